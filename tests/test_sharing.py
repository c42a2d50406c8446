"""What is computed once instead of many times, or in place instead of anew, gives the same numbers: prompts, cache, logits, microbatches."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, DynamicLayer

import common
from common import InPlaceLayer, LogprobsAndEntropy
from test_models import CPU, FAMILIES, RAGGED, prompts_of, random_model

SLIDING = "Gemma2", "Gemma3Text", "Mistral", "GptOss"  # part of a prompt's cache is gone when it has been read


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
        for result, piece in zip(results, pieces):
            result[micro["rows"], : piece.shape[1]] = piece.detach()
        (micro["coefficients"] * (pieces[0] + entropy_grad * pieces[1])).sum().backward()
    return *results, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


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
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, atol=1e-4 * max(1, b.abs().max().item()), rtol=0)
    # prompts of 4, 2, 11 and 4 tokens, padded to 10 without their last ones, and 20 rows: 4 * 10 + 20 T instead of 20 (L - 1)
    (B, L), T = batch["input_ids"].shape, batch["mask"].shape[1]
    assert read == B * (L - 1) and shared == (read if family in SLIDING else 4 * 10 + B * T)


@pytest.mark.parametrize("budget", [1, 60, 150, 10_000])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_no_cut_into_microbatches_changes_what_shared_prompts_give(tokenizer, budget, entropy_grad):
    model = random_model()
    batch = common.generate(model, tokenizer, RAGGED, 5, 12, 0.7, key=(0, 1))
    batch["coefficients"] = torch.randn(batch["mask"].shape, generator=torch.Generator().manual_seed(0))
    expected = gradients(model, {k: v for k, v in batch.items() if k != "prompt_id"}, 10_000, entropy_grad)
    for a, b in zip(gradients(model, batch, budget, entropy_grad), expected):
        torch.testing.assert_close(a, b, atol=1e-4 * max(1, b.abs().max().item()), rtol=0)


def test_a_batch_with_a_prompt_of_one_token_is_cut_as_it_is_read(tokenizer):
    """Nothing of that prompt can be read before its rows, so its microbatch is read plainly and has to be counted so."""
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
    recomputed = common.prepare(random_model(), CPU, torch.float32, True, gradient_checkpointing=True)
    assert "cache" not in common.completion_inputs(recomputed, recomputed, batch)[0]
    ids = common.generate(recomputed, tokenizer, RAGGED, 3, 4, 1.0, key=(0, 1))["prompt_id"]
    assert len(ids.unique()) == 12  # so that microbatches count every row's prompt


def test_values_are_those_of_the_plain_pass(tokenizer):
    """The value model's trunk shares prompts as the policy does, gradients included."""
    torch.manual_seed(0)
    model = common.prepare(common.ValueModel(random_model()), CPU, torch.float32, trainable=True)
    model.head.weight.data = torch.randn(1, 32)
    batch = common.generate(random_model(), tokenizer, RAGGED, 4, 9, 1.0, key=(0, 1))
    results = []
    for given in (batch, {k: v for k, v in batch.items() if k != "prompt_id"}):
        model.zero_grad()
        values = model(given)
        (values * torch.arange(values.numel()).view(values.shape).sin()).sum().backward()
        results.append((values.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, atol=1e-4 * max(1, b.abs().max().item()), rtol=0)


def test_prompts_of_two_batches_stay_apart_when_they_are_joined(tokenizer):
    """Dynamic sampling joins batches; a row must never go on from another prompt's cache."""
    model = random_model()
    first = common.generate(model, tokenizer, RAGGED[:2], 3, 4, 1.0, key=(0, 1))
    second = common.generate(model, tokenizer, RAGGED[2:], 3, 4, 1.0, key=(0, 2))
    joined = common.concatenate(common.select(first, torch.arange(3, 6)), second)
    assert [joined["prompt_id"].tolist().count(i) for i in joined["prompt_id"].unique()] == [3, 3, 3]
    scored = common.no_grad_pass(lambda micro: common.logprobs_of(model, 1.0, micro), joined, 10_000)
    torch.testing.assert_close(scored, joined["logprobs"], atol=1e-4, rtol=0)


# --- microbatches ---


def made_up(prompt_lengths, completion_lengths, group_size):
    """A batch of token counts; rows of one prompt are adjacent."""
    prompt_length = torch.tensor(prompt_lengths).repeat_interleave(group_size)
    length = torch.tensor(completion_lengths)
    mask = (torch.arange(int(length.max())) < length[:, None]).float()
    ids = torch.zeros(len(length), int((prompt_length + length).max()), dtype=torch.long)
    return {"input_ids": ids, "prompt_length": prompt_length, "mask": mask, "prompt_id": torch.arange(len(length)) // group_size}


def tokens_of(micro):
    """What a microbatch makes the model read: its prompts once, if any two rows share one."""
    rows, prompts = len(micro["mask"]), len(micro["prompt_id"].unique())
    if rows == prompts:
        return micro["input_ids"].numel()
    return prompts * int(micro["prompt_length"].max()) + micro["mask"].numel()


def test_long_prompts_keep_their_completions_together_and_ragged_completions_go_by_length():
    # 2 prompts of 384 tokens with 8 completions each, 384 + 8 * 64 = 896 and 384 + 8 * 62 = 880 tokens; by length both would be read each time
    long = list(common.microbatches(made_up([384, 384], [*range(64, 32, -4), *range(62, 30, -4)], 8), 1000))
    assert [tokens_of(micro) for micro in long] == [896, 880] and all(len(micro["prompt_id"].unique()) == 1 for micro in long)
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
    for micro in common.microbatches(batch, budget):
        rows += micro["rows"].tolist()
        assert len(micro["mask"]) == 1 or tokens_of(micro) <= budget
        assert micro["mask"].shape[1] == micro["mask"].sum(1).max() and (micro["prompt_length"] == batch["prompt_length"][micro["rows"]]).all()
        assert micro["input_ids"].shape[1] == (micro["prompt_length"] + micro["mask"].sum(1)).max()
    assert sorted(rows) == list(range(n * group_size))


# --- cache and logits ---


def test_a_cache_in_place_is_the_cache_that_is_copied():
    """Over more tokens than its room, with rows that leave and are repeated on the way; tokens between are not copied."""
    draw = torch.Generator().manual_seed(0)
    here, copied = InPlaceLayer(), DynamicLayer()
    rows, moved = 3, 0
    for t in range(150):
        states = [torch.randn(rows, 2, 5 if t == 0 else 1, 4, generator=draw) for _ in range(2)]
        before = here.room and here.room[0].data_ptr()
        for a, b in zip(here.update(*states), copied.update(*states)):
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
    logits, uniform = (100 + torch.randn(50, 30, generator=draw)).bfloat16(), torch.rand(50, generator=draw, dtype=torch.float64)
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
    seen = []
    monkeypatch.setattr(common, "DynamicCache", lambda **options: seen.append(DynamicCache(**options)) or seen[-1])
    common.generate(random_model(), tokenizer, RAGGED, 2, 4, 1.0, key=(0, 1))
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
    impossible = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)  # ln 2 nats over the two others, and nothing pulls at them
    entropy = LogprobsAndEntropy.apply(impossible, torch.tensor([1]))[1]
    entropy.backward()
    assert entropy.item() == pytest.approx(0.693147, abs=1e-6) and impossible.grad.tolist() == [[pytest.approx(0, abs=1e-7)] * 3]


@pytest.mark.parametrize("scale, shift", [(0.01, 0.0), (2.0, 100.0), (20.0, 1e4)])
def test_the_entropy_of_many_large_logits_is_right_to_float32_and_never_negative(scale, shift):
    """Flat and peaked, far from 0, in more than one piece: logsumexp - E[logit] would be off by 1e-3 here, and below 0."""
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
