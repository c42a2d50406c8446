"""Long runs die: whatever happens, what was saved is there, loads, and continues as if nothing had been."""

import json
import os
import pty
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict

import pytest
import torch
from test_scripts import (
    ADDITION,
    ENVIRONMENT,
    ROOT,
    SMALL,
    metrics_of,
    run_command,
    train,
    weights_of,
    without_times,
)
from transformers import AutoModelForCausalLM

import common
import grpo
from common import InputError


def words_of(options):
    flags = []
    for name, value in options.items():
        flags += [f"--{name.replace('_', '-')}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return flags


def test_two_processes_of_one_second_name_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "20260101-120000")
    for process in (11, 12):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        common.Logger("grpo", asdict(grpo.Args()), None, None, 0, "none")
    assert len([*tmp_path.glob("runs/grpo-20260101-120000-*")]) == 2


def test_killed_runs_end_as_if_never_killed():
    command = [sys.executable, "tests/kill.py", "--kills", "10"]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0 and "10 kills" in done.stdout, done.stdout + done.stderr


# --- signals ---


SIGNALS = """import os, pathlib, time
calls = []

def score(prompts, completions, rows):
    calls.append(1)
    file = pathlib.Path(__file__).with_name("signals")
    if len(calls) == 3 and file.exists():  # evaluation, step 1, step 2
        for number in map(int, file.read_text().split()):
            os.kill(os.getpid(), number)
            time.sleep(0.1)
    return [float(c == row["answer"]) for c, row in zip(completions, rows)]
"""


@pytest.fixture
def signalled(tmp_path, monkeypatch):
    """Options of a run that gets the signals named in a file; without the script's handler nothing comes of them."""
    monkeypatch.setattr(common, "asked_to_stop", [])
    (tmp_path / "reward.py").write_text(SIGNALS)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield SMALL | ADDITION | {"reward_fn": (f"{tmp_path}/reward.py:score",), "num_steps": 3, "eval_every": 0}
    signal.signal(signal.SIGINT, before)


PRINTS = """import sys

def score(prompts, completions, rows):
    print("scoring", len(completions))
    print("scoring", file=sys.stderr, flush=True)
    return [float(len(c)) for c in completions]
"""
LEAVING = [(signal.SIGTERM, "stays", False), (signal.SIGINT, "is gone", False), (signal.SIGHUP, "is gone", False)]


@pytest.mark.parametrize("number, reader, nohup", [*LEAVING, (signal.SIGHUP, "is gone", True)])
def test_a_signal_from_outside_saves_a_checkpoint_after_the_step(number, reader, nohup, tmp_path):
    """Whenever it comes, while sampling, in an update, in a save; also where Ctrl-C ends the | tee that reads, too, or
    the terminal is closed, and the reward prints on. Under nohup a closed terminal is nothing."""
    (tmp_path / "reward.py").write_text(PRINTS)
    steps = 12 if nohup else 400
    options = SMALL | {"reward_fn": f"{tmp_path}/reward.py:score", "num_steps": steps, "eval_every": 0, "save_every": 1}
    command = ["nohup"] * nohup + [sys.executable, "grpo.py", *words_of(options | {"output_dir": tmp_path / "run"})]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE if reader == "stays" else subprocess.STDOUT}
    process = subprocess.Popen(command, cwd=ROOT, text=True, env=ENVIRONMENT, **streams)
    for line in process.stdout:
        if line.startswith("step 2:"):
            break
    if reader == "is gone":
        process.stdout.close()
    process.send_signal(number)
    err = process.communicate(timeout=60)[1] if reader == "stays" else process.wait(timeout=60)
    stopped = metrics_of(tmp_path / "run")[-1]["step"]
    assert process.returncode == (0 if nohup else 128 + number) and (stopped == steps) == nohup
    assert reader == "is gone" or f"stopped after step {stopped}; continue with --resume {tmp_path / 'run'}" in err, err
    assert common.checkpoints(tmp_path / "run")[-1].name == f"checkpoint-{stopped}"


def test_a_signal_stops_after_the_step_and_the_run_goes_on(signalled, tmp_path, capsys):
    (tmp_path / "signals").write_text("2")
    with pytest.raises(SystemExit) as end:
        run_command(["ppo.py", *words_of(signalled | {"output_dir": tmp_path / "run"})])
    (tmp_path / "signals").unlink()
    common.asked_to_stop.clear()  # as a new process has it
    assert end.value.code == 130 and "stopped after step 2; continue with --resume" in capsys.readouterr().err
    assert [p.name for p in common.checkpoints(tmp_path / "run")] == ["checkpoint-2"]
    assert metrics_of(tmp_path / "run")[-1]["step"] == 2
    run_command(["ppo.py", "--resume", str(tmp_path / "run")])
    assert without_times(metrics_of(tmp_path / "run")) == without_times(train("ppo", tmp_path / "whole", **signalled))


def test_a_second_signal_stops_at_once(signalled, tmp_path):
    (tmp_path / "signals").write_text("2 2")
    with pytest.raises(KeyboardInterrupt):
        run_command(["grpo.py", *words_of(signalled | {"output_dir": tmp_path / "run"})])
    assert not common.checkpoints(tmp_path / "run") and metrics_of(tmp_path / "run")[-1]["step"] == 1


# --- output that nobody reads, or that can't be written as it is ---


def test_a_reader_that_goes_away_and_an_encoding_without_the_prompts_end_no_run(tmp_path):
    for name in ("sums.jsonl", "sums-eval.jsonl"):
        (tmp_path / name).write_text('{"prompt": "日本 1+1=", "answer": "2"}\n', encoding="utf-8")
    options = SMALL | ADDITION | {"dataset": tmp_path / "sums.jsonl", "eval_every": 1, "output_dir": tmp_path / "run"}
    command = shlex.join([sys.executable, "grpo.py", *words_of(options)])
    shell = ["bash", "-c", f"set -o pipefail; {command} | head -1"]
    environment = ENVIRONMENT | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(shell, check=False, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and done.stdout.startswith("device: cpu") and done.stdout.count("\n") == 1, done
    assert "Error" not in done.stderr and (tmp_path / "run" / "final" / "config.json").exists(), done.stderr
    sample = json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[0])
    assert sample["prompt"] == "日本 1+1="


def test_what_is_printed_to_a_terminal_that_was_closed_ends_no_run():
    """A run that was disowned, say."""
    screen, end = pty.openpty()
    os.close(screen)
    with pytest.raises(OSError, match="Input/output error"):
        os.write(end, b"step 1")
    common.if_read(os.write, end, b"step 1")
    os.close(end)


# --- what a run leaves, and goes on from ---


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    train("rloo", tmp_path, **SMALL | ADDITION | {"save_every": 1, "minibatch_size": 0})
    assert [p.name for p in common.checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-3"]
    assert not list(tmp_path.glob(".*")) and not (tmp_path / "checkpoint-1").exists()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")


FAILS = """import pathlib
calls = []

def score(prompts, completions, rows):
    calls.append(1)
    if len(calls) == 4 and pathlib.Path(__file__).with_name("fails").exists():  # evaluation, steps 1, 2, 3
        return [{"easy": 1.0}[row["level"]] for row in rows]
    return [float(c == row["answer"]) for c, row in zip(completions, rows)]
"""


def test_an_error_in_a_step_leaves_the_newest_checkpoint_and_shows_itself(tmp_path):
    """The reward function's own exception and traceback, no sentence of ours; mended, the run goes on."""
    (tmp_path / "reward.py").write_text(FAILS)
    (tmp_path / "fails").touch()
    options = SMALL | ADDITION | {"reward_fn": (f"{tmp_path}/reward.py:score",), "save_every": 1, "eval_every": 0}
    options |= {"num_steps": 4}
    with pytest.raises(KeyError, match="^'level'$") as error:
        run_command(["grpo.py", *words_of(options | {"output_dir": tmp_path / "run"})])
    assert str(error.traceback[-1].path) == str(tmp_path / "reward.py")
    assert [p.name for p in common.checkpoints(tmp_path / "run")] == ["checkpoint-1", "checkpoint-2"]
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [0, 1, 2]
    (tmp_path / "fails").unlink()
    run_command(["grpo.py", "--resume", str(tmp_path / "run")])
    assert without_times(metrics_of(tmp_path / "run")) == without_times(train("grpo", tmp_path / "whole", **options))
    one, other = weights_of(tmp_path / "whole" / "final"), weights_of(tmp_path / "run" / "final")
    assert all(torch.equal(one[k], other[k]) for k in one)


def test_a_disk_that_is_full_in_the_middle_of_a_save_leaves_the_earlier_checkpoint(tmp_path):
    """From the third step on no file may grow over 500 kB: the weights have more."""
    (tmp_path / "reward.py").write_text(
        "import resource\ncalls = []\n\ndef score(prompts, completions, rows):\n    calls.append(1)\n"
        "    if len(calls) == 4:\n        most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, most))\n    return [len(c) for c in completions]\n"
    )
    options = SMALL | {"reward_fn": f"{tmp_path}/reward.py:score", "save_every": 1, "eval_every": 0, "num_steps": 5}
    options |= {"output_dir": tmp_path / "run"}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(SystemExit, match="checkpoint-3 could not be saved.*what was saved before is still there"):
            run_command(["grpo.py", *words_of(options)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.name for p in common.checkpoints(tmp_path / "run")] == ["checkpoint-1", "checkpoint-2"]
    run_command(["grpo.py", "--resume", str(tmp_path / "run"), "--num-steps", "3"])
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [0, 1, 2, 3]


def test_a_resume_on_a_full_disk_leaves_what_the_next_one_needs(tmp_path, capsys):
    train("rloo", tmp_path, **SMALL | ADDITION | {"num_steps": 1, "minibatch_size": 0})
    before = {path: path.read_text() for path in tmp_path.glob("*.json*")}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises((OSError, SystemExit)):
            run_command(["rloo.py", "--resume", str(tmp_path), "--num-steps", "2"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path: path.read_text() for path in before} == before
    run_command(["rloo.py", "--resume", str(tmp_path), "--num-steps", "2"])
    assert [row["step"] for row in metrics_of(tmp_path)] == [0, 1, 2]


def test_a_folder_is_replaced_only_by_a_complete_one(tmp_path, monkeypatch):
    tokenizer = common.load_tokenizer("tiny/policy")
    policy = common.load_policy("tiny/policy", torch.device("cpu"), torch.float32)
    trained = torch.nn.ModuleDict({"policy": policy})
    common.save_model(tmp_path / "final", trained, tokenizer)
    before = weights_of(tmp_path / "final")
    policy.lm_head.weight.data += 1
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "save_pretrained", lambda *_: 1 / 0)
        with pytest.raises(InputError, match="final could not be saved"):
            common.save_model(tmp_path / "final", trained, tokenizer)
    assert all(torch.equal(v, before[k]) for k, v in weights_of(tmp_path / "final").items())
    common.save_model(tmp_path / "final", trained, tokenizer)
    assert not torch.equal(weights_of(tmp_path / "final")["lm_head.weight"], before["lm_head.weight"])
    assert [p.name for p in tmp_path.iterdir()] == ["final"]
    weights = tmp_path / "final" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])  # cut short by something else
    with pytest.raises(InputError, match="no model could be loaded from .*final, a folder or a hub id: "):
        common.load_policy(str(tmp_path / "final"), torch.device("cpu"), torch.float32)


def test_a_run_is_resumed_from_any_folder(tmp_path, monkeypatch, capsys):
    """Relative paths are meant from where the run was started, also when it is resumed twice."""
    monkeypatch.chdir(tmp_path)
    for name in ("sums.jsonl", "held-out.jsonl"):
        (tmp_path / name).write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "reward.py").write_text(
        "def score(prompts, completions, rows):\n    return [len(c) for c in completions]\n"
    )
    shutil.copytree(ROOT / "tiny/policy", "mine")
    options = SMALL | {"model": "mine", "dataset": "sums.jsonl", "eval_dataset": "held-out.jsonl", "num_steps": 1}
    options |= {"reward_fn": ("exact_match", "reward.py:score"), "output_dir": "run"}
    run_command(["grpo.py", *words_of(options)])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    capsys.readouterr()
    for steps in (2, 3):
        run_command(["grpo.py", "--resume", "../run", "--num-steps", str(steps)])
    announced = [line for line in capsys.readouterr().out.splitlines() if "resuming with" in line]
    assert announced == ["resuming with --num-steps 2 (was 1)", "resuming with --num-steps 3 (was 2)"]
    rows = metrics_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2, 3] and not list((tmp_path / "elsewhere").iterdir())
    names = [{name for name in row if name.startswith("reward/")} for row in rows[1:]]
    assert names == [{"reward/exact_match", "reward/score"}] * 3  # whatever way leads to the file


@pytest.mark.parametrize("name, options", [
    ("ppo", ADDITION | {"shared_backbone": True}),
    ("ppo", {"num_epochs": 2}),  # the learned reward, from which the value model starts
    ("grpo", ADDITION | {"dynamic_sampling": 2, "warmup_steps": 4}),
    ("rloo", {"minibatch_size": 0, "gradient_checkpointing": True}),
])  # fmt: skip
def test_what_is_resumed_ends_as_if_never_stopped(name, options, tmp_path):
    """Stopped after the second of four steps: position in the data, value model and optimizer's state come back."""
    options = SMALL | options | {"num_steps": 4, "eval_every": 1, "save_every": 2, "lr": 1e-3}
    whole = train(name, tmp_path / "whole", **options)
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    for folder in ("checkpoint-4", "final"):
        (tmp_path / "parts" / folder).rename(tmp_path / f"gone-{folder}")
    run_command([f"{name}.py", "--resume", str(tmp_path / "parts")])
    assert without_times(metrics_of(tmp_path / "parts")) == without_times(whole)
    one, other = weights_of(tmp_path / "whole" / "final"), weights_of(tmp_path / "parts" / "final")
    assert all(torch.equal(one[k], other[k]) for k in one)
    states = [flat(torch.load(tmp_path / run / "checkpoint-4" / "state.pt")) for run in ("whole", "parts")]
    assert states[0].keys() == states[1].keys() and states[0][".step"] == 4
    assert all(torch.equal(torch.as_tensor(x), torch.as_tensor(states[1][k])) for k, x in states[0].items())


def flat(thing, name=""):
    """What a nest of dicts and lists holds, by path, texts aside."""
    if isinstance(thing, dict | list | tuple):
        items = thing.items() if isinstance(thing, dict) else enumerate(thing)
        return {k: v for key, value in items for k, v in flat(value, f"{name}.{key}").items()}
    return {} if thing is None or isinstance(thing, str) else {name: thing}


def test_flags_beside_resume_stay_only_once_they_have_worked(tmp_path, capsys):
    (tmp_path / "raises.py").write_text("def score(prompts, completions, rows):\n    return [1 / 0 for _ in rows]\n")
    run = tmp_path / "run"
    train("grpo", run, **SMALL | ADDITION | {"num_steps": 1})
    before = (run / "args.json").read_text()
    with pytest.raises(ZeroDivisionError):
        run_command(["grpo.py", "--resume", str(run), "--num-steps", "2", "--reward-fn", f"{tmp_path}/raises.py:score"])
    assert (run / "args.json").read_text() == before
    capsys.readouterr()
    run_command(["grpo.py", "--resume", str(run)])  # one step was asked for, and is done: it says where it stands
    assert f"run folder: {run}, after step 1" in capsys.readouterr().out
    assert [row["step"] for row in metrics_of(run)] == [0, 1] and (run / "args.json").read_text() == before
    run_command(["grpo.py", "--resume", str(run), "--num-steps", "2", "--lr", "1e-4"])
    saved = json.loads((run / "args.json").read_text())
    assert saved["lr"] == 1e-4 and saved["num_steps"] == 2 and [row["step"] for row in metrics_of(run)] == [0, 1, 2]


def test_a_run_that_died_between_its_last_checkpoint_and_final_gets_its_final(tmp_path):
    train("grpo", tmp_path / "run", **SMALL | ADDITION | {"num_steps": 2})
    whole, rows = weights_of(tmp_path / "run" / "final"), metrics_of(tmp_path / "run")
    (tmp_path / "run" / "final").rename(tmp_path / "gone")
    run_command(["grpo.py", "--resume", str(tmp_path / "run")])
    final = weights_of(tmp_path / "run" / "final")
    assert all(torch.equal(final[k], whole[k]) for k in whole) and metrics_of(tmp_path / "run") == rows
