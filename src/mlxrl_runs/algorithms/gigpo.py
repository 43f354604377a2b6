"""GiGPO (Feng et al. 2025, arXiv:2505.10978): GRPO over episodes, and over the steps taken in the same state."""

from typing import TYPE_CHECKING, Literal

from mlxrl_runs import maths
from mlxrl_runs.core import registry
from mlxrl_runs.core.clipped import ClippedObjective
from mlxrl_runs.core.settings import NonNegative, Positive, UnitInterval

if TYPE_CHECKING:
    from mlxrl_runs.core.batch import Batch


@registry.algorithm("gigpo")
class Gigpo(ClippedObjective):
    """Group-in-group policy optimization: A(turn) = A_episode + omega A_step.

    Anchors are the states in which actions were taken, compared within one task only; a state met once pays nothing.

    Attributes:
        omega: weight of the step part; 0 is episode-level GRPO, bit for bit.
        gamma: discount of the returns to go that steps are compared by. With 1 and equal returns the step part is 0.
        normalization: divide centred returns by their std, or centre only; the same at both levels.
        statistics: the episode level counts a trajectory once, or once for each of its steps (verl-agent).
        std_eps: added to the std, in the reward's unit.
    """

    name: Literal["gigpo"]
    omega: NonNegative
    gamma: UnitInterval
    normalization: Literal["std", "mean"]
    statistics: Literal["trajectory", "step"]
    std_eps: Positive

    def credit(self, batch: "Batch") -> "Batch":
        joint = maths.anchors.joint_advantage(
            self._episode_advantage(batch), self._step_advantage(batch), _owners(batch), self.omega
        )
        return batch.with_(advantage=batch.spread_turns(joint), weights=self.weights(batch))

    def metrics(self, batch: "Batch") -> dict[str, float]:
        sizes = maths.anchors.group_sizes(_anchor_groups(batch))
        return {
            "advantage/episode_std": maths.baselines.sample_std(self._episode_advantage(batch)),
            "advantage/step_std": maths.baselines.sample_std(self._step_advantage(batch)),
            "anchor/group_size_mean": sum(sizes) / len(sizes),
            "anchor/singleton_fraction": sum(size == 1 for size in sizes) / sum(sizes),
        }

    def _episode_advantage(self, batch: "Batch") -> list[float]:
        return maths.anchors.episode_advantage(
            [trajectory.total_reward for trajectory in batch.trajectories],
            batch.group_index,
            [len(trajectory.turns) for trajectory in batch.trajectories],
            self.normalization,
            self.statistics,
            self.std_eps,
        )

    def _step_advantage(self, batch: "Batch") -> list[float]:
        returns = [
            value
            for trajectory in batch.trajectories
            for value in maths.returns.discounted_returns(trajectory.rewards, self.gamma)
        ]
        return maths.anchors.step_advantage(returns, _anchor_groups(batch), self.normalization, self.std_eps)


def _owners(batch: "Batch") -> list[int]:
    return [row for row, trajectory in enumerate(batch.trajectories) for _ in trajectory.turns]


def _anchor_groups(batch: "Batch") -> list[int]:
    states = [turn.state for trajectory in batch.trajectories for turn in trajectory.turns]
    return maths.anchors.step_groups([batch.group_index[row] for row in _owners(batch)], states)
