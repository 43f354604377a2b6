"""Checkpoints: everything a run is at the end of a step, complete only once its manifest exists."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxrl_runs.policy.load import Policy
from mlxrl_runs.training.update import Updater

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoints:
    """Writes `checkpoints/step_000040/` under a run's folder.

    Random draws and the choice of tasks are functions of (seed, step), so the step stands for both.
    """

    folder: Path

    def save(self, step: int, policy: Policy, updater: Updater, progress: dict[str, Any]) -> Path:
        """Write aside, sync, name the files with sizes and hashes in the manifest, rename."""
        final = self._of(step)
        if (final / MANIFEST).is_file():
            return final
        state = {"step": step, "optimizer_updates": updater.updates, "updates_skipped": updater.skipped, **progress}
        with written_aside(final) as aside:
            policy.save(aside)
            mx.save_safetensors(str(aside / "optimizer.safetensors"), dict(tree_flatten(updater.optimizer.state)))
            (aside / "state.json").write_text(json.dumps(state, indent=2) + "\n")
            _write_manifest(aside)
        return final

    def remove(self, step: int) -> None:
        """Forget a checkpoint that a better one has taken the place of."""
        shutil.rmtree(self._of(step), ignore_errors=True)

    def _of(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"step_{step:06d}"


@contextmanager
def written_aside(final: Path) -> Iterator[Path]:
    """A new folder to write into that becomes `final` when nothing went wrong, and is never half of it."""
    aside = final.with_name(final.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    yield aside
    for file in aside.iterdir():
        _sync(file)
    aside.rename(final)
    _sync(final.parent)


def _write_manifest(folder: Path) -> None:
    files = {}
    for file in sorted(folder.iterdir()):
        files[file.name] = {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=2) + "\n")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
