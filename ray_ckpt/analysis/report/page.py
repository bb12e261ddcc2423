"""The page: one file of HTML and SVG, without scripts and network access.

The content security policy of the page forbids both, whatever a log contains. The page is also well-formed
XML. `page.html` is its template, `page.css` its style.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from markupsafe import Markup

import ray_ckpt
from ray_ckpt.analysis.goodput import CAUSES, Goodput
from ray_ckpt.analysis.report import facts
from ray_ckpt.analysis.report.facts import RunReport, Tone
from ray_ckpt.analysis.report.timeline import MAX_DRAWN, around_last_failure, draw, el, part, whole
from ray_ckpt.analysis.session_history import save_s
from ray_ckpt.core.recovery import PHASES as RECOVERY_PHASES
from ray_ckpt.core.retention import pinned_by
from ray_ckpt.texts import count_text, duration_text, printable, short_text, size_text, tiers_text, utc_text
from ray_ckpt.types import FAILURES, CheckpointInfo, Level, SessionInfo

MAX_SAVES = 12  # newest saves, drawn phase by phase
MAX_DEPTH = 10  # levels of indentation of branches in the lineage
BAR_W, BAR_H, BAR_LEFT = 1120.0, 20.0, 112.0

_SIGNS: Mapping[Tone, tuple[str, str]] = {
    "good": ("\u25cf", "good"),
    "warn": ("\u25b2", "warning"),
    "bad": ("\u2715", "bad"),
    "plain": ("\u25cb", "for information"),
}
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
_SAVE_PHASES: Sequence[tuple[str, str, Callable[[CheckpointInfo], float | None]]] = (
    ("p1", "capture", lambda info: info.capture_s),
    ("p2", "local", lambda info: info.local_s),
    ("p3", "replicate", lambda info: info.replicate_s),
)
_SAVE_KEYS = (*((kind, name) for kind, name, _ in _SAVE_PHASES), ("c-stalls", "training was held up"))


def page(report: RunReport) -> str:
    """Return the whole page. Its size is bounded for any run; notes on the page name what is left out."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # takes 0.1 s to import

    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "count": count_text,
        "duration": duration_text,
        "group": facts.group_text,
        "level": _level_text,
        "metrics": _metrics_text,
        "number": "{:,}".format,
        "phase": facts.phase_text,
        "pins": partial(_pins_text, now_s=report.now_s),
        "range": facts.range_text,
        "save_s": save_s,
        "short": short_text,
        "size": size_text,
        "sizes": _sizes_text,
        "steps": facts.estimate_text,
        "tiers": tiers_text,
        "utc": utc_text,
    }
    known_phases = {name for problem in report.problems[-facts.MAX_TROUBLES :] for name in problem.phases}
    limits = {name: value for name, value in vars(facts).items() if name.startswith("MAX_")}
    return templates.get_template("page.html").render(
        **limits,
        **_pictures(report),
        CAUSE_TEXT=facts.CAUSE_TEXT,
        FAILURES=FAILURES,
        MAX_DRAWN=MAX_DRAWN,
        RECOVERY_PHASES=RECOVERY_PHASES,
        SAVE_KEYS=_SAVE_KEYS,
        SIGNS=_SIGNS,
        TIMELINE_KEYS=_TIMELINE_KEYS,
        clocks=facts.clocks_text(report.goodput),
        drilled=sorted(
            (info for info in report.checkpoints if info.drilled_at_s is not None),
            key=lambda info: info.drilled_at_s or 0.0,
        ),
        goodput=report.goodput,
        lineage=list(_lineage(report)),
        recovery_phases=[name for name in RECOVERY_PHASES if name in known_phases],
        run=report,
        verdicts=facts.verdicts(report),
        version=ray_ckpt.__version__,
    )


def _printable(value: Any) -> Any:
    return value if isinstance(value, Markup) or not isinstance(value, str) else printable(value)


def _pictures(report: RunReport) -> dict[str, Any]:
    """Return the pictures, None where there is nothing to draw, with the facts that only they need."""
    found, everything, near = report.goodput, whole(report), around_last_failure(report)
    timed = [info for info in report.checkpoints[-MAX_SAVES:] if save_s(info) is not None]
    measured = facts.measured_percent(found) if found.wall_s else 0
    return {
        "timeline": draw(report, everything, "Timeline of the run") if everything else None,
        "last_failure": draw(report, near, "Timeline around the last failure") if near else None,
        "goodput_bar": _goodput_bar(found, measured),
        "measured": measured,
        "spent": [
            ("goodput", "productive", found.productive, "steps whose effect survived"),
            *((c.replace("_", " "), _kind(c), time, CAUSES[c]) for c, time in found.badput.items()),
        ],
        "save_bars": _save_bars(timed) if timed else None,
        "timed": timed,
    }


def _kind(cause: str) -> str:
    return "down" if cause.startswith("down") else cause


def _goodput_bar(found: Goodput, measured: int) -> Markup:
    name = "measured" if measured == 100 else "partly measured" if measured else "estimated"
    parts = [el("text", name, x=8.0, y=BAR_H / 2 + 4, class_="lane-name")]
    x, whole_w = BAR_LEFT, BAR_W - BAR_LEFT - 16
    for cause, time in {"productive": found.productive, **found.badput}.items():
        share = time.estimate / found.wall_s if found.wall_s else 0.0
        if share > 0:
            text = f"{cause.replace('_', ' ')}: {duration_text(time.estimate)}, {100 * share:.1f} %"
            parts += part(_kind(cause), text, x=x, y=0.0, width=whole_w * share, height=BAR_H)
        x += whole_w * share
    return _picture(parts, BAR_H + 4, "How the wall time was spent")


def _save_bars(saves: Sequence[CheckpointInfo]) -> Markup:
    longest_s = max(save_s(info) or 0.0 for info in saves) or 1.0
    room = BAR_W - BAR_LEFT - 260
    parts: list[Markup] = []
    for number, info in enumerate(reversed(saves)):
        top, x = 22.0 * number, BAR_LEFT
        parts.append(el("text", f"step {info.step:,}", x=8.0, y=top + 13, class_="lane-name"))
        for kind, name, read in _SAVE_PHASES:
            took_s = read(info) or 0.0
            width = room * took_s / longest_s
            title = el("title", f"{name} {duration_text(took_s)}")
            parts.append(el("rect", title, x=x, y=top + 2, width=width, height=11, class_=kind))
            x += width
        stall_w = room * min(info.stall_s or 0.0, longest_s) / longest_s
        title = el("title", f"training was held up for {duration_text(info.stall_s or 0.0)}")
        parts.append(el("rect", title, x=BAR_LEFT, y=top + 14, width=stall_w, height=3.0, class_="c-stalls"))
        after = "" if info.drain_s is None else f", durable {duration_text(info.drain_s)} later"
        parts.append(el("text", f"{duration_text(save_s(info) or 0.0)}{after}", x=x + 8, y=top + 13))
    return _picture(parts, 22 * len(saves), "The phases of the last saves")


def _picture(parts: Iterable[Markup], height: float, name: str) -> Markup:
    return el("svg", *parts, viewBox=f"0 0 {BAR_W:.0f} {height:.0f}", role="img", aria_label=name)


def _lineage(report: RunReport) -> Iterator[tuple[SessionInfo, CheckpointInfo | None, int, bool, int]]:
    """Yield session, source, indentation, if it is an ancestor of the newest state, and number of saves."""
    known = {session.session: session for session in report.sessions}
    ancestors: set[int] = set()
    session = report.sessions[-1] if report.sessions else None
    while session is not None and session.session not in ancestors:
        ancestors.add(session.session)
        source = report.by_attempt.get(session.resumed_from or "")
        session = known.get(source.id.session) if source else None
    counts = Counter(info.id.session for info in report.checkpoints)
    depths: dict[int, int] = {}
    for session in report.sessions[-facts.MAX_SESSIONS :]:
        source = report.by_attempt.get(session.resumed_from or "")
        is_on, depth = session.session in ancestors, 0
        if source is not None and not is_on:
            depth = depths.get(source.id.session, 0) + (source.id.session in ancestors)
        depths[session.session] = min(depth, MAX_DEPTH)
        yield session, source, depths[session.session], is_on, counts[session.session]


def _level_text(info: CheckpointInfo) -> str:
    known = [str(info.replicas)] if info.level is Level.REPLICATED else []
    known += [f"parity {info.parity}"] if info.parity else []
    copies = f" ({', '.join(known)})" if known else ""
    level = f"{info.level.label}{copies}" if info.state == "live" else info.state
    is_alone = info.kept_items and (info.level < Level.DURABLE or info.state == "lost")
    exported = [f"exported: {short_text(info.kept_items)}"] if is_alone else []
    return ", ".join((level, *exported, *info.flaws))


def _sizes_text(info: CheckpointInfo) -> str:
    linked = f", {size_text(info.shared_bytes)} linked" if info.shared_bytes else ""
    return f"{size_text(info.size_bytes)}{linked}"


def _pins_text(info: CheckpointInfo, *, now_s: float) -> str:
    return _first(short_text(owner, 40) for owner in sorted(pinned_by(info, now_s)))


def _metrics_text(info: CheckpointInfo) -> str:
    return _first(f"{short_text(name, 40)} {value:.5g}" for name, value in sorted(info.metrics.items()))


def _first(texts: Iterable[str]) -> str:
    """Return the first MAX_METRICS texts, with an ellipsis if there are more."""
    shown = list(islice(texts, facts.MAX_METRICS + 1))
    return ", ".join([*shown[: facts.MAX_METRICS], *(["..."] if len(shown) > facts.MAX_METRICS else [])])
