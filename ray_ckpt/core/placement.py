"""Placement of copies: fixed groups of nodes, so that few combinations of lost nodes lose data."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from heapq import heapify, heappop, heappush

from ray_ckpt.types import ParityGroup

MAX_CHOICES = 64  # sets of labelled nodes that are compared for each training node, which bounds the time


def place_replicas(
    *,
    training_nodes: Sequence[str],
    live_nodes: Iterable[str],
    replicas: int,
    domains: Mapping[str, str] = {},
    draining: Set[str] = frozenset(),
    near: int = 0,
    num_outside: int = 1,
    labelled: Set[str] | None = None,
) -> Mapping[str, tuple[str, ...]]:
    """Return, for each training node, the other nodes that hold its copies.

    Training nodes form groups of `replicas + 1`; each node of a group holds copies for the others. Remaining
    nodes join the last group. Data is lost only if all nodes of a group are lost; in a ring, the loss of any
    `replicas + 1` neighbours loses data (GEMINI, SOSP 2023, section 4). Members of a group are in different
    failure domains as far as possible; without domains, groups follow the given order. Idle live nodes join a
    group that has too few training nodes. A draining or dead node holds no copies for others; the copies of
    its fragments go to the nodes that hold the fewest. With too few nodes, there are fewer holders.

    With `labelled`, only these nodes hold copies. They form sets of `replicas` instead, in different failure
    domains as far as possible, and each training node gets one of the sets.

    The first `near` holders are of the node's own failure domain, by the same rules within the domain; the
    others are outside of it. If one side has too few nodes, the other side has more holders.

    Some nodes of a failure domain that is larger than the others may get too many holders inside it. The last
    ones are then replaced by outside nodes that hold few copies, until `num_outside` holders are outside, or
    with `near` all but these; see `_share_out`.
    """
    nodes = list(dict.fromkeys(training_nodes))
    able = set(live_nodes) - draining
    if labelled is None:
        placed = _in_groups(nodes, able, replicas, domains)
    else:
        placed = _on_labelled(nodes, able & labelled, replicas, domains)
    may_hold = able if labelled is None else able & labelled
    if not near:
        return _share_out(
            placed, may_hold, min(replicas, num_outside), replicas, domains, is_near_first=False
        )
    inside: dict[str, tuple[list[str], list[str]]] = {}  # domain -> its training nodes and all its able nodes
    for kind, found in enumerate((nodes, able)):
        for node in found:
            if domain := domains.get(node):
                inside.setdefault(domain, ([], []))[kind].append(node)
    close: dict[str, tuple[str, ...]] = {}
    for training, live in inside.values():
        close |= place_replicas(
            training_nodes=training, live_nodes=live, replicas=near, draining=draining, labelled=labelled
        )
    merged = {
        node: tuple(dict.fromkeys([*close.get(node, ()), *holders]))[:replicas]
        for node, holders in placed.items()
    }
    return _share_out(merged, may_hold, replicas - near, replicas, domains, is_near_first=True)


def _share_out(
    placed: Mapping[str, tuple[str, ...]],
    able: Set[str],
    num_outside: int,
    replicas: int,
    domains: Mapping[str, str],
    *,
    is_near_first: bool,
) -> dict[str, tuple[str, ...]]:
    """Replace last holders in a node's domain by nodes outside of it, until it has `num_outside` of these.

    No node gets more than twice the copies that it has from its own group, or than another node has: its disk
    has to take them. Without `is_near_first` an outside node stays the first holder.
    """
    load = Counter(holder for holders in placed.values() for holder in holders)
    most = max([2 * replicas, *load.values()])
    outside: dict[str, deque[str]] = {}  # domain -> nodes outside of it that may hold more, in turn
    shared: dict[str, tuple[str, ...]] = {}
    for node, holders in placed.items():
        shared[node] = holders
        inside = [holder for holder in holders if same_domain(node, holder, domains)]
        others = [holder for holder in holders if holder not in inside]
        if not inside or len(others) >= num_outside:
            continue
        domain = domain_of(node, domains)
        if domain not in outside:
            found = (n for n in able if domain_of(n, domains) != domain)
            outside[domain] = deque(sorted(found, key=lambda n: (load[n], n)))
        count = min(num_outside - len(others), len(inside))
        for other in _next_of(outside[domain], count, others, load, most):
            load[inside.pop()] -= 1
            load[other] += 1
            others.append(other)
        shared[node] = (*inside, *others) if is_near_first else (*others, *inside)
    return shared


def _next_of(
    ring: deque[str], count: int, known: Sequence[str], load: Mapping[str, int], most: int
) -> list[str]:
    """Return the next `count` nodes of a ring that are not known; remove those that hold `most` copies."""
    found: list[str] = []
    for _ in range(len(ring)):
        if len(found) == count:
            break
        if load[ring[0]] >= most:
            ring.popleft()
            continue
        if ring[0] not in known:
            found.append(ring[0])
        ring.rotate(-1)
    return found


def _in_groups(
    nodes: Sequence[str], able: Set[str], replicas: int, domains: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    members = list(_in_turn([node for node in nodes if node in able], replicas + 1, domains))
    idle = sorted(able - set(nodes))
    placed: dict[str, tuple[str, ...]] = {}
    for group in _cut(members, replicas + 1):
        ring = [*group, *_spread(group, idle, replicas + 1 - len(group), domains)]
        for at, node in enumerate(group):
            placed[node] = _spread([node], ring[at + 1 :] + ring[:at], replicas, domains)
    load = Counter(holder for holders in placed.values() for holder in holders)
    for node in nodes:
        if node not in able:
            candidates = sorted([*members, *idle], key=load.__getitem__)
            placed[node] = _spread([node], candidates, replicas, domains)
            load.update(placed[node])
    return {node: placed[node] for node in nodes}


def _on_labelled(
    nodes: Sequence[str], able: Set[str], replicas: int, domains: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """Give each node a set of labelled ones: without itself, outside of its domain, the least loaded."""
    if not replicas:
        return dict.fromkeys(nodes, ())
    sets = [list(found) for found in _cut(list(_in_turn(sorted(able), replicas, domains)), replicas)]
    load, placed = [0] * len(sets), {}
    for turn, node in enumerate(nodes):

        def cost(at: int, node: str = node) -> tuple[bool, int, int]:
            num_inside = sum(same_domain(node, other, domains) for other in sets[at])
            return node in sets[at], num_inside, load[at]

        choices = range(turn, turn + min(len(sets), MAX_CHOICES))
        at = min((choice % len(sets) for choice in choices), key=cost)
        first = load[at] % max(len(sets[at]), 1)  # a set with a remainder takes turns, too
        ring = [other for other in sets[at][first:] + sets[at][:first] if other != node]
        placed[node] = _spread([node], ring, replicas, domains)
        load[at] += 1
    return placed


def place_groups(
    training_nodes: Sequence[str], *, num_data: int, parity: int, domains: Mapping[str, str] = {}
) -> tuple[ParityGroup, ...]:
    """Return the parity groups of the training nodes: as few as possible, whose sizes differ by 1 at most.

    No group has more than `num_data + parity` nodes, except with (2, 2), where five nodes form one group. So
    9 nodes with (6, 2) form groups of 5 and 4, and 17 nodes those of 6, 6 and 5, and not of 8 and a rest. A
    save of a group of n nodes takes n / (n - parity) times the bytes of its nodes.

    Nodes of one failure domain are dealt to all groups in turn, so that no group has more of them than it
    must. A group has at least `parity + 1` nodes, so too few nodes to fill several groups form one; with
    `parity` nodes or fewer there is no group.
    """
    total = len(training_nodes)
    num_groups = min(-(-total // (num_data + parity)), total // (parity + 1))
    if not num_groups:
        return ()
    named = [domain_of(node, domains) for node in training_nodes]
    sizes = Counter(named)
    first = {name: at for at, name in reversed(list(enumerate(named)))}
    dealt = sorted(range(total), key=lambda at: (-sizes[named[at]], first[named[at]], at))
    members = (tuple(sorted(dealt[start::num_groups])) for start in range(num_groups))
    return tuple(ParityGroup(members=found, parity=parity) for found in members)


def crowded_domain(
    groups: Iterable[ParityGroup], training_nodes: Sequence[str], domains: Mapping[str, str]
) -> str:
    """Return a failure domain with more nodes of one group than the group can lose; "" if there is none."""
    for group in groups:
        counts = Counter(domains.get(training_nodes[member]) or "" for member in group.members)
        for name, count in sorted(counts.items()):
            if name and count > group.parity:
                return name
    return ""


def domain_of(node: str, domains: Mapping[str, str]) -> str:
    """Return the failure domain of a node; a node without a given domain forms a domain alone."""
    return domains.get(node) or f"node {node}"


def same_domain(node: str, other: str, domains: Mapping[str, str]) -> bool:
    """Return whether two nodes fail together."""
    return domain_of(node, domains) == domain_of(other, domains)


def _in_turn(nodes: Sequence[str], size: int, domains: Mapping[str, str]) -> Iterator[str]:
    """Yield the nodes in rounds of `size` different domains, domains with the most remaining nodes first.

    A round has each domain at most once. So no group gets two nodes of a domain, unless there is a remainder
    or a domain has more nodes than there are rounds. Nodes that are alone in their domains keep their order.
    """
    order = {node: at for at, node in enumerate(nodes)}
    queues: dict[str, deque[str]] = {}
    for node in nodes:
        queues.setdefault(domain_of(node, domains), deque()).append(node)

    def entry(queue: deque[str]) -> tuple[int, int, deque[str]]:
        return -len(queue), order[queue[0]], queue

    heap = [entry(queue) for queue in queues.values()]
    heapify(heap)
    while heap:
        taken = [heappop(heap)[2] for _ in range(min(size, len(heap)))]
        for queue in taken:
            yield queue.popleft()
        for queue in filter(None, taken):
            heappush(heap, entry(queue))


def _cut(nodes: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    """Yield groups of `size` in order; the last one takes the remainder."""
    last = max(len(nodes) // size - 1, 0) * size
    for start in range(0, last, size):
        yield nodes[start : start + size]
    yield nodes[last:]


def _spread(
    near: Iterable[str], candidates: Sequence[str], count: int, domains: Mapping[str, str]
) -> tuple[str, ...]:
    """Return `count` candidates: first those whose domains differ from `near` and from each other."""
    taken = {domain_of(node, domains) for node in near}
    fresh: list[str] = []
    rest: list[str] = []
    for node in candidates:
        (rest if domain_of(node, domains) in taken else fresh).append(node)
        taken.add(domain_of(node, domains))
    return tuple([*fresh, *rest][: max(count, 0)])
