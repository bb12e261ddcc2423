"""Show that a resumed run of the example is the same run, bit for bit, under each layout of parallelism.

    python -m jobs.verify_resume
    python -m jobs.verify_resume --parallel 2d --workers 4 --at 6 --steps 6

Each check trains the GPT of `jobs.train_gpt` and compares by `ray_ckpt.check_resume`. It prints a line; with
a difference the first tensor and the likely cause are in it, and the exit code is 1. CPU ranks only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import ray.train
from ray.train.torch import TorchConfig

from jobs.train_gpt import PARALLEL, absolute, find_config_error, parse_args, positive, train_loop
from ray_ckpt.train.check import ResumeCheck, check_resume

WORKERS = {"ddp": 2, "fsdp2": 2, "2d": 4}  # the fewest that exercise everything; 2d: two groups of two
SHOWN = (
    "rank",
    "step",
    "moment",
    "names",
    "first_tensor",
    "cause",
)  # of a difference, in the output of --json
# A model with every kind of layer and steps of milliseconds; the start of the workers takes longer.
TINY = "--layers 2 --width 32 --heads 4 --context 32 --batch 2 --log-every 1000000 --eval-every 5"


def check(parallel: str, workers: int, args: argparse.Namespace, storage_path: str) -> ResumeCheck:
    total = args.at + args.steps
    config = parse_args([*TINY.split(), "--parallel", parallel, "--steps", str(total)])
    config.accumulate, config.seed = args.accumulate, args.seed
    return check_resume(
        train_loop,
        config=vars(config),
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        torch_config=TorchConfig(backend="gloo"),
        at=args.at,
        steps=args.steps,
        storage_path=storage_path,
        staging=args.staging,
    )


def start_ray(workers: int) -> None:
    """Connect to the cluster at RAY_ADDRESS, or start one here for `workers`, even with fewer cores."""
    if "RAY_ADDRESS" in os.environ:
        ray.init(log_to_driver=False)
    else:
        num_cpus = max(workers, os.cpu_count() or 1)
        ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False)


def describe(parallel: str, found: ResumeCheck) -> dict[str, Any]:
    """Return one line of the output of --json."""
    difference = found.difference
    return {
        "parallel": parallel,
        "ranks": found.num_ranks,
        "at": found.at,
        "steps": found.steps,
        "same": difference is None,
        "warnings": found.warnings,
        "states": found.num_states,
        "values": found.num_values,
        "seconds": {part: round(seconds, 1) for part, seconds in found.seconds.items()},
        "first_difference": None
        if difference is None
        else {name: getattr(difference, name) for name in SHOWN},
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.verify_resume",
        description="Show that a resumed run of the example is the same run, bit for bit.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--parallel", choices=PARALLEL, nargs="+", default=PARALLEL, help="what to check")
    parser.add_argument("--workers", type=positive, help="ranks; else 2, and 4 for 2d")
    parser.add_argument("--at", type=positive, default=6, help="step that is saved and restored")
    parser.add_argument("--steps", type=positive, default=6, help="steps after it that are compared")
    parser.add_argument("--accumulate", type=positive, default=2, help="micro-batches per optimizer step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--storage-path", type=absolute, help="folder all nodes share; else a temporary one")
    parser.add_argument("--staging", type=absolute, help="local folder of each node")
    parser.add_argument("--json", action="store_true", help="one JSON object per check")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    workers = {parallel: args.workers or WORKERS[parallel] for parallel in args.parallel}
    if not ray.is_initialized():
        start_ray(max(workers.values()))
    with tempfile.TemporaryDirectory(prefix="verify-resume-", ignore_cleanup_errors=True) as temporary:
        try:
            return run_checks(workers, args, args.storage_path or temporary)
        except Exception as error:
            if (cause := find_config_error(error)) is None:
                raise
            print("error:", " ".join(str(cause).split()), file=sys.stderr)
            return 2


def run_checks(workers: Mapping[str, int], args: argparse.Namespace, storage_path: str) -> int:
    """Check each layout in `workers` with its number of ranks; return the exit code."""
    differ = False
    for parallel, ranks in workers.items():
        found = check(parallel, ranks, args, storage_path)
        differ = differ or not found
        print(json.dumps(describe(parallel, found)) if args.json else f"{parallel:6}{found}", flush=True)
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
