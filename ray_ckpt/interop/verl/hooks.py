"""Hooks of the plug-in in verl's modules.

verl imports plug-ins before its own modules, and some of these fix the device when they are imported. So each
hook runs behind the import of its module, and no module is imported for a hook.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ray_ckpt.interop.packages import require
from ray_ckpt.interop.verl.resume import latest_folder
from ray_ckpt.interop.verl.settings import Settings

Connect = Callable[..., Callable[[], None]]
"""`begin_connect`: begins to connect, and returns the function that completes this."""


def install(connect: Connect) -> None:
    """Make engines of verl, from their creation on, save and restore through ray_ckpt."""
    hooks = {
        "verl.workers.engine.base": lambda module: _hook_engines(module, connect),
        "verl.utils.checkpoint.checkpoint_manager": _hook_resume,
    }
    for name in hooks.keys() & sys.modules.keys():
        hooks[name](sys.modules[name])
    sys.meta_path.insert(0, _Finder(hooks))


class _Finder(MetaPathFinder):
    """Finds the modules that have hooks, by the finders behind this one, and runs the hooks."""

    def __init__(self, hooks: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._hooks = hooks

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        hook = self._hooks.get(fullname)
        if hook is None:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((found for found in specs if found is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                hook(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _hook_engines(module: ModuleType, connect: Connect) -> None:
    """Give each engine that the registry creates our checkpoint manager."""
    registry: Any = module.EngineRegistry
    create = registry.new

    @wraps(create)
    def new(cls: Any, model_type: str, backend: str, *args: Any, **kwargs: Any) -> Any:
        engine = create(model_type, backend, *args, **kwargs)
        from ray_ckpt.interop.verl.manager import serve  # torch, which the driver may not need

        serve(engine, model_type, connect)
        return engine

    registry.new = classmethod(new)


def _hook_resume(module: ModuleType) -> None:
    """Let verl's trainers find the newest step in the log of the run, before they look into the tracker."""
    find: Any = module.find_latest_ckpt_path

    @wraps(find)
    def find_latest_ckpt_path(path: str | None, directory_format: str = "global_step_{}") -> str | None:
        require("verl", extra="verl")
        if path is not None and (folder := latest_folder(Settings.from_environment(), path)) is not None:
            return folder
        found: str | None = find(path, directory_format)
        return found

    module.find_latest_ckpt_path = find_latest_ckpt_path  # type: ignore[attr-defined]
