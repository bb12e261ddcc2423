"""The content of a report as plain values, for `--json` and scripts."""

from __future__ import annotations

import dataclasses
from typing import Any

from ray_ckpt.analysis.goodput import Goodput
from ray_ckpt.analysis.report.facts import (
    MAX_CHECKPOINTS,
    MAX_IN_CLUSTER,
    MAX_SESSIONS,
    MAX_TROUBLES,
    RunReport,
    verdicts,
)
from ray_ckpt.analysis.session_history import save_s
from ray_ckpt.core.retention import pinned_by
from ray_ckpt.format import jsontext
from ray_ckpt.types import CheckpointInfo, SessionInfo


def to_json(report: RunReport) -> dict[str, Any]:
    """Return the content of the page as plain values; lists are as long as on the page."""
    found = report.goodput
    return {
        "run_name": report.run_name,
        "run_uid": report.run_uid,
        "where": report.where,
        "time_s": report.now_s,
        "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts(report)],
        "num_sessions": len(report.sessions),
        "num_checkpoints": len(report.checkpoints),
        "num_live": len(report.live),
        "num_in_cluster": len(report.in_cluster),
        "goodput": {
            "ratio": None if found.ratios is None else dataclasses.asdict(found.ratios),
            **goodput_json(found),
        },
        "interruptions": [dataclasses.asdict(each) for each in report.problems[-MAX_TROUBLES:]],
        "phases": [dataclasses.asdict(phase) for phase in report.phases],
        "checkpoints": [_checkpoint_json(info, report) for info in report.checkpoints[-MAX_CHECKPOINTS:]],
        "in_cluster_steps": [info.step for info in report.in_cluster[-MAX_IN_CLUSTER:]],
        "sessions": [_session_json(info, report) for info in report.sessions[-MAX_SESSIONS:]],
    }


def goodput_json(found: Goodput) -> dict[str, Any]:
    return {
        "wall_s": found.wall_s,
        "measured_s": found.measured_s,
        "not_counted_s": found.not_counted_s,
        "clock_back_s": found.clock_back_s,
        "productive_s": dataclasses.asdict(found.productive),
        "badput_s": {cause: dataclasses.asdict(time) for cause, time in found.badput.items()},
    }


def _checkpoint_json(info: CheckpointInfo, report: RunReport) -> dict[str, Any]:
    return {
        "step": info.step,
        "attempt": info.id.attempt,
        "session": info.id.session,
        "state": info.state,
        "level": info.level.label,
        "replicas": info.replicas,
        "parity": info.parity or None,
        "size_bytes": info.size_bytes,
        "shared_bytes": info.shared_bytes,
        "exported": info.exported or None,
        "committed_at_s": info.committed_at_s,
        "stall_s": info.stall_s,
        "save_s": save_s(info),
        "drain_s": info.drain_s,
        "verified_at_s": info.verified_at_s,
        "drilled_at_s": info.drilled_at_s,
        "drill": info.drill,
        "damaged": info.damaged or None,
        "suspect": info.suspect or None,
        "pins": list(pinned_by(info, report.now_s)),
        "metrics": jsontext.metrics_json(info.metrics),
    }


def _session_json(info: SessionInfo, report: RunReport) -> dict[str, Any]:
    source = report.by_attempt.get(info.resumed_from or "")
    return {
        "session": info.session,
        "resumed_from_session": source.id.session if source else None,
        "resumed_from_step": source.step if source else None,
        "origin_step": info.origin_step,
        "world_size": info.world_size,
        "num_nodes": info.num_nodes,
        "opened_at_s": info.opened_at_s,
        "restored_at_s": info.restored_at_s,
        "restore_s": info.restore_s,
        "read_bytes": dict(info.read_bytes),
        "ended": None if info.ended is None else dataclasses.asdict(info.ended),
    }
