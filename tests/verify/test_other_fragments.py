"""A fragment that was not committed is refused wherever a checkpoint is read, with either root digest."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

import ray_ckpt
from ray_ckpt.actors.agent.restore_sources import SourceFinder
from ray_ckpt.actors.coordinator.storage_work import write_description
from ray_ckpt.catalog.catalog import Catalog, CheckpointView
from ray_ckpt.core.loss_scenarios import REMOTE_ONLY, LiveCheckpoint
from ray_ckpt.core.values import ResumePoint, SessionNode, SessionPlan
from ray_ckpt.errors import CorruptionError
from ray_ckpt.format import names
from ray_ckpt.format.digest import digest, root_digest
from ray_ckpt.format.manifest import decode_checkpoint, encode_checkpoint, encode_fragment
from ray_ckpt.storage.local.disks import Disks
from ray_ckpt.storage.remote.tier import RemoteRef
from ray_ckpt.types import FileEntry, Fragment, RootOf
from ray_ckpt.verify.content import verify_files
from ray_ckpt.verify.copies import verify_copies
from ray_ckpt.verify.drill import dry_run
from ray_ckpt.verify.live_manifest import ReadAccess
from ray_ckpt.verify.plan import verify_plan
from tests.support.roots import ROOTS
from tests.support.sample_run import SampleRun, write_run
from tests.transport.peers import KEYS

STEP = 10
NAME, STATE = names.fragment_file(0, 2), names.state_file(0, 2)


@pytest.fixture(params=ROOTS)
def run(tmp_path: Path, request: pytest.FixtureRequest) -> SampleRun:
    return write_run(tmp_path, steps=(STEP, 20), durable=(STEP, 20), root_of=request.param)


# Fragments that can be read


def of_another_attempt(run: SampleRun) -> bytes:
    other = run.checkpoints[20]
    return encode_fragment(replace(run.checkpoints[STEP].fragments[0], attempt=other.attempt))


def of_another_step(run: SampleRun) -> bytes:
    return run.checkpoints[20].files[NAME]


def of_another_node(run: SampleRun) -> bytes:
    return run.checkpoints[STEP].files[names.fragment_file(1, 2)]


def of_other_metrics(run: SampleRun) -> bytes:
    return encode_fragment(replace(run.checkpoints[STEP].fragments[0], metrics={"loss": 7.0}))


def of_other_files(run: SampleRun) -> bytes:
    """The fragment has the correct digest of another state file, which is there."""
    state = run.checkpoints[20].files[STATE]
    (run.directory(STEP) / STATE).write_bytes(state)
    entry = FileEntry(name=STATE, size_bytes=len(state), digest=digest(state))
    old = run.checkpoints[STEP].fragments[0]
    rows = (
        replace(row, nbytes=len(state), digest=entry.digest) if row.file == STATE else row for row in old.rows
    )
    files = (entry if file.name == STATE else file for file in old.files)
    return encode_fragment(replace(old, files=tuple(files), rows=tuple(rows)))


def of_fewer_files(run: SampleRun) -> bytes:
    old = run.checkpoints[STEP].fragments[0]
    (run.directory(STEP) / STATE).unlink()
    files = tuple(file for file in old.files if file.name != STATE)
    return encode_fragment(replace(old, files=files, rows=tuple(r for r in old.rows if r.file != STATE)))


# Readers: each returns if the checkpoint is refused


def verify(view: CheckpointView) -> bool:
    report = verify_files(view.files(), root_digest=view.info.root_digest)
    return not report.ok and not verify_files(view.files()).ok


def verify_with_the_log(view: CheckpointView) -> bool:
    """Whatever checkpoint.json has."""
    return not verify_files(view.files(), root_digest=view.info.root_digest).ok


def plan(view: CheckpointView) -> bool:
    return not verify_plan(view.files(), root_digest=view.info.root_digest).is_restorable


def fragments(view: CheckpointView) -> bool:
    return _fails(view.fragments)


def load(view: CheckpointView) -> bool:
    assert view.tier is not None
    run = view.tier.root.folder.parent
    return _fails(lambda: ray_ckpt.open(f"{run}").at(view.info.id).load())


def drill(view: CheckpointView) -> bool:
    result = dry_run(_live(view), REMOTE_ONLY, ReadAccess(remote=view.tier))
    return result.verdict == "failed"


def copies(view: CheckpointView) -> bool:
    access = ReadAccess(remote=view.tier)
    report = verify_copies(_live(view), access, retry=lambda live: (live, access))
    return report is not None and not report.is_restorable


def description(view: CheckpointView) -> bool:
    assert view.tier is not None
    tier, folder = view.tier, view.path
    assert folder is not None
    (folder / names.CHECKPOINT_JSON).unlink()
    return _fails(lambda: write_description(tier, view.info)) and len(view.files().names) < 7


def ticket(view: CheckpointView) -> bool:
    return _fails(lambda: _ticket(view, is_whole=True))


def own_ticket(view: CheckpointView) -> bool:
    return _ticket(view, is_whole=False) is None


READERS = (verify, plan, fragments, load, drill, copies, description, ticket, own_ticket)
OTHERS = (
    of_another_attempt,
    of_another_step,
    of_another_node,
    of_other_metrics,
    of_other_files,
    of_fewer_files,
)


def _fails(read: Callable[[], object]) -> bool:
    with pytest.raises(CorruptionError):
        read()
    return True


def _live(view: CheckpointView) -> LiveCheckpoint:
    return LiveCheckpoint(checkpoint=view.info, holders=((), ()), homes=("", ""), on_lineage=True)


def _ticket(view: CheckpointView, *, is_whole: bool) -> object:
    assert view.tier is not None
    run = view.tier.root.folder.parent
    found = [file.digest for file in _committed(view)]
    plan = SessionPlan(
        run_uid=view.info.id.run_uid,
        session=2,
        world_size=2,
        nodes=tuple(SessionNode(node_id=n, node_index=i, ranks=(i,), holders=()) for i, n in enumerate("ab")),
        resume=ResumePoint(checkpoint=view.info, holders=((), ()), fragments=tuple(found)),
    )
    folder = run.parent / "staging"
    folder.mkdir(mode=0o700)
    with closing(Disks([folder])) as disks:
        finder = SourceFinder(
            run_uid=plan.run_uid,
            node_id="a",
            credentials=KEYS.credentials(plan.run_uid),
            arenas={},
            staging=disks,
            storage=RemoteRef(storage_path=str(run.parent), run_name=run.name),
            endpoints={},
        )
        made = (finder.ticket if is_whole else finder.own_ticket)(plan)
    if made is not None:
        made[1].close()
    return made


def _committed(view: CheckpointView) -> list[FileEntry]:
    return COMMITTED[view.info.id.attempt]


COMMITTED: dict[str, list[FileEntry]] = {}


def changed(run: SampleRun, other: Callable[[SampleRun], bytes]) -> CheckpointView:
    saved = run.checkpoints[STEP]
    COMMITTED[saved.attempt.attempt] = [e for e in saved.entries if e.name.startswith("manifest-")]
    (run.directory(STEP) / NAME).write_bytes(other(run))
    return Catalog(run.folder)[STEP]


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
def test_what_was_committed_is_accepted(run: SampleRun, read: Callable[[CheckpointView], bool]) -> None:
    view = changed(run, lambda run: run.checkpoints[STEP].files[NAME])
    if read in (fragments, load, ticket):
        with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
            read(view)
    elif read is description:
        with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
            read(view)
        written = (run.directory(STEP) / names.CHECKPOINT_JSON).read_bytes()
        assert written == run.checkpoints[STEP].files[names.CHECKPOINT_JSON]
    else:
        assert not read(view)


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.__name__)
def test_another_fragment_is_refused(
    run: SampleRun, other: Callable[[SampleRun], bytes], read: Callable[[CheckpointView], bool]
) -> None:
    assert read(changed(run, other))


@pytest.mark.parametrize("read", [verify_with_the_log, plan, fragments, load], ids=lambda read: read.__name__)
@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.__name__)
def test_no_list_of_files_makes_another_fragment_right(
    run: SampleRun, other: Callable[[SampleRun], bytes], read: Callable[[CheckpointView], bool]
) -> None:
    """checkpoint.json is written again, for the files as they are."""
    view, folder = changed(run, other), run.directory(STEP)
    old = decode_checkpoint(run.checkpoints[STEP].files[names.CHECKPOINT_JSON])
    there = [folder / file.name for file in old.files if (folder / file.name).exists()]
    files = tuple(
        FileEntry(name=path.name, size_bytes=len(data), digest=digest(data))
        for path in there
        for data in (path.read_bytes(),)
    )
    new = replace(old, files=files, root_digest=root_digest(files, old.root_of))
    (folder / names.CHECKPOINT_JSON).write_bytes(encode_checkpoint(new))
    assert read(view)


@pytest.mark.parametrize("read", [verify_with_the_log, plan, fragments, load], ids=lambda read: read.__name__)
def test_a_list_of_the_other_kind_is_refused(run: SampleRun, read: Callable[[CheckpointView], bool]) -> None:
    """The log has the root digest of the fragments, checkpoint.json that of all files, or the reverse."""
    saved = run.checkpoints[STEP]
    other: RootOf = "files" if saved.root_of == "fragments" else "fragments"
    again = write_run(run.folder.parent / "again", steps=(STEP,), durable=(STEP,), root_of=other)
    description = decode_checkpoint(again.checkpoints[STEP].files[names.CHECKPOINT_JSON])
    path = run.directory(STEP) / names.CHECKPOINT_JSON
    assert description.attempt == saved.attempt
    path.write_bytes(encode_checkpoint(description))
    report = verify_plan(Catalog(run.folder)[STEP].files(), root_digest=saved.root_digest)
    if read is plan:  # a restore needs the fragments alone, and they are as they were
        assert report.is_restorable and [d.where for d in report.damages] == ["root digest"]
    else:
        assert read(Catalog(run.folder)[STEP])


def test_files_of_two_fragments_are_not_described(run: SampleRun) -> None:
    """A file that two nodes list has two digests, and nothing shows which one is right."""
    saved = run.checkpoints[STEP]
    one, two = saved.fragments
    shared = [file for file in one.files if file.name == STATE]
    rows = tuple(row for row in one.rows if row.file == STATE)
    twice: Fragment = replace(two, files=(*two.files, *shared), rows=(*two.rows, *rows))
    data = encode_fragment(twice)
    (run.directory(STEP) / names.fragment_file(1, 2)).write_bytes(data)
    view = Catalog(run.folder)[STEP]
    entries = [
        *(e for e in saved.entries if e.name != names.fragment_file(1, 2)),
        *((e for e in shared) if saved.root_of == "files" else ()),
        FileEntry(name=names.fragment_file(1, 2), size_bytes=len(data), digest=digest(data)),
    ]
    info = replace(view.info, root_digest=root_digest(entries, saved.root_of))
    assert view.tier is not None
    with pytest.raises(CorruptionError):
        write_description(view.tier, info)
