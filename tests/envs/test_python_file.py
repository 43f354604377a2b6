import pytest
from pydantic import ValidationError

from building import settings
from mlxrl_runs.errors import ConfigError

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
    with pytest.raises(ValidationError, match="no file that can be read"):
        settings("env", "python", file=str(tmp_path / "none.py"))
    for name, source, complaint in (
        ("empty.py", "", r"env\.factory=make"),
        ("broken.py", "def make(:", r"cannot be imported: SyntaxError"),
        ("needs.py", "import not_there", r"cannot be imported: ModuleNotFoundError"),
        ("text.txt", "", r"must end in \.py"),
    ):
        (tmp_path / name).write_text(source)
        with pytest.raises(ConfigError, match=complaint):
            settings("env", "python", file=str(tmp_path / name)).make("1", 0, 0)
