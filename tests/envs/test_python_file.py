import pytest
from pydantic import ValidationError

from building import settings

SOURCE = """
from dataclasses import dataclass
from mlxrl_runs.core.protocols import StepResult

@dataclass
class Echo:
    task: str
    max_turns: int = 1
    def reset(self): return f"say {self.task}"
    def step(self, action): return StepResult("", float(action == self.task), True)
    def state_id(self, observation): return self.task

def make(task, seed, group_index): return Echo(task)
"""


def test_a_users_file_makes_environments(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    family = settings("env", "python", file=str(tmp_path / "mine.py"), tasks=10, held_out=3)
    assert family.held_out_tasks() == ["7", "8", "9"]
    assert family.make("4", 0, 0).reset() == "say 4"
    assert family.make("4", 0, 0).step("4").reward == 1.0


def test_a_missing_file_is_refused_and_a_missing_factory_is_named(tmp_path):
    with pytest.raises(ValidationError, match="does not exist"):
        settings("env", "python", file=str(tmp_path / "none.py"))
    (tmp_path / "empty.py").write_text("")
    family = settings("env", "python", file=str(tmp_path / "empty.py"))
    with pytest.raises(AttributeError, match="'make'"):
        family.make("1", 0, 0)
