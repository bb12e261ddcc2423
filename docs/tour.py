"""A tour of the command line on what `make demo` leaves behind, with real output and pictures: docs/tour.md.

    python -m docs.tour

Each command runs on a copy of the demo's storage path. In what it prints, ids and dates are replaced by
others of the same width, so that two tours differ where the commands do. Commands that need a service are
listed with what they are for.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ray_ckpt.cli import app

PROJECT = Path(__file__).parents[1]
OUT = PROJECT / "docs"
DEMO = Path("demo-out/storage")  # below the project, and below the copy
RUN = DEMO / "gpt-with-failure"
MAX_LINES = 45  # of a command's output in the page
MAX_PICTURE_BYTES = 200_000  # for a page that loads at once
PAGE_PIXELS = "1100,935"  # of the report, down to the end of its timeline
COMMAND_S = 120.0  # a command on a run of some 30 MB takes a second or two


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A command on the demo's run, and what to look at.

    `picture` is a PNG that the command writes, or of the page that it writes under that name.
    """

    line: str
    text: str
    picture: str = ""

    @property
    def command(self) -> str:
        return self.line.split()[0]


STOPS = (
    Stop(
        line=f"ls {DEMO}",
        text="Two runs of the same training: one that nothing happened to, one that lost a node.",
    ),
    Stop(
        line=f"ls {RUN} --all",
        text="Every checkpoint that the run has had. `*` marks the one that a restart resumes from, `+` "
        "others on its lineage. What retention gave up is listed with `--all` only.",
    ),
    Stop(
        line=f"tree {RUN} --all",
        text="Each session is one group of workers. The second one went on after the loss.",
    ),
    Stop(line=f"show {RUN} 70", text="One checkpoint: its record, its files, its tensors by item."),
    Stop(line=f"verify {RUN} --all", text="Every byte of every durable checkpoint against its digest."),
    Stop(
        line=f"verify {RUN} --step 70 --plan",
        text="Can it be restored, by its manifest and the sizes of its files? Moves no tensor.",
    ),
    Stop(
        line=f"diff {RUN} 60 70 --only 'model.blocks.0.*'",
        text="How far ten steps have moved the weights. Both checkpoints are read in bounded memory.",
    ),
    Stop(
        line=f"export {RUN} gpt-70 --step 70 --item model",
        text="The weights as files that other tools read.",
    ),
    Stop(
        line=f"import hf gpt-70 {DEMO}/gpt-imported",
        text="The same files as the first checkpoint of a new run, from which a training can continue.",
    ),
    Stop(line=f"gc {RUN} --dry-run", text="What retention would give up now, what stays, and why."),
    Stop(
        line=f"goodput {RUN} --plot goodput.png",
        text="Where the time went: steps whose effect survived, and the rest by its cause.",
        picture="goodput.png",
    ),
    Stop(
        line=f"report {RUN} --html report.html",
        text="One page with the run's timeline, for a browser.",
        picture="report.png",
    ),
    Stop(
        line=f"drill {RUN} --remote-only",
        text="Rehearse the loss of the whole cluster: what the storage path holds is read and compared.",
    ),
    Stop(
        line=f"doctor {DEMO} --size 64 --staging staging",
        text="Is this machine, are its disks and that storage path fit for the service? Exits with 1 if not.",
    ),
    Stop(
        line=f"rollback {RUN} --before 70 --yes --quiet-s 0",
        text="Go back before a loss spike. It prompts before it writes, and refuses while the log is young: "
        "here the two options confirm that nobody trains any more.",
    ),
)
WITH_A_SERVICE = (
    ("up", "ray-ckpt up", "starts the service on this Ray cluster, or reports that it is up"),
    ("status", "ray-ckpt status", "runs, agents, exposure, drains on their way, disks"),
    ("top", "ray-ckpt top", "the same, live"),
    ("pin", "ray-ckpt pin /shared/runs/gpt 3000 --owner paper", "retention leaves this step alone"),
    ("unpin", "ray-ckpt unpin /shared/runs/gpt 3000 --owner paper", "and may have it again"),
    (
        "verify",
        "ray-ckpt verify /shared/runs/gpt --plan --address auto",
        "is every copy of the newest step there?",
    ),
    (
        "drill",
        "ray-ckpt drill /shared/runs/gpt --lose-node <node id>",
        "what would be left without this node",
    ),
    ("down", "ray-ckpt down", "ends the service; what is on disk stays"),
)


def commands() -> set[str]:
    """Return the names of the commands of `ray-ckpt`."""
    return {str(info.name or getattr(info.callback, "__name__", "")) for info in app.registered_commands}


def stops() -> tuple[Stop, ...]:
    return tuple(stop for stop in STOPS if stop.command in commands())


def with_a_service() -> tuple[tuple[str, str, str], ...]:
    return tuple(row for row in WITH_A_SERVICE if row[0] in commands())


def run(line: str, folder: Path) -> str:
    """Run `ray-ckpt <line>` in `folder` and return its output. RuntimeError if its exit code is not 0."""
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "FORCE_COLOR")}
    found = subprocess.run(
        [sys.executable, "-m", "ray_ckpt.cli", *shlex.split(line)],
        cwd=folder,
        env={**environment, "TZ": "UTC", "PYTHONPATH": str(PROJECT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )
    if found.returncode != 0:
        raise RuntimeError(f"ray-ckpt {line} exits with {found.returncode}:\n{found.stdout}")
    return found.stdout


class Normaliser:
    """Ids, moments and places that differ from run to run, replaced by some that do not."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._ids: dict[str, str] = {}

    def __call__(self, text: str) -> str:
        text = text.replace(f"{self._folder}/", "")
        text = re.sub(r"\b(?:[0-9a-f]{32}|[0-9a-f]{16})\b", self._id, text)
        text = re.sub(r"\b\d+ (?:s|min|h|d) ago, ", "", text)
        text = re.sub(r"\b20\d\d-\d\d-\d\d (?=\d\d:)", "2026-01-01 ", text)
        lines = [line.rstrip() for line in text.strip("\n").splitlines()]
        if len(lines) > MAX_LINES:
            lines = [*lines[:MAX_LINES], f"... {len(lines) - MAX_LINES} more lines"]
        return "\n".join(lines)

    def _id(self, match: re.Match[str]) -> str:
        known = self._ids.setdefault(match[0], f"{len(self._ids) + 1:02x}")
        return known * (len(match[0]) // 2)


def take_picture(folder: Path, name: str, out: Path) -> None:
    """Copy the picture `name` that a command wrote into `folder`, or take one of the page beside it.

    RuntimeError if the picture is too large or no browser is installed.
    """
    picture, page = folder / name, (folder / name).with_suffix(".html")
    if page.exists():
        browser = shutil.which("chromium") or shutil.which("google-chrome")
        if browser is None:
            raise RuntimeError(f"{name} needs chromium or google-chrome")
        page.write_text(page.read_text().replace(f"{folder}/", ""))
        window = [f"--window-size={PAGE_PIXELS}", "--hide-scrollbars", "--no-sandbox", "--disable-gpu"]
        command = [browser, "--headless", *window, f"--screenshot={picture}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=COMMAND_S)
    if picture.stat().st_size > MAX_PICTURE_BYTES:
        raise RuntimeError(f"{name} has {picture.stat().st_size} bytes")
    shutil.copyfile(picture, out / name)


def write_tour(demo: Path, out: Path) -> None:
    """Run every stop on a copy of the storage path `demo`, and write page and pictures into `out`."""
    out.mkdir(exist_ok=True)
    page = [
        "# A tour of `ray-ckpt`",
        "",
        "On what `make demo` leaves behind: a small GPT that trained on two of three local nodes, lost one "
        "of them with its disk, and went on. The output is real, written by `python -m docs.tour`; ids and "
        "dates are replaced. Every command has `--help`, and `--json` for scripts.",
        "",
    ]
    with tempfile.TemporaryDirectory(prefix="ray_ckpt-tour-") as scratch:
        folder = Path(scratch).resolve()
        shutil.copytree(demo, folder / DEMO)
        normalise = Normaliser(folder)
        for stop in stops():
            output = normalise(run(stop.line, folder))
            page += [f"## {stop.command}", ""] if f"## {stop.command}" not in page else []
            page += [stop.text, "", "```bash", f"ray-ckpt {stop.line}", "```", ""]
            page += ["```text", output, "```", ""] if output else []
            if stop.picture:
                take_picture(folder, stop.picture, out)
                page += [f"![{stop.command}]({stop.picture})", ""]
            print(f"ray-ckpt {stop.line}")
    if rows := with_a_service():
        page += [
            "## With a running service",
            "",
            "These commands use the service of a Ray cluster.",
            "",
            "```bash",
        ]
        width = max(len(line) for _, line, _ in rows)
        page += [f"{line:<{width}}   # {text}" for _, line, text in rows] + ["```", ""]
    (out / "tour.md").write_text("\n".join(page))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.tour", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--demo", type=Path, default=PROJECT / DEMO, help="the demo's storage path")
    parser.add_argument("--out", type=Path, default=OUT, help="where tour.md and its pictures go")
    args = parser.parse_args(argv)
    if not (args.demo / RUN.name).exists():
        print(f"There is no {args.demo / RUN.name}: run `make demo` first.", file=sys.stderr)
        return 2
    write_tour(args.demo, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
