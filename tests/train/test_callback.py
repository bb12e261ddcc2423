"""The callback without a cluster: its options, which of several works, and what its hooks do with errors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle

import ray_ckpt
from ray_ckpt.actors import connecting as service
from ray_ckpt.actors.messages import RunSpec
from ray_ckpt.errors import (
    CheckpointError,
    ConfigError,
    Fenced,
    InsufficientSpace,
    RestoreError,
    RunConflict,
    RunInUse,
    RunSuperseded,
    ServiceError,
    StateError,
    Unavailable,
)
from ray_ckpt.preemption.sigterm import TermSignal
from ray_ckpt.train import CheckpointCallback
from ray_ckpt.train import callback as module
from ray_ckpt.train.callback import OPTIONS_ENV
from ray_ckpt.trainer.connection import get_connection, set_connection
from ray_ckpt.types import LaunchTimes


def context_of(*callbacks: object, **config: Any) -> Any:
    """Return the argument of after_controller_start; its run_config has copies of the callbacks."""
    copies = cloudpickle.loads(cloudpickle.dumps(callbacks))
    fields = {"name": "run", "storage_path": "/nowhere", "storage_filesystem": None, **config}
    return SimpleNamespace(run_config=SimpleNamespace(callbacks=copies, **fields))


class Failing(CheckpointCallback):
    """Cannot open its run: tests with a cluster open some."""

    reason: Exception = Unavailable("there is no cluster")

    def _open(self) -> Any:
        raise self.reason


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OPTIONS_ENV, raising=False)


# -- options of the environment --------------------------------------------------------------------------


def test_the_environment_gives_defaults_and_keywords_win(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '{"replicas": 2, "keep_last": 7, "keep_best": ["loss", "min", 2], "storage_path": "/shared"}'
    monkeypatch.setenv(OPTIONS_ENV, text)
    plain, given = CheckpointCallback(), CheckpointCallback(keep_last=3, storage_path="/mine")
    assert (plain._options.replicas, plain._options.keep_last) == (2, 7)
    assert plain._options.keep_best == ("loss", "min", 2), "lists are tuples"
    assert (given._options.replicas, given._options.keep_last) == (2, 3)
    assert (plain._storage_path, given._storage_path) == ("/shared", "/mine")


@pytest.mark.parametrize(
    "text",
    ["{", "[1]", "7", '{"storage_path": 7}', '{"storage_path": ""}', '{"replica": 1}', '{"replicas": -1}'],
)
def test_a_bad_environment_is_an_error_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(OPTIONS_ENV, text)
    with pytest.raises(ConfigError, match=OPTIONS_ENV):
        CheckpointCallback()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "storage_path has '' as the storage path. Give a folder"),
        (7, "storage_path has 7"),
        ("runs", "storage_path: The storage path 'runs' is relative"),
        ("s3://key:secret@b/runs", "storage_path: The s3:// storage path holds credentials"),
    ],
)
def test_a_wrong_storage_path_is_refused_before_training(path: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CheckpointCallback(storage_path=path)
    assert message in str(caught.value) and "secret" not in str(caught.value)


def test_a_bad_keyword_is_not_blamed_on_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPTIONS_ENV, '{"replicas": 2, "keep_milestones": [0.5]}')
    with pytest.raises(ConfigError) as caught:
        CheckpointCallback(replicas=-1, total_steps=10)
    assert OPTIONS_ENV not in str(caught.value)
    assert CheckpointCallback(total_steps=10)._options.keep_milestones == (0.5,), "they are checked together"


# -- several in one trainer ------------------------------------------------------------------------------


def are_passive(in_run_config: tuple[CheckpointCallback, ...], *others: CheckpointCallback) -> list[bool]:
    """Run the hook of each callback, those of a RunConfig first; return which are passive."""
    callbacks = (*in_run_config, *others)
    for callback in callbacks:
        callback.after_controller_start(context_of(*in_run_config))
    return [callback._is_passive for callback in callbacks]


def test_one_of_several_callbacks_works_and_the_others_log_that_they_do_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, given = Failing, partial(Failing, replicas=0)

    assert are_passive((), plain()) == [False], "the environment's alone"
    assert "does nothing" not in caplog.text
    assert are_passive((given(),), plain()) == [False, True]
    assert "does nothing: another one comes before it" in caplog.text
    assert are_passive((plain(),), plain()) == [False, True], "of equals the later one"
    assert are_passive((plain(), plain())) == [True, False]
    assert are_passive((given(), plain())) == [False, True], "arguments count for more than the place"
    assert are_passive((given(), given()), plain()) == [True, False, True]


def test_a_passive_callback_leaves_the_group_and_the_worker_alone() -> None:
    passive, chosen = Failing(), Failing(replicas=0)
    assert are_passive((chosen,), passive) == [False, True]
    assert passive.before_init_train_context([object()]) == {}
    before = get_connection()
    passive.after_init_train_context()
    passive.before_worker_shutdown()
    assert get_connection() is before
    asyncio.run(passive.before_controller_shutdown())


# -- the times of a launch -------------------------------------------------------------------------------


class Launching(CheckpointCallback):
    """Opens groups of one rank on node n by itself: `opened` has the times of each group."""

    def _open(self) -> Any:
        return RunSpec(name="run", storage_path="/nowhere", options=self._options)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    found = Launches()
    monkeypatch.setattr(module, "open_group", found.open_group)
    monkeypatch.setattr(time, "time", lambda: found.now_s)
    return found


class Launches:
    """A clock, and the times with which groups were opened; `error` is raised instead if it is set."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.opened: list[LaunchTimes] = []
        self.error: Exception | None = None
        self.callback = Launching()
        self.callback.after_controller_start(context_of())

    def open_group(self, spec: RunSpec, nodes: list[str], *, owner: str, launch: LaunchTimes) -> object:
        assert nodes == ["n"]
        if self.error is not None:
            raise self.error
        self.opened.append(launch)
        return SimpleNamespace()

    def failed(self, now_s: float) -> None:
        self.now_s = now_s
        self.callback.before_controller_execute_failure_decision(object())

    def ended(self, now_s: float) -> None:
        self.now_s = now_s
        self.callback.after_worker_group_shutdown(object())

    def started(self, now_s: float) -> None:
        self.now_s = now_s
        worker = SimpleNamespace(
            distributed_context=SimpleNamespace(world_rank=0, world_size=1),
            metadata=SimpleNamespace(node_id="n"),
        )
        assert self.callback.before_init_train_context([worker]) == {}


def times(noticed_s: float | None, ended_s: float | None, started_s: float) -> LaunchTimes:
    return LaunchTimes(noticed_at_s=noticed_s, previous_ended_at_s=ended_s, started_at_s=started_s)


def test_each_group_has_the_times_of_its_own_launch(launches: Launches) -> None:
    launches.started(10.0)
    launches.failed(20.0)
    launches.ended(23.0)
    launches.started(29.0)
    launches.ended(40.0)  # such as for another number of workers
    launches.started(45.0)
    launches.failed(50.0)
    launches.started(55.0)
    assert launches.opened == [
        times(None, None, 10.0),
        times(20.0, 23.0, 29.0),
        times(None, 40.0, 45.0),
        times(50.0, None, 55.0),
    ]


def test_a_group_that_could_not_be_opened_is_part_of_the_recovery(launches: Launches) -> None:
    """The failure and the end are those of the group that trained, the start is that of the last one."""
    launches.started(10.0)
    launches.failed(20.0)
    launches.ended(23.0)
    launches.error = Unavailable("the store is away")
    launches.started(29.0)
    launches.failed(31.0)
    launches.ended(32.0)
    launches.error = None
    launches.started(40.0)
    assert launches.opened == [times(None, None, 10.0), times(20.0, 23.0, 40.0)]


@pytest.mark.parametrize("has_salvage", [True, False])
def test_ranks_save_the_last_step_when_their_group_fails_or_is_replaced_by_a_larger_one(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, has_salvage: bool
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(module, "salvage", lambda spec: asked.append(launches.now_s))
    callback = launches.callback
    callback._options = replace(callback._options, salvage=has_salvage)
    callback.before_controller_execute_resize_decision(object())  # for the first group
    launches.started(10.0)
    launches.failed(20.0)
    callback.before_controller_execute_resize_decision(object())  # for the next one, of what is left
    launches.ended(23.0)
    launches.started(29.0)
    launches.now_s = 40.0
    callback.before_controller_execute_resize_decision(object())  # a node has joined
    assert asked == ([20.0, 40.0] if has_salvage else [])


# -- errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ConfigError, RunInUse, RestoreError, InsufficientSpace, StateError])
def test_what_a_person_must_mend_ends_the_run(kind: type[Exception]) -> None:
    callback = Failing()
    callback.reason = kind("mend this")
    with pytest.raises(kind, match="mend this"):
        callback.after_controller_start(context_of())
    with pytest.raises(kind, match="mend this"):
        callback.before_init_train_context([])


@pytest.mark.parametrize("kind", [ServiceError, Unavailable, Fenced, RuntimeError, KeyError, AssertionError])
def test_what_a_new_try_may_mend_goes_to_the_workers(
    kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    callback = Failing()
    callback.reason = kind("try again")
    callback.after_controller_start(context_of())
    assert callback.before_init_train_context([]) == {}
    assert "try again" in caplog.text
    assert ("Traceback" in caplog.text) == (not issubclass(kind, ServiceError | Fenced)), "of surprises only"
    in_worker = cloudpickle.loads(cloudpickle.dumps(callback))
    in_worker.after_init_train_context()
    try:
        with pytest.raises((ServiceError, Fenced), match="try again"):
            ray_ckpt.Checkpointer()
    finally:
        in_worker.before_worker_shutdown()
    assert get_connection().problem is None


def test_a_part_of_a_group_is_refused_before_it_takes_the_run_from_the_rest() -> None:
    class Opened(CheckpointCallback):
        def _open(self) -> Any:
            return None

    callback = Opened()
    callback.after_controller_start(context_of())
    alone = SimpleNamespace(distributed_context=SimpleNamespace(world_rank=0, world_size=2))
    with pytest.raises(ConfigError, match="torchft"):
        callback.before_init_train_context([alone])


def test_replica_groups_are_refused_at_the_start() -> None:
    from ray.train.v2.torch.torchft_config import TorchftConfig

    context = context_of()
    context.backend_config = TorchftConfig(lighthouse_kwargs={"min_replicas": 1})
    with pytest.raises(ConfigError, match="torchft") as error:
        CheckpointCallback().after_controller_start(context)
    assert "ReplicaCheckpointer" in str(error.value.hint)


def test_a_run_that_could_not_be_opened_is_opened_with_the_next_group() -> None:
    callback = Failing()
    callback.after_controller_start(context_of())
    for reason in ("still away", "and still"):
        callback.reason = Unavailable(reason)
        callback.before_init_train_context([])
        assert str(callback._problem) == reason


def test_a_ray_that_has_moved_something_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    callback = CheckpointCallback()
    callback.after_controller_start(SimpleNamespace())
    assert callback.before_init_train_context([object()]) == {}
    assert isinstance(callback._problem, ServiceError)
    assert "AttributeError" in str(callback._problem) and "run_config" in str(callback._problem)
    asyncio.run(callback.before_controller_shutdown())


def test_a_worker_whose_connection_fails_raises_when_a_checkpointer_is_built() -> None:
    callback = CheckpointCallback()
    callback._joined = SimpleNamespace()  # type: ignore[assignment]
    callback.after_init_train_context()  # ray.train.get_context() raises outside of a worker
    try:
        with pytest.raises(ServiceError, match="this worker has no checkpoints"):
            ray_ckpt.Checkpointer()
    finally:
        set_connection(type(get_connection())())


def test_a_callback_can_be_pickled_after_use_also_in_a_worker_that_watches_sigterm() -> None:
    callback = Failing()
    callback.after_controller_start(context_of())
    if service._signal is not None:  # a test before has connected this process; only one is installed
        service._signal.uninstall()
        service._signal = None
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray has a handler of its own once it was connected
    callback._term_signal = TermSignal.install(lambda notice: None)
    assert callback._term_signal is not None
    copy = cloudpickle.loads(cloudpickle.dumps(callback))
    assert copy._term_signal is None and str(copy._problem) == str(callback._problem)
    callback.before_worker_shutdown()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "as it was"


def test_a_file_system_object_is_refused_since_it_may_hold_credentials() -> None:
    with pytest.raises(ConfigError, match="may hold credentials"):
        CheckpointCallback().after_controller_start(context_of(storage_filesystem=object()))


def test_the_end_of_a_run_is_logged_and_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    callback = CheckpointCallback()
    callback._spec = SimpleNamespace(options=None)  # type: ignore[assignment]
    callback._has_had_group = True
    with caplog.at_level(logging.WARNING):
        asyncio.run(callback.before_controller_shutdown())
    assert "the last checkpoint is not on the storage path" in caplog.text


@pytest.mark.parametrize(
    ("error", "finishes"),
    [
        (None, [False]),
        (Unavailable("a node does not answer"), [True]),
        (RestoreError("no copy is left"), [True]),
        (RunSuperseded("another launcher has it"), []),
        (RunInUse("another launcher has it"), []),
    ],
)
def test_the_last_checkpoint_is_uploaded_also_if_no_group_could_start_again(
    error: CheckpointError | None,
    finishes: list[bool],
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finished: list[bool] = []
    monkeypatch.setattr(module, "finish_run", lambda spec, *, owner, has_failed: finished.append(has_failed))
    launches.started(10.0)
    launches.error = error
    with contextlib.suppress(RestoreError, RunConflict):
        launches.started(20.0)
    asyncio.run(launches.callback.before_controller_shutdown())
    assert finished == finishes


def test_a_launcher_that_never_had_a_group_finishes_nothing(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished: list[Any] = []
    monkeypatch.setattr(module, "finish_run", lambda spec, *, owner, has_failed: finished.append(spec))
    launches.error = Unavailable("a node does not answer")
    launches.started(10.0)
    launches.callback._spec = launches.callback._open()
    asyncio.run(launches.callback.before_controller_shutdown())
    assert not finished
