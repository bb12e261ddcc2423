"""The environment variable by which verl saves through ray_ckpt, and the folders of verl."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray_ckpt.config import from_json
from ray_ckpt.errors import ConfigError

ENV = "RAY_CKPT_VERL"
HINT = f'Set {ENV} to 1, or to options in JSON, such as {{"keep_last": 5}}.'
TRACKER = "latest_checkpointed_iteration.txt"
OTHERS = {
    "resume": "verl's trainer.resume_mode decides this.",
    "init_from": "Build the models from actor_rollout_ref.model.path.",
    "every_steps": "verl's trainer.save_freq decides this.",
    "every_s": "verl's trainer.save_freq decides this.",
}
"""Options of a run in whose place verl has its own."""
_FOLDER = re.compile(r"global_step_(\d+)")


def is_wanted() -> bool:
    """Return whether the user of this process has chosen ray_ckpt."""
    return os.environ.get(ENV, "0") not in ("", "0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings in RAY_CKPT_VERL: the run, the parts, and options of `RunOptions`.

    Without `storage_path` and `run`, verl's `trainer.default_local_dir` is the folder of the run.
    """

    storage_path: str | None = None
    run: str | None = None
    parts: Mapping[str, int] = field(default_factory=dict)  # roles in groups of their own -> number of ranks
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_environment(cls) -> Settings:
        """Read RAY_CKPT_VERL. Raises ConfigError if it is neither 1 nor a JSON object of options."""
        text = os.environ.get(ENV, "1")
        try:
            found = {} if text == "1" else json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{ENV} is not valid JSON: {error}.", hint=HINT) from None
        if not isinstance(found, dict):
            raise ConfigError(f"{ENV} is {text!r}.", hint=HINT)
        for name in OTHERS.keys() & found.keys():
            raise ConfigError(f"{ENV} has the option {name!r}.", hint=OTHERS[name], option=name)
        options = from_json(found)
        named = [name for name in ("storage_path", "run", "parts") if name in options]
        own: dict[str, Any] = {name: options.pop(name) for name in named}
        for name in ("storage_path", "run"):
            if not isinstance(own.get(name), str | None):
                raise ConfigError(
                    f"{ENV} has {name} {own[name]!r}, which is no text.", hint=HINT, option=name
                )
        if not _are_parts(own.get("parts", {})):
            raise ConfigError(
                f"{ENV} has parts {own['parts']!r}.",
                hint='Give the ranks of each group, as in "parts": {"actor": 8, "critic": 2}.',
                option="parts",
            )
        if own.get("parts") and not {"storage_path", "run"} <= own.keys():
            raise ConfigError(
                f"{ENV} has parts, and no storage_path and run.",
                hint="Groups that start one after the other need both, before verl names a folder.",
            )
        return cls(**own, options=options)

    def run_of(self, root: Path) -> tuple[str, str]:
        """Return storage path and name of the run whose `trainer.default_local_dir` is `root`."""
        return self.storage_path or str(root.parent), self.run or root.name


def _are_parts(parts: Any) -> bool:
    return isinstance(parts, dict) and all(type(ranks) is int and ranks > 0 for ranks in parts.values())


@dataclass(frozen=True, slots=True)
class StepFolder:
    """A folder of verl: `<default_local_dir>/global_step_<step>`, and below it one for each role in PPO."""

    root: Path
    step: int
    role: str  # "": verl trains one model, as in supervised training

    @classmethod
    def of(cls, path: str) -> StepFolder:
        """Parse a path. Raises ConfigError if it is no such folder."""
        folder = Path(path).absolute()
        for step_folder, role in ((folder, ""), (folder.parent, folder.name)):
            if found := _FOLDER.fullmatch(step_folder.name):
                return cls(step_folder.parent, int(found[1]), role)
        raise ConfigError(
            f"verl saves to {path}, which is neither a folder global_step_N nor one in it.",
            hint="Leave the names of the folders below trainer.default_local_dir as verl makes them.",
        )


def write_tracker(root: Path, step: int) -> None:
    """Write verl's tracker file, whole or not at all, unless it names `step` already. Raises OSError."""
    root.mkdir(parents=True, exist_ok=True)
    tracker = root / TRACKER
    if tracker.exists() and tracker.read_text() == str(step):
        return
    temporary = root / f"{TRACKER}.{os.getpid()}.tmp"
    temporary.write_text(str(step))
    temporary.replace(tracker)
