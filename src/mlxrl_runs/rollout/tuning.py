"""Which way to decode is fastest here: a short timing, once for a model, a device and a number of rows.

What was found is kept in the cache folder, so that a sweep's equal shapes, and a run that is taken up again, decode the
same way. Delete the file to have it measured anew.
"""

import hashlib
import json
import os
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxrl_runs.rollout.rows import Rows
from mlxrl_runs.rollout.sampling import row_keys
from mlxrl_runs.rollout.stepping import Cursor, Stepper

CONTEXT = 128  # tokens that the timed rows have read
WARM_STEPS, TIMED_STEPS, ROUNDS = 4, 24, 2


def step_milliseconds(stepper: Stepper, count: int) -> float:
    """Of a decode step of `count` rows that all write: the best round, after one that compiles."""
    steps = WARM_STEPS + ROUNDS * TIMED_STEPS
    stepper.begin()
    try:
        prompt = Rows.empty(stepper.kinds, 1, CONTEXT + steps + 1)
        stepper.read(prompt, [[0] * CONTEXT])
        rows = prompt.select([0] * count)
        cursor = _everyone_writes(count, steps)
        rounds = []
        for number in (WARM_STEPS, *([TIMED_STEPS] * ROUNDS)):
            started = time.perf_counter()
            for _ in range(number):
                cursor, written = stepper.step(rows, cursor)
            mx.eval(written.tokens, rows.kept)
            rounds.append((time.perf_counter() - started) / number)
        return 1000 * min(rounds[1:])
    finally:
        stepper.end()


def _everyone_writes(count: int, steps: int) -> Cursor:
    whole = lambda number: mx.full((count,), number, dtype=mx.int32)
    return Cursor(
        tokens=whole(0),
        lengths=whole(CONTEXT),
        active=mx.array([True] * count),
        drawn=whole(1),
        limits=whole(steps + 2),
        keys=row_keys([("tune", row) for row in range(count)]),
        greedy=mx.array([False] * count),
        longest=CONTEXT,
        is_level=True,
    )


def key_of(model: nn.Module, rows: int) -> str:
    """What a timing is good for: the device, MLX's version, every weight's shape and number format, and the rows."""
    shapes = [(name, array.shape, str(array.dtype)) for name, array in tree_flatten(model.parameters())]
    digest = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:12]
    device = mx.device_info().get("device_name", "?")
    return f"{device}, mlx {version('mlx')}, model {digest}, {rows} rows"


class Memory:
    """What was measured before, in one file."""

    def __init__(self, file: Path):
        self._file = file

    def recall(self, key: str) -> dict[str, float] | None:
        """Milliseconds a step by way, or None; a file that cannot be read counts as empty."""
        return self._all().get(key)

    def keep(self, key: str, found: dict[str, float]) -> None:
        """Write it down; a cache folder that cannot be written to is no reason to fail."""
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            aside = self._file.with_suffix(f".{os.getpid()}")
            aside.write_text(json.dumps(self._all() | {key: found}, indent=2) + "\n")
            aside.replace(self._file)
        except OSError:
            return

    def _all(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self._file.read_text()))
        except (OSError, ValueError):
            return {}
