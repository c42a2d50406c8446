"""Known traps that no other test file holds: mistakes reported of other code, each with its own input and right value.

README.md in this folder lists them all, and which test settles each. Most run a script's main() on something small.
"""

import json
import math

import pytest
import torch
from test_models import prompts_of, random_model
from test_scripts import ADDITION, ROOT, SCRIPTS, SMALL, metrics_of, train, weights_of
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

import common
import gspo
import ppo
import reinforce
from common import InputError

CPU = torch.device("cpu")
EOS = 1
EVERY = pytest.mark.parametrize("name", SCRIPTS)
WITH_RATIO = ["ppo", "grpo", "gspo", "cispo"]


@pytest.fixture
def tokenizer():
    return common.load_tokenizer("tiny/policy")


def t(rows):
    return torch.tensor(rows, dtype=torch.float32)


def close(actual, expected):
    torch.testing.assert_close(torch.as_tensor(actual), torch.as_tensor(expected), rtol=1e-5, atol=1e-6)


def reward_file(tmp_path, expression, before="pass"):
    """The option reward_fn for a function that gives expression for each completion c."""
    lines = ["calls = []", "def score(prompts, completions, rows):"]
    lines += [f"    {before}", f"    return [{expression} for c in completions]"]
    (tmp_path / "reward.py").write_text("\n".join(lines))
    return {"reward_fn": (f"{tmp_path}/reward.py:score",)}


def force(monkeypatch, rows):
    """The sampler draws these tokens: its uniform numbers are made to say row and column."""
    forced = torch.tensor(rows).flatten()

    def places(*shape, **_):
        return torch.arange(math.prod(shape), dtype=torch.float64).view(shape)

    def draw(logits, uniform, temperature):
        ids = forced[uniform.long() % len(forced)]
        return ids, common.token_logprobs(logits, ids, temperature)

    monkeypatch.setattr(torch, "rand", places)
    monkeypatch.setattr(common, "sample_tokens", draw)


# --- by hand ---


def test_the_score_stands_on_the_last_real_token_of_a_padded_row():
    # V (.5, .5) and two pads, lambda .5: A_2 = 1 - .5, A_1 = .5 - .5 + .5 * .5
    # In the last column: -.125, -.25; masked away: -.25, -.5
    mask = t([[1, 1, 0, 0]])
    advantages, _ = ppo.gae(common.at_last_token(t([1]), mask), t([[0.5, 0.5, 0, 0]]), mask, 1.0, 0.5)
    close(advantages, t([[0.25, 0.5, 0, 0]]))


def test_no_kl_is_summed_over_pads():
    # log p = reference on both tokens, 2 nats below it on three pads: nothing is left of .1 * 3 * 2 = .6
    mask = t([[1, 1, 0, 0, 0]])
    kl = common.kl_estimate(t([[-1, -1, -5, -5, -5]]), t([[-1, -1, -3, -3, -3]]), "k1")
    rewards = common.at_last_token(t([1]), mask) - 0.1 * kl
    close(ppo.gae(rewards, torch.zeros(1, 5), mask, 1.0, 1.0)[0], t([[1, 1, 0, 0, 0]]))
    close(reinforce.rewards_to_go(rewards, mask, 1.0), t([[1, 1, 0, 0, 0]]))
    close(common.weighted_sum(kl, mask, 1), t([0]))


def test_returns_are_of_the_advantages_as_they_were():
    # lambda 0: A = 2 + 1 - 1 and 1 - 1; R = A + V. Of whitened advantages they would be 1.7071 and .2929
    advantages, returns = ppo.gae(t([[2, 1]]), t([[1, 1]]), torch.ones(1, 2), 1.0, 0.0)
    close(advantages, t([[2, 0]]))
    close(returns, t([[3, 1]]))


def test_the_first_of_100_tokens_learns_from_the_score_at_the_default_lambda():
    # V = 0: A_1 = lambda**99: 1 at the default, .0062321 at .95
    rewards, ones = torch.nn.functional.pad(t([[1]]), (99, 0)), torch.ones(1, 100)
    lambdas = (ppo.Args.gae_lambda, 0.95)
    first = [ppo.gae(rewards, 0 * ones, ones, 1.0, gae_lambda)[0][0, 0].item() for gae_lambda in lambdas]
    close(first, [1.0, 0.0062321])


@pytest.mark.parametrize("name", WITH_RATIO)
def test_a_gap_to_the_sampler_is_corrected_once(name):
    # log p = old = -1, sampler -1.5: e**.5 = 1.6487213 on the gradient of -A, not its square 2.7182818
    logprobs = t([[-1.0]]).requires_grad_()
    weights = common.importance_weighted(t([[1]]), logprobs, t([[-1.5]]), cap=10.0)
    SCRIPTS[name].policy_loss(logprobs, logprobs.detach(), t([1]), weights, 0.2, 0.2)[0].backward()
    close(logprobs.grad, t([[-1.6487213]]))


@pytest.mark.parametrize("aggregation, loss", [("token", 0.5), ("sequence", 0.0), ("constant", 0.25)])
@pytest.mark.parametrize("budget", [1, 100])
def test_rows_of_1_and_3_tokens_in_one_microbatch_or_two(aggregation, loss, budget):
    # ratio 1, A = +1 and -1: (-1 + 3) / 4 tokens; (-1 + 1) / 2 rows; (-1 + 3) / (2 * 4)
    # A mean of micro-batch means is 0 for the first too
    mask = t([[1, 0, 0], [1, 1, 1]])
    batch = {"input_ids": torch.zeros(2, 5), "prompt_length": torch.tensor([2, 2]), "length": torch.tensor([1, 3])}
    batch |= {"mask": mask, "logprobs": -mask, "advantages": t([1, -1])}
    batch["weights"] = common.loss_weights(mask, aggregation, 4)
    micros, names = list(common.microbatches(batch, budget)), ("logprobs", "logprobs", "advantages", "weights")
    losses = [SCRIPTS["grpo"].policy_loss(*(m[k] for k in names), 0.2, 0.2)[0] for m in micros]
    assert len(micros) == (2 if budget == 1 else 1)
    close(sum(losses), loss)


def test_gspo_means_over_rows_and_not_tokens():
    # s = 1; one token with A = +1, three with A = -1: (-1 + 1) / 2 = 0; over tokens (-1 + 3) / 4 = .5
    mask, logprobs = t([[1, 0, 0], [1, 1, 1]]), torch.full((2, 3), -1.0)
    for aggregation, loss in ((gspo.Args.aggregation, 0.0), ("token", 0.5)):
        weights = common.loss_weights(mask, aggregation)
        close(gspo.policy_loss(logprobs, logprobs, t([1, -1]), weights, 0.2, 0.2)[0], loss)


def test_a_group_without_signal_stays_in_the_denominator():
    # a live row of 10 tokens, loss sum 10, and a dead one: 10 / 20. Dropped from the count it would be 1
    logprobs = torch.full((2, 10), -1.0)
    weights = common.loss_weights(torch.ones(2, 10), "token")
    close(SCRIPTS["grpo"].policy_loss(logprobs, logprobs, t([-1, 0]), weights, 0.2, 0.2)[0], 0.5)


def test_zeros_of_every_kind_are_scores_of_zero():
    values = [0.0, -0.0, False, 0, 1, 1, 1, 0]
    batch = {"prompts": prompts_of(*[[0]] * 8), "completions": list("abcdefgh"), "mask": torch.ones(8, 1)}
    batch |= {"length": torch.ones(8), "truncated": torch.ones(8) == 0}
    batch |= common.score({"mine": (lambda prompts, completions, rows: values, 1.0)}, batch)
    assert batch["rewards"].tolist() == [0, 0, 0, 0, 1, 1, 1, 0]
    metrics = common.rollout_metrics(batch, 4)
    assert metrics["reward"] == 3 / 8 and metrics["no_signal_fraction"] == 0.5  # the first group is all zeros
    advantages = SCRIPTS["grpo"].group_advantages(batch["rewards"], 4, scale_by_std=False)
    assert advantages.tolist() == [0, 0, 0, 0, 0.25, 0.25, 0.25, -0.75]


# --- stop tokens and sampled ids ---


def test_a_pad_that_is_the_eos_hides_no_eos(tokenizer, monkeypatch):
    """What is trained comes from lengths, what is attended from the prompt's own: no id is compared with the pad's."""
    tokenizer.pad_token, model = tokenizer.eos_token, random_model(pad_token_id=EOS)
    force(monkeypatch, [[5, 6, EOS, EOS, EOS], [EOS] * 5, [5, 6, 7, 8, 9]])
    seen, prompts = [], prompts_of([0, EOS, 9], [0, 5], [0, 5])
    model.register_forward_pre_hook(lambda m, args, kwargs: seen.append(kwargs), with_kwargs=True)
    batch = common.generate(model, tokenizer, prompts, 1, 5, 1.0, key=(0,))
    assert batch["mask"].tolist() == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]
    assert batch["truncated"].tolist() == [False, False, True]
    assert seen[0]["attention_mask"].tolist() == [[1, 1, 1], [0, 1, 1], [0, 1, 1]]
    assert seen[0]["position_ids"].tolist() == [
        [0, 1, 2],
        [0, 0, 1],
        [0, 0, 1],
    ]  # left-padded, and real tokens count from 0
    close(batch["logprobs"], common.logprobs_of(model, 1.0, batch).detach())


def test_shorter_is_better_teaches_to_stop_with_a_pad_that_is_the_eos(tokenizer, tmp_path):
    tokenizer.pad_token, model = tokenizer.eos_token, common.load_policy("tiny/policy", CPU, torch.float32)
    model.config.pad_token_id = model.generation_config.pad_token_id = EOS
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    options = {"model": str(tmp_path / "model"), "num_steps": 20, "eval_every": 0, "lr": 1e-3, "temperature": 1.5}
    options["kl_coef"] = 0.0
    train("grpo", tmp_path / "run", **SMALL | ADDITION | options | reward_file(tmp_path, "-len(c)"))
    ids = torch.tensor([tokenizer(f"1{i}+2{i}=").input_ids for i in range(8)])
    before, after = (AutoModelForCausalLM.from_pretrained(tmp_path / folder) for folder in ("model", "run/final"))
    stops = [model(ids).logits[:, -1].softmax(-1)[:, EOS].mean().item() for model in (before, after)]
    assert stops[0] < 0.05 and stops[1] > 0.3, stops


@EVERY
def test_ids_that_text_does_not_give_back_are_trained_as_sampled(name, tokenizer, tmp_path, monkeypatch):
    """i and l that would merge, a special token, half a character: the ids in the loss are the sampled ones.

    The text goes to the reward alone.
    """
    one, other, half = tokenizer.convert_tokens_to_ids(["i", "l", "Ã"])
    sampled = [one, other, tokenizer.pad_token_id, half, EOS]
    assert tokenizer(tokenizer.decode(sampled), add_special_tokens=False).input_ids != sampled
    force(monkeypatch, [sampled])
    trained, scoring = [], common.logprobs_and_entropy_of
    monkeypatch.setattr(common, "logprobs_and_entropy_of", lambda *args: trained.append(args[2]) or scoring(*args))
    reward = reward_file(tmp_path, "calls.append(0) or len(calls)", before="assert completions[0] == 'il\\ufffd'")
    options = SMALL | ADDITION | reward | {"max_new_tokens": 5, "num_steps": 1}
    (row,) = train(name, tmp_path / "run", **options)[1:]
    for micro in trained:
        pairs = zip(micro["input_ids"], micro["prompt_length"], strict=True)
        assert all(ids[n : n + 5].tolist() == sampled for ids, n in pairs)
        assert (micro["mask"] == 1).all() and micro["mask"].shape[1] == 5
    assert (
        sum(len(micro["mask"]) for micro in trained) == 16
        and row["sampler_gap"] < 1e-5
        and row["truncated_fraction"] == 0
    )


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_truncated_rows_that_are_not_trained_stay_in_the_baseline(name, tmp_path, monkeypatch):
    """Two groups, the second row of each truncated, rewards 1, 0 and 1, 1: A = .5 and 0 on what is left.

    Left alone, survivors are all 0.
    """
    force(monkeypatch, [[5, EOS, 0, 0], [6, 5, 5, 5], [5, 5, EOS, 0], [5, 5, 5, 5]])
    seen, cut = [], common.microbatches
    monkeypatch.setattr(common, "microbatches", lambda batch, budget: seen.append(batch) or cut(batch, budget))
    options = {"num_steps": 1, "num_prompts": 2, "group_size": 2, "minibatch_size": 0, "max_new_tokens": 4}
    options |= {"mask_truncated": True, "scale_rewards": "none", "aggregation": "sequence", "eval_every": 0}
    train(name, tmp_path / "run", **SMALL | options | reward_file(tmp_path, "c[0] == '#'"))
    (seen,) = (batch for batch in seen if "weights" in batch)  # the others are scored by the reference
    lengths, advantages, weights = seen["length"].tolist(), seen["advantages"].tolist(), seen["weights"].tolist()
    rows = {n: (a, w) for n, a, w in zip(lengths, advantages, weights, strict=True)}
    assert rows[2] == (0.5, [1 / 8, 1 / 8, 0, 0])  # a quarter, over two tokens
    close(t([rows[3][1]]), t([[1 / 12] * 3 + [0]]))
    assert rows[3][0] == 0 and rows[4][1] == [0] * 4


def test_a_missing_eos_costs_its_penalty_and_a_full_row_that_has_one_costs_nothing(tmp_path, monkeypatch):
    force(monkeypatch, [[5, 6, 7, EOS], [5, 6, 7, 8]])
    scores, place = [], common.at_last_token
    monkeypatch.setattr(common, "at_last_token", lambda x, mask: scores.append(x) or place(x, mask))
    options = {"num_steps": 1, "num_prompts": 2, "group_size": 1, "max_new_tokens": 4, "missing_eos_penalty": 1.0}
    train("ppo", tmp_path / "run", **SMALL | options | reward_file(tmp_path, "0.8"))
    close(scores[0], t([0.8, -0.2]))


# --- precision ---


def test_norm_weights_of_a_bfloat16_checkpoint_move_at_a_learning_rate_of_1e_6(tokenizer, tmp_path):
    """Below 1 bfloat16 is spaced by 2**-8 = 3.9e-3: five steps of at most 1e-6 would each be rounded away.

    float32, spaced by 6e-8, keeps them.
    """
    random_model().to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    options = {"model": str(tmp_path / "model"), "num_steps": 5, "lr": 1e-6, "warmup_steps": 0, "dtype": "bfloat16"}
    options["eval_every"] = 0
    train("grpo", tmp_path / "run", **SMALL | options | reward_file(tmp_path, "len(c) % 5"))
    weights = weights_of(tmp_path / "run" / "final")
    norms = torch.cat([w for key, w in weights.items() if "norm" in key])
    assert norms.dtype == torch.float32 and (norms != 1).float().mean() > 0.9
    assert (norms - 1).abs().max() < 2e-5 and (norms.bfloat16() == 1).all()


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_in_bfloat16_the_ratio_starts_at_1_though_the_sampler_is_off(name, tmp_path):
    """Old and new log-probabilities come of the same pass; the sampler's are off by 1e-3, gspo clips at 3e-4."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "Review of the musical Red Road:"}\n')
    options = SMALL | {
        "dataset": str(tmp_path / "a.jsonl"),
        "dtype": "bfloat16",
        "lr": 0.0,
        "num_epochs": 2,
        "num_steps": 2,
    }
    rows = train(name, tmp_path / "run", **options)
    assert [row["step"] for row in rows] == [1, 2]  # there are no prompts to evaluate on before
    for row in rows:
        assert row["sampler_gap"] > 3e-4 and abs(row["ratio_mean"] - 1) < 1e-5 and row["clip_fraction"] == 0


def test_the_smallest_loss_scale_still_makes_whole_adam_steps(tmp_path):
    """Sums over 480, the budget of a constant denominator: a first Adam step is lr * g / (g + 1e-8).

    That is .99 lr at g = 1e-6 and .09 lr at 1e-9.
    """
    options = {"num_steps": 1, "warmup_steps": 0, "lr": 1e-4, "minibatch_size": 0, "kl_coef": 0.0}
    options |= {"max_new_tokens": 480, "scale_rewards": "none", "aggregation": "constant"}
    train("grpo", tmp_path / "run", **SMALL | ADDITION | options)
    before, after = weights_of(ROOT / "tiny/policy"), weights_of(tmp_path / "run" / "final")
    steps = torch.cat([(after[k] - before[k]).abs().flatten() for k in after if "norm" in k]) / 1e-4
    assert steps.median() > 0.9


@pytest.mark.parametrize("name", ["reinforce", "rloo", "grpo", "gspo", "cispo"])
def test_equal_rewards_move_nothing_although_float32_rounds_their_mean(name, tmp_path):
    """Six times .9: the float32 sum is off by one spacing, and Adam divides any gradient by its own size."""
    options = SMALL | ADDITION | {"num_steps": 1, "num_prompts": 1, "group_size": 6, "minibatch_size": 0}
    options["kl_coef"] = 0.0
    if name == "reinforce":
        options |= {"num_prompts": 7, "group_size": 1}
    (row,) = train(name, tmp_path / "run", **options | reward_file(tmp_path, "0.9"))[1:]
    before, after = weights_of(ROOT / "tiny/policy"), weights_of(tmp_path / "run" / "final")
    assert row["grad_norm"] == 0 and row.get("no_signal_fraction", 1.0) == 1.0
    assert all(torch.equal(before[k].float(), after[k]) for k in before)


@pytest.mark.parametrize("name", ["rloo", "grpo", "gspo", "cispo"])
def test_two_rewards_of_a_constant_sum_move_nothing(name, tmp_path):
    """.1 + .2 and .3 + 0: in float32 they differ by a unit of rounding."""
    (tmp_path / "two.py").write_text(
        "def one(prompts, completions, rows):\n    return [0.1 if len(c) % 2 else 0.3 for c in completions]\n"
        "def other(prompts, completions, rows):\n    return [0.2 if len(c) % 2 else 0.0 for c in completions]\n"
    )
    options = {"reward_fn": (f"{tmp_path}/two.py:one", f"{tmp_path}/two.py:other"), "kl_coef": 0.0, "num_steps": 2}
    metrics = train(name, tmp_path / "run", **SMALL | options)
    assert metrics[1]["no_signal_fraction"] == 1.0 and 0.1 < metrics[1]["reward/one"] < 0.3
    before, after = weights_of(ROOT / "tiny/policy"), weights_of(tmp_path / "run" / "final")
    assert all(torch.equal(before[k], after[k]) for k in before)


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_a_step_that_trains_no_token_leaves_weights_and_optimizer_alone(name, tmp_path):
    """Adam's momentum of the step before would move them on: in the second step all rows are cut, and masked."""
    script, options = SCRIPTS[name], SMALL | ADDITION | {"mask_truncated": True, "num_steps": 1, "minibatch_size": 0}
    train(name, tmp_path / "run", **options)
    one = torch.load(tmp_path / "run" / "checkpoint-1" / "state.pt")
    resumed = {"output_dir": str(tmp_path / "run"), "resume": str(tmp_path / "run"), "num_steps": 2}
    script.main(script.Args(**options | resumed | {"max_new_tokens": 1}))
    two = torch.load(tmp_path / "run" / "checkpoint-2" / "state.pt")
    row = metrics_of(tmp_path / "run")[-1]
    assert row["truncated_fraction"] == 1.0 and row["grad_norm"] == 0.0
    before, after = (weights_of(tmp_path / "run" / f"checkpoint-{step}") for step in (1, 2))
    assert all(torch.equal(before[k], after[k]) for k in before)
    for key, state in one["optimizer"]["state"].items():
        assert all(torch.equal(x, two["optimizer"]["state"][key][k]) for k, x in state.items())


@pytest.mark.parametrize("name", ["reinforce", "rloo", "grpo", "gspo", "cispo"])
def test_a_step_of_equal_rewards_after_one_with_a_signal_moves_nothing(name, tmp_path):
    """Nor does it move Adam's state, whose momentum of the first step would carry on."""
    reward = reward_file(tmp_path, "len(c) * (len(calls) == 1)", before="calls.append(0)")
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1="}\n')  # nothing is evaluated, so the first call is step 1
    options = SMALL | reward | {"dataset": str(tmp_path / "a.jsonl"), "kl_coef": 0.0, "num_steps": 2, "save_every": 1}
    rows = train(name, tmp_path / "run", **options)
    assert rows[0]["grad_norm"] > 0 == rows[1]["grad_norm"]
    before, after = (weights_of(tmp_path / "run" / f"checkpoint-{step}") for step in (1, 2))
    assert all(torch.equal(before[k], after[k]) for k in before)
    one, two = (torch.load(tmp_path / "run" / f"checkpoint-{step}" / "state.pt")["optimizer"] for step in (1, 2))
    assert all(torch.equal(x, two["state"][key][k]) for key, state in one["state"].items() for k, x in state.items())


@EVERY
def test_in_bfloat16_the_first_kl_is_0_in_metrics_and_rewards(name, tmp_path, monkeypatch):
    """Policy and reference are one model: the sampler's rounding is not in the KL."""
    kls, kl_estimate = [], common.kl_estimate

    def recorded(*args):
        kls.append(kl_estimate(*args))
        return kls[-1]

    monkeypatch.setattr(common, "kl_estimate", recorded)
    (tmp_path / "a.jsonl").write_text('{"prompt": "Review of the musical Red Road:"}\n')
    options = SMALL | {"dtype": "bfloat16", "kl_coef": 0.1, "num_steps": 1, "minibatch_size": 0}
    row = train(name, tmp_path / "run", **options | {"dataset": str(tmp_path / "a.jsonl")})[0]
    assert row["sampler_gap"] > 3e-4 and row["kl"] == pytest.approx(0, abs=1e-9)
    assert len(kls) >= 2 and all(kl.abs().max() < 1e-4 for kl in kls)


@EVERY
@pytest.mark.parametrize("quantity", ["logprobs", "ref_logprobs", "old_logprobs", "advantages"])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_number_that_is_not_finite_stops_before_the_update_and_is_named(name, quantity, bad, tmp_path, monkeypatch):
    """At a trained token; at a tool's it may be anything."""
    batch = {"mask": t([[1, 1, 0], [1, 1, 1]]), quantity: t([[-1, -1, bad], [-1, -1, -1]])}
    assert len([*common.minibatches(batch, 1, 0, (0,))]) == 1
    batch[quantity][1, 2] = bad
    with pytest.raises(InputError, match=f"{quantity} of a trained token are not finite"):
        next(common.minibatches(batch, 1, 0, (0,)))
    if quantity != "ref_logprobs" or bad == -math.inf:
        return
    scored = common.no_grad_pass

    def poisoned(fn, batch, microbatch_tokens):
        found = scored(fn, batch, microbatch_tokens)
        return found if getattr(fn, "args", [None])[0] is policies[0] else found * bad

    policies, load_policy = [], common.load_policy
    monkeypatch.setattr(
        common, "load_policy", lambda *args, **how: policies.append(load_policy(*args, **how)) or policies[0]
    )
    monkeypatch.setattr(common, "no_grad_pass", poisoned)
    with pytest.raises(InputError, match=" of a trained token are not finite"):
        train(name, tmp_path / "run", **SMALL | ADDITION | {"kl_coef": 0.1, "save_every": 1})
    assert not common.checkpoints(tmp_path / "run")


@pytest.mark.parametrize("n", [2, 6, 7, 100, 1001])
def test_whitened_equal_advantages_are_0(n):
    """Trap: what rounding leaves of the mean, over sqrt(1e-8), is 6e-4 for seven .9: Adam makes whole steps of that."""
    for value in (0.9, 0.1, -3.3):
        assert (ppo.whiten(torch.full((1, n), value), torch.ones(1, n)) == 0).all()


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_a_loss_of_0_on_the_policy_is_no_gradient_of_0(name, tmp_path):
    """At ratio 1 the value is minus the mean advantage, 0; the gradient is not, and the weights move."""
    options = SMALL | ADDITION | {"num_steps": 1, "kl_coef": 0.0, "minibatch_size": 0}
    (row,) = train(name, tmp_path / "run", **options)[1:]
    before, after = weights_of(ROOT / "tiny/policy"), weights_of(tmp_path / "run" / "final")
    assert abs(row["loss"]) < 1e-6 and row["grad_norm"] > 0.01 and row["no_signal_fraction"] < 1
    assert all(not torch.equal(before[k].float(), after[k]) for k in before)


# --- models ---


@pytest.mark.parametrize("family", ["Mistral", "Gemma2", "Gemma3Text", "GptOss"])
def test_a_sliding_window_is_kept_while_sampling_and_while_scoring(family, tokenizer):
    """Window 8, prompts of 4 and 32 tokens left-padded into one batch, 24 new tokens; without it, other numbers."""
    model = random_model(family)
    model.generation_config.eos_token_id = 511
    batch = common.generate(model, tokenizer, prompts_of(range(4), range(3, 35)), 4, 24, 1.0, key=(0, 1))
    assert batch["mask"].sum() > 6 * 24
    scored = common.logprobs_of(model, 1.0, batch).detach()
    torch.testing.assert_close(batch["logprobs"], scored, atol=1e-4, rtol=0)
    wide = random_model(family, sliding_window=128)
    assert (common.logprobs_of(wide, 1.0, batch) - scored).abs().max() > 0.1


def test_tied_weights_stay_tied_and_are_trained_once(tmp_path, monkeypatch):
    save, policies = common.save_model, []

    def noted(folder, trained, *args):
        policies.extend([trained["policy"]] * (folder.name == "final"))
        save(folder, trained, *args)

    monkeypatch.setattr(common, "save_model", noted)
    train("rloo", tmp_path / "run", **SMALL | ADDITION | {"num_steps": 2, "lr": 1e-3})
    resumed = SMALL | ADDITION | {"num_steps": 3, "lr": 1e-3, "resume": str(tmp_path / "run")}
    train("rloo", tmp_path / "run", **resumed)
    for step, policy in zip((2, 3), policies, strict=True):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        loaded = common.load_policy(str(folder), CPU, torch.float32)
        for model in (policy, loaded):
            assert model.lm_head.weight is model.model.embed_tokens.weight
        ids = torch.tensor([[0, 19, 12, 20, 29]])
        torch.testing.assert_close(loaded(ids).logits, policy(ids).logits, atol=1e-6, rtol=0)
        state = torch.load(folder / "state.pt", weights_only=True)["optimizer"]["state"]
        shapes = {name.removeprefix("policy."): entries["exp_avg"].shape for name, entries in state.items()}
        assert shapes == {name: p.shape for name, p in policy.named_parameters()}
        assert [*shapes.values()].count(loaded.lm_head.weight.shape) == 1


@pytest.mark.parametrize("sampling", [True, None])
def test_a_hostile_generation_config_changes_no_draw_and_is_saved_as_it_was(sampling, tokenizer, tmp_path):
    """Values that some samplers fill in unasked; without do_sample some libraries refuse to save them again."""
    hostile = {"eos_token_id": 1, "temperature": 0.1, "top_k": 1, "top_p": 0.5, "repetition_penalty": 1.3}
    hostile["transformers_version"] = "4.51.0"
    hostile |= {"do_sample": True} if sampling else {}
    rows = []
    for config in ({"eos_token_id": 1}, hostile):
        model = tmp_path / str(len(config))
        random_model(vocab_size=512).save_pretrained(model)
        tokenizer.save_pretrained(model)
        (model / "generation_config.json").write_text(json.dumps(config))
        options = {"model": str(model), "num_steps": 1, "eval_every": 0} | reward_file(tmp_path, "len(c) % 5")
        rows.append(train("grpo", tmp_path / f"run{len(config)}", **SMALL | options)[1])
    for key in ("reward", "completion_length", "entropy", "loss", "grad_norm"):
        assert rows[0][key] == rows[1][key]
    saved = json.loads((tmp_path / f"run{len(hostile)}" / "final" / "generation_config.json").read_text())
    assert saved | {"transformers_version": "4.51.0"} == hostile


def test_a_reward_model_of_another_tokenizer_reads_the_text(tokenizer, tmp_path, capsys):
    """Policy: 512 ids. Reward model: 120, one per character, so that most of the policy's would be beyond its table."""
    vocab = {"[PAD]": 0, "[UNK]": 1} | {chr(32 + i): 2 + i for i in range(95)} | {f"[{i}]": i for i in range(97, 120)}
    letters = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters = PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="[PAD]", unk_token="[UNK]", eos_token="[97]")
    letters.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    torch.manual_seed(0)
    shape = {"vocab_size": 120, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "num_labels": 1, "pad_token_id": 0}
    judge = LlamaForSequenceClassification(LlamaConfig(**shape)).eval()
    for part in (judge, letters):
        part.save_pretrained(tmp_path / "judge")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}={% endfor %}"
    for part in (random_model(), tokenizer):
        part.save_pretrained(tmp_path / "policy")
    (tmp_path / "chat.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "1+1"}]}) + "\n")
    options = {"model": str(tmp_path / "policy"), "reward_model": str(tmp_path / "judge"), "num_steps": 1}
    options["eval_every"] = 0
    read = {SMALL["dataset"]: "{prompt}{completion}", f"{tmp_path}/chat.jsonl": "user:1+1;assistant:{completion};"}
    for data, whole in read.items():
        train("ppo", tmp_path / data[-7:], **SMALL | options | {"dataset": data})
        assert f"value model: starts from {tmp_path}/policy" in capsys.readouterr().out
        lines = (tmp_path / data[-7:] / "samples.jsonl").read_text().splitlines()
        samples = [json.loads(line) for line in lines]
        texts = [[vocab.get(c, 1) for c in whole.format(**s)] for s in samples]
        direct = [judge(torch.tensor([ids])).logits.item() for ids in texts]
        assert [s["reward"] for s in samples] == pytest.approx(direct, abs=1e-5) and len(set(direct)) > 3


# --- refusals and stops ---


@pytest.mark.parametrize("name", ["rloo", "grpo", "gspo", "cispo"])
def test_a_group_of_one_is_refused_before_anything_is_loaded(name, tmp_path):
    with pytest.raises(InputError, match="--group-size must be 2 or more"):
        train(name, tmp_path / "run", **SMALL | {"group_size": 1, "model": "nothere"})
    assert not (tmp_path / "run").exists()


@EVERY
def test_a_gradient_that_is_not_finite_stops_in_its_step_and_is_named(name, tmp_path, monkeypatch):
    losses, policy_loss = [], SCRIPTS[name].policy_loss

    def poisoned(*args):
        losses.append(policy_loss(*args))
        return (losses[-1][0] * math.inf, losses[-1][1]) if len(losses) == 2 else losses[-1]

    monkeypatch.setattr(SCRIPTS[name], "policy_loss", poisoned)
    with pytest.raises(InputError, match="the gradient norm is (inf|nan) in step 2: no update"):
        train(name, tmp_path / "run", **SMALL | ADDITION | {"save_every": 1, "eval_every": 0, "minibatch_size": 0})
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [0, 1]
    assert [p.name for p in (tmp_path / "run").iterdir() if p.is_dir()] == ["checkpoint-1"]


@EVERY
def test_a_sampler_that_is_not_the_trained_model_ends_the_run_before_it_is_saved(name, tmp_path, monkeypatch):
    sample = common.generate

    def off_by_0_6(*args, **how):
        batch = sample(*args, **how)
        return batch | {"logprobs": batch["logprobs"] - 0.6}

    monkeypatch.setattr(common, "generate", off_by_0_6)
    with pytest.raises(InputError, match="as sampled and as trained differ by 0.60 nats per token"):
        train(name, tmp_path / "run", **SMALL | ADDITION | {"save_every": 1})
    assert not common.checkpoints(tmp_path / "run")


def test_an_infinite_reward_stops_its_step(tmp_path):
    scores = "float('inf') if len(calls) == 3 else 1.0"  # evaluation, step 1, step 2
    reward = reward_file(tmp_path, scores, before="calls.append(0)")
    with pytest.raises(InputError, match="reward score gave inf for prompt .*, completion "):
        train("grpo", tmp_path / "run", **SMALL | ADDITION | reward | {"save_every": 1, "eval_every": 0})
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [0, 1]
    assert [p.name for p in (tmp_path / "run").iterdir() if p.is_dir()] == ["checkpoint-1"]


# --- batches ---


@pytest.mark.parametrize("rows, per_step", [(10, 4), (3, 8)])
def test_prompts_that_do_not_divide_into_steps(rows, per_step, tmp_path, monkeypatch):
    """An epoch goes on in the next step and none of its prompts is lost.

    8 or 16 rows cut into threes leave 2 or 1 for a last step.
    """
    taken, sizes, take, cut = [], [], common.next_prompts, common.microbatches

    def noted_prompts(*args):
        taken.extend(found := take(*args))
        return found

    def noted_cut(batch, budget):
        if "weights" in batch:  # not where the reference scores
            sizes.append(batch["weights"][:, 0])
        return cut(batch, budget)

    monkeypatch.setattr(common, "next_prompts", noted_prompts)
    monkeypatch.setattr(common, "microbatches", noted_cut)
    lines = [json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(rows)]
    (tmp_path / "few.jsonl").write_text("".join(lines))
    options = {"num_prompts": per_step, "group_size": 2, "minibatch_size": 3, "microbatch_tokens": 16}
    options["dataset"] = str(tmp_path / "few.jsonl")
    found = train("rloo", tmp_path / "run", **SMALL | ADDITION | options)
    assert [row["step"] for row in found] == [1, 2, 3]
    texts = [prompt.text for prompt in taken]
    assert len(texts) == 3 * per_step
    for epoch in range(3 * per_step // rows):
        assert len(set(texts[epoch * rows : (epoch + 1) * rows])) == rows
    per_batch = [3, 3, 2] if per_step == 4 else [3, 3, 3, 3, 3, 1]
    assert [len(shares) for shares in sizes] == per_batch * 3
    # a mean over its own rows, the short one's too
    close([shares.sum().item() for shares in sizes], [1.0] * len(sizes))
