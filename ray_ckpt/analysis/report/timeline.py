"""The timeline of a run, as SVG: the state of the training, its steps, and its saves.

The number of elements is bounded for any length of the run: time is cut into COLUMNS, and marks of one kind
in one column are drawn as one mark with a count.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from markupsafe import Markup

from ray_ckpt.analysis.goodput import SessionSpan, StepsOverTime
from ray_ckpt.analysis.report.facts import CAUSE_TEXT, RunReport
from ray_ckpt.texts import duration_text, short_text, tiers_text, to_datetime, utc_text
from ray_ckpt.types import FAILURES, CheckpointInfo, Level, SessionInfo

WIDTH = 1120.0  # width of the picture in SVG units, about pixels
LEFT, RIGHT = 104.0, 16.0  # margins of the plot, with room for the names of lanes
COLUMNS = 400  # columns of time: about the number of marks that can be distinguished
MAX_DRAWN = 200  # newest sessions in the drawn time
BAND_Y, BAND_H = 34.0, 22.0
CURVE_Y, CURVE_H = 70.0, 190.0
LANE_H = 24.0
MARK_W = 3.0
MIN_W = 0.8  # least width of a stretch, so that the stretch is visible
GAP_W, MIN_GAPPED_W = 1.0, 3.0  # gap between adjacent parts, and the least width of a part with a gap
HATCH_W = 6.0  # distance between two lines of a hatch
LABEL_GAP = 64.0  # distance between the beginnings of two labels, which must not overlap
CHAR_W = 6.3  # approximate width of a letter of a label
ZOOM_BELOW = 1 / 3  # part of the whole run: a longer window is not drawn as a separate picture
ZOOM_INTERVALS = 4.0  # usual times between two saves, drawn before and after a failure
MORE_S, MORE_PART = 300.0, 0.25  # longest time drawn after the last event: the larger of s and part
TICK_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
MAX_TICKS = 9  # labels of the time axis; more would overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The drawn time, in Unix seconds."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return max(self.end_s - self.start_s, 1e-3)

    def x(self, time_s: float) -> float:
        """Return the position of a time; times outside the window are drawn at the edges."""
        part = (time_s - self.start_s) / self.length_s
        return LEFT + min(max(part, 0.0), 1.0) * (WIDTH - LEFT - RIGHT)

    def column(self, time_s: float) -> int:
        return min(COLUMNS - 1, max(0, int((time_s - self.start_s) / self.length_s * COLUMNS)))

    def __contains__(self, time_s: float) -> bool:
        return self.start_s <= time_s <= self.end_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """An event in a lane; `kind` selects its shape, and `text` describes it."""

    time_s: float
    kind: str
    text: str


def whole(report: RunReport) -> Window | None:
    """Return a window of all sessions and a short time after them for later events; None without sessions."""
    spans = report.goodput.spans
    if not spans:
        return None
    start_s, end_s = spans[-MAX_DRAWN:][0].opened_s, spans[-1].closed_s
    ended = report.sessions[-1].ended
    is_over = ended is not None and ended.cause not in FAILURES
    later_s = _last_known_s(report) if is_over else report.now_s
    more_s = max(MORE_S, MORE_PART * (end_s - start_s))
    end_s = max(end_s, min(later_s, end_s + more_s))
    return Window(start_s=start_s, end_s=end_s + 0.01 * (end_s - start_s))


def _last_known_s(report: RunReport) -> float:
    """Return the time of the last event or durable checkpoint, which may be after the last session."""
    events_s = (event.time_s for event in report.events[-1:])
    durable_s = (info.durable_at_s for info in report.checkpoints if info.durable_at_s is not None)
    return max((*events_s, *durable_s), default=0.0)


def around_last_failure(report: RunReport) -> Window | None:
    """Return a window around the last failure with some saves on both sides; None if that is most of the run.

    The failure may be older than all sessions in the picture of the whole run.
    """
    everything = whole(report)
    failed = [problem for problem in report.problems if problem.cause in FAILURES]
    if everything is None or not failed:
        return None
    last = failed[-1]
    back_s = last.ended_s + (last.recovery.estimate if last.recovery else 0.0)
    room_s = ZOOM_INTERVALS * (report.interval_s or 60.0)
    start_s, end_s = last.ended_s - room_s, min(back_s + room_s, everything.end_s)
    if end_s - start_s > ZOOM_BELOW * everything.length_s:
        return None
    return Window(start_s=max(start_s, report.goodput.spans[0].opened_s), end_s=end_s)


def draw(report: RunReport, window: Window, name: str) -> Markup:
    """Return the picture of `window`; `name` is its description for screen readers."""
    spans = [t for t in report.goodput.spans if t.closed_s >= window.start_s]
    spans = [t for t in spans if t.opened_s <= window.end_s][-MAX_DRAWN:]
    lanes = _lanes(report, window)
    bottom = CURVE_Y + CURVE_H + 14.0 + LANE_H * len(lanes)
    parts = [
        el("title", name),
        *_time_axis(window, bottom),
        *_band(report, spans, window),
        *_curve(report, spans, window),
        *_failures(report, spans, window),
    ]
    for number, (title, marks) in enumerate(lanes):
        parts += _lane(title, marks, window, CURVE_Y + CURVE_H + 14.0 + LANE_H * number)
    return el(
        "svg",
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH:.0f} {bottom + 26:.0f}",
        role="img",
        aria_label=name,
        class_="timeline",
    )


# Time


def _time_axis(window: Window, bottom: float) -> Iterator[Markup]:
    every_s = next((s for s in TICK_S if window.length_s / s <= MAX_TICKS), None)
    if every_s is None:  # whole days
        every_s = 86400 * math.ceil(window.length_s / 86400 / MAX_TICKS)
    day = ""
    first = math.ceil(window.start_s / every_s)
    for number in range(first, int(window.end_s // every_s) + 1):
        time_s = number * every_s
        x = window.x(time_s)
        yield el("line", x1=x, x2=x, y1=BAND_Y, y2=bottom, class_="grid")
        found = to_datetime(time_s)
        if found is None:
            continue
        date = f"{found:%b %d}"
        clock = f"{found:%H:%M:%S}" if every_s < 60 else f"{found:%H:%M}"
        text = date if every_s >= 86400 else clock if date == day else f"{date} {clock}"
        day = date
        yield el("text", text, x=x, y=bottom + 16, class_="tick", text_anchor="middle")


# States of the training


def _band(report: RunReport, spans: Sequence[SessionSpan], window: Window) -> Iterator[Markup]:
    sessions = {info.session: info for info in report.sessions}
    yield _lane_name("training", BAND_Y + BAND_H / 2)
    free_x = 0.0
    for span in spans:
        info = sessions[span.session]
        for kind, start_s, end_s, text in _stretches(span, info):
            yield from _stretch(kind, start_s, end_s, f"session {span.session}: {text}", window)
        if info is report.sessions[-1] and report.now_s > span.closed_s:
            yield from _since(span, info, report.now_s, window)
        x = window.x(span.opened_s)
        label = f"session {span.session}"
        room = window.x(span.closed_s) - x
        if x >= free_x and room > CHAR_W * len(str(span.session)):
            if room < CHAR_W * len(label):
                label = str(span.session)
            yield el("text", label, x=x + 1, y=BAND_Y - 6, class_="note")
            free_x = x + CHAR_W * len(label) + 6


def _since(span: SessionSpan, info: SessionInfo, now_s: float, window: Window) -> Iterator[Markup]:
    """Draw the time after the last event of the last session, which may still be open."""
    since = f"since {utc_text(span.closed_s)}"
    if info.is_offline:
        what = "rolled back" if info.is_rollback else "imported"
        text = f"session {info.session}: {what}; the run was not opened {since}"
        yield from _stretch("down", span.closed_s, now_s, text, window)
    elif span.cause in FAILURES:
        yield from _stretch("down", span.closed_s, now_s, f"no session has followed {since}", window)
    elif info.ended is None:
        yield from _stretch(
            "open", span.closed_s, now_s, f"session {info.session}: nothing in the log {since}", window
        )


def _stretches(span: SessionSpan, info: SessionInfo) -> Iterator[tuple[str, float, float, str]]:
    """Yield the parts of a session's time: kind, start, end and description."""
    about = "" if span.measured else " (estimated)"
    read = f", read {tiers_text(info.read_bytes)}" if info.read_bytes else ""
    after = CAUSE_TEXT[span.cause] if span.cause else "the cause is unknown"
    closing = ("down", f"no steps: {after}{about}")
    if span.last_step == span.first_step and not span.measured:
        closing = ("no_commit", "no commit, and its steps are not in the log")
    if info.is_offline:
        what = "a rollback" if info.is_rollback else "an import"
        closing = ("no_commit", f"{what}; nobody trained in it")
    moments = (
        ("group_start", span.opened_s, span.restoring_s, "group start"),
        ("restore", span.restoring_s, span.ready_s, f"restore{read}"),
        ("startup", span.ready_s, span.first_s, f"startup{about}"),
        ("productive", span.first_s, span.survived_s, f"steps that survived{about}"),
        ("lost_steps", span.survived_s, span.last_s, f"steps that were lost{about}"),
        (closing[0], span.last_s, span.closed_s, closing[1]),
    )
    for kind, start_s, end_s, text in moments:
        if end_s > start_s:
            yield kind, start_s, end_s, f"{text}, {duration_text(end_s - start_s)} from {utc_text(start_s)}"


def _stretch(kind: str, start_s: float, end_s: float, text: str, window: Window) -> Iterator[Markup]:
    if end_s < window.start_s or start_s > window.end_s:
        return
    x = window.x(start_s)
    width = max(window.x(end_s) - x, MIN_W)
    yield from part(kind, text, x=x, y=BAND_Y, width=width, height=BAND_H)


def part(kind: str, text: str, *, x: float, y: float, width: float, height: float) -> Iterator[Markup]:
    """Draw one of several parts side by side; a gap and a hatch distinguish parts without colours."""
    if width > MIN_GAPPED_W:
        width -= GAP_W
    yield el("rect", el("title", text), x=x, y=y, width=width, height=height, class_=f"c-{kind}")
    if kind == "lost_steps":
        lines = "".join(_hatch(x, y, width, height))
        yield el("path", d=lines, class_="hatch")


def _hatch(x: float, y: float, width: float, height: float) -> Iterator[str]:
    """Yield lines that rise from left to right, cut to the part."""
    for number in range(math.ceil((width + height) / HATCH_W)):
        foot = x - height + (number + 0.5) * HATCH_W  # x at which the line would begin at the lower edge
        left, right = max(foot, x), min(foot + height, x + width)
        if left < right:
            bottom, top = y + height - (left - foot), y + height - (right - foot)
            yield f"M{left:.1f} {bottom:.1f}L{right:.1f} {top:.1f}"


def _failures(report: RunReport, spans: Sequence[SessionSpan], window: Window) -> Iterator[Markup]:
    """Draw a mark and a line where a session failed, with the cause if there is room.

    The span of a session without training has the cause of the end before it, and no failure of its own.
    """
    offline = {info.session for info in report.sessions if info.is_offline}
    free_x = 0.0
    for span in spans:
        if span.cause not in FAILURES or span.session in offline or span.last_s not in window:
            continue
        x, y = window.x(span.last_s), BAND_Y + BAND_H + 9
        assert span.cause is not None
        text = f"{CAUSE_TEXT[span.cause]}, {utc_text(span.last_s)}, at step {span.last_step}"
        yield el("line", x1=x, x2=x, y1=BAND_Y, y2=CURVE_Y + CURVE_H, class_="fail-line")
        cross = f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8"
        yield el("path", el("title", text), d=cross, class_="cross")
        if x >= free_x:
            label = CAUSE_TEXT[span.cause]
            is_right = x + CHAR_W * len(label) + 8 > WIDTH - RIGHT
            anchor, at = ("end", x - 8) if is_right else ("start", x + 8)
            yield el("text", label, x=at, y=y + 4, class_="note bad", text_anchor=anchor)
            free_x = x + max(LABEL_GAP, CHAR_W * len(label) + 16)


# Steps


def _curve(report: RunReport, spans: Sequence[SessionSpan], window: Window) -> Iterator[Markup]:
    shown = {span.session for span in spans}
    points = [p for p in report.goodput.progress if p.session in shown]
    runs = [list(run) for _, run in groupby(points, key=lambda p: p.session)]
    thin = [_thin(run, window) for run in runs]
    seen = [p.step for run in thin for p in run] or [0]
    low, high = min(seen), max(max(seen), min(seen) + 1)

    def y(step: float) -> float:
        part = min(max((step - low) / (high - low), 0.0), 1.0)
        return CURVE_Y + CURVE_H - 8 - part * (CURVE_H - 26)

    yield _lane_name("steps", CURVE_Y + CURVE_H / 2)
    for tick in _ticks(low, high):
        yield el("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(tick), y2=y(tick), class_="grid")
        yield el("text", f"{tick:,}", x=LEFT - 6, y=y(tick) + 4, class_="tick", text_anchor="end")
    for before, after in pairwise(runs):
        x = window.x(after[0].time_s)
        if after[0].time_s in window and before[-1].step != after[0].step:
            yield el("path", d=f"M{x:.1f} {y(before[-1].step):.1f}V{y(after[0].step):.1f}", class_="back")
    for run in thin:
        for survived, line in _lines(run):
            path = "L".join(f"{window.x(p.time_s):.1f} {y(p.step):.1f}" for p in line)
            text = f"session {line[0].session}: steps {line[0].step} to {line[-1].step}"
            kind = "kept" if survived else "gone"
            title = el("title", f"{text}{'' if survived else ', lost'}")
            yield el("path", title, d=f"M{path}", class_=f"steps {kind}")


def _thin(run: Sequence[StepsOverTime], window: Window) -> list[StepsOverTime]:
    """Return the first and last point of each column and kind, and points at the ends of the window."""
    inside = [p for p in run if p.time_s in window]
    for before, after in pairwise(run):
        if before.time_s < window.start_s < after.time_s:
            inside.insert(0, _between(before, after, window.start_s))
        if before.time_s < window.end_s < after.time_s:
            inside.append(_between(before, after, window.end_s))
    found: list[StepsOverTime] = []
    for _, group in groupby(inside, key=lambda p: (window.column(p.time_s), p.survived)):
        points = list(group)
        found += points[:1] if len(points) == 1 else [points[0], points[-1]]
    return found


def _between(before: StepsOverTime, after: StepsOverTime, time_s: float) -> StepsOverTime:
    part = (time_s - before.time_s) / (after.time_s - before.time_s)
    step = round(before.step + part * (after.step - before.step))
    return replace(after, time_s=time_s, step=step)


def _lines(points: Sequence[StepsOverTime]) -> Iterator[tuple[bool, list[StepsOverTime]]]:
    """Yield stretches of surviving and of lost steps; each stretch begins where the previous one ends."""
    for survived, pairs in groupby(pairwise(points), key=lambda pair: pair[1].survived):
        found = list(pairs)
        yield survived, [found[0][0], *(after for _, after in found)]


def _ticks(low: int, high: int) -> Iterator[int]:
    rough = max(1.0, (high - low) / 4)
    base = 10 ** int(math.log10(rough))
    every = max(1, int(next(m * base for m in (1, 2, 5, 10) if m * base >= rough)))
    yield from range(math.ceil(low / every) * every, high + 1, every)


# Lanes of marks


def _lanes(report: RunReport, window: Window) -> list[tuple[str, list[Mark]]]:
    """Return the lanes with their names: always levels and restores; other lanes unless empty."""
    lanes = [
        ("on local disk", list(_reached(report.checkpoints, Level.LOCAL, window))),
        ("replicated", list(_reached(report.checkpoints, Level.REPLICATED, window))),
        ("durable", list(_reached(report.checkpoints, Level.DURABLE, window))),
        ("restored", list(_restored(report, window))),
    ]
    more = [("checked", list(_checked(report, window))), ("kept, let go", list(_kept(report, window)))]
    return lanes + [lane for lane in more if lane[1]]


def _reached(checkpoints: Iterable[CheckpointInfo], level: Level, window: Window) -> Iterator[Mark]:
    for info in checkpoints:
        time_s = reached_s(info, level)
        if time_s is not None and time_s in window:
            since = "" if info.state == "live" else f", {info.state} since"
            kind = info.state if info.state in ("live", "lost") else "past"
            yield Mark(time_s=time_s, kind=kind, text=f"step {info.step}, {utc_text(time_s)}{since}")


def reached_s(info: CheckpointInfo, level: Level) -> float | None:
    """Return the Unix time at which a checkpoint reached a level by the log, or None."""
    if level is Level.DURABLE:
        return info.durable_at_s if info.level is Level.DURABLE else None
    if level is Level.LOCAL:
        return info.committed_at_s - (info.replicate_s or 0.0)
    return info.replicated_at_s


def _restored(report: RunReport, window: Window) -> Iterator[Mark]:
    for info, span in zip(report.sessions, report.goodput.spans, strict=True):
        if info.restored_at_s is not None and span.ready_s in window:
            source = report.by_attempt.get(info.resumed_from or "")
            step = "state" if info.origin_step is None else f"step {info.origin_step} of another run"
            step = step if source is None else f"step {source.step}"
            took = "" if info.restore_s is None else f" in {duration_text(info.restore_s)}"
            text = f"session {info.session}: {step}{took}, {tiers_text(info.read_bytes)}"
            yield Mark(time_s=span.ready_s, kind="restore", text=text)


def _checked(report: RunReport, window: Window) -> Iterator[Mark]:
    """Yield the scrubs and drills among the log's events, and the last older ones of each checkpoint."""
    since_s = min((event.time_s for event in report.events), default=math.inf)
    for event in report.events:
        if event.op == "drilled":
            yield from _mark(
                event.time_s, _drill_kind(event.text), f"drill of step {event.step}: {event.text}", window
            )
        elif event.op == "verified":
            yield from _mark(event.time_s, "verified", f"step {event.step} scrubbed: good", window)
    for info in report.checkpoints:
        if info.drilled_at_s is not None and info.drilled_at_s < since_s:
            text = f"drill of step {info.step}: {info.drill}"
            yield from _mark(info.drilled_at_s, _drill_kind(info.drill), text, window)
        if info.verified_at_s is not None and info.verified_at_s < since_s:
            yield from _mark(info.verified_at_s, "verified", f"step {info.step} scrubbed: good", window)


def _drill_kind(text: str) -> str:
    return "passed" if text.startswith("passed") else "lost"


def _kept(report: RunReport, window: Window) -> Iterator[Mark]:
    """Yield pins, deletions, losses and notes."""
    looks = {
        "retired": ("past", "retired"),
        "collected": ("past", "deleted"),
        "lost": ("lost", "lost"),
        "pin": ("pin", "pinned by"),
        "unpin": ("past", "unpinned by"),
        "note": ("other", ""),
    }
    for event in report.events:
        if event.op in looks:
            kind, what = looks[event.op]
            step = "" if event.step is None else f"step {event.step} "
            yield from _mark(event.time_s, kind, f"{step}{what} {event.text}".strip(), window)


def _mark(time_s: float, kind: str, text: str, window: Window) -> Iterator[Mark]:
    if time_s in window:
        yield Mark(time_s=time_s, kind=kind, text=f"{short_text(text)}, {utc_text(time_s)}")


def _lane(title: str, marks: Sequence[Mark], window: Window, top: float) -> Iterator[Markup]:
    middle = top + LANE_H / 2
    yield _lane_name(title, middle)
    yield el("line", x1=LEFT, x2=WIDTH - RIGHT, y1=middle, y2=middle, class_="lane")
    bins: defaultdict[tuple[int, str], list[Mark]] = defaultdict(list)
    for mark in marks:
        bins[window.column(mark.time_s), mark.kind].append(mark)
    for (_, kind), group in sorted(bins.items(), key=lambda bin: (bin[0][1] == "lost", *bin[0])):
        first, last = group[0], group[-1]
        text = first.text
        if len(group) > 1:
            text = f"{len(group)} together: {text} to {last.text}"
        yield _glyph(kind, window.x(first.time_s), middle, text)


def _glyph(kind: str, x: float, y: float, text: str) -> Markup:
    title = el("title", text)
    if kind in ("passed", "pin", "restore"):
        return el("path", title, d=f"M{x:.1f} {y - 7:.1f}l6 7l-6 7l-6 -7z", class_=f"m-{kind}")
    if kind == "lost":
        return el("path", title, d=f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8", class_="cross")
    half = 4.0 if kind in ("past", "other") else 7.0
    return el("rect", title, x=x - MARK_W / 2, y=y - half, width=MARK_W, height=2 * half, class_=f"m-{kind}")


def _lane_name(text: str, y: float) -> Markup:
    return el("text", text, x=8.0, y=y + 4, class_="lane-name")


def el(name: str, /, *content: str, **attributes: str | float) -> Markup:
    """Return an element with escaped text; attribute `class_` is `class`, and any other `_` is `-`."""
    names = (
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), _value(value))
        for key, value in attributes.items()
    )
    return Markup("<{0}{1}>{2}</{0}>").format(name, Markup().join(names), Markup().join(content))


def _value(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")
