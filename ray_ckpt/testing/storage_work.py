"""Work outside the run machine: uploads, deletions, listings and reads, each with a fate.

Each method does the work of one effect and returns its value and its failure. Lost work is not done, and
unanswered work looks like a time-out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from ray_ckpt.core import messages as m
from ray_ckpt.core.values import ScrubResult
from ray_ckpt.engine.ports import Failure
from ray_ckpt.format.names import parity_file
from ray_ckpt.storage.log_store import write_snapshot
from ray_ckpt.testing.nodes import Nodes
from ray_ckpt.testing.parts import Fate
from ray_ckpt.testing.stores import START_S, Copy, Disk, Parity, part_of

Ended: TypeAlias = tuple[object, Failure | None]

TIME_OUT = Failure(text="time-out")


class StorageWork(Nodes):
    """The part of a world in which coordinators use storage and disks."""

    def _is_done(self, fate: Fate) -> bool:
        return fate != "lost" and not self.storage.is_away

    def _failure(self, fate: Fate) -> Failure | None:
        return None if self._is_done(fate) and fate == "delivered" else TIME_OUT

    def _upload(self, name: str, drain: m.Drain, fate: Fate) -> Ended:
        """Upload a fragment; a lost call leaves an unfinished upload behind."""
        attempt, index = drain.attempt, drain.node_index
        copy = (attempt.attempt, index)
        node = self.nodes[drain.node_id]
        is_here = node.agent is not None and node.disk.has(copy)
        if self.storage.is_away:
            return None, TIME_OUT
        bad = node.disk.bad_still_files(copy) if is_here else []
        bad = [file for file in bad if not self.storage.has_like(drain.like, attempt.directory, file)]
        if not is_here or bad or copy in node.disk.rotten:
            if node.agent is None:
                return None, Failure(text="the agent died", is_dead=True)
            is_damage = is_here or not node.agent.machine.is_deleted(attempt.attempt)
            return None, Failure(text="it is damaged" if is_here else "not here", is_damage=is_damage)
        if fate == "lost":
            self.storage.leave_upload(attempt, index, drain.items, self.now_s)
            return None, Failure(text="the agent died")
        if drain.items:
            part = part_of(node.disk.fragments[copy].fragment, drain.items)
            self.storage.put_items(attempt, index, drain.items, part.fragment, self.now_s)
            failure = self._failure(fate)
            return None if failure else part, failure
        self.storage.put(attempt, index, node.disk.listed[copy], self.now_s)
        return None, self._failure(fate)

    def _code(self, name: str, work: m.Code, fate: Fate) -> Ended:
        """Compute a parity file, or the files of a lost member, on a node."""
        node, attempt = self.nodes[work.node_id], work.attempt
        if node.agent is None or not node.is_alive:
            return None, Failure(text="the agent died", is_dead=True)
        if node.agent.machine.is_deleted(attempt.attempt):
            return None, Failure(text="it is being deleted there")
        parity = self._read_group(work) if fate != "lost" else None
        if parity is None:
            return None, Failure(text="too many members are lost")
        copy = attempt.attempt, work.node_index
        held, listed = parity.members[work.node_index]
        if work.is_parity:
            node.disk.write(attempt.directory, parity_file(work.node_index, work.num_nodes))
            node.disk.parities[copy] = parity
            self.oracle.coded(node.disk, copy, parity.group)
        else:
            node.disk.write(attempt.directory, *listed)
            node.disk.put(held, listed)
            self._arrived(node, copy)
        return None, None if fate == "delivered" else TIME_OUT

    def _read_group(self, work: m.Code) -> Parity | None:
        """Return what a node reads from the live members of a group; None if it is too little."""
        attempt, places = work.attempt.attempt, work.places
        if not work.is_parity:
            names = places.fragments[places.group.members.index(work.node_index)]
            if disk := self._intact(work.node_id, names, (attempt, work.node_index)):
                copied = disk.fragments[attempt, work.node_index], disk.listed[attempt, work.node_index]
                return Parity(places.group, {work.node_index: copied})
            found = self.decodable(work.attempt, places, work.node_id)
            return found if found is not None and work.node_index in found.members else None
        members = {}
        for member, names in zip(places.group.members, places.fragments, strict=True):
            disk = self._intact(work.node_id, names, (attempt, member))
            if disk is None:
                return None
            members[member] = disk.fragments[attempt, member], disk.listed[attempt, member]
        return Parity(places.group, members)

    def _intact(self, reader: str, names: Iterable[str], copy: Copy) -> Disk | None:
        """Return a disk with a good copy that a node can read, of those of the named nodes, or None."""
        disks = [self.nodes[name].disk for name in names if self._serves(reader, name)]
        return next((disk for disk in disks if disk.has_intact(copy)), None)

    def _describe(self, name: str, work: m.WriteDescription, fate: Fate) -> Ended:
        checkpoint, exported = work.checkpoint, work.exported
        if exported is not None:
            if self.storage.items_root(checkpoint, exported.items) != exported.root_digest:
                return None, Failure(text="a fragment is missing or another", is_damage=True)
            if self._is_done(fate):
                self.storage.describe_items(checkpoint, exported.items, self.now_s)
            return None, self._failure(fate)
        if self.storage.fragments.get(checkpoint.id.attempt) != set(range(checkpoint.num_nodes)):
            return None, Failure(text="a fragment is missing", is_damage=True)
        if self._is_done(fate):
            self.storage.describe(checkpoint, self.now_s)
        return None, self._failure(fate)

    def _delete_remote(self, name: str, work: m.Delete, fate: Fate) -> Ended:
        if self._is_done(fate):
            self.oracle.deletes_remote(work.attempt)
            self.storage.delete(work.directory)
        return None, self._failure(fate)

    def _list_remote(self, name: str, work: m.SweepRemote, fate: Fate) -> Ended:
        if (failure := self._failure(fate)) is not None:
            return None, failure
        listed = self.storage.listed(work.number, self.now_s)
        return replace(listed, directories={}) if work.uploads_only else listed, None

    def _delete_orphans(self, name: str, work: m.DeleteOrphans, fate: Fate) -> Ended:
        if self._is_done(fate):
            self.oracle.sweeps(work, self)
            self.storage.sweep(work)
        return None, None

    def _write_snapshot(self, name: str, work: m.WriteSnapshot, fate: Fate) -> Ended:
        history = self.coordinators[name].machine.history
        if self._is_done(fate) and history.next_seq == work.seq + 1:
            write_snapshot(self.storage.log, history.to_snapshot(START_S + self.now_s))
        return None, self._failure(fate)

    def _scrub(self, name: str, work: m.Scrub, fate: Fate) -> Ended:
        copy, node = (work.attempt.attempt, work.node_index), self.nodes.get(work.place)
        if node is not None:
            if node.agent is None or not node.disk.has(copy):
                return None, Failure(text="not here")
            if node.agent.machine.epoch > self.coordinators[name].machine.epoch:
                return None, Failure(text="a later coordinator is obeyed")
        failure = self._failure(fate)
        if failure is not None or node is None or node.disk.has_intact(copy):
            return None, failure
        shared = tuple((held.attempt, held.node_index) for held in node.disk.quarantine(copy))
        return ScrubResult(damage=("a slice",), shared=shared), None


STORAGE_WORK: Mapping[type, Callable[[Any, str, Any, Fate], Ended]] = {
    m.Code: StorageWork._code,
    m.Drain: StorageWork._upload,
    m.WriteDescription: StorageWork._describe,
    m.Delete: StorageWork._delete_remote,
    m.SweepRemote: StorageWork._list_remote,
    m.DeleteOrphans: StorageWork._delete_orphans,
    m.WriteSnapshot: StorageWork._write_snapshot,
    m.Scrub: StorageWork._scrub,
}
"""Maps each effect type to the method that does its work for the coordinator of the given name."""
