"""Policy terms per token, to be minimised. Padding still holds values; multiply by the batch's weights."""

import mlx.core as mx


def bounded_log_ratio(logp: mx.array, other_logp: mx.array, log_ratio_clamp: float | None) -> mx.array:
    """logp - other_logp held inside +-log_ratio_clamp, so that its exp cannot overflow; gradient 0 beyond.

    Args:
        logp, other_logp: (B, T) nats.
        log_ratio_clamp: nats; None leaves the difference as it is.
    Returns: (B, T) nats.
    """
    log_ratio = logp - other_logp
    return log_ratio if log_ratio_clamp is None else mx.clip(log_ratio, -log_ratio_clamp, log_ratio_clamp)


def importance_ratio(logp: mx.array, old_logp: mx.array, log_ratio_clamp: float | None = 20.0) -> mx.array:
    """How much likelier the policy makes a token than the policy that sampled it: r = exp(logp - old_logp).

    `old_logp` is a constant here even when it is the same array as `logp`: then r = 1 and its slope is 1, not 0.

    Args:
        logp, old_logp: (B, T) nats.
        log_ratio_clamp: nats, see `bounded_log_ratio`.
    Returns: (B, T), no unit.
    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 6.
    """
    return mx.exp(bounded_log_ratio(logp, mx.stop_gradient(old_logp), log_ratio_clamp))


def clipped_surrogate(
    logp: mx.array,
    old_logp: mx.array,
    advantage: mx.array,
    clip_low: float,
    clip_high: float,
    log_ratio_clamp: float | None = 20.0,
) -> mx.array:
    """PPO's clipped policy term per token, to be minimised: -min(r A, clip(r, 1 - low, 1 + high) A).

    Args:
        logp, old_logp: (B, T) nats; r = exp(logp - old_logp) is their ratio.
        advantage: (B, T), or (B, 1) for one number per row.
        clip_low, clip_high: half-widths of the trust region, no unit; equal in PPO.
        log_ratio_clamp: nats, see `bounded_log_ratio`.
    Returns: (B, T). Padding still holds values; multiply by the batch's weights.
    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; clip_high above clip_low: Yu et al. 2025,
        arXiv:2503.14476, eq. 8.
    """
    ratio = importance_ratio(logp, old_logp, log_ratio_clamp)
    clipped = mx.clip(ratio, 1 - clip_low, 1 + clip_high)
    # At a tie the slope is that of the second argument: at r = 1 with a clip of 0 it must be the ratio's, not 0.
    return -mx.minimum(clipped * advantage, ratio * advantage)


def clip_fractions(
    logp: mx.array,
    old_logp: mx.array,
    advantage: mx.array,
    clip_low: float,
    clip_high: float,
    log_ratio_clamp: float | None = 20.0,
) -> tuple[mx.array, mx.array]:
    """Where the clip takes the gradient away: (r < 1 - low and A < 0, r > 1 + high and A > 0).

    Args: as for `clipped_surrogate`.
    Returns: two (B, T) arrays of 0 and 1; weigh them like a loss to get fractions.
    """
    ratio = importance_ratio(logp, old_logp, log_ratio_clamp)
    low = (ratio < 1 - clip_low) & (advantage < 0)
    high = (ratio > 1 + clip_high) & (advantage > 0)
    return low.astype(mx.float32), high.astype(mx.float32)
