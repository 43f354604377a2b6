"""Says when a run goes on without learning, from the numbers of its steps, and what a person can do about it."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Metrics = Mapping[str, float]

WINDOW = 5  # steps in a row that a sign must be seen before it is told, and be gone before it may be told again
LONELY = 0.8  # share of turns in a state nobody else met, above which the step part has next to nothing to compare
# Share of the first step's entropy that counts as collapsed. Good runs of the shipped model end at .13 to .19 of it,
# and others may go lower: low entropy is told only where the reward did not rise.
COLLAPSED = 0.05
CERTAIN = 2.0  # standard errors that a gain must be larger than, to be no accident of sampling
GOOD = 0.9  # success beyond which a reward has no room to rise
CERTAIN_ENTROPY = 1e-3  # nats per token under which a policy is sure of every token


@dataclass
class Sign:
    """One thing that can go wrong.

    Attributes:
        is_there: whether a step's metrics show it.
        advice: what it means and what to do, from the metrics of the step at which it is told.
    """

    is_there: Callable[[Metrics], bool]
    advice: Callable[[Metrics], str]
    told: bool = False
    _alike: int = 0  # steps in a row that spoke against `told`

    def after_step(self, metrics: Metrics, window: int) -> str | None:
        """The advice, when this step makes `window` of them in a row."""
        self._alike = self._alike + 1 if self.is_there(metrics) != self.told else 0
        if self._alike < window:
            return None
        self.told, self._alike = not self.told, 0
        return self.advice(metrics) if self.told else None


class Watch:
    """Fed with the metrics of every step (docs/metrics.md); tells each trouble once, when it begins.

    It is told again only after it had been gone for as many steps as it takes to notice it.

    Args:
        keys: the run's config, full key -> value: what advice names, and what explains a number that is meant so.
        window: steps.
    """

    def __init__(self, keys: Mapping[str, Any], window: int = WINDOW):
        self._keys = keys
        self._window = window
        self._first: Metrics = {}
        self._rewards: deque[float] = deque(maxlen=window)
        self._signs = (
            Sign(_teaches_nothing, self._on_equal_rewards),
            Sign(self._is_cut, self._on_cut_actions),
            Sign(_is_inert, self._on_no_gradient),
            Sign(self._is_certain_for_nothing, self._on_collapsed_entropy),
            Sign(self._is_lonely, self._on_lonely_states),
            Sign(self._stays_short, self._on_short_batches),
        )

    def after_step(self, metrics: Metrics) -> list[str]:
        """What begins to be wrong at this step; empty where nothing does."""
        self._first = self._first or metrics  # of the policy before its first update
        self._rewards.append(_of(metrics, "reward/mean"))
        told = [sign.after_step(metrics, self._window) for sign in self._signs]
        return [text for text in told if text is not None]

    def _on_equal_rewards(self, metrics: Metrics) -> str:
        opening = (
            f"In each of the last {self._window} steps the episodes of every group earned the same: "
            "their reward teaches nothing. "
        )
        if _of(metrics, "reward/success") > 0.5:
            return f"{opening}Most are right already: try harder tasks."
        if _of(self._first, "group/zero_std_fraction") < 0.5 and self._gain() < 0:
            return f"{opening}At the first step they differed, and earned more. Start again with {self._slower()}."
        tries = [f"group_size={2 * self._keys['group_size']}", "easier tasks"]
        if self._keys.get("env.reward") == "sparse":
            tries.insert(0, "env.reward=dense")
        if self._keys["trainer.warm_start.steps"] == 0:
            tries.insert(0, "trainer.warm_start.steps=20 where the environment shows examples")
        return f"{opening}Try {', '.join(tries)}, or a reward that tells failures apart."

    def _is_cut(self, metrics: Metrics) -> bool:
        """Not where the model is kept from ending, and not where answers are right although they are cut."""
        meant = self._keys["rollout.ignore_eos"] or _of(metrics, "reward/success") > 0.5
        return not meant and _of(metrics, "completion/truncated_fraction") == 1

    def _on_cut_actions(self, metrics: Metrics) -> str:
        limit, first = self._keys["rollout.max_completion_tokens"], _of(self._first, "completion/truncated_fraction")
        opening = (
            f"In each of the last {self._window} steps every action was cut at rollout.max_completion_tokens={limit}. "
        )
        if first < 0.5:
            return f"{opening}At the first step {first:.0%} were. Start again with {self._slower()}."
        return (
            f"{opening}Try rollout.max_completion_tokens={2 * limit}. If the model never writes its end-of-sequence "
            "token, end its actions at a text of their own (rollout.stop_strings), or show it how: "
            "trainer.warm_start.steps=20."
        )

    def _on_no_gradient(self, metrics: Metrics) -> str:
        opening = (
            f"In each of the last {self._window} steps the gradient was exactly 0 although the advantages were not: "
            "the policy no longer changes. "
        )
        if _of(metrics, "progress/trained_tokens") == 0:
            return (
                f"{opening}So far no token was trained: look at algorithm.mask_truncated, algorithm.mask_longer_than "
                "and algorithm.filter_groups."
            )
        if _of(metrics, "policy/entropy") < CERTAIN_ENTROPY:
            return f"{opening}It is sure of every token it writes. Start again with {self._slower()}."
        if "adapter.targets" in self._keys:
            return f"{opening}What is trained has no part in what it writes: try adapter.targets=all, or adapter=full."
        return f"{opening}What is trained has no part in what it writes: look at the algorithm's loss and weights."

    def _is_certain_for_nothing(self, metrics: Metrics) -> bool:
        """Collapsed entropy and a reward that is not above the first step's by more than chance."""
        if not _of(metrics, "policy/entropy") < COLLAPSED * _of(self._first, "policy/entropy"):
            return False
        rows = self._keys["group_size"] * self._keys["tasks_per_step"]
        noise = math.hypot(
            _of(self._first, "reward/std") / math.sqrt(rows),
            _of(metrics, "reward/std") / math.sqrt(rows * len(self._rewards)),
        )
        return self._gain() <= CERTAIN * noise and _of(metrics, "reward/success") < GOOD

    def _on_collapsed_entropy(self, metrics: Metrics) -> str:
        kl = " algorithm.kl_coef=0.05," if self._keys.get("algorithm.kl_coef") == 0 else ""
        before, now = _of(self._first, "policy/entropy"), _of(metrics, "policy/entropy")
        return (
            f"policy/entropy fell from {before:.3g} to {now:.2g} nats per token, and the reward is no higher than at "
            "the first step: the policy tries next to nothing any more, so it will hardly find anything better. "
            f"Start again with {self._slower()},{kl} or tasks_per_step={2 * self._keys['tasks_per_step']}."
        )

    def _is_lonely(self, metrics: Metrics) -> bool:
        return self._keys.get("algorithm.omega") != 0 and _of(metrics, "anchor/singleton_fraction") > LONELY

    def _on_lonely_states(self, metrics: Metrics) -> str:
        ways = {
            "algorithm.anchor_similarity": ", or set algorithm.anchor_similarity",
            "algorithm.omega": ", or leave the step part out: algorithm.omega=0",
        }
        return (
            f"{_of(metrics, 'anchor/singleton_fraction'):.0%} of the turns were taken in a state that no other turn of "
            "their task was in: the step part of the advantage teaches hardly anything. Let state_id() of the "
            "environment leave out what does not matter for the decision"
            f"{''.join(way for key, way in ways.items() if key in self._keys)}."
        )

    def _stays_short(self, metrics: Metrics) -> bool:
        """Not where nearly all are right: groups that disagree are few then."""
        return _of(metrics, "refill/kept_groups") < self._keys["tasks_per_step"] and not (
            _of(metrics, "reward/success") > GOOD
        )

    def _on_short_batches(self, metrics: Metrics) -> str:
        kept, asked = int(_of(metrics, "refill/kept_groups")), self._keys["tasks_per_step"]
        return (
            f"In each of the last {self._window} steps algorithm.max_refills={self._keys['algorithm.max_refills']} "
            f"rounds of sampling did not fill the batch with groups that disagree: {kept} of {asked} at this one. Try "
            f"group_size={2 * self._keys['group_size']}, other tasks, or tasks_per_step={max(kept, 1)}."
        )

    def _gain(self) -> float:
        """Mean reward of the last steps beyond that of the first."""
        return math.fsum(self._rewards) / len(self._rewards) - _of(self._first, "reward/mean")

    def _slower(self) -> str:
        """What to type when it was training that did the harm."""
        return f"optimizer.learning_rate={self._keys['optimizer.learning_rate'] / 3:.2g}"


def _teaches_nothing(metrics: Metrics) -> bool:
    """Not where all are right: that is what training is for.

    An advantage per turn is no way out: between equal episodes it sees who was paid the same earlier. Policies that
    wrote nothing but malformed actions had advantage/std .98 from it, for 40 steps.
    """
    return _of(metrics, "group/zero_std_fraction") == 1 and _of(metrics, "reward/success") < 1


def _is_inert(metrics: Metrics) -> bool:
    return _of(metrics, "grad/norm") == 0 and _of(metrics, "advantage/std") > 0


def _of(metrics: Metrics, name: str) -> float:
    """NaN, which no comparison holds for, where a metric is absent."""
    return metrics.get(name, math.nan)
