"""Read the status of a service and of its runs, for the command line, tests and metrics."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import ray

import ray_ckpt
from ray_ckpt.actors import names
from ray_ckpt.actors.coordinator.agents import CARD_S
from ray_ckpt.actors.coordinator.disks import read_disk
from ray_ckpt.actors.coordinator.engine import Engine
from ray_ckpt.actors.coordinator.overview import view_of
from ray_ckpt.actors.coordinator.run import Run
from ray_ckpt.actors.messages import DrainingView, DrillSources, RunStatus, RunView, ServiceView
from ray_ckpt.core.loss_scenarios import live_checkpoints
from ray_ckpt.storage.log_store import read_run

MAX_REQUESTED = 64  # agents that one overview calls for upload progress, or for their disks


class StatusReader:
    """Status as of now; its methods change nothing."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._started_s = time.time()

    async def overview(self) -> ServiceView:
        engine = self._engine
        await engine.agents.read_cards()
        return ServiceView(
            version=ray_ckpt.__version__,
            protocol=names.PROTOCOL_VERSION,
            ray_version=ray.__version__,
            coordinator_node=ray.get_runtime_context().get_node_id(),
            coordinator_host=ray.util.get_node_ip_address(),
            up_s=time.time() - self._started_s,
            is_encrypted=engine.agents.keys.encrypt,
            nodes=await engine.agents.live_nodes(),
            agents=tuple(card for _, card in sorted(engine.agents.cards.items())),
            leaving=tuple(
                DrainingView(node_id=node, source=source, in_s=in_s)
                for node, source, in_s in engine.notices.leaving(time.time())
            ),
            runs=(
                *await asyncio.gather(*(self._view(run) for run in engine.runs)),
                *(past.view_at(time.time()) for past in engine.runs.past.values()),
            ),
        )

    async def status(self, run: Run) -> RunStatus:
        history, machine = run.machine.history, run.machine
        lineage = history.lineage()
        _, records = await run.log_threads.run(read_run, run.store)
        return RunStatus(
            run_uid=history.run_uid,
            records=tuple(record for record, _ in records),
            newest=lineage[-1] if lineage else None,
            holders=machine.view.holders,
            nodes=machine.plan.nodes if machine.plan else (),
            restores=machine.view.restores,
            agents=tuple(self._engine.agents.cards.values()),
            exposure=machine.view.exposure(),
            copies_missing=machine.view.copies_missing,
        )

    async def drill_sources(self, run: Run) -> DrillSources:
        agents, machine = self._engine.agents, run.machine
        nodes = await agents.cluster.recent()
        return DrillSources(
            live=live_checkpoints(
                machine.history, machine.view.holders, machine.plan, machine.view.parity_groups
            ),
            endpoints=agents.endpoints,
            domains=nodes.domains(run.spec.options.failure_domain),
            credentials=agents.keys.credentials(run.run_uid),
            storage=run.spec.storage,
            last_step=machine.view.last_step,
        )

    async def _view(self, run: Run) -> RunView:
        owner = run.machine.view.owner
        lives = not owner or await self._engine.is_alive(owner)
        sent_bytes = await self._sent_bytes(run)
        if run.machine.view.is_idle:
            await self._read_disks(run)
        return view_of(run, self._engine.agents.nodes, owner_lives=lives, sent_bytes=sent_bytes)

    async def _read_disks(self, run: Run) -> None:
        """Read the disks of an idle run, which are read rarely otherwise, unless the run has many nodes."""
        nodes = run.host.nodes.opened & self._engine.agents.nodes
        if len(nodes) <= MAX_REQUESTED:
            await asyncio.gather(*(read_disk(self._engine, run, node, CARD_S) for node in nodes))

    async def _sent_bytes(self, run: Run) -> dict[str, int]:
        """Return, by attempt, the bytes that unfinished uploads have sent; {} if too many nodes upload."""
        agents = self._engine.agents
        nodes = {node for drain in run.machine.view.drains_underway for node in drain.nodes} & agents.nodes
        if len(nodes) > MAX_REQUESTED:
            return {}
        calls = (asyncio.wait_for(agents.call(n, "uploads", run.run_uid), CARD_S) for n in nodes)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        sent = Counter[str]()
        for answer in answers:
            sent.update(answer if isinstance(answer, dict) else {})
        return dict(sent)
