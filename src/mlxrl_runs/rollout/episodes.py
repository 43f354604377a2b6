"""One episode being played: what it has read and written, and what its environment answered."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mlxrl_runs.core.protocols import Completion, Environment, HasAnswer, Scorer, StepResult
from mlxrl_runs.core.trajectory import EndReason, StopReason, Trajectory, Turn
from mlxrl_runs.errors import ConfigError
from mlxrl_runs.policy.chat import ChatFormat, Context
from mlxrl_runs.rollout.environment import answer_prefix, ask_state, last_text, opened, reset, step


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
    """One episode to play. `key` names its random draws: equal keys draw equal tokens. A `greedy` one draws none.

    Attributes: max_completion_tokens: of each action, where it is to be less than the engine's limit.
    """

    task: str
    member: int
    make: Callable[[], Environment]
    key: tuple[object, ...]
    greedy: bool = False
    max_completion_tokens: int | None = None


@dataclass
class Action:
    """What is being written."""

    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    stop: StopReason | None = None


@dataclass
class Episode:
    """Attributes: unread: the last action token, sampled and not fed to the model yet; tokens: of it all, so far."""

    request: EpisodeRequest
    environment: Environment
    max_turns: int
    observation: str
    context: Context
    max_completion_tokens: int
    turns: list[Turn] = field(default_factory=list)
    action: Action = field(default_factory=Action)
    unread: list[int] = field(default_factory=list)
    tokens: int = 0
    info: Mapping[str, float] = field(default_factory=dict)
    end: EndReason | None = None
    final_context: tuple[int, ...] = ()

    @property
    def to_read(self) -> list[int]:
        """What the model has still to read. Only ever a suffix: what was fed before is a prefix of the trajectory."""
        return [*self.unread, *self.context.tokens]

    @property
    def draws(self) -> tuple[object, ...]:
        """Names the random draws of the action being written."""
        return (*self.request.key, len(self.turns))

    def trajectory(self) -> Trajectory:
        assert self.end is not None
        return Trajectory(
            task=self.request.task,
            member=self.request.member,
            turns=tuple(self.turns),
            end=self.end,
            final_context=self.final_context,
            info=dict(self.info),
        )


class Referee:
    """Opens episodes, ends actions, and lets environments answer them.

    Args: scorer: turns what environments pay into the run's reward; None leaves it as it is.
    """

    def __init__(self, chat: ChatFormat, eos_ids: frozenset[int], limits: Limits, scorer: Scorer | None):
        self._chat = chat
        self._limits = limits
        self._scorer = scorer
        self.eos_ids = frozenset() if limits.ignore_eos else eos_ids

    @property
    def has_stop_strings(self) -> bool:
        return bool(self._limits.stop_strings)

    def open(self, request: EpisodeRequest) -> Episode:
        """Raises: ConfigError for a prompt over the limit; EnvironmentFailure when the environment fails."""
        environment, max_turns = opened(request.make, request.task)
        first = reset(environment, request.task)
        context = self._chat.first(first, answer_prefix(environment))
        limit = min(request.max_completion_tokens or 2**62, self._limits.max_completion_tokens)
        if len(context.tokens) > self._limits.max_prompt_tokens:
            raise ConfigError(
                f"the prompt of task {request.task!r} has {len(context.tokens)} tokens, more than "
                f"rollout.max_prompt_tokens={self._limits.max_prompt_tokens}; raise that key or shorten the observation"
            )
        if len(context.tokens) + limit > self._limits.max_episode_tokens:
            raise ConfigError(
                f"rollout.max_episode_tokens={self._limits.max_episode_tokens} has no room for one turn of task "
                f"{request.task!r}: {len(context.tokens)} prompt tokens and rollout.max_completion_tokens={limit}; "
                "raise the first or lower the last"
            )
        return Episode(request, environment, max_turns, last_text(first), context, limit, tokens=len(context.tokens))

    def append(self, episode: Episode, token: int, logp: float) -> None:
        """Take one sampled token, and say whether the action ends with it."""
        action = episode.action
        action.tokens.append(token)
        action.logp.append(logp)
        if token in self.eos_ids:
            action.stop = StopReason.EOS
        elif self._limits.stop_strings and self._holds_stop_string(action.tokens):
            action.stop = StopReason.STOP_STRING
        elif len(action.tokens) == episode.max_completion_tokens:
            action.stop = StopReason.LENGTH

    def _holds_stop_string(self, tokens: list[int]) -> bool:
        text = self._chat.action_text(tokens)
        return any(stop in text for stop in self._limits.stop_strings)

    def ask(self, episode: Episode) -> "Reply":
        """Let the environment answer the finished action. Touches nothing but it, so it may run in a thread.

        Raises: EnvironmentFailure when the environment fails.
        """
        where = f"task {episode.request.task!r}, turn {len(episode.turns) + 1}"
        environment = episode.environment
        state = ask_state(environment, episode.observation, where)
        answer = environment.answer if isinstance(environment, HasAnswer) else None  # before the world moves on
        text = self._chat.action_text(episode.action.tokens)
        return Reply(text, state, answer, step(environment, text, where))

    def settle(self, episode: Episode, reply: "Reply") -> None:
        """Write the turn down, with the reward that the run pays, and decide whether the episode goes on.

        Raises: EnvironmentFailure when a part of the reward fails.
        """
        action, stop = episode.action, episode.action.stop
        assert stop is not None
        is_truncated = stop is StopReason.LENGTH
        result = self._scored(reply, episode.observation, episode.request.task, len(action.tokens), is_truncated)
        episode.turns.append(
            Turn(
                context=episode.context.tokens,
                observation=episode.context.observation,
                action=tuple(action.tokens),
                sampler_logp=tuple(action.logp),
                reward=result.reward,
                reward_parts=dict(result.reward_parts),
                state=reply.state,
                stop=stop,
                text=reply.text,
                observation_text=episode.observation,
            )
        )
        episode.tokens += len(action.tokens)
        episode.info = result.info
        episode.action = Action()
        if result.done:
            episode.end = EndReason.ENV_DONE
            return
        context = self._chat.next(result.observation, stop is StopReason.EOS, answer_prefix(episode.environment))
        next_tokens = episode.tokens + len(context.tokens) + episode.max_completion_tokens
        if len(episode.turns) >= episode.max_turns:
            episode.end, episode.final_context = EndReason.MAX_TURNS, context.tokens
        elif next_tokens > self._limits.max_episode_tokens:
            episode.end, episode.final_context = EndReason.MAX_TOKENS, context.tokens
        else:
            episode.unread = [action.tokens[-1]]
            episode.observation, episode.context = result.observation, context
            episode.tokens += len(context.tokens)

    def _scored(self, reply: "Reply", prompt: str, task: str, token_count: int, is_truncated: bool) -> StepResult:
        if self._scorer is None:
            return reply.paid
        return self._scorer.score(
            Completion(
                text=reply.text,
                prompt=prompt,
                task=task,
                answer=reply.answer,
                token_count=token_count,
                max_tokens=self._limits.max_completion_tokens,
                is_truncated=is_truncated,
                paid=reply.paid,
            )
        )

    def step(
        self, environment: Environment, text: str, where: str, *, prompt: str, task: str, token_count: int
    ) -> StepResult:
        """Play an action of somebody else; the answer comes back with the reward that the run pays.

        Raises: EnvironmentFailure when the environment or a part of the reward fails.
        """
        answer = environment.answer if isinstance(environment, HasAnswer) else None
        reply = Reply(text, "", answer, step(environment, text, where))
        return self._scored(reply, prompt, task, token_count, is_truncated=False)


@dataclass(frozen=True)
class Reply:
    """What an environment answered to one action.

    Attributes:
        text: the action as the environment read it. state: the anchor key of the state it was taken in.
        answer: the right answer, where the environment has one. paid: its own answer.
    """

    text: str
    state: str
    answer: str | None
    paid: StepResult
