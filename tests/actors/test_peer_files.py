"""Copies that peers send to a node: the node obeys the epoch of the sender before a copy counts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ray_ckpt.actors.agent import peer_files
from ray_ckpt.actors.agent import run as run_module
from ray_ckpt.actors.agent.node import Node
from ray_ckpt.actors.agent.peer_files import MAX_SERVED, SERVE_WAIT_S, PeerFiles
from ray_ckpt.actors.agent.run import EPOCH_S, NodeRun
from ray_ckpt.actors.agent.runs import NodeRuns
from ray_ckpt.actors.messages import RunSpec
from ray_ckpt.config import RunOptions
from ray_ckpt.core import node_messages as n
from ray_ckpt.errors import Fenced, Unavailable
from ray_ckpt.format.digest import digest
from ray_ckpt.format.names import make_attempt
from ray_ckpt.storage.local.direct import Written
from ray_ckpt.storage.local.disks import Disks
from ray_ckpt.transport.client import CALL_BASE_S
from ray_ckpt.transport.credentials import ServiceKeys
from ray_ckpt.transport.wire import FileName, PutRequest

UID = "a" * 32
DATA = b"shard"
FILE = "shard-00000-of-00001.safetensors"
ATTEMPT = make_attempt(run_uid=UID, epoch=1, session=1, step=3, attempt=0)
DROP = n.OutcomeNotified(attempt=ATTEMPT, level=None, error=Unavailable("dropped"), epoch=4)


def received(tmp_path: Path, epoch: int, *orders: n.Order) -> NodeRun:
    """Return a run that obeyed epoch 4 when a peer of `epoch` sent a copy; `orders` come during the write."""

    def chunks(run: NodeRun, loop: asyncio.AbstractEventLoop) -> Iterator[bytes]:
        for order in orders:
            asyncio.run_coroutine_threadsafe(run.obey(order), loop).result(10)
        yield DATA

    async def receive() -> NodeRun:
        runs = NodeRuns(Node("node", ServiceKeys.make(datetime.now(UTC))))
        options = RunOptions(staging=str(tmp_path / "staging"))
        run = await runs.take_up(RunSpec(name="run", storage_path=str(tmp_path), options=options), UID)
        await run.obey(n.EpochSeen(epoch=4))
        name = FileName(run_uid=UID, directory=ATTEMPT.directory, file=FILE)
        request = PutRequest(name=name, size_bytes=len(DATA), digest=digest(DATA), epoch=epoch)
        sent = chunks(run, asyncio.get_running_loop())
        written = await asyncio.to_thread(PeerFiles(runs.open).put, request, sent)
        assert written == request.digest
        return run

    return asyncio.run(receive())


@pytest.mark.parametrize("epoch", [0, 3, 4, 5])
def test_a_copy_counts_when_its_holder_obeys_the_epoch_of_the_sender(tmp_path: Path, epoch: int) -> None:
    run = received(tmp_path, epoch)
    assert run.machine.epoch == run.staging.epoch(UID) == max(4, epoch)


def test_no_order_of_a_lower_epoch_deletes_a_copy_that_counts(tmp_path: Path) -> None:
    run = received(tmp_path, 5)
    with pytest.raises(Fenced):
        asyncio.run(run.obey(DROP))


def test_a_copy_that_was_dropped_while_it_was_written_does_not_count(tmp_path: Path) -> None:
    with pytest.raises((Unavailable, FileNotFoundError)):
        received(tmp_path, 5, DROP)


def test_a_copy_that_comes_after_the_files_were_deleted_is_deleted_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Disks.put

    def after_the_delete(
        disks: Disks, uid: str, directory: str, file: str, chunks: Iterable[bytes], **options: Any
    ) -> Written:
        return write(disks, uid, directory, file, list(chunks), **options)  # the chunks wait for the delete

    monkeypatch.setattr(Disks, "put", after_the_delete)
    with pytest.raises(Unavailable, match="being deleted"):
        received(tmp_path, 5, DROP)
    assert not [path for path in (tmp_path / "staging").rglob("*") if ATTEMPT.directory in str(path)]


def test_a_peer_tries_again_if_the_epoch_is_not_durable_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go = threading.Event()
    monkeypatch.setattr(run_module, "EPOCH_S", 0.01)
    write = NodeRun.persist_epoch

    def slowly(run: NodeRun, epoch: int) -> None:
        assert epoch == 4 or may_go.wait(10)
        write(run, epoch)

    monkeypatch.setattr(NodeRun, "persist_epoch", slowly)
    try:
        with pytest.raises(Unavailable, match="epoch 5") as caught:
            received(tmp_path, 5)
        assert caught.value.fields["refused"] is False
    finally:
        may_go.set()


def test_a_node_that_many_peers_read_from_sends_them_away_only_for_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_files, "SERVE_WAIT_S", 0.01)
    run = received(tmp_path, 4)
    files, name = PeerFiles({UID: run}), FileName(run_uid=UID, directory=ATTEMPT.directory, file=FILE)
    readers = [files.read(name, 0, None) for _ in range(MAX_SERVED)]
    assert [bytes(next(blocks)) for blocks in readers] == [DATA] * MAX_SERVED
    with pytest.raises(Unavailable) as caught:
        next(files.read(name, 0, None))
    assert caught.value.fields["refused"] is False, "the peer tries again"
    del readers[-1]  # ends its read
    assert bytes(next(files.read(name, 0, None))) == DATA


def test_a_peer_waits_here_no_longer_than_its_call_may_take() -> None:
    assert max(SERVE_WAIT_S, EPOCH_S) < CALL_BASE_S
