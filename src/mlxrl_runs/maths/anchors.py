"""GiGPO: credit per step from steps taken in the same state, beside credit per episode.

Steps are flat lists of N numbers, one a step, in any order; `owner[n]` is the number of the trajectory step n belongs
to. Standard deviations are those of a sample; eps is added to them; equal returns and singletons give exactly 0.
Source: Feng et al. 2025, arXiv:2505.10978.
"""

from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher
from typing import Literal

from mlxrl_runs.maths.baselines import Scaling, group_advantage

EpisodeStatistics = Literal["trajectory", "step"]


def step_groups(task_ids: Sequence[Hashable], anchors: Sequence[Hashable]) -> list[int]:
    """Number of the group each step belongs to: same task and same anchor state. A revisit counts once more.

    Args: task_ids, anchors: (N,), of each step. The same anchor in two tasks makes two groups.
    Returns: (N,), groups numbered from 0 by first appearance.
    Source: arXiv:2505.10978, anchor state grouping.
    """
    numbers: dict[tuple[Hashable, Hashable], int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in zip(task_ids, anchors, strict=True)]


def similar_step_groups(task_ids: Sequence[Hashable], anchors: Sequence[str], threshold: float) -> list[int]:
    """`step_groups` for states that hardly ever recur word by word: an anchor joins the first group of its task, by
    appearance, whose first text it is like enough.

    Args:
        task_ids, anchors: (N,), of each step.
        threshold: least ratio of characters in common, 0 to 1: 2 M / (both lengths together), M characters in matching
            blocks; 1 asks for equal texts.
    Returns: (N,), groups numbered from 0 by first appearance.
    Source: arXiv:2505.10978 as in verl-agent (`enable_similarity`); `difflib.SequenceMatcher.ratio`.
    """
    firsts: dict[Hashable, list[tuple[str, int]]] = {}  # by task: each group's first text and number
    numbers: dict[tuple[Hashable, str], int] = {}
    for task, anchor in zip(task_ids, anchors, strict=True):
        if (task, anchor) in numbers:
            continue
        known = firsts.setdefault(task, [])
        found = next((number for first, number in known if _alike(anchor, first, threshold)), None)
        if found is None:
            found = sum(map(len, firsts.values()))
            known.append((anchor, found))
        numbers[task, anchor] = found
    return [numbers[key] for key in zip(task_ids, anchors, strict=True)]


def _alike(text: str, first: str, threshold: float) -> bool:
    # Without autojunk=False, letters that are frequent in a text of 200 characters or more count as no match at all.
    matcher = SequenceMatcher(None, text, first, autojunk=False)
    bounds = (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)  # each is at least the next, and cheaper
    return all(bound() >= threshold for bound in bounds)


def group_sizes(groups: Sequence[int]) -> list[int]:
    """How many steps each group has, by group number.

    Args: groups: (N,), as from `step_groups`.
    """
    sizes = [0] * len(set(groups))
    for group in groups:
        sizes[group] += 1
    return sizes


def step_advantage(
    returns: Sequence[float], groups: Sequence[int], scaling: Scaling, eps: float = 1e-4, ddof: int = 1
) -> list[float]:
    """A step's discounted return against its anchor group: (G_n - mean) / (std + eps), or G_n - mean.

    Args:
        returns: (N,) return to go, in the reward's unit.
        groups: (N,), as from `step_groups`.
        scaling, eps, ddof: see `baselines.group_advantage`; `none` centres only.
    Returns: (N,).
    Source: arXiv:2505.10978, step relative advantage.
    """
    return group_advantage(returns, groups, scaling, eps, ddof)


def episode_advantage(
    returns: Sequence[float],
    task_ids: Sequence[Hashable],
    step_counts: Sequence[int],
    scaling: Scaling,
    statistics: EpisodeStatistics = "trajectory",
    eps: float = 1e-4,
    ddof: int = 1,
) -> list[float]:
    """A trajectory's total reward against its task's: (R_i - mean) / (std + eps), or R_i - mean.

    Args:
        returns: (B,) total rewards.
        task_ids: (B,).
        step_counts: (B,) steps of each trajectory.
        scaling, eps, ddof: see `baselines.group_advantage`; `none` centres only.
        statistics: mean and std over the task's trajectories, or over its steps, so that a trajectory counts once for
            each step it took (verl-agent's default: long episodes weigh more).
    Returns: (B,); 0 for a trajectory without steps under `step`.
    Source: arXiv:2505.10978, episode relative advantage; `step`: verl-agent.
    """
    if statistics == "trajectory":
        return group_advantage(returns, task_ids, scaling, eps, ddof)
    if statistics != "step":
        raise ValueError(f"statistics must be trajectory or step, got {statistics!r}.")
    owner = [row for row, count in enumerate(step_counts) for _ in range(count)]
    per_step = group_advantage([returns[row] for row in owner], [task_ids[row] for row in owner], scaling, eps, ddof)
    advantages = [0.0] * len(returns)
    for row, advantage in zip(owner, per_step, strict=True):
        advantages[row] = advantage
    return advantages


def joint_advantage(
    episode: Sequence[float], step: Sequence[float], owner: Sequence[int], omega: float
) -> list[list[float]]:
    """Both credits together: A = A_episode + omega A_step.

    Args:
        episode: (B,), one a trajectory.
        step: (N,), one a step.
        owner: (N,) trajectory number of each step; the steps of one trajectory stand in the order they were taken.
        omega: weight of the step part; 0 leaves episode-level GRPO.
    Returns: for each trajectory one number per step.
    Source: arXiv:2505.10978, the group-in-group advantage.
    """
    joint: list[list[float]] = [[] for _ in episode]
    for row, advantage in zip(owner, step, strict=True):
        joint[row].append(episode[row] + omega * advantage)
    return joint
