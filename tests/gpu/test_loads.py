"""Tensors on a CUDA device get the saved bytes, whatever their form and whatever the device is doing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ray_ckpt.capture.walk import DTYPES
from ray_ckpt.errors import MismatchError
from tests.capture.test_load import Saved, items_of

HOST, DEVICE = torch.device("cpu"), torch.device("cuda")
BUSY_CYCLES = 1_000_000_000  # of the device's clock: about half a second
LARGE = 40 << 20  # bytes: more than one slab of a restore


def kinds_of_tensors(device: torch.device, *, filled: bool) -> dict[str, Tensor]:
    made = {}
    for name, dtype in DTYPES.items():
        for shape in ((), (0, 2), (5,), (3, 4)):
            values = torch.arange(1, 1 + math.prod(shape)).view(shape) if filled else torch.zeros(shape)
            made[f"{name}{len(shape)}{math.prod(shape)}"] = values.to(dtype)
    numbers = torch.Generator().manual_seed(0)
    made["large"] = torch.randint(0, 256 if filled else 1, (LARGE,), dtype=torch.uint8, generator=numbers)
    image = torch.rand(2, 3, 4, 4, generator=numbers) * filled
    made["channels_last"] = image.to(memory_format=torch.channels_last)
    square = torch.rand(6, 6, generator=numbers) * filled
    there = {name: tensor.to(device) for name, tensor in made.items()}
    return {**there, "column": square.to(device)[:, 2], "turned": square.to(device).t()}


def raw(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(DEVICE, DEVICE), (HOST, DEVICE), (DEVICE, HOST)])
def test_every_kind_of_tensor_comes_back_in_place(
    tmp_path: Path, saved_on: torch.device, loaded_on: torch.device
) -> None:
    first, second = kinds_of_tensors(saved_on, filled=True), kinds_of_tensors(loaded_on, filled=False)
    places = [tensor.data_ptr() for tensor in second.values()]
    reader = Saved(tmp_path).save(items_of(state=first)).load(items_of(state=second))
    assert not reader.damage and not reader.rejected
    for name, tensor in second.items():
        assert torch.equal(raw(tensor), raw(first[name])), name
    assert [tensor.data_ptr() for tensor in second.values()] == places


@pytest.mark.parametrize("has_own_stream", [False, True])
def test_work_enqueued_before_does_not_overwrite_what_is_loaded(tmp_path: Path, has_own_stream: bool) -> None:
    right = torch.arange(LARGE // 4, dtype=torch.float32, device=DEVICE)
    saved = Saved(tmp_path).save(items_of(state={"x": right}))
    live = torch.zeros_like(right)
    torch.cuda.synchronize()
    own, current = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(own if has_own_stream else current):
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
        live.fill_(-1)
        saved.load(items_of(state={"x": live}))
        doubled = live * 2
    torch.cuda.synchronize()
    assert torch.equal(live, right) and torch.equal(doubled, right * 2)


def test_training_goes_on_after_a_restore_in_inference_mode(tmp_path: Path) -> None:
    model, other = (nn.Linear(8, 8).to(DEVICE) for _ in range(2))
    saved = Saved(tmp_path).save(items_of(model=model))
    with torch.inference_mode():
        saved.load(items_of(model=other))
    other(torch.ones(1, 8, device=DEVICE)).sum().backward()
    assert torch.equal(other.weight, model.weight) and other.weight.grad is not None


def test_tensors_in_the_same_memory_need_the_same_bytes(tmp_path: Path) -> None:
    saved = Saved(tmp_path).save(items_of(state={"a": torch.ones(4), "b": torch.zeros(4)}))
    memory = torch.full((4,), 5.0, device=DEVICE)
    with pytest.raises(MismatchError, match=r"state\.b: has the memory of state\.a here, and other bytes"):
        saved.load(items_of(state={"a": memory, "b": memory.view(2, 2).view(4)}))
    assert memory.tolist() == [5.0] * 4
