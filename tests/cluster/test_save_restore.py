"""Saves and restores through real agents on real nodes."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from typer.testing import CliRunner

import ray_ckpt
from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.actors import names
from ray_ckpt.actors.client import coordinator
from ray_ckpt.actors.messages import RunStatus
from ray_ckpt.capture.replica_watch import WINDOWS
from ray_ckpt.catalog.catalog import Catalog, verify_directory
from ray_ckpt.cli import app
from ray_ckpt.errors import (
    CollectiveError,
    ConfigError,
    MismatchError,
    RestoreError,
    SaveNotCollective,
    Unavailable,
    UnsupportedItem,
    UnsupportedLeaf,
)
from ray_ckpt.types import Level
from tests.cluster.conftest import everywhere
from tests.cluster.ranks import RankGroup, Training

pytestmark = pytest.mark.cluster
SETTLE_S = 20.0
STEP_S = 0.3
MAX_STEPS = 200  # a minute at least


def train(run: str, storage: str, total: int, options: dict[str, Any]) -> list[float]:
    return Training(run, storage, **options).train(total)


def status_of(storage: str, run: str) -> RunStatus:
    status: RunStatus = ray.get(coordinator().status.remote(f"{storage}/{run}"), timeout=30)
    return status


def make_durable(storage: str, run: str) -> None:
    ray.get(coordinator().finish.remote(f"{storage}/{run}", 60.0), timeout=90)


def folders(cluster: LocalCluster, run_uid: str) -> dict[str, set[str]]:
    """Checkpoint folders of the run per node."""
    return {n.name: {p.name for p in (n.staging / run_uid).glob("*-*")} for n in cluster.nodes.values()}


def wait_until(condition: Callable[[], bool], why_not: Callable[[], object]) -> None:
    deadline = time.monotonic() + SETTLE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {SETTLE_S} s: {why_not()}"
        time.sleep(0.1)


def has_second_package(_: object = None) -> bool:
    """Return True if this process has imported the folder `actors` by that name, too."""
    return any(name.partition(".")[0] == "actors" for name in sys.modules)


@pytest.mark.slow  # 5 s
def test_no_process_has_the_classes_of_actors_twice(
    group: RankGroup, cluster: LocalCluster, storage: str
) -> None:
    group.run(train, "once", storage, 6, {"every_steps": 5})
    agents = [names.agent_name(cluster.nodes[name].node_id) for name in ("node-a", "node-b")]
    actors = [ray.get_actor(name, namespace=names.NAMESPACE) for name in (names.COORDINATOR, *agents)]
    found = ray.get([actor.__ray_call__.remote(has_second_package) for actor in actors], timeout=30)
    assert not any([*found, *group.run(has_second_package), has_second_package()])


def test_a_resumed_run_is_the_same_run(group: RankGroup, storage: str) -> None:
    calm = group.run(train, "calm", storage, 24, {"every_steps": 5})
    group.run(train, "broken", storage, 15, {"every_steps": 5})
    rest = group.run(train, "broken", storage, 24, {"every_steps": 5})
    assert [r[15:] for r in calm] == rest
    make_durable(storage, "calm")
    make_durable(storage, "broken")
    digests = []
    for run in ("calm", "broken"):
        rows = [r for f in Catalog(f"{storage}/{run}")[24].fragments() for r in f.rows]
        digests.append({(r.file, r.label): r.digest for r in rows})
    assert digests[0] == digests[1] and len(digests[0]) > 20


def test_each_shard_has_a_copy_on_the_other_node(
    group: RankGroup, cluster: LocalCluster, storage: str
) -> None:
    group.run(train, "copies", storage, 4, {"every_steps": 2, "remote_every": 1000})
    status = status_of(storage, "copies")
    assert status.newest is not None and status.newest.step == 4
    assert (status.newest.level, status.newest.replicas) == (Level.REPLICATED, 1)
    holders = status.holders[status.newest.id.attempt]
    names = {i: {cluster.name_of(n) for n in nodes} for i, nodes in holders.items()}
    assert names == {0: {"node-a", "node-b"}, 1: {"node-a", "node-b"}}
    for node in ("node-a", "node-b"):
        folder = cluster.nodes[node].staging / status.run_uid / status.newest.directory
        assert verify_files(folder) == 6  # two shards, two states, two fragments


def verify_files(folder: Path) -> int:
    """Compare each byte of the files with the fragments; return the number of files."""
    from ray_ckpt.format.digest import digest
    from ray_ckpt.format.manifest import decode_fragment

    fragments = [decode_fragment(p.read_bytes()) for p in folder.glob("manifest-*")]
    for file in (f for fragment in fragments for f in fragment.files):
        assert digest((folder / file.name).read_bytes()) == file.digest
    return len(list(folder.iterdir()))


def test_retention_bounds_every_disk(group: RankGroup, cluster: LocalCluster, storage: str) -> None:
    options = {"every_steps": 1, "keep_last": 2, "remote_every": 7, "max_block_s": 5, "retire_grace_s": 0}
    options["keep_local_at_end"] = True  # else the one that only nodes have goes when the run has finished
    group.run(train, "bounded", storage, 20, options)
    make_durable(storage, "bounded")
    uid = status_of(storage, "bounded").run_uid
    remote = Path(storage) / "bounded" / "ray_ckpt" / "checkpoints"

    def retired() -> bool:
        return len(Catalog(f"{storage}/bounded").checkpoints) <= 2

    wait_until(retired, lambda: [c.step for c in Catalog(f"{storage}/bounded").checkpoints])
    live = {c.directory for c in Catalog(f"{storage}/bounded").checkpoints}
    steps = sorted(int(name[:12]) for name in live)
    assert len(steps) == 2 and steps[-1] == 20, "the last two, of which a busy disk may have skipped one"

    def left_over() -> dict[str, set[str]]:
        places = {"storage": {p.name for p in remote.iterdir()}, **folders(cluster, uid)}
        return {place: names - live for place, names in places.items() if names - live}

    wait_until(lambda: not left_over(), left_over)
    assert verify_directory(next(p for p in remote.iterdir() if p.name.startswith("000000000020"))).ok


BEST: dict[str, Any] = {"keep_last": 1, "keep_best": ("accuracy", "max", 1), "retire_grace_s": 0}


def train_and_validate(run: str, storage: str, accuracies: dict[int, float]) -> None:
    """Six steps, each saved; some are validated while their save is on its way."""
    training = Training(run, storage, every_steps=1, remote_every=1000, max_block_s=5, **BEST)
    for step in training.ckpt.steps(total=6):
        training.step()
        training.ckpt.step(step, metrics={"accuracy": 0.0})
        if step in accuracies:
            training.ckpt.annotate(step, metrics={"accuracy": torch.tensor(accuracies[step])})
            wait_until(
                lambda step=step: accuracy_of(storage, run, step) > 0.0,  # type: ignore[misc]
                lambda: Catalog(f"{storage}/{run}").list(all=True),
            )
    training.ckpt.close()


def accuracy_of(storage: str, run: str, step: int) -> float:
    found = [c for c in Catalog(f"{storage}/{run}").checkpoints if c.step == step]
    return found[0].metrics["accuracy"] if found else 0.0


@pytest.mark.slow  # 6 s; tests/core/test_retention.py has the rule
def test_the_best_are_those_by_what_validation_found_later(group: RankGroup, storage: str) -> None:
    group.run(train_and_validate, "best", storage, {2: 0.75, 4: 0.5})

    def live() -> list[int]:
        return [c.step for c in Catalog(f"{storage}/best").checkpoints]

    wait_until(lambda: live() == [2, 6], live)
    assert (accuracy_of(storage, "best", 2), accuracy_of(storage, "best", 6)) == (0.75, 0.0)
    ray_ckpt.annotate(run="best", storage_path=storage, step=6, metrics={"accuracy": 1.0})
    assert accuracy_of(storage, "best", 6) == 1.0
    make_durable(storage, "best")  # until then step 2 is the newest on the storage path
    wait_until(lambda: live() == [6], live)
    with pytest.raises(ConfigError, match="Step 2 cannot be annotated: its checkpoint is retired"):
        ray_ckpt.annotate(run="best", storage_path=storage, step=2, metrics={"accuracy": 1.0})


def test_stock_torch_reads_a_durable_checkpoint(group: RankGroup, storage: str) -> None:
    group.run(train, "stock", storage, 3, {"every_steps": 3})
    make_durable(storage, "stock")
    view = Catalog(f"{storage}/stock")[3]
    assert view.path is not None
    state = {
        "model.0.weight": torch.zeros(16, 8),
        "model.1.running_mean": torch.zeros(16),
        "optimizer.state.0.weight.exp_avg": torch.zeros(16, 8),
        "extra.ema": torch.zeros(4),
    }
    with pytest.warns(UserWarning, match="single process"):
        state_dict_loader.load(state, storage_reader=HuggingFaceStorageReader(str(view.path)))
    assert all(t.abs().sum() > 0 for t in state.values())


def full_state(run: str, storage: str, options: dict[str, Any]) -> dict[str, Any]:
    """Restore and return what is live, unsharded."""
    training = Training(run, storage, **options)
    info = training.ckpt.restore()
    training.ckpt.close()
    weights = {k: _full(v) for k, v in training.model.state_dict().items()}
    return {"step": info.step if info else None, "tiers": info.bytes_by_tier() if info else {}, **weights}


def _full(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def test_a_checkpoint_with_a_bad_slice_in_every_copy_is_skipped_by_all_ranks(
    group: RankGroup, cluster: LocalCluster, storage: str
) -> None:
    group.run(train, "rotten", storage, 6, {"every_steps": 2, "remote_every": 1000})
    status = status_of(storage, "rotten")
    assert status.newest is not None
    for node in ("node-a", "node-b"):
        flip(cluster.nodes[node].staging / status.run_uid / status.newest.directory, "shard-00001")
    forget_memory(cluster)
    results = group.run(full_state, "rotten", storage, {})
    assert [r["step"] for r in results] == [4, 4]
    catalog = Catalog(f"{storage}/rotten")

    def texts() -> list[str]:
        catalog.refresh()
        return list(catalog.events()["text"].to_pylist())

    wait_until(
        lambda: any("restored step 4" in text for text in texts()), texts
    )  # recorded after the ranks go on
    first, *_, last = catalog.sessions
    assert first.ended is not None and first.ended.cause == "process" and first.ended.step == 6
    assert last.restored_at_s is not None and sum(last.read_bytes.values()) > 0
    times = [(c.stall_s, c.capture_s, c.local_s, c.replicate_s) for c in catalog.list(all=True)]
    assert all(t is not None and 0 <= t < 60 for save in times for t in save), times


def test_a_bad_copy_is_replaced_by_the_next_source(
    group: RankGroup, cluster: LocalCluster, storage: str
) -> None:
    group.run(train, "one-bad", storage, 2, {"every_steps": 2, "remote_every": 1000})
    status = status_of(storage, "one-bad")
    assert status.newest is not None
    flip(cluster.nodes["node-b"].staging / status.run_uid / status.newest.directory, "shard-00001")
    forget_memory(cluster)
    results = group.run(full_state, "one-bad", storage, {})
    assert [r["step"] for r in results] == [2, 2]
    assert results[1]["tiers"]["peer"] > 0


def forget_memory(cluster: LocalCluster) -> None:
    """Kill all agents, and with them the arenas; the next group starts new ones."""
    for node in cluster.nodes.values():
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(names.agent_name(node.node_id), namespace=names.NAMESPACE))


def flip(folder: Path, prefix: str) -> None:
    """Flip one bit of a slice."""
    path = next(folder.glob(f"{prefix}*"))
    data = bytearray(path.read_bytes())
    data[4096 + 40] ^= 0x10
    path.write_bytes(data)


def save_on_rank_zero(run: str, storage: str) -> None:
    training = Training(run, storage, every_steps=1000)
    for step in training.ckpt.steps(total=400):
        training.step()
        if training.rank == 0 and step % 10 == 0:
            training.ckpt.save(step)
        training.ckpt.step(step)
        time.sleep(0.02)  # the time of a step


@pytest.mark.slow  # 10 s with a group of its own
@everywhere
def test_save_on_rank_zero_only_is_found_and_named(spare_group: RankGroup, storage: str) -> None:
    with pytest.raises(SaveNotCollective, match=r"rank\(s\) 1 .*if rank == 0") as caught:
        spare_group.run(save_on_rank_zero, "alone", storage)
    assert caught.value.fields["missing_ranks"] == (1,)
    assert not Catalog(f"{storage}/alone").checkpoints


def train_unsharded_norm(run: str, storage: str) -> None:
    Training(run, storage, shard_norm=False, every_steps=2).train(20)


@pytest.mark.slow  # 7 s with a group of its own
@everywhere
def test_parameters_that_differ_between_ranks_are_not_silently_dropped(
    spare_group: RankGroup, storage: str
) -> None:
    with pytest.raises(CollectiveError, match="do not hold the same parameters"):
        spare_group.run(train_unsharded_norm, "drift", storage)
    assert not Catalog(f"{storage}/drift").checkpoints


def drift_apart(run: str, storage: str, **options: Any) -> None:
    """Train with a parameter that both ranks hold, of which rank 1 changes every element at step 4."""
    training = Training(run, storage, every_steps=1, keep_last=20, **options)
    own = torch.nn.Parameter(torch.zeros(100 * WINDOWS))  # nearly all that both hold
    ckpt = ray_ckpt.Checkpointer(model=training.model, optimizer=training.optimizer, own=own)
    for step in ckpt.steps(total=8):
        training.step()
        if step == 4 and training.rank == 1:
            own.data.add_(1)
        ckpt.step(step)
        ckpt.wait("local")
    ckpt.close()


def test_parameters_that_drift_apart_later_are_found_and_saved(group: RankGroup, storage: str) -> None:
    group.run(drift_apart, "apart", storage)
    catalog = Catalog(f"{storage}/apart")
    found = {info.step: info.suspect for info in catalog.checkpoints}
    text = "own: rank(s) 0 and rank(s) 1 differ, no majority shows which is wrong"
    assert found == {step: text if step >= 4 else "" for step in range(1, 9)}
    answer = CliRunner().invoke(app, ["status", "apart"], catch_exceptions=False)
    assert "drifted apart, step 8: own" in " ".join(answer.stdout.split())


def save_last_again(run: str, storage: str) -> tuple[bool, bool]:
    """Call `save` for a step that was saved because it was due."""
    ckpt = Training(run, storage, every_steps=2).ckpt
    ckpt.restore()
    for step in range(1, 5):
        ckpt.step(step)
    saved = ckpt.save(4, {"loss": 0.5})
    ckpt.wait("durable")
    has_checkpoint = ckpt.finish()
    ckpt.close()
    return saved, has_checkpoint


def test_a_step_that_was_due_may_be_saved_again(group: RankGroup, storage: str) -> None:
    assert group.run(save_last_again, "again", storage) == [(True, True)] * 2
    found = Catalog(f"{storage}/again").checkpoints
    assert [(info.step, info.level, info.metrics) for info in found][-1] == (4, Level.DURABLE, {"loss": 0.5})
    assert len({info.step for info in found}) == len(found)


def train_wider(run: str, storage: str) -> None:
    Training(run, storage, width=32).train(4)


def test_a_checkpoint_of_another_model_is_refused_and_kept(group: RankGroup, storage: str) -> None:
    group.run(train, "model", storage, 2, {"every_steps": 2})
    with pytest.raises(MismatchError, match=r"model\.0\.weight: shape \(16, 8\).*\(32, 8\)"):
        group.run(train_wider, "model", storage)
    assert [r["step"] for r in group.run(full_state, "model", storage, {})] == [2, 2]


def register(run: str, storage: str, extra: Any) -> None:
    import ray_ckpt

    training = Training(run, storage)
    ckpt = ray_ckpt.Checkpointer(model=training.model, optimizer=training.optimizer, thing=extra())
    ckpt.restore()


def test_state_that_would_need_pickle_is_named_before_training(group: RankGroup, storage: str) -> None:
    with pytest.raises(UnsupportedLeaf, match=r"thing.*hook"):
        group.run(register, "pickle", storage, lambda: {"ok": 1, "hook": print})
    with pytest.raises(UnsupportedItem, match=r"'thing' \(object\).*state_dict"):
        group.run(register, "pickle", storage, object)


def test_resume_must_and_never(group: RankGroup, storage: str) -> None:
    with pytest.raises(RestoreError, match="has no checkpoint to resume from"):
        group.run(full_state, "modes", storage, {"resume": "must"})
    group.run(train, "modes", storage, 2, {"every_steps": 2})
    assert group.run(full_state, "modes", storage, {"resume": "never"})[0]["step"] is None


def kill_agent_in_the_middle(run: str, storage: str) -> int:
    """Save, lose the agent of rank 1's node, and save on until both ranks see a commit; that step."""
    training = Training(run, storage, attempt_timeout_s=3, max_block_s=5)
    return _train_until_safe_again(training, _kill_own_agent if training.rank == 1 else None)


def kill_service_in_the_middle(run: str, storage: str) -> int:
    """Save, lose the coordinator and all agents, and save on until both ranks see a commit; that step."""
    training = Training(run, storage, attempt_timeout_s=3, max_block_s=5)
    return _train_until_safe_again(training, _kill_service if training.rank == 1 else None)


def _kill_own_agent() -> None:
    node = ray.get_runtime_context().get_node_id()
    ray.kill(ray.get_actor(names.agent_name(node), namespace=names.NAMESPACE))


def _kill_service() -> None:
    """Kill the coordinator, which Ray restarts, when no agent is left that it could find."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    for agent in (a["name"] for a in actors if a["name"].startswith(names.AGENT_PREFIX)):
        ray.kill(ray.get_actor(agent, namespace=names.NAMESPACE))
    ray.kill(ray.get_actor(names.COORDINATOR, namespace=names.NAMESPACE), no_restart=False)


def _train_until_safe_again(training: Training, fault: Callable[[], None] | None) -> int:
    """Train with `fault` after step 3 until both ranks see the commit of a later step; that step."""
    import torch
    import torch.distributed as dist

    training.ckpt.restore()
    for step in range(1, MAX_STEPS):
        training.step()
        if step == 3 and fault is not None:
            fault()
        dist.barrier()
        is_safe = training.ckpt.save(step) and step > 3
        try:
            training.ckpt.wait("local", timeout_s=10)
        except Unavailable:
            is_safe = False
        agreed = torch.tensor(int(is_safe))
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        if agreed:
            break
        time.sleep(STEP_S)  # a step of training; an agent takes seconds to start
    training.ckpt.close()
    return step


@pytest.mark.slow
def test_training_survives_its_agent_and_is_protected_again(
    group: RankGroup, cluster: LocalCluster, storage: str
) -> None:
    last, other = group.run(kill_agent_in_the_middle, "agent", storage)
    assert last == other < MAX_STEPS - 1, "protected again before time was up"
    newest = Catalog(f"{storage}/agent").newest()
    assert newest is not None and newest.info.step == last
    assert [r["step"] for r in group.run(full_state, "agent", storage, {})] == [last, last]


@pytest.mark.slow
def test_training_survives_the_loss_of_the_whole_service(
    group: RankGroup, cluster: LocalCluster, storage: str
) -> None:
    """The new coordinator finds no agent, so that rank 0 has to report the group."""
    last, other = group.run(kill_service_in_the_middle, "lost", storage)
    assert last == other < MAX_STEPS - 1, "protected again before time was up"
    records = [json.loads(p.read_bytes()) for p in sorted((Path(storage) / "lost/ray_ckpt/log").iterdir())]
    assert [r["session"] for r in records if r["op"] == "session"] == [1], "the group was not disturbed"
    assert len({r["service"] for r in records if r["op"] == "epoch"}) == 1
    newest = Catalog(f"{storage}/lost").newest()
    assert newest is not None and newest.info.step == last
    assert [r["step"] for r in group.run(full_state, "lost", storage, {})] == [last, last]


def kill_coordinator_in_the_middle(run: str, storage: str) -> list[str]:
    """Save, lose the coordinator's process, and save on."""
    import torch.distributed as dist

    training = Training(run, storage, max_block_s=5)
    training.ckpt.restore()
    for step in range(1, 9):
        training.step()
        training.ckpt.save(step)
        if step == 3 and training.rank == 0:
            ray.kill(ray.get_actor(names.COORDINATOR, namespace=names.NAMESPACE), no_restart=False)
        dist.barrier()
        time.sleep(0.7)  # the time of a step: saves go on before, during and after the coordinator's restart
    training.ckpt.wait("replicated", timeout_s=60)
    training.ckpt.close()
    return [run]


@pytest.mark.slow
def test_saves_go_on_after_the_coordinator_dies(group: RankGroup, storage: str) -> None:
    group.run(kill_coordinator_in_the_middle, "headless", storage)
    log = sorted((Path(storage) / "headless" / "ray_ckpt" / "log").iterdir())
    records = [json.loads(p.read_bytes()) for p in log]
    assert [r["epoch"] for r in records if r["op"] == "epoch"] == [1, 2]
    assert [r["session"] for r in records if r["op"] == "session"] == [1], "the group was not disturbed"
    newest = Catalog(f"{storage}/headless").newest(Level.REPLICATED)
    assert newest is not None and newest.info.step == 8
    assert [r["step"] for r in group.run(full_state, "headless", storage, {})] == [8, 8]


def test_the_log_has_the_whole_story(group: RankGroup, storage: str) -> None:
    group.run(train, "story", storage, 2, {"every_steps": 2})
    group.run(train, "story", storage, 4, {"every_steps": 2})
    log = sorted((Path(storage) / "story" / "ray_ckpt" / "log").iterdir())
    records = [json.loads(p.read_bytes()) for p in log]
    assert [r["op"] for r in records[:4]] == ["create", "epoch", "session", "commit2"]
    sessions = [r for r in records if r["op"] == "session"]
    commits = [r for r in records if r["op"] == "commit2"]
    assert [s["resumed_from"] for s in sessions] == [None, commits[0]["attempt"]]
    assert [c["step"] for c in commits] == [2, 4]
