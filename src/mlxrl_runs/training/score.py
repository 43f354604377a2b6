"""Forward passes without a gradient over a collected batch: only those that something asked for."""

import mlx.core as mx
import mlx.nn as nn

from mlxrl_runs.core.batch import Batch
from mlxrl_runs.policy.forward import action_logp
from mlxrl_runs.policy.load import Policy


def score(policy: Policy, batch: Batch, temperature: float, *, old: bool, reference: bool, rows: int) -> Batch:
    """The batch with `old_logp` and `reference_logp` where asked for.

    Args:
        old: the policy before any update on this batch; only several optimizer steps a batch need it.
        reference: the starting policy.
        rows: rows of one forward pass; 0 for all.
    """
    if old:
        batch = batch.with_(old_logp=_logp(policy.model, batch, temperature, rows))
    if reference:
        with policy.reference() as model:
            batch = batch.with_(reference_logp=_logp(model, batch, temperature, rows))
    return batch


def _logp(model: nn.Module, batch: Batch, temperature: float, rows: int) -> mx.array:
    parts = []
    for part in batch.chunks(rows):
        logp, _ = action_logp(model, part, temperature)
        parts.append(widened(logp, batch))
        mx.eval(parts[-1])
    return mx.concatenate(parts)


def widened(values: mx.array, batch: Batch) -> mx.array:
    """A micro-batch's (b, t) array with the columns back that were cut off."""
    return mx.pad(values, [(0, 0), (0, batch.tokens.shape[1] - values.shape[1])])
