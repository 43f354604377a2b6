"""The policy term of the clipped algorithms: PPO's surrogate, with its dual clip where that is asked for."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mlxrl_runs import maths
from mlxrl_runs.core.policy_gradient import PolicyGradient
from mlxrl_runs.core.settings import NonNegative, Positive, UnitInterval

if TYPE_CHECKING:
    import mlx.core as mx

    from mlxrl_runs.core.batch import Batch


class ClippedObjective(PolicyGradient):
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), reduced by weights.

    Attributes:
        clip_low, clip_high: half-widths of the ratio's trust region; inert with one optimizer step a batch.
        dual_clip: ratio beyond which a negative advantage pays no more (TRL's delta); None: no bound.
    """

    clip_low: UnitInterval
    clip_high: NonNegative
    dual_clip: Positive | None

    def _rules(self) -> Iterator[tuple[bool, str]]:
        yield from super()._rules()
        yield (
            self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high,
            f"dual_clip: got {self.dual_clip}; must be above 1 + clip_high={1 + self.clip_high:g}. "
            "Try algorithm.dual_clip=3.",
        )

    def policy_term(self, ratio: "mx.array", logp: "mx.array", advantage: "mx.array") -> "mx.array":
        return maths.surrogates.clipped_surrogate(ratio, advantage, self.clip_low, self.clip_high, self.dual_clip)

    def ratio_metrics(self, logp: "mx.array", batch: "Batch") -> dict[str, float]:
        shared, ratio = super().ratio_metrics(logp, batch), self.ratio(logp, batch)
        assert batch.advantage is not None
        low, high = maths.surrogates.clip_fractions(ratio, batch.advantage, self.clip_low, self.clip_high)
        fractions = {"clip/low_fraction": low, "clip/high_fraction": high}
        if self.dual_clip is not None:
            beyond = maths.surrogates.dual_clip_fraction(ratio, batch.advantage, self.dual_clip)
            fractions["clip/dual_fraction"] = beyond
        return shared | {
            name: maths.objective.token_mean_of(where, batch.action_mask) for name, where in fractions.items()
        }
