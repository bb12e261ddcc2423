"""The package declares the packages that it imports, imports those that it declares, and ships no test."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import ray_ckpt
from ray_ckpt.analysis.goodput import Goodput
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.cli.goodput import draw
from ray_ckpt.errors import ConfigError
from ray_ckpt.format import zstd
from ray_ckpt.location import Location
from ray_ckpt.storage.remote.tier import open_objects

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
OPTIONAL = ("fsspec", "pandas", "plot", "zstd")
# Extras of other trainers, which bring many packages
INTEGRATIONS = (
    "accelerate",
    "deepspeed",
    "huggingface",
    "lightning",
    "megatron",
    "torchft",
    "torchtitan",
    "verl",
    "vllm",
)
# Others have the name of their module
DISTRIBUTIONS = {"google": "google-auth", "grpc": "grpcio", "megatron": "megatron-core"}
FSSPEC = {"backend": "fsspec"}
OWN = {"ray_ckpt", "actors", "jobs", "tests"}


def imported(*folders: str) -> Iterator[tuple[str, str]]:
    """Yield the distribution of each third-party import below the folders, and the file that has it."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "peers" in path.relative_to(ROOT).parts:  # benchmarks that run in environments of their own
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    modules = [node.module]
                for module in {module.partition(".")[0] for module in modules}:
                    if module not in OWN and module not in sys.stdlib_module_names:
                        yield DISTRIBUTIONS.get(module, module).replace("_", "-"), str(path.relative_to(ROOT))


def declared(requirements: list[str]) -> set[str]:
    names = (re.match(r"[\w.-]+", requirement) for requirement in requirements)
    return {name[0].replace("_", "-") for name in names if name}


def test_the_product_declares_what_it_imports_and_imports_what_it_declares() -> None:
    required = declared(PROJECT["dependencies"])
    optional = declared([needed for extra in OPTIONAL for needed in EXTRAS[extra]])
    integrated = declared([needed for extra in INTEGRATIONS for needed in EXTRAS[extra]])
    found = set(imported("ray_ckpt", "actors"))
    assert len({file for _, file in found}) > 50
    undeclared = sorted((name, file) for name, file in found if name not in required | optional | integrated)
    assert not undeclared
    assert not (required | optional) - {name for name, _ in found}
    assert not required & optional


def test_the_extras_are_part_of_all_and_all_of_dev() -> None:
    assert EXTRAS["all"] == [f"ray_ckpt[{','.join(OPTIONAL)}]"]
    assert "ray_ckpt[all]" in EXTRAS["dev"]
    assert any(set(INTEGRATIONS) & set(re.findall(r"\w+", needed)) for needed in EXTRAS["dev"])
    assert set(EXTRAS) == {*OPTIONAL, *INTEGRATIONS, "all", "dev"}


def test_the_jobs_import_what_an_extra_or_the_product_declares() -> None:
    known = declared([*PROJECT["dependencies"], *(needed for extra in EXTRAS.values() for needed in extra)])
    assert not [(name, file) for name, file in imported("jobs") if name not in known]


def test_the_product_imports_no_test_and_no_job() -> None:
    """The wheel (packages `ray_ckpt*`) therefore works without the checkout and holds no test server."""
    for folder in ("ray_ckpt", "actors"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not path.name.startswith(("test_", "conftest"))
            assert not re.search(r"^\s*(from|import) (tests|jobs|actors|pytest)\b", path.read_text(), re.M), (
                path
            )


def test_the_package_lists_its_public_names() -> None:
    assert set(ray_ckpt.__all__) <= set(dir(ray_ckpt))


def test_importing_the_product_needs_no_extra() -> None:
    """All of it but the modules that are of an extra alone; a module that is None cannot be imported."""
    script = (
        "import sys, pkgutil, importlib\n"
        "sys.modules.update(dict.fromkeys(('s3fs', 'gcsfs', 'matplotlib', 'zstandard')))\n"
        "for name in ('ray_ckpt', 'ray_ckpt.cli', 'ray_ckpt.storage.remote.tier', 'ray_ckpt.format.zstd',\n"
        "             'ray_ckpt.storage.remote.s3', 'ray_ckpt.storage.remote.gcs',\n"
        "             'ray_ckpt.storage.remote.fsspec_store', 'ray_ckpt.catalog.catalog',\n"
        "             'ray_ckpt.cli.goodput'):\n"
        "    importlib.import_module(name)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, cwd=ROOT)


@pytest.mark.parametrize("use", ["write", "read"])
def test_without_zstandard_the_error_names_the_extra(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = b"".join(zstd.encode([bytes(1000)], 1))

    def read(ranges: Sequence[tuple[int, int]]) -> zstd.Blocks:
        [(offset, nbytes)] = ranges
        yield memoryview(stored)[offset : offset + nbytes]

    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"needs the package zstandard.*'ray_ckpt\[zstd\]'"):
        list(zstd.encode([b"1"], 1)) if use == "write" else zstd.SeekableReader(read, len(stored))


@pytest.mark.parametrize(
    ("package", "extra", "use"),
    [
        ("s3fs", "fsspec", lambda: open_objects(Location.parse("s3://bucket/x"), {"backend": "fsspec"})),
        (
            "gcsfs.core",
            "fsspec",
            lambda: open_objects(Location.parse("gs://bucket/x"), {"backend": "fsspec"}),
        ),
        ("pandas", "pandas", lambda: Catalog.to_pandas(object.__new__(Catalog))),
        ("matplotlib", "plot", lambda: draw("run", object.__new__(Goodput))),
    ],
)
def test_without_an_optional_package_the_error_names_the_extra(
    package: str, extra: str, use: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ConfigError, match=rf"needs the package {package.partition('.')[0]}.*'ray_ckpt\[{extra}\]'"
    ):
        use()


def test_the_oldest_constraints_are_the_floors() -> None:
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    oldest = dict(line.split()[0].split("==") for line in lines if not line.startswith("#"))
    needed = [*PROJECT["dependencies"], *(needed for extra in OPTIONAL for needed in EXTRAS[extra])]
    for requirement in needed:
        found = re.match(r"([\w.-]+)(?:\[[\w,]+\])?>=([\d.]+)", requirement)
        assert found, requirement
        assert f"{oldest[found[1]]}.".startswith(f"{found[2]}."), requirement
