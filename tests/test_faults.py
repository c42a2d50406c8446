"""Long runs die: whatever happens, what was saved is there, loads, and continues as if nothing had been."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

import common
from common import InputError
from test_scripts import ADDITION, ROOT, SMALL, metrics_of, run_command, train, weights_of, without_times

ENVIRONMENT = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def words_of(options):
    flags = []
    for name, value in options.items():
        flags += [f"--{name.replace('_', '-')}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return flags


def test_two_processes_of_one_second_name_two_folders(monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda form: "20260101-120000")
    first = common.stamp()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert common.stamp() != first


def test_killed_runs_end_as_if_never_killed():
    done = subprocess.run([sys.executable, "tests/kill.py", "--kills", "10"], cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0 and "10 kills" in done.stdout, done.stdout + done.stderr


SIGNALS = """import os, pathlib, time
calls = []

def score(prompts, completions, rows):
    calls.append(1)
    if len(calls) == 3 and (file := pathlib.Path(__file__).with_name("signals")).exists():  # evaluation, step 1, step 2
        for number in map(int, file.read_text().split()):
            os.kill(os.getpid(), number)
            time.sleep(0.1)
    return [float(c == row["answer"]) for c, row in zip(completions, rows)]
"""


@pytest.fixture
def signalled(tmp_path, monkeypatch):
    """Options of a run that gets the signals named in a file. Were the script's own handler missing, nothing would come of them."""
    monkeypatch.setattr(common, "asked_to_stop", [])
    (tmp_path / "reward.py").write_text(SIGNALS)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield SMALL | ADDITION | {"reward_fn": (f"{tmp_path}/reward.py:score",), "num_steps": 3, "eval_every": 0}
    signal.signal(signal.SIGINT, before)


def test_a_signal_from_outside_saves_a_checkpoint_after_the_step(tmp_path):
    """Whenever it comes: while sampling, in an update, in a save."""
    options = SMALL | ADDITION | {"num_steps": 200, "eval_every": 0, "save_every": 1, "output_dir": tmp_path / "run"}
    command = [sys.executable, "grpo.py", *words_of(options)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    for line in process.stdout:
        if line.startswith("step 2/"):
            break
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    stopped = metrics_of(tmp_path / "run")[-1]["step"]
    assert process.returncode == 128 + signal.SIGTERM and f"stopped after step {stopped}; continue with --resume" in err, err
    assert common.checkpoints(tmp_path / "run")[-1].name == f"checkpoint-{stopped}"


def test_a_signal_stops_after_the_step_and_the_run_goes_on(signalled, tmp_path, capsys):
    (tmp_path / "signals").write_text("2")
    with pytest.raises(SystemExit) as end:
        run_command(["ppo.py", *words_of(signalled | {"output_dir": tmp_path / "run"})])
    (tmp_path / "signals").unlink()
    assert end.value.code == 130 and "stopped after step 2; continue with --resume" in capsys.readouterr().err
    assert [p.name for p in common.checkpoints(tmp_path / "run")] == ["checkpoint-2"] and metrics_of(tmp_path / "run")[-1]["step"] == 2
    run_command(["ppo.py", "--resume", str(tmp_path / "run")])
    assert without_times(metrics_of(tmp_path / "run")) == without_times(train("ppo", tmp_path / "whole", **signalled))


def test_a_second_signal_stops_at_once(signalled, tmp_path, capsys):
    (tmp_path / "signals").write_text("2 2")
    with pytest.raises(SystemExit) as end:
        run_command(["grpo.py", *words_of(signalled | {"output_dir": tmp_path / "run"})])
    assert end.value.code == 130 and "stopped at once" in capsys.readouterr().err and not common.checkpoints(tmp_path / "run")


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    for keep, left in ((1, [3]), (2, [2, 3]), (0, [1, 2, 3])):
        folder = tmp_path / str(keep)
        train("rloo", folder, **SMALL | ADDITION | {"save_every": 1, "keep": keep, "minibatch_size": None})
        assert [p.name for p in common.checkpoints(folder)] == [f"checkpoint-{n}" for n in left]
        assert not list(folder.glob(".*"))
        assert AutoModelForCausalLM.from_pretrained(folder / f"checkpoint-{left[0]}")


def test_a_disk_that_is_full_in_the_middle_of_a_save_leaves_the_earlier_checkpoint(tmp_path):
    """From the third step on no file may grow over 500 kB: the weights have more."""
    (tmp_path / "reward.py").write_text(
        "import resource\ncalls = []\n\ndef score(prompts, completions, rows):\n    calls.append(1)\n    if len(calls) == 4:\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))\n"
        "    return [len(c) for c in completions]\n"
    )
    options = SMALL | {"reward_fn": f"{tmp_path}/reward.py:score", "save_every": 1, "eval_every": 0, "num_steps": 5, "output_dir": tmp_path / "run"}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(SystemExit, match="checkpoint-3 could not be saved.*what was saved before is still there"):
            run_command(["grpo.py", *words_of(options)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.name for p in common.checkpoints(tmp_path / "run")] == ["checkpoint-1", "checkpoint-2"]
    assert not list((tmp_path / "run").glob(".*.partial"))
    run_command(["grpo.py", "--resume", str(tmp_path / "run"), "--num-steps", "3"])
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [0, 1, 2, 3]


def test_a_folder_is_replaced_only_by_a_complete_one(tmp_path, monkeypatch):
    tokenizer, policy = common.load_tokenizer("tiny/policy"), common.load_policy("tiny/policy", torch.device("cpu"), torch.float32)
    common.save_model(tmp_path / "best", policy, tokenizer)
    before = weights_of(tmp_path / "best")
    policy.lm_head.weight.data += 1
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "save_pretrained", lambda *_: 1 / 0)
        with pytest.raises(InputError, match="best could not be saved"):
            common.save_model(tmp_path / "best", policy, tokenizer)
    assert all(torch.equal(v, before[k]) for k, v in weights_of(tmp_path / "best").items())
    common.save_model(tmp_path / "best", policy, tokenizer)
    assert not torch.equal(weights_of(tmp_path / "best")["lm_head.weight"], before["lm_head.weight"])
    assert [p.name for p in tmp_path.iterdir()] == ["best"]
    (tmp_path / "best").rename(tmp_path / ".best.old")  # the process died between the two names
    (tmp_path / "metrics.jsonl").write_text("")
    common.load_checkpoint(str(tmp_path))
    assert (tmp_path / "best" / "config.json").exists()
    for left in (".checkpoint-1.old", ".final.partial", ".best.old"):  # half written, or given up for a newer one that is there
        (tmp_path / left).mkdir()
    common.put_back(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "metrics.jsonl"]
    weights = tmp_path / "best" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])  # cut short by something else
    with pytest.raises(InputError, match="best could not be loaded: "):
        common.load_policy(str(tmp_path / "best"), torch.device("cpu"), torch.float32)


def test_out_of_memory_says_what_to_turn_first(tmp_path, monkeypatch):
    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(common, "completion_logits", no_memory)
    with pytest.raises(SystemExit, match="error: out of memory; lower --microbatch-tokens first.* --gradient-checkpointing.* --lora-rank"):
        run_command(["grpo.py", *words_of(SMALL | ADDITION | {"output_dir": tmp_path / "run"})])


def test_a_run_is_resumed_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("sums.jsonl", "sums-eval.jsonl"):
        (tmp_path / name).write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "reward.py").write_text("def score(prompts, completions, rows):\n    return [len(c) for c in completions]\n")
    options = SMALL | {"dataset": "sums.jsonl", "reward_fn": ("exact_match", "reward.py:score"), "num_steps": 1, "output_dir": "run"}
    run_command(["grpo.py", *words_of(options)])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run_command(["grpo.py", "--resume", "../run", "--num-steps", "2"])
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [0, 1, 2]


def test_a_run_that_died_before_its_first_checkpoint_begins_anew(tmp_path, capsys):
    options = SMALL | ADDITION | {"num_steps": 2, "output_dir": str(tmp_path / "run")}
    whole = train("gspo", tmp_path / "whole", **options | {"output_dir": str(tmp_path / "whole")})
    train("gspo", tmp_path / "run", **options | {"num_steps": 1})
    for checkpoint in common.checkpoints(tmp_path / "run"):
        checkpoint.rename(tmp_path / "gone")
    before = metrics_of(tmp_path / "run")
    with pytest.raises(SystemExit, match="has a final/ but no checkpoint to continue from"):
        run_command(["gspo.py", "--resume", str(tmp_path / "run"), "--num-steps", "2"])
    assert metrics_of(tmp_path / "run") == before
    (tmp_path / "run" / "final").rename(tmp_path / "gone-final")
    (tmp_path / "run" / "best").mkdir(exist_ok=True)
    (tmp_path / "run" / "best" / "mark").touch()
    run_command(["gspo.py", "--resume", str(tmp_path / "run"), "--num-steps", "2"])
    (aside,) = (tmp_path / "run").glob("until-*")  # what the dead run had found is kept, and decides nothing
    assert (aside / "best" / "mark").exists() and metrics_of(aside) == before
    assert "has no checkpoint yet: the run begins anew" in capsys.readouterr().out
    assert without_times(metrics_of(tmp_path / "run")) == without_times(whole)


@pytest.mark.parametrize("name, options", [
    ("ppo", ADDITION | {"shared_backbone": True, "kl_target": 0.001, "kl_horizon": 20}),
    ("ppo", {"num_epochs": 2}),  # the learned reward, from which the value model starts
    ("grpo", ADDITION | {"dynamic_sampling": 2, "lr_schedule": "cosine"}),
    ("rloo", {"minibatch_size": None, "gradient_checkpointing": True}),
])  # fmt: skip
def test_what_is_resumed_ends_as_if_never_stopped(name, options, tmp_path):
    """Stopped after the second of four steps, with the best evaluation so far, the adaptive coefficient and the position in the data."""
    options = SMALL | options | {"num_steps": 4, "eval_every": 1, "save_every": 2, "lr": 1e-3, "keep": 0}
    whole = train(name, tmp_path / "whole", **options)
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    for folder in ("checkpoint-4", "final", "best"):
        if (tmp_path / "parts" / folder).exists():
            (tmp_path / "parts" / folder).rename(tmp_path / f"gone-{folder}")
    run_command([f"{name}.py", "--resume", str(tmp_path / "parts")])
    assert without_times(metrics_of(tmp_path / "parts")) == without_times(whole)
    one, other = weights_of(tmp_path / "whole" / "final"), weights_of(tmp_path / "parts" / "final")
    assert all(torch.equal(one[k], other[k]) for k in one)
    states = [torch.load(tmp_path / run / "checkpoint-4" / "state.pt", weights_only=True) for run in ("whole", "parts")]
    assert states[0]["best"] == states[1]["best"] == max(row["eval_reward"] for row in whole)
    if name == "ppo" and "kl_target" in options:
        assert len({row["kl_coef"] for row in whole[1:]}) > 1


def test_a_run_that_died_between_its_last_checkpoint_and_final_gets_its_final(tmp_path):
    train("grpo", tmp_path / "run", **SMALL | ADDITION | {"num_steps": 2})
    whole, rows = weights_of(tmp_path / "run" / "final"), metrics_of(tmp_path / "run")
    (tmp_path / "run" / "final").rename(tmp_path / "gone")
    run_command(["grpo.py", "--resume", str(tmp_path / "run")])
    final = weights_of(tmp_path / "run" / "final")
    assert all(torch.equal(final[k], whole[k]) for k in whole) and metrics_of(tmp_path / "run") == rows
    with pytest.raises(SystemExit, match="the run has 2 steps already, more than --num-steps 1"):
        run_command(["grpo.py", "--resume", str(tmp_path / "run"), "--num-steps", "1"])
