"""What every policy-gradient algorithm shares: keys that mean the same everywhere, and the way from a batch to a loss.

An algorithm adds its own keys and answers two questions: what an action is worth (`advantage`), and what that makes of
a token's loss (`policy_term`). `core/clipped.py` answers the second for most; algorithms/grpo.py is the shortest one.
The values of the keys stand in conf/parts/policy_gradient.yaml.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from mlxrl_runs import maths
from mlxrl_runs.core.protocols import Needs
from mlxrl_runs.core.settings import (
    AdvantageScaling,
    Correction,
    Float,
    KlEstimator,
    KlGradient,
    NonNegative,
    Positive,
    PositiveInt,
    RatioLevel,
    Reduction,
    Settings,
)
from mlxrl_runs.core.trajectory import StopReason

if TYPE_CHECKING:
    import mlx.core as mx

    from mlxrl_runs.core.batch import Batch
    from mlxrl_runs.core.outputs import TokenOutputs
    from mlxrl_runs.core.trajectory import Turn


class PolicyGradient(Settings):
    """Advantage times a function of the importance ratio, with a KL term, an entropy bonus and ECHO beside it.

    Attributes:
        minimum_group_size: episodes of a task that the baseline needs.
        scalings: the values of `advantage_scaling` that mean something here.
        ratio_level: what has one importance ratio: a token, a turn, a row.
        log_ratio_clamp: nats, keeps exp() from overflowing.
        advantage_scaling, std_eps, std_ddof: whose standard deviation divides, what is added to it, n - ddof under it.
        kl_coef, kl_estimator, kl_gradient, kl_in: of KL(policy || reference), in the loss or taken off the reward.
        kl_target, kl_horizon: nats per token that kl_coef is steered to; episodes for a fifth at most.
        entropy_coef: of a bonus for entropy.
        reduction, reduction_length: how per-token losses become one number; tokens, read by fixed_length alone.
        updates_per_batch, minibatches, kl_stop: see `Algorithm`.
        mask_truncated, mask_longer_than: actions that are not trained; their rewards stay in every baseline.
        filter_groups: groups that all earned the same are not trained and leave every denominator.
        mismatch_correction, mismatch_level, mismatch_cap: importance weights from the sampler to the trainer.
        echo_coef, echo_schedule, echo_taper_steps: of the cross-entropy of what the environment wrote.
    """

    minimum_group_size: ClassVar[int] = 2
    scalings: ClassVar[tuple[AdvantageScaling, ...]] = ("group", "batch", "none")

    ratio_level: RatioLevel
    log_ratio_clamp: Annotated[Float, Field(gt=0, le=80)]  # float32 ends at exp(88.7), and an advantage multiplies it
    advantage_scaling: AdvantageScaling
    std_eps: Positive
    std_ddof: Literal[0, 1]
    kl_coef: NonNegative
    kl_estimator: KlEstimator
    kl_gradient: KlGradient
    kl_in: Literal["loss", "reward"]
    kl_target: Positive | None
    kl_horizon: Positive
    entropy_coef: NonNegative
    reduction: Reduction
    reduction_length: PositiveInt
    updates_per_batch: PositiveInt
    minibatches: PositiveInt
    kl_stop: Positive | None
    mask_truncated: bool
    mask_longer_than: PositiveInt | None
    filter_groups: bool
    mismatch_correction: Correction | Literal["none"]
    mismatch_level: Literal["token", "sequence"]
    mismatch_cap: Positive
    echo_coef: NonNegative
    echo_schedule: Literal["constant", "linear"]
    echo_taper_steps: PositiveInt | None

    @model_validator(mode="after")
    def _keys_agree(self) -> "PolicyGradient":
        for is_wrong, problem in self._rules():
            if is_wrong:
                raise ValueError(problem)
        return self

    def _rules(self) -> Iterator[tuple[bool, str]]:
        """What must agree between keys, each of them valid by itself."""
        yield (
            self.advantage_scaling not in self.scalings,
            f"advantage_scaling: got {self.advantage_scaling}; allowed here: {' or '.join(self.scalings)}. "
            f"Try algorithm.advantage_scaling={self.scalings[0]}.",
        )
        yield (
            (self.echo_schedule == "linear") != (self.echo_taper_steps is not None),
            f"echo_taper_steps: got {self.echo_taper_steps}; goes with echo_schedule=linear: give both or neither. "
            "Try algorithm.echo_schedule=linear algorithm.echo_taper_steps=50.",
        )
        yield (
            self.kl_target is not None and self.kl_coef == 0,
            f"kl_target: got {self.kl_target}; it needs a kl_coef to start from. Try algorithm.kl_coef=0.05.",
        )
        yield (
            self.kl_stop is not None and self.updates_per_batch == 1,
            f"kl_stop: got {self.kl_stop}; acts from the second time on that a batch is gone through. "
            "Try algorithm.updates_per_batch=2.",
        )
        yield (
            self.kl_in == "reward" and self.kl_gradient != "plain",
            f"kl_gradient: got {self.kl_gradient}; with kl_in=reward no gradient goes through the KL. "
            "Try algorithm.kl_gradient=plain.",
        )
        yield (
            self.kl_coef > 0 and (self.kl_in, self.kl_estimator, self.kl_gradient) == ("loss", "k1", "plain"),
            "kl_estimator: got k1; its own slope is the same everywhere and pulls to no reference. "
            "Try algorithm.kl_estimator=k3, algorithm.kl_gradient=k2 or algorithm.kl_in=reward.",
        )

    # ---- what an algorithm answers

    @abstractmethod
    def advantage(self, batch: "Batch") -> "mx.array":
        """(B, T): what each action token is worth, 0 elsewhere."""

    @abstractmethod
    def policy_term(self, ratio: "mx.array", logp: "mx.array", advantage: "mx.array") -> "mx.array":
        """(B, T): the policy's part of the loss per token."""

    def turn_reward(self, turn: "Turn") -> float:
        """What an action earned, as this algorithm sees it."""
        return turn.reward

    def metrics(self, batch: "Batch") -> dict[str, float]:
        return {}

    # ---- what all of them do

    def group_relative(self, batch: "Batch") -> "mx.array":
        """(B, T): an episode's return against those of its group, the same on each of its action tokens."""
        return batch.spread_rows(
            maths.baselines.group_advantage(
                self.episode_returns(batch), batch.group_index, self.advantage_scaling, self.std_eps, self.std_ddof
            )
        )

    @property
    def needs(self) -> Needs:
        paid = self._kl_is_paid
        return Needs(
            old=self._is_stepwise or paid,
            reference=self.kl_coef > 0,
            observations=self.echo_coef > 0,
            entropy_gradient=self.entropy_coef > 0,
        )

    @property
    def _is_stepwise(self) -> bool:
        """Whether the policy moves while a batch is trained on."""
        return self.updates_per_batch * self.minibatches > 1

    @property
    def _kl_is_paid(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "reward"

    def credit(self, batch: "Batch") -> "Batch":
        advantage = maths.reduction.masked(self.advantage(batch), batch.action_mask)
        return self.weigh(batch.with_(advantage=advantage, trained_mask=self.trained(batch)))

    def weigh(self, batch: "Batch") -> "Batch":
        if batch.trained_mask is None:
            raise ValueError("the batch has no trained_mask: credit comes before weigh")
        weights = maths.reduction.by_name(self.reduction, batch.trained_mask, self.reduction_length)
        if self.echo_coef == 0:
            return batch.with_(weights=weights)
        observed = self.echo_coef_at(batch.step) * maths.reduction.token_mean(batch.observation_mask)
        return batch.with_(weights=weights, observation_weights=observed)

    def trained(self, batch: "Batch") -> "mx.array":
        """(B, T): nonzero on the action tokens that are trained."""
        earned = [trajectory.total_reward for trajectory in batch.trajectories]
        kept = maths.baselines.keep_mixed_groups(earned, batch.group_index) if self.filter_groups else range(batch.rows)
        return batch.spread_turns(
            [
                [float(row in kept and self._is_trained(turn)) for turn in trajectory.turns]
                for row, trajectory in enumerate(batch.trajectories)
            ]
        )

    def _is_trained(self, turn: "Turn") -> bool:
        is_cut = self.mask_truncated and turn.stop is StopReason.LENGTH
        return not is_cut and (self.mask_longer_than is None or len(turn.action) <= self.mask_longer_than)

    def turn_rewards(self, batch: "Batch") -> list[list[float]]:
        """For each row what its turns earned, the KL taken off where it is paid for there."""
        earned = self._earned(batch)
        if not self._kl_is_paid:
            return earned
        costs = batch.turn_sums(self._kl_cost(batch))
        return [[reward - cost for reward, cost in zip(*row, strict=True)] for row in zip(earned, costs, strict=True)]

    def episode_returns(self, batch: "Batch") -> list[float]:
        """(B,): the sums of `turn_rewards`."""
        return [sum(rewards) for rewards in self.turn_rewards(batch)]

    def token_rewards(self, batch: "Batch") -> "mx.array":
        """(B, T): an action's reward on its last token, each token's KL taken off where it is paid for there."""
        earned = batch.at_turn_ends(self._earned(batch))
        return earned - self._kl_cost(batch) if self._kl_is_paid else earned

    def _earned(self, batch: "Batch") -> list[list[float]]:
        """For each row what its turns earned, before any KL."""
        return [[self.turn_reward(turn) for turn in trajectory.turns] for trajectory in batch.trajectories]

    def _kl_cost(self, batch: "Batch") -> "mx.array":
        """(B, T), in the reward's unit."""
        kl = self._kl(batch.old_logp, batch)
        return self._kl_coef(batch) * maths.reduction.masked(kl, batch.action_mask)

    def _kl(self, logp: "mx.array | None", batch: "Batch") -> "mx.array":
        if logp is None or batch.reference_logp is None:
            raise ValueError("kl_coef > 0 needs log-probabilities of the reference, and kl_in=reward the old ones")
        return maths.divergence.estimate(
            self.kl_estimator,
            self.kl_gradient,
            logp,
            batch.reference_logp,
            _old(logp, batch),
            self.log_ratio_clamp,
            self.ratio(logp, batch) if self.kl_gradient == "corrected" else None,
        )

    def _kl_coef(self, batch: "Batch") -> float:
        return self.kl_coef if batch.kl_coef is None else batch.kl_coef

    def echo_coef_at(self, step: int) -> float:
        """Of that training step, the first of which is 1."""
        if self.echo_taper_steps is None:
            return self.echo_coef
        return self.echo_coef * max(0.0, 1 - (step - 1) / self.echo_taper_steps)

    def ratio(self, logp: "mx.array", batch: "Batch") -> "mx.array":
        """(B, T): how much likelier the policy makes what was written than it was before this batch."""
        return maths.surrogates.ratio_at(
            self.ratio_level, logp, _old(logp, batch), batch.action_mask, batch.turn_index, self.log_ratio_clamp
        )

    def loss(self, outputs: "TokenOutputs", batch: "Batch") -> "dict[str, mx.array]":
        if batch.advantage is None or batch.weights is None:
            raise ValueError("the batch has no advantage: credit comes before the loss")
        logp, total = outputs.logp, maths.reduction.weighted_sum
        policy = self.policy_term(self.ratio(logp, batch), logp, batch.advantage)
        if self.mismatch_correction != "none":
            policy = policy * self._mismatch_weights(self.mismatch_correction, logp, batch)
        terms = {"policy": total(policy, batch.weights)}
        if self.kl_coef > 0 and not self._kl_is_paid:
            terms["kl"] = self._kl_coef(batch) * total(self._kl(logp, batch), batch.weights)
        if self.entropy_coef > 0:
            terms["entropy"] = -self.entropy_coef * total(outputs.entropy, batch.weights)
        if batch.observation_weights is not None:
            terms["echo"] = -total(logp, batch.observation_weights)
        return terms

    def _mismatch_weights(self, correction: Correction, logp: "mx.array", batch: "Batch") -> "mx.array":
        return maths.mismatch.importance_weights(
            _old(logp, batch),
            batch.sampler_logp,
            batch.action_mask,
            correction,
            self.mismatch_cap,
            self.mismatch_level,
        )

    def ratio_metrics(self, logp: "mx.array", batch: "Batch") -> dict[str, float]:
        if batch.advantage is None or batch.old_logp is None:
            raise ValueError("ratios need the batch's advantage and old log-probabilities")
        return maths.objective.ratio_metrics(
            self.ratio(logp, batch), logp, batch.old_logp, batch.action_mask, self.log_ratio_clamp
        )


def _old(logp: "mx.array", batch: "Batch") -> "mx.array":
    """(B, T) nats of the policy before this batch, which is the present one where a batch gets one optimizer step."""
    return logp if batch.old_logp is None else batch.old_logp
