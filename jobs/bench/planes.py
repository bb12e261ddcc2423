"""Byte planes on the storage path: bytes and core time for a state that was trained, beside zstd alone.

The example GPT is trained with AdamW, since the exponents of a new model are not those of a trained one. Its
weights with both moments are the state in fp32; the same values rounded are the state in bf16. The time is
the CPU time of one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import zstandard

from jobs.bench.context import Context
from jobs.bench.row import Reference, Row, core_rates
from jobs.model.gpt import GPT, next_byte_loss
from jobs.model.text import cut_blocks, read_text
from ray_ckpt.format import zstd

STEPS, QUICK_STEPS = 1_000, 5
WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 192, 4, 4, 64, 8  # 1.9 million parameters: 40 ms a step on a core
LEVEL = 1
RATIOS = {"fp32": 0.86, "bf16": 0.70}  # stored bytes over raw ones, at most
UP_GB_PER_S, BACK_GB_PER_S = 0.6, 1.5  # of a core, at least
MIN_BYTES = 64 << 20  # each sample takes the state so often that it has this size


def rows(context: Context) -> Iterator[Row]:
    state = _trained(QUICK_STEPS if context.quick else STEPS)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        raw = b"".join(tensor.to(dtype).view(torch.uint8).numpy().tobytes() for tensor in state)
        yield from _rows(name, raw, context)


def _trained(num_steps: int) -> list[torch.Tensor]:
    """Return the weights of the example's GPT after so many steps, then both moments of each."""
    torch.manual_seed(0)
    model = GPT(width=WIDTH, layers=LAYERS, heads=HEADS, context=CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    blocks = cut_blocks(read_text(None), CONTEXT)
    for step in range(num_steps):
        chosen = torch.randint(len(blocks), (BATCH,), generator=torch.Generator().manual_seed(step))
        batch = torch.stack([torch.as_tensor(blocks[int(number)]).long() for number in chosen])
        loss: Any = next_byte_loss(model, batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    states = optimizer.state.values()
    moments = [state[key] for key in ("exp_avg", "exp_avg_sq") for state in states]
    return [tensor.detach().flatten() for tensor in (*model.parameters(), *moments)]


def _rows(name: str, raw: bytes, context: Context) -> Iterator[Row]:
    stored = b"".join(zstd.encode([raw], LEVEL))
    table = zstd.parse_table(stored, len(stored))
    frames = memoryview(stored)[: int(table.starts[-1])]
    assert b"".join(zstd.decode([frames], table, range(table.num_frames))) == raw
    alone = zstandard.ZstdCompressor(level=LEVEL)
    compressed = [alone.compress(raw[start : start + zstd.FRAME_BYTES]) for start in _starts(raw)]
    opened = zstandard.ZstdDecompressor()
    yield Row(
        name=f"planes-{name}-stored",
        what=f"stored over raw bytes of a trained state in {name}, beside zstd {LEVEL} on the raw bytes",
        unit="of raw",
        samples=(len(stored) / len(raw),),
        reference=Reference(name="limit", samples=(RATIOS[name],)),
        reach="<= 1",
        note=f"zstd alone: {sum(map(len, compressed)) / len(raw):.3f}",
    )
    times = 1 if context.quick else -(-MIN_BYTES // len(raw))
    sides: tuple[tuple[str, float, Callable[[], object], Callable[[], object]], ...] = (
        (
            "up",
            UP_GB_PER_S,
            lambda: [None for _ in zstd.encode([raw], LEVEL)],
            lambda: [None for start in _starts(raw) if alone.compress(raw[start : start + zstd.FRAME_BYTES])],
        ),
        (
            "back",
            BACK_GB_PER_S,
            lambda: [None for _ in zstd.decode([frames], table, range(table.num_frames))],
            lambda: [None for frame in compressed if opened.decompress(frame)],
        ),
    )
    for side, least, own, other in sides:
        found = [core_rates(work, len(raw), times, context.repeat) for work in (own, other)]
        yield Row(
            name=f"planes-{name}-{side}",
            what=f"GB/s of a core {'into' if side == 'up' else 'out of'} byte planes, {name}",
            unit="GB/s",
            samples=found[0],
            reference=Reference(name="limit", samples=(least,)),
            reach=">= 1",
        )
        yield Row(
            name=f"planes-{name}-{side}/zstd",
            what=f"the same with zstd {LEVEL} on the raw bytes",
            unit="GB/s",
            samples=found[1],
        )


def _starts(raw: bytes) -> range:
    return range(0, len(raw), zstd.FRAME_BYTES)
