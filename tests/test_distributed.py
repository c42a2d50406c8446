"""Several ranks on CPU with gloo: the numbers of one process, and a fault of one rank that stops all. tests/ranks.py has every case."""

import json
import subprocess
import sys
import time

import pytest
import torch

from test_faults import ENVIRONMENT, words_of
from test_scripts import ADDITION, ROOT, SMALL, metrics_of, run_command, train, weights_of

REWARD = """import json, os, pathlib
log = pathlib.Path(__file__).with_name(f"rank-{os.environ.get('RANK', 0)}.jsonl")
calls = []

def score(prompts, completions, rows):
    with open(log, "a") as file:
        file.write(json.dumps(prompts) + chr(10))
    calls.append(1)
    if os.environ.get("RANK") == "1" and len(calls) == 4:
        raise ValueError("the judge is out")
    return [float(c == row["answer"]) for c, row in zip(completions, rows)]
"""


def test_every_script_on_two_ranks_gives_the_numbers_of_one_process():
    done = subprocess.run([sys.executable, "tests/ranks.py", "--quick"], cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0 and "a signal to one rank" in done.stdout, done.stdout + done.stderr


def test_a_reward_that_raises_on_one_rank_stops_all_and_one_process_goes_on(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    options = SMALL | ADDITION | {"num_prompts": 3, "reward_fn": (f"{tmp_path}/reward.py:score",), "eval_every": 0, "save_every": 1}
    whole = train("grpo", tmp_path / "whole", **options)
    (tmp_path / "rank-0.jsonl").unlink()
    flags = words_of(options | {"output_dir": tmp_path / "run"})
    command = [sys.executable, *"-m torch.distributed.run --nproc-per-node 2 grpo.py".split(), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode != 0 and time.time() - (tmp_path / "rank-1.jsonl").stat().st_mtime < 60
    fault = "error: reward score raised ValueError: the judge is out (reward.py line 10) for 8 completions at once, though for none of them alone"
    assert done.stderr.startswith(fault) and done.stderr.count("the judge is out") == 1, done.stderr
    assert done.stdout.count("device: cpu x 2 (weights sharded)") == 1 and done.stdout.count("step 2/3") == 1, done.stdout

    (first, *shares), (_, *others) = ([json.loads(line) for line in open(tmp_path / f"rank-{rank}.jsonl")] for rank in (0, 1))
    assert len(first) == 4  # of the 8 held-out prompts
    for mine, theirs in zip(shares[:2], others):  # 1 prompt of 3 and 2: each row is scored once, all rows of a prompt in one place
        assert len(mine) == 4 and len(theirs) == 8 and not set(mine) & set(theirs)

    run_command(["grpo.py", "--resume", str(tmp_path / "run")])
    rows = metrics_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row, expected in zip(rows, whole):
        for name in set(row) - {"sampler_gap", "tokens_per_second", "time_generate", "time_score", "time_update"}:
            assert row[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), (row["step"], name)
    a, b = weights_of(tmp_path / "whole" / "final"), weights_of(tmp_path / "run" / "final")
    assert all(torch.allclose(a[k], b[k], rtol=0, atol=1e-5) for k in a)
