"""Calls into environments, which may be anyone's code: their failures get a name, their answers are checked."""

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import cast

from mlxrl_runs.core.protocols import Conversation, Environment, HasAnswerPrefix, StepResult
from mlxrl_runs.core.reward_part import WHOLE
from mlxrl_runs.errors import EnvironmentFailure, MlxrlError

FLOAT32_LARGEST = 3.4028234e38  # rewards become float32 advantages


def opened(make: Callable[[], Environment], task: str) -> tuple[Environment, int]:
    """A new environment and its turn limit.

    Raises: EnvironmentFailure when the factory raises, or what it made is no environment.
    """
    try:
        environment = make()
    except MlxrlError:
        raise
    except Exception as error:
        raise EnvironmentFailure(f"task {task!r}: making its environment raised {named(error)}") from error
    missing = [name for name in ("reset", "step", "state_id") if not callable(getattr(environment, name, None))]
    if missing:
        made = type(environment).__name__
        raise EnvironmentFailure(f"task {task!r}: the factory made a {made}, which has no {', '.join(missing)}")
    limit = getattr(environment, "max_turns", None)
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise EnvironmentFailure(f"task {task!r}: max_turns must be a whole number >= 1, got {limit!r}")
    return environment, limit


def reset(environment: Environment, task: str) -> str | Conversation:
    """What the model reads first. Raises: EnvironmentFailure when it is neither text nor a conversation."""
    try:
        first = environment.reset()
    except Exception as error:
        raise EnvironmentFailure(f"task {task!r}: reset() raised {named(error)}") from error
    rule = f"task {task!r}: reset() must return the first observation as text"
    return _text(first, rule) if not isinstance(first, list | tuple) else _conversation(first, rule)


def _conversation(messages: Sequence[object], rule: str) -> Conversation:
    rule = f"{rule}, or a list of messages with a role and a content, the last of them not the assistant's"
    for message in messages:
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise EnvironmentFailure(f"{rule}, got {message!r}")
        _text(message["role"], rule)
        _text(message["content"], rule)
    checked = cast(Conversation, messages)
    if not checked or checked[-1]["role"] == "assistant":
        raise EnvironmentFailure(f"{rule}, got {messages!r}")
    return checked


def last_text(first: str | Conversation) -> str:
    """What stands right before the model's first answer."""
    return first if isinstance(first, str) else first[-1]["content"]


def ask_state(environment: Environment, observation: str, where: str) -> str:
    """The anchor key of the state the next action is taken in."""
    try:
        return str(environment.state_id(observation))
    except Exception as error:
        raise EnvironmentFailure(f"{where}: state_id() raised {named(error)}") from error


def answer_prefix(environment: Environment) -> str:
    """What the next answer begins with; empty where the environment has no such thing."""
    prefix = environment.answer_prefix if isinstance(environment, HasAnswerPrefix) else ""
    return _text(prefix, "answer_prefix must be text")


def step(environment: Environment, action: str, where: str) -> StepResult:
    """Play one action and check the answer.

    Raises: EnvironmentFailure when the environment raises, or answers with anything but a finite number as reward.
    """
    try:
        result = environment.step(action)
    except Exception as error:
        raise EnvironmentFailure(f"{where}: step() raised {named(error)}") from error
    if not isinstance(result, StepResult):
        raise EnvironmentFailure(f"{where}: step() must return a StepResult, got {type(result).__name__}")
    return StepResult(
        observation=_text(result.observation, f"{where}: the observation must be text"),
        reward=finite_number(result.reward, f"{where}: the reward"),
        done=bool(result.done),
        info=_numbers(result.info, f"{where}: info"),
        reward_parts=_parts(result.reward_parts, f"{where}: reward_parts"),
    )


def _text(value: object, rule: str) -> str:
    if not isinstance(value, str):
        raise EnvironmentFailure(f"{rule}, got {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise EnvironmentFailure(f"{rule}, got half a surrogate pair in {value!r}") from error
    return value


def finite_number(value: object, what: str) -> float:
    """True and False count as 1 and 0; a list of one number is a wrong count, not a number."""
    if not isinstance(value, Real):
        raise EnvironmentFailure(f"{what} must be one number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:  # a whole number may have any length, and its digits would be all of the message
        raise EnvironmentFailure(f"{what} must be finite, got a number beyond {FLOAT32_LARGEST:.1e}") from None
    if not abs(number) <= FLOAT32_LARGEST:  # also when it is not a number at all
        raise EnvironmentFailure(f"{what} must be finite, got {value!r}")
    return number


def _numbers(values: object, what: str) -> dict[str, float]:
    if not isinstance(values, Mapping):
        raise EnvironmentFailure(f"{what} must map names to numbers, got {values!r}")
    return {str(name): finite_number(value, f"{what}[{name!r}]") for name, value in values.items()}


def _parts(values: object, what: str) -> dict[str, float]:
    parts = _numbers(values, what)
    taken = [name for name in parts if name in WHOLE]
    if taken:
        raise EnvironmentFailure(
            f"{what}[{taken[0]!r}]: reward/{taken[0]} is a number of the whole reward; give this part another name"
        )
    return parts


def named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
