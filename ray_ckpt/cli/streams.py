"""Stdout and stderr of a command whose reader may go away, such as `head`, or whose disk may be full."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from ray_ckpt.cli.options import EXIT_UNREAD, EXIT_USAGE


class _Stdout(io.FileIO):
    """Ends this process as by SIGPIPE when it writes there and nobody reads it any more, and with one line of
    error when it cannot write for another reason.

    The signal itself stays ignored: it would also end who writes to a connection that a store has closed.
    """

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            os._exit(EXIT_UNREAD)
        except OSError as error:
            if sys.stderr is not None:  # else it is printed to stdout
                print(f"ray-ckpt: stdout: {error.strerror}", file=sys.stderr, flush=True)
            os._exit(EXIT_USAGE)


class _Stderr(io.FileIO):
    """What cannot be written there is dropped: the result, and the exit code, are worth more than words."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def end_when_unread() -> None:
    """Let this process end without a trace once its stdout cannot be written, also while it shuts down, and
    go on without its stderr.

    What their encoding does not have is written as an escape. A stream that is closed, or that something
    else stands in for, stays as it is.
    """
    for name, kind in (("stdout", _Stdout), ("stderr", _Stderr)):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper):
            setattr(sys, name, _over(kind(stream.fileno(), "w", closefd=False), stream))


def _over(raw: io.RawIOBase, stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """A stream on `raw` that is else like `stream`."""
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
