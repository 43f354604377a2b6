"""GRPO (Shao et al. 2024, arXiv:2402.03300): each episode is judged against its siblings of the same task."""

from typing import TYPE_CHECKING, Literal

from mlxrl_runs.core import registry
from mlxrl_runs.core.clipped import ClippedObjective

if TYPE_CHECKING:
    import mlx.core as mx

    from mlxrl_runs.core.batch import Batch


@registry.algorithm("grpo")
class Grpo(ClippedObjective):
    """Group-relative policy optimization over whole episodes; a completion is the one-turn case."""

    name: Literal["grpo"]

    def advantage(self, batch: "Batch") -> "mx.array":
        return self.group_relative(batch)
