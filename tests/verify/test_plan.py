"""`verify --plan`: what the manifest proves, what it cannot see, and what it costs to read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from ray_ckpt.cli import app, main
from ray_ckpt.format import manifest, names
from ray_ckpt.format.digest import digest, root_digest, root_files
from ray_ckpt.format.manifest import CheckpointDescription, encode_checkpoint, encode_fragment
from ray_ckpt.storage.checkpoint_files import files_at
from ray_ckpt.types import FileEntry, ManifestRow, RootOf, Slice
from ray_ckpt.verify.plan import PlanReport, _tensor_coverage, verify_plan
from tests.support.sample_run import SampleRun, compress_shards, write_run

SHARD = "shard-00001-of-00002.safetensors"


@pytest.fixture(params=get_args(RootOf))
def run(tmp_path: Path, request: pytest.FixtureRequest) -> SampleRun:
    return write_run(tmp_path, steps=(10, 20, 30), durable=(10, 30), rows=4096, root_of=request.param)


@pytest.fixture
def folder(run: SampleRun) -> Path:
    return run.directory(30)


def plan(folder: Path, **options: Any) -> PlanReport:
    return verify_plan(files_at(folder), **options)


def is_newer(run: SampleRun) -> bool:
    return run.checkpoints[30].root_of == "fragments"


def findings(report: PlanReport) -> list[tuple[str, str]]:
    return [(damage.file, damage.where) for damage in report.damages]


def rewrite(folder: Path, run: SampleRun, change: Any) -> None:
    """Rewrite the manifest as a faulty writer would: `change` each row, and make all digests fit."""
    saved = run.checkpoints[30]
    entries = [entry for fragment in saved.fragments for entry in fragment.files]
    for fragment in saved.fragments:
        changed = replace(fragment, rows=tuple(map(change, fragment.rows)))
        name = names.fragment_file(fragment.node_index, fragment.num_nodes)
        data = encode_fragment(changed)
        (folder / name).write_bytes(data)
        entries.append(FileEntry(name=name, size_bytes=len(data), digest=digest(data)))
    described(folder, run, entries)


def described(folder: Path, run: SampleRun, entries: Iterable[FileEntry]) -> None:
    saved = run.checkpoints[30]
    files = tuple(root_files(entries, saved.root_of))
    description = CheckpointDescription(
        attempt=saved.attempt,
        world_size=saved.world_size,
        num_nodes=saved.num_nodes,
        metrics=saved.metrics,
        files=files,
        root_digest=root_digest(files, saved.root_of),
        root_of=saved.root_of,
    )
    (folder / names.CHECKPOINT_JSON).write_bytes(encode_checkpoint(description))


def moved(key: str, by: int) -> Any:
    """Slices of a tensor that begin `by` rows further on, where they do not begin at 0."""

    def change(row: ManifestRow) -> ManifestRow:
        part = row.slice
        if part is None or part.key != key or not part.offset[0]:
            return row
        return replace(row, slice=replace(part, offset=(part.offset[0] + by, *part.offset[1:])))

    return change


def taller(key: str) -> Any:
    """Declare one row more for a tensor than were saved."""

    def change(row: ManifestRow) -> ManifestRow:
        part = row.slice
        if part is None or part.key != key:
            return row
        shape = (part.global_shape[0] + 1, *part.global_shape[1:])
        return replace(row, slice=replace(part, global_shape=shape))

    return change


def test_a_whole_checkpoint_is_proven_without_its_bytes(run: SampleRun, folder: Path) -> None:
    saved = run.checkpoints[30]
    report = plan(folder, root_digest=saved.root_digest)
    assert report.ok and report.world_size == 2
    assert report.tensor_bytes == sum(array.nbytes for array in saved.tensors.values())
    assert all(item.num_covered == item.num_elements and not item.num_differing for item in report.items)
    items = {item.item: item for item in report.items}
    assert set(items) == {"model", "optimizer", "rank0", "rank1"}
    assert (items["model"].num_tensors, items["model"].num_slices) == (4, 6)
    assert [(n.node_index, n.ranks, n.num_files) for n in report.nodes] == [(0, (0,), 2), (1, (1,), 2)]
    assert report.size_bytes == sum(node.size_bytes for node in report.nodes)
    assert report.read_bytes < report.size_bytes / 10


def test_a_flipped_bit_in_a_tensor_is_not_seen_and_one_in_a_header_is(folder: Path) -> None:
    data = bytearray((folder / SHARD).read_bytes())
    data[-1] ^= 1
    (folder / SHARD).write_bytes(data)
    assert plan(folder).ok
    data[20] ^= 1
    (folder / SHARD).write_bytes(data)
    assert findings(plan(folder)) == [(SHARD, "header")]


def test_files_that_are_missing_cut_or_too_many_are_named(folder: Path) -> None:
    state = names.state_file(0, 2)
    (folder / SHARD).unlink()
    (folder / state).write_bytes(b"short")
    (folder / names.shard_file(3, 4)).write_bytes(b"")
    assert not plan(folder).is_restorable and sorted(findings(plan(folder))) == sorted(
        [(SHARD, "missing"), (state, "size"), (names.shard_file(3, 4), "unlisted")]
    )


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        (moved("model.blocks.0.weight", -1), "Slices of model.blocks.0.weight overlap"),
        (taller("model.blocks.0.weight"), "6 elements of model.blocks.0.weight are in no slice"),
    ],
    ids=["overlap", "gap"],
)
def test_a_tensor_that_is_not_covered_exactly_is_named(
    run: SampleRun, folder: Path, change: Any, detail: str
) -> None:
    rewrite(folder, run, change)
    [damage] = plan(folder).damages
    assert not plan(folder).is_restorable and damage.where == "coverage" and detail in damage.detail


def test_each_tensor_with_a_gap_is_named_and_counted(run: SampleRun, folder: Path) -> None:
    one, other = taller("model.blocks.0.weight"), taller("optimizer.state.blocks.0.weight.exp_avg")
    rewrite(folder, run, lambda row: one(other(row)))
    report = plan(folder)
    assert [damage.where for damage in report.damages] == ["coverage"] * 2
    short = {item.item: item.num_elements - item.num_covered for item in report.items}
    assert short == {"model": 6, "optimizer": 6, "rank0": 0, "rank1": 0}


def test_copies_of_a_slice_count_once_and_differences_are_reported(tmp_path: Path) -> None:
    part = Slice(item="m", name="w", dtype="U8", global_shape=(4,), offset=(0,), shape=(4,))
    rows = [
        ManifestRow(kind="slice", file=f"f{rank}", byte_offset=0, nbytes=4, digest=mark * 32, slice=part)
        for rank, mark in enumerate("aab")
    ]
    manifest.check_coverage(rows)
    found = _tensor_coverage(rows)
    assert [found[f"num_{name}"] for name in ("slices", "covered", "differing")] == [3, 4, 1]
    assert found["size_bytes"] == 4


def test_tensors_of_ranks_that_differ_in_dtype_or_shape_count_each() -> None:
    rows = [
        ManifestRow(
            kind="slice",
            file=f"f{rank}",
            byte_offset=0,
            nbytes=nbytes,
            digest=f"{rank}" * 32,
            slice=Slice(item="m", name="w", dtype=dtype, global_shape=(size,), offset=(0,), shape=(size,)),
        )
        for rank, (dtype, size, nbytes) in enumerate([("U8", 4, 4), ("U8", 6, 6), ("I64", 4, 32)])
    ]
    assert _tensor_coverage(rows) == {
        "num_tensors": 1,
        "num_slices": 3,
        "size_bytes": 42,
        "num_elements": 14,
        "num_covered": 14,
        "num_differing": 0,
    }


def test_another_manifest_than_the_log_has_is_found(run: SampleRun, folder: Path) -> None:
    report = plan(folder, root_digest="0" * 32)
    [damage] = report.damages
    assert not report.is_restorable and damage.where == "root digest" and "the log has" in damage.detail
    (folder / names.CHECKPOINT_JSON).unlink()
    report = plan(folder, root_digest=run.checkpoints[30].root_digest)
    assert findings(report) == [(names.CHECKPOINT_JSON, "missing")], "the fragments are the log's"


def stray(folder: Path, run: SampleRun) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def no_description(folder: Path, run: SampleRun) -> None:
    (folder / names.CHECKPOINT_JSON).unlink()


def bad_description(folder: Path, run: SampleRun) -> None:
    (folder / names.CHECKPOINT_JSON).write_bytes(b"{}")


def another_description(folder: Path, run: SampleRun) -> None:
    """Sealed, of the same files with other digests, and of one that nobody saved."""
    entries = [replace(entry, digest="0" * 32) for entry in run.checkpoints[30].entries]
    extra = FileEntry(name=names.shard_file(0, 4), size_bytes=8, digest="0" * 32)
    described(folder, run, [*entries, extra])


@pytest.mark.parametrize("harm", [stray, no_description, bad_description, another_description])
def test_damage_that_a_restore_does_not_need_is_reported(
    run: SampleRun, folder: Path, harm: Callable[[Path, SampleRun], None]
) -> None:
    harm(folder, run)
    root_digest = run.checkpoints[30].root_digest
    report = plan(folder, root_digest=root_digest)
    assert report.is_restorable and not report.ok
    code, text = invoke(run.folder, "--step", 30, "--plan")
    assert code == 1 and ": can be restored; its folder has changed since the save (" in text
    (folder / SHARD).unlink()
    assert not plan(folder, root_digest=root_digest).is_restorable


def test_without_the_log_the_folder_defines_what_was_committed(run: SampleRun, folder: Path) -> None:
    stray(folder, run)
    assert plan(folder).is_restorable
    (folder / names.CHECKPOINT_JSON).unlink()
    assert not plan(folder).is_restorable


def test_a_lost_fragment_leaves_nothing_proven(run: SampleRun, folder: Path) -> None:
    name = names.fragment_file(1, 2)
    (folder / name).unlink()
    report = plan(folder)
    assert not report.is_restorable
    unread = [names.shard_file(1, 2), names.state_file(1, 2)] if is_newer(run) else []
    unlisted = [(file, "unlisted") for file in unread]  # checkpoint.json lists them in older versions only
    assert findings(report) == [(name, "missing"), *unlisted], "no tensor is blamed for it"
    assert all("No readable fragment lists it" in damage.detail for damage in report.damages[1:])
    assert any(item.num_covered < item.num_elements for item in report.items)


def test_compressed_shards_are_looked_at_where_they_lie(folder: Path) -> None:
    compress_shards(folder)
    assert plan(folder).ok
    path = folder / f"{SHARD}.zst"
    path.write_bytes(path.read_bytes()[:-10])
    assert findings(plan(folder)) == [(SHARD, "content")]


# the command


def invoke(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["verify", *map(str, args)], catch_exceptions=False)
    return result.exit_code, result.stdout


def test_the_command_shows_what_can_be_restored(run: SampleRun) -> None:
    code, text = invoke(run.folder, "--step", 30, "--plan", "--nodes")
    assert code == 0 and "30" in text and ": can be restored; read" in text
    rows = [line.split() for line in text.splitlines()]
    assert next(row for row in rows if row[:1] == ["model"])[:3] == ["model", "4", "6"]
    assert "100 %" in text and "can be restored by any number" in text
    assert ["1", "1", "2"] in [row[:3] for row in rows]


def test_the_command_as_json_and_its_exit_code(run: SampleRun, folder: Path) -> None:
    code, text = invoke(run.folder, "--all", "--plan", "--json")
    document = json.loads(text)
    assert code == 0 and document["ok"] and len(document["checkpoints"]) == 2
    assert document["checkpoints"][0]["world_sizes"] == "any" and "nodes" not in document["checkpoints"][0]
    (folder / SHARD).unlink()
    code, text = invoke(run.folder, "--plan", "--nodes", "--json")
    found = json.loads(text)["checkpoints"][0]
    assert code == 1 and found["damages"][0]["file"] == SHARD and found["world_sizes"] is None
    assert [node["ranks"] for node in found["nodes"]] == [[0], [1]]
    code, text = invoke(run.folder, "--plan")
    assert code == 1 and "CANNOT BE RESTORED (1 finding)" in text and f"{SHARD}: missing" in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--nodes",), "--nodes goes with --plan"),
        (("--address", "auto"), "--address goes with --plan"),
        (("--plan", "--address", "127.0.0.1:1"), "No Ray cluster answers"),
        (("--plan", "--step", "20"), "`--plan --address auto` proves"),
        (("--plan", "--step", "30", "--all", "--address", "auto"), "exclude each other"),
    ],
)
def test_wrong_usage_is_one_line(
    run: SampleRun, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["verify", str(run.folder), *args])
    error = capsys.readouterr().err
    assert caught.value.code == 2 and message in error and error.count("\n") == 1
