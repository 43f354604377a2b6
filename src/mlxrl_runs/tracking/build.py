"""From the `tracking` section of a config to the trackers of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from mlxrl_runs.core.protocols import Tracker
from mlxrl_runs.tracking.console import ConsoleTracker
from mlxrl_runs.tracking.fan_out import FanOut
from mlxrl_runs.tracking.jsonl import JsonlTracker
from mlxrl_runs.tracking.weights_and_biases import WeightsAndBiasesTracker, require_login


def make_trackers(*, tracking: Mapping[str, Any], folder: Path, console: Console) -> FanOut:
    """The run's own record first, then the console, then wandb where `tracking.name` says so.

    Raises: ConfigError when `tracking.mode=online` finds no login.
    """

    def say(line: str) -> None:
        console.print(Text(line, style="bold yellow"), highlight=False, soft_wrap=True)

    trackers: list[Tracker] = [JsonlTracker(folder), ConsoleTracker(console)]
    if tracking["name"] == "wandb":
        if tracking["mode"] == "online":
            require_login()
        trackers.append(WeightsAndBiasesTracker(folder, tracking["project"], tracking["entity"], tracking["mode"], say))
    return FanOut(trackers, warn=say)
