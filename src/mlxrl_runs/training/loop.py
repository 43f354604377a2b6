"""The training loop: roll out, score, credit, update, log, evaluate, save."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import mlx.core as mx

from mlxrl_runs.core.batch import Batch, collate
from mlxrl_runs.core.protocols import Algorithm, Experience, Refills, Sampled, Tracker, TrajectoryRecord
from mlxrl_runs.core.stop import StopRequest
from mlxrl_runs.core.trajectory import Group
from mlxrl_runs.errors import EnvironmentFailure, Interrupted, TrainingError
from mlxrl_runs.maths.scalars import table
from mlxrl_runs.memory.meter import Meter
from mlxrl_runs.policy.load import Policy
from mlxrl_runs.training.collapse import ADVICE, CollapseGuard
from mlxrl_runs.training.early_stop import EarlyStop
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
from mlxrl_runs.training.sound import fault_of, require_finite_draws, require_usable_advantages
from mlxrl_runs.training.state import Checkpoints
from mlxrl_runs.training.update import Updater
from mlxrl_runs.training.warm_start import WarmStarter, warm_start_metrics
from mlxrl_runs.training.watch import Watch

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


class Warned(TypedDict):
    """Something that was said, and when."""

    step: int
    text: str


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
    """One run's parts and the loop over them.

    Attributes:
        stopped: why training ended before its last step, in words.
        warnings: what was said that a person can act on, with the step it was said at.
        last_saved: step and folder of the newest checkpoint; what was saved is a policy that works.
        is_sound: whether the policy is one that may be saved as the run's result.
    """

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
    watch: Watch | None = None
    early_stop: EarlyStop | None = None
    callbacks: Sequence[StepCallback] = ()
    progress: Progress = field(default_factory=Progress)
    evaluations: dict[str, dict[str, Score] | None] = field(default_factory=lambda: {"before": None, "after": None})
    final: Metrics = field(default_factory=dict)
    best: Metrics = field(default_factory=dict)
    best_checkpoint: BestCheckpoint | None = None
    stopped: str | None = None
    warnings: list[Warned] = field(default_factory=list)
    last_saved: tuple[int, Path] | None = None
    is_sound: bool = True

    def train(self) -> None:
        """Train to the end of the budget, evaluating before and after.

        Raises: TrainingError when the collapse guard stops it; the policy is then the best one that was kept. Also when
            a number is not finite; the policy is then the last one that was saved, where the present one is broken.
        """
        try:
            self._begin()
            last = False
            while not last:
                last = self._step()
            self._save()
        except Interrupted:
            self._save()
            raise
        except (TrainingError, EnvironmentFailure):
            self._leave_what_works()
            raise

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
            self._warn(warning)
        if self.guard is not None:
            self.guard.begin(evaluation["greedy"]["success"], int(evaluation["greedy"]["episodes"]))
        self.tracker.log(0, metrics)

    def _step(self) -> bool:
        """One step; True when it was the last. Budgets are asked once: minutes go on while a step is closed."""
        step = self.progress.step + 1
        self.meter.begin_step()
        with self.meter.phase("rollout"):
            sampled = self.experience.sample(step)
        require_finite_draws((row for group in sampled.groups for row in group.trajectories), f"at step {step}")
        if not sampled.kept:
            return self._nothing_to_learn(sampled)
        groups = sampled.kept
        batch, advantages = self._credited(groups, step)
        with self.meter.phase("update"):
            report = self.updater.update(self.algorithm, batch)
        self.progress.step = step
        self._count(sampled, report.trained_tokens)
        metrics = {
            **experience_metrics(sampled.groups),
            **self._refill_metrics(sampled),
            **advantages,
            **self.algorithm.metrics(batch),
            **update_metrics(batch, report),
            **self.meter.metrics(),
            **self._rates_and_counts(sampled, report.trained_tokens),
        }
        self._steer_kl(metrics, len(batch.trajectories))
        evaluation = self._evaluate(f"after step {step}") if self._due(self.cadence.eval_every) else None
        metrics |= evaluation_metrics(evaluation) if evaluation is not None else {}
        last = self._is_last(step, metrics)
        if last:
            evaluation = self.evaluations["after"] = evaluation or self._evaluate(f"after step {step}")
            metrics |= evaluation_metrics(evaluation)
        self._log(step, metrics, groups, batch)
        if self._due(self.cadence.save_every):
            self._save()
        self._look(step, metrics, last)
        self._guard(metrics["reward/success"], sampled.groups, evaluation, last)
        return last

    def _nothing_to_learn(self, sampled: Sampled) -> bool:
        """No group of the step disagrees, however often others were sampled: the run ends here.

        Raises: TrainingError when that is no success.
        """
        success = experience_metrics(sampled.groups)["reward/success"]
        found = (
            f"all {len(sampled.groups)} groups of {sampled.refills + 1} rounds of sampling are without spread at step "
            f"{self.progress.step + 1}, which leaves no advantage (success {success:.3f})"
        )
        if success < SOLVED:
            raise TrainingError(
                f"Nothing to learn from: {found}. Try easier or harder tasks, "
                f"group_size={2 * self.experience.group_size}, trainer.warm_start.steps=20, or algorithm.max_refills=0 "
                "to train on whatever comes."
            )
        self._count(sampled, trained_tokens=0)
        self.stopped = f"the tasks are solved: {found}"
        self.say(f"Training stops: {self.stopped}.")
        self.evaluations["after"] = self._evaluate(f"after step {self.progress.step}")
        return True

    def _is_last(self, step: int, metrics: Metrics) -> bool:
        """Whether the run ends here, and why where it is before its last step. Every callback is called."""
        asked = True in [callback(step, metrics) is True for callback in self.callbacks]
        bound = self.early_stop.after_step(step, metrics) if self.early_stop is not None else None
        if step >= self.cadence.steps:
            return True
        self.stopped = bound or (f"a callback returned True at step {step}" if asked else self._spent(step))
        return self.stopped is not None

    def _look(self, step: int, metrics: Metrics, last: bool) -> None:
        """Say what a person should know about this step."""
        if self.early_stop is not None and (missing := self.early_stop.missing(step, last, metrics)):
            self._warn(missing)
        for text in self.watch.after_step(metrics) if self.watch is not None else ():
            self._warn(text)
        if self.stopped is not None:
            self.say(f"Training stops: {self.stopped}.")

    def _warn(self, text: str) -> None:
        step = self.progress.step
        self.warnings.append({"step": step, "text": text})
        self.say(f"Step {step}: {text}" if step else text)

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
            self._warn(f"The run ends worse than it was: {trouble}. {ADVICE}")
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
        if step == 1 and needs.observations and not batch.observation_mask.any().item():
            self._warn("algorithm.echo_coef: the environment answered no action, so there is nothing to train on.")
        batch = self.algorithm.credit(batch)
        assert batch.advantage is not None
        metrics = advantage_metrics(batch)
        require_usable_advantages(metrics, (episode.total_reward for episode in batch.trajectories), step)
        if step == self.cadence.inject_nan_step:
            batch = batch.with_(advantage=mx.where(batch.action_mask, mx.nan, batch.advantage))
        return batch, metrics

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

    def _count(self, sampled: Sampled, trained_tokens: int) -> None:
        self.progress.episodes += sum(len(group.trajectories) for group in sampled.groups)
        self.progress.sampled_tokens += sampled.sampled_tokens
        self.progress.trained_tokens += trained_tokens

    def _rates_and_counts(self, sampled: Sampled, trained_tokens: int) -> Metrics:
        return {
            "time/env_seconds": sampled.env_seconds,
            "rollout/tokens_per_second": sampled.sampled_tokens / self.meter.seconds["rollout"],
            "update/tokens_per_second": trained_tokens / self.meter.seconds["update"],
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

    def _spent(self, step: int) -> str | None:
        """Which budget is used up; None while there is some of each."""
        done, budget = self.progress, self.cadence
        spent = {
            "tokens": (done.sampled_tokens, budget.budget_tokens),
            "episodes": (done.episodes, budget.budget_episodes),
            "minutes": (done.seconds / 60, budget.budget_minutes),
        }
        for name, (used, limit) in spent.items():
            if limit is not None and used >= limit:
                return f"budget.{name}={limit:g} reached at step {step}"
        return None

    def _due(self, every: int) -> bool:
        return every > 0 and self.progress.step % every == 0

    def _save(self) -> Path:
        """Raises: TrainingError when there is nothing left that is worth saving."""
        step = self.progress.step
        if fault := fault_of(self.policy):
            self._leave_what_works()
            raise TrainingError(f"The policy of step {step} is broken: {fault}. Lower optimizer.learning_rate.")
        state = self.progress.counts() | ({} if self.kl_control is None else {"kl_coef": self.kl_control.coefficient})
        folder = self.checkpoints.save(step, self.policy, self.updater, state)
        self.last_saved = (step, folder)
        return folder

    def _leave_what_works(self) -> None:
        """Put the last checkpoint in the place of a broken policy, so that no broken one is saved as the result."""
        if not self.is_sound or fault_of(self.policy) is None:
            return
        if self.last_saved is None:
            self.is_sound = False
            self._warn("The policy is broken, and none was saved before it broke: no weights are kept.")
            return
        step, folder = self.last_saved
        self.policy.load_weights(folder)
        self._warn(f"The policy is broken; that of step {step}, the last one saved, is kept as the result.")


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
