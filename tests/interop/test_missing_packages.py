"""What a user sees without the package of a trainer."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT = """
import importlib.metadata, sys
known = importlib.metadata.version
def version(name):
    if name == "{package}":
        raise importlib.metadata.PackageNotFoundError(name)
    return known(name)
importlib.metadata.version = version
sys.modules["{package}"] = None  # its import fails
import ray_ckpt
ray_ckpt.{name}
"""


@pytest.mark.parametrize(
    ("name", "package", "use"),
    [
        ("huggingface", "transformers", ".prepare_trainer"),
        ("lightning", "lightning", ".CheckpointCallback"),
        pytest.param("accelerate", "accelerate", ".items(None)", marks=pytest.mark.slow),  # it loads torch
        ("megatron", "megatron-core", ".SaveStrategy()"),
    ],
)
def test_the_package_and_the_extra_are_named(name: str, package: str, use: str) -> None:
    program = WITHOUT.format(package=package, name=f"{name}{use}")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and f"{package} is not installed" in done.stderr
    assert f"ray_ckpt[{name}]" in done.stderr
