"""The plug-in in fresh processes, loaded by verl itself through the entry point of the installed package."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import distribution, entry_points

import pytest

from tests.frameworks.verl.conftest import ENVIRONMENT

PROGRAM = """
import sys
import verl  # and nothing of ray_ckpt
fixed = [name for name in sys.modules if name.startswith(("verl.workers", "verl.trainer"))]
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl
from verl.trainer.ppo import ray_trainer
print("fixed", fixed)
print("engines", EngineRegistry.new.__func__.__code__.co_filename)
print("resume", ray_trainer.find_latest_ckpt_path.__code__.co_filename)
print("manager", transformer_impl.FSDPCheckpointManager.__module__)
print("loaded", sorted(name for name in sys.modules if name.startswith("ray_ckpt.interop")))
"""


def run(**environment: str) -> dict[str, str]:
    """Import verl in a fresh process; return what it found."""
    others = {key: value for key, value in os.environ.items() if key != "RAY_CKPT_VERL"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env={**others, **ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    lines = (line.partition(" ") for line in done.stdout.splitlines())
    return {name: rest for name, _, rest in lines}


@pytest.mark.timeout(900)
def test_verl_loads_the_plugin_by_itself() -> None:
    found = run(RAY_CKPT_VERL="1")
    assert found["fixed"] == "[]", "no module of verl is imported early"
    assert found["engines"].endswith("ray_ckpt/interop/verl/hooks.py")
    assert found["resume"].endswith("ray_ckpt/interop/verl/hooks.py")
    assert found["manager"] == "verl.utils.checkpoint.fsdp_checkpoint_manager", "the class is verl's own"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "environment", [{}, {"RAY_CKPT_VERL": "0"}, {"RAY_CKPT_VERL": "1", "VERL_USE_EXTERNAL_PLUGINS": "none"}]
)
def test_verl_is_left_alone_unless_the_user_chose_otherwise(environment: dict[str, str]) -> None:
    found = run(**environment)
    assert found["engines"].endswith("verl/workers/engine/base.py")
    assert found["resume"].endswith("verl/utils/checkpoint/checkpoint_manager.py")
    assert "ray_ckpt.interop.verl.manager" not in found["loaded"]


def test_the_entry_point_is_the_one_of_the_package() -> None:
    (found,) = entry_points(group="verl.plugins", name="ray_ckpt")
    assert found.value == "ray_ckpt.verl" and found in distribution("ray_ckpt").entry_points
