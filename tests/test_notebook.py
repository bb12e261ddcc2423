"""The notebook runs from its first cell to its last on a run that nobody prepared for it."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.sample_run import write_run

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
ROOT = NOTEBOOKS.parent


@pytest.mark.parametrize("durable", [(10, 30, 50), ()], ids=["durable", "in-cluster-only"])
def test_the_catalog_notebook_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: tuple[int, ...]
) -> None:
    run = write_run(
        tmp_path, durable=durable, resume_at=30, resumed_steps=(40, 50), lost=(20,), collected=(10,)
    )
    monkeypatch.setenv("RAY_CKPT_DEMO", str(run.folder))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOKS / "explore_catalog.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(NOTEBOOKS)}})
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert [o for o in outputs if o.output_type == "stream" and o.name == "stderr"] == []
    shown = "\n".join(str(o.data.get("text/plain", "")) for o in outputs if "data" in o)
    assert "4 live checkpoints" in shown
    assert ("exp_avg" if durable else "on the storage path") in shown


def test_notebooks_are_stored_without_outputs() -> None:
    for path in NOTEBOOKS.glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        assert all(not cell.get("outputs") for cell in notebook.cells), path.name
        assert all(cell.get("execution_count") is None for cell in notebook.cells), path.name
