"""Generate the parts of the documentation that repeat the code.

`expand` replaces lines such as `<!-- generated: options -->`, and `docs/hooks.py` calls it for mkdocs.
`python -m docs.generate docs/reference/options.md` prints one page.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import typer

import ray_ckpt
from ray_ckpt import config, telemetry
from ray_ckpt.cli import app

ROOT = Path(__file__).resolve().parent.parent
DIRECTIVE = re.compile(r"^<!-- generated: ([\w-]+)(?: (\S+))? -->$", re.MULTILINE)
SOURCES = ("ray_ckpt", "actors")  # ray_ckpt/actors is a link to the second one

OPTION_GROUPS: Mapping[str, tuple[str, ...]] = {
    "When to save": (
        "every_steps",
        "every_s",
        "overhead_budget",
        "partial_grads",
        "salvage",
        "salvage_copy",
        "max_block_s",
        "goal_timeout_s",
        "attempt_timeout_s",
    ),
    "How to capture": (
        "overlap",
        "memory",
        "static_items",
        "verify_captures",
        "replicate",
        "replica_watch",
    ),
    "Copies on other nodes": (
        "replicas",
        "parity",
        "failure_domain",
        "copies",
        "replica_nodes",
        "spare_nodes",
        "replicate_bytes_per_s",
        "repair_bytes_per_s",
        "scrub_bytes_per_s",
        "scrub_every_s",
    ),
    "The storage path": (
        "remote_every",
        "remote_every_s",
        "remote_items",
        "remote_items_every",
        "remote_items_every_s",
        "storage_options",
        "drain_bytes_per_s",
        "compress",
    ),
    "Staging disks": ("staging", "reserve_bytes", "high_watermark", "low_watermark", "agent_idle_s"),
    "Retention": (
        "keep_last",
        "keep_every",
        "keep_every_s",
        "keep_best",
        "keep_milestones",
        "total_steps",
        "keep_epochs",
        "ttl_s",
        "keep_local",
        "keep_local_at_end",
        "retire_grace_s",
    ),
    "Restore": (
        "resume",
        "init_from",
        "init_items",
        "keep",
        "anew",
        "inventory_wait_s",
        "store_wait_s",
        "prefetch",
        "restore_timeout_s",
    ),
    "The end of a run": ("finish_timeout_s", "unprotected_after", "ray_report"),
}


# Options


def options() -> str:
    """Return a table for each group of options: name, default, meaning from the field's docstring."""
    docs = field_docs(ROOT / "ray_ckpt/config.py", "RunOptions")
    defaults = {field.name: field.default for field in dataclasses.fields(config.RunOptions)}
    parts = []
    for group, names in OPTION_GROUPS.items():
        rows = [f"| `{name}` | {_default(name, defaults[name])} | {_cell(docs[name])} |" for name in names]
        parts.append("\n".join([f"### {group}\n", "| Option | Default | Meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(parts)


def field_docs(path: Path, class_name: str) -> dict[str, str]:
    """Return the docstring below each field of a class."""
    tree = ast.parse(path.read_text())
    (node,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name]
    found: dict[str, str] = {}
    for field, text in zip(node.body, node.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
        ):
            found[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return found


def _default(name: str, value: object) -> str:
    if isinstance(value, bool | None | str | tuple):
        return f"`{value!r}`"
    if name.endswith(("_bytes", "_bytes_per_s")):
        return _size(int(str(value)))
    if name.endswith("_s"):
        return _duration(float(str(value)))
    return f"{value}"


# Constants


@dataclass(frozen=True, slots=True)
class Constant:
    module: str  # path of the file, such as core/drain.py
    name: str
    value: float
    reason: str  # the comment beside it or above it


def constants() -> tuple[Constant, ...]:
    """Return the named numbers of the library, by file and in the order of the file."""
    found: list[Constant] = []
    for source in SOURCES:
        for path in sorted((ROOT / source).rglob("*.py")):
            if path.is_relative_to(ROOT / "ray_ckpt/actors") or "testing" in path.parts:
                continue
            module = path.relative_to(ROOT / source).as_posix()
            found += _constants_of(path, module if source == "ray_ckpt" else f"actors/{module}")
    return tuple(found)


def _constants_of(path: Path, module: str) -> Iterator[Constant]:
    lines = path.read_text().splitlines()
    known: dict[str, Any] = {}
    for node in ast.parse("\n".join(lines)).body:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        name = node.targets[0].id
        value = _number(node.value, known)
        if value is None:
            continue
        known[name] = value
        if re.fullmatch(r"[A-Z][A-Z0-9_]+", name):
            yield Constant(module, name, value, _comment(lines, node))


def _number(node: ast.expr, known: Mapping[str, float]) -> float | None:
    """Return the value of an expression of numbers and earlier constants, None for any other one."""
    allowed = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Name, ast.Load)
    if not all(isinstance(part, allowed) for part in ast.walk(node)):
        return None
    try:
        value = eval(compile(ast.Expression(node), "constant", "eval"), {"__builtins__": {}}, dict(known))
    except NameError:  # a constant of another module
        return None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _comment(lines: list[str], node: ast.Assign) -> str:
    """Return the comment in the lines of the statement, or else the comment lines above it."""
    inside = [
        line.partition("#")[2].strip() for line in lines[node.lineno - 1 : node.end_lineno] if "#" in line
    ]
    above: list[str] = []
    for line in reversed(lines[: node.lineno - 1]):
        if not line.startswith("#"):
            break
        above.insert(0, line.removeprefix("#").strip())
    return " ".join(inside or above)


def limits() -> str:
    """Return a table for each room: constant, value, reason. Constants without a comment are left out."""
    rooms: dict[str, list[Constant]] = {}
    for constant in constants():
        if constant.reason:
            rooms.setdefault(constant.module.partition("/")[0].removesuffix(".py"), []).append(constant)
    parts = []
    for room in sorted(rooms):
        rows = [
            f"| `{c.module.removesuffix('.py')}.{c.name}` | {_value(c)} | {_cell(c.reason)} |"
            for c in rooms[room]
        ]
        parts.append("\n".join([f"## {room}\n", "| Constant | Value | Meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(parts)


def _value(constant: Constant) -> str:
    if "BYTES" in constant.name.split("_") and constant.value >= 1024:
        per_s = " per s" if constant.name.endswith("_PER_S") else ""
        return _size(int(constant.value)) + per_s
    if constant.name.endswith("_S"):
        return _duration(constant.value)
    return f"{constant.value:,}"


def _size(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size and num_bytes % size == 0:
            return f"{num_bytes // size:,} {unit}"
    return f"{num_bytes:,} bytes"


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("h", 3600)):
        if seconds >= 2 * length and seconds % length == 0:
            return f"{seconds / length:g} {unit}"
    return f"{seconds:g} s"


# Commands


def commands() -> str:
    """Return a section for each command of `ray-ckpt`: its help, arguments and options."""
    root: Any = typer.main.get_command(app)
    parts, panel = [], None
    for name, command in root.commands.items():
        if command.rich_help_panel != panel:
            panel = command.rich_help_panel
            parts.append(f"## {panel}")
        usage = " ".join(
            [f"ray-ckpt {name}", *(_usage(p) for p in command.params if not _is_option(p)), "[OPTIONS]"]
        )
        rows = [_parameter_row(parameter) for parameter in command.params]
        table = ["| Argument or option | Default | Meaning |", "|---|---|---|", *rows] if rows else []
        parts.append("\n".join([f"### {name}\n", f"`{usage}`\n", f"{command.help.strip()}\n", *table]))
    return "\n\n".join(parts)


def _is_option(parameter: Any) -> bool:
    return bool(parameter.opts[0].startswith("-"))


def _usage(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return str(name if argument.required or name.startswith("[") else f"[{name}]")


def _parameter_row(parameter: Any) -> str:
    if not _is_option(parameter):
        return f"| `{_usage(parameter)}` |  | {_cell(parameter.help or '')} |"
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    kind = "" if parameter.is_flag else parameter.metavar or _kind(parameter)
    shown = parameter.show_default and parameter.default not in (None, False)
    default = f"`{parameter.default}`" if shown else ""
    return f"| {names}{f' {kind}' if kind else ''} | {default} | {_cell(parameter.help or '')} |"


def _kind(parameter: Any) -> str:
    kind = parameter.type_descriptor.annotation
    (kind,) = get_args(kind) or (kind,)
    return {int: "INTEGER", float: "NUMBER"}.get(kind, "TEXT")


# Metrics, names, decisions


def metrics() -> str:
    """Return the table of the metrics, as Prometheus has them."""
    rows = [
        f"| `{m.exported}` | {m.kind} | {', '.join(f'`{label}`' for label in m.labels)} | {m.text} |"
        for m in telemetry.METRICS
    ]
    return "\n".join(["| Metric | Kind | Labels besides `run` | Meaning |", "|---|---|---|---|", *rows])


def public_names(module: str) -> str:
    """Return a directive of mkdocstrings for each public name of a module, or for those in `module:A,B`."""
    module, _, chosen = module.partition(":")
    names = chosen.split(",") if chosen else public(module)
    homes = ray_ckpt._HOMES if module == "ray_ckpt" else dict.fromkeys(names, module)
    return "\n\n".join(f"### {name}\n\n::: {homes[name]}.{name}" for name in names)


def public(module: str) -> list[str]:
    """Return the names that a module exports: its `__all__`, or its public classes and functions."""
    tree = ast.parse(_file_of(module).read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [name for name in ast.literal_eval(node.value) if name != "__version__"]
    definitions = (node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef))
    return [node.name for node in definitions if not node.name.startswith("_")]


def _file_of(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def error_tree() -> str:
    """Return the tree of errors from the docstring of `ray_ckpt.errors`."""
    docstring = ast.get_docstring(ast.parse((ROOT / "ray_ckpt/errors.py").read_text())) or ""
    lines = [line for line in docstring.splitlines() if line.startswith("    ")]
    return "\n".join(["```text", *(line.removeprefix("    ") for line in lines), "```"])


def import_rules() -> str:
    """Return the layers, top to bottom, and the other contracts that import-linter checks."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [layer.replace("ray_ckpt.", "").split(" | ") for layer in contracts[0]["layers"]]
    lines = [f"{k}. {', '.join(f'`{room}`' for room in layer)}" for k, layer in enumerate(layers, 1)]
    for contract in contracts[1:]:
        sources = ", ".join(f"`{name.removeprefix('ray_ckpt.')}`" for name in contract["source_modules"])
        forbidden = ", ".join(f"`{name}`" for name in contract["forbidden_modules"])
        lines.append(f"\n**{contract['name']}**: {sources} do not import {forbidden}.")
    return "\n".join(lines)


def decisions() -> str:
    """Return the list of decisions, by number, with the first heading of each."""
    rows = []
    for path in sorted((ROOT / "ray_ckpt/design").glob("[0-9]*.md")):
        title = path.read_text().partition("\n")[0].lstrip("# ")
        rows.append(f"- [{title}]({relative(path, ROOT / 'docs/internals/decisions.md')})")
    return "\n".join(rows)


def included(path: str) -> str:
    """Return a document of the repository without its first heading."""
    return (ROOT / path).read_text().partition("\n")[2].strip()


GENERATORS: Mapping[str, Callable[..., str]] = {
    "options": options,
    "limits": limits,
    "commands": commands,
    "metrics": metrics,
    "names": public_names,
    "errors": error_tree,
    "imports": import_rules,
    "decisions": decisions,
    "include": included,
}


def expand(text: str) -> str:
    """Return a page with each directive replaced by the text that it stands for."""

    def replace(match: re.Match[str]) -> str:
        arguments = [match[2]] if match[2] else []
        return GENERATORS[match[1]](*arguments)

    return DIRECTIVE.sub(replace, text)


def relative(target: Path, page: Path) -> str:
    return Path(os.path.relpath(target, page.parent)).as_posix()


def _cell(text: str) -> str:
    return (
        " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
        if "`" not in text
        else _with_code(text)
    )


def _with_code(text: str) -> str:
    parts = " ".join(text.split()).replace("|", "\\|").split("`")
    return "`".join(part if k % 2 else part.replace("<", "&lt;") for k, part in enumerate(parts))


if __name__ == "__main__":
    print(expand(Path(sys.argv[1]).read_text()))
