"""Experience sampled from the policy being trained: `tasks_per_step` tasks, `group_size` episodes of each."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from mlxrl_runs.core.protocols import EnvironmentFamily, Refills, Sampled
from mlxrl_runs.core.seeding import derive_seed, generator
from mlxrl_runs.core.trajectory import Group, Trajectory
from mlxrl_runs.rollout.engine import RolloutEngine
from mlxrl_runs.rollout.episodes import EpisodeRequest
from mlxrl_runs.rollout.sampling import Sampling

MAX_ROUND = 4  # batches of groups that one refill samples at most
MAX_TRIES = 100  # draws for a task not yet in the step, before a repeated one is taken


def requests_of(
    family: EnvironmentFamily, tasks: Sequence[str], members: int, seed: int, stream: tuple[object, ...]
) -> list[EpisodeRequest]:
    """`members` episodes of each task, siblings side by side. `stream` names the draws (a step, an evaluation)."""
    return [
        EpisodeRequest(
            task=task,
            member=member,
            make=partial(family.make, task, derive_seed(seed, "environment", task), member),
            key=(seed, *stream, slot, task, member),
        )
        for slot, task in enumerate(tasks)
        for member in range(members)
    ]


class OnPolicy:
    """Samples the groups of each step with an engine.

    Every draw is a function of (seed, step, task, member, turn, position), so a resumed or repeated run sees the same.

    Args: refills: which groups are wanted, and how many rounds may look for more of them; None takes every group.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        family: EnvironmentFamily,
        sampling: Sampling,
        *,
        seed: int,
        tasks_per_step: int,
        group_size: int,
        refills: Refills | None = None,
    ):
        self._engine = engine
        self._family = family
        self._sampling = sampling
        self._seed = seed
        self._tasks_per_step = tasks_per_step
        self.group_size = group_size
        self._refills = refills

    def sample(self, step: int) -> Sampled:
        """The groups of one step. The batch is full of wanted ones, unless the rounds have run out."""
        sampled = self._play(self._tasks(self._tasks_per_step, step), ("train", step))
        if self._refills is None:
            return sampled
        rounds, wants = 0, self._refills.wants
        while (kept := sum(map(wants, sampled.groups))) < self._tasks_per_step and rounds < self._refills.max_refills:
            rounds += 1
            tasks = self._tasks(self._missing(kept, len(sampled.groups)), step, rounds)
            sampled += self._play(tasks, ("train", step, "refill", rounds))
        wanted = [group for group in sampled.groups if wants(group)]
        return replace(sampled, kept=wanted[: self._tasks_per_step], refills=rounds)

    def _missing(self, kept: int, seen: int) -> int:
        """Groups to sample for a full batch by the share that was wanted so far, within bounds."""
        if not kept:
            return self._tasks_per_step
        return min(MAX_ROUND * self._tasks_per_step, math.ceil((self._tasks_per_step - kept) * seen / kept))

    def _play(self, tasks: Sequence[str], stream: tuple[object, ...]) -> Sampled:
        requests = requests_of(self._family, tasks, self.group_size, self._seed, stream)
        # however many a refill asks for, no more are decoded together than without one
        rows = self._tasks_per_step * self.group_size
        trajectories, cost = self._engine.play(requests, self._sampling, rows=rows)
        groups = group_up(tasks, trajectories, self.group_size)
        return Sampled(groups, groups, cost.sampled_tokens, cost.env_seconds)

    def _tasks(self, count: int, *draw: int) -> list[str]:
        stream = generator(self._seed, "tasks", *draw)
        tasks: list[str] = []
        while len(tasks) < count:
            drawn = (self._family.sample_task(stream) for _ in range(MAX_TRIES))
            tasks.append(next((task for task in drawn if task not in tasks), None) or self._family.sample_task(stream))
        return tasks


def group_up(tasks: Sequence[str], trajectories: Sequence[Trajectory], members: int) -> list[Group]:
    """Cut trajectories that lie side by side into their groups."""
    return [Group(task, tuple(trajectories[slot * members : (slot + 1) * members])) for slot, task in enumerate(tasks)]
