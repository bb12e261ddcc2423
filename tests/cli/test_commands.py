"""`ray-ckpt` as a user meets it: what it prints, as text and as JSON, and with which code it exits."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from rich.console import Console
from rich.filesize import decimal
from safetensors.torch import load_file
from typer.testing import CliRunner

import ray_ckpt
from ray_ckpt.catalog import runs as runs_module
from ray_ckpt.cli import app, main
from ray_ckpt.cli import gc as cli_gc
from ray_ckpt.cli import ls as cli_ls
from ray_ckpt.cli.options import EXIT_INTERRUPTED
from ray_ckpt.cli.output import FittedTable, stdout, when_text
from ray_ckpt.cli.tree import MAX_SESSIONS
from ray_ckpt.format import names, records
from ray_ckpt.format.tree import TensorRef
from ray_ckpt.location import Location
from ray_ckpt.storage.checkpoint_files import CheckpointFiles
from ray_ckpt.storage.remote.file_store import Blocks, Children, PosixFiles
from ray_ckpt.storage.remote.tier import open_store
from ray_ckpt.types import Slice
from tests.servers.stores import bucket_url
from tests.servers.strict_store import StrictStore
from tests.support.examples import every_few
from tests.support.sample_run import (
    RECORD_S,
    RankState,
    RunLog,
    SampleRun,
    assemble,
    copy_to,
    make_checkpoint,
    write_run,
)

SHARD = "shard-00001-of-00002.safetensors"


@pytest.fixture
def run(tmp_path: Path) -> SampleRun:
    return write_run(
        tmp_path,
        durable=(10, 30, 50),
        resume_at=30,
        resumed_steps=(40, 50),
        lost=(20,),
        collected=(10,),
    )


def ray_ckpt_cli(*args: object) -> str:
    """Return the output of a command that succeeds."""
    result = CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def as_json(*args: object) -> Any:
    return json.loads(ray_ckpt_cli(*args, "--json"))


def fails(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command that does not end well."""
    with pytest.raises(SystemExit) as caught:
        main([str(arg) for arg in args])
    output = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, output.out, output.err


def damage(run: SampleRun, step: int) -> None:
    path = run.directory(step) / SHARD
    data = bytearray(path.read_bytes())
    data[4100] ^= 1
    path.write_bytes(data)


# ls


def test_ls_marks_the_newest_and_the_lineage(run: SampleRun) -> None:
    lines = ray_ckpt_cli("ls", run.folder).splitlines()
    assert lines[0].split() == ["run", "gpt", "uid", run.log.run_uid, "sessions", "2"]
    rows = [line.split() for line in lines if "loss" in line]
    assert [row[:2] for row in rows] == [["+", "30"], ["40", "replicated(1),"], ["+", "40"], ["*", "50"]]
    assert "durable" in rows[-1] and "ago," in rows[-1] and "0.56569," in rows[-1]
    assert "cluster" in rows[1] and "cluster" not in rows[0]


def test_ls_all_shows_what_is_gone(run: SampleRun) -> None:
    text = ray_ckpt_cli("ls", run.folder, "--all")
    assert "collected" in text and "lost" in text
    states = [c["state"] for c in as_json("ls", run.folder, "--all")["checkpoints"]]
    assert states == ["collected", "lost", *["live"] * 4]


def test_ls_says_that_it_has_not_searched_all_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runs_module, "MAX_FOLDERS", 3)
    write_run(tmp_path)
    for name in ("old-1", "old-2"):
        (tmp_path / name).mkdir()
    assert "gpt" in ray_ckpt_cli("ls", tmp_path) and "searched" not in caplog.text
    (tmp_path / "a").mkdir()
    assert "gpt" in ray_ckpt_cli("ls", tmp_path)
    assert f"3 of the 4 folders in {tmp_path} were searched for runs" in caplog.text


def test_ls_as_json(run: SampleRun) -> None:
    document = as_json("ls", run.folder)
    assert (document["run_name"], document["run_uid"]) == ("gpt", run.log.run_uid)
    assert [(c["step"], c["on_lineage"], c["newest"]) for c in document["checkpoints"]] == [
        (30, True, False),
        (40, False, False),
        (40, True, False),
        (50, True, True),
    ]
    assert document["checkpoints"][-1]["path"] == str(run.directory(50))
    assert document["checkpoints"][1]["path"] is None


def test_what_a_newer_version_wrote_is_no_damage(
    run: SampleRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run.log.append(records.Note(text="of tomorrow"))
    monkeypatch.delitem(records.OPS, "note")
    for args in (["ls", run.folder], ["verify", run.folder], ["tree", run.folder]):
        code, out, err = fails(capsys, *args)
        assert (code, out) == (2, "") and "of a newer version; update ray_ckpt" in err
    assert "of a newer version; update ray_ckpt" in ray_ckpt_cli("ls", run.folder.parent)


def test_show_without_a_step_takes_the_newest(
    run: SampleRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert as_json("show", run.folder) == as_json("show", run.folder, 50)
    write_run(tmp_path, "unused", steps=())
    assert "Run unused has no live checkpoint" in fails(capsys, "show", tmp_path / "unused")[2]


def test_ls_of_a_storage_path_lists_its_runs(
    run: SampleRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, "local", steps=(5,), durable=(), replicas=0)
    write_run(tmp_path, "unused", steps=())
    write_run(tmp_path, "torn")
    (tmp_path / "torn" / "ray_ckpt" / "log" / names.record_file(2)).unlink()
    code, text, _ = fails(capsys, "ls", tmp_path)
    assert code == 1 and "local, in cluster" in text and "no record 2" in text
    code, text, _ = fails(capsys, "ls", tmp_path, "--json")
    runs = {r["run_name"]: r for r in json.loads(text)["runs"]}
    assert code == 1 and list(runs) == ["gpt", "local", "torn", "unused"]
    assert (runs["gpt"]["live_checkpoints"], runs["gpt"]["newest_step"]) == (4, 50)
    assert runs["unused"]["newest_step"] is None and "error" in runs["torn"]


@pytest.mark.parametrize("columns", [60, 80])
def test_ls_in_a_narrow_terminal_keeps_a_line_per_checkpoint(
    run: SampleRun, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = ray_ckpt_cli("ls", run.folder, "--all").splitlines()
    rows = [line.split() for line in lines if "kB" in line]
    assert [row[:3] for row in rows if row[0] == "*"] == [["*", "50", "durable"]]
    assert [row[:2] for row in rows if row[0] not in "*+"] == [
        ["10", "collected"],
        ["20", "lost"],
        ["40", "replicated(1)"],
    ]
    assert all(" ".join(row).count(" d ago") == 1 for row in rows) and max(map(len, lines)) <= columns


@pytest.mark.parametrize("columns", [60, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "command",
    [
        "gc {} --dry-run --keep-last 2",
        "verify {} --plan --nodes",
        "goodput {}",
        "diff {} 30 50 --only model.head",
        "drill {} --remote-only --step 30",
        "rollback {} --to 30 --yes",
    ],
)
def test_tables_in_a_narrow_terminal_fit_and_break_no_number(
    run: SampleRun, command: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def table() -> list[str]:
        copy = shutil.copytree(run.folder, run.folder.parent / uuid.uuid4().hex / "gpt")
        lines = ray_ckpt_cli(*command.format(copy).split()).splitlines()
        return [line for line in lines if line.startswith(" ")]

    def numbers(lines: list[str]) -> set[str]:
        return {word.strip(",;") for line in lines for word in line.split() if re.search("[0-9]", word)}

    monkeypatch.delenv("COLUMNS", raising=False)
    whole = table()
    monkeypatch.setenv("COLUMNS", str(columns))
    narrow = table()
    assert narrow and max(map(len, narrow)) <= columns
    seconds = re.compile(r"0\.\d\d")  # of a drill
    assert {n for n in numbers(narrow) if not seconds.fullmatch(n)} <= numbers(whole)


def test_without_a_terminal_no_line_is_folded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    run = write_run(tmp_path, steps=())
    metrics = {f"validation/{'perplexity/' * 8}{k}": float(k) for k in range(10)}
    run.log.commit(make_checkpoint(run.log.attempt(1, 1), metrics=metrics))
    (row,) = [line for line in ray_ckpt_cli("ls", run.folder).splitlines() if "perplexity" in line]
    assert all(name in row for name in metrics)


@pytest.mark.parametrize(
    ("width", "rows"),
    [
        (63, [f"{'a' * 20} 1.2 GB 14:19:20 no policy keeps it"]),
        (47, [f"{'a' * 16} 1.2 GB 14:19:20 no", "aaaa policy", "keeps", "it"]),
        (46, [f"{'a' * 16} 1.2 GB no policy keeps", "aaaa it"]),
        (36, [f"{'a' * 16} 1.2 GB no", "aaaa policy", "keeps", "it"]),
    ],
)
def test_where_it_is_narrow_names_and_words_of_a_table_wrap_and_then_columns_go(
    width: int, rows: list[str]
) -> None:
    table = FittedTable("name", "size", "when", "why", whole=(1,), fold=(0,), gives_way=(2,))
    table.add("a" * 20, "1.2 GB", "14:19:20", "no policy keeps it")
    console = Console(width=width)
    with console.capture() as captured:
        console.print(table)
    printed = [" ".join(line.split()) for line in captured.get().splitlines()[3:]]
    assert [line for line in printed if line] == rows


def test_a_word_that_is_longer_than_the_terminal_is_folded() -> None:
    table = FittedTable("size", "why", whole=(0,))
    table.add("1.2 GB", "a" * 200)
    console = Console(width=60)
    with console.capture() as captured:
        console.print(table)
    lines = captured.get().splitlines()
    assert "".join(lines).count("a") == 200 and max(map(len, lines)) <= 60 and " 1.2 GB   a" in lines[3]


def at_sixty(
    table: FittedTable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[list[str], int]:
    """Return all words on a terminal of 60 columns, and the length of the longest line."""
    monkeypatch.setenv("COLUMNS", "60")
    stdout().print(table)
    printed = capsys.readouterr().out
    return printed.split(), max(map(len, printed.splitlines()))


def test_numbers_stay_whole_at_sixty_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = FittedTable("run", "state", "step", "durable", "at risk", right=(2,), fold=(0,))
    table.add("gpt-" * 6, "training", 1234567, "1234000, 55 min ago", "1234567 step(s), from the beginning")
    words, width = at_sixty(table, monkeypatch, capsys)
    assert {"training", "1234567", "1234000,", "step(s),", "beginning"} <= set(words) and width <= 60


def test_a_line_is_rather_too_long_than_that_a_number_or_an_id_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = FittedTable("node", "word", "rate", *("step",) * 4, right=(3, 4, 5, 6), whole=(2,))
    table.add("ab" * 6, "w" * 12, "123.4 MB/s", *(f"{number}234567 steps" for number in (1, 2, 3, 4)))
    words, width = at_sixty(table, monkeypatch, capsys)
    assert {"ab" * 6, "123.4", "MB/s", "1234567", "2234567", "3234567", "4234567"} <= set(words)
    assert "w" * 8 in words and width > 60, "words are broken first"


def test_tables_of_long_runs_have_the_newest_rows(
    run: SampleRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cli_ls, "MAX_ROWS", 2)
    monkeypatch.setattr(cli_gc, "MAX_ROWS", 2)
    text = ray_ckpt_cli("ls", run.folder)
    assert "The last 2 of 4 checkpoints" in text
    assert [line.split()[1] for line in text.splitlines() if "kB" in line] == ["40", "50"]
    text = ray_ckpt_cli("gc", run.folder, "--dry-run", "--keep-last", 1)
    assert "These are the last 2" in text and "of 4 would go" in text and text.count(" kB") == 3
    ray_ckpt_cli("rollback", run.folder, "--to", 30, "--yes")
    rows = [line.split()[:2] for line in ray_ckpt_cli("ls", run.folder).splitlines() if "kB" in line]
    assert rows[0] == ["*", "30"] and len(rows) == 3, "what a restart goes on from is always shown"


@pytest.mark.parametrize("columns", ["0", "", "many", "1"])
def test_a_meaningless_width_hides_nothing(
    run: SampleRun, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert sum("kB" in line for line in ray_ckpt_cli("ls", run.folder).splitlines()) == 4


def test_json_has_the_durations_of_a_save(run: SampleRun) -> None:
    measured = {"stall_s", "capture_s", "local_s", "replicate_s", "durable_at_s", "drill", "drilled_at_s"}
    assert measured <= set(as_json("show", run.folder, 50)) & set(as_json("ls", run.folder)["checkpoints"][0])
    document = as_json("show", run.folder, 50)
    assert document["durable_at_s"] == document["committed_at_s"] + RECORD_S


def test_ls_without_checkpoints_reports_that(tmp_path: Path) -> None:
    folder = write_run(tmp_path, steps=()).folder
    assert "No live checkpoints." in ray_ckpt_cli("ls", folder)
    assert as_json("ls", folder)["checkpoints"] == []


def test_names_in_a_log_do_not_drive_the_terminal(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=())
    run.log.commit(make_checkpoint(run.log.attempt(1, 1), metrics={"\x1b[31m[bold]loss": float("inf")}))
    text = ray_ckpt_cli("ls", run.folder)
    assert "\x1b" not in text and "[bold]loss inf" in text
    assert as_json("ls", run.folder)["checkpoints"][0]["metrics"] == {"\x1b[31m[bold]loss": "inf"}


# tree


def test_tree_draws_sessions_and_from_where_they_went_on(run: SampleRun) -> None:
    lines = ray_ckpt_cli("tree", run.folder).splitlines()
    assert lines[0] == f"run gpt  uid {run.log.run_uid}"
    assert [re.sub(r"  (2 ranks|[0-9]+ d ago).*", "", line) for line in lines[1:]] == [
        "├── session 1  from scratch",
        "│   ├── 2 gone; --all draws them",
        "│   ├── + step 30  durable",
        "│   └──   step 40  replicated(1), in cluster",
        "└── session 2  from step 30 of session 1",
        "    ├── + step 40  replicated(1), in cluster",
        "    └── * step 50  durable",
    ]
    text = ray_ckpt_cli("tree", run.folder, "--all")
    assert "step 10  collected" in text and "step 20  lost" in text and "gone" not in text


def test_tree_as_json(run: SampleRun) -> None:
    first, second = as_json("tree", run.folder)["sessions"]
    assert (first["parent"], first["resumed_from"]) == (None, None)
    assert [(c["step"], c["state"]) for c in first["checkpoints"]] == [
        (10, "collected"),
        (20, "lost"),
        (30, "live"),
        (40, "live"),
    ]
    origin = {"step": 30, "attempt": first["checkpoints"][2]["attempt"], "session": 1}
    assert (second["parent"], second["resumed_from"]) == (1, origin)
    assert [(c["step"], c["newest"], c["on_lineage"]) for c in second["checkpoints"]] == [
        (40, False, True),
        (50, True, True),
    ]


def test_tree_draws_a_branch_that_was_left_aside_under_its_session(tmp_path: Path) -> None:
    run = write_run(tmp_path, resume_at=20, resumed_steps=(25,))
    run.log.append(records.Epoch())
    run.log.session(3, after=run.checkpoints[30], world_size=2, num_nodes=2)
    assert [
        line[: line.index("from")] for line in ray_ckpt_cli("tree", run.folder).splitlines() if "from" in line
    ] == [
        "├── session 1  ",
        "│   └── session 2  ",
        "└── session 3  ",
    ]
    on_lineage = {s["session"]: s["on_lineage"] for s in as_json("tree", run.folder)["sessions"]}
    assert on_lineage == {1: True, 2: False, 3: True}


def test_tree_of_a_long_run_draws_its_end(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=range(1, 21), durable=())
    assert "├── 12 older; --all draws them" in ray_ckpt_cli("tree", run.folder)
    for session in range(2, 2 + MAX_SESSIONS):
        run.log.session(session, after=run.checkpoints[20], world_size=2, num_nodes=2)
    lines = ray_ckpt_cli("tree", run.folder).splitlines()
    assert "1 older sessions; --all draws them" in lines[1] and len(lines) == 2 + MAX_SESSIONS
    lines = ray_ckpt_cli("tree", run.folder, "--all").splitlines()
    assert len(lines) == 1 + 1 + 20 + MAX_SESSIONS


# show


def test_show_prints_everything_about_a_checkpoint(run: SampleRun) -> None:
    text = ray_ckpt_cli("show", run.folder, 50)
    for part in (str(run.directory(50)), run.log.run_uid, "2 ranks on 2 nodes", SHARD, "BF16 F32"):
        assert part in text
    assert "exp_avg" not in text
    assert "optimizer.state.blocks.0.weight.exp_avg" in ray_ckpt_cli("show", run.folder, 50, "--slices")


def test_show_as_json(run: SampleRun) -> None:
    document = as_json("show", run.folder, 50, "--slices")
    saved = run.checkpoints[50]
    assert {f["name"]: f["size_bytes"] for f in document["files"]} == {
        f.name: f.size_bytes for f in saved.entries
    }
    items = {i["item"]: i for i in document["items"]}
    assert items["optimizer"] == {
        "item": "optimizer",
        "tensors": 2,
        "slices": 3,
        "size_bytes": 8 * 6 * 4 + 8,
        "dtypes": ["F32", "I64"],
    }
    assert len(document["slices"]) == sum(i["slices"] for i in items.values()) == 11


def test_show_names_what_is_as_in_the_checkpoint_before(tmp_path: Path) -> None:
    """A frozen base in a shard of its own is read, verified and loaded as any other."""
    log = RunLog(folder=tmp_path / "lora")
    log.create()
    base = bytes(range(256))

    def slices(item: str, data: bytes) -> list[tuple[Slice, bytes]]:
        shape = (len(data),)
        part = Slice(item=item, name="w", dtype="U8", global_shape=shape, offset=(0,), shape=shape)
        return [(part, data)]

    log.session(1, after=None, world_size=1, num_nodes=1)
    for step, still in ((10, base), (20, base), (30, base[::-1])):
        items = {"base": {"w": TensorRef("base.w")}, "head": {"w": TensorRef("head.w")}}
        rank = RankState(slices=slices("head", bytes([step] * 8)), still=slices("base", still), items=items)
        saved = assemble(log.attempt(1, step), [rank])
        log.commit(saved)
        log.drain(saved)
    assert "unchanged" in (text := ray_ckpt_cli("show", log.folder, 20)) and "as in step 10" in text
    shared = as_json("show", log.folder, 20)["shared"]
    assert shared["files"] == ["shard-00000.1-of-00001.safetensors"] and shared["step"] == 10
    for step in (10, 30):
        assert "shared" not in as_json("show", log.folder, step)
    assert ray_ckpt_cli("verify", log.folder, "--all").count(": ok;") == 3
    view = ray_ckpt.Catalog(log.folder)[20]
    assert np.asarray(view["base.w"]).tobytes() == base and np.asarray(view["head.w"])[0] == 20
    before = Path(ray_ckpt.Catalog(log.folder)[10].where or "")
    shutil.rmtree(before)  # a run may have retired it, and damage there is damage of step 10
    assert "unchanged" not in ray_ckpt_cli("show", log.folder, 20)


def test_show_of_what_is_not_on_the_storage_path(run: SampleRun) -> None:
    assert "replicated(1), in cluster" in ray_ckpt_cli("show", run.folder, 40)
    assert "collected" in ray_ckpt_cli("show", run.folder, 10)
    document = as_json("show", run.folder, 20)
    assert document["state"] == "lost" and "files" not in document


def test_show_of_an_unknown_step(run: SampleRun, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = fails(capsys, "show", run.folder, 7)
    hint = "no live checkpoint of step 7. The nearest live steps are 30, 40, 50."
    assert (code, out) == (2, "") and hint in err


def test_show_and_ls_name_the_parity_groups_of_the_log(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=(10,), durable=(10,))
    later = make_checkpoint(run.log.attempt(1, 20))
    run.log.commit(later, replicas=2, parity="6+2")
    assert "replicated(2), parity 6+2, in cluster" in ray_ckpt_cli("show", run.folder, 20)
    assert as_json("show", run.folder, 20)["parity"] == "6+2"
    assert as_json("show", run.folder, 10)["parity"] is None
    assert [found["parity"] for found in as_json("ls", run.folder)["checkpoints"]] == [None, "6+2"]


def test_every_command_names_the_parity_groups_of_a_durable_checkpoint(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=())
    saved = make_checkpoint(run.log.attempt(1, 10))
    run.log.commit(saved, replicas=2, parity="6+2")
    run.log.drain(saved, replicas=2)
    assert "level          durable, parity 6+2\n" in ray_ckpt_cli("show", run.folder)
    assert "durable, parity 6+2  " in ray_ckpt_cli("ls", run.folder)
    assert "durable, parity 6+2  " in ray_ckpt_cli("tree", run.folder)
    assert "durable, parity 6+2  " in ray_ckpt_cli("gc", run.folder, "--dry-run", "--keep-last", 1)
    for args in (("verify",), ("verify", "--plan"), ("drill", "--remote-only")):
        command = (args[0], run.folder, *args[1:])
        assert "its files are in parity groups (6+2)" in ray_ckpt_cli(*command)
        assert as_json(*command)["checkpoints"][0]["parity"] == "6+2"


def test_show_and_verify_name_the_damage_that_a_scrub_has_found(run: SampleRun) -> None:
    attempt = run.checkpoints[50].attempt.attempt
    assert "damaged" not in ray_ckpt_cli("show", run.folder, 50)
    run.log.append(records.Damaged(attempt=attempt, fragments="0,1"))
    assert "damaged        fragments 0,1 on the storage path" in ray_ckpt_cli("show", run.folder, 50)
    assert as_json("show", run.folder, 50)["damaged"] == "0,1"
    remark = "a scrub has found damage on the storage path, or cannot read it, in fragments 0,1"
    assert remark in ray_ckpt_cli("verify", run.folder, "--step", 50)
    run.log.append(records.Damaged(attempt=attempt, fragments=""))
    assert as_json("show", run.folder, 50)["damaged"] is None


def test_lists_name_the_damage_that_the_log_has(run: SampleRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.log.append(records.Damaged(attempt=run.checkpoints[50].attempt.attempt, fragments="0,1"))
    assert re.search(r"\* +50 +durable, damaged +live", ray_ckpt_cli("ls", run.folder))
    assert re.search(r"gpt +4 +50 +durable, damaged", ray_ckpt_cli("ls", run.folder.parent))
    (row,) = as_json("ls", run.folder.parent)["runs"]
    assert row["newest_flaws"] == ["damaged"]
    assert "* step 50  durable, damaged  " in ray_ckpt_cli("tree", run.folder)
    sessions = as_json("tree", run.folder)["sessions"]
    assert {c["step"]: c["flaws"] for c in sessions[-1]["checkpoints"]} == {40: [], 50: ["damaged"]}
    assert "level          durable, damaged\n" in ray_ckpt_cli("show", run.folder, 50)
    assert re.search(
        r"stays +50 +durable, damaged ", ray_ckpt_cli("gc", run.folder, "--dry-run", "--keep-last", 1)
    )
    monkeypatch.setenv("COLUMNS", "60")
    lines = ray_ckpt_cli("ls", run.folder).splitlines()
    assert any("durable, damaged" in line for line in lines) and max(map(len, lines)) <= 60


def test_show_names_pins_and_the_last_verification(run: SampleRun) -> None:
    assert (as_json("show", run.folder, 50)["pins"], as_json("show", run.folder, 50)["verified_at_s"]) == (
        {},
        None,
    )
    text = ray_ckpt_cli("show", run.folder, 50)
    assert "pins           none" in text and "last verified  never" in text
    attempt = run.checkpoints[50].attempt.attempt
    for owner, expires_at_s in (("nightly", 4e9), ("eval", None), ("old", 1e9)):
        run.log.append(records.Pin(attempt=attempt, owner=owner, expires_at_s=expires_at_s))
    run.log.append(records.Verified(attempt=attempt))
    document = as_json("show", run.folder, 50)
    assert document["pins"] == {"nightly": 4e9, "eval": None, "old": 1e9}
    assert document["verified_at_s"] > document["committed_at_s"]
    text = ray_ckpt_cli("show", run.folder, 50)
    assert "eval, nightly until 2096-10-0" in text and "old (expired)" in text
    assert "last verified" in text and "never" not in text


# gc


def verdicts(*args: object) -> list[tuple[int, bool]]:
    """Step and whether it stays, of the live checkpoints."""
    return [(c["step"], c["kept"]) for c in as_json("gc", *args, "--dry-run")["checkpoints"]]


def test_gc_takes_the_policy_of_the_last_session(run: SampleRun) -> None:
    for number, retention in ((3, "last=1"), (4, "last=1 best=loss:max:2")):
        session = records.Session(
            session=number,
            service="sample",
            after=number - 1,
            resumed_from=run.checkpoints[50].attempt.attempt,
            world_size=2,
            num_nodes=2,
            retention=retention,
        )
        run.log.append(session)
    document = as_json("gc", run.folder, "--dry-run")
    assert document["policy"] == "last=1 best=loss:max:2"
    assert [(c["step"], c["kept"], c["reasons"]) for c in document["checkpoints"]] == [
        (30, True, ["1 of 2 best by loss (max)"]),
        (40, False, ["off the lineage"]),
        (40, True, ["2 of 2 best by loss (max)"]),
        (50, True, ["newest local", "newest replicated", "newest durable", "last 1"]),
    ]
    assert verdicts(run.folder, "--keep-last", 1) == [(30, False), (40, False), (40, False), (50, True)]


def test_gc_with_a_policy_by_options_as_text(run: SampleRun) -> None:
    before = as_json("ls", run.folder, "--all")
    lines = ray_ckpt_cli("gc", run.folder, "--dry-run", "--keep-last", 2).splitlines()
    assert lines[0] == "run gpt  policy last=2"
    rows = [line.split() for line in lines if line.strip().startswith(("stays", "goes"))]
    assert [row[:2] for row in rows] == [["goes", "30"], ["goes", "40"], ["stays", "40"], ["stays", "50"]]
    assert "no policy keeps it" in " ".join(rows[0]) and "last 2" in " ".join(rows[2])
    going = [c["size_bytes"] for c in before["checkpoints"] if c["state"] == "live"][:2]
    size = f"{decimal(sum(going))} before sharing and compression"
    assert lines[-1] == f"2 of 4 would go, {size}; nothing was changed."
    assert as_json("ls", run.folder, "--all") == before


def test_gc_takes_every_option_of_retention(run: SampleRun) -> None:
    options = ["--keep-every", 10, "--keep-every-s", 60, "--keep-best", "a:b:min:1", "--keep-milestone", 0.25]
    options += ["--keep-milestone", 1, "--total-steps", 90, "--keep-epochs", "--ttl-s", 1e9]
    text = (
        "last=3 every_steps=10 every_s=60.0 milestones=90:0.25,1.0 epochs best=a%3Ab:min:1 ttl_s=1000000000.0"
    )
    assert as_json("gc", run.folder, "--dry-run", *options)["policy"] == text
    assert verdicts(run.folder, "--ttl-s", 1) == [(30, False), (40, False), (40, False), (50, True)]


def test_gc_shows_that_pins_hold(run: SampleRun) -> None:
    pin = records.Pin(attempt=run.checkpoints[30].attempt.attempt, owner="eval", expires_at_s=None)
    run.log.append(pin)
    assert "pinned by eval" in ray_ckpt_cli("gc", run.folder, "--dry-run", "--keep-last", 1)


def test_gc_keeps_the_newest_intact_durable_one(run: SampleRun) -> None:
    assert verdicts(run.folder, "--keep-last", 1) == [(30, False), (40, False), (40, False), (50, True)]
    run.log.append(records.Damaged(attempt=run.checkpoints[50].attempt.attempt, fragments="1"))
    assert verdicts(run.folder, "--keep-last", 1) == [(30, True), (40, False), (40, False), (50, True)]


def test_gc_prints_why_it_does_not_run(
    run: SampleRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = write_run(tmp_path, "empty", steps=()).folder
    for args, message in (
        ([run.folder], "only by the service of a running training. Add --dry-run"),
        ([run.folder, "--dry-run"], "has no retention policy. Give one by options"),
        (
            [run.folder, "--dry-run", "--keep-best", "loss:least:2"],
            "Give METRIC:MODE:COUNT",
        ),
        ([run.folder, "--dry-run", "--keep-best", "loss:2"], "Give METRIC:MODE:COUNT"),
        ([run.folder, "--dry-run", "--keep-last", 0], "keep_last is 0. Set it to"),
        ([run.folder, "--dry-run", "--keep-milestone", 0.5], "--keep-milestone and --total-steps go"),
        ([run.folder, "--dry-run", "--total-steps", 90], "--keep-milestone and --total-steps go"),
        ([tmp_path / "nothing", "--dry-run", "--keep-last", 1], "There is no run at"),
    ):
        code, out, err = fails(capsys, "gc", *args)
        assert (code, out) == (2, "")
        assert message in err and err.startswith("ray-ckpt: ") and err.count("\n") == 1
    assert "No live checkpoints." in ray_ckpt_cli("gc", empty, "--dry-run", "--keep-last", 1)


def test_show_prints_what_the_log_has_before_it_reports_damage(
    run: SampleRun, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.directory(50) / "manifest-00001-of-00002.parquet").unlink()
    code, out, err = fails(capsys, "show", run.folder, 50)
    assert code == 1 and f"path           {run.directory(50)}" in out
    assert "manifest-00001-of-00002.parquet is missing. Run `ray-ckpt verify`" in err
    code, out, err = fails(capsys, "show", run.folder, 50, "--json")
    document = json.loads(out)
    assert code == 1 and document["step"] == 50 and "files" not in document and "is missing" in err
    code, out, _ = fails(capsys, "verify", run.folder)
    assert code == 1 and "is missing.\n" in out, "verify has read the log just now"


def test_show_of_a_checkpoint_that_is_being_deleted_is_no_error(run: SampleRun) -> None:
    run.log.append(records.Retired(attempt=run.checkpoints[30].attempt.attempt, reason="old"))
    assert "model.blocks.0" in ray_ckpt_cli("show", run.folder, 30, "--slices")
    (run.directory(30) / names.CHECKPOINT_JSON).unlink()
    assert f"{run.directory(30)}, being deleted\n" in ray_ckpt_cli("show", run.folder, 30)
    assert as_json("show", run.folder, 30)["state"] == "retired"


# verify


def test_verify_takes_the_newest_durable_one(run: SampleRun, tmp_path: Path) -> None:
    assert f"{run.directory(50)}: ok; read 7 files, 11 slices" in ray_ckpt_cli("verify", run.folder)
    damage(run, 30)
    ray_ckpt_cli("verify", run.folder)
    branch = write_run(tmp_path, "branch", durable=(40,), resume_at=10, resumed_steps=(20,))
    assert str(branch.directory(40)) in ray_ckpt_cli("verify", branch.folder)


def test_verify_exits_with_1_and_names_file_and_slice(
    run: SampleRun, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run, 50)
    for args in ([run.folder], [run.folder, "--step", "50"], [run.folder, "--all"], [run.directory(50)]):
        code, out, _ = fails(capsys, "verify", *args)
        assert code == 1
        assert f"{SHARD}: model.blocks.0.weight[4:8, 0:6]: " in out and "DAMAGED (1 finding)" in out
    ray_ckpt_cli("verify", run.folder, "--step", 30)


def test_verify_as_json(run: SampleRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert as_json("verify", run.folder, "--all")["ok"] is True
    (run.directory(30) / SHARD).unlink()
    code, out, _ = fails(capsys, "verify", run.folder, "--all", "--json")
    document = json.loads(out)
    assert code == 1 and document["ok"] is False
    assert [(c["folder"], c["ok"]) for c in document["checkpoints"]] == [
        (str(run.directory(30)), False),
        (str(run.directory(50)), True),
    ]
    assert [(d["file"], d["where"]) for d in document["checkpoints"][0]["damages"]] == [(SHARD, "missing")]


def test_verify_and_drill_name_what_is_shared_and_what_was_suspected(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=(10,), durable=(10,))
    later = make_checkpoint(run.log.attempt(1, 20))
    text = "model.w: rank(s) 1 on node(s) b differ from 2 others"
    run.log.commit(later, suspect=text, shared_bytes=700)
    run.log.drain(later)
    shared = "700 bytes were linked to an earlier checkpoint on the nodes, not written"
    suspected = f"data-parallel replicas had drifted apart, {text}"
    for args in ((), ("--plan",), ("--all",)):
        out = ray_ckpt_cli("verify", run.folder, *args)
        assert f"Step 20: {shared}." in out and f"Step 20: {suspected}." in out
        assert "Step 10: " not in out
        found = as_json("verify", run.folder, *args)["checkpoints"][-1]
        assert (found["shared_bytes"], found["suspect"], found["parity"]) == (700, text, None)
    out = ray_ckpt_cli("drill", run.folder, "--remote-only")
    assert f"step 20: {shared}" in out and f"step 20: {suspected}" in out and "step 10: " not in out
    newest, *_ = as_json("drill", run.folder, "--remote-only")["checkpoints"]
    assert (newest["step"], newest["shared_bytes"], newest["suspect"]) == (20, 700, text)


def test_verify_of_all_names_what_is_in_the_cluster_only(run: SampleRun) -> None:
    for args in (("--all",), ("--all", "--plan")):
        text = ray_ckpt_cli("verify", run.folder, *args)
        assert "Not verified: 1 step in the cluster only (40)." in text
        assert as_json("verify", run.folder, *args)["in_cluster_only"] == [40]
    assert as_json("verify", run.folder)["in_cluster_only"] == []


def test_verify_of_a_copy_needs_no_log(
    run: SampleRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(run.directory(50), tmp_path / "elsewhere")
    assert "ok" in ray_ckpt_cli("verify", copy)
    (copy / names.CHECKPOINT_JSON).unlink()
    code, out, _ = fails(capsys, "verify", copy)
    assert code == 1 and f"{names.CHECKPOINT_JSON}: missing" in out
    assert fails(capsys, "verify", copy, "--all")[0] == 2


def test_verify_of_a_run_with_a_stray_file_verifies_the_run(run: SampleRun) -> None:
    for folder in (run.folder, run.folder / names.SERVICE_DIR):
        (folder / names.CHECKPOINT_JSON).write_text("{}")
        assert f"{run.directory(50)}: ok" in ray_ckpt_cli("verify", folder)


@pytest.fixture
def deleted_when_read(run: SampleRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention deletes step 30 as soon as anything is read."""
    read = CheckpointFiles.read_whole

    def then_deleted(files: CheckpointFiles, name: str, max_bytes: int) -> bytes:
        if run.directory(30).exists():
            run.log.append(records.Retired(attempt=run.checkpoints[30].attempt.attempt, reason="old"))
            shutil.rmtree(run.directory(30))
        return read(files, name, max_bytes)

    monkeypatch.setattr(CheckpointFiles, "read_whole", then_deleted)


@pytest.mark.parametrize("plan", [(), ("--plan",)])
@pytest.mark.usefixtures("deleted_when_read")
def test_verify_leaves_out_what_the_run_deletes_meanwhile(
    run: SampleRun, capsys: pytest.CaptureFixture[str], plan: tuple[str, ...]
) -> None:
    out = ray_ckpt_cli("verify", run.folder, "--all", *plan)
    assert str(run.directory(50)) in out and str(run.directory(30)) not in out
    shutil.rmtree(run.directory(50))  # by nobody who may
    code, out, _ = fails(capsys, "verify", run.folder, "--all", *plan)
    assert code == 1 and str(run.directory(50)) in out


@pytest.mark.parametrize("plan", [(), ("--plan",)])
@pytest.mark.usefixtures("deleted_when_read")
def test_verify_reports_that_its_only_step_was_retired_meanwhile(
    run: SampleRun, capsys: pytest.CaptureFixture[str], plan: tuple[str, ...]
) -> None:
    code, out, err = fails(capsys, "verify", run.folder, "--step", 30, *plan)
    assert (code, out) == (2, "") and "All checkpoints were retired while they were verified" in err


def test_verify_without_anything_to_verify_exits_with_2(
    run: SampleRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = write_run(tmp_path, "empty", durable=()).folder
    for args, message in (
        ([empty], "it has no durable checkpoint"),
        ([empty, "--all"], "it has no durable checkpoint"),
        ([run.folder, "--step", 40], "step 40 is in the cluster only"),
        ([run.folder, "--step", 30, "--all"], "exclude each other"),
        ([tmp_path], "holds the runs empty, gpt"),
        ([tmp_path / "nothing"], "There is no run at"),
    ):
        code, out, err = fails(capsys, "verify", *args)
        assert (code, out) == (2, "")
        assert message in err and err.startswith("ray-ckpt: ") and err.count("\n") == 1


def test_files_without_permission_are_not_called_damaged(
    run: SampleRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    children, private = PosixFiles.children, run.directory(50)

    def refuse(files: PosixFiles, folder: str = "") -> Children:
        if folder.endswith(private.name):
            raise PermissionError(13, "Permission denied", str(private))
        return children(files, folder)

    monkeypatch.setattr(PosixFiles, "children", refuse)
    for args in ((), ("--all",), ("--plan",)):
        code, out, _ = fails(capsys, "verify", run.folder, *args)
        assert code == 2 and f"{private}: CANNOT BE READ (1 finding)" in out
        assert "read them as that user" in out and "root digest" not in out
        code, out, _ = fails(capsys, "verify", run.folder, *args, "--json")
        assert code == 2 and json.loads(out)["ok"] is False
    for command in (("show", run.folder, 50), ("export", run.folder, tmp_path / "out")):
        code, _, err = fails(capsys, *command)
        assert code == 2 and "read them as that user" in err
    damage(run, 30)
    assert fails(capsys, "verify", run.folder, "--all")[0] == 1


def test_one_file_without_permission_is_not_called_damaged(
    run: SampleRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, private = PosixFiles.read, [SHARD]

    def refuse(files: PosixFiles, name: str, ranges: Sequence[tuple[int, int]]) -> Blocks:
        if name.endswith(private[0]):
            raise PermissionError(13, "Permission denied", name)
        return read(files, name, ranges)

    monkeypatch.setattr(PosixFiles, "read", refuse)
    for args in ((), ("--plan",)):
        code, out, _ = fails(capsys, "verify", run.folder, *args)
        assert code == 2 and "CANNOT BE READ (1 finding)" in out and f"{SHARD}: unreadable" in out
    private[0] = next(run.directory(50).glob("manifest-*")).name
    code, out, _ = fails(capsys, "verify", run.folder)
    assert code == 2 and "CANNOT BE READ" in out and "unlisted" not in out
    private[0] = names.CHECKPOINT_JSON
    code, out, _ = fails(capsys, "verify", run.folder, "--plan")
    assert code == 2 and "can be restored; not all files can be read (1 finding)" in out


def test_a_file_that_is_deleted_meanwhile_is_missing(
    run: SampleRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = PosixFiles.read

    def delete_first(files: PosixFiles, name: str, ranges: Sequence[tuple[int, int]]) -> Blocks:
        if name.endswith(SHARD):
            (run.directory(50) / SHARD).unlink(missing_ok=True)
        return read(files, name, ranges)

    monkeypatch.setattr(PosixFiles, "read", delete_first)
    code, out, _ = fails(capsys, "verify", run.folder)
    assert code == 1 and f"{SHARD}: missing" in out


@pytest.mark.parametrize("plan", [(), ("--plan",)])
def test_verify_of_a_folder_that_is_gone_names_no_other_root_digest(
    run: SampleRun, capsys: pytest.CaptureFixture[str], plan: tuple[str, ...]
) -> None:
    shutil.rmtree(run.directory(50))
    code, out, _ = fails(capsys, "verify", run.folder, *plan)
    assert code == 1 and f"{names.CHECKPOINT_JSON}: missing" in out and "root digest" not in out


def test_verify_names_the_option_for_items_that_lost_checkpoints_have_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path, steps=(10,), durable=())
    attempt = run.checkpoints[10].attempt.attempt
    exported = records.Exported(attempt=attempt, items="model", root_digest="0" * 32, size_bytes=9)
    for record in (exported, records.Lost(attempt=attempt, reason="all nodes are gone")):
        run.log.append(record)
    (names_all,) = fails(capsys, "verify", run.folder)[2].splitlines()
    assert "`--all` verifies the items that lost checkpoints have left" in names_all


# export


def test_export_of_two_items_says_how_to_write_several(
    run: SampleRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    args = ("export", run.folder, out, "--item", "model", "--item", "optimizer")
    code, _, err = fails(capsys, *args)
    assert code == 2 and not out.exists()
    assert "--item is given twice" in err and "--only 'model.*' --only 'optimizer.*'" in err
    several = ("--only", "model.*", "--only", "optimizer.*")
    ray_ckpt_cli("export", run.folder, out, *several)
    written = ray_ckpt.Catalog(run.folder).newest()
    assert written is not None
    assert set(load_file(out / "model.safetensors")) == {
        name for name in written.tensors() if name.partition(".")[0] in ("model", "optimizer")
    }


def test_export_to_a_folder_refuses_the_name_of_a_file(
    run: SampleRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gpt.safetensors"
    code, _, err = fails(capsys, "export", run.folder, out)
    assert code == 2 and f"{out} is to be a folder" in err and f"Give {tmp_path / 'gpt'}" in err
    assert not out.exists()
    out.mkdir()
    ray_ckpt_cli("export", run.folder, out)  # which is a folder already


# In a bucket


@pytest.fixture
def storage(strict: StrictStore, credentials: None) -> Location:
    """A storage path of S3 that nobody else has."""
    return Location.parse(bucket_url("s3", strict.endpoint, f"cli/{uuid.uuid4().hex}"))


def test_every_command_takes_a_url(
    run: SampleRun, tmp_path: Path, storage: Location, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, "local", steps=(5,), durable=(), replicas=0)
    damage(run, 30)
    copy_to(open_store(storage, None)[0], tmp_path)
    url, where = storage / "gpt", storage / "gpt" / "ray_ckpt" / "checkpoints"
    here = as_json("ls", run.folder, "--all")["checkpoints"]
    for found in here:
        path = found["path"]
        found["path"] = path and str(where / Path(path).name)
    assert as_json("ls", url, "--all")["checkpoints"] == here
    assert [r["run_name"] for r in as_json("ls", storage)["runs"]] == ["gpt", "local"]
    checkpoint = where / run.checkpoints[50].attempt.directory
    assert str(checkpoint) in ray_ckpt_cli("show", url, 50)
    assert verdicts(url, "--keep-last", 1) == verdicts(run.folder, "--keep-last", 1)
    for target in (url, checkpoint):
        assert f"{checkpoint}: ok; read 7 files" in ray_ckpt_cli("verify", target)
    code, out, _ = fails(capsys, "verify", url, "--step", 30)
    assert code == 1 and f"{SHARD}: model.blocks.0.weight[4:8, 0:6]: " in out


def test_the_reason_why_a_bucket_cannot_be_read_is_one_line(
    run: SampleRun, tmp_path: Path, storage: Location, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_to(open_store(storage, None)[0], tmp_path)
    url = storage / "gpt"
    for args, message in (
        (["verify", storage], f"It holds the runs gpt; open {url}, for example."),
        (["ls", storage / "nothing"], "There is no run at"),
        (["ls", Location("s3", "nobody/gpt", storage.query)], "NoSuchBucket"),
        (["verify", Location("s3", "nobody/gpt", storage.query)], "NoSuchBucket"),
        (["ls", url, "--storage-option", "profile=nobody"], "no AWS profile 'nobody'"),
        (["show", url, 50, "--storage-option", "secret=canary"], "Unknown storage option 'secret'"),
        (["gc", url, "--dry-run", "--storage-option", "canary"], "Give NAME=VALUE."),
        (["verify", run.folder, "--storage-option", "profile=a"], "takes no storage_options"),
        (["ls", "s3://key:canary@bucket/gpt"], "holds credentials"),
    ):
        code, out, err = fails(capsys, *args)
        assert (code, out) == (2, "")
        assert message in err and err.startswith("ray-ckpt: ") and err.count("\n") == 1
        assert "canary" not in err
    assert "gpt" in ray_ckpt_cli("ls", url, "--storage-option", "region=us-east-1")


# The command itself


def test_usage_errors_exit_with_2() -> None:
    for args in (["ls"], ["show", "x", "not-a-number"], ["verify", "x", "--nope"], ["unknown"]):
        assert CliRunner().invoke(app, args).exit_code == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["unknown"], "No such command 'unknown'. See `ray-ckpt --help`."),
        (["ls"], "Missing argument 'PATH'. See `ray-ckpt ls --help`."),
        (["verify", "x", "--nope"], "No such option: --nope"),
        (["show", "x", "y"], "Invalid value for 'STEP': "),
        (["verify", "x", "7"], "Got unexpected extra argument(s) (7). Name the step with --step 7. See"),
        (["export", "x", "out", "7"], "Got unexpected extra argument(s) (7). Name the step with --step 7."),
        (["tree", "x", "7"], "Got unexpected extra argument(s) (7). See `ray-ckpt tree --help`."),
    ],
)
def test_usage_errors_are_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = fails(capsys, *args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"ray-ckpt: {message}")


def test_an_option_in_place_of_the_step_says_that_the_step_is_an_argument(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for args in (("show", "x", "--step", 7), ("pin", "x", "--step=7", "--owner", "me")):
        code, _, err = fails(capsys, *args)
        assert code == 2 and "No such option: --step" in err
        assert ". The step is an argument: leave out --step. See" in err


def test_errors_of_the_system_are_printed_in_words(
    run: SampleRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    result = fails(capsys, "ls", run.folder, "--parquet", file)
    assert result == (2, "", f"ray-ckpt: {file}: File exists\n")


def test_damage_exits_with_1_in_every_command(run: SampleRun, capsys: pytest.CaptureFixture[str]) -> None:
    next(run.directory(50).glob("manifest-*")).write_bytes(b"x")
    code, out, err = fails(capsys, "show", run.folder, 50)
    assert code == 1 and "root digest" in out and "differs from its digest" in err
    (run.folder / "ray_ckpt" / "log" / names.record_file(3)).write_bytes(b'{"x":')
    for command in ("ls", "tree", "goodput"):
        code, out, err = fails(capsys, command, run.folder)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert names.record_file(3) in err and "backup" in err


def test_ctrl_c_exits_with_130(
    run: SampleRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_ls, "Catalog", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit) as caught:
        main(["ls", str(run.folder)])
    assert caught.value.code == EXIT_INTERRUPTED == 130
    assert capsys.readouterr().out == ""


def test_output_that_nobody_takes_is_no_error(
    run: SampleRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout", None)  # as `>&-` leaves it
    for args in (["ls", str(run.folder)], ["ls", str(run.folder), "--json"], ["tree", str(run.folder)]):
        with pytest.raises(SystemExit) as caught:
            main(args)
        assert caught.value.code == 0
    assert capsys.readouterr().err == ""


def into_closed_pipe(stream: str, *command: object) -> subprocess.CompletedProcess[str]:
    """Run a process whose `stream` nobody reads."""
    ours, theirs = os.pipe()
    os.close(ours)
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: theirs}
    try:
        return subprocess.run([sys.executable, *map(str, command)], text=True, **streams)
    finally:
        os.close(theirs)


@pytest.mark.parametrize("args", every_few(["ls {run}", "--help"]))
def test_a_pipe_that_nobody_reads_ends_a_command_without_a_message(run: SampleRun, args: str) -> None:
    done = into_closed_pipe("stdout", "-m", "ray_ckpt.cli", *args.format(run=run.folder).split())
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.slow  # 3 s
def test_a_result_is_printed_whole_when_nobody_reads_stderr(run: SampleRun) -> None:
    program = (
        "import sys; from ray_ckpt.cli.streams import end_when_unread; end_when_unread(); print('before'); "
        "print('words', file=sys.stderr, flush=True); print('after')"
    )
    done = into_closed_pipe("stderr", "-c", program)
    assert (done.returncode, done.stdout) == (0, "before\nafter\n")
    assert into_closed_pipe("stderr", "-m", "ray_ckpt.cli", "show", run.folder, 7).returncode == 2


@pytest.mark.parametrize("args", every_few(["ls {run}", "ls {run} --json", "--help"]))
def test_a_full_disk_is_one_line_of_error(run: SampleRun, args: str) -> None:
    command = [sys.executable, "-m", "ray_ckpt.cli", *args.format(run=run.folder).split()]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, text=True, stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (2, "ray-ckpt: stdout: No space left on device\n")


@pytest.mark.parametrize("args", every_few(["ls {run}", "show {run} 60"]))
def test_what_an_encoding_does_not_have_is_escaped(run: SampleRun, args: str) -> None:
    saved = make_checkpoint(run.log.attempt(1, 60), metrics={"損失": 0.5})
    run.log.commit(saved)
    command = [sys.executable, "-m", "ray_ckpt.cli", *args.format(run=run.folder).split()]
    env = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, capture_output=True, env=env)
    assert (done.returncode, done.stderr) == (0, b"") and rb"\u640d\u5931" in done.stdout


def test_a_time_that_has_not_come_is_not_past() -> None:
    assert when_text(time.time() + 2.5 * 3600).startswith("in 2 h, 20")
    assert when_text(time.time() + 2.5 * 86400, brief=True) == "in 2 d"
    assert when_text(time.time() - 2.5 * 3600, brief=True) == "2 h ago"


def test_what_is_left_in_a_pipes_buffer_ends_a_command_when_it_shuts_down() -> None:
    program = "from ray_ckpt.cli.streams import end_when_unread; end_when_unread(); print('x')"
    done = into_closed_pipe("stdout", "-c", program)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("command", ["ls", "tree", "export", "show", "verify", "gc"])
def test_every_command_has_an_example(command: str) -> None:
    assert f"Example: ray-ckpt {command}" in ray_ckpt_cli(command, "--help")


def test_version_and_exit_codes_are_documented() -> None:
    assert ray_ckpt_cli("--version").strip() == f"ray-ckpt {ray_ckpt.__version__}"
    assert "1 damage found" in ray_ckpt_cli("--help") and "s3://bucket/runs/gpt" in ray_ckpt_cli("--help")


def test_as_a_process(run: SampleRun) -> None:
    damage(run, 50)
    command = [sys.executable, "-m", "ray_ckpt.cli", "verify", str(run.folder)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (1, "")
    assert "model.blocks.0.weight[4:8, 0:6]" in result.stdout and "\x1b" not in result.stdout
    result = subprocess.run([*command, "--step", "99"], capture_output=True, text=True)
    assert result.returncode == 2 and "no live checkpoint of step 99" in result.stderr
