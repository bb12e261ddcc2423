"""`ray-ckpt diff`: what differs between two checkpoints."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from ray_ckpt.analysis.diff import MAX_VALUES, Status, TensorDiff, compare
from ray_ckpt.analysis.diff_values import ValueDiff
from ray_ckpt.catalog.catalog import Catalog, CheckpointView
from ray_ckpt.catalog.uri import CheckpointUri
from ray_ckpt.cli.options import EXIT_DAMAGED, JsonOption, StorageOption, argument, option, store_options
from ray_ckpt.cli.output import FittedTable, print_json, stdout
from ray_ckpt.cli.progress import byte_bar
from ray_ckpt.errors import ConfigError
from ray_ckpt.location import without_tilde

_ORDER: Sequence[Status] = (
    "damaged",
    "only_a",
    "only_b",
    "shape",
    "dtype",
    "changed",
    "equal",
)  # order of rows in the table and of counts in the summary
MAX_STEP_DIGITS = 19  # a step has 64 bits
_NUMBERS = ("relative", "max_abs", "cosine", "norm_a", "norm_b", "norm_diff")


def diff(
    first: Annotated[
        str,
        argument("PATH|A", "The run of both steps; or checkpoint A."),
    ],
    second: Annotated[
        str,
        argument(
            "STEP|B",
            "Step of A; or checkpoint B, such as `s3://bucket/runs/gpt@3000`; without @STEP the newest.",
        ),
    ],
    third: Annotated[int | None, argument("STEP", "Step of B.")] = None,
    only: Annotated[
        list[str] | None,
        option("--only", "Tensors such as `model.layers.*`. Repeatable.", "PATTERN"),
    ] = None,
    all: Annotated[bool, option("--all", "List equal tensors too, not only their count.")] = False,
    storage_option: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two checkpoints: `diff PATH STEP STEP` of one run, `diff A B` of any two.

    Shows tensors that were added, removed, reshaped or have another dtype, how far the values of the others
    moved, NaN and infinities; then the plain values of rank 0. Tensors with equal digests are not read. Exits
    with 1 if something is damaged, else with 0, even if everything differs.

    Example: `ray-ckpt diff /shared/runs/gpt 1000 2000 --only 'model.*'`
    """
    a, b = _views(first, second, third, store_options(storage_option))
    with byte_bar("comparing") as bar:
        comparison = compare(a, b, only=only or (), progress=bar.advance)
        bar.expect(lambda: comparison.size_bytes)
        tensors = sorted(comparison, key=_rank)
    values = comparison.values()
    is_damaged = any(found.status == "damaged" for found in tensors)
    if as_json:
        print_json(_document(a, b, tensors, values, ok=not is_damaged))
    else:
        _print(a, b, [found for found in tensors if all or found.status != "equal"], values)
        _print_summary(tensors, values)
    if is_damaged:
        raise typer.Exit(EXIT_DAMAGED)


def _views(
    first: str, second: str, third: int | None, options: Mapping[str, str]
) -> tuple[CheckpointView, CheckpointView]:
    if third is not None:
        if not (second.isdecimal() and len(second) <= MAX_STEP_DIGITS):
            raise ConfigError(
                f"{second[:80]!r} is not a step.",
                hint="Give PATH STEP STEP, or two checkpoints such as PATH@STEP.",
            )
        catalog = Catalog(first, options)
        return catalog[int(second)], catalog[third]
    if second.isdecimal():
        raise ConfigError(
            "Only one step was given.", hint=f"`ray-ckpt diff PATH {second} STEP` takes two of one run."
        )
    return _view(first, options), _view(second, options)


def _view(text: str, options: Mapping[str, str]) -> CheckpointView:
    """Return the checkpoint that a URI or a folder names. `options` apply to URLs only."""
    is_url = "://" in text
    uri = CheckpointUri.parse(text if is_url else str(without_tilde(text).absolute()))
    opened = uri.open(options if is_url else None)
    return opened.run.catalog.view(opened.info)


def _rank(found: TensorDiff) -> tuple[int, bool, float, str]:
    """Return a sort key: incomparable tensors, then those with NaN or infinities, then the largest change."""
    return _ORDER.index(found.status), found.is_finite, -(found.relative or 0.0), found.name


def _print(
    a: CheckpointView, b: CheckpointView, tensors: Sequence[TensorDiff], values: Sequence[ValueDiff]
) -> None:
    console = stdout()
    for label, view in (("A", a), ("B", b)):
        console.print_line(f"{label}: step {view.info.step}, {view.where}")
    if tensors:
        table = FittedTable(
            "tensor",
            "",
            *("relative", "max change", "cosine", "norm A", "norm B", "norm B-A", "differ", "NaN", "inf"),
            right=range(2, 11),
            fold=(0,),
            gives_way=(5, 6, 4, 7, 3),
        )
        for found in tensors:
            numbers = [_number(getattr(found, name)) for name in _NUMBERS]
            counts = (
                "" if found.num_different is None else found.num_different,
                _counts(found.nan_a, found.nan_b),
                _counts(found.inf_a, found.inf_b),
            )
            style = "red" if found.status == "damaged" else None if found.is_finite else "yellow"
            table.add(found.name, _what(found), *numbers, *counts, style=style)
        console.print(table)
    if values:
        table = FittedTable("value", "A", "B", fold=(0, 1, 2))
        for value in values:
            table.add(value.name, *("absent" if v is None else v for v in (value.a, value.b)))
        console.print(table)
    for found in tensors:
        if found.detail:
            console.print_line(f"{found.name}: {found.detail}", style="red")


def _print_summary(tensors: Sequence[TensorDiff], values: Sequence[ValueDiff]) -> None:
    counts = Counter(found.status for found in tensors)
    parts = [f"{counts[status]} {_words(status)}" for status in _ORDER if counts[status]]
    if spoilt := sum(not found.is_finite for found in tensors):
        parts.append(f"{spoilt} with NaN or infinities")
    many = "at least " if len(values) == MAX_VALUES else ""
    text = f"{len(tensors)} tensors: {', '.join(parts) or 'none'}; {many}{len(values)} values differ"
    stdout().print_line(text)


def _what(found: TensorDiff) -> str:
    """Return the status in words, such as `changed`, or both shapes or dtypes."""
    if found.status == "shape":
        return f"shape {_shape(found.shape_a)} -> {_shape(found.shape_b)}"
    return f"{found.dtype_a} -> {found.dtype_b}" if found.status == "dtype" else _words(found.status)


def _words(status: str) -> str:
    return {"only_a": "only in A", "only_b": "only in B"}.get(status, status)


def _shape(shape: tuple[int, ...] | None) -> str:
    return "x".join(map(str, shape)) if shape else "scalar"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def _counts(a: int | None, b: int | None) -> str:
    return f"{a} -> {b}" if a or b else ""


def _document(
    a: CheckpointView,
    b: CheckpointView,
    tensors: Sequence[TensorDiff],
    values: Sequence[ValueDiff],
    *,
    ok: bool,
) -> dict[str, Any]:
    sides = {
        label: {"step": view.info.step, "attempt": view.info.id.attempt, "path": view.where}
        for label, view in (("a", a), ("b", b))
    }
    counts = Counter(found.status for found in tensors)
    return {
        "ok": ok,
        **sides,
        "summary": {status: counts[status] for status in _ORDER},
        "tensors": [{key: _plain(value) for key, value in asdict(found).items()} for found in tensors],
        "values": [asdict(value) for value in values],
    }


def _plain(value: Any) -> Any:
    """Return `value`, but infinities and NaN as strings, as JSON has no numbers for them."""
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
