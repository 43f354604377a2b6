"""Sweeps over the fake worker: each point its own process, folder and record."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

SCRIPT = Path(__file__).with_name("supervised.py")


def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    return ended.returncode, ended.stdout, ended.stderr


def records(folder: Path, sweep: str) -> dict[str, dict]:
    files = sorted((folder / "outputs" / "sweeps" / sweep).glob("*/run.json"))
    return {file.parent.name: json.loads(file.read_text()) for file in files}


def test_each_point_is_a_run_of_its_own(tmp_path):
    code, out, err = run(tmp_path, "-m", "seed=1,2,3", "notes=fine", "name=study")
    assert (code, err) == (0, "")
    found = records(tmp_path, "study")
    assert len(found) == 3 and {record["state"] for record in found.values()} == {"finished"}
    assert len({record["pid"] for record in found.values()}) == 3
    assert {record["sweep"] for record in found.values()} == {"study"}
    assert sorted(name.split("_", 1)[1] for name in found) == ["seed=1", "seed=2", "seed=3"]
    assert "3 of 3 runs finished" in out and "success  0.300  seed=3" in out
    listed = json.loads((tmp_path / "outputs" / "sweeps" / "study" / "sweep.json").read_text())
    assert listed["overrides"] == ["seed=1,2,3", "notes=fine", "name=study"]
    assert [Path(point["folder"]).name for point in listed["points"]] == sorted(found, key=lambda name: name[-1])


def test_a_failed_point_does_not_stop_the_others(tmp_path):
    code, out, err = run(tmp_path, "notes=fail,killed,fine", "name=study", "-m")
    assert code == 1
    states = {name.split("=")[1]: record["state"] for name, record in records(tmp_path, "study").items()}
    assert states == {"fail": "failed", "killed": "failed", "fine": "finished"}
    assert "1 of 3 runs finished" in out
    assert "notes=fail: failed: the loss is not finite" in err and "notes=killed: failed: its process was killed" in err


def test_the_same_sweep_again_moves_the_earlier_attempt_aside(tmp_path):
    run(tmp_path, "-m", "seed=1,2", "notes=fine", "name=study")
    first = records(tmp_path, "study")
    code, out, err = run(tmp_path, "-m", "seed=1,2", "notes=fine", "name=study")
    assert code == 0 and err.count("_attempt1") == 2
    again = records(tmp_path, "study")
    assert set(again) == set(first) | {f"{name}_attempt1" for name in first}
    assert "2 of 2 runs finished" in out


def test_a_sweep_without_a_name_gets_the_time(tmp_path):
    assert run(tmp_path, "-m", "seed=1,2", "notes=fine")[0] == 0
    assert len(list((tmp_path / "outputs" / "sweeps").iterdir())) == 1


def test_a_signal_ends_the_whole_sweep(tmp_path):
    command = [sys.executable, str(SCRIPT), "-m", "seed=1,2", "notes=wait", "name=study"]
    process = subprocess.Popen(command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("outputs/sweeps/study/*/ready")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert [record["state"] for record in records(tmp_path, "study").values()] == ["interrupted"]
    assert "not started" in out and "seed=2" in out


def test_a_sweep_of_one_point_is_called_after_its_run(tmp_path):
    code, out, err = run(tmp_path, "-m", "seed=2", "notes=fine", "name=study")
    assert (code, err) == (0, "")
    [name] = records(tmp_path, "study")
    assert name.split("_", 1)[1] == "study"
    assert "--- 1/1 study" in out and "success  0.200  study" in out


def test_values_with_odd_letters_are_swept_as_typed(tmp_path):
    code, out, err = run(tmp_path, "-m", "notes=ä,it's=fine", "seed=1", "name=study")
    assert (code, err) == (0, "") and "2 of 2 runs finished" in out
    configs = (tmp_path / "outputs" / "sweeps" / "study").glob("*/config.yaml")
    assert {yaml.safe_load(file.read_text())["notes"] for file in configs} == {"ä", "it's=fine"}


def test_a_point_that_another_process_writes_is_named_in_the_report(tmp_path):
    command = [sys.executable, str(SCRIPT), "-m", "seed=1", "notes=wait", "name=study"]
    first = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("outputs/sweeps/study/*/ready")) and time.monotonic() < deadline:
        time.sleep(0.05)
    code, _, err = run(tmp_path, "-m", "seed=1", "notes=wait", "name=study")
    first.send_signal(signal.SIGINT)
    assert first.wait(30) == 130
    assert code == 1 and "is writing here" in err
    assert "study: did not start (exit code 2); the reason stands above" in err
