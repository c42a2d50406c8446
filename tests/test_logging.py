"""What a run shows: trackers get what metrics.jsonl gets, the screen says what matters in lines that fit, curves.png draws it."""

import fcntl
import json
import os
import pty
import re
import runpy
import struct
import subprocess
import sys
import termios
from collections import defaultdict
from dataclasses import asdict
from types import SimpleNamespace

import pytest

import common
import grpo

from conftest import AT_START
from test_scripts import ROOT

SAMPLE = {"prompt": "1+1=", "completion": "a|b\nc", "reward": 0.5}


def row_of(step):
    """One step's metrics, every number another; the even ones evaluate."""
    names = ["reward", "reward/exact_match", "kl", "completion_length", "tokens_per_second"] + ["eval_reward"] * (step % 2 == 0)
    return {name: step + i / 8 for i, name in enumerate(names) if step or name == "eval_reward"}


def log_run(folder, steps, resume=False, **options):
    """Log steps (a range) into a run folder as a script does."""
    options = {"output_dir": str(folder), "resume": str(folder) if resume else None} | options
    logger = common.Logger("grpo", asdict(grpo.Args(num_steps=max(steps), **options)), steps[0] - 1 if resume else 0)
    for step in steps:
        logger.log(step, row_of(step), [SAMPLE, SAMPLE | {"held_out": True}])
    logger.close()


def log_and_resume(folder, track):
    """Steps 0 to 5, then from the checkpoint of step 3 on to 6: what a tracker should show in the end, (step, value) by name."""
    log_run(folder, range(6), track=track)
    log_run(folder, range(4, 7), track=track, resume=True)
    expected = defaultdict(list)
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for name in row.keys() - {"step"}:
            expected[name].append((row["step"], row[name]))
    assert [step for step, _ in expected["reward"]] == [1, 2, 3, 4, 5, 6]
    return expected


# --- trackers ---


@pytest.mark.parametrize("track", ["wandb", "trackio"])
def test_what_a_tracker_is_told(track, tmp_path, monkeypatch):
    """A stand-in for the package notes the calls: names and steps of metrics.jsonl, tables with evaluations, and the end of the run."""
    runs, logged, ended = [], [], []
    package = SimpleNamespace(
        init=lambda **options: runs.append(options), finish=lambda: ended.append(len(logged)),
        log=lambda row, step: logged.append((step, row)), Table=lambda columns, data: [columns, *data],
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, track, package)
    log_run(tmp_path / "run", range(6), track=track)
    (tmp_path / "run" / "wandb" / "offline-run-20260101_000000-abc123").mkdir(parents=True)
    log_run(tmp_path / "run", range(4, 7), track=track, resume=True)
    assert [step for step, _ in logged] == [0, 1, 2, 3, 4, 5, 4, 5, 6] and ended == [6, 9]
    tables = [(step, row.pop("samples")) for step, row in logged if "samples" in row]
    assert all(row == row_of(step) for step, row in logged)
    assert [step for step, _ in tables] == [0, 2, 4, 5, 4, 6]  # with an evaluation, and at the end
    assert all(table[1:] == [[False, "1+1=", "a|b\nc", 0.5], [True, "1+1=", "a|b\nc", 0.5]] for _, table in tables)
    assert [(run["name"], run["project"]) for run in runs] == [("run", "policy-gradients")] * 2
    assert [run["resume"] for run in runs] == ["never", "allow"] and runs[0]["config"]["num_steps"] == 5
    if track == "wandb":
        assert [(run["dir"], run["id"]) for run in runs] == [(str(tmp_path / "run"), None), (str(tmp_path / "run"), "abc123")]


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    expected = log_and_resume(tmp_path / "run", "tensorboard")
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    assert {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]} == expected
    texts = events.Tensors("samples/text_summary")
    assert [event.step for event in texts] == [0, 2, 4, 5, 4, 6]  # with an evaluation, and at the end of each part
    table = texts[-1].tensor_proto.string_val[0].decode().splitlines()
    assert [line.count("|") for line in table] == [5, 5, 5, 5]  # the bar in the completion opens no cell, its line break no row
    log, _ = common.open_tracker("tensorboard", tmp_path / "open", {}, 0)
    log({"step": 1, "kl": 2.0}, [])  # and the process dies: what it has logged is on the disk
    assert [event.step for event in EventAccumulator(str(tmp_path / "open")).Reload().Scalars("kl")] == [1]
    assert table[0] == "| held_out | prompt | completion | reward |" and table[3] == "| True | '1+1=' | 'a&#124;b\\nc' | 0.5 |"


def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    expected, found, ids, ends, tables = log_and_resume(tmp_path / "run", "wandb"), defaultdict(dict), set(), 0, 0
    for path in sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")):
        data, at, record = path.read_bytes(), 7, b""
        while at + 7 <= len(data):  # LevelDB's log format: blocks of 32 KiB; checksum, length, kind, piece
            if (left := 32768 - at % 32768) < 7:
                at += left
                continue
            end, kind = at + 7 + int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            record, at = record + data[at + 7 : end], end
            if kind in (1, 4):  # a whole record, or its last piece
                entry, record = Record.FromString(record), b""
                row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in entry.history.item}
                for name in expected.keys() & row.keys():
                    found[name][row["_step"]] = row[name]
                tables += any("samples" in name for name in row)
                ends += entry.HasField("exit")
                ids |= {entry.run.run_id} - {""}
    assert {name: sorted(values.items()) for name, values in found.items()} == expected
    assert len(ids) == 1 and ends == 2 and tables == 6  # of 0, 2, 4, 5 and then 4, 6


def test_trackio(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)  # it reads its folder's name when imported
    from trackio.sqlite_storage import SQLiteStorage

    expected, found, tables = log_and_resume(tmp_path / "run", "trackio"), defaultdict(dict), []
    for row in SQLiteStorage.get_logs("policy-gradients", "run"):
        tables += [row["samples"]] if "samples" in row else []
        for name in expected.keys() & row.keys():
            found[name][row["step"]] = row[name]
    assert {name: sorted(values.items()) for name, values in found.items()} == expected
    assert len(tables) == 6 and tables[0]["_value"][1] == {"held_out": True, **SAMPLE}


# --- the screen ---


def log_long_samples(folder, monkeypatch, steps=range(5)):
    """Steps whose samples don't fit a line."""
    monkeypatch.setitem(SAMPLE, "completion", "\x1b[1m" + "So 7 times 8 is fifty-six, and " * 40 + "the answer is 56.\n")
    log_run(folder, steps)


def test_a_log_file_has_one_line_per_step_and_no_control_characters(tmp_path, capfd, monkeypatch):
    log_long_samples(tmp_path / "run", monkeypatch)
    out, err = capfd.readouterr()
    assert not err and all(c.isprintable() or c == "\n" for c in out)
    steps, table = out.split("\n\n", 1)
    assert steps.splitlines() == [
        "step 0/4: eval 0.625",
        "step 1/4: reward 1.000, kl 1.25, length 1.4, 2 tokens/s",
        "step 2/4: reward 2.000, kl 2.25, length 2.4, eval 2.625, 2 tokens/s",
        "step 3/4: reward 3.000, kl 3.25, length 3.4, 4 tokens/s",
        "step 4/4: reward 4.000, kl 4.25, length 4.4, eval 4.625, 4 tokens/s",
    ]
    lines = table.splitlines()
    assert lines[1].split() == ["reward", "0.625", "4.625"] and f"run folder: {tmp_path / 'run'}" in lines
    assert (
        max(map(len, lines)) <= 140 and "\\x1b[1mSo 7" in table and table.count("the answer is 56.\\n' (0.500)") == 2
    )  # both ends are there


def test_a_terminal_of_80_columns(tmp_path, monkeypatch):
    screen, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    monkeypatch.setenv("COLUMNS", "80")
    with open(end, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        patch.setattr(sys, "stderr", terminal)
        log_long_samples(tmp_path / "run", patch, range(6))
        terminal.flush()
        text = os.read(screen, 1 << 16).decode()
    os.close(screen)
    drawn = [piece.rstrip() for piece in re.split("[\r\n]+", text)]
    assert max(map(len, drawn)) <= 80 and "\x1b" not in text.replace("\x1b[A", "")
    bars = [piece for piece in drawn if re.match(r"grpo \d/5 ", piece)]
    assert re.fullmatch(r"grpo 5/5 \S+ 00:\d\d<00:00, reward 5.000, kl 5.25, length 5.4, eval 4.625", bars[-1]), bars  # the latest
    assert [int(piece[5]) for piece in drawn if piece.startswith("step ")] == [0, 2, 4]  # evaluations scroll by above the bar
    assert "    '1+1=' -> '\\x1b[1mSo 7 times 8 is" in text and "    before: '\\x1b[1mSo 7 times 8 is" in text


def test_quiet_leaves_the_scores_before_and_after_and_the_folder(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(common, "quiet", [True])
    common.say("good to know")
    log_long_samples(tmp_path / "run", monkeypatch)
    out, err = capfd.readouterr()
    head = f"{'held-out prompts':<40}{'before':>10}{'after':>10}"
    assert not err and out.split("\n") == ["", head, f"{'reward':<40}{0.625:>10}{4.625:>10}", "", f"run folder: {tmp_path / 'run'}", ""]


def test_the_flag_quiet_is_that_of_one_run(tmp_path, capsys, monkeypatch):
    for flags, out in (["--quiet"], ""), ([], "good to know\n"):
        monkeypatch.setattr(sys, "argv", ["grpo.py", *flags])
        monkeypatch.setattr(sys.stdout, "reconfigure", lambda **_: None, raising=False)
        common.launch(lambda args: common.say("good to know"), grpo.Args, "")
        assert capsys.readouterr().out == out


# --- curves ---


def test_curves_show_every_metric_of_every_run(tmp_path, monkeypatch):
    """What is drawn, read back from the figure: a panel per metric and a line per run, with the numbers of metrics.jsonl."""
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path: drawn.append((self, path)))
    log_run(tmp_path / "one", range(6))
    log_run(tmp_path / "two", range(3))
    monkeypatch.setattr(sys, "argv", ["plot.py", str(tmp_path / "one"), str(tmp_path / "two"), "--output", str(tmp_path / "both.png")])
    runpy.run_path(str(ROOT / "benchmarks/plot.py"), run_name="__main__")
    assert [path for _, path in drawn] == [tmp_path / "one" / "curves.png", tmp_path / "two" / "curves.png", tmp_path / "both.png"]
    for figure, ends in zip((drawn[0][0], drawn[2][0]), ([5], [5, 2])):
        panels = {axis.get_title(): axis.lines for axis in figure.axes if axis.get_title()}
        assert list(panels) == ["eval_reward", "reward", "reward/exact_match", "kl", "completion_length", "tokens_per_second"]
        for name, lines in panels.items():
            for line, end in zip(lines, ends, strict=True):
                steps = [step for step in range(end + 1) if name in row_of(step)]
                assert list(line.get_xdata()) == steps and list(line.get_ydata()) == [row_of(step)[name] for step in steps]


def test_without_matplotlib_nothing_is_drawn(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(common.importlib.util, "find_spec", lambda name: None)
    log_run(tmp_path / "run", range(3))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["args.json", "metrics.jsonl", "samples.jsonl"]
    assert "curves.png" not in capsys.readouterr().out


def test_nothing_optional_is_imported_at_start_up():
    names = "matplotlib", "tensorboard", "wandb", "trackio", "peft", "datasets", "math_verify"
    assert not AT_START & set(names)
