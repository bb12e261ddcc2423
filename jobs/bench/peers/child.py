"""The process of a peer, as started by `measure.py`. It needs only torch, the standard library and the peer.

It makes the state, connects to the bench's socket and serves its requests: `save`, `load` from disk,
`load-memory`, `end`. The times are taken here, around the library's own calls; everything else (making the
state, comparing it, dropping files from memory) is outside of them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from jobs.bench.state import advance, fingerprint, make_state, state_dict, wipe

RETURNED = "returned"  # the library's call has returned
STAGED = "staged"  # the state may change; the same moment, unless the library requires a wait
BLOCK_BYTES = 1 << 24  # bytes of a file read at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """The state that is saved and restored in place; `root` is the folder of all files of the peer."""

    model: nn.Module
    optimizer: Optimizer
    root: Path

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The calls of one library in its best configuration.

    `save(folder, step)` saves into the new folder; it may yield RETURNED and STAGED, and ends when all files
    are written. `load(folder, step, cached)` loads into the live tensors; before it the bench has read the
    files into the page cache, or dropped them from it. It returns the seconds if part of the work does not
    count. `prepare` comes before each save, outside of its time; `close` stops threads and processes.
    """

    save: Callable[[Path, int], Iterator[str] | None]
    load: Callable[[Path, int, bool], float | None]
    prepare: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None


class Session:
    """The answers of one peer to requests."""

    def __init__(self, library: Library, live: Live) -> None:
        self.library, self.live = library, live
        self.step = 0
        self.saved: tuple[int, ...] = ()

    def save(self) -> dict[str, float]:
        """Return the seconds until the call returned, the state may change, and the files are stable."""
        before = self._path()
        self.step += 1
        advance(self.live.model, self.live.optimizer)
        self.library.prepare()
        marks: dict[str, float] = {}
        started_s = time.perf_counter()
        for mark in self.library.save(self._path(), self.step) or ():
            marks[mark] = time.perf_counter() - started_s
        written_s = time.perf_counter() - started_s
        sync_folder(self.live.root)
        complete_s = time.perf_counter() - started_s
        shutil.rmtree(before, ignore_errors=True)
        self.saved = fingerprint(self.live.model, self.live.optimizer)
        returned_s = marks.get(RETURNED, written_s)
        blocked_s = marks.get(STAGED, returned_s)
        return {"returned_s": returned_s, "blocked_s": blocked_s, "complete_s": complete_s}

    def load(self, *, cached: bool) -> dict[str, float]:
        """Return the seconds to load the newest save into the live tensors, from cached or uncached files."""
        wipe(self.live.model, self.live.optimizer)
        (read_all if cached else forget_cached)(self.live.root)
        started_s = time.perf_counter()
        counted_s = self.library.load(self._path(), self.step, cached)
        load_s = time.perf_counter() - started_s if counted_s is None else counted_s
        if fingerprint(self.live.model, self.live.optimizer) != self.saved:
            raise ValueError("the state that was loaded differs from the one that was saved")
        return {"load_s": load_s}

    def _path(self) -> Path:
        return self.live.root / f"step-{self.step}"


def sync_folder(folder: Path) -> None:
    """Call fsync on all files and folders in `folder`; this is fast if the library has done so."""
    for path in [*folder.rglob("*"), folder]:
        if path.is_file() or path.is_dir():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def forget_cached(folder: Path) -> None:
    """Drop all files in `folder` from the page cache, so that they are read from the disk again."""
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(folder: Path) -> None:
    """Read all files in `folder`, so that the page cache has them."""
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb") as file:
            while file.read(BLOCK_BYTES):
                pass


def serve(chosen: argparse.Namespace) -> None:
    """Answer requests until `end` or until the bench is gone. An error is sent as the last answer."""
    from jobs.bench.peers.libraries import LIBRARIES

    unix = socket.socket(socket.AF_UNIX)
    unix.connect(chosen.socket)
    with Connection(unix.detach()) as connection:
        try:
            model, optimizer = make_state(chosen.size)
            live = Live(model=model, optimizer=optimizer, root=chosen.folder)
            session = Session(LIBRARIES[chosen.peer](live), live)
            connection.send({"ready": True})
            while (command := connection.recv()) != "end":
                is_save, cached = command == "save", command == "load-memory"
                connection.send(session.save() if is_save else session.load(cached=cached))
            session.library.close()
        except EOFError:
            pass
        except BaseException as error:
            traceback.print_exc()
            first = str(error).strip().partition("\n")[0]
            connection.send({"error": f"{type(error).__name__}: {first}" if first else type(error).__name__})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("peer")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    chosen = parser.parse_args()
    if chosen.peer.startswith("ray.train"):
        from jobs.bench.peers.libraries import in_ray_train

        in_ray_train(chosen)
    else:
        serve(chosen)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without waiting for threads of a library that would keep the process alive


if __name__ == "__main__":
    main()
