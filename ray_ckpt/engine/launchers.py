"""The death of a launcher: end the session of a launcher that has been dead for a while."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ray_ckpt.core import messages as m
from ray_ckpt.engine.ports import LauncherSeen

if TYPE_CHECKING:
    from ray_ckpt.engine.run_host import RunHost

LOOK_EVERY_S = 10.0  # between checks of the launcher
OWNER_DEAD_S = 30.0  # until a dead launcher's session ends; a node's death is noticed sooner, in 14 s


class LauncherWatch:
    """Watch of the launcher that owns the run.

    The death of a launcher ends a session only if the launcher ends its runs itself, as Ray Train's
    controller does. A job may end long before its detached actors.
    """

    def __init__(self, host: RunHost) -> None:
        self._host = host
        self._looked_s = -math.inf
        self._dead: tuple[str, float] = ("", math.inf)  # a dead launcher, and when its death was found

    def ticked(self) -> None:
        now_s, owner = self._host.ports.now_s(), self._host.machine.view.owner
        if owner and now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            self._host.ports.look_for(owner)

    def seen(self, event: LauncherSeen) -> None:
        """Report a launcher that is still dead OWNER_DEAD_S after its death was found."""
        host, now_s = self._host, self._host.ports.now_s()
        if event.owner != host.machine.view.owner or not event.ends_runs:
            return
        if event.is_alive:
            self._dead = ("", math.inf)
        elif self._dead[0] != event.owner:
            self._dead = (event.owner, now_s)
            plan = host.machine.plan  # the group's processes got SIGTERM, but their nodes may stay
            nodes = {node.node_id for node in plan.nodes} if plan else set()
            host.notices.forget_signals(host.machine.history.run_uid, nodes)
        elif now_s - self._dead[1] >= OWNER_DEAD_S:
            host.apply(m.OwnerDied(owner=event.owner))
