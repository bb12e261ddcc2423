"""The doctor's findings on this machine, in healthy and faulty folders and stores, and its leftovers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ray_ckpt.cli import app
from ray_ckpt.cli import doctor_checks as doctor
from ray_ckpt.cli.doctor_checks import Check, check_machine, check_staging, check_store
from ray_ckpt.config import MIB, PORTS_ENV, STAGING_ENV
from ray_ckpt.location import Location
from ray_ckpt.storage.local.direct import write_direct
from ray_ckpt.storage.remote.tier import open_store
from tests.servers.stores import bucket_url
from tests.servers.strict_store import Fault, Hang, Match, Status, StrictStore

SOON_S = 0.5


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (STAGING_ENV, PORTS_ENV):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def bucket(strict: StrictStore, credentials: None) -> Location:
    return Location.parse(bucket_url("s3", strict.endpoint, f"doctor/{uuid.uuid4().hex}"))


def machine() -> dict[str, Check]:
    return {check.name: check for check in check_machine()}


def staging(folder: Path, **options: float) -> list[Check]:
    return list(check_staging(str(folder), size_bytes=MIB, **options))


# This machine


def test_this_machine_is_measured() -> None:
    checks = machine()
    assert list(checks) == [
        "shared memory",
        "huge pages",
        "memory of others",
        "memory",
        "open files",
        "ports",
    ]
    assert all(check.found and check.state in ("ok", "warn") for check in checks.values()), checks
    assert all(check.advice for check in checks.values() if check.state != "ok")
    assert checks["memory of others"].state == "ok"


def test_ports_that_are_taken_or_make_no_sense_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv(PORTS_ENV, f"{port}-{port}")
        check = machine()["ports"]
        assert check.state == "fail" and "0 of 1 are free" in check.found and PORTS_ENV in check.advice
    assert machine()["ports"].state == "ok"
    monkeypatch.setenv(PORTS_ENV, "many")
    assert machine()["ports"].state == "fail" and "two ports" in machine()["ports"].advice


def test_little_memory_and_few_files_are_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LEAST_MEMORY_BYTES", 1 << 60)
    monkeypatch.setattr(doctor, "LEAST_OPEN_FILES", 1 << 40)
    monkeypatch.setattr(doctor, "LEAST_SHM_BYTES", 1 << 60)
    checks = machine()
    assert [checks[name].state for name in ("memory", "open files", "shared memory")] == ["warn"] * 3


# Staging folders


def test_a_staging_folder_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("stays")
    space, small, speed = staging(tmp_path)
    assert [space.name, small.name, speed.name] == [f"{n} {tmp_path}" for n in ("staging", "fsync", "speed")]
    assert all(check.state in ("ok", "warn") for check in (space, small, speed))
    assert "free of" in space.found and "O_DIRECT" in small.found and "1.0 MB written at" in speed.found
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_staging_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    space, *_ = staging(tmp_path / "a" / "b")
    assert "created when it is needed" in space.found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["file", "link", "file/below"])
def test_a_staging_folder_that_cannot_be_made_fails(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (space,) = staging(tmp_path / name)
    assert space.state == "fail" and space.found.endswith(f"{name[:4]} is not a folder")
    assert STAGING_ENV in space.advice


def test_without_a_size_nothing_large_is_written(tmp_path: Path) -> None:
    assert len(list(check_staging(str(tmp_path), size_bytes=0))) == 2


def test_too_little_space_fails_and_nothing_is_written(tmp_path: Path) -> None:
    (space,) = check_staging(str(tmp_path), size_bytes=1 << 60)
    assert space.state == "fail" and "reserve_bytes" in space.advice


def test_a_folder_of_memory_is_warned_about() -> None:
    space, *_ = check_staging("/dev/shm", size_bytes=0)
    assert space.state == "fail" or (space.state == "warn" and "This is memory" in space.advice)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_fails_with_advice(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    _, small = staging(tmp_path)
    assert small.state == "fail" and STAGING_ENV in small.advice


def test_a_disk_that_takes_too_long_ends_in_time_and_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, ended = threading.Event(), threading.Event()

    def slow(*args: object, **options: object) -> object:
        go_on.wait(60)
        try:
            return write_direct(*args, **options)  # type: ignore[arg-type]
        finally:
            ended.set()

    monkeypatch.setattr("ray_ckpt.cli.doctor_checks.write_direct", slow)
    monkeypatch.setattr(doctor, "GRACE_S", 0.05)
    *_, speed = staging(tmp_path, limit_s=0.05)
    assert (speed.state, speed.found) == ("fail", "no answer within 0.05 s")
    go_on.set()
    assert ended.wait(10)
    deadline_s = time.monotonic() + 10
    while any(tmp_path.iterdir()) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert list(tmp_path.iterdir()) == []


# Storage paths


def test_a_folder_and_a_bucket_are_fit_and_left_as_they_were(tmp_path: Path, bucket: Location) -> None:
    for where in (Location.parse(tmp_path), bucket):
        checks = list(check_store(where))
        assert [(c.name, c.state) for c in checks] == [
            ("store", "ok"),
            ("store latency", "ok"),
            ("store clock", "ok"),
        ], checks
        assert "ms to write" in checks[1].found
        assert list(open_store(where, None)[0].list()) == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    (check,) = check_store(Location.parse(tmp_path / "typo"))
    assert check.state == "fail" and "does not exist" in check.found and "Mount it" in check.advice
    assert list(tmp_path.iterdir()) == []


def test_the_stores_clock_is_held_against_ours(strict: StrictStore, bucket: Location) -> None:
    strict.set_clock_offset(-60.0)
    *_, clock = check_store(bucket)
    assert clock.state == "warn" and "NTP" in clock.advice
    assert 55 < float(clock.found.split()[0]) < 65


def test_a_store_that_refuses_fails(strict: StrictStore, bucket: Location) -> None:
    strict.add_fault(Fault(match=Match(operation="PutObject"), action=Status(403, "AccessDenied")))
    (check,) = check_store(bucket)
    assert check.state == "fail" and check.advice


def test_a_store_that_hangs_ends_in_time(strict: StrictStore, bucket: Location) -> None:
    strict.add_fault(Fault(match=Match(), action=Hang()))
    began_s = time.monotonic()
    (check,) = check_store(bucket, limit_s=SOON_S)
    assert time.monotonic() - began_s < SOON_S + 5
    assert (check.state, check.found) == ("fail", f"no answer within {SOON_S:g} s")
    assert "ray_ckpt-doctor-" in check.advice


def test_a_process_ends_in_time_also_while_a_store_hangs(strict: StrictStore, bucket: Location) -> None:
    strict.add_fault(Fault(match=Match(), action=Hang()))
    program = (
        "import sys; from ray_ckpt.cli.doctor_checks import check_store\n"
        "from ray_ckpt.location import Location\n"
        f"for check in check_store(Location.parse(sys.argv[1]), limit_s={SOON_S}): print(check.found)"
    )
    command = [sys.executable, "-c", program, str(bucket)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    assert (ended.stdout, ended.stderr) == (f"no answer within {SOON_S:g} s\n", "")


def test_the_measurement_of_a_slow_disk_is_stopped_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "IO_BLOCK_BYTES", 4096)
    real = doctor._go_on

    def slow(stop: threading.Event) -> None:
        time.sleep(0.02)
        real(stop)

    monkeypatch.setattr(doctor, "_go_on", slow)
    *_, speed = staging(tmp_path, limit_s=0.1)
    assert speed.found == "no answer within 0.1 s" and list(tmp_path.iterdir()) == []


def test_a_check_that_breaks_is_a_failed_one() -> None:
    def broken() -> doctor.Finding:
        raise ZeroDivisionError("oh")

    check = doctor._run("x", broken, limit_s=5, advice="Do that.")
    assert (check.state, check.found, check.advice) == ("fail", "ZeroDivisionError: oh", "Do that.")


# The command


def test_the_command_shows_a_table_and_exits_with_0(tmp_path: Path) -> None:
    args = ["doctor", str(tmp_path), "--staging", str(tmp_path), "--size", "1"]
    result = CliRunner().invoke(app, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    for name in ("shared memory", f"speed {tmp_path}", "store clock", "12 checks in"):
        assert name in result.stdout
    assert "\x1b" not in result.stdout and list(tmp_path.iterdir()) == []


def test_a_failed_check_exits_with_1_also_as_json(tmp_path: Path) -> None:
    args = ["doctor", str(tmp_path / "typo"), "--staging", str(tmp_path), "--size", "0", "--json"]
    result = CliRunner().invoke(app, args, catch_exceptions=False)
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["ok"] is False
    assert [c["name"] for c in document["checks"] if c["state"] == "fail"] == ["store"]
    assert set(document["checks"][0]) == {"name", "state", "found", "advice"}


def test_wrong_usage_exits_with_2() -> None:
    assert CliRunner().invoke(app, ["doctor", "--size", "-1"]).exit_code == 2
    help_text = CliRunner().invoke(app, ["doctor", "--help"]).stdout
    assert "Example: ray-ckpt doctor" in help_text
