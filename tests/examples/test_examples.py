"""The examples are as short as they say, run as they stand, and do what they claim."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import mlx.core as mx
import pytest

from building import ENVIRONMENTS, one_turn_batch
from contracts import test_algorithms as promises
from mlxrl_runs import Completion, StepResult, compose, train
from mlxrl_runs.config import compose_config
from mlxrl_runs.core import registry

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHORT = ["steps=1", "tasks_per_step=4", "trainer.evaluation_episodes=8", "tracking=jsonl"]


def lines_of(file: Path, name: str) -> int:
    """Lines of a class or function that are not blank, comment or docstring."""
    tree = ast.parse(file.read_text())
    [node] = [node for node in tree.body if getattr(node, "name", None) == name]
    documented = [part for part in ast.walk(node) if isinstance(part, ast.FunctionDef | ast.ClassDef)]
    docstrings = {
        line
        for part in documented
        if ast.get_docstring(part)
        for line in range(part.body[0].lineno, part.body[0].end_lineno + 1)
    }
    ignored = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    with open(file, "rb") as stream:
        tokens = [token for token in tokenize.tokenize(stream.readline) if token.type not in ignored]
    written = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - docstrings
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return len([line for line in written if first <= line <= node.end_lineno])


@pytest.mark.parametrize(
    ("file", "name", "limit"),
    [("reward.py", "reward", 10), ("environment.py", "Corridor", 30), ("algorithm.py", "Raft", 40)],
)
def test_each_is_as_short_as_it_is_said_to_be(file, name, limit):
    assert 5 <= lines_of(EXAMPLES / file, name) <= limit


def loaded(name: str):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "least", "most"),
    # measured: .53 -> .70, .17 -> .45, .03 -> .21; nothing learned leaves the first number where it was
    [("reward", 0.6, 1.0), ("environment", 0.35, 1.0), ("algorithm", 0.12, 1.75)],
)
def test_each_runs_as_a_script_and_learns(name, least, most, tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = map(float, re.search(r"([\d.-]+) before, ([\d.]+) after\n$", done.stdout).groups())
    assert before < least <= after <= most
    assert (tmp_path / "outputs/latest/run.json").is_file()


def by_command(tmp_path, *overrides):
    command = [sys.executable, "-m", "mlxrl_runs", *SHORT, *overrides, f"paths.output={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (tmp_path / "latest/metrics.jsonl").read_text().splitlines()]


# ---- the reward


@pytest.mark.parametrize(
    ("text", "paid"), [("42", 1.0), ("= 41", 0.5), ("1 then 39", 0.25), ("-42", 1 / 85), ("?", 0.0)]
)
def test_the_reward_pays_less_the_further_off_an_answer_is(text, paid):
    completion = Completion(text, "40+2", "t", "42", 3, 8, False, StepResult("", 0.0, True))
    assert loaded("reward").reward(completion) == pytest.approx(paid)


def test_the_reward_is_one_of_the_command_too(tmp_path):
    row = by_command(tmp_path, "env=arithmetic", "reward=file", f"reward.file.path={EXAMPLES / 'reward.py'}")[1]
    assert row["reward/file"] == row["reward/mean"] and 0 < row["reward/file"] < 1


# ---- the environment


def test_a_room_entered_again_is_the_same_state_and_the_exit_ends_the_episode():
    corridor = loaded("environment").Corridor("7", 0, 0)
    corridor.place, corridor.exit = 2, 4
    first = corridor.state_id("")
    assert corridor.step("nonsense").reward == -0.1 and corridor.state_id("") == first
    for action in ("push", "pull"):
        assert not corridor.step(f"<action>{action}</action>").done
        assert (corridor.state_id("") == first) == (action == "pull")
    corridor.step("<action>push</action>")
    out = corridor.step("<action>push</action>")
    assert (out.done, out.reward, out.info["success"]) == (True, 1.0, 1.0)


def test_the_signs_lead_to_the_exit_and_held_out_corridors_are_new():
    module = loaded("environment")
    seen = set()
    for number in range(1000):
        corridor = module.Corridor(str(number), 0, 0)
        if number < 900:
            seen.add((corridor.exit, *corridor.signs))
        else:
            assert (corridor.exit, *corridor.signs) not in seen
        observation, turns = corridor.reset(), 0
        while corridor.place != corridor.exit:
            ahead = observation.removeprefix("door ") in module.AHEAD
            observation, turns = corridor.step(f"<action>{'push' if ahead else 'pull'}</action>").observation, turns + 1
        assert 1 <= turns <= corridor.max_turns


def test_the_environment_is_one_of_the_command_too_and_its_states_recur(tmp_path):
    file = EXAMPLES / "environment.py"
    rows = by_command(tmp_path, "env=python", f"env.file={file}", "env.factory=Corridor", "group_size=8")
    assert rows[1]["anchor/group_size_mean"] > 1.5 and rows[1]["turns/mean"] > 1
    assert "eval/sampled_success" in rows[0]


# ---- the algorithm


@pytest.fixture
def raft(monkeypatch):
    """Its class, registered for one test."""
    monkeypatch.setattr(registry.algorithm, "_classes", dict(registry.algorithm._classes))
    return loaded("algorithm").Raft


@pytest.fixture
def make(raft, monkeypatch):
    """The contracts' own tests, with the example in the place of a registered yaml."""
    values = compose_config(["algorithm=raft"], [EXAMPLES / "conf"])["algorithm"]
    make = lambda group, name, **changes: raft.model_validate(values | changes)
    monkeypatch.setattr(promises, "settings", make)
    return make


def test_the_best_of_a_group_is_imitated_and_nobody_where_all_are_alike(make):
    batch = make("algorithm", "raft").credit(one_turn_batch([[0.0, 1.0, 1.0], [0.5, 0.5, 0.5]]))
    assert batch.advantage[:, 2].tolist() == [0, 1, 1, 0, 0, 0]
    assert batch.weights.sum().item() == pytest.approx(1)  # a mean over the tokens that are imitated
    assert mx.where(batch.advantage == 0, batch.weights, 0.0).sum().item() == 0
    assert make("algorithm", "raft").metrics(batch) == {"raft/kept_fraction": pytest.approx(2 / 6)}


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_the_algorithm_trains_on_every_environment(make, environment):
    promises.test_it_trains_on_every_environment("raft", environment)


# one is left out: advantages of a group sum to zero. Imitation has no baseline.
@pytest.mark.parametrize(
    "promise",
    [
        promises.test_padding_changes_nothing,
        promises.test_the_order_of_groups_is_irrelevant,
        promises.test_equal_returns_pay_nothing,
        promises.test_context_is_never_trained,
        promises.test_h08_only_sampled_tokens_are_trained_and_an_old_answer_in_the_prompt_moves_no_mask,
        promises.test_h23_an_empty_completion_trains_its_end_token_counts_in_the_baseline_and_gives_no_nan,
        promises.test_its_reference_pass_is_asked_for_only_when_the_loss_reads_it,
        promises.test_the_gradient_of_the_loss_is_the_policy_gradient,
    ],
)
def test_the_algorithm_keeps_the_promises_of_every_algorithm(make, promise):
    promise("raft")


def test_the_algorithm_is_composed_with_its_own_folder_of_configs(raft, tmp_path):
    config = compose(["algorithm=raft", *SHORT, f"paths.output={tmp_path}"], config_dirs=[EXAMPLES / "conf"])
    assert isinstance(config.algorithm, raft)
    run = train(config)
    assert 0 < run.metrics[1]["raft/kept_fraction"] < 1 and run.metrics[1]["grad/norm"] > 0


def test_what_such_an_algorithm_trained_is_exported_where_nobody_knows_it(tmp_path):
    code = (
        "import runpy, sys; from pathlib import Path; from mlxrl_runs import compose, train;"
        f"runpy.run_path({str(EXAMPLES / 'algorithm.py')!r}, run_name='example');"
        f"train(compose(['algorithm=raft', *{SHORT!r}, 'paths.output=' + sys.argv[1]], [{str(EXAMPLES / 'conf')!r}]))"
    )
    for command in (["-c", code, str(tmp_path)], ["-m", "mlxrl_runs.export", str(tmp_path / "latest")]):
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "latest/export/adapter/adapters.safetensors").is_file()
