import hashlib
import json

import mlx.core as mx
import pytest

from building import one_turn_batch, settings, tiny, updater_of
from mlxrl_runs.core.files import MANIFEST
from mlxrl_runs.training.state import Checkpoints


def saved(tmp_path):
    policy, algorithm = tiny(), settings("algorithm", "grpo")
    updater = updater_of(policy)
    updater.update(algorithm, algorithm.credit(one_turn_batch([[1.0, 0.0]])))
    return Checkpoints(tmp_path).save(7, policy, updater, {"episodes": 2}), policy, updater


def test_a_checkpoint_names_its_files_with_sizes_and_hashes(tmp_path):
    folder, _, updater = saved(tmp_path)
    assert folder.name == "step_000007"
    files = json.loads((folder / MANIFEST).read_text())["files"]
    assert set(files) == {file.name for file in folder.iterdir()} - {MANIFEST}
    for name, entry in files.items():
        content = (folder / name).read_bytes()
        assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert json.loads((folder / "state.json").read_text()) == {
        "step": 7, "optimizer_updates": updater.updates, "updates_skipped": 0, "episodes": 2,
    }  # fmt: skip


def test_it_holds_the_weights_and_the_optimizers_moments(tmp_path):
    folder, policy, updater = saved(tmp_path)
    fresh = tiny(seed=3)
    fresh.load_weights(folder)
    prompt = mx.array([[5, 6, 7]])
    assert mx.array_equal(fresh.model(prompt), policy.model(prompt))
    moments = mx.load(str(folder / "optimizer.safetensors"))
    assert moments["step"].item() == updater.optimizer.state["step"].item() == 1
    assert sum(name.endswith(".m") for name in moments) == 56


def test_a_half_written_one_has_another_name_and_no_manifest(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mx, "save_safetensors", full)
    with pytest.raises(OSError, match="No space left"):
        saved(tmp_path)
    [left] = (tmp_path / "checkpoints").iterdir()
    assert left.name == "step_000007.partial" and not (left / MANIFEST).exists()
