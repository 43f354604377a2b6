import json

import pytest

from mlxrl_runs.core.protocols import RunRecord
from mlxrl_runs.tracking.fan_out import FanOut
from mlxrl_runs.tracking.jsonl import JsonlTracker

RECORD = RunRecord(name="r", folder="", job="train", config={})


class Listener:
    """Remembers steps; from step `breaks_at` on it raises."""

    def __init__(self, breaks_at=None, run_id=None):
        self.steps, self.breaks_at, self.calls, self.run_id = [], breaks_at, 0, run_id

    def start(self, run): ...

    def log(self, step, metrics):
        self.calls += 1
        if self.breaks_at is not None and step >= self.breaks_at:
            raise RuntimeError("no space [left]")
        self.steps.append(step)

    def log_trajectories(self, step, trajectories): ...

    def log_evaluation(self, step, evaluation): ...

    def finish(self, summary, exit_code): ...


def test_a_tracker_in_trouble_is_reported_once_and_left_out():
    warnings, broken, sound = [], Listener(breaks_at=2), Listener()
    fan_out = FanOut([broken, sound], warnings.append)
    for step in (1, 2, 3, 4):
        fan_out.log(step, {})
    assert broken.calls == 2
    assert sound.steps == [1, 2, 3, 4]
    assert len(warnings) == 1 and "RuntimeError: no space [left]" in warnings[0]
    assert fan_out.trackers == (sound,)


def test_trouble_with_the_source_of_truth_is_the_runs_trouble(tmp_path):
    fan_out = FanOut([JsonlTracker(tmp_path), Listener()], lambda text: None)
    fan_out.start(RECORD)
    fan_out.log(3, {"reward/mean": 1.0})
    with pytest.raises(ValueError, match="step 2 was logged after step 3"):
        fan_out.log(2, {"reward/mean": 1.0})


def test_the_record_is_written_before_another_tracker_can_break(tmp_path):
    fan_out = FanOut([JsonlTracker(tmp_path), Listener(breaks_at=1)], lambda text: None)
    fan_out.start(RECORD)
    fan_out.log(1, {"reward/mean": 1.0})
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 1


def test_the_run_id_is_that_of_the_tracker_that_has_one():
    assert FanOut([Listener(), Listener(run_id="abc")]).run_id == "abc"
    assert FanOut([Listener()]).run_id is None


def test_an_interrupt_is_not_a_trackers_trouble():
    class Interrupting(Listener):
        def log(self, step, metrics):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FanOut([Interrupting()]).log(1, {})
