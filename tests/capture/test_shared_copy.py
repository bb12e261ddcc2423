"""Copies that a thread beside training begins and helpers end."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from ray_ckpt.capture import shared_copy
from ray_ckpt.capture.shared_copy import MAX_SHARES, MIN_SHARE_BYTES, Helpers, Pair, SharedCopy

SECOND = 1.0


def random_pairs(seed: int) -> list[Pair]:
    """Return sources of many sizes and layouts, with zeroed targets."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    sources = [
        torch.randn(draw.choice([0, 1, 1000, 300_000, 3_000_000]), generator=generator) for _ in range(40)
    ]
    sources += [torch.randn(2000, 1500, generator=generator).t(), torch.randn((), generator=generator)]
    sources += [torch.nn.Parameter(torch.randn(1500, 1700, generator=generator)), torch.arange(2_000_000)]
    draw.shuffle(sources)
    return [(torch.zeros_like(source, memory_format=torch.contiguous_format), source) for source in sources]


@pytest.mark.parametrize("num_helpers", [0, 1, 3])
def test_every_byte_is_copied_whoever_copies(num_helpers: int) -> None:
    pairs = random_pairs(num_helpers)
    copy = SharedCopy(pairs)
    helpers = [threading.Thread(target=copy.help) for _ in range(num_helpers)]
    for helper in helpers:
        helper.start()
    copy.run()
    for target, source in pairs:
        assert torch.equal(target, source)
        assert not target.requires_grad
    for helper in helpers:
        helper.join()


def test_a_large_tensor_is_shared_too() -> None:
    source = torch.randn(MIN_SHARE_BYTES)  # of 4 bytes each
    assert SharedCopy([(torch.zeros_like(source), source)]).num_left == 4


def test_the_number_of_shares_is_bounded() -> None:
    source = torch.zeros(2 * MAX_SHARES * MIN_SHARE_BYTES, dtype=torch.uint8)
    pairs = list(
        zip(*(torch.split(one, 1_000_000) for one in (torch.empty_like(source), source)), strict=True)
    )
    assert SharedCopy(pairs).num_left <= MAX_SHARES


def test_small_tensors_are_copied_in_one_call() -> None:
    pairs = [(torch.zeros(8), torch.ones(8)) for _ in range(1000)]
    assert SharedCopy(pairs).num_left == 1


class Copies:
    """Calls of `copy_all` that wait until the test lets them go on, or fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Event()
        self.fails_in: set[int] = set()  # idents of threads
        monkeypatch.setattr(shared_copy, "copy_all", self)

    def __call__(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        self.begun.release()
        assert self.may_end.wait(10 * SECOND)
        if threading.get_ident() in self.fails_in:
            raise RuntimeError("no such memory")
        torch._foreach_copy_(targets, sources)


def two_shares() -> list[Pair]:
    sources = [torch.randn(MIN_SHARE_BYTES // 4) for _ in range(2)]
    return [(torch.zeros_like(source), source) for source in sources]


def test_the_copy_ends_after_its_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, pairs = Copies(monkeypatch), two_shares()
    copy = SharedCopy(pairs)
    helper, main = threading.Thread(target=copy.help), threading.Thread(target=copy.run)
    helper.start()
    assert copies.begun.acquire(timeout=10 * SECOND)
    copies_of_main = Copies(monkeypatch)
    copies_of_main.may_end.set()
    main.start()
    assert copies_of_main.begun.acquire(timeout=10 * SECOND)
    main.join(0.2)
    assert main.is_alive(), "the helper's share is not copied yet"
    copies.may_end.set()
    main.join(10 * SECOND)
    helper.join(10 * SECOND)
    assert all(torch.equal(target, source) for target, source in pairs)


def test_the_error_of_a_helper_fails_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies(monkeypatch)
    copies.may_end.set()
    copy = SharedCopy(two_shares())

    def fail() -> None:
        copies.fails_in.add(threading.get_ident())
        copy.help()

    helper = threading.Thread(target=fail)
    helper.start()
    helper.join()
    with pytest.raises(RuntimeError, match="no such memory"):
        copy.run()


def test_after_an_error_helpers_copy_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies(monkeypatch)
    copies.may_end.set()
    copies.fails_in.add(threading.get_ident())
    copy = SharedCopy(two_shares())
    with pytest.raises(RuntimeError, match="no such memory"):
        copy.run()
    assert copy.num_left == 0
    copy.help()


def test_helpers_copy_while_the_thread_beside_training_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where all cores are busy: the share that it has begun is all that training waits for."""
    pairs = [(torch.zeros(MIN_SHARE_BYTES // 4), torch.randn(MIN_SHARE_BYTES // 4)) for _ in range(8)]
    copies = Copies(monkeypatch)
    copy = SharedCopy(pairs)
    main = threading.Thread(target=copy.run)
    main.start()
    assert copies.begun.acquire(timeout=10 * SECOND)
    free = Copies(monkeypatch)
    free.may_end.set()
    helpers = Helpers()
    helpers.join(copy)
    deadline_s = time.monotonic() + 10 * SECOND
    while sum(torch.equal(target, source) for target, source in pairs) < 7:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert main.is_alive()
    copies.may_end.set()
    main.join(10 * SECOND)
    helpers.close()
    assert all(torch.equal(target, source) for target, source in pairs)


def test_closed_helpers_do_nothing() -> None:
    pairs = two_shares()
    copy, helpers = SharedCopy(pairs), Helpers()
    helpers.close()
    helpers.join(copy)
    copy.run()
    assert all(torch.equal(target, source) for target, source in pairs)
