"""torchsnapshot's async_take; restore reads into the live tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torchsnapshot import Snapshot  # type: ignore[import-not-found]

from jobs.bench.peers.child import RETURNED, Live, Peer, main, parser
from jobs.bench.peers.dcp import start_group


class Torchsnapshot(Peer):
    def save(self, live: Live, folder: Path, step: int) -> Iterator[str]:
        pending = Snapshot.async_take(str(folder), {"model": live.model, "optimizer": live.optimizer})
        yield RETURNED
        pending.wait()

    def load(self, live: Live, folder: Path, step: int, *, cached: bool) -> None:
        Snapshot(str(folder)).restore({"model": live.model, "optimizer": live.optimizer})


def make(live: Live) -> Torchsnapshot:
    start_group()
    return Torchsnapshot()


if __name__ == "__main__":
    main(make, parser().parse_args())
