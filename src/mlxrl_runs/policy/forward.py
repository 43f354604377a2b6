"""Log-probabilities of the actions in a batch, one full forward pass per call."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, qwen2, qwen3

from mlxrl_runs import maths
from mlxrl_runs.core.batch import Batch

# Classes whose hidden states and head can be taken apart, so that prompt and observation positions never meet the head.
_SPLITTABLE = (qwen2.Model, qwen3.Model, llama.Model)


def action_logp(
    model: nn.Module, batch: Batch, temperature: float, with_entropy: bool = False
) -> tuple[mx.array, mx.array | None]:
    """Log-probability of every sampled token, at the sampling temperature over the full vocabulary.

    Args:
        batch: right-padded rows; the causal mask keeps padding out of every real position.
        temperature: the logits are divided by it, for policy, old and reference alike.
    Returns: (B, T) nats, 0 where the policy did not act; and the policy's entropy there, or None.
    """
    rows, columns = _action_positions(batch)
    logits = _logits_before(model, batch.tokens, rows, columns)
    labels = batch.tokens[rows, columns]
    logp = maths.logprob.token_logp(logits, labels, temperature)
    spread = _spreader(batch, rows, columns)
    return spread(logp), spread(maths.logprob.entropy(logits, temperature)) if with_entropy else None


def _action_positions(batch: Batch) -> tuple[mx.array, mx.array]:
    positions = [
        (row, column)
        for row, trajectory in enumerate(batch.trajectories)
        for start, end in trajectory.action_spans()
        for column in range(start, end)
    ]
    rows, columns = zip(*positions, strict=True)
    return mx.array(rows), mx.array(columns)


def _logits_before(model: nn.Module, tokens: mx.array, rows: mx.array, columns: mx.array) -> mx.array:
    """(N, V): the logits that predict tokens[rows, columns]."""
    inputs = tokens[:, :-1]
    if not isinstance(model, _SPLITTABLE):
        return model(inputs)[rows, columns - 1]
    hidden = model.model(inputs)[rows, columns - 1]
    return model.model.embed_tokens.as_linear(hidden) if model.args.tie_word_embeddings else model.lm_head(hidden)


def _spreader(batch: Batch, rows: mx.array, columns: mx.array) -> Callable[[mx.array], mx.array]:
    def spread(values: mx.array) -> mx.array:
        return mx.zeros(batch.tokens.shape, dtype=mx.float32).at[rows, columns].add(values.astype(mx.float32))

    return spread
