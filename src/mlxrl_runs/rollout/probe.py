"""Can rows of unequal lengths share a batch of this model? Asked of families that the tests do not know."""

import mlx.core as mx
import mlx.nn as nn

from mlxrl_runs.maths.scalars import number
from mlxrl_runs.rollout.layers import Keeps
from mlxrl_runs.rollout.one_by_one import SingleRow
from mlxrl_runs.rollout.plan import Way
from mlxrl_runs.rollout.rows import Rows
from mlxrl_runs.rollout.sampling import Sampling
from mlxrl_runs.rollout.stepping import Stepper

TESTED = ("llama", "qwen2", "qwen3", "gemma3_text", "qwen3_moe", "qwen3_5", "qwen3_next")  # of mlx_lm.models
PROMPTS = (tuple(range(1, 13)), (3, 2, 1))
FOLLOWING = 5  # a token
ALLOWED = {mx.float32: 1e-3}  # nats, on average over the vocabulary
ALLOWED_ROUNDED = 0.1  # in 16-bit formats, whose rounding alone moves it by 0.01 to 0.04


def why_not_batched(model: nn.Module, kinds: tuple[Keeps, ...]) -> str | None:
    """None where a short row beside a long one is what it is alone; else what was found."""
    if type(model).__module__.rpartition(".")[2] in TESTED:
        return None
    try:
        apart, number_format = _apart(model, kinds)
    except (ValueError, RuntimeError, TypeError) as error:
        return f"rows of unequal lengths cannot be read together by this model ({str(error).splitlines()[0]})"
    if apart <= ALLOWED.get(number_format, ALLOWED_ROUNDED):
        return None
    return f"a row of this model is another one beside a longer row: {apart:.2g} nats apart on average"


def _apart(model: nn.Module, kinds: tuple[Keeps, ...]) -> tuple[float, mx.Dtype]:
    """The largest mean difference of a row's next-token log-probabilities together and alone, and their format."""
    stepper = Stepper(model, kinds, Way.PLAIN, Sampling(), frozenset())
    rows = Rows.empty(kinds, len(PROMPTS), 1)
    together = [stepper.read(rows, PROMPTS), stepper.append(rows, [FOLLOWING] * len(PROMPTS))]
    differences = []
    for place, prompt in enumerate(PROMPTS):
        row = SingleRow(model)
        alone = [row.feed(prompt), row.feed([FOLLOWING])]
        for batched, single in zip(together, alone, strict=True):
            differences.append(mx.abs(_logp(batched[place]) - _logp(single[0])).mean())
    return max(map(number, differences)), together[0].dtype


def _logp(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
