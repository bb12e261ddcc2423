"""Sweeping the storage path: what is left there that no checkpoint needs, and how one can be sure of it.

Only committed checkpoints are uploaded, and names are never used again. So an unfinished upload that an agent
left behind is needed while its checkpoint is being drained, at most; and a directory is needed while its
checkpoint is in the log and not collected. A late upload may bring one back after that.

That the log calls a checkpoint durable, retired or collected stays true, and may be acted on at any time.
That it knows nothing of a directory does not: another coordinator may have written there since. Such a
directory is named in a `note` first. When that is confirmed, nobody else has had the log since before the
directory was listed, so it belongs to no checkpoint. If it is older than the run's first session it was
another log's, which is gone; somebody may still want it, and it stays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from math import inf

from ray_ckpt.core.context import Context
from ray_ckpt.core.messages import DeleteOrphans, RemoteListed, SweepRemote, UnfinishedUpload, Warn
from ray_ckpt.format.names import attempt_of
from ray_ckpt.format.records import Note
from ray_ckpt.types import CheckpointInfo, Level

SWEEP_EVERY_S = 3600.0  # a listing of all that lies there; what is left over is paid for by the month
SWEEP_SOON_S = 30.0  # at least, however fast checkpoints become durable; doubled with each failure
MAX_DOUBLINGS = 7  # of that: beyond SWEEP_EVERY_S
ORPHAN_AGE_S = 24 * 3600.0  # longer than any upload and than the errors of clocks
MAX_SWEPT = 1_000  # directories and uploads in one order: a minute of a store's time
MAX_NAMED = 5  # directories in a record or a warning


class Sweeps:
    """One listing at a time, and what follows from it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._asked_s = -inf
        self._asked_wall_s = 0.0
        self._all_asked_s = -inf  # the last time that directories were asked for too
        self._number = 0  # of the last listing
        self._is_asked = False  # it is under way
        self._has_news = False  # something may have been left behind since the last one
        self._failures = 0  # in a row
        self._unconfirmed: tuple[Note, tuple[str, ...]] | None = None  # with the directories it is about

    def became_durable(self) -> None:
        """What unfinished uploads were for is done."""
        self._has_news = True

    @property
    def is_under_way(self) -> bool:
        """A listing is, and it may still be answered."""
        return self._is_asked and self._context.now_s - self._asked_s < SWEEP_SOON_S

    def ask(self, wall_s: float, *, is_end: bool = False) -> Iterator[SweepRemote]:
        """List if it is time; at the end of a run at once if there are news, because there may be no later.

        Called while nothing waits for the log, so not before a note is confirmed. An answer that has not come
        by the next regular time is not waited for.
        """
        wait_s = SWEEP_EVERY_S
        if self._has_news and not self._is_asked:
            wait_s = (
                0.0 if is_end and not self._failures else min(SWEEP_SOON_S * 2**self._failures, SWEEP_EVERY_S)
            )
        if self._context.now_s - self._asked_s >= wait_s:
            self._asked_s, self._asked_wall_s = self._context.now_s, wall_s
            self._is_asked, self._has_news = True, False
            self._number += 1
            is_all = self._asked_s - self._all_asked_s >= SWEEP_EVERY_S
            if is_all:
                self._all_asked_s = self._asked_s
            yield SweepRemote(number=self._number, uploads_only=not is_all)

    def listed(
        self,
        event: RemoteListed,
        *,
        draining: Collection[str],
        may_come: Callable[[str], bool] | None,
    ) -> Iterator[DeleteOrphans | Warn]:
        """Decide what goes.

        `may_come` tells of an attempt that is not in the log whether it is open or held; None: nobody knows.
        """
        if not self._is_asked or event.number != self._number:
            return
        self._is_asked = False
        if event.error is not None:
            self._has_news, self._failures = True, min(self._failures + 1, MAX_DOUBLINGS)
            self._all_asked_s = -inf  # it may have been that one
            yield from self._context.warn_once(f"The storage path could not be listed: {event.error}")
            return
        self._failures = 0
        uploads = [upload for upload in event.uploads if self._is_useless(upload, draining)]
        old = [name for name, age_s in sorted(event.directories.items()) if age_s >= ORPHAN_AGE_S]
        known = {name: self._known(name) for name in old}
        yield from self._delete([name for name, c in known.items() if c and c.state == "collected"], uploads)
        if may_come is not None:
            unknown = [name for name, c in known.items() if c is None and not may_come(attempt_of(name))]
            is_older = {name: self._is_older(event.directories[name]) for name in unknown}
            yield from self._leave([name for name in unknown if is_older[name]])
            self._ask_log([name for name in unknown if not is_older[name]])

    def _is_useless(self, upload: UnfinishedUpload, draining: Collection[str]) -> bool:
        if upload.age_s >= ORPHAN_AGE_S:
            return True
        checkpoint = self._known(upload.directory)
        if checkpoint is None or checkpoint.id.attempt in draining:
            return False
        return checkpoint.level >= Level.DURABLE or checkpoint.state in ("retired", "collected")

    def _known(self, directory: str) -> CheckpointInfo | None:
        checkpoint = self._context.history.checkpoints.get(attempt_of(directory))
        return checkpoint if checkpoint is not None and checkpoint.directory == directory else None

    def _is_older(self, age_s: float) -> bool:
        """Than this run's log, as far as clocks can tell. The listing may have been on its way for long."""
        first = next(iter(self._context.history.sessions.values()), None)
        return first is None or self._asked_wall_s - age_s < first.opened_at_s

    def _delete(
        self, directories: Sequence[str], uploads: Sequence[UnfinishedUpload]
    ) -> Iterator[DeleteOrphans]:
        """At most MAX_SWEPT of them; the next listing finds the rest."""
        aborted = tuple(uploads[:MAX_SWEPT])
        deleted = tuple(directories[: MAX_SWEPT - len(aborted)])
        if aborted or deleted:
            yield DeleteOrphans(directories=deleted, uploads=aborted)

    def _leave(self, directories: Sequence[str]) -> Iterator[Warn]:
        if directories:
            yield from self._context.warn_once(
                f"{len(directories)} checkpoint(s) on the storage path are older than this run's log and are "
                f"left alone: {_named(directories)}. Delete them yourself if nobody needs them."
            )

    # -- what the log does not know ----------------------------------------------------------------------

    def _ask_log(self, directories: Sequence[str]) -> None:
        if directories:
            chosen = tuple(directories[:MAX_SWEPT])
            text = f"deletes {len(chosen)} orphan(s) from the storage path: {_named(chosen)}"
            self._unconfirmed = Note(text=text), chosen
            self._context.ledger.append(self._unconfirmed[0])

    def noted(self, note: Note) -> Iterator[DeleteOrphans]:
        """A note is confirmed: this coordinator has the log, and had it when the directories were listed."""
        if self._unconfirmed is not None and note == self._unconfirmed[0]:
            (_, directories), self._unconfirmed = self._unconfirmed, None
            yield DeleteOrphans(directories=directories, uploads=())


def _named(directories: Sequence[str]) -> str:
    more = ", ..." if len(directories) > MAX_NAMED else ""
    return ", ".join(directories[:MAX_NAMED]) + more
