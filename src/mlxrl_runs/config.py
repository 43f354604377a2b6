"""From overrides to a checked RunConfig: compose with Hydra, then one strict pass that lists every problem. No MLX.

Hydra is imported where it composes, so that a worker, which gets its config ready made, does without it.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from mlxrl_runs import problems as wording
from mlxrl_runs.agreement import disagreements
from mlxrl_runs.core import registry
from mlxrl_runs.core.settings import Settings
from mlxrl_runs.errors import ConfigError
from mlxrl_runs.groups import conf_folder, group_choices
from mlxrl_runs.schema import (
    AdamSettings,
    AdamWSettings,
    Budget,
    DebugSettings,
    DoraAdapter,
    FullAdapter,
    JsonlTracking,
    LoraAdapter,
    MemorySettings,
    ModelSettings,
    ModelSource,
    PathSettings,
    RolloutSettings,
    RunConfig,
    TrainerSettings,
    WandbTracking,
)

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

__all__ = [
    "Point",
    "RunConfig",
    "as_typed",
    "compose_config",
    "config_hash",
    "expand_points",
    "implied_model",
    "own_hydra",
    "shown_override",
    "validate",
]

CONFIG_NAME = "config"
FOLDER_KEYS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.output_subdir")
NOT_PART_OF_THE_EXPERIMENT = ("name", "tags", "notes", "tracking", "paths")
SECTIONS: Mapping[str, type[Settings]] = {
    "budget": Budget, "model": ModelSettings, "rollout": RolloutSettings, "memory": MemorySettings,
    "trainer": TrainerSettings, "debug": DebugSettings, "paths": PathSettings,
}  # fmt: skip
CHOICES: Mapping[str, Mapping[str, type[Settings]]] = {
    "adapter": {"lora": LoraAdapter, "dora": DoraAdapter, "full": FullAdapter},
    "optimizer": {"adam": AdamSettings, "adamw": AdamWSettings},
    "tracking": {"wandb": WandbTracking, "jsonl": JsonlTracking},
}
REGISTRIES = {"algorithm": registry.algorithm, "env": registry.environment, "reward": registry.reward}
TABLES = ("rollout.token_bias",)  # whose keys are the user's own
IN_PARTS = ("reward",)  # sections of several parts, each under a label of its own


def config_hash(config: RunConfig) -> str:
    """12 hex digits that are equal for equal experiments: names, notes, tracking and paths do not count."""
    part = {key: value for key, value in config.plain().items() if key not in NOT_PART_OF_THE_EXPERIMENT}
    return hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:12]


# ---- the strict pass


def validate(plain: Mapping[str, Any]) -> RunConfig:
    """A resolved config, checked: unknown and missing keys, types, ranges, and what must agree between keys.

    Raises: ConfigError listing every problem.
    """
    config, found = _check(plain)
    if config is None or found:
        raise ConfigError(_without_secrets(found))
    return config


def _check(plain: Mapping[str, Any]) -> tuple[RunConfig | None, list[str]]:
    parts: dict[str, Any] = {}
    found = _leaked_secrets(plain)
    for name, value in plain.items():
        if name not in RunConfig.model_fields:
            found += _unknown(name, value, wording.known_keys(RunConfig) + _section_keys(plain))
        elif name in IN_PARTS:
            labelled, lines = _check_parts(name, value)
            found += lines
            if labelled is not None:
                parts[name] = labelled
        elif name in SECTIONS or name in CHOICES or name in REGISTRIES:
            section, lines = _check_section(name, value)
            found += lines
            if section is not None:
                parts[name] = section
        elif value == "???":
            found.append(f"{name}: must be given. {wording.default_advice(name, None)}")
        else:
            parts[name] = value
    found += [_no_parts(name, "nothing") for name in IN_PARTS if name not in plain]
    config, lines = _check_top_level(parts, plain)
    return config, found + lines + disagreements(parts)


def _check_parts(name: str, value: Any) -> tuple[dict[str, Settings] | None, list[str]]:
    """A section whose keys are labels, each with a section under the schema that its `name` chooses."""
    if not isinstance(value, Mapping) or not value:
        return None, [_no_parts(name, wording.shown(value))]
    checked = {label: _check_section(f"{name}.{label}", part) for label, part in value.items()}
    lines = [line for _, found in checked.values() for line in found]
    sections = {label: section for label, (section, _) in checked.items() if section is not None}
    return sections if len(sections) == len(value) else None, lines


def _no_parts(name: str, given: str) -> str:
    return f"{name}: got {given}; at least one part is needed. Try {name}=environment."


def _check_section(name: str, value: Any) -> tuple[Settings | None, list[str]]:
    """One section under the schema that its `name` chooses."""
    if not isinstance(value, Mapping):
        return None, [f"{name}: got {wording.shown(value)}; this is a section of keys, such as those of {name}.*"]
    try:
        schema = _schema_of(name, value)
    except ConfigError as error:
        return None, error.problems
    absent = [key for key, leaf in wording.walk(value) if leaf == "???"]
    lines = [f"{name}.{key}: must be given. Add {name}.{key}=VALUE." for key in absent]
    extra = {key: leaf for key, leaf in value.items() if key not in schema.model_fields}
    for key, leaf in extra.items():
        lines += _unknown(f"{name}.{key}", leaf, wording.known_keys(schema, name))
    given = {key: leaf for key, leaf in value.items() if key not in extra}
    try:
        return schema.model_validate(given), lines
    except ValidationError as error:
        more = wording.from_validation(error, schema, name, given)
        return None, lines + [line for line in more if "???" not in line]


def _schema_of(section: str, value: Mapping[str, Any]) -> type[Settings]:
    label, section = section, section.split(".")[0]
    if section in SECTIONS:
        return SECTIONS[section]
    chosen = str(value.get("name"))
    if section in CHOICES:
        if chosen not in CHOICES[section]:
            raise ConfigError(wording.unknown_choice(section, chosen, CHOICES[section]))
        return CHOICES[section][chosen]
    try:
        return REGISTRIES[section].get(chosen)
    except KeyError:
        key = section if label == section else f"{label}.name"
        raise ConfigError(wording.unknown_choice(key, value.get("name"), REGISTRIES[section].names())) from None


def _check_top_level(parts: dict[str, Any], plain: Mapping[str, Any]) -> tuple[RunConfig | None, list[str]]:
    """The whole, once its sections are checked; a key that failed is taken out of `parts`."""
    try:
        return RunConfig.model_validate(parts), []
    except ValidationError as error:
        wrong = {detail["loc"][0] for detail in error.errors()}
        reported = [name for name in {*plain, *IN_PARTS} if name in wrong and name not in parts]  # it already spoke
        lines = wording.from_validation(error, RunConfig, "", parts)
        for name in wrong & parts.keys():
            del parts[str(name)]
        return None, [line for line in lines if line.split(":")[0].split(".")[0] not in reported]


def _section_keys(plain: Mapping[str, Any]) -> list[str]:
    return [key for key, _ in wording.walk(plain) if key.split(".")[0] in RunConfig.model_fields]


def _unknown(key: str, value: Any, known: Sequence[str]) -> list[str]:
    leaves = list(wording.walk(value, key))
    secret = [leaf for leaf, content in leaves if wording.looks_secret(leaf, content)]
    if secret:
        return [wording.secret_key(leaf) for leaf in secret]
    return [_unknown_line(leaf, known) for leaf, _ in leaves]


def _unknown_line(key: str, known: Sequence[str]) -> str:
    """An unknown key may belong to another choice of its group: adapter.rank under adapter=full."""
    group = key.split(".")[0]
    owners = [name for name, schema in CHOICES.get(group, {}).items() if key in wording.known_keys(schema, group)]
    if owners:
        return f"{key}: the chosen {group} has no such key. Try {group}={owners[0]}."
    return wording.unknown_key(key, known)


def _leaked_secrets(plain: Mapping[str, Any]) -> list[str]:
    """Keys whose value holds the secret of an environment variable, by interpolation for instance."""
    secrets = wording.secret_values()
    leaked = [key for key, value in wording.walk(plain) if any(secret in str(value) for secret in secrets)]
    return [wording.secret_key(key) for key in leaked]


# ---- composing with Hydra


@dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Attributes:
        swept: those of its overrides that the sweep varies.
        is_final: false for what stands for points that a sweeper chooses as it goes.
    """

    overrides: tuple[str, ...]
    swept: tuple[str, ...]
    is_final: bool = True


def as_typed(overrides: Sequence[str], many: bool = False) -> list[str]:
    """Overrides with those values quoted that Hydra's grammar does not read: ~/models, a=b, Größe, it's, (new).

    A folder of a sweep has such a name, and people paste it. Tables get the ++ without which Hydra takes no new keys.
    Args: many: a comma separates values, as under -m.
    """
    overrides = [f"++{override}" if override.partition("=")[0] in TABLES else override for override in overrides]
    return [override if _is_read(override) else _with_quotes(override, many) for override in overrides]


def _is_read(override: str) -> bool:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        OverridesParser.create().parse_override(override)
        return True
    except HydraException:
        return False


def _with_quotes(override: str, many: bool) -> str:
    key, equals, value = override.partition("=")
    if not equals or value.startswith("'") or any(mark in value for mark in '[]{}"'):
        return override  # meant as a list, a dict or a quoted text, and not closed
    # in Hydra's quotes a backslash stands for itself, unless a quote follows
    escaped = [re.sub(r"(\\*)('|$)", _doubled, part) for part in (value.split(",") if many else [value])]
    quoted = f"{key}=" + ",".join(f"'{part}'" for part in escaped)
    return quoted if _is_read(quoted) else override


def _doubled(found: re.Match[str]) -> str:
    backslashes, quote = found.groups()
    return 2 * backslashes + (f"\\{quote}" if quote else "")


def compose_config(overrides: Sequence[str], config_dirs: Sequence[str | Path] = ()) -> dict[str, Any]:
    """The resolved config of these overrides, as plain dicts and lists.

    Raises: ConfigError listing everything that is wrong with the overrides, and with the config they leave.
    """
    with own_hydra(config_dirs) as hydra:
        parsed, found = _parse(hydra, as_typed(overrides))
        found += _override_problems(parsed, config_dirs)
        good = [override for override in parsed if not _override_problems([override], config_dirs)]
        good += _parse(hydra, implied_model([str(override.input_line) for override in good]))[0]
        config, lines = _compose(hydra, good)
        plain, unresolved = _resolve(config)
    found += lines + unresolved
    if found:
        # what the rest of the config gets wrong belongs into the same list
        later = _check(plain)[1] if plain and not unresolved else []
        raise ConfigError(_without_secrets([*found, *(line for line in later if line not in found)]))
    return plain


def implied_model(overrides: Sequence[str]) -> list[str]:
    """The `model=...` that `model.path=X` alone stands for: local for a folder, hub for a name.

    Args: overrides: such as Hydra's grammar reads (see `as_typed`).
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_overrides(list(overrides))
    paths = [override.value() for override in parsed if override.key_or_group == "model.path"]
    if not paths or not isinstance(paths[-1], str) or any(override.key_or_group == "model" for override in parsed):
        return []
    is_folder = paths[-1].startswith(("/", ".", "~")) or Path(paths[-1]).is_dir()
    return [f"model={(ModelSource.LOCAL if is_folder else ModelSource.HUB).value}"]


@contextmanager
def own_hydra(config_dirs: Sequence[str | Path]) -> Iterator[Any]:
    """A Hydra of our own; one that a caller has set up is put back afterwards."""
    from hydra import version
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_config_search_path
    from hydra.core.config_search_path import SearchPathQuery
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    # what suits a model times what suits an environment: ${times:a,b}
    OmegaConf.register_new_resolver("times", lambda a, b: a * b, replace=True)
    version.setbase("1.3")
    search_path = create_config_search_path(str(conf_folder()))
    for folder in map(Path, config_dirs):
        if not folder.is_dir():
            raise ConfigError(f"--config-dir: {folder} is no folder. Give one that holds config groups.")
        anchor = SearchPathQuery(provider="schema")
        search_path.prepend(provider="command-line", path=f"file://{folder.resolve()}", anchor=anchor)
    previous = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield Hydra.create_main_hydra2(task_name="mlxrl_runs", config_search_path=search_path)
    finally:
        GlobalHydra.instance().hydra = previous


def _parse(hydra: Any, overrides: Sequence[str]) -> tuple[list["Override"], list[str]]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create(config_loader=hydra.config_loader)
    parsed, found = [], []
    for override in overrides:
        try:
            override.encode()
            one = parser.parse_override(override)
            one.config_loader = hydra.config_loader  # glob() lists a group's choices with it
            if not one.key_or_group:
                raise HydraException("no key")
            parsed.append(one)
        except UnicodeEncodeError:
            readable = override.encode(errors="replace").decode()
            found.append(f"{shown_override(readable)}: holds bytes that are no text in this terminal's encoding.")
        except HydraException:
            example = "Write KEY=VALUE, quoted when VALUE has special characters: 'notes=\"a, b\"'"
            found.append(f"{shown_override(override)}: not understood. {example}")
    return parsed, found


def _override_problems(parsed: Sequence["Override"], config_dirs: Sequence[str | Path]) -> list[str]:
    """What can be told about overrides before anything is composed."""
    choices, found = group_choices(config_dirs), []
    for override in parsed:
        key = override.key_or_group
        if _is_secret(override):
            found.append(wording.secret_key(key))
        elif override.is_sweep_override():
            found.append(
                f"{key}: got several values; one run takes one. Add -m to run all of them, "
                f"or quote a value that holds a comma: '{key}=\"a, b\"'"
            )
        elif key in FOLDER_KEYS:
            found.append(
                f"{key}: runs make their own folders. Try paths.output=DIR, and name=NAME for a sweep's folder."
            )
        elif (group := key.removesuffix(".name")) != key and override.value() in choices.get(group, ()):
            found.append(f"{key}: follows from the chosen {group}. Try {group}={override.value()}.")
        elif key == "hydra.mode":
            found.append("hydra.mode: one run or many is chosen by the flag alone. Try -m.")
        elif key in choices and not override.is_delete() and not _is_choice(override.value(), choices[key]):
            given = override.value() if isinstance(override.value(), list) else [override.value()]
            wrong = next(one for one in given if not _is_choice(one, choices[key]))
            found.append(wording.unknown_choice(key, wrong, choices[key]))
        elif key in choices and (twice := _chosen_twice(override.value())):
            found.append(f"{key}: {twice} is listed twice. Give each name once, or a second part with +{key}.NAME.*")
        elif key in set(choices) - _default_groups() and not (override.is_add() or override.is_force_add()):
            found.append(f"{key}: no part of a run unless it is added. Try +{override.input_line}")
    return found


def _default_groups() -> set[str]:
    """Groups that every run has a choice of; a folder of the user's own may hold others."""
    return set(group_choices())


def _is_choice(value: Any, names: Sequence[str]) -> bool:
    if isinstance(value, list):
        return all(_is_choice(one, names) for one in value)
    return isinstance(value, str) and (value.removesuffix(".yaml") in names or "/" in value)


def _chosen_twice(value: Any) -> Any:
    """The first name that stands in a list again; None for a list without one, and for what is no list."""
    names = value if isinstance(value, list) else []
    return next((name for index, name in enumerate(names) if name in names[:index]), None)


def _is_secret(override: "Override") -> bool:
    """Keys of ours that merely hold the word token are none: budget.tokens, rollout.max_prompt_tokens."""
    key = override.key_or_group
    if override.is_delete() or key in _our_keys():
        return False
    text = override.get_value_element_as_str() if not override.is_sweep_override() else override.get_value_string()
    inside = override.is_hydra_override() or text.startswith("{")
    return wording.looks_secret(key, text) or (inside and bool(wording.SECRET_KEY.search(text)))


def _our_keys() -> list[str]:
    sections = [wording.known_keys(schema, name) for name, schema in SECTIONS.items()]
    chosen = [wording.known_keys(schema, name) for name, group in CHOICES.items() for schema in group.values()]
    return [key for keys in [*sections, *chosen] for key in keys] + ["env.recommended.max_completion_tokens"]


def _compose(hydra: Any, parsed: Sequence["Override"]) -> tuple["DictConfig | None", list[str]]:
    """The config of the chosen groups with the values put in one by one, and what could not be put in.

    Hydra itself stops at the first key it does not know.
    """
    groups = [override for override in parsed if override.is_hydra_override() or _is_group(hydra, override)]
    try:
        config = _compose_groups(hydra, groups)
    except ConfigError as error:
        return None, error.problems
    known, found = _keys_of(config), []
    for override in parsed:
        if override in groups:
            continue
        if override.key_or_group not in known and not override.is_add() and not override.is_force_add():
            found.append(_unknown_line(override.key_or_group, [key for key, is_leaf in known.items() if is_leaf]))
        else:
            found += _put(override, config)
    return config, found


def _is_group(hydra: Any, override: "Override") -> bool:
    from hydra.core.object_type import ObjectType

    return hydra.config_loader.get_group_options(override.key_or_group, ObjectType.CONFIG) != []


def _compose_groups(hydra: Any, groups: Sequence["Override"]) -> "DictConfig":
    """Raises: ConfigError with Hydra's reason."""
    from hydra.types import RunMode

    lines = [override.input_line for override in groups]
    try:
        return hydra.compose_config(CONFIG_NAME, lines, RunMode.RUN, from_shell=False, with_log_configuration=False)
    except _composing_errors() as error:
        raise ConfigError(_hydra_text(error)) from error


def _composing_errors() -> tuple[type[Exception], ...]:
    """Hydra also answers odd input with plain Python errors, and passes on those of yaml files."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError  # type: ignore[import-untyped]

    return (HydraException, OmegaConfBaseException, YAMLError, ValueError, TypeError, AssertionError)


def _keys_of(config: "DictConfig") -> dict[str, bool]:
    """Every full key, true where it is a leaf and false where it is a section."""
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(config)
    leaves = [key for key, _ in wording.walk(plain) if not key.startswith("hydra.")]
    sections = {key.rsplit(".", count)[0] for key in leaves for count in range(1, key.count(".") + 1)}
    return dict.fromkeys(leaves, True) | dict.fromkeys(sections, False)


def _put(override: "Override", config: "DictConfig") -> list[str]:
    from hydra._internal.config_loader_impl import ConfigLoaderImpl

    try:
        ConfigLoaderImpl._apply_overrides_to_config([override], config)
        return []
    except _composing_errors() as error:
        return [_hydra_text(error)]


def _hydra_text(error: BaseException) -> str:
    """Hydra's message on one line, its hint to force keys in left out."""
    texts = [str(error), str(error.__cause__ or "")]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    useful = [line for line in lines if line and not line.startswith(("To append", "full_key", "object_type"))]
    return " ".join(dict.fromkeys(useful)) + f" Compare with: {wording.HELP_COMMAND}"


def _resolve(config: "DictConfig | None") -> tuple[dict[str, Any], list[str]]:
    """Plain dicts with every interpolation filled in; those that cannot be are reported."""
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    if config is None:
        return {}, []
    with open_dict(config):
        config.pop("hydra", None)
    try:
        return OmegaConf.to_container(config, resolve=True), []  # type: ignore[return-value]
    except OmegaConfBaseException:
        raw: Any = OmegaConf.to_container(config)
        return raw, [line for key, value in wording.walk(raw) for line in _unresolved(config, key, value)]


def _unresolved(config: "DictConfig", key: str, value: Any) -> list[str]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        OmegaConf.select(config, key)
        return []
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        return [f"{key}: got {value}, which cannot be filled in ({reason}). Try {key}=VALUE."]


def _without_secrets(lines: Sequence[str]) -> list[str]:
    secrets = wording.secret_values()
    return [wording.redact(line, secrets) for line in lines]


def shown_override(override: str) -> str:
    """An override as it may be printed: the value of a key that looks like a secret stays out."""
    key, _, value = override.partition("=")
    ours = key.lstrip("+~") in _our_keys()
    if wording.SECRET_KEY.search(override) or (not ours and wording.looks_secret(key, value)):
        return f"{key}={wording.HIDDEN}"
    return _without_secrets([override])[0]


# ---- sweeps


def expand_points(overrides: Sequence[str], config_dirs: Sequence[str | Path] = ()) -> list[Point]:
    """Every run of a sweep, in the order they will run.

    A sweeper that chooses its points as it goes (Optuna) has none yet: one point without the swept keys stands for all.
    Raises: ConfigError when the sweep cannot be read, is empty or holds a point twice.
    """
    with own_hydra(config_dirs) as hydra:
        parsed, found = _parse(hydra, as_typed(overrides, many=True))
        found += _override_problems([override for override in parsed if not override.is_sweep_override()], config_dirs)
        found += [wording.secret_key(override.key_or_group) for override in parsed if _is_secret(override)]
        found = list(dict.fromkeys(found))
        if found:
            raise ConfigError(_without_secrets(found))
        is_basic, params = _sweeper(hydra, parsed)
        task = [override for override in parsed if not override.is_hydra_override()]
        if not is_basic:
            given = tuple(str(override.input_line) for override in task if not override.is_sweep_override())
            return [Point(given, (), is_final=False)]
        points = _split(_parse(hydra, params)[0] + task, config_dirs)
    twice = [point for index, point in enumerate(points) if point in points[:index]]
    if twice:
        raise ConfigError(f"-m: the point {' '.join(twice[0].swept)} is listed twice. Give each value once.")
    return points


def _sweeper(hydra: Any, parsed: Sequence["Override"]) -> tuple[bool, list[str]]:
    """Whether Hydra's own sweeper is chosen, and the sweep that its `params` hold."""
    from hydra.types import RunMode

    lines = [override.input_line for override in parsed]
    try:
        config = hydra.compose_config(
            CONFIG_NAME, lines, RunMode.MULTIRUN, from_shell=False, with_log_configuration=False
        )
    except _composing_errors():
        return True, []  # whatever is wrong is told with the points
    params = config.hydra.sweeper.get("params") or {}
    return config.hydra.sweeper._target_.endswith(".BasicSweeper"), [f"{key}={value}" for key, value in params.items()]


def _split(parsed: Sequence["Override"], config_dirs: Sequence[str | Path]) -> list[Point]:
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.errors import HydraException

    try:
        rows = BasicSweeper.split_arguments(list(parsed), None)[0]
    except HydraException as error:
        raise ConfigError(f"-m: {error}. Try KEY=A,B,C, or another sweeper: hydra/sweeper=NAME") from error
    if not rows:
        raise ConfigError([line for override in parsed if (line := _nothing_matched(override, config_dirs))])
    swept = {override.get_key_element() for override in parsed if override.is_sweep_override()}
    return [Point(tuple(row), tuple(text for text in row if text.partition("=")[0] in swept)) for row in rows]


def _nothing_matched(override: "Override", config_dirs: Sequence[str | Path]) -> str | None:
    if not override.is_sweep_override() or list(override.sweep_string_iterator()):
        return None
    group = override.key_or_group
    names = group_choices(config_dirs).get(group, [])
    advice = f"choices: {', '.join(names)}" if names else "it is no config group"
    return f"{group}: {override.get_value_string()} matches nothing; {advice}. Try {group}=glob(*)."
