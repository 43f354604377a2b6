"""Whether a number in the text is the right one."""

import re
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from mlxrl_runs.core import registry
from mlxrl_runs.core.reward_part import ComparingPart
from mlxrl_runs.core.settings import NonNegative

if TYPE_CHECKING:
    from mlxrl_runs.core.protocols import Completion

# A minus behind a digit, a letter or a bracket subtracts ("12-5"); elsewhere it is the number's sign. No text is run.
NUMBER = re.compile(r"(?:(?<![\w)\].])[-\u2212])?\d[\d,]*(?:\.\d+)?")


class Which(StrEnum):
    FIRST = "first"
    LAST = "last"


@registry.reward("numeric")
class Numeric(ComparingPart):
    """1 when the first or last number of the text equals the answer, else 0.

    Attributes: tolerance: how far apart they may be.
    """

    name: Literal["numeric"]
    which: Which
    tolerance: NonNegative

    def value(self, completion: "Completion", is_right: bool) -> float:
        found, right = numbers_in(completion.text), numbers_in(completion.answer or "")
        if not found or not right:
            return 0.0
        given = found[0] if self.which is Which.FIRST else found[-1]
        return float(abs(given - right[-1]) <= self.tolerance)


def numbers_in(text: str) -> list[float]:
    """The numbers of a text, left to right; commas between digits group them ("1,204")."""
    return [float(match.replace(",", "").replace("\u2212", "-")) for match in NUMBER.findall(text)]
