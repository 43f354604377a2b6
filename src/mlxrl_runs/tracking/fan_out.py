"""Several trackers as one: trouble in one of them is reported once and ends neither the run nor the others."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from mlxrl_runs.core.protocols import RunRecord, Tracker, TrajectoryRecord
from mlxrl_runs.tracking.jsonl import JsonlTracker


@runtime_checkable
class Identified(Protocol):
    """A tracker whose service gives the run an id."""

    @property
    def run_id(self) -> str | None: ...


class FanOut:
    """Hands every call to each tracker, in order.

    A tracker that raises is named in one warning and left out from then on. JsonlTracker is the exception: it is the
    source of truth, so its error is the run's.

    Args:
        trackers: called in this order.
        warn: how trouble is told; a line of text.
    """

    def __init__(self, trackers: Sequence[Tracker], warn: Callable[[str], None] = warnings.warn):
        self._trackers = list(trackers)
        self._warn = warn

    @property
    def trackers(self) -> tuple[Tracker, ...]:
        """Those that still listen."""
        return tuple(self._trackers)

    @property
    def run_id(self) -> str | None:
        """The id under which an outside service knows this run, None without one."""
        ids = (tracker.run_id for tracker in self._trackers if isinstance(tracker, Identified))
        return next((found for found in ids if found is not None), None)

    def start(self, run: RunRecord) -> None:
        self._each(lambda tracker: tracker.start(run))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each(lambda tracker: tracker.log(step, metrics))

    def log_trajectories(self, step: int, trajectories: Sequence[TrajectoryRecord]) -> None:
        self._each(lambda tracker: tracker.log_trajectories(step, trajectories))

    def log_evaluation(self, when: str, evaluation: Mapping[str, Any]) -> None:
        self._each(lambda tracker: tracker.log_evaluation(when, evaluation))

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        self._each(lambda tracker: tracker.finish(summary, exit_code))

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in tuple(self._trackers):
            try:
                call(tracker)
            except Exception as error:
                if isinstance(tracker, JsonlTracker):
                    raise
                self._trackers.remove(tracker)
                name = type(tracker).__name__
                self._warn(
                    f"{name} stopped ({type(error).__name__}: {error}). The run goes on; metrics.jsonl has it all."
                )
