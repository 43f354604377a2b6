"""The run's reward: named, weighted parts, each of them logged."""

from collections.abc import Mapping
from dataclasses import replace

from mlxrl_runs.core.protocols import Completion, StepResult
from mlxrl_runs.core.reward_part import RewardPart
from mlxrl_runs.errors import ConfigError, EnvironmentFailure, MlxrlError
from mlxrl_runs.rollout.environment import finite_number, named


class WeightedReward:
    """reward = sum of weight x value over the parts; an action is right when all parts that judge it and pay say so.

    Args: parts: by the label they are logged under. A part of weight 0 is measured and changes nothing.
    """

    def __init__(self, parts: Mapping[str, RewardPart]):
        self._parts = parts
        self._judges = {label for label, part in parts.items() if part.judges and part.weight != 0}
        self._needing_answer = [label for label, part in parts.items() if part.needs_answer]

    def score(self, completion: Completion) -> StepResult:
        """Raises: EnvironmentFailure when a part raises or returns anything but one finite number."""
        if self._needing_answer and completion.answer is None:
            raise ConfigError(
                f"reward.{self._needing_answer[0]}: needs the right answer, and the environment gives none (it would "
                "have it as `answer`). Try env=arithmetic, or reward=environment."
            )
        values: dict[str, float] = {}
        for label in sorted(self._parts, key=lambda label: label not in self._judges):  # what others depend on first
            values[label] = self._value(label, completion, self._is_right(values, completion))
        paid = completion.paid
        kept = paid.reward_parts if any(part.keeps_parts for part in self._parts.values()) else {}
        kept = {f"environment_{name}" if name in self._parts else name: value for name, value in kept.items()}
        total = sum(self._parts[label].weight * value for label, value in values.items())
        return replace(
            paid,
            reward=finite_number(total, f"reward: the weighted sum of its parts for task {completion.task!r}"),
            reward_parts={**kept, **{label: values[label] for label in self._parts}},
            info={**paid.info, "success": float(self._is_right(values, completion))},
        )

    def _is_right(self, values: Mapping[str, float], completion: Completion) -> bool:
        """What the judges found so far; where nobody judges, the environment's own word."""
        if not self._judges:
            return completion.paid.info.get("success", 0.0) > 0
        return all(
            self._parts[label].finds_right(values[label], completion) for label in self._judges if label in values
        )

    def _value(self, label: str, completion: Completion, is_right: bool) -> float:
        try:
            value = self._parts[label].value(completion, is_right)
        except ConfigError as error:
            raise ConfigError([f"reward.{label}.{problem}" for problem in error.problems]) from error
        except MlxrlError:
            raise
        except Exception as error:
            raise EnvironmentFailure(
                f"reward.{label}: raised {named(error)} for task {completion.task!r}, answer {completion.text!r}"
            ) from error
        return finite_number(value, f"reward.{label}, for task {completion.task!r},")
