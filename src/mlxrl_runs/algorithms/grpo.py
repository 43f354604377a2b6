"""GRPO (Shao et al. 2024, arXiv:2402.03300): each episode is judged against its siblings of the same task."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import model_validator

from mlxrl_runs import maths
from mlxrl_runs.core import registry
from mlxrl_runs.core.settings import KlGradient, NonNegative, Positive, PositiveInt, Reduction, Settings, UnitInterval

if TYPE_CHECKING:
    import mlx.core as mx

    from mlxrl_runs.core.batch import Batch


@registry.algorithm("grpo")
class Grpo(Settings):
    """Group-relative policy optimization over whole episodes; a completion is the one-turn case.

    Attributes:
        advantage_scaling: divide the centred return by the group's std, by the batch's, or not at all.
        std_eps: added to the std, in the reward's unit.
        clip_low, clip_high: half-widths of the ratio's trust region; inert with one update per batch.
        kl_coef: weight of KL(policy || reference) in the loss; 0 leaves the term out.
        log_ratio_clamp: nats, keeps exp() from overflowing.
        reduction_length: tokens to divide a row's sum by; for reduction=fixed_length.
        updates_per_batch: optimizer steps on one batch.
    """

    minimum_group_size: ClassVar[int] = 2

    name: Literal["grpo"]
    advantage_scaling: Literal["group", "batch", "none"]
    std_eps: Positive
    clip_low: UnitInterval
    clip_high: NonNegative
    kl_coef: NonNegative
    kl_gradient: KlGradient
    log_ratio_clamp: Positive
    reduction: Reduction
    reduction_length: PositiveInt | None
    updates_per_batch: PositiveInt

    @model_validator(mode="after")
    def _length_given(self) -> "Grpo":
        if (self.reduction is Reduction.FIXED_LENGTH) != (self.reduction_length is not None):
            raise ValueError("reduction_length goes with reduction=fixed_length: give both or neither")
        return self

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    def credit(self, batch: "Batch") -> "Batch":
        returns = [trajectory.total_reward for trajectory in batch.trajectories]
        advantage = maths.baselines.group_advantage(returns, batch.group_index, self.advantage_scaling, self.std_eps)
        return batch.with_(
            advantage=batch.spread_rows(advantage),
            weights=maths.reduction.by_name(self.reduction, batch.action_mask, self.reduction_length),
        )

    def loss(self, logp: "mx.array", batch: "Batch") -> "dict[str, mx.array]":
        return maths.objective.clipped_terms(
            logp,
            batch.old_logp,
            batch.reference_logp,
            batch.advantage,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            kl_coef=self.kl_coef,
            corrected_kl=self.kl_gradient is KlGradient.CORRECTED,
            log_ratio_clamp=self.log_ratio_clamp,
        )

    def metrics(self, batch: "Batch") -> dict[str, float]:
        return {}

    def ratio_metrics(self, logp: "mx.array", batch: "Batch") -> dict[str, float]:
        return maths.objective.ratio_metrics(
            logp,
            batch.old_logp,
            batch.advantage,
            batch.action_mask,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            log_ratio_clamp=self.log_ratio_clamp,
        )
