"""Every algorithm with the defaults of its yaml, and GiGPO against GRPO: one Hydra multirun each.

    python scripts/bench_algorithms.py [--json FILE] [overrides]   every algorithm on recurring, 3 seeds
    python scripts/bench_algorithms.py --grid [--json FILE]        gigpo and grpo, 3 learning rates, 8 seeds
    python scripts/bench_algorithms.py [--grid] --sweep FOLDER     read a sweep that was run before

Prints a Markdown table. `success` is that of sampled episodes on held-out tasks; `seconds` is a whole run with both
evaluations, runs one after the other. Steps to .8: the first step at which success, as the mean over the sampled
training episodes of the last 5 steps, is .8 or more; of an even number of runs the median is the later of the two in
the middle. A run that failed is in the table and counts as one that did not learn.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

CONF = Path(__file__).resolve().parents[1] / "conf"
FIRST_FRESH_SEED = 101  # from here on none that the defaults were chosen with
RATES = (6e-4, 1.2e-3, 2.4e-3)  # half, once and twice the tiny model's own
WINDOW = 5  # steps
GOAL = 0.8
LEARNED = 0.6


def points_of_algorithms(seeds: int) -> list[str]:
    names = sorted(file.stem for file in (CONF / "algorithm").glob("*.yaml"))
    return [f"algorithm={','.join(names)}", f"seed={','.join(map(str, range(seeds)))}"]


def points_of_grid(seeds: int) -> list[str]:
    """Without the guard: a run that collapses is a result here, and no reason to stop."""
    return [
        "algorithm=gigpo,grpo",
        f"optimizer.learning_rate={','.join(map(str, RATES))}",
        f"seed={','.join(map(str, range(FIRST_FRESH_SEED, FIRST_FRESH_SEED + seeds)))}",
        "trainer.collapse_guard.enabled=false",
    ]


def run_sweep(output: Path, overrides: Sequence[str]) -> Path:
    """The folder of one multirun with these overrides; runs that failed are in it too."""
    command = [
        sys.executable, "-m", "mlxrl_runs", "-m", *overrides, "tracking=jsonl", f"paths.output={output}", "name=sweep",
    ]  # fmt: skip
    print(" ".join(command), file=sys.stderr)
    subprocess.run(command, stdout=sys.stderr, stdin=subprocess.DEVNULL, check=False)
    return output / "sweeps/sweep"


def read_run(folder: Path) -> dict[str, Any]:
    """What one run of a sweep came to; scores are None where it failed before them."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    record = json.loads((folder / "run.json").read_text())
    evaluation = json.loads(written(folder / "evaluation.json") or "{}")
    lines = [json.loads(line) for line in written(folder / "metrics.jsonl").splitlines()]
    before, after = evaluation.get("before"), evaluation.get("after")
    return {
        "algorithm": config["algorithm"]["name"],
        "seed": config["seed"],
        "learning_rate": config["optimizer"]["learning_rate"],
        "state": record["state"],
        "before_sampled": before["sampled"]["success"] if before else None,
        "after_sampled": after["sampled"]["success"] if after else None,
        "after_greedy": after["greedy"]["success"] if after else None,
        "steps": max(len(lines) - 1, 0),
        "steps_to_goal": steps_to_goal([line["reward/success"] for line in lines[1:]]),
        "seconds": record["seconds"],
        "backend": record["device"]["backend"],
        "device": record["device"]["name"],
    }


def written(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def steps_to_goal(success: Sequence[float]) -> int | None:
    """The first step at which the mean of the last WINDOW steps is at GOAL; None where it never is."""
    for step in range(WINDOW, len(success) + 1):
        if sum(success[step - WINDOW : step]) / WINDOW >= GOAL:
            return step
    return None


def read_sweep(folder: Path) -> list[dict[str, Any]]:
    runs = [read_run(file.parent) for file in sorted(folder.glob("*/run.json"))]
    if not runs:
        raise SystemExit(f"{folder} holds no run. Give a sweep's folder, such as outputs/sweeps/NAME.")
    return sorted(runs, key=lambda run: (run["algorithm"], run["learning_rate"], run["seed"]))


def algorithms_table(runs: Sequence[dict[str, Any]]) -> str:
    """One row an algorithm, its seeds side by side."""
    lines = [
        "| algorithm | success before | after, by seed | greedy after | steps to .8 | seconds | seeds at .6 or more |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(run["algorithm"] for run in runs):
        own = [run for run in runs if run["algorithm"] == name]
        cells = [
            shown(max((run["before_sampled"] for run in own if run["before_sampled"] is not None), default=None)),
            " ".join(shown(run["after_sampled"]) for run in own),
            " ".join(shown(run["after_greedy"]) for run in own),
            " ".join(str(run["steps_to_goal"] or "-") for run in own),
            " ".join(f"{run['seconds']:.0f}" for run in own),
            f"{learned(own)} of {len(own)}",
        ]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def learned(runs: Sequence[dict[str, Any]]) -> int:
    return sum((run["after_sampled"] or 0) >= LEARNED for run in runs)


def verdict(runs: Sequence[dict[str, Any]]) -> str:
    seconds = max(run["seconds"] for run in runs)
    return f"{learned(runs)} of {len(runs)} runs end at {LEARNED} held-out success or more; longest run {seconds:.0f} s"


def shown(success: float | None) -> str:
    return "failed" if success is None else f"{success:.3f}"


def grid_table(runs: Sequence[dict[str, Any]]) -> str:
    """One row an algorithm and learning rate."""
    lines = [
        "| algorithm | learning rate | reached .8 | steps: median | least | most | success after: median | least |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, rate in dict.fromkeys((run["algorithm"], run["learning_rate"]) for run in runs):
        own = [run for run in runs if (run["algorithm"], run["learning_rate"]) == (name, rate)]
        steps = sorted(run["steps_to_goal"] for run in own if run["steps_to_goal"])
        after = [run["after_sampled"] or 0.0 for run in own]
        cells = [
            f"{len(steps)} of {len(own)}", median_step(own), str(steps[0]) if steps else "-",
            str(steps[-1]) if len(steps) == len(own) else "-", f"{statistics.median(after):.3f}", f"{min(after):.3f}",
        ]  # fmt: skip
        lines.append(f"| `{name}` | {rate:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def median_step(runs: Sequence[dict[str, Any]]) -> str:
    """Over all runs: those that never got there count as later than any."""
    steps = statistics.median_high(run["steps_to_goal"] or sys.maxsize for run in runs)
    return "-" if steps == sys.maxsize else str(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", action="store_true", help="GiGPO against GRPO instead of every algorithm")
    parser.add_argument("--sweep", type=Path, help="folder of a sweep that was run before")
    parser.add_argument("--seeds", type=int, help="3 of every algorithm, 8 of the grid, unless given")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", default=[])
    arguments = parser.parse_args()
    os.environ.pop("WANDB_API_KEY", None)
    seeds = arguments.seeds or (8 if arguments.grid else 3)
    points = points_of_grid(seeds) if arguments.grid else points_of_algorithms(seeds)
    with tempfile.TemporaryDirectory() as scratch:
        runs = read_sweep(arguments.sweep or run_sweep(Path(scratch), [*points, *arguments.overrides]))
    print(f"{grid_table(runs) if arguments.grid else algorithms_table(runs)}\n\n{verdict(runs)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(runs, indent=2) + "\n")


if __name__ == "__main__":
    main()
