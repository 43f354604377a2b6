"""The product from Python: `compose`, `train`, `evaluate`. A run in a notebook and its command give equal metrics."""

import contextlib
import inspect
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxrl_runs import backend
from mlxrl_runs.agreement import require_agreement
from mlxrl_runs.config import RunConfig, compose_config, validate
from mlxrl_runs.core.protocols import Environment, RewardFunction
from mlxrl_runs.core.settings import Settings
from mlxrl_runs.core.stop import StopRequest
from mlxrl_runs.core.user_code import PYTHON_OBJECT
from mlxrl_runs.errors import ConfigError, Interrupted, MlxrlError
from mlxrl_runs.groups import conf_folder
from mlxrl_runs.lifecycle import begin_folder, exit_code, one_line
from mlxrl_runs.policy.source import locate
from mlxrl_runs.report.curves import Figure, draw_curves
from mlxrl_runs.schema import Job
from mlxrl_runs.tee import Tee
from mlxrl_runs.training.run_folder import RunFolder, record_end

if TYPE_CHECKING:
    from mlxrl_runs.run import Run

with contextlib.suppress(MlxrlError):  # told when a run starts
    backend.prepare()  # here, for the caller may import MLX before the run does

StepCallback = Callable[[int, dict[str, float]], object]
EnvironmentFactory = Callable[[str, int, int], Environment]
PLOTTED = ("reward/mean", "reward/success", "eval/greedy_success", "kl/reference", "grad/norm", "memory/peak_bytes")


def compose(overrides: Sequence[str] = (), config_dirs: Sequence[str | Path] = ()) -> RunConfig:
    """The checked config of these overrides, the same as on the command line.

    Args:
        overrides: "key=value", as typed after `python -m mlxrl_runs`.
        config_dirs: folders with config groups of your own.
    Raises: ConfigError listing every problem.
    """
    return validate(compose_config(overrides, config_dirs)).remembering(overrides)


def train(
    config: RunConfig,
    *,
    reward: RewardFunction | Mapping[str, RewardFunction] | None = None,
    env: EnvironmentFactory | Settings | None = None,
    callbacks: Sequence[StepCallback] = (),
) -> "FinishedRun":
    """Train in this process and return the run. Its folder, files and metrics are those of the command.

    Args:
        reward: takes the place of the config's: a function of a Completion, or several by name, which are added up.
        env: takes the place of the config's: a class or function of (task, seed, group_index) that makes an
            environment, tasks being "0", "1", ... as with env=python; or one of the product's own, with its settings.
        callbacks: each is called with (step, metrics) after every step; one that returns True ends training there.
    Raises: ConfigError, TrainingError, EnvironmentFailure; KeyboardInterrupt once everything was saved.
    """
    _require_callables(reward, env, callbacks)
    return _execute(_replaced(config, reward, env, Job.TRAIN), callbacks)


def evaluate(
    config: RunConfig,
    checkpoint: str | Path | None = None,
    *,
    reward: RewardFunction | Mapping[str, RewardFunction] | None = None,
    env: EnvironmentFactory | Settings | None = None,
) -> "FinishedRun":
    """Score the base model, or a checkpoint, on held-out tasks; `.evaluation["after"]` has the scores.

    Args: checkpoint: a run's `adapters`, `model` or `checkpoints/step_...` folder; None keeps the config's own.
    """
    _require_callables(reward, env)
    if checkpoint is not None:
        config = config.model_copy(update={"checkpoint": str(Path(checkpoint).expanduser().resolve())})
    return _execute(_replaced(config, reward, env, Job.EVALUATE), ())


class FinishedRun:
    """A run that is over: its numbers, its files and its policy.

    Attributes:
        config: as it was run. folder: where its files are. summary: what summary.json holds.
    """

    def __init__(self, run: "Run"):
        self._run = run
        self.config = run.config
        self.folder = run.folder.path
        self.summary = run.summary

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dict a step, as metrics.jsonl has them; docs/metrics.md defines the names."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def trajectories(self) -> list[dict[str, Any]]:
        """The sampled episodes that were written out, as trajectories.jsonl has them."""
        return [json.loads(line) for line in (self.folder / "trajectories.jsonl").read_text().splitlines()]

    @property
    def evaluation(self) -> dict[str, Any]:
        """{"before", "after"}: held-out scores, sampled and greedy."""
        return self.summary["evaluation"]

    def generate(
        self, prompt: str, *, max_tokens: int | None = None, greedy: bool = True, answer_prefix: str = ""
    ) -> str:
        """What the trained policy answers.

        Args:
            max_tokens: None for the config's rollout.max_completion_tokens.
            greedy: the likeliest token each time, or a draw at the config's temperature.
            answer_prefix: what the answer begins with.
        """
        limit = max_tokens or self.config.rollout.max_completion_tokens
        return self._run.generate([prompt], max_tokens=limit, greedy=greedy, answer_prefix=answer_prefix)[0]

    def plot(self, *names: str) -> Figure:
        """Curves of metrics over steps, those people look at first when none is named; a notebook shows them."""
        return draw_curves({"": self.metrics}, names or PLOTTED, self.config.run_name)

    def __repr__(self) -> str:
        return f"<run {self.config.run_name}: {self.summary.get('state')}, in {self.folder}>"


def _require_callables(reward: Any, env: Any, callbacks: Any = ()) -> None:
    """Raises: ConfigError for what cannot be called, before a folder is made and an evaluation waited for."""
    if reward == {}:
        raise ConfigError("reward: got {}; at least one function is needed. Give reward=None for the config's own.")
    if not isinstance(callbacks, Sequence):
        raise ConfigError(f"callbacks: got {callbacks!r}; allowed: a list of functions. Try callbacks=[...].")
    rewards = reward if isinstance(reward, Mapping) else {} if reward is None else {"": reward}
    given = {f"reward[{name!r}]" if name else "reward": function for name, function in rewards.items()}
    given |= {f"callbacks[{number}]": callback for number, callback in enumerate(callbacks)}
    given |= {} if env is None or isinstance(env, Settings) else {"env": env}
    wrong = [f"{name}: got {part!r}; allowed: a function." for name, part in given.items() if not callable(part)]
    if wrong:
        raise ConfigError(wrong)


def _replaced(config: RunConfig, reward: Any, env: Any, job: Job) -> RunConfig:
    """The config with the parts that were given as Python objects; config.yaml then says where they came from.

    Raises: ConfigError when the parts do not go together.
    """
    changes: dict[str, Any] = {"job": job}
    if reward is not None:
        changes["reward"] = _parts_of(reward)
    if env is not None:
        changes["env"] = env if isinstance(env, Settings) else _family_of(env, config)
    given = [name for name in ("env", "reward") if name in changes]
    changed = config.model_copy(update=changes).remembering(python_parts=given)
    require_agreement(changed)
    return changed


def _parts_of(reward: RewardFunction | Mapping[str, RewardFunction]) -> dict[str, Settings]:
    """Each function under the name it is logged by: its own, where it is given alone and has one."""
    from mlxrl_runs.rewards.file import FileReward

    if not isinstance(reward, Mapping):
        name = getattr(reward, "__name__", "")
        reward = {name if name.isidentifier() else "reward": reward}
    return {name: FileReward.of(function, *_origin(function)) for name, function in reward.items()}


def _family_of(factory: EnvironmentFactory, config: RunConfig) -> Settings:
    import yaml  # type: ignore[import-untyped]

    from mlxrl_runs.envs.python import PythonFile

    values = yaml.safe_load((conf_folder() / "env" / "python.yaml").read_text())
    return PythonFile.of(
        factory, *_origin(factory), values["tasks"], values["held_out"], config.plain()["env"]["recommended"]
    )


def _origin(part: Callable[..., Any]) -> tuple[str, str]:
    """(place, name) of a function or class. The place is marked: the file may be the script that started the run."""
    try:
        file = inspect.getsourcefile(part) or ""
    except (TypeError, OSError):  # a callable object, or a class that no file holds
        file = ""
    place = file if Path(file).is_file() else "notebook"
    return f"{PYTHON_OBJECT} {place}", getattr(part, "__qualname__", type(part).__qualname__)


def _execute(config: RunConfig, callbacks: Sequence[StepCallback]) -> FinishedRun:
    from mlxrl_runs.run import execute, fresh_memory

    fresh_memory()
    locate(config.model.source, config.model.path, config.model.revision)  # what is missing leaves no folder
    folder, _ = begin_folder(config, config.overrides, None)
    state, code, error = "finished", 0, None
    try:
        with _stopped_by_ctrl_c() as stop, _console(folder) as console:
            run = execute(
                config,
                folder,
                overrides=config.overrides,
                sweep=None,
                stop=stop,
                console=console,
                callbacks=callbacks,
            )
        return FinishedRun(run)
    except Interrupted as interrupted:
        state, code, error = "interrupted", exit_code(interrupted), str(interrupted)
        raise KeyboardInterrupt(f"What was reached is saved in {folder.path}") from None
    except KeyboardInterrupt:  # the second one
        state, code, error = "interrupted", 128 + signal.SIGINT, "interrupted again before everything was saved"
        raise
    except BaseException as failure:
        state, code, error = "failed", exit_code(failure), one_line(failure, folder.path)
        raise
    finally:
        record_end(folder.path, state, code, error)
        folder.release()


@contextlib.contextmanager
def _stopped_by_ctrl_c() -> Iterator[StopRequest]:
    """Inside, the first Ctrl-C asks the run to save and end, the second ends it where it is."""
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: Any) -> None:
        if stop.signal_number is not None:
            raise KeyboardInterrupt
        stop.signal_number = number

    signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _console(folder: RunFolder) -> Iterator[Any]:
    """A console that also writes run.log."""
    from rich.console import Console

    with open(folder.path / "run.log", "a", encoding="utf-8") as log:
        out = Tee(sys.stdout, log, threading.Lock())
        width = None if out.isatty() or "COLUMNS" in os.environ else 100
        yield Console(file=out, force_jupyter=False, width=width)  # type: ignore[arg-type]
        out.close_line()
