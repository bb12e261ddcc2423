"""A real Prometheus, set up as in the runbook, finds a cluster and a training; all our queries have answers.

There are two runs: a small training, and one that exists in name only, of which every metric of the
catalogue is recorded once with every label.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import pytest
import ray

from jobs.demo.local_cluster import LocalCluster
from ray_ckpt import telemetry as t
from ray_ckpt.actors.metrics import GAUGES_EVERY_S, Meters
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.telemetry import METRICS, Metric, Sample
from tests.cluster.ranks import RankGroup, Training
from tests.servers.programs import debian_program, prometheus
from tests.support import promql
from tests.support.promql import BUCKET, COUNT, SUM

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        debian_program("prometheus") is None or debian_program("promtool") is None,
        reason="Prometheus is not there: sh tests/servers/debian.sh .venv-servers/debian",
    ),
]

T = TypeVar("T")

SEEN_S = 90.0  # Ray exports every 10 s, Prometheus reads every 2 s; a busy machine takes longer
CALL_S = 30.0
LOOK_S = 0.5
STEPS, EVERY_STEPS, STEP_S = 60, 5, 0.5
EVERY, TRAINED = "every-metric", "trained"
VALUES: Mapping[str, tuple[str, ...]] = {
    "outcome": ("committed", "dropped", "passed", "failed"),
    "phase": ("capture", "local", "replicate", "commit", "drain"),
    "tier": ("memory", "local", "peer", "remote"),
    "level": ("local", "replicated", "durable"),
    "cause": ("process", "node"),
    "place": ("node", "remote"),
    "node": ("a", "b"),
    "stat": ("max", "p99"),
}
ALERTS = "Alerts that fire"  # the panel
RARE = {  # what a training of which nothing is lost, and nothing drilled, has none of
    t.SKIPPED_SAVES,
    t.REPLICA_FINDINGS,
    t.INTERRUPTIONS,
    t.FAILURES,
    t.CORRUPT,
    t.REPAIRED,
    t.LOST,
    t.RECOVERY,
    t.DRILLS,
    t.DRILL_SECONDS,
    t.DRILLED_AT,
}
RAYS_LABELS = {"Component", "NodeAddress", "SessionName", "Version", "WorkerId", "instance", "job"}
CONFIG = """
global: {{scrape_interval: 2s, evaluation_interval: 2s}}
rule_files: ['{rules}']
scrape_configs:
  - job_name: ray
    file_sd_configs:
      - files: ['{found}']
        refresh_interval: 2s
"""


class Server:
    """Prometheus' HTTP API. Source: https://prometheus.io/docs/prometheus/latest/querying/api/"""

    def __init__(self, url: str) -> None:
        self._url = url

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Return the result of an instant query: a list of labels and values. ValueError if it is refused."""
        return list(self.request("query", query=expr)["result"])

    def request(self, what: str, **parameters: str) -> Any:
        try:
            address = f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
            with urllib.request.urlopen(address, timeout=CALL_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{parameters}: {error.read().decode()}") from error

    def is_ready(self) -> bool:
        try:
            return bool(self.request("status/runtimeinfo"))
        except ValueError:
            return False

    def series(self) -> dict[str, list[dict[str, str]]]:
        """Labels of all series of ours, by name."""
        found: dict[str, list[dict[str, str]]] = {}
        for labels in self.request("series", **{"match[]": '{__name__=~"ray_ckpt_.*"}'}):
            found.setdefault(labels.pop("__name__"), []).append(labels)
        return found


def until(what: Callable[[], T]) -> T:
    """Call `what` until its answer is true or the time is over; return the last answer."""
    end = time.monotonic() + SEEN_S
    while True:
        found = what()
        if found or time.monotonic() > end:
            return found
        time.sleep(LOOK_S)


class Recorder:
    """A process that records every metric of the catalogue with every label, again and again."""

    def __init__(self) -> None:
        self._meters = Meters()
        threading.Thread(target=self._go_on, daemon=True).start()

    def _go_on(self) -> None:
        while True:
            for metric in METRICS:
                for values in product(*(VALUES[label] for label in metric.labels)):
                    labels = dict(zip(metric.labels, values, strict=True))
                    self._meters.record(EVERY, Sample(metric=metric, labels=labels))
            time.sleep(GAUGES_EVERY_S)


def train(run: str, storage: str, total: int) -> None:
    """Continue the run, slowly, since a gauge is exported only while it is set again and again."""
    training = Training(run, storage, every_steps=EVERY_STEPS, remote_every=1)
    for step in training.ckpt.steps(total=total):
        training.step()
        training.ckpt.step(step)
        time.sleep(STEP_S)
    training.ckpt.close()


@pytest.fixture
def seen(cluster: LocalCluster, group: RankGroup, tmp_path: Path, storage: str) -> Iterator[Server]:
    """Prometheus, when it has seen both runs."""
    session = cluster.nodes["head"].handle.get_session_dir_path()
    config = tmp_path / "prometheus.yml"
    rules = promql.DASHBOARDS / "alerts.yml"
    config.write_text(CONFIG.format(rules=rules, found=f"{session}/prom_metrics_service_discovery.json"))
    recorder = ray.remote(Recorder).options(num_cpus=0).remote()
    with prometheus(tmp_path, config) as url:
        server = Server(url)
        until(server.is_ready)
        for total in (STEPS // 2, STEPS):
            group.run(train, TRAINED, storage, total)
        yield server
    ray.kill(recorder)


def test_prometheus_sees_the_metrics_of_a_training_and_answers_every_query(
    seen: Server, storage: str
) -> None:
    """One test, because the training and what Prometheus has of it take a minute."""
    series = until_seen(seen)
    assert_labels(series)
    assert_label_values(series)
    assert_kinds(seen, series)
    assert_rules(seen)
    assert_answers(seen)
    assert_values(seen, Catalog(f"{storage}/{TRAINED}"))


def until_seen(server: Server) -> Mapping[str, list[dict[str, str]]]:
    """Wait for the series of the catalogue and of the training; return all series."""
    wanted = {(name, EVERY) for metric in METRICS for name in names_of(metric)}
    wanted |= {(name, TRAINED) for metric in METRICS if metric not in RARE for name in names_of(metric)}

    def missing() -> set[tuple[str, str]]:
        return wanted - {(name, labels["run"]) for name, found in server.series().items() for labels in found}

    until(lambda: not missing())
    assert not missing()
    return server.series()


def names_of(metric: Metric) -> list[str]:
    if metric.kind != "histogram":
        return [metric.exported]
    return [metric.exported + suffix for suffix in (BUCKET, SUM, COUNT)]


def assert_labels(series: Mapping[str, list[dict[str, str]]]) -> None:
    known = {name: metric for metric in METRICS for name in names_of(metric)}
    assert series.keys() == known.keys()
    for name, found in series.items():
        wanted = {"run", *known[name].labels} | ({"le"} if name.endswith(BUCKET) else set())
        for labels in found:
            own = {label for label in labels if label not in RAYS_LABELS and not label.startswith("otel_")}
            assert own == wanted, name


def assert_label_values(series: Mapping[str, list[dict[str, str]]]) -> None:
    """Assert that the training has every phase, tier and level, and none that the catalogue lacks."""

    def seen(name: str, label: str) -> set[str]:
        return {labels[label] for labels in series[name] if labels["run"] == TRAINED}

    assert seen("ray_ckpt_save_phase_seconds_count", "phase") == set(VALUES["phase"])
    assert seen("ray_ckpt_save_bytes_total", "tier") == {"local", "peer", "remote"}
    assert seen("ray_ckpt_restore_bytes_total", "tier") <= set(VALUES["tier"])
    for name in ("ray_ckpt_saved_step", "ray_ckpt_lag_steps", "ray_ckpt_lag_seconds"):
        assert seen(name, "level") == set(VALUES["level"])
    nodes = seen("ray_ckpt_steps_at_risk", "node")
    assert len(nodes) == 2 and nodes <= seen("ray_ckpt_disk_free_bytes", "node")
    assert nodes <= seen("ray_ckpt_save_bytes_total", "node")


def assert_kinds(server: Server, series: Mapping[str, list[dict[str, str]]]) -> None:
    metadata = server.request("metadata")
    for metric in METRICS:
        family = metric.exported.removesuffix("_total")  # as OpenMetrics has it, which Prometheus requests
        assert {entry["type"] for entry in metadata[family]} == {metric.kind}
    for metric in METRICS:
        if metric.kind == "histogram":
            bounds = {float(labels["le"]) for labels in series[metric.exported + BUCKET]}
            assert bounds == {*metric.buckets, float("inf")}


def assert_rules(server: Server) -> None:
    [group] = server.request("rules")["groups"]
    assert [rule["name"] for rule in group["rules"]] == [rule["alert"] for rule in promql.rules()]
    for rule in group["rules"]:
        assert (rule["health"], rule.get("lastError", "")) == ("ok", ""), rule


def assert_answers(server: Server) -> None:
    """Assert that the dashboard's queries have data for each run with metrics, and that alerts parse."""
    for query in promql.panel_queries():
        runs = {found["metric"].get("run") for found in server.query(promql.evaluable(query.expr))}
        is_rare = query.where == ALERTS or any(use.metric in RARE for use in promql.selected(query.expr))
        assert runs >= ({EVERY} if is_rare else {EVERY, TRAINED}), (query.where, query.expr)
    for query in promql.alert_queries():
        server.query(query.expr)
    with pytest.raises(ValueError, match="parse error"):
        server.query("sum by run (")


def assert_values(server: Server, catalog: Catalog) -> None:
    """Assert that the counters agree with the log."""
    of = f'{{run="{TRAINED}"}}'
    commits = catalog.events()["op"].to_pylist().count("commit")
    wanted = {
        f'sum(ray_ckpt_saves_total{{run="{TRAINED}", outcome="committed"}})': commits,
        f"sum(ray_ckpt_save_stall_seconds_count{of})": commits,
        f"sum(ray_ckpt_restore_seconds_count{of})": 1,
        f"max(max_over_time(ray_ckpt_session{of}[5m]))": len(catalog.sessions),
        f"max(max_over_time(ray_ckpt_last_step{of}[5m]))": STEPS,
        f'max(max_over_time(ray_ckpt_saved_step{{run="{TRAINED}", level="durable"}}[5m]))': STEPS,
    }

    def published() -> dict[str, float]:
        return {expr: float(found["value"][1]) for expr in wanted for found in server.query(expr)}

    until(lambda: published() == wanted)
    assert published() == wanted


def test_promtool_takes_the_rules() -> None:
    promtool = debian_program("promtool")
    assert promtool is not None
    rules = promql.DASHBOARDS / "alerts.yml"
    done = subprocess.run(
        [promtool, "check", "rules", rules], capture_output=True, text=True, timeout=CALL_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
