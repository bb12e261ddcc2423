"""Names in Ray, with the protocol version, so that another version starts a separate service."""

from __future__ import annotations

import functools
from typing import Any

import ray

PROTOCOL_VERSION = 26
NAMESPACE = "ray_ckpt"
COORDINATOR = f"coordinator-v{PROTOCOL_VERSION}"
AGENT_PREFIX = f"agent-v{PROTOCOL_VERSION}-"


def agent_name(node_id: str) -> str:
    return f"{AGENT_PREFIX}{node_id}"


@functools.cache
def actor_class(kind: type) -> Any:
    """Return `kind` as a Ray actor class; cached, since Ray keeps each class as long as the process lives."""
    return ray.remote(kind)
