"""Saves of a state of which most is frozen: what is copied, written, sent and uploaded after the first save.

Measured through the whole service on a Ray of two nodes, which have staging folders of their own on one disk.
Nineteen twentieths of the state are frozen parameters; AdamW trains the rest. The bytes of a save are those
of files that are new in a folder; a linked file is not. A state without frozen parameters is saved in turn.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from jobs.bench.context import Context
from jobs.bench.row import Reference, Row
from jobs.bench.training import SameBytes, Saves
from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.format.names import is_shard_name

HOME, PEER = "head", "peer"  # the node of the rank, and the node that holds its copies
FROZEN = 0.95  # of the state's bytes
TENSOR_BYTES = 16 << 20  # of a frozen parameter
NUM_TRAINED = 8  # trained parameters, each with two moments
WAIT_S = 300.0  # longest wait of a save for the upload of the save before
TIERS = {"written": "to the disk of its node", "sent": "to another node", "uploaded": "to the storage path"}


class Partly(nn.Module):
    """Frozen parameters, and parameters that take `trained_bytes` with their moments."""

    def __init__(self, frozen_bytes: int, trained_bytes: int) -> None:
        super().__init__()
        whole, rest = divmod(frozen_bytes, TENSOR_BYTES)
        sizes = [TENSOR_BYTES] * whole + [rest] * bool(rest)
        frozen = (nn.Parameter(torch.rand(size // 4), requires_grad=False) for size in sizes)
        self.base = nn.ParameterList(frozen)
        each = trained_bytes // 4 // 3 // NUM_TRAINED
        self.head = nn.ParameterList(nn.Parameter(torch.rand(each)) for _ in range(NUM_TRAINED))


class Job:
    """A run of one rank; every save finds the trained part changed."""

    def __init__(self, folder: Path, name: str, *, size_bytes: int, frozen: float) -> None:
        frozen_bytes = int(size_bytes * frozen)
        self.model = Partly(frozen_bytes, size_bytes - frozen_bytes)
        self.optimizer = torch.optim.AdamW(self.model.head.parameters(), foreach=False)
        self._train()
        self._uri = f"{folder}/storage/{name}"
        items = {"model": self.model, "optimizer": self.optimizer}
        options: dict[str, Any] = {"replicas": 1, "remote_every": 1, "overlap": False}
        options |= {"max_block_s": WAIT_S, "retire_grace_s": 0.0}
        self.saves = Saves(items, folder, name, **options)
        self.saves.wait_ready()
        self.folders = {
            "written": folder / "staging" / HOME,
            "sent": folder / "staging" / PEER,
            "uploaded": folder / "storage" / name,
        }
        self.changed_bytes = 0  # of the trained part, with what describes it, in the last save

    def _train(self) -> None:
        for param in self.model.head:
            param.grad = torch.ones_like(param)
        self.optimizer.step()

    def sample(self) -> dict[str, float]:
        """Save and wait for the upload; return seconds of the phases and bytes by tier."""
        self._train()
        before = {tier: _files(folder) for tier, folder in self.folders.items()}
        capture_s = self.saves.save()
        self.saves.ckpt.wait("durable", timeout_s=WAIT_S)
        info = Catalog(self._uri).checkpoints[-1]
        after = {tier: _files(folder) for tier, folder in self.folders.items()}
        new = {tier: after[tier].keys() - before[tier].keys() for tier in after}
        found = {tier: float(sum(after[tier][file] for file in files)) for tier, files in new.items()}
        folder = self.folders["uploaded"] / "ray_ckpt" / "checkpoints" / info.id.directory
        others = (path.stat().st_size for path in folder.iterdir() if not is_shard_name(path.name))
        trained = 3 * sum(param.nbytes for param in self.model.head)
        self.changed_bytes = trained + sum(others)
        return {**found, "capture": capture_s, "local": info.local_s or 0.0}

    def wait_deleted(self) -> None:
        """Wait until the disk has nothing else to do: deletions of large files hold up an fsync."""
        end_s = time.monotonic() + WAIT_S
        while any(info.state == "retired" for info in Catalog(self._uri).list(all=True)):
            if time.monotonic() > end_s:
                raise TimeoutError(f"retired checkpoints are not deleted after {WAIT_S} s")
            time.sleep(0.05)
        os.sync()

    def close(self) -> None:
        self.saves.close()


def _files(folder: Path) -> Mapping[tuple[int, int], int]:
    """Return the sizes of the files of checkpoints in a folder, by inode and time of the last write."""
    found: dict[tuple[int, int], int] = {}
    for path in folder.rglob("*-of-*"):
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            found[stat.st_ino, stat.st_mtime_ns] = stat.st_size
    return found


def rows(context: Context) -> Iterator[Row]:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(context.temporary())
        stack.enter_context(LocalCluster(folder / "staging", [PEER]))
        jobs: dict[str, Job] = {}
        for name, frozen in (("plain", 0.0), ("partly", FROZEN)):
            jobs[name] = Job(folder, name, size_bytes=context.size_bytes, frozen=frozen)
            stack.callback(jobs[name].close)
            jobs[name].sample()  # the first save writes everything
        memcpy = SameBytes(jobs["plain"].model, jobs["plain"].optimizer, torch.get_num_threads())
        stack.callback(memcpy.close)
        samples: dict[str, list[dict[str, float]]] = {name: [] for name in jobs}
        copies_s = []
        for _ in range(context.repeat):
            for name, job in jobs.items():
                for other in jobs.values():
                    other.wait_deleted()
                samples[name].append(job.sample())
            copies_s.append(memcpy())
        yield from _rows(samples, tuple(copies_s), jobs["partly"].changed_bytes)


def _rows(
    samples: Mapping[str, list[dict[str, float]]], copies_s: tuple[float, ...], changed_bytes: int
) -> Iterator[Row]:
    def of(name: str, what: str, scale: float = 1.0) -> tuple[float, ...]:
        return tuple(sample[what] / scale for sample in samples[name])

    memcpy = Reference(name="memcpy of everything", samples=copies_s)
    changed = Reference(name="changed bytes and manifest", samples=(changed_bytes / 1e6,))
    for tier, where in TIERS.items():
        yield Row(
            name=f"delta-{tier}",
            what=f"bytes of a save {where}, {FROZEN:.0%} frozen",
            unit="MB",
            samples=of("partly", tier, 1e6),
            reference=changed,
            reach="<= 1.05",
        )
    yield Row(
        name="delta-local",
        what="captured state to fsynced files",
        unit="s",
        samples=of("partly", "local"),
        reference=Reference(name="nothing frozen", samples=of("plain", "local")),
        reach="<= 0.15",
    )
    yield Row(
        name="delta-capture",
        what="blocking capture",
        unit="s",
        samples=of("partly", "capture"),
        reference=memcpy,
        reach="<= 0.1",
    )
    yield Row(
        name="delta-none",
        what="blocking capture, nothing frozen",
        unit="s",
        samples=of("plain", "capture"),
        reference=memcpy,
        reach="<= 1.15",
    )
