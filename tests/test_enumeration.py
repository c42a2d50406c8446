"""Exact expectations: every completion of one prompt is enumerated and weighted by its probability, all in float64.
A small real policy is scored by common.logprobs_of and the shipped functions make the estimators: nothing is sampled.
The right-hand sides are gradients by autograd of the enumerated objective itself: "unbiased" means equal to 1e-10."""

import math
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel

import cispo
import common
import grpo
import gspo
import ppo
import reinforce
import rloo

STOP, VOCAB, HORIZON, PROMPT, TEMPERATURE, BETA = 0, 3, 3, [1, 2], 0.8, 0.3
RATIO = {script.__name__: script for script in (ppo, grpo, gspo, cispo)}
GROUPED = pytest.mark.parametrize("script", [grpo, gspo, cispo])
close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def noise(seed, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def model_of(seed, trainable=False):
    """GPT-2, whose every operation stays in float64 (Llama's norms compute in float32), far from uniform."""
    shape = {"vocab_size": VOCAB, "n_embd": 8, "n_inner": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}
    config = GPT2Config(**shape, tie_word_embeddings=False, bos_token_id=STOP, eos_token_id=STOP)
    model = GPT2LMHeadModel(config).double()
    for i, parameter in enumerate(model.parameters()):
        scale = 0.8 if parameter.dim() == 2 else 0.2
        parameter.data = scale * noise(100 * seed + i, *parameter.shape) + (parameter == 1)
    return common.prepare(model, torch.float32, trainable)


def batch_of(horizon):
    """Every completion that ends with its first stop token or at the horizon, as common.generate lays a batch out."""
    every = {y[: y.index(STOP) + 1] if STOP in y else y for y in product(range(VOCAB), repeat=horizon)}
    rows = sorted(every, key=lambda y: (len(y), y))
    length = torch.tensor([len(y) for y in rows])
    return {
        "input_ids": pad_sequence([torch.tensor([*PROMPT, *y]) for y in rows], batch_first=True),
        "prompt_length": torch.full_like(length, len(PROMPT)),
        "length": length,
        "mask": (torch.arange(horizon) < length[:, None]).double(),
        "truncated": torch.tensor([y[-1] != STOP for y in rows]),
        "completions": rows,
    }


def gradient(objective):
    """With respect to all parameters of the policy, as one vector."""
    gradients = torch.autograd.grad(objective, list(POLICY.parameters()), retain_graph=True)
    return torch.cat([g.flatten() for g in gradients])


POLICY, REFERENCE, BATCH = model_of(5, trainable=True), model_of(12), batch_of(HORIZON)
MASK = BATCH["mask"]
LIVE = common.logprobs_of(POLICY, TEMPERATURE, BATCH)  # (B, T), B = 1 + 2 + 12 = 15
LOGPROBS, P = LIVE.detach(), LIVE.detach().sum(1).exp()
REF = common.no_grad_pass(partial(common.logprobs_of, REFERENCE, TEMPERATURE), BATCH, microbatch_tokens=12)
JACOBIAN = torch.stack([gradient(x) for x in LIVE.flatten()])  # (B * T, parameters)
SCORES = 1 + noise(3, len(P)).sigmoid()  # from 1 to 2, so that a baseline matters
REWARDS = common.at_last_token(SCORES, MASK) - BETA * common.kl_estimate(LOGPROBS, REF, "k1")  # as the scripts' step 3
PREFIXES = sorted({y[:t] for y in BATCH["completions"] for t in range(len(y))})
PREFIX = [[PREFIXES.index(y[:t]) if t < len(y) else 0 for t in range(HORIZON)] for y in BATCH["completions"]]
PREFIX = torch.tensor(PREFIX)  # (B, T)
THROUGH = torch.nn.functional.one_hot(PREFIX, len(PREFIXES)) * MASK[..., None]  # (B, T, prefixes), nothing on pads
REACHED = torch.einsum("b,btn->n", P, THROUGH)  # the probability of every prefix


def exact(beta):
    """The gradient of E[score] - beta * KL(policy || reference), over whole completions."""
    return gradient(LIVE.sum(1).exp() @ (SCORES - beta * (LIVE - REF).sum(1)))


def groups_of(size):
    """(n, size): every draw of independent completions."""
    return torch.cartesian_prod(*[torch.arange(len(P))] * size).view(-1, size)


def steps(policy_loss, groups, advantages, aggregation="sum"):
    """(n, B * T): what each group's own step, minus the gradient of its loss, puts on each log-probability."""
    weights = torch.vmap(lambda mask: common.loss_weights(mask, aggregation, HORIZON))(MASK[groups])
    ascent = torch.vmap(torch.func.grad(lambda *args: -policy_loss(*args)[0]))(LOGPROBS[groups], advantages, weights)
    where = torch.arange(len(groups))[:, None], groups
    return torch.zeros(len(groups), *MASK.shape, dtype=MASK.dtype).index_put(where, ascent, accumulate=True).flatten(1)


def advantages_of(function, groups, rewards, *args):
    """(n, size): of all groups in one call."""
    return function(rewards[groups].flatten(), groups.shape[1], *args).view(groups.shape)


def mean(groups, steps):
    return P[groups].prod(1) @ steps @ JACOBIAN


def variance(groups, steps):
    """The trace of the covariance of the gradient."""
    return P[groups].prod(1) @ (steps @ JACOBIAN - mean(groups, steps)).square().sum(1)


def at_ratio_one(script):
    return lambda logprobs, *others: script.policy_loss(logprobs, logprobs.detach(), *others, 0.2, 0.2)


def next_tokens(model):
    """(prefixes, V): the log-probability of every next token, each prefix on its own, without padding."""
    logits = torch.stack([model(torch.tensor([[*PROMPT, *y]])).logits[0, -1] for y in PREFIXES])
    return logits.div(TEMPERATURE).log_softmax(-1)


# --- the policy ---


def test_completions_are_all_there_and_scored_by_the_chain_rule():
    assert len(P) == 15 and LIVE.dtype == REF.dtype == torch.float64 and P.max() > 0.2 and P.min() < 0.01
    close(P.sum().item(), 1.0)
    for model, logprobs in ((POLICY, LOGPROBS), (REFERENCE, REF)):
        close(logprobs, next_tokens(model).detach()[PREFIX, BATCH["input_ids"][:, len(PROMPT) :]] * MASK)


def test_generate_draws_them_with_their_probabilities():
    model, n = model_of(5).float(), 4000
    tokenizer = SimpleNamespace(eos_token_id=STOP, batch_decode=lambda ids, **_: ids)
    prompts = [common.Prompt(PROMPT, "", {})]
    batch = common.generate(model, tokenizer, prompts, n, HORIZON, TEMPERATURE, key=("enumeration",))
    row = (batch["input_ids"][:, None] == BATCH["input_ids"]).all(2) & (batch["mask"][:, None] == MASK).all(2)  # (n, B)
    which = row.int().argmax(1)
    assert (row.sum(1) == 1).all() and torch.equal(batch["truncated"], BATCH["truncated"][which])
    torch.testing.assert_close(batch["logprobs"].double(), LOGPROBS[which], rtol=0, atol=1e-5)
    assert ((row.sum(0) - n * P).abs() < 4 * (n * P * (1 - P)).sqrt() + 1).all()


def test_expected_gradient_of_the_log_probability_is_zero_at_every_position():
    per_position = torch.einsum("b,btd->td", P, JACOBIAN.view(*MASK.shape, -1))
    close(per_position, torch.zeros_like(per_position))
    assert JACOBIAN.norm() > 1


# --- reinforce, rloo ---


def reinforce_steps(weighting, groups, rewards=REWARDS):
    returns = reinforce.rewards_to_go(rewards, MASK, 1.0)
    advantages = returns[:, 0][groups] if weighting == "total" else returns[groups]
    if weighting == "baseline":
        advantages = advantages - torch.vmap(reinforce.leave_one_out_baseline)(returns[:, 0][groups])[..., None]
    return steps(reinforce.policy_loss, groups, advantages)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("weighting", ["total", "reward-to-go", "baseline"])
def test_reinforce_is_unbiased(weighting, size):
    close(mean(groups_of(size), reinforce_steps(weighting, groups_of(size))), exact(BETA))


def test_reward_to_go_has_less_variance_than_the_total_and_a_baseline_still_less():
    """On this policy: if the reference is far off, the KL that reward-to-go leaves out might offset what is kept."""
    groups = groups_of(3)
    found = [variance(groups, reinforce_steps(how, groups)).item() for how in ("total", "reward-to-go", "baseline")]
    assert found == pytest.approx([60.6, 56.7, 3.7], abs=0.05)  # as the README says
    shifted = reinforce_steps("baseline", groups, REWARDS + common.at_last_token(SCORES * 0 + 10, MASK))
    close(shifted, reinforce_steps("baseline", groups))  # a constant in every score is taken off


@pytest.mark.parametrize("size", [2, 3])
def test_rloo_is_unbiased(size):
    rewards = SCORES - BETA * common.kl_estimate(LOGPROBS, REF, "k1").sum(1)
    advantages = advantages_of(rloo.leave_one_out_advantages, groups_of(size), rewards)
    close(mean(groups_of(size), steps(rloo.policy_loss, groups_of(size), advantages)), exact(BETA))


# --- ppo ---

TO_COME = REWARDS.flip(1).cumsum(1).flip(1)  # score and KL
TRUE_VALUES = (torch.einsum("b,bt,btn->n", P, TO_COME, THROUGH) / REACHED)[PREFIX]  # E[to come | prefix]; junk on pads
WRONG_VALUES = noise(4, len(PREFIXES))[PREFIX]


def ppo_steps(values, gae_lambda):
    advantages, _ = ppo.gae(REWARDS, values, MASK, 1.0, gae_lambda)
    return steps(at_ratio_one(ppo), groups_of(1), advantages[groups_of(1)])


@pytest.mark.parametrize("values, gae_lambda", [(WRONG_VALUES, 1.0), *((TRUE_VALUES, x) for x in (1.0, 0.5, 0.0))])
def test_gae_is_unbiased_with_any_values_at_lambda_1_and_with_true_ones_at_every_lambda(values, gae_lambda):
    close(mean(groups_of(1), ppo_steps(values, gae_lambda)), exact(BETA))


def test_gae_with_wrong_values_is_biased_below_lambda_1():
    assert (mean(groups_of(1), ppo_steps(WRONG_VALUES, 0.5)) - exact(BETA)).norm() > 0.1 * exact(BETA).norm()


def test_true_values_lower_the_variance_and_so_does_a_lower_lambda():
    three = ((0 * MASK, 1.0), (TRUE_VALUES, 1.0), (TRUE_VALUES, 0.0))
    none, true, short = (variance(groups_of(1), ppo_steps(*values_and_lambda)) for values_and_lambda in three)
    assert none > 2 * true and true > short, (none, true, short)


# --- grpo, gspo, cispo ---


@pytest.mark.parametrize("aggregation", ["sequence", "token", "constant", "sum"])
@pytest.mark.parametrize("script", RATIO)
def test_at_ratio_one_every_step_is_that_of_reinforce(script, aggregation):
    groups = groups_of(2)
    advantages = advantages_of(grpo.group_advantages, groups, SCORES)
    expected = steps(reinforce.policy_loss, groups, advantages, aggregation)
    close(steps(at_ratio_one(RATIO[script]), groups, advantages, aggregation), expected)
    assert expected.norm() > 1


@GROUPED
@pytest.mark.parametrize("size", [2, 3])
def test_a_group_mean_with_the_sample_in_it_shrinks_the_gradient_by_one_gth(script, size):
    advantages = advantages_of(script.group_advantages, groups_of(size), SCORES, False)
    step = mean(groups_of(size), steps(at_ratio_one(script), groups_of(size), advantages))
    close(step, (size - 1) / size * exact(0.0))


def std_factor(p, G):
    """c(p) of the next test: k of G succeed, with std sqrt(k (G - k) / (G (G - 1))); k = 0 and k = G teach nothing."""

    def term(k):
        std = math.sqrt(k * (G - k) / (G * (G - 1))) + 1e-4
        plus, minus = (1 - k / G) / std, -(k / G) / std  # advantages of success and of failure
        return math.comb(G, k) * p**k * (1 - p) ** (G - k) * (k / G * plus / p - (G - k) / G * minus / (1 - p))

    return sum(term(k) for k in range(1, G))


@GROUPED
def test_dividing_by_the_std_keeps_the_direction_and_weights_prompts_by_difficulty(script):
    """Success is to be among the r rarest completions, with probability p: the expected step is c(p) * grad p.

    Without the std it is (G - 1) / G * grad p.
    """
    groups, factors = groups_of(4), {}
    for r in (1, 6, 13, 14):
        success = torch.zeros_like(P).index_fill(0, P.argsort()[:r], 1.0)
        p, slope = (P @ success).item(), gradient(LIVE.sum(1).exp() @ success)
        for scale_by_std, c in ((True, std_factor(p, 4)), (False, 3 / 4)):
            advantages = advantages_of(script.group_advantages, groups, success, scale_by_std)
            close(mean(groups, steps(at_ratio_one(script), groups, advantages)), c * slope)
        factors[p] = std_factor(p, 4)
    middle = min(factors, key=lambda p: abs(p - 0.5))
    assert [min(factors), middle] == pytest.approx([0.001, 0.53], rel=0.1)
    assert [factors[min(factors)], factors[middle]] == pytest.approx([1.50, 1.40], abs=0.005)  # as the README says


# --- the KL ---


def kl_per_prefix(first, second):
    return (first.exp() * (first - second)).sum(1)


def test_k1_and_k3_are_unbiased_over_completions_and_k2_is_not():
    kl = REACHED @ kl_per_prefix(next_tokens(POLICY), next_tokens(REFERENCE)).detach()  # the chain rule
    k1, k2, k3 = (P @ common.kl_estimate(LOGPROBS, REF, kind).sum(1) for kind in ("k1", "k2", "k3"))
    close(k1, kl)
    close(k3, kl)
    assert abs(k2 - kl) > 0.05 * kl


def test_the_gradient_of_k1_k2_and_k3_as_a_loss():
    """On samples that stand still: 0, that of KL(policy || reference), that of KL(reference || policy), by prefix."""
    weights = common.loss_weights(MASK, "sum") * len(P) * P[:, None]
    estimates = [common.kl_estimate(LIVE, REF, kind) for kind in ("k1", "k2", "k3")]
    k1, k2, k3 = (gradient(common.weighted_sum(kl, weights)) for kl in estimates)
    policy, reference = next_tokens(POLICY), next_tokens(REFERENCE)
    close(k1, torch.zeros_like(k1))
    close(k2, gradient(REACHED @ kl_per_prefix(policy, reference)))
    close(k3, gradient(REACHED @ kl_per_prefix(reference, policy)))
    assert (k2 - k3).norm() > 0.1 * k2.norm() and k2.norm() > 0.1


# --- off the policy ---


@pytest.mark.parametrize("name", [*RATIO, "importance_weighted"])
def test_uncapped_ratios_of_one_token_turn_samples_of_an_old_policy_into_the_gradient_of_the_new(name):
    """E over old of ratio * A * grad log p = grad E over new of A. Of one token: a ratio leaves its prefix to old."""
    batch, advantages = batch_of(1), 1 + noise(5, VOCAB).sigmoid()
    new, old = (common.logprobs_of(model, TEMPERATURE, batch) for model in (POLICY, model_of(6)))
    weights = common.loss_weights(batch["mask"], "sum") * VOCAB * old.exp()
    if name in RATIO:
        loss, _ = RATIO[name].policy_loss(new, old, advantages, weights, 1.0, 1e6)
    else:
        loss, _ = reinforce.policy_loss(new, advantages, common.importance_weighted(weights, new, old, cap=1e6))
    close(-gradient(loss), gradient(new[:, 0].exp() @ advantages))
    assert (new - old).abs().max() > 0.5
