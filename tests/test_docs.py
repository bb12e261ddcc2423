"""The documents name what is there: links, options, tests, constants and their values."""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ray_ckpt
from docs import generate
from ray_ckpt import cli, errors
from ray_ckpt.actors import names
from ray_ckpt.capture.load import RestoreInfo
from ray_ckpt.cli import app, options
from ray_ckpt.config import RunOptions
from ray_ckpt.interop.packages import KNOWN
from ray_ckpt.telemetry import METRICS
from ray_ckpt.train.check import ResumeCheck
from ray_ckpt.trainer.outcomes import SaveStats
from ray_ckpt.types import RestoredPart
from tests.support.code_blocks import DOCUMENTS, our_commands

ROOT = Path(__file__).parent.parent
README, CHANGELOG, PROTOCOL = (
    ROOT / name for name in ("README.md", "CHANGELOG.md", "ray_ckpt/core/PROTOCOL.md")
)
PAGES = sorted((ROOT / "docs").rglob("*.md"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([\w-]+))?\)")


def _source(*folders: str) -> str:
    return "\n".join(path.read_text() for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))


@cache
def _text(path: Path) -> str:
    """Return a document as its readers see it: with its generated parts, without code."""
    return re.sub(
        r"^( *)```.*?^\1```$", "", generate.expand(path.read_text()), flags=re.MULTILINE | re.DOTALL
    )


def _page(name: str) -> str:
    return _text(ROOT / "docs" / name)


def _anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them, and those that it sets itself."""
    headings = re.findall(r"^#+ (.+)$", _text(path), re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a id="([\w-]+)">', _text(path)))


# Links


@pytest.mark.parametrize("document", [*DOCUMENTS, "CHANGELOG.md"])
def test_links_lead_to_a_file_and_to_a_heading_of_it(document: str) -> None:
    path = ROOT / document
    written = re.sub(r"^( *)```.*?^\1```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target, anchor in LINK.findall(written):
        if "://" in target:
            continue
        there = path.parent / target if target else path
        assert there.exists(), target
        if anchor:
            assert there.suffix == ".md" and anchor in _anchors(there), (target, anchor)


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page() -> None:
    written = re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text())
    listed = re.findall(r"- ([\w/-]+\.md)$", written, re.MULTILINE)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in PAGES}
    outside = {"index.md": README, "changelog.md": CHANGELOG, "contributing.md": ROOT / "CONTRIBUTING.md"}
    assert len(set(listed)) == len(listed) and all(path.exists() for path in outside.values())
    assert set(listed) == pages | outside.keys()


def test_the_readme_and_the_architecture_are_short() -> None:
    assert len(README.read_text().splitlines()) <= 150
    assert len((ROOT / "docs/internals/architecture.md").read_text().splitlines()) <= 200
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) <= 200


# What is generated


def test_the_page_of_options_has_every_option_with_its_default() -> None:
    rows = dict(
        re.findall(r"^\| `(\w+)` \| (.*?) \| .{20,} \|$", _page("reference/options.md"), re.MULTILINE)
    )
    assert rows.keys() == {option.name for option in fields(RunOptions)}
    defaults = RunOptions()
    numbers = {name: text for name, text in rows.items() if not text.startswith("`")}
    assert len(numbers) > 15
    for name, text in numbers.items():
        number, _, unit = text.partition(" ")
        size = {"": 1, "s": 1, "h": 3600, "days": 86400, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
        assert float(number.replace(",", "")) * size == getattr(defaults, name), name
    for name in rows.keys() - numbers.keys():
        assert rows[name] == f"`{getattr(defaults, name)!r}`", name


def test_every_option_is_in_one_group() -> None:
    grouped = [name for group in generate.OPTION_GROUPS.values() for name in group]
    assert sorted(grouped) == sorted(option.name for option in fields(RunOptions))


def test_the_page_of_commands_has_every_command_with_every_option() -> None:
    sections = re.split(
        r"^### ", _page("reference/commands.md").split("\n## Exit codes")[0], flags=re.MULTILINE
    )[1:]
    by_name = {section.splitlines()[0]: section for section in sections}
    assert by_name.keys() == our_commands().keys()
    for name, command in our_commands().items():
        assert "\n".join(command.help.strip().splitlines()[:1]) in by_name[name]
        for parameter in command.params:
            for option in (*parameter.opts, *parameter.secondary_opts):
                if option.startswith("-"):
                    assert re.search(rf"^\| [^|]*`{option}`.*\| .{{5,}} \|$", by_name[name], re.MULTILINE), (
                        name,
                        option,
                    )


def test_the_page_of_python_has_every_public_name() -> None:
    directives = re.findall(r"^::: ([\w.]+)$", _page("reference/python.md"), re.MULTILINE)
    named = {directive.rpartition(".")[2] for directive in directives}
    public = set(ray_ckpt.__all__) - {"__version__"}
    assert public | {"CheckpointCallback", "check_storage_path", "open_checkpoint"} <= named
    for directive in directives:
        module, _, name = directive.rpartition(".")
        assert hasattr(import_module(module), name), directive
    tree = generate.expand((ROOT / "docs/reference/python.md").read_text()).split("\n## Errors\n")[1]
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, errors.CheckpointError):
            assert re.search(rf"\b{name}\b", tree), name


def test_every_field_of_a_result_has_a_docstring_or_is_on_the_page() -> None:
    page = _page("reference/python.md").split("\n## Results\n")[1]
    for kind in (SaveStats, RestoredPart):
        unnamed = [
            field.name for field in fields(kind) if f"`{field.name}`" not in page and field.name != "file"
        ]
        assert not unnamed, kind
    shown = set(re.findall(r"^::: [\w.]+\.(\w+)$", _page("reference/python.md"), re.MULTILINE))
    assert {RestoreInfo.__name__, ResumeCheck.__name__} <= shown  # with their fields


def _constant(module: str, name: str) -> float:
    """Return a constant; if its module needs a framework that is not installed here, by its expression."""
    package = "ray_ckpt." + module.replace("/", ".").removesuffix(".__init__")
    try:
        found: float = getattr(import_module(package), name)
    except ModuleNotFoundError as error:
        assert error.name in KNOWN, error
        tree = ast.parse((ROOT / "ray_ckpt" / f"{module}.py").read_text())
        values = {n.targets[0].id: n.value for n in tree.body if isinstance(n, ast.Assign)}  # type: ignore[attr-defined]
        found = eval(compile(ast.Expression(values[name]), module, "eval"), {"__builtins__": {}})
    return found


def test_the_page_of_limits_has_the_constants_of_the_code() -> None:
    rows = re.findall(
        r"^\| `([\w/]+)\.([A-Z0-9_]+)` \| (.+?) \| (.+) \|$", _page("reference/limits.md"), re.MULTILINE
    )
    assert len(rows) > 300
    listed = {(module, name) for module, name, _, _ in rows}
    assert len(listed) == len(rows)
    for module, name, shown, reason in rows:
        value = _constant(module, name)
        number, _, unit = shown.partition(" ")
        size = {
            "": 1,
            "s": 1,
            "h": 3600,
            "days": 86400,
            "bytes": 1,
            "KiB": 2**10,
            "MiB": 2**20,
            "GiB": 2**30,
        }[unit.removesuffix(" per s")]
        assert float(number.replace(",", "")) * size == pytest.approx(value, rel=1e-5), (module, name, shown)
        assert len(reason) > 3, (module, name)
    bounds = re.compile(
        r"^(MAX_[A-Z0-9_]+|[A-Z0-9_]+_(?:TRIES|THREADS|WAIT_S|TIMEOUT_S)) = [\d(]", re.MULTILINE
    )
    for path in [*(ROOT / "ray_ckpt").rglob("*.py"), *(ROOT / "actors").rglob("*.py")]:
        if path.is_relative_to(ROOT / "ray_ckpt/actors") or "testing" in path.parts:
            continue
        top = ROOT / "ray_ckpt" if path.is_relative_to(ROOT / "ray_ckpt") else ROOT
        module = path.relative_to(top).with_suffix("").as_posix()
        for name in bounds.findall(path.read_text()):
            assert (module, name) in listed, f"{module}.{name}: a comment with its reason"


def test_the_page_of_metrics_has_every_metric() -> None:
    page = _page("operations/metrics.md")
    assert len(METRICS) > 20
    assert all(f"| `{metric.exported}` | {metric.kind} |" in page for metric in METRICS)


def test_the_decisions_are_listed_by_number() -> None:
    notes = sorted((ROOT / "ray_ckpt/design").glob("*.md"))
    titles = re.findall(r"^- \[(\d{4})\. .+\]\(.+/(\d{4})-", _page("internals/decisions.md"), re.MULTILINE)
    assert titles == [(path.name[:4], path.name[:4]) for path in notes]
    assert [int(number) for number, _ in titles] == list(range(1, len(notes) + 1))


# What is written


def test_the_protocol_names_tests_that_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", PROTOCOL.read_text()))
    there = set(re.findall(r"def (test_\w+)", _source("tests")))
    assert len(named) > 50
    assert named <= there, named - there


def test_a_wheel_has_every_package() -> None:
    """Folders without `__init__.py` are not found."""
    assert PYPROJECT["tool"]["setuptools"]["packages"]["find"] == {"include": ["ray_ckpt*"]}
    folders = {path.parent for top in ("ray_ckpt", "actors") for path in (ROOT / top).rglob("*.py")}
    assert len(folders) > 15
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_the_page_of_the_service_has_the_actors_and_the_protocol_by_their_names() -> None:
    text = (ROOT / "docs/operations/service.md").read_text()
    assert f"| `{names.COORDINATOR}` |" in text and f"| `{names.agent_name('<node id>')}` |" in text
    versions = re.findall(
        r"(?:coordinator-v|agent-v|Another `PROTOCOL_VERSION` than )(\d+)",
        text + (ROOT / "docs/operations/runbook.md").read_text(),
    )
    assert len(versions) == 3 and set(versions) == {str(names.PROTOCOL_VERSION)}


def test_the_readme_lists_what_an_installation_needs_and_has() -> None:
    project = PYPROJECT["project"]
    text = README.read_text().split("\n## Install\n")[1].split("\n## ")[0]
    pinned = [needed for needed in project["dependencies"] if re.match(r"(ray|torch)\b", needed)]
    assert set(re.findall(r"`((?:ray|torch)[^`]*>=[^`]*)`", text)) == set(pinned)
    assert f"Python {project['requires-python'].removeprefix('>=')} or newer" in text
    assert f"ray_ckpt-{project['version']}-py3-none-any.whl" in text
    extras = project["optional-dependencies"]
    optional = {re.split(r"\W", needed)[0] for needs in extras.values() for needed in needs}
    required = {re.split(r"\W", needed)[0] for needed in project["dependencies"]}
    assert {"matplotlib", "duckdb", "s3fs"} <= optional - required
    assert all(name in text for name in ("matplotlib", "duckdb", "s3fs"))
    assert all(re.search(rf"[\[`]{extra}[\]`]", text) for extra in extras)
    assert set(re.findall(r"\.\[(\w+)\]", text)) <= extras.keys()
    left = re.findall(r"`(jobs\.\w+)`", text)
    assert left and not [name for name in left if not any((ROOT / "jobs").glob(f"{name.split('.')[1]}*"))]


def test_all_texts_have_the_same_exit_codes() -> None:
    codes = {0, *(value for name, value in vars(options).items() if name.startswith("EXIT_"))}
    table = _page("reference/commands.md").split("\n## Exit codes\n")[1]
    rows = {int(code): text for code, text in re.findall(r"^\| (\d+) \| (.+) \|$", table, re.MULTILINE)}
    assert rows.keys() == codes
    page = _page("operations/troubleshooting.md").split("\n## Errors\n")[1].split("\n## ")[0].splitlines()[-1]
    help_text = " ".join(CliRunner().invoke(app, ["--help"], terminal_width=200).stdout.split())
    for text in (rows[1], page, help_text.split("Exit codes: ")[1]):
        assert "damage" in text and "check" in text and "refus" in text, text
    assert all(f"`{command}`" in rows[1] for command in ("rollback", "pin", "unpin", "down"))
    assert re.findall(r"\b\d+\b", help_text.split("Exit codes: ")[1]) == [str(code) for code in sorted(codes)]
    assert "(../reference/commands.md#exit-codes)" in page


def test_the_page_of_commands_has_every_command_that_writes_to_a_storage_path() -> None:
    writes = re.compile(
        r"^(?:from|import) .*\b(open_log|open_or_begin|RunDrills|check_store)\b", re.MULTILINE
    )
    modules = {
        path.stem: path.read_text().replace("    from", "from") for path in Path(cli.__path__[0]).glob("*.py")
    }
    found = {name for name, source in modules.items() if writes.search(source)}
    writing = {name.removesuffix("s") for name in found}  # the command of imports.py is import
    sentence = _page("reference/commands.md").split("read the storage path only, except ")[1].split("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", sentence)) - {"drilled", "unpin"} == writing


def test_a_first_version_that_is_not_released_changes_nothing_that_somebody_has() -> None:
    first, *later = re.split(r"^## ", CHANGELOG.read_text(), flags=re.MULTILINE)[:0:-1]
    assert "First version." in first
    if first.startswith("0.1.0 (unreleased)"):
        assert not later
        assert not re.findall(
            r"^(?:Fixed|Changed|Removed|If you used)\b.*|\bare gone\b|\bis called\b", first, re.M
        )


def test_the_tour_shows_or_lists_every_command() -> None:
    shown, listed = (ROOT / "docs/tour.md").read_text().split("\n## With a running service\n")
    with_output = set(re.findall(r"^## (\w+)$", shown, re.MULTILINE))
    only_listed = set(re.findall(r"^ray-ckpt (\w+)", listed, re.MULTILINE)) - with_output
    assert with_output | only_listed == set(our_commands())


def test_the_architecture_has_every_room_and_the_rules_of_imports() -> None:
    text = _page("internals/architecture.md")
    rules = PYPROJECT["tool"]["importlinter"]["contracts"]
    layers = [layer.replace("ray_ckpt.", "").split(" | ") for layer in rules[0]["layers"]]
    listed = re.findall(r"^\d+\. (.+)$", text, re.MULTILINE)
    assert [re.findall(r"`(\w+)`", line) for line in listed] == layers
    assert all(f"**{rule['name']}**" in text for rule in rules[1:])
    rows = {
        name
        for row in re.findall(r"^\| (`.+?) \|", text, re.MULTILINE)
        for name in re.findall(r"`(\w+)/?`", row)
    }
    assert {room for layer in layers for room in layer} <= rows
