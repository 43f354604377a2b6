"""A worker whose work is played: the real worker, with an `execute` that does what the run's notes say."""

import os
import signal
import sys
import time
from pathlib import Path

from mlxrl_runs import worker
from mlxrl_runs.core.stop import StopRequest
from mlxrl_runs.errors import TrainingError
from mlxrl_runs.training.run_folder import RunFolder


def execute(config, folder: RunFolder, *, overrides, sweep, stop: StopRequest) -> dict:
    print(f"\x1b[31mworking\x1b[0m on {config.notes} " + ("x" * 10) + "\rdone", flush=True)
    (folder.path / "mlx_was_imported_before").write_text(str("mlx" in sys.modules))
    played(config.notes, folder.path, stop)
    summary = {"evaluation": {"before": None, "after": {"sampled": {"success": config.seed / 10}}}}
    folder.write_json("summary.json", summary)
    return summary


def played(part: str, folder: Path, stop: StopRequest) -> None:
    if part == "fail":
        raise TrainingError("the loss is not finite. Try optimizer.learning_rate=1e-5")
    if part == "crash":
        raise ValueError("a bug")
    if part == "exits":
        sys.exit(0)  # what an environment's script might do at its end
    if part == "vanishes":
        os._exit(0)
    if part == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if part == "environment":
        (folder / "seen").write_text(os.environ.get("HYDRA_FULL_ERROR", ""))
    if part in ("wait", "deaf"):
        (folder / "ready").write_text(str(os.getpid()))
        for _ in range(1200):
            time.sleep(0.05)
            if part == "wait" and stop.signal_number is not None:
                (folder / "saved").write_text("all of it")
                stop.raise_if_requested()


if __name__ == "__main__":
    sys.exit(worker.main(execute))
