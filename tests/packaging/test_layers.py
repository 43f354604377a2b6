"""Who may import whom: pyproject.toml says it, import-linter reads it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_layers_import_downward_only_and_algorithms_not_one_another():
    code = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    for contract in ("Layers import downward only", "Algorithms do not import one another"):
        assert f"{contract} KEPT" in done.stdout
