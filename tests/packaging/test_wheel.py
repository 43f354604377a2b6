import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT, check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    [path] = folder.glob("*.whl")
    return path


def test_the_wheel_holds_every_module_config_and_weight_and_nothing_else(wheel):
    package = {f"mlxrl_runs/{name}" for name in files(ROOT / "src/mlxrl_runs")}
    conf = {f"mlxrl_runs/conf/{name}" for name in files(ROOT / "conf")}
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
        [license_file] = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
        assert archive.read(license_file) == (ROOT / "LICENSE").read_bytes()
    assert inside == package | conf
    assert "mlxrl_runs/py.typed" in inside  # type checkers may read the annotations
    assert "mlxrl_runs/conf/config.yaml" in inside and "mlxrl_runs/models/tiny/model.safetensors" in inside


def files(folder):
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc" and path.name != ".DS_Store"
    }


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A new environment outside the checkout: the wheel in its own site-packages, what it needs lent by this one."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=True)
    [site] = folder.glob("lib/python3*/site-packages")
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True, capture_output=True, timeout=120)
    (site / "lent.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")) + "\n")
    return folder / "bin"


def called(command, folder):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        [str(word) for word in command], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip


@pytest.mark.slow
def test_an_installed_wheel_shows_its_help_from_any_folder(installed, tmp_path):
    shown = called([installed / "mlxrl-runs", "--help"], tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "algorithm  gigpo, grpo" in shown.stdout


@pytest.mark.slow
def test_an_installed_wheel_finds_its_configs_and_model_and_trains(installed, tmp_path):
    command = [installed / "python", "-m", "mlxrl_runs", "steps=1", "tasks_per_step=2", "tracking=jsonl"]
    done = called([*command, "trainer.evaluation_episodes=8"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    latest = tmp_path / "outputs/latest"
    assert len((latest / "metrics.jsonl").read_text().splitlines()) >= 1
    assert yaml.safe_load((latest / "config.yaml").read_text())["model"]["name"] == "tiny"
    where = called([installed / "python", "-c", "import mlxrl_runs; print(mlxrl_runs.__path__[0])"], tmp_path)
    assert Path(where.stdout.strip()).is_relative_to(installed.parent)
