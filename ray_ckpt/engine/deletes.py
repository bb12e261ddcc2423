"""Deletions on nodes: one order per node for all deletions that are decided together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n

MAX_DIRECTORIES = 32  # folders in one order: each may take a second, and the answer is due in AGENT_CALL_S


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDeletes:
    """Folders to be deleted on one node; each of `deletes` is answered for its own folder."""

    node: str
    directories: tuple[str, ...]
    deletes: tuple[m.Delete, ...]  # evictions and orphans have no answer
    evicted: tuple[str, ...] = ()  # folders of checkpoints that the storage path keeps

    def order(self, *, epoch: int) -> n.DeleteOrdered:
        return n.DeleteOrdered(directories=self.directories, evicted=self.evicted, epoch=epoch)


def together(effects: Iterable[m.Effect]) -> Iterator[m.Effect | NodeDeletes]:
    """Yield the effects of one decision, with the deletions on each node together and last."""
    by_node: dict[str, dict[str, m.Delete | m.Evict | None]] = {}
    for effect in effects:
        match effect:
            case m.Delete(place=node, directory=directory) if node != m.REMOTE:
                by_node.setdefault(node, {})[directory] = effect
            case m.Evict(node_id=node, attempt=attempt):
                by_node.setdefault(node, {}).setdefault(attempt.directory, effect)
            case m.DeleteLocalOrphans(node_id=node, directories=directories):
                by_node[node] = {**dict.fromkeys(directories), **by_node.get(node, {})}
            case _:
                yield effect
    for node, folders in by_node.items():
        names = tuple(folders)
        for first in range(0, len(names), MAX_DIRECTORIES):
            some = names[first : first + MAX_DIRECTORIES]
            deletes = tuple(found for name in some if isinstance(found := folders[name], m.Delete))
            evicted = tuple(name for name in some if isinstance(folders[name], m.Evict))
            yield NodeDeletes(node=node, directories=some, deletes=deletes, evicted=evicted)


def folders_left(work: NodeDeletes, value: object, failure: str | None) -> dict[str, str]:
    """Return the folders that a node has not deleted, with the reasons.

    `value` is the answer of the node, with the folders that the node could not delete; `failure` is the
    failure of the call, after which all folders count as left.
    """
    if failure is not None:
        return dict.fromkeys(work.directories, failure)
    return dict(value) if isinstance(value, dict) else {}
