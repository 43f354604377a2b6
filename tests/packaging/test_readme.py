"""What the README tells a newcomer to type, typed."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mlxrl_runs.config import compose_config, validate

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^python -m mlxrl_runs (.*)$", README, re.MULTILINE)
OWN_ENVIRONMENT, FROM_PYTHON = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.fixture
def placeholders(tmp_path, monkeypatch):
    """A folder in which `my_env.py`, `my_reward.py`, DIR and RUN_FOLDER of the commands exist."""
    (tmp_path / "my_env.py").write_text(OWN_ENVIRONMENT)
    (tmp_path / "my_reward.py").write_text("def reward(completion): return float(len(completion.text))\n")
    (tmp_path / "DIR").symlink_to(ROOT / "src/mlxrl_runs/models/tiny")
    (tmp_path / "RUN_FOLDER/adapters").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_readme_is_accepted(command, placeholders):
    words = shlex.split(command, comments=True)
    sweep = "-m" in words
    validate(compose_config([word.split(",")[0] if sweep else word for word in words if word != "-m"]))


@pytest.mark.slow
def test_the_readmes_python_runs(placeholders):
    done = subprocess.run([sys.executable, "-c", FROM_PYTHON], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.splitlines()[-1].split()[0]) > 0.5 and (placeholders / "curves.svg").is_file()


def test_every_make_target_in_the_docs_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    pages = [README, *(path.read_text() for path in [ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])]
    named = {target for page in pages for target in re.findall(r"(?:`|^)make ([a-z-]+)", page, re.MULTILINE)}
    assert {"run", "test", "setup", "lint"} <= named <= targets


def test_every_page_the_docs_link_to_exists():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())]
    assert len(links) >= 4
    assert [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()] == []


@pytest.mark.slow
def test_the_readmes_own_environment_is_learned_and_its_folder_is_as_the_table_says(placeholders):
    # measured: 0.16 of the held-out tasks before, 0.996 after 40 steps
    [command] = [command for command in COMMANDS if "my_env.py" in command]
    done = subprocess.run(
        [sys.executable, "-m", "mlxrl_runs", *command.split(), "trainer.evaluation_episodes=128"],
        env=os.environ | {"WANDB_MODE": "offline"}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = map(float, re.search(r"sampled success +([\d.]+) +([\d.]+)", done.stdout).groups())
    assert before < 0.4 and after > 0.9
    [table] = re.findall(r"\| file \| holds \|\n\|---\|---\|\n(.*?)\n\n", README, re.DOTALL)
    names = re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)
    assert len(names) == 10
    assert [name for name in names if not list((placeholders / "outputs/latest").glob(name.rstrip("/")))] == []
