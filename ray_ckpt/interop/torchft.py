"""Durable checkpoints of a torchft job, which one of its replica groups writes.

torchft keeps the replica groups alike: after the loss of a group the others go on, and a group that comes
back gets the live state from a peer. So a restore from a checkpoint happens only when all groups begin. In
the first step of a quorum without any progress, the first group of the quorum restores. All groups discard
that step, and torchft brings the restored state to the others in the next one. Later, if no group of a step
is the one that saves, the first group of the quorum takes over with its live state.

Data positions differ between the groups, and one group saves them all. So each step has one small collective
more, in which each group shows its position and whether it saves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from ray_ckpt.capture.items import Item
from ray_ckpt.errors import ConfigError, UnsupportedItem
from ray_ckpt.format.tree import decode_tree, encode_tree
from ray_ckpt.interop.packages import require
from ray_ckpt.trainer.checkpointer import Checkpointer

log = logging.getLogger("ray_ckpt")

PENDING = ("_healing", "_pending_state_dict")
"""Private attributes of a Manager: a peer's state was received, and waits to be loaded at the commit."""
ROW_BYTES = 4096  # of a group in the collective; the data position of a group is a few numbers
HEAD_BYTES = 3  # in a row: flags, and the number of bytes that follow
SAVES, RESTORED = 1, 2  # flags: the group saves; it has restored a checkpoint in this step


class ReplicaCheckpointer:
    """Saves and restores a torchft job; each rank of each replica group has one.

        ckpt = ReplicaCheckpointer(
            manager, connect, group=0, groups=2, data=batches, model=net, optimizer=inner
        )
        for batch in ckpt.batches():
            optimizer.zero_grad()
            ...
            ckpt.exchange()
            optimizer.step()
            ckpt.step()

    `connect` is `functools.partial(ray_ckpt.connect, run=..., storage_path=..., rank=..., world_size=...)`,
    where the rank and the number of ranks are those in the replica group. It is called when this group begins
    to save. All groups belong to one Ray job. `group` is the number of this group, the same after its
    restart, and `groups` the largest number of groups. `data` has `state_dict` and `load_state_dict`, and is
    the loader of this rank alone. Other keywords are the items of a Checkpointer, without torchft's wrappers.

    Raises ConfigError for a version of torchft that is not known, or a number that is not one of a group.
    """

    def __init__(
        self,
        manager: Any,
        connect: Callable[..., None],
        *,
        group: int,
        groups: int,
        data: Any = None,
        **items: Any,
    ) -> None:
        require("torchft", extra="torchft", owner=manager, names=PENDING)
        if not 0 <= group < groups:
            raise ConfigError(f"There is no group {group} among {groups}.", hint="Count groups from 0.")
        self._manager = manager
        self._connect = connect
        self._group, self._groups = group, groups
        self._positions = _Positions(group, data)
        self._items = {**items, "manager": manager, "positions": self._positions}
        self._device = _device_of(items)
        self._checkpointer: Checkpointer | None = None  # None: another group saves
        self._before = 0  # the step that was complete at the last exchange
        self._takes_over = False  # if the step of the last exchange is committed
        manager.register_state_dict_fn("ray_ckpt", self._positions.load, self._positions.tree)

    @property
    def saves(self) -> bool:
        """Return whether this group is the one that saves."""
        return self._checkpointer is not None

    def batches(self) -> Iterator[Any]:
        """Yield the batches of `data`, epoch after epoch, from the position that was restored or received.

        Ends when an iteration of `data` has no batch. With `use_async_quorum=False` call `next` on it after
        `zero_grad`, which receives the position.
        """
        is_empty = False
        while not is_empty:
            is_empty, self._positions.is_moved = True, False
            batches = iter(self._positions.data)
            if self._checkpointer is not None:
                self._checkpointer.restore_random_state()
            for batch in batches:
                is_empty = False
                yield batch
                if self._positions.is_moved:
                    break

    def exchange(self) -> None:
        """Call this between the backward pass and the step of torchft's optimizer, on every rank.

        Waits for the other groups of the quorum. The first call in a job restores.
        """
        manager = self._manager
        is_first = manager.participating_rank() == 0  # waits for the quorum, so it comes first
        restored = manager.current_step() == 0 and self._begin(is_first)
        self._before, self._takes_over = manager.current_step(), False
        if self._checkpointer is not None:
            with self._checkpointer.lock():  # the commit may load a peer's state
                pass
        rows = self._rows(restored)
        manager.allreduce(rows, reduce_op=ReduceOp.SUM).wait()
        if manager.errored() is not None:
            return
        flags = rows[:, 0].tolist()
        if restored or any(flag & RESTORED for flag in flags):
            manager.report_error(_Discarded("a checkpoint was restored; the step is done again from there"))
            return
        self._takes_over = is_first and not self.saves and not any(flag & SAVES for flag in flags)
        self._positions.note(rows)

    def step(self, metrics: Mapping[str, Any] | None = None) -> bool:
        """Call this after the step of torchft's optimizer, on every rank; save if a save is due.

        Returns False, and does nothing, if torchft did not commit the step. The number of a step is the
        manager's.
        """
        step = self._manager.current_step()
        if step <= self._before:
            return False
        restored = self._takes_over and self._take_over(step)
        if self._checkpointer is not None and not restored:
            self._checkpointer.step(step, metrics)
        return True

    def finish(self) -> None:
        """Save the last step unless it is saved, and wait until the save is committed: training is over."""
        if self._checkpointer is not None:
            self._checkpointer.finish()
        self.close()

    def close(self) -> None:
        """End this group's saves; wait until the last one is safe on this node."""
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close()

    # -- the group that saves ------------------------------------------------------------------------

    def _begin(self, is_first: bool) -> bool:
        """Begin to save before the first step, if this group is the first; return True if it has restored."""
        if not is_first or self.saves:
            if not is_first:
                self.close()
            return False
        self._connect()
        self._checkpointer = Checkpointer(**self._items)
        info = self._checkpointer.restore()
        if info is None:
            return False
        if info.step == 0:
            raise UnsupportedItem(
                "torchft does not bring the state of init_from to the other groups, since it has no step.",
                hint="Load the weights in each group, with ray_ckpt.open(URI).load(...), before training.",
            )
        self._manager._healing, self._manager._pending_state_dict = False, None  # PENDING: older than this
        return True

    def _take_over(self, step: int) -> bool:
        """Begin to save with the live state after `step`; return True if a later checkpoint was restored."""
        log.warning("no group of step %d saves: group %d takes over", step, self._group)
        self._connect(resume="auto")
        self._checkpointer = Checkpointer(**self._items)
        if self._checkpointer.resume_step() >= step:  # this group was cut off while others went on
            return self._checkpointer.restore() is not None
        self._checkpointer.restore(live_step=step - 1)
        return False

    def _rows(self, restored: bool) -> Tensor:
        """Return the collective's tensor, with this group's row filled."""
        rows = torch.zeros(self._groups, ROW_BYTES, dtype=torch.uint8)
        flags = SAVES * self.saves + RESTORED * restored
        position = self._positions.encoded()
        row = bytes([flags]) + len(position).to_bytes(HEAD_BYTES - 1, "little") + position
        rows[self._group, : len(row)] = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        return rows.to(self._device)


class _Discarded(Exception):
    """Makes torchft skip a step; it is no failure."""


class _Positions(Item):
    """The data position of each replica group by its number, as the last steps have shown them."""

    per_rank = True

    def __init__(self, group: int, data: Any) -> None:
        self.data = data
        self.is_moved = False  # since the last iterator of `data` was made
        self._group = str(group)
        self._begun = None if data is None else data.state_dict()
        self._states: dict[str, Any] = {}

    def tree(self) -> Any:
        return dict(self._states)

    def load(self, tree: Mapping[str, Any]) -> None:
        """Set all positions; batches of this group that counted nowhere are its next ones again."""
        self._states = dict(tree)
        if self.data is not None:
            self.data.load_state_dict(tree.get(self._group, self._begun))
            self.is_moved = True

    def encoded(self) -> bytes:
        """Return the position of this group; UnsupportedItem if it does not fit into a row."""
        if self.data is None:
            return b""
        found = encode_tree(self.data.state_dict())
        if len(found) > ROW_BYTES - HEAD_BYTES:
            raise UnsupportedItem(
                f"The position in `data` takes {len(found)} of {ROW_BYTES - HEAD_BYTES} bytes.",
                hint="Use ray_ckpt.data.GlobalBatchSampler(...).batches(loader), whose position is a number.",
            )
        return found

    def note(self, rows: Tensor) -> None:
        """Note the positions in `rows`; a group that did not participate has none there."""
        for group, row in enumerate(rows.cpu()):
            data = row.numpy().tobytes()
            size = int.from_bytes(data[1:HEAD_BYTES], "little")
            if size:
                self._states[str(group)] = decode_tree(data[HEAD_BYTES : HEAD_BYTES + size])


def _device_of(items: Mapping[str, Any]) -> torch.device:
    """Return the device of the parameters, which the process group of the gradients works on."""
    modules = (obj for obj in items.values() if isinstance(obj, nn.Module))
    return next((p.device for module in modules for p in module.parameters()), torch.device("cpu"))
