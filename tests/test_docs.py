"""The documents name what is there: links, options, tests, constants and their values."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ray_ckpt
from ray_ckpt import cli
from ray_ckpt.actors import names
from ray_ckpt.capture.load import RestoreInfo
from ray_ckpt.catalog import catalog
from ray_ckpt.cli import app, options
from ray_ckpt.config import RunOptions
from ray_ckpt.train.check import ResumeCheck
from ray_ckpt.trainer.outcomes import SaveStats
from ray_ckpt.types import RestoredPart
from tests.support.code_blocks import our_commands

ROOT = Path(__file__).parent.parent
README, ARCHITECTURE, PROTOCOL, RUNBOOK, TROUBLESHOOTING = (
    ROOT / name
    for name in (
        "README.md",
        "ARCHITECTURE.md",
        "ray_ckpt/core/PROTOCOL.md",
        "actors/README.md",
        "actors/TROUBLESHOOTING.md",
    )
)
CHANGELOG = ROOT / "CHANGELOG.md"
DOCUMENTS = [
    README,
    ARCHITECTURE,
    PROTOCOL,
    CHANGELOG,
    RUNBOOK,
    TROUBLESHOOTING,
    ROOT / "docs/tour.md",
    ROOT / "ray_ckpt/format/FORMAT.md",
    *sorted((ROOT / "ray_ckpt/design").glob("*.md")),
]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
UNITS = {"": 1, "MiB": 2**20, "KiB": 2**10, "h": 3600}  # others are as in the code


def _source(*folders: str) -> str:
    return "\n".join(path.read_text() for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", document.read_text())
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert not missing


def test_the_readme_has_every_option_with_its_default() -> None:
    text = README.read_text()
    for option in fields(RunOptions):
        assert re.search(rf"^\|.*`{option.name}`.*\|", text, re.MULTILINE), option.name
    rows = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", text, re.MULTILINE))
    defaults = RunOptions()
    assert len(rows) > 10
    assert {name: float(value) for name, value in rows.items()} == {n: getattr(defaults, n) for n in rows}


def test_the_protocol_names_tests_that_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", PROTOCOL.read_text()))
    there = set(re.findall(r"def (test_\w+)", _source("tests")))
    assert len(named) > 50
    assert named <= there, named - there


def test_the_bounds_are_those_of_the_code() -> None:
    bounds = ARCHITECTURE.read_text().split("## Bounds\n")[1].split("\n## ")[0]
    source = _source("ray_ckpt", "actors")
    named = re.findall(r"`(?:[\w/]+\.)?([A-Z][A-Z_]+_[A-Z]+)`(?: =)? ([\d.,]*\d)(?: (\w+))?", bounds)
    assert len(named) > 40
    for name, value, unit in named:
        found = re.findall(rf"^{name} = ([\d._*< ]+)", source, re.MULTILINE)
        wanted = float(value.replace(",", "")) * UNITS.get(unit, 1)
        assert wanted in {eval(text) for text in found}, (name, value, unit, found)


def test_a_wheel_has_every_package() -> None:
    """Folders without `__init__.py` are not found."""
    assert PYPROJECT["tool"]["setuptools"]["packages"]["find"] == {"include": ["ray_ckpt*"]}
    folders = {path.parent for top in ("ray_ckpt", "actors") for path in (ROOT / top).rglob("*.py")}
    assert len(folders) > 15
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_the_runbook_has_the_actors_and_the_protocol_by_their_names() -> None:
    text = RUNBOOK.read_text()
    assert f"| `{names.COORDINATOR}` |" in text and f"| `{names.agent_name('<node id>')}` |" in text
    versions = re.findall(r"(?:coordinator-v|agent-v|Another `PROTOCOL_VERSION` than )(\d+)", text)
    assert len(versions) == 3 and set(versions) == {str(names.PROTOCOL_VERSION)}


def test_the_readme_says_what_an_installation_needs_and_has() -> None:
    project = PYPROJECT["project"]
    text = README.read_text().split("\n## Install\n")[1].split("\n## ")[0]
    pinned = [needed for needed in project["dependencies"] if re.match(r"(ray|torch)\b", needed)]
    assert set(re.findall(r"`((?:ray|torch)[^`]*>=[^`]*)`", text)) == set(pinned)
    assert f"Python {project['requires-python'].removeprefix('>=')} or newer" in text
    assert f"ray_ckpt-{project['version']}-py3-none-any.whl" in text
    for named, extra in (("matplotlib", "plot"), ("duckdb", "dev"), ("s3fs", "fsspec")):
        needing = [needed for needed in project["optional-dependencies"][extra] if needed.startswith(named)]
        assert (
            named in text and needing and not any(need.startswith(named) for need in project["dependencies"])
        )
    assert all(re.search(rf"[\[`]{extra}[\]`]", text) for extra in project["optional-dependencies"])
    left = re.findall(r"`(jobs\.\w+)`", text)
    assert left and not any(
        package.startswith("jobs") for package in PYPROJECT["tool"]["setuptools"]["packages"]
    )
    missing = [name for name in left if not any((ROOT / "jobs").glob(f"{name.split('.')[1]}*"))]
    assert not missing


def test_the_readme_has_every_public_name_and_what_calls_give() -> None:
    text = README.read_text()
    missing = [
        name for name in ray_ckpt.__all__ if name != "__version__" and not re.search(rf"\b{name}\b", text)
    ]
    assert not missing
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.*) \|$", text.split('<a id="names">')[1], re.MULTILINE))
    for row, kind in (("RestoreInfo", RestoreInfo), ("ResumeCheck", ResumeCheck), ("ckpt.stats", SaveStats)):
        unnamed = [field.name for field in fields(kind) if f"`{field.name}`" not in rows[row]]
        assert not unnamed, row
    assert all(
        f"`{field.name}`" in rows["RestoreInfo"] for field in fields(RestoredPart) if field.name != "file"
    )
    assert {"find_runs", "verify_directory"} <= {*catalog.__all__}


def test_all_texts_have_the_same_exit_codes() -> None:
    codes = {0, *(value for name, value in vars(options).items() if name.startswith("EXIT_"))}
    table = README.read_text().split('<a id="exit-codes">')[1].split("\n\n**")[0]
    rows = {int(code): text for code, text in re.findall(r"^\| (\d+) \| (.+) \|$", table, re.MULTILINE)}
    assert rows.keys() == codes
    page = TROUBLESHOOTING.read_text().split("\n## Errors\n")[1].split("\n## ")[0].splitlines()[-1]
    told = " ".join(CliRunner().invoke(app, ["--help"], terminal_width=200).stdout.split())
    for text in (rows[1], page, told.split("Exit codes: ")[1]):
        assert "damage" in text and "check" in text and "refus" in text, text
    assert all(f"`{command}`" in rows[1] for command in ("rollback", "pin", "unpin", "down"))
    assert re.findall(r"\b\d+\b", told.split("Exit codes: ")[1]) == [str(code) for code in sorted(codes)]
    assert "(../README.md#exit-codes)" in page


def test_the_readme_has_every_command_that_writes_to_a_storage_path() -> None:
    writes = re.compile(r"^(?:from|import) .*\b(open_log|RunDrills|check_store)\b", re.MULTILINE)
    modules = {
        path.stem: path.read_text().replace("    from", "from") for path in Path(cli.__path__[0]).glob("*.py")
    }
    writing = {name for name, source in modules.items() if writes.search(source)}
    sentence = README.read_text().split("changes nothing there, but for")[1].split(" Tables fit")[0]
    assert set(re.findall(r"`(\w+)`", sentence)) - {"drilled", "unpin"} == writing


def test_a_first_version_that_is_not_released_changes_nothing_that_somebody_has() -> None:
    first, *later = re.split(r"^## ", CHANGELOG.read_text(), flags=re.MULTILINE)[:0:-1]
    assert "First version." in first
    if first.startswith("0.1.0 (unreleased)"):
        assert not later
        assert not re.findall(
            r"^(?:Fixed|Changed|Removed|If you used)\b.*|\bare gone\b|\bis called\b", first, re.M
        )


def test_the_readme_says_which_commands_the_tour_shows_and_which_it_lists() -> None:
    shown, listed = (ROOT / "docs/tour.md").read_text().split("\n## With a running service\n")
    with_output = set(re.findall(r"^## (\w+)$", shown, re.MULTILINE))
    only_listed = set(re.findall(r"^ray-ckpt (\w+)", listed, re.MULTILINE)) - with_output
    assert with_output | only_listed == set(our_commands())
    sentence = README.read_text().split("[A tour of the command line]")[1].split(" are listed there.")[0]
    assert set(re.findall(r"`(\w+)`", sentence)) == only_listed


def test_the_architecture_has_the_rules_of_imports() -> None:
    text = ARCHITECTURE.read_text().split("import-linter holds it")[1].split("The rules look at")[0]
    layers, *told = re.split(r"; (?=\(\d\) )", text)
    rules = PYPROJECT["tool"]["importlinter"]["contracts"]
    rooms = [layer.replace("ray_ckpt.", "").split(" | ") for layer in rules[0]["layers"]]
    assert [names.split(" | ") for names in re.findall(r"`([a-z_ |]+)`", layers.split("layers")[1])] == rooms
    assert len(told) == len(rules) - 1
    for sentence, rule in zip(told, rules[1:], strict=True):
        modules = {module.removeprefix("ray_ckpt.") for module in rule["source_modules"]}
        assert set(re.findall(r"`([\w.]+)`", sentence)) == modules
        assert all(re.search(rf"\b{module}\b", sentence) for module in rule["forbidden_modules"])


def test_the_readme_has_every_option_of_every_command() -> None:
    text = README.read_text()
    for name, command in our_commands().items():
        options_of = {
            option for parameter in command.params for option in parameter.opts if option[:2] == "--"
        }
        missing = {option for option in options_of if not re.search(rf"(?<![\w-]){option}(?![\w-])", text)}
        assert not missing, name
