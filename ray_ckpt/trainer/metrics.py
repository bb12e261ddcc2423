"""Metrics of saves as the numbers that the log holds."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ray_ckpt.config import MAX_METRIC_NAME
from ray_ckpt.format.records import MAX_METRICS

log = logging.getLogger("ray_ckpt")

MAX_LOGGED = 500  # characters of a line about metrics


def detached(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return metrics without their autograd graphs, which must not live until the next step."""
    items = (metrics or {}).items()
    return {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in items}


class MetricReader:
    """Reads metrics as numbers. A value that is none is left out: a save must not fail over it."""

    def __init__(self, *, is_first: bool) -> None:
        """`is_first`: this is rank 0, whose metrics count; the others log no warnings."""
        self.is_first = is_first
        self._warned: set[str] = set()  # names that a warning has named; "" for too many metrics

    def read(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        values: dict[str, float] = {}
        bad: dict[str, str] = {}
        for name, value in itertools.islice(metrics.items(), MAX_METRICS):
            short = str(name)[:MAX_METRIC_NAME]
            try:
                values[short] = float(value)
            except (TypeError, ValueError, RuntimeError, OverflowError) as error:
                bad[short] = f"{short!r} ({error})"
        if len(metrics) > MAX_METRICS and "" not in self._warned:
            self._warned.add("")
            log.warning("of %d metrics the first %d are kept", len(metrics), MAX_METRICS)
        new = [text for name, text in bad.items() if name not in self._warned]
        if new and len(self._warned) < MAX_METRICS and self.is_first:
            self._warned.update(bad)
            log.warning("metrics are left out, as they are no numbers: %s", ", ".join(new)[:MAX_LOGGED])
        return values

    def capture(self, metrics: Mapping[str, Any] | None) -> CapturedMetrics:
        """Read metrics now, except values that an accelerator still computes: these are copied."""
        now, late = detached(metrics), {}
        for name, value in list(now.items()):
            if isinstance(value, torch.Tensor) and value.device.type != "cpu" and value.numel() == 1:
                late[name] = now.pop(name).clone()
        return CapturedMetrics(values=self.read(now), late=late, reader=self)


@dataclass(frozen=True, slots=True)
class CapturedMetrics:
    """The metrics of one save; `late` are copies on an accelerator, which are read beside the capture."""

    values: dict[str, float]
    late: Mapping[str, torch.Tensor]
    reader: MetricReader

    def complete(self) -> Mapping[str, float] | None:
        """Add the late values, and return all on rank 0. Runs in the thread that copies."""
        for name, value in self.reader.read(self.late).items():
            if len(self.values) < MAX_METRICS:
                self.values[name] = value
        return self.values if self.reader.is_first else None
