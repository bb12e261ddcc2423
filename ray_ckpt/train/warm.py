"""WarmWorkers: a process that has imported everything waits on each node for the next group of Ray Train.

An actor, such as a worker of Ray Train, gets an idle process of its node if there is one in which nothing
ever ran and which has the same runtime environment. Ray has no call that starts such a process. But it starts
one for each actor, and does not end that process if the actor is killed before its process is there; so
each rank starts an actor and kills it at once. If Ray does not keep the process, nothing is lost but the time
that it would have saved.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import ray.train
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_ckpt.errors import ConfigError
from ray_ckpt.train.ray_compat import ControllerCallback, WorkerCallback, WorkerGroupCallback

log = logging.getLogger("ray_ckpt")

MODULES_ENV = "RAY_CKPT_WARM_MODULES"  # in workers: modules to import, separated by commas
ID_ENV = "RAY_CKPT_WARM_ID"  # in workers: differs between the trainers of a driver
OF_EVERY_RANK = ("ray.train.torch", "ray_ckpt.trainer.checkpointer", "ray_ckpt.actors.agent.actor")
OF_FIRST_STEP = ("torch._dynamo",)  # an optimizer imports it when it is made or does its first step
OTHER_PYTHONS = {  # fields of a runtime environment
    *("conda", "container", "image_uri", "pip", "py_executable", "uv"),
    *("nsight", "_nsight", "rocprof_sys", "_rocprof_sys"),
}
DELAY_S = 20.0  # after a group's begin, which needs the cores
START_S = 1.0  # Ray has begun to start a process, which imports torch for longer than that
END_S = 10.0  # for the news that an actor is dead
MAX_TRIES = 2  # to start a process: the first may have ended one that had waited
JOINED_S, JOINED_NODE_S = 60.0, 0.03  # between two looks for nodes that have joined; for each node at least
MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z")

threads_at_start = 0  # of torch in this process, before the modules of the user were imported


class WarmWorkers(ControllerCallback, WorkerGroupCallback, WorkerCallback):  # type: ignore[misc]
    """Lets the next group of a trainer start in processes that have imported torch and your modules.

        warm = WarmWorkers("transformers", "my_project.training")
        RunConfig(worker_runtime_env=warm.runtime_env(), callbacks=[CheckpointCallback(), warm])

    DELAY_S after each begin of a group, each rank starts such a process on its node, and rank 0 starts as
    many as a node has ranks on `idle_nodes` nodes without ranks that have the resources of a worker. Ray ends
    a process that waits if its node has more of them than free CPUs.

    `modules` are imported in the order given, after torch, before the process knows its rank or its GPUs, so
    they may not look for GPUs when they are imported. They have to be installed on the nodes, or in the
    `working_dir` or `py_modules` of the runtime environment. One that cannot be imported is left to the
    program. `python` is the command of Python on the nodes, by default the path of the one that runs the
    driver.

    Raises ConfigError for wrong arguments, such as a name that is no module's; the run raises it if the
    workers have another Python.
    """

    def __init__(self, *modules: str, idle_nodes: int = 1, python: str | None = None) -> None:
        for name in modules:
            if not isinstance(name, str) or not MODULE.match(name):
                raise ConfigError(
                    f"{name!r} is not the name of a module.",
                    hint='Give each name by itself: WarmWorkers("transformers", "my_project.training").',
                    option="modules",
                )
        if not isinstance(idle_nodes, int) or isinstance(idle_nodes, bool) or idle_nodes < 0:
            raise ConfigError(
                f"idle_nodes is {idle_nodes!r}.", hint="Set it to an int of 0 or more.", option="idle_nodes"
            )
        self._modules = ",".join((*OF_EVERY_RANK, *OF_FIRST_STEP, *modules))
        self._idle_nodes = idle_nodes
        self._python = python or shlex.quote(sys.executable)
        self._id = uuid.uuid4().hex
        # Set in the controller, and copied to the workers:
        self._nodes: list[str] = []  # by rank
        self._needed: Mapping[str, float] = {}  # resources of a worker
        self._ended: threading.Event | None = None  # set in a worker; not copied

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ended": None}

    def runtime_env(self, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return `base` with what RunConfig(worker_runtime_env=...) needs.

        Raises ConfigError if it has a Python, or variables that are no mapping.
        """
        env = dict(base or {})
        _check_python(env)
        variables, known = {MODULES_ENV: self._modules, ID_ENV: self._id}, env.get("env_vars", {})
        if not isinstance(known, Mapping):
            raise ConfigError(
                f"The runtime environment has env_vars {known!r}.",
                hint="Give a dict of variables, or leave env_vars out.",
                option="env_vars",
            )
        env["env_vars"] = {**known, **variables}
        env["py_executable"] = f"{self._python} -m ray_ckpt.train.warm_start"
        return env

    # -- in the controller -----------------------------------------------------------------------------

    def after_controller_start(self, train_run_context: Any) -> None:
        """Raise ConfigError, which ends the run, unless its workers start as `runtime_env` says."""
        _check_python(ray.get_runtime_context().runtime_env)  # workers inherit it
        variables = (train_run_context.run_config.worker_runtime_env or {}).get("env_vars") or {}
        if variables.get(ID_ENV) != self._id:
            raise ConfigError(
                "The trainer has WarmWorkers, but not the runtime environment that they need.",
                hint="Give it to the trainer: RunConfig(worker_runtime_env=warm.runtime_env()).",
            )

    def before_init_train_context(self, workers: list[Any]) -> dict[str, list[Any]]:
        """Note where the ranks are; none if Ray Train replaces a single one, as it does for torchft."""
        ranks = {worker.distributed_context.world_rank: worker for worker in workers}
        is_whole = all(worker.distributed_context.world_size == len(ranks) for worker in workers)
        self._nodes = [ranks[rank].metadata.node_id for rank in sorted(ranks)] if is_whole else []
        self._needed = workers[0].resources
        return {}

    # -- in the workers --------------------------------------------------------------------------------

    def after_init_train_context(self) -> None:
        try:
            _set_threads()
            if not self._nodes:
                return
            self._ended = threading.Event()
            rank, env = ray.train.get_context().get_world_rank(), ray.get_runtime_context().runtime_env
            arguments = rank, env, self._ended
            threading.Thread(target=self._start, args=arguments, name="warm", daemon=True).start()
        except Exception as error:  # training goes on
            log.warning("no process will wait for the next group: %s", error)

    def before_worker_shutdown(self) -> None:
        if self._ended is not None:
            self._ended.set()

    def _start(self, rank: int, env: Mapping[str, Any], ended: threading.Event) -> None:
        """Start a process on the node of a rank; rank 0 also starts those on idle nodes."""
        if ended.wait(DELAY_S):
            return
        try:
            start([self._nodes[rank]], env)
            if rank == 0 and self._idle_nodes:
                self._start_on_idle(env, ended)
        except Exception as error:  # training goes on
            log.warning("no process waits for the next group: %s", error)

    def _start_on_idle(self, env: Mapping[str, Any], ended: threading.Event) -> None:
        """Start processes on idle nodes, and on those that join if there were too few."""
        most = max(Counter(self._nodes).values())
        chosen: set[str] = set()
        wait_s = 0.0
        while not ended.wait(wait_s):
            nodes = ray.nodes()
            places = [node for node in find_places(nodes, self._needed) if node not in self._nodes]
            chosen.intersection_update(places)
            joined = [node for node in places if node not in chosen][: self._idle_nodes - len(chosen)]
            start([node for node in joined for _ in range(most)], env)
            chosen.update(joined)
            wait_s = max(JOINED_S, JOINED_NODE_S * len(nodes))


def start(nodes: Sequence[str], env: Mapping[str, Any]) -> None:
    """Let Ray start a process with a runtime environment on each of the nodes, which may repeat.

    Must be called in a task or an actor with that environment. An actor that has run all the same has taken a
    process that waited, which ends with it, so another one is started.
    """
    for _ in range(MAX_TRIES):
        if not nodes:
            return
        actors = [_never(node, env) for node in nodes]
        answers = [actor.__ray_ready__.remote() for actor in actors]
        ray.wait(answers, num_returns=len(answers), timeout=START_S)
        for actor in actors:
            ray.kill(actor)
        ray.wait(answers, num_returns=len(answers), timeout=END_S)
        nodes = [node for node, answer in zip(nodes, answers, strict=True) if _has_run(answer)]


def _never(node: str, env: Mapping[str, Any]) -> Any:
    place = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(_Never).options(num_cpus=0, runtime_env=env, scheduling_strategy=place).remote()


class _Never:
    """An actor that is killed before Ray has made it."""


def _has_run(answer: Any) -> bool:
    """Return whether the actor of an answer was made before it was killed, as far as Ray tells."""
    try:
        ray.get(answer, timeout=0)
    except RayActorError as error:
        return "never ran" not in str(error)
    except Exception:
        return False
    return True


def find_places(nodes: Sequence[Mapping[str, Any]], needed: Mapping[str, float]) -> list[str]:
    """Return the live nodes of `ray.nodes()` with the resources of a worker, always in the same order."""
    return sorted(
        node["NodeID"]
        for node in nodes
        if node["Alive"] and all(node["Resources"].get(name, 0.0) >= least for name, least in needed.items())
    )


def _check_python(env: Mapping[str, Any]) -> None:
    if taken := sorted(env.keys() & OTHER_PYTHONS):
        raise ConfigError(
            f"WarmWorkers cannot start workers whose runtime environment has {', '.join(taken)}.",
            hint="Install packages in the image; give another interpreter as WarmWorkers(python=...).",
        )


def _set_threads() -> None:
    """Give torch the number of threads that Ray has set since torch was imported, unless it was changed."""
    threads, torch = os.environ.get("OMP_NUM_THREADS", ""), sys.modules.get("torch")
    if threads.isdecimal() and int(threads) and torch and torch.get_num_threads() == threads_at_start:
        torch.set_num_threads(int(threads))
