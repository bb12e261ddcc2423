"""Starts a Ray worker that imports modules before it registers with Ray; see `warm.WarmWorkers`.

    python -m ray_ckpt.train.warm_start SCRIPT [ARGUMENT ...]

Ray starts its worker processes with this command in place of `python SCRIPT`.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import traceback
from pathlib import Path

from ray_ckpt.train.warm import MODULES_ENV

# torch then asks for GPUs without fixing which ones the process sees, which Ray decides later
CHECK_ENV = "PYTORCH_NVML_BASED_CUDA_CHECK"


def main() -> None:
    is_ours = CHECK_ENV not in os.environ
    os.environ.setdefault(CHECK_ENV, "1")
    for name in filter(None, os.environ.get(MODULES_ENV, "").split(",")):
        try:
            importlib.import_module(name)
        except (Exception, SystemExit):  # the program reports it if it needs the module
            print(f"ray_ckpt: {name} was not imported ahead of time:", file=sys.stderr)
            traceback.print_exc()
    if is_ours:
        del os.environ[CHECK_ENV]
    script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)  # as `python SCRIPT` sets it
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
