"""A short supervised start: examples the environment makes itself, learned by cross-entropy before the first rollout.

A model that never writes the asked-for form earns nothing, and a group that earns nothing teaches nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import mlx.core as mx

from mlxrl_runs import maths
from mlxrl_runs.core.batch import Batch, collate
from mlxrl_runs.core.outputs import TokenOutputs
from mlxrl_runs.core.protocols import Demonstrator, Environment, EnvironmentFamily, Needs
from mlxrl_runs.core.seeding import derive_seed, generator
from mlxrl_runs.core.trajectory import EndReason, Group, StopReason, Trajectory, Turn
from mlxrl_runs.errors import ConfigError
from mlxrl_runs.policy.chat import ChatFormat
from mlxrl_runs.rollout.environment import answer_prefix, opened, reset, step
from mlxrl_runs.training.metrics import evaluation_metrics
from mlxrl_runs.training.update import Updater


class Imitation:
    """Cross-entropy of the demonstrated actions, the mean over their tokens."""

    updates_per_batch = 1
    minibatches = 1
    kl_stop: float | None = None
    needs = Needs()

    def credit(self, batch: Batch) -> Batch:
        return self.weigh(batch)

    def weigh(self, batch: Batch) -> Batch:
        return batch.with_(weights=maths.reduction.token_mean(batch.action_mask))

    def loss(self, outputs: TokenOutputs, batch: Batch) -> dict[str, mx.array]:
        assert batch.weights is not None
        return {"cross_entropy": -maths.reduction.weighted_sum(outputs.logp, batch.weights)}

    def metrics(self, batch: Batch) -> dict[str, float]:
        return {}

    def ratio_metrics(self, logp: mx.array, batch: Batch) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class WarmStarter:
    """Trains on demonstrations.

    Attributes:
        updater: of its own, so that the optimizer's moments do not reach into reinforcement learning.
        actions: "oracle" or "random", which of the environment's two policies shows how.
    """

    family: EnvironmentFamily
    chat: ChatFormat
    updater: Updater
    steps: int
    examples_per_step: int
    actions: str
    seed: int

    def check(self) -> None:
        """Raises: ConfigError when the environment cannot show how; better told before anything is evaluated."""
        task = self.family.sample_task(generator(self.seed, "warm start", 1))
        self._opened(task, derive_seed(self.seed, "environment", task))

    def train(self) -> list[float]:
        """The cross-entropy of each step, nats per token, before that step's update."""
        losses = []
        algorithm = Imitation()
        for number in range(1, self.steps + 1):
            groups = [Group(episode.task, (episode,)) for episode in self._episodes(number)]
            report = self.updater.update(algorithm, algorithm.credit(collate(groups)))
            losses.append(report.losses["cross_entropy"])
        return losses

    def _episodes(self, number: int) -> list[Trajectory]:
        stream = generator(self.seed, "warm start", number)
        tasks = [self.family.sample_task(stream) for _ in range(self.examples_per_step)]
        return [self._demonstrated(task, derive_seed(self.seed, "environment", task), stream) for task in tasks]

    def _opened(self, task: str, seed: int) -> tuple[Environment, int]:
        environment, max_turns = opened(lambda: self.family.make(task, seed, 0), task)
        if not isinstance(environment, Demonstrator):
            raise ConfigError(
                f"trainer.warm_start.steps={self.steps}: the environment shows no examples, having no oracle_action "
                "and random_action. Try trainer.warm_start.steps=0."
            )
        return environment, max_turns

    def _demonstrated(self, task: str, seed: int, stream: Random) -> Trajectory:
        """One episode, played by the environment's own policy and written down as the model would have written it."""
        environment, max_turns = self._opened(task, seed)
        assert isinstance(environment, Demonstrator)
        context = self.chat.first(reset(environment, task), answer_prefix(environment))
        turns: list[Turn] = []
        while True:
            text = environment.oracle_action() if self.actions == "oracle" else environment.random_action(stream)
            result = step(environment, text, f"task {task!r}, turn {len(turns) + 1} of an example")
            action = tuple(self.chat.action_tokens(text))
            turns.append(
                Turn(
                    context=context.tokens,
                    observation=context.observation,
                    action=action,
                    sampler_logp=(0.0,) * len(action),  # nobody sampled it
                    reward=result.reward,
                    reward_parts=result.reward_parts,
                    state="",
                    stop=StopReason.EOS,
                    text=text,
                )
            )
            if result.done or len(turns) == max_turns:
                end = EndReason.ENV_DONE if result.done else EndReason.MAX_TURNS
                return Trajectory(task, 0, tuple(turns), end, info=result.info)
            context = self.chat.next(result.observation, True, answer_prefix(environment))


def warm_start_metrics(losses: Sequence[float], evaluation: dict[str, dict[str, Any]]) -> dict[str, float]:
    """What step 0 of the log says about it, held-out scores after it included; eval/* are those before."""
    return {
        **{f"warm_start/{name.removeprefix('eval/')}": value for name, value in evaluation_metrics(evaluation).items()},
        "warm_start/steps": len(losses),
        "warm_start/first_cross_entropy": losses[0],
        "warm_start/last_cross_entropy": losses[-1],
    }
