"""A supervisor in a process of its own, so that tests can send it signals. Arguments: the overrides."""

import sys
from pathlib import Path

from mlxrl_runs import supervise, sweep
from mlxrl_runs.cli import main

FAKE_WORKER = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))


def with_fake_worker(config, overrides=(), sweep=None):
    return REAL(config, overrides, sweep, FAKE_WORKER)


REAL = supervise.supervise
supervise.supervise = sweep.supervise = with_fake_worker

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
