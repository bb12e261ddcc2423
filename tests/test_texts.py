"""Texts for people: sizes and tiers in words, and no Python in log lines."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ray_ckpt.texts import TIER_TEXT, size_text, tiers_text
from tests.support.code_blocks import ROOT

LOGGED = ("debug", "info", "warning", "error", "exception", "Warn", "warn_once")
CONTAINERS = ("dict", "set", "list", "tuple", "sorted", "frozenset", "repr", "vars", "asdict")


def test_sizes_and_tiers_are_words() -> None:
    assert [size_text(n) for n in (0, 999, 27_866, 4e9)] == ["0 B", "999 B", "27.9 kB", "4.0 GB"]
    assert tiers_text({"peer": 5e6, "local": 27_866, "memory": 0}) == (
        "27.9 kB from this node's disk, 5.0 MB from other nodes"
    )
    assert tiers_text({}) == "nothing" and tiers_text({"tape": 1}) == "1 B from tape"
    assert not TIER_TEXT.keys() - {"memory", "local", "peer", "remote"}


def logged() -> Iterator[tuple[str, ast.Call]]:
    """Yield each call that logs or warns."""
    for folder in ("ray_ckpt", "actors", "jobs"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    called = getattr(node.func, "attr", getattr(node.func, "id", ""))
                    if called in LOGGED:
                        yield f"{path}:{node.lineno}", node


def test_no_line_of_a_log_shows_a_container() -> None:
    """`%s` of a dict is Python, not a sentence."""
    calls = [*logged()]
    assert len(calls) > 50
    for where, call in calls:
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        parts = [v.value for a in arguments for v in ast.walk(a) if isinstance(v, ast.FormattedValue)]
        shown = [*arguments, *parts]
        made = [a.func.id for a in shown if isinstance(a, ast.Call) and isinstance(a.func, ast.Name)]
        assert not {*made} & {*CONTAINERS}, f"{where}: {ast.unparse(call)}"
        assert not any(isinstance(a, ast.Dict | ast.Set | ast.List | ast.Tuple) for a in shown), where
