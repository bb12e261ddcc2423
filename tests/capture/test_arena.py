"""The arena is a safetensors file behind a page with the attempt that it holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from ray_ckpt.capture.arena import Arena
from ray_ckpt.capture.walk import DTYPE_NAMES
from ray_ckpt.errors import StateError
from ray_ckpt.format.shard import RankLayout, build_rank_layout
from ray_ckpt.types import ARENA_PAGE_BYTES, Slice

ATTEMPT, LATER = "0123456789abcdef", "fedcba9876543210"


def sliced(name: str, tensor: torch.Tensor) -> Slice:
    return Slice(
        item="model",
        name=name,
        dtype=DTYPE_NAMES[tensor.dtype],
        global_shape=tuple(tensor.shape),
        offset=(0,) * tensor.dim(),
        shape=tuple(tensor.shape),
    )


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {
        str(dtype).removeprefix("torch."): torch.randint(0, 2, (3, 5), generator=generator).to(dtype)
        for dtype in DTYPE_NAMES
    }
    strided = torch.randn(6, 4, generator=generator).t()[::2]
    return {**made, "scalar": torch.tensor(7.5), "empty": torch.zeros(0, 3), "strided": strided}


def make(tmp_path: Path, state: dict[str, torch.Tensor]) -> tuple[Path, RankLayout]:
    layout = build_rank_layout(sliced(name, tensor) for name, tensor in state.items())
    path = tmp_path / "arena"
    with path.open("wb") as file:
        file.truncate(ARENA_PAGE_BYTES + layout.size_bytes)
    return path, layout


def laid_out(path: Path, layout: RankLayout) -> Arena:
    arena = Arena(str(path))
    arena.lay_out(layout)
    return arena


def fill(arena: Arena, layout: RankLayout, state: dict[str, torch.Tensor], attempt: str) -> None:
    arena.begin()
    for placed, view in zip(layout.slices, arena.views, strict=True):
        with torch.no_grad():
            view.copy_(state[placed.slice.name])
    arena.seal(attempt)


def test_what_is_captured_is_a_safetensors_file(tmp_path: Path) -> None:
    state = tensors()
    path, layout = make(tmp_path, state)
    fill(laid_out(path, layout), layout, state, ATTEMPT)
    data = path.read_bytes()
    assert data[:16].decode() == ATTEMPT and not data[16:ARENA_PAGE_BYTES].strip(b"\0")
    shard = tmp_path / "shard.safetensors"
    shard.write_bytes(data[ARENA_PAGE_BYTES:])
    with safe_open(shard, framework="pt") as file:
        assert sorted(file.keys()) == sorted(f"model.{name}" for name in state)
        for name, tensor in state.items():
            found = file.get_tensor(f"model.{name}")
            assert found.dtype == tensor.dtype and found.shape == tensor.shape
            assert torch.equal(found.contiguous().view(-1).view(torch.uint8), _bytes(tensor))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_while_it_is_written_an_arena_belongs_to_no_attempt(tmp_path: Path) -> None:
    state = {"w": torch.ones(4)}
    path, layout = make(tmp_path, state)
    arena = laid_out(path, layout)
    fill(arena, layout, state, ATTEMPT)
    assert arena.mapping.page.sealed == ATTEMPT
    arena.begin()
    assert arena.mapping.page.sealed == "" and path.read_bytes()[:16] == b"\0" * 16
    fill(arena, layout, state, LATER)
    assert path.read_bytes()[:16].decode() == LATER


def test_a_new_layout_puts_the_header_and_no_seal(tmp_path: Path) -> None:
    state = {"w": torch.ones(4)}
    path, layout = make(tmp_path, state)
    fill(laid_out(path, layout), layout, state, ATTEMPT)
    laid_out(path, layout)
    data = path.read_bytes()
    assert data[:16] == b"\0" * 16
    assert data[ARENA_PAGE_BYTES:].startswith(layout.shards[0].header)


def test_a_smaller_shard_fits_and_a_larger_one_is_refused(tmp_path: Path) -> None:
    path, layout = make(tmp_path, {"w": torch.ones(4)})
    arena = laid_out(path, layout)
    arena.lay_out(build_rank_layout([sliced("v", torch.ones(2))]))
    assert len(arena.views) == 1 and arena.views[0].shape == (2,)
    with pytest.raises(StateError, match="larger arena"):
        arena.lay_out(build_rank_layout([sliced("w", torch.ones(40))]))


def test_an_empty_state_has_an_arena_too(tmp_path: Path) -> None:
    path, layout = make(tmp_path, {})
    fill(laid_out(path, layout), layout, {}, ATTEMPT)
    assert path.read_bytes()[ARENA_PAGE_BYTES:] == layout.shards[0].header


def test_a_file_that_is_too_small_is_an_error(tmp_path: Path) -> None:
    path, _ = make(tmp_path, {"w": torch.ones(4)})
    path.write_bytes(b"")
    with pytest.raises((ValueError, OSError)):
        Arena(str(path))
