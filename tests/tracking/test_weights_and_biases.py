import functools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mlxrl_runs.core.protocols import RunRecord
from mlxrl_runs.tracking import weights_and_biases
from mlxrl_runs.tracking.weights_and_biases import WeightsAndBiasesTracker, histogram

DRIVER = Path(__file__).with_name("drive_wandb.py")
WANDB = shutil.which("wandb", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
SECRET = "DUMMY-KEY-123"
KEY = "d0" * 20  # the length the SDK asks of a key
NOWHERE = "http://127.0.0.1:9"  # nobody answers there


def drive(folder, runs, *words, mode="auto", init_seconds=1.0, **environment):
    """Run the driver and return what it printed, its report, and the seconds from start to the end of the process."""
    home = folder / "home"
    home.mkdir(parents=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_") and name != "NETRC"}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, DRIVER, folder, str(runs), mode, str(init_seconds), *words, f"+wandb.api_key={SECRET}"],
        env={**kept, "HOME": str(home), "WANDB_BASE_URL": NOWHERE, **environment},
        capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *lines, report = done.stdout.splitlines()
    return {
        **json.loads(report),
        "said": [line for line in lines if "still sending" not in line],  # depends on how busy the machine is
        "waited_for": [line for line in lines if "still sending" in line],
        "stderr": done.stderr,
        "total_seconds": time.monotonic() - started,
    }


def offline_folder(run_folder):
    [found] = (run_folder / "wandb").glob("offline-run-*")
    return found


@functools.cache  # the reader takes over a second to start
def read_back(run_folder):
    """(records, summary) as wandb's own reader finds them."""
    found, inspect = offline_folder(run_folder), [WANDB, "leet", "inspect", "--json"]
    records = subprocess.run([*inspect, found], capture_output=True, text=True, check=True, timeout=60).stdout
    summary = subprocess.run([*inspect, "--summary", found], capture_output=True, text=True, check=True, timeout=60)
    return [json.loads(line) for line in records.splitlines()], json.loads(summary.stdout)


def history(records):
    return [record["history"]["item"] for record in records if record["type"] == "history"]


def logged(rows, name):
    return [(row["step"], row[name]) for row in rows if name in row]


@pytest.fixture(scope="module")
def three_runs(tmp_path_factory):
    """Three runs after one another in one process, not logged in, the second of which failed."""
    folder = tmp_path_factory.mktemp("three")
    return folder, drive(folder, 3)


def test_h27_runs_of_one_process_are_runs_of_their_own_in_one_group(three_runs):
    # H27: the SDK's default would hand out the first run again
    folder, report = three_runs
    read = [read_back(folder / f"run{seed}") for seed in (1, 2, 3)]
    assert [summary["run_id"] for _, summary in read] == report["ids"] and len(set(report["ids"])) == 3
    assert [summary["config"]["seed"] for _, summary in read] == [1, 2, 3]
    assert [summary["exit_code"] for _, summary in read] == [0, 1, 0]
    for records, _ in read:
        [run] = [record["run"] for record in records if record["type"] == "run"]
        assert run["run_group"] == "the sweep" and run["job_type"] == "train"


def test_h27_a_run_that_is_still_open_is_not_handed_out_again(tmp_path):
    # H27, the case that went wrong: the earlier run was not finished before the next one started
    report = drive(tmp_path, 2, "together")
    read = [read_back(tmp_path / f"run{seed}") for seed in (1, 2)]
    assert [summary["run_id"] for _, summary in read] == report["ids"]
    assert [summary["config"]["seed"] for _, summary in read] == [1, 2]
    assert all(logged(history(records), "reward/mean") == [(1, 0.25), (2, 0.5), (3, 0.75)] for records, _ in read)


def test_h28_the_config_is_plain_and_holds_overrides_and_versions(three_runs):
    # H28
    _, summary = read_back(three_runs[0] / "run1")
    config = summary["config"]
    assert config["algorithm"] == {"name": "gigpo", "omega": 1}
    assert config["tags"] == ["a", "b"] and config["budget"] == {"tokens": None}
    assert config["overrides"] == ["seed=1"] and config["versions"] == {"mlx": "0.32.4"}
    assert summary["name"] == "seed 1" and summary["notes"] == "a note"
    assert summary["tags"] == ["tiny", "t" * 64]  # the SDK refuses more than 64 letters


def test_h29_every_row_arrives_on_our_own_step_even_an_earlier_one(three_runs):
    # H29: the evaluation of step 2 comes after step 3 was logged; counted by the SDK's own step it would be dropped
    records, _ = read_back(three_runs[0] / "run1")
    rows = history(records)
    assert logged(rows, "reward/mean") == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert logged(rows, "eval/sampled_success") == [(0, 0.25)]
    assert logged(rows, "eval/greedy_success") == [(2, 0.75)]
    axes = {record["metric"].get("glob_name"): record["metric"] for record in records if record["type"] == "metric"}
    assert axes["*"]["step_metric"] == "step"


def test_a_peak_is_summarised_by_its_maximum(three_runs):
    # 99, 98, 97 were logged
    _, summary = read_back(three_runs[0] / "run1")
    assert summary["summary"]["memory/peak_bytes"] == {"max": 99}
    assert summary["summary"]["best/reward/mean"] == 0.75


def test_episodes_arrive_as_one_growing_table_and_a_histogram(three_runs):
    folder, _ = three_runs
    records, summary = read_back(folder / "run1")
    assert summary["summary"]["trajectories"]["nrows"] == 6  # 3 steps of 2 one-turn episodes
    tables = sorted(offline_folder(folder / "run1").glob("files/media/table/*.json"))
    rows = sorted(row for table in tables for row in json.loads(table.read_text())["data"])
    assert rows[0] == [1, "doors-1", 0, 0, "A door.", "open <b>", 1, -1, "room 1", "eos", 1, False]
    drawn = [row for row in history(records) if "advantage/histogram.values" in row]
    assert [row["step"] for row in drawn] == [1, 2, 3]
    assert drawn[0]["advantage/histogram.bins"][0] == -1 and drawn[0]["advantage/histogram.bins"][-1] == 1
    assert sum(drawn[0]["advantage/histogram.values"]) == 2


def test_without_a_login_one_line_says_so_and_how_to_sync(three_runs):
    folder, report = three_runs
    assert len(report["said"]) == 3 and report["stderr"] == ""
    expected = f"To upload it later: wandb sync {offline_folder(folder / 'run1')}"
    assert "not logged in" in report["said"][0] and "wandb login" in report["said"][0]
    assert report["said"][0].endswith(expected)


def test_nothing_is_left_in_the_home_folder_or_the_environment(three_runs):
    folder, report = three_runs
    assert list((folder / "home").rglob("*")) == []
    assert report["environment"] == []
    assert list((folder / "run3/wandb/data").rglob("tmp*")) != []  # what a later sync uploads lies with its run


def files_holding(folder, text):
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def test_h30_no_secret_of_the_command_line_is_recorded(three_runs):
    # H30: the process was started with +wandb.api_key=DUMMY-KEY-123
    assert files_holding(three_runs[0], SECRET) == []
    assert len(files_holding(three_runs[0], "the sweep")) >= 3  # the search does see what is there


def test_h30_a_key_without_a_network_falls_back_to_offline_and_leaks_nothing(tmp_path):
    # H30 again: the key is used, and yet in no file
    report = drive(tmp_path, 1, WANDB_API_KEY=KEY)
    [line] = report["said"]
    assert "could not go online" in line and "wandb sync" in line
    records, summary = read_back(tmp_path / "run1")
    assert [row["step"] for row in history(records) if "reward/mean" in row] == [1, 2, 3]
    assert summary["run_id"] == report["ids"][0]
    assert files_holding(tmp_path, KEY) == []
    assert not list((tmp_path / "run1/wandb").glob("run-*"))


@pytest.mark.slow
def test_a_key_without_a_network_holds_a_run_up_for_seconds_only(tmp_path):
    report = drive(tmp_path, 1, mode="online", init_seconds=weights_and_biases.INIT_SECONDS, WANDB_API_KEY=KEY)
    assert report["total_seconds"] < 20
    assert len(report["waited_for"]) == 1 and "could not go online" in report["said"][0]


def test_a_key_that_is_none_is_no_reason_to_stop(tmp_path):
    report = drive(tmp_path, 1, WANDB_API_KEY="short")
    assert "the login cannot be used" in report["said"][0]
    assert "short" not in report["said"][0].split("wandb sync")[0].replace("too short", "")
    assert read_back(tmp_path / "run1")[1]["exit_code"] == 0


def test_wandb_mode_decides(tmp_path):
    report = drive(tmp_path / "offline", 1, mode="online", WANDB_MODE="offline", WANDB_API_KEY=KEY)
    assert "WANDB_MODE" in report["said"][0] and report["ids"][0] is not None
    report = drive(tmp_path / "disabled", 1, WANDB_MODE="disabled")
    assert report["ids"] == [None] and "disabled" in report["said"][0]
    assert not list((tmp_path / "disabled/run1").rglob("*.wandb"))


def test_online_without_a_login_is_refused_in_words(tmp_path):
    code = "from mlxrl_runs.tracking.weights_and_biases import require_login; require_login()"
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert "ConfigError: tracking.mode: online was asked for, but wandb has no login" in done.stderr
    for allowed in ({"WANDB_MODE": "offline"}, {"WANDB_API_KEY": KEY}):
        subprocess.run([sys.executable, "-c", code], env={**environment, **allowed}, check=True, timeout=60)


def test_neither_the_start_nor_a_step_waits_for_the_sdk(tmp_path, monkeypatch):
    opened, seen = threading.Event(), []

    class Run:
        def __init__(self):
            self.summary, self.log = {}, seen.append

        def finish(self, exit_code):
            seen.append(exit_code)

    def slow(self, record):
        assert opened.wait(20)
        return Run()

    monkeypatch.setattr(WeightsAndBiasesTracker, "_open", slow)
    tracker = WeightsAndBiasesTracker(tmp_path, "p", None, "auto", print)
    tracker.start(RunRecord(name="r", folder="", job="train", config={}))
    for step in (1, 2, 3):
        tracker.log(step, {"a": step})
    assert tracker.run_id is not None and seen == []  # all calls returned while the SDK was still at it
    opened.set()
    tracker.finish({"state": "failed"}, 1)
    assert seen == [{"step": 1, "a": 1}, {"step": 2, "a": 2}, {"step": 3, "a": 3}, 1]


def test_trouble_in_the_sdk_is_told_once(tmp_path, monkeypatch):
    said = []

    class Broken:
        def log(self, row):
            raise OSError("disk full")

    monkeypatch.setattr(WeightsAndBiasesTracker, "_open", lambda self, record: Broken())
    tracker = WeightsAndBiasesTracker(tmp_path, "p", None, "auto", said.append)
    tracker.start(RunRecord(name="r", folder="", job="train", config={}))
    tracker.log(1, {"a": 1})
    tracker.log(2, {"a": 2})
    tracker.finish({}, 0)
    assert said == ["wandb stopped (OSError: disk full). The run goes on; metrics.jsonl has everything."]


def test_a_histogram_counts_every_value_once():
    # bins of width 1 from -1 to 3: [-1, 0) [0, 1) [1, 2) [2, 3]
    assert histogram([-1.0, 0.0, 0.5, 3.0], bins=4) == ([1, 2, 0, 1], [-1.0, 0.0, 1.0, 2.0, 3.0])
    # equal values: one unit around them, so 2 lies on the edge at the middle of [1.5, 2.5]
    assert histogram([2.0, 2.0], bins=2) == ([0, 2], [1.5, 2.0, 2.5])
