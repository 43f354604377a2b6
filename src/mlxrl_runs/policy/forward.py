"""Log-probabilities of the actions in a batch, and the logits a rollout draws from."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrl_runs import maths
from mlxrl_runs.core.batch import Batch
from mlxrl_runs.policy.head import SPLITTABLE, apply_head, head_logp
from mlxrl_runs.policy.shared_prompt import Prompts, hidden_before, keeps_plain_kv

SHARE_FROM = 0.25  # repeated prompt tokens, as a share of all tokens


def action_logp(
    model: nn.Module, batch: Batch, temperature: float, with_entropy: bool = False
) -> tuple[mx.array, mx.array | None]:
    """Log-probability of every sampled token, at the sampling temperature over the full vocabulary.

    Args:
        batch: right-padded rows; the causal mask keeps padding out of every real position.
        temperature: the logits are divided by it, for policy, old and reference alike.
    Returns: (B, T) nats, 0 where the policy did not act; and the policy's entropy there, without gradient, or None.
    """
    rows, columns = _action_positions(batch)
    labels = batch.tokens[rows, columns]
    if isinstance(model, SPLITTABLE):
        logp, entropy = head_logp(model, _hidden_before(model, batch, rows, columns), labels, temperature)
    else:
        logits = model(batch.tokens[:, :-1])[rows, columns - 1]
        logp, entropy = maths.logprob.logp_and_entropy(logits, labels, temperature)
    spread = _spreader(batch, rows, columns)
    return spread(logp), mx.stop_gradient(spread(entropy)) if with_entropy else None


def last_logits(model: nn.Module, tokens: mx.array, last: mx.array, cache: Sequence[Any]) -> mx.array:
    """(B, V): the logits behind each row's last token. Only those positions meet the head, where it can be told apart.

    Args:
        tokens: (B, T), padded on the right.
        last: (B,) column of each row's last token.
    """
    rows = mx.arange(tokens.shape[0])
    if not isinstance(model, SPLITTABLE):
        return model(tokens, cache=cache)[rows, last]
    return apply_head(model, model.model(tokens, cache=cache)[rows, last])


def shares_prompts(batch: Batch, prompts: Prompts) -> bool:
    """Whether computing each distinct prompt once saves enough to pay for a second pass."""
    return prompts.repeated_tokens >= SHARE_FROM * sum(len(trajectory.tokens) for trajectory in batch.trajectories)


def _action_positions(batch: Batch) -> tuple[mx.array, mx.array]:
    positions = [
        (row, column)
        for row, trajectory in enumerate(batch.trajectories)
        for start, end in trajectory.action_spans()
        for column in range(start, end)
    ]
    rows, columns = zip(*positions, strict=True)
    return mx.array(rows), mx.array(columns)


def _hidden_before(model: nn.Module, batch: Batch, rows: mx.array, columns: mx.array) -> mx.array:
    """(N, H): the hidden states that predict tokens[rows, columns]."""
    prompts = Prompts.of(batch)
    if shares_prompts(batch, prompts) and keeps_plain_kv(model):
        return hidden_before(model.model, batch, prompts, rows, columns)
    return model.model(batch.tokens[:, :-1])[rows, columns - 1]


def _spreader(batch: Batch, rows: mx.array, columns: mx.array) -> Callable[[mx.array], mx.array]:
    def spread(values: mx.array) -> mx.array:
        return mx.zeros(batch.tokens.shape, dtype=mx.float32).at[rows, columns].add(values.astype(mx.float32))

    return spread
