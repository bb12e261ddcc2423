"""Starts a Ray worker that imports modules before it registers with Ray; see `warm.WarmWorkers`.

    python -m ray_ckpt.train.warm_start SCRIPT [ARGUMENT ...]

Ray starts its worker processes with this command in place of `python SCRIPT`.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from ray_ckpt.train import warm

# torch then asks for GPUs without fixing which ones the process sees, which Ray decides later
CHECK_ENV = "PYTORCH_NVML_BASED_CUDA_CHECK"
# Ray ends a process that has not registered after 60 s, and starts another. So:
LONGEST_S = 20.0  # of imports; no other one begins after it
GIVEN_UP_S = 40.0  # of imports; one that has not ended then is given up, and all others with it


def main() -> None:
    script, *arguments = sys.argv[1:]
    env = dict(os.environ)

    def start_anew(reason: str) -> None:
        _log(f"{reason}; this worker starts without it")
        os.execve(sys.executable, [sys.executable, script, *arguments], env)

    if not sys.flags.safe_path:
        sys.path[0] = str(Path(script).parent)  # as `python SCRIPT` sets it
    before = signal.signal(
        signal.SIGALRM, lambda *_: start_anew(f"a module is still imported after {GIVEN_UP_S:.0f} s")
    )
    signal.setitimer(signal.ITIMER_REAL, GIVEN_UP_S)
    _import_all(os.environ.get(warm.MODULES_ENV, ""))
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        start_anew("a module has initialized CUDA when it was imported")
    gc.collect()
    gc.freeze()  # what was imported stays: collections, and searches of all live objects, leave it out
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def _import_all(names: str) -> None:
    end_s = time.monotonic() + LONGEST_S
    is_ours = CHECK_ENV not in os.environ
    os.environ.setdefault(CHECK_ENV, "1")
    for name in filter(None, names.split(",")):
        if time.monotonic() > end_s:
            _log(f"{name} is not imported ahead of time: the modules before it took {LONGEST_S:.0f} s")
            continue
        try:
            importlib.import_module(name)
        except (Exception, SystemExit):  # the program reports it if it needs the module
            _log(f"{name} was not imported ahead of time:")
            traceback.print_exc()
        if name in warm.OF_EVERY_RANK and "torch" in sys.modules:
            warm.threads_at_start = sys.modules["torch"].get_num_threads()
    if is_ours:
        del os.environ[CHECK_ENV]


def _log(text: str) -> None:
    print(f"ray_ckpt: {text}", file=sys.stderr)


if __name__ == "__main__":
    main()
