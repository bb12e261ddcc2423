"""The main job, started again as often as it fails: `python -m tests.fault.stubborn` and the arguments of
`jobs.train_gpt`."""

from __future__ import annotations

import sys

import ray
import ray.train

from jobs.train_gpt import build_trainer, parse_args

MAX_FAILURES = 1000  # a group that dies while it starts counts as well; no test strikes so often

if __name__ == "__main__":
    ray.init(logging_level="warning")
    trainer = build_trainer(parse_args(sys.argv[1:]))
    trainer.run_config.failure_config = ray.train.FailureConfig(max_failures=MAX_FAILURES)
    trainer.fit()
