"""A run of a GPT that has really learned, written without Ray: as the demo leaves one, in a second or two.

Two ranks have each saved half of every tensor. The second session resumed from the middle of the first,
as after a failure.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jobs.model.gpt import GPT, next_byte_loss
from jobs.model.text import ByteLoader, cut_blocks, read_text, split_text
from ray_ckpt.format import records
from ray_ckpt.format.tree import TensorRef
from ray_ckpt.types import Level, Slice
from tests.support.sample_run import RECORD_S, START_S, RankState, RunLog, SampleCheckpoint, assemble

EVERY_STEPS = 6
STEPS, FAILED_AT, RESUMED_AT = 30, 24, 18  # of checkpoints: the one of step 24 is made twice
DURABLE = (6, 18, 30)
WORLD_SIZE = 2
SIZES = {"layers": 2, "width": 32, "heads": 4, "context": 64}


def write_trained_run(storage: Path, name: str = "gpt-with-failure") -> Path:
    """Train and save below `storage`; gives the run's folder."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors, and a machine that others use
    try:
        return _train_run(storage / name)
    finally:
        torch.set_num_threads(num_threads)


def _train_run(folder: Path) -> Path:
    torch.manual_seed(0)
    model = GPT(**SIZES, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    blocks = cut_blocks(split_text(read_text())[0], SIZES["context"])
    loader = ByteLoader(blocks, batch_size=8)
    log = RunLog(folder=folder)
    log.create()
    log.session(1, after=None, world_size=WORLD_SIZE, num_nodes=2)
    before: dict[str, Any] = {}
    saved: dict[int, SampleCheckpoint] = {}

    def train(session: int, first: int, last: int) -> None:
        batches = iter(loader)
        for step in range(first, last + 1):
            loss = next_byte_loss(model, *next(batches))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if step % EVERY_STEPS == 0:
                saved[step] = _save(log, session, step, model, optimizer, float(loss.detach()))
                if step in DURABLE:
                    log.drain(saved[step])
            if step == RESUMED_AT:
                before.update(
                    copy.deepcopy(
                        {n: o.state_dict() for n, o in (("m", model), ("o", optimizer), ("l", loader))}
                    )
                )

    train(1, 1, FAILED_AT)
    model.load_state_dict(before["m"])
    optimizer.load_state_dict(before["o"])
    loader.load_state_dict(before["l"])
    last_s = START_S + RECORD_S * log.seq
    ended = records.Ended(
        session=1,
        cause="node",
        step=FAILED_AT + 3,
        first_at_s=START_S + 2 * RECORD_S + 5,
        last_at_s=last_s,
        stalled_s=0.4,
    )
    log.append(ended)
    log.append(records.Epoch())
    log.session(2, after=saved[RESUMED_AT], world_size=WORLD_SIZE, num_nodes=2)
    log.append(records.Restored(session=2, seconds=0.5, read_bytes={"peer": 1e6, "local": 1e6}))
    train(2, RESUMED_AT + 1, STEPS)
    return log.folder


def _save(
    log: RunLog, session: int, step: int, model: GPT, optimizer: torch.optim.Optimizer, loss: float
) -> SampleCheckpoint:
    """Commit the state, by `WORLD_SIZE` ranks; gives the checkpoint."""
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    state: dict[str, Any] = {}
    for parameter, values in optimizer.state.items():
        name = names[id(parameter)]
        state[name] = {kind: TensorRef(f"optimizer.state.{name}.{kind}") for kind in values}
        tensors |= {f"optimizer.state.{name}.{kind}": value for kind, value in values.items()}
    items = {
        "model": {name: TensorRef(f"model.{name}") for name in model.state_dict()},
        "optimizer": {"state": state, "param_groups": [{"lr": 1e-2, "params": list(names.values())}]},
    }
    ranks = [
        RankState(slices=[part for k, t in tensors.items() for part in _part(k, t, rank)], items=items)
        for rank in range(WORLD_SIZE)
    ]
    metrics = {"loss": loss}
    saved = assemble(log.attempt(session, step), ranks, num_nodes=2, metrics=metrics)
    seconds = 0.01 * (1 + step % 3)  # somebody's measurements
    commit = records.Commit2(
        session=session,
        step=step,
        attempt=saved.attempt.attempt,
        level=Level.REPLICATED,
        replicas=1,
        world_size=WORLD_SIZE,
        num_nodes=2,
        size_bytes=saved.size_bytes,
        root_digest=saved.root_digest,
        metrics=metrics,
        stall_s=seconds,
        capture_s=2 * seconds,
        local_s=4 * seconds,
        replicate_s=3 * seconds,
    )
    log.append(commit)
    return saved


def _part(key: str, tensor: Tensor, rank: int) -> Iterator[tuple[Slice, bytes]]:
    """Return a rank's part of a tensor: half of the rows; a scalar whole or not at all."""
    item, _, name = key.partition(".")
    shape = tuple(tensor.shape)
    whole = Slice(
        item=item, name=name, dtype="F32", global_shape=shape, offset=(0,) * len(shape), shape=shape
    )
    if not shape:
        if rank == 0:
            yield whole, tensor.numpy().tobytes()
        return
    start, end = (shape[0] * k // WORLD_SIZE for k in (rank, rank + 1))
    part = replace(whole, offset=(start, *whole.offset[1:]), shape=(end - start, *shape[1:]))
    yield part, tensor[start:end].detach().contiguous().numpy().tobytes()
