"""The training loop: roll out, score, credit, update, log, evaluate, save."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from mlxrl_runs.core.batch import Batch, collate
from mlxrl_runs.core.protocols import Algorithm, Tracker, TrajectoryRecord
from mlxrl_runs.core.stop import StopRequest
from mlxrl_runs.core.trajectory import Group
from mlxrl_runs.errors import Interrupted
from mlxrl_runs.maths.scalars import table
from mlxrl_runs.memory.meter import Meter
from mlxrl_runs.policy.load import Policy
from mlxrl_runs.rollout.on_policy import OnPolicy
from mlxrl_runs.training.evaluate import Evaluator, Score
from mlxrl_runs.training.metrics import (
    Metrics,
    advantage_metrics,
    evaluation_metrics,
    experience_metrics,
    update_metrics,
)
from mlxrl_runs.training.score import score
from mlxrl_runs.training.state import Checkpoints
from mlxrl_runs.training.update import Updater


@dataclass(frozen=True)
class Cadence:
    """How long, and what happens how often (in steps; 0 is never)."""

    steps: int
    eval_every: int
    save_every: int
    kl_every: int
    trajectories_every: int
    trajectories: int  # episodes shown each time
    budget_tokens: int | None = None  # sampled
    budget_episodes: int | None = None
    budget_minutes: float | None = None
    inject_nan_step: int | None = None


@dataclass
class Progress:
    """What a run has done so far."""

    step: int = 0
    episodes: int = 0
    sampled_tokens: int = 0
    trained_tokens: int = 0
    started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def counts(self) -> dict[str, int]:
        return {
            "episodes": self.episodes,
            "sampled_tokens": self.sampled_tokens,
            "trained_tokens": self.trained_tokens,
        }


@dataclass
class Trainer:
    """One run's parts and the loop over them."""

    policy: Policy
    experience: OnPolicy
    algorithm: Algorithm
    updater: Updater
    evaluator: Evaluator
    tracker: Tracker
    checkpoints: Checkpoints
    meter: Meter
    cadence: Cadence
    temperature: float
    micro_batch_rows: int
    stop: StopRequest
    progress: Progress = field(default_factory=Progress)
    evaluations: dict[str, dict[str, Score] | None] = field(default_factory=lambda: {"before": None, "after": None})
    final: Metrics = field(default_factory=dict)
    best: Metrics = field(default_factory=dict)

    def train(self) -> None:
        """Train to the end of the budget, evaluating before and after."""
        try:
            before = self._evaluate(0)
            self.evaluations["before"] = before
            self.tracker.log(0, evaluation_metrics(before))
            self._remember(evaluation_metrics(before))
            last = False
            while not last:
                last = self._step()
        except Interrupted:
            self._save()
            raise
        self._save()

    def _step(self) -> bool:
        """One step; True when it was the last. The budget is asked once: minutes go on while a step is closed."""
        step = self.progress.step + 1
        self.meter.begin_step()
        with self.meter.phase("rollout"):
            groups = self.experience.groups(step)
        batch, advantages = self._credited(groups, step)
        with self.meter.phase("update"):
            report = self.updater.update(self.algorithm, batch)
        self.progress.step = step
        self._count(groups)
        metrics = {
            **experience_metrics(groups),
            **advantages,
            **self.algorithm.metrics(batch),
            **update_metrics(batch, report),
            **self.meter.metrics(),
            **self._rates_and_counts(groups),
        }
        last = self._finished()
        if last or self._due(self.cadence.eval_every):
            evaluation = self._evaluate(step)
            metrics |= evaluation_metrics(evaluation)
            if last:
                self.evaluations["after"] = evaluation
        self._log(step, metrics, groups, batch)
        if self._due(self.cadence.save_every):
            self._save()
        return last

    def _credited(self, groups: Sequence[Group], step: int) -> tuple[Batch, Metrics]:
        """The batch with the passes that something asked for, its advantages and its weights."""
        batch = collate(groups)
        kl_due = self.cadence.kl_every > 0 and step % self.cadence.kl_every == 0
        old, reference = self.algorithm.updates_per_batch > 1, self.algorithm.needs_reference or kl_due
        if old or reference:
            with self.meter.phase("score"):
                batch = score(
                    self.policy, batch, self.temperature, old=old, reference=reference, rows=self.micro_batch_rows
                )
        batch = self.algorithm.credit(batch)
        assert batch.advantage is not None
        if step == self.cadence.inject_nan_step:
            batch = batch.with_(advantage=mx.where(batch.action_mask, mx.nan, batch.advantage))
        return batch, advantage_metrics(batch)

    def _count(self, groups: Sequence[Group]) -> None:
        self.progress.episodes += sum(len(group.trajectories) for group in groups)
        self.progress.sampled_tokens += self.experience.statistics.sampled_tokens
        self.progress.trained_tokens += _action_tokens(groups) * self.algorithm.updates_per_batch

    def _rates_and_counts(self, groups: Sequence[Group]) -> Metrics:
        rolled = self.experience.statistics
        trained = _action_tokens(groups)
        return {
            "time/env_seconds": rolled.env_seconds,
            "rollout/tokens_per_second": rolled.sampled_tokens / self.meter.seconds["rollout"],
            "update/tokens_per_second": trained * self.algorithm.updates_per_batch / self.meter.seconds["update"],
            "update/skipped": self.updater.skipped,
            "progress/optimizer_updates": self.updater.updates,
            "progress/seconds": self.progress.seconds,
            **{f"progress/{name}": count for name, count in self.progress.counts().items()},
        }

    def _log(self, step: int, metrics: Metrics, groups: Sequence[Group], batch: Batch) -> None:
        self.tracker.log(step, metrics)
        if self._due(self.cadence.trajectories_every) or step == 1:
            self.tracker.log_trajectories(step, _records(groups, batch, self.cadence.trajectories))
        self.final = metrics
        self._remember(metrics)

    def _remember(self, metrics: Metrics) -> None:
        for name in ("reward/mean", "reward/success", "eval/sampled_success", "eval/greedy_success"):
            if name in metrics:
                self.best[name] = max(metrics[name], self.best.get(name, metrics[name]))

    def _evaluate(self, step: int) -> dict[str, Score]:
        with self.meter.phase("evaluate"):
            evaluation = self.evaluator.evaluate()
        self.tracker.log_evaluation(step, evaluation)
        return evaluation

    def _finished(self) -> bool:
        done, budget = self.progress, self.cadence
        return (
            done.step >= budget.steps
            or (budget.budget_tokens is not None and done.sampled_tokens >= budget.budget_tokens)
            or (budget.budget_episodes is not None and done.episodes >= budget.budget_episodes)
            or (budget.budget_minutes is not None and done.seconds >= 60 * budget.budget_minutes)
        )

    def _due(self, every: int) -> bool:
        return every > 0 and self.progress.step % every == 0

    def _save(self) -> None:
        self.checkpoints.save(self.progress.step, self.policy, self.updater, self.progress.counts())


def _action_tokens(groups: Sequence[Group]) -> int:
    return sum(trajectory.action_count for group in groups for trajectory in group.trajectories)


def _records(groups: Sequence[Group], batch: Batch, limit: int) -> list[TrajectoryRecord]:
    assert batch.advantage is not None
    trajectories = [trajectory for group in groups for trajectory in group.trajectories][:limit]
    advantages = table(batch.advantage[:limit])
    return [
        TrajectoryRecord(
            trajectory.task,
            trajectory.member,
            trajectory,
            tuple(row[start] for start, _ in trajectory.action_spans()),
        )
        for trajectory, row in zip(trajectories, advantages, strict=True)
    ]
