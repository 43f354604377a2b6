"""CISPO (MiniMax 2025, arXiv:2506.13585): the ratio is capped, and every token keeps its gradient."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from mlxrl_runs import maths
from mlxrl_runs.core import registry
from mlxrl_runs.core.policy_gradient import PolicyGradient
from mlxrl_runs.core.settings import Positive, Share

if TYPE_CHECKING:
    import mlx.core as mx

    from mlxrl_runs.core.batch import Batch


@registry.algorithm("cispo")
class Cispo(PolicyGradient):
    """-stop(clip(r, ratio_floor, ratio_cap)) A logp.

    Attributes: ratio_floor, ratio_cap: bounds of the ratio itself; inert with one optimizer step a batch.
    """

    name: Literal["cispo"]
    ratio_floor: Share
    ratio_cap: Positive

    def _rules(self) -> Iterator[tuple[bool, str]]:
        yield from super()._rules()
        yield (
            self.ratio_cap <= 1,
            f"ratio_cap: got {self.ratio_cap:g}; it bounds the ratio itself and must be above 1. For what others call "
            f"an upper clip of {self.ratio_cap:g}, try algorithm.ratio_cap={1 + self.ratio_cap:g}.",
        )

    def advantage(self, batch: "Batch") -> "mx.array":
        return self.group_relative(batch)

    def policy_term(self, ratio: "mx.array", logp: "mx.array", advantage: "mx.array") -> "mx.array":
        return maths.surrogates.capped_surrogate(ratio, logp, advantage, self.ratio_floor, self.ratio_cap)

    def ratio_metrics(self, logp: "mx.array", batch: "Batch") -> dict[str, float]:
        below, above = maths.surrogates.cap_fractions(self.ratio(logp, batch), self.ratio_floor, self.ratio_cap)
        return super().ratio_metrics(logp, batch) | {
            "clip/low_fraction": maths.objective.token_mean_of(below, batch.action_mask),
            "clip/high_fraction": maths.objective.token_mean_of(above, batch.action_mask),
        }
