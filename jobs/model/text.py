"""Bytes of real text as training batches, in an order that a checkpoint can continue exactly.

Every rank reads the text itself, so it must be the same on every node: a folder all nodes see, or the
default, the sources of the Python standard library. There is no prefetch: the loader's position counts only
the samples that the training loop has consumed.
"""

from __future__ import annotations

import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

MAX_TEXT_BYTES = 4 * 2**20  # enough for a small model, read in milliseconds by every rank
HELD_OUT = 0.1  # share of the text at its end, which is never trained on

Batch: TypeAlias = tuple[Tensor, Tensor]


def read_text(source: str | None = None, max_bytes: int = MAX_TEXT_BYTES) -> Tensor:
    """Return the first `max_bytes` bytes of a file, or of the files of a folder by name: uint8 [num_bytes].

    Without `source`: the standard library's own top-level modules. Hidden files are left out.
    Raises FileNotFoundError if there is nothing at `source`.
    """
    if source is None:
        files: Iterable[Path] = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    else:
        root = Path(source)
        if not root.exists():
            raise FileNotFoundError(f"no text at {source}: it must be a file or folder that every node sees")
        files = [root] if root.is_file() else sorted(visible_files(root))
    text = bytearray()
    for file in files:
        with file.open("rb") as f:
            text += f.read(max_bytes - len(text))
        if len(text) == max_bytes:
            break
    return torch.tensor(np.frombuffer(text, dtype=np.uint8))


def visible_files(root: Path) -> Iterator[Path]:
    """Return all files below a folder, except hidden files and files in hidden folders."""
    for path in root.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
        if path.is_file() and not hidden:
            yield path


def split_text(text: Tensor, held_out: float = HELD_OUT) -> tuple[Tensor, Tensor]:
    """Split the text into the part to train on and its last part, held out for evaluation."""
    cut = len(text) - int(len(text) * held_out)
    return text[:cut], text[cut:]


def cut_blocks(text: Tensor, context: int) -> Tensor:
    """Return a view of the text as samples, uint8 [num_blocks, context + 1].

    Each sample starts at the last byte of the one before, so that every byte but the first is predicted once.
    Raises ValueError if not one sample fits.
    """
    if len(text) < context + 1:
        raise ValueError(
            f"the text is too short: {len(text)} bytes, and one sample takes {context + 1}; "
            "give a longer text (--data) or a smaller --context"
        )
    return text.unfold(0, context + 1, context)


def as_batch(blocks: Tensor) -> Batch:
    """Return (inputs, targets), int64 [num_blocks, context]: the target of a byte is the next byte."""
    blocks = blocks.long()
    return blocks[:, :-1], blocks[:, 1:]


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, num_blocks: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the permutation of the blocks in one epoch."""
    return np.random.default_rng((seed, epoch)).permutation(num_blocks)


class ByteLoader:
    """An endless iterator over the batches of one rank.

    The n-th block of an epoch depends on (seed, epoch, n) alone. A global batch is the next `batch_size *
    world_size` samples; rank r takes the samples r, r + world_size, ... of the batch. The state, counted in
    global samples, is therefore the same on all ranks and valid for another world size. Samples that do not
    fill a global batch at the end of an epoch are dropped.
    """

    def __init__(
        self, blocks: Tensor, *, batch_size: int, rank: int = 0, world_size: int = 1, seed: int = 0
    ) -> None:
        self.blocks = blocks
        self.rank = rank
        self.world_size = world_size
        self.global_batch = batch_size * world_size
        self.seed = seed
        self.epoch = 0
        self.position = 0
        if len(blocks) < self.global_batch:
            raise ValueError(
                f"the text is too short: {len(blocks)} samples, and a global batch takes {self.global_batch} "
                f"({batch_size} on each of {world_size} workers); give a longer text or a smaller batch"
            )
        shape = "x".join(str(n) for n in blocks.shape)
        self.text = f"{zlib.crc32(blocks.numpy().tobytes()):08x}-{shape}"

    def __iter__(self) -> Iterator[Batch]:
        while True:
            if self.position + self.global_batch > len(self.blocks):
                self.epoch, self.position = self.epoch + 1, 0
            start, end = self.position, self.position + self.global_batch
            order = epoch_order(self.seed, self.epoch, len(self.blocks))
            mine = torch.from_numpy(order[start + self.rank : end : self.world_size])
            self.position = end  # before handing out: a checkpoint taken now counts this batch as used
            yield as_batch(self.blocks[mine])

    def state_dict(self) -> dict[str, Any]:
        return {"text": self.text, "seed": self.seed, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position and in the order of `state`. Raise ValueError if its text differs."""
        if state["text"] != self.text:
            raise ValueError(
                f"the checkpoint was trained on other text or --context ({state['text']}, not {self.text}); "
                "give the same --data and --context, or another --name for a new run"
            )
        self.seed, self.epoch, self.position = state["seed"], state["epoch"], state["position"]
