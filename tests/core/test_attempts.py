"""The life of an attempt: every pair of state and event, and the diagram of the protocol."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import get_args

import pytest

import ray_ckpt.core
from ray_ckpt.core.attempts import TRANSITIONS, Attempt, AttemptEvent, AttemptState
from ray_ckpt.format.names import make_attempt

PROTOCOL = (Path(ray_ckpt.core.__file__).parent / "PROTOCOL.md").read_text()


def attempt(state: AttemptState) -> Attempt:
    id_ = make_attempt(run_uid="0" * 32, epoch=1, session=1, step=10, attempt=0)
    return Attempt(id=id_, nodes=(), started_s=0.0, state=state, story=["stored_by_all -> copying"])


@pytest.mark.parametrize(("state", "event"), [*product(get_args(AttemptState), get_args(AttemptEvent))])
def test_an_unlisted_pair_raises_with_the_story_and_changes_nothing(
    state: AttemptState, event: AttemptEvent
) -> None:
    found = attempt(state)
    if event in TRANSITIONS[state]:
        found.change(event)
        assert found.state == TRANSITIONS[state][event]
        assert len(found.story) == (1 if found.state == state else 2)
        return
    with pytest.raises(RuntimeError, match=f"step 10 .* is {state} and cannot be {event}.*-> copying"):
        found.change(event)
    assert found.state == state and len(found.story) == 1


def test_every_state_can_be_reached_and_left_unless_it_is_an_end() -> None:
    reached = {"writing"}
    for _ in TRANSITIONS:
        reached |= {new for state in reached for new in TRANSITIONS[state].values()}  # type: ignore[index]
    assert reached == set(get_args(AttemptState)) == TRANSITIONS.keys()
    assert [state for state, events in TRANSITIONS.items() if not events] == ["committed", "dropped"]


def test_the_protocol_draws_the_table() -> None:
    diagram = PROTOCOL.split("stateDiagram-v2\n")[1].split("```")[0]
    drawn = set(re.findall(r"^ *(\w+) --> (\w+): (\w+)$", diagram, re.MULTILINE))
    assert drawn == {
        (state, new, event) for state, events in TRANSITIONS.items() for event, new in events.items()
    }
