"""The simulation keeps its books, knows the formulas, and `auto` is as good as knowing the best interval."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.simulate_cadence import (
    CASES,
    SETUPS,
    Auto,
    Case,
    Failure,
    Fixed,
    Setup,
    compare,
    draw_failures,
    main,
    read_failures,
    simulate,
)
from ray_ckpt.core.interval_model import DAY_S, MAX_INTERVAL_S, OVERHEAD_BUDGET, waste

HOUR_S = 3_600.0
NOTHING: tuple[Failure, ...] = ()


def plain(**changes: object) -> Case:
    """A cluster in which restarts and drains cost nothing, if not said otherwise."""
    case = Case(
        name="plain",
        num_nodes=1,
        node_mtbf_s=3 * HOUR_S,
        horizon_s=400 * DAY_S,
        step_s=1.0,
        drain_s=0.0,
        restart_s=0.0,
        restore_s={"local": 0.0, "replicated": 0.0, "store": 0.0},
    )
    return replace(case, **changes)  # type: ignore[arg-type]


def every(seconds: float, remote_s: float = 1e9) -> Fixed:
    return Fixed("fixed", seconds, remote_s)


def stepwise(case: Case, every_s: float, failures: Sequence[Failure]) -> tuple[int, int]:
    """Steps that count and steps that were lost with a store that all wait for, one step after the other."""
    steps = max(1, round((every_s - case.store_stall_s) / case.step_s))
    due = [failure.time_s for failure in failures] + [case.horizon_s]
    now_s, step, saved, lost = 0.0, 0, 0, 0
    for time_s in due:
        while now_s < time_s:
            is_due = step > saved and (step - saved) % steps == 0
            now_s += case.store_stall_s if is_due else case.step_s
            if now_s <= time_s + 1e-9:
                saved, step = (step, step) if is_due else (saved, step + 1)
        if time_s < case.horizon_s:
            lost, step = lost + step - saved, saved
            now_s = time_s + case.restart_s + case.restore_s["store"]
    return step, lost


# -- the books ---------------------------------------------------------------------------------------


def test_without_failures_only_stalls_cost() -> None:
    outcome = simulate(plain(horizon_s=10_000.0, store_stall_s=10.0), "store", every(100.0), NOTHING)
    assert [outcome.goodput, outcome.overhead] == pytest.approx([0.9, 0.1])
    assert (outcome.saves, outcome.steps_lost, outcome.down, outcome.interval_s) == (100, 0, 0.0, 100.0)


def test_a_save_that_the_end_cuts_off_has_begun() -> None:
    outcome = simulate(plain(horizon_s=195.0, store_stall_s=10.0), "store", every(100.0), NOTHING)
    assert outcome.saves == 2 and outcome.overhead == pytest.approx(15 / 195)


@pytest.mark.parametrize("seed", range(20))
def test_it_does_in_one_go_what_step_after_step_gives(seed: int) -> None:
    """Times are whole seconds, so that both round alike."""
    chance = random.Random(seed)
    case = plain(horizon_s=5_000.0, store_stall_s=7.0, restart_s=20.0, step_s=3.0)
    failures = [Failure(float(s), "node") for s in sorted(chance.sample(range(1, 5_000), 12))]
    outcome = simulate(case, "store", every(97.0), failures)
    steps, lost = stepwise(case, 97.0, failures)
    assert outcome.goodput * case.horizon_s / case.step_s == pytest.approx(steps)
    assert outcome.steps_lost == lost


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("name", list(CASES))
def test_all_time_is_accounted_for(name: str, setup: Setup) -> None:
    """To a step per failure: one that a failure cuts off is not counted."""
    case = CASES[name]
    failures = draw_failures(case, seed=3)
    found = compare(case, setup, failures, every_steps=(100,), every_s=(600.0,))
    for outcome in (*found.policies, *found.curve):
        spent = outcome.goodput + outcome.overhead + outcome.lost + outcome.down
        assert 1 - (outcome.failures + 1) * case.step_s / case.horizon_s <= spent <= 1 + 1e-6


def test_a_failure_takes_what_its_kind_takes() -> None:
    """Saves each 100 s, one in ten goes on; the failure comes at 1999 s, between the 19th and the 20th."""
    case = plain(horizon_s=4_000.0, stall_s=0.0, local_s=1.0, replicated_s=1.0)
    lost = {
        (setup, kind): simulate(case, setup, every(100.0, 1_000.0), [Failure(1_999.0, kind)]).steps_lost
        for setup in ("local", "replicated")
        for kind in ("process", "node", "rack", "group")
    }
    assert {key for key, steps in lost.items() if steps == 999} == {
        ("local", "node"),
        ("local", "rack"),
        ("local", "group"),
        ("replicated", "group"),
    }
    assert set(lost.values()) == {99, 999}


def test_a_save_counts_when_it_is_complete() -> None:
    case = plain(horizon_s=1_000.0, stall_s=0.0, replicated_s=50.0)
    lost = [
        simulate(case, "replicated", every(100.0), [Failure(time_s, "node")]).steps_lost
        for time_s in (549.0, 550.0)
    ]
    assert lost == [149, 50]


def test_a_restart_that_fails_begins_anew() -> None:
    case = plain(horizon_s=1_000.0, store_stall_s=0.0, restart_s=100.0)
    failures = [Failure(500.0, "node"), Failure(560.0, "process"), Failure(950.0, "node")]
    outcome = simulate(case, "store", every(10.0), failures)
    assert outcome.down == pytest.approx((160 + 50) / 1_000)
    assert outcome.goodput == pytest.approx(0.79, abs=0.001)


def test_saves_are_one_at_a_time() -> None:
    outcome = simulate(plain(horizon_s=10_000.0, local_s=60.0), "local", every(5.0), NOTHING)
    assert outcome.interval_s >= 60.0 and outcome.saves <= 10_000 / 60


# -- the formulas ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stall_s", "mtbf_h", "interval_s", "wasted"),
    [(120, 3, 1610, 0.149), (30, 7.9, 1306, 0.046), (2, 7.9, 337, 0.012), (0.5, 3, 104, 0.0096)],
)
def test_the_field_s_table_comes_out(stall_s: float, mtbf_h: float, interval_s: float, wasted: float) -> None:
    case = plain(node_mtbf_s=mtbf_h * HOUR_S, store_stall_s=stall_s, step_s=0.1)
    outcome = simulate(case, "store", every(interval_s), draw_failures(case, seed=1))
    rate = 1 / case.node_mtbf_s
    expected = waste(interval_s, save_stall_s=stall_s, failure_rate_per_s=rate)
    assert expected == pytest.approx(wasted, rel=0.05)
    assert 1 - outcome.goodput == pytest.approx(expected, rel=0.03)


def test_latency_and_restarts_cost_what_the_formula_says() -> None:
    case = plain(stall_s=1.0, replicated_s=80.0, restart_s=200.0, step_s=0.1)
    outcome = simulate(case, "replicated", every(150.0), draw_failures(case, seed=2))
    expected = waste(
        150.0, save_stall_s=1.0, failure_rate_per_s=1 / case.node_mtbf_s, latency_s=80.0, restart_s=200.0
    )
    assert 1 - outcome.goodput == pytest.approx(expected, rel=0.05)


# -- policies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", list(CASES))
def test_auto_is_within_a_point_of_the_best_fixed_interval(name: str, seed: int) -> None:
    case = CASES[name]
    failures = draw_failures(case, seed)
    for setup in ("local", "replicated", "store"):
        found = compare(case, setup, failures)
        assert found.policies[-1].goodput > found.best.goodput - 0.01, setup


def test_auto_keeps_its_budget_where_that_costs() -> None:
    case = CASES["llama3"]
    kept, free = compare(case, "store", draw_failures(case, 1)).policies
    assert kept.overhead <= OVERHEAD_BUDGET < free.overhead
    assert free.goodput > kept.goodput


@pytest.mark.parametrize("name", list(CASES))
def test_a_trace_without_failures_ends_at_the_longest_interval(name: str) -> None:
    """Within what whole steps add; `llama3` has too many nodes for its 54 days to be proof of safety."""
    case = replace(CASES[name], stall_s=2.0)
    outcome = simulate(case, "replicated", Auto(case, "replicated", budget=OVERHEAD_BUDGET), NOTHING)
    assert MAX_INTERVAL_S <= outcome.interval_s <= MAX_INTERVAL_S + case.step_s + 10


def test_replicas_beat_the_store_and_local_saves() -> None:
    for case in CASES.values():
        failures = draw_failures(case, 1)
        goodput = {setup: compare(case, setup, failures).policies[0].goodput for setup in SETUPS}
        assert max(goodput, key=lambda setup: goodput[setup]) == "replicated"


def test_llama_3_has_its_number_of_failures_and_its_effective_time() -> None:
    case = CASES["llama3"]
    counts = [len(draw_failures(case, seed)) for seed in range(10)]
    assert sum(counts) / 10 == pytest.approx(419, rel=0.05)
    assert compare(case, "replicated", draw_failures(case, 1)).policies[-1].goodput > 0.9


def test_equal_seeds_give_equal_runs() -> None:
    case = CASES["rsc"]
    assert draw_failures(case, 5) == draw_failures(case, 5) != draw_failures(case, 6)
    runs = [compare(case, "replicated", draw_failures(case, 5)) for _ in range(2)]
    assert runs[0] == runs[1]


def test_the_mean_time_to_failure_does_not_depend_on_the_shape() -> None:
    case = replace(CASES["rsc"], horizon_s=3_000 * DAY_S, racks_per_day=0.0)
    counts = [len(draw_failures(case, 1, weibull_shape=shape)) for shape in (1.0, 0.7, 1.5)]
    assert counts == pytest.approx([counts[0]] * 3, rel=0.1)


def test_two_nodes_of_a_group_that_fail_together_are_told_apart() -> None:
    case = Case(name="pair", num_nodes=2, node_mtbf_s=600.0, horizon_s=DAY_S, step_s=1.0, process_share=0.0)
    kinds = [failure.kind for failure in draw_failures(case, 1)]
    assert 0.2 < kinds.count("group") / len(kinds) < 0.8
    apart = replace(case, node_mtbf_s=100 * DAY_S, horizon_s=5_000 * DAY_S)
    assert all(failure.kind == "node" for failure in draw_failures(apart, 1))


# -- the command -------------------------------------------------------------------------------------


def test_a_trace_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "failures.csv"
    path.write_text("time_s,kind\n200, node\n100,process\n\n")
    assert read_failures(path) == (Failure(100.0, "process"), Failure(200.0, "node"))


@pytest.mark.parametrize("line", ["soon,node", "1,flood", "-1,node", "nan,node", "5"])
def test_a_bad_trace_is_said_with_its_line(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "failures.csv"
    path.write_text(f"time_s,kind\n1,node\n{line}\n")
    with pytest.raises(SystemExit) as caught:
        main(["--trace", str(path), "--case", "small"])
    error = capsys.readouterr().err
    assert caught.value.code == 2 and "line 3" in error and error.count("\n") == 1


def test_it_prints_a_row_per_policy_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    main(
        ["--case", "small", "--every-steps", "50", "--every-s", "90", "--setup", "local", "--json", str(path)]
    )
    out = capsys.readouterr().out
    assert all(
        name in out for name in ("small: 8 nodes", "every 50 steps", "every 90 s", "auto", "best fixed")
    )
    document = json.loads(path.read_text())
    assert [row["policy"] for row in document["policies"]] == ["every 50 steps", "every 90 s", "auto"]
    assert document["case"]["name"] == "small" and len(document["curve"]) > 10


def test_it_draws(tmp_path: Path) -> None:
    path = tmp_path / "out.png"
    main(["--case", "small", "--plot", str(path)])
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as caught:
        main(["--case", "small", "--plot", str(tmp_path / "out.png")])
    assert caught.value.code == 2 and "pip install 'ray_ckpt[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--days", "0"], ["--every-steps", "0"], ["--case", "mars"]])
def test_wrong_usage_exits_with_2(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(option)
    assert caught.value.code == 2 and option[0] in capsys.readouterr().err
