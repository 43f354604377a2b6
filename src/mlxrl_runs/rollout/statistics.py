"""What playing cost."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter


@dataclass
class RolloutStatistics:
    """What playing cost; `margins` holds the perturbed-score margin of every sampled token when asked for.

    Attributes:
        env_seconds: spent in environments, or waiting for those in threads.
        highest_kept_bytes: of keys, values and states, at most.
    """

    sampled_tokens: int = 0
    env_seconds: float = 0.0
    total_seconds: float = 0.0
    highest_kept_bytes: int = 0
    margins: dict[tuple[object, ...], list[float]] | None = None

    def note(self, key: tuple[object, ...], margin: float | None) -> None:
        """Count one sampled token of the episode with this key."""
        self.sampled_tokens += 1
        if margin is not None and self.margins is not None:
            self.margins.setdefault(key, []).append(margin)

    @contextmanager
    def env_time(self) -> Iterator[None]:
        """Around what is the environments'."""
        started = perf_counter()
        try:
            yield
        finally:
            self.env_seconds += perf_counter() - started
