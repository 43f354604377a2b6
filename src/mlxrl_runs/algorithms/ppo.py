"""PPO (Schulman et al. 2017, arXiv:1707.06347): what an action is worth is learned too, by a value head."""

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from mlxrl_runs import maths
from mlxrl_runs.core import registry
from mlxrl_runs.core.clipped import ClippedObjective
from mlxrl_runs.core.protocols import Needs
from mlxrl_runs.core.settings import AdvantageScaling, NonNegative, Positive, UnitInterval
from mlxrl_runs.core.trajectory import EndReason

if TYPE_CHECKING:
    import mlx.core as mx

    from mlxrl_runs.core.batch import Batch
    from mlxrl_runs.core.outputs import TokenOutputs

OPEN = {
    "tokens": (EndReason.MAX_TOKENS,),
    "limits": (EndReason.MAX_TOKENS, EndReason.MAX_TURNS),
    "none": (),
}  # ends that are no end of the task, by `bootstrap`


@registry.algorithm("ppo")
class Ppo(ClippedObjective):
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438) over the action tokens of an episode.

    Attributes:
        gamma, gae_lambda: discount and decay per action token.
        bootstrap: episodes that are worth their last value beyond their end: those cut by the token limit, those cut
            by any limit, or none. A turn limit is mostly a part of the task: to count on what would come after it pays
            for using it up.
        value_clip: how far a value may move from where it was before the batch, in the reward's unit; None: any.
        value_gradient: share of the value loss's gradient that reaches the model; 0 trains the head alone.
        value_learning_rate: of the head.
    """

    minimum_group_size: ClassVar[int] = 1
    scalings: ClassVar[tuple[AdvantageScaling, ...]] = ("none", "batch")

    name: Literal["ppo"]
    gamma: UnitInterval
    gae_lambda: UnitInterval
    bootstrap: Literal["tokens", "limits", "none"]
    value_clip: Positive | None
    value_gradient: UnitInterval
    value_learning_rate: NonNegative

    @property
    def needs(self) -> Needs:
        return replace(super().needs, value_gradient=self.value_gradient)

    def credit(self, batch: "Batch") -> "Batch":
        return super().credit(batch.with_(returns=self._returns(batch)))

    def advantage(self, batch: "Batch") -> "mx.array":
        assert batch.returns is not None and batch.values is not None, "credit sets the one and asks for the other"
        advantage = batch.returns - batch.values
        if self.advantage_scaling == "none":
            return advantage
        return maths.reduction.whiten(advantage, batch.action_mask, self.std_eps**2, self.std_ddof)

    def _returns(self, batch: "Batch") -> "mx.array":
        """(B, T): what the values are trained towards; they and the estimated advantages add up to it."""
        if batch.values is None or batch.final_values is None:
            raise ValueError("the batch has no values: the value head comes before credit")
        is_open = maths.scalars.switches([row.end in OPEN[self.bootstrap] for row in batch.trajectories])
        beyond = maths.reduction.masked(batch.final_values, is_open)
        _, returns = maths.values.gae(
            self.token_rewards(batch), batch.values, batch.action_mask, self.gamma, self.gae_lambda, beyond
        )
        return returns

    def loss(self, outputs: "TokenOutputs", batch: "Batch") -> "dict[str, mx.array]":
        terms = super().loss(outputs, batch)
        if outputs.values is None or batch.values is None or batch.returns is None or batch.weights is None:
            raise ValueError("the value loss needs the values of now and before, and credit comes before the loss")
        per_token = maths.values.clipped_value_loss(outputs.values, batch.values, batch.returns, self.value_clip)
        return terms | {"value": maths.reduction.weighted_sum(per_token, batch.weights)}

    def metrics(self, batch: "Batch") -> dict[str, float]:
        assert batch.values is not None and batch.returns is not None
        mean = lambda numbers: maths.objective.token_mean_of(numbers, batch.action_mask)
        return {
            "value/mean": mean(batch.values),
            "value/return_mean": mean(batch.returns),
            "value/explained_variance": maths.values.explained_variance(batch.values, batch.returns, batch.action_mask),
        }
