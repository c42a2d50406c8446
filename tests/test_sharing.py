"""What is computed once instead of many times, in pieces, or in place instead of anew, gives the same numbers.

So do masks with holes, where a tool's tokens stand among the policy's own.
"""

from functools import partial

import pytest
import torch
from test_invariances import first_step, same  # noqa: F401
from test_models import FAMILIES, RAGGED, prompts_of, random_model
from test_scripts import SCRIPTS
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, DynamicLayer

import common
import grpo
import ppo
from common import InPlaceLayer, LogprobsAndEntropy

SLIDING = "Gemma2", "Gemma3Text", "Mistral", "GptOss"  # part of a prompt's cache is gone when it has been read
UNSHARED = (*SLIDING, "Mamba", "FalconMamba", "Jamba")  # or is a state


@pytest.fixture(scope="module")
def tokenizer():
    return common.load_tokenizer("tiny/policy")


def tokens_read(model):
    """A list that grows by the number of tokens of every forward pass."""
    counts = []
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: counts.append(inputs[0].numel()))
    return counts


def gradients(model, batch, budget, entropy_grad=False):
    """Log-probabilities, entropies and the gradient of a sum of both with random weights, over microbatches."""
    model.zero_grad()
    results = [torch.zeros_like(batch["mask"]) for _ in range(2)]
    for micro in common.microbatches(batch, budget):
        pieces = common.logprobs_and_entropy_of(model, 0.7, micro)
        for result, piece in zip(results, pieces, strict=True):
            result[micro["rows"], : piece.shape[1]] = piece.detach()
        (micro["coefficients"] * (pieces[0] + entropy_grad * pieces[1])).sum().backward()
    return *results, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def close(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4 * max(1, b.abs().max().item()), rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shared_prompt_gives_the_values_and_gradients_of_one_that_is_read_for_every_row(tokenizer, family):
    """Ragged prompts and completions; the plain pass is the same batch without its prompt_id."""
    model = random_model(family)
    batch = common.generate(model, tokenizer, RAGGED, 5, 12, 0.7, key=(0, 1))
    batch["coefficients"] = torch.randn(batch["mask"].shape, generator=torch.Generator().manual_seed(0))
    plain = {k: v for k, v in batch.items() if k != "prompt_id"}
    counts = tokens_read(model)
    expected, read = gradients(model, plain, 10_000), sum(counts)
    counts.clear()
    found, shared = gradients(model, batch, 10_000), sum(counts)
    close(found, expected)
    # prompts of 4, 2, 11 and 4 tokens, without the last ones padded to 10, and 20 rows: 4 * 10 + 20 T, not 20 (L - 1)
    (B, L), T = batch["input_ids"].shape, batch["mask"].shape[1]
    assert read == B * (L - 1) and shared == (read if family in UNSHARED else 4 * 10 + B * T)


@pytest.mark.parametrize("budget", [1, 60, 150, 10_000])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_no_cut_into_microbatches_changes_what_shared_prompts_give(tokenizer, budget, entropy_grad):
    model = random_model()
    batch = common.generate(model, tokenizer, RAGGED, 5, 12, 0.7, key=(0, 1))
    batch["coefficients"] = torch.randn(batch["mask"].shape, generator=torch.Generator().manual_seed(0))
    expected = gradients(model, {k: v for k, v in batch.items() if k != "prompt_id"}, 10_000, entropy_grad)
    close(gradients(model, batch, budget, entropy_grad), expected)


def test_a_batch_with_a_prompt_of_one_token_is_cut_as_it_is_read(tokenizer):
    """Nothing of that prompt can be read before its rows: its microbatch is read plainly and has to be counted so."""
    model, long = random_model(), list(range(3, 43))
    batch = common.generate(model, tokenizer, prompts_of([0], long), 8, 4, 1.0, key=(0, 1))
    assert len(batch["prompt_id"].unique()) == 16
    counts = tokens_read(model)
    common.no_grad_pass(lambda micro: common.logprobs_of(model, 1.0, micro), batch, 100)
    assert max(counts) <= 100


def test_prompts_of_one_token_recomputed_layers_and_single_rows_are_read_plainly(tokenizer):
    short = common.generate(random_model(), tokenizer, prompts_of([0], [0, 5, 6]), 3, 4, 1.0, key=(0, 1))
    model = random_model()
    assert "cache" not in common.completion_inputs(model, model, short)[0]
    batch = common.generate(model, tokenizer, RAGGED, 3, 4, 1.0, key=(0, 1))
    assert "cache" in common.completion_inputs(model, model, batch)[0]
    assert "cache" not in common.completion_inputs(model, model, common.select(batch, torch.tensor([0, 3, 6, 9])))[0]
    recomputed = common.prepare(random_model(), torch.float32, True, gradient_checkpointing=True)
    assert "cache" not in common.completion_inputs(recomputed, recomputed, batch)[0]
    ids = common.generate(recomputed, tokenizer, RAGGED, 3, 4, 1.0, key=(0, 1))["prompt_id"]
    assert len(ids.unique()) == 12  # so that microbatches count every row's prompt


def test_values_are_those_of_the_plain_pass(tokenizer):
    """The value model's trunk shares prompts as the policy does, gradients included."""
    torch.manual_seed(0)
    model = common.prepare(ppo.ValueModel(random_model()), torch.float32, trainable=True)
    model.head.weight.data = torch.randn(1, 32)
    batch = common.generate(random_model(), tokenizer, RAGGED, 4, 9, 1.0, key=(0, 1))
    results = []
    for given in (batch, {k: v for k, v in batch.items() if k != "prompt_id"}):
        model.zero_grad()
        values = model(given)
        (values * torch.arange(values.numel()).view(values.shape).sin()).sum().backward()
        results.append((values.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])))
    close(*results)


def test_prompts_of_two_batches_stay_apart_when_they_are_joined(tokenizer):
    """Dynamic sampling joins batches; a row must never go on from another prompt's cache."""
    model = random_model()
    first = common.generate(model, tokenizer, RAGGED[:2], 3, 4, 1.0, key=(0, 1))
    second = common.generate(model, tokenizer, RAGGED[2:], 3, 4, 1.0, key=(0, 2))
    joined = common.concatenate(common.select(first, torch.arange(3, 6)), second)
    assert [joined["prompt_id"].tolist().count(i) for i in joined["prompt_id"].unique()] == [3, 3, 3]
    scored = common.no_grad_pass(lambda micro: common.logprobs_of(model, 1.0, micro), joined, 10_000)
    torch.testing.assert_close(scored, joined["logprobs"], atol=1e-4, rtol=0)


def test_a_prompt_of_one_token_that_joins_a_batch_of_shared_prompts_spoils_none(tokenizer):
    """It would put nothing into the cache, and what attention makes of no keys at all depends on the kernel."""
    model = random_model()
    first = common.generate(model, tokenizer, RAGGED, 3, 4, 1.0, key=(0, 1))
    joined = common.concatenate(first, common.generate(model, tokenizer, prompts_of([5]), 3, 4, 1.0, key=(0, 2)))
    assert "cache" in common.completion_inputs(model, model, first)[0]
    assert "cache" not in common.completion_inputs(model, model, joined)[0]
    scored = common.no_grad_pass(lambda micro: common.logprobs_of(model, 1.0, micro), joined, 10_000)
    torch.testing.assert_close(scored, joined["logprobs"], atol=1e-4, rtol=0)


# --- masks with holes ---

MASKS = [  # three rows of each of RAGGED: turns with a tool in between, at the start, at the end; none; nothing else
    [1, 1, 1, 0, 0, 0, 0, 1, 1, 1], [1, 0, 1, 0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 0, 0], [1],
    [0, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0], [1, 0, 0, 0, 1, 1, 0, 1], [1, 1], [1, 0, 1],
]  # fmt: skip


def batch_with_holes(tokenizer):
    """Random tokens; the log-probabilities that a loss needs are still to come, and stay NaN at a tool's tokens."""
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 512, (len(mask),), generator=draw) for mask in MASKS]
    batch = common.collate(tokenizer, RAGGED, 3, ids, [[0.0] * len(mask) for mask in MASKS], [True] * 12, MASKS)
    batch |= {name: torch.full_like(batch["mask"], torch.nan) for name in ("old_logprobs", "ref_logprobs")}
    return batch | {"advantages": torch.randn(12, generator=draw)}


def loss_of(logprobs, entropy, old_logprobs, ref_logprobs, advantages, weights):
    """grpo's: clipped ratio, KL and entropy bonus."""
    loss, _ = grpo.policy_loss(logprobs, old_logprobs, advantages, weights, 0.2, 0.2)
    kl = common.kl_estimate(logprobs, ref_logprobs, "k3")
    return loss + 0.1 * common.weighted_sum(kl, weights) - 0.1 * common.weighted_sum(entropy, weights)


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("family", ["Llama", "GPT2", "Gemma2"])
def test_a_mask_with_holes_trains_the_policys_own_tokens(tokenizer, family, is_shared):
    """Log-probabilities, entropies, loss and gradient in any microbatches are those of a plain pass over each row."""
    model, batch = random_model(family), batch_with_holes(tokenizer)
    (logprobs, entropies), loss = torch.zeros(2, *batch["mask"].shape), 0.0
    for i, mask in enumerate(MASKS):
        start, own = int(batch["prompt_length"][i]), torch.tensor(mask).nonzero()[:, 0]
        ids = batch["input_ids"][i, : start + len(mask)]
        plain = torch.log_softmax(model(ids[None]).logits[0, start - 1 : -1] / 0.7, -1)[own]  # (own tokens, V)
        found = plain.gather(1, ids[start:][own, None])[:, 0]
        entropy = -(plain.exp() * plain).sum(1)
        logprobs[i, own], entropies[i, own] = found.detach(), entropy.detach()
        old, ref = logprobs[i, own] + 0.3 * torch.randn(2, len(own))
        batch["old_logprobs"][i, own], batch["ref_logprobs"][i, own] = old, ref
        weights = torch.full_like(found, 1 / max(1, len(own)) / 12)
        loss = loss + loss_of(found, entropy, old, ref, batch["advantages"][i], weights)
    loss.backward()
    expected = logprobs, entropies, loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])

    needed = "old_logprobs", "ref_logprobs", "advantages", "weights"
    batch["weights"] = common.loss_weights(batch["mask"], "sequence")
    if not is_shared:
        batch["prompt_id"] = torch.arange(12)
    is_read_once = "cache" in common.completion_inputs(model, model, batch)[0]
    assert is_read_once == (is_shared and family not in UNSHARED)
    for budget in (1, 60, 150, 10_000):
        model.zero_grad()
        found, loss = torch.zeros(2, *batch["mask"].shape), 0.0
        for micro in common.microbatches(batch, budget):
            pieces = common.logprobs_and_entropy_of(model, 0.7, micro)
            found[:, micro["rows"], : pieces[0].shape[1]] = torch.stack(pieces).detach()
            part = loss_of(*pieces, *(micro[name] for name in needed))
            part.backward()
            loss += part.detach()
        close((*found, loss, torch.cat([p.grad.flatten() for p in model.parameters()])), expected)
        scored = common.no_grad_pass(lambda micro: common.logprobs_of(model, 0.7, micro), batch, budget)
        close([scored], [logprobs])


@torch.no_grad()
def test_values_under_a_mask_with_holes_are_those_before_the_policys_own_tokens(tokenizer):
    torch.manual_seed(0)
    model, batch = common.prepare(ppo.ValueModel(random_model()), torch.float32, True), batch_with_holes(tokenizer)
    model.head.weight.data = torch.randn(1, 32)
    expected = torch.zeros_like(batch["mask"])
    for i, mask in enumerate(MASKS):
        start = int(batch["prompt_length"][i])
        hidden = model.trunk(batch["input_ids"][i : i + 1, : start + len(mask)]).last_hidden_state[0, start - 1 : -1]
        expected[i, : len(mask)] = model.head(hidden)[:, 0] * torch.tensor(mask)
    for budget in (1, 60, 10_000):
        close([common.no_grad_pass(model, batch, budget)], [expected])


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_reads_what_stands_at_a_tools_tokens(name, first_step):  # noqa: F811
    """Nor does the cut into microbatches matter there."""

    def with_tools(batch, what=0.0):
        batch["mask"][:, 1::3] = 0
        batch["logprobs"] = batch["logprobs"].masked_fill(batch["mask"] == 0, what)
        return batch

    garbage = partial(with_tools, what=torch.nan)
    same(first_step(name, with_tools), first_step(name, garbage, microbatch_tokens=40))


# --- microbatches ---


def made_up(prompt_lengths, completion_lengths, group_size):
    """A batch of token counts; rows of one prompt are adjacent."""
    prompt_length = torch.tensor(prompt_lengths).repeat_interleave(group_size)
    length = torch.tensor(completion_lengths)
    mask = (torch.arange(int(length.max())) < length[:, None]).float()
    ids = torch.zeros(len(length), int((prompt_length + length).max()), dtype=torch.long)
    batch = {"input_ids": ids, "prompt_length": prompt_length, "length": length, "mask": mask}
    return batch | {"prompt_id": torch.arange(len(length)) // group_size}


def tokens_of(micro):
    """What a microbatch makes the model read: its prompts once, if any two rows share one."""
    rows, prompts = len(micro["mask"]), len(micro["prompt_id"].unique())
    if rows == prompts:
        return micro["input_ids"].numel()
    return prompts * int(micro["prompt_length"].max()) + micro["mask"].numel()


def test_long_prompts_keep_their_completions_together_and_ragged_completions_go_by_length():
    # 2 prompts of 384 tokens with 8 completions each, 384 + 8 * 64 = 896 and 384 + 8 * 62 = 880 tokens;
    # by length both would be read each time
    long = list(common.microbatches(made_up([384, 384], [*range(64, 32, -4), *range(62, 30, -4)], 8), 1000))
    assert [tokens_of(micro) for micro in long] == [896, 880]
    assert all(len(micro["prompt_id"].unique()) == 1 for micro in long)
    # by prompt every group would be padded to 100: 4 * (2 + 400) tokens; by length one piece holds the long ones
    ragged = list(common.microbatches(made_up([2] * 4, [100, 1, 1, 1] * 4, 4), 420))
    assert [len(micro["mask"]) for micro in ragged] == [4, 12] and sum(map(tokens_of, ragged)) == 4 * 102 + 4 * 2 + 12


@pytest.mark.parametrize("seed", range(20))
def test_pieces_hold_every_row_once_within_the_budget_at_their_own_width(seed):
    draw = torch.Generator().manual_seed(seed)
    n, group_size, budget = 6, 1 + seed % 4, (1, 50, 90, 300)[seed // 5]
    prompts = torch.randint(1, 40, (n,), generator=draw).tolist()
    completions = torch.randint(0, 30, (n * group_size,), generator=draw).clamp(min=1).tolist()
    batch, rows = made_up(prompts, completions, group_size), []
    batch["mask"][:, seed % 3 :: 3] = 0  # a tool's tokens, which are read like the others
    for micro in common.microbatches(batch, budget):
        rows += micro["rows"].tolist()
        assert len(micro["mask"]) == 1 or tokens_of(micro) <= budget
        assert (micro["prompt_length"] == batch["prompt_length"][micro["rows"]]).all()
        assert micro["mask"].shape[1] == micro["length"].max()
        assert micro["mask"].sum() == batch["mask"][micro["rows"]].sum()
        assert micro["input_ids"].shape[1] == (micro["prompt_length"] + micro["length"]).max()
    assert sorted(rows) == list(range(n * group_size))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_all_ranks_make_as_many_passes_and_together_count_every_row_once(num_ranks, monkeypatch):
    """Weights are gathered in a pass: a rank without a piece reads a row whose weights are 0."""
    batch = made_up([5, 9, 3], [4, 2, 7, 1, 6, 3], 2)
    batch["weights"], result = batch["mask"] / batch["mask"].sum(), []
    monkeypatch.setattr(common, "NUM_RANKS", num_ranks)
    for rank in range(num_ranks):
        monkeypatch.setattr(common, "RANK", rank)
        result.append(list(common.microbatches(batch, 14)))
    assert len({len(micros) for micros in result}) == 1
    micros = [micro for micros in result for micro in micros]
    assert sorted(torch.cat([micro["rows"] for micro in micros]).tolist()) == list(range(6))
    assert sum(micro["weights"].sum() for micro in micros).item() == pytest.approx(1.0)
    assert sum(len(micro["mask"]) for micro in micros) > 6  # one was left without a piece


# --- sampling in pieces ---


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_sampling_in_pieces_of_prompts_is_sampling_in_one(tokenizer, family, monkeypatch):
    """As many prompts at once as fit: 3 rows of 11 + 12 tokens each, of which two prompts need 138."""
    model, pieces, sample = random_model(family), [], common.sample_completions

    def counted(policy, prompts, *args):
        pieces[-1].append(len(prompts))
        return sample(policy, prompts, *args)

    monkeypatch.setattr(common, "sample_completions", counted)
    batches = []
    for most_tokens in (2**15, 138, 1):
        pieces.append([])
        batches.append(common.generate(model, tokenizer, RAGGED, 3, 12, 1.0, key=(0, 1), most_tokens=most_tokens))
    assert pieces == [[4], [2, 2], [1, 1, 1, 1]]
    for cut in batches[1:]:
        assert cut["completions"] == batches[0]["completions"]
        for name in ("input_ids", "mask", "prompt_id", "length", "truncated"):
            assert torch.equal(cut[name], batches[0][name])
        torch.testing.assert_close(cut["logprobs"], batches[0]["logprobs"], atol=1e-5, rtol=0)


# --- cache and logits ---


def test_a_cache_in_place_is_the_cache_that_is_copied():
    """Over more tokens than its room, with rows that leave and are repeated; tokens in between are not copied."""
    draw = torch.Generator().manual_seed(0)
    here, copied = InPlaceLayer(), DynamicLayer()
    rows, moved = 3, 0
    for t in range(150):
        states = [torch.randn(rows, 2, 5 if t == 0 else 1, 4, generator=draw) for _ in range(2)]
        before = here.room and here.room[0].data_ptr()
        for a, b in zip(here.update(*states), copied.update(*states), strict=True):
            assert torch.equal(a, b)
        moved += before != (here.room and here.room[0].data_ptr())
        if t in (0, 40, 41):
            index = torch.tensor({0: [0, 0, 1, 2, 2], 40: [4, 1, 2], 41: [0, 2]}[t])
            rows = len(index)
            here.reorder_cache(index), copied.reorder_cache(index)
        assert here.get_seq_length() == copied.get_seq_length()
        assert t not in (0, 40, 41) or here.room is None  # what the rows that left took up is free at once
    assert moved <= 9  # room for 64 tokens each time; twice where rows leave


def test_keys_that_autocast_leaves_in_float32_are_kept_in_the_values_dtype():
    layer = InPlaceLayer()
    for n in (3, 1):
        keys, values = layer.update(torch.randn(2, 2, n, 4), torch.randn(2, 2, n, 4).bfloat16())
    assert keys.dtype == values.dtype == torch.bfloat16 and keys.shape == (2, 2, 4, 4)


@pytest.mark.parametrize("temperature", [1e-3, 0.7, 1.0])
def test_bfloat16_logits_are_scaled_in_float32(temperature):
    draw = torch.Generator().manual_seed(0)
    logits = (100 + torch.randn(50, 30, generator=draw)).bfloat16()
    uniform = torch.rand(50, generator=draw, dtype=torch.float64)
    ids, logprobs = common.sample_tokens(logits, uniform, temperature)
    rounding = 2.0**-22 * 100 / temperature  # of logits around 100 / temperature
    torch.testing.assert_close(logprobs, common.token_logprobs(logits, ids, temperature), atol=rounding, rtol=1e-5)
    assert logprobs.dtype == torch.float32 and torch.isfinite(logprobs).all()


def test_a_uniform_number_just_below_1_draws_no_impossible_token():
    """In float32 a float64 number just below 1 may round to 1; generate keeps it below."""
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    ids, logprobs = common.sample_tokens(logits, torch.tensor([1 - 2.0**-24]), 1.0)
    assert ids.item() == 1 and torch.isfinite(logprobs).all()


def test_the_sampler_writes_its_cache_in_place(tokenizer, monkeypatch):
    model, seen = random_model(), []
    monkeypatch.setattr(common, "DynamicCache", lambda **options: seen.append(DynamicCache(**options)) or seen[-1])
    common.generate(model, tokenizer, RAGGED, 2, 4, 1.0, key=(0, 1))
    assert [type(layer) for layer in seen[0].layers] == [InPlaceLayer, InPlaceLayer]


def test_the_written_out_gradient_of_log_probabilities_is_autograds():
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 11, generator=draw, dtype=torch.float64).mul_(5).requires_grad_()
    ids = torch.randint(11, (6,), generator=draw)
    for chosen in (lambda x: x[0], lambda x: x[1], lambda x: x):  # one, the other, both in the loss
        assert torch.autograd.gradcheck(lambda x: chosen(LogprobsAndEntropy.apply(x, ids)), logits)  # noqa: B023
    logprobs, entropy = LogprobsAndEntropy.apply(logits, ids)
    torch.testing.assert_close(logprobs, common.token_logprobs(logits, ids))
    torch.testing.assert_close(entropy, -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1))
    # one token that can't come: ln 2 nats over the two others, and nothing pulls at them
    impossible = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    entropy = LogprobsAndEntropy.apply(impossible, torch.tensor([1]))[1]
    entropy.backward()
    assert entropy.item() == pytest.approx(0.693147, abs=1e-6)
    assert impossible.grad.tolist() == [[pytest.approx(0, abs=1e-7)] * 3]


@pytest.mark.parametrize("scale, shift", [(0.01, 0.0), (2.0, 100.0), (20.0, 1e4)])
def test_the_entropy_of_many_large_logits_is_right_to_float32_and_never_negative(scale, shift):
    """Flat and peaked, far from 0, in more than one piece: logsumexp - E[logit] would be off by 1e-3, and below 0."""
    logits = torch.randn(40, 151_936, generator=torch.Generator().manual_seed(0)) * scale + shift
    logprobs, entropy = LogprobsAndEntropy.apply(logits, torch.arange(40))
    exact = logits.double().log_softmax(-1)
    assert (entropy - torch.special.entr(exact.exp()).sum(-1)).abs().max() < 5e-6 and entropy.min() >= 0
    torch.testing.assert_close(logprobs.double(), exact[:, :40].diagonal(), rtol=3e-7, atol=2e-5)
    torch.testing.assert_close(common.token_logprobs(logits, torch.arange(40)), logprobs, rtol=0, atol=1e-6)


class Made(TorchDispatchMode):
    """Address and number of elements of every tensor that an operation makes or writes."""

    def __init__(self):
        super().__init__()
        self.tensors = set()

    def __torch_dispatch__(self, fn, types, args=(), kwargs=None):
        result = fn(*args, **kwargs or {})
        if isinstance(result, torch.Tensor):
            self.tensors.add((result.data_ptr(), result.numel()))
        return result


def test_no_more_than_two_copies_of_the_logits_are_held():
    """The logits and their gradient: forward makes a piece at a time, and keeps what it was given."""
    logits, ids = torch.randn(2**10, 2**13), torch.arange(2**10)
    with Made() as made:
        LogprobsAndEntropy.apply(logits, ids)
    assert max(n for _, n in made.tensors) == 2**22 == logits.numel() / 2
    with Made() as made:  # log-probabilities alone: one copy, exponentiated in place
        common.token_logprobs(logits, ids)
    assert len({address for address, n in made.tensors if n == 2**23} - {logits.data_ptr()}) == 1
    logits, ids = torch.randn(8, 1000, requires_grad=True), torch.arange(8)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        LogprobsAndEntropy.apply(logits, ids)[0].sum().backward()
    large = [x for x in saved if x.numel() == 8000]
    assert len(large) == 1 and large[0].data_ptr() == logits.data_ptr()
