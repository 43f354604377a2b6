"""Experience sampled from the policy being trained: `tasks_per_step` tasks, `group_size` episodes of each."""

from collections.abc import Sequence
from functools import partial

from mlxrl_runs.core.protocols import EnvironmentFamily
from mlxrl_runs.core.seeding import derive_seed, generator
from mlxrl_runs.core.trajectory import Group, Trajectory
from mlxrl_runs.rollout.engine import RolloutEngine
from mlxrl_runs.rollout.episodes import EpisodeRequest
from mlxrl_runs.rollout.sampling import Sampling
from mlxrl_runs.rollout.statistics import RolloutStatistics

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
    ):
        self._engine = engine
        self._family = family
        self._sampling = sampling
        self._seed = seed
        self._tasks_per_step = tasks_per_step
        self.group_size = group_size
        self.statistics = RolloutStatistics()

    def groups(self, step: int) -> list[Group]:
        """The groups of one step; `statistics` then tells what they cost."""
        tasks = self._tasks(step)
        requests = requests_of(self._family, tasks, self.group_size, self._seed, ("train", step))
        trajectories, self.statistics = self._engine.play(requests, self._sampling)
        return group_up(tasks, trajectories, self.group_size)

    def _tasks(self, step: int) -> list[str]:
        stream = generator(self._seed, "tasks", step)
        tasks: list[str] = []
        while len(tasks) < self._tasks_per_step:
            drawn = (self._family.sample_task(stream) for _ in range(MAX_TRIES))
            tasks.append(next((task for task in drawn if task not in tasks), None) or self._family.sample_task(stream))
        return tasks


def group_up(tasks: Sequence[str], trajectories: Sequence[Trajectory], members: int) -> list[Group]:
    """Cut trajectories that lie side by side into their groups."""
    return [Group(task, tuple(trajectories[slot * members : (slot + 1) * members])) for slot, task in enumerate(tasks)]
