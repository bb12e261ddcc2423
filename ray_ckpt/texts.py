"""Texts for commands, pages, errors and logs: sizes, tiers, times, steps, metrics, "did you mean" hints."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from difflib import get_close_matches
from html import escape

TIER_TEXT: Mapping[str, str] = {
    "memory": "memory",
    "local": "this node's disk",
    "peer": "other nodes",
    "remote": "the storage path",
}
MAX_NEAREST = 5  # steps or names in a hint
MAX_KNOWN = 50  # names in a hint if no known name is similar
MAX_COMPARED = 10_000  # names that are searched for similar ones, in 0.1 s
MAX_STEPS = 10  # steps that a message lists
MAX_TEXT = 120  # characters of a name or a reason from a log, where space is limited

_AGES = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


# Sizes and tiers


def size_text(size_bytes: float) -> str:
    """Return a size in powers of 1000, such as `1.5 GB`."""
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= one:
            return f"{size_bytes / one:.1f} {unit}"
    return f"{size_bytes:.0f} B"


def tier_text(tier: str) -> str:
    """Return a description of a tier; an unknown tier, written by a newer version, is returned unchanged."""
    return TIER_TEXT.get(tier, tier)


def tiers_text(read_bytes: Mapping[str, float]) -> str:
    """Return `4.0 GB from memory, 1.2 GB from other nodes`, or `nothing`; long names of tiers are cut."""
    parts = (
        f"{size_text(nbytes)} from {short_text(tier_text(tier))}"
        for tier, nbytes in sorted(read_bytes.items())
        if nbytes
    )
    return ", ".join(parts) or "nothing"


# Times


def to_datetime(time_s: float | None) -> datetime | None:
    """Return Unix seconds as a time in UTC; None for None and for times outside the calendar."""
    if time_s is None or time_s < 0:
        return None
    try:
        return datetime.fromtimestamp(time_s, UTC)
    except (OverflowError, ValueError):
        return None


def utc_text(time_s: float) -> str:
    """Return `2026-09-21 14:13:20`, in UTC; `?` for times outside the calendar."""
    found = to_datetime(time_s)
    return "?" if found is None else f"{found:%Y-%m-%d %H:%M:%S}"


def local_time_text(time_s: float) -> str:
    """Return `2026-09-21 14:13:20+02`: local time and its offset from UTC as in ISO 8601; `Z` is UTC.

    `?` for times outside the calendar.
    """
    found = to_datetime(time_s)
    if found is None:
        return "?"
    try:
        local = found.astimezone()
    except OverflowError:  # east of UTC the last hours of the year 9999 are in the next one
        return "?"
    zone = f"{local:%z}"  # +0200
    zone = "Z" if zone == "+0000" else zone[:3] if zone[3:] == "00" else f"{zone[:3]}:{zone[3:]}"
    return f"{local:%Y-%m-%d %H:%M:%S}{zone}"


def duration_text(time_s: float) -> str:
    """Return `850 ms`, `12.3 s`, `4.5 min`, `6.7 h` or `3.2 d`."""
    if 0 < time_s < 0.9995:
        return f"{1000 * time_s:.0f} ms"
    for unit_s, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if time_s >= 2 * unit_s:
            return f"{time_s / unit_s:.1f} {unit}"
    return f"{time_s:.1f} s"


def age_text(age_s: float) -> str:
    """Return `3 min`: an age, rounded down, in the largest unit that it fills."""
    count, unit = next(((int(age_s // n), unit) for unit, n in _AGES if age_s >= n), (0, "s"))
    return f"{count} {unit}"


# Counts, steps, metrics


def count_text(count: int, what: str) -> str:
    """Return `1 step` or `1,200 steps`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def steps_text(steps: Iterable[int]) -> str:
    """Return `20, 40`, each step once; if there are many, only the newest: `..., 1080, 1090`."""
    known = sorted(set(steps))
    shown = ", ".join(map(str, known[-MAX_STEPS:]))
    return f"..., {shown}" if len(known) > MAX_STEPS else shown


def metrics_text(metrics: Mapping[str, float], *, most: int | None = None) -> str:
    """Return `loss 0.73, lr 0.001`: the first `most` metrics by name."""
    text = ", ".join(f"{name} {metrics[name]:.5g}" for name in sorted(metrics)[:most])
    return text if most is None or len(metrics) <= most else f"{text}, ..."


# Hints


def nearest_steps(steps: Iterable[int], step: int, *, kind: str = "live") -> str:
    """Return a hint that names the known steps closest to `step`; `kind` describes their checkpoints."""
    near = sorted(sorted(set(steps), key=lambda known: abs(known - step))[:MAX_NEAREST])
    if not near:
        return f"The run has no {kind} checkpoint at all."
    return f"The nearest {kind} step{'s are' if len(near) > 1 else ' is'} {', '.join(map(str, near))}."


def did_you_mean(wanted: str, names: Collection[str], *, known: Collection[str] | None = None) -> str:
    """Return a hint: those of `names` most similar to `wanted`, else the first of `known` (or of `names`)."""
    near = get_close_matches(wanted, list(names)[:MAX_COMPARED], n=MAX_NEAREST, cutoff=0.5)
    if near:
        return f"Did you mean {', '.join(near)}?"
    every = list(names if known is None else known)
    more = f" and {len(every) - MAX_KNOWN} more" if len(every) > MAX_KNOWN else ""
    return f"Known: {', '.join(every[:MAX_KNOWN]) or 'none'}{more}."


# Text for terminals and pages


def printable(text: str) -> str:
    """Return `text` without control characters: names in a log or manifest must not control a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def short_text(text: str, limit: int = MAX_TEXT) -> str:
    """Return printable text of at most `limit` characters."""
    return printable(text if len(text) <= limit else text[: limit - 1] + "\N{HORIZONTAL ELLIPSIS}")


def html_table(
    title: str, headers: Iterable[str], rows: Iterable[Iterable[object]], left_out: str = ""
) -> str:
    """Return a small unstyled, escaped table for a notebook, with a line below for omitted rows."""
    head = "".join(f"<th>{escape(header)}</th>" for header in headers)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    more = f"<p>{escape(left_out)}</p>" if left_out else ""
    top = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f"<table><caption>{escape(title)}</caption>{top}<tbody>{body}</tbody></table>{more}"
