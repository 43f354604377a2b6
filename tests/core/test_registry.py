from importlib.metadata import EntryPoint

import pytest

from mlxrl_runs.core import registry
from mlxrl_runs.core.settings import Settings
from mlxrl_runs.errors import ConfigError


class Mine(Settings):
    name: str


def test_built_in_parts_are_found_by_their_file_name():
    assert {"grpo", "gigpo"} <= set(registry.algorithm.names())
    assert registry.algorithm.get("gigpo").__name__ == "Gigpo"


def test_another_packages_entry_point_can_be_chosen_by_name(monkeypatch):
    point = EntryPoint("mine", f"{__name__}:Mine", "mlxrl_runs.algorithms")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == point.group else [])
    fresh = registry.Registry("algorithm", "mlxrl_runs.algorithms", "mlxrl_runs.algorithms")
    assert "mine" in fresh.names()
    assert fresh.get("mine").__name__ == "Mine"


def test_a_name_nobody_registered_is_a_key_error():
    with pytest.raises(KeyError):
        registry.algorithm.get("gigpoo")


def test_two_classes_cannot_share_a_name():
    fresh = registry.Registry("algorithm", "mlxrl_runs.algorithms", "nothing")
    fresh("mine")(Mine)
    other = type("Other", (Settings,), {"__module__": "elsewhere", "__annotations__": {"name": str}})
    with pytest.raises(ConfigError, match="mine"):
        fresh("mine")(other)
