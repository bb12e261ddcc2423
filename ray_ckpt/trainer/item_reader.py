"""Read from a checkpoint the state with which a rank continues or begins."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from ray_ckpt.capture.items import Item
from ray_ckpt.capture.load import Load, SavedState, load_items, wanted_trees
from ray_ckpt.capture.walk import Walked
from ray_ckpt.errors import ConfigError, FormatError, MismatchError, RestoreError
from ray_ckpt.format.names import state_file
from ray_ckpt.format.tree import decode_state
from ray_ckpt.restore.manifest import PartialRows, SavedRows
from ray_ckpt.restore.reader import FileSource, ProgressLog, RestoreTicket, SourceReader
from ray_ckpt.texts import did_you_mean
from ray_ckpt.trainer.link import RestoreLink
from ray_ckpt.types import GroupPart, RankRestore, ranks_of

log = logging.getLogger("ray_ckpt")

REREAD_S = (2.0, 4.0, 8.0, 16.0)  # pauses before a source that was not reached is tried again; 30 s in all


@dataclass(frozen=True, slots=True)
class ItemReader:
    """Reads checkpoints for the items of one rank."""

    link: RestoreLink
    items: Mapping[str, Item]
    walked: Walked | None = None  # an earlier walk of the items

    def read_all(self, ticket: RestoreTicket) -> tuple[RankRestore, Load]:
        """Read every item's state. If the report lists damage, `Load` does nothing."""
        return self._read(ticket, self._all_items)

    def read_named(self, ticket: RestoreTicket, names: Sequence[str]) -> tuple[RankRestore, Load]:
        """Read only the named items. Raises ConfigError if this rank or the checkpoint lacks an item."""
        return self._read(ticket, partial(self._named_items, names))

    def _read(self, ticket: RestoreTicket, choose: _Choose) -> tuple[RankRestore, Load]:
        start_s = time.monotonic()
        identity = self.link.identity
        load: Load = _nothing
        if ticket.checkpoint is None or ticket.damage:
            damage, unreachable = ticket.damage, ticket.is_unreachable
            return RankRestore(rank=identity.rank, damage=damage, is_unreachable=unreachable), load
        try:
            states = self._states(ticket)
            reader, rows = states.reader, states.rows
            chosen = choose(states)
            if chosen is not None:
                items, state = chosen
                load = load_items(
                    items,
                    state,
                    rows,
                    reader,
                    rank=identity.rank,
                    world_size=identity.world_size,
                    node_ranks=ticket.node_ranks,
                    ranks=identity.ranks,
                    anew=self.link.options.anew,
                    before=self.walked,
                )
        except _Damaged as error:
            damage, unreachable = error.damage, error.is_unreachable
            return RankRestore(rank=identity.rank, damage=damage, is_unreachable=unreachable), _nothing
        for note in reader.rejected:
            log.warning("restore: %s", note)
        report = RankRestore(
            rank=identity.rank,
            parts=tuple(reader.parts),
            seconds=time.monotonic() - start_s,
            damage=tuple(reader.damage),
            is_unreachable=reader.is_unreachable,
            bad_nodes=tuple(sorted(reader.bad_nodes)),
        )
        return report, load

    def saved(self, find_ticket: Callable[[], RestoreTicket | None]) -> SavedState | None:
        """Return the saved items of this rank without a byte of their tensors; None without a ticket.

        While a source of them is not reached, they are read again after each of REREAD_S. Raises RestoreError
        if they cannot be read from any source.
        """
        pauses_s = list(reversed(REREAD_S))
        while (ticket := find_ticket()) is not None:
            found = self._saved(ticket)
            if isinstance(found, SavedState):
                return found
            if not (found.is_unreachable and pauses_s):
                raise RestoreError(
                    f"The state of rank {self.link.identity.rank} cannot be read.",
                    hint="`ray-ckpt verify` shows the damage; resume='step:N' takes an older checkpoint.",
                    damage=found.damage,
                )
            pause_s = pauses_s.pop()
            log.warning("the state is read again in %.0f s: no source was reached: %s", pause_s, found)
            time.sleep(pause_s)
        return None

    def _saved(self, ticket: RestoreTicket) -> SavedState | _Damaged:
        if ticket.damage:  # then the ticket has no manifest
            return _Damaged(ticket.damage, is_unreachable=ticket.is_unreachable)
        try:
            states = self._states(ticket)
            if (state := self._own_state(states)) is not None:
                return SavedState.of(state["items"], states.rows)
        except _Damaged as error:
            return error
        reader = states.reader
        return _Damaged(tuple(reader.damage), is_unreachable=reader.is_unreachable)

    def _states(self, ticket: RestoreTicket) -> _States:
        """Return the state files and the manifest of a ticket's checkpoint."""
        checkpoint = ticket.checkpoint
        assert checkpoint is not None
        sources: dict[str, Sequence[FileSource]] = dict(ticket.sources)
        reader = SourceReader(
            checkpoint.id,
            sources,
            credentials=ticket.credentials,
            remote=ticket.remote,
            fetch=partial(self.link.fetch, ticket.session_key),
            progress=ProgressLog(checkpoint.step, log=log.info),
        )
        return _States(reader, self._rows(ticket, sources), checkpoint.world_size)

    def _rows(self, ticket: RestoreTicket, sources: dict[str, Sequence[FileSource]]) -> SavedRows:
        """Return the rows of the ticket; when they are completed, `sources` gets those of all files."""
        rows = _opened(ticket)
        if ticket.is_whole:
            return rows

        def complete() -> SavedRows:
            whole = self.link.whole_ticket(ticket.session_key)
            if whole.damage:
                raise _Damaged(whole.damage, is_unreachable=whole.is_unreachable)
            sources.update(whole.sources)
            return _opened(whole)

        return PartialRows(rows, complete)

    def _warn_of_unknown(self, saved: Collection[str]) -> None:
        """Log names in the option `anew` of no item. No error: a dropped item is in no later checkpoint."""
        identity, known = self.link.identity, sorted({*self.items, *saved})
        if identity.parts or identity.rank:  # with parts, another part may have the item
            return
        for name in (name for name in self.link.options.anew if name not in known):
            hint = did_you_mean(name, known)
            log.warning("anew has %s, which is neither registered nor in the checkpoint. %s", name, hint)

    def _all_items(self, states: _States) -> tuple[Mapping[str, Item], dict[str, Any]] | None:
        """Return the state of this rank, or for a new rank of the first in its part; None if unreadable."""
        state = self._own_state(states)
        if state is not None:
            self._warn_of_unknown(state["items"])
        if state is not None and any(item.is_partial for item in self.items.values()):
            state["items"] = wanted_trees(self.items, state["items"])
        if state is None or _has_gradients(state):
            return None if state is None else (self.items, state)
        state["items"].pop("gradients", None)  # empty outside a window: any `partial_grads` fits
        return {name: item for name, item in self.items.items() if name != "gradients"}, state

    def _own_state(self, states: _States) -> dict[str, Any] | None:
        identity, world_size = self.link.identity, states.world_size
        if not identity.parts:
            return states.of(identity.rank if identity.rank < world_size else 0)
        any_state = states.of(identity.rank if identity.rank < world_size else 0)
        if any_state is None:
            return None
        saved = {part.name: part for part in _parts(any_state)}
        if identity.part not in saved:
            raise MismatchError(
                f"The checkpoint has the parts {', '.join(sorted(saved))} and not {identity.part!r}.",
                hint="Connect with the parts of the run that saved it, or start another run name.",
            )
        ranks = ranks_of(tuple(saved.values()), identity.part, world_size)
        index, first = identity.rank - identity.ranks[0], identity.ranks[0]
        state = states.of(ranks[index] if index < len(ranks) else ranks[0])
        return None if state is None else {**state, "world_size": first + len(ranks)}  # size of this part

    def _named_items(
        self, names: Sequence[str], states: _States
    ) -> tuple[Mapping[str, Item], dict[str, Any]] | None:
        """Return items from the state of the same rank, or else of the first rank of its part."""
        own = states.of(self.link.identity.rank if self.link.identity.rank < states.world_size else 0)
        if own is None:
            return None
        saved, classes, first = dict(own["items"]), dict(own.get("classes", {})), 0
        for part in _parts(own):
            other = states.of(first)
            if other is None:
                return None
            saved, first = {**other["items"], **saved}, first + part.world_size
            classes = {**other.get("classes", {}), **classes}
        self._warn_of_unknown(saved)
        here = [name for name in names if name in self.items]
        if not self.link.identity.parts:  # with parts, another part may have the item
            _need_all(names, self.items, "registered with the Checkpointer")
        _need_all([name for name in here if name not in self.link.options.anew], saved, "in the checkpoint")
        state = {**own, "items": {name: saved[name] for name in here}, "classes": classes}
        return {name: self.items[name] for name in here}, state


@dataclass(frozen=True, slots=True)
class _States:
    """The state files of a checkpoint."""

    reader: SourceReader
    rows: SavedRows
    world_size: int

    def of(self, rank: int) -> dict[str, Any] | None:
        """Return the decoded state file of that rank; None if no source has an intact copy."""
        wanted = state_file(rank, self.world_size)
        rows = self.rows.of_file(wanted)
        if not rows and self.rows.complete():
            rows = self.rows.of_file(wanted)
        data = self.reader.read_bytes(rows[0]) if rows else None
        try:
            return None if data is None else decode_state(data)
        except FormatError as error:
            raise error.at(wanted) from error


class _Damaged(Exception):
    """Raised if the manifest of a checkpoint cannot be read, and what `saved` could not read."""

    def __init__(self, damage: tuple[str, ...], *, is_unreachable: bool) -> None:
        super().__init__(*damage)
        self.damage = damage
        self.is_unreachable = is_unreachable


def _opened(ticket: RestoreTicket) -> SavedRows:
    assert ticket.manifest is not None
    try:
        return ticket.manifest.open()
    except OSError as error:  # the agent has died, or the session is over
        text = f"the manifest in the agent's memory cannot be mapped: {error}"
        raise _Damaged((text,), is_unreachable=True) from error


_Choose: TypeAlias = Callable[[_States], tuple[Mapping[str, Item], dict[str, Any]] | None]


def _parts(state: Mapping[str, Any]) -> tuple[GroupPart, ...]:
    """Return the parts of the group that saved the state; () for a group without parts."""
    return tuple(GroupPart(**part) for part in state.get("parts", ()))


def _has_gradients(state: Mapping[str, Any]) -> bool:
    """Return True for a checkpoint from the middle of an accumulation window."""
    saved = state["items"].get("gradients")
    return saved is not None and bool(saved["gradients"])


def _need_all(names: Sequence[str], known: Mapping[str, Any], where: str) -> None:
    missing = [name for name in names if name not in known]
    if missing:
        raise ConfigError(
            f"init_items has {', '.join(missing)}, which is not {where}.",
            hint=f"There are {', '.join(sorted(known))}.",
            option="init_items",
        )


def _nothing() -> Set[str]:
    """Load nothing, because nothing was read."""
    return frozenset()
