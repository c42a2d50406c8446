"""README.md in this folder: the worked example is what the shipped functions give, and every named test exists."""

import inspect
import re

import pytest
import torch
from test_scripts import ROOT, SCRIPTS

import common
import grpo
import gspo
import ppo
import reinforce
import rloo

README = (ROOT / "tests/README.md").read_text()
MASK = torch.tensor([[1.0, 1, 1], [1, 0, 0], [1, 1, 0]], dtype=torch.float64)
RATIO = torch.tensor([[1.1, 1.5, 0.9], [1.25, 1, 1], [0.7, 1.0, 1]], dtype=torch.float64)
OLD = torch.tensor([[-1.0, -0.5, -2.0], [-0.7, 0, 0], [-1.5, -0.3, 0]], dtype=torch.float64)
REWARDS = torch.tensor([1.0, 0.0, 0.2], dtype=torch.float64)
VALUES = torch.tensor([[0.4, 0.5, 0.8], [0.4, 0, 0], [0.4, 0.3, 0]], dtype=torch.float64)


def advantages_of(script):
    if script is reinforce:
        returns = reinforce.rewards_to_go(common.at_last_token(REWARDS, MASK), MASK, reinforce.Args.gamma)
        return returns - reinforce.leave_one_out_baseline(returns[:, 0])[:, None]
    if script is rloo:
        return rloo.leave_one_out_advantages(REWARDS, 3)
    if script is ppo:
        advantages, _ = ppo.gae(common.at_last_token(REWARDS, MASK), VALUES, MASK, ppo.Args.gamma, ppo.Args.gae_lambda)
        return ppo.whiten(advantages, MASK)
    return script.group_advantages(REWARDS, 3)


def numbers(x):
    """Ragged rows as they are printed there: [.9 .9 .9] [-.6] [-.3 -.3]; one number where it is the same for a row."""
    if x.dim() == 1:
        return " ".join(short(v) for v in x.tolist())
    rows = zip(x, MASK.bool(), strict=True)
    return " ".join("[" + " ".join(short(v) for v in row[keep].tolist()) + "]" for row, keep in rows)


def short(value):
    return f"{value + 0.0:.2f}".replace("0.", ".", 1) if abs(value) >= 0.005 else "0"


def example(script):
    """The cells of a row: advantages, loss, and what the loss pulls up (minus its gradient) at each log-probability."""
    logprobs, advantages = (OLD + RATIO.log()).requires_grad_(), advantages_of(script)
    weights = common.loss_weights(MASK, getattr(script.Args, "aggregation", "sum"))
    clip = (script.Args.clip_low, script.Args.clip_high) if hasattr(script.Args, "clip_low") else ()
    loss, _ = script.policy_loss(logprobs, *[OLD] * bool(clip), advantages, weights, *clip)
    pull = -torch.autograd.grad(loss, logprobs)[0]
    each = advantages if script is ppo or advantages.dim() == 1 else advantages[:, 0]
    return f"{numbers(each)} | {loss.item():.3f} | {numbers(pull)} |"


def test_every_test_that_is_named_exists():
    named = re.findall(r"`(\w+)::(test_\w+)", README)
    files = {file: (ROOT / f"tests/test_{file}.py").read_text() for file, _ in named}
    missing = [(file, test) for file, test in named if f"def {test}(" not in files[file]]
    assert len(named) > 80 and not missing, missing


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_row_of_the_worked_example(name):
    (row,) = re.findall(rf"^\| `{name}\.py`, `.*", README, flags=re.MULTILINE)
    assert row.endswith("| " + example(SCRIPTS[name])), example(SCRIPTS[name])
    functions = re.findall(r"`(\w+)`: `(.*?)`(?=[ ;|])", row)
    assert functions
    for function, line in functions:
        assert line in inspect.getsource(getattr(SCRIPTS[name], function)), (function, line)


def test_the_worked_example_worked_out_by_hand():
    assert example(rloo) == ".90 -.60 -.30 | 0.620 | [.30 .30 .30] [-.20] [-.10 -.10] |"
    # group mean .4, sample std .529; token 2 of row 1 is past 1.2 and token 1 of row 3 below 0.8: no pull
    assert example(grpo).endswith("| [.14 0 .11] [-.31] [0 -.06] |")
    # 1.485^(1/3) and .7^(1/2) are outside the clip, on the side of the advantage
    assert example(gspo).endswith("| [0 0 0] [-.31] [0 0] |")
