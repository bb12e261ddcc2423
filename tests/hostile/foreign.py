"""`python -m tests.hostile.foreign --seeds 0:500`: imports of damaged and hostile directories.

For each seed one file of a small directory of each format is mutated and read in a forked child, which has to
end within 20 s and 500 MB above the interpreter, start no process, and give an error that names the file, or
the tensors of the undamaged directory. Every tenth seed runs the whole command, into a run that is loaded.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import pickle
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ray_ckpt
from ray_ckpt.cli import main as command
from ray_ckpt.errors import CheckpointError
from ray_ckpt.format.manifest import check_coverage
from ray_ckpt.format.tree import encode_tree
from ray_ckpt.interop.importers import Form, open_source
from ray_ckpt.types import ManifestRow
from tests.hostile.mutations import MUTATIONS
from tests.hostile.play import MAX_GROWN_BYTES
from tests.hostile.readers import MAX_S, _digest, _reset_peak, _status_bytes, _surroundings
from tests.hostile.samples import SAMPLES, source_of

SHOWN_EACH = 100  # seeds
WHOLE_OF = 10  # every so many seeds the command itself runs
FOLDER = "gpt"  # of the directory, whose name a mutation looks for
TRACE = "executed"  # the file that exists after hostile code ran
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect", "pty.spawn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of an import. `tensors` are digests by name, `values` everything else."""

    code: int
    text: str = ""
    tensors: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    seconds: float = 0.0
    grown_bytes: int = 0


# Mutations of pickles, whose archives have right checksums again


class Evil:
    def __reduce__(self) -> Any:
        return os.system, (f"touch {TRACE}",)


def _hostile(data: bytes, rng: random.Random) -> bytes:
    evil = pickle.dumps(rng.choice(([Evil()], {"model": Evil()}, Evil())), protocol=2)
    return evil if rng.random() < 0.5 else data[:-1] + b"0" + evil[2:]  # after the value, which is popped


def _bombs(data: bytes, rng: random.Random) -> bytes:
    """Return a pickle that asks for much memory, or nests deeply."""
    twice = b"\x80\x02]q\x00" + b"".join(b"]q%c(h%ch%ce" % (k, k - 1, k - 1) for k in range(1, 100)) + b"."
    huge = b"\x80\x02cbuiltins\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x10\x85R."
    deep = b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."
    binary = b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"."
    return rng.choice((twice, huge, deep, binary))


def _names(data: bytes, rng: random.Random) -> bytes:
    """Put another name in place of one."""
    names = sorted({line for line in data.split(b"c") if b"\n" in line[:60]})
    others = (b"builtins\neval\n", b"os\nsystem\n", b"builtins\ngetattr\n", b"torch\nfloat16\n",
              b"collections\nCounter\n", b"torch\nSize\n", b"torch._utils\n_rebuild_qtensor\n")  # fmt: skip
    if not names:
        return data[: len(data) // 2]
    old = b"\n".join(rng.choice(names).split(b"\n")[:2]) + b"\n"
    return data.replace(b"c" + old, b"c" + rng.choice(others), rng.choice((1, -1)))


def _numbers(data: bytes, rng: random.Random) -> bytes:
    """Put large numbers in place of some small ones."""
    out, value = (
        bytearray(),
        rng.choice((b"J\xff\xff\xff\x7f", b"J\xff\xff\xff\xff", b"\x8a\x07" + b"\xff" * 6 + b"\x0f")),
    )
    chosen = rng.randrange(1, 12)
    index = seen = 0
    while index < len(data):
        if data[index : index + 1] == b"K" and (seen := seen + 1) == chosen:
            out += value
            index += 2
            continue
        out.append(data[index])
        index += 1
    return bytes(out)


def _flips(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 20))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


PICKLES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "pickle: hostile": _hostile,
    "pickle: bomb": _bombs,
    "pickle: names": _names,
    "pickle: numbers": _numbers,
    "pickle: flips": _flips,
    "pickle: cut": lambda data, rng: data[: rng.randrange(len(data))],
}


def _with_pickle(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the pickle of a file, an archive or not, and put its checksum right."""
    data = path.read_bytes()
    if path.name == ".metadata":
        path.write_bytes(change(data))
        return
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w") as new:
        for info in old.infolist():
            content = old.read(info)
            new.writestr(info.filename, change(content) if info.filename.endswith("data.pkl") else content)
    path.write_bytes(made.getvalue())


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A change of the file. `is_sound`: its content is a valid answer, since no checksum shows the change."""

    kind: str
    file: Path
    is_sound: bool


def mutate(folder: Path, seed: int) -> Mutation:
    """Mutate one file of the directory."""
    rng = random.Random(seed)
    path = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    has_pickle = path.name == ".metadata" or path.suffix == ".pt"
    kind = rng.choice(sorted({**MUTATIONS, **PICKLES} if has_pickle else MUTATIONS))
    if kind in PICKLES:
        _with_pickle(path, lambda data: PICKLES[kind](data, rng))
    else:
        MUTATIONS[kind](path, rng)
    unchecked = path.suffix in (".json", ".safetensors") or path.name == ".metadata"
    return Mutation(kind=kind, file=path, is_sound=unchecked or kind in PICKLES)


# An import in a child


def outcome_of(form: Form, source: Path, run: Path | None) -> Outcome:
    """Return the result of reading, or of an import into `run`, in a process of its own."""
    file = source.parent / "outcome"
    file.unlink(missing_ok=True)
    if (child := os.fork()) == 0:
        try:
            signal.alarm(MAX_S)
            file.write_text(json.dumps(asdict(_outcome(form, source, run))))
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    if not file.exists():
        return Outcome(code=-1, problem=f"ended by {status}: {signal.strsignal(status & 127)}")
    return Outcome(**json.loads(file.read_text()))


def _outcome(form: Form, source: Path, run: Path | None) -> Outcome:
    forbidden: list[str] = []
    sys.addaudithook(lambda event, _: forbidden.append(event) if event in FORBIDDEN else None)
    before, start_s, code, problem = _reset_peak(), time.monotonic(), 0, ""
    tensors: dict[str, str] = {}
    out, err = io.StringIO(), io.StringIO()
    with _surroundings(out, err):
        try:
            tensors = _read(form, source) if run is None else _imported(form, source, run)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException as error:
            code, problem = 1, "" if isinstance(error, CheckpointError) else _trace(error)
            err.write(str(error))
    grown = _status_bytes("VmHWM") - before
    if forbidden:
        problem = f"it called {forbidden}"
    if code not in (0, 1, 2):
        problem = problem or f"exit code {code}"
    text = out.getvalue() + err.getvalue()
    seconds = time.monotonic() - start_s
    return Outcome(code=code, text=text, tensors=tensors, problem=problem, seconds=seconds, grown_bytes=grown)


def _read(form: Form, source: Path) -> dict[str, str]:
    """Return digests of all slices, as the command would write them."""
    found = open_source(form, source)
    made = partial(ManifestRow, kind="slice", file="", byte_offset=0, nbytes=0, digest="")
    check_coverage(made(slice=part) for part in found.tensors)
    encode_tree({"items": found.items})
    digests = {}
    for part, read in found.tensors.items():
        hashed = hashlib.sha256(repr((part.dtype, part.shape, part.global_shape)).encode())
        for block in read():
            hashed.update(block)
        digests[f"{part.key} at {part.offset}"] = hashed.hexdigest()
    return digests


def _imported(form: Form, source: Path, run: Path) -> dict[str, str]:
    try:
        command(["import", form, str(source), str(run), "--step", "7", "--json"])
    except SystemExit as ended:
        if ended.code:
            raise
    return dict(_digests(ray_ckpt.open(run).load()))


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error, limit=-6))[-3000:]


def _digests(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the digests of all tensors, and of the other values together."""
    if isinstance(value, torch.Tensor):
        yield path, _digest(value)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _digests(each, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _digests(each, f"{path}.{index}")


# One seed


class Player:
    """Plays seeds in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._whole: dict[tuple[str, bool], dict[str, str]] = {}
        self.num_errors = self.num_answers = 0
        self.slowest_s, self.largest_bytes = 0.0, 0

    def play(self, seed: int, name: str) -> str:
        """Mutate the sample `name` by a seed and import it; return the problem, "" if there is none."""
        form, is_whole = SAMPLES[name][0], seed % WHOLE_OF == 0
        known = self._known(name, is_whole)
        source = self._fresh(name)
        mutation = mutate(source if source.is_dir() else source.parent, seed)
        found = outcome_of(form, source, self._run(is_whole))
        self.num_answers += 1
        self.num_errors += found.code != 0
        self.slowest_s = max(self.slowest_s, found.seconds)
        self.largest_bytes = max(self.largest_bytes, found.grown_bytes)
        problem = "hostile code ran" if Path(TRACE).exists() else _problem(found, known, mutation, source)
        if not problem:
            return ""
        replay = f"python -m tests.hostile.foreign --seeds {seed}:{seed + 1} --sample {name}"
        return f"{replay}\n  {mutation.kind}, {mutation.file.name}: {problem}"

    def _fresh(self, name: str) -> Path:
        shutil.rmtree(self._folder, ignore_errors=True)
        (self._folder / FOLDER).mkdir(parents=True)
        (self._folder / "runs").mkdir()
        kept = self._folder.parent / f"sample-{name}"
        if not kept.exists():
            kept.mkdir()
            SAMPLES[name][1](kept)
        shutil.copytree(kept, self._folder / FOLDER, dirs_exist_ok=True)
        return source_of(name, self._folder / FOLDER)

    def _run(self, is_whole: bool) -> Path | None:
        return self._folder / "runs/imported" if is_whole else None

    def _known(self, name: str, is_whole: bool) -> dict[str, str]:
        key = (name, is_whole)
        if key not in self._whole:
            found = outcome_of(SAMPLES[name][0], self._fresh(name), self._run(is_whole))
            assert not found.code and found.tensors, found
            self._whole[key] = found.tensors
        return self._whole[key]


def _problem(found: Outcome, known: dict[str, str], mutation: Mutation, source: Path) -> str:
    if found.problem:
        return found.problem
    if found.grown_bytes > MAX_GROWN_BYTES or found.seconds > MAX_S:
        return f"it took {found.grown_bytes / 1e6:.0f} MB and {found.seconds:.1f} s"
    if found.code:
        names = (mutation.file.name, str(source))
        return (
            ""
            if any(each in found.text for each in names)
            else f"the error names no file: {found.text[-300:]}"
        )
    if found.tensors == known or mutation.is_sound:
        return ""
    return f"another answer: {set(found.tensors.items()) ^ set(known.items())}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.foreign", description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="first:last+1")
    parser.add_argument("--sample", choices=SAMPLES, help="this one only")
    arguments = parser.parse_args()
    first, last = (int(number) for number in arguments.seeds.split(":"))
    start_s, counts = time.monotonic(), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        player = Player(Path(folder) / "at")
        for seed in range(first, last):
            for name in [arguments.sample] if arguments.sample else SAMPLES:
                if problem := player.play(seed, name):
                    counts[name] += 1
                    print(problem, flush=True)
            if (seed - first + 1) % SHOWN_EACH == 0:
                print(f"{seed - first + 1} seeds, {time.monotonic() - start_s:.0f} s", flush=True)
    print(f"seeds {first} to {last - 1}: {player.num_answers} imports, {player.num_errors} errors")
    print(f"  {time.monotonic() - start_s:.0f} s; slowest {player.slowest_s:.1f} s")
    print(f"  largest {player.largest_bytes / 1e6:.0f} MB; {counts.total()} violations {dict(counts)}")
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main())
