"""`python -m mlxrl_runs`."""

import sys

from mlxrl_runs.cli import main

sys.exit(main())
