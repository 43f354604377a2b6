"""scripts/setup.sh, with every program it calls replaced by one that writes down how it was called."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("sh", "cat", "cksum", "dirname", "rm", "tr", "cp", "mkdir", "timeout")
PYTHON = """\
case "$*" in
  *"import platform"*) echo x86_64 ;;
  *backend*) [ -e {root}/blas ] ;;
  "-c "*) exit {unusable} ;;
  "-m venv "*) echo "venv" >>{root}/calls; mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
  "-m pip "*) for last; do :; done; echo "pip $last" >>{root}/calls; case $last in *blas*) : >{root}/blas ;; esac ;;
esac
"""
UV = """\
echo "uv $*" >>{root}/calls
case "$1" in venv) mkdir -p .venv/bin; cp {root}/bin/python3 .venv/bin/python ;; esac
"""
APT_GET = 'echo apt-get >>{root}/calls; case "$*" in *libopenblas0-pthread*) : >{root}/blas ;; esac\n'


class Machine:
    """A checkout and a PATH of which every program is known."""

    def __init__(self, folder, user="1000", machine="x86_64", blas=True, unusable=0):
        self.folder, self.checkout, self.unusable = folder, folder / "checkout", unusable
        (self.checkout / "scripts").mkdir(parents=True)
        (folder / "bin").mkdir()
        for name in ("pyproject.toml", "uv.lock", "scripts/setup.sh"):
            shutil.copy(ROOT / name, self.checkout / name)
        for name in NEEDED:
            if path := shutil.which(name):
                (folder / "bin" / name).symlink_to(path)
        self.program("python3", PYTHON)
        self.program("uname", f'[ "$1" = -s ] && echo Linux || echo {machine}\n')
        self.program("id", f"echo {user}\n")
        if blas:
            (folder / "blas").touch()

    def program(self, name, text):
        path = self.folder / "bin" / name
        path.write_text(
            "#!/bin/sh\n" + text.replace("{root}", str(self.folder)).replace("{unusable}", str(self.unusable))
        )
        path.chmod(0o755)

    def setup(self, *arguments, **environment):
        return subprocess.run(
            ["sh", "scripts/setup.sh", *arguments],
            cwd=self.checkout,
            env={"PATH": str(self.folder / "bin"), "HOME": str(self.folder), **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )

    def calls(self):
        """What was called since the last time this was asked."""
        file = self.folder / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return lines


def test_the_first_setup_installs_and_the_next_does_nothing_until_pyproject_changes(tmp_path):
    machine = Machine(tmp_path)
    assert machine.setup("dev").returncode == 0
    assert machine.calls() == ["venv", "pip .[cpu,dev]"]
    again = machine.setup("dev")
    assert (again.returncode, again.stdout, machine.calls()) == (0, "", [])
    with (machine.checkout / "pyproject.toml").open("a") as file:
        file.write("\n")
    assert machine.setup("dev").returncode == 0
    assert machine.calls() == ["pip .[cpu,dev]"]


def test_a_run_installs_without_the_tools_and_an_install_with_them_serves_both(tmp_path):
    machine = Machine(tmp_path)
    machine.setup()
    assert machine.calls() == ["venv", "pip .[cpu]"]
    machine.setup("dev")
    assert machine.calls() == ["pip .[cpu,dev]"]
    machine.setup()
    assert machine.calls() == []


def test_uv_is_used_where_it_is_with_the_locked_versions(tmp_path):
    machine = Machine(tmp_path)
    machine.program("uv", UV)
    assert machine.setup("dev").returncode == 0
    assert machine.calls() == [
        "uv venv --quiet --python python3 .venv",
        "uv sync --quiet --locked --inexact --extra cpu --extra dev",
    ]


def test_where_the_locked_versions_cannot_be_had_uv_resolves_afresh(tmp_path):
    machine = Machine(tmp_path)
    machine.program("uv", UV + '[ "$1" != sync ]\n')
    assert machine.setup().returncode == 0
    assert machine.calls()[-1] == "uv pip install --quiet --python .venv/bin/python --editable .[cpu]"


def test_an_install_that_failed_is_tried_again(tmp_path):
    machine = Machine(tmp_path)
    machine.program("python3", PYTHON + 'case "$*" in "-m pip "*) exit 1 ;; esac\n')
    assert machine.setup().returncode == 1
    machine.calls()
    assert machine.setup().returncode == 1
    assert machine.calls() == ["pip .[cpu]"]


def test_without_a_usable_python_the_message_says_how_to_get_one(tmp_path):
    done = Machine(tmp_path, unusable=1).setup()
    assert done.returncode == 1
    assert "No usable Python >= 3.11" in done.stderr and "apt-get install python3 python3-venv" in done.stderr


def test_root_gets_openblas_from_apt(tmp_path):
    machine = Machine(tmp_path, user="0", blas=False)
    machine.program("apt-get", APT_GET)
    assert machine.setup().returncode == 0
    assert machine.calls() == ["venv", "pip .[cpu]", "apt-get"]


@pytest.mark.parametrize("user", ["0", "1000"])
def test_where_apt_fails_or_may_not_be_used_mkl_comes_from_pypi(user, tmp_path):
    machine = Machine(tmp_path, user=user, blas=False)
    machine.program("apt-get", "echo no network >&2; exit 100\n")
    done = machine.setup()
    assert (done.returncode, done.stderr) == (0, "")
    assert machine.calls() == ["venv", "pip .[cpu]", "pip .[cpu,blas]"]


def test_no_blas_at_all_is_said_and_stops_nothing(tmp_path):
    # MKL is made for x86-64 only
    machine = Machine(tmp_path, machine="aarch64", blas=False)
    done = machine.setup()
    assert done.returncode == 0 and "about 16 times slower" in done.stdout
    assert machine.calls() == ["venv", "pip .[cpu]"]


def test_another_backend_gets_a_new_environment_and_stays(tmp_path):
    # the backends bring the same files, so one cannot be installed over another
    machine = Machine(tmp_path)
    machine.setup()
    machine.calls()
    machine.setup(MLX_BACKEND="cuda13")
    assert machine.calls() == ["venv", "pip .[cuda13]"]
    machine.setup()
    assert machine.calls() == []


def test_an_unknown_backend_is_refused_before_anything_is_made(tmp_path):
    machine = Machine(tmp_path)
    done = machine.setup(MLX_BACKEND="cuda")
    assert done.returncode == 1 and "cuda12 or cuda13" in done.stderr
    assert machine.calls() == [] and not os.path.exists(machine.checkout / ".venv")
