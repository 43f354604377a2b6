"""Types, meanings and ranges of every section of a run's config. The yamls in conf/ hold the values. Imports no MLX."""

import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    SerializeAsAny,
    ValidationInfo,
    field_validator,
)

from mlxrl_runs.core.reward_part import RewardPart
from mlxrl_runs.core.settings import (
    Count,
    Float,
    NonNegative,
    OpenShare,
    Positive,
    PositiveInt,
    Settings,
    Share,
    UnitInterval,
)


def _as_text(value: Any) -> Any:
    """Text that looks like a number or a switch was typed as text: `name=2026`."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


Text = Annotated[str, BeforeValidator(_as_text)]


def _settled(value: str | None) -> str | None:
    """A folder that stays the same one while `outputs/latest` moves on."""
    return value if value is None or not Path(value).expanduser().is_dir() else str(Path(value).expanduser().resolve())


class Job(StrEnum):
    TRAIN = "train"
    EVALUATE = "evaluate"
    CHECK = "check"
    DOCTOR = "doctor"


class ModelSource(StrEnum):
    TINY = "tiny"
    RANDOM = "random"
    LOCAL = "local"
    HUB = "hub"
    SMOLLM2 = "smollm2"


class Precision(StrEnum):
    STORED = "stored"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FOUR_BIT = "4bit"


class RolloutMode(StrEnum):
    BATCHED = "batched"
    SEQUENTIAL = "sequential"


class Switch(StrEnum):
    """Three ways, since yaml reads on and off as true and false."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class Schedule(StrEnum):
    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class WandbMode(StrEnum):
    AUTO = "auto"
    ONLINE = "online"
    OFFLINE = "offline"


class Budget(Settings):
    """Limits that end training early; null: none."""

    tokens: PositiveInt | None
    episodes: PositiveInt | None
    minutes: Positive | None


class LearningRates(Settings):
    """By adapter; 0 measures without learning."""

    lora: NonNegative
    dora: NonNegative
    full: NonNegative


class ModelRecommended(Settings):
    """What suits a model; adapter and optimizer read it by interpolation."""

    learning_rate: LearningRates
    adapter_rank: PositiveInt
    adapter_scale: Positive


class ModelSettings(Settings):
    """A model and what suits it.

    Attributes:
        path: folder of a local model, or org/name on the hub. revision: commit, tag or branch there; null for main.
        thinking: enable_thinking of the chat template; null leaves it out.
        shape: size of a random model.
    """

    name: Annotated[Text, Field(min_length=1)]
    source: ModelSource
    path: Text | None
    revision: Text | None
    precision: Precision
    thinking: bool | None
    shape: Text | None
    recommended: ModelRecommended

    @field_validator("path")
    @classmethod
    def _path_is_settled(cls, path: str | None, info: ValidationInfo) -> str | None:
        return _settled(path) if info.data.get("source") == ModelSource.LOCAL else path

    @property
    def label(self) -> str:
        """What names a run: the yaml's name, or the model's where the yaml stands for any model."""
        if self.path is None or self.name not in (ModelSource.LOCAL, ModelSource.HUB):
            return self.name
        last = Path(self.path).expanduser().resolve().name
        return re.sub(r"[^\w.-]+", "-", last).strip("-") or self.name


class Reference(StrEnum):
    START = "start"
    BASE = "base"


class _LowRankAdapter(Settings):
    """Attributes: scale: mlx-lm's, alpha / rank already multiplied; targets: "auto", "all", or suffixes of layer names.

    init: folder of a saved adapter to start from; reference: what KL compares with, the starting policy or the base.
    """

    rank: PositiveInt
    scale: Positive
    dropout: Share
    targets: Literal["auto", "all"] | Annotated[tuple[Text, ...], Field(min_length=1)]
    init: Annotated[Text | None, AfterValidator(_settled)]
    reference: Reference


class LoraAdapter(_LowRankAdapter):
    name: Literal["lora"]


class DoraAdapter(_LowRankAdapter):
    """LoRA with a trained magnitude per output."""

    name: Literal["dora"]


class FullAdapter(Settings):
    """Every weight is trained."""

    name: Literal["full"]


class _AdamFamily(Settings):
    """Attributes: warmup_steps: optimizer steps; max_grad_norm: null for no clipping."""

    learning_rate: NonNegative
    betas: tuple[Share, Share]
    eps: Positive
    warmup_steps: Count
    schedule: Schedule
    final_learning_rate_ratio: UnitInterval
    max_grad_norm: Positive | None


class AdamSettings(_AdamFamily):
    name: Literal["adam"]


class AdamWSettings(_AdamFamily):
    """Adam with decoupled weight decay."""

    name: Literal["adamw"]
    weight_decay: NonNegative


def _as_id(value: Any) -> Any:
    """JSON and the command line know text alone as keys."""
    return int(value) if isinstance(value, str) and re.fullmatch(r"-?[0-9]+", value) else value


Token = Annotated[int | Text, BeforeValidator(_as_id)]


class RolloutSettings(Settings):
    """How episodes are sampled.

    Attributes:
        max_*_tokens: of one turn's answer, of the first prompt, of a whole episode. top_k: 0 is off.
        token_bias: added to the logits of tokens, by id or by a text that is one token; a number is an id.
        compile: decode with compiled steps. tune: choose between ways to decode by a short timing, on a GPU.
        merge_adapter: sample with base and adapter as one weight.
        max_rows: decoded together; null for all of a step. max_cache_bytes: of their keys and values; fewer rows then.
        env_threads: environments that answer at the same time; 0 for one after the other.
    """

    name: Literal["on_policy"]
    mode: RolloutMode
    max_completion_tokens: PositiveInt
    max_prompt_tokens: PositiveInt
    max_episode_tokens: PositiveInt
    temperature: Positive
    top_p: OpenShare
    min_p: Share
    top_k: Count
    stop_strings: tuple[Annotated[Text, Field(min_length=1)], ...]
    ignore_eos: bool
    token_bias: dict[Token, Float]
    compile: Switch
    tune: Switch
    merge_adapter: Switch
    max_rows: PositiveInt | None
    max_cache_bytes: PositiveInt | None
    env_threads: Count


def _granularity(value: Any) -> Any:
    if isinstance(value, str) and re.fullmatch(r"none|layer|every_([2-9]|[1-9]\d+)", value):
        return value
    raise ValueError("allowed: none, layer, or every_k with 2 <= k < the model's layers, such as every_2")


class MemorySettings(Settings):
    """Attributes: micro_batch_size: rows of one pass, 0 for all; wired_limit_gib: Metal only.

    checkpoint: which layers keep only their inputs for the backward pass and are computed a second time in it: none,
    every layer, or the first of every k.
    """

    checkpoint: Annotated[str, BeforeValidator(_granularity)]
    micro_batch_size: Count
    cache_limit_gib: NonNegative | None
    wired_limit_gib: NonNegative | None

    @property
    def checkpoint_every(self) -> int:
        """0 for no layer, 1 for each, k for the first of every k."""
        if self.checkpoint == "none":
            return 0
        return 1 if self.checkpoint == "layer" else int(self.checkpoint.removeprefix("every_"))


class WarmStart(Settings):
    """A short supervised start on examples the environment makes itself.

    Attributes:
        steps: optimizer steps, 0 for none.
        examples_per_step: episodes of one step, of training tasks.
        learning_rate: null for that of the optimizer section.
        actions: what they show: the best actions, or well-formed ones drawn at random, which teach the form alone.
    """

    steps: Count
    examples_per_step: PositiveInt
    learning_rate: Positive | None
    actions: Literal["oracle", "random"]


class CollapseGuard(Settings):
    """When training has done more harm than good, and is stopped with the best checkpoint kept.

    Attributes:
        enabled: look at all.
        window_steps: steps that the running success of the sampled episodes is averaged over.
        lost_share: stop when it has lost more than this share of its best.
    """

    enabled: bool
    window_steps: PositiveInt
    lost_share: OpenShare


class EarlyStopSettings(Settings):
    """A bound on a metric that ends training, everything evaluated and saved.

    Attributes:
        metric: a name of docs/metrics.md; null for none.
        above, below: the bound, in the metric's unit; one of them goes with a metric.
        patience: measurements in a row that must be beyond it.
    """

    metric: Text | None
    above: Float | None
    below: Float | None
    patience: PositiveInt


class TrainerSettings(Settings):
    """Attributes: evaluation_rows: episodes decoded together; *_every: steps, 0 for never in between."""

    eval_every: Count
    evaluation_episodes: PositiveInt
    evaluation_rows: PositiveInt
    save_every: Count
    max_nonfinite_updates: Count
    warm_start: WarmStart
    collapse_guard: CollapseGuard
    early_stop: EarlyStopSettings


class WandbTracking(Settings):
    """Attributes: *_every: steps, 0 for off; entity: null for the account's default."""

    name: Literal["wandb"]
    kl_every: Count
    trajectories_every: Count
    trajectories: PositiveInt
    project: Annotated[Text, Field(min_length=1)]
    entity: Text | None
    mode: WandbMode


class JsonlTracking(Settings):
    """Files and console only."""

    name: Literal["jsonl"]
    kl_every: Count
    trajectories_every: Count
    trajectories: PositiveInt


class DebugSettings(Settings):
    """Faults to inject."""

    inject_nan_step: Count | None


class PathSettings(Settings):
    """Attributes: output: root of everything a run writes."""

    output: Annotated[Text, Field(min_length=1)]


class RunConfig(Settings):
    """One run, complete and resolved. Sections follow the groups of conf/.

    Attributes:
        name: null means <algorithm>-<env>-<model>-G<group_size>-s<seed>.
        reproducible: give up what is faster and not the same bit for bit, on a GPU; a CPU has nothing to give up.
        group_size: G, episodes per task; a step rolls out group_size x tasks_per_step.
        checkpoint: what job=evaluate scores and job=check examines; null for the base model.
        reward: its parts, by the label they are logged under.
        algorithm, env: instances of the classes registered under the chosen names.
    """

    job: Job
    name: Text | None
    tags: tuple[Text, ...]
    notes: Text
    seed: Count
    reproducible: bool
    steps: PositiveInt
    group_size: PositiveInt
    tasks_per_step: PositiveInt
    budget: Budget
    checkpoint: Annotated[Text | None, AfterValidator(_settled)]
    model: ModelSettings
    adapter: LoraAdapter | DoraAdapter | FullAdapter
    env: SerializeAsAny[Settings]
    reward: Annotated[dict[str, SerializeAsAny[RewardPart]], Field(min_length=1)]
    rollout: RolloutSettings
    algorithm: SerializeAsAny[Settings]
    memory: MemorySettings
    optimizer: AdamSettings | AdamWSettings
    trainer: TrainerSettings
    tracking: WandbTracking | JsonlTracking
    debug: DebugSettings
    paths: PathSettings
    _overrides: tuple[str, ...] = PrivateAttr(default=())
    _python_parts: tuple[str, ...] = PrivateAttr(default=())

    def remembering(self, overrides: Sequence[str] = (), python_parts: Sequence[str] = ()) -> "RunConfig":
        """The same config, which knows where it came from; what is empty leaves what was known before."""
        copy = self.model_copy()
        copy._overrides = tuple(overrides) or self._overrides
        copy._python_parts = tuple(python_parts) or self._python_parts
        return copy

    @property
    def overrides(self) -> tuple[str, ...]:
        """What it was composed of, where that was remembered."""
        return self._overrides

    @property
    def python_parts(self) -> tuple[str, ...]:
        """Sections that were handed over as Python objects, which no command can name."""
        return self._python_parts

    @property
    def run_name(self) -> str:
        """The name a person reads."""
        registered = [str(getattr(part, "name")) for part in (self.algorithm, self.env)]  # noqa: B009
        return self.name or "-".join([*registered, self.model.label, f"G{self.group_size}", f"s{self.seed}"])

    def plain(self) -> dict[str, Any]:
        """Numbers, text, lists and dicts only: what config.yaml and the trackers get."""
        return self.model_dump(mode="json")
