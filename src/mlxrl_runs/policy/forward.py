"""Log-probabilities of the actions in a batch, one full forward pass per call."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, qwen2, qwen3

from mlxrl_runs import maths
from mlxrl_runs.core.batch import Batch
from mlxrl_runs.policy.shared_prompt import Prompts, hidden_before

# Classes whose hidden states and head can be taken apart, so that prompt and observation positions never meet the head.
_SPLITTABLE = (qwen2.Model, qwen3.Model, llama.Model)
SHARE_FROM = 0.25  # repeated prompt tokens, as a share of all tokens


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
    logits = _logits_before(model, batch, rows, columns)
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


def _logits_before(model: nn.Module, batch: Batch, rows: mx.array, columns: mx.array) -> mx.array:
    """(N, V): the logits that predict tokens[rows, columns]."""
    if not isinstance(model, _SPLITTABLE):
        return model(batch.tokens[:, :-1])[rows, columns - 1]
    prompts = Prompts.of(batch)
    if shares_prompts(batch, prompts):
        hidden = hidden_before(model.model, batch, prompts, rows, columns)
    else:
        hidden = model.model(batch.tokens[:, :-1])[rows, columns - 1]
    return _head(model, hidden)


def last_logits(model: nn.Module, tokens: mx.array, last: mx.array, cache: Sequence[Any]) -> mx.array:
    """(B, V): the logits behind each row's last token. Only those positions meet the head, where it can be told apart.

    Args:
        tokens: (B, T), padded on the right.
        last: (B,) column of each row's last token.
    """
    rows = mx.arange(tokens.shape[0])
    if not isinstance(model, _SPLITTABLE):
        return model(tokens, cache=cache)[rows, last]
    return _head(model, model.model(tokens, cache=cache)[rows, last])


def _head(model: nn.Module, hidden: mx.array) -> mx.array:
    return model.model.embed_tokens.as_linear(hidden) if model.args.tie_word_embeddings else model.lm_head(hidden)


def shares_prompts(batch: Batch, prompts: Prompts) -> bool:
    """Whether computing each distinct prompt once saves enough to pay for a second pass."""
    return prompts.repeated_tokens >= SHARE_FROM * sum(len(trajectory.tokens) for trajectory in batch.trajectories)


def _spreader(batch: Batch, rows: mx.array, columns: mx.array) -> Callable[[mx.array], mx.array]:
    def spread(values: mx.array) -> mx.array:
        return mx.zeros(batch.tokens.shape, dtype=mx.float32).at[rows, columns].add(values.astype(mx.float32))

    return spread
