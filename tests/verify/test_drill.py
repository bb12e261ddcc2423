"""Drills on real peers and real files: what they read, what they name, and what they leave alone."""

from __future__ import annotations

import json
import re
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow.flight as flight
import pytest
from typer.testing import CliRunner, Result

from ray_ckpt.cli import app, main
from ray_ckpt.cli.drill import print_report
from ray_ckpt.core.loss_scenarios import REMOTE_ONLY, LiveCheckpoint, Scenario, lose_node
from ray_ckpt.errors import ConfigError
from ray_ckpt.format import records
from ray_ckpt.format.manifest import encode_fragment, uncovered
from ray_ckpt.format.names import fragment_file, make_attempt, shard_file
from ray_ckpt.location import Location
from ray_ckpt.storage.remote.tier import open_store
from ray_ckpt.transport import client
from ray_ckpt.transport.client import CALL_BASE_S, SLOWEST_BYTES_PER_S
from ray_ckpt.transport.sending import BURST_S, MAX_SHARING, Limiter
from ray_ckpt.types import Level, ManifestRow
from ray_ckpt.verify.drill import CheckpointDrill, DrillReport, choose, drill, dry_run
from ray_ckpt.verify.live_manifest import ReadAccess
from tests.servers.stores import bucket_url
from tests.servers.strict_store import StrictStore
from tests.support.peer_nodes import A, B, C, Nodes, both, flip, live, sample
from tests.support.roots import ROOTS
from tests.support.sample_run import SampleCheckpoint, SampleRun, copy_to, make_checkpoint, write_run
from tests.transport.peers import UID


@pytest.fixture(params=ROOTS)
def saved(request: pytest.FixtureRequest) -> SampleCheckpoint:
    return sample(10, request.param)


LOSE_A, LOSE_B = lose_node(A, [A]), lose_node(B, [B])


def test_every_byte_is_read_once_from_what_is_left(nodes: Nodes, saved: SampleCheckpoint) -> None:
    counted: list[int] = []
    result = dry_run(both(nodes, saved), LOSE_A, nodes.reach, counted.append)
    assert (result.verdict, result.problems, result.notes) == ("passed", (), ())
    sizes = [
        sum(saved.files[f.name].__len__() for f in fragment.files)
        + len(saved.files[fragment_file(fragment.node_index, 2)])
        for fragment in saved.fragments
    ]
    assert result.read_bytes == {"peer": sizes[0], "local": sizes[1]}
    assert sum(counted) == sum(sizes) == saved.size_bytes
    assert all(read.seconds > 0 and read.bytes_per_s > 0 for read in result.reads.values())


def test_a_damaged_replica_fails_the_loss_that_needs_it_until_it_is_good_again(
    nodes: Nodes, saved: SampleCheckpoint
) -> None:
    there, shard = both(nodes, saved), shard_file(0, 2)
    flip(nodes.folder(B, saved) / shard)
    result = dry_run(there, LOSE_A, nodes.reach)
    assert result.verdict == "failed"
    [problem] = result.problems
    assert shard in problem and B[:12] in problem and "wrong digest" in problem
    other = dry_run(there, LOSE_B, nodes.reach)
    assert other.verdict == "passed" and not other.notes
    nodes.put(B, saved, 0)  # as repair does
    assert dry_run(there, LOSE_A, nodes.reach).verdict == "passed"


def test_damage_that_another_source_makes_good_is_a_note(nodes: Nodes, saved: SampleCheckpoint) -> None:
    nodes.put("remote", saved, 0, 1)
    there = both(nodes, saved)
    durable = replace(there, checkpoint=replace(there.checkpoint, level=Level.DURABLE))
    flip(nodes.folder(B, saved) / shard_file(0, 2))
    result = dry_run(durable, LOSE_A, nodes.reach)
    assert result.verdict == "passed" and result.read_bytes["remote"] > 0
    [note] = result.notes
    assert B[:12] in note


def test_remote_only_reads_the_storage_path_alone(nodes: Nodes, saved: SampleCheckpoint) -> None:
    nodes.put("remote", saved, 0, 1)
    durable = live(saved, level=Level.DURABLE)  # no node has a file
    result = dry_run(durable, REMOTE_ONLY, nodes.reach)
    assert result.verdict == "passed" and result.read_bytes == {"remote": saved.size_bytes}
    flip(nodes.folder("remote", saved) / shard_file(1, 2))
    result = dry_run(durable, REMOTE_ONLY, nodes.reach)
    assert result.verdict == "failed"
    assert shard_file(1, 2) in result.problems[0] and str(nodes.root / "remote") in result.problems[0]


@pytest.mark.parametrize("file", [shard_file(0, 2), fragment_file(0, 2)])
def test_a_file_that_is_not_there_is_named(nodes: Nodes, saved: SampleCheckpoint, file: str) -> None:
    there = both(nodes, saved)
    (nodes.folder(B, saved) / file).unlink()
    result = dry_run(there, LOSE_A, nodes.reach)
    assert result.verdict == "failed"
    assert any(file in line and B[:12] in line for line in result.problems)


def test_a_manifest_of_other_bytes_is_no_proof(nodes: Nodes, saved: SampleCheckpoint) -> None:
    there = both(nodes, saved)
    other = replace(there, checkpoint=replace(there.checkpoint, root_digest="0" * 32))
    result = dry_run(other, LOSE_A, nodes.reach)
    assert result.verdict == "failed" and "not the one that was committed" in result.problems[0]


def test_of_manifests_that_differ_the_one_in_the_log_is_read(nodes: Nodes, saved: SampleCheckpoint) -> None:
    there, lose_c = both(nodes, saved), lose_node(C, [C])
    for holder, index in ((A, 0), (B, 1)):  # which are read first
        other = encode_fragment(replace(saved.fragments[index], metrics={"loss": 7.0}))
        (nodes.folder(holder, saved) / fragment_file(index, 2)).write_bytes(other)
    result = dry_run(there, lose_c, nodes.reach)
    assert (result.verdict, result.problems) == ("passed", ())
    assert [line.partition(":")[0] for line in result.notes] == [
        f"{fragment_file(0, 2)} on peer {A[:12]}",
        f"{fragment_file(1, 2)} on peer {B[:12]}",
    ]
    assert all("not the one that was committed" in line for line in result.notes)
    assert dry_run(there, LOSE_A, nodes.reach).verdict == "failed", "B alone has no such fragment 1"


def with_a_gap(saved: SampleCheckpoint) -> SampleCheckpoint:
    """Return files as a faulty writer would leave them: one tensor has a row too many, all digests fit."""

    def taller(row: ManifestRow) -> ManifestRow:
        part = row.slice
        if part is None or part.key != "model.blocks.0.weight":
            return row
        shape = (part.global_shape[0] + 1, *part.global_shape[1:])
        return replace(row, slice=replace(part, global_shape=shape))

    fragments = tuple(replace(f, rows=tuple(map(taller, f.rows))) for f in saved.fragments)
    changed = {fragment_file(f.node_index, f.num_nodes): encode_fragment(f) for f in fragments}
    return replace(saved, fragments=fragments, files={**saved.files, **changed})


def test_a_tensor_with_a_gap_fails_though_all_digests_fit(nodes: Nodes, saved: SampleCheckpoint) -> None:
    result = dry_run(both(nodes, with_a_gap(saved)), LOSE_A, nodes.reach)
    assert result.verdict == "failed"
    assert result.problems == ("6 elements of model.blocks.0.weight are in no slice.",)


def test_of_many_slices_a_part_is_in_hand_at_a_time(
    nodes: Nodes, saved: SampleCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def noted(rows: Iterable[ManifestRow]) -> Iterator[str]:
        rows = list(rows)
        seen.append([row.slice.key for row in rows if row.slice is not None])
        yield from uncovered(rows)

    monkeypatch.setattr("ray_ckpt.verify.drill.uncovered", noted)
    assert dry_run(both(nodes, saved), LOSE_A, nodes.reach).verdict == "passed"
    [whole] = seen
    monkeypatch.setattr("ray_ckpt.verify.drill.MAX_SLICES", 4)
    seen.clear()
    assert dry_run(both(nodes, saved), LOSE_A, nodes.reach).verdict == "passed"
    assert len(seen) == -(-len(whole) // 4) and max(map(len, seen)) < len(whole)
    assert sorted(key for keys in seen for key in keys) == sorted(whole)
    assert sum(len(set(keys)) for keys in seen) == len(set(whole)), "each tensor in one turn"
    result = dry_run(both(nodes, with_a_gap(saved)), LOSE_A, nodes.reach)
    assert result.problems == ("6 elements of model.blocks.0.weight are in no slice.",)


def test_a_manifest_that_is_lost_while_it_is_read_again_reports_no_gaps(
    nodes: Nodes, saved: SampleCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, lost = both(nodes, saved), fragment_file(1, 2)

    def removed(rows: Iterable[ManifestRow]) -> Iterator[str]:
        (nodes.folder(B, saved) / lost).unlink(missing_ok=True)
        yield from uncovered(rows)

    monkeypatch.setattr("ray_ckpt.verify.drill.MAX_SLICES", 4)
    monkeypatch.setattr("ray_ckpt.verify.drill.uncovered", removed)
    result = dry_run(there, LOSE_A, nodes.reach)
    assert result.verdict == "failed" and all(line.startswith(lost) for line in result.problems)


def test_a_node_without_an_agent_is_reported(nodes: Nodes, saved: SampleCheckpoint) -> None:
    there = both(nodes, saved)
    del nodes.endpoints[B]
    result = dry_run(there, LOSE_A, nodes.reach)
    assert result.verdict == "failed" and "no holder has an agent" in result.problems[0]


def test_much_damage_is_reported_in_a_few_lines(nodes: Nodes) -> None:
    attempt = make_attempt(run_uid=UID, session=1, step=10, attempt=0)
    saved = make_checkpoint(attempt, world_size=32, rows=64)  # each rank has several rows
    there = both(nodes, saved)
    for rank in range(32):
        path = nodes.folder(B, saved) / shard_file(rank, 32)
        path.write_bytes(bytes(path.stat().st_size))
    result = dry_run(there, LOSE_A, nodes.reach)
    assert len(result.problems) == 21 and result.problems[-1].startswith("and ")


def test_nothing_is_written_or_left_running(nodes: Nodes, saved: SampleCheckpoint) -> None:
    there = both(nodes, saved)
    before = {path: path.stat().st_mtime_ns for path in nodes.root.rglob("*")}
    threads = {t.name for t in threading.enumerate()}
    dry_run(there, LOSE_A, nodes.reach)
    assert before == {path: path.stat().st_mtime_ns for path in nodes.root.rglob("*")}
    assert {t.name for t in threading.enumerate()} <= threads


def test_all_streams_of_a_drill_share_its_limit(nodes: Nodes, saved: SampleCheckpoint) -> None:
    """Each block waits until those before it have left: the last one for all but its own bytes."""
    waits: list[float] = []
    limiter = Limiter(1000.0, clock=lambda: 0.0, sleep=waits.append)
    result = dry_run(both(nodes, saved), LOSE_A, replace(nodes.reach, limiter=limiter))
    largest = max(map(len, saved.files.values()))
    assert result.verdict == "passed"
    assert (saved.size_bytes - largest) / 1000 - BURST_S <= max(waits) <= saved.size_bytes / 1000


def test_a_peer_that_a_limit_holds_up_is_not_taken_for_gone(
    nodes: Nodes, saved: SampleCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time limit of a read is that of its bytes if all streams share the rate limit."""
    times_s: list[float] = []

    def options(*, timeout: float, headers: list[tuple[bytes, bytes]]) -> flight.FlightCallOptions:
        times_s.append(timeout)
        return flight.FlightCallOptions(timeout=timeout, headers=headers)

    monkeypatch.setattr(client, "flight", Mock(wraps=flight, FlightCallOptions=options))
    there = both(nodes, saved)
    size = len(saved.files[shard_file(0, 2)])
    limited = Limiter(1000.0, sleep=lambda _: None)
    for limiter, bytes_per_s in ((Limiter(), SLOWEST_BYTES_PER_S), (limited, 1000.0 / MAX_SHARING)):
        times_s.clear()
        assert dry_run(there, LOSE_A, replace(nodes.reach, limiter=limiter)).verdict == "passed"
        assert CALL_BASE_S + size / bytes_per_s in times_s


# a drill of several checkpoints


def run_drill(
    nodes: Nodes, known: Sequence[LiveCheckpoint], scenario: Scenario = LOSE_A, **options: object
) -> DrillReport:
    reach = nodes.reach
    settings: dict[str, object] = {"last_step": 35, "retry": lambda c: (c, reach), **options}
    return drill(known, scenario, reach, **settings)  # type: ignore[arg-type]


def test_the_newest_that_passes_is_what_a_run_would_go_on_from(nodes: Nodes) -> None:
    saves = [sample(step) for step in (10, 20, 30)]
    known = [both(nodes, saved) for saved in saves]
    flip(nodes.folder(B, saves[2]) / shard_file(0, 2))
    recorded: list[CheckpointDrill] = []
    report = run_drill(nodes, known, record=recorded.append)
    assert [(r.checkpoint.step, r.verdict) for r in report.results] == [
        (30, "failed"),
        (20, "passed"),
        (10, "passed"),
    ]
    assert not report.passed and recorded == list(report.results)
    assert report.resume is not None and (report.resume.step, report.steps_lost) == (20, 15)
    assert sum(read.size_bytes for read in report.reads.values()) > 2 * saves[0].size_bytes


def test_what_is_off_the_lineage_is_drilled_and_not_gone_on_from(nodes: Nodes) -> None:
    old, aside = sample(10), sample(20)
    known = [both(nodes, old), replace(both(nodes, aside), on_lineage=False)]
    report = run_drill(nodes, known)
    assert report.passed and report.resume is not None and report.resume.step == 10


def test_what_no_promise_covers_fails_no_drill_and_is_not_recorded(nodes: Nodes) -> None:
    saved = sample(10)
    nodes.put(A, saved, 0)
    nodes.put(B, saved, 1)
    recorded: list[CheckpointDrill] = []
    report = run_drill(nodes, [live(saved, (A,), (B,), level=Level.LOCAL)], record=recorded.append)
    assert not report.failed and not report.passed and not report.is_covered
    assert report.results[0].verdict == "not covered" and not recorded
    assert report.resume is None and report.steps_lost == 35


def test_what_is_retired_while_it_is_read_fails_nothing(nodes: Nodes, saved: SampleCheckpoint) -> None:
    there = live(sample(5))  # and no file is there any more
    report = run_drill(nodes, [both(nodes, saved), there], retry=lambda known: None)
    assert report.passed and [r.verdict for r in report.results] == ["passed", "retired"]


def test_a_drill_of_one_step_names_no_checkpoint_to_continue_from(nodes: Nodes) -> None:
    known = [both(nodes, sample(step)) for step in (10, 30)]
    report = run_drill(nodes, known, step=10)
    assert report.passed and [r.checkpoint.step for r in report.results] == [10]
    assert not report.is_conclusive and (report.resume, report.steps_lost) == (None, None)
    alone = run_drill(nodes, known[:1], step=10)
    assert alone.resume is not None and (alone.resume.step, alone.steps_lost) == (10, 25), (
        "it is all there is"
    )


def test_a_drill_is_inconclusive_if_the_newest_was_retired_meanwhile(nodes: Nodes) -> None:
    older, newest = both(nodes, sample(10)), live(sample(30))
    report = run_drill(nodes, [older, newest], retry=lambda known: None)
    assert [r.verdict for r in report.results] == ["retired", "passed"] and report.passed
    assert not report.is_conclusive and (report.resume, report.steps_lost) == (None, None)


def test_a_drill_of_what_was_all_retired_has_not_passed(nodes: Nodes, saved: SampleCheckpoint) -> None:
    there = both(nodes, saved)
    flip(nodes.folder(B, saved) / shard_file(0, 2))
    with pytest.raises(ConfigError, match="were retired while they were read"):
        run_drill(nodes, [there], retry=lambda known: None)


def test_a_promise_that_was_retired_is_no_promise_tried(nodes: Nodes, saved: SampleCheckpoint) -> None:
    unsafe = live(sample(20), (A,), (B,), level=Level.LOCAL)
    report = run_drill(
        nodes, [live(saved), unsafe], retry=lambda known: None if known != unsafe else (unsafe, nodes.reach)
    )
    assert [r.verdict for r in report.results] == ["not covered", "retired"]
    assert not report.passed and not report.failed and not report.is_covered


def test_what_moves_while_it_is_read_is_read_where_it_is(nodes: Nodes, saved: SampleCheckpoint) -> None:
    nodes.put(C, saved, 0, 1)
    moved = live(saved, (A, C), (A, C))
    report = run_drill(nodes, [live(saved)], retry=lambda known: (moved, nodes.reach))
    assert report.passed and report.results[0].read_bytes == {"peer": saved.size_bytes}


def test_an_agent_that_has_moved_is_found_again(nodes: Nodes, saved: SampleCheckpoint) -> None:
    there, before = both(nodes, saved), nodes.reach
    gone = replace(before, endpoints={**before.endpoints, B: "grpc+tls://127.0.0.1:1"})
    requested: list[LiveCheckpoint] = []

    def again(known: LiveCheckpoint) -> tuple[LiveCheckpoint, ReadAccess]:
        requested.append(known)
        return known, before

    report = drill([there], LOSE_A, gone, last_step=10, retry=again)
    assert report.passed and report.results[0].verdict == "passed" and requested == [there]


def test_a_step_that_is_not_live_is_refused(saved: SampleCheckpoint) -> None:
    assert choose([live(saved)], 10) == choose([live(saved)], None)
    with pytest.raises(ConfigError, match="no live checkpoint of step 11"):
        choose([live(saved)], 11)


# the command, without a cluster


@pytest.fixture
def run(tmp_path: Path) -> SampleRun:
    return write_run(tmp_path, steps=(10, 20, 30, 40), durable=(10, 30))


def command(*args: object) -> Result:
    return CliRunner().invoke(app, ["drill", *map(str, args)], catch_exceptions=False)


def test_the_command_reads_what_the_storage_path_has_of_a_run(run: SampleRun) -> None:
    result = command(run.folder, "--remote-only")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "run gpt  remote-only: passed"
    shown = [re.split(r"  +", line.strip())[:3] for line in lines[4:8]]
    assert [(row[0], row[2]) for row in shown] == [
        ("40", "not covered"),
        ("30", "passed"),
        ("20", "not covered"),
        ("10", "passed"),
    ]
    assert "step 40: it is not on the storage path" in lines
    assert (
        lines[-1] == "After this loss the run would continue from step 30: at least 10 steps would be lost."
    )
    assert "not in the run's log" in result.stderr


def test_the_command_as_json(run: SampleRun) -> None:
    document = json.loads(command(run.folder, "--remote-only", "--step", "30", "--json").stdout)
    assert (document["scenario"], document["passed"], document["recorded"]) == ("remote-only", True, False)
    assert (document["resume_step"], document["steps_lost"], document["last_step"]) == (None, None, None)
    [found] = document["checkpoints"]
    assert found["verdict"] == "passed" and found["tiers"]["remote"]["size_bytes"] > 10_000
    assert document["tiers"] == found["tiers"]
    document = json.loads(command(run.folder, "--remote-only", "--json").stdout)
    assert (document["resume_step"], document["steps_lost"], document["last_step"]) == (30, 10, None)


def test_the_command_concludes_nothing_from_one_step(run: SampleRun) -> None:
    result = command(run.folder, "--remote-only", "--step", "10")
    assert result.exit_code == 0 and "remote-only: passed" in result.stdout
    assert "continue from step" not in result.stdout and "be lost" not in result.stdout
    assert "The checkpoint from which the run would continue is shown only without --step." in result.stdout


@pytest.mark.parametrize(
    ("last_step", "text"),
    [
        (None, "step 30: no saved step would be lost; the number of later steps is unknown."),
        (30, "step 30: no step would be lost."),
        (31, "step 30: 1 step would be lost."),
        (35, "step 30: 5 steps would be lost."),
    ],
)
def test_lost_steps_are_reported_as_far_as_they_are_known(
    nodes: Nodes, capsys: pytest.CaptureFixture[str], last_step: int | None, text: str
) -> None:
    print_report("gpt", run_drill(nodes, [both(nodes, sample(30))], last_step=last_step))
    assert capsys.readouterr().out.splitlines()[-1] == f"After this loss the run would continue from {text}"


@pytest.mark.parametrize(
    ("given", "bytes_per_s"),
    [
        ("200MB/s", 200_000_000),
        ("2 GB", 2_000_000_000),
        ("1000000", 1_000_000),
        ("1.5GB/s", 1_500_000_000),
        ("200mb / sec", 200_000_000),
        ("1GiB/s", 1 << 30),
        ("64 MiB", 64 << 20),
        ("0", None),
    ],
)
def test_the_command_takes_a_limit(
    run: SampleRun, monkeypatch: pytest.MonkeyPatch, given: str, bytes_per_s: int | None
) -> None:
    limits: list[float | None] = []

    def noted(limit: float | None) -> Limiter:
        limits.append(limit)
        return Limiter(limit)

    monkeypatch.setattr("ray_ckpt.cli.drill.Limiter", noted)
    assert command(run.folder, "--remote-only", "--max-rate", given).exit_code == 0
    assert limits == [bytes_per_s]


def test_a_damaged_object_on_the_storage_path_fails_the_command(run: SampleRun) -> None:
    flip(run.directory(30) / shard_file(1, 2))
    result = command(run.folder, "--remote-only")
    assert result.exit_code == 1 and "remote-only: FAILED" in result.stdout
    assert re.search(rf"step 30: {shard_file(1, 2)}: \S+\[.*\] on remote .*: wrong digest", result.stdout)
    assert "would continue from step 10: at least 30 steps would be lost" in result.stdout


def test_a_run_that_is_all_retired_while_it_is_read_is_no_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path, steps=(10,), durable=(10,))
    flip(run.directory(10) / shard_file(1, 2))

    def retired_meanwhile(*args: Any) -> CheckpointDrill:
        run.log.append(records.Retired(attempt=run.checkpoints[10].attempt.attempt, reason="test"))
        return dry_run(*args)

    monkeypatch.setattr("ray_ckpt.verify.drill.dry_run", retired_meanwhile)
    with pytest.raises(SystemExit) as caught:
        main(["drill", str(run.folder), "--remote-only"])
    found = capsys.readouterr()
    assert caught.value.code == 2 and "were retired while they were read" in found.err and not found.out


def test_a_run_without_checkpoints_has_nothing_to_prove(tmp_path: Path) -> None:
    folder = write_run(tmp_path, steps=(10,), durable=()).folder
    result = command(folder, "--remote-only")
    assert result.exit_code == 0 and "no checkpoint must survive this loss" in result.stdout
    assert "no checkpoint is left to continue from: at least 10 steps would be lost" in result.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "needs one loss"),
        (("--remote-only", "--lose-node", "ab"), "needs one loss"),
        (("--remote-only", "--step", "11"), "no live checkpoint of step 11"),
        (("--lose-node", "ab", "--address", "127.0.0.1:1"), "No Ray cluster answers"),
        (("--remote-only", "--max-rate", "fast"), "--max-rate is 'fast'. Give one such as 200MB/s"),
        (("--remote-only", "--max-rate", "999KB/s"), "1MB/s or more"),
        (("--remote-only", "--max-rate", "5\N{KELVIN SIGN}B/s"), "Give one such as 200MB/s"),
        (("--remote-only", "--max-rate", "8Mbit/s"), "--max-rate is '8Mbit/s'. Give one such as 200MB/s"),
        (("--remote-only", "--max-rate", "-1MB/s"), "1MB/s or more"),
    ],
)
def test_wrong_usage_is_one_line(
    run: SampleRun, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["drill", str(run.folder), *args])
    error = capsys.readouterr().err
    assert caught.value.code == 2 and message in error and error.count("\n") == 1


def test_the_last_drill_is_shown_with_its_checkpoint(run: SampleRun) -> None:
    show = ["show", str(run.folder), "30"]
    assert re.search(r"last drill +none", CliRunner().invoke(app, show).stdout)
    run.log.append(
        records.Drilled(
            attempt=run.checkpoints[30].attempt.attempt,
            scenario="lose-node 3f2a1b4c9d0e",
            passed=False,
            seconds=1.5,
            read_bytes={"peer": 100.0},
            text="fragment 0: no live node holds it",
        )
    )
    text = CliRunner().invoke(app, show).stdout
    assert re.search(r"last drill +failed: lose-node 3f2a1b4c9d0e, .* ago", text)
    document = json.loads(CliRunner().invoke(app, [*show, "--json"]).stdout)
    assert document["drill"] == "failed: lose-node 3f2a1b4c9d0e"
    assert document["drilled_at_s"] > document["committed_at_s"]


# In a bucket


@pytest.fixture
def storage(strict: StrictStore, credentials: None) -> Location:
    """A storage path of S3 that nobody else has."""
    return Location.parse(bucket_url("s3", strict.endpoint, f"drill/{uuid.uuid4().hex}"))


def test_a_run_in_a_bucket_is_drilled_and_planned_alike(
    run: SampleRun, tmp_path: Path, storage: Location
) -> None:
    flip(run.directory(30) / shard_file(1, 2))
    copy_to(open_store(storage, None)[0], tmp_path)
    here, there = (
        json.loads(command(path, "--remote-only", "--json").stdout) for path in (run.folder, storage / "gpt")
    )
    assert [c["verdict"] for c in there["checkpoints"]] == ["not covered", "failed", "not covered", "passed"]
    assert there["resume_step"] == here["resume_step"] == 10
    assert there["tiers"]["remote"]["size_bytes"] == here["tiers"]["remote"]["size_bytes"]
    planned = CliRunner().invoke(app, ["verify", str(storage / "gpt"), "--all", "--plan"])
    assert planned.exit_code == 0 and planned.stdout.count(": can be restored;") == 2
