"""How a run's process is started, stopped and accounted for. The work itself is played by fake_worker.py."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from mlxrl_runs.worker import Tee

SCRIPT = Path(__file__).with_name("supervised.py")


def start(folder: Path, *overrides: str, **streams) -> "subprocess.Popen[str]":
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    unignored = lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under nohup inherit an ignored SIGHUP
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *overrides], cwd=folder, text=True, preexec_fn=unignored, **streams
    )


def run(folder: Path, *overrides: str) -> tuple[int, str, str]:
    process = start(folder, *overrides)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def run_folder(folder: Path) -> Path:
    return (folder / "outputs" / "latest").resolve()


def record(folder: Path) -> dict:
    return json.loads((run_folder(folder) / "run.json").read_text())


def wait_until_gone(pid: int, seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} is still there after {seconds} s")


def started(folder: Path, part: str) -> "tuple[subprocess.Popen[str], int]":
    """A run that waits, once it waits; with its worker's process id."""
    process = start(folder, f"notes={part}")
    ready = folder / "outputs" / "latest" / "ready"
    deadline = time.monotonic() + 30
    while not (ready.is_file() and ready.read_text()) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.poll() is None, process.communicate()[1]
    return process, int(ready.read_text())


def test_a_run_that_ends_well_leaves_a_whole_record(tmp_path):
    code, _, err = run(tmp_path, "notes=fine", "seed=3", "tags=[first,second]")
    assert (code, err) == (0, "")
    found = record(tmp_path)
    assert found["state"] == "finished" and found["exit_code"] == 0 and found["error"] is None
    assert found["overrides"] == ["notes=fine", "seed=3", "tags=[first,second]"]
    assert (found["name"], found["tags"]) == ("gigpo-recurring-tiny-G4-s3", ["first", "second"])
    assert found["notes"] == "fine" and run_folder(tmp_path).name.endswith("_gigpo-recurring-tiny-G4-s3")
    assert found["ended_at"] > found["started_at"] and found["seconds"] > 0
    assert set(found["versions"]) == {"python", "mlx", "mlx_lm", "hydra", "wandb", "mlxrl_runs"}
    config = yaml.safe_load((run_folder(tmp_path) / "config.yaml").read_text())
    assert config["seed"] == 3 and config["optimizer"]["learning_rate"] > 0


def test_nothing_of_mlx_is_imported_before_the_work_begins(tmp_path):
    run(tmp_path, "notes=fine")
    assert (run_folder(tmp_path) / "mlx_was_imported_before").read_text() == "False"


def test_the_log_holds_what_was_printed_without_escape_codes(tmp_path):
    _, out, _ = run(tmp_path, "notes=fine")
    assert "\x1b[31mworking\x1b[0m on fine" in out
    assert (run_folder(tmp_path) / "run.log").read_text() == "done\n"  # a line that was redrawn: its last state


@pytest.mark.parametrize(
    ("part", "message"), [("exits", "called exit(0)"), ("vanishes", "its process ended before the run was over")]
)
def test_work_that_ends_the_process_with_code_0_has_not_finished(part, message, tmp_path):
    code, _, err = run(tmp_path, f"notes={part}")
    assert code == 1 and message in err
    found = record(tmp_path)
    assert (found["state"], found["exit_code"]) == ("failed", 1) and message in found["error"]


def test_h26_runs_started_at_once_have_folders_of_their_own(tmp_path):
    runs = [start(tmp_path, "notes=fine", f"seed={seed}") for seed in range(4)]
    assert [process.wait(60) for process in runs] == [0] * 4
    configs = list(tmp_path.glob("outputs/2*/*/config.yaml"))
    assert sorted(yaml.safe_load(file.read_text())["seed"] for file in configs) == [0, 1, 2, 3]


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
def test_a_run_works_with_its_streams_closed(closed, tmp_path):
    close = "; ".join(f"os.close({number})" for number in closed)
    code = f"import os, sys; {close}; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    command = [sys.executable, "-c", code, str(SCRIPT), "notes=fine"]
    assert subprocess.run(command, cwd=tmp_path, timeout=60, check=False).returncode == 0
    assert record(tmp_path)["state"] == "finished"
    assert (run_folder(tmp_path) / "run.log").read_text() == "done\n"


def test_a_terminal_without_a_letter_ends_no_run(tmp_path):
    command = [sys.executable, str(SCRIPT), "notes='ünï'"]
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii:strict"}
    done = subprocess.run(command, cwd=tmp_path, env=ascii_only, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert b"\\xfcn\\xef" in done.stdout


class FullDisk(io.StringIO):
    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_log_on_a_full_disk_leaves_the_terminal_as_it_is():
    terminal = io.StringIO()
    print("step 1", file=Tee(terminal, FullDisk(), threading.Lock()))
    assert terminal.getvalue() == "step 1\n"


def test_a_terminal_stays_a_terminal_for_the_work(tmp_path):
    import pty

    ours, theirs = pty.openpty()
    probe = "from mlxrl_runs.worker import Tee; import sys, io, threading; "
    probe += "print(Tee(sys.stdout, io.StringIO(), threading.Lock()).isatty())"
    subprocess.run([sys.executable, "-c", probe], stdout=theirs, timeout=30, check=True)
    assert os.read(ours, 100).strip() == b"True"
    os.close(ours), os.close(theirs)


def test_a_run_goes_on_when_its_output_is_closed(tmp_path):
    process = start(tmp_path, "notes=fine", stdout=subprocess.PIPE)
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert record(tmp_path)["state"] == "finished"


def test_an_expected_failure_is_one_message(tmp_path):
    code, _, err = run(tmp_path, "notes=fail")
    assert code == 1
    assert err.strip() == "The run failed: the loss is not finite. Try optimizer.learning_rate=1e-5"
    assert record(tmp_path)["state"] == "failed" and "not finite" in record(tmp_path)["error"]
    assert "Traceback" in (run_folder(tmp_path) / "run.log").read_text()


def test_a_bug_points_to_its_traceback(tmp_path, monkeypatch):
    code, _, err = run(tmp_path, "notes=crash")
    assert code == 1 and "ValueError: a bug" in err and "run.log" in err
    assert "Traceback (most recent call last)" not in err
    assert "Traceback (most recent call last)" in (run_folder(tmp_path) / "run.log").read_text()
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert "Traceback (most recent call last)" in run(tmp_path, "notes=crash")[2]


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_first_signal_saves_and_ends(number, expected, tmp_path):
    process, _ = started(tmp_path, "wait")
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == expected
    assert (run_folder(tmp_path) / "saved").is_file()
    assert record(tmp_path)["state"] == "interrupted" and record(tmp_path)["exit_code"] == expected


def test_the_second_signal_ends_at_once(tmp_path):
    process, worker = started(tmp_path, "deaf")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None  # the first one waits for a safe point
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143 and time.monotonic() - begun < 3
    wait_until_gone(worker)
    assert record(tmp_path)["state"] == "interrupted" and record(tmp_path)["exit_code"] == 143


def test_a_signal_while_the_worker_starts_is_not_lost(tmp_path):
    process = start(tmp_path, "notes=wait")
    while subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True).returncode != 0:
        pass  # the worker's interpreter is only just there: none of our handlers stand yet
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143
    assert record(tmp_path)["state"] == "interrupted" and (run_folder(tmp_path) / "saved").is_file()


@pytest.mark.parametrize("part", ["wait", "deaf"])
def test_a_killed_supervisor_takes_its_worker_along(part, tmp_path):
    process, worker = started(tmp_path, part)
    process.kill()
    process.communicate(timeout=30)
    wait_until_gone(worker)
    assert record(tmp_path)["state"] == "interrupted" and record(tmp_path)["exit_code"] == 143
    assert (run_folder(tmp_path) / "saved").is_file() == (part == "wait")


def test_a_killed_worker_is_recorded_and_explained(tmp_path):
    process, worker = started(tmp_path, "wait")
    os.kill(worker, signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "SIGKILL" in err and "memory.micro_batch_size=1" in err
    found = record(tmp_path)
    assert found["state"] == "failed" and found["exit_code"] == 1 and "SIGKILL" in found["error"]


def test_an_output_that_cannot_be_written_is_a_wrong_input(tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = run(tmp_path, "notes=fine", f"paths.output={tmp_path / 'file'}")
    assert code == 2 and "paths.output" in err and "Traceback" not in err


def test_two_runs_at_once_get_two_folders(tmp_path):
    both = [start(tmp_path, "notes=fine", f"seed={seed}") for seed in (1, 2)]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    records = [json.loads(file.read_text()) for file in tmp_path.glob("outputs/*-*-*/*/run.json")]
    assert sorted(found["overrides"][1] for found in records) == ["seed=1", "seed=2"]


def test_a_refused_secret_leaves_nothing_anywhere(tmp_path):
    code, out, err = run(tmp_path, "notes=fine", "+wandb.api_key=DUMMY-KEY-123")
    assert code == 2 and "WANDB_API_KEY" in err and "DUMMY-KEY-123" not in out + err
    assert list(tmp_path.iterdir()) == []


def test_a_worker_started_by_hand_says_so(tmp_path):
    command = [sys.executable, "-m", "mlxrl_runs.worker"]
    ended = subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and "python -m mlxrl_runs" in ended.stderr
