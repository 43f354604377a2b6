"""The run folder: unique, locked, and never half written."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlxrl_runs.errors import ConfigError
from mlxrl_runs.training import run_folder
from mlxrl_runs.training.run_folder import RunFolder, git_commit, safe_name


def test_folders_made_at_once_are_never_shared(tmp_path):
    folders = [RunFolder.create(str(tmp_path), "same").path for _ in range(50)]
    assert len(set(folders)) == 50


def test_latest_points_to_the_newest(tmp_path):
    for _ in range(2):
        newest = RunFolder.create(str(tmp_path), "run").path
        assert (tmp_path / "latest").resolve() == newest
    assert not os.path.isabs(os.readlink(tmp_path / "latest"))  # the whole folder may be moved


def test_a_second_writer_is_told_who_is_there(tmp_path):
    code = (
        "import sys; from mlxrl_runs.training.run_folder import RunFolder;"
        "folder = RunFolder.create_at(sys.argv[1], sys.argv[2]); print('locked', flush=True); sys.stdin.read()"
    )
    place = tmp_path / "sweeps" / "study" / "point"
    command = [sys.executable, "-c", code, str(place), str(tmp_path)]
    first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert first.stdout.readline() == "locked\n"
    with pytest.raises(ConfigError, match=f"process {first.pid} is writing here"):
        RunFolder.create_at(place, str(tmp_path))
    first.communicate("", timeout=30)
    folder, aside = RunFolder.create_at(place, str(tmp_path))  # it has ended: its attempt is kept beside
    assert folder.path == place and aside == place.with_name("point_attempt1")


def test_attempts_are_numbered(tmp_path):
    place = tmp_path / "point"
    asides = []
    for _ in range(3):
        folder, aside = RunFolder.create_at(place, str(tmp_path))
        folder.release()
        asides.append(aside and aside.name)
    assert asides == [None, "point_attempt1", "point_attempt2"]


def test_json_is_replaced_whole_and_always_valid(tmp_path):
    folder = RunFolder.create(str(tmp_path), "run")
    folder.write_json("summary.json", {"loss": float("nan"), "peaks": [1.5, float("inf")], "name": "ä"})
    assert json.loads((folder.path / "summary.json").read_text()) == {"loss": None, "peaks": [1.5, None], "name": "ä"}
    with pytest.raises(TypeError):
        folder.write_json("summary.json", {"loss": object()})
    assert json.loads((folder.path / "summary.json").read_text())["peaks"] == [1.5, None]
    assert [file.name for file in folder.path.iterdir() if file.name not in ("summary.json", ".lock")] == []


def test_updates_merge(tmp_path):
    folder = RunFolder.create(str(tmp_path), "run")
    folder.write_json("run.json", {"state": "running", "device": None})
    folder.update(device="cpu")
    assert json.loads((folder.path / "run.json").read_text()) == {"state": "running", "device": "cpu"}


def test_the_end_is_recorded_on_a_full_disk_in_place_of_a_checkpoint_that_was_not_completed(tmp_path, monkeypatch):
    folder = RunFolder.create(str(tmp_path), "run")
    folder.write_json("run.json", {"state": "running", "started_at": run_folder.timestamp()})
    half, whole = (folder.path / "checkpoints" / name for name in ("step_000002.partial", "step_000001"))
    half.mkdir(parents=True), whole.mkdir()

    def sync(descriptor):  # the disk is full as long as the half-written checkpoint is there
        if half.exists():
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folder.os, "fsync", sync)
    run_folder.record_end(folder.path, "failed", 1, "the disk is full")
    assert json.loads((folder.path / "run.json").read_text())["state"] == "failed"
    assert whole.exists() and {file.name for file in folder.path.iterdir()} == {"run.json", ".lock", "checkpoints"}


@pytest.mark.parametrize("kind", ["file", "closed folder"])
def test_an_output_that_cannot_be_written_names_its_key(kind, tmp_path):
    output = tmp_path / "out"
    if kind == "file":
        output.write_text("")
    else:
        output.mkdir(mode=0o500)
        if os.access(output, os.W_OK):
            pytest.skip("this user may write everywhere")
    with pytest.raises(ConfigError, match=r"paths\.output.*Give a folder you can write to"):
        RunFolder.create(str(output), "run")


def test_names_are_safe_for_file_systems():
    assert safe_name("a/b c:d") == "a-b-c-d"
    assert safe_name("../..") == "run"
    assert len(safe_name("x" * 500)) == 120
    assert safe_name("group_size=4,seed=1") == "group_size=4,seed=1"


def test_the_commit_of_a_checkout_is_known():
    commit = git_commit()
    if (Path(__file__).resolve().parents[2] / ".git").exists():
        assert commit is not None and len(commit.removesuffix("-dirty")) == 40
    else:
        assert commit is None
