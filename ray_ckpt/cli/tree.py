"""`ray-ckpt tree`: sessions of a run, their checkpoints, and the checkpoint from which each continued."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Any

from rich.text import Text
from rich.tree import Tree

from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.cli.options import JsonOption, PathArgument, StorageOption, option, store_options
from ray_ckpt.cli.output import Lineage, level_text, print_json, stdout, when_text
from ray_ckpt.texts import count_text, printable
from ray_ckpt.types import CheckpointInfo, SessionInfo

MAX_SESSIONS = 100  # sessions drawn without `--all`: a few screens
MAX_CHECKPOINTS = 8  # checkpoints drawn per session without `--all`


def tree(
    path: PathArgument,
    all: Annotated[
        bool,
        option("--all", "Every session and checkpoint, also lost, retired and deleted ones."),
    ] = False,
    storage_option: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Draw the lineage of a run: its sessions, the checkpoint from which each continued, and their saves.

    A session stands below the one from which it continued; an abandoned branch is drawn under the session
    from which it started. `*` marks the newest checkpoint, which a restart resumes from; `+` the
    others on its lineage. Draws the newest sessions and the newest live checkpoints of each; with `--all`
    everything.

    Example: `ray-ckpt tree /shared/runs/gpt`
    """
    run = _Sessions(Catalog(path, store_options(storage_option)))
    if as_json:
        print_json(run.to_json())
    else:
        stdout().print(_draw(run, all))


class _Sessions:
    """The sessions of a run, and their checkpoints."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.sessions = catalog.sessions
        self.attempts = {info.id.attempt: info for info in catalog.list(all=True)}
        self.checkpoints: dict[int, list[CheckpointInfo]] = defaultdict(list)  # by session, in log order
        for info in self.attempts.values():
            self.checkpoints[info.id.session].append(info)
        self.marks = Lineage(catalog)
        known = {s.session: s for s in self.sessions}
        self.on_lineage: set[int] = set()
        session = self.sessions[-1] if self.sessions else None
        while session is not None:
            self.on_lineage.add(session.session)
            origin = self.origin(session)
            session = known[origin.id.session] if origin else None

    def origin(self, session: SessionInfo) -> CheckpointInfo | None:
        """Return the checkpoint from which a session continued."""
        return self.attempts[session.resumed_from] if session.resumed_from else None

    def chains(self, shown: Sequence[SessionInfo]) -> dict[int | None, list[SessionInfo]]:
        """Return the sessions of `shown`, by the session under which each is drawn; None is the run itself.

        Sessions are in log order. Several sessions may have continued from checkpoints of one session: the
        session on the lineage, else the last session, is drawn beside it; the others are drawn as branches
        under it.
        """
        heirs: dict[int, SessionInfo] = {}
        for session in shown:
            if (origin := self.origin(session)) is not None:
                heir = heirs.get(origin.id.session)
                if heir is None or heir.session not in self.on_lineage:
                    heirs[origin.id.session] = session
        under: dict[int | None, list[SessionInfo]] = defaultdict(list)
        places: dict[int, int | None] = {}  # for each session, the session under which it is drawn
        for session in shown:
            origin = self.origin(session)
            place = None
            if origin is not None and origin.id.session in places:  # otherwise the origin is not drawn
                is_heir = heirs[origin.id.session] is session
                place = places[origin.id.session] if is_heir else origin.id.session
            places[session.session] = place
            under[place].append(session)
        return under

    def to_json(self) -> dict[str, Any]:
        return {
            "run_name": self.catalog.run_name,
            "run_uid": self.catalog.run_uid,
            "sessions": [self._session_json(session) for session in self.sessions],
        }

    def _session_json(self, session: SessionInfo) -> dict[str, Any]:
        origin = self.origin(session)
        return {
            "session": session.session,
            "parent": session.parent,
            "resumed_from": None
            if origin is None
            else {"step": origin.step, "attempt": origin.id.attempt, "session": origin.id.session},
            "origin_step": session.origin_step,
            "world_size": session.world_size,
            "num_nodes": session.num_nodes,
            "opened_at_s": session.opened_at_s,
            "is_rollback": session.is_rollback,
            "is_import": session.is_import,
            "on_lineage": session.session in self.on_lineage,
            "checkpoints": [
                {
                    "step": info.step,
                    "attempt": info.id.attempt,
                    "state": info.state,
                    "level": info.level.label,
                    "replicas": info.replicas,
                    "flaws": list(info.flaws),
                    "committed_at_s": info.committed_at_s,
                    **self.marks.marks_json(info),
                }
                for info in self.checkpoints[session.session]
            ],
        }


def _draw(run: _Sessions, all: bool) -> Tree:
    catalog = run.catalog
    root = Tree(_text(f"run {catalog.run_name}  uid {catalog.run_uid}"))
    shown = run.sessions if all else run.sessions[-MAX_SESSIONS:]
    if left_out := len(run.sessions) - len(shown):
        root.add(_text(f"{left_out} older sessions; --all draws them", "dim"))
    under = run.chains(shown)
    todo: list[tuple[Tree, int | None]] = [(root, None)]
    while todo:  # not recursive: a log may have any depth of branches
        node, place = todo.pop()
        for session in under.get(place, ()):
            style = None if session.session in run.on_lineage else "dim"
            child = node.add(_text(_session_text(session, run.origin(session)), style))
            _draw_checkpoints(child, run, session, all)
            todo.append((child, session.session))
    if not run.sessions:
        root.add(_text("No sessions."))
    return root


def _draw_checkpoints(node: Tree, run: _Sessions, session: SessionInfo, all: bool) -> None:
    known = run.checkpoints.get(session.session, [])
    live = [info for info in known if all or info.state == "live"]
    shown = live if all else live[-MAX_CHECKPOINTS:]
    notes = {"older": len(live) - len(shown), "gone": len(known) - len(live)}
    if text := ", ".join(f"{count} {what}" for what, count in notes.items() if count):
        node.add(_text(f"{text}; --all draws them", "dim"))
    for info in shown:
        mark, style = run.marks.mark(info), run.marks.style(info)
        level = level_text(info) if info.state == "live" else info.state
        node.add(_text(f"{mark or ' '} step {info.step}  {level}  {when_text(info.committed_at_s)}", style))


def _session_text(session: SessionInfo, origin: CheckpointInfo | None) -> str:
    begun = "imported" if session.is_import else "from scratch"
    if session.origin_step is not None:
        begun = f"from step {session.origin_step} of another run"
    if origin is not None:
        verb = "rolled back to" if session.is_rollback else "imported after" if session.is_import else "from"
        gone = "" if origin.state == "live" else f", now {origin.state}"
        begun = f"{verb} step {origin.step} of session {origin.id.session}{gone}"
    if session.is_offline:  # no ranks trained in it
        return f"session {session.session}  {begun}  {when_text(session.opened_at_s)}"
    ranks = f"{count_text(session.world_size, 'rank')} on {count_text(session.num_nodes, 'node')}"
    return f"session {session.session}  {begun}  {ranks}  {when_text(session.opened_at_s)}"


def _text(text: str, style: str | None = None) -> Text:
    return Text(printable(text), style=style or "", overflow="fold")
