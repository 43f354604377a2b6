"""Where a run's numbers and texts go: its own files, the console, wandb."""

from mlxrl_runs.tracking.build import make_trackers

__all__ = ["make_trackers"]
