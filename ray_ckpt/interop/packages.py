"""Check that another trainer's package is one of the versions that its integration knows."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from ray_ckpt.errors import ConfigError

KNOWN = {
    "accelerate": SpecifierSet(">=1.15,<2"),
    "deepspeed": SpecifierSet(">=0.19.8,<0.20"),
    "lightning": SpecifierSet(">=2.6,<2.7"),
    "megatron-core": SpecifierSet(">=0.15,<0.17"),
    "peft": SpecifierSet(">=0.21,<1"),
    "torchft": SpecifierSet(">=0.2,<0.3"),
    "torchtitan": SpecifierSet(">=0.3,<0.4"),
    "transformers": SpecifierSet(">=5.23,<6"),
    "verl": SpecifierSet(">=0.9.1,<0.10"),
    "vllm": SpecifierSet(">=0.30,<0.31"),
}


def require(package: str, *, extra: str, owner: object = None, names: tuple[str, ...] = ()) -> None:
    """Raise ConfigError unless a known version of `package` is installed.

    `names` are the attributes of `owner`, private ones of the package, that the integration uses or
    overrides: a version that lacks one is not known either.
    """
    known = KNOWN[package]
    hint = f'pip install "ray_ckpt[{extra}]" takes a version that works.'
    try:
        found = version(package)
    except PackageNotFoundError:
        raise ConfigError(f"{package} is not installed; {package}{known} is needed.", hint=hint) from None
    if not known.contains(found, prereleases=True):
        raise ConfigError(f"{package} {found} is not supported; {package}{known} is needed.", hint=hint)
    if missing := [name for name in names if not hasattr(owner, name)]:
        raise ConfigError(
            f"{package} {found} has no {', '.join(missing)}; ray_ckpt was written for {package}{known}.",
            hint=f"Use an older {package}, or a newer ray_ckpt.",
        )
