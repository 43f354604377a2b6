"""Checkpoints: everything a run is at the end of a step, complete only once its manifest exists."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxrl_runs.core.files import MANIFEST, write_manifest, written_aside
from mlxrl_runs.policy.load import Policy
from mlxrl_runs.training.update import Updater


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
            for name, learner in updater.learners.items():
                file = "optimizer.safetensors" if name == "policy" else f"{name}_optimizer.safetensors"
                mx.save_safetensors(str(aside / file), dict(tree_flatten(learner.optimizer.state)))
            (aside / "state.json").write_text(json.dumps(state, indent=2) + "\n")
            write_manifest(aside)
        return final

    def remove(self, step: int) -> None:
        """Forget a checkpoint that a better one has taken the place of."""
        shutil.rmtree(self._of(step), ignore_errors=True)

    def _of(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"step_{step:06d}"
