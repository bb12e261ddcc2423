"""Each command and call names files of a newer ray_ckpt as such, and not as damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import ray_ckpt
import tests.support.sample_run as sample
from ray_ckpt import Catalog
from ray_ckpt.catalog.catalog import verify_directory
from ray_ckpt.cli import main
from ray_ckpt.errors import NewerFormat
from ray_ckpt.format import jsontext, manifest, names, records
from ray_ckpt.format.tree import encode_tree
from ray_ckpt.storage.local.scrub import verify_fragment
from tests.support.examples import every_few
from tests.support.sample_run import RunLog, SampleRun, write_run

WORDS = "of a newer version; update ray_ckpt"
READ_THE_LOG = (
    "ls {}",
    "tree {}",
    "gc {} --dry-run",
    "goodput {}",
    "report {} --html {out}",
    "rollback {} --before 30 --yes",
    "pin {} 30 --owner a",
    "unpin {} 30 --owner a",
    "status {}",
)
READ_THE_MANIFEST = (
    "ls {} --parquet {out}",
    "show {} 30",
    "verify {}",
    "verify {} --all",
    "verify {} --plan",
    "diff {} 10 30",
    "export {} {out}",
    "drill {} --remote-only",
    "drill {} --remote-only --step 30",
)
READ_STATES = ("diff {} 10 30", "export {} {out} --to torch")

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: Patch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")


def with_newer_op(tmp_path: Path, monkeypatch: Patch) -> SampleRun:
    run = write_run(tmp_path)
    run.log.append(records.Note(text="of tomorrow"))
    monkeypatch.delitem(records.OPS, "note")
    return run


def of_newer_format(tmp_path: Path, monkeypatch: Patch) -> SampleRun:
    """Return a run in a newer format, from its first record on."""

    def create(log: RunLog) -> None:
        log.append(records.Create(run_uid=log.run_uid, run_name=log.folder.name, format=2))
        log.append(records.Epoch())

    with monkeypatch.context() as patch:
        patch.setattr(jsontext, "FORMAT_VERSION", 2)
        patch.setattr(RunLog, "create", create)
        return write_run(tmp_path)


def with_newer_snapshot(tmp_path: Path, monkeypatch: Patch) -> SampleRun:
    """Return a run with a newer snapshot, after whose trimming the records before it are gone."""
    run = write_run(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(jsontext, "FORMAT_VERSION", 2)
        run.log.snapshot(time_s=2e9)
    for seq in range(1, run.log.seq):
        run.log.store.delete(names.record_file(seq))
    return run


def with_newer_description(tmp_path: Path, monkeypatch: Patch) -> SampleRun:
    return newer_in("encode_checkpoint", tmp_path, monkeypatch)


def with_newer_fragments(tmp_path: Path, monkeypatch: Patch) -> SampleRun:
    return newer_in("encode_fragment", tmp_path, monkeypatch)


def newer_in(encoder: str, tmp_path: Path, monkeypatch: Patch) -> SampleRun:
    """Return a run whose `encoder` writes the next format."""
    encode: Callable[[object], bytes] = getattr(sample, encoder)

    def encode_newer(value: object) -> bytes:
        with monkeypatch.context() as patch:
            patch.setattr(jsontext, "FORMAT_VERSION", 2)
            patch.setattr(manifest, "DESCRIPTION_VERSION", 4)
            return encode(value)

    with monkeypatch.context() as patch:
        patch.setattr(sample, encoder, encode_newer)
        return write_run(tmp_path)


def with_newer_values(tmp_path: Path, monkeypatch: Patch) -> SampleRun:
    """State files with a tag that this version does not know."""
    with monkeypatch.context() as patch:
        patch.setattr(sample, "encode_tree", lambda tree: encode_tree(tree).replace(b'"$tuple"', b'"$later"'))
        return write_run(tmp_path)


def exits(capsys: pytest.CaptureFixture[str], command: str, run: SampleRun) -> tuple[int, str, str]:
    args = command.format(run.folder, out=run.folder.parent / "out").split()
    with pytest.raises(SystemExit) as caught:
        main(args)
    output = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, output.out, output.err


@pytest.mark.parametrize(
    ("write", "command"),
    [
        *((with_newer_op, command) for command in READ_THE_LOG + READ_THE_MANIFEST),
        *every_few((of_newer_format, command) for command in READ_THE_LOG + READ_THE_MANIFEST),
        *every_few((with_newer_snapshot, command) for command in READ_THE_LOG + READ_THE_MANIFEST),
    ],
)
def test_a_newer_log_is_named(
    write: Callable[[Path, Patch], SampleRun],
    command: str,
    tmp_path: Path,
    monkeypatch: Patch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = exits(capsys, command, write(tmp_path, monkeypatch))
    assert (code, out) == (2, "") and WORDS in err and err.count("\n") == 1


@pytest.mark.parametrize("command", READ_THE_MANIFEST)
@pytest.mark.parametrize("write", [with_newer_description, with_newer_fragments])
def test_a_newer_checkpoint_is_named(
    write: Callable[[Path, Patch], SampleRun],
    command: str,
    tmp_path: Path,
    monkeypatch: Patch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = exits(capsys, command, write(tmp_path, monkeypatch))
    if command.startswith("drill") and write is with_newer_description:  # a restore does not read it, either
        assert code == 0 and "passed" in out
    else:
        assert code == 2 and WORDS in err and "DAMAGED" not in out


@pytest.mark.parametrize("command", READ_STATES)
def test_newer_values_are_named(
    command: str, tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = exits(capsys, command, with_newer_values(tmp_path, monkeypatch))
    assert code == 2 and WORDS in err and "state-" in err


@pytest.mark.parametrize(
    "write",
    [
        with_newer_op,
        of_newer_format,
        with_newer_snapshot,
        with_newer_description,
        with_newer_fragments,
        with_newer_values,
    ],
)
def test_load_names_what_is_newer(
    write: Callable[[Path, Patch], SampleRun], tmp_path: Path, monkeypatch: Patch
) -> None:
    run = write(tmp_path, monkeypatch)
    with pytest.raises(NewerFormat, match=WORDS):
        ray_ckpt.open(str(run.folder)).load()


def test_verify_distinguishes_newer_formats_from_damage(
    tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = with_newer_description(tmp_path, monkeypatch)
    other = write_run(tmp_path / "other")
    path = run.directory(10) / names.CHECKPOINT_JSON
    path.write_bytes(other.checkpoints[10].files[names.CHECKPOINT_JSON])
    code, out, err = exits(capsys, "verify {} --all", run)
    assert code == 2 and f"{run.directory(10)}: ok" in out and f"{run.directory(30)}" in err
    code, out, err = exits(capsys, "verify {} --all --json", run)
    document = json.loads(out)
    assert (code, document["ok"], len(document["checkpoints"])) == (2, False, 1) and WORDS in err
    shard = run.directory(10) / names.shard_file(0, 2)
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff\x00")
    code, out, err = exits(capsys, "verify {} --all", run)
    assert code == 1 and "DAMAGED" in out and WORDS in err


def test_calls_of_the_catalog_name_what_is_newer(tmp_path: Path, monkeypatch: Patch) -> None:
    run = with_newer_fragments(tmp_path, monkeypatch)
    view = Catalog(run.folder)[30]
    for call in (view.verify, view.fragments, view.tensors, lambda: verify_directory(run.directory(30))):
        with pytest.raises(NewerFormat, match=f"manifest-00000-of-00002.*{WORDS}"):
            call()


def test_the_scrub_takes_nothing_newer_for_damage(tmp_path: Path, monkeypatch: Patch) -> None:
    run = with_newer_fragments(tmp_path, monkeypatch)
    assert verify_fragment(lambda name: run.directory(30) / name, 0, 2) == ()
