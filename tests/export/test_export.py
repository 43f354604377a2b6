"""What is exported is opened by mlx-lm alone, in a process that knows nothing of this package."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
import yaml
from mlx_lm.utils import quantize_model, save

from mlxrl_runs import export as exporting
from mlxrl_runs.export import main
from mlxrl_runs.policy.load import TINY
from mlxrl_runs.run import BACKEND, open_policy_of, prompt_of
from mlxrl_runs.runs import find_weights
from mlxrl_runs.tracking.drawing import readable_path

SMALL = ["steps=3", "trainer.evaluation_episodes=4", "tracking=jsonl", "optimizer.learning_rate=3e-3"]
TOKENS = (4, 20, 33, 57, 101, 7)
ELSEWHERE = """
import ctypes, os, sys
if os.environ["BLAS"]:  # the same library as here: another one rounds differently, by 1e-5 of these logits
    ctypes.CDLL(os.environ["BLAS"], mode=ctypes.RTLD_GLOBAL)
import mlx.core as mx, mlx_lm
model, tokenizer = mlx_lm.load(sys.argv[1], adapter_path=sys.argv[2] or None)
assert not [name for name in sys.modules if name.startswith("mlxrl_runs")]
mx.save(sys.argv[3], model(mx.array([[int(token) for token in sys.argv[4:]]])))
"""
ENVIRONMENT = """
from mlxrl_runs.core.protocols import StepResult

class Echo:
    max_turns = 1
    def __init__(self, task, seed, group_index): self.task = task
    def reset(self): return self.task
    def step(self, action): return StepResult("", float(len(action)), True)
    def state_id(self, observation): return observation

make = Echo
"""


def train(output: Path, *overrides: str) -> Path:
    command = [sys.executable, "-m", "mlxrl_runs", *SMALL, *overrides, f"paths.output={output}"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return (output / "latest").resolve()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("run"))


def live_logits(run: Path) -> mx.array:
    policy = open_policy_of(exporting._config_of(run), keep_reference=False)
    policy.load_weights(find_weights(str(run)).folder)
    return policy.model(mx.array([TOKENS]))


def logits_elsewhere(model: Path, adapter: Path | str, folder: Path) -> mx.array:
    out = folder / "logits.npy"
    command = [sys.executable, "-c", ELSEWHERE, str(model), str(adapter), str(out), *map(str, TOKENS)]
    subprocess.run(command, check=True, timeout=120, env={**os.environ, "BLAS": BACKEND.blas or ""})
    return mx.load(str(out))


def difference(one: mx.array, other: mx.array) -> float:
    return float(mx.abs(one - other).max().item())


def test_h15_an_exported_adapter_is_the_live_policy_in_a_fresh_process(run, tmp_path, capsys):
    assert main([str(run)]) == 0
    adapter = run / "export/adapter"
    elsewhere = logits_elsewhere(TINY, adapter, tmp_path)
    assert difference(elsewhere, live_logits(run)) < 1e-5
    assert difference(elsewhere, logits_elsewhere(TINY, "", tmp_path)) > 0.01  # and not its base
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert "self_attn.q_proj" in config["lora_parameters"]["keys"] and config["base_model"]["folder"] == str(TINY)
    assert "largest difference of a logit from the live policy: 0 over" in capsys.readouterr().out


def test_a_fused_model_is_the_live_policy_in_a_fresh_process(run, tmp_path):
    assert main([str(run), "--fuse", "--out", str(tmp_path / "fused")]) == 0
    live = live_logits(run)
    largest = float(mx.abs(live).max().item())  # about 16, where float32 has steps of 2e-6
    assert difference(logits_elsewhere(tmp_path / "fused", "", tmp_path), live) < 1e-5 * largest
    _, tokenizer = mlx_lm.load(str(tmp_path / "fused"))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False).startswith("<|user|>hi")


def test_the_commands_it_ends_with_run_as_they_stand(run, capsys):
    assert main([str(run)]) == 0
    [generate] = [line for line in capsys.readouterr().out.splitlines() if " generate " in line]
    words = shlex.split(generate)
    assert words[-2] == "--prompt" and words[-1].startswith("door ")
    done = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and "Generation:" in done.stdout, done.stderr


def test_a_run_ends_with_commands_that_talk_to_what_it_saved(run):
    chat, generate, export, *_ = json.loads((run / "summary.json").read_text())["next"]
    opened = ["--model", readable_path(str(TINY)), "--adapter-path", str(run / "adapters")]
    assert shlex.split(chat) == ["python", "-m", "mlx_lm", "chat", *opened]
    assert shlex.split(generate)[3:-1] == ["generate", *opened, "--prompt"]
    assert shlex.split(export) == ["python", "-m", "mlxrl_runs.export", str(run), "--fuse"]


def test_a_checkpoint_is_exported_and_an_earlier_export_replaced(run):
    stale = run / "export/adapter/stale"
    stale.parent.mkdir(parents=True, exist_ok=True)
    stale.touch()
    assert main([str(run / "checkpoints/step_000003")]) == 0
    assert sorted(file.name for file in stale.parent.iterdir()) == ["adapter_config.json", "adapters.safetensors"]


def test_full_training_is_copied_whole_with_the_bases_generation_config(tmp_path):
    base = tmp_path / "base"
    model, tokenizer, config = mlx_lm.load(str(TINY), return_config=True)
    save(base, TINY, model, tokenizer, config)
    (base / "generation_config.json").write_text('{"temperature": 0.5}')
    run = train(tmp_path / "out", "adapter=full", "model=local", f"model.path={base}", "optimizer.learning_rate=1e-3")
    assert main([str(run / "checkpoints/step_000003")]) == 0
    names = {file.name for file in (run / "export/model").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "generation_config.json"} <= names
    assert not names & {"optimizer.safetensors", "state.json", "manifest.json"}
    assert difference(logits_elsewhere(run / "export/model", "", tmp_path), live_logits(run)) < 1e-5
    assert main([str(run), "--fuse"]) == 2


def test_a_quantised_base_is_quantised_again_or_made_float(tmp_path, capsys):
    model, tokenizer, config = mlx_lm.load(str(TINY), return_config=True)
    model, config = quantize_model(model, config, group_size=32, bits=4)
    save(tmp_path / "base", TINY, model, tokenizer, config)
    run = train(tmp_path / "out", "model=local", f"model.path={tmp_path / 'base'}")
    live = live_logits(run)
    moved = {}
    for more in ([], ["--dequantize"]):
        capsys.readouterr()
        assert main([str(run), "--fuse", *more]) == 0
        assert "rounding of the fused weights moves them" in capsys.readouterr().out
        opened, _ = mlx_lm.load(str(run / "export/fused"))
        quantised = [module for module in opened.modules() if isinstance(module, nn.QuantizedLinear)]
        assert bool(quantised) is not bool(more)
        moved[len(more)] = difference(opened(mx.array([TOKENS])), live)
    assert moved[1] < 1e-3 < moved[0]  # 4 bits round the sum of base and adapter; floats hardly do


def test_weights_that_are_not_the_policys_are_refused_and_nothing_is_kept(run, tmp_path, monkeypatch, capsys):
    from mlxrl_runs.policy import export as formats

    def damaged(policy, folder, *, dequantize):
        policy.model.layers[0].mlp.up_proj.lora_b += 0.01
        fuse(policy, folder, dequantize=dequantize)

    fuse = formats.write_fused
    monkeypatch.setattr(formats, "write_fused", damaged)
    assert main([str(run), "--fuse", "--out", str(tmp_path / "out")]) == 1
    assert "a logit differs by" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_wrong_input_is_one_message_and_exit_2(run, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/run.json").write_text("{}")
    wrong = {
        (str(tmp_path / "none"),): "is no folder",
        (str(tmp_path / "full"),): "no run folder and lies in none",
        (str(tmp_path / "empty"),): "holds no weights",
        (str(run), "--dequantize"): "Try --fuse --dequantize",
        (str(run), "--fuse", "--dequantize"): "is not quantised",
        (str(run), "--out", str(tmp_path / "full")): "is there already and not empty",
        (str(run), "--out", str(tmp_path / "full/file/deeper")): "cannot be written",
    }
    for arguments, message in wrong.items():
        assert main(list(arguments)) == 2
        streams = capsys.readouterr()
        assert message in streams.err and len(streams.err.splitlines()) == 1


def test_an_adapter_on_drawn_weights_must_be_fused(run, tmp_path, capsys):
    drawn = train(tmp_path, "model=random", "model.shape=1m", "steps=1", "tasks_per_step=1")
    assert main([str(drawn)]) == 2
    assert "Try --fuse" in capsys.readouterr().err
    assert "mlx_lm" not in " ".join(json.loads((drawn / "summary.json").read_text())["next"])
    assert main([str(drawn), "--fuse"]) == 0


@pytest.mark.parametrize("precision", ["bfloat16", "4bit"])
def test_an_adapter_on_weights_in_another_precision_than_stored_must_be_fused(precision, tmp_path, capsys):
    other = train(tmp_path, f"model.precision={precision}", "steps=1", "tasks_per_step=1")
    assert main([str(other)]) == 2
    assert "model.precision" in (said := capsys.readouterr().err) and said.endswith("Try --fuse.\n")
    commands = json.loads((other / "summary.json").read_text())["next"]
    assert "mlx_lm" not in " ".join(commands) and commands[0].endswith("--fuse")
    assert main([str(other), "--fuse"]) == 0


def test_a_precision_that_is_the_stored_one_changes_nothing(tmp_path):
    same = train(tmp_path, "model.precision=float32", "steps=1", "tasks_per_step=1")
    assert main([str(same)]) == 0
    assert "mlx_lm chat" in json.loads((same / "summary.json").read_text())["next"][0]


@pytest.mark.parametrize(
    ("opening", "prompt"),
    [
        ("What is\n 2 + 2?", "What is 2 + 2?"),
        ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}], "2 + 2?"),
        (None, "Hello"),  # whatever it is, a hint fails no run
    ],
)
def test_the_suggested_prompt_is_what_the_policy_reads_last(opening, prompt):
    family = SimpleNamespace(held_out_tasks=lambda: ["t"], make=lambda *_: SimpleNamespace(reset=lambda: opening))
    assert prompt_of(SimpleNamespace(env=family, seed=0)) == prompt


def test_a_config_that_no_longer_fits_is_named(run, tmp_path, capsys):
    config = yaml.safe_load((run / "config.yaml").read_text())
    (tmp_path / "adapters").symlink_to(run / "adapters")
    (tmp_path / "run.json").write_text("{}")
    config["model"]["pathh"] = "x"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert main([str(tmp_path)]) == 2
    assert f"{tmp_path / 'config.yaml'}: model.pathh: no such key" in capsys.readouterr().err


def test_a_run_of_another_version_is_exported_although_its_algorithm_had_other_keys(run, tmp_path):
    config = yaml.safe_load((run / "config.yaml").read_text())
    (tmp_path / "adapters").symlink_to(run / "adapters")
    (tmp_path / "run.json").write_text("{}")
    config |= {"algorithm": {"name": "gigpo", "normalization": "std"}, "trainer": {}, "of_old": 1}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert main([str(tmp_path)]) == 0


def test_a_run_is_exported_from_another_folder_and_without_the_file_that_paid_it(tmp_path, monkeypatch):
    (tmp_path / "started_here").mkdir()
    monkeypatch.chdir(tmp_path / "started_here")
    Path("environment.py").write_text(ENVIRONMENT)
    Path("reward.py").write_text("def reward(completion): return len(completion.text)")
    files = ["env=python", "env.file=environment.py", "reward=file", "reward.file.path=reward.py"]
    saved = train(tmp_path / "output", *files, "steps=1", "rollout.max_completion_tokens=4")
    Path("reward.py").unlink()
    monkeypatch.chdir(tmp_path)
    assert main([str(saved)]) == 0


@pytest.mark.parametrize("damage", [b"", b"- a list", b"job: [", b"\xff\xfe"])
def test_a_damaged_config_is_told(run, tmp_path, capsys, damage):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("export"))
    (copy / "config.yaml").write_bytes(damage)
    assert main([str(copy)]) == 2
    assert "config.yaml: is damaged" in capsys.readouterr().err


def test_an_adapter_on_a_base_in_other_numbers_is_offered_fused_alone(tmp_path, capsys):
    # on the float32 files under it the adapter would be another policy: a logit differed by 3
    recast = train(tmp_path, "model.precision=4bit", "steps=1", "tasks_per_step=1")
    offered = " ".join(json.loads((recast / "summary.json").read_text())["next"])
    assert "mlx_lm" not in offered and "--fuse" in offered
    assert main([str(recast), "--fuse"]) == 0
    assert "--dequantize avoids most" in capsys.readouterr().out
    assert main([str(recast), "--fuse", "--dequantize"]) == 0
    assert "--dequantize avoids" not in capsys.readouterr().out
