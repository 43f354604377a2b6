"""Whether the text fits a pattern, and what the pattern caught is the answer."""

import re
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from pydantic import field_validator

from mlxrl_runs.core import registry
from mlxrl_runs.core.reward_part import RewardPart

if TYPE_CHECKING:
    from mlxrl_runs.core.protocols import Completion


@registry.reward("regex")
class Regex(RewardPart):
    """1 when the pattern fits, else 0.

    Attributes:
        pattern: Python's syntax. A group named `answer` must then hold the right answer, space around it aside.
        whole: fit the whole text, or any part of it.
    """

    name: Literal["regex"]
    pattern: str
    whole: bool

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"is no regular expression: {error}") from error
        return pattern

    @property
    def judges(self) -> bool:
        return self.needs_answer

    @property
    def needs_answer(self) -> bool:
        return "answer" in self._compiled.groupindex

    def value(self, completion: "Completion", is_right: bool) -> float:
        match = (self._compiled.fullmatch if self.whole else self._compiled.search)(completion.text)
        if match is None or not self.needs_answer:
            return float(match is not None)
        return float((match["answer"] or "").strip() == (completion.answer or "").strip())

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern)
