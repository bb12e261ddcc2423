"""Exhaustive play: every order of a few events in a small world, up to a number of steps.

A scene is a world in the middle of an operation. Each step is the arrival of any message (a create may also
be lost, or applied without an answer), or one of the scene's few faults and moves. Local work of an agent is
done at once. A state that several orders of events reach is visited once.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias

from ray_ckpt.config import RunOptions
from ray_ckpt.format.digest import digest
from ray_ckpt.testing.parts import Coordinator, Create, Launcher, Local, Replied
from ray_ckpt.testing.simulator import World

MAX_STATES = 200_000  # states of a scene; about 10 KB each
LONG_S = 70.0  # longer than all time-outs of a save
MAX_REST = 1_000  # deliveries in the preparation of a scene
ATONCE = (Local, Replied)
OWNERS = {"machine", "view", "nodes", "groups", "launchers", "ports", "notices", "_host"}

Step: TypeAlias = tuple[str, tuple[Any, ...]]  # a method of Scene, and its arguments


@dataclass(frozen=True, slots=True)
class Explored:
    num_states: int
    num_steps: int
    depth: int  # number of steps up to which every order was played
    is_complete: bool  # True if `depth` is the requested depth


@dataclass(slots=True)
class Scene:
    """A small world, and the number of events other than messages that may still happen in it."""

    world: World
    faults: int = 1  # deaths, lost creates, changes of the store
    waits: int = 1
    saves: int = 1  # saves of all members together
    launches: int = 1

    def steps(self) -> Iterator[Step]:
        """Yield all steps that are possible next."""
        yield from self._deliveries()
        yield from self._coordinator_steps()
        if self.waits:
            yield "wait", ()
        if self.faults:
            yield "toggle_store", ()
        yield from self._group_steps()

    def _deliveries(self) -> Iterator[Step]:
        world = self.world
        for index, message in enumerate(world.wire):
            if not world.can_deliver(message) or message in world.wire[:index]:
                continue
            yield "deliver", (index, "delivered")
            if self.faults and isinstance(message, Create):
                yield "lose", (index, "lost")
                if not message.is_late:
                    yield "lose", (index, "unanswered")

    def _coordinator_steps(self) -> Iterator[Step]:
        world = self.world
        for name, process in world.coordinators.items():
            if process.is_up and process.is_frozen:
                yield "thaw", (name,)
            elif process.is_up and self.faults:
                yield "kill", (name,)
        for service in sorted({node.service for node in world.nodes.values()}):
            current = world.process_of(service)
            if current is None or current.is_frozen:
                yield "start", (service,)

    def _group_steps(self) -> Iterator[Step]:
        world = self.world
        if self.launches:
            for name, launcher in world.launchers.items():
                if launcher.state in ("idle", "running"):
                    yield "launch", (name,)
        for number, (_, group, member) in enumerate(world.members()):
            if member.state == "waiting":
                yield "read", (number,)
            elif self.saves and world.can_save(group, member):
                yield "save", (number,)

    def do(self, step: Step) -> None:
        name, arguments = step
        getattr(self, name)(*arguments)
        self.settle(ATONCE)

    def deliver(self, index: int, fate: Any) -> None:
        self.world.deliver(index, fate)

    def lose(self, index: int, fate: Any) -> None:
        self.faults -= 1
        self.world.deliver(index, fate)

    def thaw(self, name: str) -> None:
        self.world.thaw(name)

    def kill(self, name: str) -> None:
        self.faults -= 1
        self.world.kill_coordinator(name)

    def start(self, service: str) -> None:
        self.world.start_coordinator(service)

    def toggle_store(self) -> None:
        self.faults -= 1
        self.world.storage.is_away = not self.world.storage.is_away

    def wait(self) -> None:
        self.waits -= 1
        self.world.wait(LONG_S)
        for name, process in list(self.world.coordinators.items()):
            if process.is_up and not process.is_frozen:
                self.world.tick(name)

    def launch(self, name: str) -> None:
        self.launches -= 1
        self.world.launch(name, 2)

    def read(self, number: int) -> None:
        launcher, _, member = list(self.world.members())[number]
        self.world.read_state(member, launcher.name)

    def save(self, number: int) -> None:
        self.saves -= 1
        _, group, member = list(self.world.members())[number]
        self.world.save(group, member, 1)

    def settle(self, kinds: tuple[type, ...] = (object,)) -> None:
        """Deliver all messages of the given kinds in the order in which the messages were sent."""
        world = self.world
        for _ in range(MAX_REST):
            ready = (
                i
                for i, message in enumerate(world.wire)
                if isinstance(message, kinds) and world.can_deliver(message)
            )
            index = next(ready, None)
            if index is None:
                return
            world.deliver(index)
        raise AssertionError("the scene does not come to rest")

    def key(self) -> str:
        """Return a digest of the current state; worlds that differ only in their past have equal digests."""
        world, storage = self.world, self.world.storage
        parts = (
            (self.faults, self.waits, self.saves, self.launches, world.now_s, storage.is_away),
            [record_digest for _, record_digest in storage.records],
            (storage.fragments, storage.described, storage.written_s, storage.uploads),
            (storage.items, storage.exported),
            [(d.folders, list(d.fragments), d.epoch) for d in (x.disk for x in world.nodes.values())],
            [(x.is_alive, x.agent and x.agent.machine) for x in world.nodes.values()],
            (world.launchers, world.current, world.waiting),
        )
        machines = (flat for process in world.coordinators.values() for flat in _flat_coordinator(process))
        wire = sorted(_flat(message) for message in world.wire)  # sorted, as any message may come next
        return digest(b"".join((*map(_flat, parts), *machines, *wire)))


def _flat_coordinator(process: Coordinator) -> Iterator[bytes]:
    """Yield the state of a coordinator, one part of its host and machine after the other.

    The state is pickled in parts, because a fast-mode pickler accepts at most 50 levels. All parts of the
    machine share a context.
    """
    state = {name: getattr(process, name) for name in Coordinator.__slots__}
    host = vars(state.pop("host"))
    yield _flat(state)
    for part in (host, *(vars(host[name]) for name in ("nodes", "groups", "launchers"))):
        yield _flat([item for item in part.items() if item[0] not in OWNERS])
    parts = vars(host["machine"])
    for name, part in parts.items():
        if name != "view":  # the view only reads other fields
            yield _flat(part, parts)


def _flat(value: object, parts: Mapping[str, object] = MappingProxyType({})) -> bytes:
    """Return bytes that depend only on the value, not on the identity of the objects in it.

    An object of `parts` inside `value` is written as its name only, since its bytes are elsewhere.
    """
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.fast = True
    if parts:
        names = {id(part): name for name, part in parts.items() if part is not value}

        def reduce(part: object) -> Any:
            name = names.get(id(part))
            return part.__reduce_ex__(pickle.HIGHEST_PROTOCOL) if name is None else (str, (name,))

        kinds = dict.fromkeys(map(type, parts.values()), reduce)
        pickler.dispatch_table = {**copyreg.dispatch_table, **kinds}
    pickler.dump(value)
    return buffer.getvalue()


def explore(name: str, *, depth: int, max_states: int = MAX_STATES) -> Explored:
    """Play all orders of up to `depth` steps of a scene; raise the first Violation with its steps."""
    start = SCENES[name]()
    seen = {start.key()}
    level: list[tuple[bytes, tuple[Step, ...]]] = [(_packed(start), ())]
    num_steps = 0
    for reached in range(depth):
        after: list[tuple[bytes, tuple[Step, ...]]] = []
        for packed, path in level:
            scene = _unpacked(packed)
            steps = list(scene.steps())
            for number, step in enumerate(steps):
                if number:
                    scene = _unpacked(packed)
                try:
                    scene.do(step)
                except Exception as error:
                    error.add_note(f"{name}: {[*path, step]}")
                    raise
                num_steps += 1
                key = scene.key()
                if key not in seen:
                    if len(seen) >= max_states:
                        return Explored(len(seen), num_steps, reached, False)
                    seen.add(key)
                    after.append((_packed(scene), (*path, step)))
        level = after
    return Explored(len(seen), num_steps, depth, True)


def _packed(scene: Scene) -> bytes:
    return zlib.compress(pickle.dumps(scene, protocol=5), 1)


def _unpacked(packed: bytes) -> Scene:
    scene: Scene = pickle.loads(zlib.decompress(packed))
    return scene


# -- scenes --------------------------------------------------------------------------------------------


def _training(clusters: Mapping[str, int], **options: Any) -> Scene:
    """Return a scene in which a group of two nodes of "east" trains and has committed one save."""
    world = World(RunOptions(**options), clusters)
    world.launchers = {f"{name}-driver": Launcher(f"{name}-driver", name) for name in clusters}
    scene = Scene(world)
    for _ in range(2):
        world.launch("east-driver", 2)
        scene.settle()
    _restore(scene)
    _save_all(scene)
    scene.settle()
    return scene


def _restore(scene: Scene) -> None:
    for launcher, _, member in list(scene.world.members()):
        scene.world.read_state(member, launcher.name)
    scene.settle()


def _save_all(scene: Scene) -> None:
    for _, group, member in list(scene.world.members()):
        scene.world.save(group, member, 1)
    scene.settle((Local,))


def frozen_coordinator() -> Scene:
    """Freeze the coordinator while a save is stored; Ray starts a second coordinator, and the first thaws."""
    scene = _training({"east": 2}, keep_last=1)
    _save_all(scene)
    scene.world.freeze("east.c0")
    return replace(scene, faults=0, saves=0)


def two_clusters() -> Scene:
    """Open the run in a second cluster while the first cluster has an open save."""
    scene = _training({"east": 2, "west": 2}, keep_last=1)
    _save_all(scene)
    scene.world.launch("west-driver", 2)
    return replace(scene, faults=0, saves=0, waits=0, launches=1)


def collector() -> Scene:
    """Retire and delete a checkpoint while the coordinator dies or the group restarts."""
    scene = _training({"east": 2}, keep_last=1, replicas=0)
    _save_all(scene)
    return replace(scene, saves=0)


def store_away() -> Scene:
    """Silence the store while a save is committed and a new group opens."""
    scene = _training({"east": 2}, keep_last=1, store_wait_s=1.0)
    _save_all(scene)
    scene.world.storage.is_away = True
    return replace(scene, saves=0)


def finishing() -> Scene:
    """End the run and report a drill; then the coordinator dies, the store fails, or a launcher opens it."""
    scene = _training({"east": 2}, keep_last=1, store_wait_s=1.0)
    world = scene.world
    world.launchers["next-driver"] = Launcher("next-driver", "east")
    (attempt,) = world.oracle.history.checkpoints
    world.finish("east-driver", ends_group=True)
    world.drill("east", attempt, passed=True)
    return replace(scene, saves=0)


SCENES: Mapping[str, Callable[[], Scene]] = {
    scene.__name__: scene for scene in (frozen_coordinator, two_clusters, collector, store_away, finishing)
}
