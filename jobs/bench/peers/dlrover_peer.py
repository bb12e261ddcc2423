"""DLRover's Flash Checkpoint: the trainer copies into shared memory, an agent's process writes the file.

Under DLRover's launcher the agent outlives the trainer; here the trainer starts the agent's process. A load
reads the shared memory. Without a launcher, the rank is taken from the environment.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType  # type: ignore[import-not-found]
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer  # type: ignore[import-not-found]

from jobs.bench.peers.child import RETURNED, Live, Peer, main, parser
from jobs.bench.peers.dcp import start_group

POLL_S = 0.005  # DLRover's own wait polls every 3 s, too slowly for a measurement
WAIT_S = 240.0
RUN = "ray_ckpt-bench"  # part of the names of the shared memory, which outlives all processes


class Dlrover(Peer):
    def __init__(self, folder: Path) -> None:
        start_group()
        os.environ["TORCHELASTIC_RUN_ID"] = RUN
        self.close()  # removes the shared memory of a killed run
        self.tracker = folder / "dlrover_latest.txt"
        self.checkpointer = DdpCheckpointer(str(folder))

    def save(self, live: Live, folder: Path, step: int) -> Iterator[str]:
        folder.mkdir()
        path = folder / "rank_0.pt"
        self.checkpointer.save_checkpoint(step, live.state_dict(), str(path), StorageType.DISK)
        yield RETURNED
        deadline_s = time.monotonic() + WAIT_S
        while not self.tracker.exists() or self.tracker.read_text() != str(step):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"step {step} was not written within {WAIT_S:.0f} s")
            time.sleep(POLL_S)

    def load(self, live: Live, folder: Path, step: int, *, cached: bool) -> None:
        live.load_state_dict(self.checkpointer.load_checkpoint())

    def close(self) -> None:
        for path in Path("/dev/shm").glob(f"{RUN}_*"):
            path.unlink()


if __name__ == "__main__":
    chosen = parser().parse_args()
    main(lambda live: Dlrover(chosen.folder), chosen)
