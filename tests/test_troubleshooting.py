"""The page of troubleshooting has every error, warning of the log and alert, and no other."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ray_ckpt import errors
from tests.support.code_blocks import ROOT

OPERATIONS = ROOT / "docs/operations"
RUNBOOK, SERVICE, METRICS = (OPERATIONS / f"{name}.md" for name in ("runbook", "service", "metrics"))
PAGE = OPERATIONS / "troubleshooting.md"
ALERTS = ROOT / "jobs/dashboards"
GAP = "\0"  # what a message leaves open
SEPARATOR = "\1"  # of two strings
LOGGED = {"warning", "error", "exception"}  # methods of a logger
MIN_CHARS = 12  # of fixed text; a pattern such as "%s: %s" has too few


def _sources() -> Iterator[Path]:
    for path in [*(ROOT / "ray_ckpt").rglob("*.py"), *(ROOT / "actors").rglob("*.py")]:
        parts = path.relative_to(ROOT).parts  # the checkout itself may have any name
        if "testing" not in parts and parts[:2] != ("ray_ckpt", "actors"):
            yield path


def _text(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str() as value):
            return re.sub(r"%[-.\d]*[a-z]", GAP, value)
        case ast.JoinedStr(values=values):
            return "".join(_text(value) for value in values)
        case ast.BinOp(left=left, right=right):
            return _text(left) + _text(right)
    return GAP


@cache
def _nodes() -> tuple[ast.AST, ...]:
    """Return the strings and calls of the sources; all nodes would take more memory than time allows."""
    kinds = ast.Constant | ast.JoinedStr | ast.BinOp | ast.Call
    found = (node for path in _sources() for node in ast.walk(ast.parse(path.read_text())))
    return tuple(node for node in found if isinstance(node, kinds))


@cache
def _strings() -> frozenset[str]:
    kinds = ast.Constant | ast.JoinedStr | ast.BinOp
    return frozenset(_text(node) for node in _nodes() if isinstance(node, kinds))


@cache
def _all_strings() -> str:
    """Return the strings in one text: a search in it takes a hundredth of one in each string."""
    return SEPARATOR + SEPARATOR.join(_strings()) + SEPARATOR


def _warnings() -> Iterator[str]:
    """Return the messages that the library or the coordinator logs as a warning or worse."""
    for node in _nodes():
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, owner = node.func.attr, node.func.value
        is_logged = name in LOGGED and isinstance(owner, ast.Name) and owner.id == "log"
        if is_logged or name == "warn_once":
            yield _text(node.args[0])
        elif name == "Warn":
            yield from (_text(keyword.value) for keyword in node.keywords if keyword.arg == "text")


def _fits(line: str, message: str) -> bool:
    """Return whether a line of the page, with its `...`, is this message or a part of it."""
    at = 0
    for part in _parts(line):
        at = message.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


@cache
def _parts(line: str) -> list[str]:
    return [part.strip() for part in line.split("...")]


def _is_printed(line: str) -> bool:
    """Return whether a string of the library is this line."""
    longest, text = max(_parts(line), key=len), _all_strings()
    at = text.find(longest)
    while at >= 0:
        end = text.index(SEPARATOR, at)
        if _fits(line, text[text.rindex(SEPARATOR, 0, at) + 1 : end]):
            return True
        at = text.find(longest, end)
    return False


def _lines() -> list[str]:
    """Return the lines of logs in the first cells of the tables."""
    sections = PAGE.read_text().split("\n## Lines of ")[1:]
    return [
        line
        for section in sections
        for row in re.findall(r"^\| (`.*?) \|", section.split("\n## ")[0], re.MULTILINE)
        for line in re.findall(r"`([^`]+)`", row)
    ]


def test_every_error_is_there() -> None:
    table = PAGE.read_text().split("\n## Errors\n")[1].split("\n## ")[0]
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, errors.CheckpointError):
            assert f"`{name}`" in table, name


def test_every_line_of_a_log_that_is_there_is_one_of_the_library() -> None:
    lines = _lines()
    assert len(lines) > 50
    assert not [line for line in lines if not _is_printed(line)]


def test_what_the_runbook_expects_to_be_printed_is_what_is_printed() -> None:
    text = RUNBOOK.read_text()
    expected = {
        phrase
        for phrase in re.findall(r"`([^`\n]+)`", text)
        if "..." in phrase and " " in phrase and not re.search(r"[<(]\w|=", phrase)
    }
    expected |= set(re.findall(r"Expect: `([^`]+)`", RUNBOOK.read_text() + SERVICE.read_text()))
    assert len(expected) > 10
    assert not {phrase for phrase in expected if not _is_printed(phrase)}


def test_constants_and_variables_that_both_pages_name_are_there() -> None:
    recipes = (ROOT / "jobs" / "recipes").iterdir()
    words = {word for path in [*_sources(), *recipes] for word in re.findall(r"\w+", path.read_text())}
    for page in OPERATIONS.glob("*.md"):
        for name in set(re.findall(r"`((?!AWS_|RAY_G)[A-Z]+_[A-Z_]+)`", page.read_text())):
            assert name in words, (page.name, name)


def test_every_warning_of_the_library_is_there() -> None:
    lines = _lines()
    missing = {
        message.replace(GAP, "...")
        for message in _warnings()
        if len(re.sub(rf"[{GAP}\W]", "", message)) >= MIN_CHARS
        and not any(_fits(line, message) for line in lines)
    }
    assert not missing, "a row of docs/operations/troubleshooting.md for each"


def test_every_alert_is_there() -> None:
    alerts = {
        name
        for path in ALERTS.glob("*.y*ml")
        for name in re.findall(r"^\s*-?\s*alert: *\"?(\w+)", path.read_text(), re.MULTILINE)
    }
    named = set(re.findall(r"`(RayCkpt\w+)`", PAGE.read_text()))
    assert alerts and named == alerts


def test_every_entry_of_the_runbook_has_its_steps_and_its_end() -> None:
    runbook = RUNBOOK.read_text()
    entries = runbook.split("\n## ")[1:]
    assert len(entries) > 20
    for entry in entries:
        assert "\n**Do.**" in entry and "\n**Over when**" in entry, entry.splitlines()[0]


def _loggers() -> dict[str, bool]:
    """Return each logger of the library, and whether it logs warnings or worse."""
    found: dict[str, bool] = {}
    for path in _sources():
        source = path.read_text()
        for name in re.findall(r'getLogger\("([\w.]+)"\)', source):
            warns = re.search(rf"\blog\.({'|'.join(LOGGED)})\(", source) is not None
            found[name] = found.get(name, False) or warns
    return found


def test_every_logger_is_in_the_runbook_and_those_that_warn_are_on_the_page() -> None:
    loggers = _loggers()
    table = METRICS.read_text().split("\n## Logs\n")[1]
    assert set(re.findall(r"^\| `([\w.]+)` \|", table, re.MULTILINE)) == loggers.keys()
    heads = " ".join(re.findall(r"^Loggers? .*", PAGE.read_text(), re.MULTILINE))
    assert {name for name, warns in loggers.items() if warns} <= set(re.findall(r"`([\w.]+)`", heads))
