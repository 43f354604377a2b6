"""The gates of job=check. Each computes one thing in two ways and says by how much they differ, and what is allowed."""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten

from mlxrl_runs.check.equivalence import Agreement, play_both
from mlxrl_runs.core.batch import Batch, collate
from mlxrl_runs.core.protocols import Algorithm, StepResult
from mlxrl_runs.core.seeding import derive_seed
from mlxrl_runs.core.stop import StopRequest
from mlxrl_runs.core.trajectory import StopReason, Trajectory
from mlxrl_runs.errors import Interrupted
from mlxrl_runs.maths.scalars import number
from mlxrl_runs.memory.limits import memory_size_bytes
from mlxrl_runs.policy.adapters import adapters_merged, adapters_off, put_on_by_mlx_lm, swapped_in
from mlxrl_runs.policy.chat import ChatFormat
from mlxrl_runs.policy.export import answer
from mlxrl_runs.policy.load import Policy
from mlxrl_runs.rollout.engine import Decoding, RolloutEngine
from mlxrl_runs.rollout.episodes import EpisodeRequest, Limits
from mlxrl_runs.rollout.on_policy import group_up
from mlxrl_runs.rollout.sampling import Sampling
from mlxrl_runs.schema import FullAdapter, RolloutMode, RunConfig
from mlxrl_runs.training.optimizer import LearningRate
from mlxrl_runs.training.score import score
from mlxrl_runs.training.update import Updater

TOKENS = 200  # sampled and compared, at least
ACTION_TOKENS = 12
SENTENCES = (1, 3, 9)  # of the prompts
MEMBERS = 4
PART_ROWS = 3  # of 4: parts of unequal size
ADAPTER_SHARE = 0.5  # of a layer's output, about, that an untrained adapter is made to change


@dataclass(frozen=True)
class Tolerance:
    """What two ways to compute the same may differ by.

    Attributes:
        largest, mean: of a log-probability, nats.
        repeated: the same where both ways do the same operations on the same shapes, so that only a kernel that adds
            up in no fixed order makes a difference.
        gradient: the largest difference of an entry, as a share of the gradient's largest entry.
        why: where the numbers come from.
    """

    largest: float
    mean: float
    repeated: float
    gradient: float
    why: str


EXACT = Tolerance(
    largest=1e-4,
    mean=1e-4,
    repeated=1e-4,
    gradient=1e-4,
    why="float32: sums in another order move a log-probability by about 1e-5 nats, a mistake by 0.1 and more",
)
# Measured on tiny, random 1m and 11m, and SmolLM2, a stirred LoRA on each: the same weights in bfloat16 and in float32
# differ by 0.01 to 0.04 nats on average over sampled tokens, by 0.05 to 0.26 at most, and by 0.02 to 0.13 of the
# gradient's largest entry. What differs only in the order of its sums stays well inside that: 0.002 and 0.02 nats.
ROUNDED = Tolerance(
    largest=0.5,
    mean=0.05,
    repeated=0.05,
    gradient=0.2,
    why="16-bit activations: rounding them moves a log-probability by 0.01 to 0.04 nats on average and 0.3 at most, "
    "and a gradient by 0.13 of its largest entry; a mistake moves the average by 0.1 and more",
)


@dataclass(frozen=True)
class Finding:
    """One gate's result. It passes unless a difference is larger than its tolerance, or no number.

    Attributes:
        how: what was compared, in words.
        more: further numbers for check.json; `mean_difference` is held against `mean_tolerance` where they are there.
    """

    difference: float
    tolerance: float
    how: str
    more: Mapping[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        mean_is_fine = self.more.get("mean_difference", 0.0) <= self.more.get("mean_tolerance", 0.0)
        return self.difference <= self.tolerance and mean_is_fine

    def as_json(self) -> dict[str, Any]:
        numbers = {"difference": self.difference, "tolerance": self.tolerance, "passed": self.passed}
        return numbers | dict(self.more) | {"measured": self.how}


@dataclass(frozen=True)
class DoesNotApply:
    """There is nothing to compare, which is no pass. `reason`: why, in words."""

    reason: str


class Talk:
    """Two turns behind a prompt of some sentences. Every second member is paid: there is something to learn."""

    max_turns = 2

    def __init__(self, sentences: int, member: int):
        self._sentences = sentences
        self._pays = float(member % 2)

    def reset(self) -> str:
        return " ".join(["The door is red."] * self._sentences)

    def step(self, action: str) -> StepResult:
        return StepResult("The door is blue.", self._pays, False)

    def state_id(self, observation: str) -> str:
        return observation


class KeptGradient(optim.Optimizer):
    """Keeps the gradient and leaves the weights alone."""

    gradient: Any = None

    def init_single(self, parameter: mx.array, state: dict[str, Any]) -> None:
        """Nothing is remembered of a weight."""

    def update(self, model: nn.Module, gradients: Any) -> None:
        self.gradient = gradients


@dataclass
class Bench:
    """A policy under examination.

    Attributes:
        base: log-probabilities of the probe under the model that never had an adapter; None under full training.
        tokens: how many sampled tokens are compared, at least.
    """

    policy: Policy
    config: RunConfig
    base: mx.array | None
    stop: StopRequest = field(default_factory=StopRequest)
    tokens: int = TOKENS

    @cached_property
    def tolerance(self) -> Tolerance:
        """By the numbers that activations are kept in: quantised weights compute in their scales' format."""
        return EXACT if self.policy.model(mx.array([[0]])).dtype == mx.float32 else ROUNDED

    @cached_property
    def alone(self) -> RolloutEngine:
        """One episode after the other."""
        return engine_of(self.policy, self.config, mode=RolloutMode.SEQUENTIAL, stop=self.stop)

    @cached_property
    def together(self) -> RolloutEngine:
        """All rows at once, where the model's family can."""
        return engine_of(self.policy, self.config, mode=RolloutMode.BATCHED, stop=self.stop)

    def agreement(self, one: RolloutEngine, other: RolloutEngine) -> Agreement:
        """Both engines on as many episodes as sample `tokens` tokens."""
        found, turn = Agreement(), 0
        while found.tokens < self.tokens:
            found += play_both(one, other, requests_of_round(turn))
            turn += 1
        return found

    @cached_property
    def episodes(self) -> list[Trajectory]:
        """Played in the config's mode, the members of a task side by side."""
        engine = self.alone if self.config.rollout.mode is RolloutMode.SEQUENTIAL else self.together
        return engine.play(requests_of_round(0), Sampling())[0]

    @cached_property
    def batch(self) -> Batch:
        """One credited group: few rows, for a gradient of a large model takes much memory.

        That with the longest prompt, which its rows then share in one pass and do not where they are taken apart.
        """
        episodes = [_ended_by_themselves(episode) for episode in self.episodes[-MEMBERS:]]
        batch = collate(group_up([str(len(SENTENCES) - 1)], episodes, MEMBERS))
        algorithm = self.algorithm
        needs = algorithm.needs
        return algorithm.credit(
            score(self.policy, batch, 1.0, old=needs.old, reference=needs.reference, values=needs.values, rows=0)
        )

    @property
    def algorithm(self) -> Algorithm:
        return cast(Algorithm, self.config.algorithm)

    def gradient(self, *, rows: int, checkpoint_every: int) -> dict[str, mx.array]:
        """Of the config's loss on `batch`, by the name of the weight, a value head's among them."""
        kept = {"policy": KeptGradient(), "value": KeptGradient()}
        still = LearningRate(0.0, "constant", 0, 1, 1.0)
        updater = Updater(
            self.policy,
            kept["policy"],
            still,
            temperature=1.0,
            rows=rows,
            checkpoint_every=checkpoint_every,
            max_grad_norm=None,
            max_nonfinite=0,
            seed=self.config.seed,
            stop=self.stop,
            value_optimizer=kept["value"],
            value_learning_rate=still,
        )
        updater.update(self.algorithm, self.batch)
        return dict(tree_flatten({name: kept[name].gradient for name in updater.learners}))

    @cached_property
    def plain_gradient(self) -> dict[str, mx.array]:
        return self.gradient(rows=0, checkpoint_every=0)


def _ended_by_themselves(episode: Trajectory) -> Trajectory:
    """The gates keep actions short, which is no reason for an algorithm to leave them untrained."""
    return replace(episode, turns=tuple(replace(turn, stop=StopReason.EOS) for turn in episode.turns))


def engine_of(
    policy: Policy, config: RunConfig, *, mode: str, compile: str = "never", stop: StopRequest | None = None
) -> RolloutEngine:
    """An engine on the policy, for short actions: what is compared does not depend on their length.

    Its adapter is not merged, which is another thing to compare.
    """
    chat = ChatFormat(policy.tokenizer, config.model.thinking)
    decoding = Decoding(mode=mode, compile_when=compile, repeatable=config.reproducible)
    return RolloutEngine(policy.model, chat, policy.eos_ids, Limits(ACTION_TOKENS), decoding, stop=stop)


def requests_of_round(turn: int) -> list[EpisodeRequest]:
    """Rows whose prompts have several lengths, `MEMBERS` of each. Args: turn: other draws at each."""
    return [
        EpisodeRequest(str(task), member, partial(Talk, sentences, member), ("check", turn, task, member))
        for task, sentences in enumerate(SENTENCES)
        for member in range(MEMBERS)
    ]


def probe_logp(policy: Policy) -> mx.array:
    """(T, V) nats: what the model, as it is now, thinks comes after each token of a probe."""
    logits = answer(policy.model, policy.tokenizer).logits
    logp = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(logp)
    return logp


@contextmanager
def stirred(policy: Policy) -> Iterator[None]:
    """Inside, an adapter does something to the model even where it has not learned anything; then it is as it was."""
    if policy.adapter_config is None:
        yield
        return
    shape: Any = policy.adapter_config["lora_parameters"]
    size = ADAPTER_SHARE / (shape["scale"] * math.sqrt(shape["rank"]))
    names = [
        (name, array) for name, array in tree_flatten(policy.model.trainable_parameters()) if name.endswith("lora_b")
    ]
    pushed = {
        name: array + size * mx.random.normal(array.shape, key=mx.random.key(derive_seed(0, "check", index)))
        for index, (name, array) in enumerate(names)
    }
    with swapped_in(policy.model, pushed):
        yield


# ---- the gates


def batched_is_one_by_one(bench: Bench) -> "Finding | DoesNotApply":
    """The same episodes from rows decoded together and from single rows."""
    if bench.together.mode != RolloutMode.BATCHED:
        return DoesNotApply(bench.together.mode_reason)
    return _agreement(bench, bench.alone, bench.together)


def compiled_is_plain(bench: Bench) -> "Finding | DoesNotApply":
    """The same episodes from decoding steps that are compiled and that are not."""
    if bench.together.mode != RolloutMode.BATCHED:
        return DoesNotApply(f"nothing is compiled there: {bench.together.mode_reason}")
    compiled = engine_of(bench.policy, bench.config, mode=RolloutMode.BATCHED, compile="always", stop=bench.stop)
    return _agreement(bench, bench.together, compiled)


def _agreement(bench: Bench, one: RolloutEngine, other: RolloutEngine) -> Finding:
    found = bench.agreement(one, other)
    ties = found.ties(bench.tolerance.largest)
    others = len(found.margins) - ties
    how = f"{found.tokens} sampled tokens, rows of unequal length; {ties} ties, {others} other partings"
    return _of_logp(bench, found.largest, found.mean, how, tokens=found.tokens, ties=ties, partings=others)


def sampled_is_trained(bench: Bench) -> Finding:
    """Log-probabilities as sampled, token by token, and as the training pass computes them for whole rows."""
    batch = collate(group_up([str(task) for task in range(len(SENTENCES))], bench.episodes, MEMBERS))
    trained = score(bench.policy, batch, 1.0, old=True, reference=False, rows=MEMBERS).old_logp
    assert trained is not None
    apart = mx.where(batch.action_mask, mx.abs(trained - batch.sampler_logp), 0.0)
    count = number(batch.action_mask.sum())
    how = f"{int(count)} tokens of {batch.rows} episodes, padded"
    return _of_logp(bench, number(apart.max()), number(apart.sum()) / count, how, tokens=count)


def adapters_off_is_base(bench: Bench) -> "Finding | DoesNotApply":
    """The adapted model with its adapters off, and the model before it ever had any."""
    if bench.base is None:
        return DoesNotApply(NO_ADAPTER)
    with adapters_off(bench.policy.model):
        off = probe_logp(bench.policy)
    return _of_probes(bench, off, bench.base, "a probe's next tokens, against the model opened without an adapter")


def saved_adapter_is_live(bench: Bench) -> "Finding | DoesNotApply":
    """The policy, and what mlx-lm makes of its saved adapter on the same base, of which no second copy is held."""
    if bench.policy.adapter_config is None:
        return DoesNotApply(NO_ADAPTER)
    live = probe_logp(bench.policy)
    with tempfile.TemporaryDirectory() as folder:
        bench.policy.save(Path(folder))
        with put_on_by_mlx_lm(bench.policy.model, Path(folder)):
            opened = probe_logp(bench.policy)
    return _of_probes(bench, live, opened, "a probe's next tokens, against the saved files put on by mlx-lm")


def checkpointed_is_plain(bench: Bench) -> "Finding | DoesNotApply":
    """The gradient with layers computed a second time, and with everything kept."""
    every = bench.config.memory.checkpoint_every or 1
    again = bench.gradient(rows=0, checkpoint_every=every)
    choice = "layer" if every == 1 else f"every_{every}"
    return _of_gradients(bench, again, f"memory.checkpoint={choice} and none")


def micro_batches_are_whole(bench: Bench) -> "Finding | DoesNotApply":
    """The gradient of a batch in parts, and in one piece."""
    adapter = bench.config.adapter
    if not isinstance(adapter, FullAdapter) and adapter.dropout > 0:
        return DoesNotApply(f"adapter.dropout={adapter.dropout:g} draws other numbers for each part")
    parts = bench.gradient(rows=PART_ROWS, checkpoint_every=0)
    return _of_gradients(bench, parts, f"memory.micro_batch_size={PART_ROWS} and 0")


Gate = Callable[[Bench], "Finding | DoesNotApply"]
NO_ADAPTER = "every weight is trained, there is no adapter"
GATES: Mapping[str, Gate] = {
    "batched = one by one": batched_is_one_by_one,
    "compiled = plain": compiled_is_plain,
    "sampled log-probability = training pass": sampled_is_trained,
    "adapters off = base": adapters_off_is_base,
    "saved adapter = live": saved_adapter_is_live,
    "checkpointed = plain gradient": checkpointed_is_plain,
    "micro-batches = whole": micro_batches_are_whole,
}


# ---- what is told and bars nothing


def merged_adapter(bench: Bench) -> "Finding | DoesNotApply":
    """The policy, and the one it is sampled with where rollout.merge_adapter makes base + adapter one weight."""
    policy, wish = bench.policy, bench.config.rollout.merge_adapter
    decoding = Decoding(merge_adapter=wish, memory_bytes=memory_size_bytes())
    engine = RolloutEngine(policy.model, bench.together.chat, policy.eos_ids, Limits(ACTION_TOKENS), decoding)
    if not engine.merges:
        return DoesNotApply(engine.merge_reason)
    live = probe_logp(bench.policy)
    with adapters_merged(bench.policy.model):
        merged = probe_logp(bench.policy)
    return _of_probes(
        bench, live, merged, "a probe's next tokens, against base + adapter in one weight, as sampled from"
    )


INFORMATION: Mapping[str, Gate] = {"merged adapter": merged_adapter}


# ---- how differences become findings


def _of_probes(bench: Bench, one: mx.array, other: mx.array, how: str) -> Finding:
    allowed = bench.tolerance.repeated
    if one.shape != other.shape:
        return Finding(math.inf, allowed, f"{how}, whose vocabulary has another size")
    apart = mx.abs(one - other)
    means = {"mean_difference": number(apart.mean()), "mean_tolerance": allowed}
    return Finding(number(apart.max()), allowed, how, means)


def _of_logp(bench: Bench, largest: float, mean: float, how: str, **more: float) -> Finding:
    means = {"mean_difference": mean, "mean_tolerance": bench.tolerance.mean}
    return Finding(largest, bench.tolerance.largest, how, {**means, **more})


def _of_gradients(bench: Bench, other: Mapping[str, mx.array], how: str) -> "Finding | DoesNotApply":
    plain, trained = bench.plain_gradient, bench.batch.trained_mask
    if trained is not None and not trained.any().item():
        return DoesNotApply(f"the algorithm trains none of the actions sampled here, of up to {ACTION_TOKENS} tokens")
    largest = max(number(mx.abs(array).max()) for array in plain.values())
    apart = max(number(mx.abs(other[name] - array).max()) for name, array in plain.items())
    share = apart / largest if largest else math.inf
    how = f"gradients of {bench.batch.rows} episodes, {how}, as a share of the largest entry"
    return Finding(share, bench.tolerance.gradient, how)


# ---- all of them


@dataclass(frozen=True)
class Report:
    """What the gates found, by their names."""

    found: Mapping[str, Finding | DoesNotApply]
    information: Mapping[str, Finding | DoesNotApply]
    tolerance: Tolerance

    @property
    def gates(self) -> dict[str, Finding]:
        """Those that apply."""
        return {name: finding for name, finding in self.found.items() if isinstance(finding, Finding)}

    @property
    def broken(self) -> list[str]:
        return [name for name, finding in self.gates.items() if not finding.passed]

    def as_json(self) -> dict[str, Any]:
        """What check.json holds. What does not apply stands apart from what passed."""
        information = {name: told for name, told in self.information.items() if isinstance(told, Finding)}
        return {
            "gates": {name: finding.as_json() for name, finding in self.gates.items()},
            "does_not_apply": {
                name: other.reason
                for name, other in {**self.found, **self.information}.items()
                if isinstance(other, DoesNotApply)
            },
            "information": {
                name: {key: value for key, value in told.as_json().items() if key not in BARRING}
                for name, told in information.items()
            },
            "tolerances": self.tolerance.why,
        }


BARRING = ("tolerance", "passed", "mean_tolerance")


def examine(bench: Bench) -> Report:
    """Every gate on a policy, which is afterwards as it was. A gate that raises is broken; the others still run.

    Raises: Interrupted.
    """
    with stirred(bench.policy):
        found = {name: _attempted(gate, bench) for name, gate in GATES.items()}
        information = {name: _attempted(gate, bench) for name, gate in INFORMATION.items()}
        return Report(found, information, bench.tolerance)


def _attempted(gate: Gate, bench: Bench) -> Finding | DoesNotApply:
    try:
        return gate(bench)
    except Interrupted:
        raise
    except Exception as error:
        return Finding(math.inf, 0.0, f"raised {type(error).__name__}: {error}")
