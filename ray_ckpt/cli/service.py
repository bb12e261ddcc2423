"""`ray-ckpt up` and `down`: the checkpoint service of a Ray cluster."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ray_ckpt.cli.live import NO_SERVICE, overview_of, service_line
from ray_ckpt.cli.options import EXIT_REFUSED, AddressOption, JsonOption, YesOption, option
from ray_ckpt.cli.output import print_json, stdout
from ray_ckpt.cli.questions import confirm, is_anybody_there
from ray_ckpt.errors import ServiceError, Unavailable
from ray_ckpt.texts import printable

if TYPE_CHECKING:
    from ray_ckpt.actors.messages import ServiceView


def up(address: AddressOption = None, as_json: JsonOption = False) -> None:
    """Start the checkpoint service of a Ray cluster, or show its versions if it is up.

    Optional: a training starts the service itself. Agents start with the first run that is opened.

    Example: `ray-ckpt up --address 10.0.0.1:6379`
    """
    from ray_ckpt.actors import attach
    from ray_ckpt.actors.client import coordinator

    with attach.attached(address):
        was_up = attach.find_service() is not None
        view = overview_of(coordinator())
    if as_json:
        print_json({"started": not was_up, **_service_json(view)})
        return
    console = stdout()
    console.print("The service was up already." if was_up else "The service is up.")
    console.print_line(service_line(view))


def down(
    address: AddressOption = None,
    force: Annotated[
        bool,
        option("--force", "Even if a group is at work or only nodes have a checkpoint."),
    ] = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """End the checkpoint service of a Ray cluster: its agents, then the coordinator. Deletes nothing.

    Prints the cluster on stderr; on a terminal it needs a confirmation, unless --address or RAY_ADDRESS names
    the cluster. Refuses, with exit code 1, while a group is at work, and while only the nodes' disks have a
    checkpoint that is newer than those on the storage path, is pinned, or is being written there. With
    --force it ends the service in spite of these: files stay on the disks, where the next service finds them;
    a training at work continues without saves.

    Example: `ray-ckpt down`
    """
    from ray_ckpt.actors import attach

    with attach.attached(address) as cluster:
        print(f"ray-ckpt: the Ray cluster at {printable(cluster)}", file=sys.stderr)
        service = attach.find_service()
        if service is not None and not yes and not attach.is_named(address) and is_anybody_there():
            confirm(f"End the service of the Ray cluster at {printable(cluster)}?")
        try:
            view = None if service is None else attach.stop(service, force=force)
        except Unavailable:
            raise
        except ServiceError as error:  # the service is in use
            print(f"ray-ckpt: {printable(f'{cluster}: {error}')}", file=sys.stderr)
            raise typer.Exit(EXIT_REFUSED) from None
    if view is None:
        print_json({"ended": False}) if as_json else stdout().print(NO_SERVICE)
        return
    on_disks = {run.where: run.in_cluster_only for run in view.runs if run.in_cluster_only}
    if as_json:
        print_json({"ended": True, **_service_json(view), "on_node_disks_only": on_disks})
        return
    console = stdout()
    console.print(f"Ended the coordinator and {len(view.agents)} agent(s); nothing was deleted.")
    for where, steps in on_disks.items():
        named = ", ".join(map(str, steps))
        console.print_line(f"{where}: only the nodes' disks have step(s) {named}.")


def _service_json(view: ServiceView) -> dict[str, Any]:
    document = dataclasses.asdict(view)
    del document["runs"]
    return document
