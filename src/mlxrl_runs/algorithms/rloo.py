"""RLOO (Ahmadian et al. 2024, arXiv:2402.14740): the baseline of an episode is the mean of its siblings."""

from typing import TYPE_CHECKING, ClassVar, Literal

from mlxrl_runs import maths
from mlxrl_runs.core import registry
from mlxrl_runs.core.clipped import ClippedObjective
from mlxrl_runs.core.settings import AdvantageScaling

if TYPE_CHECKING:
    import mlx.core as mx

    from mlxrl_runs.core.batch import Batch


@registry.algorithm("rloo")
class Rloo(ClippedObjective):
    """REINFORCE leave-one-out. advantage_scaling=batch centres and scales over the batch (TRL's normalize_advantages).

    ratio_level=sequence_product with reduction=sequence_mean is TRL's loss on whole rows.
    """

    scalings: ClassVar[tuple[AdvantageScaling, ...]] = ("none", "batch")

    name: Literal["rloo"]

    def advantage(self, batch: "Batch") -> "mx.array":
        returns, groups = self.episode_returns(batch), batch.group_index
        if self.advantage_scaling == "none":
            return batch.spread_rows(maths.baselines.leave_one_out(returns, groups))
        return batch.spread_rows(maths.baselines.leave_one_out_normalized(returns, groups, self.std_eps, self.std_ddof))
