"""Dashboard and alerts query metrics that exist, and alerts fire when they should, and only then."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from docs.generate import expand
from ray_ckpt.config import RunOptions
from ray_ckpt.telemetry import METRICS, Metric
from tests.servers.programs import debian_program
from tests.support import promql
from tests.support.promql import BUCKET, Named

ROOT = Path(__file__).parents[2]
QUERIES = promql.panel_queries() + promql.alert_queries()
ALERTS = [rule["alert"] for rule in promql.rules()]
OF_COUNTERS = {"increase", "rate"}
OF_GAUGES = {"", "changes", "deriv", "min_over_time"}
LOOKS, SHORT_MINUTES = (2, 20), 300
GRID_COLUMNS = 24  # of a dashboard of Grafana
PROMTOOL_S = 60.0  # two seconds


@pytest.fixture(params=QUERIES, ids=lambda query: query.where)
def query(request: pytest.FixtureRequest) -> Named:
    assert isinstance(request.param, Named)
    return request.param


# -- against the catalogue ---------------------------------------------------------------------------------


def test_every_metric_of_a_query_is_in_the_catalogue_and_used_as_its_kind(query: Named) -> None:
    for use in promql.selected(query.expr):
        allowed = OF_GAUGES if use.metric.kind == "gauge" else OF_COUNTERS
        assert use.function in allowed, (use.metric.name, use.function)


def test_every_label_of_a_query_is_one_of_its_metrics(query: Named) -> None:
    uses = list(promql.selected(query.expr))
    own = {"run"} | {label for use in uses for label in use.metric.labels}
    own |= {"le"} if any(use.suffix == BUCKET for use in uses) else set()
    assert promql.labels_named(query.expr) <= own
    for use in uses:
        assert {label for label, _ in use.matchers} <= {"run", *use.metric.labels}


def test_every_value_of_a_label_in_a_query_is_in_the_catalogue(query: Named) -> None:
    for use in promql.selected(query.expr):
        for label, value in use.matchers:
            texts = " ".join(metric.text for metric in METRICS if label in metric.labels)
            assert label == "run" or re.search(rf"\b{value}\b", texts), (label, value)


def test_quantiles_are_taken_over_all_buckets(query: Named) -> None:
    assert ("histogram_quantile" in query.expr) == (BUCKET in query.expr)
    assert BUCKET not in query.expr or "le" in promql.labels_named(query.expr)


def test_legends_and_summaries_name_labels_that_the_result_has(query: Named) -> None:
    named = {
        label
        for text in query.texts
        for label in re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", text)
        if label != "alertname"
    }
    assert named <= promql.labels_named(query.expr)


def test_every_metric_is_in_a_panel_or_an_alert() -> None:
    used = {use.metric.name for query in QUERIES for use in promql.selected(query.expr)}
    assert used == {metric.name for metric in METRICS}


def test_the_checks_see_a_wrong_name_and_a_wrong_function() -> None:
    with pytest.raises(LookupError):
        list(promql.selected("ray_ckpt_saves"))
    [use] = promql.selected('sum by (run) (ray_ckpt_saves_total{outcome="committed"})')
    assert use.function not in OF_COUNTERS and use.matchers == (("outcome", "committed"),)
    [use] = promql.selected("(ray_ckpt_saves_total unless ray_ckpt_saves_total offset 1h) or "
                            "increase(ray_ckpt_saves_total[1h])")  # fmt: skip
    assert use.function == "increase"


# -- the files ----------------------------------------------------------------------------------------------


def test_panels_have_places_ids_and_a_data_source_of_the_readers_choice() -> None:
    board = promql.dashboard()
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in combinations(panels, 2):
        assert not _overlap(one["gridPos"], other["gridPos"]), (one["title"], other["title"])
    for panel in panels:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= GRID_COLUMNS
        if panel["type"] != "row":
            assert panel["description"] and panel["targets"]
            assert panel["datasource"]["uid"] == "${datasource}"
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    assert [variable["name"] for variable in board["templating"]["list"]] == ["datasource", "run"]
    assert json.dumps(board).count("__inputs") == 0  # nothing to fill in at the import


def _overlap(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    sides = (("x", "w"), ("y", "h"))
    return all(one[at] < other[at] + other[by] and other[at] < one[at] + one[by] for at, by in sides)


@pytest.mark.parametrize("rule", promql.rules(), ids=lambda rule: rule["alert"])
def test_an_alert_has_its_severity_a_remedy_and_a_link(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    notes = rule["annotations"]
    assert len(notes["description"]) > 60 and "\n" not in notes["summary"]
    file, anchor = notes["runbook"].split("#")
    headings = re.findall(r"^#+ (.*)$", (ROOT / file).read_text(), re.MULTILINE)
    assert anchor in {_slug(heading) for heading in headings}
    for option in re.findall(r"`(\w+)`", notes["description"]):
        assert option in RunOptions.__dataclass_fields__
    assert f"`{rule['alert']}`" in (ROOT / "docs/operations/troubleshooting.md").read_text()


def _slug(heading: str) -> str:
    """Return the anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_the_page_of_metrics_has_a_row_for_each(metric: Metric) -> None:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    row = f"| `{metric.exported}` | {metric.kind} | {labels} | {metric.text} |"
    assert row in expand((ROOT / "docs/operations/metrics.md").read_text()).splitlines()


# -- alerts in time -----------------------------------------------------------------------------------------

# One run that trains well for a day and more: a step per second, a save per minute, all of it in its place.
# Values per minute in the notation of promtool, start+growth x times, `_` for none; the last one goes on.
WELL: Mapping[str, str] = {
    'ray_ckpt_run_active{run="r"}': "1",
    'ray_ckpt_last_step{run="r"}': "0+60",
    'ray_ckpt_saved_step{run="r", level="local"}': "0+60",
    'ray_ckpt_saved_step{run="r", level="durable"}': "0+60",
    'ray_ckpt_lag_seconds{run="r", level="local"}': "60",
    'ray_ckpt_lag_seconds{run="r", level="durable"}': "600",
    'ray_ckpt_session_age_seconds{run="r"}': "7200+60",
    'ray_ckpt_storage_damaged{run="r"}': "0",
    'ray_ckpt_save_interval_seconds{run="r"}': "60",
    'ray_ckpt_steps_at_risk{run="r", node="a"}': "90",
    'ray_ckpt_steps_at_risk{run="r", node="b"}': "60",
    'ray_ckpt_copies_missing{run="r"}': "0",
    'ray_ckpt_drains_pending{run="r"}': "1",
    'ray_ckpt_disk_free_bytes{run="r", node="a"}': "500",
    'ray_ckpt_disk_reserve_bytes{run="r", node="a"}': "50",
    'ray_ckpt_disk_total_bytes{run="r", node="a"}': "1000",
    'ray_ckpt_saves_total{run="r", outcome="committed"}': "1+1",
    'ray_ckpt_saves_total{run="r", outcome="dropped"}': "_x200 1x300 2",
    'ray_ckpt_interruptions_total{run="r", cause="process"}': "_x100 1x2000 2",
    'ray_ckpt_interruptions_total{run="r", cause="replaced"}': "_x100 9",
    'ray_ckpt_save_stall_seconds_sum{run="r"}': "0+0.3",
    'ray_ckpt_drill_timestamp_seconds{run="r"}': "0",
    'ray_ckpt_goodput_ratio{run="r"}': "0.97",
}


@dataclass(frozen=True)
class Case:
    """The difference from a healthy run, and the alerts that fire at the given minutes."""

    name: str
    series: Mapping[str, str]
    fires: Mapping[int, frozenset[str]] = field(default_factory=dict)


def _case(name: str, series: Mapping[str, str], fires: Mapping[int, str]) -> Case:
    return Case(name, series, {minute: frozenset(alerts.split()) for minute, alerts in fires.items()})


ACTIVE = 'ray_ckpt_run_active{run="r"}'
RISK_A = 'ray_ckpt_steps_at_risk{run="r", node="a"}'
LAG = 'ray_ckpt_lag_seconds{run="r", level="local"}'
DURABLE = 'ray_ckpt_lag_seconds{run="r", level="durable"}'
FOUND = 'ray_ckpt_corruption_found_total{run="r", place="remote", WorkerId="1"}'
DAMAGED = 'ray_ckpt_storage_damaged{run="r"}'
AGE = 'ray_ckpt_session_age_seconds{run="r"}'
INTERVAL = 'ray_ckpt_save_interval_seconds{run="r"}'
FREE = 'ray_ckpt_disk_free_bytes{run="r", node="a"}'
DRILLED = 'ray_ckpt_drill_timestamp_seconds{run="r"}'

DROPPED = 'ray_ckpt_saves_total{{run="r", outcome="dropped", WorkerId="{}"}}'
INTERRUPTED = 'ray_ckpt_interruptions_total{{run="r", cause="node", WorkerId="{}"}}'
STEP = 'ray_ckpt_last_step{run="r"}'

CASES = (
    _case("all is well", {}, dict.fromkeys((5, 70, 120), "")),
    _case("all is well for long", {}, dict.fromkeys((220, 500, 1500), "")),
    _case("no checkpoint yet", {RISK_A: "-1x3000"}, {55: "", 65: "RayCkptUnprotected"}),
    _case(
        "nobody trains",
        {
            ACTIVE: "0x3000",
            RISK_A: "-1x3000",
            'ray_ckpt_steps_at_risk{run="r", node="b"}': "400x3000",
            LAG: "60+60x3000",
            DURABLE: "18000x3000",
            'ray_ckpt_copies_missing{run="r"}': "4x3000",
            'ray_ckpt_goodput_ratio{run="r"}': "0.5x3000",
            DRILLED: "-604800x3000",
        },
        {10: "", 90: "RayCkptNotTraining"},
    ),
    _case("saves ceased", {LAG: "60x60 60+60x2000"}, {60: "", 85: "", 95: "RayCkptNoNewCheckpoint"}),
    _case("exposed", {RISK_A: "400x3000"}, {5: "", 20: "RayCkptExposureHigh"}),
    _case("exposed, pace of saves unknown", {RISK_A: "400x3000", INTERVAL: "0x3000"}, {20: ""}),
    _case("training hangs", {STEP: "0+60x60 3600x2000"}, dict.fromkeys((62, 85, 120), "")),
    _case("not durable", {DURABLE: "0+60x3000"}, {239: "", 246: "", 255: "RayCkptDurableLagHigh"}),
    _case(
        "not durable, saves are rare",
        {DURABLE: "0+60x3000", INTERVAL: "10800x3000"},
        {260: "", 520: "", 580: "RayCkptDurableLagHigh"},
    ),
    _case("the coordinator is gone", {ACTIVE: "1x30"}, {35: "", 39: "", 45: "RayCkptSilent", 60: ""}),
    _case("finished", {ACTIVE: "1x30 2x20"}, dict.fromkeys((35, 45, 50, 60, 90), "")),
    _case(
        "goes on after a night, saves by the hour",
        {LAG: "40000+60x60 0+60x60", INTERVAL: "3600x900", AGE: "0+60x900"},
        dict.fromkeys((17, 30, 58, 90), ""),
    ),
    _case(
        "saves dropped, each by another coordinator",
        {DROPPED.format(k): f"_x{100 + k} 1x900" for k in range(3)},
        {101: "", 104: "RayCkptSavesDropped", 170: ""},
    ),
    _case(
        "saves dropped by one",
        {DROPPED.format(1): "1x100 2 3 4x900"},
        {100: "", 106: "RayCkptSavesDropped", 170: ""},
    ),
    _case(
        "saves skipped",
        {'ray_ckpt_skipped_saves_total{run="r"}': "_x10 1x10 2x10 3x900"},
        {25: "", 35: "RayCkptSavesSkipped"},
    ),
    _case(
        "saves hold up training",
        {'ray_ckpt_save_stall_seconds_sum{run="r"}': "0+3x3000"},
        {40: "", 75: "RayCkptSavesStall"},
    ),
    _case(
        "copies missing",
        {'ray_ckpt_copies_missing{run="r"}': "0x10 4x12 0x10 4x900"},
        {25: "", 40: "", 55: "RayCkptCopiesMissing"},
    ),
    _case(
        "drains stuck",
        {'ray_ckpt_saved_step{run="r", level="durable"}': "0+60x60 3600x900"},
        {115: "", 150: "", 190: "RayCkptDrainsStuck"},
    ),
    _case("disk nearly full", {FREE: "90x900"}, {10: "", 20: "RayCkptDiskFilling"}),
    _case("disk full", {FREE: "40x900"}, {2: "", 20: "RayCkptDiskFilling RayCkptDiskBelowReserve"}),
    _case(
        "damage, made good",
        {FOUND: "_x50 4x900", DAMAGED: "0x50 1x5 0x900"},
        {49: "", 52: "RayCkptCorruptionFound", 57: "RayCkptCorruptionFound", 115: "", 150: ""},
    ),
    _case(
        "damage, half of it made good",
        {FOUND: "_x50 4x900", DAMAGED: "0x50 2x5 1x900"},
        {52: "RayCkptCorruptionFound", 150: "RayCkptCorruptionNotRepaired"},
    ),
    _case("damage of before the coordinator", {DAMAGED: "1x900"}, {150: "RayCkptCorruptionNotRepaired"}),
    _case(
        "a checkpoint lost",
        {'ray_ckpt_lost_checkpoints_total{run="r"}': "_x50 1x900"},
        {49: "", 51: "RayCkptCheckpointLost"},
    ),
    _case(
        "interrupted",
        {INTERRUPTED.format(k): f"_x{50 + k} 1x900" for k in range(4)},
        {52: "", 55: "RayCkptInterruptionsOften"},
    ),
    _case(
        "the store fails",
        {'ray_ckpt_failures_total{run="r", cause="store"}': "_x100 6x900"},
        {99: "", 110: "RayCkptServiceFailures"},
    ),
    _case(
        "replicas differ",
        {'ray_ckpt_replica_findings_total{run="r"}': "_x50 1x900"},
        {49: "", 51: "RayCkptReplicasDiffer"},
    ),
    _case(
        "a drill failed",
        {'ray_ckpt_drills_total{run="r", outcome="failed"}': "_x50 1x900"},
        {49: "", 51: "RayCkptDrillFailed"},
    ),
    _case("no drill", {DRILLED: "_x3000"}, {1420: "", 1460: "RayCkptDrillOverdue"}),
    _case("an old drill", {DRILLED: "-604800x3000"}, {1420: "", 1460: "RayCkptDrillOverdue"}),
    _case(
        "little of use", {'ray_ckpt_goodput_ratio{run="r"}': "0.8x3000"}, {50: "", 65: "RayCkptGoodputLow"}
    ),
)


def test_every_alert_fires_in_a_case() -> None:
    assert {alert for case in CASES for alerts in case.fires.values() for alert in alerts} == set(ALERTS)


@pytest.mark.parametrize("every", LOOKS)
def test_alerts_fire_in_time_and_no_others(tmp_path: Path, every: int) -> None:
    promtool = debian_program("promtool")
    if promtool is None:
        pytest.skip("promtool is not there: sh tests/servers/debian.sh .venv-servers/debian")
    tests = [_promtool_case(case) for case in CASES if _look(case) == every]
    rules = str(promql.DASHBOARDS / "alerts.yml")
    cases = tmp_path / "cases.yml"  # JSON is YAML
    cases.write_text(json.dumps({"rule_files": [rules], "evaluation_interval": f"{every}m", "tests": tests}))
    done = subprocess.run(
        [promtool, "test", "rules", cases], capture_output=True, text=True, timeout=PROMTOOL_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _look(case: Case) -> int:
    """Minutes between two looks at the rules; Prometheus looks more often, which takes promtool long."""
    return LOOKS[0] if max(case.fires) <= SHORT_MINUTES else LOOKS[1]


def _promtool_case(case: Case) -> dict[str, Any]:
    """ALERTS is the series that Prometheus makes of the alerts that fire."""
    well = {series: f"{values}x{max(case.fires)}" for series, values in WELL.items()}
    firing = 'count by (alertname) (ALERTS{alertstate="firing"})'
    return {
        "name": case.name,
        "interval": "1m",
        "input_series": [{"series": s, "values": v} for s, v in {**well, **case.series}.items()],
        "promql_expr_test": [
            {
                "expr": firing,
                "eval_time": f"{minute}m",
                "exp_samples": [
                    {"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in sorted(alerts)
                ],
            }
            for minute, alerts in case.fires.items()
        ],
    }
