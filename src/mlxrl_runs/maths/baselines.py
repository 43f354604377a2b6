"""Advantages of whole episodes: what an episode earned against what its group earned.

Everywhere: `group_ids[i]` says which group row i belongs to; the position says nothing. A return of NaN means that
nobody could score the row: it is left out of every statistic and its advantage is 0. Standard deviations are those of a
sample (divisor n - 1) unless `ddof` says otherwise. Equal returns, and a row without scored siblings, give exactly 0.
"""

import math
from collections.abc import Hashable, Sequence
from typing import Literal

Scaling = Literal["group", "batch", "none"]


def group_advantage(
    returns: Sequence[float], group_ids: Sequence[Hashable], scaling: Scaling, eps: float = 1e-4, ddof: int = 1
) -> list[float]:
    """Return minus the group's mean, over a spread: A_i = (R_i - mean_g) / (std + eps).

    Args:
        returns: (B,) in the reward's unit.
        group_ids: (B,).
        scaling: whose std divides: the row's `group` (GRPO), all returns of the `batch`, or `none` (Dr. GRPO: no
            division, no eps).
        eps: added to the std, in the reward's unit.
        ddof: 1 for the std of a sample, 0 for that of a population.
    Returns: (B,), no unit; the reward's unit with `none`.
    Source: Shao et al. 2024, arXiv:2402.03300, sec. 4.1.2; `none`: Liu et al. 2025, arXiv:2503.20783, sec. 3.
    """
    if scaling not in ("group", "batch", "none"):
        raise ValueError(f"scaling must be group, batch or none, got {scaling!r}.")
    batch_std = sample_std([value for value in returns if not math.isnan(value)], ddof)
    advantages = [0.0] * len(returns)
    for rows in _scored_groups(returns, group_ids):
        values = [returns[row] for row in rows]
        if max(values) == min(values):  # the mean of equal floats may differ from them in the last bit
            continue
        mean = _mean(values)
        spread = 1.0 if scaling == "none" else (batch_std if scaling == "batch" else sample_std(values, ddof)) + eps
        for row in rows:
            advantages[row] = (returns[row] - mean) / spread
    return advantages


def leave_one_out(returns: Sequence[float], group_ids: Sequence[Hashable]) -> list[float]:
    """Return minus the mean return of the scored siblings: A_i = R_i - mean of R_j, j != i, same group.

    Args: returns: (B,) in the reward's unit; group_ids: (B,).
    Returns: (B,) in the reward's unit.
    Source: Ahmadian et al. 2024, arXiv:2402.14740, sec. 2 (RLOO).
    """
    return [0.0 if math.isnan(value) else value for value in _leave_one_out(returns, group_ids)]


def leave_one_out_normalized(
    returns: Sequence[float], group_ids: Sequence[Hashable], eps: float = 1e-4, ddof: int = 1
) -> list[float]:
    """`leave_one_out`, then centred and scaled over the batch; rows without scored siblings take no part.

    Args: returns: (B,) in the reward's unit; group_ids: (B,); eps, ddof: see `group_advantage`.
    Returns: (B,), no unit.
    Source: TRL's RLOO option `normalize_advantages`.
    """
    return normalize_over_batch(_leave_one_out(returns, group_ids), eps, ddof)


def normalize_over_batch(values: Sequence[float], eps: float = 1e-4, ddof: int = 1) -> list[float]:
    """(x_i - mean) / (std + eps) over everything that is not NaN.

    Args: values: (B,); eps: added to the std, in the values' unit; ddof: see `group_advantage`.
    Returns: (B,), no unit; 0 where the value was NaN.
    """
    return group_advantage(values, [None] * len(values), "group", eps, ddof)


def combine_rewards(rewards_per_function: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    """Weighted sum of several reward functions: R_i = sum over k of w_k r_ik, without the missing ones.

    Args:
        rewards_per_function: (B, functions); NaN where a function gave no score.
        weights: (functions,).
    Returns: (B,); NaN where no function gave a score.
    """
    return [_weighted_sum(row, weights) for row in rewards_per_function]


def normalize_then_sum(
    rewards_per_function: Sequence[Sequence[float]],
    weights: Sequence[float],
    group_ids: Sequence[Hashable],
    eps: float = 1e-4,
) -> list[float]:
    """Each reward function centred and scaled within its group, then the weighted sum scaled over the batch.

    A function with a small spread weighs as much as one with a large spread.

    Args:
        rewards_per_function: (B, functions); NaN where a function gave no score.
        weights: (functions,); group_ids: (B,); eps: added to both std.
    Returns: (B,), no unit.
    Source: Liu et al. 2026 (GDPO), arXiv:2601.05242; TRL's `multi_objective_aggregation="normalize_then_sum"`.
    """
    columns = [
        [math.nan if math.isnan(reward) else advantage for reward, advantage in zip(column, advantages, strict=True)]
        for column in zip(*rewards_per_function, strict=True)
        for advantages in [group_advantage(column, group_ids, "group", eps)]
    ]
    return normalize_over_batch(combine_rewards(list(zip(*columns, strict=True)), weights), eps)


def clip_returns(returns: Sequence[float], low: float, high: float) -> list[float]:
    """Returns held inside [low, high]; NaN stays NaN.

    Args: returns: (B,); low, high: in the reward's unit.
    """
    return [value if math.isnan(value) else min(max(value, low), high) for value in returns]


def penalized_returns(returns: Sequence[float], sequence_kl: Sequence[float], kl_coef: float) -> list[float]:
    """KL as a part of the reward, before any baseline: R_i - kl_coef * KL_i.

    Args:
        returns: (B,) in the reward's unit.
        sequence_kl: (B,) nats per row, as from `divergence.sequence_k1`.
        kl_coef: reward per nat.
    Source: Ahmadian et al. 2024, arXiv:2402.14740, sec. 2.
    """
    return [value - kl_coef * kl for value, kl in zip(returns, sequence_kl, strict=True)]


def keep_mixed_groups(returns: Sequence[float], group_ids: Sequence[Hashable]) -> list[int]:
    """Rows of the groups whose returns differ: the only ones a group baseline can learn from.

    Compares returns, not a std with 0: the std of equal floats need not be 0.

    Args: returns: (B,); group_ids: (B,).
    Returns: kept row numbers, ascending; unscored rows are not among them.
    Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 11.
    """
    kept: list[int] = []
    for rows in _scored_groups(returns, group_ids):
        if len({returns[row] for row in rows}) > 1:
            kept.extend(rows)
    return sorted(kept)


def sample_std(values: Sequence[float], ddof: int = 1) -> float:
    """sqrt(sum of (x - mean)^2 / (n - ddof)); 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - ddof))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _scored_groups(returns: Sequence[float], group_ids: Sequence[Hashable]) -> list[list[int]]:
    """Row numbers by group, groups by first appearance, unscored rows left out."""
    groups: dict[Hashable, list[int]] = {}
    for row, (value, group) in enumerate(zip(returns, group_ids, strict=True)):
        if not math.isnan(value):
            groups.setdefault(group, []).append(row)
    return list(groups.values())


def _leave_one_out(returns: Sequence[float], group_ids: Sequence[Hashable]) -> list[float]:
    """NaN for rows that have no scored sibling, so that a later statistic can tell them from a true 0."""
    advantages = [math.nan] * len(returns)
    for rows in _scored_groups(returns, group_ids):
        values = [returns[row] for row in rows]
        if len(rows) < 2:
            continue
        equal, mean = max(values) == min(values), _mean(values)
        for row in rows:
            advantages[row] = 0.0 if equal else (returns[row] - mean) * len(rows) / (len(rows) - 1)
    return advantages


def _weighted_sum(rewards: Sequence[float], weights: Sequence[float]) -> float:
    scored = [weight * reward for reward, weight in zip(rewards, weights, strict=True) if not math.isnan(reward)]
    return sum(scored) if scored else math.nan
