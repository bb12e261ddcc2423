"""vLLM on its own CPU platform, in this process and in those that a test starts.

vLLM loads `cpu_kernels` in each of its processes as it loads ray_ckpt: by an entry point, of a package that
is on the path alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.demo.local_cluster import LocalCluster

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # an engine in this process; tests of several processes set it
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # ranks share cores
}
PACKAGE = {
    "METADATA": "Metadata-Version: 2.1\nName: ray_ckpt_test_kernels\nVersion: 1\n",
    "entry_points.txt": "[vllm.general_plugins]\nkernels = tests.frameworks.vllm.cpu_kernels:register\n",
}
os.environ.update(ENVIRONMENT)  # before the tests import vLLM


@pytest.fixture(scope="session", autouse=True)
def plugin(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("path") / "ray_ckpt_test_kernels-1.dist-info"
    folder.mkdir()
    for name, text in PACKAGE.items():
        (folder / name).write_text(text)
    sys.path.append(str(folder.parent))
    paths = [str(ROOT), str(folder.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with LocalCluster(tmp_path_factory.mktemp("staging"), ["node"], cpus=2) as cluster:
        yield cluster.nodes["node"].node_id
