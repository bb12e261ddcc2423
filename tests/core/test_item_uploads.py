"""Stories of items that are uploaded alone: when, by whom, and what the log says of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ray_ckpt.config import RunOptions
from ray_ckpt.core import messages as m
from ray_ckpt.core.drain import DAMAGED_AGAIN_S, RETRY_S
from ray_ckpt.core.history import RunHistory
from ray_ckpt.core.maintenance import MAINTENANCE_S
from ray_ckpt.core.values import ItemsPart
from ray_ckpt.errors import ConfigError, RestoreError
from ray_ckpt.format import records as r
from ray_ckpt.format.digest import digest, root_digest
from ray_ckpt.format.snapshot import decode_snapshot, encode_snapshot
from ray_ckpt.types import FileEntry, Level
from tests.core.driver import Disk, Harness, of, one, ops


def run_on(nodes: str = "ab", **options: Any) -> Harness:
    wanted: dict[str, Any] = {"remote_every": 1000, "remote_items": ("model",), **options}
    run = Harness(nodes, inventory_wait_s=0.0, **wanted)
    run.open(nodes)
    return run


def part_of(run: Harness, order: m.Drain, *, source: FileEntry | None = None) -> ItemsPart:
    held = run.disks[order.node_id].fragments[order.attempt.attempt, order.node_index].fragment
    fragment = replace(held, digest=digest(f"{order.items}/{held.digest}".encode()))
    return ItemsPart(source=source or held, fragment=fragment, size_bytes=70)


def uploaded(run: Harness, order: m.Drain, **more: Any) -> tuple[m.Effect, ...]:
    """Let a node end the upload of its part."""
    ended = m.DrainEnded(
        attempt=order.attempt,
        node_index=order.node_index,
        node_id=order.node_id,
        error=None,
        items=order.items,
        part=part_of(run, order),
    )
    return run.feed(replace(ended, **more))


def exports(effects: tuple[m.Effect, ...]) -> list[m.Drain]:
    return [order for order in of(effects, m.Drain) if order.items]


def export(run: Harness, effects: tuple[m.Effect, ...]) -> r.Exported:
    """Upload all parts that `effects` order, describe them, and return the record."""
    orders = exports(effects)
    assert orders
    for order in orders:
        effects = uploaded(run, order)
    described = one(effects, m.WriteDescription)
    assert described.exported is not None
    effects = run.feed(
        m.DescriptionWritten(
            attempt=described.checkpoint.id, error=None, exported=described.exported, is_damage=False
        )
    )
    (found,) = [op for op in ops(effects) if isinstance(op, r.Exported)]
    return found


def _described(run: Harness, order: m.Drain) -> r.Exported | None:
    """Let the only node upload its part; return what is to be described."""
    return one(uploaded(run, order), m.WriteDescription).exported


def test_items_of_each_commit_are_uploaded_by_their_holders_and_recorded() -> None:
    run = run_on()
    effects = run.save(10)
    orders = exports(effects)
    assert [(o.node_index, o.items, o.like) for o in orders] == [(0, "model", ""), (1, "model", "")]
    parts = [part_of(run, order) for order in orders]
    found = export(run, effects)
    root = root_digest(part.fragment for part in parts)
    assert found == r.Exported(
        attempt=run.attempt(10).attempt, items="model", root_digest=root, size_bytes=140
    )
    info = run.checkpoint(run.attempt(10))
    assert (info.exported_items, info.exported_root, info.exported_bytes) == (("model",), root, 140)
    assert info.level < Level.DURABLE and info.durable_at_s is None and info.exported_at_s is not None


def test_the_order_of_names_does_not_matter() -> None:
    run = run_on("a", remote_items=("model", "ema"))
    assert {order.items for order in exports(run.save(10))} == {"ema,model"}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"remote_items_every": 2}, [20, 40]),
        ({"remote_items_every_s": 20.0}, [30]),
        ({"remote_items_every": 3, "remote_items_every_s": 1000.0}, [30]),
        ({}, [10, 20, 30, 40]),
        ({"remote_items": ()}, []),
    ],
)
def test_items_have_a_cadence_of_their_own(options: dict[str, Any], wanted: list[int]) -> None:
    run, found = run_on("a", **options), []
    for step in (10, 20, 30, 40):
        effects = run.save(step)
        if exports(effects):
            found.append(export(run, effects))
        run.tick(12.0)
    checkpoints = run.machine.history.checkpoints
    assert [checkpoints[op.attempt].step for op in found] == wanted


def test_what_is_uploaded_whole_needs_no_items() -> None:
    run = run_on("a", remote_every=2)
    assert exports(run.save(10))
    assert not exports(run.save(20)) and not exports(run.tick(1.0))


def test_a_restarted_coordinator_uploads_what_is_due() -> None:
    run = run_on("a", remote_items_every=2)
    run.save(10)
    assert exports(run.save(20))
    run.start_coordinator()
    run.open("a")
    orders = exports((*run.tick(MAINTENANCE_S), *run.tick(MAINTENANCE_S)))
    assert {order.attempt.step for order in orders} == {20}


def test_one_upload_runs_and_newer_ones_displace_older_ones() -> None:
    run = run_on("a", keep_last=10)
    first = exports(run.save(10))
    assert first and not any(exports(run.save(step)) for step in (20, 30, 40))
    next_ = uploaded(run, first[0])
    assert {order.attempt.step for order in exports(next_)} == {40}
    (described,) = of(next_, m.WriteDescription)
    done = run.feed(
        m.DescriptionWritten(attempt=described.checkpoint.id, error=None, exported=described.exported)
    )
    assert not exports((*done, *run.tick(1.0)))


@pytest.mark.parametrize("is_restarted", [False, True])
def test_older_items_are_left_out_once_newer_ones_are_there(is_restarted: bool) -> None:
    run = run_on("a", keep_last=10)
    (first,) = exports(run.save(10))
    for step in (20, 30, 40):
        run.save(step)
    run.feed(m.DescriptionWritten(attempt=first.attempt, error=None, exported=_described(run, first)))
    (last,) = [order for order in exports(tuple(run.transcript)) if order.attempt.step == 40]
    assert not exports((*run.tick(MAINTENANCE_S), *run.tick(MAINTENANCE_S))), "40 is on its way"
    run.feed(m.DescriptionWritten(attempt=last.attempt, error=None, exported=_described(run, last)))
    if is_restarted:
        run.start_coordinator()
        run.open("a")
    assert not exports((*run.tick(MAINTENANCE_S), *run.tick(MAINTENANCE_S)))
    assert {order.attempt.step for order in exports(run.save(50))} == {50}, "it waits for no older one"


def test_items_of_what_the_user_went_back_from_are_left_out() -> None:
    run = run_on("a", keep_last=10)
    export(run, run.save(10))
    run.save(20)
    newer = run.attempt(20)
    run.open("a", resume="step:10")
    run.start_coordinator()
    run.open("a", resume="step:10")
    assert run.checkpoint(newer).state == "live"
    assert not exports((*run.tick(MAINTENANCE_S), *run.tick(MAINTENANCE_S)))


def test_a_failed_part_is_tried_again_and_a_damaged_one_elsewhere() -> None:
    run = run_on("ab")
    first, second = exports(run.save(10))
    effects = uploaded(run, first, error="the store is away", part=None)
    assert "the store is away" in one(effects, m.Warn).text
    (again,) = exports(run.tick(RETRY_S))
    assert again.node_index == first.node_index
    (other,) = exports(uploaded(run, second, error="bad bytes", part=None, is_damage=True))
    assert other.node_id != second.node_id


def test_parts_of_another_version_than_the_committed_one_are_not_recorded() -> None:
    run = run_on("a")
    (order,) = exports(run.save(10))
    held = run.disks["a"].fragments[order.attempt.attempt, 0].fragment
    other = part_of(run, order, source=replace(held, digest="0" * 32))
    effects = uploaded(run, order, part=other)
    assert not of(effects, m.WriteDescription) and "another version" in one(effects, m.Warn).text
    assert not exports(run.tick(MAINTENANCE_S)) and not run.checkpoint(run.attempt(10)).exported
    assert exports((*run.tick(DAMAGED_AGAIN_S), *run.tick(MAINTENANCE_S)))


def test_a_description_that_fails_is_written_again() -> None:
    run = run_on("a")
    (order,) = exports(run.save(10))
    described = one(uploaded(run, order), m.WriteDescription)
    failed = m.DescriptionWritten(attempt=order.attempt, error="away", exported=described.exported)
    assert "away" in one(run.feed(failed), m.Warn).text
    assert one(run.tick(RETRY_S), m.WriteDescription).exported == described.exported


def test_the_newest_items_stay_until_newer_ones_are_there() -> None:
    run = run_on("a", keep_last=1, remote_items_every=2)
    run.save(10)
    export(run, run.save(20))
    run.save(30)
    assert run.checkpoint(run.attempt(20)).state == "live"
    export(run, run.save(40))
    assert run.checkpoint(run.attempt(20)).state != "live"
    assert not any(isinstance(effect, m.Drain) and not effect.items for effect in run.transcript)


@pytest.mark.parametrize("is_lost", [True, False], ids=["all nodes are lost", "the user goes back"])
def test_items_stay_after_a_restart_from_an_older_checkpoint_until_newer_ones_are_there(
    is_lost: bool,
) -> None:
    run = run_on("a", keep_last=1, remote_items_every=2)
    run.save(10)
    older = run.attempt(10)
    run.drain_all(run.feed(m.DrainRequested(token="t", attempt=older.attempt)))
    export(run, run.save(20))
    newer, nodes = run.attempt(20), "a"
    if is_lost:
        run.lose("a")
        nodes = "b"
        run.live.add(nodes)
        run.disks[nodes] = Disk()
        run.feed(m.NodesSeen(live=frozenset(nodes)))
    run.open(nodes, resume="auto" if is_lost else "step:10")
    assert [c.id for c in run.machine.history.lineage()] == [older]
    run.save(30)
    assert run.checkpoint(newer).state == "live"
    assert not of(run.transcript, m.Delete)
    assert not [drain for drain in of(run.transcript, m.Drain) if drain.attempt == newer and not drain.items]
    export(run, run.save(40))
    assert run.checkpoint(newer).state in ("retired", "collected")


def test_what_the_user_went_back_from_is_not_uploaded_whole_at_the_end() -> None:
    run = run_on("a", keep_last=1, remote_items_every=2)
    run.save(10)
    run.drain_all(run.feed(m.DrainRequested(token="t", attempt=run.attempt(10).attempt)))
    export(run, run.save(20))
    newer = run.attempt(20)
    run.open("a", resume="step:10")
    effects = run.feed(m.FinishRequested(token="end", ends_group=True, has_failed=False))
    for _ in range(5):
        run.drain_all(effects)
        effects = run.tick(MAINTENANCE_S)
    assert not [drain for drain in of(run.transcript, m.Drain) if drain.attempt == newer and not drain.items]
    assert run.checkpoint(newer).state == "lost" and "model" in run.checkpoint(newer).exported_items


@pytest.mark.parametrize("is_pinned", [False, True])
def test_the_nodes_of_a_finished_run_keep_nothing_for_items_on_the_storage_path(is_pinned: bool) -> None:
    run = run_on("a", keep_last=1, remote_items_every=2)
    run.save(10)
    run.drain_all(run.feed(m.DrainRequested(token="t", attempt=run.attempt(10).attempt)))
    export(run, run.save(20))
    newer = run.attempt(20)
    if is_pinned:
        run.feed(m.PinRequested(token="p", attempt=newer.attempt, owner="paper", expires_at_s=None))
    run.open("a", resume="step:10")
    run.feed(m.FinishRequested(token="end", ends_group=True))
    for _ in range(3):
        run.tick(1.0)
        run.drain_all(drain for drain in of(run.transcript, m.Drain) if not drain.items)
        run.feed(m.RemoteListed(number=of(run.transcript, m.SweepRemote)[-1].number))
    assert one(run.transcript, m.PutAway).kept == ()
    assert run.checkpoint(newer).level is (Level.DURABLE if is_pinned else Level.LOCAL)
    assert run.checkpoint(newer).state == ("live" if is_pinned else "lost")
    run.feed(m.PutAwayEnded(error=None))
    run.disks["a"] = Disk()
    run.start_coordinator()
    run.open("a")
    assert run.plan.resume is not None and run.plan.resume.checkpoint.step == 10
    run.save(30)
    assert run.checkpoint(newer).state == ("live" if is_pinned else "lost")
    export(run, run.save(40))
    assert is_pinned or run.checkpoint(newer).state in ("retired", "collected")


def test_a_retired_checkpoint_ends_its_upload() -> None:
    run = run_on("a", keep_last=1)
    (order,) = exports(run.save(10))
    run.save(20)
    assert run.checkpoint(run.attempt(10)).state == "live", "it is in use"
    run.machine._item_uploads.finish(order.attempt.attempt)
    run.save(30)
    assert not ops(uploaded(run, order))


def test_lost_checkpoints_keep_their_items_until_newer_ones_are_there() -> None:
    run = run_on("a", keep_last=3)
    found = export(run, run.save(10))
    history = run.machine.history
    run.machine._ledger.append(r.Lost(attempt=found.attempt, reason="the node is gone"))
    run.tick(0.1)
    assert [c.id.attempt for c in history.lost_exported()] == [found.attempt]
    effects = run.save(20)
    assert history.lost_exported(), "step 20 is not on the storage path yet"
    export(run, effects)
    run.tick(0.1)
    assert not history.lost_exported() and history.checkpoints[found.attempt].state != "lost"


def test_a_snapshot_has_the_items_of_live_and_lost_checkpoints() -> None:
    run = run_on("a", keep_last=3)
    found = export(run, run.save(10))
    run.save(20)
    run.machine._ledger.append(r.Lost(attempt=found.attempt, reason="the node is gone"))
    run.tick(0.1)
    history = run.machine.history
    read = RunHistory.from_snapshot(decode_snapshot(encode_snapshot(history.to_snapshot(0.0))))
    assert read.checkpoints == history.checkpoints
    assert read.lost_exported() == history.lost_exported() != ()


def test_a_pin_keeps_the_items_of_a_lost_checkpoint() -> None:
    run = run_on("a", keep_last=3)
    found = export(run, run.save(10))
    run.feed(m.PinRequested(token="t", attempt=found.attempt, owner="eval", expires_at_s=None))
    run.machine._ledger.append(r.Lost(attempt=found.attempt, reason="the node is gone"))
    run.tick(0.1)
    export(run, run.save(20))
    run.tick(0.1)
    assert [c.step for c in run.machine.history.lost_exported()] == [10]


def test_items_are_no_reason_to_restore_a_checkpoint() -> None:
    run = run_on("a")
    export(run, run.save(10))
    run.lose("a")
    run.live.add("b")
    run.disks["b"] = Disk()
    run.feed(m.NodesSeen(live=frozenset("b")))
    failed = run.feed(run.group("b"))
    assert isinstance(one(failed, m.Fail).error, RestoreError) and not of(failed, m.StartSession)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"remote_items": "model"}, "remote_items is 'model'"),
        ({"remote_items": ("",)}, "remote_items is"),
        ({"remote_items": ("model.a",)}, "remote_items is"),
        ({"remote_items": ("model", "model")}, "remote_items is"),
        ({"remote_items": ("m" * 101,)}, "remote_items is"),
        ({"remote_items_every": 2}, "remote_items_every is set, but remote_items is empty"),
        ({"remote_items_every_s": 2.0}, "remote_items_every_s is set, but remote_items is empty"),
        ({"remote_items": ("model",), "remote_items_every": 0}, "remote_items_every is 0"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        RunOptions.parse(**options)
