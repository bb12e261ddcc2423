"""`ray-ckpt gc --dry-run`: the checkpoints that retention would delete, and why."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from rich.filesize import decimal

from ray_ckpt.catalog.catalog import Catalog, CheckpointView
from ray_ckpt.cli.options import JsonOption, PathArgument, StorageOption, option, store_options
from ray_ckpt.cli.output import (
    MAX_ROWS,
    FittedTable,
    info_json,
    is_narrow,
    level_text,
    print_json,
    stdout,
    when_text,
)
from ray_ckpt.config import RunOptions
from ray_ckpt.core.retention import (
    Decision,
    Policy,
    RetentionView,
    decide,
    from_text,
    policies_of,
    to_text,
)
from ray_ckpt.errors import ConfigError

_keep = partial(option, rich_help_panel="Another policy than the last session's")


def gc(
    path: PathArgument,
    dry_run: Annotated[bool, option("--dry-run", "Only show; change nothing. Required.")] = False,
    keep_last: Annotated[int | None, _keep("--keep-last", "This many of the newest; default 3.")] = None,
    keep_every: Annotated[
        int | None, _keep("--keep-every", "The first from each multiple of this step.")
    ] = None,
    keep_every_s: Annotated[
        float | None, _keep("--keep-every-s", "The first of each period of this many seconds.")
    ] = None,
    keep_best: Annotated[
        str | None, _keep("--keep-best", "The best by a metric, such as loss:min:2.", "METRIC:MODE:COUNT")
    ] = None,
    keep_milestones: Annotated[
        list[float] | None,
        _keep("--keep-milestone", "The first from this fraction of --total-steps. Repeatable.", "FRACTION"),
    ] = None,
    total_steps: Annotated[int | None, _keep("--total-steps", "Steps of the whole run.")] = None,
    keep_epochs: Annotated[bool, _keep("--keep-epochs", "The last of each finished epoch.")] = False,
    ttl_s: Annotated[float | None, _keep("--ttl-s", "None that are older than this many seconds.")] = None,
    storage_option: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show which live checkpoints retention would delete, which it would keep, and why.

    Uses the policy of the last training session, or the one given by options, which are those of
    `CheckpointCallback`. While the newest durable checkpoints are damaged on the storage path by the log,
    older ones stay, down to an intact one. Only the service of a running training deletes; it also keeps
    checkpoints in use.

    Example: `ray-ckpt gc /shared/runs/gpt --dry-run --keep-last 3 --keep-every 1000`
    """
    if not dry_run:
        raise ConfigError(
            "Checkpoints are deleted only by the service of a running training.",
            hint="Add --dry-run to see what it would delete, and why.",
        )
    if bool(keep_milestones) != (total_steps is not None):
        raise ConfigError("--keep-milestone and --total-steps go together.", hint="Give both, or neither.")
    catalog = Catalog(path, store_options(storage_option))
    options = {
        "keep_last": keep_last,
        "keep_every": keep_every,
        "keep_every_s": keep_every_s,
        "keep_best": _best(keep_best) if keep_best is not None else None,
        "keep_milestones": tuple(keep_milestones or ()) or None,
        "total_steps": total_steps,
        "keep_epochs": keep_epochs or None,
        "ttl_s": ttl_s,
    }
    policies = _policies(catalog, {name: value for name, value in options.items() if value is not None})
    damaged = {info.id.attempt for info in catalog.checkpoints if info.damaged}
    view = RetentionView(
        live=catalog.checkpoints, lineage=catalog.lineage, now_s=time.time(), unsafe_remote=damaged
    )
    decisions = decide(view, policies)
    if as_json:
        print_json(
            {
                "run_name": catalog.run_name,
                "run_uid": catalog.run_uid,
                "policy": to_text(policies),
                "checkpoints": [_decision_json(catalog.view(d.checkpoint), d) for d in decisions],
            }
        )
    else:
        _print_decisions(catalog, policies, decisions)


def _best(text: str) -> tuple[str, str, int]:
    """Parse `loss:min:2` into the value of `keep_best`."""
    head, _, count = text.rpartition(":")
    metric, _, mode = head.rpartition(":")
    if not metric or mode not in ("min", "max") or not re.fullmatch("[1-9][0-9]{0,8}", count):
        hint = "Give METRIC:MODE:COUNT, such as loss:min:2."
        raise ConfigError(f"--keep-best is {text!r}.", hint=hint, option="keep_best")
    return metric, mode, int(count)


def _policies(catalog: Catalog, options: Mapping[str, Any]) -> tuple[Policy, ...]:
    """Return the policies that the options choose, else those of the last session."""
    if options:
        return policies_of(RunOptions.parse(**options))
    policies = from_text(catalog.sessions[-1].retention) if catalog.sessions else ()
    if not policies:
        raise ConfigError(
            f"The log of run {catalog.run_name} has no retention policy.",
            hint="Give one by options, such as --keep-last 3.",
        )
    return policies


def _decision_json(view: CheckpointView, decision: Decision) -> dict[str, Any]:
    return {**info_json(view), "kept": decision.kept, "reasons": list(decision.reasons)}


def _print_decisions(catalog: Catalog, policies: Iterable[Policy], decisions: Sequence[Decision]) -> None:
    console = stdout()
    brief, headers = is_narrow(console), ("", "step", "level", "session", "size", "when", "why")
    table = FittedTable(*headers, right=(1, 3, 4), whole=(4,) if not brief else (4, 5), gives_way=(3, 4))
    for decision in decisions[-MAX_ROWS:]:
        info = decision.checkpoint
        table.add(
            "stays" if decision.kept else "goes",
            info.step,
            level_text(info, brief=brief),
            info.id.session,
            decimal(info.size_bytes),
            when_text(info.committed_at_s, brief=brief),
            ", ".join(decision.reasons),
            style=None if decision.kept else "red",
        )
    going = [decision.checkpoint for decision in decisions if not decision.kept]
    console.print_line(f"run {catalog.run_name}  policy {to_text(policies)}")
    console.print(table if decisions else "No live checkpoints.")
    if len(decisions) > MAX_ROWS:
        console.print(f"These are the last {MAX_ROWS}; --json gives all.")
    if decisions:
        size = f"{decimal(sum(info.size_bytes for info in going))} before sharing and compression"
        console.print(f"{len(going)} of {len(decisions)} would go, {size}; nothing was changed.")
