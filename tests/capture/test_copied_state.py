"""Modules whose state_dict has copies of what is in memory, as hooks make that divide fused weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ray_ckpt
from ray_ckpt.config import RunOptions
from tests.capture.local import LocalLink


class Fused(nn.Module):
    """Has one weight for q and k; its state_dict has both, as copies."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.randn(4, 3))
        self.bias = nn.Parameter(torch.randn(4))
        self.register_state_dict_post_hook(self._divide)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(self._join)  # type: ignore[no-untyped-call]

    @staticmethod
    def _divide(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        whole = state.pop(f"{prefix}qk")
        state[f"{prefix}q"], state[f"{prefix}k"] = whole[::2].clone(), whole[1::2].clone()

    @staticmethod
    def _join(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if f"{prefix}q" in state:
            parts = state.pop(f"{prefix}q"), state.pop(f"{prefix}k")
            state[f"{prefix}qk"] = torch.stack(parts, dim=1).reshape(4, 3)


def test_copies_are_restored_by_load_state_dict(tmp_path: Path) -> None:
    attention = Fused()
    saved = nn.ModuleDict({"attention": attention, "out": nn.Linear(3, 2)})
    link = LocalLink()
    checkpointer = ray_ckpt.Checkpointer(link=link, model=saved)
    checkpointer.restore()
    checkpointer.save(1)
    with torch.no_grad():  # the second save has the copies of its own step
        attention.qk.add_(1)
    checkpointer.save(2)
    checkpointer.wait()
    assert set(link.tensors(2)) >= {"model.attention.q", "model.attention.k", "model.attention.bias"}

    live = nn.ModuleDict({"attention": Fused(), "out": nn.Linear(3, 2)})
    again = ray_ckpt.Checkpointer(link=link.resumed(tmp_path, 2), model=live)
    again.restore()
    for (name, one), other in zip(saved.named_parameters(), live.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_views_of_live_memory_are_filled_in_place(tmp_path: Path) -> None:
    class Viewed(Fused):
        @staticmethod
        def _divide(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
            whole = state.pop(f"{prefix}qk").detach()
            state[f"{prefix}q"], state[f"{prefix}k"] = whole[::2], whole[1::2]

    saved, live = Viewed(), Viewed()
    link = LocalLink()
    checkpointer = ray_ckpt.Checkpointer(link=link, model=saved)
    checkpointer.restore()
    checkpointer.save(1)
    checkpointer.wait()
    address = live.qk.data_ptr()
    ray_ckpt.Checkpointer(link=link.resumed(tmp_path, 1), model=live).restore()
    assert torch.equal(saved.qk, live.qk) and live.qk.data_ptr() == address


class Views(nn.Module):
    """Has parameters whose memory has other values, as conjugate and negative views, or another stride."""

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.randn(1 << 17, dtype=torch.complex64)
        self.conjugate = nn.Parameter(numbers.conj())
        self.negative = nn.Parameter(torch._neg_view(torch.randn(8)))
        self.one = nn.Parameter(torch.randn(1, 5)[:, 2])
        self.frozen = nn.Parameter(numbers.clone().conj(), requires_grad=False)


@pytest.mark.parametrize(("memory", "verify"), [("single", False), ("single", True), ("stream", False)])
def test_views_of_other_memory_are_saved(memory: str, verify: bool) -> None:
    """Torch gives no view of the bytes of such a tensor, which replicas and still slices are compared by."""
    model = Views()
    assert model.conjugate.is_conj() and model.frozen.is_conj() and model.negative.is_neg()
    assert model.one.is_contiguous() and model.one.stride() == (5,)
    link = LocalLink(RunOptions(memory=memory, verify_captures=verify, max_block_s=10.0), world_size=2)
    optimizer = torch.optim.SGD([model.conjugate, model.negative, model.one])
    checkpointer = ray_ckpt.Checkpointer(link=link, model=model, optimizer=optimizer)
    checkpointer.restore()
    for step in (53, 54):  # two windows of `replica_watch`
        assert checkpointer.save(step)
        checkpointer.wait()
    tensors = link.tensors(54)
    assert tensors.keys() & {f"model.{name}" for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if (found := tensors.get(f"model.{name}")) is not None:  # the other rank saves the rest
            assert torch.equal(found, parameter.detach().clone()), name
