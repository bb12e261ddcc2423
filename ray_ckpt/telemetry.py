"""The metrics of a service: their names, labels and meaning. `ray_ckpt.actors.metrics` records the metrics.

Ray exports each metric as `ray_ckpt_<name>`, a counter with `_total` at its end, from every node (see
docs/operations/metrics.md). Every metric has the label `run`, the name of the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric: `labels` besides `run`; `buckets`: the upper bounds of a histogram, in its unit."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exported(self) -> str:
        """The name in Prometheus; for a histogram, without the suffixes `_bucket`, `_sum` and `_count`."""
        return f"ray_ckpt_{self.name}" + ("_total" if self.kind == "counter" else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A value to set (gauge), to add (counter) or to observe (histogram)."""

    metric: Metric
    value: float = 1.0
    labels: Mapping[str, str] = field(default_factory=dict)


WORST_NODES = 10  # nodes with series of their own, in each gauge and run: series must not grow with the nodes


def spread(metric: Metric, values: Iterable[float]) -> Iterator[Sample]:
    """Yield the largest of `values`, and the value that 99 % of them do not exceed; nothing for no values."""
    ranked = sorted(values)
    if ranked:
        yield Sample(metric=metric, value=ranked[-1], labels={"stat": "max"})
        p99 = ranked[math.ceil(0.99 * len(ranked)) - 1]
        yield Sample(metric=metric, value=p99, labels={"stat": "p99"})


_SHORT = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_LONG = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)

# Saves
SAVES = Metric("saves", "counter", "Saves that ended; outcome: committed or dropped.", ("outcome",))
STALL = Metric(
    "save_stall_seconds", "histogram", "Time for which a save stalled training, slowest rank.", (), _SHORT
)
PHASE = Metric(
    "save_phase_seconds",
    "histogram",
    "Parts of a save: capture (until copied), local (until fsynced), replicate (waiting for copies), commit "
    "(the log record), drain (until on the storage path).",
    ("phase",),
    _LONG,
)
REPLICA_FINDINGS = Metric(
    "replica_findings", "counter", "Saves at which ranks that hold the same tensors had different bytes."
)
SKIPPED_SAVES = Metric(
    "skipped_saves", "counter", "Saves skipped because the one before was still being written; also dropped."
)
SAVE_BYTES = Metric(
    "save_bytes",
    "counter",
    "Bytes written by saves, on the storage path as compressed; tier: local, peer, parity, remote.",
    ("tier", "node"),
)
SHARED_BYTES = Metric(
    "save_shared_bytes",
    "counter",
    "Bytes of saves that a tier had already, in a file of an earlier checkpoint; tier: local, peer, remote.",
    ("tier", "node"),
)
INTERVAL = Metric("save_interval_seconds", "gauge", "Interval between two saves as it is now; 0: not known.")
LATENCY = Metric("save_latency_seconds", "gauge", "Recent time from the start of a save to its commit.")

# Progress of a run
ACTIVE = Metric(
    "run_active",
    "gauge",
    "1 while a training group has the run, else 0; 2 for 20 minutes after its end, then no series.",
)
SESSION = Metric("session", "gauge", "Number of the current or the last session.")
SESSION_AGE = Metric("session_age_seconds", "gauge", "Seconds since this session began.")
STEP = Metric("last_step", "gauge", "The last optimizer step that a rank has completed.")
SAVED_STEP = Metric(
    "saved_step", "gauge", "The newest step that has reached a level: local, replicated, durable.", ("level",)
)
LAG_STEPS = Metric("lag_steps", "gauge", "Steps completed since the newest one at a level.", ("level",))
LAG_SECONDS = Metric("lag_seconds", "gauge", "Seconds since the newest commit at a level.", ("level",))
AT_RISK = Metric(
    "steps_at_risk",
    "gauge",
    "Steps to repeat if this node died now; -1: all. The ten worst nodes of the group.",
    ("node",),
)
NODES_AT_RISK = Metric(
    "nodes_steps_at_risk",
    "gauge",
    "The steps at risk of all nodes of the group; stat: max, or p99, which 99 % of the nodes do not exceed; "
    "-1: all steps.",
    ("stat",),
)

# Missing or damaged copies
COPIES_MISSING = Metric("copies_missing", "gauge", "Copies of fragments that repair still has to make.")
DRAINS = Metric(
    "drains_pending", "gauge", "Checkpoints being drained to the storage path, or waiting for it."
)
DAMAGED = Metric(
    "storage_damaged", "gauge", "Live checkpoints whose copy on the storage path is known to be damaged."
)
DISK_FREE = Metric(
    "disk_free_bytes",
    "gauge",
    "Free bytes on the file system of a node's staging folder. The ten nodes with the smallest share above "
    "the reserve.",
    ("node",),
)
DISK_TOTAL = Metric("disk_total_bytes", "gauge", "Size of that file system.", ("node",))
DISK_RESERVE = Metric(
    "disk_reserve_bytes", "gauge", "Bytes of it that are left unused (`reserve_bytes`).", ("node",)
)

NODES_DISK_USED = Metric(
    "nodes_disk_used_ratio",
    "gauge",
    "Used share of the file systems of all nodes; stat: max, or p99, which 99 % of the nodes do not exceed.",
    ("stat",),
)

# Failures
INTERRUPTIONS = Metric(
    "interruptions",
    "counter",
    "Groups that ended; cause: process, node, preemption, replaced, launcher.",
    ("cause",),
)
FAILURES = Metric(
    "failures",
    "counter",
    "Failures of the service; cause: save, copy, drain, store, agent, coordinator, node.",
    ("cause",),
)
CORRUPT = Metric(
    "corruption_found", "counter", "Copies that differed from their digests; place: node, remote.", ("place",)
)
REPAIRED = Metric(
    "corruption_repaired",
    "counter",
    "Damaged copies that were repaired, as far as they are needed.",
    ("place",),
)
LOST = Metric("lost_checkpoints", "counter", "Checkpoints without an intact copy.")

# Restores
RESTORES = Metric("restore_seconds", "histogram", "Duration of a restore, slowest rank.", (), _LONG)
RECOVERY = Metric(
    "recovery_seconds",
    "histogram",
    "Phases of a recovery after a failure, observed when all ranks have their state: noticed, ended, "
    "started, opened, connected, prepared, restored; as in `ray-ckpt goodput`.",
    ("phase",),
    _LONG,
)
RESTORE_BYTES = Metric(
    "restore_bytes", "counter", "Bytes read; tier: memory, local, peer, remote.", ("tier",)
)
DRILLS = Metric(
    "drills", "counter", "Recovery drills by checkpoint; outcome: passed or failed.", ("outcome",)
)
DRILL_SECONDS = Metric("drill_seconds", "histogram", "Time for which a recovery drill read.", (), _LONG)
DRILLED_AT = Metric("drill_timestamp_seconds", "gauge", "Unix time of the last recovery drill that passed.")
GOODPUT = Metric(
    "goodput_ratio", "gauge", "Time of steps whose effect survived, divided by wall time; from the run's log."
)
BADPUT = Metric("badput_seconds", "gauge", "Lost time; cause as in `ray-ckpt goodput`.", ("cause",))

METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
