"""Whole runs, in processes of their own, looked at from outside: exit codes, files, numbers."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
import yaml

from mlxrl_runs.policy.load import TINY
from mlxrl_runs.training.state import MANIFEST

SHORT = ["steps=3", "trainer.evaluation_episodes=16", "tracking=jsonl"]
NOT_REPEATABLE = ("time/", "memory/", "/tokens_per_second", "progress/seconds")
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name not in ("WANDB_MODE", "WANDB_API_KEY", "HYDRA_FULL_ERROR")
}


def command(*overrides, output):
    return [sys.executable, "-m", "mlxrl_runs", *overrides, f"paths.output={output}"]


def run(*overrides, output, **environment):
    return subprocess.run(
        command(*overrides, output=output),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=ENVIRONMENT | environment,
        timeout=240,
        check=False,
    )


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def repeatable(rows):
    return [
        {name: value for name, value in row.items() if not any(part in name for part in NOT_REPEATABLE)} for row in rows
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    output = tmp_path_factory.mktemp("finished")
    done = run(*SHORT, output=output)
    assert done.returncode == 0, done.stderr
    return done, (output / "latest").resolve()


def test_a_finished_run_leaves_every_file_of_the_contract(finished):
    _, folder = finished
    names = {
        "config.yaml",
        "run.json",
        "metrics.jsonl",
        "trajectories.jsonl",
        "evaluation.json",
        "summary.json",
        "run.log",
    }
    assert names <= {file.name for file in folder.iterdir()}
    record = json.loads((folder / "run.json").read_text())
    assert (record["state"], record["exit_code"]) == ("finished", 0)
    assert record["engine"]["rollout_mode"] == "batched" and record["device"]["backend"]
    assert record["engine"]["trainable_parameters"] == sum(
        array.size for array in mx.load(str(folder / "adapters/adapters.safetensors")).values()
    )
    assert yaml.safe_load((folder / "config.yaml").read_text())["steps"] == 3


def test_steps_and_evaluations_stand_on_one_axis(finished):
    rows = rows_of(finished[1])
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert "eval/sampled_success" in rows[0] and "eval/sampled_success" in rows[3]
    assert "eval/sampled_success" not in rows[1]


def test_a_metric_that_is_constant_by_construction_is_absent(finished):
    row = rows_of(finished[1])[1]
    assert not [name for name in row if name.startswith(("ratio/", "clip/")) or name == "kl/old"]
    assert row["kl/reference"] == 0.0  # before its first update the policy is its reference


def test_every_logged_metric_is_documented(finished):
    from tracking.test_metrics_doc import is_documented

    names = {name for row in rows_of(finished[1]) for name in row if name != "step"}
    assert len(names) > 40
    assert [name for name in sorted(names) if not is_documented(name)] == []


def test_evaluation_stands_between_a_floor_and_a_ceiling(finished):
    evaluation = json.loads((finished[1] / "evaluation.json").read_text())
    for when in ("before", "after"):
        assert evaluation[when]["sampled"]["episodes"] == 16
        assert set(evaluation[when]["greedy"]) >= {"success", "reward", "episodes"}
        assert evaluation[when]["oracle"]["success"] == 1.0
        assert evaluation[when]["random"]["success"] < 0.5


def test_the_screen_says_what_came_out_and_what_to_type_next(finished):
    done, folder = finished
    assert "held-out" in done.stdout and "job=evaluate" in done.stdout
    assert "\x1b[" not in done.stdout  # no terminal, no escape codes
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stdout.splitlines()[0] in (folder / "run.log").read_text()


def test_the_saved_adapter_opens_with_mlx_lm(finished):
    model, _ = mlx_lm.load(str(TINY), adapter_path=str(finished[1] / "adapters"))
    assert model.layers


def test_the_same_command_gives_the_same_run(finished, tmp_path):
    assert run(*SHORT, output=tmp_path).returncode == 0
    assert repeatable(rows_of(tmp_path / "latest")) == repeatable(rows_of(finished[1]))
    same = [(tmp_path / "latest/trajectories.jsonl").read_text(), (finished[1] / "trajectories.jsonl").read_text()]
    assert same[0] == same[1]


def test_a_checkpoint_is_scored_as_it_was_at_the_end_of_its_run(finished, tmp_path):
    _, folder = finished
    after = json.loads((folder / "evaluation.json").read_text())["after"]
    (tmp_path / "latest").symlink_to(folder)  # moves on to the evaluation's own folder before the weights are read
    for checkpoint in (tmp_path / "latest/adapters", folder / "checkpoints/step_000003"):
        done = run("job=evaluate", f"checkpoint={checkpoint}", *SHORT[1:], output=tmp_path)
        assert done.returncode == 0, done.stderr
        evaluation = json.loads((tmp_path / "latest/evaluation.json").read_text())
        assert evaluation["before"] is None and evaluation["after"] == after
        assert rows_of(tmp_path / "latest")[0]["eval/sampled_success"] == after["sampled"]["success"]
        assert "held-out success: sampled" in done.stdout and "before training" not in done.stdout


def test_the_check_of_a_trained_adapter_passes_and_is_no_evaluation(finished, tmp_path):
    done = run("job=check", f"checkpoint={finished[1] / 'adapters'}", output=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = (tmp_path / "latest").resolve()
    content = json.loads((folder / "check.json").read_text())
    assert len(content["gates"]) == 7 and all(gate["passed"] for gate in content["gates"].values())
    assert all(gate["difference"] <= gate["tolerance"] for gate in content["gates"].values())
    assert done.stdout.count("   pass") == 7 and "merged adapter" in done.stdout
    record = json.loads((folder / "run.json").read_text())
    assert (record["job"], record["state"], record["exit_code"]) == ("check", "finished", 0)
    assert "held-out" not in done.stdout


def test_the_sequential_twin_micro_batches_and_checkpointing_train_on_the_same_tokens(tmp_path):
    small = [*SHORT, "steps=1", "trainer.evaluation_episodes=4", "tasks_per_step=2"]
    twins = []
    for name, more in (
        ("plain", []),
        ("twin", ["rollout.mode=sequential", "memory.micro_batch_size=3", "memory.checkpoint=every_2"]),
    ):
        done = run(*small, *more, output=tmp_path / name)
        assert done.returncode == 0, done.stderr
        twins.append(rows_of(tmp_path / name / "latest"))
    for mine, other in zip(*twins, strict=True):
        for name in ("reward/mean", "completion/length_mean", "progress/sampled_tokens", "eval/sampled_success"):
            assert mine.get(name) == other.get(name)
        assert mine.get("loss/policy") == pytest.approx(other.get("loss/policy"), abs=1e-5)


def test_full_training_saves_a_whole_model(tmp_path):
    done = run(*SHORT, "adapter=full", "env=arithmetic", "algorithm=grpo", "tasks_per_step=2", output=tmp_path)
    assert done.returncode == 0, done.stderr
    assert mlx_lm.load(str(tmp_path / "latest/model"))
    assert rows_of(tmp_path / "latest")[-1]["kl/reference"] > 0


def test_several_updates_a_batch_log_their_ratios(tmp_path):
    done = run(*SHORT, "algorithm.updates_per_batch=2", "algorithm.kl_coef=0.1", output=tmp_path)
    assert done.returncode == 0, done.stderr
    row = rows_of(tmp_path / "latest")[1]
    assert row["ratio/max"] > 1 and row["kl/old"] > 0 and row["loss/kl"] == 0.0
    assert rows_of(tmp_path / "latest")[-1]["progress/optimizer_updates"] == 6


def test_a_budget_ends_training_early(tmp_path):
    done = run(*SHORT, "steps=50", "budget.episodes=64", output=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "latest")
    assert rows[-1]["step"] == 2 and "eval/sampled_success" in rows[-1]


def test_a_budget_of_minutes_ends_with_an_evaluation(tmp_path):
    done = run(*SHORT, "steps=500", "budget.minutes=0.04", output=tmp_path)
    assert done.returncode == 0, done.stderr
    last = rows_of(tmp_path / "latest")[-1]
    after = json.loads((tmp_path / "latest/evaluation.json").read_text())["after"]
    assert 1 <= last["step"] < 500 and last["eval/sampled_success"] == after["sampled"]["success"]


def test_random_weights_train_at_full_length(tmp_path):
    done = run(
        *SHORT, "steps=1", "model=random", "model.shape=1m", "env=arithmetic", "rollout.ignore_eos=true",
        "rollout.max_completion_tokens=12", "tasks_per_step=2", "memory.cache_limit_gib=0.1", output=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    row = rows_of(tmp_path / "latest")[1]
    assert row["completion/length_mean"] == 12 and row["memory/cache_bytes"] <= 0.1 * 1024**3


def test_h21_a_loss_that_is_not_finite_fails_the_run_and_leaves_the_last_good_weights(tmp_path):
    done = run(*SHORT, "debug.inject_nan_step=2", "trainer.save_every=1", output=tmp_path)
    folder = tmp_path / "latest"
    assert done.returncode == 1 and "not finite" in done.stderr
    record = json.loads((folder / "run.json").read_text())
    assert record["state"] == "failed" and "not finite" in record["error"]
    assert (folder / "checkpoints/step_000001" / MANIFEST).is_file()
    assert mlx_lm.load(str(TINY), adapter_path=str(folder / "adapters"))
    assert [row["step"] for row in rows_of(folder)] == [0, 1]


def test_h21_non_finite_updates_are_skipped_up_to_the_stated_number(tmp_path):
    done = run(*SHORT, "debug.inject_nan_step=2", "trainer.max_nonfinite_updates=1", output=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "latest")
    assert [row.get("update/skipped") for row in rows] == [None, 0, 1, 1]
    assert rows[3]["progress/optimizer_updates"] == 2


BAD_ENVIRONMENT = """
from mlxrl_runs.core.protocols import StepResult
class Bad:
    max_turns = 1
    def __init__(self, reward): self.reward = reward
    def reset(self): return "say something"
    def step(self, action):
        if isinstance(self.reward, Exception): raise self.reward
        return StepResult("", self.reward, True)
    def state_id(self, observation): return "s"
def make(task, seed, group_index): return Bad({reward})
"""


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("float('nan')", "must be finite, got nan"),
        ("10**400", "must be finite, got a number beyond 3.4e+38"),
        ("None", "must be one number, got None"),
        ("'1'", "must be one number, got '1'"),
        ("[1.0, 0.0]", "must be one number, got [1.0, 0.0]"),
        ("RuntimeError('the world broke')", "raised RuntimeError: the world broke"),
    ],
)
def test_h20_a_bad_reward_fails_the_run_by_name_and_leaves_its_folder_whole(tmp_path, reward, message):
    file = tmp_path / "bad.py"
    file.write_text(BAD_ENVIRONMENT.replace("{reward}", reward))
    done = run(*SHORT, "env=python", f"env.file={file}", output=tmp_path / "out")
    assert done.returncode == 1 and message in done.stderr and "task '" in done.stderr
    assert "Traceback" not in done.stderr
    record = json.loads((tmp_path / "out/latest/run.json").read_text())
    assert record["state"] == "failed" and message in record["error"]
    assert (tmp_path / "out/latest/config.yaml").is_file()
    assert "Traceback" in (tmp_path / "out/latest/run.log").read_text()


@pytest.mark.slow
def test_h21_advantages_that_overflow_are_refused_by_name_before_any_update(tmp_path):
    # 3.4e38 and -3.4e38 are rewards float32 can hold; their distance from the mean of a group is not
    file = tmp_path / "huge.py"
    file.write_text(BAD_ENVIRONMENT.replace("{reward}", "__import__('random').choice([-3.4e38, 3.4e38])"))
    plain = ["algorithm=grpo", "algorithm.advantage_scaling=none", "env=python", f"env.file={file}"]
    done = run(*SHORT, *plain, output=tmp_path / "out")
    assert done.returncode == 1 and "The advantages of step 1 reach from " in done.stderr
    assert "inf" in done.stderr  # one end or both: it depends on who of a group was paid which
    assert "The episodes earned -3.4e+38 to 3.4e+38" in done.stderr and "advantage_scaling=group" in done.stderr
    record = json.loads((tmp_path / "out/latest/run.json").read_text())
    assert record["state"] == "failed" and "The advantages of step 1" in record["error"]


@pytest.mark.slow
def test_h21_a_policy_that_an_update_broke_is_never_saved(tmp_path):
    done = run(*SHORT, "optimizer.learning_rate=1e20", "trainer.save_every=1", output=tmp_path)
    folder = tmp_path / "latest"
    assert done.returncode == 1 and "The policy of step 1 is broken" in done.stderr
    assert "optimizer.learning_rate" in done.stderr and "Traceback" not in done.stderr
    assert json.loads((folder / "run.json").read_text())["state"] == "failed"
    assert not (folder / "adapters").exists() and not list(folder.glob("checkpoints/step_*"))
    summary = json.loads((folder / "summary.json").read_text())
    assert "weights" not in summary["files"] and "no weights are kept" in summary["warnings"][-1]["text"]


def test_weights_are_named_only_where_they_were_saved(tmp_path):
    file = tmp_path / "bad.py"
    file.write_text(BAD_ENVIRONMENT.replace("{reward}", "None"))
    done = run(*SHORT, "env=python", f"env.file={file}", output=tmp_path / "out")
    summary = json.loads((tmp_path / "out/latest/summary.json").read_text())
    assert summary["state"] == "failed" and "weights" not in summary["files"] and summary["next"] == []
    assert "job=evaluate" not in done.stdout


def test_a_prompt_over_the_limit_is_exit_2(tmp_path):
    done = run(*SHORT, "rollout.max_prompt_tokens=2", output=tmp_path)
    assert done.returncode == 2 and "rollout.max_prompt_tokens=2" in done.stderr


def test_a_model_folder_without_weights_is_exit_2_and_makes_no_folder(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    done = run(*SHORT, "model=local", f"model.path={tmp_path / 'model'}", output=tmp_path / "out")
    assert done.returncode == 2 and "model.path" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_training_saves_a_complete_checkpoint(tmp_path, number, code):
    process = subprocess.Popen(
        command(*SHORT, "steps=500", output=tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        stdin=subprocess.DEVNULL, env=ENVIRONMENT,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step "):
            process.send_signal(number)
            break
    process.stdout.read()
    assert process.wait(60) == code
    folder = tmp_path / "latest"
    assert json.loads((folder / "run.json").read_text())["state"] == "interrupted"
    [checkpoint] = (folder / "checkpoints").iterdir()
    files = json.loads((checkpoint / MANIFEST).read_text())["files"]
    assert {"adapters.safetensors", "optimizer.safetensors", "state.json"} <= set(files)
    assert all((checkpoint / name).stat().st_size == entry["bytes"] for name, entry in files.items())
    assert json.loads((checkpoint / "state.json").read_text())["step"] == rows_of(folder)[-1]["step"]


def leet(path, *flags):
    found = subprocess.run(
        [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", *flags, str(path)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return found.stdout


@pytest.mark.slow
def test_h27_a_sweep_makes_one_process_one_folder_and_one_wandb_run_per_point(tmp_path):
    done = run("-m", "seed=1,2,3", "steps=1", "trainer.evaluation_episodes=4", "name=seeds", output=tmp_path)
    assert done.returncode == 0, done.stderr
    folders = sorted(file.parent for file in (tmp_path / "sweeps/seeds").glob("*/run.json"))
    assert len(folders) == 3
    records = [json.loads((folder / "run.json").read_text()) for folder in folders]
    assert len({record["pid"] for record in records}) == len({record["wandb_id"] for record in records}) == 3
    seeds = {yaml.safe_load((folder / "config.yaml").read_text())["seed"] for folder in folders}
    assert seeds == {1, 2, 3}
    for folder in folders:
        [offline] = folder.glob("wandb/offline-run-*")
        assert json.loads((folder / "run.json").read_text())["wandb_id"] in offline.name
        told = leet(next(offline.glob("*.wandb")))
        assert "seeds" in told and "${" not in told  # H28: plain resolved values


@pytest.mark.slow
def test_h30_no_file_and_no_output_holds_the_key(tmp_path):
    key = "DUMMY0123456789abcdef0123456789abcdef0123"
    done = run(*SHORT[:2], "tracking.mode=offline", output=tmp_path, WANDB_API_KEY=key)
    assert done.returncode == 0, done.stderr
    assert key not in done.stdout + done.stderr
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) > 10
    assert [file for file in files if key.encode() in file.read_bytes()] == []


def test_the_first_step_is_not_kept_waiting_by_the_default_tracker(tmp_path):
    started = time.monotonic()
    done = run("steps=1", "trainer.evaluation_episodes=4", output=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "stays offline" in done.stdout  # one loud line, no prompt
    assert time.monotonic() - started < 60
