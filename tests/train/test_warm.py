"""WarmWorkers without a cluster: the runtime environment, and the start of a worker's process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from ray_ckpt.errors import ConfigError
from ray_ckpt.train import WarmWorkers
from ray_ckpt.train.warm import MODULES_ENV, find_places


def test_the_runtime_environment_keeps_what_the_user_wants() -> None:
    warm = WarmWorkers("my_project.training", python="python3")
    env = warm.runtime_env({"working_dir": "/code", "env_vars": {"A": "1"}})
    assert env["working_dir"] == "/code" and env["env_vars"]["A"] == "1"
    assert env["env_vars"][MODULES_ENV].endswith(",my_project.training")
    assert env["py_executable"] == "python3 -m ray_ckpt.train.warm_start"


@pytest.mark.parametrize("field", ["pip", "conda", "uv", "py_executable", "image_uri"])
def test_another_python_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        WarmWorkers().runtime_env({field: "x"})


@pytest.mark.parametrize("name", ["", "a,b", "a b", "a.", "1a", "a;b", "a\n"])
def test_a_name_that_is_no_modules_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="not the name of a module"):
        WarmWorkers(name)


def test_a_process_imports_what_it_can_and_then_runs_the_script(tmp_path: Path) -> None:
    script = tmp_path / "folder" / "script.py"
    script.parent.mkdir()
    script.write_text(
        "import os, sys\n"
        "print(__name__, sys.argv[1:], sys.path[0], sorted({'good', 'bad', 'ends'} & sys.modules.keys()),\n"
        "      sys.modules['good'].check, 'PYTORCH_NVML_BASED_CUDA_CHECK' in os.environ)\n"
    )
    (tmp_path / "good.py").write_text("import os\ncheck = os.environ['PYTORCH_NVML_BASED_CUDA_CHECK']\n")
    (tmp_path / "bad.py").write_text("raise RuntimeError('no GPU')")
    (tmp_path / "ends.py").write_text("raise SystemExit(3)")
    project = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "ray_ckpt.train.warm_start", str(script), "--one", "two words"],
        env={**os.environ, MODULES_ENV: "bad,ends,no_such,good", "PYTHONPATH": f"{tmp_path}:{project}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    expected = f"__main__ ['--one', 'two words'] {script.parent} ['good'] 1 False"
    assert done.stdout.splitlines()[-1] == expected
    assert "no GPU" in done.stderr and "no_such was not imported" in done.stderr


def test_torch_gets_the_threads_that_ray_sets_after_its_import() -> None:
    program = (
        "import os, torch; from ray_ckpt.train import warm\n"
        "torch.set_num_threads(3)\n"
        "for threads in ('', '0', 'x', '1'):\n"
        "    os.environ['OMP_NUM_THREADS'] = threads\n"
        "    warm._limit_threads()\n"
        "    print(torch.get_num_threads())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["3", "3", "3", "1"], done.stderr


def test_a_place_for_a_worker_is_on_a_live_node_with_its_resources() -> None:
    def node(name: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
        return {"NodeID": name, "Alive": alive, "Resources": resources}

    nodes = [
        node("head", CPU=0.0),
        node("dead", alive=False, CPU=8.0, GPU=8.0),
        node("without GPUs", CPU=8.0),
        node("with GPUs", CPU=8.0, GPU=8.0),
    ]
    assert find_places(nodes, {"CPU": 1.0, "GPU": 1.0}) == ["with GPUs"]
    assert find_places(nodes, {"CPU": 1.0}) == ["without GPUs", "with GPUs"]


class Groups:
    """Groups of a trainer, and the processes that wait if each order is carried out."""

    def __init__(self, idle_nodes: int) -> None:
        self.warm = WarmWorkers(idle_nodes=idle_nodes)
        self.now_s = 100.0

    def begin(self, ranks: str, places: str = "abcd", *, after_s: float = 1000.0) -> str:
        """Begin a group with a rank for each letter, and return a letter for each process to start."""
        self.now_s += after_s
        self.warm._nodes = list(ranks)
        self.warm._order(list(places), self.now_s)
        return "".join(sorted(chain(*map(self.warm._orders_of, range(len(ranks))))))


def test_each_group_starts_the_processes_that_the_last_ones_have_not_left() -> None:
    groups = Groups(idle_nodes=1)
    assert groups.begin("aabb") == "aabbcc", "one for each rank, and as many on one idle node"
    assert groups.begin("aabb") == "aabb", "those of `c` still wait"
    assert groups.begin("aacc", places="acd") == "aaccdd", "`b` has died, and `c` has replaced it"
    assert groups.begin("aacc", places="abcd") == "aacc", "those of `b` may still wait"


def test_a_group_that_ends_soon_has_left_no_process() -> None:
    groups = Groups(idle_nodes=0)
    assert groups.begin("ab") == "ab"
    assert groups.begin("ab", after_s=5.0) == "ab"
    assert not groups.warm._waiting
    assert groups.begin("a") == "a", "it takes one of the second group's"
    assert groups.warm._waiting == Counter("b")
