"""The bench runs and prints its rows; the tests judge no speed."""

from __future__ import annotations

import io
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console

from jobs.bench import __main__ as bench
from jobs.bench import coordinator, history, overhead, remote, report, state
from jobs.bench.context import Context
from jobs.bench.limits import Limits
from jobs.bench.overhead import Stretch
from jobs.bench.peers import environments
from jobs.bench.peers import measure as peers
from jobs.bench.peers.catalogue import PEERS, Peer
from jobs.bench.peers.libraries import LIBRARIES
from jobs.bench.report import margin
from jobs.bench.row import Reference, Row, interleaved, measure, skipped, spread
from jobs.demo import s3_server
from ray_ckpt.location import Location
from ray_ckpt.storage.remote.tier import RemoteRef

FACTS: Mapping[str, Any] = {
    "date": "2026-01-01T00:00:00+00:00",
    "command": "python -m jobs.bench",
    "size_bytes": 1 << 20,
    "repeat": 2,
    "quick": False,
    "cpu": "A processor",
    "cores": 2,
    "memory_bytes": 8 << 30,
    "kernel": "Linux 6",
    "file_system": "ext4",
    "python": "3.11",
    "versions": {"torch": "2"},
    "load": 0.5,
}


def row(*samples: float, beside: float | None = None, reach: str = "", name: str = "row") -> Row:
    reference = None if beside is None else Reference(name="other", samples=(beside, beside))
    return Row(
        name=name,
        what="something",
        unit="ms",
        samples=samples,
        reference=reference,
        reach=reach,
        load=1.5,
    )


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(size_bytes=1 << 20, repeat=2, folder=tmp_path, quick=True)


class TestRows:
    def test_a_row_is_a_median_beside_its_reference(self) -> None:
        measured = row(3, 1, 2, beside=4, reach="<= 1")
        assert (measured.median, spread(measured.samples), measured.ratio) == (2, 1, 0.5)
        assert measured.verdict == "pass"

    @pytest.mark.parametrize(
        ("own", "reach", "verdict"),
        [
            (11.5, "<= 1.15", "pass"),
            (11.6, "<= 1.15", "miss"),
            (8.5, ">= 0.85", "pass"),
            (8.4, ">= 0.85", "miss"),
            (99, "", "-"),
        ],
    )
    def test_a_cost_reaches_from_above_and_a_speed_from_below(
        self, own: float, reach: str, verdict: str
    ) -> None:
        assert row(own, beside=10, reach=reach).verdict == verdict

    def test_a_row_that_was_not_measured_has_the_reason(self) -> None:
        one = skipped("row", "something", "not here")
        assert (one.median, one.ratio, one.verdict) == (None, None, "skipped")
        assert skipped("row", "it", OSError("no\nmore")).skipped == "OSError: no"

    @pytest.mark.parametrize(
        "wrong",
        [
            {"samples": ()},
            {"samples": (1.0,), "reach": "<= 1"},
            {"samples": (1.0,), "reference": Reference(name="r", samples=(1.0,)), "reach": "about 1"},
        ],
    )
    def test_a_row_that_means_nothing_is_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="row: "):
            Row(name="row", what="something", **wrong)

    def test_samplers_take_turns(self) -> None:
        turns: list[str] = []

        def sampler(name: str) -> float:
            turns.append(name)
            return float(len(turns))

        samples = interleaved({"a": partial(sampler, "a"), "b": partial(sampler, "b")}, 3)
        assert turns == ["a", "b"] * 3
        assert samples == {"a": (1.0, 3.0, 5.0), "b": (2.0, 4.0, 6.0)}

    def test_speeds_are_compared_as_speeds(self) -> None:
        beside = ("raw", lambda: 1.0)
        size_bytes = 4 * 10**9
        one = measure(
            "row", "w", "GB/s", lambda: 2.0, beside=beside, repeat=2, reach=">= 0.5", size_bytes=size_bytes
        )
        assert one.samples == (2.0, 2.0) and one.reference == Reference(name="raw", samples=(4.0, 4.0))
        assert (one.ratio, one.verdict) == (0.5, "pass")

    def test_a_limit_is_a_plain_number_at_most(self) -> None:
        assert measure("row", "w", "s", lambda: 2.0, repeat=3, limit=2.0).verdict == "pass"
        slow = measure("row", "w", "s", lambda: 2.1, repeat=3, limit=2.0)
        assert slow.verdict == "miss" and len(slow.samples) == 3 and slow.load >= 0
        assert measure("row", "w", "s", lambda: 2.0, repeat=1).verdict == "-"

    def test_margin_is_above_one_where_more_than_wanted_is_reached(self) -> None:
        assert margin(row(5, beside=10, reach="<= 1")) == 2
        assert margin(row(5, beside=10, reach=">= 1")) == 0.5


class TestState:
    def test_the_state_has_the_wanted_size_and_hundreds_of_tensors(self) -> None:
        model, optimizer = state.make_state(4 << 20)
        assert abs(state.state_bytes(model, optimizer) / (4 << 20) - 1) < 0.01
        assert len(list(state.tensors(model, optimizer))) > 300
        assert {tensor.dtype for tensor in state.tensors(model, optimizer)} == {torch.float32}

    def test_each_process_makes_the_same_and_each_save_is_another(self) -> None:
        one, other = state.make_state(1 << 20), state.make_state(1 << 20)
        assert state.fingerprint(*one) == state.fingerprint(*other)
        state.advance(*one)
        assert all(a != b for a, b in zip(state.fingerprint(*one), state.fingerprint(*other), strict=True))


class TestReports:
    rows = (
        row(1, 2, 3, beside=4, reach="<= 1", name="fast"),
        row(9, 9, beside=4, reach="<= 1", name="slow"),
        skipped("other", "a message", "Ray does not start"),
    )

    def test_the_terminal_shows_numbers_and_what_was_skipped(self) -> None:
        console = Console(file=io.StringIO())
        report.print_page(report.page(self.rows, FACTS), console)
        assert isinstance(console.file, io.StringIO)
        text = console.file.getvalue()
        lines = [line for line in text.splitlines() if line.strip()]
        heading, _, fast, slow, other = lines[-5:]
        assert heading.split() == ["row", "what", "median", "spread", "beside", "ratio", "reach"]
        for part in ("2 ms", "100%", "other 4 ms ± 0%", "0.50", "<= 1", "pass"):
            assert part in fast
        assert "miss" in slow and "a message: Ray does not start" in other and "skipped" in other
        assert "A processor, 2 cores, 8.6 GB, Linux 6, ext4" in text

    def test_the_files_have_everything(self, tmp_path: Path) -> None:
        plot, data = tmp_path / "rows.png", tmp_path / "rows.json"
        peer = row(1, 2, beside=4, name="torch.save/load")
        report.write_plot(plot, [*self.rows, peer], FACTS)
        report.write_json(data, self.rows, FACTS)
        assert plot.read_bytes().startswith(b"\x89PNG")
        with pytest.raises(ValueError, match="nothing to draw"):
            report.write_plot(plot, self.rows[2:], FACTS)
        text = report.page(self.rows, FACTS, plot="../rows.png")
        for part in ("    python -m jobs.bench", "![rows](../rows.png)", "A processor"):
            assert part in text
        assert "| fast | something | 2 ms | 100% | other 4 ms ± 0% | 0.50 | <= 1 | pass |" in text
        found = json.loads(data.read_text())
        assert found["machine"] == FACTS
        fast, _, other = found["rows"]
        assert fast["samples"] == [1, 2, 3] and fast["reference"]["samples"] == [4, 4]
        assert (fast["median"], fast["spread"], fast["reference"]["median"]) == (2, 1, 4)
        assert (fast["ratio"], fast["verdict"], fast["reach"], fast["load"]) == (0.5, "pass", "<= 1", 1.5)
        assert (other["verdict"], other["skipped"]) == ("skipped", "Ray does not start")


class TestOwnRows:
    def test_a_fleet_saves_retires_drains_and_restores(self, context: Context) -> None:
        measured = list(coordinator.rows(context, sizes=(4,)))
        assert [r.name for r in measured] == ["save-4", "retire-4", "drain-4", "open-4"]
        assert all(len(r.samples) == 2 for r in measured)

    def test_a_fleet_commits_each_step_and_resumes_from_the_last(self) -> None:
        fleet = coordinator.Fleet(3)
        for _ in range(2):
            fleet.save()
            fleet.answer_all()
        assert [c.step for c in fleet.machine.history.lineage()] == [1, 2]
        assert all(c.replicas == 1 for c in fleet.machine.history.lineage())
        fleet.open_group()
        assert fleet.plan.resume is not None and fleet.plan.resume.checkpoint.step == 2
        assert coordinator.stored_events(3)[0].size_bytes == 17 * coordinator.FILE_BYTES

    def test_a_long_log_is_listed_and_retained(self, context: Context) -> None:
        listed, table = history.catalog_rows(context, num_checkpoints=50, num_records=10)
        (retained,) = history.retention_rows(context, num_checkpoints=50)
        assert (listed.name, table.name, retained.name) == ("list", "list-table", "retention")
        for one in (listed, table, retained):
            assert one.reference == Reference(name="limit", samples=(1.0,)) and one.reach == "<= 1"
            assert "50 checkpoints" in one.what

    def test_the_rank_that_is_held_up_longest_is_what_a_save_costs(self) -> None:
        ranks = (Stretch(seconds=10.0, blocked_s=0.1), Stretch(seconds=9.9, blocked_s=0.3))
        quicker = (Stretch(seconds=5.0, blocked_s=0.05), Stretch(seconds=5.0, blocked_s=0.0))
        one = overhead.blocked_row([ranks, quicker], 100 * 10**6)
        assert one.samples == pytest.approx((3.0, 1.0)) and one.ratio == pytest.approx(1.0)
        assert "steps of 0.75 s, 100.0 MB" in one.note and one.verdict == "pass"

    def test_stretches_with_a_save_are_compared_pair_by_pair(self) -> None:
        one = overhead.wall_row((10.1, 20.4, 5.0), (10.0, 20.0, 5.0))
        assert one.ratio == pytest.approx(1.01) and one.verdict == "-"
        assert "pair by pair 1.010, from 1.000 to 1.020" in one.note

    def test_limits_move_all_bytes(self, tmp_path: Path) -> None:
        with closing(Limits(1 << 20, tmp_path)) as limits:
            for move in (limits.memcpy_s, partial(limits.memcpy_s, 3), limits.write_s, limits.read_s):
                limits.target[:] = bytes(limits.size_bytes)
                assert move() > 0
                moved = limits.path.read_bytes() if move == limits.write_s else limits.target
                assert moved == limits.source
            other = memoryview(b"other bytes")
            assert limits.memcpy_s(2, other) > 0 and limits.target[: len(other)] == other
        assert list(tmp_path.iterdir()) == []


def fake(tmp_path: Path, answers: str, *, rest: str = "") -> list[str]:
    """Return a peer's process that answers as a test needs: `answers` is the body of a function."""
    script = tmp_path / "fake.py"
    script.write_text(
        "import sys, time\n"
        "from multiprocessing.connection import Client\n"
        "print('noise')\n"
        f"{rest}\n"
        f"def answer(command, count):\n    {answers}\n"
        "bench = Client(sys.argv[sys.argv.index('--socket') + 1], 'AF_UNIX')\n"
        "bench.send({'ready': True})\n"
        "count = 0\n"
        "while (command := bench.recv()) != 'end':\n"
        "    bench.send(answer(command, count))\n"
        "    count += 1\n"
    )
    return [sys.executable, str(script)]


SAVE = "{'returned_s': 0.5, 'blocked_s': 1.0 + count, 'complete_s': 4.0}"


class TestPeers:
    def test_a_peers_answers_become_rows(self, tmp_path: Path) -> None:
        command = fake(tmp_path, f"return {SAVE} if command == 'save' else {{'load_s': len(command)}}")
        with (
            closing(Limits(1 << 16, tmp_path)) as limits,
            peers.running(command, tmp_path / "log") as request,
        ):
            rows = list(peers._rows_of("name", PEERS["torch.save"], request, 2, limits))
        found = {one.name: one for one in rows}
        assert found["name/blocked-first"].samples == (1.0,)
        assert found["name/blocked"].samples == (2.0, 3.0)
        assert "returns after 0.5 s" in found["name/blocked"].note
        assert "does not fsync" in found["name/complete"].note
        assert found["name/load-memory"].samples == (11, 11) and found["name/load"].samples == (4, 4)
        names = [one.reference.name for one in rows if one.reference is not None]
        assert names == ["memcpy", "memcpy", "raw write", "memcpy", "raw read"]
        assert all(one.verdict == "-" and one.ratio is not None for one in rows)

    @pytest.mark.parametrize(
        ("answers", "reason"),
        [
            ("return {'error': 'OSError: no'}", "OSError: no"),
            ("raise ValueError('broken')", "ValueError: broken"),
            ("time.sleep(60)", "no answer to save within 0 s"),
        ],
    )
    def test_a_peer_that_fails_or_dies_or_hangs_is_an_error(
        self, answers: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        started: list[subprocess.Popen[bytes]] = []
        kill = peers._kill

        def noted_kill(process: subprocess.Popen[bytes]) -> None:
            started.append(process)
            kill(process)

        monkeypatch.setattr(peers, "_kill", noted_kill)
        monkeypatch.setattr(peers, "COMMAND_TIMEOUT_S", 0.1 if "sleep" in answers else 60)
        with (
            pytest.raises(peers.PeerError, match=reason),
            peers.running(fake(tmp_path, answers), tmp_path / "log") as request,
        ):
            request("save")
        assert started[0].poll() is not None

    def test_a_peer_that_does_not_start_is_an_error(self, tmp_path: Path) -> None:
        command = fake(tmp_path, "pass", rest="raise ImportError('nothing')")
        with (
            pytest.raises(peers.PeerError, match="ImportError: nothing"),
            peers.running(command, tmp_path / "log"),
        ):
            pass

    def test_every_peer_has_a_library(self) -> None:
        assert list(LIBRARIES) == list(PEERS)

    def test_a_peer_that_is_not_installed_is_a_row(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, context: Context
    ) -> None:
        monkeypatch.setattr(environments, "HOME", tmp_path)
        peer = Peer(what="another library", environment="orbax")
        with closing(Limits(1 << 16, tmp_path)) as limits:
            (missing,) = peers.peer_rows("it", peer, context, limits, tmp_path / "it")
            (tmp_path / "orbax").mkdir()
            (tmp_path / "orbax" / environments.FAILED).write_text("error: no compiler")
            (failed,) = peers.peer_rows("it", peer, context, limits, tmp_path / "it")
        assert missing.skipped == "not installed; `make bench` does it"
        assert failed.skipped == "not installable here: error: no compiler"

    def test_the_reason_of_a_failed_installation_is_its_cause(self) -> None:
        output = "  error: subprocess-exited\n  fatal: unable to access 'https://x'\nERROR: no wheel\n"
        assert environments._reason(output) == "fatal: unable to access 'https://x'"
        assert (
            environments._reason("Looking\nERROR: No matching distribution\n")
            == "ERROR: No matching distribution"
        )

    @pytest.mark.slow
    def test_torch_save_is_measured_for_real(self, context: Context) -> None:
        """All of it: the child's protocol, the library, the comparison of what was loaded."""
        rows = {one.name: one for one in peers.rows(replace(context, peers=("torch.save",)))}
        assert set(rows) == {
            f"torch.save/{kind}" for kind in ("blocked-first", "blocked", "complete", "load-memory", "load")
        }
        assert rows["torch.save/complete"].median > rows["torch.save/blocked"].median  # type: ignore[operator]
        assert list(context.folder.iterdir()) == []

    def test_this_project_is_put_beside_the_best_peer(self) -> None:
        rows = [
            Row(name=f"{peer}/load", what="w", unit="s", samples=(value,))
            for peer, value in (("ray_ckpt", 2.0), ("slow", 9.0), ("fast", 4.0))
        ]
        (best,) = peers._beside_best([*rows, skipped("gone", "w", "not here")])
        assert (best.name, best.ratio) == ("best/load", 0.5)
        assert best.reference == Reference(name="fast", samples=(4.0,))


def copier(changes: str = "") -> remote.Make:
    """Return a client of a folder; `changes` is the fault of its copies."""

    def copy(source: Path, target: Path) -> None:
        if changes == "fails":
            raise OSError("no way")
        target.parent.mkdir(parents=True, exist_ok=True)
        data = bytearray(source.read_bytes())
        if changes == "flips" and data:
            data[0] ^= 1
        target.write_bytes(data)

    client = remote.Client(
        upload=lambda path, to: copy(path, to.folder),
        download=lambda source, path: copy(source.folder, path),
    )
    return lambda place, folder: client


@pytest.fixture
def rig(tmp_path: Path) -> remote.Rig:
    """A shard that goes to a folder, without a server."""
    folder, tmpfs = tmp_path / "staging", tmp_path / "tmpfs"
    folder.mkdir()
    tmpfs.mkdir()
    cargo = remote.make_cargo(folder / "shard", 1 << 20)
    tier = RemoteRef(storage_path=str(tmp_path / "store"), run_name="bench").open()
    tier.root.folder.mkdir(parents=True)
    return remote.Rig(tier, cargo, folder, tmpfs)


class TestRemote:
    @pytest.mark.parametrize("direction", ("upload", "download"))
    def test_the_fastest_peer_counts_and_one_that_changes_bytes_does_not(
        self, rig: remote.Rig, direction: remote.Direction
    ) -> None:
        peers = {"good": copier(), "bad": copier("flips"), "none": copier("fails")}
        own, good, bad, none = rig.rows(direction, peers, repeat=2)
        assert own.reference == Reference(name="good", samples=good.samples)
        assert own.reach == ">= 0.9" and "CPU s/GB" in own.note and len(own.samples) == 2
        assert ("wrong" if direction == "upload" else "other bytes") in bad.skipped
        assert none.skipped == "OSError: no way"

    def test_without_a_peer_there_is_nothing_to_reach(self, rig: remote.Rig) -> None:
        own, none = rig.rows("upload", {"none": copier("fails")}, repeat=1)
        assert (own.reference, own.reach, none.verdict) == (None, "", "skipped")

    def test_a_program_that_is_not_installed_is_a_row(
        self, rig: remote.Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(s3_server, "TOOLS", tmp_path)
        monkeypatch.setenv("PATH", str(tmp_path))
        programs = {name: remote.CLIENTS[name] for name in ("aws", "rclone")}
        _, *rows = rig.rows("upload", programs, repeat=1)
        assert [one.name for one in rows] == ["remote-upload/aws", "remote-upload/rclone"]
        assert all("make .venv-servers/.ready" in one.skipped for one in rows)

    def test_a_program_that_fails_is_an_error_with_its_reason(self, tmp_path: Path) -> None:
        script = "import sys; print('first', 'then no bucket', sep='\\n', file=sys.stderr); sys.exit(3)"
        program = remote.program((sys.executable, "-c", script), "s3://", {})
        with pytest.raises(OSError, match=r"^then no bucket$"):
            program.upload(tmp_path, Location.parse("s3://bucket/key"))

    def test_the_start_of_a_program_does_not_count(self) -> None:
        mover = remote.Mover(
            prepare=lambda: time.sleep(0.3), move=lambda: time.sleep(0.05), start=remote.Usage(0.04, 0.0)
        )
        assert 0.01 <= mover.sample() < 0.25

    def test_shared_memory_is_not_a_process_its_own(self) -> None:
        size, process = 32 << 20, psutil.Process()
        for flag, is_own in ((mmap.MAP_SHARED, False), (mmap.MAP_PRIVATE, True)):
            with mmap.mmap(-1, size, flags=flag | mmap.MAP_ANONYMOUS) as memory:
                before = remote.own_bytes(process)
                for page in range(0, size, mmap.PAGESIZE):
                    memory[page] = 1
                assert (remote.own_bytes(process) - before > size / 2) == is_own


class TestCommand:
    def test_one_group_of_rows(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        out = tmp_path / "out.json"
        arguments = ["--only", "simulator", "--quick", "--json", str(out), "--folder", str(tmp_path)]
        assert bench.main(arguments) == 0
        found = json.loads(out.read_text())
        assert [one["name"] for one in found["rows"]] == ["schedule"]
        assert found["machine"]["command"] == " ".join(["python", "-m", "jobs.bench", *arguments])
        assert "schedule" in capsys.readouterr().out

    def test_a_missed_reach_and_a_failure_are_exit_codes(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fail(context: Context) -> Iterator[Row]:
            yield row(1, beside=4, reach="<= 1", name="before")
            raise OSError("broken\nand more")

        arguments = ["--only", "simulator", "--folder", str(tmp_path)]
        monkeypatch.setattr(
            coordinator, "schedule_rows", lambda context: iter([row(5, beside=4, reach="<= 1")])
        )
        assert bench.main(arguments) == 1
        monkeypatch.setattr(coordinator, "schedule_rows", fail)
        assert bench.main(arguments) == 2
        text = capsys.readouterr().out
        assert "before" in text and "failed: OSError: broken" in text

    @pytest.mark.parametrize(
        "wrong",
        (
            ["--repeat", "0"],
            ["--only", "nothing"],
            ["--size", "big"],
            ["--peers", "nobody"],
            ["--server", "ftp"],
        ),
    )
    def test_wrong_arguments_are_refused(self, wrong: list[str]) -> None:
        with pytest.raises(SystemExit):
            bench.main(wrong)

    @pytest.mark.slow
    @pytest.mark.timeout(120)
    @pytest.mark.parametrize(
        ("groups", "names"),
        [
            ("limits coordinator catalog", {"memcpy", "save-100", "list"}),
            ("overhead", {"overhead-blocked", "overhead-wall"}),
            ("remote", {"remote-upload", "remote-download/s3fs", "remote-memory"}),
            (
                "",
                {
                    "memcpy",
                    "raw-write",
                    "small-dict",
                    "small-module",
                    "small-module-restore",
                    "save-100",
                    "list",
                    "schedule",
                },
            ),
        ],
    )
    def test_a_quick_run_measures_the_chosen_groups_or_most_and_leaves_nothing(
        self, groups: str, names: set[str], tmp_path: Path
    ) -> None:
        """Any numbers pass: a busy machine makes any."""
        out, folder = tmp_path / "out.json", tmp_path / "work"
        keys = {name: os.environ.get(name) for name in s3_server.ENVIRONMENT}
        only = ["--only", *groups.split()] if groups else []
        command = ["--quick", *only, "--size", "8MiB", "--json", str(out), "--folder", str(folder)]
        code = bench.main(command)
        rows = json.loads(out.read_text())["rows"]
        assert code in (0, 1), [one["skipped"] for one in rows if one["skipped"]]
        assert {one["name"] for one in rows} >= names
        assert list(folder.iterdir()) == []
        assert {name: os.environ.get(name) for name in s3_server.ENVIRONMENT} == keys
