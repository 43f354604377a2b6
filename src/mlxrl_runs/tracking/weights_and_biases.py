"""Mirrors a run into wandb without ever making the run wait, prompting, or recording a command line.

Everything the SDK does happens in one background thread, fed by a queue: importing it takes 0.6 s, starting a run
0.7 s, and a missing network ten seconds. The thread starts with the first thing to send, not with the run: it shares
the interpreter with the evaluation before training, and would keep the first step waiting.
"""

import math
import os
import queue
import secrets
import shlex
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxrl_runs.core.protocols import RunRecord, TrajectoryRecord
from mlxrl_runs.errors import ConfigError

INIT_SECONDS = 10.0  # the SDK's own 90 s would outlast a short run without a network
UPLOAD_SECONDS = 30.0
CLOSE_SECONDS = 2 * INIT_SECONDS + UPLOAD_SECONDS + 5  # a start online, another offline, the upload, the SDK's grace
PATIENCE_SECONDS = 4.0  # a wait longer than this is explained
LONGEST_NAME, LONGEST_TAG = 128, 64  # the SDK refuses longer ones
HISTOGRAM_BINS = 32
TABLE_COLUMNS = (
    "step", "task", "member", "turn", "observation", "text", "reward", "advantage", "state", "stop",
    "return", "success",
)  # fmt: skip
PEAKS = ("memory/rollout_peak_bytes", "memory/score_peak_bytes", "memory/update_peak_bytes", "memory/peak_bytes")


def require_login() -> None:
    """For `tracking.mode=online`: make sure, without a network, that there is a login to go online with.

    Raises: ConfigError when none is found and WANDB_MODE does not ask for something else.
    """
    wandb = _quiet_sdk()
    if _asked_mode(wandb) == "online" and not wandb.login(prompt=False, verify=False):
        raise ConfigError(
            "tracking.mode: online was asked for, but wandb has no login on this machine. Log in with `wandb login`, "
            "set WANDB_API_KEY, or try tracking.mode=auto (offline until you log in)."
        )


def login_state() -> str:
    """In words, without a network: not installed, not logged in, logged in, or the mode that was asked for."""
    try:
        wandb = _quiet_sdk()
    except ImportError:
        return "not installed"
    if (asked := _asked_mode(wandb)) != "online":
        return f"{asked}, as WANDB_MODE or wandb's settings ask"
    try:
        return "logged in" if wandb.login(prompt=False, verify=False) else "not logged in"
    except Exception as error:
        return f"cannot be used ({_one_line(error)})"


class WeightsAndBiasesTracker:
    """One wandb run. WANDB_MODE, where set, decides before `mode` does.

    Args:
        folder: the run folder; everything the SDK writes lies under it.
        project, entity: where the run belongs; entity None is your default.
        mode: auto is online with a login and offline without; online falls back to offline without a network.
        say: prints one line that a person should see.
    """

    def __init__(self, folder: Path, project: str, entity: str | None, mode: str, say: Callable[[str], None]):
        self._folder = folder.resolve()
        self._project = project
        self._entity = entity
        self._mode = mode
        self._say = say
        self._run_id: str | None = None
        self._calls: queue.SimpleQueue[Callable[[Any], None] | None] = queue.SimpleQueue()
        self._record: RunRecord | None = None
        self._thread: threading.Thread | None = None
        self._folders = _SdkFolders(self._folder / "wandb")
        self._table: Any = None

    @property
    def run_id(self) -> str | None:
        """The run's id from `start` on; None when nothing is tracked.

        A start that could not go online gets another id, so the one to write down is that of the run's end.
        """
        return self._run_id

    def start(self, run: RunRecord) -> None:
        self._folders.enter()
        self._run_id = _new_id()
        self._record = run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {"step": step, **metrics}
        self._later(lambda run: run.log(row))

    def log_trajectories(self, step: int, trajectories: Sequence[TrajectoryRecord]) -> None:
        """Add the episodes to the table `trajectories`, and draw their turns' advantages as a histogram."""
        records = tuple(trajectories)
        self._later(lambda run: self._log_episodes(run, step, records))

    def log_evaluation(self, when: str, evaluation: Mapping[str, Any]) -> None:
        """Nothing: a step's eval/* numbers come with its metrics, as in metrics.jsonl."""

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Send what is left and close the run; gives up, saying so, after CLOSE_SECONDS."""
        if self._run_id is None and self._thread is None:
            return
        best = {f"best/{name}": value for name, value in summary.get("best", {}).items()}
        self._later(lambda run: run.summary.update({**best, "state": summary.get("state")}))
        self._later(lambda run: run.finish(exit_code=exit_code))
        self._calls.put(None)
        if self._thread is None:
            return
        self._thread.join(PATIENCE_SECONDS)
        if self._thread.is_alive():
            self._say(f"wandb: still sending; waiting {CLOSE_SECONDS:.0f} s at most")
            self._thread.join(CLOSE_SECONDS - PATIENCE_SECONDS)
        if self._thread.is_alive():
            self._say(f"wandb: not everything was sent. To send it: wandb sync {self._folder / 'wandb'}/*run-*")
        self._folders.leave()
        self._thread = None

    def _later(self, call: Callable[[Any], None]) -> None:
        if self._run_id is None:
            return
        self._calls.put(call)
        if self._thread is None and self._record is not None:
            self._thread = threading.Thread(target=self._work, args=(self._record,), name="wandb", daemon=True)
            self._thread.start()

    def _work(self, record: RunRecord) -> None:
        """The thread: open the run, then do what was asked for, in order. Trouble is told once, then all is quiet."""
        try:
            run = self._open(record)
            if run is None:
                self._run_id = None
                return
            while (call := self._calls.get()) is not None:
                call(run)
        except Exception as error:
            self._run_id = None
            self._say(f"wandb stopped ({_one_line(error)}). The run goes on; metrics.jsonl has everything.")

    def _open(self, record: RunRecord) -> Any:
        """The SDK's run, or None where wandb is disabled."""
        wandb = _quiet_sdk()
        mode, reason = _decide(wandb, self._mode)
        if mode == "disabled":
            self._say(f"wandb: {reason}")
            return None
        if mode == "online":
            try:
                run = self._init(wandb, record, "online")
                self._say(f"wandb: {run.url}")
                return _define(run)
            except Exception as error:
                self._drop_failed_start()
                reason = f"could not go online ({_one_line(error)}), so this run stays offline"
        run = self._init(wandb, record, "offline")
        folder = shlex.quote(str(Path(run.dir).parent))
        self._say(f"wandb: {reason}. To upload it later: wandb sync {folder}")
        return _define(run)

    def _init(self, wandb: Any, record: RunRecord, mode: str) -> Any:
        return wandb.init(
            project=self._project,
            entity=self._entity,
            dir=str(self._folder),
            id=self._run_id,
            name=record.name[:LONGEST_NAME],
            group=record.group and record.group[:LONGEST_NAME],
            job_type=record.job,
            tags=[tag[:LONGEST_TAG] for tag in record.tags],
            notes=record.notes,
            config={**record.config, "overrides": list(record.overrides), "versions": dict(record.versions)},
            mode=mode,
            settings=wandb.Settings(
                silent=True,
                console="off",  # run.log has it, and captured progress bars are escape codes
                reinit="create_new",  # the default hands out the first run of the process again
                init_timeout=INIT_SECONDS,
                finish_timeout=UPLOAD_SECONDS,
                x_disable_meta=True,  # holds the raw command line; machine and versions are in config and run.json
                disable_git=True,  # a remote's address can hold a password
                disable_code=True,
            ),
        )

    def _drop_failed_start(self) -> None:
        """Make room for another start: the SDK's service holds on to the id of the one that failed."""
        for left_over in (self._folder / "wandb").glob(f"run-*-{self._run_id}"):
            shutil.rmtree(left_over, ignore_errors=True)
        self._run_id = _new_id()

    def _log_episodes(self, run: Any, step: int, records: Sequence[TrajectoryRecord]) -> None:
        import wandb

        if self._table is None:
            self._table = wandb.Table(columns=list(TABLE_COLUMNS), log_mode="INCREMENTAL")  # sends new rows only
        for record in records:
            for row in table_rows(step, record):
                self._table.add_data(*row)
        values = [number for record in records for number in record.turn_advantages or () if math.isfinite(number)]
        drawn = {"advantage/histogram": wandb.Histogram(np_histogram=histogram(values))} if values else {}
        run.log({"step": step, "trajectories": self._table, **drawn})


@dataclass
class _SdkFolders:
    """Keeps what the SDK would put into the home folder under `root`, for as long as the run lasts."""

    root: Path
    added: tuple[str, ...] = ()

    def enter(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self.added = tuple(name for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR") if name not in os.environ)
        for name in self.added:
            os.environ[name] = str(self.root / name.split("_")[1].lower())

    def leave(self) -> None:
        for name in self.added:
            os.environ.pop(name, None)
        self.added = ()


def histogram(values: Sequence[float], bins: int = HISTOGRAM_BINS) -> tuple[list[int], list[float]]:
    """Counts of `values` in equal bins from the smallest to the largest, and the bins' edges.

    Equal values stand in the middle of bins that are one unit wide together.
    """
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 0.5, high + 0.5
    edges = [low + (high - low) * number / bins for number in range(bins + 1)]
    counts = [0] * bins
    for value in values:
        counts[min(int((value - low) / (high - low) * bins), bins - 1)] += 1
    return counts, edges


def table_rows(step: int, record: TrajectoryRecord) -> list[list[Any]]:
    """One row a turn, in the order of TABLE_COLUMNS."""
    trajectory = record.trajectory
    advantages = record.turn_advantages or (None,) * len(trajectory.turns)
    return [
        [
            step, record.task, record.member, number, turn.observation_text, turn.text, turn.reward, advantage,
            turn.state, turn.stop.value, trajectory.total_reward, trajectory.success,
        ]
        for number, (turn, advantage) in enumerate(zip(trajectory.turns, advantages, strict=True))
    ]  # fmt: skip


def _quiet_sdk() -> Any:
    """The SDK, told to leave the terminal alone: its lines would tear a live display."""
    import wandb

    wandb.setup(settings=wandb.Settings(silent=True))
    return wandb


def _asked_mode(wandb: Any) -> str:
    """What WANDB_MODE or wandb's settings files ask for; online when nobody asks for anything."""
    mode = os.environ.get("WANDB_MODE") or wandb.setup().settings.mode
    return {"dryrun": "offline", "run": "online", "shared": "online"}.get(mode, mode)


def _decide(wandb: Any, mode: str) -> tuple[str, str]:
    """online, offline or disabled, and the reason. A login is looked for in the environment and in files only."""
    asked = _asked_mode(wandb)
    if asked != "online":
        return asked, f"{asked}, as WANDB_MODE or wandb's settings ask"
    if mode == "offline":
        return mode, "offline, as tracking.mode asks"
    try:
        if wandb.login(prompt=False, verify=False):
            return "online", ""
    except Exception as error:
        return "offline", f"the login cannot be used ({_one_line(error)}), so this run stays offline"
    return "offline", "not logged in, so this run stays offline. To log in: wandb login"


def _define(run: Any) -> Any:
    """Everything over our own step, which never goes back; rows are then never dropped."""
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    for name in PEAKS:
        run.define_metric(name, step_metric="step", summary="max")
    return run


def _new_id() -> str:
    return secrets.token_hex(6)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
