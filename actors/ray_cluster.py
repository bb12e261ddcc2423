"""Read the state of nodes and launchers from Ray; the one place with private calls to Ray's state.

`tests/train/test_ray_compat.py` and `tests/cluster/test_ray_compat.py` hold the contract, for Ray 2.56 to
2.60. Functions block; call them from a thread.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import ray
import ray._private.gcs_utils as ray_gcs
import ray._private.services as ray_services
import ray._private.state as ray_state
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from ray_ckpt.config import FAILURE_DOMAIN_LABELS

AUTH_MODE = "RAY_AUTH_MODE"
MAX_REASON = 400  # characters of an error of Ray, or of another program at its port


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesNow:
    """Live nodes, those of them that are draining, and the failure domain of each ("" if not known)."""

    live: tuple[str, ...]
    draining: frozenset[str]
    left_s: Mapping[str, float]  # until a draining node is gone, where that is known
    domains: Mapping[str, str]


def nodes_now(failure_domain: str) -> NodesNow:
    """Return the live nodes of the cluster.

    `failure_domain`: a node label, "auto" (the first of FAILURE_DOMAIN_LABELS that a node has), or "none".
    """
    alive = {node["NodeID"]: node.get("Labels") or {} for node in ray.nodes() if node["Alive"]}
    keys = {"auto": FAILURE_DOMAIN_LABELS, "none": ()}.get(failure_domain, (failure_domain,))
    domains = {
        node: next((labels[key] for key in keys if labels.get(key)), "") for node, labels in alive.items()
    }
    deadlines_ms = ray_state.state.get_draining_nodes()  # Unix time; 0: none was given
    draining = {node: ms for node, ms in deadlines_ms.items() if node in alive}
    return NodesNow(
        live=tuple(sorted(alive)),
        draining=frozenset(draining),
        left_s={node: max(ms / 1000 - time.time(), 0.0) for node, ms in draining.items() if ms},
        domains=domains,
    )


def owner_here(*, by_job: bool) -> str:
    """Return the name of this process as a launcher: its actor, or its job."""
    context = ray.get_runtime_context()
    actor = None if by_job else context.get_actor_id()
    return f"actor:{actor}" if actor else f"job:{context.get_job_id()}"


def is_controller(owner: str) -> bool:
    """Return whether a launcher is an actor, which ends its run itself."""
    return owner.startswith("actor:")


def is_alive(owner: str) -> bool:
    """Return whether a launcher of this cluster is alive."""
    kind, _, name = owner.partition(":")
    if kind == "actor":
        found = ray_state.actors(name)
        return bool(found) and found["State"] != "DEAD"
    return any(job["JobID"] == name and not job["IsDead"] for job in ray_state.jobs())


def find_cluster() -> str | None:
    """Return `host:port` of the cluster that `RAY_ADDRESS` names, or of one on this machine."""
    try:
        found = ray_services.get_ray_address_from_environment("auto", None)
    except ConnectionError:  # none has ever run here; otherwise the last one's address is returned
        return None
    return None if found in (None, "auto", "local") else str(found)


def check_answers(address: str, timeout_s: float) -> None:
    """Make a driver's first call to `host:port`, or to `ray://host:port`.

    Uses the driver's certificates and token. PermissionError if Ray requires a token, or another one;
    ConnectionError, with the reason, if no Ray answers.
    """
    where = address.removeprefix("ray://")
    try:
        with ray_gcs.create_gcs_channel(where) as channel:
            stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
            stub.GetClusterId(gcs_service_pb2.GetClusterIdRequest(), timeout=timeout_s)
    except grpc.RpcError as error:
        if where != address and error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return  # a server of Ray clients has other calls
        refused = PermissionError if error.code() is grpc.StatusCode.UNAUTHENTICATED else ConnectionError
        raise refused(_one_line(error.details() or error.code().name)) from None
    except ray.exceptions.RayError as error:  # AuthenticationError: no token found
        raise PermissionError(_one_line(str(error))) from None
    except Exception as error:  # no certificate found
        raise ConnectionError(_one_line(repr(error))) from None


def use_token() -> bool:
    """Turn on Ray's token authentication in this process, as `ray.init()` does for a cluster that it finds.

    Only if RAY_AUTH_MODE is not set, and there is a token where Ray looks for one: in RAY_AUTH_TOKEN, in
    RAY_AUTH_TOKEN_PATH or in ~/.ray/auth_token. Returns whether it was turned on.
    """
    if AUTH_MODE in os.environ:
        return False
    try:
        raylet: Any = importlib.import_module("ray._raylet")
        if not raylet.AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
            return False
    except (AttributeError, ray.exceptions.RayError):  # an older Ray, or a missing file
        return False
    os.environ[AUTH_MODE] = "token"
    raylet.Config.initialize("")  # Ray has read the environment before
    return True


def _one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".")[:MAX_REASON]
