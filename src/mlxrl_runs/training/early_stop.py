"""Ends training once a metric has passed a bound."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class EarlyStop:
    """Counts the measurements in a row of `metric` that are beyond its bound; a step without one changes nothing.

    Attributes:
        above, below: the bound; one of them is None.
        patience: measurements in a row that it takes.
        expected_every: steps after which it must have been measured once.
    """

    metric: str
    above: float | None
    below: float | None
    patience: int
    expected_every: int
    _beyond: int = 0
    _asked_for: bool = False  # it was measured, or was told to be missing

    def after_step(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Why training ends here, in words; None when it goes on."""
        if self.metric not in metrics:
            return None
        self._asked_for = True
        value = metrics[self.metric]
        self._beyond = self._beyond + 1 if self._is_beyond(value) else 0
        if self._beyond < self.patience:
            return None
        side, bound = ("above", self.above) if self.above is not None else ("below", self.below)
        times = f", {self.patience} measurements running" if self.patience > 1 else ""
        return f"{self.metric} {value:.4g} {side} {bound:g} at step {step}{times}"

    def missing(self, step: int, last: bool, metrics: Mapping[str, float]) -> str | None:
        """A warning, once, when a metric that should have been measured by now was not."""
        if self._asked_for or not (last or step >= self.expected_every):
            return None
        self._asked_for = True
        near = difflib.get_close_matches(self.metric, metrics, n=1)
        advice = f"Did you mean {near[0]}?" if near else f"This step has {', '.join(sorted(metrics))}."
        return f"trainer.early_stop.metric={self.metric} was not measured by step {step}, so it ends nothing. {advice}"

    def _is_beyond(self, value: float) -> bool:
        """False for NaN."""
        return (self.above is not None and value > self.above) or (self.below is not None and value < self.below)
