"""Restore one rank together with all other ranks of its group.

All ranks restore the same checkpoint. If a rank finds a part of the checkpoint damaged in every source, the
group starts over with an older checkpoint; if a source was not reached, first with the same one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Set
from dataclasses import dataclass, replace
from functools import partial

from ray_ckpt.capture.classes import check_settings
from ray_ckpt.capture.hyperparameters import Changed, Hyperparameters
from ray_ckpt.capture.load import Load, RestoreInfo
from ray_ckpt.config import is_uri
from ray_ckpt.core.values import SessionKey
from ray_ckpt.data import is_bound_to_world_size
from ray_ckpt.errors import ConfigError, RestoreError
from ray_ckpt.restore.reader import RestoreTicket
from ray_ckpt.texts import size_text, tiers_text
from ray_ckpt.trainer.item_reader import REREAD_S, ItemReader
from ray_ckpt.trainer.link import RestoreLink
from ray_ckpt.trainer.rank_items import RankItems
from ray_ckpt.trainer.waiting import wait_for_restore
from ray_ckpt.types import CheckpointInfo, RankRestore

log = logging.getLogger("ray_ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreResult:
    """The result of a restore: the session that begins with the restore, and the restored checkpoint."""

    session_key: SessionKey
    checkpoint: CheckpointInfo | None  # a checkpoint of this run
    info: RestoreInfo | None  # also for a checkpoint of another run; None: training begins anew
    has_random_state: bool = False  # False: random state is as built


class Restoring:
    """One restore of all items of one rank."""

    def __init__(self, link: RestoreLink, items: RankItems) -> None:
        """Note the hyperparameters as built. Raises ConfigError if the option `keep` matches none of them."""
        self._link = link
        self._items = items
        self._options = link.options
        self._is_first = link.identity.rank == 0
        self._built = Hyperparameters(items.hyperparameter_owners)
        self._built.check(link.options.keep)
        self._reader = ItemReader(link, items.items, items.walked)

    def run(self, ticket: RestoreTicket) -> RestoreResult:
        """Restore the checkpoint of `ticket`, or an older one if the group falls back, and load the state."""
        while True:
            origin = None
            if ticket.checkpoint is None:
                origin = self._link.origin(ticket.session_key)
            report, load = self._reader.read_all(ticket) if origin is None else self._begin_from(origin)
            older = self._report(ticket, report)
            if older is None:
                if report.damage:  # the answer was for a rank of another group
                    raise RestoreError(
                        f"The group goes on from step {step_of(ticket)}, which this rank could not read.",
                        hint="Start the group again.",
                        damage=report.damage,
                    )
                break
            if step_of(older) == step_of(ticket):
                log.warning("step %s is read again: sources of a part were not reached", step_of(ticket))
            else:
                log.warning("step %s has no intact copy of a part; falling back", step_of(ticket))
            ticket = older
        info = self._info(ticket, origin, report)
        begun, not_loaded = load(), self._not_loaded(origin)
        if info is not None:
            if origin is not None and self._is_as_built(begun):
                info = replace(info, metrics={})  # they are of state that was not restored
            info = replace(info, changed=self._changed(begun, not_loaded))
            if self._options.keep:
                check_settings(self._items.items)
            self._log(info)
        return RestoreResult(
            session_key=ticket.session_key,
            checkpoint=ticket.checkpoint,
            info=info,
            has_random_state=info is not None and "rng" not in begun | not_loaded,
        )

    def keep(self, ticket: RestoreTicket, step: int) -> RestoreResult:
        """Begin the session of `ticket` and load nothing: the live state is that after `step`.

        Raises ConfigError if the checkpoint of `ticket` has a later step.
        """
        if step_of(ticket) > step:
            raise ConfigError(
                f"The live state is that of step {step}, and the run has a checkpoint of {step_of(ticket)}.",
                hint="Restore that checkpoint.",
            )
        self._report(ticket, RankRestore(rank=self._link.identity.rank))
        return RestoreResult(session_key=ticket.session_key, checkpoint=ticket.checkpoint, info=None)

    def _report(self, ticket: RestoreTicket, report: RankRestore) -> RestoreTicket | None:
        """Report what this rank has restored, and return the group's answer; see `RestoreLink.restored`."""
        send = partial(self._link.restored, ticket.session_key, report)
        return wait_for_restore(send, self._link, self._options.restore_timeout_s)

    def _begin_from(self, origin: RestoreTicket) -> tuple[RankRestore, Load]:
        """Read the checkpoint of another run that this run begins with; see `Link.origin`.

        While its storage path is not reached, it is read again after each of REREAD_S.
        """
        checkpoint = origin.checkpoint
        assert checkpoint is not None
        is_resumed = is_uri(self._options.resume)
        for pause_s in (*REREAD_S, None):
            if is_resumed:
                report, load = self._reader.read_all(origin)
            else:
                report, load = self._reader.read_named(origin, self._options.init_items)
            if pause_s is None or not report.is_unreachable:
                break
            log.warning("step %s is read again: sources of a part were not reached", checkpoint.step)
            time.sleep(pause_s)
        if report.damage:
            raise RestoreError(
                f"The run cannot begin with step {checkpoint.step} of {checkpoint.id.run_uid}: "
                f"{len(report.damage)} parts cannot be read, the first is {report.damage[0]}.",
                hint="`ray-ckpt verify` shows the damage; name another checkpoint.",
                damage=report.damage,
            )
        return replace(report, origin_step=checkpoint.step if is_resumed else None), load

    def _info(
        self, ticket: RestoreTicket, origin: RestoreTicket | None, report: RankRestore
    ) -> RestoreInfo | None:
        checkpoint = ticket.checkpoint if origin is None else origin.checkpoint
        if checkpoint is None:
            return None
        info = RestoreInfo(
            step=checkpoint.step, metrics=checkpoint.metrics, parts=report.parts, seconds=report.seconds
        )
        if origin is None:
            self._warn_of_other_world(checkpoint)
            return info
        if report.origin_step is not None:
            self._warn_of_other_world(checkpoint)
        return replace(info, step=report.origin_step or 0)

    def _is_as_built(self, begun: Set[str]) -> bool:
        """Return whether this run begins with `init_from`, and all items from there begin anew."""
        chosen = self._items.items.keys() & set(self._options.init_items)
        return self._options.init_from is not None and bool(chosen) and chosen <= begun

    def _not_loaded(self, origin: RestoreTicket | None) -> Set[str]:
        """Return the items that stay as built because `init_from` begins with others only."""
        if origin is None or is_uri(self._options.resume):
            return frozenset()
        return self._items.items.keys() - set(self._options.init_items)

    def _changed(self, begun: Set[str], not_loaded: Set[str]) -> tuple[Changed, ...]:
        """Return the hyperparameters that differ from the built values; the items in `begun` begin anew."""
        keep = (*self._options.keep, *(f"{name}.*" for name in begun))
        try:
            return self._built.loaded(keep, begun | not_loaded)
        except Exception:  # a user's optimizer or schedule may raise any error
            if keep:
                raise
            log.warning("hyperparameters could not be compared", exc_info=True)
            return ()

    def _log(self, info: RestoreInfo) -> None:
        text = tiers_text(info.bytes_by_tier())
        if info.prefetched_bytes:
            text += f"; {size_text(info.prefetched_bytes)} read ahead"
        log.info("restored step %d in %.2f s: %s", info.step, info.seconds, text)
        if self._is_first:
            for changed in info.changed:
                log.warning("hyperparameter %s", changed)

    def _warn_of_other_world(self, checkpoint: CheckpointInfo) -> None:
        world_size = self._link.identity.world_size
        if checkpoint.world_size == world_size or not self._is_first:
            return
        log.warning(
            "step %d was saved by %d ranks and is restored by %d: training goes on as another run would, "
            "and new ranks draw random numbers of their own",
            checkpoint.step,
            checkpoint.world_size,
            world_size,
        )
        for name, obj in self._items.objects.items():
            if is_bound_to_world_size(obj):
                log.warning(
                    "the position of %r belongs to a rank among %d: some samples are now skipped and some "
                    "repeated; use ray_ckpt.data.GlobalBatchSampler",
                    name,
                    checkpoint.world_size,
                )


def called_again(*, is_closed: bool, has_failed: bool) -> ConfigError:
    """Return the error of a call of `restore` after another one, or after `close`."""
    if is_closed or not has_failed:
        when = "after close" if is_closed else "twice"
        return ConfigError(f"restore was called {when}.", hint="Call it once, before the first step.")
    return ConfigError(
        "restore was called again after it had failed.",
        hint="Close this Checkpointer, connect all ranks again, and make a new one.",
    )


def step_of(ticket: RestoreTicket) -> int:
    return ticket.checkpoint.step if ticket.checkpoint else 0
