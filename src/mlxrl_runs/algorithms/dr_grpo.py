"""Dr. GRPO (Liu et al. 2025, arXiv:2503.20783): GRPO without what favours long wrong answers and one-sided groups."""

from typing import TYPE_CHECKING, Literal

from mlxrl_runs.core import registry
from mlxrl_runs.core.clipped import ClippedObjective

if TYPE_CHECKING:
    import mlx.core as mx

    from mlxrl_runs.core.batch import Batch


@registry.algorithm("dr_grpo")
class DrGrpo(ClippedObjective):
    """Centred returns that no standard deviation divides, and a reduction that no length of this batch decides.

    Both are values of shared keys: advantage_scaling=none and reduction=fixed_length.
    """

    name: Literal["dr_grpo"]

    def advantage(self, batch: "Batch") -> "mx.array":
        return self.group_relative(batch)
