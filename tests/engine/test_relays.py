"""Orders that go through relays, and messages that are sent again when a relay does not answer."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from ray_ckpt.config import RELAY_NODES, relay_nodes
from ray_ckpt.core import node_messages as n
from ray_ckpt.engine.ports import Call, UpdatePeer
from ray_ckpt.engine.relays import RELAY_AGAIN_S, Batch, OrderRelays, ReportRoute, relay_size
from ray_ckpt.errors import ConfigError

NODES = tuple("abcdefgh")


RELEASED = n.RunReleased(session_key=(1, 1), is_finished=True, epoch=1)


def calls_to(nodes: Iterable[str]) -> list[Call]:
    return [Call(node=node, order=RELEASED) for node in nodes]


def divided(relays: OrderRelays, calls: Iterable[Call], now_s: float = 0.0) -> list[str]:
    """Return the nodes of each call and batch; the relay of a batch is in brackets."""
    return [
        f"[{part.relay}]" + "".join(call.node for call in part.calls.values())
        if isinstance(part, Batch)
        else part.node
        for part in relays.divide(calls, set(NODES), now_s)
    ]


def test_few_orders_need_no_relay() -> None:
    assert divided(OrderRelays(3), calls_to("abc")) == ["a", "b", "c"]
    assert divided(OrderRelays(0), calls_to(NODES)) == list(NODES)


def test_the_first_addressee_passes_orders_on_to_the_next() -> None:
    assert divided(OrderRelays(3), calls_to("hgfedcba")) == ["[a]abc", "[d]def", "[g]gh"]
    assert divided(OrderRelays(3), calls_to("abcd")) == ["[a]abc", "d"], "one order alone needs no relay"


def test_a_node_without_a_known_agent_is_called_without_a_relay() -> None:
    assert divided(OrderRelays(2), calls_to(["x", *"abc"])) == ["x", "[a]ab", "c"]


def test_the_orders_of_one_node_stay_in_order() -> None:
    calls = calls_to("abc")
    calls.insert(1, Call(node="a", order=UpdatePeer(node="b")))
    (batch, single) = OrderRelays(2).divide(calls, set(NODES), 0.0)
    assert isinstance(batch, Batch) and isinstance(single, Call)
    assert [type(call.order) for call in batch.calls.values() if call.node == "a"] == [
        n.RunReleased,
        UpdatePeer,
    ]


def test_a_large_cluster_has_as_many_relays_as_each_has_nodes() -> None:
    sizes = {num_nodes: relay_size(64, num_nodes) for num_nodes in (1, 65, 4096, 4224, 4225, 10_000)}
    assert sizes == {1: 64, 65: 64, 4096: 64, 4224: 64, 4225: 65, 10_000: 100}
    assert relay_size(0, 10_000) == 0


def test_a_relay_that_failed_is_avoided_for_a_while() -> None:
    relays = OrderRelays(2)
    relays.failed("a", now_s=10.0)
    assert divided(relays, calls_to("abc"), now_s=11.0) == ["[b]ab", "c"]
    relays.failed("b", now_s=10.0)
    assert divided(relays, calls_to("abc"), now_s=11.0) == ["a", "b", "c"]
    assert divided(relays, calls_to("abc"), now_s=10.0 + RELAY_AGAIN_S) == ["[a]ab", "c"]


def test_each_call_of_a_batch_ends_once() -> None:
    (batch, _) = OrderRelays(2).divide(calls_to("abc"), set(NODES), 0.0)
    assert isinstance(batch, Batch)
    assert (first := batch.answered(0)) is not None and first.node == "a"
    assert batch.answered(0) is None
    assert [call.node for call in batch.give_up()] == ["b"]
    assert batch.answered(1) is None, "it was sent again, and the second answer counts"


def test_reports_go_without_the_relay_while_it_does_not_answer() -> None:
    route = ReportRoute()
    assert route.via(0.0) == ""
    route.use("a")
    route.failed(5.0)
    assert (route.via(6.0), route.via(5.0 + RELAY_AGAIN_S)) == ("", "a")
    route.failed(100.0)
    route.use("b")
    assert route.via(101.0) == "b", "a new session has a new relay"


def test_the_number_of_nodes_of_a_relay_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert relay_nodes() == RELAY_NODES
    for text, number in (("0", 0), ("2", 2), ("999", 999)):
        monkeypatch.setenv("RAY_CKPT_RELAY_NODES", text)
        assert relay_nodes() == number
    for text in ("1", "-2", "1000", "many", ""):
        monkeypatch.setenv("RAY_CKPT_RELAY_NODES", text)
        with pytest.raises(ConfigError, match="RAY_CKPT_RELAY_NODES"):
            relay_nodes()
