"""A training that is the same however many ranks share it, so that one process without shards can check it.

Each step uses the next global batch of a data set of NUM_SAMPLES, in float64, without random numbers; ranks
have equal shares, so the mean of their gradients is that of the batch. Only the order in which
numbers are added up differs.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ray_ckpt.data import GlobalBatchSampler, Share

NUM_SAMPLES = 50  # no multiple of the batch: epochs end within batches
GLOBAL_BATCH = 12  # equal shares for 1, 2, 3 and 4 ranks
SEED = 3
State = dict[str, Tensor]


class Model(nn.Module):
    """float64 [n, 6] to [n, 1]. Only 2 ranks have equal parts of its 10 features."""

    seen: Tensor  # int64 [NUM_SAMPLES]: how often each sample was used on the way to this state

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 10), nn.Linear(10, 1)
        self.register_buffer("seen", torch.zeros(NUM_SAMPLES, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.outer(torch.tanh(self.inner(x)))
        return y


class Regression:
    """Model, optimizer and data position: of this rank under FSDP2, or of a single process without it."""

    def __init__(self) -> None:
        is_group = dist.is_initialized()
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if is_group else (0, 1)
        generator = torch.Generator().manual_seed(SEED)
        self.inputs = torch.randn(NUM_SAMPLES, 6, generator=generator, dtype=torch.float64)
        self.targets = torch.randn(NUM_SAMPLES, 1, generator=generator, dtype=torch.float64)
        self.model = Model().double()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(0, 0.3, generator=generator)
        if is_group:
            for module in (self.model.inner, self.model.outer, self.model):
                fully_shard(module)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        sampler = GlobalBatchSampler(
            NUM_SAMPLES, global_batch=GLOBAL_BATCH, rank=self.rank, world_size=self.world_size, seed=SEED
        )
        self.batches = sampler.batches(sampler)

    def step(self, share: Share) -> None:
        """Make one optimizer step on this rank's share of a global batch."""
        used = torch.bincount(torch.tensor(share), minlength=NUM_SAMPLES)
        loss = (self.model(self.inputs[share]) - self.targets[share]).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.world_size > 1:
            dist.all_reduce(used)
        self.model.seen += used

    def full_state(self) -> State:
        """Return copies of all tensors of model and optimizer, unsharded. All ranks call this together."""
        named = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state.get(parameter, {})
            named |= {f"optimizer.{name}.{key}": tensor for key, tensor in state.items()}
        return {name: _full(tensor) for name, tensor in named.items()}


def _full(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def reference(total: int) -> State:
    """Return the state after step `total` of one process that holds everything."""
    alone = Regression()
    for _, share in zip(range(total), alone.batches, strict=False):
        alone.step(share)
    return alone.full_state()


def batch_of(step: int) -> list[int]:
    """Return the samples that all ranks together use in a step, in order."""
    sampler = GlobalBatchSampler(NUM_SAMPLES, global_batch=GLOBAL_BATCH, rank=0, world_size=1, seed=SEED)
    return list(sampler.share((step - 1) * GLOBAL_BATCH))


def seen_after(step: int) -> list[int]:
    """Return how often each sample is used in the steps up to this one, none lost and none doubled."""
    used = torch.tensor([index for done in range(1, step + 1) for index in batch_of(done)])
    return torch.bincount(used, minlength=NUM_SAMPLES).tolist()


def assert_same_bits(one: State, other: State) -> None:
    assert one.keys() == other.keys() and one
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name


def assert_same_training(one: State, other: State) -> None:
    """Equal but for the order in which float64 numbers were added up; counts are equal."""
    assert one.keys() == other.keys() and one
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-9, atol=1e-12, msg=name)
