"""The engines of verl, FSDP1 and FSDP2, called one role after the other as its drivers do."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.errors import ConfigError, UnsupportedItem
from tests.frameworks.verl.equality import same
from tests.frameworks.verl.ranks import Ranks, Start

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(900)]
TRACKER = "latest_checkpointed_iteration.txt"
BOTH = ("actor", "critic")
COMMIT_S = 60.0
REPORTS_S = 2.5  # within which a rank that has its state reports progress to the agent


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    process = get_context("spawn").Process(target=_write_model, args=(folder,))
    process.start()
    process.join()
    return str(folder)


def _write_model(folder: Path) -> None:
    from tests.frameworks.verl.program import write_model

    write_model(folder)


class Training:
    """Groups of ranks, in place of those before, and the folder that verl's driver would name."""

    def __init__(self, ranks: Ranks, model: str, folder: Path) -> None:
        self._ranks, self._model, self.folder = ranks, model, folder
        self._roles: list[str] = []
        self._num_groups = 0

    def start(
        self,
        *groups: dict[str, int],
        settings: dict[str, Any] | None = None,
        strategy: str = "fsdp2",
        **ckpt: Any,
    ) -> None:
        import ray

        self._ranks.kill()
        self._roles = sorted(role for roles in groups for role in roles)
        for roles in groups:
            self._num_groups += 1
            self._ranks.start(
                Start(
                    roles=tuple(sorted(roles)),
                    num_ranks=max(roles.values()),
                    strategy=strategy,
                    checkpoint=ckpt,
                    environment={"RAY_CKPT_VERL": json.dumps(settings or {})},
                    address=ray.get_runtime_context().gcs_address,
                    model=self._model,
                    meeting=str(self.folder.parents[1] / f"meet-{self._num_groups}"),
                )
            )
        for role in reversed(self._roles):
            self._ranks.call(role, "reset")

    def each(self, method: str, *args: Any) -> dict[str, list[Any]]:
        return {role: self._ranks.call(role, method, *args) for role in self._roles}

    def save(self, step: int, *roles: str, keep: int | None = None) -> None:
        for role in roles or self._roles:
            self._ranks.call(role, "save", str(self.folder / f"global_step_{step}" / role), step, keep)

    def resume(self, *, pause_s: float = 0.0) -> int:
        """Load the step that verl's function finds, as a driver does; return it, or 0.

        The driver takes `pause_s` between two roles.
        """
        found = self._ranks.call("actor", "latest", str(self.folder))[0]
        if found is None:
            return 0
        for role in self._roles:
            self._ranks.call(role, "load", f"{found}/{role}")
            time.sleep(pause_s)
        return int(found.rpartition("_")[2])


@pytest.fixture
def training(ranks: Ranks, model: str, tmp_path: Path) -> Iterator[Training]:
    yield Training(ranks, model, tmp_path / "runs" / "run")
    ranks.kill()


def test_groups_of_their_own_commit_together(training: Training) -> None:
    """The ranks die after the actor's save of step 4 and before the critic's: step 2 comes back for both."""
    settings = {"parts": {"actor": 2, "critic": 2}, "storage_path": str(training.folder.parent), "run": "run"}
    training.start({"critic": 2}, {"actor": 2}, settings=settings)
    assert training.resume() == 0
    training.each("train", [1, 2])
    training.save(2)
    at_2, losses, at_4 = training.each("state"), training.each("train", [3, 4]), training.each("state")
    training.save(4, "actor")

    training.start({"critic": 2}, {"actor": 2}, settings=settings)
    assert training.resume(pause_s=REPORTS_S) == 2 and same(training.each("state"), at_2)
    assert training.each("train", [3, 4]) == losses and same(training.each("state"), at_4), "bit for bit"
    training.save(4)
    assert (training.folder / TRACKER).read_text() == "4"
    assert [(c.step, c.world_size) for c in Catalog(training.folder).lineage] == [(2, 4), (4, 4)]

    settings["parts"] = {"actor": 1, "critic": 2}
    training.start({"critic": 2}, {"actor": 1}, settings=settings)
    assert training.resume() == 4
    for role, states in training.each("state").items():
        for name in ("model", "moments", "rate"):
            assert same(states[0][name], at_4[role][0][name]), (role, name)


def test_fsdp1_resumes_bit_for_bit_and_becomes_fsdp2(training: Training) -> None:
    """On the CPU, FSDP1 gives no whole tensors after verl's save, so that losses are compared."""
    training.start({"actor": 2, "critic": 2}, strategy="fsdp")
    training.each("train", [1, 2])
    training.save(2)
    losses = training.each("train", [3, 4, 5])
    assert [c.step for c in Catalog(training.folder).lineage] == [2]

    training.start({"actor": 2, "critic": 2}, strategy="fsdp")
    assert training.resume() == 2
    assert training.each("train", [3, 4, 5]) == losses, "bit for bit"

    training.start({"actor": 2, "critic": 2}, strategy="fsdp2")
    assert training.resume() == 2
    for role, found in training.each("train", [3, 4, 5]).items():
        for rank, values in enumerate(found):
            assert values == pytest.approx(losses[role][rank], rel=1e-4), (role, rank)


def test_the_tracker_names_steps_that_have_committed_alone(training: Training) -> None:
    """With async_save, verl writes no tracker; a tracker that claims more than the log is corrected."""
    tracker = training.folder / TRACKER
    training.start({"actor": 1}, settings={"keep_last": 2}, async_save=True)
    training.each("train", [1, 2])
    training.save(2)
    end_s = time.monotonic() + COMMIT_S
    while not tracker.exists():
        assert time.monotonic() < end_s, "the tracker is written after the commit"
        time.sleep(0.05)
    assert tracker.read_text() == "2" and [c.step for c in Catalog(training.folder).lineage] == [2]

    tracker.write_text("99")
    (training.folder / "global_step_99").mkdir()
    training.start({"actor": 1}, settings={"keep_last": 2})
    assert training.resume() == 2 and tracker.read_text() == "2"
    training.each("train", [3])
    with pytest.raises(ConfigError, match='Set "keep_last": 5'):
        training.save(3, keep=5)
    training.save(3, keep=2)
    assert tracker.read_text() == "3", "written before save_checkpoint returns"


@pytest.mark.parametrize(
    ("checkpoint", "kind", "message"),
    [
        ({"save_contents": ["model", "hf_model"]}, UnsupportedItem, "hf_model"),
        ({"save_contents": ["model"]}, ConfigError, "load_contents"),
        ({"save_contents": ["extra"], "load_contents": ["extra"]}, ConfigError, "with the model"),
    ],
)
def test_contents_that_would_be_left_out_are_refused(
    training: Training, checkpoint: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        training.start({"actor": 1}, **checkpoint)


def test_a_critic_with_a_group_that_no_part_names_is_refused(training: Training) -> None:
    training.start({"critic": 1})
    with pytest.raises(ConfigError, match="worker group of its own"):
        training.save(1)
