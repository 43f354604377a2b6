"""What the clipped policy-gradient algorithms share: the keys of their loss, and the loss those keys stand for.

An algorithm adds its own keys and its `credit`; see algorithms/grpo.py for the shortest one.
"""

from typing import TYPE_CHECKING, ClassVar

from pydantic import model_validator

from mlxrl_runs import maths
from mlxrl_runs.core.settings import KlGradient, NonNegative, Positive, PositiveInt, Reduction, Settings, UnitInterval

if TYPE_CHECKING:
    import mlx.core as mx

    from mlxrl_runs.core.batch import Batch


class ClippedObjective(Settings):
    """PPO's clipped surrogate plus a KL term, reduced by weights.

    Attributes:
        minimum_group_size: episodes of a task that the baseline needs.
        clip_low, clip_high: half-widths of the ratio's trust region; inert with one update per batch.
        kl_coef: weight of KL(policy || reference) in the loss; 0 leaves the term out.
        kl_gradient: the estimator's own gradient, or the one corrected by the importance ratio (TRL).
        log_ratio_clamp: nats, keeps exp() from overflowing.
        reduction: how per-token losses become one number.
        reduction_length: tokens to divide a row's sum by; for reduction=fixed_length.
        updates_per_batch: optimizer steps on one batch.
    """

    minimum_group_size: ClassVar[int] = 2

    clip_low: UnitInterval
    clip_high: NonNegative
    kl_coef: NonNegative
    kl_gradient: KlGradient
    log_ratio_clamp: Positive
    reduction: Reduction
    reduction_length: PositiveInt | None
    updates_per_batch: PositiveInt

    @model_validator(mode="after")
    def _length_given(self) -> "ClippedObjective":
        if (self.reduction is Reduction.FIXED_LENGTH) != (self.reduction_length is not None):
            raise ValueError("reduction_length goes with reduction=fixed_length: give both or neither")
        return self

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    def weights(self, batch: "Batch") -> "mx.array":
        """(B, T): the reduction, fixed over everything one optimizer step sees."""
        return maths.reduction.by_name(self.reduction, batch.action_mask, self.reduction_length)

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
