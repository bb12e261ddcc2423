"""Connect ranks to a run without Ray Train."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from numbers import Integral
from typing import Any

import ray

from ray_ckpt.actors.client import open_group, open_part, open_run
from ray_ckpt.actors.messages import Joined
from ray_ckpt.actors.rank_link import RayLink
from ray_ckpt.actors.ray_cluster import owner_here
from ray_ckpt.arguments import whole_number
from ray_ckpt.config import RunOptions
from ray_ckpt.errors import CheckpointError, ConfigError, ServiceError, Unavailable
from ray_ckpt.preemption.notice import Notice
from ray_ckpt.preemption.sigterm import TermSignal
from ray_ckpt.trainer.connection import Connection, get_connection, open_checkpointers, set_connection
from ray_ckpt.types import GroupPart, ranks_of

log = logging.getLogger("ray_ckpt")

LATE_PARTS_S = 3600.0  # longest wait of `begin_connect` for parts that a driver starts later
RETRY_S = 1.0  # after a failed attempt to open a group in the background
_PARTS_HINT = (
    'Give all processes the same `parts`, names with numbers of ranks such as {"actor": 8, "critic": 2}, and '
    "each its `part`."
)

_signal: TermSignal | None = None  # SIGTERM handler of this process's connection


def connect(
    *,
    run: str,
    storage_path: str,
    rank: int = 0,
    world_size: int = 1,
    part: str = "",
    parts: Mapping[str, int] | None = None,
    **options: Any,
) -> None:
    """Connect this process to a run without Ray Train; every rank of the group calls this in a Ray worker.

    Rank 0 opens the run and the group with the nodes of all ranks: with `world_size > 1`, torch.distributed
    must be initialised first. After this call, build Checkpointers as usual. If one process alone saves
    the state of all, as rank 0 does for replicas, only this process connects, as rank 0 of 1.

    `parts` describes several worker groups that commit one checkpoint together, such as an actor and a
    critic: it maps the name of each part to its number of ranks, and is the same in all processes. `part` is
    the part of this process; `rank`, `world_size` and torch.distributed are then those of the part. All parts
    save the same steps, under items of different names. The call waits at most PARTS_WAIT_S for the other
    parts.

    Raises ConfigError for wrong arguments or options.
    """
    _connecting(run, storage_path, rank, world_size, part, parts, options)()


def begin_connect(
    *,
    run: str,
    storage_path: str,
    rank: int = 0,
    world_size: int = 1,
    part: str = "",
    parts: Mapping[str, int] | None = None,
    **options: Any,
) -> Callable[[], None]:
    """Begin to connect this process, as `connect` does, and return the function that completes this.

    For a driver that starts the parts one after the other: no call waits for the other parts before the
    returned function is called. All ranks of the part call both.
    """
    return _connecting(run, storage_path, rank, world_size, part, parts, options, in_background=True)


def _connecting(
    run: str,
    storage_path: str,
    rank: int,
    world_size: int,
    part: str,
    parts: Mapping[str, int] | None,
    options: Mapping[str, Any],
    *,
    in_background: bool = False,
) -> Callable[[], None]:
    rank, world_size = (
        whole_number(value, name, hint=f"Give an int, such as {name}=int(os.environ[{name.upper()!r}]).")
        for name, value in (("rank", rank), ("world_size", world_size))
    )
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"This process cannot be rank {rank} of {world_size}.",
            hint="Give `rank` and `world_size` of the group, such as those of torch.distributed.",
        )
    run_options = RunOptions.parse(**{"ray_report": False, **options})
    group = _parts_of(part, parts, world_size)
    nodes = _nodes_of(rank, world_size)
    opens: Callable[[], Joined] = partial(_open, run, storage_path, run_options, nodes, part, group)
    if in_background and rank == 0:
        opens = _started(opens)

    def complete() -> None:
        joined = _open_on_first(rank, world_size, opens)
        _set_link(RayLink(joined, ranks_of(group, part, world_size).start + rank, part))

    return complete


def _started(opens: Callable[[], Joined]) -> Callable[[], Joined]:
    """Call `opens` in a thread, again while other parts are missing; return a function that waits for it."""
    opened: Future[Joined] = Future()

    def run() -> None:
        end_s = time.monotonic() + LATE_PARTS_S
        while not opened.done():
            try:
                opened.set_result(opens())
            except Exception as error:
                if not isinstance(error, Unavailable) or time.monotonic() > end_s:
                    opened.set_exception(error)
                time.sleep(RETRY_S)

    threading.Thread(target=run, name="ray_ckpt-connect", daemon=True).start()
    return opened.result


def _set_link(link: RayLink) -> None:
    """Make `link` the connection of this process."""
    known = get_connection().link
    if known is not None and known.identity.run_uid != link.identity.run_uid and link.identity.rank == 0:
        log.warning(
            "this process was connected to run %s, now to %s; earlier Checkpointers still save to the former",
            known.identity.run_name,
            link.identity.run_name,
        )
    set_connection(Connection(link=link))
    _watch_signals(link)


def _is_part(named: tuple[object, object]) -> bool:
    name, world_size = named
    is_number = isinstance(world_size, Integral) and not isinstance(world_size, bool)
    return is_number and isinstance(name, str) and name.isidentifier()


def _parts_of(part: str, parts: Mapping[str, int] | None, world_size: int) -> tuple[GroupPart, ...]:
    if parts is None:
        if part:
            raise ConfigError(f"part is {part!r}, and parts is not set.", hint=_PARTS_HINT)
        return ()
    if not isinstance(parts, Mapping) or not all(map(_is_part, parts.items())):
        raise ConfigError(f"parts is {parts!r}.", hint=_PARTS_HINT)
    if parts.get(part) != world_size:
        named = ", ".join(f"{name} with {size}" for name, size in parts.items()) or "none"
        raise ConfigError(
            f"This process is in part {part!r} with {world_size} ranks, and the parts are {named}.",
            hint=_PARTS_HINT,
        )
    return tuple(GroupPart(name=name, world_size=size) for name, size in parts.items())


def _open(
    run: str,
    storage_path: str,
    options: RunOptions,
    nodes: Sequence[str],
    part: str,
    parts: tuple[GroupPart, ...],
) -> Joined:
    owner = owner_here(by_job=True)  # a job outlives its ranks
    spec = open_run(run, storage_path, options, owner=owner)
    if not parts:
        return open_group(spec, nodes, owner=owner)
    return open_part(spec, parts, part, nodes, owner=owner)


def _nodes_of(rank: int, world_size: int) -> list[str]:
    """Return the node of each rank; all ranks call this."""
    node = ray.get_runtime_context().get_node_id()
    if world_size == 1:
        return [node]
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() != world_size or dist.get_rank() != rank:
        raise ServiceError(
            f"rank {rank} of {world_size} is not the rank in torch.distributed.",
            hint="Call torch.distributed.init_process_group() before ray_ckpt.connect().",
        )
    nodes: list[Any] = [None] * world_size
    dist.all_gather_object(nodes, node)
    return nodes


def _open_on_first(rank: int, world_size: int, opens: Callable[[], Joined]) -> Joined:
    """Call `opens` on rank 0; on all ranks, return the result of `opens` or raise its error."""
    answer: list[Any] = [None]
    if rank == 0:
        try:
            answer = [opens()]
        except CheckpointError as error:
            answer = [error]
        except Exception as error:  # after any error the other ranks need an answer
            answer = [ServiceError(f"The group could not be opened: {error}")]
    if world_size > 1:
        import torch.distributed as dist

        dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], CheckpointError):
        raise answer[0]
    joined: Joined = answer[0]
    return joined


def _watch_signals(link: RayLink) -> None:
    """Make all ranks save when this process gets SIGTERM, before it ends."""
    global _signal
    if _signal is not None:
        _signal.uninstall()
    _signal = TermSignal.install(partial(_notify, link))


def _notify(link: RayLink, notice: Notice) -> None:
    """Report that this process ends; without an open Checkpointer, which may save, it ends at once."""
    link.notify_preemption(notice)
    if not open_checkpointers and _signal is not None:
        _signal.uninstall()
