"""Seeds of `python -m tests.hostile.foreign`, and the checksums that they count on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ray_ckpt.errors import CorruptionError
from ray_ckpt.interop.importers import open_source
from tests.hostile.foreign import FORBIDDEN, Player, _read, outcome_of
from tests.hostile.samples import SAMPLES
from tests.support.examples import every_few


@pytest.fixture
def player(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Player:
    monkeypatch.chdir(tmp_path)
    return Player(tmp_path / "at")


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", SAMPLES)
def test_imports_of_damaged_directories_name_the_file_or_are_right(name: str, player: Player) -> None:
    found = [problem for seed in range(500) if (problem := player.play(seed, name))]
    assert not found, "\n".join(found)
    assert player.num_errors > player.num_answers / 10, "the damage has no effect"


FOUND = {
    "zero3": (63, 83),  # without the file of rank 1, a frozen parameter was imported as empty
    "universal3": (58, 68),  # 58: a place in an archive that is a negative number
    "universal2": (155,),  # errors that did not name the file, and values that took 20 s to refuse
    "dcp": (90, 108),
    "pt": (86, 124, 161),
    "torch_dist": (241,),
}


@pytest.mark.parametrize(("name", "seed"), [(name, seed) for name, seeds in FOUND.items() for seed in seeds])
def test_seeds_that_found_a_bug(name: str, seed: int, player: Player) -> None:
    assert not player.play(seed, name)


@pytest.mark.parametrize("seed", every_few(range(1, 6), 5))
@pytest.mark.parametrize("name", SAMPLES)
def test_a_few_seeds(name: str, seed: int, player: Player) -> None:
    assert not player.play(seed, name)


def test_a_flipped_bit_of_a_tensor_is_found(tmp_path: Path) -> None:
    path = tmp_path / "step_1.pt"
    base = torch.full((1000,), 7.0)
    torch.save({"whole": base, "part": base[5:9], "other": torch.ones(2)}, path)
    data = bytearray(path.read_bytes())
    data[data.index(base.numpy().tobytes()) + 2000] ^= 1
    path.write_bytes(data)
    found = open_source("pt", path)
    for part, read in found.tensors.items():
        if part.name == "other":
            assert b"".join(read()) == torch.ones(2).numpy().tobytes()
            continue
        with pytest.raises(CorruptionError, match=r"step_1\.pt is damaged: data/\d differs from its"):
            list(read())


def test_a_file_without_checksums_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(3)}, tmp_path / "step_1.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert len(_read("pt", tmp_path / "step_1.pt")) == 1


def test_a_process_that_a_reader_starts_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reads(form: str, source: Path) -> object:
        return os.system("true")

    monkeypatch.setattr("tests.hostile.foreign.open_source", reads)
    found = outcome_of("pt", tmp_path / "a.pt", None)
    assert found.problem == f"it called {['os.system']}" and "os.system" in FORBIDDEN
