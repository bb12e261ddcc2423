"""Dashboards as Grafana reads them: its JSON model of schema 39 (Grafana 11; 12 and later convert it).

Source: https://grafana.com/docs/grafana/v11.0/dashboards/build-dashboards/view-dashboard-json-model/
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Json: TypeAlias = dict[str, Any]
Kind: TypeAlias = Literal["timeseries", "stat", "table"]

SCHEMA = 39
WIDTH = 24  # columns of Grafana's grid
HEIGHT: Mapping[Kind, int] = {"stat": 4, "timeseries": 8, "table": 8}  # in units of its grid
SOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Query:
    """`legend` names labels as `{{run}}`."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """`limits`: colours from a value on, rising, the first from below all; `names`: text in place of a value.

    `unit` is one of Grafana's: short, s, bytes, Bps, percentunit. `width` counts columns of 24.
    """

    title: str
    text: str
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    unit: str = "short"
    width: int = 8
    limits: tuple[tuple[float | None, str], ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    is_stacked: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


def dashboard(
    title: str, uid: str, rows: Sequence[Row], variables: Sequence[Json], events: Sequence[Query]
) -> Json:
    """`events` become annotations: vertical lines in every panel where their value is above 0."""
    return {
        "title": title,
        "uid": uid,
        "tags": ["ray", "checkpoints"],
        "schemaVersion": SCHEMA,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # one crosshair for all panels
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": list(variables)},
        "annotations": {"list": [_annotation(query) for query in events]},
        "panels": list(_panels(rows)),
    }


def datasource_variable() -> Json:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def label_variable(name: str, label: str, metric: str) -> Json:
    """The values that `name` has as a label of `metric`, several at a time or all."""
    query = f"label_values({metric}, {name})"
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,  # when the time range changes
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _annotation(query: Query) -> Json:
    return {
        "name": query.legend,
        "datasource": SOURCE,
        "enable": True,
        "iconColor": "orange",
        "expr": query.expr,
        "step": "60s",
        "titleFormat": query.legend,
        "useValueForTime": False,
    }


def _panels(rows: Sequence[Row]) -> Iterator[Json]:
    """Left to right, a new line where the next panel does not fit; ids count from 1."""
    number, y = 0, 0
    for row in rows:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
        }
        x, y, line = 0, y + 1, 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y, line = 0, y + line, 0
            number += 1
            height = HEIGHT[panel.kind]
            yield {"id": number, "gridPos": {"x": x, "y": y, "w": panel.width, "h": height}, **_panel(panel)}
            x, line = x + panel.width, max(line, height)
        y += line


def _panel(panel: Panel) -> Json:
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "targets": [_target(panel, k, query) for k, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": _field(panel), "overrides": []},
        "options": _options(panel),
    }


def _target(panel: Panel, place: int, query: Query) -> Json:
    is_instant = panel.kind == "table"
    return {
        "refId": chr(ord("A") + place),
        "datasource": SOURCE,
        "expr": query.expr,
        "legendFormat": query.legend,
        "instant": is_instant,
        "range": not is_instant,
        "format": "table" if is_instant else "time_series",
    }


def _field(panel: Panel) -> Json:
    limits = panel.limits or ((None, "green"),)
    found: Json = {
        "unit": panel.unit,
        "color": {"mode": "thresholds" if panel.kind == "stat" else "palette-classic"},
        "thresholds": {"mode": "absolute", "steps": [{"value": value, "color": c} for value, c in limits]},
        "mappings": [],
    }
    if panel.names:
        options = {value: {"index": k, "text": text} for k, (value, text) in enumerate(panel.names.items())}
        found["mappings"] = [{"type": "value", "options": options}]
    if panel.kind == "timeseries":
        found["custom"] = {
            "fillOpacity": 60 if panel.is_stacked else 0,
            "stacking": {"mode": "normal" if panel.is_stacked else "none", "group": "A"},
            "showPoints": "auto",
            "spanNulls": False,
        }
    return found


def _options(panel: Panel) -> Json:
    if panel.kind == "stat":
        return {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "textMode": "value_and_name",
            "colorMode": "value",
            "graphMode": "none",
        }
    if panel.kind == "table":
        return {"showHeader": True}
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
