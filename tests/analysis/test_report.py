"""The page of a run: its content, its markup for any log, and the bound on its size."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from ray_ckpt.analysis.report import Event, RunReport, page, read_report, to_json
from ray_ckpt.analysis.report.facts import drawn_events, measured_percent
from ray_ckpt.analysis.report.timeline import MAX_DRAWN, around_last_failure, part, reached_s, whole
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.catalog.tables import events_table
from ray_ckpt.cli import app
from ray_ckpt.core.history import RunHistory
from ray_ckpt.errors import ConfigError
from ray_ckpt.format import names, records
from ray_ckpt.format.digest import digest
from ray_ckpt.format.snapshot import decode_snapshot, encode_snapshot
from ray_ckpt.storage.log_store import CreateResult, write_snapshot
from ray_ckpt.types import ROLLBACK_PREFIX, AttemptId, CheckpointInfo, Level, SessionEnd, SessionInfo
from tests.analysis.test_goodput import impossible_facts, random_log
from tests.support.examples import every_few
from tests.support.sample_run import RunLog, SampleRun, make_checkpoint, write_run

NOON_S = 1_790_078_400.0  # 2026-09-22 12:00:00 UTC
SECTIONS = (
    "now",
    "timeline",
    "goodput",
    "interruptions",
    "saves",
    "checkpoints",
    "in-cluster",
    "checks",
    "lineage",
)


@dataclass(slots=True, kw_only=True)
class Story(RunLog):
    """A log in memory whose clock goes as the story does; `write` puts it on disk."""

    folder: Path = Path("/runs/gpt")
    now_s: float = NOON_S
    logged: list[records.LogRecord] = field(default_factory=list)
    history: RunHistory = field(default_factory=RunHistory)

    def append(self, op: records.Op, *, time_s: float | None = None) -> None:
        self.now_s = self.now_s if time_s is None else time_s
        self.epoch += isinstance(op, records.Epoch)
        record = records.LogRecord(
            seq=self.seq, epoch=self.epoch, writer="story", prev=self.prev, time_s=self.now_s, op=op
        )
        self.seq, self.prev = self.seq + 1, digest(records.encode_record(record))
        self.history.apply(record, self.prev)
        self.logged.append(record)

    def write(self, storage: Path) -> Path:
        """Write the run's folder, with all records but the first in a snapshot; return the folder."""
        folder = storage / self.folder.name
        store = RunLog(folder=folder).store
        for record in self.logged:
            data = records.encode_record(record)
            (folder / names.SERVICE_DIR / names.LOG_DIR / names.record_file(record.seq)).write_bytes(data)
        assert write_snapshot(store, self.history.to_snapshot(self.now_s)) is CreateResult.OK
        return folder

    def report(self, after_s: float = 30.0) -> RunReport:
        """Return the report that `read_report` gives `after_s` seconds after the last record."""
        return RunReport(
            run_name=self.history.run_name,
            run_uid=self.history.run_uid,
            where=str(self.folder),
            now_s=self.now_s + after_s,
            sessions=tuple(self.history.sessions.values()),
            checkpoints=tuple(self.history.checkpoints.values()),
            lineage=self.history.lineage(),
            events=drawn_events(events_table(self.logged, self.history)),
        )

    def trained(
        self,
        session: int,
        *,
        start: int,
        steps: int,
        num_nodes: int = 4,
        step_s: float = 1.5,
        every: int = 60,
        durable_every: int = 300,
        restored: dict[str, float] | None = None,
        resumed_from: str | None = None,
        ended: str | None = None,
        down_s: float = 0.0,
        seed: int = 0,
    ) -> list[str]:
        """Append a session that saves each `every` steps from step `start` on; return its attempts."""
        chance = random.Random(seed)
        self.append(records.Epoch(service="story"))
        self.append(
            records.Session(
                session=session,
                service="story",
                after=session - 1 or None,
                resumed_from=resumed_from,
                world_size=16,
                num_nodes=num_nodes,
            )
        )
        if resumed_from is not None:
            took_s = chance.uniform(10, 25)
            self.now_s += took_s
            self.append(records.Restored(session=session, seconds=took_s, read_bytes=restored or {}))
        self.now_s += chance.uniform(15, 30)
        first_s, stalled_s, attempts = self.now_s, 0.0, []
        for step in range(start + 1, start + steps + 1):
            self.now_s += step_s * chance.uniform(0.95, 1.05)
            if step % every == 0:
                attempts.append(self.saved(session, step, chance, durable=step % durable_every == 0))
                stalled_s += 0.05
        if ended is not None:
            end = records.Ended(
                session=session,
                cause=ended,  # type: ignore[arg-type]
                step=start + steps,
                first_at_s=first_s,
                last_at_s=self.now_s,
                stalled_s=stalled_s,
            )
            self.now_s += down_s
            self.append(end)
        return attempts

    @property
    def newest(self) -> str:
        """The attempt that a restart goes on from."""
        return self.history.lineage()[-1].id.attempt

    def saved(self, session: int, step: int, chance: random.Random, *, durable: bool) -> str:
        attempt = self.attempt(session, step)
        began_s = self.now_s
        capture_s, local_s, replicate_s = (chance.uniform(0.5, 1.5) * s for s in (1.2, 4.0, 2.5))
        self.now_s = began_s + capture_s + local_s + replicate_s
        self.append(
            records.Commit(
                session=session,
                step=step,
                attempt=attempt.attempt,
                level=Level.REPLICATED,
                replicas=1,
                world_size=16,
                num_nodes=4,
                size_bytes=48_000_000_000 + step,
                root_digest="0" * 32,
                metrics={"loss": 4.0 / step**0.3, "lr": 3e-4},
                stall_s=0.05,
                capture_s=capture_s,
                local_s=local_s,
                replicate_s=replicate_s,
            )
        )
        if durable:
            self.now_s += chance.uniform(10, 30)
            self.append(records.Promote(attempt=attempt.attempt, level=Level.DURABLE, replicas=1))
        self.now_s = began_s  # training went on meanwhile
        return attempt.attempt


def night_story() -> Story:
    """Return the log of a night: a process fails, a user rolls back, and at 4 a.m. a node is lost."""
    log = Story(now_s=NOON_S - 12 * 3600)
    log.create()
    first = log.trained(1, start=0, steps=3100, ended="process", down_s=20, seed=1)
    memory = {"memory": 764e9, "local": 4e9}
    second = log.trained(
        2,
        start=3060,
        steps=2000,
        resumed_from=first[-1],
        restored=memory,
        ended="replaced",
        down_s=300,
        seed=2,
    )
    for attempt in (*first[:-10:2], *second[5:9]):
        log.append(records.Retired(attempt=attempt, reason="older than the last 3"))
        log.append(records.Collected(attempt=attempt))
    log.append(records.Pin(attempt=first[-5], owner="eval", expires_at_s=None))
    third = log.trained(
        3, start=2820, steps=2230, resumed_from=first[-5], restored=memory, ended="node", down_s=45, seed=3
    )
    log.append(records.Verified(attempt=first[-5]))
    log.append(
        records.Drilled(
            attempt=third[-2], scenario="lose node-3", passed=False, seconds=3.0, read_bytes={}, text="1 file"
        )
    )
    peers = {"memory": 573e9, "peer": 191e9}
    fourth = log.trained(4, start=5040, steps=900, resumed_from=third[-1], restored=peers, seed=4)
    log.now_s += 20
    drill = {"scenario": "remote only", "passed": True, "seconds": 84.0, "read_bytes": {}, "text": ""}
    log.append(records.Drilled(attempt=fourth[3], **drill))  # type: ignore[arg-type]
    log.append(records.Lost(attempt=second[-1], reason="both nodes are gone"))
    log.append(records.Note(text="a person looked at it"))
    return log


def failed_story(*, durable_every: int = 300) -> Story:
    log = Story()
    log.create()
    log.trained(1, start=0, steps=330, durable_every=durable_every, ended="node", seed=1)
    return log


class Parsed(HTMLParser):
    """The elements and attributes of a page, as browsers split it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.ids: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id" and value]


def parsed(text: str) -> Parsed:
    """Parse the page; check that it is well-formed XML and refers to nothing on the network."""
    root = ElementTree.fromstring(text)
    found = Parsed(text)
    assert len(list(root.iter())) == len(found.elements)
    assert "script" not in found.elements and "iframe" not in found.elements
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert [value for name, value in found.attributes if name in ("src", "href")] == ["data:,"]
    assert not re.search(r"url\(|@import|\bnan\b|\binf\b", text)
    return found


@pytest.fixture(scope="module")
def night() -> Story:
    return night_story()


def test_the_page_has_all_its_parts(night: Story) -> None:
    text = page(night.report())
    found = parsed(text)
    assert set(SECTIONS) <= set(found.ids) and "last-failure" in found.ids
    assert found.elements.count("svg") == 4, "two timelines, goodput, saves"
    for line in (
        "By the log it survives the loss of any one node",
        "node lost at step 5,050",
        "573.0 GB from memory, 191.0 GB from other nodes",
        "drill passed: remote only",
        "pinned by eval",
        "from step 2,820 of session 1",
        "prefers-color-scheme: dark",
        "all times are UTC",
    ):
        assert line in text, line


def test_the_first_lines_show_what_was_lost_and_whether_the_run_is_protected(night: Story) -> None:
    verdicts = to_json(night.report())["verdicts"]
    assert [(v["tone"], v["head"]) for v in verdicts] == [
        ("good", "step 5940"),
        ("good", "open"),
        ("plain", "lost 10 steps"),
        ("plain", "69.3 %"),
        ("good", "passed"),
    ]
    assert "Without the cluster it would be step 5700." in verdicts[0]["text"]
    assert "Node lost at 2026-09-22 03:10:21. Training again after" in verdicts[2]["text"]


def test_a_run_that_is_down_is_shown_as_down() -> None:
    shown = to_json(failed_story().report())
    assert [(v["tone"], v["head"]) for v in shown["verdicts"][:3]] == [
        ("good", "step 300"),
        ("bad", "down: node lost"),
        ("bad", "lost 30 steps"),
    ]
    (problem,) = shown["interruptions"]
    assert (problem["next_session"], problem["recovery"], problem["steps_lost"]["high"]) == (None, None, 30)


def test_the_page_and_the_json_have_the_phases_of_recoveries() -> None:
    log = failed_story()
    assert "Phases of recoveries" not in page(log.report())
    failed_s = log.now_s
    log.now_s += 42.0
    opened = records.Session(
        session=2,
        service="story",
        after=1,
        resumed_from=log.newest,
        world_size=16,
        num_nodes=4,
        noticed_at_s=failed_s + 5.0,
        previous_ended_at_s=failed_s + 12.5,
    )
    log.append(opened)
    (problem,) = to_json(log.report())["interruptions"]
    assert problem["phases"] == pytest.approx({"noticed": 5.0, "ended": 7.5, "opened": 29.5})
    assert list(problem["phases"]) == ["noticed", "ended", "opened"]
    text = page(log.report())
    parsed(text)
    row = text.split("Phases of recoveries")[1].split("</table>")[0].split("<tr")[-1]
    assert re.findall(r">([^<>\n]+)</td>", row) == ["1 to 2", "5.0 s", "7.5 s", "29.5 s"]
    assert "the launcher noticed the failure (noticed);" in text and "(restored)" not in text


def crashed_again(*ends: str | None) -> Story:
    """Return a log with a lost node, then a session without a step for each of `ends`, a minute apart."""
    log = failed_story()
    for number, cause in enumerate(ends):
        log.now_s += 30
        log.trained(2 + number, start=300, steps=0, resumed_from=log.newest, ended=cause, down_s=30)
    return log


def again_after(log: Story) -> list[str]:
    """Return the column of the interruptions, the last one first."""
    table = page(log.report()).split('id="interruptions"')[1].split("</table>")[0]
    return [row.split("</td>")[4].rpartition(">")[2] for row in table.split("<tr")[2:]]


def test_the_recovery_goes_through_sessions_without_a_step() -> None:
    log = crashed_again("process")
    log.now_s += 60
    opened_s = log.now_s
    log.trained(3, start=300, steps=6000, resumed_from=log.newest, seed=3)
    first, second = log.report().problems
    assert first.recovery is not None and second.recovery is not None
    lost_s, died_s = (each.ended_s for each in (first, second))
    assert first.recovery.estimate - second.recovery.estimate == pytest.approx(died_s - lost_s)
    assert first.recovery.low - second.recovery.low == pytest.approx(died_s - lost_s)
    assert second.recovery.low >= opened_s - died_s and not first.is_waiting
    verdict = to_json(log.report())["verdicts"][2]
    assert verdict["tone"] == "plain" and "Training again after" in verdict["text"]


def test_before_its_first_commit_nothing_is_known_of_an_open_session() -> None:
    log = crashed_again(None)
    verdict = to_json(log.report())["verdicts"][2]
    assert verdict["text"].endswith("No commit since.") and again_after(log) == ["no commit yet"]
    assert again_after(crashed_again("process", None)) == ["no commit yet", "none: it ended first"]
    assert again_after(crashed_again("process")) == ["not yet", "none: it ended first"]
    assert again_after(crashed_again("finished")) == ["none: it ended first"]


def rolled_back(log: Story, session: int) -> Story:
    """Append a rollback to the newest checkpoint, as session `session`."""
    log.append(records.Epoch(service=f"{ROLLBACK_PREFIX}story"))
    log.append(
        records.Session(
            session=session,
            service=f"{ROLLBACK_PREFIX}story",
            after=session - 1,
            resumed_from=log.newest,
            world_size=16,
            num_nodes=4,
        )
    )
    return log


def test_a_rollback_is_no_session_that_hangs_or_ended() -> None:
    log = Story()
    log.create()
    log.trained(1, start=0, steps=330, ended="finished", seed=1)
    report = rolled_back(log, 2).report(after_s=86400)
    verdicts = to_json(report)["verdicts"]
    assert (verdicts[1]["tone"], verdicts[1]["head"]) == ("plain", "rolled back to step 300")
    assert verdicts[1]["text"].endswith("the run was not opened since.")
    text = page(report)
    assert "session 2: rolled back; the run was not opened since" in text, "the timeline"
    assert "a rollback to step 300 of session 1" in text
    assert "nothing in the log since" not in text and "its end is not in the log" not in text
    log.now_s += 3600
    log.trained(3, start=300, steps=100, resumed_from=log.newest)
    (planned,) = log.report().problems
    assert (planned.session, planned.cause) == (1, "finished")
    assert to_json(log.report())["verdicts"][2]["text"] == "No session has failed."


def test_the_recovery_goes_through_a_rollback() -> None:
    log = rolled_back(failed_story(), 2)
    assert again_after(log) == ["no commit yet"]
    log.now_s += 3600
    log.trained(3, start=300, steps=100, resumed_from=log.newest)
    (problem,) = log.report().problems
    assert (problem.session, problem.next_session) == (1, 2)
    assert problem.recovery is not None and 3600 < problem.recovery.low <= problem.recovery.high < 3800


def test_a_rollback_after_a_failure_is_no_second_failure() -> None:
    log = rolled_back(failed_story(), 2)
    text = page(log.report())
    assert text.count("node lost, 2026-09-22") == text.count('class="fail-line"') == 1
    assert "at step 330" in text and "at step 300" not in text


def test_a_day_without_a_checkpoint_is_a_warning_without_a_known_cadence_too() -> None:
    log = Story()
    log.create()
    log.trained(1, start=0, steps=30)
    for after_s, tone in ((3600.0, "good"), (2 * 86400.0, "warn")):
        verdict = to_json(log.report(after_s))["verdicts"][1]
        assert (verdict["tone"], "may be stuck" in verdict["text"]) == (tone, tone == "warn")


def test_a_run_that_went_on_from_another_one_is_not_from_scratch() -> None:
    log = Story()
    log.create()
    log.trained(1, start=0, steps=1)
    log.append(records.Restored(session=1, seconds=3.0, read_bytes={"remote": 1e9}, origin_step=50_000))
    report = log.report()
    assert to_json(report)["verdicts"][0]["head"] == "step 50000 of another run"
    assert "session 1: step 50000 of another run in " in page(report)


def test_time_that_is_not_counted_is_shown() -> None:
    log = Story()
    log.create()
    log.trained(1, start=0, steps=330, ended="finished")
    log.now_s += 2 * 86400
    log.trained(2, start=300, steps=100, resumed_from=log.newest)
    assert "Not counted: 2.0 d after the run had finished" in page(log.report())


def test_no_recovery_has_time_that_is_not_counted() -> None:
    """Prolonged after two days by a session without a step, and then by one that trains."""
    log = Story()
    log.create()
    log.trained(1, start=0, steps=330, ended="finished")
    log.now_s += 2 * 86400
    log.trained(2, start=300, steps=0, resumed_from=log.newest, ended="process", down_s=60.0)
    log.trained(3, start=300, steps=100, resumed_from=log.newest)
    planned = log.report().problems[0]
    assert planned.recovery is not None and 60 <= planned.recovery.low <= planned.recovery.high < 300


@pytest.mark.parametrize(("count", "p99_s"), [(1, 1), (99, 99), (100, 99), (101, 100), (200, 198)])
def test_99_percent_of_the_saves_take_no_longer_than_p99(count: int, p99_s: int) -> None:
    log = failed_story()
    some = log.report().checkpoints[0]
    saves = [replace(some, stall_s=float(number)) for number in range(count, 0, -1)]
    (stall, *_) = replace(log.report(), checkpoints=saves).phases
    assert (stall.name, stall.count, stall.p99_s, stall.max_s) == ("stall", count, p99_s, count)


def test_the_page_names_shared_bytes(night: Story) -> None:
    *others, newest = night.report().checkpoints
    assert "linked" not in page(night.report())
    shared = replace(newest, size_bytes=9 * 10**9, shared_bytes=7 * 10**9)
    text = page(replace(night.report(), checkpoints=[*others, shared]))
    assert ">9.0 GB, 7.0 GB linked<" in text


def test_the_page_names_parity_groups(night: Story) -> None:
    *others, newest = night.report().checkpoints
    assert "parity" not in page(night.report())
    coded = replace(newest, level=Level.REPLICATED, replicas=2, parity="6+2")
    report = replace(night.report(), checkpoints=[*others, coded])
    assert ">replicated (2, parity 6+2)<" in page(report)
    durable = replace(newest, level=Level.DURABLE, replicas=2, parity="6+2")
    assert ">durable (parity 6+2)<" in page(replace(report, checkpoints=[*others, durable]))
    assert to_json(report)["checkpoints"][-1]["parity"] == "6+2"


def test_one_of_a_kind_is_not_many() -> None:
    log = Story()
    log.create()
    log.trained(1, start=0, steps=61, seed=1)
    log.trained(2, start=60, steps=61, resumed_from=log.newest, seed=2)
    assert to_json(log.report())["verdicts"][2]["text"] == "1 session ended for an unknown cause."
    log = Story()
    log.create()
    log.trained(1, start=0, steps=61, ended="node", seed=1)
    found = log.report()
    small = replace(found, sessions=[replace(found.sessions[0], world_size=1, num_nodes=1)])
    verdicts = to_json(small)["verdicts"]
    assert verdicts[2]["head"] == "lost 1 step" and "1 rank on 1 node;" in page(small)


def test_what_is_measured_is_rounded_down() -> None:
    found = night_story().report().goodput
    shares = [measured_percent(replace(found, measured_s=found.wall_s * part)) for part in (0.9965, 0.99951)]
    assert shares == [99, 100]


def test_clocks_that_jumped_are_reported() -> None:
    log = failed_story()
    log.now_s -= 86400
    log.trained(2, start=300, steps=100, resumed_from=log.newest, seed=2)
    note = "Clocks differed or jumped by up to 24.0 h; times around there are wrong by up to that much."
    assert page(log.report()).count(note) == 2, "in the first lines, and where goodput is"
    assert "Clocks" not in page(night_story().report())


def test_copies_on_nodes_alone_are_a_warning(tmp_path: Path) -> None:
    (verdict, *_) = to_json(failed_story(durable_every=10_000).report())["verdicts"]
    assert verdict["tone"] == "warn" and "Nothing is on the storage path" in verdict["text"]
    run = write_run(tmp_path, replicas=0, durable=())
    found = read_report(Catalog(run.folder), NOON_S)
    (verdict, *_) = to_json(found)["verdicts"]
    assert verdict["tone"] == "bad" and "from nothing" in verdict["text"]
    assert to_json(found)["in_cluster_steps"] == [10, 20, 30, 40]


def test_what_is_durable_and_off_the_lineage_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path, durable=(40,), resume_at=20, resumed_steps=(25,))
    (verdict, *_) = to_json(read_report(Catalog(run.folder), NOON_S))["verdicts"]
    assert (verdict["tone"], verdict["head"]) == ("warn", "step 25")
    assert verdict["text"].endswith(
        "On the storage path is step 40, from which this run does not descend: without the cluster a restart "
        "would begin anew."
    )


def protection(run: SampleRun) -> tuple[str, str, str]:
    """Return tone, head and text of the first verdict."""
    (verdict, *_) = to_json(read_report(Catalog(run.folder), NOON_S))["verdicts"]
    return verdict["tone"], verdict["head"], verdict["text"]


def test_a_damaged_checkpoint_protects_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=(10, 20, 30), durable=(10, 20))
    attempts = {step: found.attempt.attempt for step, found in run.checkpoints.items()}
    assert protection(run)[2].endswith("Without the cluster it would be step 20.")
    run.log.append(records.Damaged(attempt=attempts[20], fragments="1"))
    assert protection(run)[2].endswith("Without the cluster it would be step 10.")
    assert ">durable, damaged<" in page(read_report(Catalog(run.folder), NOON_S))
    run.log.append(records.Damaged(attempt=attempts[10], fragments="0"))
    tone, _, text = protection(run)
    lost = "Only damaged checkpoints are on the storage path: without the cluster all may be lost."
    assert tone == "warn" and text.endswith(lost)


def test_the_first_finding_about_replicas_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=(10,))
    for step, suspect in ((20, "model.w differs"), (30, None), (40, "model.b differs")):
        run.log.commit(make_checkpoint(run.log.attempt(1, step)), suspect=suspect)
    report = read_report(Catalog(run.folder), NOON_S)
    found = next(v for v in to_json(report)["verdicts"] if v["title"] == "Replicas")
    assert found["head"] == "differed at 2 saves"
    assert found["text"] == "Step 40: model.b differs. The first was at step 20 of session 1."
    assert page(report).count(">replicated (1), drifted apart<") == 2


def test_items_alone_on_the_storage_path_are_named_wherever_their_checkpoint_is(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=(10, 20), durable=())
    empty = read_report(Catalog(write_run(tmp_path, "empty", steps=()).folder), NOON_S)
    assert "Nothing: the run has no live checkpoint." in page(empty)
    attempt = run.checkpoints[20].attempt.attempt
    run.log.append(records.Exported(attempt=attempt, items="model", root_digest="a" * 32, size_bytes=700))
    tone, _, text = protection(run)
    assert tone == "good" and text.endswith("Without the cluster only model of step 20 would be left.")
    there = page(read_report(Catalog(run.folder), NOON_S))
    assert "20 (replicated; exported: model)," in there and "cluster, except for the exported items." in there
    assert ">replicated (1), exported: model<" in there
    run.log.session(2, after=None, world_size=2, num_nodes=2)
    run.log.commit(make_checkpoint(run.log.attempt(2, 5)))
    only = "On the storage path is only model of step 20: without the cluster a restart would begin anew."
    assert protection(run)[0] == "warn" and protection(run)[2].endswith(only)
    for info in Catalog(run.folder).checkpoints:
        run.log.append(records.Lost(attempt=info.id.attempt, reason="all nodes are gone"))
    has = "The run has no live checkpoint. The storage path has model of step 20."
    assert protection(run)[2] == has
    assert ">lost, exported: model<" in page(read_report(Catalog(run.folder), NOON_S))


@pytest.mark.parametrize(
    ("damaged", "tone", "end"),
    [
        ((20,), "warn", "Without the cluster it would be step 10."),
        (
            (10, 20),
            "bad",
            "Only damaged checkpoints are on the storage path: without the cluster all may be lost.",
        ),
    ],
)
def test_a_newest_checkpoint_that_is_damaged_is_not_good(
    tmp_path: Path, damaged: tuple[int, ...], tone: str, end: str
) -> None:
    run = write_run(tmp_path, steps=(10, 20), durable=(10, 20))
    assert protection(run)[0] == "good"
    for step in damaged:
        run.log.append(records.Damaged(attempt=run.checkpoints[step].attempt.attempt, fragments="1"))
    found, head, text = protection(run)
    assert (found, head) == (tone, "step 20")
    assert text.startswith("Damaged on the storage path, or not readable there") and text.endswith(end)
    there = f"every live checkpoint is on the storage path, {len(damaged)} of them damaged there."
    assert there in page(read_report(Catalog(run.folder), NOON_S))


def test_with_a_reader_whose_clock_is_behind_nothing_is_yet_to_come(night: Story) -> None:
    report = night.report(after_s=-3600)
    texts = [verdict["text"] for verdict in to_json(report)["verdicts"]]
    assert "saved 0.0 s before this report" in texts[0] and "0.0 s since the last checkpoint" in texts[1]
    assert not re.search(r"(^|[ >(])-[0-9.]+ (ms|s|min|h|d)\b", " ".join(texts) + page(report))


def test_silence_for_three_intervals_is_a_warning(night: Story) -> None:
    assert to_json(night.report(after_s=330))["verdicts"][1]["tone"] == "warn"


def test_a_failure_before_all_sessions_that_are_drawn_has_a_picture() -> None:
    """Or none; but no window that ends before it begins."""
    log = failed_story()
    for session in range(2, 2 + MAX_DRAWN + 10):
        log.now_s += 60
        log.trained(session, start=300, steps=60, resumed_from=log.newest, seed=session)
    window, everything = around_last_failure(log.report()), whole(log.report())
    assert window is not None and everything is not None
    (failure,) = [problem for problem in log.report().problems if problem.cause == "node"]
    assert failure.ended_s in window and window.end_s < everything.start_s


def test_what_happened_long_after_does_not_squeeze_the_timeline() -> None:
    log = failed_story()
    log.append(records.Note(text="a month later"))
    before = whole(log.report())
    log.now_s += 30 * 86400
    log.append(records.Note(text="a month later"))
    after = whole(log.report())
    assert before is not None and after is not None
    assert before.length_s < after.length_s < 2 * before.length_s


def test_what_becomes_durable_after_the_end_is_on_the_timeline() -> None:
    log = Story()
    log.create()
    [attempt] = log.trained(1, start=0, steps=60, durable_every=1000, ended="finished")
    log.now_s += 1.5
    log.append(records.Promote(attempt=attempt, level=Level.DURABLE, replicas=1))
    window = whole(log.report())
    assert window is not None and log.now_s in window


def test_the_bar_is_named_by_what_it_is() -> None:
    def name(log: Story) -> str:
        return (
            page(log.report()).split('id="goodput"')[1].split("lane-name")[1].partition("<")[0].lstrip('">')
        )

    log = Story()
    log.create()
    log.trained(1, start=0, steps=130, seed=1)
    assert name(log) == "estimated"
    assert name(night_story()) == "partly measured"
    assert name(failed_story()) == "measured"


def test_parts_can_be_distinguished_without_colours() -> None:
    """Those side by side by a gap, lost steps by a hatch, which stays within its part."""
    bars = "".join(part("productive", "kept", x=0, y=0, width=50, height=20))
    bars += "".join(part("lost_steps", "lost", x=50, y=0, width=30, height=20))
    root = ElementTree.fromstring(f"<svg>{bars}</svg>")
    assert [rect.get("width") for rect in root.iter("rect")] == ["49", "29"]
    (hatch,) = root.iter("path")
    numbers = [float(number) for number in re.findall(r"[0-9.]+", hatch.get("d") or "")]
    assert len(numbers) > 20
    assert all(50 <= x <= 79 for x in numbers[::2]) and all(0 <= y <= 20 for y in numbers[1::2])
    report = night_story().report()
    lost = page(report).count('class="c-lost_steps"')
    assert lost and page(report).count('class="hatch"') == lost


def test_copies_that_come_later_are_drawn_when_they_came() -> None:
    log = Story()
    log.create()
    log.trained(1, start=0, steps=61)
    alone = log.attempt(1, 62)
    op = records.Commit(
        session=1,
        step=62,
        attempt=alone.attempt,
        level=Level.LOCAL,
        replicas=0,
        world_size=16,
        num_nodes=4,
        size_bytes=10**9,
        root_digest="0" * 32,
        metrics={},
    )
    log.append(op)
    assert reached_s(log.history.checkpoints[alone.attempt], Level.REPLICATED) is None
    log.now_s += 3000
    log.append(records.Promote(attempt=alone.attempt, level=Level.REPLICATED, replicas=1))
    copied_s = log.now_s
    log.now_s += 60
    log.append(records.Promote(attempt=alone.attempt, level=Level.DURABLE, replicas=2))
    with_copies, found = log.report().checkpoints
    assert reached_s(with_copies, Level.REPLICATED) == with_copies.committed_at_s
    assert reached_s(found, Level.REPLICATED) == copied_s
    stored = encode_snapshot(log.history.to_snapshot(log.now_s))
    assert decode_snapshot(stored).checkpoints == tuple(log.history.checkpoints.values())


def test_a_run_without_sessions_or_saves_has_a_page(tmp_path: Path) -> None:
    log = Story()
    log.create()
    assert set(SECTIONS) <= set(parsed(page(log.report())).ids)
    log.trained(1, start=0, steps=5)
    assert "nothing in the log since" in page(log.report())
    run = write_run(tmp_path, "old", resume_at=30, resumed_steps=(40,), lost=(20,), collected=(10,))
    text = page(read_report(Catalog(run.folder), NOON_S))  # of a log without times
    assert (
        set(SECTIONS) <= set(parsed(text).ids)
        and "until it was on the storage path" in text
        and "held up for" not in text
    )


HOSTILE = "</title></style></svg><script>alert(1)</script><img src=x onerror='alert(1)'>\"'&\x00\x1b[2J\ud800"


def test_nothing_in_a_log_becomes_markup(night: Story) -> None:
    found = night.report()
    last = found.checkpoints[-1]
    hostile = replace(
        last,
        metrics={HOSTILE[:-1]: float("nan"), "b": float("inf")},
        pins={HOSTILE: None},
        drill=HOSTILE,
        drilled_at_s=NOON_S,
    )
    sessions = [*found.sessions[:-1], replace(found.sessions[-1], read_bytes={HOSTILE: 1e9}, owner=HOSTILE)]
    events = [
        Event(op=op, time_s=found.now_s - 50, step=1, text=HOSTILE)
        for op in ("note", "pin", "drilled", "lost")
    ]
    spoiled = RunReport(
        run_name=HOSTILE,
        run_uid=found.run_uid,
        where=f"/runs/{HOSTILE}",
        now_s=found.now_s,
        sessions=sessions,
        checkpoints=[*found.checkpoints[:-1], hostile],
        lineage=[*found.lineage[:-1], hostile],
        events=events,
    )
    text = page(spoiled).replace(" nan", "").replace(" inf", "")  # two metrics
    parsed(text)
    assert "<script" not in text and "<img" not in text and "\x1b" not in text and "\x00" not in text
    assert "&lt;script&gt;" in text
    text.encode("utf-8")
    json.dumps(to_json(spoiled), allow_nan=False)


def long_run(num_checkpoints: int, num_sessions: int) -> RunReport:
    """Return a run of months: every session goes on from the last checkpoint and dies."""
    checkpoints: list[CheckpointInfo] = []
    sessions: list[SessionInfo] = []
    now_s, step, each = NOON_S, 0, num_checkpoints // num_sessions
    for session in range(1, num_sessions + 1):
        opened_s = now_s
        resumed = checkpoints[-1].id.attempt if checkpoints else None
        for _ in range(each):
            now_s, step = now_s + 60.0, step + 10
            attempt = AttemptId(run_uid="0" * 32, session=session, step=step, attempt=f"{step:016x}")
            checkpoints.append(
                CheckpointInfo(
                    id=attempt,
                    seq=len(checkpoints) + 10,
                    level=Level.DURABLE,
                    world_size=8,
                    num_nodes=2,
                    size_bytes=10**9,
                    root_digest="0" * 32,
                    committed_at_s=now_s,
                    metrics={f"metric {n}": float(n) for n in range(5)},
                    replicas=1,
                    replicated_at_s=now_s,
                    durable_at_s=now_s + 20.0,
                    stall_s=0.1,
                    capture_s=1.0,
                    local_s=2.0,
                    replicate_s=3.0,
                    state="live" if step % 70 else "collected",
                    pins={"a person": None},
                )
            )
        end = SessionEnd(
            cause="node", step=step + 3, first_at_s=opened_s + 10, last_at_s=now_s + 10, stalled_s=1.0
        )
        sessions.append(
            SessionInfo(
                session=session,
                parent=session - 1 or None,
                resumed_from=resumed,
                world_size=8,
                num_nodes=2,
                opened_at_s=opened_s,
                restored_at_s=opened_s + 5.0,
                read_bytes={"memory": 1e9, "peer": 1e9},
                ended=end,
            )
        )
        now_s += 60.0
    events = [
        Event(op=op, time_s=NOON_S + 60 * n, step=10 * n, text="older than the last 3")
        for n in range(5_000)
        for op in ("retired", "collected", "verified", "drilled")
    ]
    return RunReport(
        run_name="long",
        run_uid="0" * 32,
        where="s3://bucket/runs/long/ray_ckpt",
        now_s=now_s,
        sessions=sessions,
        checkpoints=checkpoints,
        lineage=[info for info in checkpoints if info.state == "live"],
        events=events,
    )


@pytest.mark.parametrize(
    ("num_checkpoints", "num_sessions"), [(10_000, 10), pytest.param(100_000, 5000, marks=pytest.mark.slow)]
)
def test_the_page_of_a_long_run_is_bounded(num_checkpoints: int, num_sessions: int) -> None:
    found = long_run(num_checkpoints, num_sessions)
    text = page(found)
    assert len(text.encode()) < 2_000_000
    assert set(SECTIONS) <= set(parsed(text).ids)
    assert "older ones are not shown" in text and "together: step" in text
    assert ("earlier sessions are not shown" in text) == (num_sessions > 100)
    assert ("Only the last 200 of 5,000 sessions are drawn." in text) == (num_sessions > 200)
    assert len(json.dumps(to_json(found))) < 500_000


@pytest.mark.parametrize("seed", every_few(range(60), 10))
def test_every_log_of_chance_has_a_page(seed: int) -> None:
    """Clocks that jump, ends that cannot be, sessions that resume from anywhere."""
    chance, log = random.Random(seed), random_log(seed)
    log.sessions = [replace(info, **impossible_facts(chance, info)) for info in log.sessions]
    found = RunReport(
        run_name="chance",
        run_uid="0" * 32,
        where="/runs/chance",
        now_s=1e9 + chance.choice((-1e6, 0.0, 900.0, 1e9)),
        sessions=log.sessions,
        checkpoints=log.commits,
        lineage=log.commits[-2:],
        events=[Event(op="note", time_s=1e9 + chance.choice((0.0, 1e5, -1e9)), step=None, text="")],
    )
    assert set(SECTIONS) <= set(parsed(page(found)).ids)
    json.dumps(to_json(found), allow_nan=False)
    for time in (problem.recovery for problem in found.problems if problem.recovery):
        assert -1e-3 < time.low <= time.estimate + 1e-3 and time.estimate <= time.high + 1e-3


# The command


def run_cli(*args: object) -> str:
    result = CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_writes_the_page_once(night: Story, tmp_path: Path) -> None:
    run, out = night.write(tmp_path / "storage"), tmp_path / "out.html"
    assert run_cli("report", run, "--html", out).strip() == str(out)
    assert set(SECTIONS) <= set(parsed(out.read_text(encoding="utf-8")).ids)
    with pytest.raises(ConfigError, match="is there already"):
        run_cli("report", run, "--html", out)
    document = json.loads(run_cli("report", run, "--html", out, "--force", "--json"))
    assert document["num_checkpoints"] == 136 and len(document["verdicts"]) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.html", "storage"]
    found, expected = read_report(Catalog(run), night.now_s), night.report(after_s=0)
    assert page(found) == page(replace(expected, where=found.where))


def test_the_command_wants_something_to_do(night: Story, tmp_path: Path) -> None:
    run = night.write(tmp_path)
    with pytest.raises(ConfigError, match="Nothing to write"):
        run_cli("report", run)
    with pytest.raises(ConfigError, match="is a folder"):
        run_cli("report", run, "--html", tmp_path, "--force")
    with pytest.raises(ConfigError, match="no folder"):
        run_cli("report", run, "--html", tmp_path / "no folder" / "out.html")
    assert "Example: ray-ckpt report" in run_cli("report", "--help")
