"""Two engines that must draw the same tokens from the same keys, compared token by token.

They may part only where the best two perturbed scores are nearer to each other than rounding moves them: a tie. After a
parting the two episodes go their own ways, so an episode is compared up to there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mlxrl_runs.core.trajectory import Trajectory
from mlxrl_runs.rollout.engine import RolloutEngine
from mlxrl_runs.rollout.episodes import EpisodeRequest
from mlxrl_runs.rollout.sampling import Sampling


@dataclass(frozen=True)
class Agreement:
    """How two ways of sampling compare.

    Attributes:
        tokens: compared, those at which episodes part included.
        differences: |log-probability - log-probability| of each token that both drew, nats.
        margins: for each parting, by how much the chosen token's score had beaten the second best, nats. The two
            engines' scores differ by as much at least, or the same token would have won.
    """

    tokens: int = 0
    differences: tuple[float, ...] = ()
    margins: tuple[float, ...] = ()

    def __add__(self, other: "Agreement") -> "Agreement":
        return Agreement(self.tokens + other.tokens, self.differences + other.differences, self.margins + other.margins)

    @property
    def largest(self) -> float:
        """The largest difference there is evidence of, nats; no number where one of them is none."""
        return max((*self.differences, *self.margins), default=0.0, key=lambda nats: (math.isnan(nats), nats))

    @property
    def mean(self) -> float:
        """Of the tokens that both drew, nats."""
        return sum(self.differences) / len(self.differences) if self.differences else 0.0

    def ties(self, tie: float) -> int:
        """Partings that a difference of `tie` nats explains."""
        return sum(margin < tie for margin in self.margins)


def compare(one: Trajectory, other: Trajectory, margins: Sequence[float]) -> Agreement:
    """One episode, played twice. Args: margins: one for each token of `other`."""
    drawn = [
        [pair for turn in row.turns for pair in zip(turn.action, turn.sampler_logp, strict=True)]
        for row in (one, other)
    ]
    differences: list[float] = []
    for number, ((token, logp), (other_token, other_logp)) in enumerate(zip(*drawn, strict=False)):
        if token != other_token:
            return Agreement(number + 1, tuple(differences), (margins[number],))
        differences.append(abs(logp - other_logp))
    return Agreement(len(differences), tuple(differences))


def play_both(one: RolloutEngine, other: RolloutEngine, requests: Sequence[EpisodeRequest]) -> Agreement:
    """How the two engines compare when each of them plays every request."""
    first, _ = one.play(requests, Sampling())
    second, statistics = other.play(requests, Sampling(), with_margins=True)
    assert statistics.margins is not None
    pairs = zip(requests, first, second, strict=True)
    return sum((compare(a, b, statistics.margins[request.key]) for request, a, b in pairs), Agreement())
