"""How soon the product answers: --help, a bad key, and the first step of the main job, in seconds of wall time.

    python scripts/bench_startup.py [--json FILE]

Each is a process of its own, best of three.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPEATS = 3
ME = [sys.executable, "-m", "mlxrl_runs"]


def seconds_of(arguments: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run([*ME, *arguments], capture_output=True, check=False)
    return time.perf_counter() - started


def seconds_to_first_step() -> float:
    """Until the console shows step 1, the evaluation before it included."""
    with tempfile.TemporaryDirectory() as output:
        started = time.perf_counter()
        command = [*ME, "algorithm=gigpo", "env=recurring", "group_size=4", "steps=2", f"paths.output={output}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("step ") and " 1/" in line:
                    found = time.perf_counter() - started
                    process.stdout.read()
                    return found
    raise SystemExit("the main job showed no first step")


def measure(repeats: int = REPEATS) -> dict[str, float]:
    """The best of several, in seconds."""
    return {
        "help_seconds": min(seconds_of(["--help"]) for _ in range(repeats)),
        "bad_key_seconds": min(seconds_of(["algorithm.clip_hgih=0.3"]) for _ in range(repeats)),
        "first_step_seconds": min(seconds_to_first_step() for _ in range(repeats)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = measure()
    for name, seconds in result.items():
        print(f"{name:20} {seconds:6.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
