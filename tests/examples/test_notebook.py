"""The notebook runs from top to bottom, its run is the command's, and what is committed of it names no machine."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples/first_run.ipynb"
NOT_REPEATABLE = ("time/", "memory/", "/tokens_per_second", "progress/seconds")


def outputs_of(file: Path) -> list[str]:
    """What each code cell shows, as text."""
    cells = [cell for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == "code"]
    return [json.dumps(cell["outputs"], ensure_ascii=False) for cell in cells]


def test_what_is_committed_has_outputs_is_small_and_names_no_machine():
    assert NOTEBOOK.stat().st_size < 200_000
    outputs = outputs_of(NOTEBOOK)
    assert all(outputs[1:]) and not any('"error"' in output for output in outputs)
    assert "<svg" in "".join(outputs) and "job=evaluate" in outputs[0]
    for output in outputs:
        assert not re.findall(r"(?<![\w.])/(?:home|root|tmp|work|Users|usr|opt|private)\b", output)


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    if find_spec("nbclient") is None or find_spec("ipykernel") is None:
        pytest.skip("needs nbclient and ipykernel: pip install 'mlxrl-runs[dev]'")
    folder = tmp_path_factory.mktemp("notebook")
    script = [sys.executable, str(ROOT / "scripts/execute_notebook.py"), str(NOTEBOOK)]
    command = [*script, "--out", str(folder / "out.ipynb"), "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def repeatable(file: Path) -> list[dict]:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [
        {name: value for name, value in row.items() if not any(part in name for part in NOT_REPEATABLE)} for row in rows
    ]


@pytest.mark.slow
def test_the_notebooks_run_has_the_numbers_of_its_command(executed, tmp_path):
    text = " ".join(json.loads(NOTEBOOK.read_text())["cells"][2]["source"]).replace("\n", "")
    [words] = re.findall(r"`python -m mlxrl_runs ([^`]*)`", text)
    command = [sys.executable, "-m", "mlxrl_runs", *words.split(), f"paths.output={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    first = min(executed.glob("outputs/*/*_gigpo-recurring-*"))
    assert len(repeatable(first / "metrics.jsonl")) == 31
    assert repeatable(first / "metrics.jsonl") == repeatable(tmp_path / "latest/metrics.jsonl")


@pytest.mark.slow
def test_each_of_its_cells_does_what_the_text_says(executed):
    outputs = outputs_of(executed / "out.ipynb")
    assert len(outputs) == len(outputs_of(NOTEBOOK))
    same, answers, files = outputs[-3:]
    assert '"True"' in same and answers.count("<action>") == 3 and "model.safetensors" in files
    closer, gates = (json.loads((min(executed.glob(f"outputs/*/*{name}*")) / "evaluation.json").read_text())
                     for name in ("gigpo-arithmetic", "gigpo-python"))  # fmt: skip
    assert closer["after"]["sampled"]["parts"]["closeness"] > closer["before"]["sampled"]["parts"]["closeness"]
    assert gates["after"]["sampled"]["success"] > gates["before"]["sampled"]["success"] + 0.2
