"""What must not matter, does not: each script's first step, through its own main(), with the sampled batch changed."""

import json
import math
from functools import partial

import pytest
import torch
from test_loops import each, logprobs_of, with_a_tool
from test_models import RAGGED, prompts_of, random_model
from test_scripts import SCRIPTS, train

import common

CPU = torch.device("cpu")
EVERY = pytest.mark.parametrize("name", SCRIPTS)
PLAIN = {}  # each script's first step as it is, with which most tests compare
REWARD = """def score(prompts, completions, rows):
    return [len(c) + 0.1 * len(p) + (c[:1] == "1") for p, c in zip(prompts, completions)]
"""


@pytest.fixture(scope="module")
def tokenizer():
    return common.load_tokenizer("tiny/policy")


@pytest.fixture
def first_step(tmp_path, monkeypatch):
    """first_step(name, change, **options): the gradient of the first step and the metrics, after change(batch)."""
    prompts = ["1+1=", "12+30=", "5+77=", "60+18=", "9+9="]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    (tmp_path / "reward.py").write_text(REWARD)
    generate = common.generate

    def run(name, change=None, **options):
        if (is_plain := change is None and not options) and name in PLAIN:
            return PLAIN[name]
        gradients = []

        class Descent(torch.optim.SGD):
            def __init__(self, params, lr, weight_decay, fused):
                super().__init__(params, lr=lr)

            def step(self):
                gradients.append(torch.cat([p.grad.flatten() for group in self.param_groups for p in group["params"]]))

        def changed(*args, key, **kwargs):
            batch = generate(*args, key=key, **kwargs)
            return change(batch) if change and key[1] == "sample" else batch

        for saving in ("save_checkpoint", "save_model"):  # nobody looks at what is saved
            monkeypatch.setattr(common, saving, lambda *_: None)
        monkeypatch.setattr(common, "generate", changed)
        monkeypatch.setattr(torch.optim, "AdamW", Descent)
        given = {"num_prompts": 4, "group_size": 4, "num_steps": 1, "minibatch_size": 0, "kl_coef": 0.1}
        given |= {"dataset": str(tmp_path / "few.jsonl"), "max_new_tokens": 8, "max_grad_norm": 1e9}
        given["reward_fn"] = (f"{tmp_path}/reward.py:score",)
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        (metrics,) = train(name, folder, **given | options)
        found = gradients[0], {k: v for k, v in metrics.items() if not k.startswith(("time", "tokens_per"))}
        return PLAIN.setdefault(name, found) if is_plain else found

    return run


def same(one, other):
    assert (one[0] - other[0]).norm() <= 1e-4 * one[0].norm() and one[0].norm() > 0
    assert one[1] == pytest.approx(other[1], rel=1e-4, abs=1e-5)


@EVERY
def test_the_order_of_groups_and_of_rows_in_a_group(name, first_step):
    groups = torch.tensor([2, 0, 3, 1])[:, None] * 4 + torch.tensor([1, 3, 0, 2])  # (N, G)
    same(first_step(name), first_step(name, lambda batch: common.select(batch, groups.flatten())))


@EVERY
def test_the_width_of_the_padding_and_what_it_holds(name, first_step):
    def widened(batch):
        end = batch["prompt_length"] + batch["length"]
        beyond = torch.arange(batch["input_ids"].shape[1] + 9) >= end[:, None]
        batch["input_ids"] = torch.nn.functional.pad(batch["input_ids"], (0, 9)).masked_fill(beyond, 77)
        batch["mask"] = torch.nn.functional.pad(batch["mask"], (0, 9))
        garbage = torch.tensor([math.nan, math.inf, -math.inf]).repeat(9)[: batch["mask"].shape[1]]
        batch["logprobs"] = torch.where(batch["mask"] == 0, garbage, torch.nn.functional.pad(batch["logprobs"], (0, 9)))
        return batch

    same(first_step(name), first_step(name, widened))


@EVERY
def test_the_microbatch_budget(name, first_step):
    """The whole batch fits the budget of 2048 tokens; with one of 60 a piece is a few rows."""
    same(first_step(name), first_step(name, microbatch_tokens=60))


@EVERY
def test_the_microbatch_budget_and_who_shares_a_prompt_where_a_tool_has_written(name, first_step, tokenizer):
    """Rows with holes: all at once with their prompts shared, a few at a time, and each with a prompt of its own."""
    policy = common.load_policy("tiny/policy", CPU, torch.float32)

    def with_tool(batch):
        return with_a_tool(policy, tokenizer, batch, batch["prompts"][::4], 4, 1.0, key=(name,))

    def apart(batch):
        return with_tool(batch) | {"prompt_id": torch.arange(16)}

    found = first_step(name, with_tool)
    same(found, first_step(name, with_tool, microbatch_tokens=60))
    same(found, first_step(name, apart))
    assert not torch.allclose(found[0], first_step(name)[0])


@EVERY
def test_a_tool_that_writes_first_is_a_longer_prompt(name, first_step, tokenizer):
    """The policy reads the same tokens and has chosen the same, so it learns the same."""
    rng = torch.Generator().manual_seed(0)
    written = torch.randint(18, 28, (16, 3), generator=rng).tolist()
    policy = common.load_policy("tiny/policy", CPU, torch.float32)

    def with_tool(batch, is_prompt):
        starts = batch["prompt_length"].tolist()
        own = [row[s : s + n] for row, s, n in each(batch["input_ids"].tolist(), starts, batch["length"].tolist())]
        prompts = batch["prompts"]
        with torch.no_grad():
            pairs = each(prompts, written, own)
            logprobs = [logprobs_of(policy, prompt.ids + tool, row, 1.0)[0] for prompt, tool, row in pairs]
        if is_prompt:
            longer = [prompt._replace(ids=prompt.ids + tool) for prompt, tool in each(prompts, written)]
            masks = None
        else:
            longer, masks = prompts, [[0] * 3 + [1] * len(row) for row in own]
            own = [tool + row for tool, row in each(written, own)]
            logprobs = [[math.nan] * 3 + row for row in logprobs]
        given = tokenizer, longer, 1, own, logprobs, batch["truncated"].tolist(), masks
        return common.collate(*given) | {"prompts": prompts, "completions": batch["completions"]}

    in_prompt, in_completion = (first_step(name, partial(with_tool, is_prompt=x)) for x in (True, False))
    same(in_prompt, in_completion)


@EVERY
def test_the_reference_and_the_old_policy_are_different_things(name, first_step, monkeypatch):
    """With a reference that is another model only the KL moves; the ratio still starts at 1 and nothing is clipped."""

    load_reference = common.load_reference

    def other_reference(*args):
        model = load_reference(*args)
        for p in model.parameters():
            p.data *= 1.2
        return model

    gradient, metrics = first_step(name)
    options = {"num_epochs": 2 if hasattr(SCRIPTS[name].Args, "clip_low") else 1}
    monkeypatch.setattr(common, "load_reference", other_reference)
    moved_gradient, moved = first_step(name, **options)
    assert metrics["kl"] == pytest.approx(0, abs=1e-6) and moved["kl"] > 0.01
    assert not torch.allclose(gradient, moved_gradient)
    assert moved.get("ratio_mean", 1.0) == pytest.approx(1, abs=1e-5) and moved.get("clip_fraction", 0.0) == 0


@pytest.mark.parametrize("name", ["rloo", "grpo", "gspo", "cispo"])
def test_a_second_group_beside_the_first(name, first_step):
    """The first group's share of the gradient is what it gets alone, halved: another group only adds to it."""
    options = {} if name == "rloo" else {"aggregation": "sequence"}  # in CISPO by default over all tokens
    first, second = (lambda batch, n=n: common.select(batch, torch.arange(n, n + 4)) for n in (0, 4))
    alone, other = (first_step(name, keep, num_prompts=2, **options)[0] for keep in (first, second))
    together = first_step(name, num_prompts=2, **options)[0]
    assert (together - (alone + other) / 2).norm() <= 1e-4 * together.norm()


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Gemma2"])
def test_who_shares_the_batch(tokenizer, family):
    """Sampling pads prompts on the left, scoring pads rows on the right: neither moves a completion or its numbers."""
    model = random_model(family)
    together = common.generate(model, tokenizer, RAGGED, 2, 16, 1.0, key=(0, 1))
    padded = common.logprobs_of(model, 1.0, together)
    for i, prompt in enumerate(RAGGED):
        uniform = prompts_of(*[[0, 9]] * i) + [prompt]  # the same row numbers, other mates
        alone = common.generate(model, tokenizer, uniform, 2, 16, 1.0, key=(0, 1))
        for row in (2 * i, 2 * i + 1):
            n = int(together["mask"][row].sum())
            assert alone["completions"][row] == together["completions"][row]
            torch.testing.assert_close(alone["logprobs"][row, :n], together["logprobs"][row, :n], atol=1e-4, rtol=0)
            one = common.logprobs_of(model, 1.0, common.select(alone, torch.tensor([row])))
            torch.testing.assert_close(one[0, :n], padded[row, :n], atol=1e-4, rtol=0)


@EVERY
def test_at_another_temperature_the_ratio_starts_at_one(name, first_step):
    metrics = first_step(name, temperature=0.5, num_epochs=2, lr=0.0)[1]
    assert metrics["sampler_gap"] < 1e-5 and metrics["kl"] == pytest.approx(0, abs=1e-5)
    assert metrics.get("ratio_mean", 1.0) == pytest.approx(1, abs=1e-5) and metrics.get("clip_fraction", 0.0) == 0


@EVERY
def test_the_correction_for_another_sampler(name, first_step):
    """Off or where the sampler is exact it changes nothing; of one that is off it weighs the tokens, up to the cap."""

    def other_sampler(batch):
        error = torch.tensor([0.3, -0.4])[torch.arange(batch["mask"].shape[1]) % 2]
        batch["logprobs"] = batch["logprobs"] - error * batch["mask"]
        return batch

    plain = first_step(name, kl_coef=0.0)
    same(plain, first_step(name, kl_coef=0.0, is_correction_cap=2.0))
    off = first_step(name, other_sampler, kl_coef=0.0)
    assert torch.equal(off[0], plain[0]) and 0.3 < off[1]["sampler_gap"] < 0.4
    corrected, capped = (first_step(name, other_sampler, kl_coef=0.0, is_correction_cap=cap)[0] for cap in (10.0, 1.0))
    assert not torch.allclose(corrected, plain[0]) and not torch.allclose(capped, corrected)
