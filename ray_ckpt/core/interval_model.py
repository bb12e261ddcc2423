"""Model of the interval between saves, from the measured cost of a save and the measured rate of failures.

The run trains and then saves, every P seconds (`interval_s`). A save stops training for its first C seconds
(`save_stall_s`) and is complete L seconds after it began (`latency_s`); a restart takes D seconds. A failure
is equally likely at every moment, with rate r per second. In t seconds without a failure, save k is complete
if k P - C + L <= t, and each complete save keeps P - C seconds of work. The work kept per failure is the sum
over k of (P - C) exp(-r (k P - C + L)); the time per failure is exp(r D) / r, as a restart may also fail. So

    waste(P) = 1 - r (P - C) exp(-r (L - C + D)) / (exp(r P) - 1)    ~  C / P + r (P / 2 + L - C + D)

For L = C this is the model of Daly (Future Generation Computer Systems 22, 2006). L and D occur only in a
factor without P: a slow background save costs time, but the best P depends on C and r alone.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from statistics import median

DAY_S = 86_400.0
OVERHEAD_BUDGET = 0.01  # fraction of the training time that stalls may take
# By default, a failure of a kind that has never occurred costs at most half an hour. A stall of half a second
# in half an hour is 0.03 %, so longer intervals gain nothing.
MAX_INTERVAL_S = 1_800.0
FIRST_INTERVAL_S = 60.0  # used until the stall is known: short, so that the stall is measured soon
LEAST_SAVES = 3  # measured saves before their median is used: the first saves of a run use cold memory
MEASURED_SAVES = 32  # last saves in the median, a few hours: bounds memory, and drops old conditions

# Days between failures of one node, as published: 264 (Llama 3: 419 unexpected interruptions of 2,048 nodes
# in 54 days), about 70 (OPT-175B: 35 manual and 70 automatic restarts of 124 nodes in two months), 42
# (Meta's research clusters: one in 7.9 h for 128 nodes). Clusters differ by far more than a factor of two, so
# the prior counts as half a failure only: the first real failure has twice that weight.
PRIOR_NODE_MTBF_S = 100 * DAY_S
PRIOR_FAILURES = 0.5

# The next two values are assumed, not measured. Uploads share links and cores with training and cost a
# twentieth of the training speed. In one of a hundred node losses, the holders of the node's copies are lost
# at the same time, for example by preemption of the whole job or with a power feed.
DRAIN_SLOWDOWN = 0.05
CORRELATED_SHARE = 0.01
REPAIR_S = 300.0  # time from the loss of a copy until a new copy is complete


@dataclass(frozen=True, slots=True)
class FailureRate:
    """The observed failures: `count` failures in `exposed_s` node-seconds of training."""

    count: int = 0
    exposed_s: float = 0.0

    def per_node_s(self) -> float:
        """Return failures per node-second: the mean of a Gamma posterior whose prior has published rates."""
        prior_s = PRIOR_FAILURES * PRIOR_NODE_MTBF_S
        return (PRIOR_FAILURES + self.count) / (prior_s + self.exposed_s)

    def per_s(self, num_nodes: int) -> float:
        """Return failures per second of a run on `num_nodes` nodes: a failure of any node stops the run."""
        return num_nodes * self.per_node_s()


def waste(
    interval_s: float,
    *,
    save_stall_s: float,
    failure_rate_per_s: float,
    latency_s: float = 0.0,
    restart_s: float = 0.0,
) -> float:
    """Return the fraction of the time, 0 to 1, that is lost to stalls, repeated work and restarts.

    `interval_s` must be above 0. Return 1 if the stall fills the interval. A `latency_s` below `save_stall_s`
    counts as `save_stall_s`.
    """
    work_s = max(0.0, interval_s - save_stall_s)
    if failure_rate_per_s == 0:
        return 1 - work_s / interval_s
    failures = failure_rate_per_s * interval_s  # expected number in one interval
    late_s = max(0.0, latency_s - save_stall_s) + restart_s
    kept = math.exp(-failures - failure_rate_per_s * late_s)
    return 1 - failure_rate_per_s * work_s * kept / -math.expm1(-failures)


def best_interval_s(
    *, save_stall_s: float, failure_rate_per_s: float, least_s: float, budget: float = OVERHEAD_BUDGET
) -> float:
    """Return the best time from the start of one save to the start of the next save, in seconds.

    This is the interval of the least `waste`, at most MAX_INTERVAL_S. The interval is raised to `least_s`,
    the time that a save takes, and until stalls take at most `budget` (a fraction of the time, above 0), even
    if the result exceeds MAX_INTERVAL_S.
    """
    wanted_s = min(_daly_s(save_stall_s, failure_rate_per_s), MAX_INTERVAL_S)
    return max(wanted_s, least_s, save_stall_s / budget)


def _daly_s(stall_s: float, rate_per_s: float) -> float:
    """Return Daly's higher-order optimum (2006) of the interval; the interval includes the stall.

    For a stall C far below the mean time M between failures, the optimum approaches Young's sqrt(2 C M).
    """
    if rate_per_s == 0:
        return math.inf
    mtbf_s = 1 / rate_per_s
    if stall_s >= 2 * mtbf_s:
        return mtbf_s + stall_s
    ratio = stall_s / (2 * mtbf_s)
    return math.sqrt(2 * stall_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9)


def remote_interval_s(
    *,
    drain_s: float,
    failure_rate_per_s: float,
    slowdown: float = DRAIN_SLOWDOWN,
    budget: float = OVERHEAD_BUDGET,
) -> float:
    """Return the best time from the start of one drain to the start of the next drain, in seconds.

    A drain stops no rank: for `drain_s` seconds, it takes the fraction `slowdown` of the training speed.
    `failure_rate_per_s` counts only failures after which nothing but the storage path is left, see
    `loss_rate_per_s`. Drains do not overlap.
    """
    return best_interval_s(
        save_stall_s=slowdown * drain_s, failure_rate_per_s=failure_rate_per_s, least_s=drain_s, budget=budget
    )


def loss_rate_per_s(
    *, node_rate_per_s: float, num_nodes: int, replicas: int, repair_s: float = REPAIR_S
) -> float:
    """Return the rate, per second, of failures that take a node together with all holders of its copies.

    There are two cases. All `replicas` + 1 nodes die before new copies are made: the first node dies at the
    run's rate, each other node within `repair_s`. Or all of them die at once, in CORRELATED_SHARE of the
    failures. Every failure counts as the loss of a node, although some failures leave the node's disk intact.
    """
    group_dies = min(1.0, node_rate_per_s * repair_s) ** replicas
    return num_nodes * node_rate_per_s * min(1.0, group_dies + CORRELATED_SHARE)


class IntervalModel:
    """The intervals of a run, calculated from the calls alone, without a clock or randomness.

    The same calls in the same order give the same intervals, so a decision can be replayed. The intervals use
    medians of the last MEASURED_SAVES values, so that one very slow save has little weight.
    """

    def __init__(
        self,
        *,
        num_nodes: int,
        replicas: int = 1,
        budget: float = OVERHEAD_BUDGET,
        failures: FailureRate | None = None,
    ) -> None:
        self._num_nodes = num_nodes
        self._replicas = replicas
        self._budget = budget
        self._failures = failures or FailureRate()
        self._stalls_s: deque[float] = deque(maxlen=MEASURED_SAVES)
        self._latencies_s: deque[float] = deque(maxlen=MEASURED_SAVES)
        self._drains_s: deque[float] = deque(maxlen=MEASURED_SAVES)

    def saved(self, stall_s: float, latency_s: float) -> None:
        """Count a committed save: the longest stall of a rank, and the time from its start to its commit."""
        self._stalls_s.append(stall_s)
        self._latencies_s.append(latency_s)

    def drained(self, drain_s: float) -> None:
        """Count a checkpoint that became durable `drain_s` after its drain began."""
        self._drains_s.append(drain_s)

    def trained(self, seconds: float) -> None:
        """Count `seconds` of training on all nodes; the failure rate is relative to this time."""
        exposed_s = self._failures.exposed_s + seconds * self._num_nodes
        self._failures = replace(self._failures, exposed_s=exposed_s)

    def failed(self) -> None:
        """Count a failure that ended the group; do not call for an end that a user wanted."""
        self._failures = replace(self._failures, count=self._failures.count + 1)

    @property
    def failures(self) -> FailureRate:
        """The failures counted so far, to pass to the next IntervalModel of this cluster."""
        return self._failures

    @property
    def interval_s(self) -> float:
        """Seconds from the start of one save to the start of the next save."""
        least_s = median(self._latencies_s) if self._latencies_s else 0.0
        if len(self._stalls_s) < LEAST_SAVES:
            return max(FIRST_INTERVAL_S, least_s)
        return best_interval_s(
            save_stall_s=median(self._stalls_s),
            failure_rate_per_s=self._failures.per_s(self._num_nodes),
            least_s=least_s,
            budget=self._budget,
        )

    @property
    def remote_interval_s(self) -> float:
        """Seconds between the starts of drains; FIRST_INTERVAL_S until a first drain is measured."""
        if not self._drains_s:
            return FIRST_INTERVAL_S
        rate_per_s = loss_rate_per_s(
            node_rate_per_s=self._failures.per_node_s(), num_nodes=self._num_nodes, replicas=self._replicas
        )
        return remote_interval_s(
            drain_s=median(self._drains_s), failure_rate_per_s=rate_per_s, budget=self._budget
        )
