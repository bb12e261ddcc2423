"""The process of a peer, as started by `measure.py`. It needs only torch and the standard library.

A script hands a `Peer` to `main`, which makes the state, connects to the bench's socket and serves its
requests, one JSON object a line: `save`, `load` from disk, `load-memory`, `end`. The times are taken here,
around the library's own calls; everything else (making the state, comparing it, dropping files from memory)
is outside of them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from jobs.bench.state import advance, fingerprint, make_state, state_bytes, state_dict, wipe

RETURNED = "returned"  # the library's call has returned
BLOCK_BYTES = 1 << 24  # bytes of a file read at a time
STAGED = "staged"  # the state may change; the same moment, unless the library requires a wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """The state that is saved and restored in place."""

    model: nn.Module
    optimizer: Optimizer

    def state_dict(self) -> dict[str, Any]:
        return state_dict(self.model, self.optimizer)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy a loaded state into the live tensors, unless the library has loaded in place.

        The optimizer's own `load_state_dict` would keep tensors of a mapped file as they are, not read yet.
        """
        named = self.state_dict()
        for live, loaded in (
            (named["model"], state["model"]),
            *((own, state["optimizer"]["state"][key]) for key, own in named["optimizer"]["state"].items()),
        ):
            for name, tensor in live.items():
                if tensor.data_ptr() != loaded[name].data_ptr():
                    tensor.copy_(loaded[name])


class Peer(ABC):
    """One library in its best configuration."""

    def prepare(self, live: Live) -> None:  # noqa: B027  # most have nothing to do
        """Prepare a save, outside of its time."""

    @abstractmethod
    def save(self, live: Live, folder: Path, step: int) -> Iterator[str]:
        """Save into the new `folder`; yield RETURNED and STAGED, and end when all files are written."""

    @abstractmethod
    def load(self, live: Live, folder: Path, step: int, *, cached: bool) -> float | None:
        """Load the saved state into the live tensors. Return the seconds if part of the work does not count.

        Before the call, the bench has read the files into the page cache (`cached`) or dropped them from it.
        """

    def close(self) -> None:  # noqa: B027
        """Stop the threads and processes that the peer started."""


class Session:
    """The answers of one peer to requests."""

    def __init__(self, peer: Peer, live: Live, folder: Path) -> None:
        self.peer, self.live, self.folder = peer, live, folder
        self.step = 0
        self.saved: tuple[int, ...] = ()

    def save(self) -> dict[str, Any]:
        """Return the seconds until the call returned, the state may change, and the files are stable."""
        before = self._path()
        self.step += 1
        advance(self.live.model, self.live.optimizer)
        self.peer.prepare(self.live)
        marks: dict[str, float] = {}
        started_s = time.perf_counter()
        for mark in self.peer.save(self.live, self._path(), self.step):
            marks[mark] = time.perf_counter() - started_s
        written_s = time.perf_counter() - started_s
        sync_folder(self.folder)
        complete_s = time.perf_counter() - started_s
        shutil.rmtree(before, ignore_errors=True)
        self.saved = fingerprint(self.live.model, self.live.optimizer)
        returned_s = marks.get(RETURNED, written_s)
        return {
            "returned_s": returned_s,
            "blocked_s": marks.get(STAGED, returned_s),
            "complete_s": complete_s,
        }

    def load(self, *, cached: bool) -> dict[str, Any]:
        """Return the seconds to load the newest save into the live tensors, from cached or uncached files."""
        wipe(self.live.model, self.live.optimizer)
        (read_all if cached else forget_cached)(self.folder)
        started_s = time.perf_counter()
        counted_s = self.peer.load(self.live, self._path(), self.step, cached=cached)
        load_s = time.perf_counter() - started_s if counted_s is None else counted_s
        if fingerprint(self.live.model, self.live.optimizer) != self.saved:
            raise ValueError("the state that was loaded differs from the one that was saved")
        return {"load_s": load_s}

    def _path(self) -> Path:
        return self.folder / f"step-{self.step}"


def sync_folder(folder: Path) -> None:
    """Call fsync on all files and folders in `folder`; this is fast if the library has done so."""
    for path in [*_files(folder), *(path for path in folder.rglob("*") if path.is_dir()), folder]:
        if path.exists():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def forget_cached(folder: Path) -> None:
    """Drop all files in `folder` from the page cache, so that they are read from the disk again."""
    for path in _files(folder):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(folder: Path) -> None:
    """Read all files in `folder`, so that the page cache has them."""
    for path in _files(folder):
        with path.open("rb") as file:
            while file.read(BLOCK_BYTES):
                pass


def serve(
    connection: socket.socket, make_peer: Callable[[Live], Peer], size_bytes: int, folder: Path
) -> None:
    """Answer requests until `end` or until the bench is gone. An error is sent as the last answer."""
    with connection, connection.makefile("rw", encoding="utf-8") as lines:

        def answer(**fields: Any) -> None:
            lines.write(json.dumps(fields) + "\n")
            lines.flush()

        try:
            model, optimizer = make_state(size_bytes)
            live = Live(model=model, optimizer=optimizer)
            peer = make_peer(live)
            session = Session(peer, live, folder)
            answer(ready=True, size_bytes=state_bytes(model, optimizer))
            for line in lines:
                command = json.loads(line)["command"]
                if command == "end":
                    break
                answer(
                    **(session.save() if command == "save" else session.load(cached=command == "load-memory"))
                )
            peer.close()
        except BaseException as error:
            traceback.print_exc()
            text = str(error).strip().splitlines()
            answer(error=f"{type(error).__name__}: {text[0]}" if text else type(error).__name__)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser()
    found.add_argument("--socket", required=True)
    found.add_argument("--size", type=int, required=True)
    found.add_argument("--folder", type=Path, required=True)
    return found


def connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    return connection


def main(make_peer: Callable[[Live], Peer], arguments: argparse.Namespace) -> int:
    """End the script without waiting for threads of a library that would keep the process alive."""
    serve(connect(arguments.socket), make_peer, arguments.size, arguments.folder)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
