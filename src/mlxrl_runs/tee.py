"""Text that goes to a terminal and, without its escape codes, into a log."""

import contextlib
import re
import threading
from collections.abc import Iterator
from typing import TextIO

ESCAPE_CODES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


class Tee:
    """A text stream that also writes complete lines, without escape codes, to a log.

    The terminal stays what it was (`isatty`); when it goes away, the log goes on.
    """

    def __init__(self, stream: TextIO, log: TextIO, lock: threading.Lock):
        self._stream: TextIO | None = stream
        self._log = log
        self._lock = lock
        self._line = ""
        self.encoding = stream.encoding
        self.errors = stream.errors

    def write(self, text: str) -> int:
        with self._lock:
            self._to_terminal(text)
            self._to_log(text)
        return len(text)

    def log_only(self, text: str) -> None:
        with self._lock:
            self._to_log(text)

    def flush(self) -> None:
        with self._lock, self._terminal_may_be_gone():
            if self._stream is not None:
                self._stream.flush()

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("the terminal is gone")
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def close_line(self) -> None:
        """Write out a last line that had no end."""
        if self._line:
            self.log_only("\n")

    def _to_terminal(self, text: str) -> None:
        with self._terminal_may_be_gone():
            if self._stream is not None:
                self._stream.write(text)

    def _to_log(self, text: str) -> None:
        *complete, self._line = (self._line + text).split("\n")
        with contextlib.suppress(OSError):  # a full disk: what is printed still reaches the terminal
            for line in complete:
                plain = ESCAPE_CODES.sub("", line).rstrip("\r").rpartition("\r")[2]  # a progress bar's last state
                self._log.write(plain + "\n")
            if complete:
                self._log.flush()

    @contextlib.contextmanager
    def _terminal_may_be_gone(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self._stream = None
