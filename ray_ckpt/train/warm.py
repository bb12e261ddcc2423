"""WarmWorkers: a process that has imported everything waits on each node for the next group of Ray Train.

An actor, such as a worker of Ray Train, gets an idle process of its node if there is one in which nothing
ever ran and which has the same runtime environment. Ray has no call that starts such a process. But it starts
one for each actor, and does not end that process if the actor is killed before its process is there; so
each rank starts an actor and kills it at once. If Ray does not keep the process, nothing is lost but the time
that it would have saved.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import ray.train
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_ckpt.errors import ConfigError
from ray_ckpt.train.ray_compat import WorkerCallback, WorkerGroupCallback

log = logging.getLogger("ray_ckpt")

MODULES_ENV = "RAY_CKPT_WARM_MODULES"  # in workers: modules to import, separated by commas
OF_EVERY_RANK = ("ray.train.torch", "ray_ckpt.trainer.checkpointer", "ray_ckpt.actors.agent.actor")
OF_FIRST_STEP = ("torch._dynamo",)  # an optimizer imports it when it is made or does its first step
OTHER_PYTHONS = ("conda", "container", "image_uri", "pip", "py_executable", "uv")  # fields of a runtime_env
DELAY_S = 20.0  # after a group's begin, which needs the cores
START_S = 1.0  # Ray has begun to start a process, which imports torch for longer than that
JOINED_S = 60.0  # between two looks for nodes that have joined
BEGUN_S = DELAY_S + 5.0  # a group that has lived longer has started its processes
MAX_TRIES = 2  # to start a process: the first may have ended one that had waited
MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z")


class WarmWorkers(WorkerGroupCallback, WorkerCallback):  # type: ignore[misc]
    """Lets the next group of a trainer start in processes that have imported torch and your modules.

        warm = WarmWorkers("transformers", "my_project.training")
        RunConfig(worker_runtime_env=warm.runtime_env(), callbacks=[CheckpointCallback(), warm])

    From DELAY_S after each begin of a group, each of its nodes has such a process for each rank, and so have
    up to `idle_nodes` nodes without ranks on which a worker would have a place. A process needs 0.3 GB of
    memory after torch alone. Ray ends it if a node has more idle processes than free CPUs.

    `modules` are imported in the order given, after torch, before the process knows its rank or its GPUs, so
    they may not look for GPUs when they are imported. They have to be installed on the nodes, or in the
    `working_dir` or `py_modules` of the runtime environment. One that cannot be imported is left to the
    program. `python` is the command of Python on the nodes, by default the path of the one that runs the
    driver.

    Raises ConfigError for a name that is no module's.
    """

    def __init__(self, *modules: str, idle_nodes: int = 2, python: str | None = None) -> None:
        for name in modules:
            if not MODULE.match(name):
                raise ConfigError(f"{name!r} is not the name of a module.", option="modules")
        if idle_nodes < 0:
            raise ConfigError("idle_nodes must not be negative.", option="idle_nodes")
        self._modules = (*OF_EVERY_RANK, *OF_FIRST_STEP, *modules)
        self._idle_nodes = idle_nodes
        self._python = python or shlex.quote(sys.executable)
        # Set in the controller, and copied to the workers:
        self._waiting: Counter[str] = Counter()  # processes that wait, by node
        self._orders: Counter[str] = Counter()  # those that this group is to start, by node
        self._nodes: list[str] = []  # by rank
        self._needed: Mapping[str, float] = {}  # resources of a worker
        self._begun_s = math.inf  # of the group
        self._ended: threading.Event | None = None  # set in a worker; not copied

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ended": None}

    def runtime_env(self, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return `base` with what RunConfig(worker_runtime_env=...) needs. ConfigError if it has a Python."""
        env = dict(base or {})
        if taken := sorted(env.keys() & set(OTHER_PYTHONS)):
            raise ConfigError(
                f"WarmWorkers cannot start workers whose runtime environment has {', '.join(taken)}.",
                hint="Install packages in the image; give another interpreter as WarmWorkers(python=...).",
            )
        env["env_vars"] = {**env.get("env_vars", {}), MODULES_ENV: ",".join(self._modules)}
        env["py_executable"] = f"{self._python} -m ray_ckpt.train.warm_start"
        return env

    # -- in the controller -----------------------------------------------------------------------------

    def before_init_train_context(self, workers: list[Any]) -> dict[str, list[Any]]:
        """Count the processes that the last group has started and this one takes, and order new ones."""
        try:
            ranks = sorted(workers, key=lambda worker: worker.distributed_context.world_rank)
            self._nodes = [worker.metadata.node_id for worker in ranks]
            self._needed = workers[0].resources
            self._order(find_places(ray.nodes(), self._needed), time.monotonic())
        except Exception as error:  # training goes on
            self._nodes = []
            log.warning("no process will wait for the next group: %s", error)
        return {}

    def _order(self, places: Sequence[str], now_s: float) -> None:
        """Note how many processes each node lacks; `places` are the nodes on which a worker has a place."""
        if now_s - self._begun_s > BEGUN_S:
            self._waiting += self._orders
        self._begun_s = now_s
        ranks = Counter(self._nodes)
        self._waiting -= ranks
        idle = [node for node in places if node not in ranks][: self._idle_nodes]
        self._orders = ranks + Counter(self._on(idle)) - self._waiting

    def _on(self, idle: Sequence[str]) -> list[str]:
        """Return nodes without ranks, each as often as the largest node has ranks."""
        most = max(Counter(self._nodes).values(), default=0)
        return [node for node in idle for _ in range(most)]

    # -- in the workers --------------------------------------------------------------------------------

    def after_init_train_context(self) -> None:
        if MODULES_ENV not in os.environ:
            log.warning("WarmWorkers does nothing: RunConfig lacks worker_runtime_env=warm.runtime_env()")
            return
        _limit_threads()
        if not self._nodes:  # the controller has said why
            return
        rank, env = ray.train.get_context().get_world_rank(), ray.get_runtime_context().runtime_env
        self._ended = threading.Event()
        arguments = rank, env, self._ended
        threading.Thread(target=self._keep, args=arguments, name="warm", daemon=True).start()

    def _keep(self, rank: int, env: Mapping[str, Any], ended: threading.Event) -> None:
        """Start the processes of a rank; rank 0 also starts some on nodes that join later."""
        known, wait_s = {*self._nodes, *self._orders, *self._waiting}, DELAY_S
        nodes = self._orders_of(rank)
        while not ended.wait(wait_s):
            try:
                start(nodes, env)
                if rank != 0 or not self._idle_nodes:
                    return
                places = find_places(ray.nodes(), self._needed)
            except Exception as error:  # training goes on
                log.warning("no process waits for the next group: %s", error)
                return
            room = self._idle_nodes - len(known.intersection(places) - {*self._nodes})
            joined = [node for node in places if node not in known][: max(0, room)]
            known.update(joined)
            nodes, wait_s = self._on(joined), JOINED_S

    def _orders_of(self, rank: int) -> list[str]:
        """Return where a rank starts processes: one on its own node, and rank 0 those on idle nodes."""
        here = self._nodes[rank]
        own = [here] if self._nodes[:rank].count(here) < self._orders[here] else []
        return own + [node for node in self._orders.elements() if rank == 0 and node not in self._nodes]

    def before_worker_shutdown(self) -> None:
        if self._ended is not None:
            self._ended.set()


def start(nodes: Sequence[str], env: Mapping[str, Any]) -> None:
    """Let Ray start a process with a runtime environment on each of the nodes; takes MAX_TRIES * START_S.

    Must be called in a task or an actor with that environment. An actor that is ready within START_S has
    taken a process that had waited, which ends with it, so another one is started.
    """
    for _ in range(MAX_TRIES):
        if not nodes:
            return
        actors = [_never(node, env) for node in nodes]
        answers = {actor.__ray_ready__.remote(): node for actor, node in zip(actors, nodes, strict=True)}
        ready, _ = ray.wait(list(answers), num_returns=len(answers), timeout=START_S)
        for actor in actors:
            ray.kill(actor)
        nodes = [answers[answer] for answer in ready]


def _never(node: str, env: Mapping[str, Any]) -> Any:
    place = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(_Never).options(num_cpus=0, runtime_env=env, scheduling_strategy=place).remote()


class _Never:
    """An actor that is killed before it exists."""


def find_places(nodes: Sequence[Mapping[str, Any]], needed: Mapping[str, float]) -> list[str]:
    """Return the nodes of `ray.nodes()` that are alive and have the resources of a worker."""
    return [
        node["NodeID"]
        for node in nodes
        if node["Alive"] and all(node["Resources"].get(name, 0.0) >= least for name, least in needed.items())
    ]


def _limit_threads() -> None:
    """Give torch the number of threads that Ray has set since torch was imported."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    torch = sys.modules.get("torch")
    if torch is not None and threads.isdigit() and int(threads):
        torch.set_num_threads(int(threads))
