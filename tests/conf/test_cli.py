"""The command line from outside: exit codes, messages, and what is not imported or written."""

import os
import subprocess
import sys

import pytest

from mlxrl_runs.cli import main
from mlxrl_runs.groups import group_choices


def run(*arguments: str, folder, code: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-c", code] if code else [sys.executable, "-m", "mlxrl_runs"]
    return subprocess.run(
        [*start, *arguments], cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )


def test_help_names_every_choice_and_the_exit_codes(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for names in group_choices().values():
        assert len(names) == 1 or ", ".join(names) in text
    assert "exit codes: 0 done, 1 the run failed, 2 wrong config" in text


@pytest.mark.parametrize(("argument", "heavy"), [("--help", "mlx wandb hydra pydantic"), ("groupsize=8", "mlx wandb")])
def test_help_and_refusals_import_nothing_heavy(argument, heavy, tmp_path):
    code = (
        "import sys; from mlxrl_runs.cli import main; main(sys.argv[1:]);"
        f"print([name for name in '{heavy}'.split() if name in sys.modules])"
    )
    ended = run(argument, folder=tmp_path, code=code)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip().endswith("[]")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["algorithm=gigpoo"], "Did you mean algorithm=gigpo?"),
        (["+groupsize=8"], "Did you mean group_size?"),
        (["group_size=1", "algorithm=gigpo"], "needs at least 2"),
        (["--colour"], "unrecognized arguments: --colour"),
        (["--config-dir", "/no/such/folder"], "/no/such/folder is no folder"),
        (["--resolve"], "go with --cfg"),
        (["--cfg", "job", "algorithm=gigpoo"], "Did you mean algorithm=gigpo?"),
        (["-m", "group_size=1,2", "algorithm=gigpo"], "group_size=1: group_size: got 1"),
        (["group_size=1,2", "algorithm=gigpo", "-m"], "group_size=1: group_size: got 1"),
        (["-m", "seed=0,1", "steps=-1"], "every point: steps: got -1"),
        (["-m", "adapter=glob(zz*)"], "matches nothing"),
        (["-m", "seed=0,1", "hydra.nope=1"], "hydra.nope"),
        (["-m", "seed=0,1", "hydra/launcher=nope"], "nope"),
        (["-m", "+wandb.api_key=DUMMY-KEY-1,DUMMY-KEY-2"], "WANDB_API_KEY"),
    ],
)
def test_wrong_input_ends_with_2_one_message_and_no_folder(arguments, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    streams = capsys.readouterr()
    assert expected in streams.err
    assert "Traceback" not in streams.err and "DUMMY-KEY" not in streams.err + streams.out
    assert list(tmp_path.iterdir()) == []


def test_a_traceback_is_shown_on_demand(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert main(["steps=-1"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_hydras_own_flags_answer(tmp_path):
    shown = run("--cfg", "job", "group_size=8", folder=tmp_path)
    assert shown.returncode == 0 and "group_size: 8" in shown.stdout
    assert "output_subdir" in run("--cfg", "hydra", folder=tmp_path).stdout
    assert "Config search path" in run("--info", "searchpath", folder=tmp_path).stdout
    assert run("--hydra-help", folder=tmp_path).returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_cfg_shows_the_model_that_a_path_alone_chooses(tmp_path):
    for words in (["--cfg", "job", "seed=1", "model.path=org/name"], ["model.path=org/name", "-c", "job"]):
        shown = run(*words, folder=tmp_path)
        assert shown.returncode == 0 and "source: hub" in shown.stdout, shown.stderr
