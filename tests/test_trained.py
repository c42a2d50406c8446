"""benchmarks/trained.py: its commands are ones that the scripts take, and its tables are what the runs' metrics say."""

import importlib
import json
import sys

import pytest
import tyro

import common
from test_scripts import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import learning  # noqa: E402
import trained  # noqa: E402

COMMANDS = {f"{claim} {name}": command for claim in trained.CLAIMS for name, command in trained.CLAIMS[claim][0]().items()}

STUB = """
import json, pathlib, sys

flags = {name: sys.argv[i + 1] for i, name in enumerate(sys.argv) if name.startswith("--") and i + 1 < len(sys.argv)}
folder, pull, seed = pathlib.Path(flags["--output-dir"]), float(flags["--kl-coef"]), int(flags["--seed"])
(folder / "final").mkdir(parents=True)
rows = [{"step": 0, "eval_reward": 0.5, "eval_reward/gold_score": 0.25}]
for step in range(1, 5):  # the learned reward rises, the gold score from the third step on falls; an evaluation at every second
    rows.append({"step": step, "kl": 2.0 * step, "clip_fraction": 0.5, "no_signal_fraction": step / 4, "time_generate": 1.0})
    if step % 2 == 0:
        rows[-1] |= {"eval_reward": float(step + seed), "eval_reward/gold_score": 3.0 - step + 10 * pull}
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
"""


@pytest.mark.parametrize("name", COMMANDS)
def test_scripts_take_the_commands(name):
    script, *flags = COMMANDS[name]
    args = tyro.cli(importlib.import_module(script.removesuffix(".py")).Args, args=flags)
    common.check_ranges(args)
    assert args.num_prompts * args.group_size == 128 and args.num_steps % args.eval_every == 0


def test_one_gradient_but_for_where_the_kl_stands():
    """What the comparison rests on: flags that make grpo.py's policy gradient rloo.py's, up to a factor, which Adam takes out."""
    import torch

    import grpo
    import rloo

    torch.manual_seed(0)
    args = tyro.cli(grpo.Args, args=COMMANDS["overoptimization loss 0.03"][1:])
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
        gradients.append(torch.autograd.grad(script.policy_loss(logprobs, *old, advantages, weights, *clip)[0], logprobs)[0])
    torch.testing.assert_close(gradients[1] * 5 * 8 / 7, gradients[0])
    assert args.minibatch_size is None and args.lr == rloo.Args.lr and rloo.Args.minibatch_size is None


def test_tables(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(learning, "ROOT", tmp_path)
    for script in ("rloo", "grpo", "gspo", "cispo"):
        (tmp_path / f"{script}.py").write_text(STUB)
    trained.main(trained.Args(seeds=2, jobs=2, output_dir=tmp_path / "runs"))
    lines = [line for name in trained.CLAIMS for line in (tmp_path / "runs" / f"trained-{name}.md").read_text().splitlines()]
    # seeds 0 and 1: learned reward 4 and 5 at the end, gold 3 - 4 + 10 * 0.1 = 0; best gold 3 - 2 + 1 = 2, at step 2, where the KL is 4
    assert "| reward | 0.1 | 4.50 ± 0.71 | 0.00 ± 0.00 | 8.00 ± 0.00 | 2.00 ± 0.00 | 4.00 ± 0.00 |" in lines
    assert "| loss | 0 | 4.50 ± 0.71 | -1.00 ± 0.00 | 8.00 ± 0.00 | 1.00 ± 0.00 | 4.00 ± 0.00 |" in lines
    assert "| grpo, no clip | 16 | 4.50 ± 0.71 | -1.00 ± 0.00 | 4.50 ± 0.71 | 50% |" in lines
    # after a quarter, the first evaluation, of step 2: 2 and 3; half of the groups are silent there, all at the end; 4 steps of a second
    assert "| the group's std | 3 | 2.50 ± 0.71 | 4.50 ± 0.71 | 50% | 100% | 4 ± 0 |" in lines
    assert len(lines) == (2 + 6) + (2 + 12) + (2 + 4)
    results = json.loads((tmp_path / "runs" / "trained.json").read_text())
    assert {"command", "commit", "date", "machine", "seeds"} <= results["overoptimization"].keys()
    point = results["overoptimization"]["reward 0.03"]
    assert point["step"] == [0, 2, 4] and point["kl"] == [0, 4, 8] and point["eval_reward"] == [0.5, 2.5, 4.5]
    assert "--kl-coef 0.03" in point["command"] and "| reward | 0.1 |" in capsys.readouterr().out
