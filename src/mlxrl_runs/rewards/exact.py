"""Whether the text is the answer, and nothing else."""

from typing import TYPE_CHECKING, Literal

from mlxrl_runs.core import registry
from mlxrl_runs.core.reward_part import ComparingPart

if TYPE_CHECKING:
    from mlxrl_runs.core.protocols import Completion


@registry.reward("exact")
class Exact(ComparingPart):
    """1 when the text, without the space around it, is the answer, else 0."""

    name: Literal["exact"]
    ignore_case: bool

    def value(self, completion: "Completion", is_right: bool) -> float:
        given, right = completion.text.strip(), (completion.answer or "").strip()
        return float(given.casefold() == right.casefold() if self.ignore_case else given == right)
