"""The queries of dashboard and alerts, and the metrics in them; for the part of PromQL that they use."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ray_ckpt.telemetry import METRICS, Metric

DASHBOARDS = Path(__file__).parents[2] / "jobs/dashboards"
BUCKET, SUM, COUNT = "_bucket", "_sum", "_count"

_SELECTOR = re.compile(r"\b(ray_ckpt_\w+|ALERTS)(\{[^}]*\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\b(?:by|on) \(([^)]*)\)")
_GROWN = re.compile(  # a counter's growth, with the value at which a new series began
    r"\((?P<series>\w+(?:\{[^}]*\})?)\s+unless\s+(?P=series)\s+offset\s+(?P<window>[$\w]+)\)"
    r"\s+or\s+increase\((?P=series)\[(?P=window)\]\)"
)


@dataclass(frozen=True, slots=True)
class Selected:
    """A metric in an expression: `suffix` of a histogram's series, `matchers` with the values they want."""

    metric: Metric
    suffix: str
    matchers: tuple[tuple[str, str], ...]
    function: str  # that it is the argument of; "": none


@dataclass(frozen=True, slots=True)
class Named:
    """An expression, where it stands, and the text that names labels of its result."""

    where: str
    expr: str
    texts: tuple[str, ...]


def dashboard() -> dict[str, Any]:
    return dict(json.loads((DASHBOARDS / "grafana.json").read_text()))


def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load((DASHBOARDS / "alerts.yml").read_text())["groups"]
    return list(group["rules"])


def panel_queries() -> list[Named]:
    board = dashboard()
    found = [
        Named(panel["title"], target["expr"], (target["legendFormat"],))
        for panel in board["panels"]
        for target in panel.get("targets", ())
    ]
    return found + [Named(a["name"], a["expr"], (a["titleFormat"],)) for a in board["annotations"]["list"]]


def alert_queries() -> list[Named]:
    return [Named(rule["alert"], rule["expr"], tuple(rule["annotations"].values())) for rule in rules()]


def selected(expr: str) -> Iterator[Selected]:
    """Yield every use of one of our metrics. LookupError for a name that is not in the catalogue."""
    expr = _GROWN.sub(r"increase(\g<series>[\g<window>])", expr)
    for match in _SELECTOR.finditer(expr):
        name, braces = match.group(1), match.group(2) or ""
        if name == "ALERTS":
            continue
        metric, suffix = _find(name)
        before = re.search(r"(\w+)\($", expr[: match.start()])
        is_range = expr[match.end() :].startswith("[")
        matchers = tuple((label, value) for label, _, value in _MATCHER.findall(braces))
        yield Selected(metric, suffix, matchers, before.group(1) if before and is_range else "")


def labels_named(expr: str) -> set[str]:
    """Return the labels in `by (...)` and `on (...)`."""
    return {label.strip() for group in _GROUPING.findall(expr) for label in group.split(",")}


def evaluable(expr: str) -> str:
    """Return the query with values for Grafana's variables: the last ten minutes of all runs."""
    for variable, value in (("$__rate_interval", "1m"), ("$__range", "10m"), ("$run", ".*")):
        expr = expr.replace(variable, value)
    assert "$" not in expr, expr
    return expr


def _find(name: str) -> tuple[Metric, str]:
    for metric in METRICS:
        if metric.kind != "histogram" and name == metric.exported:
            return metric, ""
        for suffix in (BUCKET, SUM, COUNT):
            if metric.kind == "histogram" and name == metric.exported + suffix:
                return metric, suffix
    raise LookupError(f"{name} is no series of ray_ckpt.telemetry")
