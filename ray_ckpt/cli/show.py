"""`ray-ckpt show`: one checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from rich.filesize import decimal

from ray_ckpt.catalog.catalog import Catalog, CheckpointView
from ray_ckpt.cli.options import JsonOption, PathArgument, StorageOption, argument, option, store_options
from ray_ckpt.cli.output import (
    FittedTable,
    Output,
    info_json,
    level_text,
    pins_text,
    print_json,
    stdout,
    when_text,
)
from ray_ckpt.errors import CheckpointError, ConfigError
from ray_ckpt.format.manifest import COLUMNS
from ray_ckpt.format.names import is_still_name, state_file
from ray_ckpt.format.tree import IMPORTED_FROM, MAX_TREE_BYTES, decode_state
from ray_ckpt.texts import count_text, metrics_text
from ray_ckpt.types import CheckpointInfo, FileEntry, Level

_SUMMED = ("kind", "item", "name", "dtype", "nbytes")  # columns of the manifest behind the table of items


def show(
    path: PathArgument,
    step: Annotated[int | None, argument("STEP", "Default: the newest one.")] = None,
    slices: Annotated[bool, option("--slices", "Also every slice, and where its bytes are.")] = False,
    storage_option: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one checkpoint: its facts from the log, its files, and its tensors by item.

    `unchanged` are frozen parameters with the same bytes as in the durable checkpoint before. Without STEP
    the checkpoint is the one that a restart resumes from. If a step has several attempts, it is the newest
    live one, with those on the lineage first.

    Example: `ray-ckpt show /shared/runs/gpt 3000 --slices`
    """
    catalog = Catalog(path, store_options(storage_option))
    view = catalog.newest() if step is None else catalog.find(step, all=True) or catalog[step]
    if view is None:
        raise ConfigError(f"Run {catalog.run_name} has no live checkpoint.", hint="See `ray-ckpt ls --all`.")
    document = {"run_name": catalog.run_name, "run_uid": catalog.run_uid, **info_json(view)}
    failure: CheckpointError | None = None
    if view.where is not None:
        try:
            document |= _contents_json(catalog, view, slices)
        except CheckpointError as error:
            failure = None if view.is_deleted() else error
    if as_json:
        print_json(document)
    else:
        _print(view, document, is_unread=failure is not None)
    if failure is not None:
        raise failure


def _print(view: CheckpointView, document: Mapping[str, Any], *, is_unread: bool) -> None:
    """Print the facts, and the content of the files if `document` has it.

    If not, the checkpoint is being deleted, unless its files cannot be read (`is_unread`).
    """
    console, has_content = stdout(), "files" in document
    where = view.where or "none: it has no files on the storage path"
    if view.where is not None and not (has_content or is_unread):
        where += ", being deleted"
    info, mesh = view.info, f", mesh {view.info.mesh}" if view.info.mesh else ""
    facts = {
        **{
            key.replace("_", " "): document[key]
            for key in ("run_name", "run_uid", "step", "attempt", "session")
        },
        "state": info.state,
        "level": level_text(info),
        "world": f"{count_text(info.world_size, 'rank')} on {count_text(info.num_nodes, 'node')}{mesh}",
        "size": f"{decimal(info.size_bytes)} ({info.size_bytes} bytes)",
        **({"linked": f"{decimal(info.shared_bytes)} on the nodes"} if info.shared_bytes else {}),
        **({"exported": exported_text(info)} if info.exported else {}),
        "when": when_text(info.committed_at_s),
        "root digest": info.root_digest,
        "metrics": metrics_text(info.metrics),
        "pins": pins_text(info) or "none",
        "last verified": "never" if info.verified_at_s is None else when_text(info.verified_at_s),
        "last drill": "none"
        if info.drilled_at_s is None
        else f"{info.drill}, {when_text(info.drilled_at_s)}",
        **({"damaged": f"fragments {info.damaged} on the storage path"} if info.damaged else {}),
        **({"drifted apart": info.suspect} if info.suspect else {}),
        "path": where,
    }
    if "shared" in document:
        shared = document["shared"]
        text = f"{decimal(shared['size_bytes'])}, in {count_text(len(shared['files']), 'file')}"
        facts["unchanged"] = f"{text}, as in step {shared['step']}"
    if IMPORTED_FROM in document:
        facts["imported from"] = "  ".join(filter(None, document[IMPORTED_FROM].values()))
    for name, value in facts.items():
        console.print_line(f"{name:13}  {value}")
    if has_content:
        _print_content(console, document)


def exported_text(info: CheckpointInfo) -> str:
    """Return a text about the items on the storage path apart from the whole checkpoint."""
    when = "" if info.exported_at_s is None else f", {when_text(info.exported_at_s)}"
    return f"{info.exported}: {decimal(info.exported_bytes)}{when}; not durable by that"


def _contents_json(catalog: Catalog, view: CheckpointView, slices: bool) -> dict[str, Any]:
    """Return the facts that only the files have. Raise the errors of `CheckpointView.each_table`."""
    content = _content_json(view, slices)
    content |= _shared_json(catalog, view, content["files"])
    if any(s.is_import for s in catalog.sessions if s.session == view.info.id.session):
        content[IMPORTED_FROM] = _origin(view)
    return content


def _shared_json(
    catalog: Catalog, view: CheckpointView, files: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the still shards that the durable checkpoint before has alike; nothing if there are none.

    Nothing also if that checkpoint cannot be read: it may be deleted by now, and its damage is its own.
    """
    still = [file for file in files if is_still_name(file["name"])]
    earlier = [c for c in catalog.checkpoints if c.level is Level.DURABLE and c.seq < view.info.seq]
    if not still or not earlier:
        return {}
    before = catalog.view(earlier[-1])
    try:
        known = {(f.name, f.size_bytes, f.digest) for fragment in before.fragments() for f in fragment.files}
    except CheckpointError:
        return {}
    alike = [file for file in still if (file["name"], file["size_bytes"], file["digest"]) in known]
    if not alike:
        return {}
    names = [file["name"] for file in alike]
    size_bytes = sum(file["size_bytes"] for file in alike)
    return {"shared": {"step": before.info.step, "files": names, "size_bytes": size_bytes}}


def _origin(view: CheckpointView) -> dict[str, str]:
    """Return the format, its version and the source of an imported checkpoint."""
    document = decode_state(view.files().read_whole(state_file(0, 1), MAX_TREE_BYTES))
    found = document.get(IMPORTED_FROM)
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}


def _content_json(view: CheckpointView, slices: bool) -> dict[str, Any]:
    """Return the files, and the tensors by item."""
    import pyarrow as pa
    import pyarrow.compute as pc

    files: list[FileEntry] = []
    tables: list[pa.Table] = []
    columns = COLUMNS if slices else pa.schema([COLUMNS.field(name) for name in _SUMMED])
    for metadata, found, own in view.each_table():
        files += (own, *metadata.files)
        tables.append(found.select(columns.names).cast(columns))
    table = pa.concat_tables(tables)
    rows = table.filter(pc.equal(table["kind"], "slice"))
    grouped = rows.group_by("item", use_threads=False).aggregate(
        [("name", "count_distinct"), ("name", "count"), ("nbytes", "sum"), ("dtype", "distinct")]
    )
    items = [
        {
            "item": row["item"],
            "tensors": row["name_count_distinct"],
            "slices": row["name_count"],
            "size_bytes": row["nbytes_sum"],
            "dtypes": sorted(row["dtype_distinct"]),
        }
        for row in grouped.to_pylist()
    ]
    content: dict[str, Any] = {
        "files": [
            {"name": f.name, "size_bytes": f.size_bytes, "digest": f.digest}
            for f in sorted(files, key=lambda file: file.name)
        ],
        "items": sorted(items, key=lambda item: str(item["item"])),
    }
    if slices:
        content["slices"] = rows.drop_columns(["kind"]).to_pylist()
    return content


def _print_content(console: Output, document: Mapping[str, Any]) -> None:
    table = FittedTable("file", "size", right=(1,), whole=(1,), fold=(0,))
    for file in document["files"]:
        table.add(file["name"], decimal(file["size_bytes"]))
    console.print(table)
    table = FittedTable("item", "tensors", "slices", "size", "dtypes", right=(1, 2, 3), whole=(3,), fold=(0,))
    for item in document["items"]:
        size = decimal(item["size_bytes"])
        table.add(item["item"], item["tensors"], item["slices"], size, " ".join(item["dtypes"]))
    console.print(table)
    if "slices" in document:
        headers = ("tensor", "dtype", "global shape", "offset", "shape", "file", "at byte", "bytes")
        table = FittedTable(*headers, right=(6, 7), whole=(2, 3, 4), fold=(0, 5), gives_way=(2, 1, 4, 3))
        for part in document["slices"]:
            key = f"{part['item']}.{part['name']}" if part["name"] else part["item"]
            shapes = (part["global_shape"], part["offset"], part["shape"])
            table.add(key, part["dtype"], *shapes, part["file"], part["byte_offset"], part["nbytes"])
        console.print(table)
