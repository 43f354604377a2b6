"""DAPO (Yu et al. 2025, arXiv:2503.14476): a wider upper clip, batches of groups that disagree, a price on length."""

from typing import TYPE_CHECKING, Literal

from mlxrl_runs import maths
from mlxrl_runs.core import registry
from mlxrl_runs.core.clipped import ClippedObjective
from mlxrl_runs.core.settings import Count, NonNegative, PositiveInt, UnitInterval

if TYPE_CHECKING:
    import mlx.core as mx

    from mlxrl_runs.core.batch import Batch
    from mlxrl_runs.core.trajectory import Group, Turn


@registry.algorithm("dapo")
class Dapo(ClippedObjective):
    """Decoupled clip and dynamic sampling policy optimization.

    Attributes:
        max_refills: further rounds of sampling in a step, until every group of the batch disagrees.
        overlong_limit: tokens an action may have.
        overlong_share: of that limit, its last part, over which an action's price rises from 0 to overlong_penalty.
    """

    name: Literal["dapo"]
    max_refills: Count
    overlong_limit: PositiveInt
    overlong_share: UnitInterval
    overlong_penalty: NonNegative

    def wants(self, group: "Group") -> bool:
        """By what the environment paid: a price on length alone makes no group worth its place."""
        return group.has_spread

    def advantage(self, batch: "Batch") -> "mx.array":
        return self.group_relative(batch)

    def turn_reward(self, turn: "Turn") -> float:
        return turn.reward + self._overlong_price(turn)

    def _overlong_price(self, turn: "Turn") -> float:
        buffer = self.overlong_share * self.overlong_limit
        return self.overlong_penalty * maths.shaping.overlong_penalty(len(turn.action), self.overlong_limit, buffer)

    def metrics(self, batch: "Batch") -> dict[str, float]:
        turns = [turn for trajectory in batch.trajectories for turn in trajectory.turns]
        return {"reward/overlong": sum(map(self._overlong_price, turns)) / batch.rows}
