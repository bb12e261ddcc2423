"""The fixture of the saved trainings."""

from __future__ import annotations

import pytest

from tests.frameworks.deepspeed_files.saved import STAGES, Saved

_made: dict[int, Saved] = {}


@pytest.fixture(params=STAGES, ids=lambda stage: f"zero{stage}")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    stage: int = request.param
    if stage not in _made:
        _made[stage] = Saved(tmp_path_factory.mktemp(f"zero{stage}"), stage)
    return _made[stage]
