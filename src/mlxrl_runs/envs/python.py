"""A user's own environment: a file and the name of a factory in it."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from mlxrl_runs.core import registry
from mlxrl_runs.core.protocols import Environment
from mlxrl_runs.core.settings import PositiveInt, Recommended, Settings
from mlxrl_runs.core.user_code import check_file, load_callable, settled_file


@registry.environment("python")
class PythonFile(Settings):
    """Environments made by `factory(task, seed, group_index)` of a Python file.

    Tasks are the numbers 0 .. tasks - 1 as text; the last `held_out` of them are only evaluated. The file is run by
    this process with the user's rights: name only files you would run yourself.

    Attributes:
        file: path of the Python file.
        factory: name of the callable in it.
    """

    name: Literal["python"]
    file: Annotated[str, Field(min_length=1), AfterValidator(settled_file)]
    factory: Annotated[str, Field(min_length=1)]
    tasks: PositiveInt
    held_out: PositiveInt
    recommended: Recommended
    _make: Callable[[str, int, int], Environment] | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _exists(self) -> "PythonFile":
        check_file(self.file, "file")
        if self.held_out >= self.tasks:
            raise ValueError(f"held_out={self.held_out} leaves no task to train on; tasks={self.tasks}")
        return self

    @classmethod
    def of(
        cls,
        make: Callable[[str, int, int], Environment],
        file: str,
        factory: str,
        tasks: int,
        held_out: int,
        recommended: Mapping[str, Any],
    ) -> "PythonFile":
        """A factory that is at hand already; `file` and `factory` say where it came from."""
        family = cls.model_construct(
            name="python",
            file=file,
            factory=factory,
            tasks=tasks,
            held_out=held_out,
            recommended=Recommended.model_validate(recommended),
        )
        family._make = make
        return family

    def sample_task(self, generator: random.Random) -> str:
        return str(generator.randrange(self.tasks - self.held_out))

    def held_out_tasks(self) -> Sequence[str]:
        return [str(number) for number in range(self.tasks - self.held_out, self.tasks)]

    def make(self, task: str, seed: int, group_index: int) -> Environment:
        if self._make is None:
            self._make = load_callable(self.file, self.factory, file_key="env.file", name_key="env.factory")
        return self._make(task, seed, group_index)
