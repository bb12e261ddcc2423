"""What a user can choose for a run, checked when it is chosen."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ray_ckpt.errors import ConfigError

# Per node, since only the node knows its disks and networks; the first wins over the option.
STAGING_ENV = "RAY_CKPT_STAGING"  # folders, separated by colons
ADDRESS_ENV = "RAY_CKPT_ADDRESS"  # of the interface by which peers reach the node; default: Ray's own
PORTS_ENV = "RAY_CKPT_PORTS"  # first-last, for a firewall; default: any
# Of the service, read where its coordinator starts.
ENCRYPT_ENV = "RAY_CKPT_ENCRYPT"  # 0: no TLS between nodes, for a network that is trusted
MIB = 1 << 20
GIB = 1 << 30
MAX_MILESTONES = 100  # fractions; they stand in each session record of the log, as the metric's name does
MAX_COMPRESS_LEVEL = 19  # zstd's last one without window sizes that a reader may refuse
DEFAULT_EVERY_STEPS = 100
MAX_METRIC_NAME = 200  # characters; longer ones are cut when they are saved
# Node labels that "auto" takes for a failure domain: the first that a node has.
FAILURE_DOMAIN_LABELS = ("rack", "ray.io/availability-zone", "zone", "topology.kubernetes.io/zone")

MEMORY_MODES = ("auto", "double", "single", "stream")
Resume: TypeAlias = str  # "auto", "never", "must", "step:N" or the URI of a checkpoint
_STEP = re.compile(r"step:(\d{1,12})\Z")


def staging_roots(option: str | tuple[str, ...] | None, node_id: str) -> tuple[Path, ...]:
    """The staging folders of a node: its environment's, or the option's, or the default.

    ConfigError if one begins with the home of somebody who has none on this node.
    """
    texts: tuple[str, ...]
    if wanted := os.environ.get(STAGING_ENV):
        texts = tuple(part for part in wanted.split(":") if part)
    else:
        texts = (option,) if isinstance(option, str) else option or (f"/tmp/ray_ckpt-{os.getuid()}",)
    return tuple(dict.fromkeys(_staging_root(text.replace("{node_id}", node_id)) for text in texts))


def _staging_root(text: str) -> Path:
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError(
            f"The staging folder {text} is in a home that this node does not know.",
            hint="Give the whole path, in RunOptions(staging=...) or RAY_CKPT_STAGING.",
            path=text,
        ) from error


def is_encrypted() -> bool:
    """Whether the bytes between nodes are."""
    value = os.environ.get(ENCRYPT_ENV, "1")
    if value not in ("0", "1"):
        raise ConfigError(f"{ENCRYPT_ENV} is {value!r}.", hint="Set it to 1 (the default) or 0.")
    return value == "1"


def transport_ports() -> range | None:
    """The ports that this node may listen on; None: any."""
    text = os.environ.get(PORTS_ENV)
    if not text:
        return None
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    if found is None or not 0 < int(found[1]) <= int(found[2]) < 65536:
        raise ConfigError(f"{PORTS_ENV} is {text!r}.", hint="Set it to two ports, such as 41000-41099.")
    return range(int(found[1]), int(found[2]) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How one run is protected. All times are seconds, all sizes bytes."""

    replicas: int = 1
    """Copies of each shard on other nodes; capped at what the live nodes can hold."""
    keep_last: int = 3
    """Checkpoints that retention keeps; the newest of each level is kept besides."""
    keep_every: int | None = None
    """Keep the first checkpoint at or after each multiple of this many steps as well."""
    keep_every_s: float | None = None
    """Keep the first checkpoint of each period of this length as well."""
    keep_best: tuple[str, str, int] | None = None
    """Keep the best ones by a metric as well: (metric, "min" or "max", how many)."""
    keep_milestones: tuple[float, ...] = ()
    """Keep the first checkpoint at or after each of these fractions of `total_steps` as well."""
    total_steps: int | None = None
    """Steps of the whole run; milestones need it."""
    keep_epochs: bool = False
    """Keep the last checkpoint of each finished epoch as well, by the metric "epoch"."""
    ttl_s: float | None = None
    """Age beyond which none of the options above keeps a checkpoint. The newest of each level stays, and
    so does what is pinned or in use."""
    keep_local: int = 2
    """The last so many checkpoints stay on the nodes once they are durable; of older durable ones only the
    copy on the storage path does."""
    retire_grace_s: float = 60.0
    """Between retiring a checkpoint and deleting it on the storage path, for those who read it; and between
    the end of a finished run and the deletion of its copies on the nodes."""
    keep_local_at_end: bool = False
    """Copies on the nodes outlive a finished run, for a fast restore by its next session, and take room until
    then. False: they go, and with them what only the nodes have; what a pin or another policy than keep_last
    keeps is drained first. A run that failed, or whose launcher died, keeps all either way."""
    every_steps: int | None = None
    """A save is due after each multiple of this many optimizer steps. None: 100, or with every_s none."""
    every_s: float | Literal["auto"] | None = None
    """A save is due when this many seconds have passed since the last one that was due by time; all ranks
    agree on a step for it, some steps ahead. auto: as often as costs least, by what saves have cost so far
    and how often groups have failed, within overhead_budget."""
    overhead_budget: float = 0.01
    """With every_s="auto": the fraction of training time that saves may hold up training for."""
    remote_every: int = 10
    """Every this many commits one is drained to the storage path; the last one of a run always is."""
    remote_every_s: float | Literal["auto"] | None = None
    """Besides, drain a commit when the last drained one was committed this many seconds ago or more. auto: by
    what drains take and how often a failure would cost the copies on nodes, within overhead_budget."""
    drain_bytes_per_s: int | None = None
    """Bandwidth of each node to the storage path, after copies to other nodes. None: as fast as it goes."""
    compress: int | None = None
    """zstd level (1 to 19) for shards on the storage path, where a sample says that it saves a tenth; other
    shards, and all with None, are stored as they are. Stock readers need them decompressed first."""
    storage_options: Mapping[str, str] | None = None
    """How to open a storage path that is a URL: names, never secrets; `env:NAME` for what stands in a
    variable of each node. S3: profile, endpoint_url, region, anonymous, checksum, sse, sse_kms_key_id; GCS:
    endpoint_url, anonymous; others: what their fsspec file system takes."""
    staging: str | tuple[str, ...] | None = None
    """Local folder on each node, best on NVMe, or one on each of several disks. `{node_id}` in it is
    replaced; the environment variable RAY_CKPT_STAGING of a node wins. Default: /tmp/ray_ckpt-<uid>."""
    resume: Resume = "auto"
    """auto: restore if there is a checkpoint; never: start from scratch; must: an error if there is none;
    step:N: go back to the checkpoint of step N. A URI, `<storage_path>/<run>` of another run or
    `<storage_path>/<run>@STEP`: go on from that checkpoint, with all of its state, while this run has none of
    its own; of this run, the same as must or step:N."""
    init_from: str | None = None
    """The URI of a checkpoint of another run, as for `resume`: while this run has none, it begins at step 0
    with the state of `init_items` from there, for fine-tuning."""
    init_items: tuple[str, ...] = ("model",)
    """Names of the items that `init_from` fills."""
    keep: tuple[str, ...] = ()
    """Hyperparameters, or patterns of them, that a restore leaves as the objects were built with, such as
    ("optimizer.lr", "scheduler.*"). Others become what was saved; those that differ are listed."""
    anew: tuple[str, ...] = ()
    """Names of items that begin as they were built where the checkpoint has nothing for them, or state of
    another class or form: ("optimizer",) when it is another optimizer from here on."""
    unprotected_after: timedelta | int | None = None
    """Training ends with Unprotected, between two steps, when it has gone on for this long without a new
    checkpoint, or when this many saves in a row have failed; halfway a warning says so. None: never."""
    overlap: bool = True
    """Copy parameters and optimizer state while the next forward and backward run; a hook before every
    optimizer's step waits for the copy. False: `save` returns when everything has been copied."""
    verify_captures: bool = False
    """Take a second copy of everything at once and compare: finds code that changes parameters behind the
    optimizer's back, at the price of a blocking copy and its memory."""
    memory: str = "auto"
    """Memory on each node for captures. double: two copies of the state, so that a save does not wait until
    the one before it is on disk; single: one; stream: a small ring, written to disk as it is filled, for
    states that memory does not hold a copy of. auto: the first of them that leaves enough memory free."""
    partial_grads: bool = False
    """Save in the middle of an accumulation window too, with the gradients; else a save waits for its end.
    Not with FSDP, which does not show them."""
    max_block_s: float = 0.0
    """How long a save may wait for the one before it; then it is skipped and counted."""
    goal_timeout_s: float = 60.0
    """After this long a checkpoint that is local everywhere is committed without its missing replicas."""
    attempt_timeout_s: float = 60.0
    """After this long an attempt that lacks ranks is dropped."""
    inventory_wait_s: float = 10.0
    """How long a restore waits for nodes that may return with the newest checkpoint."""
    restore_timeout_s: float = 1800.0
    """How long a rank that has restored waits for the others; which ones are missing is said within seconds.
    Large models may take some ranks minutes longer to build or to read."""
    finish_timeout_s: float = 600.0
    """How long the end of a run waits for its last checkpoint to reach the storage path."""
    reserve_bytes: int = GIB
    """Free space on each staging disk that checkpoints never use."""
    high_watermark: float = 0.9
    """Fraction of a staging disk in use above which checkpoints make room."""
    low_watermark: float = 0.8
    """Fraction of a staging disk in use at which they have made room enough."""
    failure_domain: str = "auto"
    """Ray node label whose values fail together; copies go to another one. auto: the first of
    FAILURE_DOMAIN_LABELS that a node has; none: each node for itself."""
    replicate_bytes_per_s: int | None = None
    """Bandwidth of each node for copies to other nodes. None: as fast as the network."""
    repair_bytes_per_s: int = 256 * MIB
    """Bandwidth for new copies in place of lost ones, in the background."""
    scrub_bytes_per_s: int = 16 * MIB
    """Bandwidth for reading stored bytes again to find damage; 0 switches it off."""
    scrub_every_s: float = 7 * 24 * 3600.0
    """How often each copy is read again."""
    store_wait_s: float = 10.0
    """How long a restore waits for a log that does not answer; then it goes on with what the nodes hold."""
    agent_idle_s: float = 600.0
    """After this long the agent of a node that holds nothing needed is ended."""
    ray_report: bool = True
    """Report pointers to Ray Train, so that `Result.checkpoint` shows the newest checkpoint."""

    def __post_init__(self) -> None:
        for name, least in _WHOLE.items():
            self._need(name, _is_whole(getattr(self, name), least), f"an integer of at least {least}")
        for name, least in _WHOLE_OR_NONE.items():
            value = getattr(self, name)
            good = value is None or _is_whole(value, least)
            self._need(name, good, f"an integer of at least {least}, or to None")
        for name in _SECONDS:
            self._need(name, _is_number(getattr(self, name)), "a number of seconds, 0 or more")
        for name in _SECONDS_OR_NONE:
            value = getattr(self, name)
            good = value is None or (_is_number(value) and value > 0)
            self._need(name, good, "a number of seconds above 0, or to None")
        for name in ("every_s", "remote_every_s"):
            every = getattr(self, name)
            good = every is None or every == "auto" or (_is_number(every) and every > 0)
            self._need(name, good, "a number of seconds above 0, 'auto' or None")
        good = _is_number(self.overhead_budget) and 0 < self.overhead_budget < 1
        self._need("overhead_budget", good, "a fraction above 0 and below 1")
        is_known = self.resume in ("auto", "never", "must") or resume_step(self.resume) is not None
        is_known = is_known or is_uri(self.resume)
        self._need("resume", is_known, "'auto', 'never', 'must', 'step:N' or the URI of a checkpoint")
        self._check_origin()
        self._check_unprotected()
        for name in _FLAGS:
            self._need(name, isinstance(getattr(self, name), bool), "True or False")
        self._need("memory", self.memory in MEMORY_MODES, f"one of {', '.join(MEMORY_MODES)}")
        domain = self.failure_domain
        good = isinstance(domain, str) and domain != ""
        self._need("failure_domain", good, "'auto', 'none' or the name of a Ray node label")
        good = self.compress is None or self.compress <= MAX_COMPRESS_LEVEL
        self._need("compress", good, f"a zstd level of at most {MAX_COMPRESS_LEVEL}")
        self._check_storage_options()
        self._check_staging()
        self._check_best()
        self._check_milestones()
        self._check_watermarks()

    def _check_origin(self) -> None:
        good = self.init_from is None or is_uri(self.init_from)
        self._need("init_from", good, "the URI of a checkpoint, such as s3://bucket/runs/gpt@30, or to None")
        for name in ("init_items", "keep", "anew"):
            texts = getattr(self, name)
            good = isinstance(texts, tuple) and all(isinstance(text, str) and text for text in texts)
            self._need(name, good, "a tuple of names")
        self._need("init_items", self.init_items != (), "a tuple of at least one name")
        if self.init_from is not None and is_uri(self.resume):
            raise ConfigError(
                "resume names a checkpoint, and init_from another one.",
                hint="Use resume to go on with all of its state, or init_from to begin at step 0 with some.",
                option="init_from",
            )

    def _check_unprotected(self) -> None:
        limit = self.unprotected_after
        limit_s = limit.total_seconds() if isinstance(limit, timedelta) else None
        good = limit is None or _is_whole(limit, 1) or (limit_s is not None and limit_s > 0)
        self._need(
            "unprotected_after", good, "a timedelta above 0, a number of saves of 1 or more, or to None"
        )
        every_s = self.every_s if isinstance(self.every_s, int | float) else 0.0
        if limit_s is not None and limit_s <= every_s:
            raise ConfigError(
                f"unprotected_after is {limit}, and a save is due every {self.every_s} s.",
                hint="Give it longer than every_s, so that a save can come before it.",
                option="unprotected_after",
            )

    def _check_staging(self) -> None:
        folders = (self.staging,) if isinstance(self.staging, str) else self.staging
        good = folders is None or (isinstance(folders, tuple) and folders != ())
        good = good and all(isinstance(folder, str) and folder for folder in folders or ())
        self._need("staging", good, "a folder, a tuple of folders, or None")

    def _check_storage_options(self) -> None:
        options = self.storage_options
        good = options is None or (
            isinstance(options, Mapping)
            and all(isinstance(name, str) and isinstance(value, str) for name, value in options.items())
        )
        if not good:  # their values are not shown: one may be a secret
            raise ConfigError(
                "storage_options is no mapping of names to texts.",
                hint="Give a dict such as {'profile': 'training'}.",
                option="storage_options",
            )

    def _check_best(self) -> None:
        match self.keep_best:
            case None:
                good = True
            case (str() as metric, "min" | "max", count):
                good = metric.isprintable() and 0 < len(metric) <= MAX_METRIC_NAME and _is_whole(count, 1)
            case _:
                good = False
        good = good and isinstance(self.keep_best, tuple | None)
        self._need("keep_best", good, "(metric, 'min' or 'max', how many), such as ('loss', 'min', 2)")

    def _check_milestones(self) -> None:
        fractions = self.keep_milestones
        good = isinstance(fractions, tuple) and len(fractions) <= MAX_MILESTONES
        good = good and all(_is_number(f) and 0 < f <= 1 for f in fractions)
        wanted = f"a tuple of at most {MAX_MILESTONES} fractions above 0 and up to 1, such as (0.25, 0.5)"
        self._need("keep_milestones", good, wanted)
        if fractions and self.total_steps is None:
            raise ConfigError(
                "keep_milestones needs total_steps.",
                hint="Set total_steps to the number of steps of the whole run.",
                option="total_steps",
            )

    def _check_watermarks(self) -> None:
        low, high = self.low_watermark, self.high_watermark
        self._need("high_watermark", _is_number(high) and 0 < high <= 1, "a fraction above 0 and up to 1")
        good = _is_number(low) and 0 < low < high
        self._need("low_watermark", good, f"a fraction above 0 and below high_watermark ({high})")

    def _need(self, name: str, good: bool, wanted: str) -> None:
        if not good:
            raise ConfigError(f"{name} is {getattr(self, name)!r}.", hint=f"Set it to {wanted}.", option=name)

    @property
    def steps_between_saves(self) -> int | None:
        """The cadence by steps; None if saves are due by time only."""
        return DEFAULT_EVERY_STEPS if self.every_steps is None and self.every_s is None else self.every_steps

    @classmethod
    def parse(cls, **options: Any) -> RunOptions:
        """RunOptions from keywords; an unknown one is a ConfigError that names the closest known one."""
        unknown = sorted(set(options) - set(cls.__dataclass_fields__))
        if unknown:
            from difflib import get_close_matches

            near = get_close_matches(unknown[0], list(cls.__dataclass_fields__), n=1)
            known = ", ".join(sorted(cls.__dataclass_fields__))
            hint = f"Did you mean {near[0]}? Known: {known}." if near else f"Known: {known}."
            raise ConfigError(f"Unknown option {unknown[0]!r}.", hint=hint, option=unknown[0])
        return cls(**options)


_WHOLE = {  # option -> the least it may be
    "replicas": 0,
    "keep_last": 1,
    "keep_local": 1,
    "remote_every": 1,
    "reserve_bytes": 0,
    "repair_bytes_per_s": 1,
    "scrub_bytes_per_s": 0,
}
_FLAGS = ("keep_epochs", "keep_local_at_end", "overlap", "verify_captures", "partial_grads", "ray_report")
_WHOLE_OR_NONE = {
    "every_steps": 1,
    "keep_every": 1,
    "total_steps": 1,
    "replicate_bytes_per_s": 1,
    "drain_bytes_per_s": 1,
    "compress": 1,
}
_SECONDS = (
    "max_block_s",
    "goal_timeout_s",
    "attempt_timeout_s",
    "inventory_wait_s",
    "restore_timeout_s",
    "finish_timeout_s",
    "retire_grace_s",
    "scrub_every_s",
    "store_wait_s",
    "agent_idle_s",
)
_SECONDS_OR_NONE = ("keep_every_s", "ttl_s")


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: object) -> bool:
    """A finite number, 0 or more."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def is_uri(text: object) -> bool:
    """Whether it can name a checkpoint: a URL, or an absolute path."""
    return isinstance(text, str) and ("://" in text or text.startswith("/"))


def resume_step(resume: Resume) -> int | None:
    """The step that a run is to be rolled back to; None if it is to go on from the newest."""
    found = _STEP.match(resume) if isinstance(resume, str) else None
    return int(found[1]) if found else None
