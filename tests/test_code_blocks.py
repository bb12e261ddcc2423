"""Every code block of the documents runs, or its commands are ones that are there. None is passed over.

Python blocks are in `PYTHON` here, with what they leave to their reader, or in `PARTS` of
`tests/cluster/test_code_blocks.py`, if they need Ray. Commands of ours run on a small run, those that train
or need a service are parsed; of other programs, Ray's are parsed. A block or program that is in none of the
lists fails.
"""

from __future__ import annotations

import argparse
import json
import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, TypeAlias

import click
import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint
from typer.testing import CliRunner

import ray_ckpt
from jobs.demo.local_cluster import FAST_FAILURE_DETECTION
from ray_ckpt.cli import app
from ray_ckpt.config import RunOptions
from ray_ckpt.errors import CheckpointError
from ray_ckpt.format import names, records
from ray_ckpt.trainer.checkpointer import Checkpointer
from tests.capture.local import LocalLink
from tests.catalog.test_load import items_of, save
from tests.cluster.test_code_blocks import PARTS
from tests.hostile.samples import SAMPLES
from tests.interop.test_hf_export import gpt2
from tests.interop.test_hf_export import saved as save_model
from tests.support.code_blocks import (
    DOCUMENTS,
    ON_A_CLUSTER,
    ROOT,
    Block,
    blocks,
    find,
    our_commands,
    run_python,
)
from tests.support.sample_run import RunLog, SampleRun, write_run

dcp: Any = checkpoint  # its functions have no stable types
Given: TypeAlias = Mapping[str, Any]
Replaced: TypeAlias = Mapping[str, str]


# Python


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(2))


def _saved_run(storage: Path) -> dict[str, Any]:
    """Save a run of four ranks below `storage`; return the saved objects."""
    model = _Model()
    objects: dict[str, Any] = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    save(RunLog(folder=storage / "gpt"), [items_of(**objects, loader={"position": 1})] * 4, step=3000)
    return objects


def _reading(tmp_path: Path) -> tuple[Given, Replaced]:
    return _saved_run(tmp_path), {"s3://bucket/runs": str(tmp_path)}


def _sample(tmp_path: Path) -> tuple[Given, Replaced]:
    return {"ray_ckpt": ray_ckpt}, {"/tmp/sample": str(tmp_path)}


def _catalog(tmp_path: Path) -> tuple[Given, Replaced]:
    run = write_run(tmp_path, durable=(30, 40))
    return {}, {"demo-out/storage/gpt-with-failure": str(run.folder)}


def _tables(tmp_path: Path) -> tuple[Given, Replaced]:
    catalog = ray_ckpt.Catalog(write_run(tmp_path, durable=(30, 40)).folder)
    return {"catalog": catalog, "view": catalog.newest()}, {"/tmp/tables": str(tmp_path / "tables")}


def _comparison(tmp_path: Path) -> tuple[Given, Replaced]:
    return {"catalog": ray_ckpt.Catalog(write_run(tmp_path).folder)}, {}


def _complete(tmp_path: Path) -> tuple[Given, Replaced]:
    return {}, {}


def _callback(tmp_path: Path) -> tuple[Given, Replaced]:
    from ray_ckpt.train import CheckpointCallback

    return {"CheckpointCallback": CheckpointCallback}, {}


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


def test_a_stock_reader_reads_a_model_with_tied_weights(tmp_path: Path) -> None:
    saved, model = _Tied(), _Tied()
    save(RunLog(folder=tmp_path / "gpt"), [items_of(model=saved)] * 2, step=10)
    view = ray_ckpt.Catalog(tmp_path / "gpt").newest()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is no process group
        found = run_python(find(*STOCK), {"view": view, "model": model}, {})
        with pytest.raises(BaseException, match=r"Missing key .*: model\.head\.weight"):
            found["dcp"].load(found["state"], storage_reader=found["reader"])
    assert found["lacking"] == {"model.head.weight"}
    assert model.head.weight is model.embed.weight
    for name, tensor in saved.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


class _WithHead(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, classes)


def test_a_new_run_begins_with_all_but_the_head_of_a_model(tmp_path: Path) -> None:
    saved, model = _WithHead(classes=3), _WithHead(classes=5)
    save(RunLog(folder=tmp_path / "gpt"), [items_of(model=saved)], step=3000)
    built = model.head.weight.detach().clone()
    ckpt = Checkpointer(link=LocalLink(), model=model)
    given, replace = {"ray_ckpt": ray_ckpt, "ckpt": ckpt, "model": model}, {"s3://bucket/runs": str(tmp_path)}
    found = run_python(find(*PARTIAL), given, {**replace, "10_000": "2"})
    assert torch.equal(model.body.weight, saved.body.weight) and torch.equal(model.body.bias, saved.body.bias)
    assert torch.equal(model.head.weight, built)
    assert set(found["loaded"].missing_keys) == {"head.weight", "head.bias"}
    ckpt.close()


def _hooks(tmp_path: Path) -> tuple[Given, Replaced]:
    return {"ray_ckpt": ray_ckpt, "Callback": object}, {}  # tests/trainer/test_callbacks.py trains with it


def _trainer(tmp_path: Path) -> tuple[Given, Replaced]:
    import ray.train
    from ray.train.torch import TorchTrainer

    given = {"TorchTrainer": TorchTrainer, "ray": ray, "train_loop": print, **_callback(tmp_path)[0]}
    return given, {"/shared/runs": str(tmp_path)}


def _write_gpt2(folder: Path, step: int = 10) -> Path:
    """Write a run with a model of Transformers."""
    (folder / "models").mkdir()
    return save_model(folder / "models", gpt2(), step=step)


def _step_in_cluster(tmp_path: Path) -> tuple[Given, Replaced]:
    """A durable step in place of one in a cluster, which tests/cluster/test_in_cluster.py opens."""
    opened = f"ray_ckpt.open({str(_write_gpt2(tmp_path))!r}).choose()"
    return {"ray_ckpt": ray_ckpt}, {'ray_ckpt.open_in_cluster("/shared/runs/gpt")': opened}


def _engine(tmp_path: Path) -> tuple[Given, Replaced]:
    given, replaced = _step_in_cluster(tmp_path)
    engine = SimpleNamespace(load_weights=lambda weights: None)
    return {**given, "torch": torch, "engine": engine}, replaced


README_SCRIPTS = (
    ("README.md", "ray_ckpt.connect("),
    ("README.md", "CheckpointCallback("),
)  # tests/cluster/test_readme.py
STOCK = ("docs/guides/reading.md", "lacking = state")
PARTIAL = ("docs/guides/resume.md", "strict=False")
PYTHON: Mapping[tuple[str, str], Callable[[Path], tuple[Given, Replaced]]] = {
    ("docs/guides/cadence.md", "CheckpointCallback(every_s=300)"): _callback,
    ("docs/guides/cadence.md", "CheckpointCallback(salvage=True)"): _callback,
    ("docs/guides/cadence.md", "salvage_copy=True"): _callback,
    ("docs/guides/resume.md", "init_items="): _callback,
    ("docs/guides/training-loop.md", "ckpt.restore_random_state()"): _hooks,
    ("docs/guides/resume.md", "anew="): _callback,
    ("docs/guides/memory.md", "static_items="): _callback,
    ("docs/guides/storage.md", "remote_items="): _callback,
    ("docs/guides/layouts.md", "num_workers=(1, 4)"): _trainer,
    ("docs/guides/reading.md", 'run.load("loader", rank=3)'): _reading,
    ("docs/guides/reading.md", "write_run(Path("): _sample,
    ("docs/guides/reading.md", "view = catalog.newest()"): _catalog,
    ("docs/guides/reading.md", "catalog.write_parquet("): _tables,
    ("docs/guides/reading.md", "diff.compare("): _comparison,
    ("docs/guides/reading.md", "ray_ckpt.open_in_cluster("): _step_in_cluster,
    ("docs/guides/huggingface.md", "engine.load_weights("): _engine,
    ("docs/operations/recovery.md", "WarmWorkers("): _complete,
}


@pytest.mark.parametrize(("document", "anchor"), PYTHON)
def test_a_python_block_runs(tmp_path: Path, document: str, anchor: str) -> None:
    given, replace = PYTHON[document, anchor](tmp_path)
    run_python(find(document, anchor), given, replace)


def test_every_python_block_runs_here_or_on_a_cluster() -> None:
    treated = [find(*place) for place in (*PYTHON, *PARTS, STOCK, PARTIAL, *README_SCRIPTS)]
    assert len(set(treated)) == len(treated), "a block is run twice"
    passed_over = [block for block in blocks() if block.language == "python" and block not in treated]
    assert not passed_over, [str(block) for block in passed_over]


def test_a_sample_run_gives_what_the_readme_shows(tmp_path: Path) -> None:
    given, replace = _sample(tmp_path)
    found = run_python(find("docs/guides/reading.md", "write_run(Path("), given, replace)
    rows = re.findall(
        r"^\| `(.*run\.load.*?)` \| `(.+?)` \|$", (ROOT / "docs/guides/reading.md").read_text(), re.MULTILINE
    )
    assert len(rows) >= 5
    for code, expected in rows:
        try:
            answer = repr(eval(code, found))
        except CheckpointError as error:
            answer = f"{type(error).__name__}: {error}"
        assert answer == expected, code


# Commands


class _Parsed(BaseException):
    """Ends a program when it has parsed its arguments."""


def _parse_only(monkeypatch: pytest.MonkeyPatch, module: str, args: Sequence[str]) -> None:
    """Start a module as `python -m` does, up to where it knows that its arguments are good."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_end(*args: Any) -> NoReturn:
        parse(*args)
        raise _Parsed

    with monkeypatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that the module was imported before
        patched.setattr(argparse.ArgumentParser, "parse_args", parse_and_end)
        patched.setattr(sys, "argv", [module, *args])
        with pytest.raises(_Parsed):
            runpy.run_module(module, run_name="__main__")


STEPS = (50, 60, 70, 1000, 2000, 2990, 3000)  # those that the texts name, and one before 3000
OUR_RUN = re.compile(
    r"^(?:/shared/runs|s3://(?:bucket|new|old)/runs|demo-out/storage)(?:/gpt[\w-]*)?((?:@\d+)?)$"
)


def _next_session(run: SampleRun) -> records.Session:
    """Return a session whose record has a policy, as a coordinator's has."""
    newest = run.checkpoints[STEPS[-1]].attempt.attempt
    return records.Session(
        session=2,
        service="sample",
        after=1,
        resumed_from=newest,
        world_size=2,
        num_nodes=2,
        retention="last=3",
    )


def _write_source(form: str, path: Path) -> None:
    """Write a small checkpoint of another format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if form == "pt":
        torch.save({"model": {"w": torch.ones(2)}}, path)
    elif form == "dcp":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a save without a group
            dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=path, no_dist=True)
    elif form == "hf":
        path.mkdir()
        save_file({"w": torch.ones(2)}, path / "model.safetensors")
    else:
        path.mkdir()
        _, write = next(sample for sample in SAMPLES.values() if sample[0] == form)
        write(path)


def _run_ray_ckpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: Sequence[str]) -> None:
    """Run a command on a run of this machine, with the paths of the text replaced."""
    if args == ["--version"]:
        return
    our_commands()[args[0]].make_context(args[0], list(args[1:]))  # the options are there
    if args[0] in ON_A_CLUSTER or {"--lose-node", "--lose-rack", "--address"} & set(args):
        return
    run = write_run(tmp_path / "storage", steps=STEPS, durable=STEPS)
    run.log.append(_next_session(run))
    monkeypatch.chdir(tmp_path)
    folder = _write_gpt2(tmp_path, step=3000) if "hf" in args and args[0] == "export" else run.folder
    here = []
    for arg in args:
        if match := OUR_RUN.match(arg):
            is_storage_path = arg in {"/shared/runs", "s3://bucket/runs"}
            arg = str(folder.parent if is_storage_path else folder) + match[1]
        here.append(arg)
    if "--storage-option" in here:  # of a URL, which is a folder here
        at = here.index("--storage-option")
        del here[at : at + 2]
    if args[0] == "import":
        _write_source(args[1], tmp_path / args[2])
    if args[0] == "doctor":  # a later option counts
        here += ["--size", "0", "--staging", str(tmp_path / "staging")]
    result = CliRunner().invoke(app, here, input="y\n", catch_exceptions=False)
    assert result.exit_code == 0, (here, result.output)


def _check_ray(args: Sequence[str]) -> None:
    """Parse a command of Ray's, with Ray's own parser."""
    from ray.scripts.scripts import cli

    command: Any = cli
    context, rest = click.Context(cli), list(args)
    while isinstance(command, click.Group):
        name = rest.pop(0)
        command = command.get_command(context, name)
        assert command is not None, f"Ray has no command {name}"
        context = click.Context(command, parent=context, info_name=name)
    command.make_context(args[0], rest, parent=context.parent)


MAKEFILE = (ROOT / "Makefile").read_text()


def _check_make(args: Sequence[str]) -> None:
    for arg in args:
        variable, is_setting, _ = arg.partition("=")
        pattern = rf"^{variable}\s*\?=" if is_setting else rf"^{arg}:"
        assert re.search(pattern, MAKEFILE, re.MULTILINE), arg


def _check_pip(args: Sequence[str]) -> None:
    """Parse a command of pip's, with pip's own parser; it is about this checkout."""
    from pip._internal.commands import create_command

    options, what = create_command(args[0]).parse_args(list(args[1:]))
    assert set(what) <= {".", ".[dev]"}
    assert all((ROOT / file).exists() for file in options.constraints)


# Programs that are not ours and that not every machine has: nothing of them can be checked here.
FOREIGN = {
    "aws": "Amazon's; a package of its own",
    "kubectl": "Kubernetes'; tests/jobs/test_recipes.py checks the manifest",
    "prometheus": "a program of the system",
    "sbatch": "Slurm's; tests/jobs/test_recipes.py plays the script",
}


def _check_variable(name: str, value: str) -> None:
    """Check a variable that a command is given."""
    if name == "RAY_CKPT_OPTIONS":
        RunOptions.parse(**json.loads(value))
    elif name in FAST_FAILURE_DETECTION:
        assert value == FAST_FAILURE_DETECTION[name], "as the demo and the tests set it"
    elif name == "RAY_TRAIN_CALLBACKS":
        module, _, attribute = value.rpartition(".")
        assert hasattr(import_module(module), attribute)
    elif name.startswith("RAY_CKPT_"):
        source = "\n".join(path.read_text() for path in (ROOT / "ray_ckpt").rglob("*.py"))
        assert f'"{name}"' in source, name
    else:
        assert name == "UPDATE_TRANSCRIPTS", f"what does {name} do?"


def _check_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: Sequence[str]) -> None:
    while words and re.fullmatch(r"[A-Za-z_]+=.*", words[0], re.DOTALL):
        _check_variable(*words[0].split("=", 1))
        words = words[1:]
    if not words:
        return
    program, args = words[0], list(words[1:])
    if program in {"ray-ckpt", ".venv/bin/ray-ckpt"}:
        _run_ray_ckpt(tmp_path, monkeypatch, args)
    elif program in {"python", ".venv/bin/python"} and args[0] == "-m":
        if args[1] == "pytest":
            assert all((ROOT / arg).exists() for arg in args[2:] if not arg.startswith("-"))
        else:
            _parse_only(monkeypatch, args[1], args[2:])
    elif program == "python":
        assert args == ["train.py"], "a file of the reader's own"
    elif program == "ray":
        own = args.index("--") if "--" in args else len(args)
        _check_ray([*args[:own], *(["python"] if own < len(args) else [])])
        _check_command(tmp_path, monkeypatch, args[own + 1 :])
    elif program == "make":
        _check_make(args)
    elif program == "pip":
        _check_pip(args)
    else:
        assert program in FOREIGN, f"how is {program} checked?"


def _commands(block: Block) -> list[list[str]]:
    """Return the commands of a block as words; `<what is left to the reader>` is x."""
    text = re.sub(r"<[\w ]+>", "x", block.text.replace("\\\n", " "))
    commands = []
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        while "&&" in words:
            at = words.index("&&")
            commands.append(words[:at])
            words = words[at + 1 :]
        if words:
            commands.append(words)
    return commands


SHELL = [block for block in blocks() if block.language == "bash"]


@pytest.mark.filterwarnings("ignore:Setuptools is replacing distutils")  # pip, if a test imported distutils
@pytest.mark.parametrize("block", SHELL, ids=str)
def test_the_commands_of_a_block_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: Block
) -> None:
    for number, words in enumerate(_commands(block)):
        folder = tmp_path / str(number)
        folder.mkdir()
        _check_command(folder, monkeypatch, words)


# Everything else

FILES_OF_A_RUN = ("ray_ckpt/format/FORMAT.md", "<storage_path>/<run>/ray_ckpt/")
DRAWINGS = (FILES_OF_A_RUN, ("CONTRIBUTING.md", "git clone"))
OUTPUT = ("docs/tour.md", "README.md")  # tests/test_tour.py and tests/cluster/test_readme.py compare them


def _check_mermaid(text: str) -> None:
    assert text.split()[0] in {"sequenceDiagram", "stateDiagram-v2", "flowchart"}


def _check_diff(text: str) -> None:
    """Check that the new lines of a diff are lines of an example job, or of the programs for a framework."""
    examples = [*(ROOT / "jobs").glob("train_*.py"), *(ROOT / "tests" / "frameworks").rglob("*.[ps][yh]")]
    jobs = "".join(path.read_text() for path in examples)
    added = [line[1:] for line in text.splitlines() if line.startswith("+")]
    assert added and all(f"\n{line}\n" in jobs for line in added)


PARSERS: Mapping[str, Callable[[str], object]] = {
    "json": json.loads,
    "yaml": yaml.safe_load,
    "mermaid": _check_mermaid,
    "diff": _check_diff,
}


def test_every_other_block_is_known() -> None:
    drawings = [find(*place) for place in DRAWINGS]
    for block in blocks():
        if block.language in {"python", "bash"} or block in drawings:
            continue
        if block.language == "text":
            assert block.document in OUTPUT, f"is {block} true?"
        else:
            assert block.language in PARSERS, f"nothing looks at {block}"
            PARSERS[block.language](block.text)


def test_the_files_of_a_run_are_those_that_the_format_lists(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    run.log.snapshot(time_s=0.0)
    patterns = []
    folder = ""
    for line in find(*FILES_OF_A_RUN).text.splitlines()[1:]:
        indent, name = re.match(r"( +)(\S+)", line).groups()  # type: ignore[union-attr]
        if name.endswith("/"):
            folder = name
            continue
        path = name if len(indent) == 2 else folder + name
        patterns.append(re.sub(r"<[\w]+>", r"\\w+", re.escape(path).replace(r"\<", "<").replace(r"\>", ">")))
    root = run.folder / names.SERVICE_DIR
    files = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    unknown = [file for file in files if not any(re.fullmatch(pattern, file) for pattern in patterns)]
    assert not unknown
    unused = [pattern for pattern in patterns if not any(re.fullmatch(pattern, file) for file in files)]
    assert unused == [p for p in patterns if r"\.\w+\-of" in p], "slices that are not one box, and no others"


# Sentences


def test_programs_that_sentences_name_are_there() -> None:
    folders = ("ray_ckpt", "actors", "jobs", "tests")
    programs = {path.name for folder in folders for path in (ROOT / folder).rglob("*.py")}
    for document in DOCUMENTS:
        named = set(re.findall(r"`(?:[\w.-]+/)*(\w+\.py)`", (ROOT / document).read_text()))
        assert named <= programs | {"train.py", "train_mlp.py"}, (document, named - programs)


def test_commands_and_options_that_sentences_name_are_there() -> None:
    commands, seen = our_commands(), 0
    for document in {block.document for block in blocks()} | {"CHANGELOG.md"}:
        text = re.sub(
            r"^( *)```.*?^\1```$", "", (ROOT / document).read_text(), flags=re.MULTILINE | re.DOTALL
        )
        for name, rest in re.findall(r"`ray-ckpt ([a-z]+)\b([^`]*)`", text):
            options = {option for parameter in commands[name].params for option in parameter.opts}
            assert set(re.findall(r"--[\w-]+", rest)) <= options | {"--help"}, (document, name, rest)
            seen += 1
        for module in re.findall(r"`(?:\.venv/bin/)?python -m ([\w.]+)", text):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), (document, module)
    assert seen > 20
