"""The example's three ways to share the model compute what one process computes."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh

from jobs import train_gpt
from jobs.model.gpt import GPT, next_byte_loss, tensor_parallel
from jobs.model.text import ByteLoader, cut_blocks, read_text
from jobs.train_gpt import build_mesh, build_model, evaluate, parse_args, train_step
from ray_ckpt.capture.items import local_tensor

RANKS, STEPS, BATCH, CONTEXT = 4, 3, 2, 16
HELD_OUT_BLOCKS = 6  # not a multiple of the ranks
MAX_NORM = 1.5  # between the norm of the gradients of the first step and those of the others
CPU = torch.device("cpu")
TINY = f"--layers 2 --width 16 --heads 4 --context {CONTEXT} --batch {BATCH} --accumulate 2 --lr 0.3"


def config_of(parallel: str, dropout: float = 0.0) -> dict[str, Any]:
    return vars(parse_args([*TINY.split(), "--parallel", parallel, "--dropout", str(dropout)]))


def blocks() -> torch.Tensor:
    return cut_blocks(read_text(max_bytes=20_000), CONTEXT)


def one_process(config: dict[str, Any], data_ranks: int) -> dict[str, Any]:
    """Losses, the last evaluation and the sum of all weights, of plain steps over the same global batches."""
    torch.manual_seed(0)
    model = GPT(**{name: config[name] for name in ("layers", "width", "heads", "context", "dropout")})
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    batches = [
        iter(ByteLoader(blocks(), batch_size=BATCH, rank=r, world_size=data_ranks)) for r in range(data_ranks)
    ]
    losses = []
    for _ in range(STEPS):
        parts = [next_byte_loss(model, *next(b)) for _ in range(config["accumulate"]) for b in batches]
        loss = torch.stack(parts).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    held_out = blocks()[:HELD_OUT_BLOCKS].long()
    eval_loss = next_byte_loss(model.eval(), held_out[:, :-1], held_out[:, 1:]).item()
    return {"losses": losses, "eval": eval_loss, "weights": weights_of(model)}


def weights_of(model: torch.nn.Module) -> list[float]:
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    return [p.detach().double().abs().sum().item() for p in whole]


def train_rank(rank: int, folder: str, cases: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    train_gpt.MAX_GRADIENT_NORM = MAX_NORM
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    results = [train_case(config) for config in cases]
    Path(folder, f"rank{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def train_case(config: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    mesh = build_mesh(config, CPU)
    data = mesh["data"]
    model = build_model(config, CPU, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    loader = ByteLoader(blocks(), batch_size=BATCH, rank=data.get_local_rank(), world_size=data.size())
    batches = iter(loader)
    torch.manual_seed(data.get_local_rank())
    losses = [train_step(model, optimizer, batches, config["accumulate"], CPU).item() for _ in range(STEPS)]
    with torch.no_grad():  # or DDP waits for a backward
        logits = model(torch.zeros(1, CONTEXT, dtype=torch.long)).double().sum().item()
    eval_loss = evaluate(model, blocks()[:HELD_OUT_BLOCKS], CPU, data).item()
    rng = torch.get_rng_state().sum().item()
    row = data.get_local_rank()
    return {
        "losses": losses,
        "eval": eval_loss,
        "weights": weights_of(model),
        "row": row,
        "rng": rng,
        "resumes": resumes_exactly(config, mesh, model, loader),
        "logits": logits,
    }


def resumes_exactly(
    config: dict[str, Any], mesh: DeviceMesh, model: torch.nn.Module, loader: ByteLoader
) -> bool:
    """Return whether a new model with the weights of this one has equal weights after one more step."""
    again = build_model(config, CPU, mesh)
    with torch.no_grad():
        for new, old in zip(again.parameters(), model.parameters(), strict=True):
            new.copy_(old)
    position, rng = loader.state_dict(), torch.get_rng_state()
    for either in (model, again):
        loader.load_state_dict(position)
        torch.set_rng_state(rng)
        optimizer = torch.optim.SGD(either.parameters(), lr=config["lr"])
        train_step(either, optimizer, iter(loader), config["accumulate"], CPU)
    pairs = zip(again.parameters(), model.parameters(), strict=True)
    return all(torch.equal(local_tensor(new), local_tensor(old)) for new, old in pairs)


CASES = [config_of(parallel, dropout) for parallel in ("ddp", "fsdp2", "2d") for dropout in (0.0, 0.5)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """Return the results by case and rank; four processes are started once for all cases."""
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.set_forkserver_preload(["jobs.train_gpt"])  # one import for all
    mp.start_processes(  # type: ignore[attr-defined,no-untyped-call]
        train_rank, (str(folder), CASES), nprocs=RANKS, start_method="forkserver"
    )
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    return [[of_rank[case] for of_rank in ranks] for case in range(len(CASES))]


@pytest.mark.slow
@pytest.mark.parametrize("case", [0, 2, 4], ids=["ddp", "fsdp2", "2d"])
def test_ranks_train_as_one_process_does_on_the_whole_batch(
    case: int, trained: list[list[dict[str, Any]]]
) -> None:
    alone = one_process(CASES[case], data_ranks=2 if CASES[case]["parallel"] == "2d" else RANKS)
    for rank in trained[case]:
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert rank["eval"] == pytest.approx(alone["eval"], rel=1e-5)
        assert rank["weights"] == pytest.approx(alone["weights"], rel=1e-4, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", range(6), ids=lambda case: f"{CASES[case]['parallel']}-{CASES[case]['dropout']}"
)
def test_a_model_built_anew_goes_on_with_the_same_bits(
    case: int, trained: list[list[dict[str, Any]]]
) -> None:
    assert [rank["resumes"] for rank in trained[case]] == [True] * RANKS


@pytest.mark.slow
def test_tensor_ranks_drop_the_same_activations_and_data_ranks_others(
    trained: list[list[dict[str, Any]]],
) -> None:
    ranks = trained[5]
    rows = {row: [(r["logits"], r["rng"]) for r in ranks if r["row"] == row] for row in (0, 1)}
    assert [len(set(row)) for row in rows.values()] == [1, 1]
    assert rows[0][0] != rows[1][0]


@pytest.mark.slow
def test_dropout_changes_the_loss_under_every_layout(trained: list[list[dict[str, Any]]]) -> None:
    for calm, dropped in (trained[0:2], trained[2:4], trained[4:6]):
        assert calm[0]["losses"][0] != dropped[0]["losses"][0]


def test_heads_that_tensor_ranks_cannot_share_are_refused() -> None:
    class Three:
        def size(self) -> int:
            return 3

    with pytest.raises(ValueError, match="4 heads cannot be shared by 3"):
        tensor_parallel(GPT(layers=1, width=16, heads=4, context=CONTEXT), Three())  # type: ignore[arg-type]
