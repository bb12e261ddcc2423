"""Peers compared with the machine's limits: `python -m jobs.bench --peers`.

Each peer runs in a separate process, one after another, because most peers keep copies of the state. Between
saves and loads of a peer the bench measures the limits again, so that both sides of each ratio are measured
in turn. The rows of a peer show how long training is blocked by the first save and by later ones, how long it
takes until the files are on stable storage, and how long a load takes.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from jobs.bench.context import Context
from jobs.bench.limits import Limits
from jobs.bench.peers.catalogue import IN_MEMORY, OURS, PEERS, Peer
from jobs.bench.peers.environments import python_of
from jobs.bench.row import Reference, Row, skipped

START_TIMEOUT_S = 180  # importing a library, making the state, starting a cluster
COMMAND_TIMEOUT_S = 300.0  # one save or load; the slowest peers write 0.1 GB/s
END_TIMEOUT_S = 20.0  # time until the process and its children are killed
START = "start"  # name of the first answer, which needs no request
LOG_TAIL = 4_000  # characters of a failed child's output that are searched for the reason
MAX_REPEAT = 3  # samples per peer and row; there are many peers, and some need a minute per sample
ROOT = Path(__file__).resolve().parents[3]
Answer: TypeAlias = dict[str, Any]
Request: TypeAlias = Callable[[str], Answer]


class PeerError(Exception):
    """A request to the process of a peer failed; the text is its error."""


@contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[Request]:
    """Start a peer's process; yield a function that sends it a request, and kill it at the end.

    The process answers over a socket and may print anything. The function returns the answer, or raises
    PeerError if the request fails, the process dies, or there is no answer in time.
    """
    environment = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "RAY_TRAIN_V2_ENABLED": "1"}
    with ExitStack() as stack:
        path = f"{stack.enter_context(TemporaryDirectory(prefix='peer-'))}/socket"
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen(1)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, "--socket", path],
                cwd=ROOT,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        stack.callback(_kill, process)
        connection = stack.enter_context(_accepted(listener, process, log))

        def request(name: str) -> Answer:
            timeout_s = START_TIMEOUT_S if name == START else COMMAND_TIMEOUT_S
            try:
                if name != START:
                    connection.send(name)
                if not connection.poll(timeout_s):
                    raise PeerError(f"no answer to {name} within {timeout_s:.0f} s")
                answer: Answer = connection.recv()
            except (EOFError, OSError):
                raise PeerError(_reason(process, log)) from None
            if "error" in answer:
                raise PeerError(answer["error"])
            return answer

        request(START)
        yield request
        with suppress(OSError, subprocess.TimeoutExpired):
            connection.send("end")
            process.wait(END_TIMEOUT_S)


def _accepted(
    listener: socket.socket, process: subprocess.Popen[bytes], log: Path
) -> Connection[str, Answer]:
    listener.settimeout(1.0)
    for _ in range(START_TIMEOUT_S):
        try:
            return Connection(listener.accept()[0].detach())
        except TimeoutError:
            if process.poll() is not None:
                raise PeerError(_reason(process, log)) from None
    raise PeerError(f"it has not started within {START_TIMEOUT_S} s")


def _reason(process: subprocess.Popen[bytes], log: Path) -> str:
    """Return the line of the output that likely has the cause: the last line that is not indented."""
    text = log.read_text(errors="replace")[-LOG_TAIL:]
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith((" ", "\t"))]
    return lines[-1] if lines else f"its process ended with code {process.poll()}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the whole process group, so that no saver outlives its trainer."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def rows(context: Context) -> Iterator[Row]:
    """Yield five rows for each peer, or one with a reason; then this project beside the best."""
    found: list[Row] = []
    with context.temporary() as folder, closing(Limits(context.size_bytes, folder)) as limits:
        for name in context.peers:
            for row in peer_rows(name, PEERS[name], context, limits, folder / name):
                found.append(row)
                yield row
    yield from _beside_best(found)


def peer_rows(name: str, peer: Peer, context: Context, limits: Limits, folder: Path) -> Iterator[Row]:
    folder.mkdir()
    try:
        python = str(python_of(peer.environment)) if peer.environment else sys.executable
        command = [python, "-m", "jobs.bench.peers.child", name]
        command += ["--size", str(context.size_bytes), "--folder", str(folder)]
        with running(command, folder / "log") as request:
            yield from _rows_of(name, peer, request, context.repeat, limits)
    except FileNotFoundError as error:
        yield skipped(name, peer.what, str(error))
    except PeerError as error:
        print((folder / "log").read_text(errors="replace")[-LOG_TAIL:], file=sys.stderr)
        yield skipped(name, peer.what, str(error))
    finally:
        shutil.rmtree(folder)  # otherwise the disk would hold all peers' checkpoints


def _rows_of(name: str, peer: Peer, request: Request, repeat: int, limits: Limits) -> Iterator[Row]:
    first = request("save")
    limits.write_s()
    rounds = range(min(repeat, MAX_REPEAT))
    saved = [(request("save"), limits.memcpy_s(), limits.write_s()) for _ in rounds]
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
        )

    def loads(kind: str, what: str, limit: str, limit_s: Callable[[], float]) -> Row:
        samples, limits_s = [], []
        for place in rounds:
            if kind == "load-memory" and peer.once and place:
                request("save")
            samples.append(request(kind)["load_s"])
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
    measured = {tuple(row.name.split("/")): row for row in rows if not row.skipped}
    for (peer, kind), own in measured.items():
        others = {name: row for (name, of), row in measured.items() if of == kind and row.note != IN_MEMORY}
        others.pop(OURS, None)
        if peer == OURS and others:
            best = min(others, key=lambda name: others[name].median or 0.0)
            yield Row(
                name=f"best/{kind}",
                what=f"{own.what}, beside the best peer",
                unit="s",
                samples=own.samples,
                reference=Reference(name=best, samples=others[best].samples),
            )
