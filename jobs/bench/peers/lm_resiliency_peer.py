"""lm-resiliency's in-memory checkpoint of tensors in host slots, then flushed to its node-local disk tier.

With one rank there is no replica on a peer; pinned memory needs CUDA and is off; the digests of the disk tier
are on, because this project verifies digests too. A load reads the disk, as after the death of the process,
because the slots are memory of this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lm_resiliency.checkpointing as lm  # type: ignore[import-not-found]

from jobs.bench.peers.child import RETURNED, STAGED, Live, Peer, main, parser
from jobs.bench.peers.dcp import start_group
from jobs.bench.state import tensors


class LmResiliency(Peer):
    def __init__(self, live: Live, folder: Path) -> None:
        start_group()
        self.folder = folder / "tier"
        self.manager = self._manager()
        self._tensors = list(tensors(live.model, live.optimizer))

    def save(self, live: Live, folder: Path, step: int) -> Iterator[str]:
        folder.mkdir()
        self.manager.save_tensors(self._tensors, step)
        yield RETURNED
        self.manager.maybe_wait()
        yield STAGED
        self.manager.flush_to_disk(step)
        self.manager._disk.wait()

    def load(self, live: Live, folder: Path, step: int, *, cached: bool) -> None:
        fresh = self._manager()
        found = fresh.load_tensors()
        assert found is not None and found[1] == step
        for tensor, loaded in zip(self._tensors, found[0], strict=True):
            tensor.copy_(loaded)

    def close(self) -> None:
        self.manager.close()

    def _manager(self) -> Any:
        return lm.InMemoryCheckpointManager(
            lm.InMemoryCkptConfig(
                disk_folder=str(self.folder), run_id="bench", pin_memory=False, verify_integrity=True
            )
        )


if __name__ == "__main__":
    chosen = parser().parse_args()
    main(lambda live: LmResiliency(live, chosen.folder), chosen)
