"""REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): returns per token, centred and scaled over the whole batch."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from mlxrl_runs import maths
from mlxrl_runs.core import registry
from mlxrl_runs.core.clipped import ClippedObjective
from mlxrl_runs.core.settings import AdvantageScaling, UnitInterval

if TYPE_CHECKING:
    import mlx.core as mx

    from mlxrl_runs.core.batch import Batch


@registry.algorithm("reinforce_pp")
class ReinforcePp(ClippedObjective):
    """No baseline per task: what is common to a batch is taken off, and advantage_scaling=batch divides by its spread.

    Attributes:
        gamma: discount per action token.
        group_baseline: first take the group's mean off whole returns, without discount (REINFORCE++-baseline).
    """

    scalings: ClassVar[tuple[AdvantageScaling, ...]] = ("none", "batch")

    name: Literal["reinforce_pp"]
    gamma: UnitInterval
    group_baseline: bool

    def _rules(self) -> Iterator[tuple[bool, str]]:
        yield from super()._rules()
        yield (
            self.group_baseline and self.gamma != 1,
            f"gamma: got {self.gamma:g}; group_baseline=true compares whole returns, without discount. "
            "Try algorithm.gamma=1.",
        )

    @property
    def minimum_group_size(self) -> int:  # type: ignore[override]
        return 2 if self.group_baseline else 1

    def advantage(self, batch: "Batch") -> "mx.array":
        worth = self._centred(batch) if self.group_baseline else self._returns(batch)
        if self.advantage_scaling == "none":
            return worth
        return maths.reduction.whiten(worth, batch.action_mask, self.std_eps**2, self.std_ddof)

    def _returns(self, batch: "Batch") -> "mx.array":
        return maths.returns.token_returns(self.token_rewards(batch), batch.action_mask, self.gamma)

    def _centred(self, batch: "Batch") -> "mx.array":
        centred = maths.baselines.group_advantage(self.episode_returns(batch), batch.group_index, "none")
        return batch.spread_rows(centred)
