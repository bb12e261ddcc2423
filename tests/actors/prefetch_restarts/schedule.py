"""Random restarts: a group trains, saves, is lost, and restores elsewhere, as a seed draws it.

Each restore is compared with the known state of the checkpoint (P4), no intact copy may be passed over (P2),
and no memory of a restore may stay (P8). Draws do not depend on the timing of threads, but a race may end
otherwise when a seed is replayed.
"""

from __future__ import annotations

import asyncio
import gc
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import mkdtemp

from ray_ckpt.config import RunOptions
from ray_ckpt.core.values import RankProgress, SessionPlan
from ray_ckpt.errors import CheckpointError
from ray_ckpt.testing.oracle import must
from ray_ckpt.types import CheckpointInfo
from tests.actors.prefetch_restarts import memory
from tests.actors.prefetch_restarts.coordinator import Decisions, Save
from tests.actors.prefetch_restarts.moments import PLENTY_BYTES, Gate, Moments
from tests.actors.prefetch_restarts.nodes import Machine
from tests.actors.prefetch_restarts.ranks import Rank
from tests.transport.peers import UID

NUM_RESTARTS = 8
NUM_SPARES = 2  # machines beside those of the first group
MAX_CHANGES = 3  # of the plan, one after the other, before a group may restore
WAIT_S = 20.0  # longest wait for what takes some milliseconds
POLL_S = 0.001
SHM = Path("/dev/shm")
RESTORE_MEMORY = ("ray_ckpt-prefetch", "ray_ckpt-manifest", "ray_ckpt-shared")

LOSSES = {"stop": 3, "unsealed": 2, "sealed": 2, "node": 3, "wiped": 2, "away": 3, "agent": 1}
MOMENTS = {"before": 2, "during": 5, "after": 3}
EVENTS = {"none": 5, "plan changes": 4, "node dies": 2, "file rots": 4, "ranks ask and die": 2}
FREE_BYTES = {PLENTY_BYTES: 8, 700_000: 1, 200_000: 1, 0: 1}


class Schedule:
    """One run, its machines, and the generator of its events."""

    def __init__(self, seed: int, root: Path) -> None:
        self.chance = chance = random.Random(seed)
        self.before = memory.mappings()
        self.open_before = memory.descriptors()
        self.size = chance.randint(2, 4)
        self.ranks_per_node = chance.choice([1, 1, 2, 3])
        self.is_hybrid = chance.random() < 0.3  # pairs of ranks hold the same part of the cut matrix
        self.is_named = chance.random() < 0.1
        options = RunOptions(
            prefetch=chance.choices(["always", "auto", "never"], [18, 2, 1])[0],
            memory=chance.choice(["single", "double"]),
            reserve_bytes=0,
        )
        self.options = options
        self.moments = Moments()
        self.counts: Counter[str] = Counter()
        self.story: list[str] = []
        machines: list[Machine] = []
        self.machines = machines
        self.decisions = Decisions(machines, chance.choice([1, 1, 1, 2]))
        numbers = range(min(self.size + NUM_SPARES, 6))
        machines += (Machine(number, root, options, self.decisions.requested) for number in numbers)
        self.ranks: list[Rank] = []
        self.group: list[tuple[Machine, tuple[int, ...]]] = []
        self.left: list[Rank] = []  # processes of a lost group that still map their arenas
        self.pool = ThreadPoolExecutor(32, "ranks")
        self.step = 0
        self.rotten: set[tuple[str, str]] = set()  # attempts and files of which a copy was damaged

    def say(self, line: str) -> None:
        self.story.append(line)

    # -- the life of a run -----------------------------------------------------------------------------

    async def play(self, num_restarts: int) -> None:
        chance = self.chance
        for machine in self.machines:
            await machine.start()
        self.group = self._placed(self.machines[: self.size])
        await self._open()
        await self._restore([])
        while self.counts["restarts"] < num_restarts:
            await self._train()
            await self._lose(chance.choices(list(LOSSES), list(LOSSES.values()))[0])
            await self._begin_again()
        await self._end()

    def _placed(self, machines: Sequence[Machine]) -> list[tuple[Machine, tuple[int, ...]]]:
        per = self.ranks_per_node
        return [(each, tuple(range(k * per, k * per + per))) for k, each in enumerate(machines)]

    async def _open(self) -> SessionPlan:
        """Begin a session of the group."""
        chance = self.chance
        self.decisions.epoch += chance.random() < 0.2  # another coordinator
        self.decisions.proves_fragments = chance.random() < 0.9
        for machine, _ in self.group:
            budget = chance.choices(list(FREE_BYTES), list(FREE_BYTES.values()))[0]
            self.moments.free_bytes[machine.node_id] = budget
        plan = await self.decisions.open(self.group)
        step = plan.resume.checkpoint.step if plan.resume else 0
        self.say(f"session {plan.session} on {self._names()} from step {step}")
        return plan

    def _names(self) -> str:
        return " ".join(machine.name for machine, _ in self.group)

    # -- training --------------------------------------------------------------------------------------

    async def _train(self) -> None:
        """Train and save, and lose an agent in between now and then."""
        plan = self.decisions.plan
        assert plan is not None
        for _ in range(self.chance.randint(1, 2)):
            if self.chance.random() < 0.1:
                await self._replace_agent()
            save = self._next_save()
            saving = [rank.save(save.attempt, plan.session_key) for rank in self.ranks]
            await asyncio.wait_for(asyncio.gather(*saving), WAIT_S)
            await self.decisions.settled(save)
            must(save.is_whole, "P1", f"step {self.step} of live ranks is not committed")
            self.say(f"step {self.step} is committed")
            self.counts["saves"] += 1
        if self.chance.random() < 0.2:
            await self._return()

    def _next_save(self) -> Save:
        self.step += 1
        save = self.decisions.begin_save(self.step)
        for rank in self.ranks:
            rank.train(save.attempt.attempt)
        return save

    async def _replace_agent(self) -> None:
        """End an agent while ranks train; its successor gets the session and prepares in vain."""
        machine, ranks = self.chance.choice(self.group)
        await machine.kill_agent()
        await machine.start()
        await self.decisions.start(machine)
        for rank in self.ranks:
            if rank.identity.rank in ranks:
                rank.reconnect()
        plan = self.decisions.plan
        assert plan is not None
        for number in ranks:
            progress = RankProgress(step=self.step, saved_step=self.step)
            await machine.require_agent().report_progress(UID, plan.session_key, number, progress)
        for other in self.decisions.live():  # they get its new address, as from the coordinator
            await other.require_agent().update_peer(UID, machine.node_id, machine.endpoint)
        self.say(f"{machine.name} gets a new agent")
        self.counts["agents replaced"] += 1
        await self._expect_no_restore_memory(machine)

    # -- losses ----------------------------------------------------------------------------------------

    async def _lose(self, kind: str) -> None:
        """End the group: `kind` is the reason, and where a save was."""
        chance, plan = self.chance, self.decisions.plan
        assert plan is not None
        machine = chance.choice(self.group)[0]
        if kind in ("unsealed", "sealed"):
            save = self._next_save()
            share = chance.random() if kind == "unsealed" else 1.0
            hasty = [rank for rank in self.ranks if chance.random() < 0.7]
            for rank in hasty:
                shard = await rank.capture(save.attempt, plan.session_key, share=share)
                if shard is not None and chance.random() < 0.5:
                    sealing = asyncio.ensure_future(rank.machine.require_agent().seal(UID, shard))
                    await asyncio.sleep(0)
                    sealing.cancel()
        self._end_ranks()
        if kind in ("node", "wiped"):
            others = [each for each in self.machines if each is not machine]
            await self._kill(machine, wipe=kind == "wiped" and self._is_held(others))
        elif kind == "away":
            machine.is_away = True
        elif kind == "agent":
            await machine.kill_agent()
            await machine.start()
        self.say(f"lost: {kind} {machine.name}")
        self.counts[f"lost: {kind}"] += 1

    async def _kill(self, machine: Machine, *, wipe: bool = False) -> None:
        restore = machine.run.restore
        if restore is not None and (gate := self.moments.gate_of(restore._prefetch)) is not None:
            gate.opened.set()  # its threads end with the process
        await machine.kill(wipe=wipe)

    def _is_held(self, machines: Sequence[Machine]) -> bool:
        """Return whether these machines hold all files of the newest checkpoint."""
        if not self.decisions.lineage:
            return True
        newest = self.decisions.lineage[-1]
        held = {name for machine in machines for name in machine.files(newest.id)}
        return held >= self.decisions.files(newest)

    def _end_ranks(self) -> None:
        """End all processes; some map their arenas for a while yet."""
        for rank in self.ranks:
            if self.chance.random() < 0.15:
                self.left.append(rank)
            else:
                rank.leave()
        self.ranks = []

    def _end_left(self) -> None:
        while self.left:
            rank = self.left.pop()
            if self.chance.random() < 0.5:
                rank.capture_on()
            rank.leave()

    async def _return(self) -> None:
        """Let the machines come back that are dead or away; those away have their old memory."""
        for machine in self.machines:
            if machine.agent is None:
                await machine.start()
                self.say(f"{machine.name} comes back")
                self.counts["late nodes"] += 1
            elif machine.is_away:
                machine.is_away = False
                self.say(f"{machine.name} comes back with its memory")
                self.counts["late nodes with memory"] += 1

    # -- restarts --------------------------------------------------------------------------------------

    async def _begin_again(self) -> None:
        """Begin sessions until a group has restored."""
        chance = self.chance
        for change in range(MAX_CHANGES + 1):
            is_whole = self._is_held(self.decisions.live())
            if chance.random() < 0.4 or not is_whole or len(self.decisions.live()) < 2:
                await self._return()
            moment = chance.choices(list(MOMENTS), list(MOMENTS.values()))[0]
            event = chance.choices(list(EVENTS), list(EVENTS.values()))[0]
            self.group = self._new_group()
            if change == MAX_CHANGES or (event == "node dies" and len(self.decisions.live()) < 3):
                event = "none"
            gates = self._set_gates() if moment == "during" else []
            rots_early = event == "file rots" and (moment == "before" or chance.random() < 0.5)
            if rots_early:
                self._rot()
            await self._open()
            self.counts["restarts"] += 1
            self.counts[f"{event}, {moment}"] += 1
            self.say(f"{event}, {moment}")
            await self._await_moment(moment, gates)
            if chance.random() < 0.5:
                self._end_left()
            if event == "file rots" and not rots_early:
                self._rot()
            if event == "ranks ask and die":
                await self._ask_and_die(gates)
            elif event == "node dies":
                await self._kill(chance.choice(self.group)[0])
            if event in ("none", "file rots"):
                await self._restore(gates)
                return
            if chance.random() < 0.5:  # else the prefetch is held up until the next session has begun
                self.moments.open_gates()
            if chance.random() < 0.3:
                await self._return()

    def _new_group(self) -> list[tuple[Machine, tuple[int, ...]]]:
        """Draw the machines of a group; it mostly has the size of the last one, and often its places."""
        live, chance = self.decisions.live(), self.chance
        size = self.size if chance.random() < 0.85 else chance.randint(2, 4)
        size = min(size, len(live))
        kept = [machine for machine, _ in self.group if machine in live]
        if chance.random() < 0.6 and kept:
            others = [machine for machine in live if machine not in kept]
            chance.shuffle(others)
            return self._placed([*kept, *others][:size])
        return self._placed(chance.sample(live, size))

    def _set_gates(self) -> list[Gate]:
        gates = []
        for machine, _ in self.group:
            if self.chance.random() < 0.7:
                gate = self.moments.gates[machine.node_id] = Gate(self.chance.randint(0, 6))
                gates.append(gate)
        return gates

    async def _await_moment(self, moment: str, gates: Sequence[Gate]) -> None:
        """Wait until prefetches are over, or have reached their gates."""
        for machine, _ in self.group:
            restore = machine.run.restore
            task = restore._prefetching if restore is not None else None
            if restore is None or task is None or moment == "before":
                continue
            if moment == "during":
                gate = self.moments.gate_of(restore._prefetch)
                while gate is not None and not gate.reached.is_set() and not task.done():
                    await asyncio.sleep(POLL_S)
                self.counts["prefetches held up"] += gate is not None and gate.reached.is_set()
            else:
                await asyncio.wait_for(asyncio.shield(task), WAIT_S)

    async def _ask_and_die(self, gates: Sequence[Gate]) -> None:
        """Let ranks begin to restore, and end their group before it has restored."""
        self._start_ranks()
        tasks = [asyncio.ensure_future(rank.restore()) for rank in self.ranks[1:]]
        await self._let_ask(tasks, gates)
        for _ in range(self.chance.randint(0, 20)):
            await asyncio.sleep(POLL_S)
        while left := [task for task in tasks if not task.done()]:
            for task in left:
                task.cancel()  # `asyncio.wait_for` of Python 3.11 may swallow it with an answer
            await asyncio.wait(left, timeout=POLL_S)
        await asyncio.gather(*tasks, return_exceptions=True)
        self._end_ranks()

    async def _let_ask(self, tasks: Sequence[asyncio.Future[None]], gates: Sequence[Gate]) -> None:
        """Open the gates once ranks have asked, so that prefetches are at work when their ranks come."""
        for _ in range(3 if gates else 0):
            await asyncio.sleep(POLL_S)
        self.moments.open_gates()

    def _start_ranks(self) -> None:
        world_size = sum(len(ranks) for _, ranks in self.group)
        num_cuts = max(1, world_size // 2) if self.is_hybrid else world_size
        plan = self.decisions.plan
        assert plan is not None
        self.ranks = [
            Rank(
                machine,
                rank,
                world_size,
                ranks,
                plan.session_key,
                options=self.options,
                num_cuts=num_cuts,
                named=self.is_named,
                pool=self.pool,
            )
            for machine, ranks in self.group
            for rank in ranks
        ]

    async def _restore(self, gates: Sequence[Gate]) -> None:
        """Restore the group, and compare each rank with the known state."""
        self._start_ranks()
        num_damaged = len(self.decisions.damage)
        tasks = [asyncio.ensure_future(rank.restore()) for rank in self.ranks]
        await self._let_ask(tasks, gates)
        try:
            await asyncio.wait_for(asyncio.gather(*tasks), WAIT_S)
        except TimeoutError:
            must(False, "P7", f"the ranks on {self._names()} do not restore")
        except CheckpointError as error:
            must(False, "P4", f"a rank on {self._names()} cannot restore: {error}")
        self._end_left()
        for attempt, damage in self.decisions.damage[num_damaged:]:
            self._check_damage(attempt.attempt, damage)
        plan = self.decisions.plan
        assert plan is not None
        checkpoint = plan.resume.checkpoint if plan.resume else None
        for rank in self.ranks:
            self._check_rank(rank, checkpoint)
        self.step = checkpoint.step if checkpoint else 0
        for machine, _ in self.group:
            await self._expect_no_restore_memory(machine)
            must(not machine.run.memory.arenas, "P8", f"{machine.name} keeps the arenas of an earlier group")
        await self._check_descriptors()

    def _check_rank(self, rank: Rank, checkpoint: CheckpointInfo | None) -> None:
        number, ticket = rank.identity.rank, rank.ticket
        assert ticket is not None
        must(ticket.checkpoint == checkpoint, "P4", f"rank {number} has restored {ticket.checkpoint}")
        if checkpoint is None:
            self.counts["ranks that begin anew"] += 1
            return
        wrong = rank.differences(checkpoint.id.attempt, checkpoint.world_size)
        text = f"rank {number} has wrong bytes of step {checkpoint.step} in {', '.join(wrong)}"
        must(not wrong, "P4", text)
        self.counts["ranks compared"] += 1
        self.counts["ranks with bytes read ahead"] += rank.prefetched_bytes > 0
        self.counts["bytes restored"] += rank.read_bytes
        self.counts["bytes read ahead"] += rank.prefetched_bytes

    # -- damage ----------------------------------------------------------------------------------------

    def _rot(self) -> None:
        """Damage or remove a file of the newest checkpoint on one disk, now and then on all."""
        if not self.decisions.lineage:
            return
        checkpoint = self.decisions.lineage[-1]
        if self.chance.random() < 0.3:
            self._rot_capture(checkpoint)
            return
        machines = self.machines
        if self.chance.random() < 0.7:  # where ranks, or their agent, read first
            machines = [machine for machine, _ in self.group]
        copies = [machine.files(checkpoint.id) for machine in machines]
        names = sorted({name for files in copies for name in files})
        if self.chance.random() < 0.7:
            names = [name for name in names if name.startswith("shard")]
        if not names:
            return
        name = self.chance.choice(names)
        paths = [files[name] for files in copies if name in files]
        if self.chance.random() < 0.8:
            paths = [self.chance.choice(paths)]
        at, is_removed = self.chance.random(), self.chance.random() < 0.3
        for path in paths:
            if is_removed:
                path.unlink()
                continue
            data = bytearray(path.read_bytes())
            data[int(at * len(data))] ^= 1
            fresh = path.with_name(f"{path.name}.rot")  # a reader that has opened the file goes on
            fresh.write_bytes(data)
            fresh.rename(path)
        self.rotten.add((checkpoint.id.attempt, name))
        self.say(
            f"{name} of step {checkpoint.step} {'is gone' if is_removed else 'rots'} on {len(paths)} disks"
        )

    def _rot_capture(self, checkpoint: CheckpointInfo) -> None:
        """Change a byte of a capture in memory, unless the kernel refuses it."""
        found = [
            (machine, buffer)
            for machine in self.machines
            if machine.agent is not None
            for arena in machine.run.memory.arenas.values()
            if (buffer := arena.find(checkpoint.id.attempt)) is not None
        ]
        at = self.chance.random()
        if not found:
            return
        machine, buffer = self.chance.choice(found)
        if buffer.memory.readonly or buffer.layout is None:
            return
        data = buffer.data(buffer.layout)
        data[int(at * len(data))] ^= 1
        self.say(f"a capture of step {checkpoint.step} rots on {machine.name}")
        self.counts["captures that rot"] += 1

    def _check_damage(self, attempt: str, damage: Sequence[str]) -> None:
        """Check that damage is reported only if a file was damaged."""
        self.counts["groups that fall back"] += 1
        self.say(f"damage: {damage[0]}")
        known = [name for found, name in self.rotten if found == attempt]
        must(bool(known), "P2", f"ranks report damage of intact files: {damage[0]}")

    # -- memory ----------------------------------------------------------------------------------------

    async def _expect_no_restore_memory(self, machine: Machine) -> None:
        """Check that a node whose ranks train holds no memory of a restore."""
        restore = machine.run.restore
        assert restore is not None
        for _ in range(int(WAIT_S / POLL_S)):
            if not restore._prefetch._memories and not restore._prefetch._at_work and not restore._memories:
                break
            await asyncio.sleep(POLL_S)
        kept = (*restore._prefetch._memories, *restore._memories)
        must(not kept, "P8", f"{machine.name} keeps memory of the restore: {kept}")
        timer = restore._unused
        must(timer is None or timer.cancelled(), "P8", f"{machine.name} keeps the timer of a prefetch")

    async def _check_descriptors(self) -> None:
        """Check that only nodes outside of the group have memory of a restore, for a bounded time."""
        members = {machine.number for machine, _ in self.group}
        bounded = 0
        for machine in self.machines:
            if machine.agent is not None and machine.number not in members and machine.run.restore:
                restore = machine.run.restore
                bounded += len(restore._prefetch._memories)
                timer = restore._unused
                must(
                    not restore._prefetch._memories or (timer is not None and not timer.cancelled()),
                    "P8",
                    f"{machine.name} has left the group and keeps prefetched files for ever",
                )
        for _ in range(int(memory.GONE_S / POLL_S)):  # threads of earlier sessions may be at their end
            found = (memory.descriptors() - self.open_before)["ray_ckpt-prefetch"]
            if found <= bounded:
                break
            await asyncio.sleep(POLL_S)
        must(found <= bounded, "P8", f"{found} prefetched files are open, {bounded} of them for a while")
        arenas = [
            arena
            for machine in self.machines
            if machine.agent is not None and machine.number not in members
            for arena in machine.run.memory.arenas.values()
        ]
        kept = sum(len(arena.buffers) for arena in arenas)
        allowed = self.before + Counter({"ray_ckpt-rank": kept})
        mapped = await memory.mapped_for_long(["ray_ckpt-rank"], allowed)
        must(not mapped, "P8", f"arenas of earlier groups are mapped while the next one trains: {mapped}")

    async def _end(self) -> None:
        """Finish the run on all nodes, and check that nothing of it is left."""
        self._end_ranks()
        self._end_left()
        await self._return()
        for machine in self.machines:
            if self.decisions.plan is not None:
                await self.decisions.release(machine, is_finished=True)

    async def stop(self) -> None:
        """End all processes."""
        self.moments.open_gates()
        self.ranks, self.left = [], []
        for machine in self.machines:
            await machine.kill_agent()
        await asyncio.to_thread(self.pool.shutdown)


def play(seed: int, num_restarts: int = NUM_RESTARTS) -> Counter[str]:
    """Play the restarts of a seed; raise a Violation, with the story as a note, if a promise is broken."""
    root = Path(mkdtemp(prefix="ray_ckpt-restarts-", dir=SHM))
    before = memory.descriptors(), memory.mappings(), set(memory.threads())
    schedule = Schedule(seed, root)

    async def story() -> None:
        try:
            await schedule.play(num_restarts)
            await _expect_nothing_left(before)
            left = memory.temporary_files(root)
            must(not left, "P8", f"temporary files are left: {left}")
        finally:
            await schedule.stop()

    gc.freeze()  # collections then look at the objects of this run only
    try:
        with schedule.moments.installed():
            asyncio.run(story())
    except (AssertionError, CheckpointError, OSError) as error:
        error.add_note(f"seed {seed}: " + "; ".join(schedule.story))
        raise
    finally:
        gc.unfreeze()
        shutil.rmtree(root, ignore_errors=True)
    return schedule.counts


Before = tuple[Counter[str], Counter[str], set[str]]


async def _expect_nothing_left(before: Before) -> None:
    """Check that no memory of the run is left after its end, once its threads have ended."""
    descriptors, mappings, threads = before
    for _ in range(int(memory.GONE_S / POLL_S)):
        if not {*memory.threads()} - threads and not memory.descriptors() - descriptors:
            break
        await asyncio.sleep(POLL_S)
    left = memory.descriptors() - descriptors
    must(not left, "P8", f"memory is open after the end: {dict(left)}")
    mapped = await memory.mapped_for_long(["ray_ckpt"], mappings)
    must(not mapped, "P8", f"memory is mapped after the end: {dict(mapped)}")
