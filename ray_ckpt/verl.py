"""verl through ray_ckpt: verl imports this module by its entry point `verl.plugins`; see docs/guides/verl.md.

Without RAY_CKPT_VERL in the environment, the import has no effect. verl ignores plug-ins that raise when they
are imported, so everything is checked where an engine is built.
"""

from __future__ import annotations

from typing import Any

from ray_ckpt.interop.verl.hooks import install
from ray_ckpt.interop.verl.settings import is_wanted


def _begin_connect(**options: Any) -> Any:
    from ray_ckpt.actors.connecting import begin_connect

    return begin_connect(**options)


if is_wanted():
    install(_begin_connect)
