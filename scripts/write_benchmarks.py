"""Write docs/benchmarks.md from what the benchmark scripts measured.

python scripts/bench_learning.py --json learning.json
python scripts/bench_learning.py --seeds 5 --json arithmetic.json env=arithmetic
python scripts/bench_algorithms.py --json algorithms.json
python scripts/bench_algorithms.py --grid --json gigpo_grpo.json
python scripts/bench_rollout.py --adapter full --json rollout.json
python scripts/bench_rollout.py --adapter full --model random --cases fixed,geometric --json rollout_11m.json
python scripts/bench_step.py --json step.json
python scripts/bench_startup.py --json startup.json
python scripts/check_equivalence.py --json equivalence.json
python scripts/write_benchmarks.py --folder . [--out docs/benchmarks.md]

What was measured on a GPU lies in docs/measured/ and is written out with the rest.
"""

import argparse
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import bench_algorithms
import bench_rollout
import bench_step
from bench_learning import table, verdict

ROOT = Path(__file__).resolve().parents[1]


def document(measured: dict[str, Any]) -> str:
    learning, arithmetic, rollout = measured["learning"], measured["arithmetic"], measured["rollout"]
    startup, equivalence = measured["startup"], measured["equivalence"]
    return f"""# Benchmarks

Measured on {rollout["device"]}, 2 cores, backend {rollout["backend"]}, MLX {version("mlx")}, with OpenBLAS. Machines are
noisy: compare only what one run of one script measured. Metal was not measured; one NVIDIA GPU was, see below. This page is
written by `scripts/write_benchmarks.py` from the files that the commands below leave with `--json FILE`.

## Does it learn: the doors world

`python scripts/bench_learning.py` runs `python -m mlxrl_runs algorithm=A env=recurring group_size=4 seed=S` with the
defaults, each in a fresh process. Success is that of sampled episodes on held-out layouts; `seconds` is the whole run,
both evaluations included. Two runs shared the machine at a time (`--parallel 2`).

{verdict(learning, "gigpo")}.

{verdict(learning, "grpo")}.

{table(learning)}

## Every algorithm

`python scripts/bench_algorithms.py`: one sweep, `-m algorithm=<all of them> seed=0,1,2`, each by the defaults of its yaml, one run
after the other. Steps to .8: the first step at which success, as the mean over the sampled training episodes of the last
{bench_algorithms.WINDOW} steps, is .8 or more. {bench_algorithms.verdict(measured["algorithms"])}.

{bench_algorithms.algorithms_table(measured["algorithms"])}

## GiGPO against GRPO

`python scripts/bench_algorithms.py --grid`: seeds that no default was chosen with, the same three learning rates for both, the
collapse guard off. Medians of steps count a run that never got there as later than any; of an even number they are the later of
the two in the middle. {best_rates(measured["gigpo_grpo"])}

{bench_algorithms.grid_table(measured["gigpo_grpo"])}

## Arithmetic

`python scripts/bench_learning.py --seeds {len({r["seed"] for r in arithmetic})} env=arithmetic`. The reward is 0.1 for a
well-formed answer and 1 more for the right integer. What the sampled policy gains is mostly sharpening: the tiny model
knows most sums already when it is asked greedily, so look at both columns.

{table(arithmetic)}

Mean sampled reward: {rise(arithmetic, "gigpo")}; {rise(arithmetic, "grpo")}.

## Rollout

`python scripts/bench_rollout.py --adapter full`; its first lines say what the cases and columns are. Everybody samples from the
same weights, without an adapter. The tiny model, float32, {dated(rollout)}:

{rollout_tables(rollout)}

An 11M model (`--model random --cases fixed,geometric`), float32:

{rollout_tables(measured["rollout_11m"])}

`python scripts/check_equivalence.py`: {equivalence["tokens"]:,} sampled tokens of both environments compared;
{equivalence["ties"]} episodes parted at a tie (two best scores within 1e-4), {equivalence["errors"]} elsewhere.

## A whole step

`python scripts/bench_step.py`: rollout and update, answers ended by the policy, everything else as each trainer comes.

#{bench_step.shown(measured["step"])}

## On one NVIDIA H200

Random weights in Qwen3-0.6B's shape, prompts of 128 tokens. Short rows are bound by the host, which builds and submits some 600
kernels a step; runs of the same command on other hosts differed by 30% and more, so read the ratios. `bfloat16`, no adapter:

{gpu_tables("h200_bf16")}

Four rows again, beside the other packages, nine rounds:

{gpu_tables("h200_bf16_4_rows")}

4-bit base under an unmerged LoRA (rank 16), which is the shape of a Mac; `rollout.merge_adapter=always` unpacks the base while
sampling:

{gpu_tables("h200_4bit_4_rows")}

16 prompts, 4 rows each:

{gpu_tables("h200_4bit_64_rows")}

A whole step of one prompt and four rows, 4-bit base:

#{bench_step.shown(on_gpu("h200_step"))}

## Answering times

`python scripts/bench_startup.py`, best of three, seconds: `--help` {startup["help_seconds"]:.2f}, a bad key
{startup["bad_key_seconds"]:.2f}, the first step of the main job {startup["first_step_seconds"]:.2f} (the evaluation before
training included).
"""  # noqa: E501 - a table's row cannot be broken


def rollout_tables(rollout: dict[str, Any]) -> str:
    """Every case that was measured, one level below the page's own headings."""
    return "\n".join(f"#{bench_rollout.shown(case)}" for case in rollout["cases"])


def on_gpu(name: str) -> dict[str, Any]:
    return json.loads((ROOT / f"docs/measured/{name}.json").read_text())


def gpu_tables(name: str) -> str:
    measured = on_gpu(name)
    return f"{dated(measured)}\n\n{rollout_tables(measured)}"


def dated(measured: dict[str, Any]) -> str:
    """When, and with what."""
    versions = ", ".join(f"{package} {number}" for package, number in measured["versions"].items() if number)
    return f"measured {measured['made_at'][:10]} with {versions}"


def best_rates(runs: list[dict[str, Any]]) -> str:
    """Each algorithm at the rate with the lowest median of steps."""
    told = []
    for name in ("gigpo", "grpo"):
        own = [run for run in runs if run["algorithm"] == name]
        rates = {
            rate: bench_algorithms.median_step([run for run in own if run["learning_rate"] == rate])
            for rate in sorted({run["learning_rate"] for run in own})
        }
        best = min(rates, key=lambda rate: (not rates[rate].isdigit(), rates[rate].zfill(9)))
        told.append(f"{name} at its best rate {best:g}: median {rates[best]} steps to .8")
    return "; ".join(told) + "."


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
    names = (
        "learning", "algorithms", "gigpo_grpo", "arithmetic", "rollout", "rollout_11m", "step", "startup",
        "equivalence",
    )  # fmt: skip
    measured = {name: json.loads((arguments.folder / f"{name}.json").read_text()) for name in names}
    arguments.out.write_text(document(measured))


if __name__ == "__main__":
    main()
