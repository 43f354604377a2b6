"""ls, show and tail over runs whose files were written by hand."""

import json
import os
import pty
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mlxrl_runs.cli import main
from mlxrl_runs.listing import table
from mlxrl_runs.runs import read_run, run_folders
from mlxrl_runs.supervise import read_objective
from mlxrl_runs.training.run_folder import RunFolder, record_end, start_record

CONFIG = {"job": "train", "steps": 4, "tags": ["first"], "notes": "why"}
SUMMARY = {"state": "finished", "steps": 2, "peaks": {"rollout": 1024, "update": 3 * 1024**2}, "next": ["do this"]}
EVALUATION = {
    "before": {"sampled": {"success": 0.125, "reward": 0.5, "episodes": 8}},
    "after": {"sampled": {"success": 0.875, "reward": 1.5, "episodes": 8}},
}


def metrics(step: int) -> dict:
    return {"step": step, "reward/mean": step / 4, "memory/peak_bytes": 2048, "progress/seconds": 10.0 * step}


def running(output: Path, name: str = "mine", sweep: str | None = None, place: Path | None = None) -> RunFolder:
    """A run after its second step. Its lock is held until `release`."""
    folder = RunFolder.create(str(output), name) if place is None else RunFolder.create_at(place, str(output))[0]
    group = None if sweep is None else {"name": sweep}
    folder.write_json("run.json", start_record(CONFIG, name, ["steps=4", "notes=why"], "abc", group))
    rows = [{"step": 0, "eval/sampled_success": 0.125}, metrics(1), metrics(2)]
    folder.write_text("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return folder


def finished(output: Path, name: str = "mine", **changes) -> Path:
    folder = running(output, name, **changes)
    folder.write_json("summary.json", {**SUMMARY, "evaluation": EVALUATION})
    folder.write_json("evaluation.json", EVALUATION)
    record_end(folder.path, "finished", 0, None)
    folder.release()
    return folder.path


def listed(output: Path, capsys, *more: str) -> list[dict]:
    assert main(["ls", "--json", "--output", str(output), *more]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_finished_run_is_told_in_one_line(tmp_path, capsys):
    folder = finished(tmp_path)
    [run] = listed(tmp_path, capsys)
    assert (run["name"], run["state"], run["steps_done"], run["steps_asked"]) == ("mine", "finished", 2, 4)
    assert (run["success_before"], run["success_after"], run["reward"]) == (0.125, 0.875, 0.5)
    assert run["peak_bytes"] == 3 * 1024**2 and run["folder"] == str(folder)
    assert main(["ls", "--output", str(tmp_path)]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    for cell in ("mine", "finished", "2/4", "0.12 -> 0.88", "0.500", "3.0 MiB", "0:00", f"{folder.parent.name}/"):
        assert cell in line


def test_a_run_whose_process_is_gone_shows_as_interrupted_and_one_that_runs_does_not(tmp_path, capsys):
    alive, dead = running(tmp_path, "alive"), running(tmp_path, "dead")
    dead.release()
    states = {run["name"]: run["state"] for run in listed(tmp_path, capsys)}
    assert states == {"alive": "running", "dead": "interrupted"}
    assert listed(tmp_path, capsys)[0]["success_before"] == 0.125  # from the log: nothing else is written yet
    alive.release()


def test_the_newest_run_comes_first_and_no_more_than_asked_for(tmp_path, capsys):
    for name in ("a", "b", "c"):
        finished(tmp_path, name)
    assert [run["name"] for run in listed(tmp_path, capsys, "-n", "2")] == ["c", "b"]
    assert main(["ls", "-n", "2", "--output", str(tmp_path)]) == 0
    assert "1 older ones: --all" in capsys.readouterr().out


def test_a_sweeps_points_are_listed_and_what_a_later_attempt_replaced_only_on_demand(tmp_path, capsys):
    place = tmp_path / "sweeps/study/0123abcd_seed=1"
    for _ in range(2):
        finished(tmp_path, "study", sweep="study", place=place)
    assert [run["name"] for run in listed(tmp_path, capsys)] == ["study/seed=1"]
    assert [run["name"] for run in listed(tmp_path, capsys, "--all")] == ["study/seed=1", "study/seed=1_attempt1"]


def test_damaged_files_end_no_list(tmp_path, capsys):
    folder = finished(tmp_path)
    (folder / "summary.json").write_text("{")
    (folder / "evaluation.json").write_text("[]")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "torn')
    broken = tmp_path / "2026-01-01/12-00-00-000000_broken"
    broken.mkdir(parents=True)
    (broken / "run.json").write_text("")
    [run, unreadable] = listed(tmp_path, capsys)
    assert run["steps_done"] == 1 and run["success_after"] is None
    assert (unreadable["name"], unreadable["state"]) == ("broken", "unreadable")


@pytest.mark.parametrize("width", [80, 100, 140, 200])
def test_the_table_fits_a_terminal(tmp_path, width):
    for seed in (3, 4):
        running(tmp_path, f"gigpo-recurring-some_very_long_model_name-G16-s{seed}").release()
    finished(tmp_path)
    lines = table([read_run(folder, tmp_path) for folder in run_folders(tmp_path)], width)
    assert max(map(len, lines)) <= width
    assert "interrupted" in lines[-1] and "2/4" in lines[-1] and "-G16-s3" in lines[-1]
    assert ("folder" in lines[0]) is (width >= 180)


def test_a_hundred_runs_are_listed_in_half_a_second_without_mlx(tmp_path):
    for number in range(100):
        finished(tmp_path, f"run{number}")
    code = (
        "import sys; from mlxrl_runs.cli import main; main(sys.argv[1:]);"
        "sys.exit('mlx' in sys.modules or 'wandb' in sys.modules or 'pydantic' in sys.modules)"
    )
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", code, "ls", "--all", "--output", str(tmp_path)], capture_output=True, text=True,
            timeout=60, check=True,
        )  # fmt: skip
        seconds.append(time.perf_counter() - started)
    assert len(done.stdout.splitlines()) == 101
    assert min(seconds) < 0.5


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    finished(tmp_path)
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "mlxrl_runs", "ls", "--output", str(tmp_path)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_on_a_terminal_lines_are_not_wider_than_it_is(tmp_path):
    finished(tmp_path, "x" * 100)
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "mlxrl_runs", "ls", "--output", str(tmp_path)]
    subprocess.run(command, stdout=child, env={**os.environ, "COLUMNS": "80"}, timeout=60, check=True)
    os.close(child)
    assert max(map(len, os.read(parent, 65536).decode().splitlines())) <= 80
    os.close(parent)


def test_show_tells_all_about_one_run(tmp_path, capsys):
    folder = finished(tmp_path, "other")
    finished(tmp_path, "mine")
    assert main(["show", "oth", "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for text in (str(folder), "finished, job=train, 2 of 4 steps", "why", "first", "steps=4 notes=why", "python 3."):
        assert text in out
    assert "0.125" in out and "+0.750" in out and "do this" in out and "3.0 MiB" in out and "metrics.jsonl" in out


def test_show_without_a_name_is_the_newest_and_json_holds_everything(tmp_path, capsys):
    finished(tmp_path, "old")
    folder = finished(tmp_path, "new")
    assert main(["show", "--json", "--output", str(tmp_path)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["folder"] == str(folder) and shown["record"]["overrides"] == ["steps=4", "notes=why"]
    assert shown["evaluation"] == EVALUATION and shown["summary"]["steps"] == 2
    assert "run.json" in shown["files"] and ".lock" not in shown["files"]


def test_show_tells_why_a_run_failed(tmp_path, capsys):
    folder = running(tmp_path)
    record_end(folder.path, "failed", 1, "the loss is not finite")
    folder.release()
    assert main(["show", str(folder.path)]) == 0
    out = capsys.readouterr().out
    assert "error     the loss is not finite" in out and "failed, job=train" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lst"], "lst: no such command; commands: ls, show, tail"),
        (["evaluate"], "To change a key, write KEY=VALUE."),
        (["show", "mnie"], "Did you mean mine?"),
        (["show", "m"], "'m' fits 2 runs"),
        (["tail", "-n", "0"], "got '0'; allowed: a whole number >= 1"),
        (["ls", "--all", "-n", "3"], "not allowed with argument"),
        (["ls", "--output", "/no/such"], "/no/such is no folder"),
        (["show", "--output", "/no/such"], "no runs there"),
    ],
)
def test_wrong_words_are_one_message_and_exit_2(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    finished(tmp_path / "outputs", "mine")
    finished(tmp_path / "outputs", "mountain")
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_tail_shows_the_last_steps_as_the_console_did(tmp_path, capsys):
    finished(tmp_path)
    assert main(["tail", "-n", "2", "--output", str(tmp_path)]) == 0
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step 1/4  reward 0.250") and first.endswith("left 0:30")
    assert second.startswith("step 2/4  reward 0.500") and second.endswith("left 0:20")


def test_tail_follows_a_run_to_its_end_and_waits_for_half_a_line(tmp_path, capsys):
    folder = running(tmp_path)
    file = folder.path / "metrics.jsonl"

    def go_on() -> None:
        text = json.dumps(metrics(3)) + "\n"
        for part in (text[:20], text[20:]):
            time.sleep(0.4)
            with file.open("a") as stream:
                stream.write(part)
        record_end(folder.path, "failed", 1, "enough")
        folder.release()

    thread = threading.Thread(target=go_on)
    thread.start()
    assert main(["tail", "-f", "-n", "1", "--output", str(tmp_path)]) == 0
    thread.join()
    lines = capsys.readouterr().out.splitlines()
    assert [line[:8] for line in lines[1:3]] == ["step 2/4", "step 3/4"] and lines[3] == "failed: enough"


def test_tail_shows_evaluations_too(tmp_path, capsys):
    finished(tmp_path)
    assert main(["tail", "--output", str(tmp_path)]) == 0
    assert "held-out success at step 0: sampled 0.125" in capsys.readouterr().out


@pytest.mark.parametrize("file", ["run.json", "summary.json", "evaluation.json", "metrics.jsonl"])
@pytest.mark.parametrize(
    "damage", [b"", b'{"st', b"[1]", b"\xff\xfe", b'{"step":0}\n{"st\n{"step":2,"reward/mean":1}\n']
)
def test_one_damaged_file_ends_neither_show_nor_tail_nor_a_sweeps_report(tmp_path, capsys, file, damage):
    folder = finished(tmp_path)
    (folder / file).write_bytes(damage)
    for command in (["ls"], ["show"], ["show", "--json"], ["tail"]):
        assert main([*command, "--output", str(tmp_path)]) == 0, capsys.readouterr().err
    assert read_objective(folder) == (None if file == "summary.json" else 0.875)
    capsys.readouterr()


def test_a_start_that_is_no_time_is_left_out(tmp_path, capsys):
    folder = finished(tmp_path)
    (folder / "run.json").write_text('{"state": "finished", "started_at": "yesterday"}')
    assert main(["ls", "--output", str(tmp_path)]) == 0
    assert "finished" in capsys.readouterr().out
