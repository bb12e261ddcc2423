"""Random schedules with items that are uploaded alone keep the promises, and bugs in them are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ray_ckpt.core import messages as m
from ray_ckpt.core import retention, retirement
from ray_ckpt.core.drain import Drains
from ray_ckpt.core.item_uploads import ItemUploads
from ray_ckpt.format import records as r
from ray_ckpt.testing import storage_work
from ray_ckpt.testing.oracle import Violation
from ray_ckpt.testing.schedules import play
from ray_ckpt.testing.stores import Storage, part_of
from ray_ckpt.types import CheckpointInfo, Level

NUM_SEEDS = 6  # more: python -m ray_ckpt.testing --remote-items 6:2000
MAX_SEEDS = 600  # within which a planted bug must show
FIRST_SEEDS = {  # before which no schedule shows the bug; a change of the schedules moves them
    "a_failed_part_counts": 34,
    "items_of_lost_checkpoints_stay": 553,
}

Plant = Callable[[pytest.MonkeyPatch], None]


def test_promises_hold_in_random_schedules_with_items() -> None:
    exported = commits = 0
    for seed in range(NUM_SEEDS):
        played = play(seed, with_items=True)
        exported, commits = exported + played.num_exported, commits + played.num_commits
    assert exported > NUM_SEEDS and commits > exported


def test_a_schedule_without_items_uploads_none_alone() -> None:
    assert not any(play(seed).num_exported for seed in range(5))


def items_make_a_checkpoint_durable(patch: pytest.MonkeyPatch) -> None:
    def described(self: ItemUploads, event: m.DescriptionWritten, exported: r.Exported) -> Iterator[m.Effect]:
        self._uploads.described(event)
        if event.error is None and exported.attempt in self._context.history.checkpoints:
            op = r.Promote(attempt=exported.attempt, level=Level.DURABLE, replicas=0)
            self._context.ledger.append(op)
        yield from ()

    patch.setattr(ItemUploads, "described", described)


def items_are_recorded_before_they_are_described(patch: pytest.MonkeyPatch) -> None:
    assign = Drains.assign

    def early(self: Drains) -> Iterator[m.Drain | m.WriteDescription]:
        for effect in assign(self):
            if isinstance(effect, m.WriteDescription) and effect.exported is not None:
                self._context.ledger.append(effect.exported)
            yield effect

    patch.setattr(Drains, "assign", early)


def a_failed_part_counts(patch: pytest.MonkeyPatch) -> None:
    def described(self: ItemUploads, event: m.DescriptionWritten, exported: r.Exported) -> Iterator[m.Effect]:
        self._uploads.finish(exported.attempt)
        if self._context.history.checkpoints[exported.attempt].state in ("live", "lost"):
            self._context.ledger.append(exported)
        yield from ()

    patch.setattr(ItemUploads, "described", described)


def a_node_uploads_other_items(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(storage_work, "part_of", lambda source, items: part_of(source, "optimizer"))


def the_newest_items_are_retired(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(retention, "_with_newest_items", lambda view: iter(()))


def items_off_the_lineage_are_retired(patch: pytest.MonkeyPatch) -> None:
    """A restart from an older durable checkpoint deletes newer items."""

    def on_lineage(view: retention.RetentionView) -> Iterator[CheckpointInfo]:
        of_lineage = retention._newest_exported(view.lineage, view)
        newest = of_lineage or retention._newest_exported(view.live, view)
        return iter((newest,) if newest is not None and newest.exported else ())

    patch.setattr(retention, "_with_newest_items", on_lineage)


def items_of_lost_checkpoints_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(retirement, "outlived", lambda lost, view: ())


def items_stay_when_their_checkpoint_is_deleted(patch: pytest.MonkeyPatch) -> None:
    delete = Storage.delete

    def left(self: Storage, directory: str) -> None:
        items = self.items
        delete(self, directory)
        self.items = items

    patch.setattr(Storage, "delete", left)


def items_are_deleted_once_recorded(patch: pytest.MonkeyPatch) -> None:
    describe = Storage.describe

    def replaced(self: Storage, checkpoint: CheckpointInfo, now_s: float) -> None:
        describe(self, checkpoint, now_s)
        self.items = {key: found for key, found in self.items.items() if key[0] != checkpoint.id.attempt}

    patch.setattr(Storage, "describe", replaced)


BUGS: tuple[tuple[Plant, str], ...] = (
    (items_make_a_checkpoint_durable, "P1"),
    (items_are_recorded_before_they_are_described, "P1"),
    (a_failed_part_counts, "P1"),
    (a_node_uploads_other_items, "P4"),
    (the_newest_items_are_retired, "P5"),
    (items_off_the_lineage_are_retired, "P5"),
    (items_of_lost_checkpoints_stay, "P8"),
    (items_stay_when_their_checkpoint_is_deleted, "P8"),
    (items_are_deleted_once_recorded, "P2"),
)


@pytest.mark.parametrize(("plant", "promise"), BUGS, ids=[plant.__name__ for plant, _ in BUGS])
def test_a_planted_bug_is_found(plant: Plant, promise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Violation, match=f"^({promise}): "):
        for seed in range(FIRST_SEEDS.get(plant.__name__, 0), MAX_SEEDS):
            play(seed, with_items=True)
