"""WarmWorkers without a cluster: the runtime environment, and the start of a worker's process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from ray_ckpt.errors import ConfigError
from ray_ckpt.train import WarmWorkers, warm_start
from ray_ckpt.train import warm as warm_module
from ray_ckpt.train.warm import MODULES_ENV, find_places

PROJECT = Path(__file__).parents[2]


def test_the_runtime_environment_keeps_what_the_user_wants() -> None:
    warm = WarmWorkers("my_project.training", python="python3")
    env = warm.runtime_env({"working_dir": "/code", "env_vars": {"A": "1"}})
    assert env["working_dir"] == "/code" and env["env_vars"]["A"] == "1"
    assert env["env_vars"][MODULES_ENV].endswith(",my_project.training")
    assert env["py_executable"] == "python3 -m ray_ckpt.train.warm_start"


@pytest.mark.parametrize("field", ["pip", "conda", "uv", "py_executable", "image_uri", "nsight"])
def test_another_python_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        WarmWorkers().runtime_env({field: "x"})


@pytest.mark.parametrize("name", ["", "a,b", "a b", "a.", "1a", "a;b", "a\n", ["torch", "numpy"], None])
def test_a_name_that_is_no_modules_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"not the name of a module\. Give each name by itself"):
        WarmWorkers(name)


@pytest.mark.parametrize("idle_nodes", [-1, 1.5, "1", None, True])
def test_idle_nodes_are_a_number_of_nodes(idle_nodes: Any) -> None:
    with pytest.raises(ConfigError, match=r"idle_nodes is .*\. Set it to an int of 0 or more"):
        WarmWorkers(idle_nodes=idle_nodes)


@pytest.mark.parametrize("variables", [None, "A=1", ["A=1"]])
def test_variables_that_are_no_mapping_are_refused(variables: Any) -> None:
    with pytest.raises(ConfigError, match=r"has env_vars .*\. Give a dict of variables"):
        WarmWorkers().runtime_env({"env_vars": variables})


def write(folder: Path, program: str, modules: Mapping[str, str]) -> Path:
    """Write a program and modules; return the program's file."""
    script = folder / "folder" / "script.py"
    script.parent.mkdir()
    script.write_text(program)
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    return script


def run_start(tmp_path: Path, modules: str, program: str, **files: str) -> subprocess.CompletedProcess[str]:
    """Run a program as Ray runs its worker, with modules made of text."""
    script = write(tmp_path, program, files)
    env = {**os.environ, MODULES_ENV: modules, "PYTHONPATH": f"{tmp_path}:{PROJECT}"}
    env.pop(warm_start.CHECK_ENV, None)  # other libraries set it for good
    done = subprocess.run(
        [sys.executable, "-m", "ray_ckpt.train.warm_start", str(script), "--one", "two words"],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done


def run_start_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., SimpleNamespace]:
    """Return what runs a program as `run_start` does, in this process, which has imported Ray."""

    def start(tmp_path: Path, modules: str, program: str, **files: str) -> SimpleNamespace:
        script = write(tmp_path, program, files)
        monkeypatch.setenv(MODULES_ENV, modules)
        monkeypatch.delenv(warm_start.CHECK_ENV, raising=False)
        monkeypatch.setattr(sys, "argv", ["warm_start", str(script), "--one", "two words"])
        monkeypatch.setattr(sys, "path", ["", str(tmp_path), *sys.path])
        left_s, _ = signal.setitimer(signal.ITIMER_REAL, 0.0)  # of this test
        handler = signal.signal(signal.SIGALRM, signal.SIG_DFL)
        try:
            warm_start.main()
        finally:
            signal.signal(signal.SIGALRM, handler)
            signal.setitimer(signal.ITIMER_REAL, left_s)
            for name in files:
                sys.modules.pop(name, None)
        out, err = capsys.readouterr()
        return SimpleNamespace(stdout=out, stderr=err)

    return start


@pytest.mark.parametrize("is_process", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_process_imports_what_it_can_and_then_runs_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_process: bool
) -> None:
    start = run_start if is_process else run_start_here(monkeypatch, capsys)
    done = start(
        tmp_path,
        "bad,ends,no_such,good",
        "import os, sys\n"
        "print(__name__, sys.argv[1:], sys.path[:2], sorted({'good', 'bad', 'ends'} & sys.modules.keys()))\n"
        "print(sys.modules['good'].check, 'PYTORCH_NVML_BASED_CUDA_CHECK' in os.environ)\n"
        "import gc\n"
        "print(any(found is sys.modules['good'].__dict__ for found in gc.get_objects()))\n"
        "import signal\n"
        "print(signal.getitimer(signal.ITIMER_REAL), signal.getsignal(signal.SIGALRM).name)\n",
        good="import os, sys\n"
        "check = os.environ['PYTORCH_NVML_BASED_CUDA_CHECK']\n"
        "sys.path.insert(0, 'of the module')\n",
        bad="raise RuntimeError('no GPU')",
        ends="raise SystemExit(3)",
    )
    path = ["of the module", str(tmp_path / "folder")]
    assert done.stdout.splitlines() == [
        f"__main__ ['--one', 'two words'] {path} ['good']",
        "1 False",
        "False",  # collections leave out what was imported
        "(0.0, 0.0) SIG_DFL",
    ]
    assert "no GPU" in done.stderr and "no_such was not imported" in done.stderr


@pytest.mark.slow  # 4 s, a process that imports torch
def test_a_process_in_which_a_module_has_initialized_cuda_starts_anew(tmp_path: Path) -> None:
    done = run_start(
        tmp_path,
        "torch,eager",
        "import sys\nprint('eager' in sys.modules, 'torch' in sys.modules, sys.argv[1:])\n",
        eager="import torch\ntorch.cuda._initialized = True\n",
    )
    assert done.stdout.splitlines() == ["False False ['--one', 'two words']"]
    assert "has initialized CUDA" in done.stderr


def test_imports_that_take_too_long_are_left_to_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(warm_start, "LONGEST_S", -1.0)
    warm_start._import_all("colorsys")
    assert "colorsys is not imported ahead of time" in capsys.readouterr().err


def test_a_process_in_which_a_module_does_not_end_starts_anew(tmp_path: Path) -> None:
    """Ray would end it before it has registered, and start another one like it, without an end."""
    done = run_start(
        tmp_path,
        "endless,good",
        "import os, signal, sys\n"
        "print(sorted({'endless', 'good'} & sys.modules.keys()), sys.argv[1:])\n"
        "print('PYTORCH_NVML_BASED_CUDA_CHECK' in os.environ, 'OF_MODULE' in os.environ)\n"
        "print(signal.getitimer(signal.ITIMER_REAL), signal.getsignal(signal.SIGALRM).name)\n",
        endless="import os, signal, time\n"
        "os.environ['OF_MODULE'] = '1'\n"
        "left_s, _ = signal.getitimer(signal.ITIMER_REAL)\n"
        f"assert 0 < left_s <= {warm_start.GIVEN_UP_S}\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.1)\n"  # the rest of the time passes
        "while True:\n"
        "    try:\n"
        "        time.sleep(60)\n"
        "    except BaseException:\n"
        "        pass\n",
        good="",
    )
    assert done.stdout.splitlines() == ["[] ['--one', 'two words']", "False False", "(0.0, 0.0) SIG_DFL"]
    assert "a module is still imported after 40 s" in done.stderr


@pytest.mark.slow  # 4 s, a process that imports torch
def test_torch_gets_the_threads_that_ray_sets_after_its_import() -> None:
    program = (
        "import os, torch; from ray_ckpt.train import warm\n"
        "for set_by_module, of_ray in ((3, ''), (3, '0'), (3, 'x'), (3, '1'), (2, '1')):\n"
        "    torch.set_num_threads(set_by_module)\n"
        "    warm.threads_at_start, os.environ['OMP_NUM_THREADS'] = 3, of_ray\n"
        "    warm._set_threads()\n"
        "    print(torch.get_num_threads())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["3", "3", "3", "1", "2"], done.stderr


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
    assert find_places(nodes, {"CPU": 1.0}) == ["with GPUs", "without GPUs"]


def controller(monkeypatch: pytest.MonkeyPatch, of_job: Mapping[str, Any]) -> None:
    context = SimpleNamespace(runtime_env=of_job)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)


def run_context(worker_env: dict[str, Any]) -> Any:
    return SimpleNamespace(run_config=SimpleNamespace(worker_runtime_env=worker_env))


def test_a_run_whose_workers_would_start_otherwise_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    warm = WarmWorkers()
    controller(monkeypatch, {"env_vars": {"A": "1"}})
    warm.after_controller_start(run_context(warm.runtime_env()))
    for wrong in ({}, {"env_vars": None}, WarmWorkers().runtime_env()):  # none, or that of another trainer
        with pytest.raises(ConfigError, match="not the runtime environment") as caught:
            warm.after_controller_start(run_context(wrong))
        assert "warm.runtime_env()" in str(caught.value.hint)
    controller(monkeypatch, {"pip": ["x"]})  # of the job
    with pytest.raises(ConfigError, match="pip"):
        warm.after_controller_start(run_context(warm.runtime_env()))


def worker(rank: int, node: str, world_size: int) -> Any:
    return SimpleNamespace(
        distributed_context=SimpleNamespace(world_rank=rank, world_size=world_size),
        metadata=SimpleNamespace(node_id=node),
        resources={"CPU": 1.0},
    )


def test_nodes_are_known_by_rank_unless_a_single_rank_is_replaced() -> None:
    warm = WarmWorkers()
    warm.before_init_train_context([worker(2, "b", 3), worker(0, "a", 3), worker(1, "a", 3)])
    assert warm._nodes == ["a", "a", "b"]
    warm.before_init_train_context([worker(1, "c", 3)])
    assert warm._nodes == []


class Looks:
    """Looks for idle nodes: what `ray.nodes()` gives in each, and what is started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, looks: Sequence[str]) -> None:
        self.started: list[str] = []
        self._looks = list(looks)
        monkeypatch.setattr(ray, "nodes", self._nodes)
        monkeypatch.setattr(warm_module, "start", lambda nodes, env: self.started.append("".join(nodes)))

    def _nodes(self) -> list[dict[str, Any]]:
        names = self._looks.pop(0)
        return [{"NodeID": name, "Alive": True, "Resources": {"CPU": 8.0}} for name in names]

    def wait(self, timeout_s: float) -> bool:
        return not self._looks


@pytest.mark.parametrize(
    ("idle_nodes", "looks", "started"),
    [
        (1, ["dcab", "abcd", "abdce"], ["cc", "", ""]),
        (1, ["ab", "abe", "abef"], ["", "ee", ""]),
        (1, ["abc", "abd", "abcd"], ["cc", "dd", ""]),  # the chosen node has died; it does not return
        (2, ["abc", "abcd"], ["cc", "dd"]),
    ],
)
def test_idle_nodes_are_chosen_once_and_replaced(
    monkeypatch: pytest.MonkeyPatch, idle_nodes: int, looks: list[str], started: list[str]
) -> None:
    warm = WarmWorkers(idle_nodes=idle_nodes)
    warm.before_init_train_context([worker(0, "a", 3), worker(1, "a", 3), worker(2, "b", 3)])
    found = Looks(monkeypatch, looks)
    warm._start_on_idle({}, cast(threading.Event, found))
    assert found.started == started, "as many as the largest node has ranks"
