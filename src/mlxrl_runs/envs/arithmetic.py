"""Single-turn arithmetic: think, then write the integer between <solution> tags."""

import random
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from mlxrl_runs.core import registry
from mlxrl_runs.core.protocols import StepResult
from mlxrl_runs.core.settings import Int, NonNegative, Recommended, Settings, UnitInterval
from mlxrl_runs.core.task_space import TaskSpace

NUMBER = r"(-?[0-9]{1,12})"
ANSWERS = {
    "tags": re.compile(rf"\s*<think>[^<]*</think>\s*<solution>{NUMBER}</solution>\s*"),
    "number": re.compile(rf"\s*{NUMBER}\s*"),
}
OPERATOR = re.compile(r"(?<=[\d)])([-+*])")  # not the sign of a number
OPERATORS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


@registry.environment("arithmetic")
class Arithmetic(Settings):
    """Integer problems; a fixed set of them is held out.

    Attributes:
        min_operand, max_operand: range of every operand, both ends included.
        operators: drawn for each place between operands; multiplication binds first.
        levels: 1 is `a+b`, 2 is `a+b-c`, 3 is `a-(b+c)`; a task's level is drawn from these.
        answers: the form that is paid for: <think>..</think><solution>INTEGER</solution>, or the bare integer.
        format_reward: paid for exactly one well-formed answer; exact_reward: for the right integer in it.
        held_out_fraction: share of all problems that is never trained on (at most 2000).
        question: what the model reads, with {problem} in it.
        answer_prefix: what its answer begins with, {problem} in it too; it goes on from there. Empty: nothing.
        spaces: write problems as `a + b`, not `a+b`.
        explain: put the expected format before the problem; for models that do not know it yet.
    """

    max_turns: ClassVar[int] = 1
    name: Literal["arithmetic"]
    min_operand: Int
    max_operand: Int
    operators: Annotated[tuple[Literal["+", "-", "*"], ...], Field(min_length=1)]
    levels: Annotated[tuple[Literal[1, 2, 3], ...], Field(min_length=1)]
    answers: Literal["tags", "number"]
    format_reward: NonNegative
    exact_reward: NonNegative
    held_out_fraction: UnitInterval
    question: Annotated[str, Field(pattern=r"\{problem\}")]
    answer_prefix: str
    spaces: bool
    explain: bool
    recommended: Recommended

    @model_validator(mode="after")
    def _non_empty(self) -> "Arithmetic":
        if self.max_operand < self.min_operand:
            raise ValueError(f"max_operand={self.max_operand} is below min_operand={self.min_operand}")
        self._space.check()
        return self

    def sample_task(self, generator: random.Random) -> str:
        return self._space.sample(generator)

    def held_out_tasks(self) -> Sequence[str]:
        return self._space.held_out

    def make(self, task: str, seed: int, group_index: int) -> "Problem":
        return Problem(self, task)

    def _level_sizes(self) -> list[int]:
        operands, operators = self.max_operand - self.min_operand + 1, len(self.operators)
        return [operands**2 * operators if level == 1 else operands**3 * operators**2 for level in self.levels]

    @cached_property
    def _space(self) -> TaskSpace:
        name = f"arithmetic {self.min_operand} {self.operators} {self.levels}"
        return TaskSpace(name, sum(self._level_sizes()), self._task, self.held_out_fraction)

    def _task(self, number: int) -> str:
        """Problem number `number` of all, counted level by level."""
        for level, size in zip(self.levels, self._level_sizes(), strict=True):
            if number < size:
                return self._problem(level, number)
            number -= size
        raise IndexError(number)

    def _problem(self, level: int, number: int) -> str:
        operands, operators = [], []
        for place in range(2 if level == 1 else 3):
            number, operand = divmod(number, self.max_operand - self.min_operand + 1)
            operands.append(_bracketed(self.min_operand + operand))
            if place > 0:
                number, operator = divmod(number, len(self.operators))
                operators.append(self.operators[operator])
        if level == 3:
            return f"{operands[0]}{operators[0]}({operands[1]}{operators[1]}{operands[2]})"
        return operands[0] + "".join(
            operator + operand for operator, operand in zip(operators, operands[1:], strict=True)
        )


def _bracketed(number: int) -> str:
    return f"({number})" if number < 0 else str(number)


class Problem:
    """One problem, one answer."""

    max_turns = Arithmetic.max_turns

    def __init__(self, settings: Arithmetic, problem: str):
        self._settings = settings
        self._problem = problem
        self._answer = solve(problem)

    def reset(self) -> str:
        form = self._form("...", "INTEGER")
        return (f"Compute. Answer as {form}.\n" if self._settings.explain else "") + self._written(
            self._settings.question
        )

    @property
    def answer(self) -> str:
        return str(self._answer)

    @property
    def answer_prefix(self) -> str:
        return self._written(self._settings.answer_prefix)

    def _written(self, template: str) -> str:
        problem = OPERATOR.sub(r" \1 ", self._problem) if self._settings.spaces else self._problem
        return template.replace("{problem}", problem)

    def step(self, action: str) -> StepResult:
        match = ANSWERS[self._settings.answers].fullmatch(action)
        exact = match is not None and int(match[1]) == self._answer
        parts = {
            "format": self._settings.format_reward if match else 0.0,
            "exact": self._settings.exact_reward if exact else 0.0,
        }
        return StepResult("", sum(parts.values()), True, {"success": float(exact)}, parts)

    def state_id(self, observation: str) -> str:
        return self._problem

    def oracle_action(self) -> str:
        return self._form("", self._answer)

    def random_action(self, generator: random.Random) -> str:
        bound = 2 * max(abs(self._settings.min_operand), abs(self._settings.max_operand))
        return self._form("", generator.randint(-bound, bound))

    def _form(self, thought: str, number: object) -> str:
        if self._settings.answers == "number":
            return (
                f" {number}" if self._settings.answer_prefix else str(number)
            )  # the space belongs to the number's token
        return f"<think>{thought}</think><solution>{number}</solution>"


def solve(problem: str) -> int:
    """The value of `a+b`, `a*b-c`, `a-(b+c)`; operands may be negative in brackets. Reads a grammar, runs no text."""
    tokens = re.findall(r"\d+|[-+*()]", problem)
    value, rest = _sum(tokens)
    if rest:
        raise ValueError(f"not a problem: {problem!r}")
    return value


def _sum(tokens: list[str]) -> tuple[int, list[str]]:
    value, rest = _product(tokens)
    while rest and rest[0] in "+-":
        term, after = _product(rest[1:])
        value, rest = OPERATORS[rest[0]](value, term), after
    return value, rest


def _product(tokens: list[str]) -> tuple[int, list[str]]:
    value, rest = _operand(tokens)
    while rest and rest[0] == "*":
        factor, rest = _operand(rest[1:])
        value *= factor
    return value, rest


def _operand(tokens: list[str]) -> tuple[int, list[str]]:
    if tokens[0] == "(":
        value, rest = _sum(tokens[1:])
        return value, rest[1:]
    if tokens[0] == "-":
        value, rest = _operand(tokens[1:])
        return -value, rest
    return int(tokens[0]), tokens[1:]
