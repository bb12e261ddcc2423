"""One Ray node for all tests, whose processes have verl's platform `cpu` and our plug-in."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "tests.frameworks.verl.cpu_platform",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
}
SUBMIT = r"""
    --runtime-env-json '{"env_vars": {"RAY_CKPT_VERL": "1"}}' \
"""
STARTS = 5  # Ray gives a node 30 s to start, which a machine at work may exceed
os.environ.update(ENVIRONMENT)  # before the tests import verl


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    import ray

    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    os.environ["RAY_CKPT_STAGING"] = str(tmp_path_factory.mktemp("staging"))
    os.environ["OMP_NUM_THREADS"] = "1"
    runtime_env = json.loads(shlex.split(SUBMIT)[1])
    for attempt in range(1, STARTS + 1):
        try:
            ray.init("local", num_cpus=8, include_dashboard=False, runtime_env=runtime_env)
            break
        except Exception:
            ray.shutdown()
            if attempt == STARTS:
                raise
    os.environ.update(runtime_env["env_vars"])  # the driver of a submitted job has them, too
    yield
    ray.shutdown()
