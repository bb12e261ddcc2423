"""Stories of leftovers on the storage path: which of them go, when, and by whose decision."""

from __future__ import annotations

from typing import Any

import pytest

from ray_ckpt.core import messages as m
from ray_ckpt.core.maintenance import MAINTENANCE_S
from ray_ckpt.core.sweep import MAX_SWEPT, ORPHAN_AGE_S, SWEEP_EVERY_S, SWEEP_SOON_S
from ray_ckpt.core.values import UnfinishedUpload
from ray_ckpt.format import records as r
from ray_ckpt.format.names import make_attempt
from ray_ckpt.storage.log_store import MemoryLogStore
from ray_ckpt.types import AttemptId, Level
from tests.core.driver import RUN_UID, Harness, of, one
from tests.core.test_maintenance import scrubbed

DAY_S = ORPHAN_AGE_S
YOUNG_S = DAY_S - 1.0


def run_on(nodes: str = "ab", **options: Any) -> Harness:
    """Return a run that has been at work for two days, and whose first sweep found nothing."""
    run = Harness(nodes, inventory_wait_s=0.0, **{"remote_every": 1, "keep_last": 1, **options})
    run.open(nodes)
    list_remote(run)
    run.tick(2 * DAY_S)
    list_remote(run)
    return run


def list_remote(
    run: Harness, directories: dict[str, float] | None = None, *uploads: UnfinishedUpload
) -> tuple[m.Effect, ...]:
    """Return the answer to the last SweepRemote."""
    return run.feed(m.RemoteListed(number=last(run), directories=directories or {}, uploads=uploads))


def last(run: Harness) -> int:
    return of(run.transcript, m.SweepRemote)[-1].number


def sweep(
    run: Harness, directories: dict[str, float] | None = None, *uploads: UnfinishedUpload
) -> tuple[m.Effect, ...]:
    """Let the next sweep find these."""
    assert of(run.tick(SWEEP_EVERY_S), m.SweepRemote)
    return list_remote(run, directories, *uploads)


def upload(attempt: AttemptId, age_s: float = 1.0, number: int = 0) -> UnfinishedUpload:
    file, name = "shard-00000-of-00002.safetensors", f"upload-{number}"
    return UnfinishedUpload(directory=attempt.directory, file=file, upload_id=name, age_s=age_s)


def nobodys(step: int = 5) -> AttemptId:
    """Return an attempt that is not in the log."""
    return make_attempt(run_uid=RUN_UID, session=77, step=step, attempt=0)


def durable(run: Harness, step: int) -> AttemptId:
    run.drain_all(run.save(step))
    return run.attempt(step)


def collected(run: Harness) -> AttemptId:
    """Return a checkpoint that was durable once, and whose bytes are gone."""
    old = durable(run, 10)
    durable(run, 20)
    for delete in of(run.transcript, m.Delete):
        run.feed(m.DeleteEnded(attempt=delete.attempt, place=delete.place, error=None))
    assert run.checkpoint(old).state == "collected"
    return old


def deleted(effects: tuple[m.Effect, ...]) -> list[str]:
    return [name for order in of(effects, m.DeleteOrphans) for name in order.directories]


def aborted(effects: tuple[m.Effect, ...]) -> list[str]:
    return [upload.upload_id for order in of(effects, m.DeleteOrphans) for upload in order.uploads]


# -- when --------------------------------------------------------------------------------------------


def test_a_sweep_comes_when_the_run_is_opened_and_once_an_hour() -> None:
    run = Harness("ab")
    assert len(of(run.transcript, m.SweepRemote)) == 1
    list_remote(run)
    assert not of(run.tick(SWEEP_EVERY_S - 1.0), m.SweepRemote)
    assert of(run.tick(1.0), m.SweepRemote)


def test_no_sweep_comes_before_the_fence_is_confirmed() -> None:
    run = Harness("ab")
    run.store_mode = "held"
    assert not of([*run.start_coordinator(), *run.tick(SWEEP_EVERY_S)], m.SweepRemote)
    assert of(run.confirm(), m.SweepRemote)


def test_one_sweep_at_a_time_and_a_lost_answer_does_not_end_them() -> None:
    run = Harness("ab")
    assert not of(run.tick(SWEEP_EVERY_S - 1.0), m.SweepRemote), "the first is not answered"
    assert of(run.tick(1.0), m.SweepRemote)


def test_a_checkpoint_that_became_durable_is_swept_after_soon() -> None:
    run = run_on()
    run.tick(SWEEP_SOON_S)
    assert one(run.drain_all(run.save(10)), m.SweepRemote)
    list_remote(run)
    reported = [*run.drain_all(run.save(20)), *run.tick(SWEEP_SOON_S - 1.0)]
    assert not of(reported, m.SweepRemote), "at most one in SWEEP_SOON_S"
    assert of(run.tick(1.0), m.SweepRemote)


def test_directories_are_listed_once_an_hour_and_again_if_that_failed() -> None:
    run = run_on()

    def listed_all() -> bool:
        return not of(run.transcript, m.SweepRemote)[-1].uploads_only

    assert listed_all(), "when the run is opened"
    run.tick(SWEEP_SOON_S)
    for step in (10, 20, 30):
        assert one(run.drain_all(run.save(step)), m.SweepRemote).uploads_only
        list_remote(run)
        run.tick(SWEEP_SOON_S)
    sent = len(of(run.transcript, m.SweepRemote))
    run.tick(SWEEP_EVERY_S)
    assert listed_all() and len(of(run.transcript, m.SweepRemote)) > sent
    run.feed(m.RemoteListed(number=last(run), error="503"))
    run.tick(10 * SWEEP_SOON_S)
    assert listed_all(), "the one that failed is not the hour's"


def test_news_that_come_during_a_sweep_are_swept_after_again() -> None:
    run = run_on()
    run.tick(SWEEP_SOON_S)
    assert of(run.drain_all(run.save(10)), m.SweepRemote)
    run.drain_all(run.save(20))
    assert not of(run.tick(2 * SWEEP_SOON_S), m.SweepRemote)
    assert of([*list_remote(run), *run.tick()], m.SweepRemote)


def test_a_listing_that_fails_is_tried_again_with_growing_pauses() -> None:
    run = run_on()
    run.tick(SWEEP_EVERY_S)
    pauses = []
    for _ in range(9):
        run.feed(m.RemoteListed(number=last(run), error="503"))
        began_s = run.now_s
        while not of(run.tick(10.0), m.SweepRemote):
            pass
        pauses.append(run.now_s - began_s)
    assert pauses == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    assert len([w for w in of(run.transcript, m.Warn) if "503" in w.text]) == 1


def test_the_end_of_a_run_requests_a_sweep_and_does_not_wait_for_it() -> None:
    run = run_on(remote_every=1000)
    run.save(10)
    drains = run.feed(m.FinishRequested(token="finish", ends_group=True))
    effects = run.drain_all(drains)
    kinds = [type(effect) for effect in effects if isinstance(effect, m.SweepRemote | m.Reply)]
    assert kinds == [m.SweepRemote, m.Reply]


# -- directories -------------------------------------------------------------------------------------


def test_directories_in_the_log_that_are_not_collected_stay() -> None:
    run = run_on(remote_every=2, retire_grace_s=10 * DAY_S)
    run.save(10)
    retired, live, local = durable(run, 20), durable(run, 40), run.attempt(50)
    run.save(50)
    assert run.checkpoint(local).level < Level.DURABLE
    found = {a.directory: 100 * DAY_S for a in (run.attempt(10), retired, live, local)}
    assert not of(sweep(run, found), m.DeleteOrphans)


@pytest.mark.parametrize(("age_s", "goes"), [(YOUNG_S, False), (DAY_S, True)])
def test_a_late_upload_of_a_collected_checkpoint_goes_after_a_day(age_s: float, goes: bool) -> None:
    run = run_on()
    old = collected(run)
    assert deleted(sweep(run, {old.directory: age_s})) == [old.directory] * goes


@pytest.mark.parametrize(("age_s", "goes"), [(YOUNG_S, False), (DAY_S, True)])
def test_directories_that_were_never_in_the_log_are_deleted_after_a_day(age_s: float, goes: bool) -> None:
    run = run_on()
    name = nobodys().directory
    assert deleted(sweep(run, {name: age_s})) == [name] * goes
    notes = [op.text for op in run.records if isinstance(op, r.Note)]
    assert [name in text for text in notes] == [True] * goes


def test_a_name_with_a_known_attempt_and_another_step_is_not_that_attempt() -> None:
    run = run_on()
    attempt = durable(run, 10)
    run.disks = {}
    run.feed(m.NodesSeen(live=frozenset()))
    other = f"{11:012d}-{attempt.attempt}"
    assert deleted(sweep(run, {attempt.directory: DAY_S, other: DAY_S})) == [other]


def test_directories_older_than_the_log_stay_with_one_warning() -> None:
    run = Harness("ab")
    run.open("ab")
    run.tick(DAY_S)
    list_remote(run)
    name = nobodys().directory
    for _ in range(3):
        assert not deleted(sweep(run, {name: run.now_s + SWEEP_EVERY_S + 1.0}))
    assert len([w for w in of(run.transcript, m.Warn) if name in w.text]) == 1


def test_what_is_open_or_held_stays() -> None:
    run = run_on()
    run.tick(SWEEP_EVERY_S)
    opened, held = run.attempt(30), run.attempt(40)
    run.feed(run.stored(held, "a"), m.SaveRefused(attempt=held, ranks=(1,), reason="busy"))
    run.feed(m.NodesJoined(inventories={"a": run.disks["a"].inventory()}))
    assert held.attempt in run.machine.view.holders, "it was dropped, and a node has it all the same"
    run.feed(run.copied(opened, "a", "b", error="the peer went away"))
    assert not deleted(list_remote(run, {opened.directory: DAY_S, held.directory: DAY_S}))


def test_while_no_group_has_the_run_nothing_unknown_goes() -> None:
    run = run_on()
    old = collected(run)
    run.start_coordinator()
    list_remote(run)
    assert deleted(sweep(run, {nobodys().directory: DAY_S, old.directory: DAY_S})) == [old.directory]


# -- uploads -----------------------------------------------------------------------------------------


def test_uploads_of_what_is_durable_or_gone_are_aborted_at_once() -> None:
    run = run_on()
    old = collected(run)
    live = run.attempt(20)
    assert aborted(sweep(run, {}, upload(old, number=1), upload(live, number=2))) == ["upload-1", "upload-2"]


def test_uploads_of_what_is_retired_are_aborted_at_once() -> None:
    run = run_on(remote_every=1000, retire_grace_s=DAY_S)
    run.save(10)
    run.save(20)
    assert run.checkpoint(run.attempt(10)).state == "retired"
    assert aborted(sweep(run, {}, upload(run.attempt(10)))) == ["upload-0"]


@pytest.mark.parametrize(("age_s", "goes"), [(YOUNG_S, False), (DAY_S, True)])
def test_uploads_of_what_is_being_drained_stay_for_a_day(age_s: float, goes: bool) -> None:
    run = run_on()
    run.save(10)
    assert bool(aborted(sweep(run, {}, upload(run.attempt(10), age_s)))) is goes


def test_uploads_with_which_a_scrub_may_mend_a_durable_checkpoint_stay() -> None:
    run = run_on(scrub_bytes_per_s=1 << 30, scrub_every_s=DAY_S)
    attempt, reads = durable(run, 10), of(run.tick(DAY_S), m.Scrub)
    while reads[-1].place != m.REMOTE:
        scrubbed(run, reads[-1])
        reads += of(run.tick(MAINTENANCE_S), m.Scrub)
    assert not aborted(list_remote(run, {}, upload(attempt)))
    scrubbed(run, reads[-1])
    assert aborted(sweep(run, {}, upload(attempt)))


def test_uploads_over_a_damaged_copy_on_the_storage_path_stay() -> None:
    run = run_on()
    attempt = durable(run, 10)
    list_remote(run)
    run.feed(m.ScrubEnded(attempt=attempt, node_index=0, place=m.REMOTE, damage=("shard",), error=None))
    assert attempt.attempt in run.machine._drains.attempts
    assert not aborted(sweep(run, {}, upload(attempt)))


@pytest.mark.parametrize(("age_s", "goes"), [(YOUNG_S, False), (DAY_S, True)])
def test_unknown_uploads_stay_for_a_day(age_s: float, goes: bool) -> None:
    run = run_on(remote_every=1000)
    run.save(10)
    uploads = upload(run.attempt(10), age_s, 1), upload(nobodys(), age_s, 2)
    assert len(aborted(sweep(run, {}, *uploads))) == 2 * goes


# -- how much, and who -------------------------------------------------------------------------------


def test_an_order_is_bounded_and_the_rest_goes_next_time() -> None:
    run = run_on()
    old = collected(run)
    uploads = [upload(old, number=number) for number in range(MAX_SWEPT + 10)]
    effects = sweep(run, {old.directory: DAY_S}, *uploads)
    (order,) = of(effects, m.DeleteOrphans)
    assert (len(order.uploads), order.directories) == (MAX_SWEPT, ())
    (order,) = of(sweep(run, {old.directory: DAY_S}, *uploads[MAX_SWEPT:]), m.DeleteOrphans)
    assert (len(order.uploads), order.directories) == (10, (old.directory,))
    unknown = {nobodys(step).directory: DAY_S for step in range(1, MAX_SWEPT + 10)}
    assert len(deleted(sweep(run, unknown))) == MAX_SWEPT


def test_nothing_unknown_goes_before_the_log_has_confirmed_that_it_is_ours() -> None:
    run = run_on()
    run.tick(SWEEP_EVERY_S)
    run.store_mode = "held"
    found = {nobodys().directory: DAY_S}
    assert not of(list_remote(run, found), m.DeleteOrphans)
    assert not of(run.tick(SWEEP_EVERY_S), m.SweepRemote), "one note at a time"
    assert deleted(run.confirm()) == list(found)


def test_a_stale_coordinator_deletes_nothing_of_its_successor() -> None:
    store = MemoryLogStore()
    stale = Harness("ab", store=store, keep_last=1, remote_every=1)
    stale.open("ab")
    list_remote(stale)
    other = Harness("ab", store=store, keep_last=1, remote_every=1, service="service-2")
    other.open("ab")
    attempt = durable(other, 10)
    stale.tick(DAY_S + SWEEP_EVERY_S)
    effects = list_remote(stale, {attempt.directory: DAY_S})
    assert of(effects, m.StepDown) and not of(effects, m.DeleteOrphans)
    assert not of(list_remote(stale, {attempt.directory: DAY_S}), m.DeleteOrphans)


def test_an_answer_that_nobody_waits_for_is_ignored() -> None:
    run = run_on()
    old = collected(run)
    list_remote(run)
    assert not of(list_remote(run, {old.directory: DAY_S}), m.DeleteOrphans), "a second one"
    run.tick(SWEEP_EVERY_S)
    late = m.RemoteListed(number=last(run), directories={old.directory: DAY_S})
    run.tick(SWEEP_EVERY_S)
    assert not of(run.feed(late), m.DeleteOrphans), "to the sweep before"


def test_a_listing_that_was_long_on_its_way_makes_nothing_younger() -> None:
    run = run_on()
    run.tick(SWEEP_EVERY_S)
    listed = {nobodys().directory: run.now_s + 1.0}  # a second before the log began
    run.tick(SWEEP_EVERY_S / 2)
    assert not deleted(list_remote(run, listed))
