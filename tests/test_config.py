"""The options of a run: refused values, and messages that show what to set instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ray_ckpt.config import MAX_METRIC_NAME, MAX_MILESTONES, RunOptions, from_json, staging_roots
from ray_ckpt.errors import ConfigError


def test_the_defaults_are_good_and_so_is_everything_at_once() -> None:
    assert RunOptions() == RunOptions.parse()
    options = RunOptions.parse(
        keep_every=1000,
        keep_every_s=600,
        remote_every_s=600,
        keep_best=("val/loss", "max", 1),
        keep_milestones=(0.1, 1),
        total_steps=10_000,
        keep_epochs=True,
        ttl_s=0.5,
        low_watermark=0.5,
        high_watermark=1,
        scrub_bytes_per_s=0,
        failure_domain="rack",
        spare_nodes="role=spare",
        replica_nodes="role=storage",
        copies=("rack",),
    )
    assert options.keep_best == ("val/loss", "max", 1)


def test_lists_of_json_are_tuples() -> None:
    found = from_json(json.loads('{"parity": [6, 2], "replicas": 1, "storage_options": {"profile": "a"}}'))
    assert found == {"parity": (6, 2), "replicas": 1, "storage_options": {"profile": "a"}}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("replicas", -1),
        ("keep_last", 0),
        ("keep_last", True),
        ("keep_every", 0),
        ("keep_every", 1.0),
        ("keep_every_s", 0),
        ("remote_every_s", 0),
        ("every_s", "often"),
        ("anew", ["optimizer"]),
        ("keep", ("",)),
        ("overhead_budget", 1),
        ("ttl_s", float("inf")),
        ("ttl_s", "1d"),
        ("keep_best", ["loss", "min", 2]),
        ("keep_best", ("loss", "least", 2)),
        ("keep_best", ("loss", "min", 0)),
        ("keep_best", ("loss", "min")),
        ("keep_best", ("", "min", 2)),
        ("keep_best", ("a\nb", "min", 2)),
        ("keep_best", ("x" * (MAX_METRIC_NAME + 1), "min", 2)),
        ("keep_milestones", [0.5]),
        ("keep_milestones", (0,)),
        ("keep_milestones", (1.1,)),
        ("keep_milestones", (0.5,) * (MAX_MILESTONES + 1)),
        ("total_steps", 0),
        ("keep_epochs", 1),
        ("keep_local", 0),
        ("retire_grace_s", -1),
        ("max_block_s", float("nan")),
        ("high_watermark", 1.1),
        ("high_watermark", 90),
        ("low_watermark", 0),
        ("low_watermark", 0.9),
        ("failure_domain", ""),
        ("spare_nodes", "spare"),
        ("spare_nodes", "role="),
        ("spare_nodes", None),
        ("spare_nodes", "role = spare"),
        ("spare_nodes", "role=spare,tier=2"),
        ("replica_nodes", " role=storage"),
        ("replica_nodes", "role=storage=2"),
        ("replica_nodes", "storage"),
        ("copies", ("rack", "spread")),
        ("copies", ("zone",)),
        ("salvage_copy", True),
        ("copies", ["rack"]),
        ("failure_domain", None),
        ("reserve_bytes", -1),
        ("repair_bytes_per_s", 0),
        ("scrub_bytes_per_s", 1.5),
        ("resume", "yes"),
        ("attempt_timeout_s", 0),
        ("restore_timeout_s", 0),
        ("parity", [6, 2]),
    ],
)
def test_an_impossible_option_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        RunOptions.parse(**{"total_steps": 100, option: value})
    assert caught.value.fields["option"] == option
    assert str(caught.value).startswith(f"{option} is {value!r}. Set it to ")


def test_replicas_that_may_differ_do_not_stand_in_for_each_other() -> None:
    with pytest.raises(ConfigError, match=r'salvage is True. Set it to False, because of replicate="full"'):
        RunOptions.parse(salvage=True, replicate="full")


def test_a_staging_folder_that_is_no_text_is_refused_with_what_to_give() -> None:
    with pytest.raises(ConfigError, match=r"Set it to the path of a folder as a str, a tuple of such paths"):
        RunOptions.parse(staging=Path("/mnt/nvme"))


def test_a_staging_folder_in_the_home_of_nobody_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert staging_roots(("~/a", "/b/{node_id}", "~/a"), "n1") == (Path("/home/me/a"), Path("/b/n1"))
    with pytest.raises(ConfigError, match="~nobody-at-all/nvme is in a home"):
        staging_roots("~nobody-at-all/nvme", "n1")


def test_a_variable_without_a_staging_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node would have no disk."""
    monkeypatch.setenv("RAY_CKPT_STAGING", ":")
    with pytest.raises(ConfigError, match="RAY_CKPT_STAGING is ':'"):
        staging_roots("/a", "n1")
    monkeypatch.setenv("RAY_CKPT_STAGING", "")
    assert staging_roots("/a", "n1") == (Path("/a"),)


def test_a_run_that_must_have_a_checkpoint_begins_with_no_other() -> None:
    with pytest.raises(ConfigError, match=r"init_from is set, and resume is 'must'.*Use resume='auto'"):
        RunOptions(init_from="s3://bucket/runs/gpt", resume="must")


def test_the_uri_of_a_checkpoint_may_be_a_path_but_not_a_relative_one() -> None:
    """`Catalog(...).newest().path` is a Path."""
    for name in ("resume", "init_from"):
        options = RunOptions.parse(**{name: Path("/shared/runs/gpt@30")})
        assert getattr(options, name) == "/shared/runs/gpt@30"
        for relative in ("runs/gpt@30", Path("runs/gpt@30"), "~/runs/gpt@30"):
            with pytest.raises(ConfigError, match=rf"{name} is '{relative}'\..* an absolute path"):
                RunOptions.parse(**{name: relative})


def test_milestones_need_the_length_of_the_run() -> None:
    with pytest.raises(ConfigError, match=r"needs total_steps. Set total_steps") as caught:
        RunOptions(keep_milestones=(0.5,))
    assert caught.value.fields["option"] == "total_steps"


def test_an_unknown_option_names_the_closest() -> None:
    with pytest.raises(ConfigError, match="Did you mean keep_milestones"):
        RunOptions.parse(keep_milestone=(0.5,))
    with pytest.raises(ConfigError, match="Unknown option 'cls'"):
        RunOptions.parse(cls=1)
