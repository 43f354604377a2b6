"""Policy terms per token, to be minimised. Padding still holds values; multiply by the batch's weights."""

from typing import Literal

import mlx.core as mx

RatioLevel = Literal["token", "turn", "sequence", "sequence_product"]

LARGEST_LOG_RATIO = 88.0  # nats; exp(88.73) overflows float32, and the gradient of what overflowed is NaN


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


def ratio_at(
    level: RatioLevel,
    logp: mx.array,
    old_logp: mx.array,
    mask: mx.array,
    turn_index: mx.array | None,
    log_ratio_clamp: float | None = 20.0,
) -> mx.array:
    """The importance ratio that a token answers for: its own, its turn's or its row's. With d = logp - old_logp:

        token             exp(d_t)
        turn              exp(mean of d over the action tokens of the token's turn)
        sequence          exp(mean of d over the action tokens of the row)
        sequence_product  exp(sum of d over the action tokens of the row): the ratio of the row's probabilities

    Nothing off the mask reaches a number or a gradient, not even NaN. `old_logp` is a constant, see `importance_ratio`.

    Args:
        level: as above.
        logp, old_logp: (B, T) nats.
        mask: (B, T), nonzero on action tokens.
        turn_index: (B, T) of whole numbers below T, the turn of an action token, anything elsewhere; read at `turn`.
        log_ratio_clamp: nats; the exponent is held inside +- this, with slope 0 beyond. None: 88, float32's end.
    Returns: (B, T), no unit; 1 off the mask.
    Source: token: Schulman et al. 2017, arXiv:1707.06347, eq. 6; sequence: Zheng et al. 2025 (GSPO), arXiv:2507.18071,
        eq. 7; sequence_product: Ahmadian et al. 2024, arXiv:2402.14740, as in TRL's RLOO.
    """
    acted = mask != 0
    log_ratio = mx.where(acted, logp - mx.stop_gradient(old_logp), 0.0)
    if level == "turn":
        log_ratio = _turn_mean(log_ratio, acted, turn_index)
    elif level == "sequence":
        log_ratio = log_ratio.sum(axis=-1, keepdims=True) / mx.maximum(acted.sum(axis=-1, keepdims=True), 1)
    elif level == "sequence_product":
        log_ratio = log_ratio.sum(axis=-1, keepdims=True)
    elif level != "token":
        raise ValueError(f"level must be token, turn, sequence or sequence_product, got {level!r}.")
    bound = LARGEST_LOG_RATIO if log_ratio_clamp is None else log_ratio_clamp
    return mx.where(acted, mx.exp(mx.clip(log_ratio, -bound, bound)), 1.0)


def _turn_mean(values: mx.array, acted: mx.array, turn_index: mx.array | None) -> mx.array:
    """(B, T): at each action token the mean over its turn. `values` are 0 off the mask."""
    if turn_index is None:
        raise ValueError("level turn needs turn_index, the turn of each action token")
    rows, turn = mx.arange(values.shape[0])[:, None], mx.where(acted, turn_index, 0)
    empty = mx.zeros(values.shape)  # one place for each turn there could be, so that no shape depends on the numbers
    sums = empty.at[rows, turn].add(values)
    counts = empty.at[rows, turn].add(acted.astype(mx.float32))
    return mx.take_along_axis(sums / mx.maximum(counts, 1), turn, axis=1)


def clipped_surrogate(
    ratio: mx.array, advantage: mx.array, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> mx.array:
    """PPO's clipped policy term per token, to be minimised: -min(r A, clip(r, 1 - low, 1 + high) A).

    With a dual clip c, it is never more than -c A where A < 0: a bad action that has become much likelier pulls no
    harder than one that has become c times as likely, and beyond that not at all.

    Args:
        ratio: (B, T), see `ratio_at`.
        advantage: (B, T), or (B, 1) for one number per row.
        clip_low, clip_high: half-widths of the trust region, no unit; equal in PPO.
        dual_clip: c > 1, no unit; None for none. Equals TRL's `delta` where delta >= 1 + clip_high.
    Returns: (B, T). Padding still holds values; multiply by the batch's weights.
    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; clip_high above clip_low: Yu et al. 2025,
        arXiv:2503.14476, eq. 8; dual_clip: Ye et al. 2020, arXiv:1912.09729, eq. 5.
    """
    clipped = mx.clip(ratio, 1 - clip_low, 1 + clip_high)
    # At a tie the slope is that of the second argument: at r = 1 with a clip of 0 it must be the ratio's, not 0.
    loss = -mx.minimum(clipped * advantage, ratio * advantage)
    return loss if dual_clip is None else mx.where(advantage < 0, mx.minimum(-dual_clip * advantage, loss), loss)


def capped_surrogate(
    ratio: mx.array, logp: mx.array, advantage: mx.array, ratio_floor: float, ratio_cap: float
) -> mx.array:
    """CISPO's policy term per token, to be minimised: -stop(clip(r, floor, cap)) A logp.

    The ratio is a weight without gradient: every token keeps its slope, by at most `ratio_cap` A.

    Args:
        ratio: (B, T), see `ratio_at`.
        logp: (B, T) nats.
        advantage: (B, T) or (B, 1).
        ratio_floor, ratio_cap: what the ratio is held between, no unit: the numbers themselves, not distances from 1
            (a cap of 5.0 where PPO's clip_high would be 4.0). A floor of 0 is none.
    Returns: (B, T). Padding still holds values; multiply by the batch's weights.
    Source: MiniMax 2025 (MiniMax-M1), arXiv:2506.13585, eq. 4.
    """
    return -mx.stop_gradient(mx.clip(ratio, ratio_floor, ratio_cap)) * advantage * logp


def gated_surrogate(
    ratio: mx.array, advantage: mx.array, temperature_positive: float, temperature_negative: float
) -> mx.array:
    """SAPO's policy term per token, to be minimised: -A sigmoid(tau (r - 1)) 4 / tau.

    A soft clip: the slope by r is -A at r = 1 and fades on both sides, the faster the higher tau.

    Args:
        ratio: (B, T), see `ratio_at`.
        advantage: (B, T) or (B, 1).
        temperature_positive, temperature_negative: tau where A > 0 and elsewhere, no unit, > 0.
    Returns: (B, T). Padding still holds values; multiply by the batch's weights.
    Source: Gao et al. 2025 (SAPO), arXiv:2511.20347.
    """
    temperature = mx.where(advantage > 0, temperature_positive, temperature_negative)
    return -advantage * mx.sigmoid(temperature * (ratio - 1)) * 4 / temperature


def clip_fractions(
    ratio: mx.array, advantage: mx.array, clip_low: float, clip_high: float
) -> tuple[mx.array, mx.array]:
    """Where the clip takes the gradient away: (r < 1 - low and A < 0, r > 1 + high and A > 0).

    Args: as for `clipped_surrogate`.
    Returns: two (B, T) arrays of 0 and 1; weigh them like a loss to get fractions.
    """
    low = (ratio < 1 - clip_low) & (advantage < 0)
    high = (ratio > 1 + clip_high) & (advantage > 0)
    return low.astype(mx.float32), high.astype(mx.float32)


def dual_clip_fraction(ratio: mx.array, advantage: mx.array, dual_clip: float) -> mx.array:
    """Where the dual clip takes the gradient away: r > c and A < 0.

    Args: as for `clipped_surrogate`.
    Returns: (B, T) of 0 and 1; weigh it like a loss to get a fraction.
    """
    return ((ratio > dual_clip) & (advantage < 0)).astype(mx.float32)


def cap_fractions(ratio: mx.array, ratio_floor: float, ratio_cap: float) -> tuple[mx.array, mx.array]:
    """Where `capped_surrogate` weighs a token by less or more than its ratio: (r < floor, r > cap), whatever A.

    Args: as for `capped_surrogate`.
    Returns: two (B, T) arrays of 0 and 1; weigh them like a loss to get fractions.
    """
    return (ratio < ratio_floor).astype(mx.float32), (ratio > ratio_cap).astype(mx.float32)
