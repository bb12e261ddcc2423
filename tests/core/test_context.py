"""Each field of the shared context is written by its owner only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import ray_ckpt.core
from ray_ckpt.core.context import Context

CORE = Path(ray_ckpt.core.__file__).parent
CHANGES = {"append", "appendleft", "extend", "add", "update", "clear", "pop", "popleft", "discard", "remove"}
OWNED = ("ledger", "holders", "links")  # objects that change by their own methods


def owners() -> dict[str, str]:
    rows = re.findall(r"^\s*\| (`.+?) \| `(\w+)`", Context.__doc__ or "", re.MULTILINE)
    return {name: owner for names, owner in rows for name in re.findall(r"`(\w+)`", names)}


def field_of(node: ast.AST) -> str | None:
    """Return the field of `context.FIELD`, `self._context.FIELD` or `parts.context.FIELD`, else None."""
    if isinstance(node, ast.Subscript):
        return field_of(node.value)
    if not isinstance(node, ast.Attribute):
        return None
    of = node.value
    name = of.attr if isinstance(of, ast.Attribute) else of.id if isinstance(of, ast.Name) else ""
    return node.attr if name in ("context", "_context") else None


def targets(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Tuple | ast.List):
        for element in node.elts:
            yield from targets(element)
    else:
        yield node


def written(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        found: list[ast.AST] = []
        if isinstance(node, ast.Assign | ast.Delete):
            found = [found for target in node.targets for found in targets(target)]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            found = [node.target]
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES
        ):
            found = [node.func.value]
        for target in found:
            if (name := field_of(target)) is not None and not (name in OWNED and isinstance(node, ast.Call)):
                yield name


def test_every_field_has_an_owner() -> None:
    assert owners().keys() == {field.name for field in fields(Context)}


def test_a_field_is_written_by_its_owner_only() -> None:
    owner, seen = owners(), set()
    for path in sorted(CORE.glob("*.py")):
        for name in written(ast.parse(path.read_text())):
            assert owner[name] == path.stem, f"{path.name} writes {name}, which {owner[name]} owns"
            seen.add(name)
    assert {"plan", "now_s", "save_signals", "draining"} <= seen


def test_the_check_sees_what_another_part_writes() -> None:
    source = "context.plan = 1\nself._context.now_s, x = 1, 2\nself._context.save_signals.append(3)\n"
    assert list(written(ast.parse(source))) == ["plan", "now_s", "save_signals"]
