"""Names on disk and on the wire, checked wherever a name comes from outside (P9)."""

from __future__ import annotations

import re

from ray_ckpt.errors import ConfigError, FormatError
from ray_ckpt.format.digest import FRAGMENT_PREFIX, digest
from ray_ckpt.types import AttemptId

CHECKPOINT_JSON = "checkpoint.json"
CHECKPOINTS_DIR = "checkpoints"
LOG_DIR = "log"
SNAPSHOT_PREFIX = "snapshot-"  # begins the names of snapshots in the log
PARITY_PREFIX = "parity-"  # begins the names of parity files
SERVICE_DIR = "ray_ckpt"  # <storage_path>/<run>/ray_ckpt

STILL = 1  # number of the shard with a rank's still slices
MAX_SHARDS = 2  # shards of a rank: what moves, and what is still
MAX_RANKS = 999_999  # ranks of a group, also nodes and copies: the limit of 6 digits in file names

_DIRECTORY = re.compile(r"([0-9]{12})-([0-9a-f]{16})\Z")
_ITEMS = re.compile(r"[A-Za-z_][0-9A-Za-z_]*(,[A-Za-z_][0-9A-Za-z_]*)*\Z")
_FILE = re.compile(
    r"(shard-\d{1,6}(\.\d{1,6})?-of-\d{1,6}\.safetensors|state-\d{1,6}-of-\d{1,6}\.json"
    r"|manifest-\d{1,6}-of-\d{1,6}\.parquet|parity-\d{1,6}(\.\d{1,6})?-of-\d{1,6}\.bin|checkpoint\.json)\Z",
    re.ASCII,
)
_SHARD = re.compile(r"shard-.*\.safetensors\Z")
_RECORD = re.compile(r"([0-9]{20})\.json\Z")
_SNAPSHOT = re.compile(r"snapshot-([0-9]{20})\.parquet\Z")
_RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]{0,199}\Z")
_RUN_UID = re.compile(r"[0-9a-f]{32}\Z")


def make_attempt(*, run_uid: str, session: int, step: int, attempt: int, epoch: int = 0) -> AttemptId:
    """Return the id of try number `attempt` to save at a step; all ranks compute the same id.

    `epoch` is the epoch of the coordinator that opened the session. The number of a session
    that is not in the log may be used again; the pair of number and epoch is unique.
    """
    name = digest(f"{run_uid}/{epoch}/{session}/{step}/{attempt}".encode())[:16]
    return AttemptId(run_uid=run_uid, session=session, step=step, attempt=name, epoch=epoch)


def attempt_of(directory: str) -> str:
    """Return the attempt whose folder has this name."""
    return check_directory(directory).rpartition("-")[2]


def step_of(directory: str) -> int:
    """Return the step of the attempt whose folder has this name."""
    return int(check_directory(directory).partition("-")[0])


def shard_file(rank: int, world_size: int, number: int = 0) -> str:
    """Return the name of a rank's shard; number STILL has its still slices."""
    further = f".{number}" if number else ""
    return f"shard-{rank:05d}{further}-of-{world_size:05d}.safetensors"


def shard_files(rank: int, world_size: int) -> tuple[str, ...]:
    """Return the names of all shards that a rank may have."""
    return tuple(shard_file(rank, world_size, number) for number in range(MAX_SHARDS))


def state_file(rank: int, world_size: int) -> str:
    return f"state-{rank:05d}-of-{world_size:05d}.json"


def fragment_file(node_index: int, num_nodes: int) -> str:
    return f"manifest-{node_index:05d}-of-{num_nodes:05d}.parquet"


def parity_file(node_index: int, num_nodes: int, number: int = 0) -> str:
    """Return the name of a parity file that was made for a node; never on the storage path.

    Number STILL has the parity of the still shards.
    """
    further = f".{number}" if number else ""
    return f"{PARITY_PREFIX}{node_index:05d}{further}-of-{num_nodes:05d}.bin"


def record_file(seq: int) -> str:
    return f"{seq:020d}.json"


def record_seq(name: str) -> int | None:
    """Return the sequence number of a record's file name, or None for other names."""
    match = _RECORD.match(name)
    return int(match.group(1)) if match else None


def snapshot_file(seq: int) -> str:
    return f"{SNAPSHOT_PREFIX}{seq:020d}.parquet"


def snapshot_seq(name: str) -> int | None:
    """Return the number of the last record in a snapshot from the file name, or None for other names."""
    match = _SNAPSHOT.match(name)
    return int(match.group(1)) if match else None


def is_directory_name(name: str) -> bool:
    return _DIRECTORY.match(name) is not None


def is_file_name(name: str) -> bool:
    return _FILE.match(name) is not None


def is_shard_name(name: str) -> bool:
    """Return whether a file of this name holds tensors, and may be stored compressed."""
    return is_file_name(name) and _SHARD.match(name) is not None


def is_still_name(name: str) -> bool:
    """Return whether a shard, or a parity file, of this name may be equal to one of an earlier checkpoint."""
    match = _FILE.match(name)
    return match is not None and f".{STILL}" in match.groups()[1:]


def is_data_name(name: str) -> bool:
    """Return whether a file of this name holds saved state, and no metadata."""
    is_metadata = name == CHECKPOINT_JSON or name.startswith((FRAGMENT_PREFIX, PARITY_PREFIX))
    return is_file_name(name) and not is_metadata


def check_directory(name: str) -> str:
    """Return `name` if it is the name of a checkpoint directory. Raise FormatError otherwise."""
    if not is_directory_name(name):
        raise FormatError(f"{name!r} is not a checkpoint directory name.", name=name)
    return name


def items_suffix(items: str) -> str:
    """Return the end of the name of a directory that has only these items of a checkpoint; "" if all."""
    return "." + check_items(items).replace(",", ".") if items else ""


def whole_directory(name: str) -> str | None:
    """Return the directory of the checkpoint of which directory `name` has all or some items, else None."""
    directory, _, items = name.partition(".")
    is_ours = is_directory_name(directory) and (directory == name or _ITEMS.match(items.replace(".", ",")))
    return directory if is_ours else None


def check_items(items: str) -> str:
    """Return `items` if it is names of items, joined by commas. Raise FormatError otherwise."""
    if not _ITEMS.match(items):
        raise FormatError(f"{items[:80]!r} is not a list of items.")
    return items


def check_file(name: str) -> str:
    """Return `name` if it is a file name of the format, without a path. Raise FormatError otherwise."""
    if not is_file_name(name):
        raise FormatError(f"{name!r} is not a file name of a checkpoint.", name=name)
    return name


def check_run_uid(uid: str) -> str:
    if not _RUN_UID.match(uid):
        raise FormatError(f"{uid!r} is not a run uid.", uid=uid)
    return uid


def check_run_name(name: str) -> str:
    """Return `name` if it can be a folder on every store. Raise ConfigError otherwise."""
    if not _RUN_NAME.match(name):
        raise ConfigError(
            f"The run name {name!r} cannot be a folder name.",
            hint="Use 1 to 200 of A-Z, a-z, 0-9, '_', '-', '.', '=' or '+', and begin with a letter, a digit "
            "or '_'.",
        )
    return name
