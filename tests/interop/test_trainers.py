"""The trainers of Transformers, Accelerate and Lightning in one process: refusals, and exact resumes."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import lightning.pytorch as pl
import pytest
import torch
import transformers.trainer
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import ray_ckpt
from ray_ckpt.config import RunOptions
from ray_ckpt.errors import ConfigError, NotConnected, UnsupportedItem
from ray_ckpt.interop.accelerate import PREPARED
from ray_ckpt.interop.huggingface.trainer import OVERRIDDEN
from ray_ckpt.trainer.connection import Connection, set_connection
from tests.capture.local import LocalLink

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata's loader
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning's loops
]
AT, TOTAL, WIDTH = 4, 8, 4
State = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def disconnect() -> Iterator[None]:
    yield
    set_connection(Connection())


def connect(**options: Any) -> LocalLink:
    """Connect this process to a new run."""
    link = LocalLink(RunOptions(memory="single", max_block_s=10.0, **options))
    set_connection(Connection(link=link))
    return link


def assert_equal(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# -- Transformers ----------------------------------------------------------------------------------------


class Halt(TrainerCallback):  # type: ignore[misc]
    """Ends the training after a step, of which the checkpoint is then the last one."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_training_stop |= state.global_step == self._step
        return control


class Named(Trainer):  # type: ignore[misc]
    """A trainer with attributes of its own, as that of TRL has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._metrics: dict[str, list[float]] = {"train": []}
        self._items = ("mine",)
        self._checkpointer = "mine"

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self._metrics["train"].append(float(loss.detach()))
        return loss


def build(folder: Path, kind: type[Trainer] = Trainer, *, seed: int = 0, **args: Any) -> Trainer:
    """Build a trainer of a small model with dropout: an epoch has six steps."""
    transformers.set_seed(seed)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
        )
    )
    rows = torch.randint(16, (24, 8), generator=torch.Generator().manual_seed(7))
    settings = {
        "max_steps": TOTAL,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.01,
        "save_steps": AT,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = TrainingArguments(output_dir=str(folder), **{**settings, **args})
    return kind(model=model, args=arguments, train_dataset=data, eval_dataset=data[:2])


def train(folder: Path, link: LocalLink, kind: type[Trainer] = Trainer, *, until: int = TOTAL) -> Trainer:
    set_connection(Connection(link=link))
    trainer = build(folder, kind, seed=link.given.session_key[1])
    trainer.add_callback(Halt(until))
    ray_ckpt.huggingface.prepare_trainer(trainer).train()
    trainer._ray_ckpt.checkpointer.close()
    return trainer


@pytest.mark.parametrize("kind", [Trainer, Named])
def test_a_trainer_of_transformers_resumes_bit_for_bit(tmp_path: Path, kind: type[Trainer]) -> None:
    whole = train(tmp_path / "hf", connect(), kind)
    first = connect()
    train(tmp_path / "hf", first, kind, until=AT)
    second = first.resumed(tmp_path, AT)
    resumed = train(tmp_path / "hf", second, kind)
    assert (list(first.files), list(second.files)) == ([AT], [TOTAL]), "resumed, and not trained from 0"
    assert_equal(resumed.model.state_dict(), whole.model.state_dict())
    losses = [[(e["step"], e["loss"]) for e in t.state.log_history if "loss" in e] for t in (whole, resumed)]
    assert losses[0] == losses[1] and len(losses[0]) == TOTAL
    assert not list(tmp_path.glob("hf/checkpoint-*"))


class Stream(IterableDataset[Any]):
    """Rows of six steps, without a length."""

    def __iter__(self) -> Iterator[Any]:
        for row in torch.randint(16, (24, 8), generator=torch.Generator().manual_seed(7)):
            yield {"input_ids": row, "labels": row}


def test_a_streamed_training_resumes_behind_its_first_pass(tmp_path: Path) -> None:
    """Transformers then skips a whole pass, at whose end no step has begun, and looks at what is due."""

    def run(link: LocalLink) -> Trainer:
        set_connection(Connection(link=link))
        trainer = build(tmp_path / "hf", seed=link.given.session_key[1], max_steps=10)
        trainer.train_dataset = Stream()
        ray_ckpt.huggingface.prepare_trainer(trainer).train()
        trainer._ray_ckpt.checkpointer.close()
        return trainer

    first = connect(every_steps=8)
    run(first)
    second = first.resumed(tmp_path, 8)
    assert run(second).state.global_step == 10 and list(second.files) == [10]


@pytest.mark.parametrize("max_steps", [AT, pytest.param(AT - 1, marks=pytest.mark.slow)])
def test_a_run_that_is_over_makes_no_step_at_a_restart(tmp_path: Path, max_steps: int) -> None:
    first = connect()
    done = train(tmp_path, first, until=AT)
    second = first.resumed(tmp_path, AT)
    set_connection(Connection(link=second))
    again = build(tmp_path, seed=1, max_steps=max_steps)
    ray_ckpt.huggingface.prepare_trainer(again).train()
    again._ray_ckpt.checkpointer.close()
    assert again.state.global_step == AT and not second.files
    assert_equal(again.model.state_dict(), done.model.state_dict())


def test_without_the_random_state_a_trainer_trains_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = connect()
    whole = train(tmp_path / "hf", first)
    monkeypatch.setattr(ray_ckpt.Checkpointer, "restore_random_state", lambda self: None)
    resumed = train(tmp_path / "hf", first.resumed(tmp_path, AT))
    weights = [t.model.state_dict()["transformer.wte.weight"] for t in (whole, resumed)]
    assert not torch.equal(*weights)


def test_attributes_of_a_subclass_stay_its_own(tmp_path: Path) -> None:
    trainer = train(tmp_path, connect(), Named)
    assert (trainer._items, trainer._checkpointer) == (("mine",), "mine")
    assert len(trainer._metrics["train"]) == 2 * TOTAL


def evaluated(folder: Path, link: LocalLink, **args: Any) -> Trainer:
    """Train with evaluations of a loss that falls."""
    set_connection(Connection(link=link))
    trainer = build(folder, seed=link.given.session_key[1], metric_for_best_model="eval_loss", **args)
    ray_ckpt.huggingface.prepare_trainer(trainer).train()
    trainer._ray_ckpt.checkpointer.close()
    return trainer


def test_the_end_of_an_epoch_is_saved_once_behind_its_evaluation(tmp_path: Path) -> None:
    epochs = {"save_strategy": "epoch", "eval_strategy": "epoch", "max_steps": 12}
    first = connect(every_steps=3)
    whole = evaluated(tmp_path, first, **epochs)
    assert [sealed.attempt.step for sealed in first.sealed] == [3, 6, 9, 12]
    assert ["eval_loss" in (sealed.metrics or {}) for sealed in first.sealed] == [False, True, False, True]
    resumed = evaluated(tmp_path, first.resumed(tmp_path, 6), **epochs)
    logged = [[e["eval_loss"] for e in t.state.log_history if "eval_loss" in e] for t in (whole, resumed)]
    assert logged[0] == logged[1] and len(logged[0]) == 2, "an evaluation is neither lost nor repeated"


def test_an_epoch_that_ends_early_adds_to_the_save_of_its_last_step(tmp_path: Path) -> None:
    link = connect(every_steps=AT)
    set_connection(Connection(link=link))
    trainer = build(tmp_path, save_strategy="epoch", eval_strategy="epoch")
    trainer.add_callback(Halt(AT))
    ray_ckpt.huggingface.prepare_trainer(trainer).train()
    trainer._ray_ckpt.checkpointer.close()
    assert [sealed.attempt.step for sealed in link.sealed] == [AT]
    assert [(step, "eval_loss" in metrics) for step, metrics, *_ in link.annotated] == [(AT, True)]


def test_with_saves_of_the_best_the_cadence_holds_where_an_evaluation_is_not_the_best(tmp_path: Path) -> None:
    link = connect(every_steps=AT)
    args = {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": AT, "greater_is_better": True}
    assert evaluated(tmp_path, link, max_steps=TOTAL + 1, **args).state.best_global_step == AT
    assert list(link.files) == [AT, TOTAL, TOTAL + 1], "the loss of the second evaluation is lower"


def test_the_best_model_is_the_best_one_that_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[int] = []
    run = SimpleNamespace(load=lambda *, into, step: loaded.append(step))
    monkeypatch.setattr("ray_ckpt.interop.huggingface.trainer.open_run", lambda *args: run)
    args = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
    trainer = evaluated(tmp_path, connect(keep_best=("eval_loss", "min", 1)), **args)
    assert (loaded, trainer.state.best_model_checkpoint) == ([TOTAL], f"/runs/run@{TOTAL}")

    highest = {**args, "greater_is_better": True}  # that of step 4
    trainer = evaluated(tmp_path, connect(keep_best=("eval_loss", "max", 1)), save_steps=TOTAL, **highest)
    assert trainer.state.best_global_step == AT
    assert (loaded, trainer.state.best_model_checkpoint) == ([TOTAL], None)

    first = connect(keep_best=("eval_loss", "max", 1))
    evaluated(tmp_path, first, **highest)
    evaluated(tmp_path, first.resumed(tmp_path, AT), eval_delay=99, **highest)
    assert loaded == [TOTAL, AT, AT], "the last one is from before the restart"


BEST = r"needs the best checkpoint by eval_loss.*keep_best=\('eval_loss', 'min', 1\)"
REFUSED_ARGUMENTS = [
    ({"enable_jit_checkpoint": True}, {}, "enable_jit_checkpoint=True takes SIGTERM"),
    ({"save_total_limit": 7}, {}, "save_total_limit=7, and the run keeps the last 3.*keep_last=7"),
    ({"save_total_limit": 2}, {"keep_last": 4}, "save_total_limit=2, and the run keeps the last 4"),
    ({"load_best_model_at_end": True}, {}, BEST),
    ({"load_best_model_at_end": True}, {"keep_best": ("eval_loss", "max", 1)}, BEST),
    (
        {"load_best_model_at_end": True, "metric_for_best_model": "f1"},
        {"keep_best": ("f1", "max", 1)},
        "needs the best checkpoint by eval_f1",
    ),
]


@pytest.mark.parametrize(("args", "options", "message"), REFUSED_ARGUMENTS)
def test_arguments_that_the_run_contradicts_are_refused(
    tmp_path: Path, args: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    connect(**options)
    evaluates = "steps" if "load_best_model_at_end" in args else "no"
    trainer = build(tmp_path, eval_strategy=evaluates, eval_steps=AT, **args)
    with pytest.raises(ConfigError, match=message):
        ray_ckpt.huggingface.prepare_trainer(trainer)


@pytest.mark.parametrize("strategy", ["every_save", "checkpoint", "all_checkpoints"])
def test_pushes_of_checkpoint_folders_are_refused(tmp_path: Path, strategy: str) -> None:
    connect()
    trainer = build(tmp_path)
    trainer.args.push_to_hub, trainer.args.hub_strategy = True, transformers.trainer.HubStrategy(strategy)
    with pytest.raises(ConfigError, match="pushes checkpoint folders") as caught:
        ray_ckpt.huggingface.prepare_trainer(trainer)
    assert strategy in str(caught.value) and 'hub_strategy="end"' in str(caught.value.hint)
    trainer.args.hub_strategy = transformers.trainer.HubStrategy("end")
    ray_ckpt.huggingface.prepare_trainer(trainer)


def test_a_search_for_a_batch_size_is_refused(tmp_path: Path) -> None:
    connect()
    with pytest.raises(ConfigError, match="auto_find_batch_size") as caught:
        ray_ckpt.huggingface.prepare_trainer(build(tmp_path, auto_find_batch_size=True))
    assert "per_device_train_batch_size" in str(caught.value.hint)


def test_deepspeed_and_the_callback_of_ray_are_refused(tmp_path: Path) -> None:
    from ray.train.huggingface.transformers import RayTrainReportCallback

    connect()
    trainer = build(tmp_path)
    trainer.is_deepspeed_enabled = True
    with pytest.raises(UnsupportedItem, match="runs DeepSpeed"):
        ray_ckpt.huggingface.prepare_trainer(trainer)
    trainer.is_deepspeed_enabled = False
    callback = RayTrainReportCallback()
    trainer.add_callback(callback)
    with pytest.raises(ConfigError, match="RayTrainReportCallback copies checkpoint folders"):
        ray_ckpt.huggingface.prepare_trainer(trainer)
    trainer.remove_callback(callback)
    ray_ckpt.huggingface.prepare_trainer(trainer)


def test_a_trainer_is_prepared_once_and_trains_once(tmp_path: Path) -> None:
    connect()
    trainer = ray_ckpt.huggingface.prepare_trainer(build(tmp_path, max_steps=1))
    with pytest.raises(ConfigError, match="prepare_trainer was called twice"):
        ray_ckpt.huggingface.prepare_trainer(trainer)
    for folder in ("old", Path("old")):
        with pytest.raises(ConfigError, match="is the folder 'old'") as caught:
            trainer.train(resume_from_checkpoint=folder)
        assert "from_pretrained" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="a search has many"):
        trainer.train(trial={"learning_rate": 0.1})
    assert trainer.train(resume_from_checkpoint=True).global_step == 1
    with pytest.raises(ConfigError, match="train was called twice"):
        trainer.train()


def test_a_trainer_that_belongs_to_no_run_is_refused_unchanged(tmp_path: Path) -> None:
    trainer = build(tmp_path)
    with pytest.raises(NotConnected, match="belongs to no run"):
        ray_ckpt.huggingface.prepare_trainer(trainer)
    assert type(trainer) is Trainer


# -- Accelerate ------------------------------------------------------------------------------------------


def loop(link: LocalLink, *, stateful: bool, until: int = TOTAL) -> State:
    """Train with accumulation over an epoch of six steps, as the guide does; return the weights."""
    set_connection(Connection(link=link))
    accelerate.utils.set_seed(link.given.session_key[1])
    accelerator = accelerate.Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        dataloader_config=accelerate.DataLoaderConfiguration(
            use_stateful_dataloader=stateful, use_seedable_sampler=True
        ),
    )
    model: Any = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(7)))
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=2, shuffle=True)
    )
    scheduler: Any = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 3))
    position = {"epoch": 0, "batch": 0}
    ckpt = ray_ckpt.Checkpointer(**ray_ckpt.accelerate.items(accelerator), position=position)
    info = ckpt.restore()
    step = info.step if info is not None else 0
    batches = loader
    if position["batch"] and not stateful:
        batches = accelerator.skip_first_batches(loader, position["batch"])
    while step < until:
        batches.set_epoch(position["epoch"])
        for (batch,) in batches:
            ckpt.restore_random_state()
            with accelerator.accumulate(model):
                accelerator.backward((model(batch) - batch.sum(1, keepdim=True)).square().mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            position["batch"] += 1
            if accelerator.sync_gradients:
                step += 1
                if ckpt.due(step):
                    ckpt.save(step)
                if step == until:
                    break
        else:
            position.update(epoch=position["epoch"] + 1, batch=0)
            batches = loader
    ckpt.finish()
    ckpt.close()
    return dict(accelerator.unwrap_model(model).state_dict())


@pytest.mark.parametrize("stateful", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_loop_with_accelerate_resumes_bit_for_bit(tmp_path: Path, stateful: bool) -> None:
    whole = loop(connect(every_steps=AT), stateful=stateful)
    first = connect(every_steps=AT)
    loop(first, stateful=stateful, until=AT)
    second = first.resumed(tmp_path, AT)
    resumed = loop(second, stateful=stateful)
    assert (list(first.files), list(second.files)) == ([AT], [TOTAL])
    assert_equal(resumed, whole)


def test_an_accelerator_is_asked_after_prepare_and_without_other_engines() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(ConfigError, match="has prepared no model"):
        ray_ckpt.accelerate.items(accelerator)
    for engine in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
        kind = accelerate.DistributedType(engine)
        other = SimpleNamespace(distributed_type=kind, **dict.fromkeys(PREPARED.values()))
        with pytest.raises(UnsupportedItem, match=f"Accelerate runs {engine}"):
            ray_ckpt.accelerate.items(other)


# -- Lightning -------------------------------------------------------------------------------------------


class Small(pl.LightningModule):  # type: ignore[misc]
    """A model with dropout; `seen` has what each batch of training and validation gave."""

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__()
        self.seen: list[tuple[str, int, float]] = []
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def on_train_start(self) -> None:
        torch.rand(3)  # as a validation before training would

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss)
        self.seen.append(("train", self.global_step, float(loss.detach())))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = (self.net(batch) - torch.rand(1)).square().mean()
        self.log("val_loss", loss)
        if not self.trainer.sanity_checking:
            self.seen.append(("validate", self.global_step, float(loss)))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def pl_trainer(*, until: int = TOTAL, **args: Any) -> pl.Trainer:
    return pl.Trainer(
        **args,
        max_steps=until,
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=2,
        use_distributed_sampler=False,
        callbacks=[ray_ckpt.lightning.CheckpointCallback()],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    )


def fit(link: LocalLink, trainer: pl.Trainer, **kwargs: Any) -> Small:
    set_connection(Connection(link=link))
    data: Any = list(torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(7)))
    sampler = ray_ckpt.GlobalBatchSampler(
        24, global_batch=2, rank=0, world_size=1, seed=3, num_batches=2 * TOTAL
    )
    model = Small(seed=link.given.session_key[1])
    loader = sampler.batches(DataLoader(data, batch_sampler=sampler))
    trainer.fit(model, loader, DataLoader(data[:4], batch_size=2), **kwargs)
    return model


@pytest.mark.parametrize(
    "batches",
    [4, 2 * AT, pytest.param(6, marks=pytest.mark.slow)],
    ids=["often", "with the saves", "beside the saves"],
)
def test_a_fit_of_lightning_resumes_bit_for_bit(tmp_path: Path, batches: int) -> None:
    """`batches` are those between two validations."""
    args = {"val_check_interval": batches}
    whole = fit(connect(every_steps=AT), pl_trainer(**args))
    first = connect(every_steps=AT)
    begun = fit(first, pl_trainer(until=AT, **args))
    second, trainer = first.resumed(tmp_path, AT), pl_trainer(**args)
    resumed = fit(second, trainer)
    assert (list(first.files), list(second.files)) == ([AT], [TOTAL])
    assert trainer.global_step == TOTAL
    assert begun.seen + resumed.seen == whole.seen, "each batch and each validation once"
    assert sum(kind == "validate" for kind, *_ in whole.seen) == 2 * (2 * TOTAL // batches)
    assert_equal(dict(resumed.state_dict()), dict(whole.state_dict()))


def test_a_fit_that_restores_otherwise_is_refused(tmp_path: Path) -> None:
    trainer = pl_trainer(until=1)
    trainer.strategy.connect(Small())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(ConfigError, match=r"ckpt_path=.*this callback restores too"):
        fit(connect(), trainer, ckpt_path=str(tmp_path / "last.ckpt"))


def test_one_callback_serves_one_fit() -> None:
    trainer = pl_trainer(until=1)
    fit(connect(), trainer)
    with pytest.raises(ConfigError, match="has served a fit"):
        fit(connect(), trainer)


def test_deepspeed_of_lightning_is_refused() -> None:
    connect()
    strategy = object.__new__(DeepSpeedStrategy)  # its __init__ needs deepspeed
    with pytest.raises(UnsupportedItem, match="Lightning runs DeepSpeed"):
        ray_ckpt.lightning.CheckpointCallback().on_fit_start(
            SimpleNamespace(ckpt_path=None, strategy=strategy), Small()
        )


# -- versions --------------------------------------------------------------------------------------------


def prepare(folder: Path) -> None:
    connect()
    ray_ckpt.huggingface.prepare_trainer(build(folder))


USES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "transformers": ("huggingface", prepare),
    "accelerate": (
        "accelerate",
        lambda folder: ray_ckpt.accelerate.items(accelerate.Accelerator(cpu=True)),
    ),
    "lightning": ("lightning", lambda folder: ray_ckpt.lightning.CheckpointCallback()),
}
KNOWN = {"transformers": "<6,>=5.23", "accelerate": "<2,>=1.15", "lightning": "<2.7,>=2.6"}


def fail_with(monkeypatch: pytest.MonkeyPatch, package: str, version: str | None) -> None:
    """Let a package have another version; without one, let it be missing."""
    installed = importlib.metadata.version

    def found(name: str) -> str:
        if name == package and version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version if name == package and version is not None else installed(name)

    monkeypatch.setattr("ray_ckpt.interop.packages.version", found)


@pytest.mark.parametrize("package", USES)
@pytest.mark.parametrize("version", ["0.1", "99.0", None])
def test_a_version_that_is_not_known_is_refused_with_the_known_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, version: str | None
) -> None:
    extra, use = USES[package]
    fail_with(monkeypatch, package, version)
    with pytest.raises(ConfigError) as caught:
        use(tmp_path)
    found = f"{version} is not supported" if version else "is not installed"
    assert str(caught.value).startswith(f"{package} {found}; {package}{KNOWN[package]} is needed.")
    assert f'pip install "ray_ckpt[{extra}]"' in str(caught.value.hint)


def test_an_unknown_accelerate_under_a_trainer_names_the_extra_of_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(monkeypatch, "accelerate", "99.0")
    with pytest.raises(ConfigError, match=r"accelerate 99\.0 is not supported") as caught:
        prepare(tmp_path)
    assert 'pip install "ray_ckpt[huggingface]"' in str(caught.value.hint)


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_each_overridden_method_is_one_that_transformers_has_and_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert f"self.{name}(" in inspect.getsource(transformers.trainer)
    trainer = build(tmp_path)
    connect()
    monkeypatch.delattr(Trainer, name)
    with pytest.raises(ConfigError, match=rf"transformers \S+ has no {name};") as caught:
        ray_ckpt.huggingface.prepare_trainer(trainer)
    assert "older transformers" in str(caught.value.hint)


@pytest.mark.parametrize("name", PREPARED.values())
def test_each_attribute_of_an_accelerator_is_there_and_is_missed(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    assert isinstance(getattr(accelerator, name), list)
    delattr(accelerator, name)
    with pytest.raises(ConfigError, match=rf"accelerate \S+ has no {name};"):
        ray_ckpt.accelerate.items(accelerator)


@pytest.mark.parametrize("name", ["_data_fetcher", "_num_ready_batches_reached", "_should_check_val_fx"])
def test_each_private_name_of_lightning_is_there_and_is_missed(name: str) -> None:
    loop = pl_trainer().fit_loop
    assert hasattr(loop if name == "_data_fetcher" else loop.epoch_loop, name)

    has_fetcher = {} if name == "_data_fetcher" else {"_data_fetcher": None}
    trainer: Any = SimpleNamespace(global_step=1, fit_loop=SimpleNamespace(epoch_loop=None, **has_fetcher))
    callback = ray_ckpt.lightning.CheckpointCallback()
    connect(every_steps=1)
    callback._checkpointer = ray_ckpt.Checkpointer(model=nn.Linear(2, 2))
    callback._checkpointer.restore()
    with pytest.raises(ConfigError, match=rf"lightning \S+ has no .*{name}.*;"):
        callback.on_train_batch_end(trainer, None, None, None, 0)
    callback._checkpointer.close()
