"""Every pure function against numbers worked out by hand; the arithmetic stands beside each number.
Expected values are literals and no formula is written a second time here: torch only builds the inputs.
A advantage, V value, R return, r reward, w loss weight, s sequence ratio; "trap": a known way to get it wrong."""

import math

import pytest
import torch

import cispo
import common
import grpo
import gspo
import ppo
import reinforce
import rloo

BAD = [math.nan, math.inf, -math.inf]
AGGREGATIONS = ["sequence", "token", "constant", "sum"]
GROUPED = pytest.mark.parametrize("script", [grpo, gspo, cispo])  # each carries its own copy of group_advantages
CLIPPED = pytest.mark.parametrize("script", [ppo, grpo])  # the same clipped surrogate


def t(rows):
    return torch.tensor(rows, dtype=torch.float32)


def close(actual, expected, rtol=1e-5, atol=1e-6):
    actual, expected = (torch.as_tensor(x).detach().double() for x in (actual, expected))
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def step(function, leaf, *others):
    """loss, gradient with respect to the first argument, stats."""
    leaf = leaf.clone().requires_grad_()
    loss, stats = function(leaf, *others)
    loss.backward()
    return loss, leaf.grad, stats


def moved(ratios):
    """old log-probabilities of -1 everywhere, and the log-probabilities that stand in these ratios to them."""
    return t(ratios).log() - 1, torch.full_like(t(ratios), -1.0)


# --- common ---

X = [[1.0, 2.0, 3.0], [4.0, math.nan, math.inf], [math.nan, 9.0, 9.0]]
X_MASK = [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("dim, expected", [
    (None, 2.5),            # (1 + 2 + 3 + 4) / 4 tokens; a mean of the row means would be (2 + 4 + 0) / 3 = 2
    (1, [2.0, 4.0, 0.0]),   # (1 + 2 + 3) / 3, 4 / 1, and 0 where the mask is empty
    (0, [2.5, 2.0, 3.0]),   # (1 + 4) / 2, 2 / 1, 3 / 1
])  # fmt: skip
def test_masked_mean(dim, expected):
    close(common.masked_mean(t(X), t(X_MASK), dim), t(expected))


def test_masked_mean_of_nothing_and_of_a_trained_stop_token():
    close(common.masked_mean(t(X), torch.zeros(3, 3)), 0.0)
    # trap: pad id == stop id. [5, 7, stop, pad, pad] keeps its first stop: (1 + 2 + 3) / 3 = 2, without it 1.5
    close(common.masked_mean(t([1, 2, 3, 9, 9]), t([1, 1, 1, 0, 0])), 2.0)


# a tool has written the tokens 2 and 3 of row 1, 1 and 2 of row 2, and 2 and 4 of row 3: holes in the mask
HOLES = t([[1, 0, 0, 1, 1], [0, 0, 1, 1, 0], [1, 0, 1, 0, 0]])


@pytest.mark.parametrize("aggregation, expected", [  # 3 rows; 3 + 2 + 2 = 7 tokens of the policy's own
    ("sequence", [[1 / 9, 0, 0, 1 / 9, 1 / 9], [0, 0, 1 / 6, 1 / 6, 0], [1 / 6, 0, 1 / 6, 0, 0]]),  # 1/3 of 1/3 or 1/2
    ("token", [[1 / 7, 0, 0, 1 / 7, 1 / 7], [0, 0, 1 / 7, 1 / 7, 0], [1 / 7, 0, 1 / 7, 0, 0]]),
    ("constant", [[1 / 30, 0, 0, 1 / 30, 1 / 30], [0, 0, 1 / 30, 1 / 30, 0], [1 / 30, 0, 1 / 30, 0, 0]]),  # 1/3 * 1/10
    ("sum", [[1 / 3, 0, 0, 1 / 3, 1 / 3], [0, 0, 1 / 3, 1 / 3, 0], [1 / 3, 0, 1 / 3, 0, 0]]),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_loss_weights_of_a_mask_with_holes(aggregation, expected, dtype):
    close(common.loss_weights(HOLES.to(dtype), aggregation, max_new_tokens=10), t(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_the_last_token_is_the_last_of_the_policys_own(dtype):
    """Behind a hole, before one, and before the last token of the row, which is a tool's; an empty row has none."""
    mask = torch.cat([HOLES, torch.zeros(1, 5)]).to(dtype)
    expected = [[0, 0, 0, 0, 5.0], [0, 0, 0, 6.0, 0], [0, 0, 7.0, 0, 0], [0] * 5]
    close(common.at_last_token(t([5, 6, 7, math.nan]), mask), t(expected))


# lengths 3, 1, 2 and 0: B = 4 rows (an empty row counts as a row), 3 + 1 + 2 = 6 tokens
MASK = t([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]])


@pytest.mark.parametrize("aggregation, expected", [
    ("sequence", [[1 / 12] * 3, [1 / 4, 0, 0], [1 / 8, 1 / 8, 0], [0, 0, 0]]),   # 1/4 * 1/3, 1/4 * 1/1, 1/4 * 1/2
    ("token", [[1 / 6] * 3, [1 / 6, 0, 0], [1 / 6, 1 / 6, 0], [0, 0, 0]]),       # 1 / 6
    ("constant", [[1 / 40] * 3, [1 / 40, 0, 0], [1 / 40, 1 / 40, 0], [0, 0, 0]]),  # 1/4 * 1/10
    ("sum", [[1 / 4] * 3, [1 / 4, 0, 0], [1 / 4, 1 / 4, 0], [0, 0, 0]]),         # 1 / 4
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_loss_weights(aggregation, expected, dtype):
    close(common.loss_weights(MASK.to(dtype), aggregation, max_new_tokens=10), t(expected))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_loss_weights_of_an_empty_minibatch_are_zero(aggregation):
    assert (common.loss_weights(torch.zeros(2, 3), aggregation, max_new_tokens=10) == 0).all()


@pytest.mark.parametrize("aggregation, expected", [
    ("sequence", 0.0),  # (-1 + 1) / 2
    ("token", 0.6),     # (2 * -1 + 8 * 1) / 10
    ("constant", 0.3),  # (2 * -1 + 8 * 1) / (2 * 10)
    ("sum", 3.0),       # (2 * -1 + 8 * 1) / 2
])  # fmt: skip
def test_four_aggregations_of_one_loss(aggregation, expected):
    """2 tokens with A = +1 and 8 tokens with A = -1, ratio 1, so the token losses are -1 and +1; max_new_tokens 10."""
    mask = t([[1] * 2 + [0] * 6, [1] * 8])
    weights = common.loss_weights(mask, aggregation, max_new_tokens=10)
    loss, _ = grpo.policy_loss(torch.full((2, 8), -1.0), torch.full((2, 8), -1.0), t([1, -1]), weights, 0.2, 0.2)
    close(loss, expected)


@pytest.mark.parametrize("estimator, per_token, expectation", [
    # policy (.7, .3), reference (.4, .6): ln(.7/.4) = .5596158, ln(.3/.6) = -.6931472
    ("k1", [0.5596158, -0.6931472], 0.1837869),  # .7 * .5596158 - .3 * .6931472 = .3917310 - .2079442: KL(policy, ref)
    ("k2", [0.1565849, 0.2402265], 0.1816774),   # .5596158**2 / 2, .6931472**2 / 2; .7 * .1565849 + .3 * .2402265
    ("k3", [0.1310444, 0.3068528], 0.1837869),   # 4/7 - 1 + .5596158, 2 - 1 - .6931472; .0917311 + .0920558: KL again
    # trap, the ratio upside down: k3 .191213, k1 -.183787
])  # fmt: skip
def test_kl_estimate_has_the_right_sign_and_orientation(estimator, per_token, expectation):
    policy, reference = t([[0.7, 0.3]]), t([[0.4, 0.6]])
    kl = common.kl_estimate(policy.log(), reference.log(), estimator)
    close(kl, t([per_token]))
    close((policy * kl).sum(), expectation)


@pytest.mark.parametrize("estimator, expected", [
    ("k1", 0.0),         # sum of the gradient of log p, always 0: k1 is no loss
    ("k2", -0.5493061),  # .5 * ln(.5/.9) * .5 - .5 * ln(.5/.1) * .5 = .25 * (-.5877867 - 1.6094379): the true gradient
    ("k3", -0.4),        # (.5 - .9) * .5 - (.5 - .1) * .5: the gradient of KL(ref, policy)
])  # fmt: skip
def test_kl_estimate_expected_gradient(estimator, expected):
    """policy (.5, .5), reference (.9, .1), with respect to logit 0, for which log p moves by +.5 and -.5."""
    logits = torch.zeros(1, 2, requires_grad=True)
    (0.5 * common.kl_estimate(logits.log_softmax(-1), t([[0.9, 0.1]]).log(), estimator)).sum().backward()
    close(logits.grad[0, 0], expected)


def test_k3_of_small_log_ratios_does_not_cancel():
    log_ratio = t([[1e-4, -3e-4, 1e-6, -1e-6]])  # log reference - log policy
    kl = common.kl_estimate(torch.zeros(1, 4), log_ratio, "k3")
    assert (kl >= 0).all()
    close(kl[:, :2], t([[5.0e-9, 4.5e-8]]), rtol=0.05, atol=0)  # x**2 / 2; exp(x) - 1 - x gives 1.7e-8 and 9.8e-9


def test_kl_estimate_works_in_float32():
    # one bfloat16 spacing apart at 2, x = 1/64: x**2 / 2 - x**3 / 6 = 1.220703e-4 - 6.357829e-7 (+ x**4 / 24 = 2.5e-9)
    kl = common.kl_estimate(t([[-2.0]]).bfloat16(), t([[-2.015625]]).bfloat16(), "k3")
    assert kl.dtype == torch.float32
    close(kl, t([[1.214370e-4]]), rtol=1e-3, atol=0)


@pytest.mark.parametrize("estimator, expected", [
    ("k1", -100.0),         # -100 - 0
    ("k2", 5000.0),         # 100**2 / 2
    ("k3", 485165174.41),   # the exponent stops at 20: e**20 - 1 - 20 = 485165195.41 - 21, not inf
])  # fmt: skip
def test_kl_estimate_of_a_huge_log_ratio_is_finite(estimator, expected):
    logprobs = t([[-100.0]]).requires_grad_()
    kl = common.kl_estimate(logprobs, t([[0.0]]), estimator)
    kl.sum().backward()
    close(kl, t([[expected]]))
    assert logprobs.grad.isfinite().all()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("hidden", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_what_a_mask_hides_from_a_kl_gets_no_gradient_and_gives_none(estimator, hidden, side):
    """Log-ratio 0.1 under the mask: slope 1, .1, 1 - e**-.1; a nan or an infinity beside it."""
    logprobs, ref = t([[-1.0, -1.0]]), t([[-1.1, -1.0]])
    (logprobs, ref)[side][0, 1] = hidden
    logprobs.requires_grad_()
    kl = common.kl_estimate(logprobs, ref, estimator)
    common.weighted_sum(kl, t([[1.0, 0.0]])).backward()
    close(logprobs.grad, t([[{"k1": 1.0, "k2": 0.1, "k3": 0.0951626}[estimator], 0.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature, expected", [
    (1.0, [-0.4076060, -2.4076060]),  # -ln(1 + e**-1 + e**-2) = -ln(1.5032147), and 2 less
    (0.5, [-0.1429316, -4.1429316]),  # -ln(1 + e**-2 + e**-4) = -ln(1.1536509), and 4 less
])  # fmt: skip
def test_token_logprobs(temperature, expected, dtype):
    """Logits (2, 1, 0), the tokens 0 and 2: shape (1, 2, 3) becomes (1, 2), float32 whatever came in."""
    logits = t([[[2, 1, 0], [2, 1, 0]]]).to(dtype)
    logprobs = common.token_logprobs(logits, torch.tensor([[0, 2]]), temperature)
    assert logprobs.shape == (1, 2) and logprobs.dtype == torch.float32
    close(logprobs, t([expected]))


def test_token_logprobs_picks_by_row_and_column_and_carries_the_temperature_into_the_gradient():
    # B = 2 rows, T = 1: -ln(1 + e**-2) = -.1269280 for token 0 of (2, 0), and 0 - 1000 for token 1 of (1000, 0)
    close(common.token_logprobs(t([[[2, 0]], [[1000, 0]]]), torch.tensor([[0], [1]])), t([[-0.1269280], [-1000.0]]))
    logits = torch.zeros(1, 1, 2, requires_grad=True)
    common.token_logprobs(logits, torch.tensor([[0]]), 0.5).sum().backward()
    close(logits.grad, t([[[1.0, -1.0]]]))  # (1 - .5) / .5, -.5 / .5


# --- reinforce, rloo ---


@pytest.mark.parametrize("gamma, expected", [
    (1.0, [[6, 5, 3], [3, 2, 0]]),         # 1 + 2 + 3, 2 + 3, 3; 1 + 2, 2
    (0.5, [[2.75, 3.5, 3], [2, 2, 0]]),    # 3; 2 + .5 * 3; 1 + .5 * 3.5; then 2; 1 + .5 * 2
    (0.0, [[1, 2, 3], [1, 2, 0]]),
])  # fmt: skip
@pytest.mark.parametrize("pad", [9.0, *BAD])
def test_rewards_to_go(gamma, expected, pad):
    close(reinforce.rewards_to_go(t([[1, 2, 3], [1, 2, pad]]), t([[1, 1, 1], [1, 1, 0]]), gamma), t(expected))


@pytest.mark.parametrize("hole", [9.0, 0.0, *BAD])
@pytest.mark.parametrize("gamma, expected", [
    (1.0, [[6, 5, 5, 5, 3], [3, 3, 2, 2, 0]]),           # as above, with holes: a tool's tokens pay nothing ...
    (0.5, [[2.75, 3.5, 3.5, 3.5, 3], [2, 2, 2, 2, 0]]),  # ... and cost no discount; trap, .5 ** 3 before 3.5: 1.4375
    (0.0, [[1, 2, 2, 2, 3], [1, 1, 2, 2, 0]]),
])  # fmt: skip
def test_rewards_to_go_pass_over_holes(gamma, expected, hole):
    """In a hole stands what comes next, so that the first column is the return of the row, whoever wrote first."""
    rewards = t([[1, hole, hole, 2, 3], [hole, 1, hole, 2, hole]])
    close(reinforce.rewards_to_go(rewards, t([[1, 0, 0, 1, 1], [0, 1, 0, 1, 0]]), gamma), t(expected))


@pytest.mark.parametrize("script", [reinforce, rloo])
@pytest.mark.parametrize("advantages, loss, grad", [
    # w = .5: -.5 * (1 * (-1 - 2) - 1 * (-3 - 4)) = -.5 * 4; trap: A laid along the tokens (B == T) gives -1
    ([1, -1], -2.0, [[-0.5, -0.5], [0.5, 0.5]]),                # -w * A
    # -.5 * (1 * -1 + 0 * -2 - 1 * -3 + 2 * -4) = -.5 * -6
    ([[1, 0], [-1, 2]], 3.0, [[-0.5, 0.0], [0.5, -1.0]]),
])  # fmt: skip
def test_policy_loss_without_a_ratio(script, advantages, loss, grad):
    got, got_grad, _ = step(script.policy_loss, t([[-1, -2], [-3, -4]]), t(advantages), torch.full((2, 2), 0.5))
    close(got, loss)
    close(got_grad, t(grad))


@pytest.mark.parametrize("rewards, group_size, expected", [
    # 1 - 0/3, 0 - 1/3; the second group sums to 20: 2 - 18/3, 4 - 16/3, 6 - 14/3, 8 - 12/3
    ([1, 0, 0, 0, 2, 4, 6, 8], 4, [1, -1 / 3, -1 / 3, -1 / 3, -4, -4 / 3, 4 / 3, 4]),
    ([1, 1, 0, 0], 2, [0, 0, 0, 0]),   # trap: neighbours are one group; paired 1st with 3rd it would be +-1
    ([1, 1, 1, 0, 0, 0, 0, 0], 8, [5 / 7] * 3 + [-3 / 7] * 5),  # 1 - 2/7, 0 - 3/7
])  # fmt: skip
def test_leave_one_out_advantages(rewards, group_size, expected):
    close(rloo.leave_one_out_advantages(t(rewards), group_size), t(expected))


# --- ppo ---


@pytest.mark.parametrize("rewards, values, gamma, gae_lambda, advantages, returns", [
    # lambda 0 is the TD error, r + next V - V: 0 + .4 - .2, .5 + .6 - .4, 1 - .6
    ([0, 0.5, 1], [0.2, 0.4, 0.6], 1.0, 0.0, [0.2, 0.7, 0.4], [0.4, 1.1, 1.0]),
    ([0, 0.5, 1], [0.2, 0.4, 0.6], 1.0, 0.5, [0.65, 0.9, 0.4], [0.85, 1.3, 1.0]),  # .4; .7 + .5 * .4; .2 + .5 * .9
    # lambda 1 is the rewards to go less V: 1.5 - .2, 1.5 - .4, 1 - .6
    ([0, 0.5, 1], [0.2, 0.4, 0.6], 1.0, 1.0, [1.3, 1.1, 0.4], [1.5, 1.5, 1.0]),
    # TD errors 0 + .5 * .4 - .2 = 0, .5 + .5 * .6 - .4 = .4, .4; then .4 + .25 * .4, 0 + .25 * .5
    ([0, 0.5, 1], [0.2, 0.4, 0.6], 0.5, 0.5, [0.125, 0.5, 0.4], [0.325, 0.9, 1.0]),
    # .9 * .5 + .81 * 1 - .2 = 1.06, .5 + .9 * 1 - .4 = 1, 1 - .6
    ([0, 0.5, 1], [0.2, 0.4, 0.6], 0.9, 1.0, [1.06, 1.0, 0.4], [1.26, 1.4, 1.0]),
    # log p (-1, -2), reference (-1.5, -1), coefficient .1: r = -.1 * .5 and 1 - .1 * -1; .7; .15 + .95 * .7
    ([-0.05, 1.1], [0.2, 0.4], 1.0, 0.95, [0.815, 0.7], [1.015, 1.1]),
    ([0, 1], [0.5, 0.5], 1.0, 0.95, [0.475, 0.5], [0.975, 1.0]),  # .95 * .5; trap, a state after the stop: .4655, .49
    ([0, 1], [0.3, 0.4], 1.0, 1.0, [0.7, 0.6], [1.0, 1.0]),       # 1 - .3, 1 - .4
    ([0.0], [0.5], 1.0, 0.95, [-0.5], [0.0]),                     # one token: 0 - .5
])  # fmt: skip
def test_gae(rewards, values, gamma, gae_lambda, advantages, returns):
    got = ppo.gae(t([rewards]), t([values]), torch.ones(1, len(values)), gamma, gae_lambda)
    close(got[0], t([advantages]))
    close(got[1], t([returns]))


@pytest.mark.parametrize("pad", [9.0, *BAD])
def test_gae_ends_at_the_last_completion_token(pad):
    """gamma 1, lambda .95, reward 1 on the last real token; the second row fills the width, the third is empty."""
    values = t([[0.5, 0.6, 0.7, pad, pad], [0.5, 0.6, 0.7, 0.8, 0.9], [pad] * 5])
    rewards = t([[0, 0, 1, pad, pad], [0, 0, 0, 0, 1], [pad] * 5])
    advantages, returns = ppo.gae(rewards, values, t([[1, 1, 1, 0, 0], [1] * 5, [0] * 5]), 1.0, 0.95)
    # row 1: 1 - .7 = .3; .1 + .95 * .3 = .385; .1 + .95 * .385 = .46575. Returns: each plus its V
    # row 2: 1 - .9 = .1; .1 + .95 * .1 = .195; .1 + .95 * .195 = .28525; .1 + .95 * .28525 = .3709875; .4524381
    close(advantages, t([[0.46575, 0.385, 0.3, 0, 0], [0.4524381, 0.3709875, 0.28525, 0.195, 0.1], [0] * 5]))
    close(returns, t([[0.96575, 0.985, 1.0, 0, 0], [0.9524381, 0.9709875, 0.98525, 0.995, 1.0], [0] * 5]))


@pytest.mark.parametrize("hole", [9.0, 0.0, *BAD])
@pytest.mark.parametrize("mask, values, rewards, gamma, gae_lambda, advantages, returns", [
    # 1 - .5; 0 + .5 - .5 + .5 * .5; 0 + .5 * .25. Trap, a hole as a value of 0: .5, (.75), -.5 + .375, -.0625
    ([1, 1, 0, 1], [0.5, 0.5, None, 0.5], [0, 0, None, 1], 1.0, 0.5, [0.125, 0.25, 0, 0.5], [0.625, 0.75, 0, 1.0]),
    # test_gae's (.2, .4, .6) with gamma and lambda .5, cut in two ways: no discount for what a tool has written
    ([1, 0, 0, 1, 1], [0.2, None, None, 0.4, 0.6], [0, None, None, 0.5, 1], 0.5, 0.5,
     [0.125, 0, 0, 0.5, 0.4], [0.325, 0, 0, 0.9, 1.0]),
    ([0, 1, 0, 1, 0, 1, 0], [None, 0.2, None, 0.4, None, 0.6, None], [None, 0, None, 0.5, None, 1, None], 0.5, 0.5,
     [0, 0.125, 0, 0.5, 0, 0.4, 0], [0, 0.325, 0, 0.9, 0, 1.0, 0]),
    ([0, 0, 0], [None] * 3, [None] * 3, 0.5, 0.5, [0, 0, 0], [0, 0, 0]),
])  # fmt: skip
def test_gae_passes_over_holes(mask, values, rewards, gamma, gae_lambda, advantages, returns, hole):
    """What stands in a hole may be anything."""
    values, rewards = (t([[hole if x is None else x for x in row]]) for row in (values, rewards))
    got = ppo.gae(rewards, values, t([mask]), gamma, gae_lambda)
    close(got[0], t([advantages]))
    close(got[1], t([returns]))


@pytest.mark.parametrize("x, mask, shifted, unshifted", [
    # mean 1, sample variance (1 + 1) / 1 = 2: +-1 / 1.4142136; trap, population variance: +-1
    ([[2, 0, 9, math.nan]], [[1, 1, 0, 0]], [[0.7071068, -0.7071068, 0, 0]], [[1.7071068, 0.2928932, 0, 0]]),
    ([[0, 4]], [[1, 1]], [[-0.7071068, 0.7071068]], [[1.2928932, 2.7071068]]),  # mean 2, variance 8: +-2 / 2.8284271
    # mean 2, variance (1 + 0 + 1) / 2 = 1, over both rows at once
    ([[1, 2], [3, math.inf]], [[1, 1], [1, 0]], [[-1, 0], [1, 0]], [[1, 2], [3, 0]]),
    # mean 1e-4, variance 2e-8, so 1e-4 / sqrt(2e-8 + 1e-8) = 1 / 1.7320508: the 1e-8 stands under the root
    ([[0, 2e-4]], [[1, 1]], [[-0.5773503, 0.5773503]], [[-0.5772503, 0.5774503]]),
    ([[3, 3, 3]], [[1, 1, 1]], [[0, 0, 0]], [[3, 3, 3]]),  # 0 / sqrt(1e-8)
])  # fmt: skip
def test_whiten(x, mask, shifted, unshifted):
    close(ppo.whiten(t(x), t(mask)), t(shifted))
    close(ppo.whiten(t(x), t(mask), shift_mean=False), t(unshifted))


@pytest.mark.parametrize("value, old, target, loss, grad, clipped", [  # clip .2; clipped: does the clipped error win?
    (1.0, 0.0, 1.5, 0.845, 0.0, 1),    # max(.5**2 = .25, (.2 - 1.5)**2 = 1.69) / 2; trap: with min .125
    (0.125, 0.0, 1.5, 0.9453125, -1.375, 0),  # inside the clip: 1.375**2 / 2 = 1.890625 / 2; .125 - 1.5
    (1.0, 0.0, 0.1, 0.405, 0.9, 0),    # max(.9**2 = .81, (.2 - .1)**2 = .01) / 2; 1 - .1
    (-1.0, 0.0, 0.5, 1.125, -1.5, 0),  # max(1.5**2 = 2.25, (-.2 - .5)**2 = .49) / 2; -1 - .5
    (-1.0, 0.0, -1.5, 0.845, 0.0, 1),  # max(.5**2 = .25, (-.2 + 1.5)**2 = 1.69) / 2
])  # fmt: skip
def test_value_loss_of_one_token(value, old, target, loss, grad, clipped):
    got, got_grad, stats = step(ppo.value_loss, t([[value]]), t([[old]]), t([[target]]), t([[1.0]]), 0.2)
    close(got, loss)
    close(got_grad, t([[grad]]))
    close(stats["value_clip_fraction"], clipped)


def test_value_loss_is_a_weighted_sum():
    # the first four cases as rows (1, 2) and (3, 4); w = .25, .25, .5 and 0 on a pad that holds case 4
    values, old, returns = t([[1.0, 0.125], [1.0, -1.0]]), torch.zeros(2, 2), t([[1.5, 1.5], [0.1, 0.5]])
    loss, grad, stats = step(ppo.value_loss, values, old, returns, t([[0.25, 0.25], [0.5, 0]]), 0.2)
    close(loss, 0.650078125)  # .25 * .845 + .25 * .9453125 + .5 * .405 = .21125 + .236328125 + .2025
    close(grad, t([[0, -0.34375], [0.45, 0]]))  # .25 * -1.375, .5 * .9
    close(stats["value_clip_fraction"], 0.25)  # the w of case 1


@CLIPPED
@pytest.mark.parametrize("ratio, advantage, loss, grad, clipped", [
    # clip to [.8, 1.28]: loss -min(ratio * A, clipped ratio * A); gradient -ratio * A, or 0 where the clipped one wins
    (0.5, 2, -1.0, -1.0, 0),   # min(1, 1.6): below the floor but A > 0, still pulled up
    (0.9, 2, -1.8, -1.8, 0),
    (1.1, 2, -2.2, -2.2, 0),
    (1.5, 2, -2.56, 0.0, 1),   # min(3, 2.56)
    (0.5, -2, 1.6, 0.0, 1),    # -min(-1, -1.6)
    (0.9, -2, 1.8, 1.8, 0),
    (1.1, -2, 2.2, 2.2, 0),
    (1.5, -2, 3.0, 3.0, 0),    # -min(-3, -2.56): above the cap but A < 0, still pushed down; trap, a bare clamp: 2.56
    (5.0, -2, 10.0, 10.0, 0),  # no second clip on this side
    (1.5, 0, 0.0, 0.0, 0),
])  # fmt: skip
def test_clipped_policy_loss_of_one_token(script, ratio, advantage, loss, grad, clipped):
    logprobs, old_logprobs = moved([[ratio]])
    got, got_grad, stats = step(script.policy_loss, logprobs, old_logprobs, t([advantage]), t([[1.0]]), 0.2, 0.28)
    close(got, loss)
    close(got_grad, t([[grad]]))
    close(stats["clip_fraction"], clipped)
    close(stats["ratio_mean"], ratio)


@CLIPPED
@pytest.mark.parametrize("advantages", [[2.0, -1.0], [[2.0, 2.0, 2.0], [-1.0, math.nan, math.inf]]])
def test_clipped_policy_loss_of_ragged_rows(script, advantages):
    """Lengths 3 and 1, so that w is 1/2 * 1/3 and 1/2; both clips .2."""
    logprobs, old_logprobs = moved([[1.5, 1.0, 0.5], [0.5, 7.0, math.nan]])
    weights = t([[1 / 6] * 3, [1 / 2, 0, 0]])
    loss, grad, stats = step(script.policy_loss, logprobs, old_logprobs, t(advantages), weights, 0.2, 0.2)
    close(loss, -0.5)  # -2 * (1.2 + 1 + .5) / 6 + 1 * .8 / 2 = -.9 + .4
    close(grad, t([[0, -1 / 3, -1 / 6], [0, 0, 0]]))  # clipped; -2 * 1 / 6; -2 * .5 / 6; clipped
    # 1/6 + 1/2: not the .5 of row 1, where A > 0, nor the 7 on a pad. Trap, blind to the sign: 1/6 + 1/6 + 1/2
    close(stats["clip_fraction"], 2 / 3)
    close(stats["ratio_mean"], 0.75)  # (1.5 + 1 + .5) / 6 + .5 / 2


# --- grpo, gspo, cispo ---


@GROUPED
@pytest.mark.parametrize("rewards, group_size, scaled, centred", [
    # mean .25, sample variance (.5625 + 3 * .0625) / 3 = .25: .75 / .5001, -.25 / .5001; trap, population std: 1.732
    ([1, 0, 0, 0], 4, [1.4997001] + [-0.4999000] * 3, [0.75] + [-0.25] * 3),
    # mean .5, sample variance .25 + .25 = .5: +-.5 / .7072068; trap: neighbours are a group, so the first four are 0
    ([1, 1, 0, 0, 1, 0], 2, [0, 0, 0, 0, 0.7070068, -0.7070068], [0, 0, 0, 0, 0.5, -0.5]),
    # mean .375, variance (3 * .390625 + 5 * .140625) / 7 = .2678571, std .5175492: .625 / .5176492, -.375 / .5176492
    # mean 5.5, variance (7 * .25 + 12.25) / 7 = 2, std 1.4142136: -.5 / 1.4143136, 3.5 / 1.4143136
    ([1, 1, 1, 0, 0, 0, 0, 0, 5, 5, 5, 5, 5, 5, 5, 9], 8,
     [1.2073814] * 3 + [-0.7244288] * 5 + [-0.3535284] * 7 + [2.4746986],
     [0.625] * 3 + [-0.375] * 5 + [-0.5] * 7 + [3.5]),
])  # fmt: skip
def test_group_advantages(script, rewards, group_size, scaled, centred):
    close(script.group_advantages(t(rewards), group_size), t(scaled))
    close(script.group_advantages(t(rewards), group_size, scale_by_std=False), t(centred))


@GROUPED
@pytest.mark.parametrize("scale_by_std", [True, False])
@pytest.mark.parametrize("reward", [0.9, 0.1, -3.3, 0.0, 1e6 + 0.1])
def test_group_of_equal_rewards_has_no_signal(script, scale_by_std, reward):
    # trap: the float32 mean of six times .9 is off by 6e-8, and dividing that leaves -.0006 instead of 0
    advantages = script.group_advantages(t([reward] * 6 + [0, 0, 0, 0, 0, 1]), 6, scale_by_std)
    assert (advantages[:6] == 0).all() and (advantages[6:] != 0).all()


GROUPED = [rloo.leave_one_out_advantages, grpo.group_advantages, gspo.group_advantages, cispo.group_advantages]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("nearly", [0.7 - 0.4, 0.1 + 0.2, 3 * 0.1])  # .3, but for a unit of rounding or two
def test_rewards_that_rounding_alone_tells_apart_are_equal(nearly, dtype):
    def column(*rewards):  # each number is rounded to the dtype before it is added to another
        return torch.stack([torch.tensor(x, dtype=dtype) for x in rewards])

    rewards = column(0.3, 0.3, 0.3, nearly)
    if nearly == 0.7 - 0.4:
        rewards[3] = torch.tensor(0.7, dtype=dtype) - torch.tensor(0.4, dtype=dtype)
    assert (common.normalize(rewards) == 0).all() and common.no_signal(rewards, 4).all()
    for function in GROUPED:
        assert (function(rewards, 4) == 0).all()
    apart = column(1000.0, 1000.01, 1000.0, 1000.0)  # a hundredth in a thousand is no rounding
    assert not common.no_signal(apart, 4).any() and (grpo.group_advantages(apart, 4) != 0).all()


@pytest.mark.parametrize("function", GROUPED)
def test_group_of_one_is_refused(function):
    with pytest.raises(ValueError):
        function(t([0.7, 0.1]), 1)


@pytest.mark.parametrize("log_ratios, ratio, grad", [
    # A = 1. s = e**((.1 + .3) / 2) = e**.2, each token gets -s / 2; traps: the sum e**.4 = 1.4918, no 1/2 -1.2214
    ([0.1, 0.3], 1.2214028, -0.6107014),
    ([0.01] * 500, 1.0100502, -0.0020201),  # e**.01, -s / 500; trap: the sum e**5 = 148.4
])  # fmt: skip
def test_gspo_ratio_of_a_sequence(log_ratios, ratio, grad):
    logprobs, weights = t([log_ratios]), torch.full((1, len(log_ratios)), 1 / len(log_ratios))
    loss, got_grad, stats = step(gspo.policy_loss, logprobs, torch.zeros_like(logprobs), t([1.0]), weights, 0.5, 0.5)
    close(loss, -ratio)
    close(got_grad, t([[grad] * len(log_ratios)]))
    close(stats["ratio_mean"], ratio)
    close(stats["clip_fraction"], 0.0)


@pytest.mark.parametrize("advantages", [[1.0, -1.0], [[1.0, 1.0, math.nan, 5.0], [-1.0, -1.0, -1.0, -1.0]]])
def test_gspo_of_ragged_rows(advantages):
    """s = e**((.2 + .4) / 2) = e**.3 = 1.3498588, and e**-.1 = .9048374; both clips .2."""
    log_ratios, mask = t([[0.2, 0.4, 5.0, 5.0], [-0.1] * 4]), t([[1, 1, 0, 0], [1, 1, 1, 1]])
    weights = common.loss_weights(mask, "sequence")
    loss, grad, stats = step(gspo.policy_loss, log_ratios, torch.zeros(2, 4), t(advantages), weights, 0.2, 0.2)
    close(loss, -0.1475813)  # (-1.2 + .9048374) / 2
    close(grad, t([[0] * 4, [0.1131047] * 4]))  # the first row is clipped; .9048374 / (4 * 2)
    close(stats["clip_fraction"], 0.5)  # one of two sequences
    close(stats["ratio_mean"], 1.1273481)  # (1.3498588 + .9048374) / 2


def test_gspo_of_as_many_rows_as_tokens():
    """As above, and s = e**((.1 - .1 + 0) / 3) = 1 and e**.05 = 1.0512711 with A = +2 and -2; w is 1/4 of 1/length."""
    log_ratios = t([[0.2, 0.4, 5.0, 5.0], [-0.1] * 4, [0.1, -0.1, 0.0, 5.0], [0.05, 5.0, 5.0, 5.0]])
    weights = common.loss_weights(t([[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0]]), "sequence")
    loss, grad, stats = step(gspo.policy_loss, log_ratios, torch.zeros(4, 4), t([1, -1, 2, -2]), weights, 0.2, 0.2)
    close(loss, -0.0481551)  # (-1.2 + .9048374 - 2 + 2.1025422) / 4 = -.1926204 / 4
    # 0; .9048374 / 16; -2 / 12; 2.1025422 / 4
    close(grad, t([[0] * 4, [0.0565523] * 4, [-1 / 6] * 3 + [0], [0.5256355, 0, 0, 0]]))
    close(stats["clip_fraction"], 0.25)
    close(stats["ratio_mean"], 1.0764918)  # (1.3498588 + .9048374 + 1 + 1.0512711) / 4 = 4.3059673 / 4


@pytest.mark.parametrize("log_ratio, advantage, loss, grad, clipped", [
    # clip to [.8, 1.28], one sequence of two tokens whose ratio is e**log_ratio; gradient per token -s * A / 2 or 0
    (math.log(0.5), 2, -1.0, -0.5, 0),
    (math.log(1.5), 2, -2.56, 0.0, 1),   # 1.28 * 2
    (math.log(0.5), -2, 1.6, 0.0, 1),    # .8 * 2
    (math.log(1.5), -2, 3.0, 1.5, 0),
])  # fmt: skip
def test_gspo_clips_whole_sequences(log_ratio, advantage, loss, grad, clipped):
    logprobs, weights = t([[log_ratio + 1, log_ratio - 1]]), t([[0.5, 0.5]])  # only the mean of the two counts
    got, got_grad, stats = step(gspo.policy_loss, logprobs, torch.zeros(1, 2), t([advantage]), weights, 0.2, 0.28)
    close(got, loss)
    close(got_grad, t([[grad, grad]]))
    close(stats["clip_fraction"], clipped)


@pytest.mark.parametrize("ratio, advantage, clip_low, clip_high, weight, clipped", [
    (1.0, 1, 1.0, 0.28, 1.0, 0),
    (2.0, 1, 1.0, 0.28, 1.28, 1),   # 1 + .28; trap: the clipped surrogate and an undetached weight give gradient 0
    (2.0, -1, 1.0, 0.28, 1.28, 1),  # capped for either sign
    (0.1, 1, 1.0, 0.28, 0.1, 0),    # clip_low 1 is no floor
    (0.1, 1, 0.2, 0.28, 0.8, 1),    # 1 - .2
    (0.1, -1, 0.2, 0.28, 0.8, 1),
    (4.5, 1, 1.0, 4.0, 4.5, 0),     # 1 + 4 = 5 is the cap
    (6.0, 1, 1.0, 4.0, 5.0, 1),
])  # fmt: skip
def test_cispo_weight(ratio, advantage, clip_low, clip_high, weight, clipped):
    """At log p = -1 the loss is -weight * A * -1 and its gradient -weight * A: never 0 from clipping."""
    logprobs, old_logprobs, weights = t([[-1.0]]), t([[-1 - math.log(ratio)]]), t([[1.0]])
    loss, grad, stats = step(cispo.policy_loss, logprobs, old_logprobs, t([advantage]), weights, clip_low, clip_high)
    close(loss, weight * advantage)
    close(grad, t([[-weight * advantage]]))
    close(stats["clip_fraction"], clipped)
    close(stats["ratio_mean"], ratio)


def test_cispo_of_two_rows():
    """Ratios 1.5 (old -1 - .4054651) and .5 (old -1 + .6931472), A = +1 and -1, a token mean, a pad behind each."""
    logprobs, old_logprobs = t([[-1, 3], [-1, 3]]), t([[-1.4054651, 0], [-0.3068528, 0]])
    weights = t([[0.5, 0], [0.5, 0]])
    loss, grad, stats = step(cispo.policy_loss, logprobs, old_logprobs, t([1, -1]), weights, 1.0, 0.28)
    close(loss, 0.39)  # -.5 * 1.28 * 1 * -1 - .5 * .5 * -1 * -1 = .64 - .25
    close(grad, t([[-0.64, 0], [0.25, 0]]))  # -.5 * 1.28, .5 * .5
    close(stats["clip_fraction"], 0.5)
    close(stats["ratio_mean"], 1.0)  # (1.5 + .5) / 2


# --- all of them ---

# w is 1/4 of 1/length; 7 stands on pads
WEIGHTS = t([[1 / 12] * 3, [1 / 4, 0, 0], [1 / 8, 1 / 8, 0], [0, 0, 0]])
LOGPROBS = t([[-1.0, -2.0, -0.5], [-0.7, 7, 7], [-1.2, -0.1, 7], [7, 7, 7]])
OLD_LOGPROBS = t([[-1.1, -1.5, -0.9], [-1.3, 7, 7], [-1.0, -0.4, 7], [7, 7, 7]])
ADVANTAGES = t([[1.0, 1.0, 1.0], [-2.0, 7, 7], [0.5, 0.5, 7], [7, 7, 7]])
PLAIN = {"logprobs": LOGPROBS, "advantages": ADVANTAGES, "weights": WEIGHTS}
OLD = {"logprobs": LOGPROBS, "old_logprobs": OLD_LOGPROBS}
RATIO = OLD | {"advantages": ADVANTAGES, "weights": WEIGHTS, "clip_low": 0.2, "clip_high": 0.2}
VALUE = {"values": LOGPROBS, "old_values": OLD_LOGPROBS, "returns": ADVANTAGES, "weights": WEIGHTS, "clip": 0.2}
KL = {"logprobs": LOGPROBS, "ref_logprobs": OLD_LOGPROBS}
# fmt: off
LOSSES = {
    "reinforce": (reinforce.policy_loss, PLAIN), "rloo": (rloo.policy_loss, PLAIN),
    "ppo": (ppo.policy_loss, RATIO), "grpo": (grpo.policy_loss, RATIO),
    "gspo": (gspo.policy_loss, RATIO), "cispo": (cispo.policy_loss, RATIO),
    "value": (ppo.value_loss, VALUE),
}
# fmt: on
MASKED = {
    "masked_mean": (common.masked_mean, {"x": LOGPROBS, "mask": MASK}),
    "masked_mean_of_rows": (common.masked_mean, {"x": LOGPROBS, "mask": MASK, "dim": 1}),
    "rewards_to_go": (reinforce.rewards_to_go, {"rewards": ADVANTAGES, "mask": MASK, "gamma": 0.9}),
    "gae": (ppo.gae, {"rewards": ADVANTAGES, "values": LOGPROBS, "mask": MASK, "gamma": 0.9, "gae_lambda": 0.8}),
    "whiten": (ppo.whiten, {"x": ADVANTAGES, "mask": MASK}),
    "whiten_rewards": (ppo.whiten, {"x": ADVANTAGES, "mask": MASK, "shift_mean": False}),
}
OTHERS = {
    **{f"kl_{kind}": (common.kl_estimate, {**KL, "estimator": kind}) for kind in ("k1", "k2", "k3")},
    "token_logprobs": (
        common.token_logprobs,
        {"logits": LOGPROBS[None], "ids": torch.tensor([[0, 1, 2, 0]]), "temperature": 0.5},
    ),
    "leave_one_out": (rloo.leave_one_out_advantages, {"rewards": t([1, 0, 2, 2]), "group_size": 2}),
    **{
        f"loss_weights_{how}": (common.loss_weights, {"mask": MASK, "aggregation": how, "max_new_tokens": 8})
        for how in AGGREGATIONS
    },
    **{
        f"group_advantages_{script.__name__}": (script.group_advantages, {"rewards": t([1, 0, 2, 2]), "group_size": 2})
        for script in (grpo, gspo, cispo)
    },
}
SPOILED = [
    (name, key)
    for name, (_, args) in {**LOSSES, **MASKED}.items()
    for key, value in args.items()
    if torch.is_tensor(value) and key not in ("mask", "weights")
]


def flat(result):
    """All numbers a function gives back, stats included, as a list of tensors."""
    if isinstance(result, dict):
        return [x for key in sorted(result) for x in flat(result[key])]
    return [x for part in result for x in flat(part)] if isinstance(result, tuple) else [torch.as_tensor(result)]


def outcome(function, args, leaves):
    """The numbers given back, and the gradient of their sum with respect to each of the leaves."""
    args = {**args, **{key: args[key].clone().requires_grad_() for key in leaves}}
    results = flat(function(**args))
    total = sum(x.sum() for x in results if x.requires_grad)
    if torch.is_tensor(total):
        total.backward()
    return [x.detach() for x in results], [args[key].grad for key in leaves if args[key].grad is not None]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("name, key", SPOILED)
def test_what_stands_under_the_mask_reaches_no_value_and_no_gradient(name, key, holes, bad):
    mask, (function, args) = MASK, {**LOSSES, **MASKED}[name]
    if holes:  # in the middle of row 1, and before row 3
        mask = t([[1, 0, 1], [1, 0, 0], [0, 1, 0], [0, 0, 0]])
        args = args | ({"mask": mask} if "mask" in args else {"weights": args["weights"] * mask})
    leaves = [k for k, v in args.items() if torch.is_tensor(v) and k not in ("mask", "weights")]
    clean, clean_grads = outcome(function, args, leaves)
    spoiled, spoiled_grads = outcome(function, {**args, key: args[key].masked_fill(mask == 0, bad)}, leaves)
    assert all(x.isfinite().all() for x in clean + clean_grads) and len(clean_grads) == len(spoiled_grads)
    for one, other in zip(clean + clean_grads, spoiled + spoiled_grads, strict=True):
        assert torch.equal(one, other)
    for grad in spoiled_grads:
        assert (grad[mask == 0] == 0).all()


@pytest.mark.parametrize("name", [*LOSSES, *MASKED, *OTHERS])
def test_no_function_edits_its_inputs(name):
    function, args = {**LOSSES, **MASKED, **OTHERS}[name]
    given = {key: value.clone() if torch.is_tensor(value) else value for key, value in args.items()}
    function(**given)
    for key, value in args.items():
        if torch.is_tensor(value):
            assert torch.equal(given[key], value), key


@pytest.mark.parametrize("split", [[1, 1, 1, 1], [1, 3], [3, 1]])
@pytest.mark.parametrize("advantage_shape", ["(B,)", "(B, T)"])
@pytest.mark.parametrize("name", LOSSES)
def test_microbatches_add_up_to_the_minibatch(name, advantage_shape, split):
    function, args = LOSSES[name]
    if advantage_shape == "(B,)" and "advantages" in args:
        args = {**args, "advantages": ADVANTAGES[:, 0]}
    first, *others = args.values()
    whole_loss, whole_grad, whole_stats = step(function, first, *others)
    parts, start = [], 0
    for size in split:
        rows = slice(start, start := start + size)
        parts.append(step(function, first[rows], *[x[rows] if torch.is_tensor(x) else x for x in others]))
    close(sum(loss for loss, _, _ in parts), whole_loss)
    close(torch.cat([grad for _, grad, _ in parts]), whole_grad)
    for key, value in whole_stats.items():
        close(sum(stats[key] for _, _, stats in parts), value)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "value"])
@pytest.mark.parametrize("advantages", [[1.0, -1.0], [[1.0, 1.0], [-1.0, -1.0]]])
def test_at_ratio_one_all_six_have_the_same_gradient(name, advantages):
    """-w * A with w = 1/4. Trap: B == T, where advantages of shape (B,) laid along the tokens pass unnoticed."""
    function, args = LOSSES[name]
    logprobs = t([[-1, -2], [-3, -4]])
    old = [logprobs] if args is RATIO else []
    clip = [0.2, 0.2] if args is RATIO else []
    loss, grad, stats = step(function, logprobs, *old, t(advantages), torch.full((2, 2), 0.25), *clip)
    close(grad, t([[-0.25, -0.25], [0.25, 0.25]]))
    if args is RATIO:
        close(stats["ratio_mean"], 1.0)
        close(stats["clip_fraction"], 0.0)
        close(loss, -1.0 if name == "cispo" else 0.0)  # -(1 * -3 - 1 * -7) / 4 for cispo; -(2 - 2) / 4


@pytest.mark.parametrize("name", LOSSES)
def test_only_the_trained_tensor_gets_a_gradient_and_stats_get_none(name):
    function, args = LOSSES[name]
    trained, *fixed = [key for key, value in args.items() if torch.is_tensor(value) and key != "weights"]
    given = {**args, **{key: args[key].clone().requires_grad_() for key in [trained, *fixed]}}
    loss, stats = function(**given)
    assert loss.shape == () and loss.dtype == torch.float32
    assert all(isinstance(x, float) or (x.shape == () and not x.requires_grad) for x in stats.values())
    loss.backward()
    assert given[trained].grad.abs().sum() > 0
    for key in fixed:  # trap: advantages and returns made with live values would let this loss move the value model
        assert given[key].grad is None or (given[key].grad == 0).all(), key


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
@pytest.mark.parametrize("name", MASKED)
def test_a_mask_may_be_of_any_type(name, dtype):
    function, args = MASKED[name]
    typed = function(**{**args, "mask": MASK.to(dtype)})
    for one, other in zip(flat(function(**args)), flat(typed), strict=True):
        close(one, other)
