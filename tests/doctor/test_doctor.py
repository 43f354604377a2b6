"""job=doctor: what it finds, that nothing hides anything else, and that no secret gets out."""

import shutil
import subprocess
import sys
from collections import namedtuple
from importlib import metadata

import pytest

from mlxrl_runs import backend, doctor
from mlxrl_runs.cli import main
from mlxrl_runs.doctor import block, examine

Usage = namedtuple("Usage", "total used free")
SECTIONS = ("system", "mlx", "versions", "disk", "wandb", "hub", "terminal")


def problems(report):
    return [problem for problem, _ in report.problems]


def test_the_command_prints_every_section_and_makes_no_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["job=doctor", "tracking=jsonl"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("mlxrl-runs doctor\n\n") and all(f"\n\n{name}\n" in out for name in SECTIONS)
    for fact in ("backend", "cache limit", "free memory", "git commit", "token", "encoding"):
        assert f"\n  {fact}  " in out
    assert list(tmp_path.iterdir()) == []


def test_the_values_stand_under_one_another():
    lines = block(doctor.Report({"a": {"x": 1, "longer_bytes": 2048}, "b": {"y": True, "z": None}})).splitlines()
    values = ["  x       1", "  longer  2.0 KiB", "", "b", "  y       yes", "  z       none"]
    assert lines[2:] == ["no problems found", "", "a", *values]


def test_a_machine_without_a_backend_is_told_what_to_install(tmp_path):
    code = (
        "import sys; sys.modules['mlx'] = None; sys.platform = 'linux';"
        "from mlxrl_runs import backend; backend._installed = lambda name: False;"
        "from mlxrl_runs.cli import main; sys.exit(main(['job=doctor']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "MLX has no backend on this machine.\n     Install one: `pip install 'mlxrl-runs[cpu]'`" in done.stdout
    assert "none installed" in done.stdout and "transformers" in done.stdout
    assert done.stdout.index("problems\n") < done.stdout.index("system\n")


def test_a_slow_blas_a_full_disk_and_a_missing_login_come_first_with_their_remedies(tmp_path, monkeypatch):
    slow = backend.Backend("cpu", warning=backend.NO_BLAS_WARNING)
    monkeypatch.setattr(backend, "prepare", lambda: slow)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(10**12, 0, 3 * 1024**2))
    monkeypatch.setattr("mlxrl_runs.tracking.weights_and_biases.login_state", lambda: "not logged in")
    report = examine(tmp_path / "outputs")
    assert problems(report) == [
        "No fast BLAS found: MLX on this CPU will be about 16 times slower.",
        f"Only 3.0 MiB are free at {tmp_path}.",
        "wandb is not logged in: runs stay offline.",
    ]
    text = block(report)
    assert "     Install one: `apt-get install libopenblas0-pthread`" in text and "paths.output=DIR" in text
    assert len(problems(examine(tmp_path, wants_wandb=False))) == 2


def test_a_blas_that_mlx_does_not_use_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(backend, "prepare", lambda: backend.Backend("cpu", blas="libc.so.6"))
    for speed, expected in ((5.6, ["libc.so.6 is loaded, but MLX multiplies as slowly as without it."]), (80.0, [])):
        monkeypatch.setattr(backend, "gigaflops", lambda size, speed=speed: speed)
        assert problems(examine(tmp_path, wants_wandb=False)) == expected


def test_a_version_this_package_was_not_made_for_is_a_problem(monkeypatch):
    real = metadata.version
    monkeypatch.setattr(doctor, "version", lambda name: "0.31.0" if name == "mlx-lm" else real(name))
    [(wanted, there)] = doctor.unmet_requirements().items()
    assert wanted.startswith("mlx-lm") and "0.33" in wanted and there == "0.31.0"


def test_what_is_broken_hides_nothing_else(tmp_path, monkeypatch):
    def broken():
        raise RuntimeError("no driver")

    monkeypatch.setattr(doctor, "_device", broken)
    monkeypatch.setattr("mlxrl_runs.tracking.weights_and_biases.login_state", broken)
    report = examine(tmp_path)
    assert "MLX does not work: RuntimeError: no driver" in problems(report)
    assert report.facts["wandb"] == {"error": "RuntimeError: no driver"} and report.facts["hub"]["token"]


def test_no_secret_gets_into_the_block(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "0123456789abcdef0123456789abcdef01234567")
    report = examine(tmp_path)
    assert report.facts["wandb"]["login"] == "logged in" and report.facts["hub"]["token"] == "present"
    assert "0123456789abcdef" not in block(report)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["job=docter"], "doctor"),
        (["job=doctor", "steps=-1"], "steps"),
        (["-m", "job=doctor", "seed=1,2"], "Leave -m out"),
    ],
)
def test_a_wrong_config_is_exit_2_as_ever(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
