"""The scripts run and write what they say; what they measure is for people to read."""

import json
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


def test_the_rollout_benchmark_measures_equal_work(tmp_path):
    printed = run(
        "bench_rollout.py", *("--rows", "4", "--tokens", "6", "--repeats", "1", "--json", str(tmp_path / "out.json"))
    )
    (case,) = json.loads((tmp_path / "out.json").read_text())["cases"]
    systems = {system["name"]: system for system in case["systems"]}
    assert {system["tokens"] for system in systems.values()} == {4 * 6}  # EOS ends nothing, in no system
    assert case["equal_rows"] == {"ours, one by one": "4 of 4"}
    ours, generator = systems["ours"], systems["mlx-lm BatchGenerator"]
    assert ours["to_batch_generator"] == ours["tokens_per_second"] / generator["tokens_per_second"]
    assert 0 < ours["tokens_per_second"] < case["limit_tokens_per_second"]
    assert f"| ours | {ours['tokens_per_second']:,.0f} |" in printed


def test_the_equivalence_check_counts_what_it_compared(tmp_path):
    run("check_equivalence.py", "--tokens", "300", "--json", str(tmp_path / "out.json"))
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["tokens"] >= 300 and result["errors"] == 0


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
    run("bench_rollout.py", "--rows", "4", "--tokens", "6", "--json", str(tmp_path / "rollout.json"))
    run("check_equivalence.py", "--tokens", "300", "--json", str(tmp_path / "equivalence.json"))
    startup = {"help_seconds": 0.1, "bad_key_seconds": 0.5, "first_step_seconds": 4.0}
    (tmp_path / "startup.json").write_text(json.dumps(startup))
    run("write_benchmarks.py", "--folder", str(tmp_path), "--out", str(tmp_path / "page.md"))
    page = (tmp_path / "page.md").read_text()
    assert "| gigpo | 0 |" in page and "### fixed: rows 4" in page
