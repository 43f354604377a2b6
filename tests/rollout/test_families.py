"""What a model family must do before its rows are decoded together."""

import mlx.core as mx
import pytest

from building import tiny
from families import FAMILIES, small_model
from mlxrl_runs.core.batch import collate
from mlxrl_runs.core.protocols import StepResult
from mlxrl_runs.core.trajectory import Group
from mlxrl_runs.policy.chat import ChatFormat
from mlxrl_runs.policy.forward import action_logp
from mlxrl_runs.rollout.decoder import BatchedDecoder, SingleDecoder
from mlxrl_runs.rollout.engine import EpisodeRequest, Limits, RolloutEngine
from mlxrl_runs.rollout.sampling import Sampling

DENSE = ("llama", "qwen2", "qwen3")
LONG, SHORT = list(range(5, 17)), [20, 21, 22]  # 12 and 3 tokens
NEXT = [30, 31, 32, 33]


def logp(logits):
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


@pytest.mark.parametrize("family", [*DENSE, "qwen3_moe"])
def test_h10_a_short_row_beside_a_long_one_is_what_it_is_alone(family):
    model = small_model(family)
    together = BatchedDecoder(model, 2)
    steps = [logp(together.feed([LONG, SHORT]))]
    steps += [logp(together.step(mx.array([token, token]), [True, True])) for token in NEXT]
    for row, prompt in enumerate([LONG, SHORT]):
        alone = SingleDecoder(model)
        expected = [logp(alone.feed([prompt]))]
        expected += [logp(alone.step(mx.array([token]), [True])) for token in NEXT]
        full = logp(model(mx.array([[*prompt, *NEXT]])))[0, len(prompt) - 1 :]
        for number, (batched, single) in enumerate(zip(steps, expected, strict=True)):
            assert mx.abs(batched[row] - single[0]).max().item() < 1e-4
            assert mx.abs(batched[row] - full[number]).max().item() < 1e-4


class Talk:
    """Two turns; the first observation is as long as its task's name says."""

    max_turns = 2

    def __init__(self, length):
        self.length = length

    def reset(self):
        return "red door " * self.length

    def step(self, action):
        return StepResult("blue", 0.0, False)

    def state_id(self, observation):
        return observation


@pytest.mark.parametrize("family", FAMILIES)
def test_h10_every_family_samples_what_training_scores_and_falls_back_to_single_rows_where_it_must(family):
    tokenizer = tiny().tokenizer
    model = small_model(family, len(tokenizer))
    engine = RolloutEngine(model, ChatFormat(tokenizer), frozenset({1}), Limits(max_completion_tokens=5))
    assert engine.mode == ("sequential" if family in ("qwen3_5", "qwen3_next") else "batched")
    requests = [
        EpisodeRequest(str(length), 0, lambda length=length: Talk(length), ("seed", length)) for length in (1, 2, 9)
    ]
    episodes, _ = engine.play(requests, Sampling())
    batch = collate([Group("all", tuple(episodes))])  # padded on the right, where nothing looks
    scored, _ = action_logp(model, batch, 1.0)
    assert mx.abs(scored - batch.sampler_logp).max().item() < 1e-4
