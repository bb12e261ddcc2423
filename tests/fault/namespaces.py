"""A Ray cluster on nodes in network namespaces of their own, so that packets between two can be dropped.

Each node has an address on one bridge; the bridge is in a namespace, too, so that all links go with the
namespaces and the machine's own network is not touched. Root, `ip` and `iptables` are needed. A process
(`python -m tests.fault.namespaces PREFIX`) waits for the end of the one that has made the namespaces, however
that ends, and removes them with all processes in them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from jobs.demo.local_cluster import FAST_FAILURE_DETECTION, NO_CLOUD, OBJECT_STORE_BYTES
from ray_ckpt.config import PORTS_ENV, STAGING_ENV

ROOT = Path(__file__).parents[2]
LINK = "eth0"  # the name of each node's link, in its own namespace
AGENT_PORTS = "41000-41009"  # of the agents alone: Ray's workers have ports from 10002 to 19999
RAY_PORT = 6379
START_S = 90.0  # until `ray start` has returned
END_S = 10.0  # until killed processes are gone


def why_not() -> str:
    """Why there can be no namespaces here; empty if there can."""
    missing = [name for name in ("ip", "iptables") if shutil.which(name) is None]
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: apt-get install iproute2 iptables)"
    probe = f"rckpt-{os.getpid()}-probe"
    try:
        _run("ip", "netns", "add", probe)
    except RuntimeError as error:
        return f"no network namespaces: {error}"
    try:
        _inside(probe, "iptables", "-A", "INPUT", "-p", "tcp", "--dport", "9", "-j", "DROP")
    except RuntimeError as error:
        return f"no packet filter in namespaces: {error}"
    finally:
        _run("ip", "netns", "del", probe)
    return ""


class Namespaces:
    """A head and the named nodes, each with its namespace and staging folder; use it as a context manager.

    `folder` is short, since sockets have their names in it. The calling process is not connected to the
    cluster: programs that are to be run with `python` in the head's namespace.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.nodes = ("head", *names)
        self.folder = folder
        self._prefix = f"rckpt-{os.getpid()}"

    def __enter__(self) -> Self:
        guard = [sys.executable, "-m", "tests.fault.namespaces", self._prefix]
        self._guard = subprocess.Popen(guard, cwd=ROOT, stdin=subprocess.PIPE, start_new_session=True)
        try:
            self._link_up()
            for name in self.nodes:
                self._start_ray(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def space(self, node: str) -> str:
        return f"{self._prefix}-{node}"

    def address(self, node: str) -> str:
        return f"10.77.0.{1 + self.nodes.index(node)}"

    def staging(self, node: str) -> Path:
        return self.folder / "staging" / node

    def python(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Python in the head's namespace, as a driver of the cluster."""
        env = {**os.environ, **self._environment("head"), "RAY_ADDRESS": f"{self.address('head')}:{RAY_PORT}"}
        command = ["ip", "netns", "exec", self.space("head"), sys.executable, *arguments]
        return subprocess.Popen(command, cwd=ROOT, env=env)

    def close(self) -> None:
        """End every process in the namespaces, then delete them, and all links with them."""
        self._guard.communicate(timeout=3 * END_S)

    def _link_up(self) -> None:
        switch = self.space("switch")
        for name in (switch, *map(self.space, self.nodes)):
            _run("ip", "netns", "add", name)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "address", "add", "10.77.0.254/24", "dev", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for at, node in enumerate(self.nodes):
            port, space = f"port{at}", self.space(node)
            peer = ("peer", "name", LINK, "netns", space)
            _run("ip", "-n", switch, "link", "add", port, "type", "veth", *peer)
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", space, "link", "set", "lo", "up")
            _run("ip", "-n", space, "address", "add", f"{self.address(node)}/24", "dev", LINK)
            _run("ip", "-n", space, "link", "set", LINK, "up")
            _run("ip", "-n", space, "route", "add", "default", "via", "10.77.0.254")  # Ray looks for one

    def _start_ray(self, name: str) -> None:
        head = self.address("head")
        role = (
            ["--head", f"--port={RAY_PORT}", f"--temp-dir={self.folder / 'ray'}", "--include-dashboard=false"]
            if name == "head"
            else [f"--address={head}:{RAY_PORT}"]
        )
        ray = str(Path(sys.executable).with_name("ray"))
        command = [ray, "start", *role, f"--node-ip-address={self.address(name)}", "--disable-usage-stats"]
        command += ["--num-cpus=1", f"--object-store-memory={OBJECT_STORE_BYTES}"]
        _inside(self.space(name), *command, env=self._environment(name), within_s=START_S)

    def _environment(self, node: str) -> Mapping[str, str]:
        return {
            **FAST_FAILURE_DETECTION,
            **NO_CLOUD,
            STAGING_ENV: str(self.staging(node)),
            PORTS_ENV: AGENT_PORTS,
            "GLOO_SOCKET_IFNAME": LINK,
            "RAY_AUTH_MODE": "disabled",  # with a token in the home folder the head would refuse nodes
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        }


@contextlib.contextmanager
def dropped(rules: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Drop all packets from an address to a namespace, for each (namespace, address)."""
    ports = AGENT_PORTS.replace("-", ":")
    done: list[tuple[str, ...]] = []
    try:
        for space, sender in rules:
            rule = ("INPUT", "-s", sender, "-p", "tcp", "--dport", ports, "-j", "DROP")
            _inside(space, "iptables", "-I", *rule)
            done.append((space, *rule))
        yield
    finally:
        for space, *applied in done:
            _inside(space, "iptables", "-D", *applied)


def _remove(prefix: str) -> None:
    """End all processes in the namespaces of this prefix, and the namespaces."""
    names = [line.split()[0] for line in _run("ip", "netns", "list").splitlines()]
    spaces = [name for name in names if name.startswith(f"{prefix}-")]
    deadline_s = time.monotonic() + END_S
    while (pids := _pids(spaces)) and time.monotonic() < deadline_s:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    for space in spaces:
        _run("ip", "netns", "del", space)


def _pids(spaces: Sequence[str]) -> list[int]:
    return [int(pid) for space in spaces for pid in _run("ip", "netns", "pids", space).split()]


def _inside(space: str, *command: str, env: Mapping[str, str] | None = None, within_s: float = END_S) -> str:
    return _run("ip", "netns", "exec", space, *command, env=env, within_s=within_s)


def _run(*command: str, env: Mapping[str, str] | None = None, within_s: float = END_S) -> str:
    """Return the output of a command; RuntimeError with the output if the command fails."""
    environment = {**os.environ, **(env or {})}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=within_s, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.stdin.read()  # until whoever has made the namespaces closes it, or is dead
    _remove(sys.argv[1])
