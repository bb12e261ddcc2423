"""Metrics of saves, converted to the numbers in the log."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ray_ckpt.config import MAX_METRIC_NAME
from ray_ckpt.errors import ConfigError
from ray_ckpt.format.records import MAX_METRICS

log = logging.getLogger("ray_ckpt")

MAX_LOGGED = 500  # characters of a log line about metrics


def detached(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return metrics without their autograd graphs, because a graph must be freed before the next step.

    Tensors of one element are copied, because the save at the end of training may use them after the loop has
    changed them, such as a running mean. Raises ConfigError for an object without `items()`.
    """
    if metrics is None:
        return {}
    if not callable(getattr(metrics, "items", None)):
        raise ConfigError(f"metrics is {metrics!r}.", hint="Give a dict, such as {'loss': 0.5}.")
    return {k: _detached(v) if isinstance(v, torch.Tensor) else v for k, v in metrics.items()}


def _detached(value: torch.Tensor) -> torch.Tensor:
    return value.detach().clone() if value.numel() == 1 else value.detach()


class MetricReader:
    """Reads metrics as numbers. Any other value is left out, because it must not make a save fail."""

    def __init__(self, *, is_first: bool) -> None:
        """Take `is_first` as True on rank 0. Only its metrics are used; other ranks log no warnings."""
        self.is_first = is_first
        self._warned: set[str] = set()  # names in earlier warnings; "" for too many metrics

    def read(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        values: dict[str, float] = {}
        bad: dict[str, str] = {}
        for name, value in itertools.islice(metrics.items(), MAX_METRICS):
            short = str(name)[:MAX_METRIC_NAME].encode(errors="replace").decode()
            try:
                values[short] = float(value)
            except Exception as error:  # raised by code of another package
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
        """Read metrics now; copy the values that an accelerator still computes."""
        now, late = detached(metrics), {}
        for name, value in list(now.items()):
            if isinstance(value, torch.Tensor) and value.device.type != "cpu" and value.numel() == 1:
                late[name] = now.pop(name)
        return CapturedMetrics(values=self.read(now), late=late, reader=self)


@dataclass(frozen=True, slots=True)
class CapturedMetrics:
    """The metrics of one save; `late` are copies on an accelerator, which are read during the capture."""

    values: dict[str, float]
    late: Mapping[str, torch.Tensor]
    reader: MetricReader

    def complete(self) -> Mapping[str, float] | None:
        """Add the late values; return all metrics on rank 0. Runs in the copying thread."""
        for name, value in self.reader.read(self.late).items():
            if len(self.values) < MAX_METRICS:
                self.values[name] = value
        return self.values if self.reader.is_first else None
