"""The recipes for orchestrators: a manifest for KubeRay, and a Slurm script played on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest
import ray
import yaml

from jobs.demo.free_ports import free_port
from jobs.demo.local_cluster import kill_family
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.config import STAGING_ENV
from ray_ckpt.preemption.sigterm import GRACE_S
from ray_ckpt.types import Level

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "jobs/recipes"
CRD_ENV = "RAY_CKPT_KUBERAY_CRD"  # a file with the operator's definition of a RayJob


def manifest() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((RECIPES / "rayjob.yaml").read_text())
    return found


def pods() -> dict[str, dict[str, Any]]:
    cluster = manifest()["spec"]["rayClusterSpec"]
    groups = {"head": cluster["headGroupSpec"], **{g["groupName"]: g for g in cluster["workerGroupSpecs"]}}
    return {name: group["template"]["spec"] for name, group in groups.items()}


# KubeRay


def test_the_manifest_fits_the_schema_of_the_operator() -> None:
    path = os.environ.get(CRD_ENV)
    if path is None:
        pytest.skip(f"{CRD_ENV} names no file: helm show crds kuberay/kuberay-operator > crds.yaml")
    definitions = yaml.load(Path(path).read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    schema = next(
        v["schema"]["openAPIV3Schema"] for v in definitions["spec"]["versions"] if v["name"] == "v1"
    )
    for level in ("spec", "status"):
        _forbid_unknown(schema["properties"][level])
    jsonschema.Draft7Validator(schema).validate(manifest())
    wrong = manifest()
    wrong["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["terminationGracePeriod"] = 1
    with pytest.raises(jsonschema.ValidationError, match="terminationGracePeriod"):
        jsonschema.Draft7Validator(schema).validate(wrong)


def _forbid_unknown(schema: Any) -> None:
    """Make unlisted properties an error, as the API server does with strict validation."""
    if isinstance(schema, dict):
        if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
        for value in schema.values():
            _forbid_unknown(value)


def test_each_pod_stages_on_a_volume_and_has_time_to_save() -> None:
    for name, pod in pods().items():
        volumes = {volume["name"] for volume in pod["volumes"]}
        (container,) = pod["containers"]
        env = {each["name"]: each["value"] for each in container["env"]}
        mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        assert mounts[env[STAGING_ENV]] in volumes, name
        drain_s = float(env.get("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", 30))
        assert pod["terminationGracePeriodSeconds"] >= max(GRACE_S, drain_s) + 15, name
        assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]


def test_the_user_of_the_image_owns_a_staging_folder_that_kubernetes_makes() -> None:
    for pod in pods().values():
        (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "staging")
        if "hostPath" not in volume:
            continue
        (prepare,) = pod["initContainers"]
        (mount,) = prepare["volumeMounts"]
        assert mount["name"] == "staging" and prepare["securityContext"]["runAsUser"] == 0
        assert prepare["command"] == ["chown", "1000:100", mount["mountPath"]]


def test_the_memory_of_a_worker_is_the_sum_that_its_comment_names() -> None:
    text = (RECIPES / "rayjob.yaml").read_text()
    training, state = map(int, re.findall(r"(\d+)Gi (?:for training|of state)", text))
    (worker,) = pods()["ranks"]["containers"]
    assert worker["resources"]["limits"]["memory"] == f"{training + 2 * state}Gi"


def test_the_entrypoint_is_a_job_that_parses(monkeypatch: pytest.MonkeyPatch) -> None:
    words = manifest()["spec"]["entrypoint"].split()
    assert words[:3] == ["python", "-m", "jobs.train_gpt"]
    from jobs.train_gpt import parse_args

    args = parse_args(words[3:])
    ranks = manifest()["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    assert args.workers == ranks["replicas"]


# Slurm

SRUN = """#!{python}
import os, sys
options = [arg for arg in sys.argv[1:] if arg.startswith("--")]
at = next(k for k, arg in enumerate(sys.argv) if k and not arg.startswith("--"))
node = next(o.partition("=")[2] for o in options if o.startswith("--nodelist="))
command = sys.argv[at:]
if command[0] == "hostname":
    print("{address}")
    sys.exit()
os.environ["RAY_CKPT_STAGING"] = "{folder}/staging/" + node
if command[:2] == ["ray", "start"]:  # the nodes share a machine, which is slow to choose ports
    sys.path.insert(0, "{root}")
    from jobs.demo.free_ports import free_port
    for port in ("metrics-export", "dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent"):
        command.append(f"--{port}-port={free_port()}")
    command += ["--include-dashboard=false"] * ("--head" in command)
os.execvp(command[0], command)
"""
SCONTROL = """#!/bin/sh
case "$1" in
show) printf 'node-a\\nnode-b\\n' ;;
requeue) echo "$2" > {folder}/requeued ;;
esac
"""
WAIT_S = 200.0  # a calm machine needs a tenth


class Slurm:
    """A stand-in for the controller and `sbatch`: starts the script, sends the signal, starts it again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir()
        here = {
            "python": sys.executable,
            "folder": folder,
            "root": ROOT,
            "address": ray.util.get_node_ip_address(),
        }
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            for key, value in here.items():
                text = text.replace("{" + key + "}", str(value))
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self.env = {
            **os.environ,
            "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "17",
            "SLURM_JOB_NODELIST": "node-[a-b]",
            "RUN": f"{folder}/storage/gpt",
            "SAVE_S": "60",
            "RAY_ARGS": "--num-cpus=1 --object-store-memory=100000000",
            "RAY_CKPT_METADATA": "off",
            "OMP_NUM_THREADS": "1",
        }

    def start(self, *driver: str) -> subprocess.Popen[bytes]:
        log = (self.folder / "slurm.out").open("ab")  # --open-mode=append
        env = {**self.env, "PORT": str(free_port())}
        return subprocess.Popen(
            ["bash", str(RECIPES / "slurm.sh"), *driver], cwd=ROOT, env=env, stdout=log, stderr=log
        )

    def end_steps(self, script: subprocess.Popen[bytes], steps: list[psutil.Process]) -> None:
        """Kill what the script has left, as Slurm does when the script has ended."""
        if script.poll() is None:
            steps += psutil.Process(script.pid).children(recursive=True)
            script.kill()
        script.wait()
        kill_family(*(process.pid for process in steps if process.is_running()))


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    found = Slurm(tmp_path)
    yield found
    print((tmp_path / "slurm.out").read_text())


def history(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_saves_at_the_signal_is_requeued_and_goes_on(slurm: Slurm) -> None:
    storage, done = slurm.folder / "storage", slurm.folder / "history.jsonl"
    small = "--layers 1 --width 16 --heads 2 --context 16 --parallel ddp --workers 2 --step-time-s 0.2"
    driver = (
        f"{sys.executable} -m jobs.train_gpt --name gpt --storage-path {storage} --history {done} {small}"
    )
    words = [*driver.split(), "--every-steps", "1000", "--steps"]
    script = slurm.start(*words, "10000")
    steps: list[psutil.Process] = []
    try:
        wait_for(lambda: len(history(done)) >= 5 or script.poll() is not None)
        assert script.poll() is None, "the job has started"
        assert Catalog(storage / "gpt").newest() is None, "and saves nothing by itself"
        steps = psutil.Process(script.pid).children(recursive=True)
        script.send_signal(signal.SIGUSR1)  # B: the script alone gets it
        assert script.wait(WAIT_S) == 0
    finally:
        slurm.end_steps(script, steps)
    assert (slurm.folder / "requeued").read_text() == "17\n"
    saved = Catalog(storage / "gpt").newest()
    assert saved is not None and saved.info.level is Level.DURABLE
    first = len(history(done))

    script = slurm.start(*words, str(saved.info.step + 5))
    steps = []
    try:
        wait_for(lambda: len(history(done)) > first or script.poll() is not None)
        steps = psutil.Process(script.pid).children(recursive=True)
        assert script.wait(WAIT_S) == 0, "the driver has come to its end"
    finally:
        slurm.end_steps(script, steps)
    assert history(done)[first:] == list(range(saved.info.step + 1, saved.info.step + 6))


def wait_for(condition: Any) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, "nothing came"
        time.sleep(0.1)


STUBS = {
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    "scontrol": 'case "$1" in show) echo node-a ;; requeue) echo "$2" > requeued ;; esac',
    "hostname": "echo 127.0.0.1",
    "python": 'case "$2" in *ray.init*) echo 01 02 ;; *) echo 0 ;; esac',
    "ray-ckpt": "",
    "sleep": "",
}


def run_stubbed(folder: Path, ray_command: str, *driver: str) -> int:
    """Run the script in `folder` with stubs of all programs; `ray_command` is the body of `ray`."""
    (folder / "bin").mkdir()
    for name, body in {**STUBS, "ray": ray_command}.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    env = {
        "PATH": f"{folder / 'bin'}:{os.defpath}",
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "node-a",
        "RAY_AUTH_TOKEN": "1",
        "SAVE_S": "0",
    }
    script = subprocess.Popen(
        ["bash", str(RECIPES / "slurm.sh"), *driver], cwd=folder, env=env, start_new_session=True
    )
    try:
        return script.wait(10)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
        script.wait()


def test_a_job_whose_head_does_not_start_ends(tmp_path: Path) -> None:
    assert run_stubbed(tmp_path, "exit 1", "touch", "trained") == 1
    assert not (tmp_path / "trained").exists()


def test_a_job_is_requeued_even_if_its_last_save_cannot_be_announced(tmp_path: Path) -> None:
    drain = 'if [ "$1" = drain-node ]; then echo "$3" >> drained; exit 1; fi'
    driver = "until [ -e requeued ]; do kill -USR1 $PPID; /bin/sleep 0.05; done"
    assert run_stubbed(tmp_path, drain, "bash", "-c", driver) == 0
    assert (tmp_path / "requeued").read_text() == "17\n"
    assert (tmp_path / "drained").read_text() == "01\n02\n"


def test_a_job_that_is_over_before_its_driver_starts_is_requeued(tmp_path: Path) -> None:
    signals = 'if [ "$1" = health-check ]; then kill -USR1 $PPID; fi'
    assert run_stubbed(tmp_path, signals, "bash", "-c", "touch trained; exec /bin/sleep 60") == 0
    assert (tmp_path / "requeued").read_text() == "17\n"
    assert not (tmp_path / "trained").exists()


def test_a_signal_while_the_driver_starts_is_not_lost(tmp_path: Path) -> None:
    assert run_stubbed(tmp_path, "", "bash", "-c", "kill -USR1 $PPID; exec /bin/sleep 60") == 0
    assert (tmp_path / "requeued").read_text() == "17\n"


def test_the_exit_status_of_the_driver_is_that_of_the_job(tmp_path: Path) -> None:
    assert run_stubbed(tmp_path, "", "bash", "-c", "exit 3") == 3
    assert not (tmp_path / "requeued").exists()


def listing(*rows: tuple[int, str, bool]) -> str:
    return json.dumps(
        {"checkpoints": [{"step": step, "level": level, "on_lineage": here} for step, level, here in rows]}
    )


def run_function(folder: Path, call: str, listings: Sequence[str]) -> str:
    """Return what a call of a function of the script prints; each `ls` prints the next of `listings`."""
    for index, text in enumerate(listings):
        (folder / f"{index}.json").write_text(text)
    listed = f"cd {folder}; touch used; n=$(wc -l < used); [ -e $n.json ] || n={len(listings) - 1}"
    stubs = {
        "ray-ckpt": f"{listed}; echo >> used; cat $n.json",
        "python": f'case "$2" in *ray.init*) echo 01 ;; *) exec {sys.executable} "$@" ;; esac',
        "ray": "",
        "sleep": "",
    }
    for name, body in stubs.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    script = (RECIPES / "slurm.sh").read_text()
    functions = re.findall(r"^(?:newest|save)\(\) \{.*?^\}", script, re.MULTILINE | re.DOTALL)
    env = {"PATH": f"{folder}:{os.defpath}", "RUN": "/runs/gpt", "SAVE_S": "30"}
    text = "\n".join(("set -euo pipefail; driver=$$", *functions, call))
    done = subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True, timeout=60)
    return done.stdout


def test_only_a_checkpoint_from_which_the_run_resumes_is_waited_for(tmp_path: Path) -> None:
    known = listing((20, "durable", True), (30, "local", True), (90, "durable", False))
    assert run_function(tmp_path, "newest durable", [known]) == "20\n"
    assert run_function(tmp_path, "newest", [known]) == "30\n"


@pytest.mark.parametrize("first", [(), ("",)], ids=["answered", "unanswered at first"])
def test_an_upload_that_ends_after_the_signal_does_not_stand_for_the_last_save(
    tmp_path: Path, first: tuple[str, ...]
) -> None:
    listings = (
        *first,
        listing((900, "durable", True), (1000, "local", True)),
        listing((1000, "durable", True)),
        "",  # a listing that fails ends nothing
        listing((1000, "durable", True), (1040, "local", True)),
        listing((1000, "durable", True), (1040, "durable", True)),
    )
    assert run_function(tmp_path, "save || true", listings) == "before the end: step 1040 is durable\n"
