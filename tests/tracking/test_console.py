import io
import sys

import pytest
from rich.console import Console

from mlxrl_runs.core.protocols import RunRecord, TrajectoryRecord
from mlxrl_runs.core.trajectory import EndReason, StopReason, Trajectory, Turn
from mlxrl_runs.errors import ConfigError
from mlxrl_runs.tracking import build, make_trackers
from mlxrl_runs.tracking.console import ConsoleTracker
from mlxrl_runs.tracking.jsonl import JsonlTracker
from mlxrl_runs.tracking.weights_and_biases import WeightsAndBiasesTracker

METRICS = {
    "reward/mean": 0.5, "reward/success": 0.25, "kl/reference": 0.0125, "advantage/std": 0.9,
    "memory/peak_bytes": 200 * 1024**2, "rollout/tokens_per_second": 12345.6,
}  # fmt: skip
EVALUATION = {
    "sampled": {"success": 0.25, "reward": 0.5, "episodes": 8},
    "greedy": {"success": 0.125, "reward": 0.25, "episodes": 8},
    "random": {"success": 0.0625, "reward": 0.03, "episodes": 8},
    "oracle": {"success": 1.0, "reward": 2.0, "episodes": 8},
}
AFTER = {**EVALUATION, "sampled": {"success": 0.875, "reward": 1.5, "episodes": 8}}
SUMMARY = {
    "state": "finished", "steps": 3, "evaluation": {"before": EVALUATION, "after": AFTER},
    "peaks": {"rollout": 3 * 1024**2, "update": 5 * 1024**2}, "seconds": {"rollout": 30.0, "env": 6.0, "total": 120.0},
    "tokens": {"sampled_tokens": 1234}, "files": {"metrics": "/runs/[a]/metrics.jsonl"},
    "next": ["python -m mlxrl_runs job=evaluate checkpoint=/runs/" + "a" * 100], "device": "cpu",
}  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Logged(Terminal):
    """What stands for stdout in a run: a terminal with a log behind it."""

    def __init__(self):
        super().__init__()
        self.logged = ""

    def log_only(self, text):
        self.logged += text


def record(steps):
    return RunRecord(name="gigpo [x]", folder="/runs/a", job="train", config={}, steps=steps)


def written(steps, console_file, summary=SUMMARY, width=100, **console_options):
    """What a run of `steps` equal steps prints."""
    tracker = ConsoleTracker(Console(file=console_file, width=width, **console_options))
    tracker.start(record(steps))
    tracker.log_evaluation("before training", EVALUATION)
    tracker.log(0, {"eval/sampled_success": 0.25})
    for step in range(1, steps + 1):
        tracker.log(step, METRICS)
    tracker.finish(summary, 0)
    return console_file.getvalue()


def step_lines(text):
    return [line for line in text.splitlines() if line.startswith("step ")]


def episode(text, reward=1.0):
    turn = Turn((1,), (0, 1), (2,), (-0.5,), reward, {}, "s", StopReason.EOS, text)
    return TrajectoryRecord("t", 0, Trajectory("t", 0, (turn,), EndReason.ENV_DONE), None)


def test_without_a_terminal_a_step_is_one_plain_line():
    text = written(3, io.StringIO())
    assert step_lines(text)[0] == (
        "step 1/3  reward 0.500  success 0.250  kl 0.0125  advantage std 0.900  memory 200 MiB  tokens/s 12,346  "
        + step_lines(text)[0].split("  ")[-1]
    )
    assert len(step_lines(text)) == 3
    assert "\x1b" not in text and "\r" not in text


def test_a_long_run_prints_about_fifty_lines_with_the_first_and_the_last():
    # 120 steps: every third, which is 40 lines, and step 1
    lines = step_lines(written(120, io.StringIO()))
    assert len(lines) == 41
    assert lines[0].startswith("step   1/120 ") and lines[1].startswith("step   3/120 ")
    assert lines[-1].startswith("step 120/120 ")


def test_an_unmeasured_number_is_left_out_of_its_line():
    file = io.StringIO()
    tracker = ConsoleTracker(Console(file=file))
    tracker.start(record(2))
    tracker.log(1, {"reward/mean": 0.5})
    assert step_lines(file.getvalue()) == ["step 1/2  reward 0.500"]


def test_the_time_left_follows_the_pace_so_far(monkeypatch):
    times = iter([10.0, 40.0, 70.0])  # 30 s a step, two to go after the third of five
    monkeypatch.setattr("mlxrl_runs.tracking.console.time.monotonic", lambda: next(times))
    file = io.StringIO()
    tracker = ConsoleTracker(Console(file=file, width=200))
    tracker.start(record(5))
    for step in (1, 2, 3):
        tracker.log(step, METRICS)
    assert [line.split("left ")[-1] for line in step_lines(file.getvalue())[1:]] == ["1:30", "1:00"]
    assert "left" not in step_lines(file.getvalue())[0]


def row(text, label):
    [found] = [line for line in text.splitlines() if line.strip().startswith(label)]
    return found.strip()[len(label) :].split()


@pytest.mark.parametrize("width", [80, 120])
def test_the_summary_shows_before_after_floor_and_ceiling_unabridged(width):
    text = written(3, io.StringIO(), width=width)
    assert row(text, "held-out tasks") == ["before", "after", "change", "random", "oracle"]
    assert row(text, "sampled success") == ["0.250", "0.875", "+0.625", "0.062", "1.000"]
    assert row(text, "greedy reward") == ["0.250", "0.250", "+0.000", "0.030", "2.000"]


def test_the_summary_shows_what_a_phase_took():
    text = written(3, io.StringIO())
    assert row(text, "rollout") == ["30.0", "25%", "3.0", "MiB"]  # 30 of 120 s
    assert row(text, "env") == ["6.0", "5%"]
    assert row(text, "update") == ["5.0", "MiB"]
    assert "finished  3 steps  in 2:00  cpu" in text and "1,234 sampled tokens" in text


def test_paths_and_commands_are_never_wrapped():
    lines = written(3, io.StringIO(), width=80).splitlines()
    assert f"    {SUMMARY['next'][0]}" in lines
    assert "  metrics  /runs/[a]/metrics.jsonl" in lines


def test_the_closing_words_say_why_it_ended_early_and_count_the_warnings():
    warned = [{"step": 0, "text": "few groups disagree"}, {"step": 7, "text": "all cut"}]
    stopped = "reward/success 0.97 above 0.95 at step 41"
    text = written(1, io.StringIO(), summary={**SUMMARY, "stopped": stopped, "warnings": warned})
    assert f"  stopped early  {stopped}\n" in text
    assert "  warnings       2, at steps 0, 7: see above, or summary.json\n" in text
    plain = written(1, io.StringIO(), summary={**SUMMARY, "stopped": None, "warnings": []})
    assert "stopped" not in plain and "warnings" not in plain


def test_a_failed_run_still_gets_its_closing_words():
    text = written(1, io.StringIO(), summary={"state": "failed", "evaluation": {"before": None, "after": None}})
    assert "failed" in text and "held-out tasks" not in text and "phase" not in text


def test_a_run_that_only_evaluated_shows_what_it_found():
    text = written(0, io.StringIO(), summary={"state": "finished", "evaluation": {"before": None, "after": AFTER}})
    assert row(text, "sampled success") == ["0.875", "0.062", "1.000"]


def test_where_blocks_cannot_be_encoded_the_pictures_are_ascii():
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    tracker = ConsoleTracker(Console(file=file, width=80))
    tracker.start(record(2))
    tracker.log(1, METRICS)
    tracker.log(2, {**METRICS, "reward/mean": 1.0})
    tracker.finish(SUMMARY, 0)
    file.flush()
    assert b"1.00 |" in file.buffer.getvalue() and b"####" in file.buffer.getvalue()


def on_terminal(monkeypatch, output):
    """A tracker on `output` as both the process's stdout and the terminal itself."""
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "__stdout__", output)
    return ConsoleTracker(Console(width=100, force_terminal=True, _environ={"TERM": "xterm"}))


def test_on_a_terminal_the_table_is_redrawn_and_taken_away(monkeypatch):
    output = Terminal()
    tracker = on_terminal(monkeypatch, output)
    tracker.start(record(3))
    for step in (1, 2):
        tracker.log(step, METRICS)
    tracker.finish(SUMMARY, 0)
    text = output.getvalue()
    assert "KL to reference" in text and "0.0125" in text and "2/3" in text
    assert "\x1b[1A" in text and "\x1b[2K" in text  # up, and the line cleared
    assert not step_lines(text)
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is shown at the end
    assert sys.stdout is output


def test_what_is_printed_meanwhile_stays_whole_and_a_log_gets_lines_and_no_pictures(monkeypatch):
    output = Logged()
    tracker = on_terminal(monkeypatch, output)
    tracker.start(record(3))
    tracker.log(1, METRICS)
    print("hello", end=" ")
    print("[world]")
    tracker.log(2, METRICS)
    tracker.finish(SUMMARY, 0)
    assert "hello [world]\n" in output.getvalue()
    lines = output.logged.splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("step ")] == ["step 1/3", "step 2/3"]
    assert "hello [world]" in lines
    assert "KL to reference" not in output.logged


def test_a_models_text_is_shown_as_written_and_obeyed_by_nothing(monkeypatch):
    output = Terminal()
    tracker = on_terminal(monkeypatch, output)
    tracker.start(record(3))
    tracker.log_trajectories(1, [episode("worse", 0.0), episode("[red]x[/] \x1b]0;owned\x07[/bold]")])
    tracker.log(1, METRICS)
    tracker.finish(SUMMARY, 0)
    assert "1.00 for: [red]x[/]  ]0;owned [/bold]" in output.getvalue()
    assert "\x1b]0;owned" not in output.getvalue()


TRACKING = {"name": "wandb", "project": "p", "entity": None, "mode": "auto", "kl_every": 1}


def test_the_config_chooses_the_trackers(tmp_path):
    console = Console(file=io.StringIO())
    kinds = [type(tracker) for tracker in make_trackers(tracking=TRACKING, folder=tmp_path, console=console).trackers]
    assert kinds == [JsonlTracker, ConsoleTracker, WeightsAndBiasesTracker]
    files_only = make_trackers(tracking={"name": "jsonl"}, folder=tmp_path, console=console)
    assert [type(tracker) for tracker in files_only.trackers] == [JsonlTracker, ConsoleTracker]


def test_online_without_a_login_ends_before_anything_starts(tmp_path, monkeypatch):
    def refuse():
        raise ConfigError("tracking.mode: no login")

    monkeypatch.setattr(build, "require_login", refuse)
    with pytest.raises(ConfigError, match=r"tracking\.mode"):
        make_trackers(tracking={**TRACKING, "mode": "online"}, folder=tmp_path, console=Console(file=io.StringIO()))
    make_trackers(tracking={**TRACKING, "mode": "offline"}, folder=tmp_path, console=Console(file=io.StringIO()))
