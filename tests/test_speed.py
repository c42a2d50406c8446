"""benchmarks/speed.py: what it asks of each side and how it counts; its measurements are no test's matter."""

import importlib
import json
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import common

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
import learning
import speed

STUB = """
import json, os, pathlib, sys

flags = {name: sys.argv[i + 1] for i, name in enumerate(sys.argv) if name.startswith("--")}
folder, steps, rows = pathlib.Path(flags["--output-dir"]), int(flags["--num-steps"]), int(flags["--minibatch-size"])
folder.mkdir()
calls = pathlib.Path(__file__).with_name("calls")
calls.write_text((calls.read_text() if calls.exists() else "") + "x")
now, marks, metrics = 100.0, [{"at": 99.0, "rows": 1, "tokens": 9, "mib": 1}], [{"step": 0, "eval_reward": 0.0}]
for step in range(1, steps + 1):  # the first steps are slow; then SECONDS, and in the second round half of that
    now += 50 if step < 3 else SECONDS / len(calls.read_text())
    marks.append({"at": now, "rows": rows, "tokens": 1000, "mib": MIB + step})
    metrics.append({"step": step, "time_generate": 0.1 * step, "time_score": 0.5, "time_update": SECONDS - 0.5})
marks.append({"at": now + 1, "rows": 1, "tokens": 9, "mib": 9999})  # the evaluation at the end
with open(os.environ["MARKS"], "w") as file:
    file.writelines(json.dumps(mark) + "\\n" for mark in marks)
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in metrics))
"""


def test_two_checkouts_are_compared(tmp_path, monkeypatch, capsys):
    run = learning.run
    monkeypatch.setattr(learning, "run", lambda words, *a, **k: words[2] == "make" or run(words, *a, **k))
    monkeypatch.setattr(learning, "ROOT", tmp_path / "ours")
    for side, seconds, mib in (("ours", "1.0", "100"), ("before", "4.0", "200")):
        (tmp_path / side).mkdir()
        (tmp_path / side / "grpo.py").write_text(STUB.replace("SECONDS", seconds).replace("MIB", mib))
    output = tmp_path / "speed.json"
    output.write_text('{"W2": "as it was"}')
    args = speed.Args(only=("W1",), algorithms=("grpo",), against=tmp_path / "before", steps=3, output=output)
    speed.main(args)
    figures = json.loads(output.read_text())
    assert figures["W2"] == "as it was" and figures["W1"]["workload"]["num_prompts"] == 16
    found = figures["W1"]["grpo"]
    # six steps a side, of 1 s in the first round and 0.5 s in the second; the two before them, of 50 s, don't count
    assert found["ours"]["seconds"] == [0.75, 0.5, 1] and found["before"]["seconds"] == [3, 2, 4]
    assert found["ours"]["tokens_per_second"] == [1500, 1000, 2000] and found["ours"]["steps"] == 6
    assert found["ours"]["generate"] == pytest.approx([0.4, 0.3, 0.5]) and found["before"]["update"] == [3.5] * 3
    assert (found["ours"]["peak_mib"], found["before"]["peak_mib"]) == (105, 205)  # the evaluation at the end is not in
    assert found["ours over"]["before"] == {"speed": 1500 / 375, "by_round": [4, 4], "memory": 105 / 205}
    assert {"command", "commit", "before", "date", "machine", "versions"} <= found["run"].keys()
    out = capsys.readouterr().out
    assert "  ours   0.750 s (0.500..1.000)" in out and " 1500 tokens/s    105 MiB   generate 0.400, score" in out
    assert "  ours / before: 4.00x tokens/s (4.00, 4.00), 0.51x memory" in out


def test_a_ratio_is_that_of_the_medians_and_that_of_each_round():
    def rounds(mib, *seconds):
        return [[{"seconds": s, "tokens_per_second": 10 / s, "peak_mib": mib} for s in each] for each in seconds]

    # ours 10, 10, 5, 5, 5, 5 tokens a second, median 5; TRL's 5, 5, 5, 1.25, 1.25, 1.25, median 3.125
    ours, trl = rounds(50, [1, 1, 2], [2, 2, 2]), rounds(200, [2, 2, 2], [8, 8, 8])
    assert speed.pooled(ours) == {"seconds": [2, 1, 2], "tokens_per_second": [5, 5, 10], "peak_mib": 50, "steps": 6}
    assert speed.compare(ours, trl) == {"speed": 5 / 3.125, "by_round": [2.0, 4.0], "memory": 0.25}


def test_the_reward_notes_when_it_was_called(tmp_path, monkeypatch):
    monkeypatch.setenv("MARKS", str(tmp_path / "marks.jsonl"))
    start = time.perf_counter()
    first = common.load_reward_fn(f"{ROOT}/benchmarks/speed.py:reward")([""] * 2, ["w1 w2", "w3"], [{}] * 2)
    assert speed.reward([""], ["w3"], completion_ids=[[5]]) == first[1:] and 0 <= min(first) and max(first) < 1
    one, two = speed.plot.rows_of(tmp_path / "marks.jsonl")
    assert (one["rows"], one["tokens"], two["rows"], two["tokens"]) == (2, 3, 1, 1)
    assert start < one["at"] < two["at"] < time.perf_counter() and 50 < one["mib"] <= two["mib"] < 1e5


@pytest.mark.parametrize("name", ["reinforce", "rloo", "ppo", "grpo", "gspo", "cispo"])
def test_scripts_take_the_commands(name, monkeypatch):
    job = dict(zip(speed.FIELDS, speed.WORKLOADS["W1"], strict=True))
    job |= {"algorithm": name, "num_steps": 7, "device": "cpu", "dtype": "float32", "folder": "/made"}
    monkeypatch.setattr(sys, "argv", speed.command_of(ROOT, job)[1:])
    args = common.parsed(importlib.import_module(name).Args, "")
    assert args.num_prompts * args.group_size == args.minibatch_size == 128 and args.save_every == 0
    assert args.reward_fn == ("benchmarks/speed.py:reward",) and args.num_epochs == 1
    assert (args.group_size, args.reward_weights) == ((1, (1, 0)) if name == "ppo" else (8, ()))


def test_a_stop_token_comes_as_often_as_it_should(tmp_path):
    for workload, probability in (("W1", 0), ("W3", 1 / 32)):
        folder = tmp_path / workload
        folder.mkdir()
        speed.make(dict(zip(speed.FIELDS, speed.WORKLOADS[workload], strict=True)) | {"folder": str(folder)})
        policy = AutoModelForCausalLM.from_pretrained(folder / "policy")
        tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
        rows = speed.plot.rows_of(folder / "prompts.jsonl")
        ids = torch.tensor([tokenizer(row["prompt"]).input_ids for row in rows[:8]])
        assert ids.shape == (8, 16) and tokenizer.decode([2, 3]).split() == ["w0", "w1"] and len(rows) == 512
        with torch.no_grad():
            found = policy(ids).logits.softmax(-1)[..., tokenizer.eos_token_id]
        assert found.mean().item() == pytest.approx(probability, rel=0.15, abs=1e-12)
