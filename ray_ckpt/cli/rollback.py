"""`ray-ckpt rollback`: let the next training continue from an older checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

from ray_ckpt.admin.rollback import QUIET_S, LogTail, Rollback, open_log, plan_rollback, roll_back
from ray_ckpt.cli.options import JsonOption, PathArgument, StorageOption, YesOption, option, store_options
from ray_ckpt.cli.output import FittedTable, Output, is_narrow, level_text, print_json, stdout, when_text
from ray_ckpt.cli.questions import confirm
from ray_ckpt.errors import ConfigError, RunInUse
from ray_ckpt.texts import metrics_text
from ray_ckpt.types import SessionInfo


def rollback(
    path: PathArgument,
    before: Annotated[
        int | None, option("--before", "To the newest step of the lineage below this one.")
    ] = None,
    to: Annotated[
        int | None,
        option("--to", "To exactly this step, which may be on another branch."),
    ] = None,
    yes: YesOption = False,
    even_if_at_work: Annotated[
        bool, option("--even-if-at-work", "Even if a training may be at work; it is stopped.")
    ] = False,
    quiet_s: Annotated[
        float, typer.Option(help="A run is idle if its log has no record of the last this many seconds.")
    ] = QUIET_S,
    storage_option: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Go back to an older checkpoint: the next training of the run continues from it, on a new branch.

    Use it after a loss spike, for example. Later checkpoints stay until the first save of that training;
    then they are deleted, except pinned ones. Until then, `--to` one of them undoes the rollback. A training
    at work is stopped: it loses the run at its next save. The command refuses, with exit code 1, if the log
    has a recent record; a training that saves rarely may look idle.

    Example: `ray-ckpt rollback /shared/runs/gpt --before 3000`
    """
    if not 0 <= quiet_s < math.inf:
        raise ConfigError(f"--quiet-s is {quiet_s}.", hint="Give seconds; --even-if-at-work does not wait.")
    tier, tail = open_log(path, store_options(storage_option))
    plan = plan_rollback(tail.history, before=before, to=to)
    is_at_work = tail.is_at_work(time.time(), quiet_s)
    if is_at_work and not even_if_at_work:
        raise RunInUse(
            f"Run {tail.history.run_name} may be at work: {_last_record(tail)}.",
            hint="Stop its training and wait, or give --even-if-at-work: it would be stopped.",
        )
    notes = [*plan.notes()]
    if is_at_work:
        notes.append(f"{_last_record(tail)}: a training that is at work is stopped.".capitalize())
    is_asked = not plan.is_done and not yes
    if not as_json:
        _print_plan(stdout(), plan, notes)
    elif is_asked:  # print the plan before the question
        _print_plan(Output(stderr=True), plan, notes)
    if not plan.is_done:
        if is_asked:
            confirm(f"Go back to step {plan.checkpoint.step}?")
        tier.probe_log()
    session = roll_back(tier.log, plan, now_s=time.time())
    if as_json:
        print_json(_rollback_json(plan, session, notes))
        return
    done = "was open already" if plan.is_done else "is open"
    stdout().print_line(
        f"Session {session.session} {done}; start a new training of the run: it continues from step "
        f"{plan.checkpoint.step}. The launcher that had the run before may also continue with it."
    )


def _last_record(tail: LogTail) -> str:
    past_s = max(0.0, time.time() - (tail.last_s or 0.0))
    return f"its log has a record of {past_s:.0f} s ago"


def _print_plan(console: Output, plan: Rollback, notes: Iterable[str]) -> None:
    brief = is_narrow(console)
    history, info = plan.history, plan.checkpoint
    console.print_line(f"run {history.run_name}  uid {history.run_uid}")
    console.print_line(
        f"session {plan.session} continues from step {info.step}, {level_text(info)}, saved "
        f"{when_text(info.committed_at_s)}"
    )
    if plan.left_aside:
        headers = ("left aside", "level", "session", "when", "metrics")
        table = FittedTable(*headers, right=(0, 2), fold=(4,), gives_way=(4,))
        for left in plan.left_aside:
            level, when = level_text(left, brief=brief), when_text(left.committed_at_s, brief=brief)
            cells = (left.step, level, left.id.session, when)
            table.add(*cells, metrics_text(left.metrics))
        console.print(table)
        console.print("They are deleted after the first save of the next training, except pinned ones.")
    for note in notes:
        console.print_line(note)


def _rollback_json(plan: Rollback, session: SessionInfo, notes: Sequence[str]) -> dict[str, Any]:
    return {
        "run_name": plan.history.run_name,
        "run_uid": plan.history.run_uid,
        "session": session.session,
        "step": plan.checkpoint.step,
        "attempt": plan.checkpoint.id.attempt,
        "level": plan.checkpoint.level.label,
        "left_aside": [
            {"step": info.step, "attempt": info.id.attempt, "level": info.level.label}
            for info in plan.left_aside
        ],
        "was_done": plan.is_done,
        "notes": list(notes),
    }
