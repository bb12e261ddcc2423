"""Stdout and stderr of a command whose reader may go away, such as `head`, or whose disk may be full."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from ray_ckpt.cli.options import EXIT_UNREAD, EXIT_USAGE

STDERR = 2


class _Stream(io.FileIO):
    """Stdout or stderr. A failed write to stdout ends this process; one to stderr is dropped.

    The process ends as if by SIGPIPE if the reader of stdout is gone, otherwise with one line of error. The
    signal SIGPIPE stays ignored, because it would also end the process when a store closes a connection.
    """

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if self.fileno() == STDERR:  # the result and the exit code matter more
                return memoryview(data).nbytes
            if isinstance(error, BrokenPipeError):
                os._exit(EXIT_UNREAD)
            if sys.stderr is not None:  # print(file=None) would write to stdout
                print(f"ray-ckpt: stdout: {error.strerror}", file=sys.stderr, flush=True)
            os._exit(EXIT_USAGE)


def end_when_unread() -> None:
    """Make this process end without a traceback if stdout cannot be written, and continue without stderr.

    Writes during interpreter shutdown are included. Characters that the encoding lacks are written as
    escapes. A stream that is closed or replaced stays as it is.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper):
            raw = io.BufferedWriter(_Stream(stream.fileno(), "w", closefd=False))
            shown = io.TextIOWrapper(
                raw,
                encoding=stream.encoding,
                errors="backslashreplace",
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, shown)
