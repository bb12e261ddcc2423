"""Compare a resumed run with the original run, by digests of the states of both runs after each step.

One run continues after a checkpoint; another run restores the checkpoint and does the same steps. A
`ResumeProbe` in each rank writes notes about the state after each step to a file in a folder that all nodes
share. `compare` reads the files of two runs side by side, finds the first difference in the order of
execution and names the likely cause.

The note of a tensor is the digest of its bytes; the note of any other value is its text or its digest. After
every step each tensor on an accelerator is copied to the host, one at a time, and hashed at some GB/s. Each
tensor or value takes about 100 bytes in memory, and about 100 bytes per step in the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from ray_ckpt.capture.items import BaseOptimizerItem, Item, ModuleItem, SamplerItem, TensorItem
from ray_ckpt.capture.rng import GeneratorItem, RngItem
from ray_ckpt.capture.walk import bytes_digest, map_leaves, walk
from ray_ckpt.errors import ConfigError
from ray_ckpt.format.digest import digest
from ray_ckpt.format.short import key_text
from ray_ckpt.format.tree import TensorRef, encode_tree

MAX_STEPS = 1000  # steps of a comparison; a line per step and rank has about 100 bytes per tensor or value
MAX_NOTES = 100_000  # notes of one state; beyond this number a container gets one note
MAX_SEQUENCE = 16  # a longer list, such as Python's random state, gets one note instead of a note per element
MAX_VALUE = 60  # characters of a value; the note of a longer value is its digest
RNG = "rng"  # name of the item that every Checkpointer adds
MAX_NAMES = 20  # names listed in a Difference

ProbePart: TypeAlias = Literal["first", "second", "third"]
"""The run that made the checkpoint, and up to two that restore it."""
Moment: TypeAlias = Literal["restored", "begin", "end"]
"""The time of a state: just restored (in the first run: just saved), before a step, after a step."""
Kind: TypeAlias = Literal["random", "data", "model", "optimizer", "other"]
"""The kind of an item, as far as it helps to explain a difference."""

_DIGEST = re.compile(r" [0-9a-f]{32}\b")
_MOMENTS: tuple[Moment, ...] = ("restored", "begin", "end")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSpec:
    """The task of the probes of one run. Steps are completed optimizer steps; `folder` is a path."""

    folder: str
    at: int
    """The step that the first run saves and the other runs restore."""
    last: int
    """The last step of each run."""
    part: ProbePart

    def __post_init__(self) -> None:
        if not 0 < self.at < self.last <= self.at + MAX_STEPS:
            raise ConfigError(
                f"Steps {self.at} to {self.last} cannot be compared.",
                hint=f"Choose at >= 1 and 1 to {MAX_STEPS} steps after it.",
            )


@dataclass(frozen=True, slots=True)
class Noted:
    """The state of one rank at one moment: a note for each tensor and value, by name."""

    moment: Moment
    step: int
    state: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Trace:
    """The notes of one rank, in order. `kinds` is by item; a note's name begins with its item."""

    kinds: Mapping[str, Kind]
    states: Iterable[Noted]
    warnings: tuple[str, ...] = ()
    """Warnings that the Checkpointer logged at the start; only on rank 0."""


# -- in a rank -------------------------------------------------------------------------------------------


class ResumeProbe:
    """Writes notes about the states of this rank, called by its Checkpointer at the restore and each step."""

    def __init__(self, spec: ProbeSpec, rank: int) -> None:
        self._spec = spec
        self._rank = rank
        self._file = trace_file(Path(spec.folder), spec.part, rank)

    def total(self, total: int) -> int:
        """Return the last step of the comparison. Raises ConfigError if `total` is less."""
        if total < self._spec.last:
            raise ConfigError(
                f"The training loop runs {total} steps, and {self._spec.last} are to be compared.",
                hint="Let the loop run at least `at` + `steps` steps.",
            )
        return self._spec.last

    def due(self, step: int) -> bool:
        """Return True if a save is needed after `step`."""
        return self._spec.part == "first" and step == self._spec.at

    def restored(self, items: Mapping[str, Item], step: int | None, warnings: Sequence[str] = ()) -> None:
        """Begin the trace. Raises ConfigError if the run does not begin at the compared step."""
        wanted = None if self._spec.part == "first" else self._spec.at
        if step != wanted:
            raise ConfigError(
                f"The {self._spec.part} run begins at step {step or 0} and not at {wanted or 0}.",
                hint="Compare under a run name that has no checkpoints yet.",
            )
        try:
            with self._file.open("x") as file:
                kinds = {name: kind_of(item) for name, item in items.items()}
                file.write(json.dumps({"kinds": kinds, "warnings": list(warnings)}) + "\n")
        except FileExistsError as error:
            raise ConfigError(
                f"{self._file} exists already.",
                hint="Build one Checkpointer per process, and compare each time under another run name.",
            ) from error
        except OSError as error:
            raise ConfigError(
                f"{self._file} cannot be written on this node: {error}",
                hint="Choose as storage_path a folder that all nodes share.",
            ) from error
        if step is not None:
            self._note("restored", step, items)

    def begun(self, step: int, items: Mapping[str, Item]) -> None:
        if step == self._spec.at + 1:
            self._note("begin", step, items)

    def ended(self, step: int, items: Mapping[str, Item]) -> None:
        if step == self._spec.at:
            self._note("restored", step, items)
        elif self._spec.at < step <= self._spec.last:
            self._note("end", step, items)

    def _note(self, moment: Moment, step: int, items: Mapping[str, Item]) -> None:
        line = {"moment": moment, "step": step, "state": note_state(items, self._rank)}
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def trace_file(folder: Path, part: ProbePart, rank: int) -> Path:
    return folder / f"{part}-{rank}.jsonl"


def kind_of(item: Item) -> Kind:
    match item:
        case RngItem() | GeneratorItem():
            return "random"
        case ModuleItem() | TensorItem():
            return "model"
        case BaseOptimizerItem():
            return "optimizer"
        case SamplerItem():
            return "data"
    obj = getattr(item, "obj", None)  # loaders, samplers and datasets are iterable
    return "data" if isinstance(obj, Iterable) else "other"


def note_state(items: Mapping[str, Item], rank: int) -> dict[str, str]:
    """Return a note for each tensor (the region on this rank) and each other value, by dotted name."""
    ordered = {name: items[name] for name in sorted(items, key=RNG.__ne__)}
    with torch.random.fork_rng(devices=[]):  # the state of a loader before its first iteration draws a number
        walked = walk(ordered, rank=rank, world_size=rank + 1)  # other ranks with the tensor are irrelevant
    tensors: dict[str, str] = {}
    for live in walked.slices:
        at = f" at {list(live.slice.offset)}" if any(live.slice.offset) else ""
        line = f"{live.slice.dtype}{list(live.slice.shape)}{at} {bytes_digest(live.tensor)}"
        before = tensors.get(live.slice.key)
        tensors[live.slice.key] = line if before is None else f"{before}, {line}"
    notes: dict[str, str] = {}
    for name, tree in walked.trees.items():
        _note_values(_with_texts(tree, tensors), name, notes)
    return notes


def _with_texts(tree: Any, tensors: Mapping[str, str]) -> Any:
    """Return `tree` with each tensor replaced by a reference to its note."""

    def visit(value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, TensorRef):
            return TensorRef(tensors.get(value.key, "held by other ranks only"))
        return map_leaves(value, visit, path)

    return visit(tree, ())


def _note_values(value: Any, name: str, notes: dict[str, str]) -> None:
    if isinstance(value, TensorRef):
        notes[name] = f"tensor {value.key}"
    elif _is_split(value) and 0 < len(value) <= MAX_NOTES - len(notes):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            _note_values(child, f"{name}.{key_text(key)}", notes)
    elif _is_shown(value):
        notes[name] = repr(value)
    else:
        notes[name] = f"{type(value).__name__} {digest(encode_tree(value))}"


def _is_split(value: Any) -> bool:
    """Return True if each element of a container gets a separate note."""
    if not isinstance(value, list | tuple):
        return isinstance(value, dict)
    inner = (TensorRef, dict, list, tuple)
    return len(value) <= MAX_SEQUENCE or any(isinstance(child, inner) for child in value)


def _is_shown(value: Any) -> bool:
    """Return True if the note of a value is its text."""
    if isinstance(value, str):
        return len(value) <= MAX_VALUE
    if isinstance(value, int):
        return value.bit_length() <= 64
    return value is None or isinstance(value, float | complex)


# -- where it is compared --------------------------------------------------------------------------------


Cause: TypeAlias = Literal[
    "restored otherwise",
    "changed after the step",
    "changed before the loop",
    "data position",
    "random numbers",
    "settings",
    "one item",
    "missing or chance",
    "missing",
    "chance",
    "ended early",
]

_EXPLANATIONS: Mapping[Cause, str] = {
    "restored otherwise": "{item} is not restored exactly: its load_state_dict does not bring back what was "
    "saved.",
    "changed after the step": "{what} after ckpt.step, when the step had been saved; "
    "make ckpt.step the last statement of the loop's body.",
    "changed before the loop": "{what} between ckpt.steps and the first step of the resumed run; "
    "do that before ckpt.steps.",
    "data position": "a live iterator over {item} was made before ckpt.steps, "
    "or its position is not part of its state.",
    "random numbers": "the step drew another number of random numbers ({streams}), and no registered item "
    "decides about that.",
    "settings": "{name} is set by something that is not a registered item, such as a scheduler.",
    "one item": "only the state of {item} differs, so it depends on something that is not restored with "
    "it, such as a time, an id, or a count that it does not save.",
    "missing or chance": "something that the step depends on is not a registered item (a scheduler, a "
    "scaler, an EMA, a counter), or the computation is not deterministic (threads, atomics, cudnn).",
    "missing": "something that the step depends on is not a registered item (a scheduler, a scaler, an EMA, "
    "a counter, a generator of random numbers). It is not chance: two resumed runs agree with each other. "
    "With DDP on three or more ranks, run one backward before ckpt.steps: it adds up gradients in "
    "another order after its first.",
    "chance": "the computation is not deterministic (threads, atomics, cudnn), for two resumed runs differ "
    "from each other too. See torch.use_deterministic_algorithms, and fix the number of threads.",
    "ended early": "one of the runs ended before the last step. Does the loop break off?",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first difference between two runs in the order of execution, on the lowest rank that has one."""

    rank: int
    step: int
    moment: Moment
    names: tuple[str, ...] = ()
    """Names that differ, at most MAX_NAMES of `count`; the names that explain the others come first."""
    count: int = 0
    first: str | None = None
    """The note of `names[0]` in the first run, or None; `second` is the same for the second run."""
    second: str | None = None
    first_tensor: str | None = None
    """The first tensor that differs, in the order of registration; None if no tensor differs."""
    cause: Cause
    what: str
    """The cause as a sentence."""

    @property
    def may_be_chance(self) -> bool:
        """True if only another resumed run can show whether chance or a missing item is the cause."""
        return self.cause == "missing or chance"

    def __str__(self) -> str:
        when = {
            "restored": f"right after the restore of step {self.step}",
            "begin": f"just before step {self.step}",
            "end": f"after step {self.step}",
        }[self.moment]
        text = f"Rank {self.rank} differs {when}"
        if self.names:
            text += f": {self.names[0]} {_change(self.first, self.second)} in the resumed run"
        if self.count > 1:
            text += f", and {self.count - 1:,} more"
        if self.first_tensor not in (None, *self.names[:1]):
            text += f" (first tensor: {self.first_tensor})"
        return f"{text}. Likely cause: {self.what}"


_NEEDED = "Let the training loop make a Checkpointer and call ckpt.step after each step."


def compare(first: Mapping[int, Trace], second: Mapping[int, Trace]) -> Difference | None:
    """Return the first difference between the traces of two runs; None if they are equal bit for bit.

    Both mappings are by rank; raises ConfigError if their ranks differ, or if the first run has left no
    states. Reads each trace line by line, up to the first difference.
    """
    if not first and not second:
        raise ConfigError("In the compared runs no rank has made a Checkpointer.", hint=_NEEDED)
    if first.keys() != second.keys():
        raise ConfigError(
            f"The runs have different ranks: {sorted(first)} and {sorted(second)}.",
            hint="Compare runs of one fixed number of workers.",
        )
    found = [d for rank in first if (d := _compare_rank(rank, first[rank], second[rank])) is not None]
    return min(found, key=lambda d: (d.step, _MOMENTS.index(d.moment), d.rank), default=None)


def resolve_chance(difference: Difference, again: Difference | None) -> Difference:
    """Return `difference` with its cause decided by `again`, the difference between two resumed runs.

    The cause is chance if the two resumed runs differ from each other at the same point as, or earlier than,
    the first resumed run and the original run.
    """
    if not difference.may_be_chance:
        return difference
    is_chance = again is not None and _order(again) <= _order(difference)
    cause: Cause = "chance" if is_chance else "missing"
    return replace(difference, cause=cause, what=_EXPLANATIONS[cause])


def read_traces(folder: Path, part: ProbePart) -> dict[int, Trace]:
    """Return the traces of one run by rank; `compare` reads the lines of a trace one at a time."""
    files = {int(file.stem.rpartition("-")[2]): file for file in folder.glob(f"{part}-*.jsonl")}
    return {rank: _read_trace(file) for rank, file in sorted(files.items())}


def _read_trace(file: Path) -> Trace:
    def states() -> Iterator[Noted]:
        with file.open() as lines:
            next(lines)
            for line in lines:
                yield Noted(**json.loads(line))

    with file.open() as lines:
        head = json.loads(next(lines))
    return Trace(kinds=head["kinds"], states=states(), warnings=tuple(head["warnings"]))


def _order(difference: Difference) -> tuple[int, int]:
    return difference.step, _MOMENTS.index(difference.moment)


def _compare_rank(rank: int, first: Trace, second: Trace) -> Difference | None:
    before: tuple[Noted, Noted] | None = None
    for one, other in zip_longest(first.states, second.states):
        if one is None and before is None:
            break
        if one is None or other is None or (one.moment, one.step) != (other.moment, other.step):
            at: Noted = one or other
            what = _EXPLANATIONS["ended early"]
            return Difference(rank=rank, step=at.step, moment=at.moment, cause="ended early", what=what)
        if one.state != other.state:
            return _explain(rank, one, other, before, {**first.kinds, **second.kinds})
        before = (one, other)
    if before is None:
        raise ConfigError(f"Rank {rank} of the first run has never called ckpt.step.", hint=_NEEDED)
    return None


def _explain(
    rank: int, one: Noted, other: Noted, before: tuple[Noted, Noted] | None, kinds: Mapping[str, Kind]
) -> Difference:
    """Return the difference between two states of the same moment; the runs were equal up to `before`."""
    names = [n for n in {**one.state, **other.state} if one.state.get(n) != other.state.get(n)]
    notes = ((name, (one.state.get(name, ""), other.state.get(name, ""))) for name in names)
    tensor = next((name for name, both in notes if any(n.startswith("tensor ") for n in both)), None)
    ranked = sorted(names, key=lambda name: _RANKING.index(_group(name, kinds)))
    cause = _cause(one, before, ranked, kinds)
    return Difference(
        rank=rank,
        step=one.step,
        moment=one.moment,
        names=tuple(ranked[:MAX_NAMES]),
        count=len(ranked),
        first=one.state.get(ranked[0]),
        second=other.state.get(ranked[0]),
        first_tensor=tensor,
        cause=cause,
        what=_sentence(cause, ranked, kinds),
    )


_RANKING = ("data", "random", "settings", "other", "model", "optimizer")
"""Groups of items, each of which may explain those after it: data explain weights, not the reverse."""


def _group(name: str, kinds: Mapping[str, Kind]) -> str:
    """Return the kind of the item in a note's name, or `settings` for an optimizer's parameter groups."""
    item, _, path = name.partition(".")
    kind = kinds.get(item, "other")
    return "settings" if kind == "optimizer" and path.startswith("param_groups.") else kind


def _cause(
    one: Noted, before: tuple[Noted, Noted] | None, ranked: list[str], kinds: Mapping[str, Kind]
) -> Cause:
    if one.moment == "restored":
        return "restored otherwise"
    if one.moment == "begin" and before is not None:
        saved, _ = before
        changed = any(saved.state.get(name) != one.state.get(name) for name in ranked)
        return "changed after the step" if changed else "changed before the loop"
    groups = {_group(name, kinds) for name in ranked}
    if "data" in groups:
        return "data position"
    if "random" in groups:
        return "random numbers"
    if "settings" in groups:
        return "settings"
    if groups == {"other"} and len({_item(name) for name in ranked}) == 1:
        return "one item"
    return "missing or chance"


def _sentence(cause: Cause, ranked: list[str], kinds: Mapping[str, Kind]) -> str:
    item, streams = _item(ranked[0]), _streams(ranked, kinds)
    what = f"random numbers were drawn ({streams})" if streams else f"{item} was changed"
    return _EXPLANATIONS[cause].format(item=item, name=ranked[0], streams=streams, what=what)


def _streams(names: Iterable[str], kinds: Mapping[str, Kind]) -> str:
    """List the sources of random numbers: parts of the item `rng`, and generators that are items."""
    paths = [name.split(".") for name in names if kinds.get(_item(name)) == "random"]
    own = {path[1] for path in paths if path[0] == RNG}
    others = {f"item {path[0]}" for path in paths if path[0] != RNG}
    return "; ".join([f"item {RNG}: {', '.join(sorted(own))}"] * bool(own) + sorted(others))


def _item(name: str) -> str:
    return name.partition(".")[0]


def _change(first: str | None, second: str | None) -> str:
    """Return the change of a note, without digests, which are meaningless to the user."""
    was, now = ("not there" if note is None else _DIGEST.sub("", note) for note in (first, second))
    return f"({was}) has other bytes" if was == now else f"was {was} and is {now}"
