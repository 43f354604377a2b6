"""Scores a policy on held-out tasks, sampled and greedy, between a random floor and an oracle ceiling."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from mlxrl_runs.core.protocols import Demonstrator, Environment, EnvironmentFamily
from mlxrl_runs.core.seeding import derive_seed, generator
from mlxrl_runs.core.stop import StopRequest
from mlxrl_runs.core.trajectory import Trajectory
from mlxrl_runs.rollout.engine import RolloutEngine
from mlxrl_runs.rollout.environment import opened, reset, step
from mlxrl_runs.rollout.on_policy import requests_of
from mlxrl_runs.rollout.sampling import Sampling

Score = dict[str, float]


class Evaluator:
    """The same held-out tasks and the same draws at every call, so that two scores differ by the policy alone.

    Args:
        episodes: sampled episodes; spread evenly over as many held-out tasks as they can cover.
        rows: episodes decoded together.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        family: EnvironmentFamily,
        sampling: Sampling,
        *,
        seed: int,
        episodes: int,
        rows: int,
        stop: StopRequest | None = None,
    ):
        self._engine = engine
        self._stop = stop or StopRequest()
        self._family = family
        self._sampling = sampling
        self._seed = seed
        self._rows = rows
        held_out = family.held_out_tasks()
        self._members = math.ceil(episodes / len(held_out))
        self._tasks = held_out[: math.ceil(episodes / self._members)]
        self._bounds: dict[str, Score] | None = None

    def evaluate(self) -> dict[str, Score]:
        """`sampled` and `greedy` {success, reward, episodes}; `random` and `oracle` where the environment has them."""
        greedy = replace(self._sampling, greedy=True)
        scores = {
            "sampled": _score(self._play(self._members, self._sampling)),
            "greedy": _score(self._play(1, greedy)),  # one episode a task: every other would be the same
        }
        if self._bounds is None:
            self._bounds = bounds(self._family, self._tasks, self._seed, self._stop)
        return scores | self._bounds

    def _play(self, members: int, sampling: Sampling) -> list[Trajectory]:
        requests = requests_of(self._family, self._tasks, members, self._seed, ("evaluation",))
        parts = (requests[start : start + self._rows] for start in range(0, len(requests), self._rows))
        return [trajectory for part in parts for trajectory in self._engine.play(part, sampling)[0]]


def _score(trajectories: Sequence[Trajectory]) -> Score:
    count = len(trajectories)
    return {
        "success": sum(trajectory.success for trajectory in trajectories) / count,
        "reward": sum(trajectory.total_reward for trajectory in trajectories) / count,
        "episodes": count,
    }


def bounds(
    family: EnvironmentFamily, tasks: Sequence[str], seed: int, stop: StopRequest | None = None
) -> dict[str, Score]:
    """What acting at random and acting perfectly earn on these tasks; empty when the environment cannot say."""

    def make(task: str) -> tuple[Environment, int]:
        (stop or StopRequest()).raise_if_requested()
        return opened(partial(family.make, task, derive_seed(seed, "environment", task), 0), task)

    if not isinstance(make(tasks[0])[0], Demonstrator):
        return {}
    policies: dict[str, Callable[[Demonstrator, random.Random], str]] = {
        "random": lambda environment, stream: environment.random_action(stream),
        "oracle": lambda environment, stream: environment.oracle_action(),
    }
    stream = generator(seed, "bounds")
    return {
        name: _average([_play_by_hand(*make(task), task, act, stream) for task in tasks])
        for name, act in policies.items()
    }


def _play_by_hand(
    environment: Environment,
    max_turns: int,
    task: str,
    act: Callable[[Demonstrator, random.Random], str],
    stream: random.Random,
) -> tuple[float, float]:
    """(success, total reward) of one episode."""
    assert isinstance(environment, Demonstrator)
    reset(environment, task)
    total, success = 0.0, 0.0
    for turn in range(max_turns):
        result = step(environment, act(environment, stream), f"task {task!r}, turn {turn + 1}")
        total, success = total + result.reward, result.info.get("success", 0.0)
        if result.done:
            break
    return success, total


def _average(played: Sequence[tuple[float, float]]) -> Score:
    return {
        "success": sum(success for success, _ in played) / len(played),
        "reward": sum(reward for _, reward in played) / len(played),
        "episodes": len(played),
    }
