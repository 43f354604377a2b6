"""What the pages tell people to type, name and run."""

import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from building import ALGORITHMS as ALGORITHM_NAMES
from building import one_turn_batch, settings
from mlxrl_runs import compose
from mlxrl_runs.core.outputs import TokenOutputs
from mlxrl_runs.problems import walk

ROOT = Path(__file__).resolve().parents[2]
FLAT = re.sub(r"```.*?```", "", (ROOT / "docs/flat_reward.md").read_text(), flags=re.DOTALL)
PYTHON = (ROOT / "docs/python.md").read_text()
SAFETY = (ROOT / "docs/safety.md").read_text()
METRICS = (ROOT / "docs/metrics.md").read_text()
ALGORITHMS = (ROOT / "docs/algorithms.md").read_text()
DIFFERENCES = ALGORITHMS.partition("## Where others differ, in numbers")[2].partition("## ")[0]
NAMES = set(ALGORITHM_NAMES)
QUOTED = re.findall(r"`([^`\n]+)`", FLAT)
OVERRIDES = [text for text in re.findall(r"`([^`]+)`", FLAT) if re.match(r"[a-z_.]+=", text)]


def test_every_snippet_of_the_python_page_runs_one_after_the_other(tmp_path):
    snippets = re.findall(r"^```python\n(.*?)^```", PYTHON, re.MULTILINE | re.DOTALL)
    assert len(snippets) == 6
    command = [sys.executable, "-c", "\n".join(snippets)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "curves.svg").is_file()
    assert len(list((tmp_path / "outputs").glob("2*/*"))) == 6  # five were trained, one evaluated


@pytest.mark.parametrize("typed", OVERRIDES)
def test_every_setting_the_flat_reward_page_names_is_one(typed):
    words = typed.replace('"', "").split()
    needed = ["reward=[environment,length]"] if "reward.length" in typed and "reward=[" not in typed else []
    compose([*needed, *(word.split(",")[0] if word.startswith("seed=") else word for word in words)])


def test_every_metric_and_key_the_flat_reward_page_names_exists():
    config = compose(["reward=[environment,length]"]).plain()
    keys = {key for key, _ in walk(config)} | set(config)
    of_recurring = {"reward/room", "reward/exit", "reward/malformed"}
    named = {text for text in QUOTED if re.fullmatch(r"[a-z_]+/[a-z_]+", text)}
    assert len(named) > 12
    assert [name for name in sorted(named - of_recurring) if f"| `{name}` |" not in METRICS] == []
    dotted = {text for text in QUOTED if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", text)} - {"evaluation.json"}
    assert len(dotted) > 12 and [key for key in sorted(dotted) if key not in keys] == []


def test_every_key_metric_and_setting_the_safety_page_names_exists():
    keys = {key for algorithm in ("gigpo", "dapo") for key, _ in walk(compose([f"algorithm={algorithm}"]).plain())}
    quoted = re.findall(r"`([^`\n]+)`", SAFETY)
    dotted = {text for text in quoted if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", text)} - {"summary.json", "run.json"}
    assert len(dotted) >= 9 and [key for key in sorted(dotted - {"trainer.collapse_guard"}) if key not in keys] == []
    metrics = {text for text in quoted if re.fullmatch(r"[a-z_]+/[a-z_]+", text)}
    assert len(metrics) >= 6 and [name for name in sorted(metrics) if f"| `{name}` |" not in METRICS] == []
    settings = [text for text in quoted if re.match(r"trainer\.early_stop\.metric=", text)]
    assert len(settings) == 2 and all(compose(text.split()) for text in settings)


def test_the_safety_page_quotes_what_a_run_says():
    said = "".join(
        (ROOT / "src/mlxrl_runs" / file).read_text()
        for file in ("training/watch.py", "training/early_stop.py", "training/sound.py", "training/loop.py",
                     "training/update.py", "rollout/environment.py")
    )  # fmt: skip
    said = re.sub(r'"\s*f?"', "", said)  # texts that are written over several lines
    phrases = [re.sub(r"`[^`]*`", "", line.split("|")[1]) for line in SAFETY.splitlines() if line.startswith("| ")]
    phrases = [part.strip(" ,%") for phrase in phrases if "it says" not in phrase for part in phrase.split("...")]
    phrases = [phrase for phrase in phrases if len(phrase.split()) > 1]
    assert len(phrases) >= 12 and [phrase for phrase in phrases if phrase not in said] == []


def algorithm_keys():
    """Every key of every algorithm, with its value in a run of the defaults."""
    return {name: compose([f"algorithm={name}"]).plain()["algorithm"] for name in NAMES}


def test_the_algorithms_page_names_every_key_of_every_algorithm_and_no_other():
    keys = {key for section in algorithm_keys().values() for key in section} - {"name"}
    quoted = " ".join(re.findall(r"`([^`\n]+)`", ALGORITHMS))
    quoted = re.sub(r"(mismatch)_correction _level _cap", r"\1_correction \1_level \1_cap", quoted)
    named = set(re.findall(r"[a-z_]+", quoted))
    assert len(keys) > 40 and sorted(keys - named) == []
    assert sorted(set(re.findall(r"algorithm\.([a-z_]+)", ALGORITHMS)) - keys) == []
    assert sorted(set(re.findall(r"`algorithm=([a-z_]+)", ALGORITHMS)) - NAMES) == []


def test_the_algorithms_page_says_which_take_several_optimizer_steps_a_batch():
    several = {name for name, keys in algorithm_keys().items() if keys["updates_per_batch"] * keys["minibatches"] > 1}
    said = re.search(r"That is why (.*?) take several", ALGORITHMS, flags=re.DOTALL)
    assert said and set(re.findall(r"`(\w+)`", said[1])) == several >= {"ppo", "gspo", "cispo"}


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/*.md")), ids=lambda page: page.name)
def test_no_page_was_left_with_a_blank_to_fill_in(page):
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    assert re.findall(r"\{[A-Z_]+\}|TODO|TBD", prose) == []


def test_the_numbers_that_differ_elsewhere_are_those_of_this_project():
    here = [line.split("|")[2].strip() for line in DIFFERENCES.splitlines() if line.startswith("| ")][1:]
    grpo = settings("algorithm", "grpo")
    pair = grpo.credit(one_turn_batch([[1.0, 0.0]]))
    assert here[0].startswith(f"A = +-{pair.advantage[0, 2].item():.5f} ")
    lengths = grpo.credit(one_turn_batch([[1.0, 0.0]], lengths=[1, 3]))
    signs = lengths.with_(advantage=mx.sign(lengths.advantage))
    assert here[2] == f"token mean: {policy_loss(grpo, signs, signs.sampler_logp):+.1f}"
    empty = settings("algorithm", "grpo", reduction="sequence_mean", mask_longer_than=2)
    weights = empty.credit(one_turn_batch([[1.0, 0.0, 1.0, 0.0]], lengths=[2, 2, 2, 3])).weights
    assert here[3] == f"divides by {1 / weights[0].sum().item():.0f}"
    far = pair.with_(advantage=-mx.ones_like(pair.advantage), old_logp=pair.sampler_logp)
    loss = policy_loss(grpo, far, far.sampler_logp + 25)
    slope = mx.grad(lambda logp: grpo.loss(TokenOutputs(logp, logp, logp), far)["policy"])(far.sampler_logp + 25)
    assert here[4] == f"clamped at 20: loss {loss:.1e}, slope {mx.abs(slope).max().item():.0f}".replace("e+0", "e")


def policy_loss(algorithm, batch, logp):
    return algorithm.loss(TokenOutputs(logp, logp, logp), batch)["policy"].item()
