"""How a wrong config is put into words: the full key, what was given, what is allowed, what to try."""

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mlxrl_runs.core.settings import Settings
from mlxrl_runs.groups import conf_folder

HELP_COMMAND = "python -m mlxrl_runs --help"
LIST_COMMAND = "python -m mlxrl_runs --cfg job"
HIDDEN = "<hidden>"
SECRET_KEY = re.compile(r"api_?key|secret|passw(or)?d|credential|private_?key|access_?key", re.IGNORECASE)


def walk(value: Any, key: str = "") -> Iterable[tuple[str, Any]]:
    """Full keys with their leaves; a list or an empty section is a leaf."""
    if isinstance(value, Mapping) and value:
        for name, part in value.items():
            yield from walk(part, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def closest(wrong: str, known: Iterable[str]) -> str | None:
    """The known full key a person most likely meant, if any is near: first in the same section, then anywhere."""
    names = list(known)
    section, _, last = wrong.rpartition(".")
    siblings = {name.rpartition(".")[2]: name for name in names if name.rpartition(".")[0] == section}
    by_end = {name.rpartition(".")[2]: name for name in reversed(names)}
    if last in by_end:
        return by_end[last]
    near = [siblings[end] for end in difflib.get_close_matches(last, siblings, n=1, cutoff=0.65)]
    near += difflib.get_close_matches(wrong, names, n=1, cutoff=0.8)
    near += [by_end[end] for end in difflib.get_close_matches(last, by_end, n=1, cutoff=0.7)]
    return next(iter(near), None)


def unknown_key(key: str, known: Iterable[str]) -> str:
    suggestion = closest(key, known)
    question = f" Did you mean {suggestion}?" if suggestion else ""
    return f"{key}: no such key.{question} See every key: {LIST_COMMAND}"


def unknown_choice(group: str, given: Any, choices: Iterable[str]) -> str:
    """A group or a name in it that does not exist."""
    names = list(choices)
    near = difflib.get_close_matches(str(given), names, n=1, cutoff=0.5)
    advice = f"Did you mean {group}={near[0]}?" if near else f"Try {group}={names[0]}." if names else ""
    return f"{group}: got {shown(given)}; choices: {', '.join(names)}. {advice}".rstrip()


def too_coarse(checkpoint: str, every: int, layers: int) -> list[str]:
    """The first of every k layers is a pattern only where there are more than k."""
    if every <= 1 or every < layers:
        return []
    pattern = f", or every_k with k from 2 to {layers - 1}" if layers > 2 else ""
    return [
        f"memory.checkpoint: got {checkpoint}, but this model has {layers} layers; allowed: none, layer{pattern}. "
        f"Try memory.checkpoint={'every_2' if layers > 2 else 'layer'}."
    ]


def looks_secret(key: str, value: Any) -> bool:
    """Whether an unknown key seems to carry a password of some service."""
    is_token = "token" in key.lower() and isinstance(value, str) and not value.replace(".", "").isdigit()
    return bool(SECRET_KEY.search(key)) or is_token


def secret_key(key: str) -> str:
    return (
        f"{key}: secrets are not accepted in the config, which is saved and uploaded. "
        "Set the environment variable WANDB_API_KEY instead, or run: wandb login"
    )


def secret_values() -> list[str]:
    """Values of environment variables that look like secrets, long enough not to be found by accident."""
    named = (value for name, value in os.environ.items() if SECRET_KEY.search(name) or name.endswith("TOKEN"))
    return [value for value in named if len(value) >= 8]


def redact(line: str, secrets: Iterable[str]) -> str:
    for secret in secrets:
        line = line.replace(secret, HIDDEN)
    return line


def from_validation(
    error: ValidationError, schema: type[Settings], section: str, given: Mapping[str, Any]
) -> list[str]:
    """One line for each wrong key of a section (`section` is empty at the top level)."""
    by_key: dict[tuple[Any, ...], ErrorDetails] = {}
    for detail in error.errors():
        by_key.setdefault(_real_path(detail, given), detail)
    return list(dict.fromkeys(_line(path, detail, schema, section, given) for path, detail in by_key.items()))


def _real_path(detail: ErrorDetails, given: Any) -> tuple[Any, ...]:
    """The error's location without the names of union members that pydantic puts into it."""
    path: list[Any] = []
    for part in detail["loc"]:
        if isinstance(given, Mapping) and (part in given or detail["type"] == "missing"):
            given = given.get(part)
        elif isinstance(given, list | tuple) and isinstance(part, int) and part < len(given):
            given = given[part]
        else:
            break
        path.append(part)
    return tuple(path)


def _line(
    path: tuple[Any, ...], detail: ErrorDetails, schema: type[Settings], section: str, given: Mapping[str, Any]
) -> str:
    names = [part for part in path if isinstance(part, str)]
    key = ".".join([section, *names] if section else names)
    if detail["type"] == "extra_forbidden":
        return unknown_key(key, known_keys(schema, section))
    if detail["type"] == "missing" and isinstance(detail["loc"][-1], str):
        return f"{key}: missing. {default_advice(key, given.get('name'))}"
    if detail["type"] in ("value_error", "assertion_error"):
        text = str(detail.get("ctx", {}).get("error", detail["msg"]))
        allowed = describe(schema, names)
        if not allowed:
            about = text.partition(":")[0]  # a rule between keys begins with the one it is about
            return f"{key}.{text}" if about in schema.model_fields else f"{key}: {text}"
        return f"{key}: got {shown(_at(given, names))}; {text}. {default_advice(key, given.get('name'))}"
    allowed = describe(schema, names) or detail["msg"]
    return f"{key}: got {shown(_at(given, names))}; allowed: {allowed}. {default_advice(key, given.get('name'))}"


def shown(value: Any) -> str:
    """A given value as a person would have typed it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, str) else str(value)


def _at(given: Any, names: Iterable[str]) -> Any:
    for name in names:
        given = given[name]
    return given


def known_keys(schema: type[Settings], prefix: str = "") -> list[str]:
    """Full keys of a schema, those of its sections included."""
    keys = []
    for name, field in schema.model_fields.items():
        key = f"{prefix}.{name}" if prefix else name
        is_section = isinstance(field.annotation, type) and issubclass(field.annotation, Settings)
        keys += known_keys(field.annotation, key) if is_section else [key]  # type: ignore[arg-type]
    return keys


def describe(schema: type[Settings], names: list[str]) -> str:
    """What a key accepts, in words; empty for a whole section."""
    for name in names[:-1]:
        schema = schema.model_fields[name].annotation  # type: ignore[assignment]
    if not names or not isinstance(schema, type) or names[-1] not in schema.model_fields:
        return ""
    field = schema.model_fields[names[-1]]
    return _describe(field.annotation, field.metadata)


_KINDS = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false", type(None): "null"}


def _describe(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _describe(arguments[0], [*arguments[1:], *metadata])
    if origin in (Union, UnionType):
        return " or ".join(map(_describe, arguments))
    if origin is Literal:
        return _options(arguments)
    if origin in (tuple, list):
        return _list_of(arguments, metadata)
    if origin is dict:
        key, value = map(_describe, arguments)
        return f"{{KEY: VALUE}}, each KEY {key}, each VALUE {value}"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _options([member.value for member in annotation])
    return _KINDS.get(annotation, "a section of keys") + _range(metadata)


def _options(values: Sequence[Any]) -> str:
    return str(values[0]) if len(values) == 1 else "one of " + ", ".join(map(str, values))


def _list_of(arguments: Sequence[Any], metadata: Iterable[Any]) -> str:
    count = "" if len(arguments) == 1 or arguments[-1] is Ellipsis else f" of {len(arguments)}"
    return f"a list{count}{_range(metadata)}, each item {_describe(arguments[0])}"


_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def _range(metadata: Iterable[Any]) -> str:
    """The bounds among a field's annotations, which pydantic keeps bare or inside a Field."""
    bare = [part for item in metadata for part in (getattr(item, "metadata", None) or [item])]
    bounds = [
        f"{sign} {getattr(part, name):g}" for part in bare for name, sign in _BOUNDS.items() if hasattr(part, name)
    ]
    length = ["not empty" for part in bare if getattr(part, "min_length", 0)]
    return (" " if bounds or length else "") + " and ".join(bounds + length)


def default_advice(key: str, choice: Any) -> str:
    """What the yaml says for a key, as something to type.

    Args: choice: the name chosen in the key's group, whose yaml is looked up.
    """
    import yaml  # type: ignore[import-untyped]

    section, _, rest = key.partition(".")
    own_file = conf_folder() / section / f"{choice}.yaml"
    candidates = [
        (own_file, rest),
        (own_file, rest.partition(".")[2]),  # behind the label of a part
        (conf_folder() / section / "default.yaml", rest),
        (conf_folder() / "config.yaml", key),
        *((file, rest) for file in _laid_under(own_file)),
    ]
    for file, name in candidates:
        if not (name and file.is_file()):
            continue
        value: Any = yaml.safe_load(file.read_text())
        for part in name.split("."):
            value = value.get(part, _ABSENT) if isinstance(value, Mapping) else _ABSENT
        if isinstance(value, str) and "${" in value:
            return "Leave it out: it then follows what suits the model and the environment."
        if value == "???":
            return f"Give it as {key}=VALUE."
        if value is not _ABSENT and not isinstance(value, Mapping):
            return f"Try {key}={_typed(value)}."
    return f"See its value: {LIST_COMMAND}"


def _laid_under(file: Path) -> list[Path]:
    """The yamls of conf/parts whose keys a file of an option group takes over: `/parts/NAME@_here_`."""
    if not file.is_file():
        return []
    found = re.findall(r"^ *- /(parts/\w+)@_here_$", file.read_text(), re.MULTILINE)
    return [conf_folder() / f"{name}.yaml" for name in found]


_ABSENT = object()


def _typed(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, list):
        return "[" + ",".join(map(_typed, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) or "''"
