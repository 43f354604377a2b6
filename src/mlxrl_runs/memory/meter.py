"""Time and memory of each phase of a step. The peak is reset at the start of a phase, so each phase has its own."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

PHASES = ("rollout", "score", "update")


class Meter:
    """Collects what the phases of one step took, and the highest peak of each phase over the run."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.peak_bytes: dict[str, int] = {}
        self.total_seconds: dict[str, float] = {}
        self.highest_bytes: dict[str, int] = {}

    def begin_step(self) -> None:
        self.seconds, self.peak_bytes = {}, {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase, which must evaluate what it computes before it ends."""
        mx.clear_cache()  # buffers of the last phase never fit this one; kept, they sit under its peak
        mx.reset_peak_memory()
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            peak = mx.get_peak_memory()
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            self.total_seconds[name] = self.total_seconds.get(name, 0.0) + seconds
            self.peak_bytes[name] = max(peak, self.peak_bytes.get(name, 0))
            self.highest_bytes[name] = max(peak, self.highest_bytes.get(name, 0))

    def metrics(self) -> dict[str, float]:
        """memory/* and time/* of the step so far; a phase that did not run is absent."""
        numbers: dict[str, float] = {}
        for phase in PHASES:
            if phase in self.seconds:
                numbers[f"memory/{phase}_peak_bytes"] = self.peak_bytes[phase]
                numbers[f"time/{phase}_seconds"] = self.seconds[phase]
        numbers["memory/active_bytes"] = mx.get_active_memory()
        numbers["memory/cache_bytes"] = mx.get_cache_memory()
        numbers["memory/peak_bytes"] = max(self.peak_bytes[phase] for phase in PHASES if phase in self.peak_bytes)
        return numbers
