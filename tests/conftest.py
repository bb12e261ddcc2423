"""Settings of all tests."""

from __future__ import annotations

import gc
import os
import random
import sys

import pytest
from hypothesis import HealthCheck, settings

from ray_ckpt.preemption.cloud import METADATA_ENV

pytest_plugins = ["tests.support.peer_nodes", "tests.servers.fixtures"]

os.environ.pop("COLUMNS", None)  # how wide the terminal is that tests were started in; tests set their own
os.environ[METADATA_ENV] = "off"  # no test may ask a cloud's service; those of notices set their own

# Machines are slow and shared: no test may fail because an example took long.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_collection_finish() -> None:
    """Hide the objects of imported modules from the collector: each `restore` looks at all that it tracks."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _the_same_draws_each_time() -> None:
    """A test that draws from the process's own generators draws the same in every run, wherever it runs."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
