"""Each script's whole loop against a second, naive one: row by row and token by token, in plain Python, from papers.

The script runs two steps through its own main(), with plain gradient descent in place of Adam, and records what it
sampled and every gradient it takes a step with. The naive loop below gets the sampled ids alone, keeps models of its
own, and must arrive at the same gradients and the same metrics. What stands under the mask is garbage, and the
sampler's log-probabilities are a little off. In the cases called "tool" a tool has written into the middle of most
completions: the policy reads what it wrote, and learns nothing from it.
"""

import copy
import json
import math
import random
import runpy
import statistics
from functools import lru_cache, partial
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

import cispo
import common
import grpo
import gspo
import ppo
import reinforce
import rloo

SCRIPTS = {m.__name__: m for m in (reinforce, rloo, ppo, grpo, gspo, cispo)}
REWARD = """def score(prompts, completions, rows):
    scores = [(sum(map(ord, c)) % 7) ** 2 / 18 for c in completions]
    return [0.0 if row["level"] == 0 else score for score, row in zip(scores, rows)]
"""  # of three different squares up to 36 none is the mean, where an advantage would be rounding
KL = {"k1": lambda d: d, "k2": lambda d: d**2 / 2, "k3": lambda d: math.exp(-d) - 1 + d}
each = partial(zip, strict=True)


def logprobs_of(model, prompt, completion, temperature):
    """One row, no padding: the n log-probabilities of its completion, and the entropy of each distribution."""
    logits = model(torch.tensor([prompt + completion])).logits[0] / temperature
    rows = [torch.log_softmax(logits[len(prompt) + t - 1], -1) for t in range(len(completion))]
    return [row[i] for row, i in each(rows, completion)], [-(row.exp() * row).sum() for row in rows]


class Values:
    """V before each token: a trunk and a head, on its own or on the policy's trunk."""

    def __init__(self, args, policy):
        if args.shared_backbone or not args.reward_model:
            self.trunk = policy.model if args.shared_backbone else load("tiny/policy").model
            self.head = torch.zeros(1, policy.config.hidden_size, requires_grad=True)
        else:
            model = AutoModelForSequenceClassification.from_pretrained(args.reward_model)
            self.trunk, self.head = model.model, model.score.weight
        self.parameters = [*([] if args.shared_backbone else self.trunk.parameters()), self.head]

    def __call__(self, prompt, completion):
        hidden = self.trunk(torch.tensor([prompt + completion])).last_hidden_state[0]
        return [self.head[0] @ hidden[len(prompt) + t - 1] for t in range(len(completion))]


@lru_cache
def loaded(path):
    return AutoModelForCausalLM.from_pretrained(path).eval()


def load(path):
    return copy.deepcopy(loaded(path))


def mean(x):
    return sum(x) / len(x)


def naive_advantages(name, args, batch):
    """One list per row, of a number for each token of the policy's own, and PPO's returns."""
    rewards = list(batch.scores)
    if name == "ppo":
        rewards = [r - args.missing_eos_penalty * cut for r, cut in each(rewards, batch.truncated)]
    if getattr(args, "overlong_buffer", 0):
        free = args.max_new_tokens - args.overlong_buffer
        excess = [max(0, len(c) - free) / args.overlong_buffer for c in batch.completions]
        rewards = [r - min(1, x) for r, x in each(rewards, excess)]
    if getattr(args, "normalize_rewards", False):
        rewards = [(r - mean(rewards)) / (statistics.stdev(rewards) + 1e-8) for r in rewards]
    G, B, n = args.group_size, len(rewards), [len(row) for row in batch.logprobs]
    kl = [[args.kl_coef * (p - q) for p, q in each(*rows)] for rows in each(batch.for_kl, batch.ref_logprobs)]
    if name == "rloo":
        rewards = [r - sum(k) for r, k in each(rewards, kl)]
    groups = [rewards[i // G * G : i // G * G + G] for i in range(B)]
    if name == "rloo":
        return [[r - (sum(g) - r) / (G - 1)] * k for r, g, k in each(rewards, groups, n)], None
    if name in ("grpo", "gspo", "cispo"):
        spread = {"group": statistics.stdev, "batch": lambda g: statistics.stdev(rewards), "none": lambda g: 1 - 1e-4}
        stds = [spread[args.scale_rewards](g) + 1e-4 for g in groups]
        return [[(r - mean(g)) / std] * k for r, g, std, k in each(rewards, groups, stds, n)], None
    token_rewards = [[-k_t for k_t in k] for k in kl]
    for row, r in each(token_rewards, rewards):
        row[-1] += r
    if name == "reinforce":
        powers = [args.gamma**t for t in range(max(n))]
        returns = [[sum(map(float.__mul__, row[t:], powers)) for t in range(len(row))] for row in token_rewards]
        total = [row[0] for row in returns]
        if args.weighting == "total":
            return [[g] * k for g, k in each(total, n)], None
        baselines = [(sum(total) - g) / (B - 1) * (args.weighting == "baseline") for g in total]
        return [[g - b for g in row] for row, b in each(returns, baselines)], None
    advantages, returns = [], []  # PPO: the sum of discounted one-step errors, straight from the definition
    for row, V in each(token_rewards, batch.values):
        delta = [r + args.gamma * v_next - v for r, v, v_next in each(row, V, [*V[1:], 0.0])]
        decay = args.gamma * args.gae_lambda
        advantages.append([sum(decay ** (s - t) * delta[s] for s in range(t, len(row))) for t in range(len(row))])
        returns.append([a + v for a, v in each(advantages[-1], V)])
    every = [a for row in advantages for a in row]
    scale = math.sqrt(statistics.variance(every) + 1e-8)
    return [[(a - mean(every)) / scale for a in row] for row in advantages], returns


def naive_loss(name, args, batch, rows, policy, values, advantages, returns, totals):
    """The loss of one optimizer step over the given rows, token by token of the policy's own."""
    trained = [i for i in rows if not (getattr(args, "mask_truncated", False) and batch.truncated[i])]
    tokens = sum(len(batch.own[i]) for i in trained)
    terms = []
    for i in trained:
        prompt, completion, own = batch.prompts[i], batch.completions[i], batch.own[i]
        logprobs, entropy = (batch.at(i, x) for x in logprobs_of(policy, prompt, completion, args.temperature))
        old = batch.old_logprobs[i] if hasattr(args, "clip_low") else [x.item() for x in logprobs]
        V = batch.at(i, values(prompt, completion)) if name == "ppo" else None
        n = len(own)
        shares = {"sum": 1, "sequence": 1 / n, "token": len(rows) / max(1, tokens), "constant": 1 / args.max_new_tokens}
        sequence_ratio = (sum(x - o for x, o in each(logprobs, old)) / n).exp()
        for t in range(n):
            A, x = advantages[i][t], logprobs[t]
            w = shares[getattr(args, "aggregation", "sum")] / len(rows)
            if args.is_correction_cap:
                w *= min(math.exp(old[t] - batch.logprobs[i][t]), args.is_correction_cap)
            clipped = False
            if name in ("reinforce", "rloo"):
                loss, ratio = -A * x, None
            elif name == "cispo":
                ratio = math.exp(x.item() - old[t])
                capped = min(max(ratio, 1 - args.clip_low), 1 + args.clip_high)
                loss, clipped = -capped * A * x, capped != ratio
            else:
                ratio = sequence_ratio if name == "gspo" else (x - old[t]).exp()
                low, high = 1 - args.clip_low, 1 + args.clip_high
                bound = min(max(ratio.item(), low), high)
                bound = ratio if bound == ratio.item() else bound
                loss, clipped = min(ratio * A, bound * A), (bound * A < ratio * A)
                loss = -loss
            if name in ("grpo", "gspo", "cispo") and args.kl_coef:
                d = x - batch.ref_logprobs[i][t]
                loss = loss + args.kl_coef * (d**2 / 2 if args.kl_estimator == "k2" else (-d).exp() - 1 + d)
            if name == "ppo":
                old_V, R = batch.values[i][t], returns[i][t]
                limited = old_V + max(-args.value_clip, min(args.value_clip, V[t].item() - old_V))
                limited = V[t] if abs(V[t].item() - old_V) < args.value_clip else torch.tensor(limited)
                value_loss = torch.maximum((V[t] - R) ** 2, (limited - R) ** 2) / 2
                loss = loss + args.vf_coef * value_loss
                totals["value_loss"] += w * value_loss.item()
            terms.append(w * (loss - args.entropy_coef * entropy[t]))
            totals["entropy"] += w * entropy[t].item()
            totals["weights"] += w
            if ratio is not None:
                totals["ratio_mean"] += w * (ratio if isinstance(ratio, float) else ratio.item())
                totals["clip_fraction"] += w * bool(clipped)
    return sum(terms)


CASES = [
    ("reinforce", {"max_grad_norm": 0.5}),
    ("reinforce", {"tool": True, "weighting": "total", "entropy_coef": 0.3, "normalize_rewards": True}),
    ("reinforce", {"tool": True, "weighting": "baseline", "minibatch_size": 5}),
    ("reinforce", {"weighting": "reward-to-go", "gamma": 0.8, "minibatch_size": 5, "temperature": 0.7,
                   "is_correction_cap": 1.02}),
    ("rloo", {"max_grad_norm": 0.5}),
    ("rloo", {"tool": True, "normalize_rewards": True, "entropy_coef": 0.3, "temperature": 1.5,
              "is_correction_cap": 1.02}),
    ("ppo", {}),
    ("ppo", {"tool": True, "reward_model": "tiny/reward", "gamma": 0.9, "gae_lambda": 0.6, "value_clip": 0.05,
             "num_epochs": 2}),
    ("ppo", {"shared_backbone": True, "missing_eos_penalty": 0.5, "normalize_rewards": True, "aggregation": "sequence",
             "entropy_coef": 0.3, "max_new_tokens": 3}),
    ("ppo", {"minibatch_size": 0, "temperature": 0.7, "is_correction_cap": 1.02, "clip_high": 0.3,
             "max_grad_norm": 0.05}),
    ("ppo", {"tool": True, "shared_backbone": True, "minibatch_size": 0}),
    ("grpo", {}),
    ("grpo", {"tool": True, "scale_rewards": "none", "aggregation": "constant", "kl_estimator": "k2", "num_epochs": 2,
              "clip_high": 0.3}),
    ("grpo", {"scale_rewards": "batch", "aggregation": "token", "kl_coef": 0.0, "overlong_buffer": 5,
              "mask_truncated": True, "entropy_coef": 0.3, "max_new_tokens": 5, "temperature": 1.5}),
    ("grpo", {"tool": True, "minibatch_size": 0, "temperature": 0.7, "is_correction_cap": 1.02, "overlong_buffer": 4,
              "max_grad_norm": 0.05}),
    ("gspo", {"clip_low": 0.02, "clip_high": 0.03}),
    ("gspo", {"clip_low": 0.02, "clip_high": 0.03, "overlong_buffer": 5, "entropy_coef": 0.3, "scale_rewards": "none",
              "max_new_tokens": 5, "temperature": 1.5, "max_grad_norm": 0.05}),
    ("gspo", {"tool": True, "clip_low": 0.02, "clip_high": 0.03, "kl_coef": 0.3, "aggregation": "token",
              "mask_truncated": True, "max_new_tokens": 5, "temperature": 1.5, "lr": 0.02}),
    ("cispo", {"max_grad_norm": 0.05, "overlong_buffer": 5, "entropy_coef": 0.3, "mask_truncated": True,
               "max_new_tokens": 5, "temperature": 1.5}),
    ("cispo", {"clip_high": 0.1}),
    ("cispo", {"tool": True, "kl_coef": 0.3, "clip_low": 0.1, "clip_high": 0.1, "aggregation": "sequence",
               "temperature": 0.7, "is_correction_cap": 1.02}),
]  # fmt: skip


def with_a_tool(policy, tokenizer, batch, prompts, group_size, temperature, key):
    """The completions, two of three with up to 5 tokens of a tool in them, made a batch as a user's sampler would."""
    rng, ids, logprobs, masks = random.Random(f"{key} tool"), [], [], []
    rows = each(*(batch[name].tolist() for name in ("input_ids", "prompt_length", "length")))
    for i, (row, start, n) in enumerate(rows):
        own, cut = row[start : start + n], rng.randint(1, max(1, n - 1))
        tool = [rng.randrange(18, 28) for _ in range(rng.randint(1, 5))] if i % 3 and n > 1 else []
        ids.append(own[:cut] + tool + own[cut:])
        masks.append([1] * cut + [0] * len(tool) + [1] * (n - cut))
        with torch.no_grad():
            found = logprobs_of(policy, row[:start], ids[-1], temperature)[0]
        logprobs.append([x.item() if is_own else math.inf for x, is_own in each(found, masks[-1])])
    return common.collate(tokenizer, prompts, group_size, ids, logprobs, batch["truncated"].tolist(), masks)


@pytest.mark.parametrize("name, options", CASES, ids=lambda x: x if isinstance(x, str) else "-".join(x) or "default")
def test_the_loop_takes_the_steps_of_a_naive_one(name, options, tmp_path, monkeypatch):
    script, recorded = SCRIPTS[name], {"batches": [], "gradients": [], "rows": [], "lrs": []}
    options = dict(options)
    tool = options.pop("tool", False)
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [("1+1=", 1), ("23+45=", 2), ("7+8=", 0), ("90+17=", 3)]
    lines = [json.dumps({"prompt": prompt, "level": level}) + "\n" for prompt, level in rows]
    (tmp_path / "data.jsonl").write_text("".join(lines))

    generate, minibatches = common.generate, common.minibatches

    def spoiled_generate(policy, tokenizer, prompts, group_size, *, key, temperature, **kwargs):
        batch = generate(policy, tokenizer, prompts, group_size, key=key, temperature=temperature, **kwargs)
        if key[1] == "sample":
            if tool:
                batch = with_a_tool(policy, tokenizer, batch, prompts, group_size, temperature, key)
            noise = torch.rand(batch["mask"].shape, generator=torch.Generator().manual_seed(key[2])) * 0.1 - 0.05
            batch["logprobs"] = (batch["logprobs"] + noise).masked_fill(batch["mask"] == 0, math.nan)
            end = batch["prompt_length"] + batch["length"]
            batch["input_ids"][torch.arange(batch["input_ids"].shape[1]) >= end[:, None]] = 77
            recorded["batches"].append(batch)
        return batch

    def recorded_minibatches(batch, *args, **kwargs):
        for minibatch in minibatches(batch | {"index": torch.arange(len(batch["mask"]))}, *args, **kwargs):
            recorded["rows"].append(minibatch["index"].tolist())
            yield minibatch

    class Descent(torch.optim.SGD):
        def __init__(self, params, lr, weight_decay, fused):
            super().__init__(params, lr=lr)

        def step(self):
            recorded["gradients"].append([p.grad.clone() for group in self.param_groups for p in group["params"]])
            recorded["lrs"].append([group["lr"] for group in self.param_groups])
            super().step()

    monkeypatch.setattr(common, "generate", spoiled_generate)
    monkeypatch.setattr(common, "minibatches", recorded_minibatches)
    monkeypatch.setattr(torch.optim, "AdamW", Descent)
    for saving in ("save_checkpoint", "save_model"):  # nobody looks at what is saved
        monkeypatch.setattr(common, saving, lambda *_: None)
    given = {"output_dir": str(tmp_path / "run"), "dataset": str(tmp_path / "data.jsonl"), "num_steps": 2}
    given |= {"reward_fn": (f"{tmp_path}/reward.py:score",), "num_prompts": 4, "group_size": 3, "max_new_tokens": 6}
    given |= {"minibatch_size": 7, "lr": 0.02, "warmup_steps": 2, "max_grad_norm": 1e9, "eval_every": 0}
    given |= {"microbatch_tokens": 40}
    if name == "ppo":
        given["value_lr"] = 0.02
    if name in ("reinforce", "rloo"):  # gradients of sums are larger, and there is no clip to reach
        given["lr"] = 0.002
    elif tool:  # what stands behind a tool's digits is unlikely, and moves far
        given["lr"] = 0.005
    args = script.Args(**given | options)
    script.main(args)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]

    tokenizer = AutoTokenizer.from_pretrained("tiny/policy")
    policy, reference = load("tiny/policy"), load("tiny/policy")
    values = Values(args, policy) if name == "ppo" else None
    updates = -(-12 // (args.minibatch_size or 12)) * args.num_epochs
    score = runpy.run_path(str(tmp_path / "reward.py"))["score"]
    gradients, minibatch_rows, lrs = (iter(recorded[key]) for key in ("gradients", "rows", "lrs"))
    clipped = truncated = uneven = holes = 0
    for sampled, found, share in each(recorded["batches"], metrics, (0.5, 1.0)):
        lengths, starts, ids = (sampled[key].tolist() for key in ("length", "prompt_length", "input_ids"))
        batch = SimpleNamespace(
            prompts=[row[:start] for row, start in each(ids, starts)],
            completions=[row[start : start + n] for row, start, n in each(ids, starts, lengths)],
            own=[[t for t, x in enumerate(row) if x] for row in sampled["mask"].tolist()],
            at=lambda i, x: [x[t] for t in batch.own[i]],  # noqa: B023
        )
        batch.logprobs = [batch.at(i, row) for i, row in enumerate(sampled["logprobs"].tolist())]
        holes += sum(len(own) < n for own, n in each(batch.own, lengths))
        batch.truncated = [c[-1] != tokenizer.eos_token_id for c in batch.completions]
        texts = [tokenizer.decode(c, skip_special_tokens=True) for c in batch.completions]
        batch.scores = score(None, texts, [p.row for p in sampled["prompts"]])
        if args.reward_model:
            judge = AutoModelForSequenceClassification.from_pretrained(args.reward_model)
            reader = AutoTokenizer.from_pretrained(args.reward_model)
            texts = [p.text + text for p, text in each(sampled["prompts"], texts)]
            judged = [judge(**reader(x, return_tensors="pt")).logits.item() for x in texts]
            batch.scores = [a + b for a, b in each(batch.scores, judged)]

        def numbers(of, batch=batch):
            """of(prompt, completion) at the tokens of the policy's own, row by row."""
            rows = enumerate(each(batch.prompts, batch.completions))
            return [[x.item() for x in batch.at(i, of(*pair))] for i, pair in rows]

        with torch.no_grad():
            batch.ref_logprobs = numbers(lambda *pair: logprobs_of(reference, *pair, args.temperature)[0])
            batch.old_logprobs = numbers(lambda *pair: logprobs_of(policy, *pair, args.temperature)[0])
            batch.values = numbers(values) if name == "ppo" else None
        # scored, but where the sampler is taken to be exact and nothing else needs a pass
        several = name in ("ppo", "grpo", "gspo", "cispo") and (args.num_epochs > 1 or 0 < args.minibatch_size < 12)
        batch.for_kl = batch.old_logprobs if several or args.is_correction_cap else batch.logprobs
        uneven |= any(len(set(lengths[i : i + 3])) > 1 for i in range(0, 12, 3))
        advantages, returns = naive_advantages(name, args, batch)
        totals = dict.fromkeys(("entropy", "weights", "ratio_mean", "clip_fraction", "value_loss"), 0.0)
        losses, norms, value_norms = [], [], []
        parameters = [*policy.parameters(), *(values.parameters if values else [])]
        count = len(list(policy.parameters()))
        for _ in range(updates):
            of_rows = next(minibatch_rows)
            loss = naive_loss(name, args, batch, of_rows, policy, values, advantages, returns, totals)
            grads = torch.autograd.grad(loss, parameters)
            norms.append(math.sqrt(sum(g.square().sum().item() for g in grads[:count])))
            value_norms.append(math.sqrt(sum(g.square().sum().item() for g in grads[count:])))
            scales = [min(1.0, args.max_grad_norm / (norm + 1e-6)) for norm in (norms[-1], value_norms[-1])]
            grads = [g * scales[i >= count] for i, g in enumerate(grads)]
            for mine, theirs in each(grads, next(gradients)):
                assert (mine - theirs).norm() <= 2e-4 * mine.norm() + 2e-6
            lr, value_lr = share * args.lr, share * getattr(args, "value_lr", 0.0)
            assert next(lrs) == pytest.approx([lr, value_lr][: 1 + (name == "ppo")])
            with torch.no_grad():
                for i, (p, g) in enumerate(each(parameters, grads)):
                    p -= (lr if i < count else value_lr) * g
            losses.append(loss.item())

        divisor = totals.pop("weights")
        value_loss = totals.pop("value_loss")
        expected = {k: v / divisor for k, v in totals.items() if k in found}
        expected |= {"loss": mean(losses), "grad_norm": mean(norms), "lr": share * args.lr}
        expected |= {"reward": mean(batch.scores), "reward_std": statistics.pstdev(batch.scores)}
        expected |= {"completion_length": mean([*map(len, batch.own)]), "truncated_fraction": mean(batch.truncated)}
        expected["no_signal_fraction"] = mean([len(set(batch.scores[i : i + 3])) == 1 for i in range(0, 12, 3)])
        if args.kl_coef:
            rows = each(batch.for_kl, batch.ref_logprobs)
            expected["kl"] = mean([sum(KL["k3"](p - q) for p, q in each(*pair)) for pair in rows])
        if name == "ppo":
            spread = statistics.pvariance([r for row in returns for r in row])
            errors = [r - v for R, V in each(returns, batch.values) for r, v in each(R, V)]
            expected["explained_variance"] = 1 - statistics.pvariance(errors) / spread
            expected |= {"value_loss": value_loss / updates, "value_grad_norm": mean(value_norms)}
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, rel=2e-3, abs=2e-5), key
        assert ("kl" in found) == bool(args.kl_coef)
        clipped, truncated = clipped + found.get("clip_fraction", 0.0), truncated + found["truncated_fraction"]
    assert not any(list(x) for x in (gradients, minibatch_rows))  # the script took no further step
    assert clipped > 0 or name in ("reinforce", "rloo") or updates == 1 or args.max_grad_norm < 1  # it reaches the clip
    assert 0 < truncated < 2 or args.max_new_tokens > 3
    assert uneven or not getattr(args, "overlong_buffer", 0)  # a penalty that a whole group shares would cancel
    assert (holes > 8) == tool
