"""Still shards on disks, at peers and on the storage path: shared where digests agree, else stored."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_ckpt.actors.agent import files, still_files
from ray_ckpt.actors.agent.still_files import has_remotely, scrub_stored
from ray_ckpt.config import RunOptions
from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.values import ScrubResult
from ray_ckpt.engine.deletes import NodeDeletes, together
from ray_ckpt.errors import CheckpointError, CorruptionError, Unavailable
from ray_ckpt.format.digest import digest
from ray_ckpt.format.names import fragment_file, shard_file
from ray_ckpt.storage.local import direct
from ray_ckpt.storage.local import files as files_module
from ray_ckpt.storage.local.scrub import verify_fragment, verify_stored
from ray_ckpt.storage.local.staging import Staging
from ray_ckpt.storage.log_store import Unsupported
from ray_ckpt.storage.remote.file_store import PosixFiles
from ray_ckpt.transport import sending
from ray_ckpt.transport.client import PeerClient
from ray_ckpt.transport.sending import send_files
from tests.support.still_nodes import STILL_FILE, StillNode, attempt
from tests.transport.peers import UID

BASE = torch.arange(1 << 19, dtype=torch.float32)  # 2 MiB, above MIN_STILL_BYTES
MOVING = shard_file(0, 1)


def head(step: int) -> torch.Tensor:
    return torch.full((100,), float(step))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def make(stack: ExitStack, tmp_path: Path) -> Callable[..., StillNode]:
    (tmp_path / "storage" / "gpt" / "ray_ckpt").mkdir(parents=True)

    def made(name: str, **more: Any) -> StillNode:
        return StillNode(stack, tmp_path / name, tmp_path / "storage", **more)

    return made


@pytest.fixture
def node(make: Callable[..., StillNode]) -> StillNode:
    return make("a")


# -- on a node's disks


def test_an_equal_shard_is_linked_and_another_one_is_written(node: StillNode) -> None:
    first, second = node.save(1, BASE, head(1)), node.save(2, BASE, head(2))
    assert not first.shared_bytes
    assert second.shared_bytes == second.files[1].size_bytes and second.written_bytes < 10_000
    assert node.inode(1) == node.inode(2)
    assert [row.digest for row in first.rows[3:5]] == [row.digest for row in second.rows[3:5]]

    other = BASE.clone()
    other[7] += 1
    third = node.save(3, other, head(3))
    assert not third.shared_bytes and node.inode(3) != node.inode(2)
    assert third.files[1].digest == node.entry(3).digest, "the bytes of the arena"
    assert node.save(4, BASE, head(4)).shared_bytes, "an older one is equal again"
    assert node.inode(4) == node.inode(1) and node.steps() == [1, 2, 3, 4]


def test_with_parity_a_shard_is_read_before_it_is_linked(make: Callable[..., StillNode]) -> None:
    """Other nodes code the bytes on the disk, so parity of bytes that have changed would be wrong."""
    node = make("a", options=RunOptions(parity=(2, 1)))
    node.save(1, BASE, head(1))
    assert node.save(2, BASE, head(2)).shared_bytes
    data = bytearray(node.path(1).read_bytes())
    data[-1] ^= 1
    node.path(1).write_bytes(data)  # of step 2 too
    assert node.save(3, BASE, head(3)).shared_bytes, "it was read in this session, and coded"
    node.run.machine.plan.session_key = (1, 2)
    assert not node.save(4, BASE, head(4)).shared_bytes
    assert digest(node.path(4).read_bytes()) == node.entry(4).digest
    assert node.save(5, BASE, head(5)).shared_bytes and node.inode(5) == node.inode(4)
    data = bytearray(node.path(5).read_bytes())
    data[-1] ^= 1
    node.path(5).unlink()
    node.path(5).write_bytes(data)
    assert node.save(6, BASE, head(6)).shared_bytes and node.inode(6) == node.inode(4), "another file"


def test_with_parity_a_save_reports_that_an_earlier_shard_is_bad_or_gone(
    make: Callable[..., StillNode],
) -> None:
    """The parity of the earlier one may have been made of bad bytes."""
    node = make("a", options=RunOptions(parity=(2, 1)))

    def facts(step: int) -> tuple[bool, tuple[str, ...]]:
        node.save(step, BASE, head(step))
        found = node.run.captures.facts(attempt(step))
        return found.is_rewritten, found.bad_copies

    assert facts(1) == (False, ())
    flip(node.path(1))
    assert facts(2) == (True, (attempt(1).attempt,))
    assert facts(3) == (False, ()), "that of step 2 is linked"
    flip(node.path(3))
    for step in (1, 3):  # step 2 shares the file of step 3
        node.scrub(step)
    assert facts(4) == (True, ()), "scrubs have taken them away"


def test_a_damaged_shard_that_checkpoints_share_is_read_once(
    make: Callable[..., StillNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be large, and each save would read it again while no scrub has found the damage."""
    node = make("a", options=RunOptions(parity=(2, 1)))
    for step in (1, 2, 3, 4):
        node.save(step, BASE, head(step))
    flip(node.path(1))
    reads = list[Path]()

    def counted(path: Path) -> Iterator[memoryview]:
        reads.append(path)
        return direct.read_written(path)

    monkeypatch.setattr(still_files, "read_written", counted)
    node.run.machine.plan.session_key = (1, 2)
    assert not node.save(5, BASE, head(5)).shared_bytes and len(reads) == 1
    node.path(5).unlink()  # the damaged one is the newest again
    assert not node.save(6, BASE, head(6)).shared_bytes and len(reads) == 1
    assert node.save(7, BASE, head(7)).shared_bytes and len(reads) == 2, "another file"
    node.run.machine.plan.session_key = (1, 3)
    for step in (6, 7):
        node.path(step).unlink()
    assert not node.save(8, BASE, head(8)).shared_bytes and len(reads) == 3, "another session"


def test_the_rows_of_a_linked_shard_are_those_of_its_bytes(node: StillNode) -> None:
    node.save(1, BASE, head(1))
    node.run.still.clear()  # an agent that was started since
    for step in (2, 3):  # from the spans, then from the last time
        stored = node.save(step, BASE, head(step))
        data = node.path(step).read_bytes()
        rows = [row for row in stored.rows if row.file == STILL_FILE]
        assert sum(row.nbytes for row in rows) == len(data) and stored.shared_bytes
        assert all(digest(data[r.byte_offset : r.byte_offset + r.nbytes]) == r.digest for r in rows)


def test_a_shard_that_changes_while_it_is_hashed_is_not_taken_for_another_one_later(
    node: StillNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank has captured again, so this save fails; the digests of its shard are kept for the next save."""
    node.save(1, BASE, head(1))
    node.run.still.clear()  # an agent that was started since
    (buffer,) = node.memory.arenas[0].buffers

    def after_a_capture(part: Any) -> str:
        assert buffer.layout is not None
        if part == buffer.layout.shards[1].header:
            buffer.data(buffer.layout, 1)[offset : offset + 4] = other[:1].numpy().tobytes()
            buffer.page.seal(attempt(3).attempt)
        return digest(part)

    other = BASE.clone()
    other[0] = 7
    offset = node.path(1).stat().st_size - BASE.nbytes
    with monkeypatch.context() as patch, pytest.raises(Unavailable, match="captured into its arena again"):
        patch.setattr(direct, "digest", after_a_capture)
        node.save(2, BASE, head(2))
    stored = node.save(3, other, head(3))
    assert stored.files[1].digest == node.entry(3).digest and not stored.shared_bytes
    assert node.path(3).read_bytes()[offset:] == other.numpy().tobytes()


def test_a_deleted_checkpoint_leaves_the_bytes_to_the_others(node: StillNode) -> None:
    for step in (1, 2, 3):
        node.save(step, BASE, head(step))
    for step in (1, 2):
        node.run.staging.delete(UID, attempt(step).directory)
    assert node.steps() == [3] and node.scrub(3).damage == ()
    assert node.save(4, BASE, head(4)).shared_bytes


def test_a_checkpoint_that_is_deleted_meanwhile_is_no_source(
    node: StillNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.save(1, BASE, head(1))
    real = files_module.link

    def link(source: Path, path: Path) -> None:
        node.run.staging.delete(UID, attempt(1).directory)
        real(source, path)

    monkeypatch.setattr(files_module, "link", link)
    assert not node.save(2, BASE, head(2)).shared_bytes
    assert node.steps() == [2] and node.scrub(2).damage == ()


def test_the_next_source_is_taken_if_the_newest_is_deleted_meanwhile(
    node: StillNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        node.save(step, BASE, head(step))
    real = files_module.link

    def link(source: Path, path: Path) -> None:
        node.run.staging.delete(UID, attempt(2).directory)
        real(source, path)

    monkeypatch.setattr(files_module, "link", link)
    assert node.save(3, BASE, head(3)).shared_bytes
    assert node.inode(3) == node.inode(1)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV])
def test_a_file_system_without_links_is_written_to_and_named_once(
    node: StillNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    def refuse(*args: object, **more: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    caplog.set_level(logging.INFO)
    for step in (1, 2, 3):
        assert not node.save(step, BASE, head(step)).shared_bytes
    assert node.steps() == [1, 2, 3] and len({node.inode(step) for step in (1, 2, 3)}) == 3
    assert caplog.text.count("makes no hard links") == 1 and "is not linked" not in caplog.text


def test_an_inode_that_takes_no_more_links_is_written_anew(
    node: StillNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        node.save(step, BASE, head(step))
    caplog.set_level(logging.INFO)
    with monkeypatch.context() as patch:

        def refuse(*args: object, **more: object) -> None:
            raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))

        patch.setattr(os, "link", refuse)
        assert not node.save(4, BASE, head(4)).shared_bytes
    assert caplog.text.count("is not linked") == 1, "the other names are of the same inode"
    assert node.save(5, BASE, head(5)).shared_bytes
    assert node.inode(5) == node.inode(4), "the new one, of which there are links to make"


def test_a_link_whose_answer_was_lost_counts(node: StillNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS: the server made the link, and the client sends the request again."""
    real = os.link

    def twice(*args: Any, **more: Any) -> None:
        real(*args, **more)
        real(*args, **more)

    node.save(1, BASE, head(1))
    monkeypatch.setattr(os, "link", twice)
    assert node.save(2, BASE, head(2)).shared_bytes and node.inode(1) == node.inode(2)
    assert not list(node.path(2).parent.glob(files_module.TEMPORARIES))


def test_the_disk_that_has_the_shard_gets_the_link(make: Callable[..., StillNode], tmp_path: Path) -> None:
    node = make("a", roots=[tmp_path / "one", tmp_path / "two"])
    for step in (1, 2, 3):
        node.save(step, BASE, head(step))
    assert len({node.inode(step) for step in (1, 2, 3)}) == 1 and node.steps() == [1, 2, 3]


# -- at peers


def test_a_holder_links_what_it_has_and_gets_the_rest(make: Callable[..., StillNode]) -> None:
    a, b = make("a"), make("b")
    sent = []
    for step in (1, 2):
        a.save(step, BASE, head(step))
        sent.append(a.send(step, b))
    still_bytes = a.entry(2).size_bytes
    assert sent[0][1] == 0 and sent[0][0] > still_bytes
    assert sent[1][1] == still_bytes and sent[1][0] < 20_000
    assert b.inode(1) == b.inode(2) and b.steps() == [1, 2] and b.scrub(2).damage == ()


def failure_of_copy(source: StillNode, holder: StillNode) -> Exception:
    with pytest.raises(CheckpointError) as caught:
        source.send(1, holder, is_repair=True)
    return caught.value


def test_a_copy_that_fails_because_of_its_source_may_be_damage(
    make: Callable[..., StillNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "RETRY_S", 0.0)
    a, b = make("a"), make("b")
    a.save(1, BASE, head(1))
    a.run.machine.plan = None  # what is sent comes from the disk
    b.run.machine.is_deleted = lambda _: True
    assert not files.may_be_damage(failure_of_copy(a, b))
    b.run.machine.is_deleted = lambda _: False
    flip(a.path(1))
    assert files.may_be_damage(failure_of_copy(a, b))
    a.path(1).unlink()
    assert files.may_be_damage(failure_of_copy(a, b))
    assert files.may_be_damage(OSError(errno.EIO, "")) and not files.may_be_damage(OSError(errno.ENOSPC, ""))


def test_a_copy_that_a_scrub_makes_incomplete_meanwhile_does_not_count(
    make: Callable[..., StillNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scrub finds the linked file damaged before the fragment that lists it is there."""
    a, b = make("a"), make("b")
    for step in (1, 2):
        a.save(step, BASE, head(step))
    a.send(1, b)
    flip(b.path(1))
    put = b.run.staging.put

    def scrubbed_first(run: str, directory: str, file: str, *more: Any, **options: Any) -> Any:
        if file == fragment_file(0, 1):
            assert b.scrub(1).damage == (STILL_FILE,)
        return put(run, directory, file, *more, **options)

    monkeypatch.setattr(b.run.staging, "put", scrubbed_first)
    with pytest.raises(Unavailable, match="is not complete here"):
        a.send(2, b)
    assert b.steps() == []


def test_the_second_try_of_a_copy_reads_no_arena(
    make: Callable[..., StillNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks capture a little after the one whose capture ended the first try."""
    a, b = make("a"), make("b")
    a.save(1, BASE, head(1))
    send, tries = send_files, Counter[int]()

    def recaptured_once(*arguments: Any, **options: Any) -> int:
        tries[len(arguments[2])] += 1
        if tries[len(arguments[2])] == 1:
            raise files._Recaptured
        return send(*arguments, **options)

    monkeypatch.setattr(files, "send_files", recaptured_once)
    monkeypatch.setattr(files, "_stored_bytes", lambda *_: pytest.fail("an arena is read"))
    a.send(1, b)
    assert b.steps() == [1] and b.scrub(1).damage == ()


def test_a_node_whose_session_has_ended_sends_what_is_on_its_disk(make: Callable[..., StillNode]) -> None:
    """Its arenas are there still; a repair may need its copy, the only one."""
    a, b = make("a"), make("b")
    a.save(1, BASE, head(1))
    a.run.machine.plan = None
    a.send(1, b)
    assert b.steps() == [1] and b.scrub(1).damage == ()


def test_a_holder_without_the_shard_gets_all_bytes(make: Callable[..., StillNode]) -> None:
    a, b = make("a"), make("b")
    for step in (1, 2):
        a.save(step, BASE, head(step))
    assert a.send(2, b)[1] == 0 and b.steps() == [2]


def test_a_holder_whose_shard_differs_gets_all_bytes(make: Callable[..., StillNode]) -> None:
    """The digest in the holder's own fragment decides, not the name of a directory."""
    a, b = make("a"), make("b")
    a.save(1, BASE, head(1))
    b.save(1, BASE + 1, head(1))
    a.save(2, BASE, head(2))
    assert a.send(2, b)[1] == 0 and b.scrub(2).damage == ()


def test_a_repair_links_what_the_holder_has_read(make: Callable[..., StillNode]) -> None:
    a, b = make("a"), make("b")
    for step in (1, 2, 3):
        a.save(step, BASE, head(step))
    sent = [a.send(step, b, is_repair=True)[1] for step in (3, 2, 1)]
    assert sent == [0, a.entry(2).size_bytes, a.entry(1).size_bytes], "the newest comes first"
    assert len({b.inode(step) for step in (1, 2, 3)}) == 1 and b.steps() == [1, 2, 3]


def test_a_repair_sends_all_bytes_if_those_of_the_holder_are_damaged(
    make: Callable[..., StillNode],
) -> None:
    a, b = make("a"), make("b")
    for step in (1, 2):
        a.save(step, BASE, head(step))
    a.send(1, b)
    flip(b.path(1))
    assert a.send(2, b, is_repair=True)[1] == 0
    assert b.inode(1) != b.inode(2) and b.steps() == [1, 2] and b.scrub(2).damage == ()


def test_a_holder_links_any_checkpoint_with_the_shard(make: Callable[..., StillNode]) -> None:
    """It did not get the one before, since a copy failed."""
    a, b = make("a"), make("b")
    for step in (1, 2, 3):
        a.save(step, BASE, head(step))
        if step != 2:
            a.send(step, b)
    assert b.inode(1) == b.inode(3) and b.steps() == [1, 3]


def test_an_interrupted_request_is_sent_again(
    make: Callable[..., StillNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make("a"), make("b")
    for step in (1, 2):
        a.save(step, BASE, head(step))
    a.send(1, b)
    real, calls = PeerClient.link, list[int]()

    def once(self: PeerClient, request: Any) -> bool:
        calls.append(1)
        found = real(self, request)
        if len(calls) == 1:
            raise Unavailable("lost", refused=False)
        return found

    monkeypatch.setattr(PeerClient, "link", once)
    assert a.send(2, b)[1] and len(calls) == 2 and b.steps() == [1, 2]


# -- on the storage path


def stored_bytes(node: StillNode, step: int, suffix: str = "") -> int | None:
    name = f"checkpoints/{attempt(step).directory}/{STILL_FILE}{suffix}"
    size: int | None = node.run.remote.files.size(name)
    return size


def read_back(node: StillNode, step: int) -> bytes:
    return b"".join(map(bytes, node.run.remote.blocks(attempt(step).directory, STILL_FILE)))


def test_an_upload_copies_within_the_store(make: Callable[..., StillNode], tmp_path: Path) -> None:
    a = make("a")
    for step in (1, 2, 3):
        a.save(step, BASE, head(step))
    assert a.upload(1)[1] == 0
    a.run.staging.delete(UID, attempt(1).directory)  # its fragment is read from the storage path
    uploaded, shared = a.upload(2, like=1)
    assert shared == a.entry(2).size_bytes and uploaded < 20_000
    stored = [
        a.run.remote.files.size(f"checkpoints/{attempt(step).directory}/{STILL_FILE}") for step in (1, 2)
    ]
    assert stored == [shared, shared]
    a.run.remote.delete(attempt(1).directory)
    assert (
        b"".join(map(bytes, a.run.remote.blocks(attempt(2).directory, STILL_FILE))) == a.path(2).read_bytes()
    )
    assert a.upload(3, like=1)[1] == 0, "it is gone"


def test_an_upload_counts_bytes_as_they_are_stored(make: Callable[..., StillNode]) -> None:
    a = make("a", options=RunOptions(compress=1))
    a.save(1, BASE, head(1))
    folder = Path(a.run.remote.files.where) / "checkpoints" / attempt(1).directory
    uploaded, _ = a.upload(1)
    assert uploaded == sum(path.stat().st_size for path in folder.iterdir()) < BASE.nbytes


@pytest.mark.parametrize("level", [None, 1])
def test_an_upload_copies_only_the_form_that_the_options_ask_for(
    make: Callable[..., StillNode], level: int | None
) -> None:
    """After `compress` was turned on or off, the next checkpoint has none of the other form."""
    a = make("a", options=RunOptions(compress=None if level else 1))
    b = make("b", options=RunOptions(compress=level))
    suffix, other = ("", ".zst")[:: -1 if level else 1]
    a.save(1, BASE, head(1))
    a.upload(1)
    assert stored_bytes(a, 1, other) is not None
    for step in (1, 2, 3):
        b.save(step, BASE, head(step))
    assert b.upload(2, like=1)[1] == 0
    assert stored_bytes(b, 2, other) is None
    assert b.upload(3, like=2)[1] == stored_bytes(b, 3, suffix)
    assert stored_bytes(b, 3, other) is None and read_back(b, 3) == b.path(3).read_bytes()


def test_an_upload_copies_a_raw_shard_that_would_not_be_compressed(make: Callable[..., StillNode]) -> None:
    noise = torch.randint(-(2**62), 2**62, (1 << 18,)).view(torch.float32)
    a, b = make("a"), make("b", options=RunOptions(compress=1))
    a.save(1, noise, head(1))
    a.upload(1)
    for step in (1, 2):
        b.save(step, noise, head(step))
    assert b.upload(2, like=1)[1] == stored_bytes(b, 2) == b.entry(2).size_bytes


def test_an_upload_copies_only_what_the_other_lists_alike(make: Callable[..., StillNode]) -> None:
    a = make("a")
    a.save(1, BASE, head(1))
    a.save(2, BASE + 1, head(2))
    a.upload(1)
    assert a.upload(2, like=1)[1] == 0


def test_an_upload_shares_files_with_the_same_fragment_only(make: Callable[..., StillNode]) -> None:
    """Damage that is found in a file makes suspects of those fragments."""
    a = make("a")
    a.save(1, BASE, head(1))
    directory, file = attempt(1).directory, a.entry(1)
    (held,) = a.run.staging.holdings(UID, directory=directory)
    index, num_nodes = held.fragment.node_index, held.fragment.num_nodes
    assert has_remotely(a.run, directory, index, num_nodes, file)
    assert not has_remotely(a.run, directory, index + 1, num_nodes, file)
    assert not has_remotely(a.run, directory, index, num_nodes + 1, file)


def test_a_compressed_shard_is_copied_as_it_is(make: Callable[..., StillNode]) -> None:
    a = make("a")
    a.run.spec.options = type(a.run.spec.options)(compress=1)
    base = torch.zeros(1 << 19)
    for step in (1, 2):
        a.save(step, base, head(step))
    a.upload(1)
    shared = a.upload(2, like=1)[1]
    assert shared == stored_bytes(a, 2, ".zst") and stored_bytes(a, 2) is None
    assert (
        b"".join(map(bytes, a.run.remote.blocks(attempt(2).directory, STILL_FILE))) == a.path(2).read_bytes()
    )


def test_a_store_that_copies_nothing_gets_uploads_and_is_named_once(
    make: Callable[..., StillNode], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object) -> int:
        raise Unsupported("no copies here")

    monkeypatch.setattr(PosixFiles, "copy", refuse)
    caplog.set_level(logging.INFO)
    a = make("a")
    for step in (1, 2, 3):
        a.save(step, BASE, head(step))
        assert a.upload(step, like=step - 1 or None)[1] == 0
    assert caplog.text.count("uploaded again") == 1


# -- damage


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(300)
        byte = file.read(1)
        file.seek(300)
        file.write(bytes([byte[0] ^ 4]))


def test_a_flip_in_a_shared_file_is_found_in_every_checkpoint_and_repaired(
    make: Callable[..., StillNode],
) -> None:
    a, b = make("a"), make("b")
    for step in (1, 2, 3):
        a.save(step, BASE, head(step))
        a.send(step, b)
    a.save(4, BASE + 1, head(4))  # shares nothing
    flip(b.path(2))
    found = b.scrub(2)
    assert found.damage == (STILL_FILE,)
    assert found.shared == ((attempt(1), 0), (attempt(3), 0))
    assert b.steps() == [], "nothing is a copy until it is repaired"
    for step in (1, 2, 3):
        a.send(step, b, is_repair=True)
    assert b.steps() == [1, 2, 3] and len({b.inode(step) for step in (1, 2, 3)}) == 1
    assert all(b.scrub(step).damage == () for step in (1, 2, 3))


def evict(node: StillNode, *steps: int) -> None:
    """Evict checkpoints from a node, as a coordinator orders it."""
    effects = [m.Evict(attempt=attempt(step), node_id="a") for step in steps]
    (work,) = together(effects)
    assert isinstance(work, NodeDeletes)
    node.delete(work.order(epoch=1))


def test_what_is_only_on_the_storage_path_is_mended_from_a_later_checkpoint(node: StillNode) -> None:
    """The folder's checkpoints share one file, and older ones are on no node any more."""
    for step in (1, 2, 3):
        node.save(step, BASE, head(step))
        node.upload(step, step - 1 or None)
    folder = Path(node.run.remote.files.where) / "checkpoints"
    stored = {step: folder / attempt(step).directory / STILL_FILE for step in (1, 2, 3)}
    assert stored[1].samefile(stored[2]) and stored[1].samefile(stored[3])
    flip(stored[1])
    evict(node, 1, 2)
    for step in (1, 2, 3):
        found = scrub_stored(node.run, attempt(step), 0, 1)
        assert (found.damage, found.mended) == ((), (STILL_FILE,))
        assert stored[step].read_bytes() == node.path(3).read_bytes()
    assert stored[1].samefile(stored[2]) and stored[1].samefile(stored[3]), "written once"
    assert scrub_stored(node.run, attempt(1), 0, 1) == ScrubResult()


def test_a_retired_checkpoint_is_not_mended(node: StillNode) -> None:
    """Its folder on the storage path may be deleted already, and would come back."""
    for step in (1, 2):
        node.save(step, BASE, head(step))
        node.upload(step, step - 1 or None)
    folder = Path(node.run.remote.files.where) / "checkpoints"
    flip(folder / attempt(1).directory / STILL_FILE)
    for directories, evicted in [((1,), ()), ((1,), (1,))]:  # a late eviction changes nothing
        names = [tuple(attempt(step).directory for step in steps) for steps in (directories, evicted)]
        node.delete(n.DeleteOrdered(directories=names[0], evicted=names[1], epoch=1))
        assert scrub_stored(node.run, attempt(1), 0, 1).damage == (STILL_FILE,)


def test_a_file_that_was_mended_is_mended_again(node: StillNode) -> None:
    for step in (1, 2, 3):
        node.save(step, BASE, head(step))
        node.upload(step, step - 1 or None)
    folder = Path(node.run.remote.files.where) / "checkpoints"
    for _ in range(2):
        flip(folder / attempt(1).directory / STILL_FILE)
        for step in (1, 2, 3):
            found = scrub_stored(node.run, attempt(step), 0, 1)
            assert (found.damage, found.mended) == ((), (STILL_FILE,))


def test_what_cannot_be_mended_is_damage(node: StillNode) -> None:
    for step in (1, 2):
        node.save(step, BASE, head(step))
        node.upload(step)
    folder = Path(node.run.remote.files.where) / "checkpoints" / attempt(1).directory
    flip(folder / STILL_FILE)
    flip(folder / shard_file(0, 1))
    found = scrub_stored(node.run, attempt(1), 0, 1)
    assert (found.damage, found.mended) == ((shard_file(0, 1),), (STILL_FILE,))
    flip(folder / STILL_FILE)
    flip(node.path(2))
    shutil.rmtree(node.path(1).parent)
    found = scrub_stored(node.run, attempt(1), 0, 1)
    assert set(found.damage) == {shard_file(0, 1), STILL_FILE} and not found.mended


def test_a_flip_on_the_storage_path_is_in_every_link_and_an_upload_without_links_replaces_it(
    node: StillNode,
) -> None:
    for step, like in ((1, None), (2, 1), (3, None)):
        node.save(step, BASE, head(step))
        node.upload(step, like)
    folder = Path(node.run.remote.files.where) / "checkpoints"
    stored = {step: folder / attempt(step).directory / STILL_FILE for step in (1, 2, 3)}
    assert stored[1].samefile(stored[2]) and not stored[1].samefile(stored[3])
    flip(stored[1])

    def damaged() -> list[int]:
        blocks = {step: partial(node.run.remote.blocks, attempt(step).directory) for step in stored}
        return [step for step, read in blocks.items() if verify_stored(read, 0, 1)]

    assert damaged() == [1, 2]
    node.upload(1)
    assert damaged() == [2], "the other link has the old bytes"
    node.upload(2, like=3)
    assert damaged() == [] and stored[2].samefile(stored[3])


def lose_bytes(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Let each read of the file fail, as of a disk with a bad sector there."""
    preadv, bad = os.preadv, path.stat().st_ino

    def read(fd: int, buffers: Any, offset: int) -> int:
        if os.fstat(fd).st_ino == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)


@pytest.mark.parametrize("file", [MOVING, STILL_FILE])
def test_a_file_with_a_bad_sector_is_damaged_and_the_next_save_has_new_bytes(
    node: StillNode, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    for step in (1, 2):
        node.save(step, BASE, head(step))
    lose_bytes(monkeypatch, node.path(2, file))
    with pytest.raises(CorruptionError, match="cannot be read"):
        node.upload(2)
    assert node.scrub(2).damage == (file,)
    node.save(3, BASE, head(3))
    assert node.scrub(3).damage == ()
    assert 2 not in node.steps()
    node.upload(3)


def test_a_disk_that_fails_altogether_keeps_what_is_on_it(
    node: StillNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.save(1, BASE, head(1))
    with monkeypatch.context() as patch:
        lose_bytes(patch, node.path(1))

        def fail(path: Path, **more: Any) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        patch.setattr(files_module, "make_dirs", fail)
        with pytest.raises(OSError, match="Input/output"):
            node.scrub(1)
    assert node.steps() == [1] and node.scrub(1).damage == ()


def test_damage_to_a_file_of_its_own_concerns_one_checkpoint(node: StillNode) -> None:
    for step in (1, 2):
        node.save(step, BASE, head(step))
    flip(node.path(1, fragment_file(0, 1)))
    node.path(2, MOVING).unlink()
    assert node.scrub(1).shared == () and node.scrub(2).shared == ()


def test_a_save_after_the_quarantine_writes_a_new_file(node: StillNode) -> None:
    for step in (1, 2):
        node.save(step, BASE, head(step))
    flip(node.path(1))
    node.scrub(2)
    assert not node.save(3, BASE, head(3)).shared_bytes and node.scrub(3).damage == ()


@pytest.mark.parametrize("file", [MOVING, STILL_FILE, fragment_file(0, 1)])
def test_an_upload_of_a_copy_that_lacks_a_file_finds_damage(node: StillNode, file: str) -> None:
    node.save(1, BASE, head(1))
    node.path(1, file).unlink()
    with pytest.raises(CorruptionError, match="fragment 0 of step 1 is not on its node any more"):
        node.upload(1)
    assert node.scrub(1).damage, "the coordinator has the copy read, and counts it no more"


def test_an_upload_of_a_copy_that_is_being_deleted_finds_no_damage(node: StillNode) -> None:
    for step in (1, 2):
        node.save(step, BASE, head(step))
    node.run.machine.is_deleted = {attempt(1).attempt, attempt(2).attempt}.__contains__
    node.run.staging.delete(UID, attempt(1).directory)
    with pytest.raises(Unavailable, match="fragment 0 of step 1 is not on its node any more"):
        node.upload(1)
    with pytest.raises(Unavailable, match="step 2 is being deleted here"):
        node.upload(2)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_copy_that_is_deleted_before_or_while_it_is_read_is_not_damaged(
    node: StillNode, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    for step in (1, 2):
        node.save(step, BASE, head(step))
    if when == "before":
        evict(node, 1)
    else:

        def verify_slowly(*args: Any) -> tuple[str, ...]:
            evict(node, 1)
            return verify_fragment(*args)

        monkeypatch.setattr(files, "verify_fragment", verify_slowly)
    with pytest.raises(Unavailable, match="step 1 is"):
        node.scrub(1)
    monkeypatch.undo()
    assert node.steps() == [2] and node.scrub(2) == ScrubResult()


def test_a_bad_file_is_not_reported_of_a_copy_that_is_being_deleted(node: StillNode) -> None:
    for step in (1, 2, 3):
        node.save(step, BASE, head(step))
    flip(node.path(1))
    node.machine.handle(n.DeleteOrdered(directories=(attempt(2).directory,), epoch=1))  # its files are there
    assert [held.step for held, _ in node.scrub(1).shared] == [3]


def test_what_a_scrub_has_moved_is_reported_although_a_file_could_not_be_moved(
    node: StillNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        node.save(step, BASE, head(step))
    flip(node.path(1))
    quarantine = Staging.quarantine

    def fails_once(stage: Staging, run: str, directory: str, file: str) -> None:
        if directory == attempt(3).directory:
            raise OSError(errno.ENOSPC, "No space left on device")
        quarantine(stage, run, directory, file)

    monkeypatch.setattr(Staging, "quarantine", fails_once)
    found = node.scrub(1)
    assert found.damage == (STILL_FILE,)
    assert [held.step for held, _ in found.shared] == [2, 3]
    assert "stays in" in caplog.text and node.steps() == []


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC])
def test_damage_is_reported_although_no_file_can_be_moved(
    node: StillNode, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    for step in (1, 2):
        node.save(step, BASE, head(step))
    intact = node.path(1).read_bytes()
    flip(node.path(1))

    def fail(path: Path, **more: Any) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(files_module, "make_dirs", fail)
        found = node.scrub(1)
    assert found.damage == (STILL_FILE,) and [held.step for held, _ in found.shared] == [2]
    assert node.path(1).exists() and node.steps() == [], "no inventory lists these copies"
    assert node.scrub(2).damage, "a coordinator that counts it is corrected"
    assert not node.save(3, BASE, head(3)).shared_bytes and node.scrub(3).damage == ()
    node.run.staging.put(UID, attempt(1).directory, STILL_FILE, [intact])
    assert node.steps() == [1, 3] and node.scrub(1).damage == ()


def test_a_save_during_a_quarantine_shares_no_bad_file(
    node: StillNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        node.save(step, BASE, head(step))
    flip(node.path(1))
    sharers = node.run.staging.sharers

    def list_slowly(run: str, directory: str, file: str) -> tuple[str, ...]:
        found: tuple[str, ...] = sharers(run, directory, file)
        saving.start()
        saving.join(0.2)  # such a save would be in none of the lists
        return found

    monkeypatch.setattr(node.run.staging, "sharers", list_slowly)
    saving = threading.Thread(target=node.save, args=(3, BASE, head(3)))
    assert [held.step for held, _ in node.scrub(1).shared] == [2]
    saving.join(10)
    monkeypatch.undo()
    assert node.steps() == [3] and node.scrub(3).damage == ()


def test_a_save_whose_shared_file_a_scrub_takes_away_before_its_end_fails(node: StillNode) -> None:
    node.save(1, BASE, head(1))
    flip(node.path(1))
    stored = node.capture(2, BASE, head(2))
    assert stored.shared_bytes and node.scrub(1).damage == (STILL_FILE,)
    with pytest.raises(CorruptionError, match="step 2 is not on its node any more"):
        node.complete(2, stored)
