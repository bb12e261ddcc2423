"""The checkpoint manager that a served engine of verl has in place of its own."""

from __future__ import annotations

from typing import Any

from ray_ckpt.errors import ConfigError, UnsupportedItem
from ray_ckpt.interop.packages import require
from ray_ckpt.interop.verl.engines import TrainedEngines
from ray_ckpt.interop.verl.settings import Settings, StepFolder

ROLES = {"language_model": "actor", "value_model": "critic"}
"""Roles of PPO by the type of model for which verl registers its engines."""
USED = ("module", "optimizer", "lr_scheduler", "scaler", "model_config", "engine_config", "checkpoint_config")
"""Attributes of an engine that are read here and in `engines`."""
_trained: TrainedEngines | None = None  # of this process


def serve(engine: Any, model_type: str, connect: Any) -> None:
    """Let `engine.initialize` end with our checkpoint manager; leave an engine that does not train as it is.

    Raises ConfigError and UnsupportedItem for versions, engines and options that are not supported.
    """
    global _trained
    require("verl", extra="verl")
    if getattr(engine.engine_config, "forward_only", False):  # a reference: nothing of it is saved
        return
    _check_engine(engine, model_type)
    _check_contents(engine.checkpoint_config)
    if _trained is None:
        _trained = TrainedEngines(Settings.from_environment(), connect)
    trained, role, initialize = _trained, ROLES[model_type], engine.initialize
    trained.begin(role)

    def initialize_served() -> None:
        initialize()
        require("verl", extra="verl", owner=engine, names=USED)
        _check_lora(engine)
        trained.add(role, engine)
        engine.checkpoint_manager = CheckpointManager(trained, role)

    engine.initialize = initialize_served


def _check_engine(engine: Any, model_type: str) -> None:
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    is_fsdp = getattr(type(engine), "initialize", None) is FSDPEngine.initialize
    if not is_fsdp or model_type not in ROLES:
        raise UnsupportedItem(
            f"verl's engine {type(engine).__name__} for {model_type} cannot be saved yet.",
            hint="Use the strategy fsdp or fsdp2, or unset RAY_CKPT_VERL.",
        )


def _check_contents(config: Any) -> None:
    saved, loaded = set(config.save_contents), set(config.load_contents)
    if "hf_model" in saved | loaded:
        raise UnsupportedItem(
            "checkpoint.save_contents or load_contents has hf_model.",
            hint="Leave it out; `ray-ckpt export --to hf` writes a model directory from any checkpoint.",
        )
    if saved != loaded or "model" not in saved:
        raise ConfigError(
            f"checkpoint.save_contents is {sorted(saved)} and load_contents {sorted(loaded)}.",
            hint="Give both the same contents, with the model among them.",
        )


def _check_lora(engine: Any) -> None:
    if getattr(engine.checkpoint_config, "save_lora_only", False) and engine.model_config.lora_rank > 0:
        raise UnsupportedItem(
            "checkpoint.save_lora_only saves a part of the model.",
            hint="Leave it out: the model is saved whole.",
        )


class CheckpointManager:
    """The calls that an engine of verl makes to its FSDPCheckpointManager; all ranks make them together."""

    def __init__(self, trained: TrainedEngines, role: str) -> None:
        self._trained = trained
        self._role = role

    def save_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Save all engines of this process once the last of them is called; see `TrainedEngines.save`.

        `local_path` is the folder that verl would fill, which names the run and the step. Raises ConfigError
        for arguments that differ from the run's options, Unavailable if a save that verl waits for is no
        checkpoint.
        """
        if local_path is None:
            return
        _refuse_hdfs(hdfs_path)
        folder = StepFolder.of(local_path)
        if folder.step != global_step:
            raise ConfigError(f"verl saves step {global_step} to {local_path}.", hint="The steps must agree.")
        self._trained.save(self._role, folder, max_ckpt_to_keep)

    def load_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Restore all engines of this process, at the first call; see `TrainedEngines.load`.

        Nothing is deleted. Raises RestoreError unless the step that `local_path` names is restored.
        """
        if local_path is None:
            return
        _refuse_hdfs(hdfs_path)
        self._trained.load(self._role, StepFolder.of(local_path))


def _refuse_hdfs(hdfs_path: str | None) -> None:
    if hdfs_path is not None:
        raise ConfigError(
            f"verl copies checkpoints to {hdfs_path}.",
            hint='Unset trainer.default_hdfs_dir; use {"storage_path": "s3://bucket/runs"} in RAY_CKPT_VERL.',
        )
