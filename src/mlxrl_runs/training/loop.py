"""The training loop: roll out, score, credit, update, log, evaluate, save."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx

from mlxrl_runs.core.batch import Batch, collate
from mlxrl_runs.core.protocols import Algorithm, Experience, Refills, Sampled, Tracker, TrajectoryRecord
from mlxrl_runs.core.stop import StopRequest
from mlxrl_runs.core.trajectory import Group
from mlxrl_runs.errors import Interrupted, TrainingError
from mlxrl_runs.maths.scalars import table
from mlxrl_runs.memory.meter import Meter
from mlxrl_runs.policy.load import Policy
from mlxrl_runs.training.collapse import ADVICE, CollapseGuard
from mlxrl_runs.training.evaluate import Evaluator, Score
from mlxrl_runs.training.kl_control import KlControl
from mlxrl_runs.training.metrics import (
    Metrics,
    advantage_metrics,
    evaluation_metrics,
    experience_metrics,
    update_metrics,
)
from mlxrl_runs.training.score import score
from mlxrl_runs.training.signal import lack_of_signal
from mlxrl_runs.training.state import Checkpoints
from mlxrl_runs.training.update import Updater
from mlxrl_runs.training.warm_start import WarmStarter, warm_start_metrics

SOLVED = 0.99  # success at which groups without spread are good news


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


@dataclass(frozen=True)
class BestCheckpoint:
    """The checkpoint of the best evaluation so far, by held-out greedy success."""

    step: int
    success: float
    folder: Path


StepCallback = Callable[[int, Metrics], object]  # (step, its metrics); True ends training after this step


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
    experience: Experience
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
    say: Callable[[str], None]
    fix_reference: Callable[[], None]
    warm_starter: WarmStarter | None = None
    guard: CollapseGuard | None = None
    kl_control: KlControl | None = None
    callbacks: Sequence[StepCallback] = ()
    progress: Progress = field(default_factory=Progress)
    evaluations: dict[str, dict[str, Score] | None] = field(default_factory=lambda: {"before": None, "after": None})
    final: Metrics = field(default_factory=dict)
    best: Metrics = field(default_factory=dict)
    best_checkpoint: BestCheckpoint | None = None

    def train(self) -> None:
        """Train to the end of the budget, evaluating before and after.

        Raises: TrainingError when the collapse guard stops it; the policy is then the best one that was kept.
        """
        try:
            self._begin()
            last = False
            while not last:
                last = self._step()
        except Interrupted:
            self._save()
            raise
        self._save()

    def _begin(self) -> None:
        """Evaluate, start warm where asked for, and fix what training is compared with."""
        if self.warm_starter is not None:
            self.warm_starter.check()
        evaluation = self.evaluations["before"] = self._evaluate("before training")
        metrics = evaluation_metrics(evaluation)
        self._remember(metrics)
        if self.warm_starter is not None:
            with self.meter.phase("warm_start"):
                losses = self.warm_starter.train()
            self.warm_starter = None  # its optimizer's moments, as large as two copies of what is trained
            self.say(f"warm start: cross-entropy {losses[0]:.3f} -> {losses[-1]:.3f} nats per token")
            evaluation = self.evaluations["warm_start"] = self._evaluate("after the warm start")
            metrics |= warm_start_metrics(losses, evaluation)
        self.fix_reference()
        if warning := lack_of_signal(evaluation["sampled"], self.experience.group_size):
            self.say(warning)
        if self.guard is not None:
            self.guard.begin(evaluation["greedy"]["success"], int(evaluation["greedy"]["episodes"]))
        self.tracker.log(0, metrics)

    def _step(self) -> bool:
        """One step; True when it was the last. The budget is asked once: minutes go on while a step is closed."""
        step = self.progress.step + 1
        self.meter.begin_step()
        with self.meter.phase("rollout"):
            sampled = self.experience.sample(step)
        if not sampled.kept:
            return self._nothing_to_learn(sampled)
        groups = sampled.kept
        batch, advantages = self._credited(groups, step)
        with self.meter.phase("update"):
            report = self.updater.update(self.algorithm, batch)
        self.progress.step = step
        self._count(sampled)
        metrics = {
            **experience_metrics(sampled.groups),
            **self._refill_metrics(sampled),
            **advantages,
            **self.algorithm.metrics(batch),
            **update_metrics(batch, report),
            **self.meter.metrics(),
            **self._rates_and_counts(sampled),
        }
        self._steer_kl(metrics, len(batch.trajectories))
        last = self._stopped_by_callback(step, metrics) or self._finished()
        evaluation = self._evaluate(f"after step {step}") if last or self._due(self.cadence.eval_every) else None
        if evaluation is not None:
            metrics |= evaluation_metrics(evaluation)
        if last:
            self.evaluations["after"] = evaluation
        self._log(step, metrics, groups, batch)
        if self._due(self.cadence.save_every):
            self._save()
        self._guard(metrics["reward/success"], sampled.groups, evaluation, last)
        return last

    def _nothing_to_learn(self, sampled: Sampled) -> bool:
        """No group of the step disagrees, however often others were sampled: the run ends here.

        Raises: TrainingError when that is no success.
        """
        success = experience_metrics(sampled.groups)["reward/success"]
        found = (
            f"Step {self.progress.step + 1}: all {len(sampled.groups)} groups of {sampled.refills + 1} rounds of "
            f"sampling are without spread, so that no advantage is left (success {success:.3f})."
        )
        if success < SOLVED:
            raise TrainingError(
                f"{found} Try easier or harder tasks, group_size={2 * self.experience.group_size}, "
                "trainer.warm_start.steps=20, or algorithm.max_refills=0 to train on whatever comes."
            )
        self._count(sampled)
        self.say(f"{found} The tasks are solved: training ends here.")
        self.evaluations["after"] = self._evaluate(f"after step {self.progress.step}")
        return True

    def _stopped_by_callback(self, step: int, metrics: Metrics) -> bool:
        """Every callback is called, whatever the first one wants."""
        return True in [callback(step, metrics) is True for callback in self.callbacks]

    def _guard(self, success: float, groups: Sequence[Group], evaluation: dict[str, Score] | None, last: bool) -> None:
        """Keep the best policy, and stop when later ones are so much worse that training must have broken them.

        Raises: TrainingError, with the best policy put back.
        """
        if self.guard is None:
            return
        trouble = self.guard.after_step(success, sum(len(group.trajectories) for group in groups))
        if evaluation is not None:
            greedy = evaluation["greedy"]
            trouble = self.guard.after_evaluation(greedy["success"], int(greedy["episodes"])) or trouble
            if trouble is None:
                self._keep_if_best(greedy["success"])
        if trouble is None:
            return
        if last:
            self.say(f"The run ends worse than it was: {trouble}. {ADVICE}")
            return
        raise TrainingError(f"Collapsed at step {self.progress.step}: {trouble}. {self._put_back_best()} {ADVICE}")

    def _keep_if_best(self, success: float) -> None:
        best, step = self.best_checkpoint, self.progress.step
        if best is not None and success <= best.success:
            return
        folder = self._save()
        if best is not None and not (self.cadence.save_every and best.step % self.cadence.save_every == 0):
            self.checkpoints.remove(best.step)
        self.best_checkpoint = BestCheckpoint(step, success, folder)

    def _put_back_best(self) -> str:
        best = self.best_checkpoint
        if best is None and self.cadence.eval_every == 0:
            return "No better policy was kept, for none was evaluated: trainer.eval_every=10 would keep one."
        if best is None:
            return "No policy since the start was evaluated as good as it, so none was kept."
        self.policy.load_weights(best.folder)
        return f"The policy of step {best.step} (held-out success {best.success:.3f}) is kept as the result."

    def _credited(self, groups: Sequence[Group], step: int) -> tuple[Batch, Metrics]:
        """The batch with the passes that something asked for, its advantages and its weights."""
        kl_coef = None if self.kl_control is None else self.kl_control.coefficient
        batch = collate(groups).with_(step=step, kl_coef=kl_coef)
        kl_due = self.cadence.kl_every > 0 and step % self.cadence.kl_every == 0
        needs = self.algorithm.needs
        reference = needs.reference or kl_due
        if needs.old or needs.values or reference:
            with self.meter.phase("score"):
                batch = score(
                    self.policy,
                    batch,
                    self.temperature,
                    old=needs.old,
                    reference=reference,
                    values=needs.values,
                    rows=self.micro_batch_rows,
                )
        batch = self.algorithm.credit(batch)
        assert batch.advantage is not None
        if step == self.cadence.inject_nan_step:
            batch = batch.with_(advantage=mx.where(batch.action_mask, mx.nan, batch.advantage))
        return batch, advantage_metrics(batch)

    def _steer_kl(self, metrics: Metrics, episodes: int) -> None:
        if self.kl_control is not None:
            metrics["kl/coef"] = self.kl_control.coefficient
            self.kl_control.after_step(metrics["kl/reference"], episodes)

    def _refill_metrics(self, sampled: Sampled) -> Metrics:
        """What it took to fill the batch, where groups are chosen."""
        if not isinstance(self.algorithm, Refills):
            return {}
        return {
            "refill/rounds": sampled.refills,
            "refill/sampled_groups": len(sampled.groups),
            "refill/kept_groups": len(sampled.kept),
            "refill/unused_tokens": sampled.unused_tokens,
        }

    def _count(self, sampled: Sampled) -> None:
        self.progress.episodes += sum(len(group.trajectories) for group in sampled.groups)
        self.progress.sampled_tokens += sampled.sampled_tokens
        self.progress.trained_tokens += _action_tokens(sampled.kept) * self.algorithm.updates_per_batch

    def _rates_and_counts(self, sampled: Sampled) -> Metrics:
        trained = _action_tokens(sampled.kept)
        return {
            "time/env_seconds": sampled.env_seconds,
            "rollout/tokens_per_second": sampled.sampled_tokens / self.meter.seconds["rollout"],
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

    def _evaluate(self, when: str) -> dict[str, Score]:
        with self.meter.phase("evaluate"):
            evaluation = self.evaluator.evaluate()
        self.tracker.log_evaluation(when, evaluation)
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

    def _save(self) -> Path:
        state = self.progress.counts() | ({} if self.kl_control is None else {"kl_coef": self.kl_control.coefficient})
        return self.checkpoints.save(self.progress.step, self.policy, self.updater, state)


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
