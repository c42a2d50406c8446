"""Every formula a second time, in Python floats from the papers' definitions, against the shipped functions.

An oracle sees ragged rows (lists of lists) and knows of no padding and no holes. The function gets the same rows padded
to (B, T), for half of the seeds with holes in between, for every other with NaN, inf or garbage where the mask is 0.
All is float64 and agrees to 1e-10; the gradients of losses are worked out by hand in the oracles (and checked against
the slopes of the oracles' own values), those of advantages are central differences, to 1e-6.
"""

import math
import random
from functools import partial
from statistics import fmean, pvariance, stdev, variance

import pytest
import torch

import cispo
import common
import grpo
import gspo
import ppo
import reinforce
import rloo

SEEDS = range(50)
SWEEP = pytest.mark.parametrize("seed", SEEDS)
CLAMP = 20.0  # the one thing not in the papers: exponents of ratios and of k3 stop here, so that nothing overflows
tensor = partial(torch.as_tensor, dtype=torch.float64)
each = partial(zip, strict=True)


def flat(rows):
    return [x for row in rows for x in row]


class Batch:
    """Random ragged rows and their padded tensors, in which the numbers of a row stand at its places.

    The first shapes are the extremes: one token, T = 1, one row, empty rows alone.
    """

    def __init__(self, seed, rows=None):
        self.rng = random.Random(seed)
        pick = self.rng.randint
        shapes = {0: (1, 1), 1: (6, 1), 2: (1, 9), 3: (2, 3)}
        self.B, T = (rows, 1) if rows else shapes[seed] if seed in shapes else (pick(1, 7), pick(1, 10))
        self.T, full, empty = T, rows or seed in (0, 2), seed == 3
        self.lengths = [T if full else 0 if empty else self.rng.choice([0, T, pick(0, T)]) for _ in range(self.B)]
        self.places = [[*range(n)] for n in self.lengths]
        if seed % 4 > 1 and seed not in shapes and not rows:  # with holes
            self.T, scattered = T + 4, random.Random(f"places {seed}")
            self.places = [sorted(scattered.sample(range(self.T), n)) for n in self.lengths]
        self.junk = [math.nan, math.inf, -math.inf, 1e300, -7.0] if seed % 2 else [0.0]
        self.mask = self.pad([[1.0] * n for n in self.lengths], [0.0])

    def rows(self, scale=1.0, shift=0.0):
        return [[self.rng.gauss(shift, scale) for _ in range(n)] for n in self.lengths]

    def pad(self, rows, junk=None):
        padded = []
        for places, row in each(self.places, rows):
            own = dict(each(places, row))
            padded.append([own[t] if t in own else self.rng.choice(junk or self.junk) for t in range(self.T)])
        return tensor(padded)

    def own(self, x):
        """With 0 where no number of a row stands: of some functions nobody reads what they give there."""
        return x.masked_fill(self.mask == 0, 0.0)

    def same(self, actual, expected, tolerance=1e-10):
        """Where ragged rows are expected, nothing but 0 is outside the mask."""
        if isinstance(expected, list) and isinstance(expected[0], list):
            assert actual.shape == self.mask.shape and (actual[self.mask == 0] == 0).all()
            expected = self.pad(expected, [0.0])
        actual = actual.detach() if torch.is_tensor(actual) else tensor(actual)
        torch.testing.assert_close(actual, tensor(expected), rtol=tolerance, atol=tolerance)


def slopes(value, rows, h=1e-5):
    """Central differences of value() with respect to every number in rows."""

    def slope(row, t):
        x, ends = row[t], []
        for row[t] in (x + h, x - h):
            ends.append(value())
        row[t] = x
        return (ends[0] - ends[1]) / (2 * h)

    return [[slope(row, t) for t in range(len(row))] for row in rows]


# --- losses: an oracle takes a row and gives for each of its tokens (loss, gradient, *stats), before the weights ---


def plain(logprobs, advantages):
    """Williams 1992."""
    return [(-A * lp, -A) for lp, A in each(logprobs, advantages)]


def surrogate(ratio, slope, A, low, high):
    """min(ratio A, clip(ratio) A), by its two dead zones (1707.06347, fig. 1): flat where A pushes the ratio out."""
    if (A > 0 and ratio > 1 + high) or (A < 0 and ratio < 1 - low):
        return -(1 + high if A > 0 else 1 - low) * A, 0.0, 1.0, ratio
    return -ratio * A, -slope * A, 0.0, ratio


def per_token(logprobs, old, advantages, low, high):
    """1707.06347, eq. 7. A clamped ratio is a constant."""
    ratios = [math.exp(min(lp - o, CLAMP)) for lp, o in each(logprobs, old)]
    return [surrogate(r, r if r < math.exp(CLAMP) else 0.0, A, low, high) for r, A in each(ratios, advantages)]


def per_sequence(logprobs, old, advantages, low, high):
    """2507.18071, eq. 5 to 7, d s / d logprobs_t = s / length; the loss sums length tokens.

    A clamped s keeps its slope (eq. 14 detaches it).
    """
    s = math.exp(min((sum(logprobs) - sum(old)) / max(1, len(old)), CLAMP))
    return [surrogate(s, s, A, low, high) for A in advantages]


def capped_weight(logprobs, old, advantages, low, high):
    """2506.13585, eq. 4 and 5: sg(clip(ratio)) A log p; no token is without gradient."""
    ratios = [math.exp(min(lp - o, CLAMP)) for lp, o in each(logprobs, old)]
    weights = [1 + high if r > 1 + high else max(r, 1 - low) for r in ratios]
    tokens = each(weights, ratios, logprobs, advantages)
    return [(-w * A * lp, -w * A, float(w != r), r) for w, r, lp, A in tokens]


def squared_error(values, old, returns, clip):
    """The larger of two errors: where V went beyond the clip and towards R, that of the clip's edge, which is flat."""
    edges = [o + math.copysign(clip, V - o) for V, o in each(values, old)]
    stuck = [abs(V - o) > clip and abs(e - R) > abs(V - R) for V, o, e, R in each(values, old, edges, returns)]
    tokens = each(stuck, edges, values, returns)
    return [((e - R) ** 2 / 2, 0.0, 1.0) if s else ((V - R) ** 2 / 2, V - R, 0.0) for s, e, V, R in tokens]


RATIO = ("clip_fraction", "ratio_mean")
LOSSES = {
    "reinforce": (reinforce.policy_loss, plain, ()), "rloo": (rloo.policy_loss, plain, ()),
    "ppo": (ppo.policy_loss, per_token, RATIO), "grpo": (grpo.policy_loss, per_token, RATIO),
    "gspo": (gspo.policy_loss, per_sequence, RATIO), "cispo": (cispo.policy_loss, capped_weight, RATIO),
    "value": (ppo.value_loss, squared_error, ("value_clip_fraction",)),
}  # fmt: skip


def draw(batch, name, wild=True):
    """Rows: current, old (ratios on both sides of the clips and, if wild, the clamp), advantages or returns; clips."""
    current, last = batch.rows(1.0, -1.5), batch.rows()
    far = [batch.rng.choice([0.0, 0.0, 0.3, -0.3] + wild * [CLAMP, 60.0, -60.0]) for _ in current]
    old = [[x - batch.rng.gauss(d, 0.3) for x in row] for row, d in each(current, far)]
    clips = batch.rng.choice([(0.2, 0.2), (0.2, 0.28), (0.1, 0.5), (3e-4, 4e-4), (1.0, 4.0)])
    if LOSSES[name][1] is plain:
        return [current, last], ()
    return [current, old, last], clips[:1] if name == "value" else clips


def answer(name, rows, weights, clips):
    """Loss, gradient and stats."""
    _, oracle, names = LOSSES[name]
    found = [each(ws, oracle(*row, *clips)) for ws, *row in each(weights, *rows)]
    tokens = [[[w * x for x in token] for w, token in row] for row in found]
    stats = {key: math.fsum(token[i] for token in flat(tokens)) for i, key in enumerate(names, 2)}
    return math.fsum(token[0] for token in flat(tokens)), [[token[1] for token in row] for row in tokens], stats


@SWEEP
@pytest.mark.parametrize("advantage_per_row", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, advantage_per_row, seed):
    """Of the whole batch, and summed over a random split of its rows, each piece cut to its own width."""
    batch = Batch(seed)
    rng, B, lengths, (rows, clips) = batch.rng, batch.B, batch.lengths, draw(batch, name)
    args, weights = [batch.pad(x) for x in rows], [[rng.uniform(0.01, 1.0) for _ in row] for row in rows[0]]
    if advantage_per_row and name != "value":
        A = [rng.choice([rng.gauss(0, 1), rng.gauss(0, 1), 0.0]) for _ in lengths]
        rows[-1] = [[a] * n for a, n in each(A, lengths)]
        args[-1] = tensor([a if n else rng.choice(batch.junk) for a, n in each(A, lengths)])
    loss, grad, stats = answer(name, rows, weights, clips)
    order, cuts = rng.sample(range(B), B), sorted(rng.choices(range(B + 1), k=2))
    pieces = [order[a:b] for a, b in each([0, *cuts], [*cuts, B]) if a < b]
    widths = [max([t + 1 for i in piece for t in batch.places[i]], default=0) for piece in pieces]
    for split in [(range(B), batch.T)], [*each(pieces, widths)]:
        leaves = [x.clone().requires_grad_() for x in args]
        tensors = [*leaves, batch.pad(weights, [0.0])]
        parts = [[x[[*rows], :width] if x.dim() == 2 else x[[*rows]] for x in tensors] for rows, width in split]
        losses, all_stats = each(*[LOSSES[name][0](*part, *clips) for part in parts])
        sum(losses).backward()
        batch.same(sum(losses), loss)
        batch.same(leaves[0].grad, grad)
        for constant in leaves[1:]:  # old values, advantages, returns
            assert constant.grad is None or (constant.grad == 0).all()
        for some in all_stats:
            assert some.keys() == stats.keys() and not any(x.requires_grad for x in some.values())
        for key in stats:
            batch.same(sum(some[key] for some in all_stats), stats[key])


@pytest.mark.parametrize("name, branches", [("ppo", 6), ("gspo", 6), ("cispo", 8), ("value", 8)])
def test_the_draws_take_every_branch(name, branches):
    """(A or R > 0, above the old value, clipped): all 8, but for the two that the surrogate never clips."""
    draws = [draw(batch, name) for batch in map(Batch, SEEDS)]
    rows = [(row, LOSSES[name][1](*row, *clips)) for rows, clips in draws for row in each(*rows)]
    tokens = [one for row, found in rows for one in each(*row, found)]
    is_above = [x > old if name == "value" else token[3] > 1 for x, old, A, token in tokens]
    assert len({(A > 0, above, token[2]) for (x, old, A, token), above in each(tokens, is_above)}) == branches
    assert name == "value" or {A > 0 for _, _, A, token in tokens if token[3] == math.exp(CLAMP)} == {True, False}


@SWEEP
@pytest.mark.parametrize("name", ["reinforce", "ppo", "gspo", "value"])
def test_gradients_by_hand_are_slopes(name, seed):
    """Weights are those of a row and for gspo advantages too, as in its eq. 5."""
    batch = Batch(seed)
    rows, clips = draw(batch, name, wild=False)
    if name == "gspo":
        rows[-1] = [row[:1] * len(row) for row in rows[-1]]
    inputs = name, rows, [[1 / max(1, n)] * n for n in batch.lengths], clips
    for x, y in each(flat(slopes(lambda: answer(*inputs)[0], rows[0])), flat(answer(*inputs)[1])):
        assert math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-7)


# --- advantages: an oracle takes ragged rows and gives a list of ragged rows ---


def returns_to_go(rewards, gamma):
    return [[[sum(gamma ** (s - t) * r[s] for s in range(t, len(r))) for t in range(len(r))] for r in rewards]]


def generalized_advantages(rewards, values, gamma, lam):
    """1506.02438, eq. 16, as the sum: A_t = sum_l (gamma lambda)^l delta_{t+l}; the value after the last token is 0."""
    deltas = [[r[t] + gamma * (V + [0.0])[t + 1] - V[t] for t in range(len(V))] for r, V in each(rewards, values)]
    (advantages,) = returns_to_go(deltas, gamma * lam)
    return [advantages, [[A + v for A, v in each(*row)] for row in each(advantages, values)]]


def standardized(rows, shift_mean):
    x = flat(rows)
    mean, std = fmean(x or [0]), math.sqrt((variance(x) if len(x) > 1 else 0.0) + 1e-8)
    return [[[(y - mean) / std + (0.0 if shift_mean else mean) for y in row] for row in rows]]


def in_groups(oracle, size):
    """oracle(rewards of a group, place in it) for all rewards, as rows of one token."""
    return lambda rows: [[[oracle(flat(rows[i - i % size : i - i % size + size]), i % size)] for i in range(len(rows))]]


def of_column(function, *size):
    return lambda rewards: [function(rewards[:, 0], *size)[:, None]]


def mean_of_others(r, i):
    return fmean(r[:i] + r[i + 1 :])


PER_GROUP = [(rloo.leave_one_out_advantages, lambda r, i: r[i] - mean_of_others(r, i))]  # 2402.14740, section 2.2.1
for script in (grpo, gspo, cispo):
    PER_GROUP.append((script.group_advantages, lambda r, i: (r[i] - fmean(r)) / (stdev(r) + 1e-4)))  # 2402.03300, 4.1.1
    PER_GROUP.append((partial(script.group_advantages, scale_by_std=False), lambda r, i: r[i] - fmean(r)))  # 2503.20783
PER_BATCH = [(reinforce.leave_one_out_baseline, mean_of_others)]
PER_BATCH.append((common.normalize, lambda r, i: (r[i] - fmean(r)) / (stdev(r) + 1e-8)))


def check(batch, function, oracle, inputs, scale=1.0):
    """Values, and the gradient of a random mixture of them."""
    leaves, expected = [batch.pad(x).requires_grad_() for x in inputs], oracle(*inputs)
    actual, mixture = function(*leaves), [batch.rows() for _ in expected]
    for one, other in each(actual, expected, strict=True):
        batch.same(one, other)
    sum((one * batch.pad(c, [0.0])).sum() for one, c in each(actual, mixture)).backward()
    shares = flat(flat(mixture))
    for x, leaf in each(inputs, leaves):
        mixed = slopes(lambda: math.fsum(y * c for y, c in each(flat(flat(oracle(*inputs))), shares)), x, 1e-5 * scale)
        batch.same(scale * leaf.grad, [[scale * y for y in row] for row in mixed], 1e-6)


@SWEEP
def test_returns(seed):
    batch, gamma = Batch(seed), [0.0, 0.5, 0.9, 1.0][seed // 4 % 4]
    oracle = partial(returns_to_go, gamma=gamma)
    check(batch, lambda r: [batch.own(reinforce.rewards_to_go(r, batch.mask, gamma))], oracle, [batch.rows()])


@SWEEP
def test_advantages_per_token(seed):
    batch = Batch(seed)
    rng, mask = batch.rng, batch.mask
    gamma, lam, scale = rng.choice([0.0, 0.5, 0.9, 1.0]), rng.choice([0.0, 0.5, 0.95, 1.0]), rng.choice([1.0, 1e-4])
    oracle, r, V = partial(generalized_advantages, gamma=gamma, lam=lam), batch.rows(), batch.rows()
    check(batch, lambda r, V: ppo.gae(r, V, mask, gamma, lam), oracle, [r, V])
    shift, x = seed % 4 < 2, batch.rows(scale, rng.gauss(0, 2))
    check(batch, lambda x: [ppo.whiten(x, mask, shift)], lambda x: standardized(x, shift), [x], scale)
    batch.same(ppo.whiten(0.7 * mask, mask, shift), [[0.0 if shift else 0.7] * n for n in batch.lengths])
    R = batch.rows(scale, 3.0)
    errors = [x - y for x, y in each(flat(R), flat(V))] or [0.0]
    spread = pvariance(flat(R) or [0.0])
    expected = 1 - pvariance(errors) / spread if spread > 1e-8 else 0.0
    batch.same(ppo.explained_variance(batch.pad(V), batch.pad(R), mask), expected)


@SWEEP
def test_advantages_per_completion(seed):
    size, scale = 2 + seed % 5, [1.0, 1e-4][seed % 2]
    batch = Batch(seed, rows=size * (1 + seed % 3))
    rewards = batch.rows(scale, batch.rng.gauss(0, 2))
    for function, oracle in PER_GROUP:
        check(batch, of_column(function, size), in_groups(oracle, size), [rewards], scale)
    for function, oracle in PER_BATCH:
        check(batch, of_column(function), in_groups(oracle, batch.B), [rewards], scale)
    dead = [batch.rng.random() < 0.5 for _ in range(batch.B // size)]
    equal = batch.rng.random()  # exactly 0, whatever the rounding
    r = tensor([equal if dead[i // size] else x for i, x in enumerate(flat(rewards))])
    assert common.no_signal(r, size).tolist() == dead
    for function, _ in PER_GROUP:
        assert (function(r, size) == 0).tolist() == [d for d in dead for _ in range(size)]
    assert (common.normalize(torch.full((1 + seed,), 0.9)) == 0).all()  # in float32 the mean of six .9 is off


# --- common ---


def kl(d, estimator):
    """J. Schulman 2020, with r = e**-d = reference / policy, for samples of the policy: value and slope in d."""
    r = math.exp(-max(d, -CLAMP))
    return {"k1": (d, 1.0), "k2": (d**2 / 2, d), "k3": ((r - 1) - math.log(r), 1 - r if d > -CLAMP else 0.0)}[estimator]


@SWEEP
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimate(estimator, seed):
    """Where the mask is 1: the function knows of no mask, and a NaN stays one."""
    batch = Batch(seed)
    (logprobs, ref, _), _ = draw(batch, "ppo")
    leaf = batch.pad(logprobs).requires_grad_()
    tokens = [[kl(x - y, estimator) for x, y in each(*row)] for row in each(logprobs, ref)]
    estimate = common.kl_estimate(leaf, batch.pad(ref), estimator)
    common.weighted_sum(estimate, batch.mask).backward()
    for actual, i in (estimate, 0), (leaf.grad, 1):
        batch.same(batch.own(actual), [[token[i] for token in row] for row in tokens])


@SWEEP
def test_token_logprobs_and_entropy(seed):
    batch = Batch(seed)
    rng, V, temperature, expected = batch.rng, batch.rng.randint(2, 9), batch.rng.choice([1.0, 0.3, 2.5]), []
    z, ids = tensor([[[rng.gauss(0, 3) for _ in range(V)] for _ in range(batch.T)] for _ in batch.lengths]), []
    u, v = rng.gauss(0, 1), rng.gauss(0, 1)
    for logits in z.flatten(0, 1).tolist():
        ids.append(k := rng.randrange(V))
        p = [math.exp(x / temperature) / sum(math.exp(y / temperature) for y in logits) for x in logits]
        H = -sum(x * math.log(x) for x in p)
        slopes_of_both = [u * ((i == k) - x) - v * x * (math.log(x) + H) for i, x in enumerate(p)]
        expected.append([math.log(p[k]), H, *(x / temperature for x in slopes_of_both)])
    ids, logits = torch.tensor(ids), common.upcast(z.requires_grad_().flatten(0, 1), temperature)
    logprobs, entropy = common.LogprobsAndEntropy.apply(logits, ids)
    batch.same(common.token_logprobs(z.flatten(0, 1), ids, temperature), logprobs.tolist())
    (u * logprobs + v * entropy).sum().backward()
    batch.same(torch.cat([logprobs[:, None], entropy[:, None], z.grad.flatten(0, 1)], -1), tensor(expected))


@SWEEP
def test_means_weights_and_places(seed):
    batch = Batch(seed)
    rng, lengths, mask, B, tokens = batch.rng, batch.lengths, batch.mask, batch.B, max(1, sum(batch.lengths))
    x, w, budget, scores = batch.rows(), batch.rows(), batch.T + rng.randint(0, 5), [rng.gauss(0, 1) for _ in lengths]
    leaf, weights = batch.pad(x).requires_grad_(), batch.pad(w, [0.0])
    own = [dict(each(*row)) for row in each(batch.places, x)]
    for dim, sets in (1, x), (0, [[row[t] for row in own if t in row] for t in range(batch.T)]):
        batch.same(common.masked_mean(leaf, mask, dim), [fmean(y) if y else 0.0 for y in sets])
        batch.same(common.weighted_sum(leaf, mask, dim), [math.fsum(y) for y in sets])
    mean, total = common.masked_mean(leaf, mask), common.weighted_sum(leaf, weights)
    batch.same(mean, fmean(flat(x) or [0.0]))
    batch.same(total, math.fsum(a * b for a, b in each(flat(x), flat(w))))
    for one, grad in (mean, [[1 / tokens] * n for n in lengths]), (total, w):
        batch.same(torch.autograd.grad(one, leaf)[0], grad)
    shares = {"token": [1 / tokens] * B, "constant": [1 / (B * budget)] * B, "sum": [1 / B] * B}
    for aggregation, share in {"sequence": [1 / (B * max(1, n)) for n in lengths], **shares}.items():
        batch.same(common.loss_weights(mask, aggregation, budget), [[x] * n for x, n in each(share, lengths)])
    last = [([0.0] * n)[1:] + [y] * (n > 0) for n, y in each(lengths, scores)]
    batch.same(common.at_last_token(tensor(scores), mask), last)
    (logprobs, sampled, _), (cap, _) = draw(batch, "ppo")
    corrected = common.importance_weighted(weights, batch.pad(logprobs).requires_grad_(), batch.pad(sampled), 1 + cap)
    assert not corrected.requires_grad
    rows = each(logprobs, sampled, w)
    batch.same(corrected, [[c * min(math.exp(a - b), 1 + cap) for a, b, c in each(*row)] for row in rows])


def test_the_length_penalty():
    """2503.14476, eq. 13, its sign turned."""
    rng = random.Random(0)
    for _ in range(300):
        longest = rng.randint(1, 40)
        buffer, length = rng.randint(1, longest), rng.randint(0, longest + 1)
        excess = length - (longest - buffer)
        penalty = 0.0 if excess <= 0 else excess / buffer if length <= longest else 1.0
        for script in (grpo, gspo, cispo):
            found = script.overlong_penalty(tensor([length]), longest, buffer).item()
            assert math.isclose(found, penalty, rel_tol=1e-10, abs_tol=1e-10)
