"""The folder of a run: made atomically, locked by one writer, its files replaced whole. Imports no MLX."""

import fcntl
import json
import math
import os
import platform
import re
import shutil
import subprocess
import threading
from collections.abc import Iterable, Mapping
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mlxrl_runs.errors import ConfigError

DISTRIBUTIONS = {"mlx": "mlx", "mlx_lm": "mlx-lm", "hydra": "hydra-core", "wandb": "wandb", "mlxrl_runs": "mlxrl-runs"}
NAME_BYTES = 120  # a folder name's share of the 255 bytes file systems allow; attempts and hashes need room
LATEST = "latest"
LOCK_FILE = ".lock"


class RunFolder:
    """One run's folder, locked until `release`.

    Attributes: path: absolute.
    """

    def __init__(self, path: Path, lock: int):
        self.path = path
        self._lock = lock
        self._updating = threading.Lock()

    @classmethod
    def create(cls, output: str, name: str) -> "RunFolder":
        """A new folder <output>/<date>/<time with microseconds>_<name>/ that nobody else can get."""
        root = Path(output).expanduser().absolute()
        while True:
            now = datetime.now()
            path = root / f"{now:%Y-%m-%d}" / f"{now:%H-%M-%S-%f}_{safe_name(name)}"
            try:
                return cls._make(path, root)
            except FileExistsError:
                continue  # two runs in one microsecond: the clock has moved on

    @classmethod
    def create_at(cls, path: str | Path, output: str) -> "tuple[RunFolder, Path | None]":
        """The folder of a sweep's point, whose name is the same at every attempt.

        Returns: the new folder, and where an earlier attempt that had ended was moved to.
        Raises: ConfigError naming the process when a run is still writing there.
        """
        folder, root = Path(path).expanduser().absolute(), Path(output).expanduser().absolute()
        aside = _move_aside(folder) if folder.exists() else None
        try:
            return cls._make(folder, root), aside
        except FileExistsError:
            raise ConfigError(f"{folder}: another run has just started here. Give the sweep another name=...") from None

    @classmethod
    def _make(cls, path: Path, root: Path) -> "RunFolder":
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
            lock = _lock(path)
        except FileExistsError:
            if path.is_dir():
                raise
            raise ConfigError(f"paths.output: {root} is in the way: a file, not a folder. {_OTHER_OUTPUT}") from None
        except OSError as error:
            raise ConfigError(f"paths.output: cannot write to {root} ({error.strerror}). {_OTHER_OUTPUT}") from error
        _point_latest_to(path, root)
        return cls(path, lock)

    def write_text(self, name: str, text: str) -> None:
        """Replace a file whole: a reader, or a crash, sees the old one or the new one."""
        write_text(self.path / name, text)

    def write_json(self, name: str, content: Any) -> None:
        """Like `write_text`; numbers that are not finite become null, which JSON can hold."""
        write_json(self.path / name, content)

    def update(self, **changes: Any) -> None:
        """Merge changes into run.json."""
        with self._updating:
            update_run_json(self.path, **changes)

    def release(self) -> None:
        os.close(self._lock)


_OTHER_OUTPUT = "Give a folder you can write to: paths.output=DIR"


def make_sweep_folder(output: str, name: str) -> Path:
    """<output>/sweeps/<name>/, kept when it is there: a sweep with a name of its own goes on in the same place."""
    root = Path(output).expanduser().absolute()
    folder = root / "sweeps" / safe_name(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"paths.output: cannot write to {root} ({error.strerror}). {_OTHER_OUTPUT}") from error
    return folder


def start_record(
    config: Mapping[str, Any], name: str, overrides: Iterable[str], config_hash: str, sweep: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What run.json says while a run is running; `config` itself goes into config.yaml.

    Args: name: the one a person reads, where the config's own is null.
    """
    return {
        "name": name,
        "tags": list(config["tags"]),
        "notes": config["notes"],
        "state": "running",
        "job": config["job"],
        "steps": config["steps"],
        "pid": os.getpid(),
        "exit_code": None,
        "started_at": timestamp(),
        "ended_at": None,
        "seconds": None,
        "versions": versions(),
        "device": None,
        "git_commit": git_commit(),
        "overrides": list(overrides),
        "sweep": None if sweep is None else sweep["name"],
        "config_hash": config_hash,
        "engine": {},
        "attempts": [],
        "wandb_id": None,
        "error": None,
    }


def record_end(folder: Path, state: str, exit_code: int, error: str | None) -> None:
    """Write into run.json how a run ended."""
    record = read_run_json(folder)
    seconds = (datetime.now().astimezone() - datetime.fromisoformat(record["started_at"])).total_seconds()
    end = {
        "state": state, "exit_code": exit_code, "error": error, "ended_at": timestamp(), "seconds": round(seconds, 3),
    }  # fmt: skip
    try:
        update_run_json(folder, **end)
    except OSError:  # a full disk: checkpoints that were not completed make room
        for unfinished in folder.glob("checkpoints/*.partial"):
            shutil.rmtree(unfinished, ignore_errors=True)
        update_run_json(folder, **end)


def read_run_json(folder: Path) -> dict[str, Any]:
    """run.json of a folder; empty when there is none."""
    file = folder / "run.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def update_run_json(folder: Path, **changes: Any) -> None:
    write_json(folder / "run.json", {**read_run_json(folder), **changes})


def write_json(file: Path, content: Any) -> None:
    write_text(file, json.dumps(_finite(content), indent=2, ensure_ascii=False) + "\n")


def write_text(file: Path, text: str) -> None:
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with open(aside, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(aside, file)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {str(key): _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def safe_name(text: str, limit: int = NAME_BYTES) -> str:
    """Text as part of a file name: letters, digits and -_.=,+ stay; at most `limit` bytes."""
    kept = re.sub(r"[^A-Za-z0-9_.=,+-]+", "-", text).strip("-.")
    return kept[:limit] or "run"


def timestamp() -> str:
    return datetime.now().astimezone().isoformat(timespec="microseconds")


def versions() -> dict[str, str | None]:
    """Of Python and of what a run depends on, by import name; null for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name, distribution in DISTRIBUTIONS.items():
        try:
            found[name] = version(distribution)
        except PackageNotFoundError:
            found[name] = None
    return found


def git_commit() -> str | None:
    """Commit of the checkout this code runs from, `-dirty` when tracked files differ; null for an installed package."""
    checkout = Path(__file__).resolve().parents[3]
    if not (checkout / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _lock(folder: Path) -> int:
    """Take the folder's lock and put our pid into it.

    Raises: BlockingIOError when another process holds it.
    """
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _move_aside(folder: Path) -> Path:
    """Rename the folder of an attempt that has ended to the first free <name>_attemptN."""
    try:
        lock = _lock(folder)
    except BlockingIOError:
        pid = (folder / LOCK_FILE).read_text().strip()
        raise ConfigError(
            f"{folder}: process {pid} is writing here. Wait for it, stop it (kill {pid}), or give another name=..."
        ) from None
    number = 1
    while (aside := folder.with_name(f"{folder.name}_attempt{number}")).exists():
        number += 1
    folder.rename(aside)
    os.close(lock)
    return aside


def _point_latest_to(path: Path, root: Path) -> None:
    """<output>/latest -> this run, replaced in one step; a real file of that name is left alone."""
    link, aside = root / LATEST, root / f".{LATEST}.{os.getpid()}"
    if link.exists() and not link.is_symlink():
        return
    aside.unlink(missing_ok=True)
    aside.symlink_to(os.path.relpath(path, root))
    os.replace(aside, link)
