"""A driver of verl: its trainer's own methods save and load its own worker groups, with actor and critic."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_ckpt.catalog.catalog import Catalog
from tests.frameworks.verl.equality import same

pytestmark = [
    pytest.mark.usefixtures("cluster"),
    pytest.mark.timeout(1200),  # each group of ranks imports verl first
    pytest.mark.filterwarnings("default"),
]
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Callable[[int], Any]]:
    """Return a function that starts `n` ranks and their driver, in place of those before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tests.frameworks.verl.driver import Driver, start
        from tests.frameworks.verl.program import config_of, write_model
    model = write_model(tmp_path / "model")
    drivers: list[Driver] = []

    def run(num_ranks: int) -> Driver:
        while drivers:
            drivers.pop().kill()
        configs = {role: config_of(role, model, strategy="fsdp2") for role in ("actor", "critic")}
        drivers.append(Driver(start(configs, num_ranks), tmp_path / "runs" / "run"))
        return drivers[-1]

    yield run
    while drivers:
        drivers.pop().kill()


def test_a_driver_whose_ranks_die_between_two_saves_repeats_the_step(
    drive: Callable[[int], Any], tmp_path: Path
) -> None:
    """Step 6 is saved by the actor and not by the critic: step 4 comes back for both, with its data."""
    run = tmp_path / "runs" / "run"
    driver = drive(2)
    driver.train(4)
    assert (run / TRACKER).read_text() == "4"
    at_4 = driver.states()
    managers = {state["manager"] for states in at_4.values() for state in states}
    assert managers == {"ray_ckpt.interop.verl.manager"}
    driver.train(6, save_every=99)
    at_6, losses = driver.states(), driver.losses[-2:]
    assert not same(at_4["critic"][0]["moments"], at_6["critic"][0]["moments"])
    driver.actor_rollout_wg.save_checkpoint(str(run / "global_step_6" / "actor"), None, 6)

    again = drive(2)
    assert again.global_steps == 4 and same(again.states(), at_4)
    again.train(6)
    assert again.losses == losses and same(again.states(), at_6), "bit for bit, with the same samples"
    assert (run / TRACKER).read_text() == "6"
    assert [c.step for c in Catalog(run).lineage] == [2, 4, 6]
    assert not list(run.rglob("*_rank_*.pt")), "verl itself saves nothing"

    alone = drive(1)
    assert alone.global_steps == 6
    for role, (state,) in alone.states().items():
        for name in ("model", "moments", "rate", "steps"):
            assert same(state[name], at_6[role][0][name]), (role, name)
