"""What it costs to be cut off."""

from typing import TYPE_CHECKING, Literal

from mlxrl_runs.core import registry
from mlxrl_runs.core.reward_part import RewardPart

if TYPE_CHECKING:
    from mlxrl_runs.core.protocols import Completion


@registry.reward("truncated")
class Truncated(RewardPart):
    """-1 for an answer that ran into `rollout.max_completion_tokens`, else 0."""

    name: Literal["truncated"]

    def value(self, completion: "Completion", is_right: bool) -> float:
        return -float(completion.is_truncated)
