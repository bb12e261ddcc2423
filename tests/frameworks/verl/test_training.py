"""Actor and critic of verl, trained by its own engines and saved by its own trainer's methods."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.errors import ConfigError

pytestmark = [
    pytest.mark.usefixtures("cluster"),
    pytest.mark.timeout(1200),  # each group of ranks imports verl first
    pytest.mark.filterwarnings("default"),
]
TRACKER = "latest_checkpointed_iteration.txt"
BOTH = ("actor", "critic")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def drive(tmp_path: Path, runs: Path) -> Iterator[Callable[..., Any]]:
    """Return a function that starts groups of ranks and their driver, in place of those before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tests.frameworks.verl.program import Driver, config_of, start, write_model
    model = write_model(tmp_path / "model")
    drivers: list[Driver] = []

    def run(
        *groups: dict[str, int],
        run: str = "run",
        strategy: str = "fsdp2",
        settings: dict[str, Any] | None = None,
        save_contents: list[str] | None = None,
        **trainer: Any,
    ) -> Driver:
        while drivers:
            drivers.pop().kill()
        checkpoint = {"async_save": trainer.get("async_save", False)}
        if save_contents is not None:
            checkpoint |= {"save_contents": save_contents, "load_contents": save_contents}
        environment = {} if settings is None else {"RAY_CKPT_VERL": json.dumps(settings)}
        started: dict[str, Any] = {}
        for roles in groups:
            configs = {role: config_of(role, model, strategy=strategy, **checkpoint) for role in roles}
            started |= start(configs, max(roles.values()), environment)
        drivers.append(Driver(started, runs / run, **trainer))
        return drivers[-1]

    yield run
    while drivers:
        drivers.pop().kill()


def same(one: Any, other: Any) -> bool:
    from tests.frameworks.verl.program import same

    return same(one, other)


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_a_step_that_the_critic_lacks_does_not_exist(
    drive: Callable[..., Any], runs: Path, strategy: str
) -> None:
    """Ranks die between the two saves: the older step comes back for both, and training repeats exactly."""
    driver = drive({"actor": 2, "critic": 2}, strategy=strategy)
    driver.train(4)
    assert (runs / "run" / TRACKER).read_text() == "4"
    at_4 = driver.states()
    assert {s["manager"] for role in BOTH for s in at_4[role]} == {"ray_ckpt.interop.verl.manager"}
    driver.train(6, save_every=99)
    at_6, losses = driver.states(), driver.losses[-2:]
    assert not same(at_4["critic"][0]["moments"], at_6["critic"][0]["moments"])
    driver.actor_rollout_wg.save_checkpoint(str(runs / "run" / "global_step_6" / "actor"), None, 6)

    again = drive({"actor": 2, "critic": 2}, strategy=strategy)
    assert again.global_steps == 4 and same(again.states(), at_4)
    again.train(6)
    assert again.losses == losses and same(again.states(), at_6), "bit for bit"
    assert (runs / "run" / TRACKER).read_text() == "6"
    assert [c.step for c in Catalog(runs / "run").lineage] == [2, 4, 6]
    assert not list((runs / "run").rglob("*_rank_*.pt")), "verl itself saves nothing"

    alone = drive({"actor": 1, "critic": 1}, strategy=strategy)
    assert alone.global_steps == 6
    for role, (state,) in alone.states().items():
        for name in ("model", "moments", "rate", "steps"):
            assert same(state[name], at_6[role][0][name]), (role, name)


def test_groups_of_their_own_commit_together(drive: Callable[..., Any], runs: Path) -> None:
    settings = {"parts": {"actor": 2, "critic": 1}, "storage_path": str(runs), "run": "run"}
    driver = drive({"critic": 1}, {"actor": 2}, settings=settings)
    driver.train(2)
    at_2 = driver.states()
    assert (runs / "run" / TRACKER).read_text() == "2"
    driver.train(4, save_every=99)
    at_4 = driver.states()
    driver.actor_rollout_wg.save_checkpoint(str(runs / "run" / "global_step_4" / "actor"), None, 4)

    again = drive({"critic": 1}, {"actor": 2}, settings=settings)
    assert again.global_steps == 2 and same(again.states(), at_2)
    again.train(4)
    assert same(again.states(), at_4), "bit for bit"
    checkpoints = Catalog(runs / "run").lineage
    assert [(c.step, c.world_size) for c in checkpoints] == [(2, 3), (4, 3)]

    swapped = {**settings, "parts": {"actor": 1, "critic": 2}}
    other = drive({"critic": 2}, {"actor": 1}, settings=swapped)
    assert other.global_steps == 4
    for role, states in other.states().items():
        assert same(states[0]["model"], at_4[role][0]["model"]), role
        assert same(states[0]["moments"], at_4[role][0]["moments"]), role


def test_the_tracker_names_a_step_that_has_committed(drive: Callable[..., Any], runs: Path) -> None:
    """With async_save verl writes no tracker. A tracker that differs from the log is corrected."""
    tracker = runs / "run" / TRACKER
    driver = drive({"actor": 1}, async_save=True, settings={"keep_last": 2})
    driver.train(4)
    driver.kill()  # the nodes complete what was handed over
    again = drive({"actor": 1}, async_save=True, settings={"keep_last": 2}, max_actor_ckpt_to_keep=2)
    assert again.global_steps == 4 and tracker.read_text() == "4"
    tracker.write_text("99")
    (runs / "run" / "global_step_99").mkdir()
    last = drive({"actor": 1}, settings={"keep_last": 2}, max_actor_ckpt_to_keep=5)
    assert last.global_steps == 4 and tracker.read_text() == "4"
    with pytest.raises(ConfigError, match='Set "keep_last": 5'):
        last.train(6)


def test_what_would_be_left_out_is_refused(drive: Callable[..., Any]) -> None:
    with pytest.raises(Exception, match="hf_model"):
        drive({"actor": 1}, save_contents=["model", "hf_model"])
    with pytest.raises(Exception, match="worker group of its own"):
        driver = drive({"actor": 1}, {"critic": 1})
        driver.train(2)


def test_the_position_in_the_data_decides_between_two_steps(drive: Callable[..., Any], runs: Path) -> None:
    """A driver that died between a commit and data.pt would begin the data again; the older step is taken."""
    driver = drive({"actor": 1})
    driver.train(4)
    (runs / "run" / "global_step_4" / "data.pt").unlink()
    again = drive({"actor": 1})
    assert again.global_steps == 2
    again.train(4)
    assert again.losses == driver.losses[-2:]
    assert [c.step for c in Catalog(runs / "run").lineage] == [2, 4]
