"""One data model for every algorithm and environment: turns, trajectories, groups.

Tokens, masks and spans are derived from turns, so they cannot disagree. Imports no MLX.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class StopReason(StrEnum):
    """Why one action ended."""

    EOS = "eos"
    STOP_STRING = "stop_string"
    LENGTH = "length"


class EndReason(StrEnum):
    """Why an episode ended."""

    ENV_DONE = "env_done"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"


@dataclass(frozen=True)
class Turn:
    """One thing the model wrote, and what it read just before.

    Attributes:
        context: prompt, template glue and observation tokens; read, never trained as actions.
        observation: [start, end) span of `context` that the environment wrote.
        action: sampled tokens, the sampled EOS included.
        sampler_logp: nats, one per action token, at the sampling temperature over the full vocabulary.
        reward: what the environment paid for this action; `reward_parts` are its named summands.
        state: anchor key of the state the action was taken in, asked for before `env.step`.
        text: the action as the environment read it.
    """

    context: tuple[int, ...]
    observation: tuple[int, int]
    action: tuple[int, ...]
    sampler_logp: tuple[float, ...]
    reward: float
    reward_parts: Mapping[str, float]
    state: str
    stop: StopReason
    text: str = ""
    observation_text: str = ""


@dataclass(frozen=True)
class Trajectory:
    """One episode; a single-turn completion is the one-turn case.

    Attributes:
        task: id of the task; `member` tells the G siblings of a task apart.
        final_context: what the environment said after the last action; never fed to the model.
        info: what the environment reported about the whole episode (`success` among it).
    """

    task: str
    member: int
    turns: tuple[Turn, ...]
    end: EndReason
    final_context: tuple[int, ...] = ()
    info: Mapping[str, float] = field(default_factory=dict)

    @property
    def total_reward(self) -> float:
        return sum(turn.reward for turn in self.turns)

    @property
    def rewards(self) -> list[float]:
        return [turn.reward for turn in self.turns]

    @property
    def success(self) -> bool:
        return self.info.get("success", 0.0) > 0

    @property
    def tokens(self) -> list[int]:
        """Everything the model read or wrote, in order."""
        return [token for turn in self.turns for token in (*turn.context, *turn.action)]

    @property
    def action_count(self) -> int:
        return sum(len(turn.action) for turn in self.turns)

    def action_spans(self) -> list[tuple[int, int]]:
        """[start, end) of each turn's action within `tokens`."""
        spans, position = [], 0
        for turn in self.turns:
            start = position + len(turn.context)
            position = start + len(turn.action)
            spans.append((start, position))
        return spans

    def observation_spans(self) -> list[tuple[int, int]]:
        """[start, end) of each turn's observation within `tokens`."""
        spans, position = [], 0
        for turn in self.turns:
            spans.append((position + turn.observation[0], position + turn.observation[1]))
            position += len(turn.context) + len(turn.action)
        return spans

    def answer_spans(self) -> list[tuple[int, int]]:
        """`observation_spans` without the first, which stands in the prompt and answers no action."""
        return self.observation_spans()[1:]


@dataclass(frozen=True)
class Group:
    """The G trajectories of one task."""

    task: str
    trajectories: tuple[Trajectory, ...]

    @property
    def returns(self) -> list[float]:
        return [trajectory.total_reward for trajectory in self.trajectories]

    @property
    def has_spread(self) -> bool:
        """False when every member earned the same, so that a group baseline pays nothing."""
        returns = self.returns
        return max(returns) != min(returns)
