"""The notebooks run from their first cell to their last on runs that nobody prepared for them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from jobs.demo import s3 as demo_s3
from jobs.demo import s3_server
from ray_ckpt import Catalog
from ray_ckpt.location import Location
from ray_ckpt.storage.remote.tier import open_store
from ray_ckpt.types import Level
from tests.analysis.test_report import Story, rolled_back
from tests.support.sample_run import copy_to, write_run
from tests.support.trained_run import DURABLE, FAILED_AT, RESUMED_AT, STEPS, write_trained_run

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
MAX_OUTPUT_BYTES = 300_000  # of a notebook with its figures: what a page shows at once
CELL_S = 120.0  # the first one loads torch, on a machine that others use
DEMO_S = 400.0  # of the S3 demo: two minutes on a machine with nothing else to do
PREPARE = """
import os
get_ipython().run_line_magic("reset", "-f")
import os
os.environ.update({environment!r})
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelManager]:
    """One for all notebooks, which is emptied before each: imports take longer than what they do."""
    folder = tmp_path_factory.mktemp("kernel")
    manager = KernelManager()
    own = {"MPLCONFIGDIR": str(folder / "matplotlib"), "IPYTHONDIR": str(folder / "ipython")}
    manager.start_kernel(cwd=str(NOTEBOOKS), env={**os.environ, **own, "OMP_NUM_THREADS": "1"})
    yield manager
    manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trained_run(tmp_path_factory.mktemp("trained"))


class Executed:
    """The output of a notebook."""

    def __init__(self, outputs: list[Any]) -> None:
        self.stderr = [o.text for o in outputs if o.output_type == "stream" and o.name == "stderr"]
        self.figures = sum("image/png" in o.get("data", {}) for o in outputs)
        kinds = ("text/plain", "text/html")
        shown = [o.text if o.output_type == "stream" else o.data.get(k, "") for o in outputs for k in kinds]
        self.text = "\n".join(shown)
        self.nbytes = len(json.dumps(outputs))


def execute(
    kernel: KernelManager, name: str, run: object, environment: Mapping[str, str] | None = None
) -> Executed:
    """Run a notebook on a run, and hold what holds for all of them."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    variables = {**(environment or {}), "RAY_CKPT_DEMO": str(run)}
    prepare = nbformat.v4.new_code_cell(PREPARE.format(environment=variables))
    client = NotebookClient(
        nbformat.v4.new_notebook(cells=[prepare, *notebook.cells]), km=kernel, timeout=CELL_S
    )
    client.execute()
    executed = Executed([output for cell in client.nb.cells for output in cell.get("outputs", ())])
    assert executed.stderr == []
    assert executed.nbytes < MAX_OUTPUT_BYTES
    return executed


@pytest.mark.parametrize(
    "durable",
    [
        pytest.param((10, 30, 50), id="durable"),
        pytest.param((), id="in-cluster-only", marks=pytest.mark.slow),
    ],
)
def test_the_catalog_notebook_runs(kernel: KernelManager, tmp_path: Path, durable: tuple[int, ...]) -> None:
    run = write_run(
        tmp_path, durable=durable, resume_at=30, resumed_steps=(40, 50), lost=(20,), collected=(10,)
    )
    executed = execute(kernel, "explore_catalog", run.folder)
    assert "4 live checkpoints" in executed.text and executed.figures == 2
    if durable:
        assert "exp_avg" in executed.text and "1x2" in executed.text
    else:
        assert "No checkpoint of this run is on the storage path" in executed.text


@pytest.mark.slow  # 3 s
def test_the_comparison_notebook_runs(kernel: KernelManager, trained: Path) -> None:
    executed = execute(kernel, "compare_checkpoints", trained)
    assert str(list(DURABLE)) in executed.text and executed.figures == 1
    assert "model.blocks.0" in executed.text and "changed" in executed.text


@pytest.mark.slow  # the next one is the same page
def test_the_goodput_notebook_runs(kernel: KernelManager, trained: Path) -> None:
    executed = execute(kernel, "goodput_and_cadence", trained)
    assert executed.figures == 2 and "1 to 2" in executed.text
    assert "a stall of 0.010 s (measured)" in executed.text and "save every" in executed.text


def test_the_goodput_notebook_runs_on_a_log_without_measurements(
    kernel: KernelManager, tmp_path: Path
) -> None:
    executed = execute(kernel, "goodput_and_cadence", write_run(tmp_path).folder)
    assert "a stall of 0.500 s (assumed" in executed.text


@pytest.mark.slow  # a kernel more for a line of the page
def test_the_goodput_notebook_counts_failures_alone(kernel: KernelManager, tmp_path: Path) -> None:
    """A rollback and the pause after it are no failures; nodes are those of each session."""
    log = Story()
    log.create()
    log.trained(1, start=0, steps=120, ended="node", down_s=60, seed=1)
    log.trained(2, start=120, steps=120, resumed_from=log.newest, ended="finished", down_s=36_000, seed=2)
    log = rolled_back(log, 3)
    log.trained(4, start=240, steps=120, resumed_from=log.newest, num_nodes=8, seed=4)
    executed = execute(kernel, "goodput_and_cadence", log.write(tmp_path))
    assert re.search(r"3 to 4\s+rollback\s", executed.text) and "unknown" not in executed.text
    found = re.search(r"failures: (.*) in (.*) node-hours; a restart takes (.*) s", executed.text)
    assert found and found[1] == "1"
    node_hours = (2 * 4 + 8) * 120 * 1.5 / 3600
    assert float(found[2]) == pytest.approx(node_hours, rel=0.3)
    assert 60 < float(found[3]) < 120


@pytest.mark.parametrize(
    ("name", "num_sessions", "message"),
    [
        ("explore_catalog", 1, "The run has no checkpoint yet"),
        pytest.param("goodput_and_cadence", 0, "There is no time to look at", marks=pytest.mark.slow),
        pytest.param("goodput_and_cadence", 1, "There is no time to look at", marks=pytest.mark.slow),
        pytest.param("goodput_and_cadence", 2, "The run has no checkpoint yet", marks=pytest.mark.slow),
    ],
)
def test_a_notebook_reports_a_run_with_too_few_sessions(
    kernel: KernelManager, tmp_path: Path, name: str, num_sessions: int, message: str
) -> None:
    log = Story()
    log.create()
    for session in range(1, num_sessions + 1):
        log.trained(session, start=0, steps=5)
    with pytest.raises(CellExecutionError) as caught:
        execute(kernel, name, log.write(tmp_path))
    assert caught.value.ename == "AssertionError" and message in caught.value.evalue


@pytest.mark.slow  # 5 s
def test_the_evaluation_notebook_runs(kernel: KernelManager, trained: Path) -> None:
    executed = execute(kernel, "restore_for_evaluation", trained)
    assert executed.figures == 1 and "2 layers of width 32" in executed.text
    (losses,) = (
        json.loads(line.replace("{", '{"').replace(": ", '": ').replace(", ", ', "'))
        for line in executed.text.splitlines()
        if line.startswith("{")
    )
    assert list(losses) == [str(step) for step in DURABLE] and all(
        1.0 < loss < 5.0 for loss in losses.values()
    )


def test_the_tensor_notebook_runs_on_a_folder(kernel: KernelManager, trained: Path) -> None:
    executed = execute(kernel, "read_one_tensor", trained)
    assert executed.figures == 1 and "saved slices" in executed.text


@pytest.mark.slow  # 7 s
def test_the_tensor_notebook_reads_from_a_bucket(kernel: KernelManager, trained: Path) -> None:
    """The server of the S3 demo, with a run that was trained as its run is."""
    with s3_server.running("strict", demo_s3.BUCKET) as server:
        run = Location.parse(server.url("runs")) / demo_s3.STORMY
        copy_to(open_store(run, None)[0], trained)
        executed = execute(kernel, "read_one_tensor", run, s3_server.ENVIRONMENT)
    assert f"s3://{demo_s3.BUCKET}/runs/{demo_s3.STORMY}" in executed.text


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(DEMO_S + 60)
def test_the_tensor_notebook_reads_what_the_s3_demo_has_left(kernel: KernelManager, tmp_path: Path) -> None:
    kind = "ministack" if s3_server.tool("ministack") else "strict"
    with s3_server.running(kind, demo_s3.BUCKET) as server:
        assert demo_s3.play(tmp_path, server.url("runs")) == []
        run = Location.parse(server.url("runs")) / demo_s3.STORMY
        executed = execute(kernel, "read_one_tensor", run, s3_server.ENVIRONMENT)
        newest = Catalog(run).newest(Level.DURABLE)
    assert newest is not None and newest.info.root_digest in executed.text


def test_the_trained_run_is_a_run_with_a_failure(trained: Path) -> None:
    catalog = Catalog(trained)
    assert [view.verify() for view in catalog.durable()] == [()] * len(DURABLE)
    tried = [(c.step, c.id.session) for c in catalog.list(all=True)]
    assert (FAILED_AT, 1) in tried and (FAILED_AT, 2) in tried and tried[-1] == (STEPS, 2)
    assert catalog.to_arrow("sessions")["resumed_from_step"].to_pylist() == [None, RESUMED_AT]
    again = [c.metrics["loss"] for c in catalog.list(all=True) if c.step == FAILED_AT]
    assert again[0] == again[1], "the same steps from the same state"


def test_notebooks_are_stored_without_outputs() -> None:
    for path in NOTEBOOKS.glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        assert all(not cell.get("outputs") for cell in notebook.cells), path.name
        assert all(cell.get("execution_count") is None for cell in notebook.cells), path.name
