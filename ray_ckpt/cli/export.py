"""`ray-ckpt export`: one checkpoint as files that stock tools read."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.catalog.export import export_safetensors, export_torch, write_safetensors
from ray_ckpt.catalog.load import OpenedCheckpoint, OpenedRun
from ray_ckpt.cli.options import (
    EXIT_DAMAGED,
    JsonOption,
    PathArgument,
    StorageOption,
    argument,
    option,
    size,
    store_options,
)
from ray_ckpt.cli.output import print_json, stdout
from ray_ckpt.cli.progress import byte_bar
from ray_ckpt.errors import ConfigError, RestoreError
from ray_ckpt.texts import printable
from ray_ckpt.types import Level

if TYPE_CHECKING:
    from ray_ckpt.interop.huggingface.hub import HubModel


class Form(StrEnum):
    safetensors = "safetensors"
    torch = "torch"
    hf = "hf"
    dcp = "dcp"


def export(
    path: PathArgument,
    out: Annotated[
        Path,
        argument("OUT", "A new or empty folder; a new file for torch."),
    ],
    to: Annotated[Form, typer.Option("--to", help="The format of the files.")] = Form.safetensors,
    step: Annotated[int | None, option("--step", "This step instead of the newest durable one.")] = None,
    item: Annotated[
        str | None,
        option("--item", "Only this item, such as model; names are without its prefix."),
    ] = None,
    only: Annotated[
        list[str] | None,
        option("--only", "Only tensors whose full names match. Repeatable.", "PATTERN"),
    ] = None,
    max_file: Annotated[
        str, typer.Option(help="For safetensors and hf: the most of tensors in one file.")
    ] = "5GB",
    dtype: Annotated[
        str | None, option("--dtype", "For hf: convert floating point to this dtype, such as bfloat16.")
    ] = None,
    like: Annotated[
        Path | None,
        option("--like", "For hf: a model directory with config.json, if the checkpoint has none.", "DIR"),
    ] = None,
    force: Annotated[bool, option("--force", "Replace an older export in OUT, or the file.")] = False,
    storage_option: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write one checkpoint as files for standard tools: whole tensors, every byte verified.

    `safetensors` writes a folder in Hugging Face's layout and needs little memory; `torch` writes one file
    for `torch.load(weights_only=True)`, which includes plain values, and needs as much memory as the state.
    `hf` writes the model directory that `save_pretrained` would write, for `from_pretrained` and vLLM: names
    of the hub, tied weights once, `config.json` and the tokenizer; memory holds one layer. `dcp` writes a
    directory for `torch.distributed.checkpoint.load`; memory holds one saved slice.
    Exits with 1, and leaves no files, if the checkpoint is damaged.

    Example: `ray-ckpt export /shared/runs/gpt gpt-3000 --step 3000 --item model`
    """
    catalog = Catalog(path, store_options(storage_option))
    view = catalog[step] if step is not None else catalog.newest(Level.DURABLE)
    if view is None:
        raise ConfigError(f"Run {catalog.run_name} has no durable checkpoint.", hint="See `ray-ckpt ls`.")
    patterns, limit = tuple(only or ()), size(max_file, option="--max-file")
    try:
        if to is Form.torch:
            files = export_torch(catalog, view, out, item=item, only=patterns, force=force)
        elif to is Form.hf:
            model = _hub_model(OpenedRun(catalog).at(view.info.id), item, patterns, dtype, like)
            with byte_bar("exporting") as bar:
                shards = model.shards(limit)
                files = write_safetensors(
                    shards, out, stem=model.stem, files=model.files, force=force, progress=bar.advance
                )
        elif to is Form.dcp:
            if patterns:
                raise ConfigError("A DCP directory has whole items.", hint="Leave out --only.")
            from ray_ckpt.interop.dcp.export import export_dcp

            with byte_bar("exporting") as bar:
                opened, tensors = OpenedRun(catalog).at(view.info.id), view.tensors()
                files = export_dcp(opened, tensors, out, item=item, force=force, progress=bar.advance)
        else:
            with byte_bar("exporting") as bar:
                files = export_safetensors(
                    view,
                    out,
                    item=item,
                    only=patterns,
                    max_file_bytes=limit,
                    force=force,
                    progress=bar.advance,
                )
    except RestoreError as error:
        print(f"ray-ckpt: {printable(str(error))}", file=sys.stderr)
        raise typer.Exit(EXIT_DAMAGED) from error
    sizes = [file.stat().st_size for file in files]
    if as_json:
        rows = [{"file": str(f), "size_bytes": size} for f, size in zip(files, sizes, strict=True)]
        print_json({"run_name": catalog.run_name, "step": view.info.step, "files": rows})
    else:
        for file in files:
            stdout().print_line(str(file))


def _hub_model(
    checkpoint: OpenedCheckpoint,
    item: str | None,
    only: tuple[str, ...],
    dtype: str | None,
    like: Path | None,
) -> HubModel:
    from ray_ckpt.interop.packages import require

    require("transformers", extra="huggingface")  # before the import of what needs it
    from ray_ckpt.interop.huggingface.hub import HubModel, parse_dtype

    if only:
        raise ConfigError("A model directory has the whole model.", hint="Leave out --only.")
    wanted = parse_dtype(dtype) if dtype is not None else None
    return HubModel(checkpoint, item=item or "model", dtype=wanted, like=like)
