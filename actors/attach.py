"""Attach a process outside of the cluster, such as the command line, to the service of a cluster.

Each wait has a limit. Ray waits minutes for a missing cluster and then ends the process, so this module first
checks the address.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import ray

from ray_ckpt.actors import names
from ray_ckpt.actors import ray_cluster as ray_state
from ray_ckpt.actors.client import get_result
from ray_ckpt.actors.messages import ServiceView
from ray_ckpt.errors import ConfigError, ServiceError, Unavailable

CONNECT_S = 5.0  # until the cluster's port answers
HELLO_S = 10.0  # until the process at the port has answered as Ray does
ANSWER_S = 60.0  # longest wait for the coordinator, which may be waiting for agents
END_S = 30.0  # longest wait for agents to exit, and for Ray to detect the end of an actor
POLL_S = 0.2  # between checks whether the actors have ended

_SERVICE = re.compile(r"coordinator-v(\d+)")
_TOKEN_HINT = (
    "Set RAY_AUTH_MODE=token, and give the token that `ray get-auth-token` prints on a node of it: in "
    "RAY_AUTH_TOKEN, in the file that RAY_AUTH_TOKEN_PATH names, or in ~/.ray/auth_token."
)


@contextlib.contextmanager
def attached(address: str | None = None) -> Iterator[str]:
    """Make this process a driver of the cluster at `address`, or of the cluster that Ray finds.

    Yields the cluster's address. A process that is already a driver stays a driver. ConfigError if there is
    no cluster; Unavailable if the cluster does not answer. Within the context, stdout goes to stderr, since
    Ray prints to stdout whenever a process of the cluster dies.
    """
    with contextlib.redirect_stdout(sys.stderr), _driver(address) as where:
        yield where


def is_named(address: str | None) -> bool:
    """Return whether `address` or RAY_ADDRESS names the cluster; otherwise `attached` looks for a cluster."""
    return any(name not in (None, "", "auto") for name in (address, os.environ.get("RAY_ADDRESS")))


@contextlib.contextmanager
def _driver(address: str | None) -> Iterator[str]:
    if ray.is_initialized():
        yield str(ray.get_runtime_context().gcs_address)
        return
    where = address if address not in (None, "", "auto") else ray_state.find_cluster()
    if where is None:
        raise ConfigError(
            "There is no Ray cluster on this machine.",
            hint="Give --address HOST:PORT or RAY_ADDRESS, or run it on a node of the cluster.",
        )
    _check_answers(where)
    try:
        ray.init(address=where, log_to_driver=False, logging_level=logging.ERROR)
    except (Exception, SystemExit) as error:  # Ray ends the process if it cannot connect
        raise Unavailable(
            f"Ray does not connect to the cluster at {where}: {error}",
            hint="Run it on a node of the cluster, with the cluster's versions of Ray and Python.",
        ) from None
    try:
        yield where
    finally:
        ray.shutdown()


def _check_answers(where: str) -> None:
    """Raise ConfigError or Unavailable unless a Ray cluster listens at the address."""
    hint = "Check with `ray status` that it runs. Name another one with --address HOST:PORT or RAY_ADDRESS."
    host, _, port = where.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"{where!r} is no address of a Ray cluster.", hint="Give HOST:PORT.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise Unavailable(f"No Ray cluster answers at {where}: {error}.", hint=hint) from None
    try:
        _check_is_ray(where, host.strip("[]"))
    except PermissionError as error:
        raise Unavailable(f"The Ray cluster at {where} wants its token: {error}.", hint=_TOKEN_HINT) from None
    except ConnectionError as error:
        message = f"What listens at {where} does not answer as a Ray cluster: {error}."
        raise Unavailable(message, hint=hint) from None


def _check_is_ray(where: str, host: str) -> None:
    """Raise PermissionError or ConnectionError unless Ray answers.

    A cluster on this machine is also tried with this user's token.
    """
    try:
        ray_state.check_answers(where, HELLO_S)
    except PermissionError:
        if not (_is_here(host) and ray_state.use_token()):
            raise
        ray_state.check_answers(where, HELLO_S)


def _is_here(host: str) -> bool:
    """Return whether `host` is an address of this machine, where a process can listen."""
    try:
        socket.create_server((host, 0)).close()
    except OSError:
        return False
    return True


def find_service() -> Any | None:
    """Return the coordinator of this cluster's service, or None if there is no service.

    ServiceError if the cluster has a service of another protocol version.
    """
    with contextlib.suppress(ValueError):
        return ray.get_actor(names.COORDINATOR, namespace=names.NAMESPACE)
    check_versions(_actor_names())
    return None


def check_versions(actors: Iterable[str]) -> None:
    """Raise ServiceError if `actors` has names of services, but of no service of this protocol version."""
    found = {int(service[1]) for name in actors if (service := _SERVICE.fullmatch(name))}
    if found and names.PROTOCOL_VERSION not in found:
        spoken = ", ".join(map(str, sorted(found)))
        raise ServiceError(
            f"The service of this cluster speaks protocol {spoken}, this ray_ckpt {names.PROTOCOL_VERSION}.",
            hint="Use the ray-ckpt of the environment that the training runs in.",
        )


def overview(service: Any) -> ServiceView:
    """Return the view of the service; raise Unavailable if the service does not answer."""
    view: ServiceView = get_result(service.overview.remote(), ANSWER_S)
    return view


def stop(service: Any, *, force: bool) -> ServiceView:
    """End the agents, then the coordinator. Return the view from before.

    Without `force`, ServiceError if the service is in use; then nothing has changed. Ray kills agents that do
    not exit within END_S; their unfinished files stay, as after a crash.
    """
    view: ServiceView = get_result(service.shut_down.remote(force), ANSWER_S)
    agents = _wait_gone(names.AGENT_PREFIX)
    for name in agents:
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(name, namespace=names.NAMESPACE))
    ray.kill(service, no_restart=True)
    if left := (*_wait_gone(names.AGENT_PREFIX), *_wait_gone(names.COORDINATOR)):
        raise Unavailable(f"Ray still has the actors {', '.join(left)} after {END_S:.0f} s.")
    return view


def _wait_gone(prefix: str) -> tuple[str, ...]:
    """Wait for actors with the prefix `prefix` to end. Return those that remain after END_S."""
    until_s = time.monotonic() + END_S
    while True:
        found = tuple(sorted(name for name in _actor_names() if name.startswith(prefix)))
        if not found or time.monotonic() > until_s:
            return found
        time.sleep(POLL_S)


def _actor_names() -> tuple[str, ...]:
    """Return the names of all actors of services, of all protocol versions."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return tuple(actor["name"] for actor in actors if actor["namespace"] == names.NAMESPACE)
