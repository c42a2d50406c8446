"""Several ranks on CPU with gloo: the numbers of one process, and a fault of one rank that stops all.

How the work is split is tried in this one process, which takes the place of each rank in turn; tests/ranks.py, which is
part of the first test, runs every script in processes of their own.
"""

import json
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial

import pytest
import torch
from test_faults import words_of
from test_models import RAGGED, prompts_of, random_model
from test_scripts import (
    ADDITION,
    ENVIRONMENT,
    ROOT,
    SMALL,
    metrics_of,
    run_command,
    train,
    weights_of,
)

import common
import grpo

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


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_script_on_two_ranks_gives_the_numbers_of_one_process():
    command = [sys.executable, "tests/ranks.py", "--quick"]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0 and "a signal to one rank" in done.stdout, done.stdout + done.stderr


def test_a_reward_that_raises_on_one_rank_stops_all_and_one_process_goes_on(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    options = SMALL | ADDITION | {"num_prompts": 3, "eval_every": 0, "save_every": 1}
    options["reward_fn"] = (f"{tmp_path}/reward.py:score",)
    whole = train("grpo", tmp_path / "whole", **options)
    (tmp_path / "rank-0.jsonl").unlink()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "grpo.py"]
    command = [*torchrun, *words_of(options | {"output_dir": tmp_path / "run"})]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode != 0 and time.time() - (tmp_path / "rank-1.jsonl").stat().st_mtime < 60
    assert done.stderr.count("ValueError: the judge is out") == 1, done.stderr
    assert f'"{tmp_path}/reward.py", line 10, in score' in done.stderr
    assert done.stdout.count("device: cpu x 2, float32 weights") == done.stdout.count("step 2: reward ") == 1
    assert [path.name for path in common.checkpoints(tmp_path / "run")] == ["checkpoint-1", "checkpoint-2"]
    assert not (tmp_path / "run" / "final").exists()

    (first, *shares), (_, *others) = (lines_of(tmp_path / f"rank-{rank}.jsonl") for rank in (0, 1))
    assert len(first) == 4  # of the 8 held-out prompts
    for mine, theirs in zip(shares[:2], others[:2], strict=True):  # 1 prompt of 3 and 2, all rows of each in one place
        assert len(mine) == 4 and len(theirs) == 8 and not set(mine) & set(theirs)

    run_command(["grpo.py", "--resume", str(tmp_path / "run")])
    rows = metrics_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row, expected in zip(rows, whole, strict=True):
        for name in set(row) - {"sampler_gap", "tokens_per_second", "time_generate", "time_score", "time_update"}:
            assert row[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), (row["step"], name)
    a, b = weights_of(tmp_path / "whole" / "final"), weights_of(tmp_path / "run" / "final")
    assert all(torch.allclose(a[k], b[k], rtol=0, atol=1e-5) for k in a)


# --- how the work is split ---


class ToldError(Exception):
    """A rank has said what it has for the others."""


@pytest.fixture
def on_ranks(monkeypatch):
    """on_ranks(size, fn): what fn() gives on each rank. Where it waits for others, it is called again with theirs."""

    def run(size, fn):
        told = []

        def tell(mine):
            told.append(mine)
            raise ToldError

        monkeypatch.setattr(common, "NUM_RANKS", size)
        monkeypatch.setattr(common, "summed", lambda x: x)
        monkeypatch.setattr(common, "on_every_rank", tell)
        results = []
        for rank in range(size):
            monkeypatch.setattr(common, "RANK", rank)
            with suppress(ToldError):
                results.append(fn())
        if told:
            assert len(told) == size and not results
            monkeypatch.setattr(common, "on_every_rank", lambda mine: told)
            for rank in range(size):
                monkeypatch.setattr(common, "RANK", rank)
                results.append(fn())
        monkeypatch.undo()
        return results

    return run


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_every_piece_of_work_is_done_once_and_all_ranks_do_as_many(count, size, on_ranks):
    """More pieces than ranks, as many, and fewer."""
    weights = torch.ones(count, 3)
    batch = {"prompt_length": torch.ones(count).long(), "length": torch.full((count,), 3), "mask": weights}
    pieces = lambda: [*common.microbatches(batch | {"weights": weights}, microbatch_tokens=4)]  # of one row each
    found = on_ranks(size, pieces)
    assert {len(work) for work in found} == {-(-count // size)}
    assert sorted(row for work in found for micro in work for row in micro["rows"].tolist()) == [*range(count)]
    weighted = [micro["weights"].sum().item() for work in found for micro in work]
    assert sorted(weighted) == [0.0] * (-count % size) + [3.0] * count  # what fills up counts for nothing

    ranges = []
    found = on_ranks(size, lambda: common.in_parts(lambda mine: ranges.append(mine) or [str(i) for i in mine], count))
    assert found == [[str(i) for i in range(count)]] * size
    assert len(ranges) == 2 * size and all(ranges)  # without a part, too: all must come to each layer's weights


@pytest.mark.parametrize("size", [2, 3, 6])
def test_ranks_without_prompts_sample_and_score_with_the_others(size, on_ranks):
    """4 prompts of 4 lengths, groups of 2; two of six ranks have none."""
    model, tokenizer, calls = random_model(), common.load_tokenizer("tiny/policy"), []

    def reward(prompts, completions, rows):
        calls.append(len(rows))
        return [float(len(completion)) for completion in completions]

    generate = partial(common.generate, model, tokenizer, RAGGED, 2, 8, 1.0, key=(0, 1))
    alone = generate()
    score = partial(common.score, {"mine": (reward, 1.0)}, alone)
    rewards = score()["rewards"]
    for batch in on_ranks(size, generate):
        assert batch["completions"] == alone["completions"]
        for name in ("input_ids", "prompt_length", "prompt_id", "length", "mask", "truncated"):
            assert torch.equal(batch[name], alone[name]), name
        torch.testing.assert_close(batch["logprobs"], alone["logprobs"], rtol=0, atol=1e-5)
    assert all(torch.equal(scored["rewards"], rewards) for scored in on_ranks(size, score))
    assert calls[1 : 1 + size] == {2: [4, 4], 3: [2, 2, 4], 6: [2] * 6}[size]


@pytest.mark.parametrize("size, budget", [(1, 60), (2, 60), (2, 4096), (3, 20), (5, 4096), (20, 4096)])
def test_the_ranks_gradients_add_up_to_that_of_one_process(size, budget, on_ranks):
    """Pieces of work more and fewer than ranks; the last has ranks without any: their row must add nothing."""
    model, tokenizer = random_model(), common.load_tokenizer("tiny/policy")
    model.shares_prompts = False  # as on several ranks
    batch = common.generate(model, tokenizer, [*RAGGED, *prompts_of([0, 9])], 2, 8, 1.0, key=(0, 1))
    batch["advantages"] = torch.arange(10.0) - 4.5
    batch["weights"] = common.loss_weights(batch["mask"], "token")
    score = partial(common.logprobs_of, model, 1.0)
    moved = 0.01 * torch.arange(10)[:, None]  # so little that no ratio is clipped
    batch["old_logprobs"] = common.no_grad_pass(score, batch, 4096) - moved

    def gradient():
        model.zero_grad()
        for micro in common.microbatches(batch, budget):
            given = (micro[name] for name in ("old_logprobs", "advantages", "weights"))
            grpo.policy_loss(score(micro), *given, 0.2, 0.2)[0].backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    alone, whole = gradient(), common.no_grad_pass(score, batch, budget)
    found = on_ranks(size, gradient)
    assert len(found) == size and alone.norm() > 0
    torch.testing.assert_close(sum(found), alone, rtol=0, atol=1e-4 * alone.norm().item())
    parts = on_ranks(size, lambda: common.no_grad_pass(score, batch, budget))
    torch.testing.assert_close(sum(parts), whole, rtol=0, atol=1e-5)
    assert ((torch.stack(parts) != 0).sum(0) == (batch["mask"] != 0)).all()  # each row in one place
