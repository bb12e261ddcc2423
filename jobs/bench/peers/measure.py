"""Peers compared with the machine's limits: `python -m jobs.bench --peers`.

Each peer runs in a separate process, one after another, because most peers keep copies of the state. Between
saves and loads of a peer the bench measures the limits again, so that both sides of each ratio are measured
in turn. The rows of a peer show how long training is blocked by the first save and by later ones, how long it
takes until the files are on stable storage, and how long a load takes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self

from jobs.bench.context import Context
from jobs.bench.limits import Limits
from jobs.bench.peers.catalogue import IN_MEMORY, OURS, PEERS, Peer
from jobs.bench.peers.environments import python_of
from jobs.bench.row import Reference, Row, skipped

START_TIMEOUT_S = 180.0  # importing a library, making the state, starting a cluster
COMMAND_TIMEOUT_S = 300.0  # one save or load; the slowest peers write 0.1 GB/s
END_TIMEOUT_S = 20.0  # time until the process and its children are killed
LOG_TAIL = 4_000  # characters of a failed child's output that are searched for the reason
MAX_REPEAT = 3  # samples per peer and row; there are many peers, and some need a minute per sample
ROOT = Path(__file__).resolve().parents[3]
Answer = Mapping[str, Any]


class PeerError(Exception):
    """A request to the process of a peer failed; the text is its error."""


class Child:
    """A peer's process with its children. The process answers over a socket and may print anything."""

    def __init__(
        self, command: Sequence[str], log: Path, *, start_timeout_s: float = START_TIMEOUT_S
    ) -> None:
        self._log = log
        self._answers = False  # whether the last request succeeded; otherwise no answer is awaited
        self._folder = tempfile.TemporaryDirectory(prefix="peer-")
        path = f"{self._folder.name}/socket"
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "RAY_TRAIN_V2_ENABLED": "1",
        }
        with socket.socket(socket.AF_UNIX) as listener, log.open("wb") as output:
            listener.bind(path)
            listener.listen(1)
            self._process = subprocess.Popen(
                [*command, "--socket", path],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                self._connection = self._accept(listener, start_timeout_s)
            except BaseException:
                self._kill()
                self._folder.cleanup()
                raise
        self._lines = self._connection.makefile("rw", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self._answers:
                self._lines.write('{"command": "end"}\n')
                self._lines.flush()
                self._process.wait(END_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired):
            pass  # the process is killed
        finally:
            self._kill()
            self._connection.close()
            self._folder.cleanup()

    def ask(self, command: str = "", *, timeout_s: float = COMMAND_TIMEOUT_S) -> Answer:
        """Send `command`, if any, and return the answer. Raise PeerError if it fails, dies or is too slow."""
        self._answers = False
        self._connection.settimeout(timeout_s)
        try:
            if command:
                self._lines.write(json.dumps({"command": command}) + "\n")
                self._lines.flush()
            line = self._lines.readline()
        except TimeoutError:
            raise PeerError(f"no answer to {command or 'start'} within {timeout_s:.0f} s") from None
        except OSError:
            line = ""
        if not line:
            raise PeerError(self._last_words())
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        self._answers = True
        return answer

    def _accept(self, listener: socket.socket, timeout_s: float) -> socket.socket:
        listener.settimeout(1.0)
        for _ in range(int(timeout_s)):
            try:
                return listener.accept()[0]
            except TimeoutError:
                if self._process.poll() is not None:
                    raise PeerError(self._last_words()) from None
        raise PeerError(f"it has not started within {timeout_s:.0f} s")

    def _last_words(self) -> str:
        """Return the line of the output that likely has the cause: the last line that is not indented."""
        text = self._log.read_text(errors="replace")[-LOG_TAIL:]
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith((" ", "\t"))]
        return lines[-1] if lines else f"its process ended with code {self._process.poll()}"

    def _kill(self) -> None:
        """Kill the whole process group, so that no saver outlives its trainer."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def rows(context: Context, names: Sequence[str]) -> Iterator[Row]:
    """Yield five rows for each peer, or one with a reason; then this project beside the best."""
    found: list[Row] = []
    with context.temporary() as folder:
        limits = Limits(context.size_bytes, folder)
        try:
            for name in names:
                for row in peer_rows(name, PEERS[name], context, limits, folder / name):
                    found.append(row)
                    yield row
        finally:
            limits.close()
    yield from _beside_best(found)


def peer_rows(name: str, peer: Peer, context: Context, limits: Limits, folder: Path) -> Iterator[Row]:
    folder.mkdir()
    try:
        python = str(python_of(peer.environment)) if peer.environment else sys.executable
        command = [python, "-m", f"jobs.bench.peers.{peer.script}", *peer.arguments]
        command += ["--size", str(context.size_bytes), "--folder", str(folder)]
        with Child(command, folder / "log") as child:
            child.ask(timeout_s=START_TIMEOUT_S)
            yield from _rows_of(name, peer, child, context.repeat, limits)
    except FileNotFoundError as error:
        yield skipped(name, peer.what, str(error))
    except PeerError as error:
        print((folder / "log").read_text(errors="replace")[-LOG_TAIL:], file=sys.stderr)
        yield skipped(name, peer.what, str(error))
    finally:
        shutil.rmtree(folder)  # otherwise the disk would hold all peers' checkpoints


def _rows_of(name: str, peer: Peer, child: Child, repeat: int, limits: Limits) -> Iterator[Row]:
    first = child.ask("save")
    limits.write_s()
    rounds = range(min(repeat, MAX_REPEAT))
    saved = [(child.ask("save"), limits.memcpy_s(), limits.write_s()) for _ in rounds]
    saves = [save for save, _, _ in saved]
    copy = Reference(name="memcpy", samples=tuple(copy_s for _, copy_s, _ in saved))
    write = Reference(name="raw write", samples=tuple(write_s for _, _, write_s in saved))

    def row(kind: str, what: str, samples: Sequence[float], reference: Reference, note: str = "") -> Row:
        return Row(
            name=f"{name}/{kind}",
            what=f"{peer.what}: {what}",
            unit="s",
            samples=tuple(samples),
            reference=reference,
            note=note,
            extra={"peer": name, "kind": kind},
        )

    def loads(kind: str, what: str, limit: str, limit_s: Callable[[], float]) -> Row:
        samples, limits_s = [], []
        for place in rounds:
            if kind == "load-memory" and peer.once and place:
                child.ask("save")
            samples.append(child.ask(kind)["load_s"])
            limits_s.append(limit_s())
        return row(kind, what, samples, Reference(name=limit, samples=tuple(limits_s)))

    returned_s = median(save["returned_s"] for save in saves)
    blocked = [save["blocked_s"] for save in saves]
    note = f"the call returns after {returned_s:.3g} s" if returned_s < 0.9 * median(blocked) else ""
    yield row("blocked-first", "blocked by the first save", [first["blocked_s"]], copy)
    yield row("blocked", "blocked by a save", blocked, copy, note)
    complete = [save["complete_s"] for save in saves]
    yield row("complete", "until files are complete and on disk", complete, write, peer.note)
    yield loads("load-memory", f"load from {peer.memory}", "memcpy", limits.memcpy_s)
    if peer.disk:
        yield loads("load", "load from disk", "raw read", limits.read_s)


def _beside_best(rows: Sequence[Row]) -> Iterator[Row]:
    """Compare this project with the fastest peer of each kind."""
    measured = [row for row in rows if not row.skipped]
    for own in (row for row in measured if row.extra["peer"] == OURS):
        kind = own.extra["kind"]
        others = [
            row for row in measured if row.extra["kind"] == kind and row is not own and row.note != IN_MEMORY
        ]
        if others:
            best = min(others, key=lambda row: row.median or 0.0)
            yield Row(
                name=f"best/{kind}",
                what=f"{own.what}, beside the best peer",
                unit="s",
                samples=own.samples,
                reference=Reference(name=best.extra["peer"], samples=best.samples),
            )
