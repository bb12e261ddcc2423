"""Accumulation windows: open or not, whatever order a loop does things in, and what of them can be saved."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ray_ckpt.capture.gradients import GradientsItem, Window, check_public
from ray_ckpt.capture.items import Item
from ray_ckpt.capture.overlap_guard import hooks_in_backward
from ray_ckpt.capture.walk import walk
from ray_ckpt.config import RunOptions
from ray_ckpt.errors import UnsupportedItem
from ray_ckpt.format.tree import decode_tree, encode_tree
from ray_ckpt.trainer.checkpointer import Checkpointer
from tests.capture.local import LocalLink, resolve_leaves


class Loop:
    """One model and what a loop does with it, one thing at a time."""

    def __init__(self, model: Any = None, **options: Any) -> None:
        self.model: Any = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)) if model is None else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, **options)
        self.window = Window([self.optimizer], [self.model])

    def backward(self) -> None:
        self.model(torch.randn(5, 4)).sum().backward()

    def step(self) -> None:
        self.optimizer.step()


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


# -- open or not --------------------------------------------------------------------------------------


@pytest.fixture
def swaps_parameters() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("swaps_parameters")
def test_a_module_is_converted_as_without_a_window(loop: Loop) -> None:
    """torch swaps its tensors, as it does under FSDP2, and refuses to swap those with weak references."""
    loop.backward()
    loop.step()
    loop.model.to(torch.float64)
    assert all(param.grad.dtype == torch.float64 for param in loop.model.parameters())
    loop.optimizer.zero_grad()
    assert not loop.window.is_open()


@pytest.mark.usefixtures("swaps_parameters")
@pytest.mark.parametrize("how", ["swapped", "replaced"])
def test_used_gradients_stay_used_when_they_are_moved(loop: Loop, how: str) -> None:
    def move() -> None:
        if how == "swapped":
            loop.model.to(torch.float64).to(torch.float32)
        for param in loop.model.parameters() if how == "replaced" else ():
            param.grad = param.grad.clone()

    loop.backward()
    with loop.window.moved():
        move()
    assert loop.window.is_open(), "nothing has used them"
    loop.step()
    with loop.window.moved():
        move()
    assert not loop.window.is_open()
    with loop.window.moved():
        loop.model[1].bias.grad.add_(1)
    assert loop.window.is_open(), "that is another gradient"


def test_two_optimizers_use_the_same_gradients_each_on_its_own() -> None:
    param = nn.Parameter(torch.ones(2))
    both = [torch.optim.SGD([param]), torch.optim.SGD([param])]
    window = Window(both)
    param.grad = torch.ones(2)
    both[0].step()
    assert window.has_unused()
    both[1].step()
    assert not window.has_unused()


def test_a_window_is_open_from_backward_to_step(loop: Loop) -> None:
    assert not loop.window.is_open()
    for _ in range(3):
        for _ in range(4):
            loop.backward()
            assert loop.window.is_open() and loop.window.has_unused()
        loop.step()
        assert not loop.window.is_open()
        loop.optimizer.zero_grad()
        assert not loop.window.is_open()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_may_be_cleared_just_before_backward(loop: Loop, set_to_none: bool) -> None:
    for _ in range(3):
        loop.optimizer.zero_grad(set_to_none=set_to_none)
        assert not loop.window.is_open()
        loop.backward()
        assert loop.window.is_open()
        loop.step()
        assert not loop.window.is_open()


def test_cleared_gradients_are_no_window_and_what_comes_on_top_is(loop: Loop) -> None:
    loop.backward()
    loop.optimizer.zero_grad(set_to_none=False)
    assert not loop.window.is_open()
    assert not loop.window.is_open()
    loop.backward()
    assert loop.window.is_open()


def test_gradients_that_are_never_cleared_are_a_window_once_there_are_more(loop: Loop) -> None:
    for _ in range(3):
        loop.backward()
        assert loop.window.is_open()
        loop.step()
        assert not loop.window.is_open()


def test_a_gradient_of_one_parameter_only_is_enough(loop: Loop) -> None:
    loop.backward()
    loop.step()
    loop.model[1].bias.grad.add_(1)
    assert loop.window.is_open()


def test_gradients_that_are_there_before_the_first_step_wait_for_nothing(loop: Loop) -> None:
    loop.backward()
    window = Window([loop.optimizer], [loop.model])  # after the warm-up of a CUDA graph, say
    assert not window.is_open()
    loop.backward()
    assert window.is_open()
    loop.step()
    assert not window.is_open()


def test_a_new_gradient_in_the_place_of_a_used_one_is_seen(loop: Loop) -> None:
    for _ in range(20):  # the same sizes, so that memory and ids are used again
        loop.backward()
        assert loop.window.is_open()
        loop.step()
        loop.optimizer.zero_grad()


def test_no_gradient_is_kept_alive(loop: Loop) -> None:
    loop.backward()
    loop.step()
    size = loop.model[0].weight.grad.untyped_storage()._weak_ref()
    loop.optimizer.zero_grad()
    gc.collect()
    assert torch.UntypedStorage._expired(size)


def test_a_step_that_the_scaler_skips_uses_nothing() -> None:
    loop, scaler = Loop(foreach=False), torch.amp.GradScaler("cpu")
    (scaler.scale(loop.model(torch.randn(5, 4)).sum()) * torch.inf).backward()
    scaler.step(loop.optimizer)
    scaler.update()
    assert loop.window.is_open()
    loop.optimizer.zero_grad()
    assert not loop.window.is_open()


def test_an_optimizer_with_a_closure_uses_what_the_closure_makes(loop: Loop) -> None:
    optimizer: Any = torch.optim.LBFGS(loop.model.parameters(), max_iter=3)
    window = Window([optimizer])
    x = torch.randn(5, 4)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = loop.model(x).square().sum()
        loss.backward()
        return loss.detach()

    optimizer.step(closure)
    assert not window.is_open()


def test_sparse_gradients_are_looked_at() -> None:
    model: Any = nn.Embedding(10, 3, sparse=True)
    optimizer: Any = torch.optim.SparseAdam(model.parameters())
    window = Window([optimizer])
    model(torch.tensor([1, 1, 4])).sum().backward()
    assert window.is_open()
    optimizer.step()
    assert not window.is_open()


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
def test_a_compiled_step_counts(loop: Loop) -> None:
    compiled = torch.compile(loop.optimizer.step, backend="eager")
    for _ in range(3):
        loop.backward()
        assert loop.window.is_open()
        compiled()
        assert not loop.window.is_open()


def test_the_hooks_hinder_nobody_and_can_be_taken_back(loop: Loop) -> None:
    assert hooks_in_backward([loop.optimizer]) == 0
    loop.window.close()
    loop.backward()
    loop.step()
    assert loop.window.is_open(), "no call has reported their use"


def test_an_optimizer_without_hooks_is_left_out(loop: Loop) -> None:
    class Wrapping(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner, self.param_groups = inner, inner.param_groups

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    window = Window([Wrapping(loop.optimizer)])
    loop.backward()
    assert not window.is_open()


# -- several optimizers -------------------------------------------------------------------------------


class Pair:
    """A discriminator, and a generator whose loss goes through it."""

    def __init__(self) -> None:
        self.discriminator, self.generator = nn.Linear(2, 1), nn.Linear(3, 2)
        self.of_d = torch.optim.SGD(self.discriminator.parameters(), lr=0.01)
        self.of_g = torch.optim.SGD(self.generator.parameters(), lr=0.01)
        self.window = Window([self.of_d, self.of_g])

    def step(self, *, set_to_none: bool = True) -> None:
        self.of_d.zero_grad(set_to_none=set_to_none)
        self.discriminator(self.generator(torch.randn(4, 3)).detach()).sum().backward()
        self.of_d.step()
        self.of_g.zero_grad(set_to_none=set_to_none)
        self.discriminator(self.generator(torch.randn(4, 3))).sum().backward()
        self.of_g.step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_left_by_another_loss_hold_a_save_up_once(set_to_none: bool) -> None:
    pair, open_after = Pair(), []
    for step in range(1, 8):
        pair.step(set_to_none=set_to_none)
        if pair.window.is_open():
            open_after.append(step)
    assert open_after == [1]
    pair.discriminator(torch.randn(1, 2)).sum().backward()
    assert pair.window.is_open(), "these came after the last step of all"


def test_the_slower_one_of_two_optimizers_has_a_window_of_its_own() -> None:
    fast, slow = Loop(), Loop()
    window = Window([fast.optimizer, slow.optimizer])
    for _ in range(3):
        for micro_step in range(4):
            slow.backward()
            if micro_step == 3:
                slow.step()
                slow.optimizer.zero_grad()
            fast.backward()
            fast.step()
            fast.optimizer.zero_grad()
            assert window.is_open() == (micro_step != 3)


# -- DTensors and FSDP2 -------------------------------------------------------------------------------


def test_gradients_that_are_dtensors_are_followed(mesh: Any) -> None:
    param = nn.Parameter(distribute_tensor(torch.ones(8, 2), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([param], lr=0.1)
    window = Window([optimizer])
    for set_to_none in (False, True, False):
        (param * param).sum().backward()  # type: ignore[no-untyped-call]
        assert window.is_open()
        optimizer.step()
        assert not window.is_open()
        grad: Any = param.grad
        grad._local_tensor += 1  # as FSDP2 adds, past the DTensor's own counter
        assert window.is_open()
        optimizer.zero_grad(set_to_none=set_to_none)
        assert not window.is_open()


def test_what_fsdp2_hides_while_it_does_not_synchronize_is_seen(mesh: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    loop = Loop(model)
    for _ in range(2):
        model.set_requires_gradient_sync(False)  # type: ignore[operator]
        loop.backward()
        assert all(param.grad is None for param in model.parameters())
        assert loop.window.is_open()
        model.set_requires_gradient_sync(True)  # type: ignore[operator]
        loop.backward()
        loop.step()
        assert not loop.window.is_open()
        loop.optimizer.zero_grad()


def test_a_step_is_saved_after_fsdp2_was_moved_under_the_lock(mesh: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    link = LocalLink(RunOptions(memory="double", every_steps=1))
    ckpt = Checkpointer(link=link, model=model, optimizer=optimizer)
    ckpt.restore()
    for step in (1, 2):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).square().sum().backward()
        optimizer.step()
        with ckpt.lock(moves=True):
            model.to(torch.float64).to(torch.float32)  # as an offload to another device does
        ckpt.step(step)
    ckpt.close()
    assert [shard.attempt.step for shard in link.sealed] == [1, 2]


def test_gradients_that_are_not_public_are_refused_by_name(mesh: Any) -> None:
    check_public({"model": nn.Linear(2, 2), "temperature": nn.Parameter(torch.zeros(1))})
    sharded = nn.Sequential(nn.Linear(4, 4))
    fully_shard(sharded[0], mesh=mesh)
    with pytest.raises(UnsupportedItem, match=r"'actor'.*fully_shard") as caught:
        check_public({"critic": nn.Linear(2, 2), "actor": sharded})
    assert "partial_grads off" in caught.value.hint
    flat = torch.distributed.fsdp.FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    with pytest.raises(UnsupportedItem, match=r"'flat'.*FullyShardedDataParallel"):
        check_public({"flat": flat})
    fused = nn.Linear(2, 2)
    fused.weight.register_post_accumulate_grad_hook(lambda param: None)  # type: ignore[no-untyped-call]
    with pytest.raises(UnsupportedItem, match=r"'fused'.*inside backward"):
        GradientsItem({"fused": fused}, window=Window([]), world_size=1)


# -- saving them --------------------------------------------------------------------------------------


def through_the_file(item: Item, other: Item, *, rank: int = 0) -> Any:
    """Return the tree as another process has it, with its tensors as `other` wants them."""
    walked = walk({"gradients": item}, rank=rank, world_size=4)
    saved = decode_tree(encode_tree(dict(walked.trees)))["gradients"]
    assert not other.problems(saved)
    tensors = {}
    for live in walked.slices:
        path = tuple(live.path[1:])
        tensors[live.slice.key] = other.allocate(path, live.slice.global_shape, live.tensor.dtype)
        tensors[live.slice.key].copy_(live.tensor)
        assert not live.changes_in_step and live.ranks == (rank,)
    return resolve_leaves(saved, tensors)


def test_a_window_goes_on_where_it_was() -> None:
    torch.manual_seed(0)
    batches = torch.randn(6, 5, 4)
    ends = []
    for is_resumed in (False, True):
        torch.manual_seed(1)
        loop = Loop()
        for x in batches[:3]:
            loop.model(x).square().sum().backward()
        if is_resumed:
            before, loop_before = GradientsItem({"m": loop.model}, window=loop.window, world_size=1), loop
            torch.manual_seed(1)
            loop = Loop()
            loop.model[0].bias.grad = torch.ones(3)  # of a run that is forgotten
            item = GradientsItem({"m": loop.model}, window=loop.window, world_size=1)
            item.load(through_the_file(before, item))
            for mine, saved in zip(loop.model.parameters(), loop_before.model.parameters(), strict=True):
                assert torch.equal(mine.grad, saved.grad) and mine.grad.stride() == saved.grad.stride()
            assert loop.window.is_open()
        for x in batches[3:]:
            loop.model(x).square().sum().backward()
        loop.step()
        ends.append([param.detach().clone() for param in loop.model.parameters()])
    assert all(map(torch.equal, *ends))


def test_a_gradient_is_laid_out_as_its_parameter() -> None:
    model = nn.ParameterDict({"w": torch.randn(6, 8).t()})
    item = GradientsItem({"m": model}, window=Window([]), world_size=1)
    new = item.allocate(("gradients", "w"), (8, 6), torch.bfloat16)
    assert (new.stride(), new.dtype, new.requires_grad) == (model["w"].stride(), torch.bfloat16, False)
    assert item.allocate(("gradients", "w"), (3,), torch.float32).shape == (3,)


def test_what_was_not_saved_is_cleared(loop: Loop) -> None:
    item = GradientsItem({"m": loop.model}, window=loop.window, world_size=1)
    loop.model[0].weight.grad = torch.ones(3, 4)
    loop.model[1].bias.grad = torch.zeros(2)
    tree = through_the_file(item, item)
    assert set(tree["gradients"]) == {"0.weight", "1.bias"}
    loop.backward()
    item.load(tree)
    assert [name for name, p in loop.model.named_parameters() if p.grad is not None] == ["0.weight", "1.bias"]


def test_a_closed_window_has_nothing_to_save_and_fits_any_world_size(loop: Loop) -> None:
    loop.backward()
    loop.step()
    saved = GradientsItem({"m": loop.model}, window=loop.window, world_size=4).tree()
    assert saved == {"world_size": 4, "gradients": {}, "layouts": {}}
    item = GradientsItem({"m": loop.model}, window=loop.window, world_size=2)
    assert not item.problems(saved)
    item.load(saved)
    assert all(param.grad is None for param in loop.model.parameters())


def test_an_open_one_does_not_fit_another_world_size_or_model(loop: Loop) -> None:
    loop.backward()
    saved = GradientsItem({"m": loop.model}, window=loop.window, world_size=4).tree()
    (problem,) = GradientsItem({"m": loop.model}, window=loop.window, world_size=2).problems(saved)
    assert "4 ranks" in problem and "2 ranks cannot" in problem
    other = nn.Sequential(nn.Linear(4, 3))
    problems = GradientsItem({"m": other}, window=loop.window, world_size=4).problems(saved)
    assert problems == [f"1.{k}: a gradient in the checkpoint, no parameter here" for k in ("weight", "bias")]


@pytest.mark.parametrize(
    ("placement", "shape"),
    [(Shard(0), (2, 8)), (Shard(1), (6, 2)), (Replicate(), (6, 8)), (Partial("sum"), (6, 8))],
)
def test_a_gradient_that_is_a_dtensor_is_saved_as_this_ranks_part(
    mesh: Any, placement: Placement, shape: tuple[int, int]
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(distribute_tensor(torch.ones(6, 8), mesh, [Shard(0)]))

    first, second, local = Model(), Model(), torch.randn(shape)
    items = [
        GradientsItem({"m": m}, window=Window([torch.optim.SGD(m.parameters())]), world_size=4)
        for m in (first, second)
    ]
    first.weight.grad = DTensor.from_local(local, mesh, [placement], shape=torch.Size([6, 8]), stride=(8, 1))
    items[1].load(through_the_file(items[0], items[1]))
    grad: Any = second.weight.grad
    assert torch.equal(grad.to_local(), local)
    assert (grad.placements, grad.shape, grad.stride()) == ((placement,), (6, 8), (8, 1))

    plain = nn.Linear(8, 6, bias=False)
    (problem,) = GradientsItem({"m": plain}, window=Window([]), world_size=4).problems(items[0].tree())
    assert problem == "weight: the mesh of its gradient is None, in the checkpoint [4]"


def test_a_closed_window_costs_microseconds_per_parameter() -> None:
    params = [nn.Parameter(torch.randn(2)) for _ in range(2000)]
    optimizer = torch.optim.SGD(params, lr=0.1)
    window = Window([optimizer])
    torch.stack(list(params)).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    best_s = min(_seconds(window.is_open) for _ in range(5))
    assert best_s < 2000 * 20e-6  # 0.4 us each on an idle core


def _seconds(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s
