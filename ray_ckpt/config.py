"""Options of a run, checked when they are set, and environment variables of a node."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ray_ckpt.errors import ConfigError
from ray_ckpt.texts import did_you_mean
from ray_ckpt.types import MAX_PARITY, MAX_PARITY_DATA

# Set on each node, since disks and networks differ; RAY_CKPT_STAGING overrides the option `staging`.
STAGING_ENV = "RAY_CKPT_STAGING"  # folders, separated by colons
ADDRESS_ENV = "RAY_CKPT_ADDRESS"  # address at which peers reach the node; default: the one that Ray uses
PORTS_ENV = "RAY_CKPT_PORTS"  # range `first-last`, for a firewall; default: any port
# Variable in the environment in which the coordinator of the service starts.
RELAY_NODES_ENV = "RAY_CKPT_RELAY_NODES"  # read where the service starts
RELAY_NODES = 64  # a coordinator answers a message in 0.5 ms, so 64 groups of 64 nodes in 32 ms
ENCRYPT_ENV = "RAY_CKPT_ENCRYPT"  # 0: no TLS between nodes, for a trusted network
MIB = 1 << 20
GIB = 1 << 30
MAX_MILESTONES = 100  # fractions; each session record in the log holds all of them
MAX_REMOTE_ITEMS = 100  # characters of their names, which are part of the name of a folder
MAX_COMPRESS_LEVEL = 19  # higher levels of zstd use window sizes that a reader may refuse
DEFAULT_EVERY_STEPS = 100
MAX_METRIC_NAME = 200  # characters; longer names are cut when metrics are saved
# Node labels that name the failure domain with "auto": the first label in this order that a node has.
FAILURE_DOMAIN_LABELS = ("rack", "ray.io/availability-zone", "zone", "topology.kubernetes.io/zone")

MEMORY_MODES = ("auto", "double", "single", "stream")
PREFETCH_MODES = ("auto", "always", "never")
PLACES = ("rack", "spread")  # of a copy: in the failure domain of the node that saved, or outside
REPLICATE_MODES = ("shared", "full")
Resume: TypeAlias = str  # "auto", "never", "must", "step:N" or the URI of a checkpoint
_LABEL = re.compile(r"[^\s,=]+=[^\s,=]+")
_STEP = re.compile(r"step:(\d{1,12})\Z")


def staging_roots(option: str | tuple[str, ...] | None, node_id: str) -> tuple[Path, ...]:
    """Return the staging folders of this node: from its environment, else from the option, else the default.

    ConfigError if a folder begins with `~user` and this node has no home for that user, and for a variable
    without a folder.
    """
    texts: tuple[str, ...]
    if wanted := os.environ.get(STAGING_ENV):
        texts = tuple(part for part in wanted.split(":") if part)
        if not texts:
            raise ConfigError(
                f"{STAGING_ENV} is {wanted!r}, which names no folder.",
                hint="Set it to folders, separated by colons, or unset it.",
            )
    else:
        texts = (option,) if isinstance(option, str) else option or (f"/tmp/ray_ckpt-{os.getuid()}",)
    return tuple(dict.fromkeys(_staging_root(text.replace("{node_id}", node_id)) for text in texts))


def _staging_root(text: str) -> Path:
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError(
            f"The staging folder {text} is in a home directory that does not exist on this node.",
            hint="Give the full path, in RunOptions(staging=...) or RAY_CKPT_STAGING.",
            path=text,
        ) from error


def is_encrypted() -> bool:
    """Return whether transfers between nodes are encrypted."""
    value = os.environ.get(ENCRYPT_ENV, "1")
    if value not in ("0", "1"):
        raise ConfigError(f"{ENCRYPT_ENV} is {value!r}.", hint="Set it to 1 (the default) or 0.")
    return value == "1"


def relay_nodes() -> int:
    """Return the number of nodes whose messages one agent relays; 0: agents relay no messages."""
    text = os.environ.get(RELAY_NODES_ENV, str(RELAY_NODES))
    if re.fullmatch(r"\d{1,3}", text) is None or int(text) == 1:
        raise ConfigError(
            f"{RELAY_NODES_ENV} is {text!r}.", hint="Set it to a number from 2 to 999, or to 0."
        )
    return int(text)


def transport_ports() -> range | None:
    """Return the ports that this node may listen on; None: any."""
    text = os.environ.get(PORTS_ENV)
    if not text:
        return None
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    if found is None or not 0 < int(found[1]) <= int(found[2]) < 65536:
        raise ConfigError(f"{PORTS_ENV} is {text!r}.", hint="Set it to two ports, such as 41000-41099.")
    return range(int(found[1]), int(found[2]) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of one run. All times are in seconds, all sizes in bytes."""

    replicas: int = 1
    """Copies of each shard on other nodes; fewer if too few nodes are alive."""
    parity: tuple[int, int] | None = None
    """(k, m), such as (6, 2): instead of copies, groups of k + m nodes keep parity of their shards, and those
    of any m lost nodes of a group are computed from the others. It takes m/k of the disk of a save, where
    replicas=m takes m times that; m is 1 or 2. With fewer nodes a group is smaller, and its k too."""
    keep_last: int = 3
    """Number of newest checkpoints to keep; the newest of each level is always kept."""
    keep_every: int | None = None
    """Also keep the first checkpoint at or after each multiple of this many steps."""
    keep_every_s: float | None = None
    """Also keep the first checkpoint of each period of this length."""
    keep_best: tuple[str, str, int] | None = None
    """Also keep the best checkpoints by a metric: (metric, "min" or "max", how many)."""
    keep_milestones: tuple[float, ...] = ()
    """Also keep the first checkpoint at or after each of these fractions of `total_steps`."""
    total_steps: int | None = None
    """Steps of the whole run; required by `keep_milestones`."""
    keep_epochs: bool = False
    """Also keep the last checkpoint of each finished epoch, by the metric "epoch"."""
    ttl_s: float | None = None
    """Age after which the options above keep a checkpoint no longer. The newest of each level, pinned
    checkpoints and those in use stay."""
    keep_local: int = 2
    """Number of newest checkpoints that stay on the nodes once they are durable; older durable ones stay on
    the storage path only."""
    retire_grace_s: float = 60.0
    """Time between retiring a checkpoint and deleting it on the storage path, so that readers can finish;
    also the time between the end of a finished run and the deletion of its copies on the nodes."""
    keep_local_at_end: bool = False
    """Keep the copies on the nodes after a finished run, so that its next session restores fast; they take
    space until then. False: they are deleted, also checkpoints that only the nodes have; those that a pin or
    a policy other than keep_last keeps are drained first. A run that failed, or whose launcher died, always
    keeps its copies."""
    every_steps: int | None = None
    """Save after each multiple of this many optimizer steps. None: 100, or never if every_s is set."""
    every_s: float | Literal["auto"] | None = None
    """Save when this many seconds have passed since the last save that was due by time; all ranks agree on a
    step for it, some steps ahead. auto: the interval that costs least, computed from the cost of saves and
    the rate of failures so far, within overhead_budget."""
    overhead_budget: float = 0.01
    """Largest fraction of training time for which saves may stall training, with every_s="auto"."""
    remote_every: int = 10
    """Drain one of this many commits to the storage path. With Ray Train the last one of a run that finishes
    is drained too; with `connect`, call `ckpt.wait("durable")` before `ckpt.close()`."""
    remote_every_s: float | Literal["auto"] | None = None
    """Also drain a commit when the last drained one was committed this many seconds ago or more. auto:
    computed from the duration of drains and the rate of failures that lose the copies on nodes, within
    overhead_budget."""
    remote_items: tuple[str, ...] = ()
    """Items that are also uploaded alone, such as ("model",): weights for evaluation, and the last resort if
    the cluster is lost. `ray_ckpt.open` reads them. Training does not resume from them, so a checkpoint of
    which only these items are uploaded is not durable. They are deleted with their checkpoint."""
    remote_items_every: int | None = None
    """Upload `remote_items` of one of this many commits, except where the whole checkpoint is uploaded.
    None: of each commit, or only by time if `remote_items_every_s` is set."""
    remote_items_every_s: float | None = None
    """Also upload them when the last such commit was made this many seconds ago or more."""
    drain_bytes_per_s: int | None = None
    """Bandwidth of each node to the storage path; copies to other nodes go first. None: no limit."""
    compress: int | None = None
    """Compress shards on the storage path, at this zstd level (1 to 19; 1 is best), by planes of bytes where
    numbers shrink that way. A shard of which a sample shrinks by less than a twentieth stays as it is. None:
    all do. Stock readers cannot read compressed shards; `ray-ckpt export` writes plain ones."""
    storage_options: Mapping[str, str] | None = None
    """Options to open a storage path that is a URL. They must not be secrets; `env:NAME` stands for the value
    of an environment variable of each node. S3: backend, profile, endpoint_url, region, anonymous, checksum,
    sse, sse_kms_key_id; GCS: backend, endpoint_url, anonymous; others: the options of their fsspec file
    system. backend: "obstore" (default), or "fsspec" for s3fs and gcsfs."""
    staging: str | tuple[str, ...] | None = None
    """Local folder on each node, best on NVMe, or a tuple with a folder on each of several disks. `{node_id}`
    in it is replaced; the environment variable RAY_CKPT_STAGING of a node overrides it. Default:
    /tmp/ray_ckpt-<uid>."""
    resume: Resume = "auto"
    """auto: restore the newest checkpoint if there is one; never: start from scratch; must: fail if there is
    none; step:N: go back to the checkpoint of step N. After never and step:N, the first saves delete the
    checkpoints that were left aside, unless they are pinned. The URI of another run, `<storage_path>/<run>`
    or `<storage_path>/<run>@STEP`: start with the complete state of that checkpoint if this run has no
    checkpoint yet. The URI of this run means must or step:N."""
    init_from: str | None = None
    """URI of a checkpoint of another run, as for `resume`, for fine-tuning: if this run has no checkpoint
    yet, it starts at step 0 with the state of `init_items` from there."""
    init_items: tuple[str, ...] = ("model",)
    """Items that are restored from `init_from`."""
    keep: tuple[str, ...] = ()
    """Hyperparameters, or patterns of them, that a restore leaves as the objects were built with, such as
    ("optimizer.lr", "scheduler.*"). Others become what was saved; those that differ are listed."""
    anew: tuple[str, ...] = ()
    """Names of items that begin as they were built where the checkpoint has nothing for them, or state of
    another class or form: ("optimizer",) when it is another optimizer from here on. Saved
    state of an item that is no longer registered is left if its name is here. This is for whole items: if one
    tensor of a model differs, none of them is restored. For parts of a model see "The model has changed" in
    docs/guides/resume.md."""
    static_items: tuple[str, ...] = ()
    """Names of items that training does not change. Their bytes are stored and sent once and then shared, as
    those of frozen parameters are in any case; a change is saved all the same. With several ranks this is
    done for parameters and DTensors; each rank saves its plain tensors for itself, anew by each save."""
    unprotected_after: timedelta | int | None = None
    """End training with Unprotected, between two steps, after this time without a new checkpoint, or after
    this many failed saves in a row; a warning is logged halfway. None: never."""
    overlap: bool = True
    """Copy parameters and optimizer state during the next forward and backward passes; a hook before each
    optimizer step waits for the copy. False: `save` returns when everything has been copied."""
    verify_captures: bool = False
    """Compare each capture with a second, blocking copy, to find code that changes parameters outside of an
    optimizer step. Costs the time and the memory of that copy. It does nothing with memory="stream", whose
    ring cannot be read again, also if "auto" has chosen it; a warning is logged then."""
    replicate: str = "shared"
    """Ranks that save what several ranks hold, such as the parameters with DDP. shared: one rank saves each
    tensor; full: every rank saves all that it holds, and restores its own bytes at the same world size. Costs
    memory, disk and bandwidth for all copies, by each save also for frozen parameters."""
    replica_watch: bool = True
    """Compare 1/53 of what several ranks hold at each save, all of it in 53 saves at a regular distance, to
    find replicas that have drifted apart. A difference is logged and recorded with the checkpoint; training
    goes on."""
    memory: str = "auto"
    """Memory on each node for captures. double: two copies of the state, so that a save need not wait until
    the previous one is on disk; single: one copy; stream: a small ring that is written to disk while it is
    filled, for states that do not fit into free memory. auto: the first of these that leaves enough memory
    free."""
    partial_grads: bool = False
    """Also save within a gradient accumulation window, with the gradients. False: a save waits for the end of
    the window. Not possible with FSDP, which does not expose gradients."""
    salvage: bool = False
    """After the loss of ranks or nodes, save the last finished step from the ranks that are left, if they
    hold all tensors (DDP, HSDP). For that, each rank sends its own state (random state, data position) to its
    node in each call of `Checkpointer.step`. It does nothing in loops that call `due` and `save` instead: the
    integrations of Hugging Face, Lightning, torchtitan, DCP, Megatron and verl. Not with `replicate="full"`:
    replicas must be alike. False: a restart continues from the last save."""
    salvage_copy: bool = False
    """With `salvage`, also copy the parameters and the optimizer state before each optimizer step. If a rank
    dies when the others are one step further, that step is lost, instead of all steps since the last save.
    Takes their memory once more, on their device, and the time of the copy in each step."""
    max_block_s: float = 0.0
    """Longest wait of a save for the previous one; after it the save is skipped and counted."""
    goal_timeout_s: float = 60.0
    """Longest wait for replicas; a checkpoint that is local everywhere is then committed without them."""
    attempt_timeout_s: float = 60.0
    """Longest wait for missing ranks of a save; it is then dropped."""
    inventory_wait_s: float = 10.0
    """Longest wait of a restore for nodes that may return with the newest checkpoint."""
    restore_timeout_s: float = 1800.0
    """Longest wait of a restored rank for the other ranks; missing ranks are logged within seconds. Some
    ranks may take minutes longer to build or to read a large model."""
    prefetch: str = "auto"
    """Reading by the nodes of what their ranks will restore, while the processes of a group start, if the
    group has as many ranks and nodes as the one that saved; otherwise nothing is read ahead. always: into
    memory, from disks, nodes and the storage path; auto: the same on nodes with more than two cores for each
    rank, elsewhere only the check of what is in memory already; never: ranks read everything."""
    finish_timeout_s: float = 600.0
    """Longest wait at the end of a run until its last checkpoint is on the storage path.

    Also of each rank, before, until its last save is committed.
    """
    reserve_bytes: int = GIB
    """Free space on each staging disk that is left unused."""
    high_watermark: float = 0.9
    """Used fraction of a staging disk above which old copies are deleted."""
    low_watermark: float = 0.8
    """Used fraction of a staging disk at which that deletion stops."""
    failure_domain: str = "auto"
    """Ray node label, such as a rack: nodes with the same value fail together, so copies go to nodes with
    another value. auto: the first of FAILURE_DOMAIN_LABELS that a node has; none: each node is its own
    domain."""
    copies: tuple[str, ...] = ()
    """Place of each of the `replicas` copies, such as ("rack", "spread"). rack: in the failure domain of the
    node that saved, over short links; it survives the loss of nodes. spread: outside; it survives the loss of
    the domain. (): all outside, as far as possible."""
    replica_nodes: str = ""
    """Ray node label as `label=value`: only nodes with it hold copies for others, such as nodes with large
    disks and no GPU. "": training nodes hold each other's copies."""
    spare_nodes: str = ""
    """Ray node label as `label=value`: idle nodes with it get copies of the newest checkpoint, so that a
    worker that is placed on one of them restores from its own disk. Copies go at `repair_bytes_per_s`, after
    all others, and only into free space below `low_watermark`. "": none."""
    replicate_bytes_per_s: int | None = None
    """Bandwidth of each node for copies to other nodes. None: no limit."""
    repair_bytes_per_s: int = 256 * MIB
    """Bandwidth for replacing lost copies in the background."""
    scrub_bytes_per_s: int = 16 * MIB
    """Bandwidth of the whole run for reading stored copies again to find damage, one at a time; 0: off."""
    scrub_every_s: float = 7 * 24 * 3600.0
    """Period in which each stored copy is read again, if `scrub_bytes_per_s` is enough for this; a warning
    says when it is not."""
    store_wait_s: float = 10.0
    """Longest wait of a restore for a log that does not answer; it then uses what the nodes hold."""
    agent_idle_s: float = 600.0
    """Time after which the agent of a node without needed data is stopped."""
    ray_report: bool = True
    """Report pointers to Ray Train, so that `Result.checkpoint` shows the newest checkpoint."""

    def __post_init__(self) -> None:
        for name in ("resume", "init_from"):  # which may be the path of a catalog's checkpoint
            if isinstance(value := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(value))
        for option in fields(self):
            self._check_type(option.name, option.type)
        for name in ("attempt_timeout_s", "restore_timeout_s"):  # with 0, no group of two ranks could go on
            self._need(name, getattr(self, name) > 0, "a number of seconds above 0")
        budget = self.overhead_budget
        self._need("overhead_budget", _is_number(budget) and 0 < budget < 1, "a fraction above 0 and below 1")
        is_known = self.resume in ("auto", "never", "must") or resume_step(self.resume) is not None
        is_known = is_known or is_uri(self.resume)
        wanted = "'auto', 'never', 'must', 'step:N' or the URI of a checkpoint: an absolute path or a URL"
        self._need("resume", is_known, wanted)
        self._need("memory", self.memory in MEMORY_MODES, f"one of {', '.join(MEMORY_MODES)}")
        modes = f"one of {', '.join(PREFETCH_MODES)}"
        self._need("prefetch", self.prefetch in PREFETCH_MODES, modes)
        modes = f"one of {', '.join(REPLICATE_MODES)}"
        self._need("replicate", self.replicate in REPLICATE_MODES, modes)
        self._need("salvage_copy", self.salvage or not self.salvage_copy, "False, or salvage to True as well")
        is_alike = self.replicate != "full"  # a rank that has died would get the state of another one
        self._need("salvage", is_alike or not self.salvage, 'False, because of replicate="full"')
        domain = self.failure_domain
        good = isinstance(domain, str) and domain != ""
        self._need("failure_domain", good, "'auto', 'none' or the name of a Ray node label")
        for name in ("replica_nodes", "spare_nodes"):
            label = getattr(self, name)
            good = isinstance(label, str) and (label == "" or _LABEL.fullmatch(label) is not None)
            wanted = "one Ray node label and its value, without blanks and commas"
            self._need(name, good, f"{wanted}, such as 'role=spare', or to ''")
        self._check_copies()
        good = self.compress is None or self.compress <= MAX_COMPRESS_LEVEL
        self._need("compress", good, f"a zstd level of at most {MAX_COMPRESS_LEVEL}")
        self._check_parity()
        self._check_origin()
        self._check_remote_items()
        self._check_unprotected()
        self._check_storage_options()
        self._check_staging()
        self._check_best()
        self._check_milestones()
        self._check_watermarks()

    def _check_type(self, name: str, type_: Any) -> None:
        """Check an option as far as its type, as it is written above, decides about its values."""
        value, least = getattr(self, name), _LEAST.get(name, 1)
        is_period = _is_number(value) and value > 0
        match type_:
            case "bool":
                self._need(name, isinstance(value, bool), "True or False")
            case "int":
                self._need(name, _is_whole(value, least), f"an integer of at least {least}")
            case "int | None":
                good = value is None or _is_whole(value, least)
                self._need(name, good, f"an integer of at least {least}, or to None")
            case "float" if name.endswith("_s"):
                self._need(name, _is_number(value), "a number of seconds, 0 or more")
            case "float | None":
                self._need(name, value is None or is_period, "a number of seconds above 0, or to None")
            case "float | Literal['auto'] | None":
                good = value is None or value == "auto" or is_period
                self._need(name, good, "a number of seconds above 0, 'auto' or None")
            case "tuple[str, ...]":
                good = isinstance(value, tuple) and all(isinstance(text, str) and text for text in value)
                self._need(name, good, "a tuple of names")

    def _check_copies(self) -> None:
        good = all(place in PLACES for place in self.copies) and len(self.copies) in (0, self.replicas)
        places = " or ".join(map(repr, PLACES))
        self._need("copies", good, f"{places} for each of the {self.replicas} replicas, or to ()")
        for name in ("copies", "replica_nodes"):
            if getattr(self, name) and self.parity is not None:
                raise ConfigError(
                    f"parity and {name} are both set.",
                    hint=f"Unset {name}: parity makes no copies that it could place.",
                    option=name,
                )
        if "rack" in self.copies and self.failure_domain == "none":
            raise ConfigError(
                f"copies is {self.copies!r}, but failure_domain is 'none'.",
                hint="Set failure_domain to 'auto' or to the name of a node label.",
                option="copies",
            )

    def _check_parity(self) -> None:
        match self.parity:
            case None:
                return
            case (k, m):
                good = _is_whole(k, 2) and k <= MAX_PARITY_DATA and _is_whole(m, 1) and m <= MAX_PARITY
            case _:
                good = False
        good = good and isinstance(self.parity, tuple)
        wanted = f"(k, m) with k from 2 to {MAX_PARITY_DATA} and m from 1 to {MAX_PARITY}, such as (6, 2)"
        self._need("parity", good, f"{wanted}, or to None")
        if self.replicas > 1:
            raise ConfigError(
                f"parity and replicas={self.replicas} are both set.",
                hint="Set parity for groups of many nodes, or replicas for copies; parity makes no copies.",
                option="parity",
            )

    def _check_origin(self) -> None:
        good = self.init_from is None or is_uri(self.init_from)
        wanted = "the URI of a checkpoint: an absolute path such as /shared/runs/gpt@30, or a URL"
        self._need("init_from", good, f"{wanted} such as s3://bucket/runs/gpt@30, or to None")
        self._need("init_items", self.init_items != (), "a tuple of at least one name")
        if self.init_from is not None and is_uri(self.resume):
            raise ConfigError(
                "resume and init_from both name a checkpoint.",
                hint="Use resume to continue with the complete state, or init_from to start at step 0.",
                option="init_from",
            )
        if self.init_from is not None and self.resume == "must":
            raise ConfigError(
                "init_from is set, and resume is 'must': init_from is for a run that has no checkpoint yet.",
                hint="Use resume='auto', or unset init_from.",
                option="init_from",
            )

    def _check_remote_items(self) -> None:
        names = self.remote_items
        good = len(set(names)) == len(names) and len(".".join(names)) <= MAX_REMOTE_ITEMS
        good = good and all(name.isidentifier() and name.isascii() for name in names)
        wanted = f"a tuple of different items, such as ('model',), with {MAX_REMOTE_ITEMS} characters at most"
        self._need("remote_items", good, wanted)
        for name in ("remote_items_every", "remote_items_every_s"):
            if getattr(self, name) is not None and not names:
                raise ConfigError(
                    f"{name} is set, but remote_items is empty.",
                    hint="Set remote_items to the items to upload, such as ('model',).",
                    option=name,
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
                f"unprotected_after is {limit}, but a save is due only every {self.every_s} s.",
                hint="Set it to more than every_s.",
                option="unprotected_after",
            )

    def _check_staging(self) -> None:
        folders = (self.staging,) if isinstance(self.staging, str) else self.staging
        good = folders is None or (isinstance(folders, tuple) and folders != ())
        good = good and all(isinstance(folder, str) and folder for folder in folders or ())
        self._need("staging", good, "the path of a folder as a str, a tuple of such paths, or None")

    def _check_storage_options(self) -> None:
        options = self.storage_options
        good = options is None or (
            isinstance(options, Mapping)
            and all(isinstance(name, str) and isinstance(value, str) for name, value in options.items())
        )
        if not good:  # the message shows no values, since a value may be a secret
            raise ConfigError(
                "storage_options is not a mapping from str to str.",
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
    def num_copies(self) -> int:
        """Copies of each shard that saves make on other nodes."""
        return self.replicas if self.parity is None else 0

    @property
    def copied_ratio(self) -> float:
        """Bytes that a save stores on other nodes, for each byte of the state."""
        return self.replicas if self.parity is None else self.parity[1] / self.parity[0]

    @property
    def max_losses(self) -> int:
        """Nodes that may be lost without the loss of a checkpoint, if there are enough nodes."""
        return self.replicas if self.parity is None else self.parity[1]

    @property
    def exported_items(self) -> str:
        """The names in `remote_items`, in order and joined by commas."""
        return ",".join(sorted(self.remote_items))

    @property
    def steps_between_saves(self) -> int | None:
        """Steps between two saves; None if saves are due by time only."""
        return DEFAULT_EVERY_STEPS if self.every_steps is None and self.every_s is None else self.every_steps

    @classmethod
    def parse(cls, /, **options: Any) -> RunOptions:
        """Return RunOptions from keywords; ConfigError with the closest known name for an unknown one."""
        unknown = sorted(set(options) - set(cls.__dataclass_fields__))
        if unknown:
            hint = did_you_mean(unknown[0], sorted(cls.__dataclass_fields__))
            raise ConfigError(f"Unknown option {unknown[0]!r}.", hint=hint, option=unknown[0])
        return cls(**options)


_LEAST = {"replicas": 0, "reserve_bytes": 0, "scrub_bytes_per_s": 0}
"""Smallest values of integers; of all others it is 1."""


def from_json(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options that were read from JSON, which has no tuples, with a tuple in place of each list."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: object) -> bool:
    """Return whether `value` is a finite number, 0 or more."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def is_uri(text: object) -> bool:
    """Return whether `text` can name a checkpoint: a URL or an absolute path."""
    return isinstance(text, str) and ("://" in text or text.startswith("/"))


def resume_step(resume: Resume) -> int | None:
    """Return the step to roll a run back to; None if it continues from the newest checkpoint."""
    found = _STEP.match(resume) if isinstance(resume, str) else None
    return int(found[1]) if found else None
