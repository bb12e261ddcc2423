"""Groups of ranks that the tests start, and the files that they need; nothing of torchtitan is imported."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Setup:
    """One group of ranks. Without `checkpoints`, the manager connects to a run on Ray by itself."""

    folder: str
    flags: list[str]
    checkpoints: str | None = None  # folder of checkpoints, one folder for each step
    resume: int = 0  # step of the checkpoint to restore
    saved_ranks: int = 1  # of that checkpoint
    kill_at: int = 0  # step after which each rank gets SIGKILL
    options: dict[str, Any] = field(default_factory=dict)  # of the run


def make_assets(folder: Path) -> None:
    """Write a tokenizer of letters, and a data set where torchtitan's `c4_test` looks for it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = ["<unk>", "<s>", "</s>", *map(chr, range(97, 123))]
    tokenizer = Tokenizer(models.WordLevel({c: k for k, c in enumerate(letters)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    (folder / "assets").mkdir()
    tokenizer.save(str(folder / "assets" / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "assets" / "tokenizer_config.json").write_text(json.dumps(special))
    drawn = random.Random(0)
    texts = ("".join(map(chr, drawn.choices(range(97, 123), k=drawn.randrange(20, 90)))) for _ in range(100))
    data = folder / "tests" / "assets" / "c4_test"
    data.mkdir(parents=True)
    (data / "data.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
