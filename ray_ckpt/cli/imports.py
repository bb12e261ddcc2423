"""`ray-ckpt import`: a checkpoint of another format as a checkpoint of a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from ray_ckpt.admin.rollback import QUIET_S
from ray_ckpt.admin.write_checkpoint import NewCheckpoint, left_aside, open_or_begin, write_checkpoint
from ray_ckpt.cli.options import JsonOption, StorageOption, argument, option, store_options
from ray_ckpt.cli.output import print_json, stdout
from ray_ckpt.cli.progress import byte_bar
from ray_ckpt.errors import RunInUse
from ray_ckpt.format.names import CHECKPOINTS_DIR
from ray_ckpt.location import Location
from ray_ckpt.texts import count_text, printable
from ray_ckpt.types import CheckpointInfo


class Form(StrEnum):
    dcp = "dcp"
    hf = "hf"
    pt = "pt"
    deepspeed = "deepspeed"
    universal = "universal"
    verl = "verl"
    torch_dist = "torch_dist"


def import_(
    form: Annotated[Form, typer.Argument(metavar="FORMAT", help=f"{', '.join(Form)}.", show_default=False)],
    source: Annotated[Path, argument("SRC", "A folder, or for pt a file of torch.save, on this machine.")],
    run: Annotated[str, argument("RUN", "The run, new or not: `<storage_path>/<run name>`.")],
    step: Annotated[
        int | None,
        option("--step", "The completed steps; else the number at the end of SRC or its folder."),
    ] = None,
    even_if_at_work: Annotated[
        bool, option("--even-if-at-work", "Even if a training may be at work; it is stopped.")
    ] = False,
    storage_option: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint of another format into a run, from which the next training continues.

    `dcp` is a folder of torch.distributed.checkpoint, `hf` a model folder of Hugging Face with safetensors,
    `pt` a file of torch.save. `deepspeed` is the folder of a tag of ZeRO, `universal` a Universal Checkpoint
    of DeepSpeed, `verl` the folder of one model of verl or SkyRL, `torch_dist` one of Megatron-core. No code
    in the files runs: names outside a fixed list are refused. Memory does not grow with the tensors. In a run
    with checkpoints, those of this step and later ones leave the lineage.

    Example: `ray-ckpt import hf checkpoints/checkpoint-3000 /shared/runs/gpt`
    """
    from ray_ckpt.interop.importers import open_source
    from ray_ckpt.interop.importers.source import step_of

    source = source.absolute()
    step = step_of(source) if step is None else step
    tier, tail = open_or_begin(run, store_options(storage_option))
    if tail.is_at_work(time.time()) and not even_if_at_work:
        raise RunInUse(
            f"Run {tail.history.run_name} may be at work: its log has a record of the last {QUIET_S:.0f} s.",
            hint="Stop its training and wait, or give --even-if-at-work: it would be stopped.",
        )
    found = open_source(form.value, source)
    new = NewCheckpoint(step=step, tensors=found.tensors, items=found.items, imported_from=found.origin)
    aside = left_aside(tail.history, step)
    with byte_bar("importing", new.num_bytes) as bar:
        info = write_checkpoint(
            tier,
            tail.history,
            new,
            owner=f"ray-ckpt import {form.value} {printable(str(source))}",
            now_s=time.time(),
            progress=bar.advance,
        )
    if as_json:
        print_json(_json(tier.root, info, new, aside))
    else:
        _print(info, new, aside)


def _print(info: CheckpointInfo, new: NewCheckpoint, aside: Sequence[CheckpointInfo]) -> None:
    items = f"{count_text(len(new.items), 'item')}: {', '.join(new.items)}"
    stdout().print_line(
        f"Step {info.step} is durable, in session {info.id.session}, with {items}; {decimal(new.num_bytes)}."
    )
    if aside:
        steps = ", ".join(str(old.step) for old in aside)
        stdout().print_line(
            f"Left aside: {steps}. They are deleted after the first save of the next training, except pinned "
            f"ones; until then, `ray-ckpt rollback --to STEP` goes back to one of them."
        )


def _json(
    root: Location, info: CheckpointInfo, new: NewCheckpoint, aside: Sequence[CheckpointInfo]
) -> dict[str, Any]:
    return {
        "run_name": root.parent.name,
        "run_uid": info.id.run_uid,
        "session": info.id.session,
        "step": info.step,
        "attempt": info.id.attempt,
        "size_bytes": info.size_bytes,
        "items": list(new.items),
        "imported_from": dict(new.imported_from),
        "path": str(root / CHECKPOINTS_DIR / info.directory),
        "left_aside": [{"step": old.step, "attempt": old.id.attempt} for old in aside],
    }
