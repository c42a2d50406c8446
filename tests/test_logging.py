"""What a run shows: trackers get what metrics.jsonl gets, and the screen says what matters, a line a step."""

import json
import sys
from collections import defaultdict
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from conftest import AT_START

import common
import grpo

SAMPLE = {"prompt": "1+1=", "completion": "a|b\nc", "reward": 0.5}


def row_of(step):
    """One step's metrics, every number another; the even ones evaluate."""
    names = ["reward", "reward/exact_match", "kl", "completion_length", "tokens_per_second"]
    names += ["eval_reward"] * (step % 2 == 0)
    return {name: step + i / 8 for i, name in enumerate(names) if step or name == "eval_reward"}


def log_run(folder, steps, resume=False, track="none"):
    """Log steps (a range) into a run folder as a script does."""
    resume, start = str(folder) if resume else None, steps[0] - 1 if resume else 0
    config = asdict(grpo.Args(num_steps=max(steps), output_dir=str(folder), resume=resume, track=track))
    logger = common.Logger("grpo", config, str(folder), resume, start, track)
    for step in steps:
        logger.log(step, row_of(step), [SAMPLE, SAMPLE | {"held_out": True}])


def log_and_resume(folder, track):
    """Steps 0 to 5, then from the checkpoint of step 3 on to 6: what a tracker should show, (step, value) by name."""
    log_run(folder, range(6), track=track)
    log_run(folder, range(4, 7), track=track, resume=True)
    expected = defaultdict(list)
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for name in row.keys() - {"step"}:
            expected[name].append((row["step"], row[name]))
    assert [step for step, _ in expected["reward"]] == [1, 2, 3, 4, 5, 6]
    return expected


def test_a_resumed_run_writes_the_steps_after_its_checkpoint_again(tmp_path):
    log_and_resume(tmp_path, "none")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": step} | row_of(step) for step in range(7)]
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    both = (SAMPLE, SAMPLE | {"held_out": True})
    assert samples == [{"step": step} | sample for step in range(7) for sample in both]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["args.json", "metrics.jsonl", "samples.jsonl"]


# --- trackers ---


def test_what_wandb_is_told(tmp_path, monkeypatch):
    """A stand-in for the package notes the calls: names and steps of metrics.jsonl."""
    runs, logged = [], []
    run = SimpleNamespace(log=lambda row, step: logged.append((step, row)))
    package = SimpleNamespace(init=lambda **options: runs.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", package)
    log_and_resume(tmp_path / "run", "wandb")
    assert logged == [(step, row_of(step)) for step in (0, 1, 2, 3, 4, 5, 4, 5, 6)]
    names = ("run", "policy-gradients", str(tmp_path / "run"))
    assert [(run["name"], run["project"], run["dir"]) for run in runs] == [names] * 2
    assert runs[0]["config"]["num_steps"] == 5 and runs[0]["config"]["script"] == "grpo"


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    expected = log_and_resume(tmp_path / "run", "tensorboard")
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    found = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert found == expected
    log = common.open_tracker("tensorboard", tmp_path / "open", {}, 0)
    log(1, {"kl": 2.0})  # and the process dies: what it has logged is on the disk
    assert [event.step for event in EventAccumulator(str(tmp_path / "open")).Reload().Scalars("kl")] == [1]


def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    expected, found = log_and_resume(tmp_path / "run", "wandb"), defaultdict(dict)
    wandb.finish()
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
                row = {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in entry.history.item
                }
                for name in expected.keys() & row.keys():
                    found[name][row["_step"]] = row[name]
    assert {name: sorted(values.items()) for name, values in found.items()} == expected


# --- the screen ---


def test_a_step_is_a_line_and_an_evaluation_shows_a_sample_without_control_characters(tmp_path, capfd, monkeypatch):
    monkeypatch.setitem(SAMPLE, "prompt", "7*8? " * 40)
    monkeypatch.setitem(SAMPLE, "completion", "\x1b[1m" + "So 7 times 8 is fifty-six, and " * 40 + "it is 56.\n")
    log_run(tmp_path / "run", range(5))
    out, err = capfd.readouterr()
    assert not err and all(c.isprintable() or c == "\n" for c in out)
    lines = out.splitlines()
    samples = [line for line in lines if line.startswith("    ")]
    assert [line for line in lines if line not in samples] == [
        f"run folder: {tmp_path / 'run'}; --resume {tmp_path / 'run'} goes on with it",
        "step 0: eval_reward 0.625",
        "step 1: reward 1, kl 1.25, completion_length 1.375, tokens_per_second 1.5",
        "step 2: reward 2, kl 2.25, completion_length 2.375, eval_reward 2.625, tokens_per_second 2.5",
        "step 3: reward 3, kl 3.25, completion_length 3.375, tokens_per_second 3.5",
        "step 4: reward 4, kl 4.25, completion_length 4.375, eval_reward 4.625, tokens_per_second 4.5",
    ]
    assert len(samples) == 3 and [lines.index(line) for line in samples[:1]] == [2]
    for line in samples:
        assert line.startswith("    '7*8? 7*8? ") and line.endswith(" (0.500)")
        assert "' -> " not in line and " -> '\\x1b[1mSo 7 times 8 is" in line and len(line) < 330


def test_nothing_optional_is_imported_at_start_up():
    names = "matplotlib", "tensorboard", "wandb", "peft", "datasets", "math_verify"
    assert not AT_START & set(names)
