"""Two runs of a small training side by side, and each way to spoil a resume: found, and named."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from ray_ckpt.capture.adapt import adapt
from ray_ckpt.capture.items import Item
from ray_ckpt.capture.rng import RngItem
from ray_ckpt.capture.walk import map_leaves
from ray_ckpt.config import RunOptions
from ray_ckpt.errors import ConfigError
from ray_ckpt.train.check import ResumeCheck
from ray_ckpt.trainer import probe
from ray_ckpt.trainer.checkpointer import Checkpointer
from ray_ckpt.trainer.connection import Connection, set_connection
from ray_ckpt.trainer.probe import (
    Difference,
    Noted,
    ProbePart,
    ProbeSpec,
    ResumeProbe,
    Trace,
    compare,
    kind_of,
    note_state,
    read_traces,
    resolve_chance,
)
from tests.capture.local import LocalLink

AT, LAST = 3, 6
DRAWS: Mapping[str, Callable[[], object]] = {
    "python": random.random,
    "numpy": np.random.rand,
    "torch_cpu": lambda: torch.rand(1),
}


class Loader:
    """Batches whose position is the state; `in_iterator` keeps it where a restore does not reach."""

    def __init__(self, *, in_iterator: bool = False) -> None:
        self.position = 0
        self.in_iterator = in_iterator

    def __iter__(self) -> Iterator[torch.Tensor]:
        position = self.position
        while True:
            position = (position if self.in_iterator else self.position) + 1
            self.position = position
            yield torch.full((2, 4), position / 10)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.position = state["position"]


class Meter:
    """A moving average of the loss; `forgets` one of its two values on load."""

    def __init__(self, *, forgets: bool = False) -> None:
        self.count, self.mean = 0, 0.0
        self.forgets = forgets

    def update(self, loss: float) -> None:
        self.count += 1
        self.mean += (loss - self.mean) / self.count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.mean = state["mean"]
        if not self.forgets:
            self.count = state["count"]


class Loop:
    """The calls of a Checkpointer to its probe, with the checkpoint in memory instead of files."""

    def __init__(self, spec: ProbeSpec, rank: int, saved: dict[str, Any], objects: Mapping[str, Any]) -> None:
        owners = {name: obj for name, obj in objects.items() if isinstance(obj, nn.Module)}
        self.items: dict[str, Item] = {name: adapt(name, obj, owners) for name, obj in objects.items()}
        self.items["rng"] = RngItem()
        self.probe, self.saved, self.is_first = ResumeProbe(spec, rank), saved, spec.part == "first"
        self.at = spec.at

    def steps(self, total: int) -> Iterator[int]:
        total = self.probe.total(total)
        if not self.is_first:
            for name, item in self.items.items():
                item.load(filled(item.tree(), copy.deepcopy(self.saved[name])))
        self.probe.restored(self.items, None if self.is_first else self.at)
        rng = self.items["rng"].tree()
        return self._steps(total, rng)

    def _steps(self, total: int, rng: Any) -> Iterator[int]:
        if not self.is_first:
            self.items["rng"].load(rng)
        for step in range(1 if self.is_first else self.at + 1, total + 1):
            self.probe.begun(step, self.items)
            yield step

    def step(self, step: int) -> None:
        if self.probe.due(step):
            self.saved.update({name: cloned(item.tree()) for name, item in self.items.items()})
        self.probe.ended(step, self.items)


def cloned(tree: Any) -> Any:
    def visit(value: Any, path: tuple[str, ...]) -> Any:
        return value.detach().clone() if isinstance(value, torch.Tensor) else map_leaves(value, visit, path)

    return copy.deepcopy(visit(tree, ()))


def filled(live: Any, saved: Any) -> Any:
    """Return `saved` with the tensors of `live`, filled in place as by a restore."""
    if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        with torch.no_grad():
            return live.copy_(saved)
    if isinstance(live, dict) and isinstance(saved, dict):
        return {key: filled(live.get(key), value) for key, value in saved.items()}
    return saved


def train(
    folder: Path,
    part: ProbePart,
    saved: dict[str, Any],
    *,
    flaw: str = "",
    rank: int = 0,
    total: int = 100,
) -> None:
    torch.manual_seed(ord(part[0]))
    random.seed(part)
    np.random.seed(len(part))
    first_layer = nn.Linear(4, 4)
    model = nn.Sequential(first_layer, nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = LambdaLR(optimizer, lambda done: 0.9**done)
    loader = Loader(in_iterator=flaw == "live iterator")
    meter = Meter(forgets=flaw == "forgetful meter")
    notes: dict[str, Any] = {"count": 0, "losses": []}
    objects = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": loader,
        "meter": meter,
        "notes": notes,
    }
    if flaw == "forgotten scheduler":
        del objects["scheduler"]
    early = iter(loader)
    if flaw == "live iterator":
        next(early)
        loader.position = 0
    loop = Loop(ProbeSpec(folder=str(folder), at=AT, last=LAST, part=part), rank, saved, objects)
    steps = loop.steps(total)
    batches = early if flaw == "live iterator" else iter(loader)
    torch.rand(7)  # as an iterator that draws a seed does; the saved state has to win over it
    if flaw == "late change" and part != "first":
        first_layer.weight.data.mul_(2.0)
    scale = 1.0
    for step in steps:
        scale += 0.5 if flaw == "forgotten counter" else 0.0
        loss = (model(next(batches)) * scale).square().mean()
        if flaw == "chance":
            loss = loss * (1 + int.from_bytes(os.urandom(4)) / 2**32)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        meter.update(loss.item())
        notes["count"] += 1
        notes["losses"].append(loss.item())
        if flaw == "run's name":
            notes["count"] += len(part)
        if flaw == "rank 1 first" and part != "first" and step == (LAST if rank == 0 else AT + 2):
            first_layer.weight.data.add_(1.0)
        if flaw == "more draws" and step > AT and part != "first":
            random.random()
        loop.step(step)
        if flaw.startswith("draws"):
            DRAWS[flaw.removeprefix("draws ")]()
        if flaw == "breaks off" and part != "first" and step == LAST - 1:
            break


def check(tmp_path: Path, flaw: str = "", ranks: int = 1) -> Difference | None:
    """Return the result of a check of a training with that flaw, with a third run if needed."""
    for rank in range(ranks):
        saved: dict[str, Any] = {}
        parts: tuple[ProbePart, ...] = ("first", "second", "third")
        for part in parts:
            train(tmp_path, part, saved, flaw=flaw, rank=rank)
    difference = compare(read_traces(tmp_path, "first"), read_traces(tmp_path, "second"))
    if difference is None:
        return None
    return resolve_chance(
        difference, compare(read_traces(tmp_path, "second"), read_traces(tmp_path, "third"))
    )


def test_a_run_that_resumes_exactly_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    assert check(tmp_path, ranks=2) is None
    lines = (tmp_path / "second-1.jsonl").read_text().splitlines()
    moments = [(line["moment"], line["step"]) for line in map(json.loads, lines[1:])]
    assert moments == [("restored", 3), ("begin", 4), ("end", 4), ("end", 5), ("end", 6)]
    assert len((tmp_path / "first-0.jsonl").read_text().splitlines()) == len(lines)


@pytest.mark.parametrize(
    ("flaw", "step", "moment", "name", "cause", "words"),
    [
        ("draws python", 4, "begin", "rng.python.1", "changed after the step", "item rng: python"),
        ("draws numpy", 4, "begin", "rng.numpy.state.pos", "changed after the step", "item rng: numpy"),
        ("draws torch_cpu", 4, "begin", "rng.torch_cpu", "changed after the step", "ckpt.step the last"),
        ("forgetful meter", 3, "restored", "meter.count", "restored otherwise", "meter is not restored"),
        ("late change", 4, "begin", "model.0.weight", "changed before the loop", "model was changed between"),
        ("live iterator", 4, "end", "loader.position", "data position", "live iterator over loader"),
        (
            "forgotten scheduler",
            4,
            "end",
            "optimizer.param_groups.0.lr",
            "settings",
            "lr is set by something that is not a registered item",
        ),
        ("forgotten counter", 4, "end", "meter.mean", "missing", "two resumed runs agree"),
        ("chance", 4, "end", "meter.mean", "chance", "not deterministic"),
        ("more draws", 4, "end", "rng.python.1", "random numbers", "(item rng: python)"),
        ("run's name", 4, "end", "notes.count", "one item", "only the state of notes"),
        ("breaks off", 6, "end", None, "ended early", "break off"),
    ],
)
def test_each_way_to_spoil_a_resume_is_named(
    tmp_path: Path, flaw: str, step: int, moment: str, name: str | None, cause: str, words: str
) -> None:
    found = check(tmp_path, flaw)
    assert found is not None
    assert (found.step, found.moment, found.cause) == (step, moment, cause), found
    assert next(iter(found.names), None) == name, found
    assert words in str(found)


def test_the_first_tensor_stands_beside_the_value_that_explains_it(tmp_path: Path) -> None:
    found = check(tmp_path, "live iterator")
    assert found is not None and found.first_tensor == "model.0.weight"
    assert "loader.position was 5 and is 2 in the resumed run, and " in str(found)
    assert "first tensor: model.0.weight" in str(found)
    assert len(found.names) == min(found.count, probe.MAX_NAMES)


def test_of_several_ranks_the_first_in_time_is_named(tmp_path: Path) -> None:
    found = check(tmp_path, "rank 1 first", ranks=2)
    assert found is not None and (found.rank, found.step) == (1, AT + 2)
    assert "Rank 1 differs after step 5: model.0.weight (tensor F32[4, 4]) has other bytes" in str(found)


def test_an_item_that_was_not_restored_at_all_is_named(tmp_path: Path) -> None:
    saved: dict[str, Any] = {}
    train(tmp_path, "first", saved)
    saved["optimizer"]["state"] = {}
    train(tmp_path, "second", saved)
    found = compare(read_traces(tmp_path, "first"), read_traces(tmp_path, "second"))
    assert found is not None and found.cause == "restored otherwise"
    assert found.names[0].startswith("optimizer.state.") and found.second is None
    assert "is not there in the resumed run" in str(found)


def test_a_loop_that_ends_before_the_last_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="runs 5 steps, and 6 are to be compared"):
        train(tmp_path, "first", {}, total=5)


def test_a_second_checkpointer_in_a_process_is_refused(tmp_path: Path) -> None:
    train(tmp_path, "first", {})
    with pytest.raises(ConfigError, match="one Checkpointer per process"):
        train(tmp_path, "first", {})


def test_a_folder_that_is_not_on_this_node_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a folder that all nodes share"):
        train(tmp_path / "elsewhere", "first", {})


@pytest.mark.parametrize(
    ("part", "begun", "words"), [("first", 3, "at step 3"), ("second", None, "at step 0")]
)
def test_a_run_that_begins_elsewhere_is_refused(
    tmp_path: Path, part: ProbePart, begun: int | None, words: str
) -> None:
    spec = ProbeSpec(folder=str(tmp_path), at=AT, last=LAST, part=part)
    with pytest.raises(ConfigError, match=words):
        ResumeProbe(spec, 0).restored({}, begun)


@pytest.mark.parametrize(("at", "last"), [(0, 3), (3, 3), (1, 2 + probe.MAX_STEPS)])
def test_steps_that_cannot_be_compared_are_refused(at: int, last: int) -> None:
    with pytest.raises(ConfigError, match=f"Steps {at} to {last} cannot be compared"):
        ProbeSpec(folder="/", at=at, last=last, part="first")


def test_runs_of_other_ranks_are_refused(tmp_path: Path) -> None:
    saved: dict[str, Any] = {}
    train(tmp_path, "first", saved)
    train(tmp_path, "first", saved, rank=1)
    train(tmp_path, "second", saved)
    with pytest.raises(ConfigError, match=r"\[0, 1\] and \[0\]"):
        compare(read_traces(tmp_path, "first"), read_traces(tmp_path, "second"))


def noted(value: Any) -> dict[str, str]:
    return note_state({"x": adapt("x", {"v": value}, {})}, 0)


def test_values_are_noted_exactly_and_briefly() -> None:
    assert noted(0.1) == {"x.v": "0.1"}
    assert noted(0.0) != noted(-0.0)
    assert noted({}) and noted({}) != noted([]) != noted(None)
    assert noted(1) != noted(1.0) != noted(True)
    assert noted([1, 2]) == {"x.v.0": "1", "x.v.1": "2"}
    for long in ("a" * 1000, 1 << 20000, b"bytes", list(range(1000)), {"a", "b"}, np.arange(3)):
        (text,) = noted(long).values()
        assert len(text) < 60, text
    assert noted(list(range(1000))) != noted([*range(999), 1000])
    assert noted({"a", "b", "c"}) == noted({"c", "b", "a"})


def test_tensors_in_a_long_list_keep_their_names() -> None:
    state = noted([torch.tensor(float(i)) for i in range(40)])
    assert len(state) == 40 and len(set(state.values())) == 40


def test_tensors_are_distinguished_by_dtype_shape_and_bytes() -> None:
    same = torch.arange(6)
    texts = [same, same.reshape(2, 3), same.int(), same + 1, same[:0], same.reshape(3, 2).t().contiguous()]
    assert len({noted(tensor)["x.v"] for tensor in texts}) == 6
    assert noted(same.reshape(3, 2).t()) == noted(same.reshape(3, 2).t().contiguous())


def test_a_state_of_very_many_values_is_noted_by_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MAX_NOTES", 50)
    one, other = ({"a": {str(i): i for i in range(40)}, "b": {str(i): i for i in range(n)}} for n in (40, 41))
    assert len(noted(one)) < 60 and noted(one) != noted(other)
    lists = [[torch.tensor([i, j]) for j in range(30)] for i in range(3)]
    before = noted(lists)
    lists[2][29] += 1  # in a list that is one line
    assert len(before) < 60 and len(noted(lists).items() ^ before.items()) == 2


def test_a_cause_that_is_known_is_not_called_chance(tmp_path: Path) -> None:
    found = check(tmp_path, "draws python")
    assert found is not None and resolve_chance(found, found) == found


def test_a_checkpointer_saves_where_its_probe_wants_it_and_notes_each_moment(tmp_path: Path) -> None:
    spec = ProbeSpec(folder=str(tmp_path), at=AT, last=LAST, part="first")
    link = LocalLink(options=RunOptions(every_steps=1000))
    set_connection(Connection(link=link, probe=ResumeProbe(spec, link.rank)))
    try:
        numbers = {"steps": 0}
        ckpt = Checkpointer(numbers=numbers)
        for step in ckpt.steps(total=1000):
            numbers["steps"] = step
            ckpt.step(step)
            random.random()
        ckpt.close()
    finally:
        set_connection(Connection())
    assert numbers["steps"] == LAST and sorted(link.files) == [AT, LAST]
    states = list(read_traces(tmp_path, "first")[0].states)
    assert [(noted.moment, noted.step) for noted in states] == [
        ("restored", AT),
        ("begin", AT + 1),
        *(("end", step) for step in range(AT + 1, LAST + 1)),
    ]
    assert [noted.state["numbers.steps"] for noted in states] == ["3", "3", "4", "5", "6"]
    assert states[0].state["rng.python.1"] != states[1].state["rng.python.1"]


def test_a_state_is_noted_by_its_kind() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    objects = {
        "model": model,
        "parameter": nn.Parameter(torch.zeros(2)),
        "optimizer": optimizer,
        "scheduler": LambdaLR(optimizer, lambda done: 1.0),
        "loader": Loader(),
        "meter": Meter(),
        "notes": {"a": 1},
        "generator": torch.Generator(),
    }
    kinds = {name: kind_of(adapt(name, obj, {"model": model})) for name, obj in objects.items()}
    assert kinds == {
        "model": "model",
        "parameter": "model",
        "optimizer": "optimizer",
        "scheduler": "other",
        "loader": "data",
        "meter": "other",
        "notes": "other",
        "generator": "random",
    }


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 on torch 2.13
def test_noting_a_loader_that_is_not_iterated_yet_takes_no_random_numbers() -> None:
    loader = StatefulDataLoader(range(8), batch_size=2, num_workers=0)
    items: dict[str, Item] = {"loader": adapt("loader", loader, {}), "rng": RngItem()}
    before = torch.get_rng_state()
    noted = note_state(items, 0)
    assert torch.equal(torch.get_rng_state(), before)
    alone = note_state({"rng": RngItem()}, 0)
    assert {name: noted[name] for name in alone} == alone


def test_warnings_of_the_start_are_in_the_result(tmp_path: Path) -> None:
    spec = ProbeSpec(folder=str(tmp_path), at=AT, last=LAST, part="first")
    link = LocalLink(options=RunOptions(every_steps=1000))
    set_connection(Connection(link=link, probe=ResumeProbe(spec, link.rank)))
    model = nn.Linear(2, 2)
    ema = AveragedModel(model)
    samples: Any = [torch.zeros(1)] * 8
    batches = iter(DataLoader(samples))
    next(batches)
    try:
        ckpt = Checkpointer(model=model)
        for step in ckpt.steps(total=LAST):
            ckpt.step(step)
        ckpt.close()
    finally:
        set_connection(Connection())
    warnings = read_traces(tmp_path, "first")[0].warnings
    assert len(warnings) == 2, warnings
    assert warnings[0].startswith("an averaged model (AveragedModel) of the registered module 'model'")
    assert warnings[1].startswith("a DataLoader is already being iterated")
    check = ResumeCheck(
        name="check",
        folder=tmp_path,
        at=AT,
        steps=LAST - AT,
        num_ranks=1,
        num_states=5,
        num_values=3,
        seconds={},
        difference=None,
        warnings=warnings,
    )
    assert "the same bit for bit" in str(check) and "AveragedModel" in str(check)
    del ema, batches


def test_a_loop_without_checkpointer_or_steps_is_no_comparison() -> None:
    with pytest.raises(ConfigError, match=r"no rank has made a Checkpointer"):
        compare({}, {})
    none, restored = Trace({}, ()), Trace({}, (Noted("restored", 3, {"a": "1"}),))
    for second in (none, restored):
        with pytest.raises(ConfigError, match=r"Rank 0 .* ckpt\.step"):
            compare({0: none}, {0: second})
