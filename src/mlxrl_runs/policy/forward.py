"""Log-probabilities of the actions in a batch, and the logits a rollout draws from."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrl_runs import maths
from mlxrl_runs.core.batch import Batch
from mlxrl_runs.core.outputs import TokenOutputs
from mlxrl_runs.core.trajectory import Trajectory
from mlxrl_runs.policy.head import SPLITTABLE, apply_head, head_statistics
from mlxrl_runs.policy.shared_prompt import Prompts, hidden_before, keeps_plain_kv

SHARE_FROM = 0.25  # repeated prompt tokens, as a share of all tokens


def token_outputs(
    model: nn.Module,
    batch: Batch,
    temperature: float,
    *,
    observations: bool = False,
    entropy_gradient: bool = False,
    value_head: nn.Module | None = None,
    value_gradient: float = 1.0,
    with_ends: bool = False,
) -> TokenOutputs:
    """Log-probability of every sampled token, at the sampling temperature over the full vocabulary, and more.

    Args:
        batch: right-padded rows; the causal mask keeps padding out of every real position.
        temperature: the logits are divided by it, for policy, old and reference alike.
        observations: also of what the environment answered; nobody sampled that, and its temperature is 1.
        entropy_gradient: the entropy carries a gradient.
        value_head: hidden (N, H) -> (N,); only for SPLITTABLE models.
        value_gradient: share of the gradient of `values` that goes on into the model.
        with_ends: also the value behind each row's last token.
    """
    rows, columns, is_action = _positions(batch, observations)
    labels = batch.tokens[rows, columns]
    heat = mx.where(is_action, temperature, 1.0) if observations and temperature != 1 else temperature
    spread = _spreader(batch, rows, columns)
    values = final_values = None
    if isinstance(model, SPLITTABLE):
        behind = _with_ends(batch, rows, columns) if with_ends else (rows, columns)
        hidden = _hidden_before(model, batch, *behind, whole=with_ends)
        found = head_statistics(model, hidden[: len(rows)], labels, heat, entropy_gradient)
        if value_head is not None:
            judged = value_head(_scaled_gradient(hidden, value_gradient))
            values, final_values = spread(judged[: len(rows)]), judged[len(rows) :] if with_ends else None
    else:
        logits = model(batch.tokens[:, :-1])[rows, columns - 1]
        logp, entropy, is_likeliest, *_ = maths.logprob.statistics(logits, labels, heat)
        found = logp, entropy if entropy_gradient else mx.stop_gradient(entropy), is_likeliest
    logp, entropy, is_likeliest = map(spread, found)
    entropy = mx.where(batch.action_mask, entropy, 0.0) if observations else entropy
    return TokenOutputs(logp, entropy, is_likeliest, values, final_values)


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


def _positions(batch: Batch, observations: bool) -> tuple[mx.array, mx.array, mx.array]:
    """(row, column, whether the policy wrote it) of every token that is looked at."""
    positions = [
        (row, column, is_action)
        for row, trajectory in enumerate(batch.trajectories)
        for is_action, (start, end) in _spans(trajectory, observations)
        for column in range(start, end)
    ]
    rows, columns, is_action = zip(*positions, strict=True)
    return mx.array(rows), mx.array(columns), mx.array(is_action)


def _spans(trajectory: Trajectory, observations: bool) -> list[tuple[bool, tuple[int, int]]]:
    actions = [(True, span) for span in trajectory.action_spans()]
    return actions + [(False, span) for span in trajectory.answer_spans()] if observations else actions


def _with_ends(batch: Batch, rows: mx.array, columns: mx.array) -> tuple[mx.array, mx.array]:
    """Positions, and the one behind each row's last token."""
    return mx.concatenate([rows, mx.arange(batch.rows)]), mx.concatenate([columns, batch.lengths])


def _scaled_gradient(values: mx.array, factor: float) -> mx.array:
    """The same numbers, with `factor` times their gradient."""
    if factor == 1:
        return values
    still = mx.stop_gradient(values)
    return still if factor == 0 else still + factor * (values - still)


def _hidden_before(model: nn.Module, batch: Batch, rows: mx.array, columns: mx.array, whole: bool) -> mx.array:
    """(N, H): the hidden states that predict tokens[rows, columns].

    Args: whole: columns just behind a row's end are among them.
    """
    prompts = Prompts.of(batch)
    if shares_prompts(batch, prompts) and keeps_plain_kv(model):
        return hidden_before(model.model, batch, prompts, rows, columns, whole)
    return model.model(batch.tokens if whole else batch.tokens[:, :-1])[rows, columns - 1]


def _spreader(batch: Batch, rows: mx.array, columns: mx.array) -> Callable[[mx.array], mx.array]:
    def spread(values: mx.array) -> mx.array:
        return mx.zeros(batch.tokens.shape, dtype=mx.float32).at[rows, columns].add(values.astype(mx.float32))

    return spread
