"""The peers' environments: `python -m jobs.bench.peers.environments [NAME...]` makes missing ones.

Each peer that is not part of the project's environment has a folder in `.venv-peers`, because the pinned
versions of peers conflict with one another and with those of the project. A `.pth` file adds torch and other
shared packages of the environment that runs this command, so that all peers run on the same torch; packages
in the peer's folder take precedence. A peer that cannot be installed leaves the reason in its folder, which
becomes the text of its rows.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

HOME = Path(__file__).resolve().parents[3] / ".venv-peers"
READY = "ready.txt"  # the installed requirements
FAILED = "failed.txt"  # the reason why the requirements are not installed
INSTALL_TIMEOUT_S = 900.0  # a few packages, one of which compiles
# Newest releases that install on Python 3.11 beside torch 2.13; torch and Ray are shared, so not listed.
REQUIREMENTS: Mapping[str, Sequence[str]] = {
    "dlrover": ("dlrover==0.6.1", "grpcio", "protobuf", "pynvml", "deprecated", "requests", "packaging"),
    "lm_resiliency": ("lm-resiliency==0.2.0",),
    "ml_flashpoint": ("ml-flashpoint==0.0.10",),
    "nvrx": ("nvidia-resiliency-ext==0.4.1", "defusedxml", "nvidia-ml-py", "pynvml", "pyyaml"),
    "orbax": ("orbax-checkpoint==0.12.8", "jax==0.10.2", "tensorstore"),
    "torch_checkpointing": ("torch-checkpointing==0.1.1",),
    "torchsnapshot": ("torchsnapshot==0.1.0", "aiofiles", "importlib-metadata", "nest-asyncio"),
}

# Installed from unpacked sources: ML Flashpoint looks for its compiled parts beside its modules. Its build
# fetches Abseil from GitHub, unless the environment variable
# CMAKE_ARGS=-DFETCHCONTENT_SOURCE_DIR_ABSEIL-CPP=FOLDER names one that is there already.
EDITABLE = "ml_flashpoint"
EDITABLE_OPTIONS = ("--no-deps", "--config-settings=cmake.define.BUILD_TESTING=OFF")


def python_of(environment: str) -> Path:
    """Return the interpreter of a peer's environment. FileNotFoundError with the reason if it is missing."""
    folder = HOME / environment
    if (folder / READY).exists():
        return folder / "bin" / "python"
    if (folder / FAILED).exists():
        raise FileNotFoundError(f"not installable here: {(folder / FAILED).read_text().strip()}")
    raise FileNotFoundError("not installed; `make bench` does it")


def make(environment: str) -> str:
    """Install one environment unless it is up to date; return the result in one line."""
    folder = HOME / environment
    wanted = "\n".join(REQUIREMENTS[environment])
    if (folder / READY).exists() and (folder / READY).read_text() == wanted:
        return "ready"
    venv.create(folder, clear=True, with_pip=True)
    (own,) = (folder / "lib").glob("python*/site-packages")
    (own / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")  # after the environment's own
    reason = _install(environment, folder)
    (folder / (FAILED if reason else READY)).write_text(reason or wanted)
    return reason or "installed"


def _install(environment: str, folder: Path) -> str:
    """Install the requirements; return the reason if that failed, otherwise an empty text."""
    requirements, sources = REQUIREMENTS[environment], folder / "source"
    if environment != EDITABLE:
        return _pip(folder, "install", *requirements)
    package = requirements[0].partition("==")[0]
    options = ("--no-deps", "--no-binary", package, "--dest", str(sources))
    if reason := _pip(folder, "download", *options, *requirements):
        return reason
    (archive,) = sources.iterdir()
    shutil.unpack_archive(archive, sources, filter="data")
    source = sources / archive.name.removesuffix(".tar.gz")
    return _pip(folder, "install", *EDITABLE_OPTIONS, "--editable", str(source))


def _pip(folder: Path, *arguments: str) -> str:
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    try:
        done = subprocess.run([*pip, *arguments], capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"pip took more than {INSTALL_TIMEOUT_S:.0f} s"
    return "" if done.returncode == 0 else _reason(done.stdout + done.stderr)


def _reason(stderr: str) -> str:
    """Return the line of pip's output with the cause: the first "fatal", else the first error."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    found = [[line for line in lines if word in line.lower()] for word in ("fatal: ", "error")]
    return [*found[0], *found[1], *lines, "pip failed"][0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 even if some cannot be installed: their rows in the bench show why."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.bench.peers.environments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", choices=[*REQUIREMENTS, []], metavar="NAME", help="default: all")
    for name in parser.parse_args(arguments).names or REQUIREMENTS:
        print(f"{name}: {make(name)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
