"""One Ray node for all tests, whose processes have verl's platform `cpu` and our plug-in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ENVIRONMENT = {
    "RAY_CKPT_VERL": "1",
    "VERL_USE_EXTERNAL_MODULES": "tests.frameworks.verl.cpu_platform",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
}
os.environ.update(ENVIRONMENT)  # before the tests import verl


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    import ray

    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    os.environ["RAY_CKPT_STAGING"] = str(tmp_path_factory.mktemp("staging"))
    os.environ["OMP_NUM_THREADS"] = "1"
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=True)
    yield
    ray.shutdown()
