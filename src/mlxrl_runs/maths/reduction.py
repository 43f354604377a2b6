"""Reductions as weights: each is a (B, T) array fixed once for all that one optimizer step sees.

A loss is `weighted_sum(per_token, weights)`, and the parts of micro-batches add up exactly to the whole. `mask` is
(B, T), nonzero on the tokens that count. An empty row weighs 0 and gives no NaN.
"""

import mlx.core as mx


def weighted_sum(per_token: mx.array, weights: mx.array) -> mx.array:
    """sum of per_token * weights, where a weight of 0 silences even NaN and infinity.

    Args: per_token: (B, T); weights: (B, T).
    Returns: a scalar.
    """
    return (mx.where(weights != 0, per_token, 0.0) * weights).sum()


def masked(values: mx.array, mask: mx.array) -> mx.array:
    """The values on the mask, 0 elsewhere, whatever stood there.

    Apply it to log-probabilities before a loss: a NaN behind the loss's own mask has no value but does have a gradient.

    Args: values: (B, T); mask: (B, T).
    """
    return mx.where(mask != 0, values, 0.0)


def token_mean(mask: mx.array, token_count: float | None = None) -> mx.array:
    """Every action token counts the same: 1 / tokens.

    Args: mask: (B, T); token_count: tokens of the whole step, when `mask` is only a part of it.
    Returns: (B, T).
    Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 8.
    """
    counted = _indicator(mask)
    return counted / mx.maximum(counted.sum() if token_count is None else token_count, 1)


def token_sum(mask: mx.array) -> mx.array:
    """Every action token weighs 1.

    Args: mask: (B, T).
    Returns: (B, T).
    """
    return _indicator(mask)


def sequence_mean(mask: mx.array, row_count: mx.array | float | None = None) -> mx.array:
    """Every row counts the same, by the mean over its tokens: 1 / (rows n_i).

    Args:
        mask: (B, T).
        row_count: rows to divide by; by default all B, the empty ones included, as in TRL; verl divides by
            `nonempty_rows(mask)`.
    Returns: (B, T).
    Source: Shao et al. 2024 (GRPO), arXiv:2402.03300, eq. 3.
    """
    counted = _indicator(mask)
    return sequence_sum(mask, row_count) / mx.maximum(counted.sum(axis=-1, keepdims=True), 1)


def sequence_sum(mask: mx.array, row_count: mx.array | float | None = None) -> mx.array:
    """Mean over rows of the sum over a row's tokens: 1 / rows.

    Args: mask: (B, T); row_count: as for `sequence_mean`.
    Returns: (B, T).
    """
    return _indicator(mask) / mx.maximum(mask.shape[0] if row_count is None else row_count, 1)


def fixed_length(mask: mx.array, length: float, row_count: mx.array | float | None = None) -> mx.array:
    """Every token counts the same and no batch's lengths matter: 1 / (rows length).

    Args:
        mask: (B, T).
        length: tokens, a constant of the run such as the longest completion allowed.
        row_count: as for `sequence_mean`.
    Returns: (B, T).
    Source: Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783, sec. 3.
    """
    return sequence_sum(mask, row_count) / max(length, 1)


def by_name(name: str, mask: mx.array, length: float) -> mx.array:
    """The weights a config asks for. What is not trained leaves every denominator: rows are those with a token.

    Args:
        name: token_mean, sequence_mean, sequence_sum or fixed_length.
        mask: (B, T).
        length: tokens; read by fixed_length alone.
    Returns: (B, T).
    """
    if name == "token_mean":
        return token_mean(mask)
    rows = nonempty_rows(mask)
    if name == "fixed_length":
        return fixed_length(mask, length, rows)
    return {"sequence_mean": sequence_mean, "sequence_sum": sequence_sum}[name](mask, rows)


def nonempty_rows(mask: mx.array) -> mx.array:
    """How many rows have at least one token.

    Args: mask: (B, T).
    Returns: a scalar.
    """
    return (mask != 0).any(axis=-1).sum()


def whiten(values: mx.array, mask: mx.array, eps: float = 1e-8, ddof: int = 1) -> mx.array:
    """Centred and scaled over all tokens on the mask: (x - mean) / sqrt(var + eps), var with divisor n - ddof.

    Args:
        values: (B, T).
        mask: (B, T).
        eps: added to the variance, in the values' unit squared.
        ddof: 1 for the variance of a sample, 0 for that of a population.
    Returns: (B, T), no unit; 0 off the mask, and 0 everywhere when all values are equal.
    Source: verl's `masked_whiten`.
    """
    centred, scale, _ = _standardised_parts(values, mask, eps, ddof)
    return masked(centred * scale, mask)


def whiten_keeping_mean(values: mx.array, mask: mx.array, eps: float = 1e-8) -> mx.array:
    """`whiten`, with the mean put back afterwards: (x - mean) / sqrt(var + eps) + mean.

    Args: as for `whiten`.
    Returns: (B, T); 0 off the mask.
    Source: verl's `masked_whiten(shift_mean=False)`, used on rewards.
    """
    centred, scale, mean = _standardised_parts(values, mask, eps, 1)
    return masked(centred * scale + mean, mask)


def _indicator(mask: mx.array) -> mx.array:
    return (mask != 0).astype(mx.float32)


def _standardised_parts(values: mx.array, mask: mx.array, eps: float, ddof: int) -> tuple[mx.array, mx.array, mx.array]:
    """(values - mean, 1 / sqrt(var + eps), mean) over the mask; the first is exactly 0 for equal values."""
    on_mask, count = mask != 0, _indicator(mask).sum()
    mean = masked(values, mask).sum() / mx.maximum(count, 1)
    highest = mx.where(on_mask, values, -mx.inf).max()
    lowest = mx.where(on_mask, values, mx.inf).min()
    # The rounding of the mean of equal values, divided by sqrt(eps), would look like an advantage.
    centred = mx.where(on_mask & (highest != lowest), values - mean, 0.0)
    variance = mx.square(centred).sum() / mx.maximum(count - ddof, 1)
    return centred, mx.rsqrt(variance + eps), mean
