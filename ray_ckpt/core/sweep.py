"""Sweep of the storage path: find directories and uploads that no checkpoint needs, and delete them.

Only committed checkpoints are uploaded, and names are never reused. So an unfinished upload is needed only
while its checkpoint is being drained or mended, and a directory only while its checkpoint is in the log and
not collected. A late upload may bring a directory back after the collection.

The log never takes back that a checkpoint is durable, retired or collected, so a coordinator may delete by
these states at any time. A directory that the log does not name may become a checkpoint: another coordinator
may have written to the log since the last read. The sweep first names such a directory in a `note` record. A
confirmed note proves that no other coordinator has written to the log since before the listing, so the
directory belongs to no checkpoint. A directory that is older than the run's first session belonged to a log
that no longer exists; the sweep leaves such a directory, because a user may still want its files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import inf

from ray_ckpt.core.context import Context
from ray_ckpt.core.messages import DeleteOrphans, RemoteListed, SweepRemote, Warn
from ray_ckpt.core.values import UnfinishedUpload
from ray_ckpt.format.names import attempt_of, whole_directory
from ray_ckpt.format.records import Note
from ray_ckpt.types import CheckpointInfo, Level

SWEEP_EVERY_S = 3600.0  # between complete listings; stores bill leftovers by the month
SWEEP_SOON_S = 30.0  # least time between listings, however many drains end; doubled per failure
MAX_DOUBLINGS = 7  # doublings of SWEEP_SOON_S: enough to exceed SWEEP_EVERY_S
ORPHAN_AGE_S = 24 * 3600.0  # longer than any upload and than any clock error
MAX_SWEPT = 1_000  # directories and uploads in one order: a minute of work for a store
MAX_NAMED = 5  # directories in a record or a warning


class Sweeps:
    """Issuer of listing orders, one at a time, and of the deletions that follow from a listing."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._ordered_s = -inf
        self._ordered_wall_s = 0.0
        self._all_ordered_s = -inf  # when the last listing with directories was ordered
        self._number = 0  # number of the last listing
        self._is_listing = False
        self._has_news = False  # an upload may have been left unfinished since the last listing
        self._failures = 0  # consecutive failed listings
        self._unconfirmed: tuple[Note, tuple[str, ...]] | None = None  # a note and its directories

    def became_durable(self) -> None:
        """Record that a checkpoint's unfinished uploads, if any, are now useless."""
        self._has_news = True

    @property
    def is_under_way(self) -> bool:
        """Return True while the answer to a listing may still come."""
        return self._is_listing and self._context.now_s - self._ordered_s < SWEEP_SOON_S

    def order_listing(self, wall_s: float, *, is_end: bool = False) -> Iterator[SweepRemote]:
        """Order a listing if a listing is due.

        At the end of a run, a listing is due at once if there may be unfinished uploads, because this may be
        the last chance. The run machine calls this method only while no record is pending, so not before a
        note is confirmed. If the answer to a listing is not here by the next regular time, the next listing
        replaces it.
        """
        if self._context.now_s - self._ordered_s >= self._wait_s(is_end=is_end):
            self._ordered_s, self._ordered_wall_s = self._context.now_s, wall_s
            self._is_listing, self._has_news = True, False
            self._number += 1
            is_all = self._ordered_s - self._all_ordered_s >= SWEEP_EVERY_S
            if is_all:
                self._all_ordered_s = self._ordered_s
            yield SweepRemote(number=self._number, uploads_only=not is_all)

    def _wait_s(self, *, is_end: bool) -> float:
        if not self._has_news or self._is_listing:
            return SWEEP_EVERY_S
        if is_end and not self._failures:
            return 0.0
        return min(SWEEP_SOON_S * 2.0**self._failures, SWEEP_EVERY_S)

    def listed(
        self,
        event: RemoteListed,
        *,
        uploading: Collection[str],
        may_come: Callable[[str], bool] | None,
    ) -> Iterator[DeleteOrphans | Warn]:
        """Delete what the log proves useless, and append a note about old directories not in the log.

        Nodes may upload files of the attempts in `uploading`. `may_come` returns True for an attempt not in
        the log that may be committed; None: not known yet.
        """
        if not self._is_listing or event.number != self._number:
            return
        self._is_listing = False
        if event.error is not None:
            yield from self._failed(event.error)
            return
        self._failures = 0
        old = {name: age_s for name, age_s in sorted(event.directories.items()) if age_s >= ORPHAN_AGE_S}
        uploads = [upload for upload in event.uploads if self._is_useless(upload, uploading)]
        yield from self._delete([name for name in old if self._is_collected(name)], uploads)
        if may_come is not None:
            unknown = {
                name: age_s
                for name, age_s in old.items()
                if self._known(name) is None and not may_come(attempt_of(name))
            }
            yield from self._sort_out(unknown)

    def _failed(self, error: str) -> Iterator[Warn]:
        self._has_news, self._failures = True, min(self._failures + 1, MAX_DOUBLINGS)
        self._all_ordered_s = -inf  # the failed listing may have included directories
        yield from self._context.warn_once(f"The storage path could not be listed: {error}")

    def _sort_out(self, unknown: Mapping[str, float]) -> Iterator[Warn]:
        """Warn of directories that are older than the log; append a note about the others."""
        older = [name for name, age_s in unknown.items() if self._is_older(age_s)]
        yield from self._warn_older(older)
        self._append_note([name for name in unknown if name not in older])

    def _is_collected(self, directory: str) -> bool:
        checkpoint = self._known(directory)
        return checkpoint is not None and checkpoint.state == "collected"

    def _is_useless(self, upload: UnfinishedUpload, uploading: Collection[str]) -> bool:
        if upload.age_s >= ORPHAN_AGE_S:
            return True
        checkpoint = self._known(upload.directory)
        if checkpoint is None or checkpoint.id.attempt in uploading:
            return False
        is_there = checkpoint.exported if "." in upload.directory else checkpoint.level >= Level.DURABLE
        return bool(is_there) or checkpoint.state in ("retired", "collected")

    def _known(self, directory: str) -> CheckpointInfo | None:
        """Return the checkpoint of which a directory has all or some items, if the log has it."""
        whole = whole_directory(directory)
        checkpoint = self._context.history.checkpoints.get(attempt_of(whole)) if whole else None
        return checkpoint if checkpoint is not None and checkpoint.directory == whole else None

    def _is_older(self, age_s: float) -> bool:
        """Return True if a directory of this age is older than the run's log, within the error of clocks.

        `age_s` counts from the time of the listing's order, because the answer may have taken long.
        """
        first = next(iter(self._context.history.sessions.values()), None)
        return first is None or self._ordered_wall_s - age_s < first.opened_at_s

    def _delete(
        self, directories: Sequence[str], uploads: Sequence[UnfinishedUpload]
    ) -> Iterator[DeleteOrphans]:
        """Delete at most MAX_SWEPT directories and uploads; the next listing finds the rest."""
        aborted = tuple(uploads[:MAX_SWEPT])
        deleted = tuple(directories[: MAX_SWEPT - len(aborted)])
        if aborted or deleted:
            yield DeleteOrphans(directories=deleted, uploads=aborted)

    def _warn_older(self, directories: Sequence[str]) -> Iterator[Warn]:
        if directories:
            yield from self._context.warn_once(
                f"{len(directories)} checkpoint(s) on the storage path are older than this run's log and are "
                f"left alone: {_named(directories)}. Delete them yourself if nobody needs them."
            )

    def _append_note(self, directories: Sequence[str]) -> None:
        if directories:
            chosen = tuple(directories[:MAX_SWEPT])
            text = f"deletes {len(chosen)} orphan(s) from the storage path: {_named(chosen)}"
            self._unconfirmed = Note(text=text), chosen
            self._context.ledger.append(self._unconfirmed[0])

    def noted(self, note: Note) -> Iterator[DeleteOrphans]:
        """Delete the directories that a confirmed note names.

        No other coordinator has written to the log since before the directories were listed.
        """
        if self._unconfirmed is not None and note == self._unconfirmed[0]:
            (_, directories), self._unconfirmed = self._unconfirmed, None
            yield DeleteOrphans(directories=directories, uploads=())


def _named(directories: Sequence[str]) -> str:
    more = ", ..." if len(directories) > MAX_NAMED else ""
    return ", ".join(directories[:MAX_NAMED]) + more
