"""Starting the servers of `.venv-servers`: a free port, the command, a first answer, an end by process id."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jobs.demo.free_ports import free_port

HOME = Path(__file__).parents[2] / ".venv-servers"
GUARD = Path(__file__).parent / "guard.py"
START_S = 60.0  # until the first answer: two seconds, when the machine has nothing else to do
LOOK_S = 0.05  # between looks for it
ACCESS_KEY, SECRET_KEY = "strict", "strict-secret"  # what the strict store wants; the others take any


def program(name: str) -> Path:
    """Return a program of `.venv-servers`. RuntimeError with the remedy if it is not there."""
    path = HOME / "bin" / name
    if not path.exists():
        raise RuntimeError(f"{path} is not there: run `make .venv-servers/.ready`")
    return path


@contextlib.contextmanager
def ministack(folder: Path) -> Iterator[str]:
    """Start an S3 server that enforces conditions and verifies checksums; yield its URL."""
    port = free_port()
    environment = {"BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "SERVICES": "s3"}
    with _running([program("ministack")], port, folder, environment) as url:
        yield url


@contextlib.contextmanager
def moto(folder: Path) -> Iterator[str]:
    """Start an S3 server that enforces conditions and verifies no checksum."""
    port = free_port()
    with _running([program("moto_server"), "-H", "127.0.0.1", "-p", str(port)], port, folder) as url:
        yield url


@contextlib.contextmanager
def rclone(folder: Path) -> Iterator[str]:
    """Start an S3 server that ignores conditions: it must be refused."""
    port, data = free_port(), folder / "rclone"
    data.mkdir()
    command: list[str | Path] = [program("rclone"), "serve", "s3", data, "--addr", f"127.0.0.1:{port}"]
    command += ["--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", "--vfs-cache-mode", "writes"]
    with _running(command, port, folder) as url:
        yield url


def debian_program(name: str) -> Path | None:
    """Return a program of Debian: on PATH, or where `debian.sh` has put it; None if it is missing."""
    found = shutil.which(
        name, path=os.pathsep.join((os.environ.get("PATH", ""), str(HOME / "debian/usr/bin")))
    )
    return Path(found) if found else None


@contextlib.contextmanager
def prometheus(folder: Path, config: Path) -> Iterator[str]:
    """Prometheus with the file `config`, its data below `folder`; `debian_program` must have it."""
    port, command = free_port(), debian_program("prometheus")
    assert command is not None
    options = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", "--log.level=warn"]
    with _running([command, *options, f"--web.listen-address=127.0.0.1:{port}"], port, folder) as url:
        yield url


@contextlib.contextmanager
def _running(
    command: Sequence[str | Path], port: int, folder: Path, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    name, url = Path(command[0]).name, f"http://127.0.0.1:{port}"
    log = folder / f"{name}.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [sys.executable, "-I", GUARD, *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | (environment or {}) | {"HOME": str(folder)},
            start_new_session=True,
        ) as guard,
    ):
        try:
            _wait_for(url, guard, log)
            yield url
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(guard.pid, signal.SIGKILL)


def _wait_for(url: str, guard: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and guard.poll() is None:
        with contextlib.suppress(OSError):
            _answers(url)
            return
        time.sleep(LOOK_S)
    raise RuntimeError(f"{log.stem} does not answer:\n{log.read_text(errors='replace')[-2000:]}")


def _answers(url: str) -> None:
    with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(url, timeout=START_S):
        pass
