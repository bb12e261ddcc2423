"""Modules whose state_dict has copies of what is in memory, as hooks make that divide fused weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import ray_ckpt
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
