"""Runs the tracker in a process of its own: `python drive_wandb.py FOLDER RUNS MODE [INIT_SECONDS] [anything]`.

Prints what the tracker says, then one JSON line: the ids, and the seconds it all took.
"""

import json
import os
import sys
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


def track(folder, seed, mode):
    folder.mkdir()
    tracker = WeightsAndBiasesTracker(folder, "mlxrl-runs-test", None, mode, lambda text: print(text, flush=True))
    tracker.start(
        RunRecord(
            name=f"seed {seed}", folder=str(folder), job="train", config={**CONFIG, "seed": seed}, group="the sweep",
            overrides=(f"seed={seed}",), tags=("tiny", "t" * 99), notes="a note", steps=3, versions={"mlx": "0.32.4"},
        )
    )  # fmt: skip
    tracker.log_evaluation(
        0, {"sampled": {"success": 0.25, "reward": 0.5, "episodes": 8}, "random": {"success": 0.125}}
    )
    for step in (1, 2, 3):
        tracker.log(step, {"reward/mean": step / 4, "memory/peak_bytes": 100 - step, "loss/total": float("nan")})
        tracker.log_trajectories(step, [episode(0, -1.0), episode(1, 1.0)])
    tracker.log(2, {"eval/greedy_success": 0.75})
    tracker.finish({"state": "finished", "best": {"reward/mean": 0.75}}, exit_code=1 if seed == 2 else 0)
    return tracker.run_id


def main():
    root, runs, mode = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    weights_and_biases.INIT_SECONDS = float(sys.argv[4])
    started = time.monotonic()
    ids = [track(root / f"run{seed}", seed, mode) for seed in range(1, runs + 1)]
    added = sorted(name for name in os.environ if name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR"))
    print(json.dumps({"ids": ids, "seconds": time.monotonic() - started, "environment": added}))


if __name__ == "__main__":
    main()
