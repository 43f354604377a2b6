"""Write docs/benchmarks.md from what the benchmark scripts measured.

python scripts/bench_learning.py --json learning.json
python scripts/bench_learning.py --seeds 5 --json arithmetic.json env=arithmetic
python scripts/bench_rollout.py --json rollout.json
python scripts/bench_startup.py --json startup.json
python scripts/check_equivalence.py --json equivalence.json
python scripts/write_benchmarks.py --folder . [--out docs/benchmarks.md]
"""

import argparse
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import bench_rollout
from bench_learning import table, verdict

ROOT = Path(__file__).resolve().parents[1]


def document(measured: dict[str, Any]) -> str:
    learning, arithmetic, rollout = measured["learning"], measured["arithmetic"], measured["rollout"]
    startup, equivalence = measured["startup"], measured["equivalence"]
    return f"""# Benchmarks

Measured on {rollout["device"]}, 2 cores, backend {rollout["backend"]}, MLX {version("mlx")}, with OpenBLAS. Machines are
noisy: compare only what one run of one script measured. Metal and CUDA were not measured. This page is written by
`scripts/write_benchmarks.py` from the files that the commands below leave with `--json FILE`.

## Does it learn: the doors world

`python scripts/bench_learning.py` runs `python -m mlxrl_runs algorithm=A env=recurring group_size=4 seed=S` with the
defaults, each in a fresh process. Success is that of sampled episodes on held-out layouts; `seconds` is the whole run,
both evaluations included. Two runs shared the machine at a time (`--parallel 2`).

{verdict(learning, "gigpo")}.

{verdict(learning, "grpo")}.

{table(learning)}

## Arithmetic

`python scripts/bench_learning.py --seeds {len({r["seed"] for r in arithmetic})} env=arithmetic`. The reward is 0.1 for a
well-formed answer and 1 more for the right integer. What the sampled policy gains is mostly sharpening: the tiny model
knows most sums already when it is asked greedily, so look at both columns.

{table(arithmetic)}

Mean sampled reward: {rise(arithmetic, "gigpo")}; {rise(arithmetic, "grpo")}.

## Rollout

`python scripts/bench_rollout.py`; its first lines say what the cases and columns are.

{rollout_tables(rollout)}

`python scripts/check_equivalence.py`: {equivalence["tokens"]:,} sampled tokens of both environments compared;
{equivalence["ties"]} episodes parted at a tie (two best scores within 1e-4), {equivalence["errors"]} elsewhere.

## Answering times

`python scripts/bench_startup.py`, best of three, seconds: `--help` {startup["help_seconds"]:.2f}, a bad key
{startup["bad_key_seconds"]:.2f}, the first step of the main job {startup["first_step_seconds"]:.2f} (the evaluation before
training included).
"""  # noqa: E501 - a table's row cannot be broken


def rollout_tables(rollout: dict[str, Any]) -> str:
    """Every case that was measured, one level below the page's own headings."""
    return "\n".join(f"#{bench_rollout.shown(case)}" for case in rollout["cases"])


def rise(results: list[dict[str, Any]], algorithm: str) -> str:
    own = [result for result in results if result["algorithm"] == algorithm]
    before, after = (sum(result[name] for result in own) / len(own) for name in ("before_reward", "after_reward"))
    least = min(result["after_reward"] - result["before_reward"] for result in own)
    return f"{algorithm} {before:.3f} -> {after:.3f}, the least gain of a seed {least:+.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--out", type=Path, default=ROOT / "docs/benchmarks.md")
    arguments = parser.parse_args()
    names = ("learning", "arithmetic", "rollout", "startup", "equivalence")
    measured = {name: json.loads((arguments.folder / f"{name}.json").read_text()) for name in names}
    arguments.out.write_text(document(measured))


if __name__ == "__main__":
    main()
