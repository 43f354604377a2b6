"""What the environment pays, as it pays it."""

from typing import TYPE_CHECKING, Literal

from mlxrl_runs.core import registry
from mlxrl_runs.core.reward_part import RewardPart

if TYPE_CHECKING:
    from mlxrl_runs.core.protocols import Completion


@registry.reward("environment")
class EnvironmentReward(RewardPart):
    """The environment's own reward; its own parts stay named in the logs, and its `success` is what counts."""

    name: Literal["environment"]

    @property
    def judges(self) -> bool:
        return True

    @property
    def keeps_parts(self) -> bool:
        return True

    def finds_right(self, value: float, completion: "Completion") -> bool:
        return completion.paid.info.get("success", 0.0) > 0

    def value(self, completion: "Completion", is_right: bool) -> float:
        return completion.paid.reward
