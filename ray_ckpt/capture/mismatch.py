"""Errors of checkpoints that do not fit the registered items, and what to do about each kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from ray_ckpt.errors import MismatchError
from ray_ckpt.texts import count_text

MAX_LISTED = 20  # differences named in one error

IN_WINDOW = "gradients"  # an item of ray_ckpt itself
CHANGED_MODEL = (
    "Build the same model as the run that saved it. With a changed model begin another run: init_from takes "
    "items that fit, ray_ckpt.open(...).load and load_state_dict the tensors of a model that fit; see "
    '"The model has changed" in docs/guides/resume.md.'
)


def listed(problems: Sequence[str], limit: int = MAX_LISTED) -> str:
    """Return the number of differences, with the first of them."""
    first = "; ".join(problems[:limit]) + ("; ..." if len(problems) > limit else "")
    return f"{count_text(len(problems), 'difference')}: {first}"


def problem_of(name: str, problem: str) -> str:
    """Return a problem of an item with its name: a path in the item follows a dot, a sentence a colon."""
    return f"{name}: {problem}" if " " in problem.partition(":")[0] else f"{name}.{problem}"


def misfit(
    step: int, problems: Sequence[str], *, modules: Iterable[str], begins: Iterable[str]
) -> MismatchError:
    """Return the error for items that differ; those in `begins` can begin anew."""

    def differs(name: str) -> bool:
        return any(problem.startswith((f"{name}.", f"{name}:")) for problem in problems)

    hints = [CHANGED_MODEL] * any(map(differs, modules))
    if begins := list(filter(differs, begins)):
        hints += ["Build the same objects as the run that saved it."] * (not hints)
        hints.append(
            f"To begin without the saved state, use the option {_anew(begins)}; "
            "in load(into=...), leave it out of `into`."
        )
    if not hints:
        hints.append("Build the same objects as the run that saved it, or start another run name.")
    return MismatchError(
        f"The checkpoint of step {step} does not fit, {listed(problems)}.",
        hint=" ".join(hints),
        problems=tuple(problems),
    )


def check_names(step: int, items: Set[str], saved: Set[str]) -> None:
    """Raise MismatchError if the checkpoint has other items than those that are registered."""
    missing, unexpected = sorted(items - saved), sorted(saved - items - {"rng"})
    if not (missing or unexpected):
        return
    texts = [f"lacks {_named(missing)} registered here."] * bool(missing)
    texts += [f"has {_named(unexpected)} not registered here."] * bool(unexpected)
    ends = ["begin what it lacks as built"] * bool(missing)
    ends += ["go on without what is not registered"] * bool(unexpected)
    hint = (
        "Register the same items as the run that saved it. "
        f"To {' and to '.join(ends)}, use the option {_anew(missing + unexpected)}."
    )
    if missing:
        hint += " In load(into=...), leave out what it lacks."
    if missing and unexpected:
        hint += " An item that has another name now is registered under the saved name."
    if IN_WINDOW in unexpected:
        hint = "It was saved within an accumulation window: use the option partial_grads=True."
    raise MismatchError(
        f"The checkpoint of step {step} {' It '.join(texts)}",
        hint=hint,
        missing=tuple(missing),
        unexpected=tuple(unexpected),
    )


def _named(names: Sequence[str]) -> str:
    return f"{', '.join(map(repr, names))}, which {'is' if len(names) == 1 else 'are'}"


def _anew(names: Sequence[str]) -> str:
    """Return the option as Python: `anew=("a",)`."""
    text = ", ".join(f'"{name}"' for name in names)
    return f"anew=({text}{',' * (len(names) == 1)})"
