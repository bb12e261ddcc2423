"""The model is a causal language model that learns, and its schedule is saved as plain values."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from jobs.model.gpt import GPT, VOCABULARY, WarmupCosine, next_byte_loss
from jobs.model.text import ByteLoader, cut_blocks, read_text

CONTEXT = 16


def small_gpt(dropout: float = 0.1) -> GPT:
    torch.manual_seed(0)
    return GPT(layers=2, width=32, heads=4, context=CONTEXT, dropout=dropout)


def test_logits_for_every_position() -> None:
    model = small_gpt()
    assert model(torch.zeros(3, CONTEXT, dtype=torch.long)).shape == (3, CONTEXT, VOCABULARY)
    assert model(torch.zeros(1, 5, dtype=torch.long)).shape == (1, 5, VOCABULARY)


def test_a_later_byte_leaves_earlier_logits_unchanged() -> None:
    model = small_gpt().eval()
    tokens = torch.randint(VOCABULARY, (2, CONTEXT))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % VOCABULARY
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_a_new_model_knows_nothing() -> None:
    tokens = torch.randint(VOCABULARY, (4, CONTEXT))
    loss = next_byte_loss(small_gpt().eval(), tokens, tokens)
    assert loss.item() == pytest.approx(math.log(VOCABULARY), abs=0.1)


def test_evaluation_draws_no_random_number_and_training_does() -> None:
    model, tokens = small_gpt(), torch.zeros(1, CONTEXT, dtype=torch.long)
    before = torch.get_rng_state()
    model.eval()(tokens)
    assert torch.equal(torch.get_rng_state(), before)
    model.train()(tokens)
    assert not torch.equal(torch.get_rng_state(), before)


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(ValueError, match="width 30 is not a multiple of heads 4"):
        GPT(layers=1, width=30, heads=4, context=CONTEXT)


@pytest.mark.slow
def test_it_learns() -> None:
    model = small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = iter(ByteLoader(cut_blocks(read_text(max_bytes=50_000), CONTEXT), batch_size=32))
    losses = []
    for _ in range(15):
        loss = next_byte_loss(model, *next(batches))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-3:]) / 3 < losses[0] - 1.0


def test_the_schedule_warms_up_and_falls_to_its_floor() -> None:
    factor = WarmupCosine(warmup=10, total=110, floor=0.1)
    assert [factor(0), factor(4), factor(9)] == [0.1, 0.5, 1.0]
    assert factor(10) == 1.0
    assert factor(60) == pytest.approx(0.55)
    assert factor(110) == factor(500) == pytest.approx(0.1)
    falling = [factor(done) for done in range(10, 111)]
    assert falling == sorted(falling, reverse=True)


def scheduler_of(warmup: int, total: int) -> LambdaLR:
    optimizer = torch.optim.AdamW(small_gpt().parameters(), lr=1e-3)
    return LambdaLR(optimizer, WarmupCosine(warmup=warmup, total=total))


def step(scheduler: LambdaLR) -> float:
    scheduler.optimizer.step()
    scheduler.step()
    return float(scheduler.get_last_lr()[0])


def test_the_scheduler_state_is_plain_values_and_resumes_the_schedule() -> None:
    scheduler = scheduler_of(warmup=3, total=20)
    for _ in range(7):
        step(scheduler)
    state = json.loads(json.dumps(scheduler.state_dict()))
    assert state["lr_lambdas"] == [{"warmup": 3, "total": 20, "floor": 0.1}]
    resumed = scheduler_of(warmup=1, total=999)
    resumed.load_state_dict(state)
    assert [step(resumed) for _ in range(5)] == [step(scheduler) for _ in range(5)]
