"""Free ports for servers that the demo and the tests start."""

from __future__ import annotations

import contextlib
import random
import socket

PORTS = range(20_000, 32_000)  # between the ports of Ray's workers and those of outgoing connections


def free_port() -> int:
    """Return a port of PORTS that no process uses now."""
    while True:
        port = random.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
