"""Settings of all tests."""

from __future__ import annotations

import functools
import gc
import os
import random
import sys
from pathlib import Path

import pytest
import setuptools  # noqa: F401  # Megatron imports it, which fails after an import of pip
import typer.main
from hypothesis import HealthCheck, settings

from ray_ckpt.preemption.cloud import METADATA_ENV
from tests.support.examples import examples

pytest_plugins = ["tests.support.peer_nodes", "tests.servers.fixtures"]

gc.disable()  # until all is imported: looking at what stays, again and again, takes a quarter of that time

os.environ.pop("COLUMNS", None)  # how wide the terminal is that tests were started in; tests set their own
os.environ[METADATA_ENV] = "off"  # no test may query a cloud's service; tests of notices set their own

# The tree of commands is built once in a process, not for each call. `typer.testing` imports this name later.
typer.main.get_command = functools.cache(typer.main.get_command)

# Machines are slow and shared: no test may fail because an example took long.
settings.register_profile("untimed", examples(), suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


# Files that take longest, longest first: several processes share the files in this order, so that no process
# is left with a long file when the others have ended. `--durations=0` shows when this list has aged.
LONGEST_FIRST = (
    "actors/test_coding.py",
    "storage/test_stores.py",
    "cli/test_commands.py",
    "interop/test_trainers.py",
    "storage/test_lost_responses.py",
    "interop/test_hf_export.py",
    "test_notebook.py",
    "capture/test_classes.py",
    "catalog/test_catalog.py",
    "analysis/test_report.py",
    "transport/test_silent_peers.py",
    "catalog/test_load.py",
    "testing/test_random.py",
    "test_canary.py",
    "test_data.py",
    "analysis/test_diff.py",
    "catalog/test_export.py",
    "verify/test_copies.py",
    "actors/test_still_files.py",
    "storage/test_store_failures.py",
    "storage/test_crash.py",
    "interop/test_prepare_trainer.py",
    "train/test_imports.py",
    "hostile/test_foreign.py",
    "test_packaging.py",
    "capture/test_hyperparameters.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files by `LONGEST_FIRST`; refuse quick tests where `make test` would not collect them."""
    tests = Path(__file__).parent
    places = {tests / name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    for item in items:
        if item.get_closest_marker("slow"):
            continue
        if item.get_closest_marker("cluster") and not item.path.is_relative_to(tests / "cluster"):
            raise pytest.UsageError(
                f"{item.nodeid}: a cluster test that is not slow belongs into tests/cluster"
            )
        if item.path.is_relative_to(tests / "fault"):
            raise pytest.UsageError(f"{item.nodeid}: tests in tests/fault are slow")


def pytest_collection_finish() -> None:
    """Hide the objects of imported modules from the collector: each `restore` looks at all that it tracks."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _hide_what_is_there_from_the_collector() -> None:
    """Hide what the tests before this file have imported and left, too."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _the_same_draws_each_time() -> None:
    """A test that draws from the process's own generators draws the same in every run, wherever it runs."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` takes 2 ms: it notes the stack for CUDA
