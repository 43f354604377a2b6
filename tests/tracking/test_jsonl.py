import json

import pytest

from mlxrl_runs.core.protocols import RunRecord, TrajectoryRecord
from mlxrl_runs.core.trajectory import EndReason, StopReason, Trajectory, Turn
from mlxrl_runs.tracking.jsonl import JsonlTracker


def started(folder):
    tracker = JsonlTracker(folder)
    tracker.start(RunRecord(name="r", folder=str(folder), job="train", config={}))
    return tracker


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def turn(text, reward, stop=StopReason.EOS, parts=None):
    return Turn((1, 2), (0, 2), (3,), (-0.5,), reward, parts or {}, "room 1", stop, text, "You see a door.")


def test_a_step_is_on_disk_before_the_next_one_starts(tmp_path):
    tracker = started(tmp_path)
    tracker.log(1, {"reward/mean": 0.25})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "reward/mean": 0.25}]


def test_h29_a_step_that_does_not_increase_is_an_error_and_not_a_lost_row(tmp_path):
    # H29: wandb drops such a row with a warning; here the caller hears of it and the file keeps what it had
    tracker = started(tmp_path)
    tracker.log(5, {"reward/mean": 0.5})
    for step in (4, 5):
        with pytest.raises(ValueError, match=f"step {step} was logged after step 5"):
            tracker.log(step, {"eval/sampled_success": 1.0})
    tracker.log(6, {"reward/mean": 0.75})
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [5, 6]


def test_equal_numbers_write_equal_bytes_whatever_the_order_of_the_names(tmp_path):
    for name, metrics in (("a", {"b": 0.1, "a": 2.0}), ("b", {"a": 2.0, "b": 0.1})):
        (tmp_path / name).mkdir()
        started(tmp_path / name).log(1, metrics)
    assert (tmp_path / "a/metrics.jsonl").read_bytes() == (tmp_path / "b/metrics.jsonl").read_bytes()


def test_a_float_is_read_back_bit_for_bit(tmp_path):
    tracker, number = started(tmp_path), 0.1 + 0.2  # 0.30000000000000004, one bit above 0.3
    tracker.log(1, {"loss/total": number})
    assert lines(tmp_path / "metrics.jsonl")[0]["loss/total"] == number != 0.3


def test_a_number_that_is_not_finite_is_null_and_named(tmp_path):
    started(tmp_path).log(1, {"loss/total": float("nan"), "grad/norm": float("-inf"), "reward/mean": 1.0})
    assert lines(tmp_path / "metrics.jsonl") == [
        {
            "step": 1,
            "grad/norm": None,
            "loss/total": None,
            "reward/mean": 1.0,
            "nonfinite": {"grad/norm": "-inf", "loss/total": "nan"},
        }
    ]


def test_a_resumed_run_goes_on_behind_the_last_complete_line(tmp_path):
    started(tmp_path).log(7, {"reward/mean": 0.5})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "reward/me')  # what a kill leaves
    tracker = started(tmp_path)
    with pytest.raises(ValueError, match="after step 7"):
        tracker.log(7, {"reward/mean": 0.5})
    tracker.log(8, {"reward/mean": 1.0})
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [7, 8]


def test_an_episode_is_one_line_with_every_turn(tmp_path):
    trajectory = Trajectory(
        "doors-3", 1, (turn("go <b>", 0.0), turn("opën", 1.0, StopReason.LENGTH, {"exact": 0.75, "format": 0.25})),
        EndReason.ENV_DONE, info={"success": 1.0},
    )  # fmt: skip
    started(tmp_path).log_trajectories(4, [TrajectoryRecord("doors-3", 1, trajectory, (-0.5, 1.5))])
    [line] = lines(tmp_path / "trajectories.jsonl")
    assert line == {
        "step": 4, "task": "doors-3", "member": 1, "success": True, "return": 1.0, "end": "env_done",
        "turns": [
            {"observation": "You see a door.", "text": "go <b>", "reward": 0.0, "reward_parts": {}, "state": "room 1",
             "advantage": -0.5, "stop": "eos"},
            {"observation": "You see a door.", "text": "opën", "reward": 1.0,
             "reward_parts": {"exact": 0.75, "format": 0.25}, "state": "room 1", "advantage": 1.5, "stop": "length"},
        ],
    }  # fmt: skip


def test_an_episode_nothing_was_trained_on_has_no_advantage(tmp_path):
    trajectory = Trajectory("doors-3", 0, (turn("go", 0.0),), EndReason.MAX_TURNS)
    started(tmp_path).log_trajectories(1, [TrajectoryRecord("doors-3", 0, trajectory, None)])
    assert lines(tmp_path / "trajectories.jsonl")[0]["turns"][0]["advantage"] is None


def test_logging_after_the_end_is_an_error(tmp_path):
    tracker = started(tmp_path)
    tracker.finish({}, 0)
    with pytest.raises(ValueError, match="after finish"):
        tracker.log(1, {"reward/mean": 0.0})
