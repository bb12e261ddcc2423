"""A rank that may outlive others: what it keeps after each step, and when it offers its live state."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from ray_ckpt.capture.walk import Walked
from ray_ckpt.config import RunOptions
from ray_ckpt.core.step_states import SALVAGE_TRY
from ray_ckpt.core.values import Salvage
from ray_ckpt.errors import Unavailable
from ray_ckpt.format.names import make_attempt
from ray_ckpt.format.shard import build_layout
from ray_ckpt.trainer import survivor
from ray_ckpt.trainer.checkpointer import Checkpointer
from tests.capture.local import LocalLink

STEPS = 3


class Loop:
    """The training of rank 0 of two, with a buffer and random numbers of its own."""

    def __init__(self, *, is_frozen: bool = False, with_average: bool = False, **options: Any) -> None:
        defaults = {"memory": "double", "salvage": True}
        self.link = LocalLink(RunOptions(**{**defaults, **options}), world_size=2)
        self.model: Any = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.model[0].requires_grad_(not is_frozen)
        trained = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.1)
        self.average: Any = deepcopy(self.model).requires_grad_(False)
        more = {"average": self.average} if with_average else {}
        self.ckpt = Checkpointer(link=self.link, model=self.model, optimizer=self.optimizer, **more)
        self.states: dict[int, dict[str, torch.Tensor]] = {}  # step -> what a checkpoint of it has

    def forward(self) -> None:
        self.model(torch.randn(4, 8)).square().mean().backward()

    def run(self, steps: int = STEPS) -> None:
        """Train; the backward pass after the last step fails, as if another rank had died."""
        for step in self.ckpt.steps(total=100):
            self.forward()
            if step > steps:
                raise RuntimeError("connection closed by peer")
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.states[step] = self.state()
            self.ckpt.step(step)

    def state(self) -> dict[str, torch.Tensor]:
        found = {f"model.{name}": tensor.clone() for name, tensor in self.model.state_dict().items()}
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                found[f"optimizer.state.{name}.exp_avg"] = self.optimizer.state[param]["exp_avg"].clone()
        return found | {"rank0.rng.torch_cpu": torch.get_rng_state()}

    def decide(self, step: int, *savers: int) -> None:
        session = (1, 1)
        attempt = make_attempt(run_uid="0" * 32, session=1, epoch=1, step=step, attempt=SALVAGE_TRY)
        self.link.decision.set_result(Salvage(session_key=session, attempt=attempt, savers=savers))


@contextmanager
def loop(**options: Any) -> Iterator[Loop]:
    made = Loop(**options)
    try:
        yield made
    finally:
        made.ckpt.close()


def fails(training: Loop) -> None:
    with pytest.raises(RuntimeError, match="connection closed"):
        training.run()


def test_after_each_step_the_agent_gets_what_no_other_rank_holds() -> None:
    with loop() as training:
        training.link.decision.set_result(Salvage(session_key=(1, 1), reason="a test"))
        fails(training)
        assert [state.step for state in training.link.kept] == [1, 2, 3]
        state = training.link.kept[-1]
        keys = {part.key for part in state.slices}
        assert {"model.1.running_mean", "rank0.rng.torch_cpu"} <= keys
        assert not any("weight" in key for key in keys)
        assert len(state.shard) == build_layout(state.slices).size_bytes
        assert len({state.holds.split()[0] for state in training.link.kept[1:]}) == 1
        assert len({state.holds for state in training.link.kept[1:]}) == 2, "with the number of steps"


def test_a_survivor_saves_the_last_step_although_its_next_one_has_begun() -> None:
    with loop() as training:
        training.decide(STEPS, 0)
        fails(training)
        assert training.link.offers == [(STEPS,)]
        found = training.link.tensors(STEPS)
        assert torch.equal(found["model.0.weight"], training.model[0].weight), "no rank else shares it out"
        assert not torch.equal(found["rank0.rng.torch_cpu"], torch.get_rng_state()), "of the next forward"
        assert not torch.equal(found["model.1.running_mean"], training.model[1].running_mean)
        assert training.link.state(STEPS)["step"] == STEPS


def test_a_step_is_offered_while_ranks_wait_for_each_other_in_its_report() -> None:
    with loop() as training:
        training.link.decision.set_result(Salvage(session_key=(1, 1), reason="a test"))

        def wait_for_a_dead_rank(step: int) -> None:
            if step == STEPS:
                training.link.question.set_result(True)
                while not training.link.offers:
                    time.sleep(0.01)

        training.ckpt._reports.report_if_due = wait_for_a_dead_rank  # type: ignore[method-assign]
        fails(training)
        assert training.link.offers == [(STEPS,)]


def test_the_question_of_a_new_agent_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with loop() as training:
        link = training.link
        link.decision.set_result(Salvage(session_key=(1, 1), reason="a test"))
        training.ckpt.restore()
        for step in (1, 2, 3):
            if step == 1:
                link.question.set_exception(Unavailable("the agent has died"))
                monkeypatch.setattr(LocalLink, "asked", fail)  # there is no agent yet
            elif step == 2:
                monkeypatch.undo()
                link.question = Future()
            training.forward()
            training.optimizer.step()
            training.ckpt.step(step)
        link.question.set_result(True)
        while not link.offers:
            time.sleep(0.01)
        assert link.offers == [(3,)]


def fail(link: LocalLink, session_key: object) -> Future[bool]:
    raise Unavailable("there is no agent")


def test_survivors_share_out_what_they_hold_alike() -> None:
    with loop() as training:
        training.decide(STEPS, 0, 1)
        fails(training)
        saved = {key for key in training.link.tensors(STEPS) if key.startswith("optimizer")}
        assert 0 < len(saved) < 12


@pytest.mark.parametrize("step", [STEPS, STEPS - 1])
def test_with_a_copy_the_step_before_can_be_saved_too(step: int) -> None:
    with loop(salvage_copy=True) as training:
        training.decide(step, 0)
        fails(training)
        assert training.link.offers == [(STEPS, STEPS - 1)]
        found, wanted = training.link.tensors(step), training.states[step]
        assert training.link.state(step)["step"] == step
        assert wanted.keys() <= found.keys()
        for key, tensor in wanted.items():
            assert torch.equal(found[key], tensor), key


def test_a_copy_is_offered_when_an_optimizer_step_was_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other optimizer step overwrites it while it is captured."""
    monkeypatch.setattr(survivor, "WHOLE_S", 0.01)
    with loop(salvage_copy=True) as training:
        training.ckpt.restore()
        training.forward()
        training.optimizer.step()
        training.ckpt.step(1)
        wanted = training.model[0].weight.detach().clone()
        training.forward()
        training.optimizer.step()
        training.link.question.set_result(True)
        while not training.link.offers:
            time.sleep(0.01)
        assert training.link.offers == [(1,)]
        threading.Timer(0.3, training.decide, (1, 0)).start()
        training.ckpt.step(2)
        training.optimizer.step()
        assert torch.equal(training.link.tensors(1)["model.0.weight"], wanted)


def test_a_step_that_was_changed_before_it_was_copied_is_not_offered() -> None:
    with loop(salvage_copy=True) as training:
        training.ckpt.restore()
        for step in (1, 2):
            training.forward()
            training.optimizer.step()
            training.ckpt.step(step)
            if step == 1:
                change(training)
        training.link.question.set_result(True)
        while not training.link.offers:
            time.sleep(0.01)
        assert training.link.offers == [(2,)]
        training.link.decision.set_result(Salvage(session_key=(1, 1), reason="a test"))


def test_frozen_parameters_are_not_copied() -> None:
    with loop(salvage_copy=True, is_frozen=True) as training:
        training.decide(STEPS - 1, 0)
        fails(training)
        copied = vars(training.ckpt)["_survivor"]._copied
        assert {x.slice.key for x in copied.live} == {"model.0.weight", "model.0.bias"}
        assert torch.equal(training.link.tensors(STEPS - 1)["model.0.weight"], training.model[0].weight)


def test_a_static_item_that_an_optimizer_has_is_copied() -> None:
    """A fused step does not count its changes, so that live tensors would be those of the next step."""
    with loop(salvage_copy=True, static_items=("model",)) as training:
        training.decide(STEPS - 1, 0)
        fails(training)
        copied = vars(training.ckpt)["_survivor"]._copied
        assert not copied.live
        found = training.link.tensors(STEPS - 1)["model.0.weight"]
        assert torch.equal(found, training.states[STEPS - 1]["model.0.weight"])


def test_training_goes_on_if_there_is_no_memory_for_a_copy(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "empty_like", lambda *_, **__: 1 / 0)
    with loop(salvage_copy=True) as training:
        training.link.decision.set_result(Salvage(session_key=(1, 1), reason="a test"))
        fails(training)
        assert training.link.offers == [(STEPS,)]
    (warning,) = (r.getMessage() for r in caplog.records if "not copied from now on" in r.getMessage())
    assert "ZeroDivisionError" in warning


@pytest.mark.parametrize("changes", ["step", "tensor"])
def test_a_state_that_is_of_no_finished_step_is_not_offered(
    changes: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survivor, "WHOLE_S", 0.01)
    with loop() as training:
        training.ckpt.restore()
        training.forward()
        training.optimizer.step()
        training.ckpt.step(1)
        training.forward()
        if changes == "step":
            training.optimizer.step()
        else:
            with torch.no_grad():
                training.model[0].weight.add_(1.0)
        training.link.question.set_result(True)
        thread = next(t for t in threading.enumerate() if t.name == "ray_ckpt-salvage")
        thread.join(10.0)
        assert not training.link.offers
    why = "After step 1 an optimizer step has begun" if changes == "step" else "1 model.0.weight was changed"
    assert any(why in record.getMessage() for record in caplog.records)


def test_a_rank_that_is_asked_makes_no_step_before_its_state_is_captured() -> None:
    """Its training thread hangs in a collective operation, or goes on."""
    with loop() as training:
        training.ckpt.restore()
        training.forward()
        training.optimizer.step()
        training.ckpt.step(1)
        weight = training.model[0].weight.detach().clone()
        training.link.question.set_result(True)
        threading.Timer(0.3, training.decide, (1, 0)).start()
        while not training.link.offers:
            time.sleep(0.01)
        training.forward()
        training.optimizer.step()
        assert torch.equal(training.link.tensors(1)["model.0.weight"], weight)
        assert not torch.equal(training.model[0].weight, weight)


def asked_after_a_step(training: Loop) -> torch.Tensor:
    """Train one step, and let the rank offer it; return a weight of that step."""
    training.ckpt.restore()
    training.forward()
    training.optimizer.step()
    training.ckpt.step(1)
    training.link.question.set_result(True)
    while not training.link.offers:
        time.sleep(0.01)
    weight: torch.Tensor = training.model[0].weight.detach().clone()
    return weight


def change(training: Loop) -> None:
    with torch.no_grad():
        training.model[0].weight.add_(1.0)


def end_of_salvage() -> None:
    thread = next(t for t in threading.enumerate() if t.name == "ray_ckpt-salvage")
    thread.join(10.0)


def test_a_step_whose_tensors_change_before_they_are_captured_is_not_saved(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survivor, "OPERATION_S", 0.01)
    with loop() as training:
        asked_after_a_step(training)
        change(training)
        training.decide(1, 0)
        end_of_salvage()
        assert not training.link.files
        assert "After step 1 model.0.weight was changed" in training.link.skipped[1]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_saver_that_cannot_save_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the launcher waits for the salvage until its time is up, and the next group with it."""
    with loop() as training:
        asked_after_a_step(training)
        monkeypatch.setattr(vars(training.ckpt)["_saver"], "wait_free", lambda _: False)
        training.decide(1, 0)
        end_of_salvage()
        assert training.link.skipped == {1: "The save before is still being written."}


def test_a_change_under_the_lock_waits_for_the_capture() -> None:
    with loop() as training:
        weight = asked_after_a_step(training)
        threading.Timer(0.3, training.decide, (1, 0)).start()
        with training.ckpt.lock():
            change(training)
        assert torch.equal(training.link.tensors(1)["model.0.weight"], weight)


def replay(training: Loop) -> None:
    """Change a weight as a CUDA graph does: no hook runs, and no version shows it."""
    training.model[0].weight.data.add_(1.0)


@pytest.mark.parametrize("has_copy", [True, False])
def test_after_a_change_under_the_lock_the_live_state_is_not_offered(
    has_copy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survivor, "WHOLE_S", 0.01)
    with loop(salvage_copy=has_copy) as training:
        training.ckpt.restore()
        training.forward()
        training.optimizer.step()
        training.ckpt.step(1)
        weight = training.model[0].weight.detach().clone()
        with training.ckpt.lock():
            replay(training)
        if has_copy:
            training.decide(1, 0)
        training.link.question.set_result(True)
        end_of_salvage()
        assert training.link.offers == ([(1,)] if has_copy else [])
        if has_copy:
            assert torch.equal(training.link.tensors(1)["model.0.weight"], weight)


@pytest.mark.parametrize("has_copy", [True, False])
@pytest.mark.parametrize("goes_on", [True, False])
def test_the_memory_of_tensors_that_have_moved_is_free(
    has_copy: bool, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survivor, "WHOLE_S", 0.01)
    with loop(salvage_copy=has_copy, is_frozen=True) as training:
        training.ckpt.restore()
        for step in (1, 2, 3):
            training.forward()
            training.optimizer.step()
            training.ckpt.step(step)
        left = [param.untyped_storage()._weak_ref() for param in training.model.parameters()]
        with training.ckpt.lock(moves=True):
            for param in training.model.parameters():
                param.data = param.data.clone()
        assert all(map(torch.UntypedStorage._expired, left))
        if goes_on:
            for step in (4, 5):
                training.forward()
                training.optimizer.step()
                if step == 4:
                    training.ckpt.step(4)
                    weight = training.model[1].weight.detach().clone()
            if has_copy:
                training.decide(4, 0)
        training.link.question.set_result(True)
        end_of_salvage()
        assert training.link.offers == ([(4,)] if has_copy and goes_on else [])
        if has_copy and goes_on:
            assert torch.equal(training.link.tensors(4)["model.1.weight"], weight)


def test_a_step_in_which_no_optimizer_step_was_seen_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survivor, "WHOLE_S", 0.01)
    with loop() as training:
        training.ckpt.restore()
        training.forward()
        training.optimizer.step()
        training.ckpt.step(1)
        for step in (2, 3):
            replay(training)
            training.ckpt.step(step)
        assert [state.step for state in training.link.kept] == [1]
        training.link.question.set_result(True)
        end_of_salvage()
        assert not training.link.offers, "nor is step 1, whose tensors are gone"


@pytest.mark.parametrize("is_counted", [True, False])
def test_an_average_of_weights_is_saved_as_it_was_at_the_step_or_not_at_all(
    is_counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is frozen and in no optimizer, as parameters that training leaves alone, and yet it changes.

    A change through `.data` has no version, so the step before is dropped until a save has found it.
    """
    monkeypatch.setattr(survivor, "WHOLE_S", 0.01)
    averages = []
    with loop(salvage_copy=True, with_average=True) as training:
        training.ckpt.restore()
        for step in (1, 2, 3):
            training.forward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            for mean, param in zip(training.average.parameters(), training.model.parameters(), strict=True):
                with torch.no_grad():
                    (mean if is_counted else mean.data).mul_(0.5).add_(param, alpha=0.5)
            averages.append(training.average[0].weight.detach().clone())
            if step < 3:
                training.ckpt.step(step)
        training.decide(2, 0)
        training.link.question.set_result(True)
        end_of_salvage()
        if is_counted:
            assert torch.equal(training.link.tensors(2)["average.0.weight"], averages[1])
        else:
            assert not training.link.files
            assert "average.0.weight was changed through `.data`" in training.link.skipped[2]


class Hookless(torch.optim.Optimizer):
    """An optimizer like those that update in gradient hooks: torch runs no hooks of its steps."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.inner.param_groups:
            for param in group["params"]:
                param.data.sub_(0.1)


def test_steps_of_an_optimizer_without_hooks_are_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    with loop() as training:
        training.ckpt.restore()
        still = vars(training.ckpt)["_items"].still
        still.optimizers = (Hookless(training.optimizer),)
        for step in (1, 2):
            training.forward()
            still.optimizers[0].step()
            training.model.zero_grad()
            with training.ckpt.lock():
                pass
            training.ckpt.step(step)
        assert not training.link.kept
    assert any("The steps of Hookless run no hooks" in r.getMessage() for r in caplog.records)


def test_a_save_waits_for_a_salvage_that_uses_the_memory() -> None:
    """With one buffer, the save of step 2 would overwrite the copy of step 1 before it is written."""
    with loop(salvage_copy=True, every_steps=2, memory="single") as training:
        training.ckpt.restore()
        training.forward()
        training.optimizer.step()
        training.ckpt.step(1)
        weight = training.model[0].weight.detach().clone()
        training.forward()
        training.optimizer.step()
        training.link.question.set_result(True)
        while not training.link.offers:
            time.sleep(0.01)
        threading.Timer(0.3, training.decide, (1, 0)).start()
        training.ckpt.step(2)
        assert training.link.decision.done() and not training.ckpt.stats.dropped
        assert torch.equal(training.link.tensors(1)["model.0.weight"], weight)


def test_a_salvage_waits_for_a_save_that_uses_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survivor, "WHOLE_S", 0.2)
    with loop(every_steps=1) as training:
        training.ckpt.restore()
        training.forward()
        training.optimizer.step()
        saver = vars(training.ckpt)["_saver"]
        real = saver.wait_free

        def asked_meanwhile(timeout_s: float) -> bool:
            training.link.question.set_result(True)
            time.sleep(1.5 * survivor.WHOLE_S)
            assert not training.link.offers
            free: bool = real(timeout_s)
            return free

        monkeypatch.setattr(saver, "wait_free", asked_meanwhile)
        training.ckpt.step(1)
        monkeypatch.undo()
        training.decide(1, 0)
        end_of_salvage()
        assert training.link.offers == [(1,)]


def test_a_checkpointer_that_is_not_closed_is_kept_by_nobody() -> None:
    link, model, optimizer = forgotten()
    deadline_s = time.monotonic() + 10.0  # the search for unregistered objects may still look at them
    while (model() is not None or optimizer() is not None) and time.monotonic() < deadline_s:
        gc.collect()
        time.sleep(0.05)
    assert model() is None and optimizer() is None
    link.question.set_result(True)
    Loop().optimizer.step()
    assert not link.offers


def forgotten() -> tuple[LocalLink, weakref.ref[Any], weakref.ref[Any]]:
    """Train with a Checkpointer that is not closed; return what is left of it."""
    training = Loop()
    training.ckpt.restore()
    training.forward()
    training.optimizer.step()
    training.ckpt.step(1)
    vars(training.ckpt)["_watch"].stop()
    assert training.link.kept
    return training.link, weakref.ref(training.model), weakref.ref(training.optimizer)


def test_a_forked_child_does_not_wait_for_a_lock_that_nobody_frees_there() -> None:
    with loop() as training:
        training.ckpt.restore()
        survives = vars(training.ckpt)["_survivor"]
        is_taken, may_end = threading.Event(), threading.Event()

        def takes() -> None:
            with survives._state:
                is_taken.set()
                may_end.wait(10.0)

        thread = threading.Thread(target=takes)
        thread.start()
        is_taken.wait(10.0)
        survives._pid += 1
        with survives.saving():
            assert not may_end.is_set()
        survives._pid -= 1
        may_end.set()
        thread.join()


def test_a_checkpointer_is_closed_when_its_salvage_has_ended() -> None:
    with loop() as training:
        weight = asked_after_a_step(training)
        threading.Timer(0.3, training.decide, (1, 0)).start()
        training.ckpt.close()
        training.optimizer.step()
        assert torch.equal(training.link.tensors(1)["model.0.weight"], weight)
        assert len(training.link.grants) == 1


def test_too_much_state_of_one_rank_is_not_sent(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survivor, "MAX_STEP_STATE_BYTES", 1000)
    monkeypatch.setattr(survivor, "WHOLE_S", 0.01)
    with loop() as training:
        fails(training)
        assert not training.link.kept and not training.link.offers
    (warning,) = (r.getMessage() for r in caplog.records if "cannot be salvaged" in r.getMessage())
    assert "rank 0 alone holds" in warning


@pytest.mark.parametrize(("limit_bytes", "encoded_after"), [(1000, [11, 12]), (6000, [1, 3, 7, 11, 12])])
def test_too_much_state_is_looked_at_again_after_longer_and_longer_pauses(
    limit_bytes: int, encoded_after: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No state file is made if the tensors alone are too much, such as the 5 KB of the random state."""
    monkeypatch.setattr(survivor, "MAX_STEP_STATE_BYTES", limit_bytes)
    monkeypatch.setattr(survivor, "MAX_PAUSE_STEPS", 4)
    with loop() as training:
        training.ckpt.restore()
        items = vars(training.ckpt)["_items"]
        encode, encoded = items.encode_state, []

        def encode_state(step: int, walked: Walked) -> bytes:
            encoded.append(step)
            data: bytes = encode(step, walked)
            return data

        monkeypatch.setattr(items, "encode_state", encode_state)
        for step in range(1, 13):
            if step == 8:
                monkeypatch.setattr(survivor, "MAX_STEP_STATE_BYTES", 1 << 20)
            training.forward()
            training.optimizer.step()
            training.ckpt.step(step)
        assert encoded == encoded_after
        assert [state.step for state in training.link.kept] == [11, 12]


def test_without_the_option_nothing_is_kept() -> None:
    with loop(salvage=False) as training:
        fails(training)
        assert not training.link.kept and not training.link.offers


def test_an_error_while_a_state_is_kept_does_not_stop_training(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survivor, "versions", lambda _: 1 / 0)
    monkeypatch.setattr(survivor, "WHOLE_S", 0.01)
    with loop() as training:
        fails(training)
        assert not training.link.kept and not training.link.offers
    (warning,) = (r.getMessage() for r in caplog.records if "no step can be salvaged" in r.getMessage())
    assert "ZeroDivisionError" in warning
