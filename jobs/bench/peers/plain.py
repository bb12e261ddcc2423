"""torch.save and safetensors: one file, written while training waits.

Both load from a mapped file into the live tensors, which is their fastest way.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from jobs.bench.peers.child import Live, Peer, main, parser
from jobs.bench.state import MOMENTS


class TorchSave(Peer):
    def save(self, live: Live, folder: Path, step: int) -> Iterator[str]:
        folder.mkdir()
        torch.save(live.state_dict(), folder / "state.pt")
        return iter(())

    def load(self, live: Live, folder: Path, step: int, *, cached: bool) -> None:
        live.load_state_dict(torch.load(folder / "state.pt", mmap=True, weights_only=True))


class Safetensors(Peer):
    """Tensors by flat names, as in programs that save their optimizer in this format."""

    def save(self, live: Live, folder: Path, step: int) -> Iterator[str]:
        from safetensors.torch import save_file

        folder.mkdir()
        save_file(_flat(live), folder / "state.safetensors")
        return iter(())

    def load(self, live: Live, folder: Path, step: int, *, cached: bool) -> None:
        from safetensors import safe_open

        with safe_open(folder / "state.safetensors", framework="pt") as file:
            for name, tensor in _flat(live).items():
                tensor.copy_(file.get_tensor(name))


def _flat(live: Live) -> dict[str, Any]:
    found = {}
    for name, parameter in live.model.named_parameters():
        found[name] = parameter.data
        for key in (*MOMENTS, "step"):
            found[f"optimizer.{name}.{key}"] = live.optimizer.state[parameter][key]
    return found


if __name__ == "__main__":
    arguments = parser()
    arguments.add_argument("format", choices=("torch", "safetensors"))
    chosen = arguments.parse_args()
    main(lambda live: TorchSave() if chosen.format == "torch" else Safetensors(), chosen)
