"""What the six scripts share and what is not the algorithm, in two halves.

First half, what an algorithm stands on: sampling, batches, log-probabilities, masks and weights. Read it.
Second half, plumbing: command line, ranks, models, rewards, data, metrics, checkpoints, logging. Skip it.

Letters: N prompts per step, G completions per prompt, B = N * G rows (the G rows of a prompt adjacent), T completion
tokens, V vocabulary. A batch is a dict. Its tensors have B rows; its lists have B entries:
    input_ids      (B, L)  prompt, then completion, right-padded: no position or attention mask is needed to score it
    prompt_length  (B,)    column t of every (B, T) tensor is the token input_ids[prompt_length + t]
    prompt_id      (B,)    rows of one number have the same prompt, which is then read once for all of them
    length         (B,)    completion tokens of a row, its stop token included
    mask           (B, T)  1 on the tokens that the policy chose; 0 on a tool's tokens in between, and after the end
    logprobs       (B, T)  log-probabilities of the completion tokens, as sampled
    truncated      (B,)    True where no stop token came within max_new_tokens
    prompts, completions   list of Prompt, list of str
Scripts add their own: ref_logprobs, old_logprobs, advantages, weights, ...
"""

import copy
import csv
import hashlib
import importlib.util
import io
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from bisect import bisect_right
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar, get_type_hints

import torch
import torch.distributed as dist
import transformers
import tyro
from torch.distributed.checkpoint import state_dict as whole
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import linear, pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint as recomputed
from transformers import DynamicCache, DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer

transformers.utils.logging.disable_progress_bar()


class InputError(Exception):
    """Something the user gave can't be used; the message is one sentence that names it and says what would be right."""


class Prompt(NamedTuple):
    ids: list[int]  # token ids, special tokens included
    text: str  # the same as text, as reward functions see it
    row: dict  # the dataset row with every column, untouched


# ==================================== first half: what an algorithm stands on ====================================

# --- sampling ---
# A plain loop over a key-value cache. Nothing is cut from the distribution: what is sampled is what is trained. It ends
# in collate(), as does any other way to sample: an engine, a tool loop, a replay buffer.


def generator(*key) -> torch.Generator:
    """Random numbers that depend on the key alone, e.g. (seed, "sample", step): a resumed run needs no random state."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))


class InPlaceLayer(DynamicLayer):
    """A layer of a cache with room to spare: a new token is written there, where DynamicLayer copies all before it."""

    room = None  # keys and values with up to 63 spare columns; self.keys and self.values are their first columns

    def update(self, key_states, value_states, *args, **kwargs):
        key_states = key_states.to(value_states.dtype)  # autocast leaves rotated keys in float32
        if not self.is_initialized:
            return super().update(key_states, value_states)
        n, new = self.keys.shape[-2], key_states.shape[-2]
        if self.room is None or n + new > self.room[0].shape[-2]:
            self.room = [pad(x, (0, 0, 0, new + 63)) for x in (self.keys, self.values)]
        for room, states in zip(self.room, (key_states, value_states), strict=True):
            room[..., n : n + new, :] = states
        self.keys, self.values = (room[..., : n + new, :] for room in self.room)
        return self.keys, self.values

    def reorder_cache(self, beam_idx):
        self.room = None
        super().reorder_cache(beam_idx)


def sample_tokens(logits: torch.Tensor, uniform: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (B,) drawn from softmax(logits / temperature), and their log-probabilities; at temperature 0 the likeliest.

    The cumulative distribution is inverted at uniform (B,), in its dtype: a float32 sum is too coarse for a large tail.
    """
    if temperature == 0:
        ids = logits.argmax(-1)
        return ids, token_logprobs(logits, ids)
    logits = upcast(logits, temperature)
    shifted = logits - logits.amax(-1, keepdim=True)  # (B, V), at most 0
    cumulative = shifted.exp().cumsum(-1, dtype=uniform.dtype)  # (B, V)
    total = cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, uniform[:, None] * total, right=True).clamp(max=logits.shape[-1] - 1)
    return ids[:, 0], (shifted.gather(1, ids) - total.log())[:, 0].to(shifted.dtype)


@torch.no_grad()
def sample_completions(policy, prompts: list[Prompt], uniform, stops: torch.Tensor, temperature: float) -> list[tuple]:
    """For each row of uniform (B, max_new_tokens): the ids drawn, their log-probabilities, and whether they were cut.

    A prompt is read once, and its cache repeated. Finished rows are dropped once they make up a quarter of the batch.
    """
    device, (B, max_new_tokens) = uniform.device, uniform.shape
    new_ids = torch.zeros(B, max_new_tokens, dtype=torch.long, device=device)
    logprobs = torch.zeros(B, max_new_tokens, device=device)
    length = torch.zeros(B, dtype=torch.long, device=device)

    # left-padded prompts, with explicit positions: models with absolute positions need them
    prompt_ids = [torch.tensor(prompt.ids, device=device) for prompt in prompts]
    inputs = pad_sequence(prompt_ids, batch_first=True, padding_side="left")  # (prompts, prompt_width)
    attention = pad_sequence([torch.ones_like(ids) for ids in prompt_ids], batch_first=True, padding_side="left")
    positions, prompt_width = (attention.cumsum(1) - 1).clamp(min=0), inputs.shape[1]
    cache = DynamicCache(config=policy.config)
    cache.layers = [InPlaceLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    has_attention = any(isinstance(layer, DynamicLayer) for layer in cache.layers)  # else states passed over padding
    forward = partial(policy, cache=cache, use_cache=True, logits_to_keep=1)
    logits = forward(inputs, attention_mask=attention, position_ids=positions).logits[:, -1]

    rows = torch.arange(B, device=device)  # those still in the cache
    running = torch.ones_like(rows, dtype=torch.bool)  # of these, the ones without a stop token so far
    prompt_of_row = rows // (B // len(prompts))
    cache.reorder_cache(prompt_of_row)
    logits, positions = logits[prompt_of_row], positions[prompt_of_row, -1:]
    attention = pad(attention[prompt_of_row], (0, max_new_tokens), value=1)  # a column for each token to come
    for t in range(max_new_tokens):
        ids, logprobs[rows, t] = sample_tokens(logits, uniform[rows, t], temperature)
        new_ids[rows, t] = ids
        length[rows] += running  # what is drawn after a stop token counts for nothing
        running = running & ~torch.isin(ids, stops)
        if t + 1 == max_new_tokens or not (left := int(running.sum())):
            break
        if left <= 0.75 * len(rows):
            cache.reorder_cache(running.nonzero()[:, 0])
            rows, ids, attention, positions, running = (x[running] for x in (rows, ids, attention, positions, running))
        seen = attention[:, : prompt_width + t + 1] if has_attention else None  # Mamba would multiply its input by it
        logits = forward(ids[:, None], attention_mask=seen, position_ids=positions + t + 1).logits[:, -1]
    cut, new_ids, logprobs = {*rows[running].tolist()}, new_ids.tolist(), logprobs.tolist()
    return [(new_ids[i][:n], logprobs[i][:n], i in cut) for i, n in enumerate(length.tolist())]


def stop_ids(policy, tokenizer) -> list[int]:
    ends = policy.generation_config.eos_token_id
    return sorted({tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None})


def generate(policy, tokenizer, prompts, group_size, max_new_tokens, temperature, key, most_tokens=2**15) -> dict:
    """Sample group_size completions of each Prompt: a batch (see the top of this file).

    key seeds a uniform number for each row and token position. A completion depends on nothing else, so prompts can be
    sampled in pieces: as many at once as fit most_tokens tokens in the cache."""
    longest = max(len(prompt.ids) for prompt in prompts) + max_new_tokens
    at_once = max(1, most_tokens // (group_size * longest))
    precision = torch.float32 if policy.device.type == "mps" else torch.float64  # mps has no float64
    uniform = torch.rand(len(prompts) * group_size, max_new_tokens, generator=generator(*key), dtype=precision)
    stops = torch.tensor(stop_ids(policy, tokenizer), device=policy.device)

    def sample(mine: range) -> list[tuple]:
        rows = []
        with autocast(policy), gathered(policy):
            for piece in (mine[i : i + at_once] for i in range(0, len(mine), at_once)):
                noise = uniform[piece.start * group_size : piece.stop * group_size].to(policy.device)
                rows += sample_completions(policy, prompts[piece.start : piece.stop], noise, stops, temperature)
        return rows

    ids, logprobs, truncated = zip(*in_parts(sample, len(prompts)), strict=True)
    return collate(tokenizer, prompts, group_size, ids, logprobs, truncated, policy=policy)


def collate(tokenizer, prompts, group_size, ids, logprobs, truncated, masks=None, policy=None) -> dict:
    """A batch of anybody's completions, on the policy's device: ids, logprobs and masks hold a list or a 1-D tensor per
    row, truncated a bool. Where that is False, the last id is a stop token. masks are 1 on the policy's own tokens and
    0 on a tool's, where logprobs may be anything; None: all are its own."""
    device, shares_prompts = (policy.device, policy.shares_prompts) if policy else ("cpu", True)
    shares_prompts &= all(len(prompt.ids) > 1 for prompt in prompts)  # all but the last token is read once
    prompts = [prompt for prompt in prompts for _ in range(group_size)]
    ids = [torch.as_tensor(row, dtype=torch.long).tolist() for row in ids]
    masks = [[1] * len(row) for row in ids] if masks is None else masks
    if not [*map(len, ids)] == [*map(len, logprobs)] == [*map(len, masks)] or [] in ids:
        raise ValueError("a completion has one token or more, and ids, logprobs and masks a number for each")
    # NOTE: decoded alone, a SentencePiece text would lose its first blank, and a WordPiece one a blank or gain "##"
    before = [prompt.ids[-16:] for prompt in prompts]
    after = [start + (row if cut else row[:-1]) for start, row, cut in zip(before, ids, truncated, strict=True)]
    decode = partial(tokenizer.batch_decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    texts = zip(decode(before), decode(after), strict=True)

    def padded(rows, dtype: torch.dtype) -> torch.Tensor:
        return pad_sequence([torch.as_tensor(row, dtype=dtype) for row in rows], batch_first=True).to(device)

    return {
        "input_ids": padded([prompt.ids + row for prompt, row in zip(prompts, ids, strict=True)], torch.long),
        "prompt_length": torch.tensor([len(prompt.ids) for prompt in prompts], device=device),
        "prompt_id": torch.arange(len(ids), device=device) // (group_size if shares_prompts else 1),
        "length": torch.tensor([len(row) for row in ids], device=device),
        "mask": padded(masks, torch.float32),
        "logprobs": padded(logprobs, torch.float32),
        "truncated": torch.as_tensor(truncated, device=device),
        "prompts": prompts,
        "completions": [whole[len(os.path.commonprefix([start, whole])) :] for start, whole in texts],
    }


# --- batches ---
# A minibatch is the rows of one optimizer step. A microbatch is what goes through the model at once: it changes memory
# and never the result, since losses are sums with weights that were computed over the whole minibatch.


def select(batch: dict, rows: torch.Tensor) -> dict:
    """The given rows (indices, or a bool each) of every entry."""
    rows = rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows
    return {k: [v[i] for i in rows.tolist()] if isinstance(v, list) else v[rows] for k, v in batch.items()}


def concatenate(first: dict, second: dict) -> dict:
    """The rows of both, padded on the right to the wider."""

    def joined(a, b):
        if isinstance(a, list):
            return a + b
        return torch.cat([a, b]) if a.dim() == 1 else pad_sequence([*a, *b], batch_first=True)

    apart = second["prompt_id"] + (first["prompt_id"].max() + 1 if len(first["prompt_id"]) else 0)
    return {k: joined(a, b) for (k, a), b in zip(first.items(), (second | {"prompt_id": apart}).values(), strict=True)}


def minibatches(batch: dict, num_epochs: int, minibatch_size: int, key: tuple):
    """num_epochs passes over the batch, each in a new order, cut into minibatch_size rows (0: all; the last: fewer).

    Raises InputError where a (B, T) entry is not finite under the mask."""
    B = len(batch["mask"])
    for name, x in batch.items():
        if torch.is_tensor(x) and x.shape == batch["mask"].shape and not (x.isfinite() | (batch["mask"] == 0)).all():
            raise InputError(f"{name} of a trained token are not finite")
    for epoch in range(num_epochs):
        order = torch.randperm(B, generator=generator(*key, epoch)).to(batch["mask"].device)
        for rows in order.split(minibatch_size or B):
            yield select(batch, rows)


def cut_rows(order: list[int], tokens_of: Callable, most_tokens: int, most_rows: int) -> list[list[int]]:
    """The rows, in this order, in pieces of at most most_rows rows, or tokens_of(rows) tokens; of one row at least."""
    pieces = []
    while order:
        counts = range(1, min(len(order), most_rows) + 1)
        fitting = bisect_right(counts, most_tokens, key=lambda n: tokens_of(order[:n]))
        pieces.append(order[: max(1, fitting)])
        order = order[max(1, fitting) :]
    return pieces


def microbatches(batch: dict, microbatch_tokens: int):
    """Cut a batch into pieces of at most microbatch_tokens tokens, padding included; "rows" says where they stood.

    Rows of like length go together, or those of one prompt, whichever makes fewer tokens."""
    prompt_length, length = batch["prompt_length"].tolist(), batch["length"].tolist()
    prompt = batch["prompt_id"].tolist() if "prompt_id" in batch else range(len(length))

    def tokens_of(rows: list[int]) -> int:
        """What a pass over these rows reads: a prompt once if any of them share one, else each row whole."""
        prompts = len({prompt[i] for i in rows})
        if prompts == len(rows):
            return prompts * max(prompt_length[i] + length[i] for i in rows)
        return prompts * max(prompt_length[i] for i in rows) + len(rows) * max(length[i] for i in rows)

    by_length = sorted(range(len(length)), key=lambda i: -(prompt_length[i] + length[i]))
    by_prompt = sorted(range(len(length)), key=lambda i: (-prompt_length[i], prompt[i], -length[i]))
    most_rows = math.ceil(len(length) / NUM_RANKS)  # so that there is work for every rank
    cuts = [cut_rows(order, tokens_of, microbatch_tokens, most_rows) for order in (by_length, by_prompt)]
    tensors = {k: v for k, v in batch.items() if isinstance(v, torch.Tensor)}
    pieces = min(cuts, key=lambda pieces: sum(map(tokens_of, pieces)))
    # all ranks run the same number of passes, since each gathers weights: what fills up is a row that does not count
    work = [(piece, True) for piece in pieces] + [(pieces[-1][:1], False)] * (-len(pieces) % NUM_RANKS)
    for piece, counts in work[RANK::NUM_RANKS]:
        rows = torch.tensor(piece, device=batch["mask"].device)
        width, T = max(prompt_length[i] + length[i] for i in piece), max(length[i] for i in piece)
        cut = {k: v[:, : width if k == "input_ids" else T] if v.dim() == 2 else v for k, v in tensors.items()}
        micro = select(cut, rows)
        yield micro | ({"rows": rows} if counts else {"rows": rows[:0], "weights": torch.zeros_like(micro["mask"])})


@torch.no_grad()
def no_grad_pass(fn: Callable, batch: dict, microbatch_tokens: int) -> torch.Tensor:
    """fn(microbatch) for the whole batch, without gradients: its (..., m, t) as (..., B, T), 0 elsewhere."""
    result = None
    for micro in microbatches(batch, microbatch_tokens):
        piece = fn(micro)
        if result is None:
            result = piece.new_zeros(*piece.shape[:-2], *batch["mask"].shape)
        result[..., micro["rows"], : piece.shape[-1]] = piece
    return summed(result)  # what other ranks found, where this one has 0


# --- log-probabilities, masks and weights ---
# Logits are made at completion tokens only, a prompt is read once for all its rows, and a gradient is written out. What
# stands where a mask or a weight is 0 may be anything, inf and NaN included, and reaches no result.


def completion_positions(batch: dict) -> torch.Tensor:
    """(B, L - 1) bool: the positions whose output predicts a token under the mask; the one place of this shift.

    Example: prompt a b c, completion d e. Position 2 (c) predicts d and position 3 (d) predicts e: [0, 0, 1, 1]."""
    mask = batch["mask"].bool()
    predicted = torch.arange(batch["input_ids"].shape[1] - 1, device=mask.device) - batch["prompt_length"][:, None] + 1
    in_completion = (predicted >= 0) & (predicted < mask.shape[1])
    return in_completion & mask.gather(1, predicted.clamp(0, mask.shape[1] - 1))


def scatter_tokens(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """One number per token under the mask, in a row (n,), to where it is 1: (B, T), 0 elsewhere."""
    return x.new_zeros(mask.shape).masked_scatter(mask.bool(), x)


def upcast(x: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """x / temperature in float32, or float64 if that is what came in; no copy where none is needed."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x if temperature == 1.0 else x / temperature


def token_logprobs(logits: torch.Tensor, ids: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """log-softmax(logits / temperature) at ids, float32: (..., V), (...) -> (...). Makes one copy of the logits."""
    logits = upcast(logits, temperature)
    top = logits.detach().amax(-1)  # taken off first: a logsumexp of 1e4 is good to 1e-3 only
    return logits.gather(-1, ids[..., None])[..., 0] - top - (logits - top[..., None]).exp_().sum(-1).log()


class LogprobsAndEntropy(torch.autograd.Function):
    """Logits (n, V), ids (n,) -> log-probabilities of the ids, and entropies in nats, (n,) each.

    The gradients, one-hot(ids) - p and -p (log p + entropy) with p = softmax(logits), are written out: autograd holds
    four (n, V) tensors at once, this two (three if the entropy is in the loss)."""

    @staticmethod
    def forward(ctx, logits, ids):
        found = []
        for rows in logits.split(max(1, 2**22 // logits.shape[-1])):  # 16 MB at a time: no second copy of the logits
            top = rows.amax(-1)
            terms = (shifted := rows - top[:, None]).exp()
            total = terms.sum(-1)
            expected = terms.mul_(shifted).nansum(-1) / total  # nan: 0 times the -inf of a token that can't come
            found.append((top, total.log(), total.log() - expected))
        top, log_total, entropy = map(torch.cat, zip(*found, strict=True))
        ctx.save_for_backward(logits, ids, top + log_total, entropy)
        ctx.set_materialize_grads(False)  # None for what is in no loss, usually the entropy
        return logits.gather(1, ids[:, None])[:, 0] - top - log_total, entropy

    @staticmethod
    def backward(ctx, grad, entropy_grad):
        logits, ids, logsumexp, entropy = ctx.saved_tensors
        grad = (torch.zeros_like(logsumexp) if grad is None else grad)[:, None]
        probabilities = (logits - logsumexp[:, None]).exp_()
        if entropy_grad is None:
            return probabilities.mul_(-grad).scatter_add_(1, ids[:, None], grad), None
        entropy_grad, surprise = entropy_grad[:, None], torch.special.entr(probabilities)  # -p log p, 0 where p is 0
        gradient = surprise.mul_(entropy_grad) - probabilities.mul_(grad + entropy_grad * entropy[:, None])
        return gradient.scatter_add_(1, ids[:, None], grad), None


def completion_inputs(model, read: Callable, batch: dict) -> tuple[dict, torch.Tensor]:
    """What the model is to read, and the positions (bool) at which it then predicts the tokens under the mask.

    Rows are right-padded and attention is causal: no token sees padding. Where rows share prompts, read(prompts) runs
    each but its last token once, with gradients; the rows go on from its cache, repeated for them."""
    input_ids, start = batch["input_ids"], batch["prompt_length"] - 1  # start (B,): where the first token is predicted
    prompts, prompt_of_row = batch["prompt_id"].unique(return_inverse=True) if "prompt_id" in batch else (start, None)
    if len(prompts) == len(start) or not model.shares_prompts or (start == 0).any():
        return {"input_ids": input_ids[:, :-1], "use_cache": False}, completion_positions(batch)
    a_row = torch.zeros_like(prompts).scatter_(0, prompt_of_row, torch.arange(len(start), device=start.device))
    column = torch.arange(-int(start.max()), 0, device=start.device) + start[a_row, None]  # (prompts, P), <0: padding
    attention, column = (column >= 0).long(), column.clamp(min=0)
    cache, prompt_ids = DynamicCache(config=model.config), input_ids[a_row].gather(1, column)
    read(prompt_ids, attention_mask=attention, position_ids=column, cache=cache, use_cache=True)
    cache.reorder_cache(prompt_of_row)
    mask = batch["mask"].bool()
    column = start[:, None] + torch.arange(mask.shape[1], device=start.device)  # (B, T)
    column = column.clamp(max=input_ids.shape[1] - 1)
    attention = torch.cat([attention[prompt_of_row], torch.ones_like(column)], 1)
    inputs = {"input_ids": input_ids.gather(1, column), "position_ids": column, "attention_mask": attention}
    return inputs | {"cache": cache, "use_cache": True}, mask


def completion_logits(model, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (n, V) that predict the batch's n tokens under the mask, in row order, and those tokens (n,)."""
    with autocast(model):
        inputs, keep = completion_inputs(model, partial(model, logits_to_keep=1), batch)
        logits = model(**inputs, logits_to_keep=keep).logits
    return logits, batch["input_ids"][:, 1:][completion_positions(batch)]


def logprobs_of(model, temperature: float, batch: dict) -> torch.Tensor:
    """Log-probabilities of the completion tokens, (B, T), 0 outside the mask."""
    return scatter_tokens(token_logprobs(*completion_logits(model, batch), temperature), batch["mask"])


def logprobs_and_entropy_of(model, temperature: float, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, and the entropy in nats of the distribution that each token was drawn from."""
    logits, ids = completion_logits(model, batch)
    logprobs, entropy = LogprobsAndEntropy.apply(upcast(logits, temperature), ids)
    return scatter_tokens(logprobs, batch["mask"]), scatter_tokens(entropy, batch["mask"])


def weighted_sum(x: torch.Tensor, weights: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """(x * weights).sum(dim), over all or one dimension; with a mask as weights, the sum under the mask."""
    return (x.masked_fill(weights == 0, 0.0) * weights).sum(dim)


def masked_mean(x: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Mean of x where the mask is 1, over all or one dimension; 0 where the mask is empty."""
    return weighted_sum(x, mask != 0, dim) / (mask != 0).sum(dim).clamp(min=1)


def loss_weights(mask: torch.Tensor, aggregation: str, max_new_tokens: int | None = None) -> torch.Tensor:
    """(B, T): the share of the minibatch's loss that each token carries; compute it before the minibatch is cut.

    "sequence": mean over a sequence's tokens, then over sequences (GRPO); "token": mean over all tokens (DAPO);
    "constant": sum over tokens / max_new_tokens, mean over sequences (Dr. GRPO); "sum": sum over tokens, mean over
    sequences (RLOO). A row with an empty mask carries nothing; it counts in the mean over sequences."""
    if aggregation == "sequence":
        return mask / mask.sum(1, keepdim=True).clamp(min=1) / len(mask)
    if aggregation == "token":
        return mask / mask.sum().clamp(min=1)
    if aggregation == "constant":
        return mask / max_new_tokens / len(mask)
    if aggregation == "sum":
        return mask / len(mask)
    raise ValueError(f"aggregation must be sequence, token, constant or sum, not {aggregation!r}")


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: str) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference) on samples of the policy (Schulman, "Approximating KL divergence").

    k1 and k3 are unbiased. As a loss the expected gradient of k1 is 0, of k2 that of KL(policy || reference), of k3
    that of KL(reference || policy). k3's exponent is clamped at 20 and expm1 keeps it right near 0."""
    log_ratio = upcast(logprobs) - upcast(ref_logprobs)
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.clamp(-1e4, 1e4) ** 2  # no gradient, not nan, for an inf or a nan that a mask hides
    if estimator == "k3":
        log_ratio = log_ratio.clamp(min=-20)
        return torch.expm1(-log_ratio) + log_ratio
    raise ValueError(f"estimator must be k1, k2 or k3, not {estimator!r}")


def importance_weighted(weights, logprobs: torch.Tensor, sampled_logprobs: torch.Tensor, cap: float) -> torch.Tensor:
    """weights times min(trained / sampled probability, cap), without a gradient: truncated importance sampling (Ionides
    2008), for a sampler that is not quite the trained model. Policy ratios start from logprobs: no gap counts twice."""
    log_ratio = (logprobs.detach() - sampled_logprobs).masked_fill(weights == 0, 0.0)
    return weights * log_ratio.exp().clamp(max=cap)


def at_last_token(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(B,) -> (B, T): x on the last token under the mask of each row, 0 elsewhere."""
    return torch.where((mask.cumsum(1) == mask.sum(1, keepdim=True)) & (mask != 0), x[:, None], 0.0)


def from_first(rewards: torch.Tensor) -> torch.Tensor:
    """(..., G): rewards minus the first; exactly 0 where rounding alone tells them apart (4 units of it)."""
    apart = rewards - rewards[..., :1]
    size = rewards.abs().amax(-1, keepdim=True)
    return apart.masked_fill(apart.abs() <= 4 * torch.finfo(rewards.dtype).eps * size, 0.0)


def normalize(rewards: torch.Tensor) -> torch.Tensor:
    """(B,): (reward - mean) / std over the batch; sample std; exactly 0 where all rewards are equal."""
    rewards = from_first(rewards)
    return (rewards - rewards.mean()) / (rewards.std(correction=int(len(rewards) > 1)) + 1e-8)


def no_signal(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """(N,) bool: the groups in which all rewards are equal, so that nothing can be learnt from comparing them."""
    return (from_first(rewards.view(-1, group_size)) == 0).all(1)


# ============================================= second half: plumbing =============================================

# --- command line ---
# A script's options are the fields of its Args, and their types say what is allowed. Of their names only two are known
# here, resume and output_dir, which make the run folder; a script may leave them out.

Positive = Annotated[TypeVar("Number", int, float), "above 0"]
Share = Annotated[float, "from 0 to 1"]  # numbers that are neither: 0 or more
asked_to_stop: list[int] = []  # the signals that have come


def launch(main: Callable, Args: type, description: str) -> None:
    """Parse the command line into Args and run main(args); an InputError ends the run with its sentence."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="replace")  # a log file shows each step as it comes
        stream.write, stream.flush = (partial(if_read, fn, stream) for fn in (type(stream).write, type(stream).flush))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, ask_to_stop)
            in_child = signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL  # a pool works until it is ended
            os.register_at_fork(after_in_child=partial(signal.signal, number, in_child))
    if NUM_RANKS > 1:  # one rank's reward function may take its time
        dist.init_process_group(timeout=timedelta(days=1))
    try:
        main(parsed(Args, description))
    except ModuleNotFoundError as error:  # what is optional is imported where it is used
        sys.exit(f"error: {error}; pip install {error.name}")
    except InputError as error:
        sys.exit(f"error: {error}")
    if NUM_RANKS > 1:
        dist.destroy_process_group()


def if_read(write: Callable, *args) -> None:
    """Who reads the output may be gone: a terminal that was closed, a | tee that Ctrl-C has ended. The run goes on."""
    with suppress(OSError):
        write(*args)


def ask_to_stop(number: int, frame) -> None:
    """The first signal lets the step finish, so that it can be saved; the second stops at once."""
    if asked_to_stop and NUM_RANKS == 1:  # torchrun passes on what the terminal has sent: once more is no second wish
        raise KeyboardInterrupt
    asked_to_stop.append(number)
    say(f"stopping after this step, with a checkpoint{'; once more to stop at once' * (NUM_RANKS == 1)}", sys.stderr)


def say(text: str, file=None) -> None:
    """Print, on rank 0."""
    if RANK == 0:
        print(text, file=file or sys.stdout)


def parsed(Args: type, description: str):
    """The command line. A resumed run goes on in the folder that it was started in, its options are the defaults."""
    parse = partial(tyro.cli, Args, description=description, console_outputs=RANK == 0)
    args = parse()
    if getattr(args, "resume", None) is not None:
        run_folder = str(Path(args.resume).resolve())
        with explained(f"--resume {run_folder} can't be continued"):
            saved = dict(json.loads(Path(run_folder, "args.json").read_text()))
            os.chdir(saved["started_in"])  # its relative paths are meant from there
        if saved.get("script") != Path(sys.argv[0]).stem:
            raise InputError(f"--resume {run_folder} is a run of {saved.get('script')}.py")
        saved |= {"resume": run_folder, "output_dir": run_folder}
        saved = {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items() if k in vars(args)}
        args = replace(parse(default=replace(args, **saved)), resume=run_folder)
        for name in [name for name in saved if getattr(args, name) != saved[name]]:
            say(f"resuming with --{name.replace('_', '-')} {getattr(args, name)} (was {saved[name]})")
    for name, kind in get_type_hints(Args, include_extras=True).items():
        value, rules = getattr(args, name), ("above 0", "from 0 to 1")
        rule = next((rule for rule in rules if rule in str(kind)), "0 or more")
        most = 1 if rule == "from 0 to 1" else sys.float_info.max
        if isinstance(value, int | float) and not (0 < value <= most or (value == 0 and rule != "above 0")):
            raise InputError(f"--{name.replace('_', '-')} must be {rule}, not {value}")
    return args


@contextmanager
def explained(what: str):
    """Whatever a library raises in here ends the run with one sentence: what, and the first one of its own."""
    try:
        yield
    except Exception as error:
        raise InputError(f"{what}: {' '.join(str(error).split()).partition('. ')[0]}") from error


# --- ranks ---
# Several processes, as torchrun starts them. Each holds every batch in full and computes the same advantages from it.
# What is split is the work, and the models' weights, gradients and optimizer state (FSDP2, arXiv:2304.11277).

RANK = int(os.environ.get("RANK", "0"))
NUM_RANKS = int(os.environ.get("WORLD_SIZE", "1"))


def on_every_rank(mine) -> list:
    """[mine of each rank], on every rank; tensors should be on the CPU."""
    found = [mine] * NUM_RANKS
    if NUM_RANKS > 1:
        dist.all_gather_object(found, mine)
    return found


def in_parts(fn: Callable, count: int) -> list:
    """The lists fn(range) of the ranks' parts of count things, joined; without a part, the last is done and dropped."""
    mine = range(count * RANK // NUM_RANKS, count * (RANK + 1) // NUM_RANKS)
    found = fn(mine or range(count - 1, count))
    return [thing for part in on_every_rank(found if mine else []) for thing in part]


def summed(x: torch.Tensor) -> torch.Tensor:
    """x, summed over all ranks in place."""
    if NUM_RANKS > 1:
        dist.all_reduce(x)
    return x


def stopping() -> bool:
    """Whether a signal to stop has come, to whichever rank; all ranks get the same answer."""
    asked_to_stop.extend(max(on_every_rank(asked_to_stop[:1])))
    return bool(asked_to_stop)


def placed(model, device: torch.device):
    """The model on its device or, with several ranks, spread over them: each layer is gathered when it is needed."""
    if NUM_RANKS == 1:
        return model.to(device)
    mesh = dist.init_device_mesh(device.type, (NUM_RANKS,))
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in [*reversed(layers), model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
        module.set_gradient_divide_factor(1.0)  # a sum, not a mean: the weights of a loss are those of all ranks
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    model.set_reduce_scatter_unused_params(True)  # the rows of a rank may leave an expert out
    return model


@contextmanager
def gathered(model):
    """The whole weights on each rank, for many forward passes without gradients. All ranks must come in."""
    modules = [module for module in model.modules() if hasattr(module, "unshard")]
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    yield
    for module in modules:
        module.set_reshard_after_forward(True, recurse=False)
        module.reshard()


# --- models ---
# Folders or hub ids, from safetensors only and never with code of their own. Weights that are trained are float32: in
# bfloat16 a step of 1e-6 would be rounded away. Passes may be bfloat16 (autocast).


def pick_device(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of the passes; "auto" is the accelerator if there is one, and bfloat16 on cuda only."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    with explained(f"--device {device} can't be used here"):
        torch.zeros(1, device=device).tolist()
        if NUM_RANKS > 1 and device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if device == "cpu":  # else transformers copies keys and values for every query head where there is a mask
        os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    say(f"device: {device}{f' x {NUM_RANKS}' * (NUM_RANKS > 1)}, float32 weights, {dtype} passes")
    return torch.device(device), getattr(torch, dtype)


def locate(path: str) -> str:
    """The absolute path, if it exists here or else beside this file (tiny/, from anywhere); or else the hub id."""
    found = [place.resolve() for place in (Path(path), Path(__file__).parent / path) if place.exists()]
    if not found and path.startswith("tiny/"):
        raise InputError(f"{path} is not here: copy tiny/ from the repository, or name your own model, data and reward")
    return str(found[0]) if found else path


def load_tokenizer(path: str):
    with explained(f"no tokenizer could be loaded from {path}, a folder or a hub id"):
        return transformers.AutoTokenizer.from_pretrained(locate(path), trust_remote_code=False)


def load_model(kind, path: str, **options):
    """kind.from_pretrained of a folder or a hub id: float32 weights, all of which must be there."""
    options |= {"dtype": torch.float32, "use_safetensors": True, "trust_remote_code": False}
    options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
    with explained(f"no model could be loaded from {path}, a folder or a hub id"):
        model, info = kind.from_pretrained(locate(path), **options)
    wrong = {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}
    wrong |= {name for name in info["unexpected_keys"] if name.startswith("score.")}  # of a classifier
    if getattr(config := model.config.get_text_config(), "output_router_logits", False):
        config.output_router_logits = False  # their auxiliary loss is in no objective here
    if wrong:
        kind = f"{type(model).__name__} ({options.get('num_labels', 'no')} label)"
        raise InputError(f"{path} is no {kind}: its weights do not fit at {', '.join(sorted(wrong)[:3])}")
    return model


def prepare(model, dtype: torch.dtype, trainable: bool, gradient_checkpointing: bool = False):
    """Without dropout, so that the ratio of two passes is exact, and with what the passes need to know."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if gradient_checkpointing and not layers:
        raise InputError(f"--gradient-checkpointing: {type(model).__name__} has no layers that can be recomputed")
    for layer in layers if gradient_checkpointing else []:
        layer.forward = partial(recomputed, layer.forward, use_reentrant=False)  # their own switch needs dropout on
    if not trainable and dtype != torch.float32:  # what never changes is cast once, not in every pass: the same numbers
        embedded = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
        for module in [module for module in model.modules() if isinstance(module, torch.nn.Linear)]:
            if module.out_features == 1:  # a reward: bfloat16 has 8 bits, which make equal what is not
                module.forward = partial(linear_in_float32, module)
            elif id(module.weight) not in embedded:
                module.to(dtype)
    # a shared prompt's last layer gets its gradient through the cache alone: it must be whole, and gathers no weights
    is_whole = all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)
    model.shares_prompts = is_whole and NUM_RANKS == 1 and not gradient_checkpointing
    model.compute_dtype = dtype
    return model.eval().requires_grad_(trainable)


def linear_in_float32(module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return linear(x.float(), module.weight, module.bias)


def autocast(model):
    """Run a forward pass in the model's compute dtype, whatever its weights are in."""
    device = next(model.parameters()).device.type
    return torch.autocast(device, model.compute_dtype, enabled=model.compute_dtype != torch.float32)


def load_policy(path, device, dtype, checkpoint=None, lora_rank=0, gradient_checkpointing=False, seed=0):
    """A causal language model to be trained or, with lora_rank, a low-rank adapter (LoRA, arXiv:2106.09685) on all its
    linear layers but the output, with alpha twice the rank; a resumed run's comes from its checkpoint."""
    for folder, wanted in ((path, 0), (checkpoint or path, lora_rank if checkpoint else 0)):
        config = Path(locate(folder)) / "adapter_config.json"
        if (found := json.loads(config.read_text()).get("r", "?") if config.is_file() else 0) != wanted:
            raise InputError(f"{folder} is an adapter of rank {found}, not {wanted} (0: a whole model; merge it first)")
    model = load_model(transformers.AutoModelForCausalLM, path if lora_rank else checkpoint or path)
    model = prepare(model, dtype, not lora_rank, gradient_checkpointing)
    if lora_rank:
        import peft

        if checkpoint:
            model = peft.PeftModel.from_pretrained(model, checkpoint, is_trainable=True)
        else:
            options = {"lora_alpha": 2 * lora_rank, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                model = peft.get_peft_model(model, peft.LoraConfig(r=lora_rank, **options))
    return placed(model.eval(), device)


def load_reference(path: str, policy):
    """The frozen model that the policy started from; where an adapter is trained, the policy with its adapter off."""
    if hasattr(policy, "disable_adapter"):
        model = object.__new__(type(policy))  # the same weights; copy.copy calls __init__ where they are sharded
        model.__dict__ = policy.__dict__ | {"forward": policy.disable_adapter()(policy.forward)}
        return model
    model = load_model(transformers.AutoModelForCausalLM, path)
    return placed(prepare(model, policy.compute_dtype, trainable=False), policy.device)


# --- rewards ---
# A dict: name -> (function, weight). A function gets prompts and completions as texts, and the dataset's whole rows; it
# gives a number for each. A reward model is one, too, and reads the text with a tokenizer and a template of its own.

NUMBER = r"(?:\d+\s+(?=\d+/\d))?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,2}\b|/\d+)?"


def answer_of(row: dict) -> str:
    answer = row.get("answer")
    if not isinstance(answer, str | int | float):
        raise InputError(f'this reward needs a column "answer", a text or a number; this row has none: {row}')
    return str(int(answer) if isinstance(answer, float) and answer.is_integer() else answer)  # 42.0 is 42


def exact_match(prompts: list[str], completions: list[str], rows: list[dict]) -> list[float]:
    """1.0 where the completion is the row's "answer", spaces around it aside."""
    return [float(c.strip() == answer_of(row).strip()) for c, row in zip(completions, rows, strict=True)]


def math_answer(prompts: list[str], completions: list[str], rows: list[dict]) -> list[float]:
    """1.0 where the completion's final answer equals the row's "answer": numbers exactly, formulas by math-verify.

    NOTE: math-verify gives up after 5 s, which counts as wrong, and hands what looks like a formula to sympy."""
    scores = []
    for completion, answer in zip(completions, map(answer_of, rows), strict=True):
        number, found = number_of(final_answer(answer) or answer), final_answer(completion)
        if number is not None:
            if found is None:  # then the last number
                found = (re.findall(rf"(?:(?<![\w.)])-)?{NUMBER}", plain(completion)) or [""])[-1]
            scores.append(number_of(found) == number)
            continue
        from math_verify import parse, verify

        gold = parse(answer if "$" in answer or "boxed" in answer else f"${answer}$")
        if not gold or not re.search(r"\d|\\[a-z]|[-+*/^=]", answer):
            raise InputError(f"math_answer can't judge the answer {answer!r}; exact_match can")
        scores.append(any(verify(gold, parse(form)) for form in (completion, f"${completion}$")))
    return [float(score) for score in scores]


def final_answer(text: str) -> str | None:
    """What is in the last \\boxed{}, else after the last ####."""
    boxed = re.findall(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}", text)
    return boxed[-1] if boxed else text.rpartition("####")[2] if "####" in text else None


def plain(text: str) -> str:
    """Without what LaTeX and Markdown put around a number: \\frac{1}{2} is 1/2, **$1{,}000** is 1,000."""
    text = re.sub(r"\\?[$€£¥%]|\*\*", "", text).replace("−", "-").replace("{,}", ",")
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text)
    return re.sub(r"\\[dt]?frac\s*(?:\{(-?\d+)\}\{(\d+)\}|(\d)(\d))", r" \1\3/\2\4", text)


def number_of(text: str) -> Fraction | None:
    """The number in a text that is just a number, exactly: 1,234.50, -3/4, 2 3/4, x = 5, 18 apples (2 pi is none)."""
    name, unit = r"(?:[A-Za-z]+\s*[=:\n]\s*)?", r"(?:\s+[A-Za-z]{3,}[A-Za-z ]*)?"
    match = re.fullmatch(rf"{name}([-+]?)\s*({NUMBER}){unit}[\s.]*", plain(text).strip())
    with suppress(ValueError, ZeroDivisionError):  # thousands of digits, or over 0
        return match and Fraction(match[1] + "1") * sum(map(Fraction, match[2].replace(",", "").split()))


def load_reward_fn(spec: str) -> Callable:
    """exact_match, math_answer, or path/to/file.py:function."""
    if spec in ("exact_match", "math_answer"):
        return {"exact_match": exact_match, "math_answer": math_answer}[spec]
    path, _, name = spec.rpartition(":")
    file = Path(locate(path)).resolve()
    if not file.is_file() or file.suffix != ".py":
        raise InputError(f"--reward-fn {spec} is neither exact_match, math_answer nor path/to/file.py:function")
    sys.path.append(str(file.parent))  # as any script, it may import its neighbours
    found = importlib.util.spec_from_file_location(re.sub(r"\W", "_", str(file)), file)
    module = importlib.util.module_from_spec(found)
    sys.modules[module.__name__] = module  # so that what it defines can be pickled, for a pool of processes
    found.loader.exec_module(module)
    with explained(f"--reward-fn {spec} names no function"):
        return partial(getattr(module, name))  # what can't be called is refused here


def reward_model_fn(model, tokenizer, batch_tokens: int, system_prompt: str | None) -> Callable:
    """A reward function that reads prompt + completion as text, messages in the reward model's own chat template."""

    def ids_of(prompt: str, completion: str, row: dict) -> list[int]:
        messages = conversation(row["prompt"], system_prompt)
        is_text = isinstance(messages, str)
        messages = prompt + completion if is_text else [*messages, {"role": "assistant", "content": completion}]
        with explained("messages can't be put through the chat template of the reward model's tokenizer"):
            return encoded(tokenizer, messages)[0]

    @torch.no_grad()
    def fn(prompts: list[str], completions: list[str], rows: list[dict]) -> list[float]:
        ids, scores = [*map(ids_of, prompts, completions, rows)], {}
        longest_first = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
        pieces = cut_rows(longest_first, lambda piece: len(piece) * len(ids[piece[0]]), batch_tokens, len(ids))
        with gathered(model), autocast(model), explained("the reward model can't read that many tokens, or not these"):
            for piece in pieces:
                texts = [torch.tensor(ids[i], device=model.device) for i in piece]
                # NOTE: transformers reads a score at the last token that is not the pad id: no row may end in that one
                pad_id = next(i for i in range(len(piece) + 1) if i not in [ids[row][-1] for row in piece])
                model.config.get_text_config().pad_token_id = pad_id
                inputs = pad_sequence(texts, batch_first=True, padding_value=pad_id)
                attention = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
                logits = model(input_ids=inputs, attention_mask=attention).logits[:, 0]
                scores |= zip(piece, logits.float().tolist(), strict=True)
        return [scores[i] for i in range(len(ids))]

    return fn


def load_rewards(reward_model, reward_fn, reward_weights, system_prompt, policy, batch_tokens) -> dict:
    """The reward model first, then the functions, each with its weight (1 by default; 0: only watched)."""
    rewards, names = {}, [spec.rpartition(":")[2] for spec in reward_fn]
    if len(set(reward_fn)) < len(reward_fn):
        raise InputError(f"--reward-fn {' '.join(reward_fn)} names a function twice; --reward-weights counts it so")
    if reward_model or not reward_fn:
        reward_model = reward_model or "tiny/reward"
        model = load_model(transformers.AutoModelForSequenceClassification, reward_model, num_labels=1)
        model = placed(prepare(model, policy.compute_dtype, trainable=False), policy.device)
        tokenizer = load_tokenizer(reward_model)
        rewards["reward_model"] = reward_model_fn(model, tokenizer, batch_tokens, system_prompt)
    for spec, name in zip(reward_fn, names, strict=True):
        rewards[spec if [*names, *rewards].count(name) > 1 else name] = load_reward_fn(spec)
    weights = reward_weights or [1.0] * len(rewards)
    if len(weights) != len(rewards) or not all(map(math.isfinite, weights)):
        raise InputError(f"--reward-weights {weights} must have a number for each of {', '.join(rewards)}")
    return {name: (rewards[name], weight) for name, weight in zip(rewards, weights, strict=True)}


def score(rewards: dict, batch: dict) -> dict:
    """Entries for the batch: "rewards" (B,), the weighted sum, and "reward/NAME" (B,) of each if there are several."""
    prompts, completions = batch["prompts"], batch["completions"]
    starts = [i for i, prompt in enumerate(prompts) if i == 0 or prompt is not prompts[i - 1]] + [len(prompts)]

    def score_groups(groups: range) -> list[tuple]:
        found, rows = [], slice(starts[groups.start], starts[groups.stop])  # all completions of a prompt in one call
        for name, (fn, _) in rewards.items():
            texts, data = [prompt.text for prompt in prompts[rows]], [prompt.row for prompt in prompts[rows]]
            values = fn(texts, completions[rows], copy.deepcopy(data))  # it may edit what it gets
            with explained(f"reward {name} returned {values!r:.60}, which is no list of {len(data)} numbers"):
                found.append([float(value + 0.0) for _, value in zip(data, values, strict=True)])  # no texts
            for prompt, text, value in zip(prompts[rows], completions[rows], found[-1], strict=True):
                if not abs(value) < 1e30:  # nan, and what float32 can't hold
                    raise InputError(f"reward {name} gave {value} for prompt {prompt.text!r}, completion {text!r}")
        return [*zip(*found, strict=True)]

    columns = torch.tensor(in_parts(score_groups, len(starts) - 1), dtype=torch.float64).unbind(1)
    total = sum(weight * x for (_, weight), x in zip(rewards.values(), columns, strict=True))
    each = {f"reward/{name}": x for name, x in zip(rewards, columns, strict=True)} if len(rewards) > 1 else {}
    return {name: x.float().to(batch["mask"].device) for name, x in ({"rewards": total} | each).items()}


# --- data ---
# Rows with a "prompt", a text or chat messages, and any other columns, all of which reach the reward functions.


def read_rows(dataset: str):
    """(where, row) for each row of a JSONL or CSV file."""
    path = Path(locate(dataset))
    if not path.is_file() or path.suffix == ".parquet":
        raise InputError(f"dataset {dataset} is no JSONL or CSV file; datasets.load_dataset(...).to_json makes one")
    with explained(f"{dataset} is not UTF-8 text"):
        text = path.read_text(encoding="utf-8-sig")
    if path.suffix.lower() == ".csv":
        csv.field_size_limit(2**30)
        for i, row in enumerate(csv.DictReader(io.StringIO(text)), 1):
            if None in row or None in row.values():
                raise InputError(f"{dataset} row {i} has not as many fields as the first line")
            yield f"{dataset} row {i}", row
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            with explained(f"{dataset} line {number} is not JSON, one object a line"):
                row = json.loads(line)
            yield f"{dataset} line {number}", row


def conversation(prompt, system_prompt: str | None):
    """A prompt as models see it: a text, or messages; a system prompt, even an empty one, makes messages of a text."""
    if system_prompt is None:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return ([{"role": "system", "content": system_prompt}] if system_prompt else []) + messages


def encoded(tokenizer, prompt, **how) -> tuple[list[int], str]:
    """Token ids and text of a text (no second start token) or of messages, in whose template all special tokens are."""
    is_whole = not isinstance(prompt, str) or (tokenizer.bos_token and prompt.startswith(tokenizer.bos_token))
    text = prompt if isinstance(prompt, str) else tokenizer.apply_chat_template(prompt, tokenize=False, **how)
    return tokenizer(text, add_special_tokens=not is_whole).input_ids, text


def to_prompt(where: str, row: dict, tokenizer, system_prompt: str | None) -> Prompt:
    """A dataset row as the policy reads it."""
    prompt = row.get("prompt") if isinstance(row, dict) else None
    is_chat = isinstance(prompt, list) and all(isinstance(m, dict) and type(m.get("content")) is str for m in prompt)
    is_text = isinstance(prompt, str) and not re.match(r"""\s*\[\s*\{\s*["'](role|content|from|value)["']""", prompt)
    if not prompt or not (is_chat or is_text):
        raise InputError(f'{where} has no "prompt" that is a text, or messages with texts as "content": {row!s:.200}')
    if is_chat and system_prompt and prompt[0].get("role") == "system":
        raise InputError(f"{where} has a system message of its own; leave out --system-prompt")
    if is_chat and prompt[-1].get("role") == "assistant":
        raise InputError(f"{where} ends with a message of the assistant, whose turn it should be")
    with explained(f"{where} can't be put through the tokenizer's chat template (--system-prompt makes chats)"):
        ids, text = encoded(tokenizer, conversation(prompt, system_prompt), add_generation_prompt=True)
    if text == prompt and ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
        ids = ids[:-1]  # some tokenizers end every text with it
    return Prompt(ids, text, row)


def load_prompts(dataset: str, tokenizer, max_prompt_tokens: int, system_prompt: str | None = None) -> list[Prompt]:
    """The prompts of a dataset; those over max_prompt_tokens are left out, and counted on the screen."""
    found = [to_prompt(where, row, tokenizer, system_prompt) for where, row in read_rows(dataset)]
    prompts = [prompt for prompt in found if len(prompt.ids) <= max_prompt_tokens]
    if not prompts:
        raise InputError(f"{dataset} has no prompt of at most --max-prompt-tokens {max_prompt_tokens}, in {len(found)}")
    say(f"{dataset}: {len(prompts)} prompts, {len(found) - len(prompts)} left out with over {max_prompt_tokens} tokens")
    return prompts


def load_eval_prompts(eval_dataset: str | None, dataset: str, tokenizer, **how) -> list[Prompt]:
    """Held-out prompts: of eval_dataset, else of NAME-eval.jsonl beside NAME.jsonl (or .csv), else none."""
    beside = str(Path(dataset).with_stem(Path(dataset).stem + "-eval"))
    if eval_dataset or Path(locate(beside)).is_file():
        return load_prompts(eval_dataset or beside, tokenizer, **how)
    say("no --eval-dataset: nothing is evaluated on held-out prompts")
    return []


def next_prompts(prompts: list[Prompt], count: int, state: dict, seed: int) -> list[Prompt]:
    """The next prompts of an endless sequence of epochs, each shuffled in its own way; moves state["consumed"] on."""
    places = [divmod(state["consumed"] + i, len(prompts)) for i in range(count)]
    state["consumed"] += count
    orders = {e: torch.randperm(len(prompts), generator=generator(seed, "prompts", e)).tolist() for e in dict(places)}
    return [prompts[orders[epoch][i]] for epoch, i in places]


# --- evaluation, checkpoints, logging ---
# Evaluations draw the same noise every time. A checkpoint is an ordinary model folder, with what --resume needs beside
# it; it gets its name only when it is complete: a run that is killed at any moment goes on from the newest, exactly.


def evaluate(rollout: Callable, rewards: dict, prompts: list[Prompt], num_samples: int, temperature: float, seed: int):
    """Mean scores of held-out prompts by metric name, and a few samples; pass@k: the mean best of k completions."""
    if not prompts:
        return {}, []
    batch = rollout(prompts, num_samples, temperature=temperature, key=(seed, "evaluate"))
    batch |= score(rewards, batch)
    metrics = {"eval_reward": batch["rewards"].mean().item()}
    metrics |= {f"eval_{name}": x.mean().item() for name, x in batch.items() if name.startswith("reward/")}
    if num_samples > 1:
        metrics[f"eval_pass@{num_samples}"] = batch["rewards"].view(-1, num_samples).amax(1).mean().item()
    return metrics, [sample | {"held_out": True} for sample in samples_of(batch, num_samples)]


def samples_of(batch: dict, group_size: int, **numbers: torch.Tensor) -> list[dict]:
    """The best and worst completions of the first prompts, and their numbers (where each token has one, the mean)."""
    numbers |= {"reward": batch["rewards"], "truncated": batch["truncated"]}
    numbers |= {name: x for name, x in batch.items() if name.startswith("reward/")}
    numbers = {k: (x if x.dim() == 1 else masked_mean(x, batch["mask"], 1)).tolist() for k, x in numbers.items()}
    texts = {"prompt": [prompt.text for prompt in batch["prompts"]], "completion": batch["completions"]}
    known, chosen = texts | numbers | {"row": [prompt.row for prompt in batch["prompts"]]}, []
    for first in range(0, min(4 * group_size, len(known["row"])), group_size):
        group = sorted(range(first, first + group_size), key=lambda i: -known["reward"][i])
        chosen += dict.fromkeys((group[0], group[-1]))
    return [{name: x[i] for name, x in known.items()} for i in chosen[:4]]


def rollout_metrics(batch: dict, group_size: int) -> dict:
    """What is logged of a rollout, before anything is filtered or shaped."""
    metrics = {"reward": batch["rewards"].mean().item(), "reward_std": batch["rewards"].std(unbiased=False).item()}
    metrics |= {name: x.mean().item() for name, x in batch.items() if name.startswith("reward/")}
    metrics["completion_length"] = batch["mask"].sum(1).mean().item()
    metrics["truncated_fraction"] = batch["truncated"].float().mean().item()
    if group_size > 1:
        metrics["no_signal_fraction"] = no_signal(batch["rewards"], group_size).float().mean().item()
    return metrics


def update_metrics(batch: dict, losses: dict, statistics: dict, per_update: dict, laps: dict) -> dict:
    """What is logged of a step's updates. losses and per_update are divided by the number of updates, statistics by the
    sum of the loss weights; per_update is the same on all ranks, the others hold a rank's share.

    sampler_gap: nats per token between the log-probabilities as sampled and as scored; kl: nats per completion (k3)."""
    sums, updates = {**losses, **statistics}, per_update.pop("updates")
    shares = torch.tensor([float(value) for value in sums.values()], dtype=torch.float64)
    sums = dict(zip(sums, summed(shares).tolist(), strict=True))
    weights, gap = sums.pop("weights"), sums.pop("sampler_gap") / (sums.pop("gap_weights") or 1.0)
    if gap > 0.5:
        what = f"log-probabilities as sampled and as trained differ by {gap:.2f} nats per token"
        raise InputError(f"{what}: a sampler that is too far off, or a model for which padding or a cache goes wrong")
    metrics = {name: sums.pop(name) / updates for name in losses}
    metrics |= {name: float(value) / updates for name, value in per_update.items()} | {"sampler_gap": gap}
    metrics |= {name: value / weights for name, value in sums.items() if weights > 0}
    if "ref_logprobs" in batch:
        kl = kl_estimate(batch.get("old_logprobs", batch["logprobs"]), batch["ref_logprobs"], "k3")
        metrics["kl"] = weighted_sum(kl, batch["mask"], 1).mean().item()
    return metrics | {"tokens_per_second": batch["mask"].sum().item() / sum(laps.values())} | laps


class Timer:
    """Seconds of each lap, waiting for the GPU first so that they belong to the right one."""

    def __init__(self, device: torch.device):
        self.device, self.laps, self.last = device, {}, time.perf_counter()

    def lap(self, name: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.laps[f"time_{name}"], self.last = now - self.last, now


def checkpoints(run_folder: Path) -> list[Path]:
    """The complete ones, oldest first."""
    complete = [path.parent for path in run_folder.glob("checkpoint-*/state.pt") if path.parent.name[11:].isdigit()]
    return sorted(complete, key=lambda path: int(path.name[11:]))


def load_checkpoint(run_folder: str | None) -> tuple[str | None, dict]:
    """The newest complete checkpoint of a run folder and its state; for a new run None, and the state to begin with."""
    if not run_folder:
        return None, {"step": 0, "consumed": 0}
    if not (found := checkpoints(Path(run_folder))):
        raise InputError(f"{run_folder} holds no complete checkpoint to continue from; begin anew in another folder")
    with explained(f"{found[-1]}/state.pt is damaged, or not of a run; move its folder away"):
        return str(found[-1]), torch.load(found[-1] / "state.pt", map_location="cpu", weights_only=True)


def load_state(trained, optimizer, state: dict) -> None:
    """What a checkpoint holds beside the policy, taken out of state; each rank keeps its part."""
    others = torch.nn.ModuleDict({name: module for name, module in trained.items() if name != "policy"})
    with explained("the checkpoint does not fit the models, whose options must stay as they were"):
        options = whole.StateDictOptions(full_state_dict=True)
        if others:
            whole.set_model_state_dict(others, state.pop("weights"), options=options)
        whole.set_optimizer_state_dict(trained, optimizer, state.pop("optimizer"), options=options)


def save_model(folder: Path, trained, tokenizer, optimizer=None, state: dict | None = None) -> None:
    """The policy as a folder that from_pretrained loads; with an optimizer, what --resume needs, too. All ranks call
    this, weights and optimizer state are put together by name, and rank 0 writes."""
    options = whole.StateDictOptions(full_state_dict=True, cpu_offload=NUM_RANKS > 1, ignore_frozen_params=True)
    weights, optimizer_state = whole.get_state_dict(trained, [optimizer] if optimizer else [], options=options)
    if RANK > 0:
        return
    names = {name for name, _ in [*trained.named_parameters(), *trained.named_buffers()]}  # of tied weights one
    others = {name: weights.pop(name) for name in [*weights] if not name.startswith("policy.")}
    weights = {name.removeprefix("policy."): x for name, x in weights.items() if name in names}
    unfinished = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    with explained(f"{folder} could not be saved (what was saved before is still there)"):
        trained["policy"].save_pretrained(unfinished, state_dict=weights)
        tokenizer.save_pretrained(unfinished)
        if optimizer:
            torch.save(state | {"weights": others, "optimizer": optimizer_state}, unfinished / "state.pt")
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def save_checkpoint(run_folder: Path, step: int, trained, optimizer, tokenizer, state: dict) -> None:
    """checkpoint-STEP/; the one before it is kept, too. On a signal to stop, the run ends here."""
    save_model(run_folder / f"checkpoint-{step}", trained, tokenizer, optimizer, state | {"step": step})
    for old in checkpoints(run_folder)[:-2] if RANK == 0 else []:
        (old / "state.pt").unlink()  # first: what is half gone is no checkpoint
        shutil.rmtree(old)
    if stopping():
        say(f"stopped after step {step}; continue with --resume {run_folder}", sys.stderr)
        sys.exit(128 + asked_to_stop[0])


def open_tracker(track: str, folder: Path, config: dict, start: int) -> Callable:
    """(step, metrics) -> None, which shows a step in tensorboard or wandb under the names of metrics.jsonl."""
    if track == "wandb":
        import wandb

        run = wandb.init(project="policy-gradients", name=folder.name, dir=str(folder), config=config)
        return lambda step, metrics: run.log(metrics, step=step)
    if track == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(folder), purge_step=start + 1 if start else None, max_queue=1)
        return lambda step, metrics: [writer.add_scalar(name, x, step) for name, x in metrics.items()]
    return lambda step, metrics: None


class Logger:
    """Writes args.json, metrics.jsonl and samples.jsonl; a resumed run writes the steps after its checkpoint again."""

    def __init__(self, script: str, config: dict, output_dir: str | None, resume: str | None, start: int, track: str):
        new = on_every_rank(f"runs/{script}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")[0]
        self.dir = Path(output_dir or resume or new).absolute()
        if RANK > 0:
            return
        taken = [path for name in ("args.json", "checkpoint-*", "final") for path in self.dir.glob(name)]
        if taken and not (resume and self.dir.samefile(resume)):
            raise InputError(f"{self.dir} already holds a run; name another folder, or continue it with --resume")
        config = {"script": script, "started_in": os.getcwd()} | config
        with explained(f"{self.dir} can't be a run folder"):
            self.dir.mkdir(parents=True, exist_ok=True)
            texts = {"args.json": json.dumps(config, indent=2, default=str) + "\n"}
            for name in ("metrics.jsonl", "samples.jsonl"):
                lines = (self.dir / name).read_text().splitlines(keepends=True) if (self.dir / name).exists() else []
                kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= start]
                texts[name] = "".join(kept)
        self.track = open_tracker(track, self.dir, config, start)
        for name, text in texts.items():  # whenever the process dies, the whole old text or the whole new one
            (self.dir / f"{name}.new").write_text(text)
            if not resume or name != "args.json":  # what was typed beside --resume may not work
                (self.dir / f"{name}.new").replace(self.dir / name)
        say(f"run folder: {self.dir}{f', after step {start}' * (start > 0)}; --resume {self.dir} goes on with it")

    def log(self, step: int, metrics: dict, samples: list[dict]) -> None:
        """A line in each file and one on the screen; with an evaluation a held-out sample, of several the worst."""
        if RANK > 0:
            return
        with suppress(FileNotFoundError):  # what was typed beside --resume has worked
            (self.dir / "args.json.new").replace(self.dir / "args.json")
        for name, rows in (("metrics", [metrics]), ("samples", samples)):
            with open(self.dir / f"{name}.jsonl", "a") as file:
                file.writelines(json.dumps({"step": step} | row, default=str) + "\n" for row in rows)
        self.track(step, metrics)
        shown = "reward", "kl", "completion_length", "eval_reward", "tokens_per_second"
        say(f"step {step}: {', '.join(f'{name} {metrics[name]:.4g}' for name in shown if name in metrics)}")
        if "eval_reward" in metrics:
            say("    {prompt!r:.100} -> {completion!r:.200} ({reward:.3f})".format(**samples[-1]))


def check_fits(policy, tokenizer, prompts: list[Prompt], max_new_tokens: int) -> None:
    """Refuse now what could not work later."""
    stops = stop_ids(policy, tokenizer)
    say(f"stop tokens: {tokenizer.convert_ids_to_tokens(stops) or 'none, all completions are cut'}")
    by_length = sorted(prompts, key=lambda prompt: len(prompt.ids))
    longest, positions = len(by_length[-1].ids), getattr(policy.config, "max_position_embeddings", math.inf)
    if longest + max_new_tokens > positions:
        raise InputError(f"--max-new-tokens {max_new_tokens} after {longest} exceed the model's {positions} positions")
    tried = [by_length[0], by_length[-1], max(prompts, key=lambda prompt: max(prompt.ids))]
    noise = torch.rand(2 * len(tried), min(max_new_tokens, 16), generator=generator("check")).to(policy.device)
    with explained(f"{type(policy).__name__} can't read these prompts, or not with a cache"), autocast(policy):
        rows = sample_completions(policy, tried, noise, torch.tensor(stops, device=policy.device), 1.0)
        batch = collate(tokenizer, tried, 2, *zip(*rows, strict=True), policy=policy)
        scored = no_grad_pass(partial(logprobs_of, policy, 1.0), batch, microbatch_tokens=1)
    gap = masked_mean((scored - batch["logprobs"]).abs(), batch["mask"]).item()
    if not gap < (1e-3 if policy.compute_dtype == torch.float32 else 0.2):
        raise InputError(f"{type(policy).__name__}: sampling and scoring it differ by {gap:.2g} nats per token")
