"""What the clipped policy-gradient algorithms have in common: a surrogate, a KL term, and what to log about both."""

import mlx.core as mx

from mlxrl_runs.maths import divergence, surrogates
from mlxrl_runs.maths.scalars import number


def clipped_terms(
    logp: mx.array,
    old_logp: mx.array | None,
    reference_logp: mx.array | None,
    advantage: mx.array | None,
    *,
    clip_low: float,
    clip_high: float,
    kl_coef: float,
    corrected_kl: bool,
    log_ratio_clamp: float | None,
) -> dict[str, mx.array]:
    """Named summands of the per-token loss: `policy`, and `kl` when kl_coef > 0.

    Args:
        logp: (B, T) nats.
        old_logp: (B, T), or None when this is the batch's only optimizer step: the ratio is then 1 by construction.
        reference_logp: (B, T), needed when kl_coef > 0.
        advantage: (B, T).
        corrected_kl: multiply k3 by the importance ratio (TRL's bias correction) instead of its plain gradient.
    Returns: (B, T) arrays; their sum is the loss per token.
    Raises: ValueError when the batch was not credited, or kl_coef > 0 and no reference was scored.
    """
    if advantage is None:
        raise ValueError("the batch has no advantage: credit comes before the loss")
    old = logp if old_logp is None else old_logp
    ratio = surrogates.importance_ratio(logp, old, log_ratio_clamp)
    terms = {"policy": surrogates.clipped_surrogate(ratio, advantage, clip_low, clip_high)}
    if kl_coef > 0:
        if reference_logp is None:
            raise ValueError("kl_coef > 0 needs the reference's log-probabilities")
        if corrected_kl:
            kl = divergence.k3_times_ratio(logp, reference_logp, old, log_ratio_clamp)
        else:
            kl = divergence.k3(logp, reference_logp, log_ratio_clamp)
        terms["kl"] = kl_coef * kl
    return terms


def ratio_metrics(
    logp: mx.array,
    old_logp: mx.array | None,
    advantage: mx.array | None,
    mask: mx.array,
    *,
    clip_low: float,
    clip_high: float,
    log_ratio_clamp: float | None,
) -> dict[str, float]:
    """How far the policy has moved from the one that sampled: numbers over the action tokens of a batch.

    Args: logp, old_logp, advantage: (B, T); mask: (B, T) bool.
    Returns: ratio/mean, ratio/max, clip/low_fraction, clip/high_fraction, kl/old (mean k3, nats).
    Raises: ValueError when the batch was not credited, or its old log-probabilities were not scored.
    """
    if advantage is None or old_logp is None:
        raise ValueError("ratios need the batch's advantage and old log-probabilities")
    tokens = mx.maximum(mask.sum(), 1)
    ratio = mx.where(mask, surrogates.importance_ratio(logp, old_logp, log_ratio_clamp), 0.0)
    low, high = surrogates.clip_fractions(ratio, advantage, clip_low, clip_high)
    kl = divergence.k3(logp, old_logp, log_ratio_clamp)
    return {
        "ratio/mean": number(ratio.sum() / tokens),
        "ratio/max": number(ratio.max()),
        "clip/low_fraction": number(mx.where(mask, low, 0.0).sum() / tokens),
        "clip/high_fraction": number(mx.where(mask, high, 0.0).sum() / tokens),
        "kl/old": number(mx.where(mask, kl, 0.0).sum() / tokens),
    }
