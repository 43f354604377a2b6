"""Runs the tracker in a process of its own: FOLDER RUNS MODE INIT_SECONDS [together].

Prints what the tracker says, then one JSON line: the ids, and the seconds it all took.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

from mlxrl_runs.core.protocols import RunRecord, TrajectoryRecord
from mlxrl_runs.core.trajectory import EndReason, StopReason, Trajectory, Turn
from mlxrl_runs.tracking import weights_and_biases
from mlxrl_runs.tracking.weights_and_biases import WeightsAndBiasesTracker

CONFIG = {"seed": 0, "algorithm": {"name": "gigpo", "omega": 1.0}, "tags": ["a", "b"], "budget": {"tokens": None}}


def episode(member, advantage):
    turn = Turn((1,), (0, 1), (2,), (-0.5,), 1.0, {}, "room 1", StopReason.EOS, "open <b>", "A door.")
    return TrajectoryRecord("doors-1", member, Trajectory("doors-1", member, (turn,), EndReason.ENV_DONE), (advantage,))


def begin(folder, seed, mode):
    folder.mkdir()
    opened = threading.Event()

    def say(text):
        print(text, flush=True)
        opened.set()

    tracker = WeightsAndBiasesTracker(folder, "mlxrl-runs-test", None, mode, say)
    tracker.start(
        RunRecord(
            name=f"seed {seed}", folder=str(folder), job="train", config={**CONFIG, "seed": seed}, group="the sweep",
            overrides=(f"seed={seed}",), tags=("tiny", "t" * 99), notes="a note", steps=3, versions={"mlx": "0.32.4"},
        )
    )  # fmt: skip
    tracker.log(0, {"eval/sampled_success": 0.25})
    for step in (1, 2, 3):
        tracker.log(step, {"reward/mean": step / 4, "memory/peak_bytes": 100 - step, "loss/total": float("nan")})
        tracker.log_trajectories(step, [episode(0, -1.0), episode(1, 1.0)])
    tracker.log(2, {"eval/greedy_success": 0.75})
    if "together" in sys.argv:  # the next run starts while this one is open
        assert opened.wait(30)
    return tracker


def end(tracker, seed):
    tracker.finish({"state": "finished", "best": {"reward/mean": 0.75}}, exit_code=1 if seed == 2 else 0)
    return tracker.run_id


def main():
    root, runs, mode = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    weights_and_biases.INIT_SECONDS = float(sys.argv[4])
    started = time.monotonic()
    seeds = range(1, runs + 1)
    if "together" in sys.argv:
        trackers = [begin(root / f"run{seed}", seed, mode) for seed in seeds]
        ids = [end(tracker, seed) for seed, tracker in zip(seeds, trackers, strict=True)]
    else:
        ids = [end(begin(root / f"run{seed}", seed, mode), seed) for seed in seeds]
    added = sorted(name for name in os.environ if name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR"))
    print(json.dumps({"ids": ids, "seconds": time.monotonic() - started, "environment": added}))


if __name__ == "__main__":
    main()
