"""Tab completion of the console script, in a real bash."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(sys.executable).with_name("mlxrl-runs")
BASH = shutil.which("bash")
ENVIRONMENT = {**os.environ, "PATH": f"{SCRIPT.parent}:{os.environ['PATH']}", "TERM": "dumb"}
ASK = """
eval "$(mlxrl-runs --shell-completion install=bash)"
[[ $(complete -p mlxrl-runs) == *"-F hydra_bash_completion mlxrl-runs" ]] || exit 3
COMP_LINE=$1; COMP_POINT=${#COMP_LINE}; COMP_WORDS=($COMP_LINE); COMP_CWORD=$2
hydra_bash_completion
printf '%s\\n' "${COMPREPLY[@]}"
"""

pytestmark = pytest.mark.skipif(BASH is None or not SCRIPT.exists(), reason="needs bash and the installed script")


def complete(line: str, folder: Path) -> set[str]:
    """What bash offers for the last word of a line."""
    words = line.split(" ")
    done = subprocess.run(
        [str(BASH), "--norc", "-c", ASK, "bash", line, str(len(words) - 1)], cwd=folder, capture_output=True, text=True,
        env=ENVIRONMENT, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mlxrl-runs alg", {"algorithm=", "algorithm."}),
        ("mlxrl-runs algorithm=gi", {"algorithm=gigpo"}),
        ("mlxrl-runs -m env=recurring optimizer.learning_ra", {"optimizer.learning_rate="}),
        ("mlxrl-runs group_s", {"group_size="}),
        (f"{SCRIPT} algorithm=gi", {"algorithm=gigpo"}),
        ("mlxrl-runs sho", {"show"}),
        ("mlxrl-runs ls --j", {"--json"}),
        ("mlxrl-runs seed=1 sho", set()),
    ],
)
def test_bash_completes_groups_choices_keys_and_commands(line, expected, tmp_path):
    assert complete(line, tmp_path) == expected


def test_bash_completes_the_names_of_runs(tmp_path):
    for name in ("12-00-00-000001_alpha", "13-00-00-000001_beta"):
        folder = tmp_path / "outputs/2026-11-30" / name
        folder.mkdir(parents=True)
        (folder / "run.json").write_text("{}")
    assert complete("mlxrl-runs show al", tmp_path) == {"alpha"}
    assert complete("mlxrl-runs tail ", tmp_path) >= {"alpha", "beta", "12-00-00-000001_alpha"}


def test_a_tab_on_a_terminal_completes_the_word(tmp_path):
    terminal, child = pty.openpty()
    shell = subprocess.Popen(
        [str(BASH), "--norc", "--noprofile", "-i"], cwd=tmp_path, env=ENVIRONMENT, stdin=child, stdout=child,
        stderr=child, start_new_session=True,
    )  # fmt: skip
    os.close(child)
    try:
        os.write(terminal, b'eval "$(mlxrl-runs -sc install=bash)"; echo rea""dy\n')
        read_until(terminal, b"ready")
        os.write(terminal, b"mlxrl-runs algorithm=gi\t")
        read_until(terminal, b"algorithm=gigpo")
    finally:
        shell.kill()
        shell.wait()
        os.close(terminal)


def read_until(terminal: int, awaited: bytes, seconds: float = 20) -> None:
    seen, deadline = b"", time.monotonic() + seconds
    while awaited not in seen:
        assert select.select([terminal], [], [], max(deadline - time.monotonic(), 0))[0], seen
        seen += os.read(terminal, 4096)
