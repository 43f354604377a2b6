"""Optimizer steps on one batch: gradients of micro-batches that add up exactly, clipped, checked, applied."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map

from mlxrl_runs import maths
from mlxrl_runs.core.batch import Batch
from mlxrl_runs.core.outputs import TokenOutputs
from mlxrl_runs.core.protocols import Algorithm
from mlxrl_runs.core.seeding import generator
from mlxrl_runs.core.stop import StopRequest
from mlxrl_runs.errors import TrainingError
from mlxrl_runs.maths.scalars import number
from mlxrl_runs.memory.checkpointing import checkpointed
from mlxrl_runs.policy.forward import token_outputs
from mlxrl_runs.policy.load import Policy
from mlxrl_runs.training.optimizer import LearningRate
from mlxrl_runs.training.score import joined_outputs

Tree = Any


@dataclass
class UpdateReport:
    """What the optimizer steps on one batch showed.

    Attributes:
        losses: each term of the loss, summed over the batch with its weights, as the batch was first gone through.
        outputs: of the batch's tokens, as each row was first met.
        grad_norms: before clipping, of the first optimizer step, by what was trained: policy, value.
        ratio_metrics: where there were several optimizer steps, as each row was last met.
        stopped_early: whether kl_stop ended them; None where there is none.
        trained_tokens: those that the steps learned from; a token in two of them counts twice.
    """

    losses: dict[str, float]
    outputs: TokenOutputs
    grad_norms: dict[str, float]
    learning_rate: float
    ratio_metrics: dict[str, float] = field(default_factory=dict)
    stopped_early: bool | None = None
    trained_tokens: int = 0


@dataclass(frozen=True)
class Learner:
    """Weights with the optimizer that trains them."""

    module: nn.Module
    optimizer: optim.Optimizer
    learning_rate: LearningRate


class Updater:
    """Owns the optimizers, and the counts of what they did and what was refused.

    Args:
        value_optimizer, value_learning_rate: of the policy's value head, where it has one.
        rows: rows of a micro-batch, 0 for the whole batch; any value gives the same gradient up to rounding.
        checkpoint_every: see `memory.checkpointing.checkpointed`; any value gives the same gradient.
        max_grad_norm: None leaves gradients as they are; the policy's and the value head's are bounded apart.
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
        value_optimizer: optim.Optimizer | None = None,
        value_learning_rate: LearningRate | None = None,
    ):
        self.policy = policy
        self.learners = {"policy": Learner(policy.model, optimizer, learning_rate)}
        if policy.value_head is not None and value_optimizer is not None and value_learning_rate is not None:
            self.learners["value"] = Learner(policy.value_head, value_optimizer, value_learning_rate)
        self.updates = 0
        self.skipped = 0
        self._trained_tokens = 0
        self._temperature = temperature
        self._rows = rows
        self._checkpoint_every = checkpoint_every
        self._max_grad_norm = max_grad_norm
        self._max_nonfinite = max_nonfinite
        self._seed = seed
        self._stop = stop
        self._trained = nn.Module()  # one tree for what one backward pass differentiates
        for name, learner in self.learners.items():
            setattr(self._trained, name, learner.module)
            learner.optimizer.init(learner.module.trainable_parameters())

    @property
    def optimizer(self) -> optim.Optimizer:
        """The policy's."""
        return self.learners["policy"].optimizer

    def update(self, algorithm: Algorithm, batch: Batch) -> UpdateReport:
        """Take the algorithm's optimizer steps on a batch that was credited.

        Raises: TrainingError when a loss or gradient is not finite more often than allowed; the weights and the
            optimizer are then as before that step.
        """
        self._trained_tokens = 0
        first = last = self._visit(algorithm, batch, 0)
        assert first is not None and last is not None, "only a later visit may end early"
        stopped = None if algorithm.kl_stop is None else False
        for visit in range(1, algorithm.updates_per_batch):
            met = self._visit(algorithm, batch, visit)
            if met is None:
                stopped = True
                break
            last = met
        if algorithm.updates_per_batch * algorithm.minibatches == 1:
            return replace(first, trained_tokens=self._trained_tokens)
        ratios = algorithm.ratio_metrics(last.outputs.logp, batch)
        return replace(first, ratio_metrics=ratios, stopped_early=stopped, trained_tokens=self._trained_tokens)

    def _visit(self, algorithm: Algorithm, batch: Batch, visit: int) -> UpdateReport | None:
        """Go through the batch once; None when `kl_stop` says that the policy has moved far enough."""
        reports: list[UpdateReport] = []
        order: list[int] = []
        for rows in self._deal(algorithm, batch, visit):
            part = batch if len(rows) == batch.rows else algorithm.weigh(batch.select_rows(rows))
            report, gradient = self._gradient(algorithm, part)
            if visit > 0 and algorithm.kl_stop is not None and _moved(report, part) > algorithm.kl_stop:
                return None
            if self._apply(report, gradient):
                self._trained_tokens += _trained_tokens(part)
            reports.append(report)
            order += rows
        if len(reports) == 1:
            return reports[0]
        back = mx.argsort(mx.array(order))
        met = joined_outputs([report.outputs for report in reports], batch)
        outputs = TokenOutputs(met.logp[back], met.entropy[back], met.is_likeliest[back])
        losses = {name: sum(report.losses[name] for report in reports) / len(reports) for name in reports[0].losses}
        return replace(reports[0], losses=losses, outputs=outputs)

    def _deal(self, algorithm: Algorithm, batch: Batch, visit: int) -> Iterator[Sequence[int]]:
        """The rows of each minibatch; the members of a group stay together."""
        groups = list(dict.fromkeys(batch.group_index))
        count = min(algorithm.minibatches, len(groups))
        if count > 1:
            generator(self._seed, "minibatches", batch.step, visit).shuffle(groups)
        for number_of_part in range(count):
            dealt = set(groups[number_of_part::count])
            yield [row for row, group in enumerate(batch.group_index) if group in dealt]

    def _gradient(self, algorithm: Algorithm, batch: Batch) -> tuple[UpdateReport, Tree]:
        step_function = self._step_function(algorithm)
        gradient: Tree = None
        losses: dict[str, float] = {}
        found: list[TokenOutputs] = []
        # dropout draws from MLX's global stream: its place in it is set here, and nowhere else
        mx.random.seed(self._seed + self.updates)
        self.policy.model.train()
        try:
            for part in batch.chunks(self._rows):
                self._stop.raise_if_requested()
                with checkpointed(self.policy.model, self._checkpoint_every):
                    (_, terms, outputs), grads = step_function(self._trained, part)
                gradient = grads if gradient is None else tree_map(mx.add, gradient, grads)
                found.append(outputs)
                # frees this micro-batch's graph
                mx.eval(gradient, terms, outputs.logp, outputs.entropy, outputs.is_likeliest)
                for name, value in terms.items():
                    losses[name] = losses.get(name, 0.0) + number(value)
        finally:
            self.policy.model.eval()
        norms = {name: number(_global_norm(gradient[name])) for name in self.learners}
        rate = self.learners["policy"].learning_rate.at(self.updates)
        return UpdateReport(losses, joined_outputs(found, batch), norms, rate), gradient

    def _step_function(self, algorithm: Algorithm) -> Callable[..., tuple[tuple[Any, ...], Tree]]:
        needs = algorithm.needs

        def loss_of(trained: nn.Module, part: Batch) -> tuple[mx.array, dict[str, mx.array], TokenOutputs]:
            outputs = token_outputs(
                trained.policy,
                part,
                self._temperature,
                observations=needs.observations,
                entropy_gradient=needs.entropy_gradient,
                value_head=trained.value if needs.values else None,
                value_gradient=needs.value_gradient or 0.0,
            )
            terms = algorithm.loss(outputs, part)
            still = mx.stop_gradient
            seen = TokenOutputs(still(outputs.logp), still(outputs.entropy), outputs.is_likeliest)
            return sum(terms.values(), mx.array(0.0)), terms, seen

        return nn.value_and_grad(self._trained, loss_of)

    def _apply(self, report: UpdateReport, gradient: Tree) -> bool:
        """Take an optimizer step; False where it was skipped."""
        numbers = {
            **{f"loss/{name}": value for name, value in report.losses.items()},
            **{norm_name(name): value for name, value in report.grad_norms.items()},
        }
        broken = [name for name, value in numbers.items() if not math.isfinite(value)]
        if broken:
            self.skipped += 1
            if self.skipped > self._max_nonfinite:
                raise TrainingError(
                    f"{', '.join(broken)} not finite at optimizer step {self.updates + 1}: the update was not applied. "
                    "Lower optimizer.learning_rate, or let trainer.max_nonfinite_updates of them be skipped."
                )
            return False
        for name, learner in self.learners.items():
            norm, own = report.grad_norms[name], gradient[name]
            if self._max_grad_norm is not None and norm > self._max_grad_norm:
                own = tree_map(lambda array, factor=self._max_grad_norm / norm: array * factor, own)
            learner.optimizer.learning_rate = learner.learning_rate.at(self.updates)
            learner.optimizer.update(learner.module, own)
            mx.eval(learner.module.parameters(), learner.optimizer.state)
        self.updates += 1
        return True


def norm_name(learner: str) -> str:
    """What the gradient's norm is called in the log. Args: learner: policy or value."""
    return "grad/norm" if learner == "policy" else f"grad/{learner}_norm"


def _moved(report: UpdateReport, batch: Batch) -> float:
    """kl/old of a batch whose policy has moved, nats per token."""
    assert batch.old_logp is not None
    kl = maths.divergence.k3(report.outputs.logp, batch.old_logp)
    return maths.objective.token_mean_of(kl, batch.action_mask)


def _trained_tokens(batch: Batch) -> int:
    mask = batch.action_mask if batch.trained_mask is None else batch.trained_mask
    return int(number((mask != 0).sum()))


def _global_norm(gradient: Tree) -> mx.array:
    return mx.sqrt(sum((array.astype(mx.float32).square().sum() for _, array in tree_flatten(gradient)), mx.array(0.0)))
