"""Steers a KL coefficient so that the measured KL stays at a target."""

from dataclasses import dataclass

from mlxrl_runs import maths
from mlxrl_runs.core.protocols import AdaptsKl


@dataclass
class KlControl:
    """The coefficient of the step that comes, and what moves it.

    Attributes: target: nats per token of kl/reference. horizon: episodes, see `maths.divergence.adapted_coefficient`.
    """

    coefficient: float
    target: float
    horizon: float

    @classmethod
    def of(cls, algorithm: object) -> "KlControl | None":
        """None where the algorithm's coefficient stays what it is."""
        if not isinstance(algorithm, AdaptsKl) or algorithm.kl_target is None:
            return None
        return cls(algorithm.kl_coef, algorithm.kl_target, algorithm.kl_horizon)

    def after_step(self, observed: float, episodes: int) -> None:
        """Args: observed: kl/reference of the step, nats per token."""
        self.coefficient = maths.divergence.adapted_coefficient(
            self.coefficient, observed, self.target, episodes, self.horizon
        )
