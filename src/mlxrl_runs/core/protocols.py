"""The seams of the product. Imports no MLX at run time, so environments and trackers stay light."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import mlx.core as mx

    from mlxrl_runs.core.batch import Batch
    from mlxrl_runs.core.outputs import TokenOutputs
    from mlxrl_runs.core.trajectory import Group, Trajectory


@dataclass(frozen=True)
class StepResult:
    """An environment's answer to one action.

    Attributes:
        observation: what the model reads next; shown nowhere when `done`.
        reward: a finite number. `reward_parts` name its summands for the logs.
        info: numbers about the episode so far; `success` (0 or 1) counts in the evaluation.
    """

    observation: str
    reward: float
    done: bool
    info: Mapping[str, float] = field(default_factory=dict)
    reward_parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """One action, as a reward function sees it.

    Attributes:
        text: what the model wrote, special tokens left out.
        prompt: the observation it answers; `task` names the episode's task.
        answer: the right answer, where the environment has one.
        token_count, max_tokens: of the action, and what it might have had.
        is_truncated: the limit ended it, not the model.
        paid: what the environment answered.
    """

    text: str
    prompt: str
    task: str
    answer: str | None
    token_count: int
    max_tokens: int
    is_truncated: bool
    paid: StepResult


class RewardFunction(Protocol):
    """A part of a reward. Write a function of this form in a file of your own: reward=file reward.file.path=FILE."""

    def __call__(self, completion: Completion) -> float: ...


Conversation = Sequence[Mapping[str, str]]  # messages with a role and a content, as chat templates take them


class Environment(Protocol):
    """One episode of one task. Write `reset`, `step`, `state_id` and `max_turns`; nothing else is needed."""

    max_turns: int

    def reset(self) -> str | Conversation:
        """Start the episode and return what the model reads first.

        A conversation so far may stand for the text: [{"role": "user", "content": "3+4"}, ...], a system message and
        old answers of the assistant included. The model reads them; nothing of them is trained.
        """

    def step(self, action: str) -> StepResult:
        """Play the model's text."""

    def state_id(self, observation: str) -> str:
        """Anchor key of the state that produced `observation`: equal keys within a task mean the same decision.

        After a conversation, `observation` is the text of its last message. Asked for once a turn, before `step`.
        """


@runtime_checkable
class HasAnswer(Protocol):
    """What an environment may offer beside: the right answer, for rewards that compare with one."""

    answer: str


@runtime_checkable
class HasAnswerPrefix(Protocol):
    """What an environment may offer beside: text its next answer begins with. The model reads it and goes on."""

    answer_prefix: str


@runtime_checkable
class Demonstrator(Protocol):
    """What an environment may offer beside: the two policies that bound what a score can mean."""

    def oracle_action(self) -> str:
        """The best action in the present state."""

    def random_action(self, generator: random.Random) -> str:
        """A well-formed action drawn without looking at the state."""


class Scorer(Protocol):
    """Turns what an environment paid for an action into the reward that is trained on."""

    def score(self, completion: Completion) -> StepResult:
        """`completion.paid` with reward, `reward_parts` and `info["success"]` as the run's reward has them."""


class EnvironmentFamily(Protocol):
    """What `env=NAME` chooses: a set of tasks and the factory of their environments."""

    def sample_task(self, generator: random.Random) -> str:
        """A training task; never one of `held_out_tasks`."""

    def held_out_tasks(self) -> Sequence[str]:
        """Tasks that are evaluated and never trained on, in a fixed order."""

    def make(self, task: str, seed: int, group_index: int) -> Environment:
        """An environment for one member of the task's group. All members get the same seed."""


@dataclass(frozen=True)
class Needs:
    """What an algorithm reads beside the sampled tokens and their log-probabilities.

    Attributes:
        old, reference: `batch.old_logp`, `batch.reference_logp`: a forward pass each.
        observations: log-probabilities of what the environment wrote.
        entropy_gradient: the entropy as something to be trained, not merely looked at.
        value_gradient: share of the value loss's gradient that reaches the model under the value head; None: no head.
    """

    old: bool = False
    reference: bool = False
    observations: bool = False
    entropy_gradient: bool = False
    value_gradient: float | None = None

    @property
    def values(self) -> bool:
        return self.value_gradient is not None


class Algorithm(Protocol):
    """How experience becomes a loss. Data in, data out: no model, no randomness."""

    updates_per_batch: int  # times that a batch is gone through
    minibatches: int  # optimizer steps of each time
    kl_stop: float | None  # nats per token from the policy that sampled, at which a batch gets no more steps

    @property
    def needs(self) -> Needs: ...

    def credit(self, batch: "Batch") -> "Batch":
        """The batch with `advantage`, `trained_mask` and what `weigh` adds."""

    def weigh(self, batch: "Batch") -> "Batch":
        """The batch, or minibatch, with `weights` (B, T) fixed over everything that one optimizer step sees."""

    def loss(self, outputs: "TokenOutputs", batch: "Batch") -> "dict[str, mx.array]":
        """Named scalars that are minimised together, each a sum of weighted numbers: parts of a batch add up."""

    def metrics(self, batch: "Batch") -> dict[str, float]:
        """Numbers this algorithm adds to the log, after `credit`."""

    def ratio_metrics(self, logp: "mx.array", batch: "Batch") -> dict[str, float]:
        """ratio/* and clip/* numbers; asked for only when a batch gets more than one optimizer step."""


@runtime_checkable
class Refills(Protocol):
    """What an algorithm may have beside: a choice among the groups, with others sampled in their place."""

    max_refills: int  # further rounds of sampling in one step

    def wants(self, group: "Group") -> bool: ...


@runtime_checkable
class HasValueHead(Protocol):
    """What an algorithm with `needs.values` has beside."""

    value_learning_rate: float


@runtime_checkable
class AdaptsKl(Protocol):
    """What an algorithm may have beside: a KL coefficient that follows the measured KL."""

    kl_coef: float
    kl_target: float | None  # nats per token; None: the coefficient stays
    kl_horizon: float  # episodes


@dataclass(frozen=True)
class Sampled:
    """What was rolled out for one step.

    Attributes:
        kept: the groups to train on.
        groups: all of them, in the order they were played.
        env_seconds: spent in environments, or waiting for those in threads.
        refills: rounds of sampling after the first.
    """

    kept: "list[Group]"
    groups: "list[Group]"
    sampled_tokens: int
    env_seconds: float
    refills: int = 0

    def __add__(self, other: "Sampled") -> "Sampled":
        return Sampled(
            self.kept + other.kept,
            self.groups + other.groups,
            self.sampled_tokens + other.sampled_tokens,
            self.env_seconds + other.env_seconds,
        )

    @property
    def unused_tokens(self) -> int:
        """Sampled tokens of groups that are not trained on."""
        return self.sampled_tokens - sum(row.action_count for group in self.kept for row in group.trajectories)


class Experience(Protocol):
    """Where groups of trajectories come from."""

    group_size: int

    def sample(self, step: int) -> Sampled:
        """What that step trains on, and what it cost to get it."""


class Tracker(Protocol):
    """Receives what a run has to say. A tracker never stops a run: it reports its own trouble once and goes quiet."""

    def start(self, run: "RunRecord") -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_trajectories(self, step: int, trajectories: "Sequence[TrajectoryRecord]") -> None: ...

    def log_evaluation(self, when: str, evaluation: Mapping[str, Any]) -> None:
        """Args: when: in words, "after step 40"; empty where there is no training."""

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None: ...


@dataclass(frozen=True)
class RunRecord:
    """What a tracker needs to know about a run before its first step."""

    name: str
    folder: str
    job: str
    config: Mapping[str, Any]  # plain and resolved
    overrides: tuple[str, ...] = ()
    group: str | None = None  # the sweep's name
    tags: tuple[str, ...] = ()
    notes: str = ""
    steps: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TrajectoryRecord:
    """One episode made ready to be read by a person: texts beside numbers."""

    task: str
    member: int
    trajectory: "Trajectory"
    turn_advantages: tuple[float, ...] | None
