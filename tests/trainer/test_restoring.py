"""Reports of a rank that begins with another run's checkpoint; `tests/cluster` restores real ones."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from ray_ckpt.capture.load import Load
from ray_ckpt.config import RunOptions
from ray_ckpt.core.values import SessionKey
from ray_ckpt.data import Batches, GlobalBatchSampler
from ray_ckpt.errors import MismatchError, RestoreError
from ray_ckpt.format.names import make_attempt
from ray_ckpt.plan.restore import plan_restore
from ray_ckpt.restore.manifest import ListedRows, MappedManifest
from ray_ckpt.restore.reader import RestoreTicket
from ray_ckpt.trainer import item_reader, rank_items, restoring
from ray_ckpt.trainer.checkpointer import Checkpointer
from ray_ckpt.trainer.connection import Connection, set_connection
from ray_ckpt.trainer.item_reader import REREAD_S, ItemReader
from ray_ckpt.types import CheckpointInfo, Level, ManifestRow, RankRestore, RestoredPart
from tests.capture.local import LocalLink

UID = "1" * 32
STEP = 50_000
METRICS = {"loss": 0.5}


@dataclass
class Begins(LocalLink):
    """The run has no checkpoint, and its options name one of another run."""

    reports: list[RankRestore] = field(default_factory=list)

    def origin(self, session_key: SessionKey) -> RestoreTicket:
        checkpoint = CheckpointInfo(
            id=make_attempt(run_uid=UID, session=1, step=STEP, attempt=1),
            seq=1,
            level=Level.DURABLE,
            world_size=1,
            num_nodes=1,
            size_bytes=1,
            root_digest=UID,
            committed_at_s=0.0,
            metrics=METRICS,
        )
        return replace(self.ticket(), checkpoint=checkpoint)

    def restored(self, session_key: SessionKey, report: RankRestore) -> Future[RestoreTicket | None]:
        self.reports.append(report)
        return LocalLink.restored(self, session_key, report)


PART = RestoredPart(file="shard", tier="remote", where="s3://bucket", size_bytes=7, seconds=1.0)


def read(monkeypatch: pytest.MonkeyPatch, report: RankRestore) -> None:
    def answer(resumer: ItemReader, ticket: RestoreTicket, *args: object) -> tuple[RankRestore, Load]:
        return report, frozenset

    monkeypatch.setattr(ItemReader, "read_all", answer)
    monkeypatch.setattr(ItemReader, "read_named", answer)


def restore(link: Begins) -> int:
    """Return the step that the rank reports as restored."""
    set_connection(Connection(link=link))
    ckpt = Checkpointer(model=torch.nn.Linear(4, 4))
    set_connection(Connection())
    try:
        info = ckpt.restore()
        assert info is not None and info.parts == (PART,)
        return info.step
    finally:
        ckpt.close()


@dataclass
class Waits(LocalLink):
    """The service has a ticket once the objects of the process have been searched."""

    searched: threading.Event = field(default_factory=threading.Event)

    def ticket(self, *, early: bool = False) -> RestoreTicket:
        assert self.searched.wait(10.0), "the search begins after the ticket is there"
        return LocalLink.ticket(self)


def test_unregistered_objects_are_searched_while_the_rank_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def search(objects: object) -> tuple[list[str], list[str]]:
        link.searched.set()
        return ["a scheduler"], []

    monkeypatch.setattr(rank_items, "find_gaps", search)
    link = Waits()
    ckpt = Checkpointer(link=link, model=torch.nn.Linear(4, 4))
    assert ckpt.restore() is None
    ckpt.close()


@pytest.mark.parametrize(
    "options, step",
    [({"resume": "s3://bucket/other"}, STEP), ({"init_from": "s3://bucket/other"}, None)],
)
def test_a_rank_reports_what_it_began_with(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, str], step: int | None
) -> None:
    read(monkeypatch, RankRestore(rank=0, parts=(PART,), seconds=2.0))
    link = Begins(options=RunOptions(**options))  # type: ignore[arg-type]
    assert restore(link) == (step or 0)
    assert link.reports == [RankRestore(rank=0, parts=(PART,), seconds=2.0, origin_step=step)]


def test_no_rank_goes_on_before_all_have_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    read(monkeypatch, RankRestore(rank=0, parts=(PART,), damage=("shard",)))
    link = Begins(options=RunOptions(resume="s3://bucket/other"))
    with pytest.raises(RestoreError, match="cannot begin with step 50000"):
        restore(link)
    assert link.reports == []


@pytest.mark.parametrize("option", ["resume", "init_from"])
@pytest.mark.parametrize("away", [1, len(REREAD_S), len(REREAD_S) + 1])
def test_another_run_is_read_again_while_its_storage_path_is_not_reached(
    monkeypatch: pytest.MonkeyPatch, away: int, option: str
) -> None:
    monkeypatch.setattr(restoring, "REREAD_S", [0.001] * len(REREAD_S))
    silent = RankRestore(rank=0, damage=("shard",), is_unreachable=True)
    answers = iter([silent] * away + [RankRestore(rank=0, parts=(PART,))])
    monkeypatch.setattr(ItemReader, "read_all", lambda *args: (next(answers), frozenset))
    monkeypatch.setattr(ItemReader, "read_named", lambda *args: (next(answers), frozenset))
    link = Begins(options=RunOptions(**{option: "s3://bucket/other"}))  # type: ignore[arg-type]
    if away <= len(REREAD_S):
        assert restore(link) == (STEP if option == "resume" else 0)
        return
    with pytest.raises(RestoreError, match="cannot begin with step 50000"):
        restore(link)
    assert next(answers).parts == (PART,), "it is read again four times"


def test_a_rank_that_could_not_read_does_not_go_on_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer may be meant for a rank of a newer group on the same node."""
    read(monkeypatch, RankRestore(rank=0, damage=("shard",)))
    checkpoint = Begins().origin((1, 1)).checkpoint
    link = LocalLink(given=RestoreTicket(session_key=(1, 1), checkpoint=checkpoint))
    ckpt = checkpointer_of(link, model_of(0.0))
    with pytest.raises(RestoreError, match="goes on from step 50000, which this rank could not read"):
        ckpt.restore()
    ckpt.close()


def saved_model(folder: Path) -> LocalLink:
    """Return a link whose ticket has a model with weights of 3.0."""
    link = LocalLink()
    ckpt = checkpointer_of(link, model_of(3.0))
    ckpt.restore()
    ckpt.save(1)
    ckpt.close()
    return link.resumed(folder, 1)


def model_of(value: float) -> torch.nn.Linear:
    model = torch.nn.Linear(4, 4)
    torch.nn.init.constant_(model.weight, value)
    return model


def checkpointer_of(link: LocalLink, model: torch.nn.Linear) -> Checkpointer:
    set_connection(Connection(link=link))
    try:
        return Checkpointer(model=model)
    finally:
        set_connection(Connection())


def rows_in(ticket: RestoreTicket) -> list[ManifestRow]:
    assert isinstance(ticket.manifest, ListedRows)
    return list(ticket.manifest.meeting(()))


@pytest.mark.parametrize("size, metrics", [(4, METRICS), (5, {})])
def test_a_run_has_metrics_of_another_only_with_state_of_it(
    tmp_path: Path, size: int, metrics: dict[str, float]
) -> None:
    given = replace(saved_model(tmp_path).given, checkpoint=None)
    link = Begins(options=RunOptions(init_from="s3://bucket/other", anew=("model",)), given=given)
    ckpt = checkpointer_of(link, torch.nn.Linear(4, size))
    info = ckpt.restore()
    assert info is not None and info.step == 0 and info.metrics == metrics
    ckpt.close()


@pytest.mark.parametrize("missing", ["", "state", "slice"])
def test_the_whole_manifest_is_requested_only_if_something_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """And the reads are planned once."""
    link, plan = saved_model(tmp_path), Mock(wraps=plan_restore)
    monkeypatch.setattr("ray_ckpt.capture.load.plan_restore", plan)
    whole = link.given
    own = [row for row in rows_in(whole) if row.kind != missing]
    files = {row.file for row in own}
    link.whole = whole
    link.given = replace(
        whole,
        manifest=ListedRows(own),
        sources={file: found for file, found in whole.sources.items() if file in files},
        is_whole=False,
    )
    model = model_of(0.0)
    ckpt = checkpointer_of(link, model)
    info = ckpt.restore()
    assert info is not None and info.step == 1 and link.num_whole == bool(missing)
    assert plan.call_count == 1
    assert torch.equal(model.weight, torch.full((4, 4), 3.0))
    ckpt.close()


def test_a_whole_manifest_that_cannot_be_read_is_damage_of_the_checkpoint(tmp_path: Path) -> None:
    link = saved_model(tmp_path)
    link.whole = RestoreTicket(session_key=(1, 2), checkpoint=link.given.checkpoint, damage=("manifest",))
    ticket = replace(link.given, manifest=ListedRows([]), is_whole=False)
    report, load = ItemReader(link, {}).read_all(ticket)
    assert report.damage == ("manifest",) and load() == frozenset()
    gone = replace(ticket, manifest=MappedManifest(path="/proc/self/fd/9999", parts=()))
    report, _ = ItemReader(link, {}).read_all(gone)
    assert "cannot be mapped" in report.damage[0]


@dataclass
class Away(LocalLink):
    """The agent does not reach the manifest at the first `away` requests."""

    away: int = 0
    requests: int = 0

    def ticket(self, *, early: bool = False) -> RestoreTicket:
        self.requests += 1
        ticket = LocalLink.ticket(self)
        if self.requests > self.away:
            return ticket
        return replace(ticket, manifest=None, damage=("manifest",), is_unreachable=True)


@pytest.mark.parametrize("away", [0, 1, len(REREAD_S)])
def test_saved_state_is_read_again_while_a_source_is_not_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away: int
) -> None:
    monkeypatch.setattr(item_reader, "REREAD_S", [0.001] * len(REREAD_S))
    link = Away(given=saved_model(tmp_path).given, away=away)
    ckpt = checkpointer_of(link, model_of(0.0))
    saved = ckpt.saved()
    assert saved is not None and "model" in saved.trees
    assert link.requests == away + 1
    ckpt.close()


@pytest.mark.parametrize("is_damaged", [False, True])
def test_saved_state_that_is_lost_or_stays_away_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_damaged: bool
) -> None:
    monkeypatch.setattr(item_reader, "REREAD_S", [0.001] * len(REREAD_S))
    given = saved_model(tmp_path).given
    if is_damaged:
        given = replace(given, damage=("manifest",))
    link = Away(given=given, away=0 if is_damaged else 1000)
    ckpt = checkpointer_of(link, model_of(0.0))
    with pytest.raises(RestoreError, match="state of rank 0 cannot be read") as caught:
        ckpt.saved()
    assert caught.value.fields["damage"] == ("manifest",)
    assert link.requests == (1 if is_damaged else 1 + len(REREAD_S))
    ckpt.close()


def test_no_state_is_read_in_a_new_run() -> None:
    ckpt = checkpointer_of(LocalLink(), model_of(0.0))
    assert ckpt.saved() is None
    ckpt.close()


def test_a_position_in_other_samples_is_a_difference_before_anything_is_loaded(tmp_path: Path) -> None:
    def batches(num_samples: int, seed: int = 0) -> Batches[list[int]]:
        sampler = GlobalBatchSampler(num_samples, global_batch=4, rank=0, world_size=1, seed=seed)
        return sampler.batches(sampler)

    saved = LocalLink(options=RunOptions(every_steps=1))
    position = batches(100)
    first = Checkpointer(link=saved, model=model_of(1.0), batches=position)
    first.restore()
    next(iter(position))
    first.step(1)
    first.flush()
    first.close()
    model = model_of(0.0)
    link = saved.resumed(tmp_path, 1)
    with pytest.raises(MismatchError, match=r"batches: num_samples was 100 and is 120 here"):
        Checkpointer(link=link, model=model, batches=batches(120)).restore()
    assert not model.weight.any(), "nothing was loaded"
    link.options, other = RunOptions(anew=("batches",)), batches(120, seed=1)
    second = Checkpointer(link=link, model=model, batches=other)
    second.restore()
    assert model.weight.all() and other.position == 0
    second.close()
    same = batches(100)
    third = Checkpointer(link=link, model=model, batches=same)
    third.restore()
    assert same.position == 4
    third.close()
