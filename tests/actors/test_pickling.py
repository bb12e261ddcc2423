"""Records that are pickled quickly."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from dataclasses import replace

from ray_ckpt.actors.messages import GatheredAnswer, GatheredReport
from ray_ckpt.core import messages as m
from ray_ckpt.core.values import RankProgress
from ray_ckpt.engine.ports import Failure
from ray_ckpt.errors import RunConflict
from ray_ckpt.format.names import make_attempt
from ray_ckpt.types import FileEntry, SaveFacts

ATTEMPT = make_attempt(run_uid="a" * 32, epoch=1, session=2, step=3, attempt=0)
RECORDS = (
    ATTEMPT,
    m.NodeStored(
        attempt=ATTEMPT,
        node_index=4,
        node_id="n",
        fragment=FileEntry(name="f", size_bytes=5, digest="d" * 32),
        size_bytes=6,
        replicated=("a:1",),
        metrics={"loss": 1.5},
        facts=SaveFacts(mesh="2x4", stall_s=0.5),
    ),
    m.ReplicaEnded(attempt=ATTEMPT, node_index=4, holder="h", error=None),
    m.RanksProgressed(session_key=(1, 2), ranks=dict.fromkeys((0, 1), RankProgress(step=7, saved_step=3))),
    GatheredReport(method="node_stored", arguments=(ATTEMPT,), waits=False),
    GatheredAnswer(value=("x",)),
    Failure(text="no", is_dead=True),
)


def test_records_stay_the_same() -> None:
    for record in RECORDS:
        assert pickle.loads(pickle.dumps(record)) == record == copy.deepcopy(record)
    progressed = pickle.loads(pickle.dumps(RECORDS[3]))
    assert progressed.distinct == (RankProgress(step=7, saved_step=3),), "two ranks share one object"
    error = pickle.loads(pickle.dumps(GatheredAnswer(error=RunConflict("no")))).error
    assert isinstance(error, RunConflict)


def test_the_attempt_of_many_messages_is_one_object() -> None:
    first, second = (pickle.loads(pickle.dumps(replace(RECORDS[2], node_index=k))) for k in (4, 5))
    assert first.attempt is second.attempt and first.attempt == ATTEMPT


def test_a_process_that_knows_no_messages_reads_them() -> None:
    read = "import pickle, sys; print(pickle.load(sys.stdin.buffer).step)"
    done = subprocess.run(
        [sys.executable, "-c", read], input=pickle.dumps(ATTEMPT), capture_output=True, check=True, timeout=60
    )
    assert done.stdout == b"3\n"
