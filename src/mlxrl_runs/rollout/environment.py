"""Calls into environments, which may be anyone's code: their failures get a name, their answers are checked."""

import math
from collections.abc import Mapping
from numbers import Real

from mlxrl_runs.core.protocols import Environment, StepResult
from mlxrl_runs.errors import EnvironmentFailure


def reset(environment: Environment, task: str) -> str:
    """The first observation. Raises: EnvironmentFailure when it is no text."""
    try:
        observation = environment.reset()
    except Exception as error:
        raise EnvironmentFailure(f"task {task!r}: reset() raised {_named(error)}") from error
    return _text(observation, f"task {task!r}: reset() must return the first observation as text")


def ask_state(environment: Environment, observation: str, where: str) -> str:
    """The anchor key of the state the next action is taken in."""
    try:
        return str(environment.state_id(observation))
    except Exception as error:
        raise EnvironmentFailure(f"{where}: state_id() raised {_named(error)}") from error


def step(environment: Environment, action: str, where: str) -> StepResult:
    """Play one action and check the answer.

    Raises: EnvironmentFailure when the environment raises, or answers with anything but a finite number as reward.
    """
    try:
        result = environment.step(action)
    except Exception as error:
        raise EnvironmentFailure(f"{where}: step() raised {_named(error)}") from error
    if not isinstance(result, StepResult):
        raise EnvironmentFailure(f"{where}: step() must return a StepResult, got {type(result).__name__}")
    return StepResult(
        observation=_text(result.observation, f"{where}: the observation must be text"),
        reward=_number(result.reward, f"{where}: the reward"),
        done=bool(result.done),
        info=_numbers(result.info, f"{where}: info"),
        reward_parts=_numbers(result.reward_parts, f"{where}: reward_parts"),
    )


def _text(value: object, rule: str) -> str:
    if not isinstance(value, str):
        raise EnvironmentFailure(f"{rule}, got {value!r}")
    return value


def _number(value: object, what: str) -> float:
    """True and False count as 1 and 0; a list of one number is a wrong count, not a number."""
    if not isinstance(value, Real):
        raise EnvironmentFailure(f"{what} must be one number, got {value!r}")
    if not math.isfinite(float(value)):
        raise EnvironmentFailure(f"{what} must be finite, got {value!r}")
    return float(value)


def _numbers(values: object, what: str) -> dict[str, float]:
    if not isinstance(values, Mapping):
        raise EnvironmentFailure(f"{what} must map names to numbers, got {values!r}")
    return {str(name): _number(value, f"{what}[{name!r}]") for name, value in values.items()}


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
