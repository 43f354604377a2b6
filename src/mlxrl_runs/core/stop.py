"""The one way a signal reaches the loop: set by a handler, looked at where stopping is safe."""

from dataclasses import dataclass

from mlxrl_runs.errors import Interrupted


@dataclass
class StopRequest:
    signal_number: int | None = None

    def raise_if_requested(self) -> None:
        """Raises: Interrupted, once a signal has asked for an end."""
        if self.signal_number is not None:
            raise Interrupted(self.signal_number)
