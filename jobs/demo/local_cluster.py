"""A Ray cluster of several nodes on this machine; each node has its own staging folder.

The cluster is for the demo and the tests, not for training. The nodes share one IP and one disk, but each
node has its own raylet, workers and agent, and can be killed like a machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import ray
from ray.cluster_utils import Cluster

from jobs.demo.free_ports import free_port
from ray_ckpt.config import STAGING_ENV
from ray_ckpt.preemption.cloud import METADATA_ENV

# A killed raylet is detected after about 1 s instead of 14 s; must be set before the cluster starts.
FAST_FAILURE_DETECTION: Mapping[str, str] = {
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
}
NO_CLOUD: Mapping[str, str] = {METADATA_ENV: "off"}  # these nodes are not machines of a cloud
OBJECT_STORE_BYTES = 100 << 20  # enough for control messages
REAP_S = 10.0


@dataclass(slots=True)
class LocalNode:
    name: str
    node_id: str
    staging: Path
    handle: Any = field(repr=False)


class LocalCluster:
    """A head without CPUs and the named nodes with `cpus` each; use it as a context manager.

    `root` gets one staging folder per node. The calling process is connected to the cluster.
    """

    def __init__(
        self, root: Path, names: Sequence[str], *, cpus: int = 1, log_to_driver: bool = False
    ) -> None:
        for name, value in {**FAST_FAILURE_DETECTION, **NO_CLOUD}.items():
            os.environ.setdefault(name, value)
        # As in an activated environment, from which users run `ray start`: jobs call plain `python`.
        os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        self._root = root
        self._cpus = cpus
        self.nodes: dict[str, LocalNode] = {}
        self._cluster = Cluster()
        try:
            self._add("head", cpus=0, dashboard=True)
            for name in names:
                self.add(name)
            ray.init(address=self.address, log_to_driver=log_to_driver, logging_level="warning")
            self._cluster.wait_for_nodes()
        except BaseException:
            self.shutdown()
            raise

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    @property
    def dashboard(self) -> str:
        """The address for `ray job submit`."""
        return f"http://{self._cluster.head_node.webui_url}"

    def add(self, name: str) -> LocalNode:
        """Start a node; its name, and therefore its staging folder, may be those of a dead node."""
        return self._add(name, cpus=self._cpus, dashboard=False)

    def name_of(self, node_id: str) -> str:
        return next((n.name for n in self.nodes.values() if n.node_id == node_id), node_id[:8])

    def idle_processes(self, variable: str) -> set[int]:
        """Return the idle processes of Ray on this machine that have an environment variable."""
        found = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_idle = (process.cmdline() or [""])[0].startswith("ray::IDLE")
                if is_idle and variable in process.environ():
                    found.add(process.pid)
        return found

    def kill(self, name: str, *, wipe: bool) -> None:
        """Send SIGKILL to the raylet and its descendants; with `wipe`, also delete the staging folder."""
        node = self.nodes.pop(name)
        kill_family(node.handle.all_processes["raylet"][0].process.pid)
        if wipe:
            shutil.rmtree(node.staging, ignore_errors=True)
        self._cluster.remove_node(node.handle, allow_graceful=False)  # else actors would live on

    def shutdown(self) -> None:
        """Shut down at once, without waiting for actors to end."""
        ray.shutdown()
        pids = [node.handle.all_processes["raylet"][0].process.pid for node in self.nodes.values()]
        kill_family(*pids)
        for node in list(self._cluster.worker_nodes):
            self._cluster.remove_node(node, allow_graceful=False)
        self._cluster.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _add(self, name: str, *, cpus: int, dashboard: bool) -> LocalNode:
        staging = self._root / name
        handle = self._cluster.add_node(
            num_cpus=cpus,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=dashboard,
            **({"dashboard_port": free_port()} if dashboard else {}),
            env_vars={STAGING_ENV: str(staging), "OMP_NUM_THREADS": "1"},
        )
        self.nodes[name] = LocalNode(name, handle.node_id, staging, handle)
        return self.nodes[name]


def kill_family(*pids: int) -> None:
    """Send SIGKILL to processes and all their descendants."""
    family: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(pid)
            family += [parent, *parent.children(recursive=True)]
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=REAP_S)
