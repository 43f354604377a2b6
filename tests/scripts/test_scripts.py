"""The scripts run and write what they say; what they measure is for people to read."""

import json
import re
import subprocess
import sys
from pathlib import Path

import mlx_lm
import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def run(name, *arguments):
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / name), *arguments], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


TINY_BENCH = ("--rows", "4", "--tokens", "6", "--requests", "12", "--slots", "4", "--episodes", "8", "--repeats", "1")


def rollout_cases(folder, *arguments):
    """What was printed, and each case's systems by name. Packages that are not installed are left out."""
    printed = run("bench_rollout.py", *TINY_BENCH, *arguments, "--json", str(folder / "out.json"))
    cases = json.loads((folder / "out.json").read_text())["cases"]
    systems = {
        case["case"]: {
            system["name"]: system
            for system in case["systems"]
            if not system.get("error", "").startswith("not installed: ml")
        }
        for case in cases
    }
    return printed, cases, systems


def test_the_rollout_benchmark_measures_equal_work(tmp_path):
    printed, (fixed, played), systems = rollout_cases(tmp_path, "--cases", "fixed,multi_turn")
    assert {system["tokens"] for system in systems["fixed"].values()} == {4 * 6}  # EOS ends nothing, in no system
    assert fixed["equal_rows"] == played["equal_rows"] == {"ours, one by one": "4 of 4"}
    ours, generator = systems["fixed"]["ours"], systems["fixed"]["mlx-lm BatchGenerator"]
    assert ours["to_batch_generator"] == ours["tokens_per_second"] / generator["tokens_per_second"]
    assert 0 < ours["tokens_per_second"] < fixed["limit_tokens_per_second"]
    assert f"| ours | {ours['tokens_per_second']:,.0f} |" in printed


def test_rows_of_many_lengths_and_slow_worlds_are_measured_on_equal_work(tmp_path):
    _, (geometric, slow, _), systems = rollout_cases(tmp_path, "--cases", "geometric,slow_env,exp")
    alone = {name: system["tokens"] for name, system in systems["geometric"].items()}
    assert alone["ours"] == alone["ours, fixed waves"] == alone["mlx-lm BatchGenerator"]
    assert alone["ours, one by one"] == alone["mlx-lm stream_generate"] < alone["ours"] < 12 * 6
    assert geometric["equal_rows"] == {"ours, fixed waves": "12 of 12", "ours, one by one": "4 of 4"}
    assert slow["equal_rows"] == {"ours, slow env": "8 of 8"}
    assert systems["slow_env"]["ours, slow env"]["seconds"] > 0.02
    assert {system["tokens"] for system in systems["exp"].values()} == {64 * 363}  # the tiny model's vocabulary


def test_the_step_benchmark_gives_time_for_each_token(tmp_path):
    given = ("--tasks", "2", "--group-size", "2", "--tokens", "6", "--steps", "1", "--repeats", "1")
    printed = run("bench_step.py", *given, "--json", str(tmp_path / "out.json"))
    ours, *others = json.loads((tmp_path / "out.json").read_text())["systems"]
    assert 4 <= ours["tokens"] <= 2 * 2 * 6 and ours["ours_to_it"] == 1
    # a row has 1-6 tokens and there are 4 of them in each step, whose time is `seconds`
    assert ours["seconds"] * 1000 / 24 <= ours["milliseconds_per_token"] <= ours["seconds"] * 1000 / 4
    assert all("tokens" in other or other["error"].startswith("not installed: ml") for other in others)
    assert f"| ours | {ours['milliseconds_per_token']:.3f} |" in printed


def test_the_equivalence_check_counts_what_it_compared(tmp_path):
    run("check_equivalence.py", "--tokens", "300", "--json", str(tmp_path / "out.json"))
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["tokens"] >= 300 and result["errors"] == 0


def test_the_page_of_upstream_defects_names_each_reproduction_and_no_other(tmp_path):
    run(
        "upstream.py",
        "--only",
        "eos_argument_only_adds",
        "masked_decode_attention",
        "--json",
        str(tmp_path / "out.json"),
    )
    found = {entry["name"]: entry["state"] for entry in json.loads((tmp_path / "out.json").read_text())["defects"]}
    assert found["eos_argument_only_adds"] in ("still there", "gone") and len(found) == 2
    source = (SCRIPTS / "upstream.py").read_text()
    reproductions = set(re.findall(r"^    Defect\((\w+)", source, re.MULTILINE))
    page = set(re.findall(r"\*\*(\w+)\*\*", (SCRIPTS.parent / "docs/upstream.md").read_text()))
    assert reproductions == page


def test_steps_to_the_goal_are_those_of_a_mean_over_five():
    sys.path.insert(0, str(SCRIPTS))
    from bench_algorithms import grid_table, steps_to_goal

    assert steps_to_goal([1, 1, 1, 0.5, 0.5, 0, 0]) == 5  # mean .8
    assert steps_to_goal([0.9, 0.9]) is None  # five are needed
    assert steps_to_goal([0] * 5 + [1] * 4) == 9
    runs = [
        {"algorithm": "grpo", "learning_rate": 1e-3, "steps_to_goal": steps, "after_sampled": after}
        for steps, after in ((40, 0.9), (60, 0.8), (None, 0.1), (50, 1.0))
    ]
    assert "| `grpo` | 0.001 | 3 of 4 | 60 | 40 | - | 0.850 | 0.100 |" in grid_table(runs)


def made_run(sweep, algorithm, seed, after, success=(), state="finished"):
    """A run's folder as a sweep leaves it. Args: after: held-out success; None: it failed before any evaluation."""
    folder = sweep / f"{seed}_{algorithm}"
    folder.mkdir(parents=True)
    config = {"algorithm": {"name": algorithm}, "seed": seed, "optimizer": {"learning_rate": 1e-3}}
    (folder / "config.yaml").write_text(json.dumps(config))
    record = {"state": state, "seconds": 10.0 + seed, "device": {"backend": "cpu", "name": "a machine"}}
    (folder / "run.json").write_text(json.dumps(record))
    if after is None:
        return
    scores = lambda value: {policy: {"success": value} for policy in ("sampled", "greedy")}
    (folder / "evaluation.json").write_text(json.dumps({"before": scores(0.01), "after": scores(after)}))
    lines = [{"step": 0}, *({"step": number, "reward/success": x} for number, x in enumerate(success, start=1))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_sweep_is_read_with_the_runs_that_failed_in_it(tmp_path):
    sweep = tmp_path / "sweeps/sweep"
    made_run(sweep, "grpo", 0, 0.9, [0.5, 0.7, 0.8, 0.9, 1.0, 1.0])  # means of five: .78 and .88
    made_run(sweep, "grpo", 1, 0.59, [0.1] * 6)
    made_run(sweep, "ppo", 0, None, state="failed")
    (sweep / "sweep.json").write_text("{}")
    printed = run("bench_algorithms.py", "--sweep", str(sweep), "--json", str(tmp_path / "out.json"))
    assert "| `grpo` | 0.010 | 0.900 0.590 | 0.900 0.590 | 6 - | 10 11 | 1 of 2 |" in printed
    assert "| `ppo` | failed | failed | failed | - | 10 | 0 of 1 |" in printed
    assert "1 of 3 runs end at 0.6 held-out success or more; longest run 11 s" in printed
    found = json.loads((tmp_path / "out.json").read_text())
    assert [(one["algorithm"], one["seed"], one["steps"]) for one in found] == [
        ("grpo", 0, 6), ("grpo", 1, 6), ("ppo", 0, 0),
    ]  # fmt: skip


@pytest.mark.slow
def test_the_tiny_model_can_be_remade(tmp_path):
    run("make_tiny.py", "--steps", "60", "--out", str(tmp_path))
    model, tokenizer = mlx_lm.load(str(tmp_path))
    assert len(model.layers) == 4 and tokenizer.encode("<action>", add_special_tokens=False)


@pytest.mark.slow
def test_the_learning_benchmark_prints_a_row_a_run_and_the_page_is_written_from_it(tmp_path):
    quick = ["--seeds", "1", "steps=1", "trainer.evaluation_episodes=4"]
    assert "gigpo | 0 |" in run("bench_learning.py", *quick, "--json", str(tmp_path / "learning.json"))
    run("bench_learning.py", *quick, "env=arithmetic", "--json", str(tmp_path / "arithmetic.json"))
    assert "| `ppo` | " in run("bench_algorithms.py", *quick, "--json", str(tmp_path / "algorithms.json"))
    assert "| `grpo` | 0.0012 | 0 of 1 |" in run(
        "bench_algorithms.py", "--grid", *quick, "--json", str(tmp_path / "gigpo_grpo.json")
    )
    few = ("--cases", "fixed", "--rows", "4", "--tokens", "6", "--repeats", "1", "--json")
    run("bench_rollout.py", *few, str(tmp_path / "rollout.json"))
    run("bench_rollout.py", *few, str(tmp_path / "rollout_11m.json"))
    run("bench_step.py", "--tasks", "1", "--steps", "1", "--repeats", "1", "--json", str(tmp_path / "step.json"))
    run("check_equivalence.py", "--tokens", "300", "--json", str(tmp_path / "equivalence.json"))
    startup = {"help_seconds": 0.1, "bad_key_seconds": 0.5, "first_step_seconds": 4.0}
    (tmp_path / "startup.json").write_text(json.dumps(startup))
    run("write_benchmarks.py", "--folder", str(tmp_path), "--out", str(tmp_path / "page.md"))
    page = (tmp_path / "page.md").read_text()
    assert "| `cispo` | " in page and "gigpo at its best rate 0.0006: median - steps" in page
    assert "| gigpo | 0 |" in page and "### fixed: rows 4" in page and "NVIDIA H200" in page
