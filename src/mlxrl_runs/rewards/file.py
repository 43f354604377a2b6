"""A user's own reward: a file and the name of a function in it."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from mlxrl_runs.core import registry
from mlxrl_runs.core.reward_part import RewardPart
from mlxrl_runs.core.user_code import check_file, load_callable, settled_file

if TYPE_CHECKING:
    from mlxrl_runs.core.protocols import Completion, RewardFunction


@registry.reward("file")
class FileReward(RewardPart):
    """What `function(completion)` of a Python file returns: one number.

    Attributes: path: of the file. function: name of the callable in it.
    """

    name: Literal["file"]
    path: Annotated[str, Field(min_length=1), AfterValidator(settled_file)]
    function: Annotated[str, Field(min_length=1)]
    _function: "RewardFunction | None" = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _exists(self) -> "FileReward":
        check_file(self.path, "path")
        return self

    @classmethod
    def of(cls, function: "RewardFunction", path: str, name: str, weight: float = 1.0) -> "FileReward":
        """A function that is at hand already; `path` and `name` say where it came from."""
        part = cls.model_construct(name="file", weight=weight, path=path, function=name)
        part._function = function
        return part

    def value(self, completion: "Completion", is_right: bool) -> Any:
        """Whatever the function returns: the caller checks it, for it is anyone's code."""
        if self._function is None:
            # the caller knows the label that these keys stand under
            self._function = load_callable(self.path, self.function, file_key="path", name_key="function")
        return self._function(completion)
