"""What to log about a policy that moves while it is trained on one batch."""

import mlx.core as mx

from mlxrl_runs.maths import divergence
from mlxrl_runs.maths.reduction import masked
from mlxrl_runs.maths.scalars import number


def ratio_metrics(
    ratio: mx.array, logp: mx.array, old_logp: mx.array, mask: mx.array, log_ratio_clamp: float | None
) -> dict[str, float]:
    """How far the policy has moved from the one that sampled: numbers over the action tokens of a batch.

    Args:
        ratio: (B, T), as from `surrogates.ratio_at`.
        logp, old_logp: (B, T) nats; mask: (B, T).
        log_ratio_clamp: nats, see `divergence.k3`.
    Returns: ratio/mean, ratio/max, kl/old (mean k3, nats per token).
    """
    return {
        "ratio/mean": token_mean_of(ratio, mask),
        "ratio/max": number(masked(ratio, mask).max()),
        "kl/old": token_mean_of(divergence.k3(logp, old_logp, log_ratio_clamp), mask),
    }


def token_mean_of(values: mx.array, mask: mx.array) -> float:
    """Mean over the tokens on the mask; 0 where there is none.

    Args: values: (B, T), of any type; mask: (B, T).
    """
    counted = mask != 0
    return number(masked(values.astype(mx.float32), counted).sum() / mx.maximum(counted.sum(), 1))
