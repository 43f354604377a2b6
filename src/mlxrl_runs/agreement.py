"""What must agree between the keys of a config, each of them valid by itself. Imports no MLX."""

import difflib
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mlxrl_runs import problems as wording
from mlxrl_runs.core.reward_part import WHOLE
from mlxrl_runs.errors import ConfigError
from mlxrl_runs.policy.shapes import SHAPES
from mlxrl_runs.policy.source import TINY, layer_count
from mlxrl_runs.schema import (
    Job,
    MemorySettings,
    ModelSettings,
    ModelSource,
    Precision,
    RolloutSettings,
    RunConfig,
    TrainerSettings,
)
from mlxrl_runs.tracking.names import FREE, METRICS

ADAPTER_FILES = ("adapters.safetensors", "adapter_config.json")
LABEL = re.compile(r"[\w-]+")
LIKE_A_SLIP = 0.94  # likeness of two names that differ by a letter; reward/stdev and reward/std have 0.91
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def require_agreement(config: RunConfig) -> None:
    """Check between the sections of a config that was changed after it was validated.

    Raises: ConfigError listing every problem.
    """
    found = disagreements(dict(config))
    if found:
        raise ConfigError(found)


def disagreements(parts: Mapping[str, Any]) -> list[str]:
    """Each rule looks at parts that are valid by themselves; one that misses a part has nothing to say."""
    found: list[str] = []
    for needed, rule in _RULES:
        if all(name in parts for name in needed):
            found += rule(*(parts[name] for name in needed))
    return found


def _group_has_a_baseline(algorithm: Any, group_size: int) -> list[str]:
    minimum = getattr(algorithm, "minimum_group_size", 1)
    if int(group_size) >= minimum:
        return []
    return [
        f"group_size: got {group_size}; algorithm={algorithm.name} compares the episodes of a task with one another "
        f"and needs at least {minimum}. Try group_size={max(minimum, 4)}."
    ]


def _filtered_groups_may_disagree(algorithm: Any, group_size: int) -> list[str]:
    if int(group_size) > 1 or not getattr(algorithm, "filter_groups", False):
        return []
    return [
        "algorithm.filter_groups: got true; it leaves out groups that all earned the same, and with group_size=1 that "
        "is every one, so nothing would be trained. Try algorithm.filter_groups=false, or group_size=4."
    ]


def _minibatches_have_groups(algorithm: Any, tasks_per_step: int) -> list[str]:
    minibatches = getattr(algorithm, "minibatches", 1)
    if minibatches <= int(tasks_per_step):
        return []
    return [
        f"algorithm.minibatches: got {minibatches}; the {tasks_per_step} groups of a step stay whole, so that at most "
        f"that many can be dealt. Try algorithm.minibatches={tasks_per_step}, or a larger tasks_per_step."
    ]


def _environment_answers(algorithm: Any, env: Any) -> list[str]:
    coefficient = getattr(algorithm, "echo_coef", 0)
    if coefficient == 0 or getattr(env, "max_turns", None) != 1:
        return []
    return [
        f"algorithm.echo_coef: got {coefficient:g}; it trains on what the environment answers to an action, and "
        f"env={env.name} has one turn. Try algorithm.echo_coef=0, or env=recurring."
    ]


def _reward_labels_are_free(reward: Mapping[str, Any]) -> list[str]:
    """A part is logged as reward/<label>, and in evaluations beside the whole reward."""
    taken = [*WHOLE, *(["reward"] if len(reward) > 1 else [])]
    return [
        f"reward.{label}: a part cannot be called {label!r}; allowed: letters, digits, _ and -, but not "
        f"{', '.join(taken)}, which are numbers of the whole reward. Try reward.my_part."
        for label in reward
        if label in taken or not LABEL.fullmatch(label)
    ]


def _something_is_paid(job: Any, reward: Mapping[str, Any]) -> list[str]:
    if job != Job.TRAIN or any(part.weight != 0 for part in reward.values()):
        return []
    label = next(iter(reward))
    return [
        f"reward.{label}.weight: got 0, and no other part of the reward has a weight, so nothing can be learned. "
        f"Try reward.{label}.weight=1."
    ]


def _rewards_have_an_answer(reward: Mapping[str, Any], env: Any) -> list[str]:
    needing = [label for label, part in reward.items() if part.needs_answer]
    if not needing or getattr(env, "gives_answers", True):
        return []
    return [
        f"reward.{needing[0]}: compares with a right answer, and env={env.name} has none. "
        "Try env=arithmetic, or reward=environment."
    ]


def _checkpoint_is_not_for_training(job: Any, checkpoint: str | None) -> list[str]:
    if checkpoint is None:
        return []
    if job not in (Job.EVALUATE, Job.CHECK):
        return [
            f"checkpoint: got {checkpoint!r}; only job=evaluate and job=check read it. "
            "Try job=evaluate, or checkpoint=null."
        ]
    if not Path(checkpoint).expanduser().is_dir():
        return [
            f"checkpoint: {checkpoint} is no folder; allowed: a run's checkpoints/step_... or adapters folder. "
            "Try checkpoint=outputs/latest/adapters."
        ]
    return []


def _model_source(model: ModelSettings) -> list[str]:
    found = []
    if model.source == ModelSource.LOCAL:
        found += _model_folder(model.path)
    elif model.source == ModelSource.HUB:
        found += _hub_name(model.path)
    elif model.path is not None:
        found.append(f"model.path: got {model.path!r}; model={model.name} has no path. Try model=local or model=hub.")
    if model.revision is not None and model.source != ModelSource.HUB:
        found.append(f"model.revision: got {model.revision!r}; only models of the hub have one. Try model=hub.")
    if model.source == ModelSource.RANDOM and model.shape not in SHAPES:
        line = (
            f"model.shape: got {wording.shown(model.shape)}; allowed: one of {', '.join(SHAPES)}. Try model.shape=11m."
        )
        found.append(line)
    if model.source != ModelSource.RANDOM and model.shape is not None:
        found.append(f"model.shape: got {model.shape!r}; only model=random has a shape. Try model=random.")
    return found


def _hub_name(path: str | None) -> list[str]:
    if path is not None and HUB_NAME.fullmatch(path):
        return []
    example = "Try model.path=mlx-community/Qwen3-0.6B-4bit, or model=local for a folder."
    name, _, revision = (path or "").partition("@")
    if HUB_NAME.fullmatch(name):
        example = f"Try model.path={name} model.revision={revision or 'COMMIT'}."
    return [f"model.path: got {wording.shown(path)}; model=hub needs a name on the Hugging Face hub. {example}"]


def _quantised_weights_are_not_trained(model: ModelSettings, adapter: Any) -> list[str]:
    quantised = model.precision == Precision.FOUR_BIT or (
        model.source == ModelSource.SMOLLM2 and model.precision == Precision.STORED
    )
    if adapter.name != "full" or not quantised:
        return []
    return [
        f"adapter: got full, which cannot train the quantised weights of model.precision={model.precision}. "
        "Try adapter=lora, or model.precision=bfloat16."
    ]


def _model_folder(path: str | None) -> list[str]:
    if path is None:
        return ["model.path: got null; model=local needs a model folder. Try model.path=DIR, or model=tiny."]
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return [f"model.path: {path} is no folder; allowed: one in mlx-lm's format. Try model.path=DIR, or model=tiny."]
    missing = [name for name in ("config.json", "model*.safetensors") if not any(folder.glob(name))]
    if not missing:
        return []
    return [
        f"model.path: {path} has no {' and no '.join(missing)}; allowed: a folder in mlx-lm's format. "
        f"Try: python -m mlx_lm convert --hf-path MODEL --mlx-path DIR, then model.path=DIR."
    ]


def _initial_adapter_is_there(adapter: Any) -> list[str]:
    if adapter.name == "full" or adapter.init is None:
        return []
    missing = [name for name in ADAPTER_FILES if not (Path(adapter.init).expanduser() / name).is_file()]
    if not missing:
        return []
    return [
        f"adapter.init: {adapter.init} has no {' and no '.join(missing)}; allowed: the folder of a saved adapter. "
        "Try adapter.init=outputs/latest/adapters, or adapter.init=null."
    ]


def _episode_holds_a_turn(rollout: RolloutSettings) -> list[str]:
    if rollout.max_completion_tokens < rollout.max_episode_tokens:
        return []
    return [
        f"rollout.max_episode_tokens: got {rollout.max_episode_tokens}; must be greater than "
        f"rollout.max_completion_tokens={rollout.max_completion_tokens}, or no answer fits. "
        f"Try rollout.max_episode_tokens={rollout.max_completion_tokens + rollout.max_prompt_tokens}."
    ]


def _early_stop_has_one_bound(trainer: TrainerSettings) -> list[str]:
    stop = trainer.early_stop
    bounds = [f"trainer.early_stop.{side}" for side in ("above", "below") if getattr(stop, side) is not None]
    if stop.metric is None and bounds:
        return [
            f"trainer.early_stop.metric: got null, but {' and '.join(bounds)} is given. "
            "Try trainer.early_stop.metric=reward/success."
        ]
    if stop.metric is not None and len(bounds) != 1:
        given = "neither" if not bounds else "both"
        return [
            f"trainer.early_stop.above, trainer.early_stop.below: got {given}; trainer.early_stop.metric={stop.metric} "
            "needs exactly one. Try trainer.early_stop.above=0.95 trainer.early_stop.below=null."
        ]
    return []


def _early_stop_metric_is_one(trainer: TrainerSettings, algorithm: Any, reward: Mapping[str, Any]) -> list[str]:
    """Names that a run makes itself are let through: of parts of its reward, and of an algorithm from elsewhere."""
    name = trainer.early_stop.metric
    elsewhere = not type(algorithm).__module__.startswith("mlxrl_runs.")
    if name is None or name in METRICS or elsewhere or name.rpartition("/")[2] in reward:
        return []
    is_free = name.startswith(FREE) and not name.endswith("/")
    near = difflib.get_close_matches(name, METRICS, n=1, cutoff=LIKE_A_SLIP if is_free else 0.6)
    if is_free and not near:
        return []
    advice = f"Did you mean {near[0]}?" if near else "Try trainer.early_stop.metric=reward/success."
    return [f"trainer.early_stop.metric: got {name!r}; allowed: a name of metrics.jsonl (docs/metrics.md). {advice}"]


def _early_stop_metric_is_measured(trainer: TrainerSettings, tracking: Any, algorithm: Any) -> list[str]:
    """What is known before a run to be absent from its steps; the rest is told once a step lacks it."""
    name = trainer.early_stop.metric
    if name is None:
        return []
    kl_coef, updates = getattr(algorithm, "kl_coef", 0), getattr(algorithm, "updates_per_batch", 1)
    several = ("kl/old", "ratio/", "clip/")
    absent = [
        (name.startswith("eval/") and trainer.eval_every == 0, "is measured only before and after training with "
         "trainer.eval_every=0. Try trainer.eval_every=10."),
        (name == "kl/reference" and tracking.kl_every == 0 and kl_coef == 0, "is not measured with "
         "tracking.kl_every=0. Try tracking.kl_every=1."),
        (name == "loss/kl" and kl_coef == 0, "is no part of the loss with algorithm.kl_coef=0. "
         "Try trainer.early_stop.metric=kl/reference."),
        (name.startswith(several) and updates == 1, "is constant, and absent, with algorithm.updates_per_batch=1. "
         "Try algorithm.updates_per_batch=2."),
        (name.startswith("warm_start/"), "is measured once, before training. "
         "Try trainer.early_stop.metric=reward/success."),
    ]  # fmt: skip
    return [f"trainer.early_stop.metric: {name} {reason}" for is_absent, reason in absent if is_absent]


def _wired_memory_is_metals(memory: MemorySettings) -> list[str]:
    if memory.wired_limit_gib is None or sys.platform == "darwin":
        return []
    return [
        f"memory.wired_limit_gib: got {memory.wired_limit_gib:g}; only a Mac's Metal has this limit. "
        "Try memory.wired_limit_gib=null."
    ]


def _checkpointing_suits_the_depth(memory: MemorySettings, model: ModelSettings) -> list[str]:
    layers = _layers(model)
    return [] if layers is None else wording.too_coarse(memory.checkpoint, memory.checkpoint_every, layers)


def _layers(model: ModelSettings) -> int | None:
    """None where that is known only once the model's files are here; the run asks again."""
    if model.source == ModelSource.RANDOM:
        return SHAPES[model.shape]["num_hidden_layers"] if model.shape in SHAPES else None
    if model.source == ModelSource.LOCAL and model.path is not None:
        return layer_count(Path(model.path).expanduser())
    return layer_count(TINY) if model.source == ModelSource.TINY else None


_RULES: tuple[tuple[tuple[str, ...], Callable[..., list[str]]], ...] = (
    (("algorithm", "group_size"), _group_has_a_baseline),
    (("algorithm", "group_size"), _filtered_groups_may_disagree),
    (("algorithm", "tasks_per_step"), _minibatches_have_groups),
    (("algorithm", "env"), _environment_answers),
    (("reward",), _reward_labels_are_free),
    (("job", "reward"), _something_is_paid),
    (("reward", "env"), _rewards_have_an_answer),
    (("job", "checkpoint"), _checkpoint_is_not_for_training),
    (("model",), _model_source),
    (("model", "adapter"), _quantised_weights_are_not_trained),
    (("adapter",), _initial_adapter_is_there),
    (("rollout",), _episode_holds_a_turn),
    (("trainer",), _early_stop_has_one_bound),
    (("trainer", "algorithm", "reward"), _early_stop_metric_is_one),
    (("trainer", "tracking", "algorithm"), _early_stop_metric_is_measured),
    (("memory",), _wired_memory_is_metals),
    (("memory", "model"), _checkpointing_suits_the_depth),
)
