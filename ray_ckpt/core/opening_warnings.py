"""Warnings, once each, if a group does not begin with what an option names, or leaves checkpoints aside."""

from __future__ import annotations

from collections.abc import Iterator

from ray_ckpt.config import Resume, is_uri, resume_step
from ray_ckpt.core.context import Context
from ray_ckpt.core.history import RunHistory
from ray_ckpt.core.messages import Warn
from ray_ckpt.core.retention import pinned_by
from ray_ckpt.texts import count_text


def warn_of_opening(context: Context, history: RunHistory, resume: Resume) -> Iterator[Warn]:
    """Yield the warnings for the last session of the history, whose group was opened with `resume`."""
    yield from _warn_of_ignored(context, history)
    yield from _warn_of_left(context, history, resume)
    yield from _warn_of_replicas(context, history)


def _warn_of_ignored(context: Context, history: RunHistory) -> Iterator[Warn]:
    """Warn if the run has a checkpoint, so that it does not begin with the one that an option names.

    Only for the first group of a launcher: the later ones continue what it has begun.
    """
    options, session = context.options, history.session
    name, uri = ("resume", options.resume) if is_uri(options.resume) else ("init_from", options.init_from)
    if uri is None or session is None or session.resumed_from is None:
        return
    launched = [(s.service, s.owner) for s in history.sessions.values() if s.session != session.session]
    if (session.service, session.owner) not in launched:
        step = history.checkpoints[session.resumed_from].step
        yield from context.warn_once(
            f"The run goes on from its own step {step}: {name} is ignored, since it is for a run without "
            "checkpoints."
        )


def _warn_of_left(context: Context, history: RunHistory, resume: Resume) -> Iterator[Warn]:
    """Warn if an option takes checkpoints off the lineage: retention deletes them."""
    if resume != "never" and resume_step(resume) is None:
        return
    on_lineage = {c.id.attempt for c in history.lineage()}
    left = [c for c in history.live() if c.id.attempt not in on_lineage]
    left = [c for c in left if not pinned_by(c, context.wall_s)]
    if left:
        yield from context.warn_once(
            f"resume={resume!r} leaves {count_text(len(left), 'checkpoint')} aside, the newest of step "
            f"{left[-1].step}: deleted from the first saves on, unless pinned. To keep checkpoints, pin them "
            "or use another run name."
        )


def _warn_of_replicas(context: Context, history: RunHistory) -> Iterator[Warn]:
    """Warn of replicas that differed at or before the restored checkpoint; none differs after the restore."""
    session, found = history.session, history.suspect
    if session is not None and session.resumed_from is not None and found is not None:
        step = history.checkpoints[session.resumed_from].step
        yield from context.warn_once(
            f"The run goes on from step {step}, which may have wrong bytes: data-parallel replicas had "
            f"drifted apart at step {found.step}: {found.suspect}."
        )
