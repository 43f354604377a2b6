"""GRPO (Shao et al. 2024, arXiv:2402.03300): each episode is judged against its siblings of the same task."""

from typing import TYPE_CHECKING, Literal

from mlxrl_runs import maths
from mlxrl_runs.core import registry
from mlxrl_runs.core.clipped import ClippedObjective
from mlxrl_runs.core.settings import Positive

if TYPE_CHECKING:
    from mlxrl_runs.core.batch import Batch


@registry.algorithm("grpo")
class Grpo(ClippedObjective):
    """Group-relative policy optimization over whole episodes; a completion is the one-turn case.

    Attributes:
        advantage_scaling: divide the centred return by the group's std, by the batch's, or not at all.
        std_eps: added to the std, in the reward's unit.
    """

    name: Literal["grpo"]
    advantage_scaling: Literal["group", "batch", "none"]
    std_eps: Positive

    def credit(self, batch: "Batch") -> "Batch":
        returns = [trajectory.total_reward for trajectory in batch.trajectories]
        advantage = maths.baselines.group_advantage(returns, batch.group_index, self.advantage_scaling, self.std_eps)
        return batch.with_(advantage=batch.spread_rows(advantage), weights=self.weights(batch))

    def metrics(self, batch: "Batch") -> dict[str, float]:
        return {}
