"""Forward passes without a gradient over a collected batch: only those that something asked for."""

import mlx.core as mx
import mlx.nn as nn

from mlxrl_runs.core.batch import Batch
from mlxrl_runs.core.outputs import TokenOutputs
from mlxrl_runs.policy.forward import token_outputs
from mlxrl_runs.policy.load import Policy


def score(
    policy: Policy, batch: Batch, temperature: float, *, old: bool, reference: bool, rows: int, values: bool = False
) -> Batch:
    """The batch with `old_logp`, `reference_logp` and `values` where asked for.

    Args:
        old: the policy before any update on this batch; only several optimizer steps a batch need it.
        reference: the starting policy.
        values: what the policy's value head expects; the old log-probabilities come with the same pass.
        rows: rows of one forward pass; 0 for all.
    """
    if values:
        batch = _judged(policy, batch, temperature, rows)
    elif old:
        batch = batch.with_(old_logp=_logp(policy.model, batch, temperature, rows))
    if reference:
        with policy.reference() as model:
            batch = batch.with_(reference_logp=_logp(model, batch, temperature, rows))
    return batch


def _judged(policy: Policy, batch: Batch, temperature: float, rows: int) -> Batch:
    logps, values, finals = [], [], []
    for part in batch.chunks(rows):
        found = token_outputs(policy.model, part, temperature, value_head=policy.value_head, with_ends=True)
        assert found.values is not None and found.final_values is not None
        logps.append(widened(found.logp, batch))
        values.append(widened(found.values, batch))
        finals.append(found.final_values)
        mx.eval(logps[-1], values[-1], finals[-1])
    joined = mx.concatenate
    return batch.with_(old_logp=joined(logps), values=joined(values), final_values=joined(finals))


def _logp(model: nn.Module, batch: Batch, temperature: float, rows: int) -> mx.array:
    parts = []
    for part in batch.chunks(rows):
        parts.append(widened(token_outputs(model, part, temperature).logp, batch))
        mx.eval(parts[-1])
    return mx.concatenate(parts)


def widened(values: mx.array, batch: Batch) -> mx.array:
    """A micro-batch's (b, t) array with the columns back that were cut off."""
    return mx.pad(values, [(0, 0), (0, batch.tokens.shape[1] - values.shape[1])])


def joined_outputs(parts: list[TokenOutputs], batch: Batch) -> TokenOutputs:
    """Those of a batch's micro-batches as one."""
    whole = {
        name: mx.concatenate([widened(getattr(part, name), batch) for part in parts])
        for name in ("logp", "entropy", "is_likeliest")
    }
    return TokenOutputs(**whole)
