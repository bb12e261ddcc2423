"""The page: one file of HTML and SVG, without scripts and network access.

The content security policy of the page forbids both, whatever a log contains. The page is also well-formed
XML.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import ray_ckpt
from ray_ckpt.analysis.goodput import CAUSES, Goodput, Seconds
from ray_ckpt.analysis.report.facts import (
    CAUSE_TEXT,
    MAX_CHECKPOINTS,
    MAX_DRILLS,
    MAX_EVENTS,
    MAX_IN_CLUSTER,
    MAX_METRICS,
    MAX_SESSIONS,
    MAX_TROUBLES,
    Problem,
    RunReport,
    Tone,
    clocks_text,
    estimate_text,
    group_text,
    measured_percent,
    verdicts,
)
from ray_ckpt.analysis.report.markup import Html, el, join
from ray_ckpt.analysis.report.style import STYLE
from ray_ckpt.analysis.report.timeline import MAX_DRAWN, around_last_failure, draw, part, whole
from ray_ckpt.analysis.session_history import save_s
from ray_ckpt.core.retention import pinned_by
from ray_ckpt.texts import count_text, duration_text, short_text, size_text, tiers_text, utc_text
from ray_ckpt.types import FAILURES, CheckpointInfo, Level, SessionInfo

MAX_SAVES = 12  # newest saves, drawn phase by phase
MAX_DEPTH = 10  # levels of indentation of branches in the lineage
BAR_W, BAR_H, BAR_LEFT = 1120.0, 20.0, 112.0
SAME_S = 0.05  # bounds that differ by less are printed as one time

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_SIGNS: Mapping[Tone, str] = {"good": "\u25cf", "warn": "\u25b2", "bad": "\u2715", "plain": "\u25cb"}
_TONES: Mapping[Tone, str] = {"good": "good", "warn": "warning", "bad": "bad", "plain": "for information"}


def page(report: RunReport) -> str:
    """Return the whole page. Its size is bounded for any run; notes on the page name what is left out."""
    name = short_text(report.run_name)
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("link", rel="icon", href="data:,"),
        el("title", f"{name}: ray_ckpt report"),
        el("style", Html(STYLE)),
    )
    body = el(
        "body",
        el(
            "main",
            *_header(report, name),
            _cards(report),
            *_timelines(report),
            _interruptions(report),
            _goodput(report),
            _saves(report),
            _in_cluster(report),
            _checks(report),
            _lineage(report),
            _checkpoints(report),
            el("footer", f"Made by ray-ckpt {ray_ckpt.__version__} from the run's log alone."),
        ),
    )
    return f"<!DOCTYPE html>\n{el('html', head, body, lang='en')}\n"


def _header(report: RunReport, name: str) -> Iterator[Html]:
    counts = (
        f"{count_text(len(report.sessions), 'session')}, {count_text(len(report.checkpoints), 'checkpoint')}"
    )
    yield el("h1", name)
    yield el("div", short_text(report.where, 300), class_="soft")
    yield el(
        "div",
        f"{counts}, {len(report.live):,} live. Report of {utc_text(report.now_s)}; all times are UTC.",
        class_="soft",
    )


def _cards(report: RunReport) -> Html:
    cards = (
        el(
            "div",
            el("div", verdict.title, class_="title"),
            el(
                "div",
                el("span", _SIGNS[verdict.tone], class_="sign", role="img", aria_label=_TONES[verdict.tone]),
                verdict.head,
                class_="head",
            ),
            el("p", verdict.text),
            class_=f"card {verdict.tone}",
        )
        for verdict in verdicts(report)
    )
    return el("section", *cards, class_="cards", id="now")


# Timelines


def _timelines(report: RunReport) -> Iterator[Html]:
    everything = whole(report)
    if everything is None:
        yield _section("timeline", "Timeline", el("p", "The run has no session yet."))
        return
    if (near := around_last_failure(report)) is not None:
        picture = el("div", draw(report, near, "Timeline around the last failure"), class_="wide")
        yield _section("last-failure", "Around the last failure", picture)
    notes = [_MARKS]
    if len(report.sessions) > MAX_DRAWN:
        notes.append(f"Only the last {MAX_DRAWN} of {len(report.sessions):,} sessions are drawn.")
    if len(report.events) >= MAX_EVENTS:
        notes.append(f"Of deletions, pins and checks only the last {MAX_EVENTS:,} are drawn.")
    yield _section(
        "timeline",
        "The whole run" if near else "Timeline",
        el("div", draw(report, everything, "Timeline of the run"), class_="wide"),
        _legend(_TIMELINE_KEYS),
        el("p", " ".join(notes), class_="soft"),
    )


_MARKS = (
    "Ticks: tall ones are live, short ones retired or deleted since. A cross is a loss or a failed drill, a "
    "diamond a restore, a drill that passed, or a pin. Point at anything to read what it is; marks that "
    "would lie on each other are drawn as one."
)
_TIMELINE_KEYS = (
    ("c-productive", "steps that survived"),
    ("c-lost_steps", "steps that were lost"),
    ("c-group_start", "group start"),
    ("c-restore", "restore"),
    ("c-startup", "startup"),
    ("c-down", "no steps"),
    ("c-no_commit", "no commit"),
    ("c-open", "nothing in the log yet"),
)


def _legend(keys: Iterable[tuple[str, str]]) -> Html:
    items = (el("li", el("span", class_=f"key {kind}"), text) for kind, text in keys)
    return el("ul", *items, class_="legend")


# Goodput


def _goodput(report: RunReport) -> Html:
    found = report.goodput
    if not found.wall_s:
        return _section("goodput", "Goodput", el("p", "The log has one moment: nothing to measure yet."))
    known = measured_percent(found)
    wall = duration_text(found.wall_s)
    about = f"Goodput is the time of steps whose effect survived, as a part of {wall} of wall time."
    if known < 100:
        about += f" {known} % of the wall time is measured; the rest is estimated, between two bounds."
    if found.not_counted_s:
        about += f" Not counted: {duration_text(found.not_counted_s)} after the run had finished."
    if clocks := clocks_text(found):
        about += f" {clocks}"
    times = {"productive": found.productive, **found.badput}
    rows = [
        (
            _keyed(cause, "goodput" if cause == "productive" else cause.replace("_", " ")),
            _time(time),
            f"{100 * time.estimate / found.wall_s:.2f} %",
            CAUSES.get(cause, "steps whose effect survived"),
        )
        for cause, time in times.items()
        if time.high
    ]
    bars = el(
        "svg",
        *_bar("measured" if known == 100 else "partly measured" if known else "estimated", found, 0.0),
        viewBox=f"0 0 {BAR_W:.0f} {BAR_H + 4:.0f}",
        role="img",
        aria_label="How the wall time was spent",
    )
    return _section(
        "goodput",
        "Goodput and where the rest went",
        el("p", about, class_="soft"),
        el("div", bars, class_="wide"),
        _table(("cause", "time", "share", "what"), rows, right=(1, 2)),
    )


def _bar(name: str, found: Goodput, top: float) -> Iterator[Html]:
    yield el("text", name, x=8.0, y=top + BAR_H / 2 + 4, class_="lane-name")
    x, whole_w = BAR_LEFT, BAR_W - BAR_LEFT - 16
    for cause, time in {"productive": found.productive, **found.badput}.items():
        width = whole_w * time.estimate / found.wall_s
        if width > 0:
            text = f"{cause.replace('_', ' ')}: {duration_text(time.estimate)}"
            text += f", {100 * time.estimate / found.wall_s:.1f} %"
            yield from part(_kind(cause), text, x=x, y=top, width=width, height=BAR_H)
        x += width


def _kind(cause: str) -> str:
    return "down" if cause.startswith("down") else cause


def _keyed(cause: str, text: str) -> Html:
    return join((el("span", class_=f"key c-{_kind(cause)}"), text))


def _time(time: Seconds) -> str:
    if time.high - time.low < SAME_S:
        return duration_text(time.estimate)
    return f"{duration_text(time.estimate)} ({duration_text(time.low)} to {duration_text(time.high)})"


# Interruptions


def _interruptions(report: RunReport) -> Html:
    if not report.problems:
        return _section("interruptions", "Interruptions", el("p", "None in the log."))
    shown = report.problems[-MAX_TROUBLES:]
    rows = [_problem(problem, report) for problem in reversed(shown)]
    kinds = ["failed" if problem.cause in FAILURES else "past" for problem in reversed(shown)]
    headers = ("what", "when", "sessions", "steps lost", "training again after", "restore", "read")
    return _section(
        "interruptions",
        "Interruptions",
        _table(headers, rows, right=(3, 4, 5), times=(1,), kinds=kinds),
        *_left_out(len(report.problems) - len(shown), "earlier ones are not listed, but counted above."),
    )


def _problem(problem: Problem, report: RunReport) -> tuple[str | Html, ...]:
    went_on = "none yet" if problem.next_session is None else str(problem.next_session)
    lost = "unknown" if problem.steps_lost is None else estimate_text(problem.steps_lost)
    pace_s = report.goodput.step_s
    if problem.steps_lost is not None and pace_s and problem.steps_lost.estimate:
        lost += f", {duration_text(problem.steps_lost.estimate * pace_s)} of work"
    return (
        CAUSE_TEXT[problem.cause] if problem.cause else "unknown",
        utc_text(problem.ended_s),
        f"{problem.session} to {went_on}",
        lost,
        _again(problem),
        "" if problem.restore_s is None else duration_text(problem.restore_s),
        tiers_text(problem.read_bytes) if problem.read_bytes else "",
    )


def _again(problem: Problem) -> str:
    """Return the time until training continued; an open session has no steps before its first commit."""
    if problem.recovery is not None:
        return _time(problem.recovery)
    if problem.next_session is None:
        return "not yet"
    return "no commit yet" if problem.is_waiting else "none: it ended first"


# Saves


def _saves(report: RunReport) -> Html:
    if not report.phases:
        return _section("saves", "Saves", el("p", "No durations of saves are in the log."))
    rows = [
        (
            p.name,
            f"{p.count:,}",
            duration_text(p.median_s),
            duration_text(p.p99_s),
            duration_text(p.max_s),
            p.what,
        )
        for p in report.phases
    ]
    timed = [info for info in report.checkpoints[-MAX_SAVES:] if save_s(info) is not None]
    parts: list[Html] = [
        _table(("phase", "saves", "median", "p99", "longest", "what"), rows, right=(1, 2, 3, 4))
    ]
    if timed:
        parts += [
            el("h3", f"The last {len(timed)} saves"),
            el("div", _save_bars(timed), class_="wide"),
            _legend(_SAVE_KEYS),
        ]
    return _section("saves", "How long saves take", *parts)


_SAVE_PHASES: Sequence[tuple[str, str, Callable[[CheckpointInfo], float | None]]] = (
    ("p1", "capture", lambda info: info.capture_s),
    ("p2", "local", lambda info: info.local_s),
    ("p3", "replicate", lambda info: info.replicate_s),
)
_SAVE_KEYS = (*((kind, name) for kind, name, _ in _SAVE_PHASES), ("c-stalls", "training was held up"))


def _save_bars(saves: Sequence[CheckpointInfo]) -> Html:
    longest_s = max(save_s(info) or 0.0 for info in saves) or 1.0
    room = BAR_W - BAR_LEFT - 260
    parts: list[Html] = []
    for number, info in enumerate(reversed(saves)):
        top, x = 22.0 * number, BAR_LEFT
        parts.append(el("text", f"step {info.step:,}", x=8.0, y=top + 13, class_="lane-name"))
        for kind, name, read in _SAVE_PHASES:
            took_s = read(info)
            width = room * (took_s or 0.0) / longest_s
            title = el("title", f"{name} {duration_text(took_s or 0.0)}")
            parts.append(el("rect", title, x=x, y=top + 2, width=width, height=11, class_=kind))
            x += width
        stall_w = room * min(info.stall_s or 0.0, longest_s) / longest_s
        title = el("title", f"training was held up for {duration_text(info.stall_s or 0.0)}")
        parts.append(el("rect", title, x=BAR_LEFT, y=top + 14, width=stall_w, height=3.0, class_="c-stalls"))
        drain = info.drain_s
        after = "" if drain is None else f", durable {duration_text(drain)} later"
        parts.append(el("text", f"{duration_text(save_s(info) or 0.0)}{after}", x=x + 8, y=top + 13))
    return el(
        "svg",
        *parts,
        viewBox=f"0 0 {BAR_W:.0f} {22 * len(saves):.0f}",
        role="img",
        aria_label="The phases of the last saves",
    )


# Checkpoints


def _checkpoints(report: RunReport) -> Html:
    if not report.checkpoints:
        return _section("checkpoints", "Checkpoints", el("p", "None yet."))
    shown = report.checkpoints[-MAX_CHECKPOINTS:]
    newest = report.lineage[-1:]
    headers = (
        "step",
        "session",
        "state",
        "size",
        "saved",
        "held up",
        "save",
        "durable after",
        "checked",
        "pins",
        "metrics",
    )
    rows, kinds = [], []
    for info in reversed(shown):
        rows.append(_checkpoint(info, report))
        kinds.append("newest" if info in newest else "" if info.state == "live" else "past")
    return _section(
        "checkpoints",
        "Checkpoints",
        _table(headers, rows, right=(0, 1, 3, 5, 6, 7), times=(4,), kinds=kinds),
        *_left_out(
            len(report.checkpoints) - len(shown), "older ones are not shown; `ray-ckpt ls --all` has them."
        ),
    )


def _checkpoint(info: CheckpointInfo, report: RunReport) -> tuple[str | Html, ...]:
    whole_s, drained_s = save_s(info), info.drain_s
    metrics = sorted(info.metrics.items())
    shown = ", ".join(f"{short_text(name, 40)} {value:.5g}" for name, value in metrics[:MAX_METRICS])
    checked = []
    if info.verified_at_s is not None:
        checked.append(f"scrubbed {utc_text(info.verified_at_s)}")
    if info.drill:
        checked.append(f"drill {short_text(info.drill)}")
    pins = [short_text(owner, 40) for owner in sorted(pinned_by(info, report.now_s))]
    return (
        f"{info.step:,}",
        str(info.id.session),
        _badge(info),
        size_text(info.size_bytes),
        utc_text(info.committed_at_s),
        "" if info.stall_s is None else duration_text(info.stall_s),
        "" if whole_s is None else duration_text(whole_s),
        "" if drained_s is None else duration_text(drained_s),
        "; ".join(checked),
        ", ".join(pins[:MAX_METRICS]) + (", ..." if len(pins) > MAX_METRICS else ""),
        shown + (", ..." if len(metrics) > MAX_METRICS else ""),
    )


def _badge(info: CheckpointInfo) -> Html:
    if info.state != "live":
        return el("span", info.state, class_=f"badge {'lost' if info.state == 'lost' else 'past'}")
    copies = f" ({info.replicas})" if info.level is Level.REPLICATED else ""
    return el("span", f"{info.level.label}{copies}", class_=f"badge {info.level.label}")


def _in_cluster(report: RunReport) -> Html:
    held = report.in_cluster
    title = "Only in the cluster"
    if not held:
        return _section(
            "in-cluster", title, el("p", "Nothing: every live checkpoint is on the storage path.")
        )
    shown = held[-MAX_IN_CLUSTER:]
    steps = ", ".join(f"{info.step:,} ({info.level.label})" for info in reversed(shown))
    more = f", and {len(held) - len(shown):,} older ones" if len(held) > len(shown) else ""
    total = size_text(sum(info.size_bytes for info in held))
    return _section(
        "in-cluster",
        title,
        el(
            "p",
            f"{count_text(len(held), 'live checkpoint')}, {total}, on nodes alone: {steps}{more}.",
        ),
        el("p", "They are lost with the cluster.", class_="soft"),
    )


def _checks(report: RunReport) -> Html:
    drilled = [info for info in report.checkpoints if info.drilled_at_s is not None]
    drilled.sort(key=lambda info: info.drilled_at_s or 0.0)
    never = sum(info.verified_at_s is None for info in report.live)
    parts = [el("p", f"{len(report.live) - never:,} of {len(report.live):,} live checkpoints were scrubbed.")]
    if drilled:
        shown = drilled[-MAX_DRILLS:]
        rows = [
            (f"{info.step:,}", utc_text(info.drilled_at_s or 0.0), short_text(info.drill))
            for info in reversed(shown)
        ]
        kinds = ["" if info.drill.startswith("passed") else "failed" for info in reversed(shown)]
        parts.append(_table(("step", "drilled", "result"), rows, right=(0,), times=(1,), kinds=kinds))
        parts += _left_out(len(drilled) - len(shown), "earlier drills are not shown.")
    else:
        parts.append(el("p", "No recovery drill yet: `ray-ckpt drill` makes one.", class_="soft"))
    return _section("checks", "Scrubs and recovery drills", *parts)


# Lineage


def _lineage(report: RunReport) -> Html:
    if not report.sessions:
        return _section("lineage", "Lineage", el("p", "No sessions yet."))
    shown = report.sessions[-MAX_SESSIONS:]
    on_lineage = _ancestors(report)
    counts: dict[int, int] = {}
    for info in report.checkpoints:
        counts[info.id.session] = counts.get(info.id.session, 0) + 1
    depths: dict[int, int] = {}
    items = []
    for session in shown:
        source = report.by_attempt.get(session.resumed_from or "")
        origin = source.id.session if source else None
        is_on = session.session in on_lineage
        depth = 0 if is_on or origin is None else depths.get(origin, 0) + (origin in on_lineage)
        depths[session.session] = min(depth, MAX_DEPTH)
        text = _session(session, source, counts.get(session.session, 0))
        style = f"margin-left: {26 * depths[session.session]}px" if depths[session.session] else None
        items.append(el("li", text, class_="on" if is_on else "off", style=style))
    return _section(
        "lineage",
        "Lineage",
        el(
            "p",
            "Each session, and the checkpoint from which it continued; the newest state comes from the green "
            "ones.",
            class_="soft",
        ),
        el("ul", *items, class_="tree"),
        *_left_out(
            len(report.sessions) - len(shown),
            "earlier sessions are not shown; `ray-ckpt tree --all` has them.",
        ),
    )


def _ancestors(report: RunReport) -> set[int]:
    """Return the last session and those from which it descends."""
    known = {session.session: session for session in report.sessions}
    found: set[int] = set()
    session: SessionInfo | None = report.sessions[-1]
    while session is not None and session.session not in found:
        found.add(session.session)
        source = report.by_attempt.get(session.resumed_from or "")
        session = known.get(source.id.session) if source else None
    return found


def _session(session: SessionInfo, source: CheckpointInfo | None, count: int) -> str:
    begun = "from scratch"
    if session.origin_step is not None:
        begun = f"from step {session.origin_step:,} of another run"
    if source is not None:
        way = "to" if session.is_rollback else "from"
        begun = f"{way} step {source.step:,} of session {source.id.session}"
    name, opened = f"session {session.session}", utc_text(session.opened_at_s)
    if session.is_rollback:
        return f"{name}, a rollback {begun}; {opened}; nobody trained in it"
    ended = "its end is not in the log"
    if session.ended is not None:
        ended = f"{CAUSE_TEXT[session.ended.cause]} at step {session.ended.step:,}"
    saved = count_text(count, "checkpoint")
    return f"{name}, {begun}; {opened}; {group_text(session)}; {saved}; {ended}"


# Parts


def _section(name: str, title: str, *content: str | Html) -> Html:
    return el("section", el("h2", title), *content, id=name)


def _table(
    headers: Sequence[str],
    rows: Iterable[Sequence[str | Html]],
    *,
    right: Sequence[int] = (),
    times: Sequence[int] = (),
    kinds: Sequence[str] | None = None,
) -> Html:
    """Return a table; columns in `right` and `times` are not folded, `kinds` are the classes of rows."""

    def cells(name: str, row: Sequence[str | Html]) -> Iterator[Html]:
        for index, cell in enumerate(row):
            yield el(name, cell, class_="num" if index in right else "time" if index in times else None)

    body = (
        el("tr", *cells("td", row), class_=(kinds[number] or None) if kinds else None)
        for number, row in enumerate(rows)
    )
    table = el("table", el("thead", el("tr", *cells("th", headers))), el("tbody", *body))
    return el("div", table, class_="wide")


def _left_out(count: int, what: str) -> list[Html]:
    return [el("p", f"{count:,} {what}", class_="soft")] if count > 0 else []
