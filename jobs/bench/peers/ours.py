"""The process of ray_ckpt, set up as users do: one rank on a local Ray, with the service's actors.

A save is complete with the commit at level local: files fsynced on the node, the record in the log. A load is
a restore by a new group, without the time to connect: first from the node's arena, which is then released,
later from the node's disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import ray

import ray_ckpt
from jobs.bench.peers.child import RETURNED, STAGED, Live, Peer, forget_cached, main, parser
from jobs.bench.state import wipe

RUN = "bench"
SETUP_S = 120.0  # touching new memory takes seconds per gigabyte on some machines


class Ours(Peer):
    def __init__(self, live: Live, folder: Path) -> None:
        self.folder = folder
        ray.init(
            address="local",
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        self.checkpointer = self._connect(live)
        assert self.checkpointer.restore() is None

    def prepare(self, live: Live) -> None:
        """Wait for the arena, which is set up in the background when training begins."""
        deadline_s = time.monotonic() + SETUP_S
        while self.checkpointer.setup_s is None:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the arena was not set up within {SETUP_S:.0f} s")
            time.sleep(0.01)

    def save(self, live: Live, folder: Path, step: int) -> Iterator[str]:
        if not self.checkpointer.save(step):
            raise RuntimeError("the save was skipped")
        yield RETURNED
        with self.checkpointer.lock():  # the optimizer's next step waits for this lock
            pass
        yield STAGED
        self.checkpointer.wait("local")

    def load(self, live: Live, folder: Path, step: int, *, cached: bool) -> float:
        used_s, tiers = self._restore(live, step)
        if not cached and "memory" in tiers:  # by now the agent has released the arena
            wipe(live.model, live.optimizer)
            forget_cached(self.folder)
            used_s, tiers = self._restore(live, step)
        assert ("memory" in tiers) == cached, tiers
        return used_s

    def _restore(self, live: Live, step: int) -> tuple[float, set[str]]:
        """Return the seconds of a restore by a new group, and the tiers that it read."""
        self.checkpointer.close()
        self.checkpointer = self._connect(live)
        started_s = time.perf_counter()
        info = self.checkpointer.restore()
        used_s = time.perf_counter() - started_s
        assert info is not None and info.step == step, info
        return used_s, set(info.bytes_by_tier())

    def close(self) -> None:
        self.checkpointer.close()
        ray.shutdown()

    def _connect(self, live: Live) -> ray_ckpt.Checkpointer:
        ray_ckpt.connect(
            run=RUN,
            storage_path=str(self.folder / "storage"),
            staging=str(self.folder / "staging"),
            replicas=0,
            keep_last=1,
        )
        return ray_ckpt.Checkpointer(model=live.model, optimizer=live.optimizer)


if __name__ == "__main__":
    chosen = parser().parse_args()
    main(lambda live: Ours(live, chosen.folder), chosen)
