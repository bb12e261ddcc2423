"""Stdout and stderr of a command whose reader may go away, such as `head`, or whose disk may be full."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from ray_ckpt.cli.options import EXIT_UNREAD, EXIT_USAGE


class _Stdout(io.FileIO):
    """Stdout; a failed write ends this process.

    The process ends as if by SIGPIPE if the reader of stdout is gone, otherwise with one line of error. The
    signal SIGPIPE stays ignored, because it would also end the process when a store closes a connection.
    """

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            os._exit(EXIT_UNREAD)
        except OSError as error:
            if sys.stderr is not None:  # print(file=None) would write to stdout
                print(f"ray-ckpt: stdout: {error.strerror}", file=sys.stderr, flush=True)
            os._exit(EXIT_USAGE)


class _Stderr(io.FileIO):
    """Stderr; output that cannot be written is dropped, because the result and the exit code matter more."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def end_when_unread() -> None:
    """Make this process end without a traceback if stdout cannot be written, and continue without stderr.

    Writes during interpreter shutdown are included. Characters that the encoding lacks are written as
    escapes. A stream that is closed or replaced stays as it is.
    """
    for name, kind in (("stdout", _Stdout), ("stderr", _Stderr)):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper):
            setattr(sys, name, _over(kind(stream.fileno(), "w", closefd=False), stream))


def _over(raw: io.RawIOBase, stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """Return a stream on `raw` with the encoding and buffering of `stream`."""
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
