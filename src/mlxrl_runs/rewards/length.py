"""What an answer's length costs."""

from typing import TYPE_CHECKING, Literal

from mlxrl_runs.core import registry
from mlxrl_runs.core.reward_part import RewardPart

if TYPE_CHECKING:
    from mlxrl_runs.core.protocols import Completion


@registry.reward("length")
class Length(RewardPart):
    """Minus the share of `rollout.max_completion_tokens` that was used: 0 for nothing, -1 for all of it.

    Attributes: of: every answer, or right ones only, so that being wrong quickly pays nothing.
    """

    name: Literal["length"]
    of: Literal["every", "right"]

    def value(self, completion: "Completion", is_right: bool) -> float:
        if self.of == "right" and not is_right:
            return 0.0
        return -completion.token_count / completion.max_tokens
