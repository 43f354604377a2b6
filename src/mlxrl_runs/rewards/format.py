"""Whether the text has exactly the tags that were asked for."""

import re
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from mlxrl_runs.core import registry
from mlxrl_runs.core.reward_part import RewardPart

if TYPE_CHECKING:
    from mlxrl_runs.core.protocols import Completion

Tag = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")]


@registry.reward("format")
class Format(RewardPart):
    """1 when the text is these tags, each once, in this order, with nothing around them, else 0."""

    name: Literal["format"]
    tags: Annotated[tuple[Tag, ...], Field(min_length=1)]

    def value(self, completion: "Completion", is_right: bool) -> float:
        return float(self._pattern.fullmatch(completion.text) is not None)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(r"\s*" + r"\s*".join(rf"<{tag}>[^<]*</{tag}>" for tag in self.tags) + r"\s*")
