"""`ray-ckpt up`, `down`, `status`, `top`, `pin` and `unpin` where there is no cluster, and shell completion.

With a real service: `tests/cluster/test_service_commands.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import ray._private.services as ray_services
from rich.console import Console
from typer.testing import CliRunner, Result

from ray_ckpt.actors import attach
from ray_ckpt.actors import ray_cluster as ray_state
from ray_ckpt.actors.attach import check_versions
from ray_ckpt.actors.messages import DiskView, DrainingView, NewestView, NodeView, RunView, ServiceView
from ray_ckpt.actors.names import PROTOCOL_VERSION
from ray_ckpt.admin import pins
from ray_ckpt.admin.rollback import read_tail
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.cli import app, main
from ray_ckpt.cli import service as cli_service
from ray_ckpt.cli.live import MAX_NODES, ranks_text, run_details, runs_named
from ray_ckpt.cli.options import seconds
from ray_ckpt.cli.top import frame
from ray_ckpt.core import messages as m
from ray_ckpt.core.attempts import SaveUnderway
from ray_ckpt.core.drain import DrainUnderway
from ray_ckpt.errors import ConfigError, Fenced, ServiceError
from ray_ckpt.format import records as r
from ray_ckpt.transport.server import PeerServer
from ray_ckpt.types import Exposure, ParityGroup
from tests.actors.test_overview import service, trained
from tests.core.driver import SERVICE, START_S, Harness, one
from tests.support.sample_run import RunLog, SampleRun, make_checkpoint, write_run
from tests.transport.peers import KEYS, Folder

GIB = 1 << 30


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray looks for no cluster of this machine, where others may run."""
    monkeypatch.setenv("RAY_ADDRESS", "local")


@pytest.fixture
def run(tmp_path: Path) -> SampleRun:
    return write_run(tmp_path, durable=(10, 30), retired=(20,))


def ray_ckpt_cli(*args: object) -> str:
    result = CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def as_json(*args: object) -> Any:
    return json.loads(ray_ckpt_cli(*args, "--json"))


def fails(capsys: pytest.CaptureFixture[str], *args: object, code: int = 2) -> str:
    """Return the one line on stderr of a command that exits with `code`."""
    with pytest.raises(SystemExit) as caught:
        main([str(arg) for arg in args])
    output = capsys.readouterr()
    assert (caught.value.code, output.out) == (code, "")
    assert output.err.startswith("ray-ckpt: ") and output.err.count("\n") == 1
    return output.err


def ops_of(folder: Path) -> list[r.Op]:
    log = RunLog(folder=folder).store
    history = read_tail(log).history
    return [r.decode_record(log.read(f"{seq:020d}.json") or b"").op for seq in range(history.next_seq)]


# -- without a cluster -------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["up", "down", "status", "top"])
def test_without_a_cluster_an_error_shows_how_to_name_one(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "There is no Ray cluster on this machine." in fails(capsys, command)


def test_a_cluster_that_does_not_answer_is_reported_at_once(
    run: SampleRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        start_s = time.monotonic()
        assert f"No Ray cluster answers at {address}" in fails(capsys, "up", "--address", address)
        assert f"No Ray cluster answers at {address}" in fails(
            capsys, "pin", run.folder, 10, "--owner", "me", "--address", address
        )
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert f"No Ray cluster answers at {address}" in fails(capsys, "status")
        assert f"No Ray cluster answers at {address}" in fails(
            capsys, "unpin", run.folder, 10, "--owner", "me"
        )
        text = ray_ckpt_cli("status", run.folder)
        assert f"By the log alone: No Ray cluster answers at {address}" in text, "it changes nothing"
        assert time.monotonic() - start_s < 5, "where Ray would take two minutes"
    assert "is no address of a Ray cluster" in fails(capsys, "top", "--address", "nowhere")


@pytest.mark.parametrize("named", ["--address", "RAY_ADDRESS", "the last cluster"])
def test_a_listener_that_is_not_ray_is_reported_in_time(
    named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a port that somebody else has by now."""
    monkeypatch.setattr(attach, "HELLO_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address if named == "RAY_ADDRESS" else "")
        if named == "the last cluster":
            monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
            monkeypatch.setattr(ray_services, "find_gcs_addresses", set)  # of this machine's processes
            (tmp_path / "ray").mkdir()
            (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        start_s = time.monotonic()
        for command in ("up", "down", "status", "top"):
            message = fails(capsys, command, *(("--address", address) if named == "--address" else ()))
            assert f"What listens at {address} does not answer as a Ray cluster: " in message
        assert time.monotonic() - start_s < 5, "where Ray would take two minutes"


REFUSED = "InvalidAuthToken: Authentication token is missing or incorrect"


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a cluster of this machine, the last one, that wants a token."""

    def check(where: str, timeout_s: float) -> None:
        raise PermissionError(REFUSED)

    monkeypatch.setattr(ray_state, "check_answers", check)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", "")
        monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
        monkeypatch.setattr(ray_services, "find_gcs_addresses", set)  # of this machine's processes
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        yield address


COMMANDS_OF_CLUSTERS = (
    "up",
    "down",
    "status",
    "top",
    "drill {} --lose-node ab",
    "verify {} --plan --address auto",
    "pin {} 10 --owner me --address auto",
    "unpin {} 10 --owner me --address auto",
)


@pytest.mark.parametrize("command", COMMANDS_OF_CLUSTERS)
def test_rays_errors_about_tokens_are_passed_on(
    command: str, guarded: str, run: SampleRun, capsys: pytest.CaptureFixture[str]
) -> None:
    message = fails(capsys, *command.format(run.folder).split())
    assert f"The Ray cluster at {guarded} wants its token: {REFUSED}. Set RAY_AUTH_MODE=token" in message
    assert all(name in message for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token"))


def test_somebody_elses_cluster_does_not_keep_a_run_from_its_pins(guarded: str, run: SampleRun) -> None:
    assert as_json("pin", run.folder, 10, "--owner", "me")["by"] == "log"
    assert as_json("unpin", run.folder, 10, "--owner", "me")["by"] == "log"
    assert f"By the log alone: The Ray cluster at {guarded} wants its token" in ray_ckpt_cli(
        "status", run.folder
    )


@pytest.mark.parametrize("command", ["pin", "unpin"])
def test_no_cluster_gets_a_request_about_a_run_that_has_finished(
    command: str, run: SampleRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "")
    end = r.Ended(session=1, cause="finished", step=40, first_at_s=None, last_at_s=None, stalled_s=None)
    run.log.append(end)
    monkeypatch.setattr(attach, "attached", Mock(side_effect=AssertionError("it got a request")))
    assert as_json(command, run.folder, 10, "--owner", "me")["by"] == "log"


def test_a_server_of_something_else_is_reported_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as an agent of ours."""
    server = PeerServer("127.0.0.1", keys=KEYS, files=Folder(tmp_path))
    try:
        message = fails(capsys, "status", "--address", f"127.0.0.1:{server.port}")
    finally:
        server.shutdown()
    assert "does not answer as a Ray cluster: " in message


def test_a_service_of_another_version_is_named() -> None:
    check_versions(())
    check_versions((f"coordinator-v{PROTOCOL_VERSION}", "coordinator-v1", "agent-v1-abc"))
    with pytest.raises(ServiceError, match=f"speaks protocol 1, 99, this ray_ckpt {PROTOCOL_VERSION}."):
        check_versions(("coordinator-v99", "coordinator-v1", "coordinator-v1x", "agent-v5-abc"))


def test_status_of_a_path_is_that_of_the_log(run: SampleRun) -> None:
    text = ray_ckpt_cli("status", run.folder)
    assert text.startswith("By the log alone: There is no Ray cluster on this machine.\n")
    assert "session 1  checkpoints: 3 live, 1 retired" in text
    assert " kept, before sharing and compression\n" in text
    assert "not on the storage path: step(s) 40" in text
    document = as_json("status", run.folder)
    assert (document["source"], document["session"]) == ("log", 1)
    assert [(found["level"], found["step"]) for found in document["newest"]] == [
        ("local", 40),
        ("replicated", 40),
        ("durable", 30),
    ]


def test_status_of_a_log_names_what_is_shared_and_what_was_suspected(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=(10,), durable=(10,))
    document = as_json("status", run.folder)
    assert (document["shared_bytes"], document["suspect"]) == (0, "")
    later = make_checkpoint(run.log.attempt(1, 20))
    run.log.commit(later, suspect="model.w: rank(s) 1 differ from 2 others", shared_bytes=700)
    text = ray_ckpt_cli("status", run.folder)
    assert "700 bytes of the newest save were linked to an earlier one, not written" in text
    found = "step 20: model.w: rank(s) 1 differ from 2 others"
    assert f"data-parallel replicas have drifted apart, {found}" in text
    document = as_json("status", run.folder)
    assert (document["shared_bytes"], document["suspect"]) == (700, found)
    run.log.commit(make_checkpoint(run.log.attempt(1, 30)))
    document = as_json("status", run.folder)
    assert (document["shared_bytes"], document["suspect"]) == (0, found), "each save compares other bytes"


def test_status_of_a_log_names_the_first_finding_about_replicas(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=(10,))
    for step, suspect in ((20, "model.w differs"), (30, None), (40, "model.b differs")):
        run.log.commit(make_checkpoint(run.log.attempt(1, step)), suspect=suspect)
    text = "data-parallel replicas have drifted apart, step 40: model.b differs; first at step 20\n"
    assert text in ray_ckpt_cli("status", run.folder)
    assert "step 20  replicated(1), in cluster, drifted apart  " in ray_ckpt_cli("tree", run.folder)
    assert ray_ckpt_cli("ls", run.folder).count("replicated(1), in cluster, drifted apart ") == 2


def test_status_of_a_log_names_items_on_the_storage_path_of_a_lost_checkpoint(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=(10, 20), durable=())
    attempt = run.checkpoints[20].attempt.attempt
    exported = r.Exported(attempt=attempt, items="model", root_digest="a" * 32, size_bytes=700)
    run.log.append(exported)
    for is_lost in (False, True):
        text, document = ray_ckpt_cli("status", run.folder), as_json("status", run.folder)
        assert "exported: model of step 20, saved" in text and "storage path: 700 bytes kept, before" in text
        assert [(found["items"], found["step"]) for found in document["exported"]] == [("model", 20)], is_lost
        assert document["bytes_on_storage"] == 700
        run.log.append(r.Lost(attempt=attempt, reason="all nodes are gone"))
    run.log.append(r.Retired(attempt=attempt, reason="older"))
    assert as_json("status", run.folder)["exported"] == []


def test_status_of_a_log_names_the_parity_groups_of_the_newest_save(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=(10,))
    assert as_json("status", run.folder)["parity"] is None
    run.log.commit(make_checkpoint(run.log.attempt(1, 20)), replicas=2, parity="6+2")
    assert as_json("status", run.folder)["parity"] == "6+2"
    assert "the newest save is in parity groups (6+2)\n" in ray_ckpt_cli("status", run.folder)


def test_status_of_a_log_names_the_damaged_steps(run: SampleRun) -> None:
    assert as_json("status", run.folder)["damaged"] == []
    for step in (10, 30):
        run.log.append(r.Damaged(attempt=run.checkpoints[step].attempt.attempt, fragments="1"))
    text = ray_ckpt_cli("status", run.folder)
    assert "damaged on the storage path, or not readable there: step(s) 10, 30\n" in text
    assert as_json("status", run.folder)["damaged"] == [10, 30]


def test_status_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = fails(capsys, "status", tmp_path / "none")
    assert "There is no run at" in text and "cluster" not in text


def test_status_of_a_name_without_a_cluster_names_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is also that of a folder, which is not there."""
    monkeypatch.chdir(tmp_path)
    text = fails(capsys, "status", "gpt")
    assert f"There is no Ray cluster on this machine. There is no run at {tmp_path}/gpt." in text
    assert "Give the run's path" in text and "--address HOST:PORT" in text
    write_run(tmp_path)
    assert "By the log alone" in ray_ckpt_cli("status", "gpt"), "a folder of this name is a path"


# -- ending a service --------------------------------------------------------------------------------

ADDRESS = "10.0.0.1:6379"


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A cluster with a service that is found at ADDRESS. Returns how it was stopped: by force or not."""
    found: list[bool] = []

    @contextlib.contextmanager
    def attached(address: str | None = None) -> Iterator[str]:
        yield address or ADDRESS

    def stop(_: object, *, force: bool) -> ServiceView:
        found.append(force)
        return service()

    monkeypatch.setattr(attach, "attached", attached)
    monkeypatch.setattr(attach, "find_service", object)
    monkeypatch.setattr(attach, "stop", stop)
    monkeypatch.delenv("RAY_ADDRESS")
    return found


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_service, "is_anybody_there", lambda: True)


def down(*args: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, ["down", *args], input=answer)


@pytest.mark.parametrize("args", [(), ("--yes",), ("--address", "10.0.0.2:6379")])
def test_down_prints_the_cluster_that_it_has_found(stopped: list[bool], args: tuple[str, ...]) -> None:
    result = down(*args)
    address = args[-1] if "--address" in args else ADDRESS
    assert (result.exit_code, result.stderr) == (0, f"ray-ckpt: the Ray cluster at {address}\n")
    assert result.stdout.startswith("Ended the coordinator") and stopped == [False]


def test_down_requests_confirmation_on_a_terminal_if_no_cluster_was_named(
    stopped: list[bool], terminal: None
) -> None:
    for answer in ("n\n", ""):
        result = down(answer=answer)
        assert isinstance(result.exception, ConfigError) and "Nothing was changed" in str(result.exception)
        assert f"End the service of the Ray cluster at {ADDRESS}?" in result.stderr and not stopped
    assert isinstance(down("--address", "auto", answer="n\n").exception, ConfigError), "that names none"
    assert down(answer="y\n").exit_code == 0 and stopped == [False]


@pytest.mark.parametrize("args", [("--yes",), ("--address", ADDRESS), ()])
def test_down_requests_no_confirmation_of_a_named_cluster(
    stopped: list[bool], terminal: None, args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not args:
        monkeypatch.setenv("RAY_ADDRESS", ADDRESS)
    result = down(*args)
    assert result.exit_code == 0 and "?" not in result.stderr and stopped == [False]


def test_down_without_a_service_requests_no_confirmation(
    stopped: list[bool], terminal: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "find_service", lambda: None)
    result = down()
    assert (result.exit_code, result.stdout) == (0, "This Ray cluster has no checkpoint service.\n")
    assert ADDRESS in result.stderr and "?" not in result.stderr


def test_a_refusal_of_down_names_the_cluster(stopped: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    error = ServiceError("The service is in use: run gpt is training.", hint="Give --force.")
    monkeypatch.setattr(attach, "stop", Mock(side_effect=error))
    result = down()
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines()[1] == f"ray-ckpt: {ADDRESS}: {error}"


# -- pins on the log alone ---------------------------------------------------------------------------


def test_a_pin_is_two_records(run: SampleRun) -> None:
    before = ops_of(run.folder)
    document = as_json("pin", run.folder, 10, "--owner", "paper", "--for", "7d")
    assert (document["step"], document["by"], list(document["pins"])) == (10, "log", ["paper"])
    assert document["pins"]["paper"] == pytest.approx(time.time() + 7 * 86400, abs=60)
    epoch, op = ops_of(run.folder)[len(before) :]
    assert isinstance(epoch, r.Epoch) and isinstance(op, r.Pin) and op.owner == "paper"
    assert list(Catalog(run.folder)[10].info.pins) == ["paper"]
    assert "paper until" in ray_ckpt_cli("show", run.folder, 10)


def test_pins_of_several_owners_end_one_by_one(run: SampleRun) -> None:
    assert "Step 10 is pinned by a." in ray_ckpt_cli("pin", run.folder, 10, "--owner", "a")
    again = ("--even-if-at-work",)  # the pin before it is a record of this moment
    assert "Step 10 is pinned by a, b." in ray_ckpt_cli("pin", run.folder, 10, "--owner", "b", *again)
    assert "Step 10 is pinned by b." in ray_ckpt_cli("unpin", run.folder, 10, "--owner", "a", *again)
    seq = len(ops_of(run.folder))
    assert "Step 10 is pinned by b." in ray_ckpt_cli("unpin", run.folder, 10, "--owner", "a", *again)
    assert len(ops_of(run.folder)) == seq, "nothing to do writes nothing"
    assert "Step 10 is not pinned." in ray_ckpt_cli("unpin", run.folder, 10, "--owner", "b", *again)


def test_an_unpin_with_nothing_to_do_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """However young the log is, and whatever became of the checkpoint."""
    run = write_run(tmp_path, retired=[20])
    run.log.append(r.Note(text="a save"), time_s=time.time())
    before = ops_of(run.folder)
    for step in (10, 20):
        assert f"Step {step} is not pinned." in ray_ckpt_cli("unpin", run.folder, step, "--owner", "me")
    assert ops_of(run.folder) == before
    assert "no live checkpoint of step 25" in fails(capsys, "unpin", run.folder, 25, "--owner", "me")


def test_an_unpin_ends_the_pin_that_its_owner_has(tmp_path: Path) -> None:
    """The pin of this owner is not on the newest checkpoint of the step."""
    run = write_run(tmp_path, resume_at=10, resumed_steps=(20,))
    older, _ = (c for c in Catalog(run.folder).checkpoints if c.step == 20)
    run.log.append(r.Pin(attempt=older.id.attempt, owner="a", expires_at_s=None))
    assert "Step 20 is not pinned." in ray_ckpt_cli("unpin", run.folder, 20, "--owner", "a")
    assert ops_of(run.folder)[-1] == r.Unpin(attempt=older.id.attempt, owner="a")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            (20, "--owner", "me"),
            "no live checkpoint of step 20: it is retired. Retirement is final. "
            "The nearest live steps are 10",
        ),
        ((25, "--owner", "me"), "no live checkpoint of step 25. The nearest live steps are 10, 30, 40."),
        ((10, "--owner", ""), "The owner is not a valid name."),
        ((10, "--owner", "\x1b[31m"), "The owner is not a valid name."),
        ((10, "--owner", "me", "--for", "soon"), "'soon' is not a duration. Give one such as 7d"),
    ],
)
def test_what_cannot_be_pinned_is_refused(
    run: SampleRun, args: tuple[object, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = ops_of(run.folder)
    assert message in fails(capsys, "pin", run.folder, *args)
    assert ops_of(run.folder) == before


def test_a_log_that_is_not_quiet_may_have_a_service_out_of_reach(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path)
    ray_ckpt_cli("pin", run.folder, 10, "--owner", "a")
    ray_ckpt_cli("pin", run.folder, 10, "--owner", "b")  # a pin is no sign of one
    ray_ckpt_cli("unpin", run.folder, 10, "--owner", "b")
    run = write_run(tmp_path / "at work")
    run.log.append(r.Pin(attempt=run.checkpoints[10].attempt.attempt, owner="a", expires_at_s=None))
    run.log.append(r.Note(text="a save"), time_s=time.time())
    for command in ("pin", "unpin"):
        message = fails(capsys, command, run.folder, 10, "--owner", "a", code=1)
        assert "Run gpt may be at work" in message and "--even-if-at-work" in message


@pytest.mark.parametrize("owner", ["", "a\nb", "x" * 300])
def test_a_pin_of_any_owner_can_be_removed(tmp_path: Path, owner: str) -> None:
    """Earlier versions took every owner."""
    run = write_run(tmp_path)
    run.log.append(r.Pin(attempt=run.checkpoints[10].attempt.attempt, owner=owner, expires_at_s=None))
    ray_ckpt_cli("unpin", run.folder, 10, "--owner", owner)
    assert ops_of(run.folder)[-1] == r.Unpin(attempt=run.checkpoints[10].attempt.attempt, owner=owner)


def test_a_pin_fails_if_another_writer_was_faster(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    history = read_tail(run.log.store).history
    pins.pin(run.log.store, history, step=10, owner="a", expires_at_s=None, now_s=0.0)
    with pytest.raises(Fenced, match="Another writer has written record"):
        pins.pin(run.log.store, history, step=10, owner="b", expires_at_s=None, now_s=0.0)


def test_a_pin_beyond_the_calendar_writes_nothing(tmp_path: Path) -> None:
    store = write_run(tmp_path).log.store
    history = read_tail(store).history
    with pytest.raises(ConfigError, match=r"The log cannot hold that: expires_at_s must be.* Use texts"):
        pins.pin(store, history, step=10, owner="me", expires_at_s=1e15, now_s=START_S)
    assert read_tail(store).history.next_seq == history.next_seq


def test_a_service_that_is_at_work_after_all_goes_on_with_its_group() -> None:
    """The pin is in its own service's name: it steps down for itself only, comes back and has the run."""
    run = trained()
    run.save(10)
    plan = run.plan
    pins.pin(run.store, read_tail(run.store).history, step=10, owner="me", expires_at_s=None, now_s=START_S)
    down = one(run.save(20), m.StepDown)
    assert not down.is_foreign, "its group does not end"
    again = Harness("ab", service=SERVICE, store=run.store, keep_last=10)
    again.disks = run.disks
    again.feed(m.GroupRecovered(plan=plan, inventories=again.inventories()))
    again.save(30)
    assert [c.step for c in again.machine.history.lineage()] == [10, 20, 30], "also what was on its way"
    assert "me" in again.machine.history.lineage()[0].pins


@pytest.mark.parametrize(
    ("text", "span_s"), [("90s", 90), ("30min", 1800), ("1.5h", 5400), ("7d", 604_800), ("2 w", 1_209_600)]
)
def test_lengths_of_time(text: str, span_s: float) -> None:
    assert seconds(text) == span_s


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "0s", "1e9d", "7 months", "nan h"])
def test_what_is_no_length_of_time(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a duration"):
        seconds(text)


# -- what is printed ---------------------------------------------------------------------------------


def node(name: str, *ranks: int, at_risk: int = 0, **more: Any) -> NodeView:
    view = NodeView(
        node_id=name * 16,
        ranks=ranks,
        holders=("b" * 16,),
        is_live=True,
        is_draining=False,
        gone_in_s=None,
        domain="",
        exposure=Exposure(node_id=name, step=1200, tier="peer", steps_at_risk=at_risk),
        disk=DiskView(free_bytes=200 * GIB, total_bytes=1000 * GIB, reserve_bytes=GIB, is_full=False),
    )
    return replace(view, **more)


RUN = RunView(
    name="gpt",
    where="/shared/runs/gpt",
    run_uid="u" * 32,
    epoch=3,
    state="training",
    owner="job:1",
    session=2,
    world_size=16,
    step=1240,
    step_s=0.52,
    interval_s=120.0,
    newest=(
        NewestView(level="local", step=1200, age_s=20.0, steps_behind=40),
        NewestView(level="durable", step=1000, age_s=130.0, steps_behind=240),
    ),
    nodes=(node("a", *range(8), at_risk=40), node("c", *range(8, 16))),
    saves=(
        SaveUnderway(
            step=1240,
            phase="copying",
            ranks_captured=16,
            ranks_stored=16,
            world_size=16,
            copies=1,
            copies_awaited=1,
            size_bytes=8_000_000_000,
            age_s=3.0,
        ),
    ),
    drains=(
        DrainUnderway(
            step=1200,
            attempt="x",
            state="uploading",
            fragments=4,
            fragments_done=1,
            nodes=("a" * 16,),
            size_bytes=8_000_000_000,
            tries=1,
            age_s=30.0,
            started_s=20.0,
        ),
    ),
    sent_bytes={"x": 1_000_000_000},
    copies_missing=2,
    records_waiting=0,
    live=5,
    in_cluster_only=(1100, 1200),
    needed_in_cluster=(1200,),
    warning="the store \x1b[31mis silent",
    warning_age_s=61.0,
)


def printed(what: Any) -> str:
    console = Console(width=200, markup=False, emoji=False, highlight=False)
    with console.capture() as captured:
        console.print(what)
    return captured.get()


def cells(text: str, first: str) -> str:
    """Return the row that begins so, with single spaces."""
    rows = [" ".join(line.split()) for line in text.splitlines()]
    (row,) = [row for row in rows if row.startswith(first)]
    return row


def test_a_run_in_detail() -> None:
    text = printed(run_details(RUN))
    assert "training  session 2, 16 rank(s) on 2 node(s)  step 1240  0.52 s a step  a save each 2 min" in text
    assert cells(text, "local") == "local 1200 20 s 40"
    assert cells(text, "replicated") == "replicated - - -"
    assert cells(text, "durable") == "durable 1000 2 min 240"
    assert cells(text, "aaaaaaaaaaaa 0-7") == (
        "aaaaaaaaaaaa 0-7 bbbbbbbbbbbb step 1200, from peer 40 214.7 GB 1.1 TB 1.1 GB"
    )
    assert cells(text, "step 1240") == "step 1240 copying 16/16 16/16 1/2 8.0 GB 3 s"
    assert cells(text, "step 1200") == (
        "step 1200 uploading 1/4 3.0 GB of 8.0 GB 150.0 MB/s 33 s 1 aaaaaaaaaaaa"
    ), "2 GB in a whole fragment and 1 GB on its way"
    assert "2 copies of fragments are yet to be made again" in text and "parity" not in text
    assert "last warning, 1 min ago: the store \N{REPLACEMENT CHARACTER}[31mis silent" in text
    assert "\x1b" not in text


def test_a_run_with_parity() -> None:
    groups = (ParityGroup(members=(0, 2), parity=1), ParityGroup(members=(1, 3), parity=1))
    nodes = tuple(node(name, at, holders=(), parity_group=at % 2) for at, name in enumerate("abcd"))
    run = replace(RUN, parity_groups=groups, nodes=(*nodes, node("e", holders=(), exposure=None)))
    text = printed(run_details(run))
    assert "parity 1+1 in 2 groups" in text
    assert "2 copies or parity files are yet to be made again" in text
    assert cells(text, "node").startswith("node ranks parity group if it dies")
    assert cells(text, "bbbbbbbbbbbb").startswith("bbbbbbbbbbbb 1 1 step 1200, from peer")
    assert cells(text, "eeeeeeeeeeee").startswith("eeeeeeeeeeee - - - -")
    assert cells(text, "save").startswith("save phase captured stored parity files bytes")
    assert cells(text, "step 1240") == "step 1240 copying 16/16 16/16 1/2 8.0 GB 3 s"


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_breaks_no_number(width: int) -> None:
    def words(columns: int) -> set[str]:
        console = Console(width=columns, markup=False, emoji=False, highlight=False)
        with console.capture() as captured:
            console.print(frame(service(RUN, replace(RUN, name="old")), None))
        assert all(len(line) <= columns for line in captured.get().splitlines())
        return {word.strip(",") for word in captured.get().split()} - {"─" * n for n in range(columns)}

    assert words(width) <= words(1000)


def test_nodes_that_need_attention_show_why() -> None:
    disk = DiskView(free_bytes=1, total_bytes=1000 * GIB, reserve_bytes=GIB, is_full=False)
    nodes = (
        node("a", 0, disk=replace(disk, is_full=True)),
        node("b", 1, disk=disk, is_draining=True, gone_in_s=75.0),
        node("c", 2, is_live=False, disk=None, exposure=None),
    )
    text = printed(run_details(replace(RUN, nodes=nodes)))
    assert cells(text, "aaaaaaaaaaaa 0").endswith("disk is full")
    assert cells(text, "bbbbbbbbbbbb 1").endswith("leaves in 1 min, reserve is used")
    assert cells(text, "cccccccccccc 2") == "cccccccccccc 2 bbbbbbbbbbbb - - - - - gone"


def test_of_many_nodes_those_at_risk_are_shown() -> None:
    nodes = tuple(replace(node("a", k, at_risk=k), node_id=f"node-{k:03d}") for k in range(MAX_NODES + 5))
    text = printed(run_details(replace(RUN, nodes=nodes)))
    assert "node-036" in text and "node-004" not in text and "5 more" in text


def test_a_frame_of_top() -> None:
    idle = replace(RUN, name="old", where="/shared/runs/old", state="idle", saves=(), drains=(), newest=())
    leaving = (DrainingView(node_id="a" * 16, source="aws", in_s=100.0),)
    text = printed(frame(replace(service(RUN, idle), leaving=leaving), None))
    assert "ray_ckpt 0.1.0, protocol 5, Ray 2.60.0; coordinator on node a (10.0.0.1)" in text
    assert "node aaaaaaaaaaaa is about to go, in 1 min (aws)" in text
    assert cells(text, "gpt") == (
        "gpt training 2 16 1240 1200, 20 s ago - 1000, 2 min ago 40 step(s), from peer 2 1"
    )
    assert cells(text, "old").startswith("old idle 2 16 1240 - - -")
    assert "run gpt  /shared/runs/gpt" in text and "run old" not in text, "only what moves is shown in detail"
    assert "run old" in printed(frame(service(idle), "old"))
    assert "No run is open." in printed(frame(service(), None))


def test_runs_are_found_by_name_and_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(RUN, where="s3://bucket/runs/gpt")
    view = service(RUN, other, replace(RUN, name="old", where=f"{tmp_path}/old"))
    assert [run.where for run in runs_named(view, "gpt")] == [RUN.where, other.where]
    assert [run.where for run in runs_named(view, "s3://bucket/runs/gpt/")] == [other.where]
    monkeypatch.chdir(tmp_path)
    assert [run.name for run in runs_named(view, "./old")] == ["old"]
    assert [run.name for run in runs_named(view, "old/ray_ckpt")] == ["old"]
    at_port = replace(RUN, where="s3://bucket/runs/gpt?endpoint_override=10.0.0.5:9000")
    printed_as = "s3://bucket/runs/gpt/ray_ckpt?endpoint_override=10.0.0.5:9000"
    assert runs_named(service(at_port), printed_as) == (at_port,)
    assert runs_named(view, "new") == () and runs_named(view, "ftp://x/y") == ()


def test_ranks_are_named_in_spans() -> None:
    assert ranks_text((0, 1, 2, 3, 8)) == "0-3, 8"
    assert ranks_text(()) == "" and ranks_text((5,)) == "5"


# -- the command itself ------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["up", "down", "status", "top", "pin", "unpin"])
def test_every_command_has_an_example_and_json(command: str) -> None:
    text = ray_ckpt_cli(command, "--help")
    assert f"Example: ray-ckpt {command}" in text and "--json" in text and "--address" in text


@pytest.mark.slow  # 4 s
def test_bash_completes_options_and_leaves_paths_to_itself(tmp_path: Path) -> None:
    script = """
        eval "$(ray-ckpt --show-completion)"
        complete -p ray-ckpt
        complete_words() {
            COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
            _ray_ckpt_completion ray-ckpt; echo "$*=${COMPREPLY[*]}"
        }
        complete_words ray-ckpt status --addr
    """
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run(
        [bash, "--norc", "-c", script],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=60,
    )
    assert done.stdout.splitlines() == [
        "complete -o default -F _ray_ckpt_completion ray-ckpt",  # default: files, if nothing else is found
        "ray-ckpt status --addr=--address",
    ], done.stderr
