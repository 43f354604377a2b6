"""Optimizer steps on one batch: gradients of micro-batches that add up exactly, clipped, checked, applied."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map

from mlxrl_runs import maths
from mlxrl_runs.core.batch import Batch
from mlxrl_runs.core.protocols import Algorithm
from mlxrl_runs.core.stop import StopRequest
from mlxrl_runs.errors import TrainingError
from mlxrl_runs.maths.scalars import number
from mlxrl_runs.memory.checkpointing import checkpointed
from mlxrl_runs.policy.forward import action_logp
from mlxrl_runs.policy.load import Policy
from mlxrl_runs.training.optimizer import LearningRate
from mlxrl_runs.training.score import widened

Tree = Any


@dataclass
class UpdateReport:
    """What the optimizer steps on one batch showed.

    Attributes:
        losses: each term of the loss, summed over the batch with its weights, at the first optimizer step.
        logp, entropy: (B, T) nats of the policy before its first update on this batch.
        grad_norm: before clipping, of the first optimizer step.
        ratio_metrics: from the last optimizer step, when there were several.
    """

    losses: dict[str, float]
    logp: mx.array
    entropy: mx.array
    grad_norm: float
    learning_rate: float
    ratio_metrics: dict[str, float] = field(default_factory=dict)


class Updater:
    """Owns the optimizer, and the counts of what it did and what it refused.

    Args:
        rows: rows of a micro-batch, 0 for the whole batch; any value gives the same gradient up to rounding.
        checkpoint_every: see `memory.checkpointing.checkpointed`; any value gives the same gradient.
        max_grad_norm: None leaves gradients as they are.
        max_nonfinite: updates that may be skipped in a run because a number was not finite.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: optim.Optimizer,
        learning_rate: LearningRate,
        *,
        temperature: float,
        rows: int,
        checkpoint_every: int,
        max_grad_norm: float | None,
        max_nonfinite: int,
        seed: int,
        stop: StopRequest,
    ):
        self.policy = policy
        self.optimizer = optimizer
        self.updates = 0
        self.skipped = 0
        self._learning_rate = learning_rate
        self._temperature = temperature
        self._rows = rows
        self._checkpoint_every = checkpoint_every
        self._max_grad_norm = max_grad_norm
        self._max_nonfinite = max_nonfinite
        self._seed = seed
        self._stop = stop
        optimizer.init(policy.model.trainable_parameters())

    def update(self, algorithm: Algorithm, batch: Batch) -> UpdateReport:
        """Take the algorithm's optimizer steps on a batch that was credited.

        Raises: TrainingError when a loss or gradient is not finite more often than allowed; the weights and the
            optimizer are then as before that step.
        """
        first: UpdateReport | None = None
        for _ in range(algorithm.updates_per_batch):
            report, gradient = self._gradient(algorithm, batch)
            self._apply(report, gradient)
            first = first or report
            if algorithm.updates_per_batch > 1:
                first.ratio_metrics = algorithm.ratio_metrics(report.logp, batch)
        assert first is not None
        return first

    def _gradient(self, algorithm: Algorithm, batch: Batch) -> tuple[UpdateReport, Tree]:
        step_function = self._step_function(algorithm)
        gradient: Tree = None
        losses: dict[str, float] = {}
        logps, entropies = [], []
        # dropout draws from MLX's global stream: its place in it is set here, and nowhere else
        mx.random.seed(self._seed + self.updates)
        self.policy.model.train()
        try:
            for part in batch.chunks(self._rows):
                self._stop.raise_if_requested()
                with checkpointed(self.policy.model, self._checkpoint_every):
                    (_, terms, logp, entropy), grads = step_function(self.policy.model, part)
                gradient = grads if gradient is None else tree_map(mx.add, gradient, grads)
                logps.append(widened(logp, batch))
                entropies.append(widened(entropy, batch))
                mx.eval(gradient, terms, logps[-1], entropies[-1])  # frees this micro-batch's graph
                for name, value in terms.items():
                    losses[name] = losses.get(name, 0.0) + number(value)
        finally:
            self.policy.model.eval()
        norm = number(_global_norm(gradient))
        rate = self._learning_rate.at(self.updates)
        return UpdateReport(losses, mx.concatenate(logps), mx.concatenate(entropies), norm, rate), gradient

    def _step_function(self, algorithm: Algorithm) -> Callable[..., tuple[tuple[Any, ...], Tree]]:
        def loss_of(model: nn.Module, part: Batch) -> tuple[mx.array, dict[str, mx.array], mx.array, mx.array]:
            logp, entropy = action_logp(model, part, self._temperature, with_entropy=True)
            assert part.weights is not None and entropy is not None
            terms = {
                name: maths.reduction.weighted_sum(term, part.weights)
                for name, term in algorithm.loss(logp, part).items()
            }
            return sum(terms.values(), mx.array(0.0)), terms, mx.stop_gradient(logp), mx.stop_gradient(entropy)

        return nn.value_and_grad(self.policy.model, loss_of)

    def _apply(self, report: UpdateReport, gradient: Tree) -> None:
        numbers = {**{f"loss/{name}": value for name, value in report.losses.items()}, "grad/norm": report.grad_norm}
        broken = [name for name, value in numbers.items() if not math.isfinite(value)]
        if broken:
            self.skipped += 1
            if self.skipped > self._max_nonfinite:
                raise TrainingError(
                    f"{', '.join(broken)} not finite at optimizer step {self.updates + 1}: the update was not applied. "
                    "Lower optimizer.learning_rate, or let trainer.max_nonfinite_updates of them be skipped."
                )
            return
        if self._max_grad_norm is not None and report.grad_norm > self._max_grad_norm:
            factor = self._max_grad_norm / report.grad_norm
            gradient = tree_map(lambda array: array * factor, gradient)
        self.optimizer.learning_rate = report.learning_rate
        self.optimizer.update(self.policy.model, gradient)
        mx.eval(self.policy.model.parameters(), self.optimizer.state)
        self.updates += 1


def _global_norm(gradient: Tree) -> mx.array:
    return mx.sqrt(sum((array.astype(mx.float32).square().sum() for _, array in tree_flatten(gradient)), mx.array(0.0)))
