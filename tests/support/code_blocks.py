"""The code blocks of the documents, and how to run one of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import typer

from ray_ckpt.cli import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "ray_ckpt/format/FORMAT.md",
    "ray_ckpt/core/PROTOCOL.md",
    *(
        str(path.relative_to(ROOT))
        for folder in ("docs", "jobs", "notebooks", "ray_ckpt/design")
        for path in sorted((ROOT / folder).rglob("*.md"))
    ),
)
ON_A_CLUSTER: Mapping[str, str] = {
    "up": "starts the service",
    "down": "ends it",
    "status": "is the output of a live service",
    "top": "is the repeated output of a live service",
    "pin": "is recorded by the service that has the run",
    "unpin": "is recorded by the service that has the run",
}
"""Commands whose output needs a cluster: tests/cluster/test_service_commands.py runs them."""
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    document: str
    line: int  # of its first line of code, from 1
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


@cache
def blocks() -> tuple[Block, ...]:
    """Return all blocks of all documents, in their order."""
    found = []
    for document in DOCUMENTS:
        text = (ROOT / document).read_text()
        matches = list(_BLOCK.finditer(text))
        assert 2 * len(matches) == len(re.findall(r"^ *```", text, re.MULTILINE)), f"a fence of {document}"
        for match in matches:
            indent, language, code = match.groups()
            line = text.count("\n", 0, match.start(3)) + 1
            unindented = "".join(part.removeprefix(indent) for part in code.splitlines(keepends=True))
            found.append(Block(document, line, language, unindented))
    return tuple(found)


def find(document: str, anchor: str) -> Block:
    """Return the one block of a document that has this text in it."""
    found = [block for block in blocks() if block.document == document and anchor in block.text]
    assert len(found) == 1, f"{len(found)} blocks of {document} have {anchor!r} in them"
    return found[0]


def run_python(block: Block, given: Mapping[str, Any], replace: Mapping[str, str]) -> dict[str, Any]:
    """Run a block with the names that it leaves to its reader, and return all names after it.

    `replace` puts places of this machine, and small numbers, where the text has others. A given or replaced
    name that does not occur is an error, so that none outlives its block.
    """
    text = block.text
    for old, new in replace.items():
        assert old in text, f"{block} does not have {old!r} any more"
        text = text.replace(old, new)
    code = ast.parse(text)
    used = {node.id for node in ast.walk(code) if isinstance(node, ast.Name)}
    assert given.keys() <= used, f"{block} does not use {given.keys() - used}"
    names = {"__name__": "code_block", **given}
    ast.increment_lineno(code, block.line - 1)
    exec(compile(code, str(ROOT / block.document), "exec"), names)
    return names


def our_commands() -> Mapping[str, Any]:
    """Return the commands of `ray-ckpt` by name, as its parser has them."""
    root: Any = typer.main.get_command(app)
    commands: Mapping[str, Any] = root.commands
    return commands
