"""What the dashboard shows, from the question "is my run protected?" down to where its time went.

Several processes may tell of a run, and a restarted one begins anew under another `WorkerId`: so gauges are
taken `max by (run, ...)` and counters `sum by (run, ...)`.
"""

from __future__ import annotations

from jobs.dashboards.grafana import Json, Panel, Query, Row, dashboard, datasource_variable, label_variable

RUN = 'run=~"$run"'
SPARSE = "30m"  # over which quantiles are taken: saves are minutes apart
WORST = 10  # nodes in a panel
HOUR = "1h"
COLOURS = ((None, "green"), (1.0, "red"))  # for counts of what must not be


def _newest(metric: str, by: str = "run", where: str = "") -> str:
    return f"max by ({by}) ({metric}{{{_all(where)}}})"


def _grown(metric: str, by: str = "run", where: str = "", window: str = HOUR) -> str:
    """How much a counter has grown within a window, with the value at which a new series began.

    `increase` alone does not see the first event of a process: its counter begins with it.
    """
    series = f"{metric}{{{_all(where)}}}"
    return f"sum by ({by}) (({series} unless {series} offset {window}) or increase({series}[{window}]))"


def _rate(metric: str, by: str = "run", where: str = "") -> str:
    return f"sum by ({by}) (rate({metric}{{{_all(where)}}}[$__rate_interval]))"


def _quantile(part: float, histogram: str, by: str = "run", window: str = SPARSE) -> str:
    return f"histogram_quantile({part}, {_grown(histogram + '_bucket', by + ', le', window=window)})"


def _all(where: str) -> str:
    return f"{RUN}, {where}" if where else RUN


def _worst(series: str, end: str = "bottomk") -> str:
    """Of a series by node: those nodes that are worth a look, however many there are."""
    return f"{end} by (run) ({WORST}, {series})"


AT_RISK = _newest("ray_ckpt_steps_at_risk", "run, node")  # -1 stands for more than any number
FREE = _newest("ray_ckpt_disk_free_bytes", "run, node")
RANGE = "$__range"  # that is shown

PROTECTED = Row(
    "Is my run protected?",
    (
        Panel(
            "Training",
            "Whether a training group has the run.",
            (Query(_newest("ray_ckpt_run_active"), "{{run}}"),),
            kind="stat",
            width=4,
            names={"0": "no", "1": "yes", "2": "finished"},
        ),
        Panel(
            "Steps at risk",
            "To be repeated if the worst node died now.",
            (Query(f"min by (run) ({AT_RISK}) < 0 or max by (run) ({AT_RISK})", "{{run}}"),),
            kind="stat",
            width=4,
            names={"-1": "all of them"},
        ),
        Panel(
            "Newest checkpoint",
            "Age of the newest commit.",
            (Query(_newest("ray_ckpt_lag_seconds", where='level="local"'), "{{run}}"),),
            kind="stat",
            unit="s",
            width=4,
        ),
        Panel(
            "Newest on the storage path",
            "What would be left if all nodes died: age of the newest durable checkpoint.",
            (Query(_newest("ray_ckpt_lag_seconds", where='level="durable"'), "{{run}}"),),
            kind="stat",
            unit="s",
            width=4,
        ),
        Panel(
            "Copies missing",
            "Copies of fragments that repair has yet to make.",
            (Query(_newest("ray_ckpt_copies_missing"), "{{run}}"),),
            kind="stat",
            width=4,
            limits=((None, "green"), (1.0, "orange")),
        ),
        Panel(
            "Goodput",
            "Time of steps whose effect survived, over wall time.",
            (Query(_newest("ray_ckpt_goodput_ratio"), "{{run}}"),),
            kind="stat",
            unit="percentunit",
            width=4,
            limits=((None, "red"), (0.9, "orange"), (0.95, "green")),
        ),
        Panel(
            "Steps at risk, by node",
            "Steps to be repeated if a node died at that moment, the ten worst; -1: all of them. Falls when "
            "a checkpoint has its copies, and grows until the next one.",
            (Query(f"{_worst(f'{AT_RISK} < 0')} or {_worst(AT_RISK, 'topk')}", "{{run}} {{node}}"),),
        ),
        Panel(
            "Seconds since the newest checkpoint",
            "By level, beside the interval between saves.",
            (
                Query(_newest("ray_ckpt_lag_seconds", "run, level"), "{{run}} {{level}}"),
                Query(_newest("ray_ckpt_save_interval_seconds"), "{{run}} interval"),
            ),
            unit="s",
        ),
        Panel(
            "Steps since the newest checkpoint",
            "Completed steps that no checkpoint of a level has.",
            (Query(_newest("ray_ckpt_lag_steps", "run, level"), "{{run}} {{level}}"),),
        ),
        Panel(
            "Steps",
            "The last completed step and the newest one at each level. A step back is a restart.",
            (
                Query(_newest("ray_ckpt_last_step"), "{{run}} completed"),
                Query(_newest("ray_ckpt_saved_step", "run, level"), "{{run}} {{level}}"),
            ),
            width=16,
        ),
        Panel(
            "Alerts that fire",
            "Those of alerts.yml.",
            (Query(f'ALERTS{{alertname=~"RayCkpt.*", alertstate="firing", {RUN}}}', "{{alertname}}"),),
            kind="table",
        ),
    ),
)

SAVES = Row(
    "Saves",
    (
        Panel(
            "Training held up by a save",
            "On the slowest rank, over half an hour.",
            (
                Query(_quantile(0.5, "ray_ckpt_save_stall_seconds"), "{{run}} p50"),
                Query(_quantile(0.99, "ray_ckpt_save_stall_seconds"), "{{run}} p99"),
            ),
            unit="s",
        ),
        Panel(
            "Parts of a save, p50",
            "capture: until copied; local: until fsynced; replicate: waiting for copies; commit: the log "
            "record; drain: until on the storage path.",
            (Query(_quantile(0.5, "ray_ckpt_save_phase_seconds", "run, phase"), "{{run}} {{phase}}"),),
            unit="s",
        ),
        Panel(
            "Parts of a save, p99",
            "As beside.",
            (Query(_quantile(0.99, "ray_ckpt_save_phase_seconds", "run, phase"), "{{run}} {{phase}}"),),
            unit="s",
        ),
        Panel(
            "From the beginning of a save to its commit",
            "Beside the interval: a save that takes longer holds up the next one.",
            (
                Query(_newest("ray_ckpt_save_latency_seconds"), "{{run}} save"),
                Query(_newest("ray_ckpt_save_interval_seconds"), "{{run}} interval"),
            ),
            unit="s",
        ),
        Panel(
            "Saves per hour",
            "committed, dropped, and of these the skipped ones: the save before was still being written.",
            (
                Query(_grown("ray_ckpt_saves_total", "run, outcome"), "{{run}} {{outcome}}"),
                Query(_grown("ray_ckpt_skipped_saves_total"), "{{run}} skipped"),
            ),
        ),
        Panel(
            "Bytes written by saves",
            "To disks of the nodes, to their peers, to the storage path; all nodes together.",
            (Query(_rate("ray_ckpt_save_bytes_total", "run, tier"), "{{run}} {{tier}}"),),
            unit="Bps",
        ),
        Panel(
            "Bytes written by node",
            "To its own disk, the ten nodes that write most.",
            (
                Query(
                    _worst(_rate("ray_ckpt_save_bytes_total", "run, node", 'tier="local"'), "topk"),
                    "{{run}} {{node}}",
                ),
            ),
            unit="Bps",
        ),
    ),
)

DURABILITY = Row(
    "Durability",
    (
        Panel(
            "Copies missing",
            "Copies of fragments that repair has yet to make; it goes to 0 after the loss of a node.",
            (Query(_newest("ray_ckpt_copies_missing"), "{{run}}"),),
        ),
        Panel(
            "Drains",
            "Checkpoints on their way to the storage path, or waiting for it.",
            (Query(_newest("ray_ckpt_drains_pending"), "{{run}}"),),
        ),
        Panel(
            "Damage",
            "Copies that did not fit their digests, those made good, in an hour; what is still damaged.",
            (
                Query(_grown("ray_ckpt_corruption_found_total", "run, place"), "{{run}} {{place}} found"),
                Query(
                    _grown("ray_ckpt_corruption_repaired_total", "run, place"), "{{run}} {{place}} repaired"
                ),
                Query(_newest("ray_ckpt_storage_damaged"), "{{run}} still damaged on the storage path"),
            ),
        ),
        Panel(
            "Checkpoints lost",
            "Of which no intact copy was left, in the time shown.",
            (Query(_grown("ray_ckpt_lost_checkpoints_total", window=RANGE), "{{run}}"),),
            kind="stat",
            width=6,
            limits=COLOURS,
        ),
        Panel(
            "Drills",
            "Recovery drills, by checkpoint, in the time shown.",
            (Query(_grown("ray_ckpt_drills_total", "run, outcome", window=RANGE), "{{run}} {{outcome}}"),),
            kind="stat",
            width=6,
        ),
        Panel(
            "Last drill that passed",
            "How long ago.",
            (Query(f"time() - {_newest('ray_ckpt_drill_timestamp_seconds')}", "{{run}}"),),
            kind="stat",
            unit="s",
            width=6,
            limits=((None, "green"), (7 * 86400.0, "orange")),
        ),
        Panel(
            "Length of drills",
            "Half of them read for longer, in the time shown.",
            (Query(_quantile(0.5, "ray_ckpt_drill_seconds", window=RANGE), "{{run}}"),),
            kind="stat",
            unit="s",
            width=6,
        ),
    ),
)

DISKS = Row(
    "Disks",
    (
        Panel(
            "Free on staging disks",
            "Of their size, the ten fullest nodes.",
            (
                Query(
                    _worst(f"{FREE} / {_newest('ray_ckpt_disk_total_bytes', 'run, node')}"),
                    "{{run}} {{node}}",
                ),
            ),
            unit="percentunit",
            width=12,
        ),
        Panel(
            "Free above the reserve",
            "The ten nodes with least. Below 0 saves are dropped.",
            (
                Query(
                    _worst(f"{FREE} - {_newest('ray_ckpt_disk_reserve_bytes', 'run, node')}"),
                    "{{run}} {{node}}",
                ),
            ),
            unit="bytes",
            width=12,
        ),
    ),
)

FAILURES = Row(
    "Failures and recovery",
    (
        Panel(
            "Interruptions per hour",
            "Groups that ended; replaced: another one took the run over.",
            (Query(_grown("ray_ckpt_interruptions_total", "run, cause"), "{{run}} {{cause}}"),),
        ),
        Panel(
            "Failures of the service per hour",
            "By cause. Most are made good without anybody's help; see the coordinator's log.",
            (Query(_grown("ray_ckpt_failures_total", "run, cause"), "{{run}} {{cause}}"),),
        ),
        Panel(
            "Session",
            "The number of the training group; one more at each restart.",
            (Query(_newest("ray_ckpt_session"), "{{run}}"),),
        ),
        Panel(
            "Restores",
            "Of the slowest rank, over six hours.",
            (
                Query(_quantile(0.5, "ray_ckpt_restore_seconds", window="6h"), "{{run}} p50"),
                Query(_quantile(0.99, "ray_ckpt_restore_seconds", window="6h"), "{{run}} p99"),
            ),
            unit="s",
            width=12,
        ),
        Panel(
            "Bytes restored within an hour",
            "By where they were read: memory of the node, its disk, a peer, the storage path.",
            (Query(_grown("ray_ckpt_restore_bytes_total", "run, tier"), "{{run}} {{tier}}"),),
            unit="bytes",
            width=12,
        ),
    ),
)

GOODPUT = Row(
    "Where the time went",
    (
        Panel(
            "Goodput",
            "Time of steps whose effect survived, over wall time since the run began.",
            (Query(_newest("ray_ckpt_goodput_ratio"), "{{run}}"),),
            unit="percentunit",
            width=12,
        ),
        Panel(
            "Badput by cause",
            "Time of the run without such steps; `ray-ckpt goodput` has the same causes.",
            (Query(_newest("ray_ckpt_badput_seconds", "run, cause"), "{{run}} {{cause}}"),),
            unit="s",
            width=12,
            is_stacked=True,
        ),
    ),
)

ROWS = (PROTECTED, SAVES, DURABILITY, DISKS, FAILURES, GOODPUT)


def checkpoint_dashboard() -> Json:
    ended = Query(
        _grown("ray_ckpt_interruptions_total", "run, cause", window="2m"), "Interruption: {{cause}}"
    )
    variables = (datasource_variable(), label_variable("run", "Run", "ray_ckpt_run_active"))
    return dashboard("Checkpoints (ray_ckpt)", "ray-ckpt", ROWS, variables, (ended,))
