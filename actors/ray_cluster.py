"""Read the state of nodes and launchers from Ray; the only module with private calls to Ray's state.

`tests/train/test_ray_compat.py` and `tests/cluster/test_ray_compat.py` test these calls for Ray 2.56 to 2.60.
Functions block; call them from a thread.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import ray
import ray._private.gcs_utils as ray_gcs
import ray._private.services as ray_services
import ray._private.state as ray_state
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from ray_ckpt.config import FAILURE_DOMAIN_LABELS

AUTH_MODE = "RAY_AUTH_MODE"
MAX_REASON = 400  # characters of an error from Ray, or from another program at Ray's port


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesNow:
    """The live nodes of the cluster at `read_s` (monotonic), and the draining nodes among them."""

    live: frozenset[str]
    labels: Mapping[str, Mapping[str, str]]  # of live nodes; a node without labels is missing
    draining: frozenset[str]
    gone_at_s: Mapping[str, float]  # Unix time at which a draining node is gone, if known
    read_s: float
    _domains: dict[str, Mapping[str, str]] = field(default_factory=dict, init=False, repr=False)

    def domains(self, failure_domain: str) -> Mapping[str, str]:
        """Return the failure domain of each live node, "" if it is not known; computed once.

        `failure_domain` is a node label, "auto" (the first of FAILURE_DOMAIN_LABELS that a node has), or
        "none".
        """
        if failure_domain not in self._domains:
            keys = {"auto": FAILURE_DOMAIN_LABELS, "none": ()}.get(failure_domain, (failure_domain,))
            domains = dict.fromkeys(self.live, "")
            for node, labels in self.labels.items():
                domains[node] = next((labels[key] for key in keys if labels.get(key)), "")
            self._domains[failure_domain] = domains
        return self._domains[failure_domain]

    def with_label(self, text: str) -> frozenset[str]:
        """Return the live nodes that have the label `label=value`; none for ""."""
        label, _, value = text.partition("=")
        return frozenset(node for node, labels in self.labels.items() if label and labels.get(label) == value)


def nodes_now() -> NodesNow:
    """Return the live nodes of the cluster."""
    read_s = time.monotonic()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    live = frozenset(node["NodeID"] for node in nodes)
    deadlines_ms = ray_state.state.get_draining_nodes()  # Unix times in ms; 0: no deadline was given
    draining = {node: ms for node, ms in deadlines_ms.items() if node in live}
    return NodesNow(
        live=live,
        labels={node["NodeID"]: labels for node in nodes if (labels := node.get("Labels"))},
        draining=frozenset(draining),
        gone_at_s={node: ms / 1000 for node, ms in draining.items() if ms},
        read_s=read_s,
    )


def owner_here(*, by_job: bool) -> str:
    """Return the name of this process as a launcher: the name of the process's actor, or of its job."""
    context = ray.get_runtime_context()
    actor = None if by_job else context.get_actor_id()
    return f"actor:{actor}" if actor else f"job:{context.get_job_id()}"


def is_controller(owner: str) -> bool:
    """Return whether a launcher is an actor; an actor ends its run itself."""
    return owner.startswith("actor:")


def is_alive(owner: str) -> bool:
    """Return whether a launcher of this cluster is alive."""
    kind, _, name = owner.partition(":")
    if kind == "actor":
        found = ray_state.actors(name)
        return bool(found) and found["State"] != "DEAD"
    return any(job["JobID"] == name and not job["IsDead"] for job in ray_state.jobs())


def find_cluster() -> str | None:
    """Return `host:port` of the cluster that `RAY_ADDRESS` names, or of a cluster on this machine."""
    try:
        found = ray_services.get_ray_address_from_environment("auto", None)
    except ConnectionError:  # no cluster ever ran here; otherwise Ray returns the last cluster's address
        return None
    return None if found in (None, "auto", "local") else str(found)


def check_answers(address: str, timeout_s: float) -> None:
    """Make the first call of a driver to `host:port`, or to `ray://host:port`.

    The call uses the driver's certificates and token. PermissionError if Ray requires a token, or a different
    token; ConnectionError, with the reason, if no Ray answers.
    """
    where = address.removeprefix("ray://")
    try:
        with ray_gcs.create_gcs_channel(where) as channel:
            stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
            stub.GetClusterId(gcs_service_pb2.GetClusterIdRequest(), timeout=timeout_s)
    except grpc.RpcError as error:
        if where != address and error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return  # a server for Ray clients answers, without this call
        refused = PermissionError if error.code() is grpc.StatusCode.UNAUTHENTICATED else ConnectionError
        raise refused(_one_line(error.details() or error.code().name)) from None
    except ray.exceptions.RayError as error:  # an AuthenticationError: no token was found
        raise PermissionError(_one_line(str(error))) from None
    except Exception as error:  # for example, no certificate was found
        raise ConnectionError(_one_line(repr(error))) from None


def use_token() -> bool:
    """Turn on Ray's token authentication in this process, as `ray.init()` does for a found cluster.

    Nothing changes if RAY_AUTH_MODE is set, or if Ray finds no token in RAY_AUTH_TOKEN,
    RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token. Returns whether token authentication was turned on.
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
    raylet.Config.initialize("")  # Ray must read the environment again
    return True


def _one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".")[:MAX_REASON]
