"""Random schedules with linked still files keep the promises, and bugs that links make possible are found.

Every even seed has still files, also among those of the other tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ray_ckpt.core import messages as m
from ray_ckpt.core.maintenance import Maintenance
from ray_ckpt.testing.oracle import Violation
from ray_ckpt.testing.schedules import play

NUM_SEEDS = 10

Plant = Callable[[pytest.MonkeyPatch], None]


def test_even_seeds_link_still_files_and_keep_the_promises() -> None:
    num_links = {seed: play(seed).num_links for seed in range(NUM_SEEDS)}
    assert sum(num_links.values()) > 10 * NUM_SEEDS
    assert not any(num_links[seed] for seed in range(1, NUM_SEEDS, 2))


def other_names_of_bad_bytes_count(patch: pytest.MonkeyPatch) -> None:
    """A fragment that has lost a bad file with another fragment is still counted."""
    real = Maintenance.scrubbed

    def scrubbed(self: Maintenance, event: m.ScrubEnded) -> object:
        return real(self, replace(event, shared=()))

    patch.setattr(Maintenance, "scrubbed", scrubbed)


def damage_waits_for_the_next_scrub(patch: pytest.MonkeyPatch) -> None:
    """Bytes that an upload found damaged stay, and each save links them again."""
    patch.setattr(Maintenance, "suspect", lambda *args, **options: None)


@pytest.mark.parametrize(
    ("plant", "promise", "first"),
    [(other_names_of_bad_bytes_count, "P2", 52), (damage_waits_for_the_next_scrub, "P7", 144)],
)
def test_a_planted_bug_is_found(
    plant: Plant, promise: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(first)
    plant(monkeypatch)
    with pytest.raises(Violation, match=f"^{promise}: "):
        play(first)
