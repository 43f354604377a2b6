"""Plays episodes: the model writes, the environment answers, and the KV of everything read so far is kept.

One round is one turn of every episode still running: its context is prefilled into the kept KV, its action is decoded
until each row has ended it, then the environments answer. Each distinct prompt is prefilled once and its KV copied to
the members of its group.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn

from mlxrl_runs.core.protocols import Completion, Environment, HasAnswer, Scorer, StepResult
from mlxrl_runs.core.stop import StopRequest
from mlxrl_runs.core.trajectory import EndReason, StopReason, Trajectory, Turn
from mlxrl_runs.errors import ConfigError
from mlxrl_runs.maths.scalars import integers, numbers
from mlxrl_runs.policy.chat import ChatFormat, Context
from mlxrl_runs.rollout.decoder import BatchedDecoder, Decoder, SingleDecoder
from mlxrl_runs.rollout.environment import answer_prefix, ask_state, last_text, opened, reset, step
from mlxrl_runs.rollout.sampling import Sampling, draw, row_keys

COMPACT_BELOW = 0.75  # rows still writing, as a share of the rows decoded, under which the others leave the batch


@dataclass(frozen=True)
class Limits:
    """Where actions and episodes end.

    Attributes:
        max_completion_tokens: per action. max_prompt_tokens: of the first context; a longer one is refused.
        max_episode_tokens: an episode whose next turn might pass this ends before it.
        stop_strings: an action ends with the token that completes one of them.
        ignore_eos: EOS ends nothing; every action runs to its full length (benchmarks, memory work).
    """

    max_completion_tokens: int
    max_prompt_tokens: int = 1024
    max_episode_tokens: int = 4096
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class EpisodeRequest:
    """One episode to play. `key` names its random draws: equal keys draw equal tokens. A `greedy` one draws none."""

    task: str
    member: int
    make: Callable[[], Environment]
    key: tuple[object, ...]
    greedy: bool = False


@dataclass
class RolloutStatistics:
    """What playing cost; `margins` holds the perturbed-score margin of every sampled token when asked for."""

    sampled_tokens: int = 0
    env_seconds: float = 0.0
    total_seconds: float = 0.0
    margins: dict[tuple[object, ...], list[float]] | None = None


@dataclass
class _Episode:
    request: EpisodeRequest
    environment: Environment
    max_turns: int
    observation: str
    context: Context
    turns: list[Turn] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)  # the last action token: sampled, not fed to the model yet
    tokens: int = 0
    info: Mapping[str, float] = field(default_factory=dict)
    end: EndReason | None = None
    final_context: tuple[int, ...] = ()


@dataclass
class _Action:
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    stop: StopReason | None = None


class RolloutEngine:
    """Samples trajectories from a model.

    Args:
        mode: "batched" decodes all rows together; "sequential" plays one episode after the other and needs the memory
            of one row. Both draw the same tokens, up to ties between scores that differ by rounding alone.
        scorer: turns what environments pay into the run's reward; None leaves it as it is.
    """

    def __init__(
        self,
        model: nn.Module,
        chat: ChatFormat,
        eos_ids: frozenset[int],
        limits: Limits,
        mode: str = "batched",
        stop: StopRequest | None = None,
        scorer: Scorer | None = None,
    ):
        self._model = model
        self.chat = chat
        self._eos_ids = eos_ids
        self._limits = limits
        self._stop = stop or StopRequest()
        self._scorer = scorer
        self.mode = mode
        self.mode_reason = "as configured"
        if mode == "batched" and not BatchedDecoder.supports(model):
            self.mode = "sequential"
            self.mode_reason = "this model family keeps more than plain keys and values: episodes run one by one"

    def play(
        self, requests: Sequence[EpisodeRequest], sampling: Sampling, with_margins: bool = False
    ) -> tuple[list[Trajectory], RolloutStatistics]:
        """Play every request to its end.

        Returns: trajectories in the order of the requests, and what they cost.
        Raises: ConfigError for a prompt over the limit; EnvironmentFailure when an environment fails.
        """
        started = time.perf_counter()
        statistics = RolloutStatistics(margins={} if with_margins else None)
        batches = [requests] if self.mode == "batched" else [[request] for request in requests]
        trajectories = [
            trajectory for batch in batches for trajectory in self._play_together(batch, sampling, statistics)
        ]
        statistics.total_seconds = time.perf_counter() - started
        return trajectories, statistics

    def _play_together(
        self, requests: Sequence[EpisodeRequest], sampling: Sampling, statistics: RolloutStatistics
    ) -> list[Trajectory]:
        started = time.perf_counter()
        episodes = [self._open(request) for request in requests]
        statistics.env_seconds += time.perf_counter() - started
        decoder, logits = self._prefill(episodes)
        running = list(episodes)
        while True:
            actions = self._decode(decoder, logits, running, sampling, statistics)
            started = time.perf_counter()
            for episode, action in zip(running, actions, strict=True):
                self._stop.raise_if_requested()
                self._answer(episode, action)
            statistics.env_seconds += time.perf_counter() - started
            alive = [row for row, episode in enumerate(running) if episode.end is None]
            if not alive:
                return [_trajectory(episode) for episode in episodes]
            if len(alive) < len(running):
                decoder, running = decoder.select(alive), [running[row] for row in alive]
            logits = decoder.feed(_suffixes(decoder, running))

    def _open(self, request: EpisodeRequest) -> _Episode:
        self._stop.raise_if_requested()
        environment, max_turns = opened(request.make, request.task)
        first = reset(environment, request.task)
        context = self.chat.first(first, answer_prefix(environment))
        if len(context.tokens) > self._limits.max_prompt_tokens:
            raise ConfigError(
                f"the prompt of task {request.task!r} has {len(context.tokens)} tokens, more than "
                f"rollout.max_prompt_tokens={self._limits.max_prompt_tokens}; raise that key or shorten the observation"
            )
        if len(context.tokens) + self._limits.max_completion_tokens > self._limits.max_episode_tokens:
            raise ConfigError(
                f"rollout.max_episode_tokens={self._limits.max_episode_tokens} has no room for one turn of task "
                f"{request.task!r}: {len(context.tokens)} prompt tokens and rollout.max_completion_tokens="
                f"{self._limits.max_completion_tokens}; raise the first or lower the last"
            )
        return _Episode(request, environment, max_turns, last_text(first), context, tokens=len(context.tokens))

    def _prefill(self, episodes: Sequence[_Episode]) -> tuple[Decoder, mx.array]:
        """Feed every distinct prompt once and hand its KV to all episodes that begin with it."""
        if self.mode == "sequential":
            single = SingleDecoder(self._model)
            return single, single.feed([episodes[0].context.tokens])
        prompts = list(dict.fromkeys(episode.context.tokens for episode in episodes))
        number = {prompt: index for index, prompt in enumerate(prompts)}
        shared = BatchedDecoder(self._model, len(prompts))
        logits = shared.feed(prompts)
        owners = [number[episode.context.tokens] for episode in episodes]
        return shared.select(owners), logits[mx.array(owners)]

    def _decode(
        self,
        decoder: Decoder,
        logits: mx.array,
        episodes: Sequence[_Episode],
        sampling: Sampling,
        statistics: RolloutStatistics,
    ) -> list[_Action]:
        """Sample until every row has ended its action; rows that ended leave once they are a quarter of the batch."""
        actions = [_Action() for _ in episodes]
        keys = row_keys([(*episode.request.key, len(episode.turns)) for episode in episodes])
        greedy = mx.array([[episode.request.greedy] for episode in episodes])
        rows, part = list(range(len(episodes))), decoder
        for position in range(self._limits.max_completion_tokens):
            self._stop.raise_if_requested()
            drawn = draw(logits, keys, position, sampling, greedy, with_margin=statistics.margins is not None)
            tokens, logps = integers(drawn.tokens), numbers(drawn.logp)
            margins = None if drawn.margin is None else numbers(drawn.margin)
            for place, row in enumerate(rows):
                if actions[row].stop is None:
                    self._append(actions[row], tokens[place], logps[place])
                    statistics.sampled_tokens += 1
                    if margins is not None and statistics.margins is not None:
                        statistics.margins.setdefault(episodes[row].request.key, []).append(margins[place])
            writing = [place for place, row in enumerate(rows) if actions[row].stop is None]
            if not writing:
                break
            last = drawn.tokens
            if len(writing) < COMPACT_BELOW * len(rows):
                if part is not decoder:
                    decoder.put_back(part, rows)
                rows, kept = [rows[place] for place in writing], mx.array(writing)
                part, keys, greedy, last = decoder.select(rows), keys[kept], greedy[kept], last[kept]
            logits = part.step(last, [actions[row].stop is None for row in rows])
        if part is not decoder:
            decoder.put_back(part, rows)
        return actions

    def _append(self, action: _Action, token: int, logp: float) -> None:
        action.tokens.append(token)
        action.logp.append(logp)
        if token in self._eos_ids and not self._limits.ignore_eos:
            action.stop = StopReason.EOS
        elif self._limits.stop_strings and self._holds_stop_string(action.tokens):
            action.stop = StopReason.STOP_STRING
        elif len(action.tokens) == self._limits.max_completion_tokens:
            action.stop = StopReason.LENGTH

    def _holds_stop_string(self, tokens: list[int]) -> bool:
        text = self.chat.action_text(tokens)
        return any(stop in text for stop in self._limits.stop_strings)

    def step(
        self,
        environment: Environment,
        text: str,
        where: str,
        *,
        prompt: str,
        task: str,
        token_count: int,
        is_truncated: bool = False,
    ) -> StepResult:
        """Play an action; the environment's answer comes back with the reward that the run pays.

        Raises: EnvironmentFailure when the environment or a part of the reward fails.
        """
        if self._scorer is None:
            return step(environment, text, where)
        answer = environment.answer if isinstance(environment, HasAnswer) else None  # before the world moves on
        return self._scorer.score(
            Completion(
                text=text,
                prompt=prompt,
                task=task,
                answer=answer,
                token_count=token_count,
                max_tokens=self._limits.max_completion_tokens,
                is_truncated=is_truncated,
                paid=step(environment, text, where),
            )
        )

    def _answer(self, episode: _Episode, action: _Action) -> None:
        """Let the environment answer one action and decide whether the episode goes on."""
        assert action.stop is not None
        where = f"task {episode.request.task!r}, turn {len(episode.turns) + 1}"
        text = self.chat.action_text(action.tokens)
        state = ask_state(episode.environment, episode.observation, where)
        result = self.step(
            episode.environment,
            text,
            where,
            prompt=episode.observation,
            task=episode.request.task,
            token_count=len(action.tokens),
            is_truncated=action.stop is StopReason.LENGTH,
        )
        episode.turns.append(
            Turn(
                context=episode.context.tokens,
                observation=episode.context.observation,
                action=tuple(action.tokens),
                sampler_logp=tuple(action.logp),
                reward=result.reward,
                reward_parts=dict(result.reward_parts),
                state=state,
                stop=action.stop,
                text=text,
                observation_text=episode.observation,
            )
        )
        episode.tokens += len(action.tokens)
        episode.info = result.info
        if result.done:
            episode.end = EndReason.ENV_DONE
            return
        context = self.chat.next(result.observation, action.stop is StopReason.EOS, answer_prefix(episode.environment))
        next_tokens = episode.tokens + len(context.tokens) + self._limits.max_completion_tokens
        if len(episode.turns) >= episode.max_turns:
            episode.end, episode.final_context = EndReason.MAX_TURNS, context.tokens
        elif next_tokens > self._limits.max_episode_tokens:
            episode.end, episode.final_context = EndReason.MAX_TOKENS, context.tokens
        else:
            episode.unread = [action.tokens[-1]]
            episode.observation, episode.context = result.observation, context
            episode.tokens += len(context.tokens)


def _suffixes(decoder: Decoder, episodes: Sequence[_Episode]) -> list[list[int]]:
    """What each row has still to read. Only ever a suffix: what was fed before is a prefix of the trajectory so far."""
    suffixes = [[*episode.unread, *episode.context.tokens] for episode in episodes]
    for length, suffix, episode in zip(decoder.lengths, suffixes, episodes, strict=True):
        assert length + len(suffix) == episode.tokens, "the KV holds other tokens than the trajectory"
    return suffixes


def _trajectory(episode: _Episode) -> Trajectory:
    assert episode.end is not None
    return Trajectory(
        task=episode.request.task,
        member=episode.request.member,
        turns=tuple(episode.turns),
        end=episode.end,
        final_context=episode.final_context,
        info=dict(episode.info),
    )
