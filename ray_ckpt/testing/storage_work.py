"""Work of a coordinator's shell outside the run machine: uploads, deletions, listings and reads.

Each method carries out one effect and returns the event that answers the effect. `fate` is the fate of the
call: lost work is not done, and unanswered work looks like a time-out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ray_ckpt.core import messages as m
from ray_ckpt.storage.log_store import write_snapshot
from ray_ckpt.testing.nodes import Nodes
from ray_ckpt.testing.parts import Fate
from ray_ckpt.testing.stores import START_S

TIME_OUT = "time-out"


class StorageWork(Nodes):
    """The part of a world in which coordinators use storage and disks."""

    def _is_done(self, fate: Fate) -> bool:
        return fate != "lost" and not self.storage.is_away

    def _error(self, fate: Fate) -> str | None:
        return None if self._is_done(fate) and fate == "delivered" else TIME_OUT

    def _upload(self, name: str, drain: m.Drain, fate: Fate) -> m.DrainEnded:
        """Upload a fragment; a lost call leaves an unfinished upload behind."""
        attempt, index = drain.attempt, drain.node_index
        copy = (attempt.attempt, index)
        node = self.nodes[drain.node_id]
        is_here = node.agent is not None and node.disk.has(copy)
        is_damage = is_here and copy in node.disk.rotten
        error = None
        if self.storage.is_away:
            error = TIME_OUT
        elif not is_here or is_damage:
            error = "it is damaged" if is_damage else "not here"
        elif fate == "lost":
            self.storage.leave_upload(attempt, index, self.now_s)
            error = "the agent died"
        else:
            self.storage.put(attempt, index, self.now_s)
            error = TIME_OUT if fate == "unanswered" else None
        return m.DrainEnded(
            attempt=attempt, node_index=index, node_id=drain.node_id, error=error, is_damage=is_damage
        )

    def _describe(self, name: str, work: m.WriteDescription, fate: Fate) -> m.DescriptionWritten:
        checkpoint, error = work.checkpoint, self._error(fate)
        is_damage = self.storage.fragments.get(checkpoint.id.attempt) != set(range(checkpoint.num_nodes))
        if is_damage:
            error = "a fragment is missing"
        elif self._is_done(fate):
            self.storage.describe(checkpoint, self.now_s)
        return m.DescriptionWritten(attempt=checkpoint.id, error=error, is_damage=is_damage)

    def _delete_remote(self, name: str, work: m.Delete, fate: Fate) -> m.DeleteEnded:
        if self._is_done(fate):
            self.oracle.deletes_remote(work.attempt)
            self.storage.delete(work.directory)
        return m.DeleteEnded(attempt=work.attempt, place=m.REMOTE, error=self._error(fate))

    def _list_remote(self, name: str, work: m.SweepRemote, fate: Fate) -> m.RemoteListed:
        error = self._error(fate)
        if error is not None:
            return m.RemoteListed(number=work.number, error=error)
        listed = self.storage.listed(work.number, self.now_s)
        return replace(listed, directories={}) if work.uploads_only else listed

    def _delete_orphans(self, name: str, work: m.DeleteOrphans, fate: Fate) -> None:
        if self._is_done(fate):
            self.oracle.sweeps(work, self)
            self.storage.sweep(work)

    def _write_snapshot(self, name: str, work: m.WriteSnapshot, fate: Fate) -> m.SnapshotWritten:
        history = self.coordinators[name].machine.history
        if self._is_done(fate) and history.next_seq == work.seq + 1:
            write_snapshot(self.storage.log, history.to_snapshot(START_S + self.now_s))
        return m.SnapshotWritten(seq=work.seq, error=self._error(fate))

    def _scrub(self, name: str, work: m.Scrub, fate: Fate) -> m.ScrubEnded:
        copy, error = (work.attempt.attempt, work.node_index), self._error(fate)
        damage: tuple[str, ...] = ()
        node = self.nodes.get(work.place)
        if node is not None:
            if node.agent is None or not node.disk.has(copy):
                error = "not here"
            elif copy in node.disk.rotten and error is None:
                node.disk.quarantine(copy)
                damage = ("a slice",)
        return m.ScrubEnded(
            attempt=work.attempt, node_index=work.node_index, place=work.place, damage=damage, error=error
        )


STORAGE_WORK: Mapping[type, Callable[[Any, str, Any, Fate], m.Event | None]] = {
    m.Drain: StorageWork._upload,
    m.WriteDescription: StorageWork._describe,
    m.Delete: StorageWork._delete_remote,
    m.SweepRemote: StorageWork._list_remote,
    m.DeleteOrphans: StorageWork._delete_orphans,
    m.WriteSnapshot: StorageWork._write_snapshot,
    m.Scrub: StorageWork._scrub,
}
"""Maps each effect type to the method that carries it out for the coordinator of the given name."""
