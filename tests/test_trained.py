"""benchmarks/trained.py: its commands are ones that the scripts take, and its tables are what the runs' metrics say."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
import tyro

import common
import grpo
import rloo

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import learning
import trained

COMMANDS = {f"{claim} {name}": command for claim in trained.COLUMNS for name, command in vars(trained)[claim]().items()}

STUB = """
import json, pathlib, sys

flags = {name: sys.argv[i + 1] for i, name in enumerate(sys.argv) if name.startswith("--") and i + 1 < len(sys.argv)}
folder, pull, seed = pathlib.Path(flags["--output-dir"]), float(flags["--kl-coef"]), int(flags["--seed"])
(folder / "final").mkdir(parents=True)
rows = [{"step": 0, "eval_reward": 0.5, "eval_reward/gold_score": 0.25}]
for step in range(1, 5):  # learned reward rises, gold score falls from the third step on; an evaluation every 2 steps
    rows.append({"step": step, "kl": 2.0 * step, "clip_fraction": 0.5, "no_signal_fraction": step / 4})
    rows[-1]["time_generate"] = 1.0
    if step % 2 == 0:
        rows[-1] |= {"eval_reward": float(step + seed), "eval_reward/gold_score": 3.0 - step + 10 * pull}
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
"""


@pytest.mark.parametrize("name", COMMANDS)
def test_scripts_take_the_commands(name, monkeypatch):
    monkeypatch.setattr(sys, "argv", [*COMMANDS[name].split(), "--seed", "1", "--device", "cpu", "--save-every", "0"])
    args = common.parsed(importlib.import_module(sys.argv[0].removesuffix(".py")).Args, "")
    assert args.num_prompts * args.group_size == learning.ROWS and args.num_steps % args.eval_every == 0


def test_one_gradient_but_for_where_the_kl_stands():
    """The comparison rests on flags that make grpo.py's gradient rloo.py's, up to a factor, which Adam takes out."""
    torch.manual_seed(0)
    args = tyro.cli(grpo.Args, args=COMMANDS["overoptimization loss 0.03"].split()[1:])
    rewards, mask = torch.randn(16), (torch.arange(5) < torch.randint(1, 6, (16, 1))).float()
    gradients = []
    for script, advantages, how in (
        (rloo, rloo.leave_one_out_advantages(rewards, 8), "sum"),
        (grpo, grpo.group_advantages(rewards, 8, args.scale_rewards == "group"), args.aggregation),
    ):
        logprobs = torch.zeros(16, 5, requires_grad=True)
        weights = common.loss_weights(mask, how, 5)
        old = () if script is rloo else (logprobs.detach(),)
        clip = () if script is rloo else (args.clip_low, args.clip_high)
        loss, _ = script.policy_loss(logprobs, *old, advantages, weights, *clip)
        gradients.append(torch.autograd.grad(loss, logprobs)[0])
    torch.testing.assert_close(gradients[1] * 5 * 8 / 7, gradients[0])
    assert args.minibatch_size == 0 and args.lr == rloo.Args.lr and rloo.Args.minibatch_size == 0


def test_tables(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(learning, "ROOT", tmp_path)
    for script in ("rloo", "grpo", "gspo", "cispo"):
        (tmp_path / f"{script}.py").write_text(STUB)
    trained.main(trained.Args(seeds=2, jobs=2, output_dir=tmp_path / "runs"))
    tables = [tmp_path / "runs" / f"trained-{claim}.md" for claim in trained.COLUMNS]
    lines = [line for table in tables for line in table.read_text().splitlines()]
    # seeds 0 and 1: learned reward 4 and 5 at the end, gold 3 - 4 + 10 * 0.1 = 0; best gold 3 - 2 + 1 = 2, at step 2,
    # where the KL is 4
    assert "| reward 0.1 | 4.5 ± 0.71 | 0 ± 0 | 8 ± 0 | 2 ± 0 | 4 ± 0 |" in lines
    assert "| loss 1e-9 | 4.5 ± 0.71 | -1 ± 0 | 8 ± 0 | 1 ± 0 | 4 ± 0 |" in lines
    assert "| grpo, no clip x 16 | 4.5 ± 0.71 | -1 ± 0 | 4.5 ± 0.71 | 0.5 ± 0 |" in lines
    # all groups are silent at the end; 4 steps of a second
    assert "| std group, 3 rounds | 4.5 ± 0.71 | 1 ± 0 | 4 ± 0 |" in lines
    assert len(lines) == (2 + 6) + (2 + 12) + (2 + 4)
    results = json.loads((tmp_path / "runs" / "trained-overoptimization.json").read_text())
    assert {"command", "commit", "date", "machine", "seeds"} <= results.keys()
    one, other = results["runs"]["reward 0.03"]
    assert one["step"] == [0, 2, 4] and one["kl"] == [0, 4, 8]
    assert one["eval_reward"] == [0.5, 2, 4] and other["eval_reward"] == [0.5, 3, 5]
    assert "--kl-coef 0.03" in one["command"] and "| reward 0.1 |" in capsys.readouterr().out
