"""The connection of a process: one restore for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from ray_ckpt.errors import ConfigError
from ray_ckpt.trainer.checkpointer import Checkpointer
from ray_ckpt.trainer.connection import Connection, set_connection
from tests.capture.local import LocalLink


@pytest.fixture(autouse=True)
def disconnect() -> Iterator[None]:
    yield
    set_connection(Connection())


@pytest.mark.parametrize("closes", [False, True])
def test_a_second_checkpointer_of_a_connection_is_refused(closes: bool) -> None:
    """It would begin with the checkpoint of the first, and save its steps under the same names."""
    set_connection(Connection(link=LocalLink()))
    first, second = Checkpointer(generator=nn.Linear(2, 2)), Checkpointer(critic=nn.Linear(2, 2))
    first.restore()
    if closes:
        first.close()
    with pytest.raises(ConfigError, match="Another Checkpointer of this process") as caught:
        second.restore()
    assert "one Checkpointer" in str(caught.value.hint)
    second.close()
    first.close()

    set_connection(Connection(link=LocalLink()))
    third = Checkpointer(generator=nn.Linear(2, 2))
    third.restore()
    third.close()


def test_the_uri_of_a_run_in_a_bucket_has_its_name_before_the_parameters() -> None:
    link = LocalLink()
    link.identity = replace(link.identity, storage_path="s3://bucket/runs?region=eu-1", run_name="gpt")
    set_connection(Connection(link=link))
    ckpt = Checkpointer(weight=torch.zeros(2))
    assert ckpt.where == "s3://bucket/runs/gpt?region=eu-1"
    ckpt.close()


def test_after_a_restore_that_failed_another_checkpointer_may_restore() -> None:
    set_connection(Connection(link=LocalLink()))
    state: dict[str, object] = {"bad": object(), "weight": torch.zeros(2)}
    first = Checkpointer(state=state)
    with pytest.raises(TypeError):
        first.restore()
    first.close()
    second = Checkpointer(weight=torch.zeros(2))
    second.restore()
    second.close()
