"""An algorithm of your own: a class, registered, and the yaml that lists its keys (examples/conf/algorithm/raft.yaml).

python examples/algorithm.py
"""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mlxrl_runs import compose, register_algorithm, train
from mlxrl_runs.core.clipped import ClippedObjective

if TYPE_CHECKING:
    import mlx.core as mx

    from mlxrl_runs.core.batch import Batch


@register_algorithm("raft")
class Raft(ClippedObjective):
    """Rejection sampling (Dong et al. 2023, arXiv:2304.06767): imitate the best episodes of each group.

    The loss, its KL term and its reductions are those of every clipped algorithm; what is its own is who gets credit.
    """

    name: Literal["raft"]

    def advantage(self, batch: "Batch") -> "mx.array":
        """1 for the best of a group, 0 for the others; a group without a spread teaches nothing."""
        return batch.spread_rows([float(keep) for keep in self._kept(batch)])

    def trained(self, batch: "Batch") -> "mx.array":
        """Only the best are imitated: the others are no part of the mean either."""
        return super().trained(batch) * self.advantage(batch)

    def metrics(self, batch: "Batch") -> dict[str, float]:
        kept = self._kept(batch)
        return {"raft/kept_fraction": sum(kept) / len(kept)}

    def _kept(self, batch: "Batch") -> list[bool]:
        groups: dict[int, list[float]] = {}
        for group, trajectory in zip(batch.group_index, batch.trajectories, strict=True):
            groups.setdefault(group, []).append(trajectory.total_reward)
        return [
            min(groups[group]) < max(groups[group]) == trajectory.total_reward
            for group, trajectory in zip(batch.group_index, batch.trajectories, strict=True)
        ]


if __name__ == "__main__":
    overrides = ["algorithm=raft", "steps=15", "trainer.evaluation_episodes=128", "tracking=jsonl"]
    run = train(compose(overrides, config_dirs=[Path(__file__).parent / "conf"]))
    before, after = (run.evaluation[when]["sampled"]["reward"] for when in ("before", "after"))
    print(f"reward on held-out tasks: {before:.2f} before, {after:.2f} after")
