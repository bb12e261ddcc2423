"""Record the metrics of `ray_ckpt.telemetry` through `ray.util.metrics`.

Ray adds `ray_` to each name, and exports the values of a process from an endpoint of the process's node. A
gauge vanishes 20 s after it was last set, and NaN is not exported (seen in Ray 2.60). Therefore a gauge is
set again and again while its value holds, and an unknown value is not set.
"""

from __future__ import annotations

import logging
from typing import Any

from ray.util import metrics

from ray_ckpt.telemetry import METRICS, Metric, Sample

log = logging.getLogger("ray_ckpt.meters")

GAUGES_EVERY_S = 5.0  # between settings of all gauges, since Ray exports gauges every 10 s


class Meters:
    """Metrics of one process. Its methods never raise, so that a failing metric costs no save."""

    def __init__(self) -> None:
        self._meters: dict[str, Any] = {}
        self._is_off = False

    def record(self, run: str, sample: Sample) -> None:
        """Set, add or observe a value for the run named `run`."""
        if self._is_off:
            return
        metric, tags = sample.metric, {"run": run, **sample.labels}
        try:
            meter = self._meter(metric)
            if metric.kind == "gauge":
                meter.set(sample.value, tags=tags)
            elif metric.kind == "histogram":
                meter.observe(max(sample.value, 0.0), tags=tags)
            elif sample.value > 0:
                meter.inc(sample.value, tags=tags)
        except Exception:
            self._is_off = True
            log.exception("metrics are off: %s could not be recorded", metric.name)

    def _meter(self, metric: Metric) -> Any:
        if metric.name not in self._meters:
            kinds = {"gauge": metrics.Gauge, "counter": metrics.Counter, "histogram": metrics.Histogram}
            bounds = {"boundaries": list(metric.buckets)} if metric.kind == "histogram" else {}
            self._meters[metric.name] = kinds[metric.kind](
                f"ckpt_{metric.name}", description=metric.text, tag_keys=("run", *metric.labels), **bounds
            )
        return self._meters[metric.name]


assert len({metric.name for metric in METRICS}) == len(METRICS), "a name means one thing"
