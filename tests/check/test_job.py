"""job=check as a run: its folder, its exit and what it looks at."""

import json
from io import StringIO

import pytest
from rich.console import Console

from mlxrl_runs import run as running
from mlxrl_runs.check import gates
from mlxrl_runs.check.gates import DoesNotApply, Finding
from mlxrl_runs.config import compose_config, validate
from mlxrl_runs.core.stop import StopRequest
from mlxrl_runs.errors import CheckFailed, ConfigError
from mlxrl_runs.lifecycle import begin_folder


def checked(folder, *overrides):
    """What was printed, and the folder of a check in this process; what it raised, too."""
    config = validate(compose_config(["job=check", f"paths.output={folder}", *overrides]))
    place, _ = begin_folder(config, (), None)
    console, raised = Console(file=StringIO(), width=100), None
    try:
        running.execute(config, place, overrides=(), sweep=None, stop=StopRequest(), console=console)
    except CheckFailed as error:
        raised = error
    finally:
        place.release()
    return console.file.getvalue(), place.path, raised


def test_a_broken_gate_ends_the_check_with_1_once_everything_is_written(tmp_path, monkeypatch):
    found = {
        "batched = one by one": Finding(0.5, 1e-4, "9 tokens"),
        "adapters off = base": Finding(0.0, 1e-4, "a probe"),
        "saved adapter = live": DoesNotApply("none here"),
    }
    monkeypatch.setattr(gates, "GATES", {name: lambda bench, name=name: found[name] for name in found})
    printed, folder, raised = checked(tmp_path)
    assert raised is not None and raised.exit_code == 1
    assert "1 of 2 gates are broken" in str(raised) and "rollout.mode=sequential" in str(raised)
    content = json.loads((folder / "check.json").read_text())
    assert {name: gate["passed"] for name, gate in content["gates"].items()} == {
        "batched = one by one": False,
        "adapters off = base": True,
    }
    assert content["gates"]["batched = one by one"]["difference"] == 0.5
    assert content["does_not_apply"] == {"saved adapter = live": "none here"}
    assert "BROKEN" in printed and "does not apply: none here" in printed
    assert json.loads((folder / "summary.json").read_text())["state"] == "failed"


@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_the_base_is_opened_for_itself_and_only_where_there_is_an_adapter(adapter, tmp_path, monkeypatch):
    opened, found = running.open_base, []
    monkeypatch.setattr(running, "open_base", lambda **given: found.append(given) or opened(**given))
    monkeypatch.setattr(gates, "GATES", {name: gates.GATES[name] for name in ("adapters off = base",)})
    printed, folder, raised = checked(tmp_path, f"adapter={adapter}", "model=random", "model.shape=1m", "seed=3")
    assert raised is None and len(found) == (adapter == "lora")
    assert set(json.loads((folder / "check.json").read_text())["gates"]) == (
        {"adapters off = base"} if adapter == "lora" else set()
    )
    assert ("does not apply" in printed) == (adapter == "full")


def test_nothing_goes_to_wandb_and_no_evaluation_is_claimed(tmp_path, monkeypatch):
    monkeypatch.setattr(gates, "GATES", {})
    _, folder, _ = checked(tmp_path, "tracking=wandb")
    assert not (folder / "wandb").exists() and not (folder / "evaluation.json").exists()


def test_a_depth_that_is_known_only_once_the_model_is_open_is_checked_then(tmp_path, monkeypatch):
    monkeypatch.setattr("mlxrl_runs.agreement.layer_count", lambda folder: None)
    with pytest.raises(ConfigError, match=r"memory\.checkpoint: got every_5, but this model has 4 layers"):
        checked(tmp_path, "memory.checkpoint=every_5")
