"""Errors a person is meant to read. Everything else that escapes is a bug and keeps its traceback."""

from collections.abc import Sequence


class MlxrlError(Exception):
    """Base of the errors whose message is enough: shown without a traceback."""

    exit_code = 1


class ConfigError(MlxrlError):
    """The config or an input was wrong. Carries every problem found, not the first one."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class EnvironmentFailure(MlxrlError):
    """An environment or a reward raised, or answered with something that is no reward."""


class TrainingError(MlxrlError):
    """Training cannot go on (a loss or gradient that is not finite, say); the last checkpoint is intact."""


class CheckFailed(MlxrlError):
    """job=check found two ways to compute the same that differ on this model and machine."""


class Interrupted(MlxrlError):
    """A signal asked the run to stop; everything was saved. The exit code is 128 + the signal."""

    def __init__(self, signal_number: int):
        self.exit_code = 128 + signal_number
        super().__init__(f"interrupted by signal {signal_number}")
