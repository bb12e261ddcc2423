"""The replica watch on a CUDA device: sums are computed there, in the order of the training's own work."""

from __future__ import annotations

import random

import pytest
import torch

from ray_ckpt.capture import replica_watch
from ray_ckpt.capture.replica_watch import WINDOWS, ReplicaWatch, device_sums
from ray_ckpt.capture.walk import LiveSlice
from tests.capture.test_replica_watch import SUMMED, flip, live, reports, state

DEVICE = torch.device("cuda")
NUM_FLIPS = 20
BUSY_CYCLES = 1_000_000_000  # of the device's clock: about half a second


def there(slices: list[LiveSlice]) -> list[LiveSlice]:
    return [live(s.slice.name, s.tensor.to(DEVICE)) for s in slices]


@pytest.mark.parametrize("dtype", SUMMED)
def test_a_device_sums_as_a_host_does(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_watch, "SUM_ELEMENTS", 1000)
    raw = torch.randint(0, 256, (5003 * dtype.itemsize,), dtype=torch.uint8)
    flats = [raw.view(dtype), raw.view(dtype)[:77], raw.view(dtype)[77:]]
    assert device_sums([flat.to(DEVICE) for flat in flats]).tolist() == device_sums(flats).tolist()


@pytest.mark.parametrize("seed", range(NUM_FLIPS))
def test_a_flipped_bit_is_found_once_in_a_rotation(seed: int) -> None:
    calm, other = there(state(seed)), there(state(seed))
    changed = random.Random(seed).choice([s for s in other if s.nbytes])
    flip(changed.tensor, random.Random(seed).randrange(changed.nbytes * 8))
    found = [step for step in range(WINDOWS) if reports(calm, step) != reports(other, step)]
    assert len(found) == 1


def test_the_host_does_not_wait_and_a_step_after_it_is_not_seen() -> None:
    slices = [live("w", torch.arange(1e6, device=DEVICE))]
    right = reports(slices, 3)
    torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
    found = ReplicaWatch(slices).digests(slices, 3, 0)
    found.add_now(frozenset())
    assert not torch.cuda.current_stream().query(), "the device had ended; nothing shows that the host waits"
    slices[0].tensor.add_(1)
    found.complete()
    assert found.reports() == right
    assert reports(slices, 3) != right
