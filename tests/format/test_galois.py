"""P and Q over the members of a stripe, and members computed from them."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ckpt.format.galois import Bytes, StripeSum, solve
from ray_ckpt.types import MAX_PARITY_DATA


def _sum(members: list[Bytes], nbytes: int, index: int, left_out: tuple[int, ...] = ()) -> Bytes:
    """Return the sum of members that are given from the highest exponent to exponent 0."""
    found = StripeSum(nbytes, index)
    for exponent, data in zip(reversed(range(len(members))), members, strict=True):
        found.begin()
        if exponent not in left_out:
            cut = data.size // 3
            found.add(0, data[:cut].data)
            found.add(cut, data[cut:].data)
    return found.finish()


def _slow_product(a: int, b: int) -> int:
    product = 0
    for bit in range(8):
        product ^= (a << bit) * (b >> bit & 1)
    for bit in reversed(range(8, 15)):
        product ^= (0x11D << (bit - 8)) * (product >> bit & 1)
    return product


def test_q_is_the_sum_with_powers_of_2_as_weights() -> None:
    members = [np.arange(at, at + 256, dtype=np.uint16).astype(np.uint8) for at in range(5)]
    for at, found in enumerate(_sum(members, 256, 1)):
        wanted, weight = 0, 1
        for data in reversed(members):
            wanted, weight = wanted ^ _slow_product(int(data[at]), weight), _slow_product(weight, 2)
        assert found == wanted


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=7), seed=st.integers(0, 2**32))
def test_any_two_losses_are_computed_also_of_members_of_different_sizes(sizes: list[int], seed: int) -> None:
    chance, longest = np.random.default_rng(seed), max(sizes)
    members = [chance.integers(0, 256, size, np.uint8) for size in sizes]
    padded = [np.pad(data, (0, longest - data.size)) for data in members]
    stored = [_sum(members, longest, index) for index in (0, 1)]
    exponents = list(reversed(range(len(sizes))))
    for count in (1, 2):
        for lost in combinations(exponents, count):
            for sums in combinations((0, 1), count):
                left = {i: stored[i] ^ _sum(members, longest, i, left_out=lost) for i in sums}
                for exponent, found in solve(lost, left).items():
                    assert found.tobytes() == padded[exponents.index(exponent)].tobytes()


def test_of_the_largest_stripe_any_two_members_are_computed() -> None:
    members = [np.full(8, 7 * at + 1, np.uint8) for at in range(MAX_PARITY_DATA)]
    stored = [_sum(members, 8, index) for index in (0, 1)]
    for lost in combinations(range(MAX_PARITY_DATA), 2):
        left = {i: stored[i] ^ _sum(members, 8, i, left_out=lost) for i in (0, 1)}
        for exponent, found in solve(lost, left).items():
            assert found.tobytes() == members[MAX_PARITY_DATA - 1 - exponent].tobytes()


def test_too_few_sums_are_refused() -> None:
    with pytest.raises(ValueError, match="2 lost members"):
        solve((0, 1), {0: np.zeros(8, np.uint8)})
