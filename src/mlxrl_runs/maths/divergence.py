"""Estimators of KL(policy || reference) per sampled token, in nats. Padding still holds values.

With x sampled from the policy and d = logp - reference_logp. Source of k1, k2, k3: Schulman 2020,
http://joschu.net/blog/kl-approx.html.
"""

from typing import Literal

import mlx.core as mx

from mlxrl_runs.maths.surrogates import bounded_log_ratio, importance_ratio

Estimator = Literal["k1", "k2", "k3"]
Gradient = Literal["plain", "corrected", "k2"]


def k1(logp: mx.array, reference_logp: mx.array) -> mx.array:
    """d: unbiased, may be negative. As a loss its slope is 1 everywhere, which pulls to no reference.

    Args: logp, reference_logp: (B, T) nats.
    Returns: (B, T) nats.
    """
    return logp - reference_logp


def k2(logp: mx.array, reference_logp: mx.array) -> mx.array:
    """d^2 / 2: biased, never negative; the slope of its mean is the slope of the KL.

    Args: logp, reference_logp: (B, T) nats.
    Returns: (B, T) nats.
    """
    return 0.5 * mx.square(logp - reference_logp)


def k3(
    logp: mx.array,
    reference_logp: mx.array,
    log_ratio_clamp: float | None = 20.0,
    value_clamp: float | None = None,
) -> mx.array:
    """exp(-d) - 1 + d: unbiased, never negative, 0 where policy and reference agree.

    Its slope by logp is 1 - exp(-d), so that a minimiser moves logp toward the reference.

    Args:
        logp, reference_logp: (B, T) nats.
        log_ratio_clamp: d is held inside +- this many nats, with slope 0 beyond; None for never.
        value_clamp: the result is held inside +- this many nats, with slope 0 beyond; None for never (verl: 10).
    Returns: (B, T) nats.
    Source: as above; Shao et al. 2024 (GRPO), arXiv:2402.03300, eq. 4.
    """
    log_ratio = bounded_log_ratio(reference_logp, logp, log_ratio_clamp)
    value = mx.expm1(log_ratio) - log_ratio  # exp(x) - x - 1 comes out at -6e-8 where policy and reference nearly agree
    return value if value_clamp is None else mx.clip(value, -value_clamp, value_clamp)


def absolute(logp: mx.array, reference_logp: mx.array) -> mx.array:
    """|d|: a distance, no estimate of the KL.

    Args: logp, reference_logp: (B, T) nats.
    Returns: (B, T) nats.
    """
    return mx.abs(logp - reference_logp)


def with_k2_gradient(value: mx.array, logp: mx.array, reference_logp: mx.array) -> mx.array:
    """The value of any estimator with the gradient of k2: d times the slope of logp (the "+" form, k1+, k3+).

    Args:
        value: (B, T) nats, what the result equals.
        logp, reference_logp: (B, T) nats.
    Returns: (B, T) nats.
    Source: Tang & Munos 2025, arXiv:2506.09477; verl's names.
    """
    slope = k2(logp, reference_logp)
    return mx.stop_gradient(value) + (slope - mx.stop_gradient(slope))


def k3_times_ratio(
    logp: mx.array, reference_logp: mx.array, old_logp: mx.array, log_ratio_clamp: float | None = 20.0
) -> mx.array:
    """r k3 with r = exp(logp - old_logp) and the gradient through both: unbiased for the policy being updated.

    At r = 1 its slope is k3 + 1 - exp(-d) = d, the slope of the true KL.

    Args:
        logp, reference_logp, old_logp: (B, T) nats.
        log_ratio_clamp: nats, for both log-ratios.
    Returns: (B, T) nats.
    Source: DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556; TRL's `use_bias_correction_kl`.
    """
    return importance_ratio(logp, old_logp, log_ratio_clamp) * k3(logp, reference_logp, log_ratio_clamp)


def estimate(
    name: Estimator,
    gradient: Gradient,
    logp: mx.array,
    reference_logp: mx.array,
    old_logp: mx.array,
    log_ratio_clamp: float | None = 20.0,
    ratio: mx.array | None = None,
) -> mx.array:
    """The estimator and the gradient that a config asks for.

    Args:
        name: k1, k2 or k3.
        gradient: `plain`, the estimator's own; `corrected`, the estimator times r with the gradient through both, see
            `k3_times_ratio`; `k2`, the estimator's value with the gradient of k2, see `with_k2_gradient`.
        logp, reference_logp, old_logp: (B, T) nats; old_logp is read by `corrected` only.
        log_ratio_clamp: nats, for the log-ratios of k3 and r.
        ratio: (B, T), r of another level than the token's for `corrected`, as from `surrogates.ratio_at`.
    Returns: (B, T) nats.
    """
    if name not in ("k1", "k2", "k3"):
        raise ValueError(f"the estimator must be k1, k2 or k3, got {name!r}.")
    if gradient not in ("plain", "corrected", "k2"):
        raise ValueError(f"its gradient must be plain, corrected or k2, got {gradient!r}.")
    simple = {"k1": k1, "k2": k2}
    value = k3(logp, reference_logp, log_ratio_clamp) if name == "k3" else simple[name](logp, reference_logp)
    if gradient == "k2":
        return with_k2_gradient(value, logp, reference_logp)
    if gradient == "corrected":
        return value * (importance_ratio(logp, old_logp, log_ratio_clamp) if ratio is None else ratio)
    return value


def adapted_coefficient(coefficient: float, observed: float, target: float, episodes: int, horizon: float) -> float:
    """The KL coefficient after a step, moved so that the KL comes to its target:

        c (1 + clip(observed / target - 1, -0.2, 0.2) episodes / horizon)

    Args:
        coefficient: c, >= 0.
        observed, target: KL in nats, both per token or both per row; target > 0.
        episodes: how many the step learned from.
        horizon: episodes over which c moves by a fifth while `observed` is off by a fifth or more.
    Returns: the next c, never below 0.
    Source: Ziegler et al. 2019, arXiv:1909.08593, sec. 2.2.
    """
    error = min(max(observed / target - 1, -0.2), 0.2)
    return max(coefficient * (1 + error * episodes / horizon), 0.0)


def sequence_k1(logp: mx.array, reference_logp: mx.array, mask: mx.array) -> mx.array:
    """Log-ratio of whole rows: the sum of k1 over action tokens.

    Args: logp, reference_logp: (B, T) nats; mask: (B, T), nonzero on action tokens.
    Returns: (B,) nats.
    """
    return mx.where(mask != 0, k1(logp, reference_logp), 0.0).sum(axis=-1)
