"""`ray-ckpt export`: one checkpoint as files that stock tools read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Protocol

import typer

from ray_ckpt.catalog.catalog import Catalog, CheckpointView
from ray_ckpt.catalog.export import MAX_FILE_BYTES, export_safetensors, export_torch, write_safetensors
from ray_ckpt.catalog.lazy_tensor import LazyTensor
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
from ray_ckpt.types import Level, ProgressCallback


class Form(StrEnum):
    safetensors = "safetensors"
    torch = "torch"
    hf = "hf"
    dcp = "dcp"
    universal = "universal"
    torch_dist = "torch_dist"


_WITH_OPTIMIZER = (Form.universal, Form.torch_dist)  # of these, --item names the model alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One checkpoint and the options of the command."""

    catalog: Catalog
    view: CheckpointView
    out: Path
    item: str | None
    only: tuple[str, ...]
    max_file_bytes: int
    dtype: str | None
    like: Path | None
    force: bool

    @property
    def opened(self) -> OpenedCheckpoint:
        self.view.files()  # ConfigError if there are none
        return OpenedCheckpoint(OpenedRun(self.catalog), self.view)

    def check_whole(self, what: str) -> None:
        """Raise ConfigError if patterns choose some tensors."""
        if self.only:
            raise ConfigError(f"{what}.", hint="Leave out --only.")


def export(
    path: PathArgument,
    out: Annotated[
        Path,
        argument("OUT", "A new or empty folder for the files; for torch, a new file."),
    ],
    to: Annotated[Form, typer.Option("--to", help="The format of the files.")] = Form.safetensors,
    step: Annotated[int | None, option("--step", "This step instead of the newest durable one.")] = None,
    items: Annotated[
        list[str] | None,
        option("--item", "Only this item, such as model; names are without its prefix.", "ITEM"),
    ] = None,
    only: Annotated[
        list[str] | None,
        option("--only", "Only tensors whose full names match. Repeatable.", "PATTERN"),
    ] = None,
    max_file: Annotated[
        str | None,
        option(
            "--max-file", "For safetensors and hf: the most of tensors in one file; default: 5GB.", "SIZE"
        ),
    ] = None,
    dtype: Annotated[
        str | None, option("--dtype", "For hf: convert floating point to this dtype, such as bfloat16.")
    ] = None,
    like: Annotated[
        Path | None,
        option("--like", "For hf: a model directory with config.json, if the checkpoint has none.", "DIR"),
    ] = None,
    force: Annotated[
        bool,
        option(
            "--force",
            "Replace an older export in OUT, or the file. Refused if OUT has weights that its index does not "
            "list; universal replaces none of the same step.",
        ),
    ] = False,
    storage_option: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write one checkpoint as files for standard tools: whole tensors, every byte verified.

    `safetensors` writes a folder in Hugging Face's layout and needs little memory; `torch` writes one file
    for `torch.load(weights_only=True)`, which includes plain values, and needs as much memory as the state.
    `hf` writes the model directory that `save_pretrained` would write, for `from_pretrained` and vLLM: names
    of the hub, tied weights once, `config.json` and the tokenizer; memory holds one layer. `dcp` writes a
    directory for `torch.distributed.checkpoint.load`, `torch_dist` one for Megatron-core; memory holds one
    saved slice. `universal` writes a Universal Checkpoint of DeepSpeed; memory holds one parameter.
    Exits with 1, and leaves no files, if the checkpoint is damaged.

    Example: `ray-ckpt export /shared/runs/gpt gpt-3000 --step 3000 --item model`
    """
    for name, value, forms in (
        ("--dtype", dtype, (Form.hf,)),
        ("--like", like, (Form.hf,)),
        ("--max-file", max_file, (Form.safetensors, Form.hf)),
    ):
        if value is not None and to not in forms:
            hint = f"Give both, or leave {name} out."
            raise ConfigError(f"{name} goes with --to {' or '.join(forms)}.", hint=hint)
    if to is not Form.torch and out.suffix == ".safetensors" and not out.is_dir():
        raise ConfigError(f"{out} is to be a folder.", hint=f"Give {out.with_suffix('')}, for example.")
    item = _only_item(items or ())
    catalog = Catalog(path, store_options(storage_option))
    view: CheckpointView | None
    if step is not None:
        view = catalog[step]
    elif item is None or to in _WITH_OPTIMIZER:
        view = catalog.newest(Level.DURABLE)
    else:
        view = catalog.with_items([item])  # which may have been uploaded alone
    if view is None:
        durable = catalog.durable_steps
        raise ConfigError(
            f"Run {catalog.run_name} has no durable checkpoint{' on its lineage' if durable else ''}.",
            hint=catalog.nearest_durable(max(durable, default=0)),
        )
    request = Request(
        catalog=catalog,
        view=view,
        out=out,
        item=item,
        only=tuple(only or ()),
        max_file_bytes=MAX_FILE_BYTES if max_file is None else size(max_file, option="--max-file"),
        dtype=dtype,
        like=like,
        force=force,
    )
    try:
        with byte_bar("exporting") as bar:
            files = _EXPORTERS[to](request, bar.advance)
    except RestoreError as error:
        print(f"ray-ckpt: {printable(str(error))}", file=sys.stderr)
        raise typer.Exit(EXIT_DAMAGED) from error
    _print(request, files, as_json=as_json)


def _only_item(items: Sequence[str]) -> str | None:
    """Return the value of --item. Raise ConfigError if there are several."""
    if len(items) > 1:
        patterns = " ".join(f"--only '{item}.*'" for item in dict.fromkeys(items))
        raise ConfigError(
            f"--item is given {'twice' if len(items) == 2 else f'{len(items)} times'}.",
            hint=f"For several items give {patterns}, which keeps their full names; without both, all items "
            "are exported.",
        )
    return items[0] if items else None


def _print(request: Request, files: Sequence[Path], *, as_json: bool) -> None:
    if as_json:
        rows = [{"file": str(file), "size_bytes": file.stat().st_size} for file in files]
        print_json({"run_name": request.catalog.run_name, "step": request.view.info.step, "files": rows})
        return
    for file in files:
        stdout().print_line(str(file))


# The formats


def _safetensors(request: Request, progress: ProgressCallback) -> Sequence[Path]:
    return export_safetensors(
        request.view,
        request.out,
        item=request.item,
        only=request.only,
        max_file_bytes=request.max_file_bytes,
        force=request.force,
        progress=progress,
    )


def _torch(request: Request, progress: ProgressCallback) -> Sequence[Path]:
    return export_torch(
        request.catalog,
        request.view,
        request.out,
        item=request.item,
        only=request.only,
        force=request.force,
    )


def _hf(request: Request, progress: ProgressCallback) -> Sequence[Path]:
    from ray_ckpt.interop.packages import require

    require("transformers", extra="huggingface")  # before the import of what needs it
    from ray_ckpt.interop.huggingface.hub import HubModel, parse_dtype

    request.check_whole("A model directory has the whole model")
    wanted = parse_dtype(request.dtype) if request.dtype is not None else None
    model = HubModel(request.opened, item=request.item or "model", dtype=wanted, like=request.like)
    return write_safetensors(
        model.shards(request.max_file_bytes),
        request.out,
        stem=model.stem,
        files=model.files,
        force=request.force,
        progress=progress,
    )


class _DirectoryExporter(Protocol):
    """An exporter of whole items to a folder."""

    def __call__(
        self,
        checkpoint: OpenedCheckpoint,
        tensors: Mapping[str, LazyTensor],
        out: Path,
        *,
        item: str | None,
        force: bool,
        progress: ProgressCallback | None,
    ) -> tuple[Path, ...]: ...


def _directory(request: Request, export_to: _DirectoryExporter, progress: ProgressCallback) -> Sequence[Path]:
    request.check_whole("The directory has whole items")
    tensors, force = request.view.tensors(), request.force
    return export_to(request.opened, tensors, request.out, item=request.item, force=force, progress=progress)


def _dcp(request: Request, progress: ProgressCallback) -> Sequence[Path]:
    from ray_ckpt.interop.dcp.export import export_dcp

    return _directory(request, export_dcp, progress)


def _universal(request: Request, progress: ProgressCallback) -> Sequence[Path]:
    from ray_ckpt.interop.exporters.universal import export_universal

    return _directory(request, export_universal, progress)


def _torch_dist(request: Request, progress: ProgressCallback) -> Sequence[Path]:
    from ray_ckpt.interop.exporters.torch_dist import export_torch_dist

    return _directory(request, export_torch_dist, progress)


_EXPORTERS: Mapping[Form, Callable[[Request, ProgressCallback], Sequence[Path]]] = {
    Form.safetensors: _safetensors,
    Form.torch: _torch,
    Form.hf: _hf,
    Form.dcp: _dcp,
    Form.universal: _universal,
    Form.torch_dist: _torch_dist,
}
