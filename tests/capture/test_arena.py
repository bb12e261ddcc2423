"""The arena is a safetensors file behind a page that says which attempt it holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from ray_ckpt.capture.arena import Arena
from ray_ckpt.capture.walk import DTYPE_NAMES
from ray_ckpt.errors import StateError
from ray_ckpt.format.shard import ShardLayout, build_layout
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


def make(tmp_path: Path, state: dict[str, torch.Tensor]) -> tuple[Path, ShardLayout]:
    layout = build_layout(sliced(name, tensor) for name, tensor in state.items())
    path = tmp_path / "arena"
    with path.open("wb") as file:
        file.truncate(ARENA_PAGE_BYTES + layout.size_bytes)
    return path, layout


def in_order(layout: ShardLayout, state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [state[placed.slice.name] for placed in layout.slices]


def test_what_is_captured_is_a_safetensors_file(tmp_path: Path) -> None:
    state = tensors()
    path, layout = make(tmp_path, state)
    arena = Arena(str(path), layout)
    assert arena.capture(in_order(layout, state), ATTEMPT) == layout.size_bytes
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


def test_a_capture_is_a_snapshot(tmp_path: Path) -> None:
    state = {"w": torch.ones(4, requires_grad=True)}
    path, layout = make(tmp_path, state)
    arena = Arena(str(path), layout)
    arena.capture(in_order(layout, state), ATTEMPT)
    before = path.read_bytes()
    with torch.no_grad():
        state["w"].mul_(3)
    assert path.read_bytes() == before
    arena.capture(in_order(layout, state), LATER)
    after = path.read_bytes()
    assert after[:16].decode() == LATER and after != before


def test_while_it_is_written_an_arena_belongs_to_no_attempt(tmp_path: Path) -> None:
    state = {"w": torch.ones(4)}
    path, layout = make(tmp_path, state)
    arena = Arena(str(path), layout)
    arena.capture(in_order(layout, state), ATTEMPT)
    with pytest.raises(RuntimeError):
        arena.capture([torch.ones(5)], LATER)
    assert path.read_bytes()[:16] == b"\0" * 16


def test_another_number_of_tensors_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    state = {"w": torch.ones(4)}
    path, layout = make(tmp_path, state)
    arena = Arena(str(path), layout)
    arena.capture(in_order(layout, state), ATTEMPT)
    with pytest.raises(StateError, match="has 1 slices, the state has 2"):
        arena.capture([torch.ones(4)] * 2, LATER)
    assert path.read_bytes()[:16].decode() == ATTEMPT


def test_a_new_mapping_puts_the_header_and_no_seal(tmp_path: Path) -> None:
    path, layout = make(tmp_path, {"w": torch.ones(4)})
    Arena(str(path), layout)
    data = path.read_bytes()
    assert data[:ARENA_PAGE_BYTES] == b"\0" * ARENA_PAGE_BYTES
    assert data[ARENA_PAGE_BYTES:].startswith(layout.header)


def test_an_empty_state_has_an_arena_too(tmp_path: Path) -> None:
    path, layout = make(tmp_path, {})
    Arena(str(path), layout).capture([], ATTEMPT)
    assert path.read_bytes()[ARENA_PAGE_BYTES:] == layout.header


def test_a_file_that_is_too_small_is_an_error(tmp_path: Path) -> None:
    path, layout = make(tmp_path, {"w": torch.ones(4)})
    path.write_bytes(b"")
    with pytest.raises((ValueError, OSError)):
        Arena(str(path), layout)
