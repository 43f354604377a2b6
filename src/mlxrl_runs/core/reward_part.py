"""Base of the parts a reward is made of: what each yaml in conf/reward describes. Imports no MLX."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from mlxrl_runs.core.settings import Float, Settings

if TYPE_CHECKING:
    from mlxrl_runs.core.protocols import Completion

WHOLE = ("mean", "std", "success")  # reward/<name> of the whole reward, which no part may be called


class RewardPart(Settings, ABC):
    """One named summand of the reward: weight x value(completion).

    Attributes: weight: 0 measures the part without paying for it.
    """

    weight: Float

    @property
    def judges(self) -> bool:
        """Its value says whether the answer was right (1) or not."""
        return False

    @property
    def needs_answer(self) -> bool:
        """It compares with the environment's `answer`."""
        return False

    @property
    def keeps_parts(self) -> bool:
        """The parts that the environment names stay in the log beside it."""
        return False

    def finds_right(self, value: float, completion: "Completion") -> bool:
        """What a judging part says about an answer it gave `value` for."""
        return value >= 1

    @abstractmethod
    def value(self, completion: "Completion", is_right: bool) -> float:
        """Args: is_right: what the judging parts found, for those that depend on it."""


class ComparingPart(RewardPart):
    """A part whose value is 1 where the answer is the right one."""

    @property
    def judges(self) -> bool:
        return True

    @property
    def needs_answer(self) -> bool:
        return True
