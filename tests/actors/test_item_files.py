"""Items that are uploaded alone: complete, equal to the commit, readable, deleted with their checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

import ray_ckpt
from ray_ckpt.actors.agent import item_files
from ray_ckpt.actors.agent.item_files import upload_items
from ray_ckpt.actors.agent.priority import ActiveCopies
from ray_ckpt.actors.coordinator.storage_work import delete_all, list_remote, write_description
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.catalog.load import OpenedRun
from ray_ckpt.catalog.uri import CheckpointUri
from ray_ckpt.cli import app
from ray_ckpt.core import messages as m
from ray_ckpt.core.values import ItemsPart
from ray_ckpt.errors import ConfigError, CorruptionError, NewerFormat, Unavailable
from ray_ckpt.format import names, records
from ray_ckpt.format.digest import root_digest
from ray_ckpt.format.manifest import decode_checkpoint
from ray_ckpt.format.tree import decode_state
from ray_ckpt.storage.local.disks import Disks
from ray_ckpt.storage.remote.tier import RemoteRef, RemoteTier
from ray_ckpt.transport.sending import Limiter
from ray_ckpt.types import CheckpointInfo
from ray_ckpt.verify.content import verify_directory, verify_files
from ray_ckpt.verify.plan import verify_plan
from tests.catalog.test_export import export as export_cli
from tests.servers.stores import bucket_url
from tests.servers.strict_store import StrictStore
from tests.support.sample_run import SampleCheckpoint, SampleRun, write_run

STEP = 20  # in the cluster only
WEIGHT = "model.blocks.0.weight"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_files, "DRAIN_SPREAD_S", 0.0)


@pytest.fixture
def run(tmp_path: Path) -> SampleRun:
    return write_run(tmp_path / "runs", steps=(10, STEP), durable=(10,), world_size=4)


@pytest.fixture
def disks(tmp_path: Path, run: SampleRun) -> Iterator[list[Disks]]:
    """Return the staging of the nodes, each with its files of step 20."""
    saved = run.checkpoints[STEP]
    with ExitStack() as stack:
        found = []
        for fragment in saved.fragments:
            disk = Disks([tmp_path / f"node-{fragment.node_index}"])
            stack.callback(disk.close)
            own = names.fragment_file(fragment.node_index, fragment.num_nodes)
            for name in (*(file.name for file in fragment.files), own):
                disk.put(saved.attempt.run_uid, saved.attempt.directory, name, [saved.files[name]])
            found.append(disk)
        yield found


@pytest.fixture
def tier(run: SampleRun) -> RemoteTier:
    return RemoteRef(storage_path=str(run.folder.parent), run_name=run.folder.name).open()


def node_run(disk: Disks, saved: SampleCheckpoint, tier: RemoteTier, **more: Any) -> Any:
    gone = more.get("gone", lambda _: False)
    return SimpleNamespace(
        run_uid=saved.attempt.run_uid,
        staging=disk,
        remote=tier,
        machine=SimpleNamespace(is_deleted=gone),
        drain_limiter=Limiter(),
    )


def upload_parts(
    saved: SampleCheckpoint, disks: list[Disks], tier: RemoteTier, items: str = "model"
) -> list[ItemsPart]:
    return [
        upload_items(node_run(disk, saved, tier), saved.attempt, index, items, ActiveCopies())
        for index, disk in enumerate(disks)
    ]


def info_of(saved: SampleCheckpoint, run: SampleRun) -> CheckpointInfo:
    return next(c for c in Catalog(run.folder).checkpoints if c.id == saved.attempt)


def export(run: SampleRun, disks: list[Disks], tier: RemoteTier, items: str = "model") -> records.Exported:
    """Upload items of step 20 from all nodes, describe them, and append the record."""
    saved = run.checkpoints[STEP]
    parts = upload_parts(saved, disks, tier, items)
    assert root_digest(part.source for part in parts) == saved.root_digest
    exported = records.Exported(
        attempt=saved.attempt.attempt,
        items=items,
        root_digest=root_digest(part.fragment for part in parts),
        size_bytes=sum(part.size_bytes for part in parts),
    )
    write_description(tier, info_of(saved, run), exported)
    run.log.append(exported)
    return exported


def folder(run: SampleRun, items: str = "model") -> Path:
    return run.directory(STEP).with_name(run.directory(STEP).name + "." + items)


def test_exported_items_are_read_like_a_checkpoint(
    run: SampleRun, disks: list[Disks], tier: RemoteTier
) -> None:
    exported = export(run, disks, tier)
    opened, saved = ray_ckpt.open(run.folder), run.checkpoints[STEP]
    state = opened.load("model")
    assert opened.choose(None, ("model",)).step == STEP, "it is newer than the durable step 10"
    assert state.keys() == {key.removeprefix("model.") for key in saved.tensors if key.startswith("model.")}
    np.testing.assert_array_equal(state["blocks.0.weight"].numpy(), saved.tensors[WEIGHT])
    assert opened.load(WEIGHT, step=STEP).keys() == {WEIGHT}
    assert opened.choose().step == 10 and opened.choose(None, ("model", "optimizer")).step == 10
    view = opened.catalog[STEP]
    assert view.items == "model" and view.where == str(folder(run)) and not view.verify()
    assert set(view) == {key for key in saved.tensors if key.startswith("model.")}
    assert exported.size_bytes == sum(path.stat().st_size for path in folder(run).glob("[!c]*"))
    assert exported.size_bytes < saved.size_bytes


@pytest.mark.parametrize(("items", "missing"), [("modle", "modle"), ("critic,model,modle", "critic, modle")])
def test_items_that_no_rank_saves_are_not_recorded(
    run: SampleRun, disks: list[Disks], tier: RemoteTier, items: str, missing: str
) -> None:
    """The ranks of a part do not know the items of others, so the start of training compares no names."""
    with pytest.raises(
        CorruptionError, match=f"No rank saves {missing}, .* Correct the names in remote_items"
    ):
        export(run, disks, tier, items)
    assert not (folder(run, items.replace(",", ".")) / names.CHECKPOINT_JSON).exists()


@pytest.mark.parametrize("rank", [0, 3])
def test_one_rank_that_saves_an_item_is_enough(
    run: SampleRun, disks: list[Disks], tier: RemoteTier, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    ranks = iter(range(4))

    def of_rank(data: Any) -> dict[str, Any]:
        document = decode_state(data)
        if next(ranks) == rank:
            document["items"]["note"] = {"text": "without a tensor"}
        return document

    monkeypatch.setattr(item_files, "decode_state", of_rank)
    assert export(run, disks, tier, "note").items == "note"


def test_the_level_stays_and_training_does_not_resume_from_items(
    run: SampleRun, disks: list[Disks], tier: RemoteTier
) -> None:
    export(run, disks, tier)
    info = info_of(run.checkpoints[STEP], run)
    assert (info.level.label, info.exported, info.exported_items) == ("replicated", "model", ("model",))
    assert [view.info.step for view in Catalog(run.folder).durable()] == [10]
    for uri in (f"{run.folder}@{STEP}", f"{run.folder}/ray_ckpt/checkpoints/{info.directory}"):
        with pytest.raises(ConfigError, match="only model, which training cannot resume from") as caught:
            CheckpointUri.parse(uri).open(None)
        assert "10" in caught.value.hint
        assert CheckpointUri.parse(uri).open(None, items=("model",)).load().keys() == {"model"}
    assert CheckpointUri.parse(str(run.folder)).open(None).step == 10
    assert CheckpointUri.parse(str(run.folder)).open(None, items=("model",)).step == STEP
    assert CheckpointUri.parse(str(run.folder)).open(None, items=("model", "files")).step == 10


@pytest.mark.parametrize(
    ("to", "step"), [("safetensors", STEP), ("dcp", STEP), ("universal", 10), ("torch_dist", 10)]
)
def test_an_export_that_is_about_more_than_an_item_is_of_a_durable_checkpoint(
    run: SampleRun,
    disks: list[Disks],
    tier: RemoteTier,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    to: str,
    step: int,
) -> None:
    """DeepSpeed and Megatron take the state of the optimizer too, which the uploaded items lack."""
    export(run, disks, tier)
    assert export_cli(run.folder, tmp_path / "out", "--to", to, "--item", "model", "--json") == 0
    assert json.loads(capsys.readouterr().out)["step"] == step


def test_an_item_that_was_not_uploaded_is_named(run: SampleRun, disks: list[Disks], tier: RemoteTier) -> None:
    export(run, disks, tier)
    with pytest.raises(ConfigError, match="no item 'optimizer' on the storage path") as caught:
        ray_ckpt.open(run.folder).load("optimizer", step=STEP)
    assert "model" in caught.value.hint


def test_a_plan_of_items_alone_is_no_plan_of_a_restart(
    run: SampleRun, disks: list[Disks], tier: RemoteTier
) -> None:
    def verify(*options: str) -> Result:
        return CliRunner().invoke(app, ["verify", where, "--plan", *options])

    export(run, disks, tier, "loader,model")
    where = str(folder(run, "loader.model"))
    (found,) = json.loads(verify("--json").stdout)["checkpoints"]
    assert found["ok"] and (found["is_restorable"], found["world_sizes"]) == (False, None)
    assert found["only_items"] == "loader,model"
    text = verify().stdout
    assert "ok; it has only loader,model, for no restart" in text and "can be restored" not in text
    (shard,) = folder(run, "loader.model").glob("shard-00001-*")
    shard.unlink()
    damaged = verify()
    assert damaged.exit_code == 1 and "DAMAGED (1 finding); it has only loader,model" in damaged.stdout


def test_a_directory_is_verified_alone_and_no_older_version_takes_it_for_a_checkpoint(
    run: SampleRun, disks: list[Disks], tier: RemoteTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = export(run, disks, tier, "loader,model")
    where = folder(run, "loader.model")
    assert verify_directory(where).only_items == "loader,model"
    assert verify_directory(where).ok and verify_directory(where, root_digest=exported.root_digest).ok
    description = decode_checkpoint((where / "checkpoint.json").read_bytes())
    assert (description.items, description.root_digest) == ("loader,model", exported.root_digest)
    view = Catalog(run.folder)[STEP]
    report = verify_plan(view.files(), root_digest=view.root_digest)
    assert report.ok and not report.is_restorable, "training does not resume from it"
    state = ray_ckpt.open(run.folder).choose(STEP).load(rank=3)
    assert state["loader"] == {"position": STEP * 8 + 3} and state.keys() == {"loader", "model"}
    tensors = load_file(where / "shard-00001-of-00004.safetensors")
    assert tensors and all(name.startswith("model.") for name in tensors)
    monkeypatch.setattr("ray_ckpt.format.manifest.ITEMS_VERSION", 2)  # as before
    with pytest.raises(NewerFormat):
        verify_directory(where)


def test_items_of_single_ranks_are_uploaded_with_their_tensors(
    run: SampleRun, disks: list[Disks], tier: RemoteTier
) -> None:
    export(run, disks, tier, "rng")
    state = ray_ckpt.open(run.folder).choose(STEP).load("rng", rank=2)
    np.testing.assert_array_equal(state["torch"].numpy(), run.checkpoints[STEP].tensors["rank2.rng.torch"])


def test_any_holder_writes_the_same_bytes(run: SampleRun, disks: list[Disks], tier: RemoteTier) -> None:
    saved = run.checkpoints[STEP]
    first = upload_parts(saved, disks, tier)
    before = {path.name: path.read_bytes() for path in folder(run).iterdir()}
    assert upload_parts(saved, disks, tier) == first
    assert {path.name: path.read_bytes() for path in folder(run).iterdir()} == before


def test_a_damaged_slice_is_not_uploaded(run: SampleRun, disks: list[Disks], tier: RemoteTier) -> None:
    saved = run.checkpoints[STEP]
    row = next(row for row in saved.fragments[1].rows if row.slice is not None and row.slice.key == WEIGHT)
    path = disks[1].path(saved.attempt.run_uid, saved.attempt.directory, row.file)
    data = bytearray(path.read_bytes())
    data[row.byte_offset] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match=WEIGHT):
        upload_parts(saved, disks, tier)
    assert not (folder(run) / row.file).exists() and not list(folder(run).glob("manifest-00001*"))


def test_damage_outside_of_the_items_does_not_matter(
    run: SampleRun, disks: list[Disks], tier: RemoteTier
) -> None:
    saved = run.checkpoints[STEP]
    row = next(r for r in saved.fragments[0].rows if r.slice is not None and r.slice.item == "optimizer")
    path = disks[0].path(saved.attempt.run_uid, saved.attempt.directory, row.file)
    data = bytearray(path.read_bytes())
    data[row.byte_offset] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    export(run, disks, tier)
    assert not Catalog(run.folder)[STEP].verify()


def test_other_fragments_on_the_storage_path_are_not_described(
    run: SampleRun, disks: list[Disks], tier: RemoteTier
) -> None:
    saved = run.checkpoints[STEP]
    parts = upload_parts(saved, disks, tier)
    exported = records.Exported(
        attempt=saved.attempt.attempt, items="model", root_digest="0" * 32, size_bytes=1
    )
    with pytest.raises(CorruptionError, match="is not what was committed"):
        write_description(tier, info_of(saved, run), exported)
    exported = replace(exported, root_digest=root_digest(part.fragment for part in parts))
    (folder(run) / "state-00002-of-00004.json").unlink()
    with pytest.raises(CorruptionError, match="has None bytes"):
        write_description(tier, info_of(saved, run), exported)
    assert not (folder(run) / "checkpoint.json").exists()


def test_an_upload_of_a_fragment_that_lacks_a_file_finds_damage(
    run: SampleRun, disks: list[Disks], tier: RemoteTier
) -> None:
    saved = run.checkpoints[STEP]
    disks[0].path(saved.attempt.run_uid, saved.attempt.directory, names.state_file(0, 4)).unlink()
    with pytest.raises(CorruptionError, match="fragment 0 of step 20 is not on its node any more"):
        upload_parts(saved, disks, tier)
    assert not folder(run).exists()


def test_an_upload_stops_when_its_checkpoint_is_deleted(
    run: SampleRun, disks: list[Disks], tier: RemoteTier
) -> None:
    saved = run.checkpoints[STEP]
    gone = node_run(disks[0], saved, tier, gone=lambda attempt: True)
    with pytest.raises(Unavailable, match="being deleted"):
        upload_items(gone, saved.attempt, 0, "model", ActiveCopies())
    assert not folder(run).exists()


def test_items_are_listed_and_deleted_with_their_checkpoint(
    run: SampleRun, disks: list[Disks], tier: RemoteTier
) -> None:
    saved, other = run.checkpoints[STEP], run.checkpoints[10]
    export(run, disks, tier)
    export(run, disks, tier, "loader,model")
    listed = list_remote(tier, m.SweepRemote(number=1))
    assert set(listed.directories) == {saved.attempt.directory, other.attempt.directory}
    left = folder(run) / ".tmp-left"
    left.write_bytes(b"x")
    (upload,) = list_remote(tier, m.SweepRemote(number=2)).uploads
    assert upload.directory == folder(run).name
    delete_all(tier, m.DeleteOrphans(directories=(), uploads=(upload,)))
    assert not left.exists()
    tier.delete(saved.attempt.directory)
    assert [path.name for path in folder(run).parent.iterdir()] == [other.attempt.directory]


def test_items_outlive_a_lost_checkpoint(run: SampleRun, disks: list[Disks], tier: RemoteTier) -> None:
    exported = export(run, disks, tier)
    run.log.append(records.Lost(attempt=exported.attempt, reason="all nodes are gone"))
    opened = ray_ckpt.open(run.folder)
    assert opened.catalog[STEP].info.state == "lost" and opened.choose(None, ["model"]).step == STEP
    weight = opened.catalog[STEP][WEIGHT][:]
    np.testing.assert_array_equal(weight.numpy(), run.checkpoints[STEP].tensors[WEIGHT])
    (view,) = (view for view in Catalog(run.folder).views(all=True) if view.items)
    assert not view.is_deleted(), "what verify and diff find in it is damage"
    run.log.append(records.Retired(attempt=exported.attempt, reason="newer items"))
    assert view.is_deleted()
    assert ray_ckpt.open(run.folder).choose(None, ["model"]).step == 10
    shutil.rmtree(folder(run))
    assert [view.items for view in Catalog(run.folder).views(all=True)] == ["", ""]


def test_verify_of_all_reads_the_items_of_lost_checkpoints(
    run: SampleRun, disks: list[Disks], tier: RemoteTier
) -> None:
    """`load("model")` returns them."""
    exported = export(run, disks, tier)
    run.log.append(records.Lost(attempt=exported.attempt, reason="all nodes are gone"))

    def verify(*words: str) -> Result:
        return CliRunner().invoke(app, ["verify", str(run.folder), *words], catch_exceptions=False)

    found = verify("--all")
    assert found.exit_code == 0 and f"{folder(run)}: ok; it has only model" in found.stdout
    assert f"Step {STEP}: the nodes have lost the other items." in found.stdout
    assert found.stdout.count(": ok;") == 2 and str(folder(run)) not in verify().stdout
    assert f"{folder(run)}: ok" in verify("--all", "--plan").stdout
    shard = next(folder(run).glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    found = verify("--all")
    assert found.exit_code == 1 and f"{folder(run)}: DAMAGED" in found.stdout
    run.log.append(records.Retired(attempt=exported.attempt, reason="newer items"))
    assert verify("--all").exit_code == 0


def test_a_warning_names_newer_items_off_the_lineage(
    run: SampleRun, disks: list[Disks], tier: RemoteTier, caplog: pytest.LogCaptureFixture
) -> None:
    export(run, disks, tier)
    run.log.session(2, after=run.checkpoints[10], world_size=4, num_nodes=len(disks))
    opened = ray_ckpt.open(run.folder)
    for _ in range(2):
        assert opened.choose(None, ["model"]).step == 10
    assert caplog.text.count("step 20 of session 1 has newer items") == 1
    assert opened.load(WEIGHT, step=STEP).keys() == {WEIGHT}
    caplog.clear()
    assert opened.choose(None, ["optimizer"]).step == 10 and not caplog.text


def test_a_checkpoint_of_which_some_items_are_stored_is_in_the_cluster_only(
    run: SampleRun, disks: list[Disks], tier: RemoteTier
) -> None:
    export(run, disks, tier)

    def as_json(*words: object) -> Any:
        found = CliRunner().invoke(app, [*map(str, words), "--json"], catch_exceptions=False)
        assert found.exit_code == 0, found.output
        return json.loads(found.stdout)

    (row,) = as_json("ls", run.folder.parent)["runs"]
    assert (row["newest_step"], row["in_cluster"]) == (STEP, True)
    assert as_json("verify", run.folder, "--all")["in_cluster_only"] == [STEP]


def test_a_bucket_has_the_same_files(
    run: SampleRun,
    disks: list[Disks],
    tier: RemoteTier,
    strict: StrictStore,
    credentials: None,
) -> None:
    export(run, disks, tier)
    url = bucket_url("s3", strict.endpoint, f"items-{run.folder.parent.parent.name}")
    bucket = RemoteRef(storage_path=url, run_name="gpt").open()
    saved = run.checkpoints[STEP]
    parts = upload_parts(saved, disks, bucket)
    exported = records.Exported(
        attempt=saved.attempt.attempt,
        items="model",
        root_digest=root_digest(part.fragment for part in parts),
        size_bytes=1,
    )
    write_description(bucket, info_of(saved, run), exported)
    of_items = bucket.of_items("model")
    for path in folder(run).iterdir():
        assert of_items.read_whole(saved.attempt.directory, path.name, max_bytes=1 << 20) == path.read_bytes()
    assert set(bucket.directories()) == {saved.attempt.directory}
    bucket.delete(saved.attempt.directory)
    assert not bucket.directories() and not of_items.files_of(saved.attempt.directory)


def test_an_opened_run_reads_the_whole_checkpoint_once_it_is_durable(
    run: SampleRun, disks: list[Disks], tier: RemoteTier
) -> None:
    export(run, disks, tier)
    opened = OpenedRun(Catalog(run.folder))
    assert opened.choose(STEP).load().keys() == {"model"}
    run.log.drain(run.checkpoints[STEP])
    opened.catalog.refresh()
    assert opened.catalog[STEP].items == "" and "optimizer" in opened.choose(STEP).load()
    assert verify_files(opened.catalog[STEP].files()).ok
