"""The sampler and the trainer are two programs: what to do about, and how to measure, their different probabilities.

w = exp(trainer_logp - sampler_logp), both of the same weights at the time of sampling. Nothing off the mask is read.
"""

from typing import Literal

import mlx.core as mx

from mlxrl_runs.maths import divergence
from mlxrl_runs.maths.scalars import number

Correction = Literal["truncate", "mask"]
CorrectionLevel = Literal["token", "sequence"]


def importance_weights(
    trainer_logp: mx.array,
    sampler_logp: mx.array,
    mask: mx.array,
    correction: Correction,
    cap: float,
    level: CorrectionLevel,
) -> mx.array:
    """What to multiply a token's policy loss by, so that samples of the sampler speak for the trainer. A constant.

    Args:
        trainer_logp, sampler_logp: (B, T) nats.
        mask: (B, T), nonzero on action tokens.
        correction: `truncate`, min(w, cap) (TIS); `mask`, w where w <= cap and 0 elsewhere (MIS).
        cap: no unit, > 0.
        level: w of the `token`, or of the whole `sequence`: the product of its tokens' on each of them.
    Returns: (B, T), no unit, no gradient; 1 off the mask.
    Source: TRL's `vllm_importance_sampling_mode` (token_truncate, token_mask, sequence_truncate, sequence_mask);
        Yao et al. 2025 (TIS) and Liu et al. 2025 (MIS).
    """
    if correction not in ("truncate", "mask"):
        raise ValueError(f"correction must be truncate or mask, got {correction!r}.")
    if level not in ("token", "sequence"):
        raise ValueError(f"level must be token or sequence, got {level!r}.")
    acted = mask != 0
    difference = mx.where(acted, trainer_logp - sampler_logp, 0.0)
    if level == "sequence":
        difference = difference.sum(axis=-1, keepdims=True)
    weight = mx.exp(difference)
    # `mask` asks for what is too large, so that a NaN stays one and shows.
    weight = mx.minimum(weight, cap) if correction == "truncate" else mx.where(weight > cap, 0.0, weight)
    return mx.stop_gradient(mx.where(acted, weight, 1.0))


def gap(trainer_logp: mx.array, sampler_logp: mx.array, mask: mx.array) -> dict[str, float]:
    """How far trainer and sampler are apart over the action tokens of a batch; all 0 without any.

    Args: trainer_logp, sampler_logp: (B, T) nats; mask: (B, T), nonzero on action tokens.
    Returns: mismatch/mean and mismatch/max of |difference| in nats, mismatch/kl: mean k3 of KL(sampler || trainer) in
        nats per token.
    Source: TRL's `sampling/sampling_logp_difference`; k3: see `divergence`.
    """
    acted = mask != 0
    tokens = mx.maximum(acted.sum(), 1)
    trainer, sampler = mx.where(acted, trainer_logp, 0.0), mx.where(acted, sampler_logp, 0.0)
    difference = mx.abs(trainer - sampler)
    return {
        "mismatch/mean": number(difference.sum() / tokens),
        "mismatch/max": number(difference.max()),
        "mismatch/kl": number(divergence.k3(sampler, trainer).sum() / tokens),
    }
