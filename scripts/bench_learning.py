"""Does it learn? The main command on many seeds, GiGPO beside GRPO, each run a fresh process with the defaults.

    python scripts/bench_learning.py [--seeds 20] [--algorithms gigpo grpo] [--parallel 2] [--json FILE] [-- overrides]

Prints a Markdown table. `success` is over held-out episodes, sampled; `seconds` is a whole run with both evaluations.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def run(algorithm: str, seed: int, overrides: list[str], output: Path) -> dict[str, Any]:
    """One run in a folder of its own; its scores and what it took."""
    folder = output / f"{algorithm}_{seed}"
    command = [
        sys.executable, "-m", "mlxrl_runs", f"algorithm={algorithm}", f"seed={seed}", "tracking=jsonl",
        f"paths.output={folder}", *overrides,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-2000:]}")
    latest = folder / "latest"
    evaluation = json.loads((latest / "evaluation.json").read_text())
    record = json.loads((latest / "run.json").read_text())
    scores = {
        f"{when}_{policy}": evaluation[when][policy]["success"]
        for when in ("before", "after")
        for policy in ("sampled", "greedy")
    }
    rewards = {f"{when}_reward": evaluation[when]["sampled"]["reward"] for when in ("before", "after")}
    episodes = evaluation["after"]["sampled"]["episodes"]
    result = {"algorithm": algorithm, "seed": seed, **scores, **rewards, "episodes": episodes}
    result |= {"seconds": record["seconds"], "backend": record["device"]["backend"], "device": record["device"]["name"]}
    print(
        f"{algorithm:6} seed {seed:2}  success {result['before_sampled']:.3f} -> {result['after_sampled']:.3f}  "
        f"{result['seconds']:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    return result


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        "| algorithm | seed | success before | after | greedy before | after | reward before | after | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        numbers = (
            "before_sampled", "after_sampled", "before_greedy", "after_greedy", "before_reward", "after_reward",
        )  # fmt: skip
        cells = " | ".join(f"{result[name]:.3f}" for name in numbers)
        lines.append(f"| {result['algorithm']} | {result['seed']} | {cells} | {result['seconds']:.0f} |")
    return "\n".join(lines)


def verdict(results: list[dict[str, Any]], algorithm: str) -> str:
    own = [result for result in results if result["algorithm"] == algorithm]
    after = sorted(result["after_sampled"] for result in own)
    learned = sum(result["before_sampled"] <= 0.3 and result["after_sampled"] >= 0.8 for result in own)
    return (
        f"{algorithm}: {learned} of {len(own)} seeds from <= 0.30 to >= 0.80 held-out sampled success; lowest "
        f"{after[0]:.3f}, median {after[len(after) // 2]:.3f}; longest run {max(r['seconds'] for r in own):.0f} s "
        f"({own[0]['backend']}, {own[0]['device']}, {own[0]['episodes']} episodes an evaluation)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--algorithms", nargs="+", default=["gigpo", "grpo"])
    parser.add_argument("--parallel", type=int, default=1, help="runs side by side; more than one slows each of them")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", default=[])
    arguments = parser.parse_args()
    os.environ.pop("WANDB_API_KEY", None)
    points = [(algorithm, seed) for algorithm in arguments.algorithms for seed in range(arguments.seeds)]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(arguments.parallel) as pool:
        results = list(pool.map(lambda point: run(*point, arguments.overrides, Path(scratch)), points))
    print(table(results) + "\n")
    for algorithm in arguments.algorithms:
        print(verdict(results, algorithm))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
