"""One seed: a run, a mutation of one of its files, and what its readers make of it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ray_ckpt.types import RootOf
from tests.hostile.mutations import Mutation, build, compress, mutate
from tests.hostile.readers import MAX_S, READERS, Answer, answers_of

MAX_GROWN_BYTES = 500 * 10**6  # above the interpreter
COMPRESSED_OF = 4  # every so many seeds the shards are compressed
OLD_OF = 3  # every so many seeds the run is as older versions wrote it


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    seed: int
    mutation: Mutation
    reader: str
    problem: str

    def __str__(self) -> str:
        replay = f"python -m tests.hostile --seeds {self.seed}:{self.seed + 1} --reader '{self.reader}'"
        return f"{replay}\n  {self.mutation.kind}, {self.mutation.file}: {self.problem}"


class Player:
    """Plays seeds in `folder`. Where the run lies is the same for all of them, so answers compare."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[tuple[str, bool, RootOf], Answer] = {}  # of the undamaged run of that kind
        self.slowest_s, self.largest_bytes, self.num_answers, self.num_errors = 0.0, 0, 0, 0

    def play(self, seed: int, readers: Sequence[str] = READERS) -> list[Violation]:
        """Play a seed with these readers, and return the violations."""
        is_compressed = seed % COMPRESSED_OF == 0
        root_of: RootOf = "files" if seed % OLD_OF == 0 else "fragments"
        self._know(readers, is_compressed, root_of)
        run = self._fresh(is_compressed, root_of)
        mutation = mutate(run, seed, root_of)
        found = []
        for answer in answers_of(run, readers):
            self.num_answers += 1
            self.num_errors += answer.code != 0
            self.slowest_s = max(self.slowest_s, answer.seconds)
            self.largest_bytes = max(self.largest_bytes, answer.grown_bytes)
            if problem := _problem(answer, self._known[answer.reader, is_compressed, root_of], mutation):
                found.append(Violation(seed=seed, mutation=mutation, reader=answer.reader, problem=problem))
        return found

    def _fresh(self, is_compressed: bool, root_of: RootOf) -> Path:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        run = build(self._folder, root_of=root_of)
        if is_compressed:
            compress(run)
        return run

    def _know(self, readers: Sequence[str], is_compressed: bool, root_of: RootOf) -> None:
        """Run each reader once on the undamaged run."""
        kind = (is_compressed, root_of)
        missing = [reader for reader in readers if (reader, *kind) not in self._known]
        if not missing:
            return
        for answer in answers_of(self._fresh(*kind), missing):
            assert not answer.problem and answer.code == (2 if answer.reader == "rollback" else 0), answer
            self._known[answer.reader, *kind] = answer


def _problem(answer: Answer, whole: Answer, mutation: Mutation) -> str:
    """Return the problem of an answer; "" if it is right, or an error that names the file."""
    if answer.problem:
        return answer.problem
    if answer.grown_bytes > MAX_GROWN_BYTES:
        return f"it took {answer.grown_bytes / 1e6:.0f} MB"
    if answer.seconds > MAX_S:
        return f"it took {answer.seconds:.1f} s"
    if (answer.code, _timeless(answer.out)) == (whole.code, _timeless(whole.out)):
        return ""
    if mutation.is_sound and answer.code in (0, whole.code):
        return ""
    if any(name in answer.text for name in mutation.names_of_file):
        return ""
    what = "an error" if answer.code else "another answer"
    return f"{what} that does not name the file: {answer.text[-300:]}"


def _timeless(text: str) -> str:
    """Return the answer without the seconds that the reader has taken."""
    return re.sub(r'"(seconds|bytes_per_s)": [0-9.e-]+', "", text)
