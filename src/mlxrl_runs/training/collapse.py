"""Notices when training does harm: success lost, not merely noisy."""

import math
from collections import deque
from dataclasses import dataclass, field

CERTAIN = 2.0  # standard errors that a loss must be larger than, to be no accident of sampling
ADVICE = (
    "Lower optimizer.learning_rate (a third of it is a good next try) or optimizer.max_grad_norm, or raise "
    "algorithm.kl_coef or tasks_per_step. trainer.collapse_guard.enabled=false trains on regardless."
)


@dataclass
class CollapseGuard:
    """Watches success, held out and while training.

    Attributes:
        window_steps: steps the running success is averaged over.
        lost_share: share of its best running success that may be lost.
    """

    window_steps: int
    lost_share: float
    _window: deque[tuple[float, int]] = field(default_factory=deque)
    _best: float = 0.0
    _base: tuple[float, int] | None = None

    def begin(self, success: float, episodes: int) -> None:
        """Held-out success where training begins."""
        self._base = (success, episodes)

    def after_evaluation(self, success: float, episodes: int) -> str | None:
        """What is wrong, when held-out success is below where training began by more than chance; else None."""
        assert self._base is not None, "begin() comes first"
        base, base_episodes = self._base
        if base - success <= CERTAIN * math.hypot(_error(base, base_episodes), _error(success, episodes)):
            return None
        return f"held-out success fell to {success:.3f}; it was {base:.3f} before training"

    def after_step(self, success: float, episodes: int) -> str | None:
        """What is wrong, when the running success lost too much of its best by more than chance; else None."""
        self._window.append((success, episodes))
        if len(self._window) > self.window_steps:
            self._window.popleft()
        if len(self._window) < self.window_steps:
            return None
        count = sum(episodes for _, episodes in self._window)
        running = sum(success * episodes for success, episodes in self._window) / count
        self._best = max(self._best, running)
        lost = self._best - running
        if lost <= self.lost_share * self._best or lost <= CERTAIN * _error(self._best, count) * math.sqrt(2):
            return None
        return (
            f"success of the sampled episodes fell to {running:.3f} over the last {self.window_steps} steps; "
            f"its best was {self._best:.3f}"
        )


def _error(share: float, count: int) -> float:
    """Standard error of a share seen in `count` episodes; never 0, for none in a few is no proof of none at all."""
    held = min(max(share, 0.5 / count), 1 - 0.5 / count) if count > 1 else 0.5
    return math.sqrt(held * (1 - held) / count)
