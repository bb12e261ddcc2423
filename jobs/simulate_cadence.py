"""How much of the time a training keeps, by how often it saves and where to: policies on a trace of failures.

    python -m jobs.simulate_cadence --case llama3
    python -m jobs.simulate_cadence --case small --plot cadence.png --json cadence.json
    python -m jobs.simulate_cadence --trace failures.csv --case small     # lines of: time_s,kind

A setup is where saves go: `store` like torch.save to a file system, all ranks waiting; `local` to the node's
disk in the background; `replicated` to other nodes too. The last two are also brought to the storage path now
and then. A policy is when: every so many steps, every so many seconds, or `auto` (`core.interval_model`, fed
with what the simulation shows it, failures and all). The case has the cluster: nodes, failures, costs.

What it plays. Training goes on in steps; a save begins at a step's end, one at a time; it stops training for
its stall and is complete after its latency. A failure takes with it what it takes (`SURVIVES`), and the group
restarts from the newest complete save that is left, after `restart_s` and the time of the restore; a failure
meanwhile begins that anew. Goodput counts steps once that a restart repeats. Left out are noise in costs and
restarts with fewer nodes; a background save that was under way at a failure counts as lost.

Known numbers, from sections B and E3 of the project's research on peers (industry-peers.md), and those here:

- E3: stalls of 120, 30, 2, 0.5 and 0.2 s waste 14.9, 4.6, 1.2, 0.96 and 0.61 % at their best intervals, with
  3, 7.9, 7.9, 3 and 3 h between failures, by Young's first order and without restarts. `pace.waste` and this
  simulation agree within 5 % of these; they have higher orders too, 14.2 instead of 14.9.
- Llama 3 405B: 16,384 GPUs, 54 days, 419 unexpected interruptions, more than 90 % effective time. `--case
  llama3` draws 414 (seed 1). A store that stops training for 30 s keeps 89.6 % at its best interval, and
  replicated saves 95.8 %. The stall and 5 min for a restart are assumptions: the paper gives neither.
- Meta's research clusters: 7.9 h between failures of 1,024 GPUs (`--case rsc`): 93.7 and 97.7 %.

A budget for stalls has its price where stalls are long: 1 % of a 30 s stall is a save each 50 min, and costs
`llama3` 6 points of goodput against `auto` without one.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import json
import math
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol, get_args

from rich.console import Console
from rich.table import Table

from ray_ckpt.core.interval_model import DAY_S, DRAIN_SLOWDOWN, LEAST_SAVES, OVERHEAD_BUDGET, IntervalModel

HOUR_S = 3_600.0
GROUP_NODES = 2  # that hold each other's copies
REPAIR_S = 300.0  # until a lost copy is made again; two nodes of a group within it are a `group`
REVIEW_S = HOUR_S  # between two looks of `auto` at its measurements, once it has some
GRID_S = tuple(10 * 1.5**k for k in range(20))  # fixed intervals that are tried for the curve: 10 s to 6 h

UNDER_WAY = 2  # saves of one tier that may not be complete yet when the next one begins
ROUNDING = 1e-9  # of a step: sums of floats that are whole but for it
FIGURE_INCHES = (8.0, 5.0)
DPI = 110
COLOURS = ("#b3362b", "#e07a1f", "#2a7f62")
PIPE_WIDTH = 130  # columns of a table that no terminal bounds

Setup = Literal["store", "local", "replicated"]
SETUPS: tuple[Setup, ...] = get_args(Setup)
Kind = Literal["process", "node", "rack", "group"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SURVIVES: Mapping[Setup, frozenset[Kind]] = {
    "local": frozenset({"process"}),
    "replicated": frozenset({"process", "node", "rack"}),  # the copies lie in another rack
    "store": frozenset(KINDS),
}
"""Of what is complete there, after which failures it can be read."""


@dataclass(frozen=True, slots=True)
class Failure:
    time_s: float  # from the begin
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A cluster and what saving costs there; all times in seconds."""

    name: str
    num_nodes: int
    node_mtbf_s: float
    horizon_s: float
    step_s: float
    stall_s: float = 0.5  # of a save into memory of the node
    local_s: float = 10.0  # from the begin of a save until it is on the nodes' disks
    replicated_s: float = 20.0  # and on other nodes
    drain_s: float = 120.0  # and from there to the storage path
    store_stall_s: float = 30.0  # of a save that all ranks write to the storage path themselves
    restart_s: float = 300.0  # from a failure until processes run again
    restore_s: Mapping[Setup, float] = field(
        default_factory=lambda: {"local": 10.0, "replicated": 30.0, "store": 120.0}
    )
    process_share: float = 0.2  # of the failures that leave the node and its disk as they are
    racks_per_day: float = 0.0  # racks that fail as a whole, in the cluster
    remote_every_s: float = 1_800.0  # of the policies that are not `auto`


# Nodes of 8 GPUs. The step of llama3 is 16 M tokens at 400 TFLOP/s a GPU; the costs are assumptions.
CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        Case(
            name="llama3",
            num_nodes=2_048,
            node_mtbf_s=2_048 * 54 * DAY_S / 419,
            horizon_s=54 * DAY_S,
            step_s=6.0,
            racks_per_day=0.05,
        ),
        Case(
            name="rsc",
            num_nodes=128,
            node_mtbf_s=128 * 7.9 * HOUR_S,
            horizon_s=30 * DAY_S,
            step_s=4.0,
            racks_per_day=0.02,
        ),
        Case(name="small", num_nodes=8, node_mtbf_s=10 * DAY_S, horizon_s=30 * DAY_S, step_s=1.0),
    )
}


# Failures


def draw_failures(case: Case, seed: int, *, weibull_shape: float = 1.0) -> tuple[Failure, ...]:
    """A trace of the case: each node fails by itself and comes back as new, racks fail as a whole.

    `weibull_shape` 1 is exponential; below 1 young nodes fail more often, above 1 old ones do.
    """
    chance = random.Random(seed)
    scale_s = case.node_mtbf_s / math.gamma(1 + 1 / weibull_shape)
    due = [(chance.weibullvariate(scale_s, weibull_shape), node) for node in range(case.num_nodes)]
    heapq.heapify(due)
    found: list[Failure] = []
    lost: dict[int, tuple[float, int]] = {}  # by group: when a node of it was lost last, and which
    while due[0][0] < case.horizon_s:
        time_s, node = due[0]
        heapq.heapreplace(due, (time_s + chance.weibullvariate(scale_s, weibull_shape), node))
        kind: Kind = "process"
        if chance.random() >= case.process_share:
            group = node // GROUP_NODES
            last_s, last = lost.get(group, (-math.inf, node))
            kind = "group" if time_s - last_s < REPAIR_S and last != node else "node"
            lost[group] = time_s, node
        found.append(Failure(time_s, kind))
    if case.racks_per_day:
        time_s = chance.expovariate(case.racks_per_day / DAY_S)
        while time_s < case.horizon_s:
            found.append(Failure(time_s, "rack"))
            time_s += chance.expovariate(case.racks_per_day / DAY_S)
    return tuple(sorted(found, key=lambda failure: failure.time_s))


def read_failures(path: Path) -> tuple[Failure, ...]:
    """A trace from lines of `time_s,kind` in any order, with that heading or none. ValueError, OSError."""
    found = []
    with path.open(newline="") as file:
        for number, row in enumerate(csv.reader(file), 1):
            if not row or (number == 1 and row[0].strip() == "time_s"):
                continue
            found.append(_failure(row, f"{path}, line {number}"))
    return tuple(sorted(found, key=lambda failure: failure.time_s))


def _failure(row: Sequence[str], where: str) -> Failure:
    hint = f"give seconds from the begin, and one of {', '.join(KINDS)}"
    try:
        time_s, kind = float(row[0]), row[1].strip()
    except (ValueError, IndexError):
        raise ValueError(f"{where} is not `time_s,kind`: {hint}") from None
    if not (math.isfinite(time_s) and time_s >= 0) or kind not in KINDS:
        raise ValueError(f"{where}: {hint}")
    return Failure(time_s, next(known for known in KINDS if known == kind))


# Policies


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a coordinator measures of a stretch of training without failures. All times in seconds."""

    seconds: float
    saves: int
    stall_s: float
    latency_s: float
    drain_s: float


class Policy(Protocol):
    """When to save; told what a coordinator would measure."""

    @property
    def name(self) -> str: ...

    def intervals_s(self) -> tuple[float, float]:
        """From save to save, and between those that go on to the storage path."""
        ...

    def review_s(self) -> float:
        """How long these hold, at least."""
        ...

    def trained(self, stretch: Trained) -> None: ...

    def failed(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Every so many seconds, or as many as some steps take."""

    name: str
    every_s: float
    remote_every_s: float

    def intervals_s(self) -> tuple[float, float]:
        return self.every_s, self.remote_every_s

    def review_s(self) -> float:
        return math.inf

    def trained(self, stretch: Trained) -> None:
        pass

    def failed(self) -> None:
        pass


class Auto:
    """`Pace`, with nothing but its prior and what it sees."""

    def __init__(self, case: Case, setup: Setup, *, budget: float, name: str = "auto") -> None:
        self.name = name
        self._saves = 0
        replicas = GROUP_NODES - 1 if setup == "replicated" else 0
        self._pace = IntervalModel(num_nodes=case.num_nodes, replicas=replicas, budget=budget)

    def intervals_s(self) -> tuple[float, float]:
        return self._pace.interval_s, self._pace.remote_interval_s

    def review_s(self) -> float:
        return REVIEW_S if self._saves >= LEAST_SAVES else 0.0

    def trained(self, stretch: Trained) -> None:
        self._pace.trained(stretch.seconds)
        if stretch.saves:
            self._pace.drained(stretch.drain_s)
        for _ in range(min(stretch.saves, LEAST_SAVES)):  # they are all alike
            self._pace.saved(stretch.stall_s, stretch.latency_s)
        self._saves += stretch.saves

    def failed(self) -> None:
        self._pace.failed()


# The simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of the time. `goodput` is the part of it that went into steps that count."""

    setup: Setup
    policy: str
    interval_s: float  # at the end
    goodput: float
    failures: int
    saves: int
    steps_lost: int  # and done again
    overhead: float  # part of the time that went into stalls and the slowdown by drains
    lost: float  # part of the time that went into steps that were lost
    down: float  # part of the time that restarts took


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """What a policy comes to: `steps`, then a save. Each `drain_every`-th goes on to the storage path."""

    steps: int
    stall_s: float
    drain_every: int
    period_s: float


class Shelf:
    """The saves of one tier: the newest that is complete, and those that are not yet."""

    def __init__(self, step: int = -1) -> None:
        self._step = step
        self._pending: list[tuple[float, int]] = []  # complete at, step; in that order

    def put(self, step: int, *, begun_s: float, complete_at_s: float) -> None:
        self.newest(begun_s)
        self._pending.append((complete_at_s, step))

    def newest(self, now_s: float) -> int:
        """The newest complete step, -1 if there is none."""
        while self._pending and self._pending[0][0] <= now_s:
            self._step = self._pending.pop(0)[1]
        return self._step

    def fail(self, now_s: float, *, is_lost: bool) -> None:
        self._step = -1 if is_lost else self.newest(now_s)
        self._pending.clear()


class Training:
    """One training under one policy. Between two failures it is computed, not stepped through."""

    def __init__(self, case: Case, setup: Setup, policy: Policy) -> None:
        self._case, self._setup, self._policy = case, setup, policy
        self._now_s = self._stalled_s = self._down_s = 0.0  # the time, or when the restart under way ends
        self._step = self._saves = self._steps_lost = self._since_drain = 0
        self._latency_s = {
            "local": case.local_s,
            "replicated": case.replicated_s,
            "store": case.store_stall_s,
        }[setup]
        self._shelves: dict[Setup, Shelf] = {setup: Shelf(), "store": Shelf(step=0)}  # 0: from nothing

    def run(self, failures: Sequence[Failure]) -> Outcome:
        """Until the end of the case."""
        case = self._case
        seen = [failure for failure in failures if failure.time_s < case.horizon_s]
        for failure in seen:
            self._train(failure.time_s)
            self._fail(failure)
            self._policy.failed()
        self._train(case.horizon_s)
        return Outcome(
            setup=self._setup,
            policy=self._policy.name,
            interval_s=self._rhythm().period_s,
            goodput=self._step * case.step_s / case.horizon_s,
            failures=len(seen),
            saves=self._saves,
            steps_lost=self._steps_lost,
            overhead=self._stalled_s / case.horizon_s,
            lost=self._steps_lost * case.step_s / case.horizon_s,
            down=self._down_s / case.horizon_s,
        )

    def _rhythm(self) -> Rhythm:
        """Whole steps, and one save at a time. The saves from drain to drain share what it slows down."""
        case = self._case
        every_s, remote_every_s = self._policy.intervals_s()
        every_s = max(every_s, self._latency_s)
        stall_s, drain_every = case.store_stall_s, 1
        if self._setup != "store":
            drain_every = max(1, round(max(remote_every_s, case.drain_s) / every_s))
            stall_s = case.stall_s + DRAIN_SLOWDOWN * case.drain_s / drain_every
        steps = max(1, math.ceil((every_s - stall_s) / case.step_s - ROUNDING))
        period_s = steps * case.step_s + stall_s
        return Rhythm(steps=steps, stall_s=stall_s, drain_every=drain_every, period_s=period_s)

    def _train(self, until_s: float) -> None:
        """Up to then; nothing if a restart takes longer, and what it took too long is no down time."""
        self._down_s -= max(0.0, self._now_s - until_s)
        while self._now_s < until_s:
            rhythm, left_s = self._rhythm(), until_s - self._now_s
            cycles = max(1, math.floor(min(self._policy.review_s(), left_s) / rhythm.period_s))
            stretch_s = min(left_s, cycles * rhythm.period_s)
            self._stretch(rhythm, stretch_s)
            self._now_s = until_s if stretch_s == left_s else self._now_s + stretch_s

    def _stretch(self, rhythm: Rhythm, seconds: float) -> None:
        """Train for so long in one rhythm."""
        case, work_s = self._case, rhythm.steps * self._case.step_s
        cycles = math.floor(seconds / rhythm.period_s + ROUNDING)
        rest_s = max(0.0, seconds - cycles * rhythm.period_s)
        begun = cycles + (rest_s > work_s)
        self._save(rhythm, begun)
        self._step += cycles * rhythm.steps + min(rhythm.steps, math.floor(rest_s / case.step_s + ROUNDING))
        self._stalled_s += cycles * rhythm.stall_s + max(0.0, rest_s - work_s)
        self._saves += begun
        stall_s = case.store_stall_s if self._setup == "store" else case.stall_s
        self._policy.trained(
            Trained(
                seconds=seconds,
                saves=begun,
                stall_s=stall_s,
                latency_s=self._latency_s,
                drain_s=case.drain_s,
            )
        )

    def _save(self, rhythm: Rhythm, begun: int) -> None:
        """The first so many saves of a stretch begin. Of those that are over only the newest matter."""
        last_drained = begun - (self._since_drain + begun) % rhythm.drain_every
        self._since_drain = (self._since_drain + begun) % rhythm.drain_every
        tiers: dict[Setup, tuple[int, int, float]] = {
            "store": (last_drained, rhythm.drain_every, self._latency_s + self._case.drain_s),
            self._setup: (begun, 1, self._latency_s),
        }
        for tier, (last, every, latency_s) in tiers.items():
            for number in range(last - UNDER_WAY * every, last + 1, every):
                if number >= 1:
                    begun_s = self._now_s + number * rhythm.period_s - rhythm.stall_s
                    step = self._step + number * rhythm.steps
                    self._shelves[tier].put(step, begun_s=begun_s, complete_at_s=begun_s + latency_s)

    def _fail(self, failure: Failure) -> None:
        """Go back to what is left, and restart."""
        for tier, shelf in self._shelves.items():
            shelf.fail(failure.time_s, is_lost=failure.kind not in SURVIVES[tier])
        left = {tier: shelf.newest(failure.time_s) for tier, shelf in self._shelves.items()}
        source = max(left, key=lambda tier: left[tier])  # the setup's own comes first among equals
        self._steps_lost += self._step - left[source]
        self._step = left[source]
        if failure.kind == "process" and source == "replicated":
            source = "local"  # the node's own files are there
        restart_s = self._case.restart_s + self._case.restore_s[source]
        self._down_s += restart_s
        self._now_s = failure.time_s + restart_s


def simulate(case: Case, setup: Setup, policy: Policy, failures: Sequence[Failure]) -> Outcome:
    """The same arguments give the same outcome."""
    return Training(case, setup, policy).run(failures)


# The comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All policies of one setup, and fixed intervals over a grid."""

    policies: tuple[Outcome, ...]
    curve: tuple[Outcome, ...]

    @property
    def best(self) -> Outcome:
        """Of the grid."""
        return max(self.curve, key=lambda outcome: outcome.goodput)


def compare(
    case: Case,
    setup: Setup,
    failures: Sequence[Failure],
    *,
    every_steps: Sequence[int] = (),
    every_s: Sequence[float] = (),
    budget: float = OVERHEAD_BUDGET,
) -> Comparison:
    """Each policy on the same failures. Where all wait for the store, also `auto` without a budget."""
    remote_s = case.remote_every_s
    policies: list[Policy] = [
        *(Fixed(f"every {n} steps", n * case.step_s, remote_s) for n in every_steps),
        *(Fixed(f"every {seconds:g} s", seconds, remote_s) for seconds in every_s),
        Auto(case, setup, budget=budget),
    ]
    if setup == "store":
        policies.append(Auto(case, setup, budget=1.0, name="auto, no budget"))
    grid = [Fixed("best fixed", seconds, remote_s) for seconds in GRID_S]
    return Comparison(
        policies=tuple(simulate(case, setup, policy, failures) for policy in policies),
        curve=tuple(simulate(case, setup, policy, failures) for policy in grid),
    )


def print_comparisons(console: Console, comparisons: Sequence[Comparison]) -> None:
    table = Table("setup", "policy", "interval s", "goodput", "stalls", "lost", "down", "saves", "steps lost")
    for column in table.columns[2:]:
        column.justify = "right"
    for comparison in comparisons:
        for outcome in (*comparison.policies, comparison.best):
            parts = (outcome.goodput, outcome.overhead, outcome.lost, outcome.down)
            table.add_row(
                outcome.setup,
                outcome.policy,
                f"{outcome.interval_s:.0f}",
                *(f"{100 * part:.2f} %" for part in parts),
                f"{outcome.saves}",
                f"{outcome.steps_lost}",
            )
        table.add_section()
    console.print(table)


def write_plot(path: Path, case: Case, comparisons: Sequence[Comparison]) -> None:
    """A PNG: goodput over the interval, a line per setup, a mark per policy. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=FIGURE_INCHES)
    named: set[str] = set()
    for comparison, colour in zip(comparisons, COLOURS, strict=False):
        curve = comparison.curve
        axis.plot([o.interval_s for o in curve], [100 * o.goodput for o in curve], color=colour, linewidth=1)
        for outcome in comparison.policies:
            is_auto = outcome.policy.startswith("auto")
            at = (outcome.interval_s, 100 * outcome.goodput)
            axis.plot(*at, marker="*" if is_auto else "o", markersize=12 if is_auto else 5, color=colour)
            if is_auto or outcome.policy not in named:  # fixed ones stand below each other
                beside = (6, 5) if is_auto else (-20, -16)
                axis.annotate(outcome.policy, at, xytext=beside, textcoords="offset points", fontsize=6)
            named.add(outcome.policy)
        axis.plot([], [], color=colour, label=comparison.best.setup)
    axis.set_xscale("log")
    axis.set_xlabel("seconds from save to save", fontsize=8)
    axis.set_ylabel("goodput, %", fontsize=8)
    axis.set_title(f"{case.name}: {case.num_nodes} nodes, {case.horizon_s / DAY_S:.3g} days", fontsize=9)
    axis.tick_params(labelsize=7)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=DPI, format="png")
    pyplot.close(figure)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.simulate_cadence",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--case", choices=list(CASES), default="llama3", help="the cluster and its costs")
    parser.add_argument("--trace", type=Path, help="CSV of time_s,kind instead of failures drawn by chance")
    parser.add_argument("--seed", type=int, default=1, help="of the failures that are drawn")
    parser.add_argument(
        "--weibull", type=_positive, default=1.0, help="shape of the time to failure of a node"
    )
    parser.add_argument("--days", type=_positive, help="length of the training instead of the case's")
    parser.add_argument("--setup", choices=SETUPS, action="append", help="all if not given; repeatable")
    parser.add_argument(
        "--every-steps", type=_count, action="append", help="a policy; repeatable; 1000 if not given"
    )
    parser.add_argument(
        "--every-s", type=_positive, action="append", help="a policy; repeatable; 600 and 3600 if not given"
    )
    parser.add_argument("--budget", type=_positive, default=OVERHEAD_BUDGET, help="of auto, for stalls")
    parser.add_argument("--json", type=Path, help="write all outcomes there")
    parser.add_argument("--plot", type=Path, help="write a PNG there: goodput over the interval")
    return parser.parse_args(argv)


def _positive(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def _run(args: argparse.Namespace) -> None:
    case = CASES[args.case]
    if args.days is not None:
        case = replace(case, horizon_s=args.days * DAY_S)
    failures = (
        read_failures(args.trace)
        if args.trace is not None
        else draw_failures(case, args.seed, weibull_shape=args.weibull)
    )
    comparisons = [
        compare(
            case,
            setup,
            failures,
            every_steps=args.every_steps or (1000,),
            every_s=args.every_s or (600.0, 3600.0),
            budget=args.budget,
        )
        for setup in args.setup or SETUPS
    ]
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    seen = sum(failure.time_s < case.horizon_s for failure in failures)
    console.print(
        f"{case.name}: {case.num_nodes} nodes, {case.horizon_s / DAY_S:.3g} days, {seen} failures, "
        f"steps of {case.step_s:g} s"
    )
    print_comparisons(console, comparisons)
    if args.json is not None:
        args.json.write_text(json.dumps(_document(case, failures, comparisons), indent=1))
    if args.plot is not None:
        write_plot(args.plot, case, comparisons)


def _document(
    case: Case, failures: Sequence[Failure], comparisons: Sequence[Comparison]
) -> dict[str, object]:
    return {
        "case": asdict(case),
        "failures": [asdict(failure) for failure in failures],
        "policies": [asdict(outcome) for comparison in comparisons for outcome in comparison.policies],
        "curve": [asdict(outcome) for comparison in comparisons for outcome in comparison.curve],
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with 2 and one line if a file cannot be read, written or drawn."""
    args = parse_args(argv)
    try:
        _run(args)
    except ImportError as error:
        hint = "--plot needs matplotlib: pip install 'ray_ckpt[plot]', or leave it out"
        sys.exit(_complain(f"{hint} ({error})"))
    except (OSError, ValueError) as error:
        sys.exit(_complain(str(error)))


def _complain(text: str) -> int:
    print(f"simulate_cadence: {text}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
