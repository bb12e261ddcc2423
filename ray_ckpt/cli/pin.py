"""`ray-ckpt pin` and `unpin`: keep checkpoints that retention would delete."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ray_ckpt.admin import pins
from ray_ckpt.admin.rollback import LogTail, open_log
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.cli.live import overview_of, runs_at, service_if_any
from ray_ckpt.cli.options import (
    AddressOption,
    JsonOption,
    PathArgument,
    StorageOption,
    option,
    seconds,
    store_options,
)
from ray_ckpt.cli.output import pins_text, print_json, stdout
from ray_ckpt.core.log_requests import check_pin, checkpoint_to_unpin
from ray_ckpt.errors import CheckpointError, RunInUse
from ray_ckpt.storage.remote.tier import RemoteTier
from ray_ckpt.types import CheckpointInfo

StepArgument = Annotated[int, typer.Argument(metavar="STEP", help="The newest live checkpoint of this step.")]
OwnerOption = Annotated[
    str,
    option("--owner", "Who needs it; each owner has a pin.", "NAME"),
]
AtWorkOption = Annotated[
    bool,
    option("--even-if-at-work", "Write even if a service that cannot be reached may have the run."),
]


def pin(
    path: PathArgument,
    step: StepArgument,
    owner: OwnerOption,
    keep_for: Annotated[
        str | None,
        option("--for", "Such as 7d, 12h, 30min; else without end.", "TIME"),
    ] = None,
    address: AddressOption = None,
    even_if_at_work: AtWorkOption = False,
    storage_option: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep a checkpoint, whatever the retention policy, until a time or until `unpin`.

    The service of this cluster writes the pin if it has the run open; else the command appends two records
    to the log itself. For a finished run, a cluster is contacted only with --address or RAY_ADDRESS. Records
    from outside would disturb a service that has the run elsewhere, so the command refuses, with exit code
    1, if the log has a recent record. A retired checkpoint cannot be pinned.

    Example: `ray-ckpt pin /shared/runs/gpt 3000 --owner paper --for 30d`
    """
    for_s = None if keep_for is None else seconds(keep_for)
    check_pin(owner, for_s)
    options = store_options(storage_option)
    by, info = "service", _by_service("pin", path, options, address, step, owner, for_s)
    if info is None:
        tier, tail = open_log(path, options)
        _check_quiet(tier, tail, even_if_at_work)
        now_s = time.time()
        until_s = None if for_s is None else now_s + for_s
        by = "log"
        info = pins.pin(tier.log, tail.history, step=step, owner=owner, expires_at_s=until_s, now_s=now_s)
    _print_pins(info, by, as_json)


def unpin(
    path: PathArgument,
    step: StepArgument,
    owner: OwnerOption,
    address: AddressOption = None,
    even_if_at_work: AtWorkOption = False,
    storage_option: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """End the pin of an owner; retention decides on the checkpoint again. Nothing to do is no error.

    Example: `ray-ckpt unpin /shared/runs/gpt 3000 --owner paper`
    """
    options = store_options(storage_option)
    by, info = "service", _by_service("unpin", path, options, address, step, owner)
    if info is None:
        tier, tail = open_log(path, options)
        if owner in checkpoint_to_unpin(tail.history, step, owner).pins:
            _check_quiet(tier, tail, even_if_at_work)
        by = "log"
        info = pins.unpin(tier.log, tail.history, step=step, owner=owner, now_s=time.time())
    _print_pins(info, by, as_json)


def _is_over(path: str, options: Mapping[str, str], address: str | None) -> bool:
    """Return whether no cluster is named and the log has the run as finished: no cluster is contacted."""
    if address is not None or os.environ.get("RAY_ADDRESS"):
        return False
    with contextlib.suppress(CheckpointError):  # perhaps only this machine cannot reach the store
        sessions = Catalog(path, options).sessions
        end = sessions[-1].ended if sessions else None
        return end is not None and end.cause == "finished"
    return False


def _by_service(
    method: str, path: str, options: Mapping[str, str], address: str | None, step: int, *args: Any
) -> CheckpointInfo | None:
    """Let the service pin or unpin, and return the checkpoint; None if no service here has the run open."""
    if _is_over(path, options, address):
        return None
    with service_if_any(address) as (service, _):
        if service is None:
            return None
        runs = runs_at(overview_of(service), path)
        if not runs:
            return None
        from ray_ckpt.actors.client import CALL_S, get_result

        info: CheckpointInfo = get_result(getattr(service, method).remote(runs[0].where, step, *args), CALL_S)
        return info


def _check_quiet(tier: RemoteTier, tail: LogTail, even_if_at_work: bool) -> None:
    """Raise RunInUse if the run may be at work, and StoragePathError if its log cannot be written."""
    if tail.is_at_work(time.time()) and not even_if_at_work:
        past_s = max(0.0, time.time() - (tail.last_s or 0.0))
        raise RunInUse(
            f"Run {tail.history.run_name} may be at work: its log has a record of {past_s:.0f} s ago.",
            hint="Run it on a node of its cluster, or with --address, so that its service does it; or give "
            "--even-if-at-work.",
        )
    tier.probe_log()


def _print_pins(info: CheckpointInfo, by: str, as_json: bool) -> None:
    if as_json:
        document = {"step": info.step, "attempt": info.id.attempt, "pins": dict(info.pins), "by": by}
        print_json(document)
        return
    held = f"pinned by {pins_text(info)}" if info.pins else "not pinned"
    stdout().print_line(f"Step {info.step} is {held}.")
