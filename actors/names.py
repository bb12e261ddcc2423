"""Names in Ray. They carry the protocol version, so that another version starts its own service beside."""

from __future__ import annotations

PROTOCOL_VERSION = 7
NAMESPACE = "ray_ckpt"
COORDINATOR = f"coordinator-v{PROTOCOL_VERSION}"
AGENT_PREFIX = f"agent-v{PROTOCOL_VERSION}-"


def agent_name(node_id: str) -> str:
    return f"{AGENT_PREFIX}{node_id}"
