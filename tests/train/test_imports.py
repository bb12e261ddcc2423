"""Imports of a worker: each delays every restart, on every rank."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

from ray_ckpt.actors.agent.manifest_memory import ManifestMemory
from ray_ckpt.format.manifest import decode_places, encode_fragment
from tests.support.peer_nodes import sample

HEAVY = (
    "cryptography",  # keys are made by the coordinator
    "ray.train.v2._internal.execution.controller.controller",
    "ray_ckpt.actors.agent.actor",
    "ray_ckpt.actors.coordinator.actor",
    "sympy",  # by torch.distributed.tensor, half a second
    "torch.distributed.tensor",
)
WORKER = f"""
import sys
import torch, ray.train.torch
from ray.train.v2._internal.execution.worker_group import worker
before = set(sys.modules)
import ray_ckpt.train.callback, ray_ckpt.trainer.checkpointer
print(*[name for name in {HEAVY} if name in set(sys.modules) - before])
"""


def test_a_worker_loads_neither_the_service_nor_what_its_program_does_not_use() -> None:
    found = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


def test_a_rank_reads_rows_without_pandas(tmp_path: Path) -> None:
    """pyarrow imports pandas for some conversions; outside of Ray Train nobody else has done so."""
    saved = sample(10)
    with closing(ManifestMemory()) as memory:
        for fragment in saved.fragments:
            data = encode_fragment(fragment)
            memory.add(decode_places(data)[1], data)
        manifest = memory.seal()
        (tmp_path / "manifest").write_bytes(Path(manifest.path).read_bytes())
    files = [file.name for fragment in saved.fragments for file in fragment.files]
    code = f"""
import sys
from ray_ckpt.restore.manifest import MappedFragment, MappedManifest
rows = MappedManifest(path={str(tmp_path / "manifest")!r}, parts={manifest.parts!r}).open()
found = [row for file in {files!r} for row in rows.of_file(file)]
assert len(found) == {sum(len(fragment.rows) for fragment in saved.fragments)}
assert rows.meeting([row.slice for row in found if row.slice is not None])
print("pandas" in sys.modules)
"""
    read = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert read.stdout.strip() == "False"
