"""GSPO (Zheng et al. 2025, arXiv:2507.18071): one importance ratio for a whole answer, since the reward is for that."""

from typing import TYPE_CHECKING, Literal

from mlxrl_runs.core import registry
from mlxrl_runs.core.clipped import ClippedObjective

if TYPE_CHECKING:
    import mlx.core as mx

    from mlxrl_runs.core.batch import Batch


@registry.algorithm("gspo")
class Gspo(ClippedObjective):
    """Group sequence policy optimization: ratio_level=sequence, or turn; clips as narrow as such a mean is steady.

    With reduction=sequence_sum it is LUSPO (a row's weight grows with its length).
    """

    name: Literal["gspo"]

    def advantage(self, batch: "Batch") -> "mx.array":
        return self.group_relative(batch)
