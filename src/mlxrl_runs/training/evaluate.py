"""Scores a policy on held-out tasks, sampled and greedy, between a random floor and an oracle ceiling."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mlxrl_runs import maths
from mlxrl_runs.core.protocols import Demonstrator, Environment, EnvironmentFamily
from mlxrl_runs.core.seeding import derive_seed, generator
from mlxrl_runs.core.stop import StopRequest
from mlxrl_runs.core.trajectory import Trajectory
from mlxrl_runs.rollout.engine import RolloutEngine
from mlxrl_runs.rollout.environment import last_text, opened, reset
from mlxrl_runs.rollout.on_policy import requests_of
from mlxrl_runs.rollout.sampling import Sampling
from mlxrl_runs.training.sound import require_finite_draws

EXAMPLES = 8
Score = dict[str, Any]  # numbers, and the named parts of the reward under `parts`


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
        """Scores of the `sampled` and `greedy` policy; of `random` and `oracle` where the environment has them."""
        sampled, greedy = self._play()
        scores = {"sampled": _score(sampled), "greedy": _score(greedy) | {"examples": _examples(greedy)}}
        if self._bounds is None:
            self._bounds = bounds(self._engine, self._family, self._tasks, self._seed, self._stop)
        return scores | self._bounds

    def _play(self) -> tuple[list[Trajectory], list[Trajectory]]:
        """(sampled, greedy) episodes, those of a task side by side so that they share its prompt."""
        sampled = requests_of(self._family, self._tasks, self._members, self._seed, ("evaluation",))
        requests = []
        for first in range(0, len(sampled), self._members):
            of_task = sampled[first : first + self._members]
            requests += [*of_task, replace(of_task[0], greedy=True)]  # one a task: every other would be the same
        played, _ = self._engine.play(requests, self._sampling, rows=self._rows)
        require_finite_draws(played, "in this evaluation")
        pairs = list(zip(requests, played, strict=True))
        return (
            [trajectory for request, trajectory in pairs if not request.greedy],
            [trajectory for request, trajectory in pairs if request.greedy],
        )


def _score(trajectories: Sequence[Trajectory]) -> Score:
    """Means over episodes, the spread of their rewards, and the parts of it that were named."""
    count = len(trajectories)
    returns = [trajectory.total_reward for trajectory in trajectories]
    parts: dict[str, float] = {}
    for turn in (turn for trajectory in trajectories for turn in trajectory.turns):
        for part, value in turn.reward_parts.items():
            parts[part] = parts.get(part, 0.0) + value / count
    return {
        "success": sum(trajectory.success for trajectory in trajectories) / count,
        "reward": sum(returns) / count,
        "reward_std": maths.baselines.sample_std(returns),
        "parts": dict(sorted(parts.items())),
        "episodes": count,
    }


def _examples(trajectories: Sequence[Trajectory]) -> list[dict[str, Any]]:
    """The first episodes, for a person to read: the same tasks at every evaluation."""
    return [
        {
            "task": episode.task,
            "success": episode.success,
            "reward": episode.total_reward,
            "turns": [
                {"observation": turn.observation_text, "text": turn.text, "reward": turn.reward}
                for turn in episode.turns
            ],
        }
        for episode in trajectories[:EXAMPLES]
    ]


def bounds(
    engine: RolloutEngine, family: EnvironmentFamily, tasks: Sequence[str], seed: int, stop: StopRequest | None = None
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
        name: _average([_play_by_hand(engine, *make(task), task, act, stream) for task in tasks])
        for name, act in policies.items()
    }


def _play_by_hand(
    engine: RolloutEngine,
    environment: Environment,
    max_turns: int,
    task: str,
    act: Callable[[Demonstrator, random.Random], str],
    stream: random.Random,
) -> tuple[float, float]:
    """(success, total reward) of one episode."""
    assert isinstance(environment, Demonstrator)
    observation = last_text(reset(environment, task))
    total, success = 0.0, 0.0
    for turn in range(max_turns):
        text = act(environment, stream)
        where, tokens = f"task {task!r}, turn {turn + 1}", len(engine.chat.action_tokens(text))
        result = engine.step(environment, text, where, prompt=observation, task=task, token_count=tokens)
        total, success, observation = total + result.reward, result.info.get("success", 0.0), result.observation
        if result.done:
            break
    return success, total


def _average(played: Sequence[tuple[float, float]]) -> Score:
    return {
        "success": sum(success for success, _ in played) / len(played),
        "reward": sum(reward for _, reward in played) / len(played),
        "episodes": len(played),
    }
