"""GiGPO (Feng et al. 2025, arXiv:2505.10978): GRPO over episodes, and over the steps taken in the same state."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from mlxrl_runs import maths
from mlxrl_runs.core import registry
from mlxrl_runs.core.clipped import ClippedObjective
from mlxrl_runs.core.settings import AdvantageScaling, Float, NonNegative, UnitInterval

if TYPE_CHECKING:
    import mlx.core as mx

    from mlxrl_runs.core.batch import Batch


@registry.algorithm("gigpo")
class Gigpo(ClippedObjective):
    """Group-in-group policy optimization: A(turn) = A_episode + omega A_step.

    Anchors are the states in which actions were taken, compared within one task only; a state met once pays nothing.

    Attributes:
        omega: weight of the step part; 0 is episode-level GRPO, bit for bit.
        gamma: discount of the returns to go that steps are compared by. With 1 and equal returns the step part is 0.
        statistics: the episode level counts a trajectory once, or once for each of its steps (verl-agent).
        anchor_similarity: states whose texts are that much alike count as one; None: equal ones only.
    """

    scalings: ClassVar[tuple[AdvantageScaling, ...]] = ("group", "none")

    name: Literal["gigpo"]
    omega: NonNegative
    gamma: UnitInterval
    statistics: Literal["trajectory", "step"]
    anchor_similarity: Annotated[Float, Field(gt=0, lt=1)] | None

    def advantage(self, batch: "Batch") -> "mx.array":
        joint = maths.anchors.joint_advantage(
            self._episode_advantage(batch), self._step_advantage(batch), _owners(batch), self.omega
        )
        return batch.spread_turns(joint)

    def metrics(self, batch: "Batch") -> dict[str, float]:
        sizes = maths.anchors.group_sizes(self._anchor_groups(batch))
        return {
            "advantage/episode_std": maths.baselines.sample_std(self._episode_advantage(batch)),
            "advantage/step_std": maths.baselines.sample_std(self._step_advantage(batch)),
            "anchor/group_size_mean": sum(sizes) / len(sizes),
            "anchor/singleton_fraction": sum(size == 1 for size in sizes) / sum(sizes),
        }

    def _episode_advantage(self, batch: "Batch") -> list[float]:
        return maths.anchors.episode_advantage(
            self.episode_returns(batch),
            batch.group_index,
            [len(trajectory.turns) for trajectory in batch.trajectories],
            self.advantage_scaling,
            self.statistics,
            self.std_eps,
            self.std_ddof,
        )

    def _step_advantage(self, batch: "Batch") -> list[float]:
        returns = [
            value
            for rewards in self.turn_rewards(batch)
            for value in maths.returns.discounted_returns(rewards, self.gamma)
        ]
        return maths.anchors.step_advantage(
            returns, self._anchor_groups(batch), self.advantage_scaling, self.std_eps, self.std_ddof
        )

    def _anchor_groups(self, batch: "Batch") -> list[int]:
        tasks = [batch.group_index[row] for row in _owners(batch)]
        states = [turn.state for trajectory in batch.trajectories for turn in trajectory.turns]
        if self.anchor_similarity is None:
            return maths.anchors.step_groups(tasks, states)
        return maths.anchors.similar_step_groups(tasks, states, self.anchor_similarity)


def _owners(batch: "Batch") -> list[int]:
    return [row for row, trajectory in enumerate(batch.trajectories) for _ in trajectory.turns]
