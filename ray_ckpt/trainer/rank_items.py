"""The items of one rank: registered objects, their state for a save, and warnings about missing items.

In an accumulation window gradients wait for an optimizer step, so a save is postponed to the window's end.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from ray_ckpt.capture.adapt import adapt
from ray_ckpt.capture.classes import classes_of
from ray_ckpt.capture.gradients import GradientsItem, Window
from ray_ckpt.capture.items import BaseOptimizerItem, Item, has_own_state_dict
from ray_ckpt.capture.predict import with_predictions
from ray_ckpt.capture.rng import RngItem
from ray_ckpt.capture.still import StillSlices
from ray_ckpt.capture.unregistered import find_gaps
from ray_ckpt.capture.walk import Walked, walk
from ray_ckpt.collector import collector_paused
from ray_ckpt.config import RunOptions
from ray_ckpt.errors import ConfigError
from ray_ckpt.format.shard import RankLayout
from ray_ckpt.format.tree import encode_tree
from ray_ckpt.texts import did_you_mean
from ray_ckpt.trainer.link import Identity

log = logging.getLogger("ray_ckpt")

RESERVED_ITEM = re.compile(r"rng|gradients|rank\d+")  # own items, and prefixes of per-rank names
MAX_POSTPONED = 1_000  # steps of an accumulation window; gradients that wait longer are never used
MAX_STEPPED = 100  # steps of an optimizer while a save waits: most windows end with the first step


def with_item(objects: Mapping[str, Any], name: str, obj: Any) -> dict[str, Any]:
    """Return `objects` with one more. Raises ConfigError for the name, UnsupportedItem for the object."""
    if RESERVED_ITEM.fullmatch(name) or name in objects or not name.isidentifier():
        raise ConfigError(f"{name!r} cannot be the name of an item.", hint="Use another identifier.")
    objects = {**objects, name: obj}
    if not isinstance(obj, torch.optim.Optimizer):  # its parameters may belong to a later item
        adapt(name, obj, {n: o for n, o in objects.items() if isinstance(o, nn.Module)})
    return objects


class RankItems:
    """The items of a Checkpointer after its restore: registered objects, random state, gradients."""

    def __init__(self, objects: Mapping[str, Any], identity: Identity, options: RunOptions) -> None:
        """Make an item of each object. Raises UnsupportedItem for an object that cannot be saved.

        Raises ConfigError if an option such as `static_items` has a name that is no object's. In a group with
        parts the names may be those of objects of another part.
        """
        self.objects = objects
        self._identity = identity
        self._is_full = options.replicate == "full"
        self.walked: Walked | None = None  # the result of the previous walk
        self._num_postponed = 0  # steps for which a save has waited
        self._stepped_before = 0  # steps of an optimizer when the save was due
        owners = {n: o for n, o in objects.items() if isinstance(o, nn.Module | nn.Parameter)}
        self.items: dict[str, Item] = {name: adapt(name, obj, owners) for name, obj in objects.items()}
        self.items["rng"] = RngItem()
        self.stepped = [item.stepped for item in self.items.values() if isinstance(item, BaseOptimizerItem)]
        plain = [stepped for stepped in self.stepped if isinstance(stepped, torch.optim.Optimizer)]
        self.window = Window(plain, [o for o in owners.values() if isinstance(o, nn.Module)])
        if not identity.parts:  # else the item may belong to another part
            _check_names("static_items", options.static_items, objects)
            _check_names("remote_items", options.remote_items, self.items)
        self.still = StillSlices(
            self.stepped, options.static_items, identity.world_size, is_full=self._is_full
        )
        if options.partial_grads:
            self.items["gradients"] = GradientsItem(
                owners, window=self.window, world_size=identity.world_size
            )

    @property
    def hyperparameter_owners(self) -> dict[str, Any]:
        """The registered objects, with the optimizer inside that of an engine, by item name."""
        inner = {n: i.optimizer for n, i in self.items.items() if isinstance(i, BaseOptimizerItem)}
        return {**self.objects, **inner}

    def hold(self, items: Mapping[str, Item]) -> None:
        """Replace the items of the user; those of ray_ckpt itself stay."""
        own = {name: item for name, item in self.items.items() if name not in self.objects}
        before = self.items
        if any(item.rules != before[name].rules for name, item in items.items() if name in before):
            self.walked = None  # its slices have the ranks that hold them, and may be kept
        self.objects, self.items = items, {**items, **own}

    @collector_paused()
    def walk(self) -> Walked:
        ranks = self._identity.ranks
        self.walked = walk(
            self.items,
            rank=self._identity.rank,
            world_size=len(ranks),
            first=ranks[0],
            before=self.walked,
        )
        return self.walked

    @collector_paused()
    def predicted_layout(self, walked: Walked) -> RankLayout:
        """Return the layout of this rank's shards once every optimizer has its state."""
        whole = with_predictions(walked, self.items, ranks=self._identity.ranks)
        owned = whole.owned(self._identity.rank, self._identity.node_ranks, full=self._is_full)
        return self.still.layout(owned)

    @collector_paused()
    def preflight(self) -> RankLayout:
        """Encode the state once, so that errors of a save are found before training; predict the layout."""
        walked = self.walk()
        encode_tree(dict(walked.trees), kept=walked.kept)
        if self._identity.rank == self._identity.ranks[0]:
            self.still.warn_of_own(walked.slices, self.objects)
        return self.predicted_layout(walked)

    def encode_state(self, step: int, walked: Walked) -> bytes:
        """Return the bytes of this rank's state file after `step`."""
        identity = self._identity
        return encode_tree(
            {
                "step": step,
                "world_size": identity.world_size,
                **({"parts": [asdict(part) for part in identity.parts]} if identity.parts else {}),
                "classes": classes_of(self.items),
                "items": dict(walked.trees),
            },
            kept=walked.kept,
        )

    @property
    def is_postponing(self) -> bool:
        """True while a save waits for the end of the window."""
        return self._num_postponed > 0

    def is_accumulating(self) -> bool:
        """Return whether gradients that would not be saved wait for an optimizer step."""
        is_open = "gradients" not in self.items and self.window.is_open()
        return is_open or any(item.is_accumulating() for item in self.items.values())

    def postpone(self) -> bool:
        """Return True if the save that is due now waits for the end of the window."""
        if not self.is_accumulating():
            self._num_postponed = 0
        else:
            if not self._num_postponed:
                self._stepped_before = self.window.num_steps
            self._num_postponed += 1
            num_stepped = self.window.num_steps - self._stepped_before
            if self._num_postponed > MAX_POSTPONED or num_stepped >= MAX_STEPPED:
                waited = self._num_postponed - 1
                log.warning("gradients have waited for %d steps; the save waits no longer", waited)
                self.window.ignore_unused()
                self._num_postponed = 0
        return self.is_postponing

    @contextmanager
    def moved(self) -> Iterator[None]:
        """Move tensors inside this context; nothing here keeps their old memory."""
        self.walked = None
        with self.window.moved():
            yield

    def close(self) -> None:
        self.window.close()
        self.walked = None  # the tensors in it may occupy an accelerator's memory


def start_gap_search(objects: Mapping[str, Any]) -> Future[tuple[str, ...]]:
    """Log a warning for each object of the process that a resumed run would lack; the result is all of them.

    None for ready items, of which the trainer hands over the states that it chooses. The search takes 0.1 s
    of a core, in a thread, for use while the rank waits for the service and for other ranks.
    """
    thread = ThreadPoolExecutor(1, "ray_ckpt-gaps")
    search = thread.submit(_gap_warnings, objects)
    thread.shutdown(wait=False)
    return search


def _gap_warnings(objects: Mapping[str, Any]) -> tuple[str, ...]:
    if any(isinstance(obj, Item) for obj in objects.values()):
        return ()
    missing = "is not registered: pass it to the Checkpointer, or resuming lacks it"
    early = ": make its iterator after ckpt.steps, and register its position"
    unregistered, iterators = find_gaps(objects)
    warnings = (
        *(f"{phrase} {missing}" for phrase in unregistered),
        *(phrase + early for phrase in iterators),
        *(
            f"the optimizer {name} has a state_dict of its own: only state and param_groups are saved"
            for name, obj in objects.items()
            if has_own_state_dict(obj)
        ),
    )
    for warning in warnings:
        log.warning("%s", warning)
    return warnings


def _check_names(option: str, names: Iterable[str], known: Mapping[str, Any]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{option} has {name!r}, which is not registered.",
                hint=did_you_mean(name, sorted(known)),
                option=option,
            )
