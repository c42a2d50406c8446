"""Each script's whole loop against a second, naive one: row by row and token by token, in plain Python, from the papers' formulas.

The script runs two steps through its own main(), with plain gradient descent in place of Adam, and records what it sampled and every
gradient it takes a step with. The naive loop below gets the sampled ids alone, keeps models of its own, and must arrive at the same
gradients and the same metrics. What stands under the mask is garbage, and the sampler's log-probabilities are a little off.
"""

import copy
import json
import math
import statistics
from functools import lru_cache
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import cispo
import grpo
import gspo
import ppo
import reinforce
import rloo

SCRIPTS = {m.__name__: m for m in (reinforce, rloo, ppo, grpo, gspo, cispo)}
REWARD = """def score(prompts, completions, rows):
    return [0.0 if row["level"] == 0 else sum(map(ord, c)) % 7 / 3 for c, row in zip(completions, rows)]
"""
KL = {"k1": lambda d: d, "k2": lambda d: d**2 / 2, "k3": lambda d: math.exp(-d) - 1 + d}


def logprobs_of(model, prompt, completion, temperature):
    """One row, no padding: the n log-probabilities of its completion, and the entropy of each distribution."""
    logits = model(torch.tensor([prompt + completion])).logits[0] / temperature
    rows = [torch.log_softmax(logits[len(prompt) + t - 1], -1) for t in range(len(completion))]
    return [row[i] for row, i in zip(rows, completion)], [-(row.exp() * row).sum() for row in rows]


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


def naive_advantages(name, args, batch, kl_coef):
    """One list of n numbers per row, and PPO's returns."""
    rewards = list(batch.scores)
    if name == "ppo":
        rewards = [r - args.missing_eos_penalty * cut for r, cut in zip(rewards, batch.truncated)]
    if getattr(args, "overlong_buffer", 0):
        free = args.max_new_tokens - args.overlong_buffer
        rewards = [r - max(0, len(c) - free) / args.overlong_buffer for r, c in zip(rewards, batch.completions)]
    if args.normalize_rewards:
        rewards = [(r - mean(rewards)) / (statistics.stdev(rewards) + 1e-8) for r in rewards]
    kl = [[0.0] * len(row) for row in batch.logprobs]
    if args.kl_coef and name in ("reinforce", "rloo", "ppo"):
        kl = [[KL[args.kl_estimator](p - q) for p, q in zip(*rows)] for rows in zip(batch.logprobs, batch.ref_logprobs)]
    G, B = args.group_size, len(rewards)
    if name == "rloo":
        rewards = [r - kl_coef * sum(k) for r, k in zip(rewards, kl)]
        groups = [rewards[i // G * G : i // G * G + G] for i in range(B)]
        return [[r - (sum(g) - r) / (G - 1)] * len(k) for r, g, k in zip(rewards, groups, kl)], None
    if name in ("grpo", "gspo", "cispo"):
        groups = [rewards[i // G * G : i // G * G + G] for i in range(B)]
        stds = [{"group": statistics.stdev(g) + 1e-4, "batch": statistics.stdev(rewards) + 1e-4, "none": 1.0} for g in groups]
        return [[(r - mean(g)) / s[args.scale_rewards]] * len(k) for r, g, s, k in zip(rewards, groups, stds, kl)], None
    token_rewards = [[-kl_coef * k_t for k_t in k] for k in kl]
    for row, r in zip(token_rewards, rewards):
        row[-1] += r
    if name == "reinforce":
        returns = [[sum(args.gamma ** (s - t) * row[s] for s in range(t, len(row))) for t in range(len(row))] for row in token_rewards]
        total = [row[0] for row in returns]
        if args.weighting == "total":
            return [[g] * len(row) for g, row in zip(total, returns)], None
        baselines = [(sum(total) - g) / (B - 1) * (args.weighting == "baseline") for g in total]
        return [[g - b for g in row] for row, b in zip(returns, baselines)], None
    advantages, returns = [], []  # PPO: the sum of discounted one-step errors, straight from the definition
    for row, V in zip(token_rewards, batch.values):
        delta = [r + args.gamma * v_next - v for r, v, v_next in zip(row, V, [*V[1:], 0.0])]
        decay = args.gamma * args.gae_lambda
        advantages.append([sum(decay ** (s - t) * delta[s] for s in range(t, len(row))) for t in range(len(row))])
        returns.append([a + v for a, v in zip(advantages[-1], V)])
    every = [a for row in advantages for a in row]
    scale = math.sqrt(statistics.variance(every) + 1e-8)
    return [[(a - mean(every)) / scale for a in row] for row in advantages], returns


def naive_loss(name, args, batch, rows, policy, values, advantages, returns, totals):
    """The loss of one optimizer step over the given rows, token by token."""
    trained = [i for i in rows if not (getattr(args, "mask_truncated", False) and batch.truncated[i])]
    tokens = sum(len(batch.completions[i]) for i in trained)
    terms = []
    for i in trained:
        prompt, completion = batch.prompts[i], batch.completions[i]
        logprobs, entropy = logprobs_of(policy, prompt, completion, args.temperature)
        old = batch.old_logprobs[i] if hasattr(args, "clip_low") else [x.item() for x in logprobs]
        V = values(prompt, completion) if name == "ppo" else None
        n = len(completion)
        sequence_ratio = (sum(x - o for x, o in zip(logprobs, old)) / n).exp()
        for t in range(n):
            A, x = advantages[i][t], logprobs[t]
            w = {"sum": 1 / len(rows), "sequence": 1 / len(rows) / n, "token": 1 / max(1, tokens), "constant": 1 / len(rows) / args.max_new_tokens}
            w = w[getattr(args, "aggregation", "sum")]
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
                bound = low if ratio < low else high if ratio > high else ratio
                loss, clipped = min(ratio * A, bound * A), (bound * A < ratio * A)
                loss = -loss
            if name in ("grpo", "gspo", "cispo") and args.kl_coef:
                d = x - batch.ref_logprobs[i][t]
                loss = loss + args.kl_coef * (d if args.kl_estimator == "k1" else d**2 / 2 if args.kl_estimator == "k2" else (-d).exp() - 1 + d)
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
    ("reinforce", {"weighting": "total", "kl_estimator": "k3", "entropy_coef": 0.3, "normalize_rewards": True}),
    ("reinforce", {"weighting": "reward-to-go", "gamma": 0.8, "minibatch_size": 5, "temperature": 0.7, "is_correction_cap": 1.02}),
    ("rloo", {"max_grad_norm": 0.5}),
    ("rloo", {"kl_estimator": "k2", "normalize_rewards": True, "entropy_coef": 0.3, "temperature": 1.5, "is_correction_cap": 1.02}),
    ("ppo", {}),
    ("ppo", {"max_grad_norm": 0.05}),
    ("ppo", {"reward_model": "tiny/reward", "gamma": 0.9, "gae_lambda": 0.6, "kl_estimator": "k3", "value_clip": 0.05, "num_epochs": 2}),
    ("ppo", {"shared_backbone": True, "missing_eos_penalty": 0.5, "normalize_rewards": True, "aggregation": "sequence",
             "entropy_coef": 0.3, "max_new_tokens": 3}),
    ("ppo", {"minibatch_size": None, "temperature": 0.7, "kl_target": 0.1, "kl_horizon": 50, "is_correction_cap": 1.02, "clip_high": 0.3}),
    ("ppo", {"shared_backbone": True, "minibatch_size": None}),
    ("grpo", {}),
    ("grpo", {"max_grad_norm": 0.05}),
    ("grpo", {"scale_rewards": "none", "aggregation": "constant", "kl_estimator": "k1", "num_epochs": 2, "clip_high": 0.3}),
    ("grpo", {"scale_rewards": "batch", "aggregation": "token", "kl_coef": 0.0, "overlong_buffer": 5, "mask_truncated": True,
              "entropy_coef": 0.3, "max_new_tokens": 5, "temperature": 1.5}),
    ("grpo", {"minibatch_size": None, "temperature": 0.7, "normalize_rewards": True, "kl_estimator": "k2", "is_correction_cap": 1.02}),
    ("gspo", {"clip_low": 0.02, "clip_high": 0.03}),
    ("gspo", {"max_grad_norm": 0.05, "overlong_buffer": 5, "entropy_coef": 0.3, "scale_rewards": "none", "max_new_tokens": 5, "temperature": 1.5,
              "clip_low": 0.02, "clip_high": 0.03}),
    ("cispo", {"max_grad_norm": 0.05, "overlong_buffer": 5, "entropy_coef": 0.3, "mask_truncated": True, "normalize_rewards": True,
               "max_new_tokens": 5, "temperature": 1.5}),
    ("gspo", {"kl_coef": 0.3, "aggregation": "token", "temperature": 1.5, "mask_truncated": True, "clip_low": 0.02, "clip_high": 0.03,
              "max_new_tokens": 3}),
    ("cispo", {"clip_high": 0.1}),
    ("cispo", {"kl_coef": 0.3, "clip_low": 0.1, "clip_high": 0.1, "aggregation": "sequence", "temperature": 0.7, "is_correction_cap": 1.02}),
]  # fmt: skip


@pytest.mark.parametrize("name, options", CASES, ids=lambda x: x if isinstance(x, str) else "-".join(x) or "default")
def test_the_loop_takes_the_steps_of_a_naive_one(name, options, tmp_path, monkeypatch):
    script, recorded = SCRIPTS[name], {"batches": [], "gradients": [], "rows": [], "lrs": []}
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [{"prompt": prompt, "level": level} for prompt, level in zip(["1+1=", "23+45=", "7+8=", "90+17="], [1, 2, 0, 3])]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    generate, minibatches = script.generate, script.minibatches

    def spoiled_generate(*args, key, **kwargs):
        batch = generate(*args, key=key, **kwargs)
        if key[1] == "sample":
            noise = torch.rand(batch["mask"].shape, generator=torch.Generator().manual_seed(key[2])) * 0.1 - 0.05
            batch["logprobs"] = (batch["logprobs"] + noise).masked_fill(batch["mask"] == 0, math.nan)
            end = batch["prompt_length"] + batch["mask"].sum(1).long()
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

    monkeypatch.setattr(script, "generate", spoiled_generate)
    monkeypatch.setattr(script, "minibatches", recorded_minibatches)
    monkeypatch.setattr(torch.optim, "AdamW", Descent)
    for saving in ("save_checkpoint", "save_model"):  # nobody looks at what is saved
        monkeypatch.setattr(script, saving, lambda *_: None)
    given = {"output_dir": str(tmp_path / "run"), "dataset": str(tmp_path / "data.jsonl")}
    given |= {"reward_fn": (f"{tmp_path}/reward.py:score",), "num_steps": 2, "num_prompts": 4, "group_size": 3, "max_new_tokens": 6}
    given |= {"minibatch_size": 7, "lr": 0.02, "warmup_steps": 2, "max_grad_norm": 1e9, "eval_every": 0, "microbatch_tokens": 40}
    if name == "ppo":
        given["value_lr"] = 0.02
    if name in ("reinforce", "rloo"):  # gradients of sums are larger, and there is no clip to reach
        given["lr"] = 0.002
    args = script.Args(**given | options)
    script.main(args)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][1:]

    tokenizer, policy, reference = AutoTokenizer.from_pretrained("tiny/policy"), load("tiny/policy"), load("tiny/policy")
    values, kl_coef, adapted = Values(args, policy) if name == "ppo" else None, args.kl_coef, getattr(args, "kl_target", None)
    updates = -(-12 // (args.minibatch_size or 12)) * args.num_epochs
    score = {}
    exec(REWARD, score)
    gradients, minibatch_rows, lrs = (iter(recorded[key]) for key in ("gradients", "rows", "lrs"))
    clipped = truncated = uneven = 0
    for sampled, found, share in zip(recorded["batches"], metrics, (0.5, 1.0), strict=True):
        lengths = [int(n) for n in sampled["mask"].sum(1)]
        starts, ids = sampled["prompt_length"].tolist(), sampled["input_ids"].tolist()
        batch = SimpleNamespace(
            prompts=[row[:start] for row, start in zip(ids, starts)],
            completions=[row[start : start + n] for row, start, n in zip(ids, starts, lengths)],
            logprobs=[row[:n] for row, n in zip(sampled["logprobs"].tolist(), lengths)],
        )
        batch.truncated = [c[-1] != tokenizer.eos_token_id for c in batch.completions]
        texts = [tokenizer.decode(c, skip_special_tokens=True) for c in batch.completions]
        batch.scores = score["score"](None, texts, [p.row for p in sampled["prompts"]])
        if args.reward_model:
            judge, reader = AutoModelForSequenceClassification.from_pretrained(args.reward_model), AutoTokenizer.from_pretrained(args.reward_model)
            texts = [p.text + text for p, text in zip(sampled["prompts"], texts)]
            judged = [judge(**reader(x, return_tensors="pt")).logits.item() for x in texts]
            batch.scores = [a + b for a, b in zip(batch.scores, judged)]
        pairs = list(zip(batch.prompts, batch.completions))
        with torch.no_grad():
            batch.ref_logprobs = [[x.item() for x in logprobs_of(reference, *pair, args.temperature)[0]] for pair in pairs]
            batch.old_logprobs = [[x.item() for x in logprobs_of(policy, *pair, args.temperature)[0]] for pair in pairs]
            batch.values = [[v.item() for v in values(*pair)] for pair in pairs] if name == "ppo" else None
        uneven |= any(len(set(lengths[i : i + 3])) > 1 for i in range(0, 12, 3))
        advantages, returns = naive_advantages(name, args, batch, kl_coef)
        totals = dict.fromkeys(("entropy", "weights", "ratio_mean", "clip_fraction", "value_loss"), 0.0)
        losses, norms, value_norms = [], [], []
        parameters = [*policy.parameters(), *(values.parameters if values else [])]
        count = len(list(policy.parameters()))
        for _ in range(updates):
            loss = naive_loss(name, args, batch, next(minibatch_rows), policy, values, advantages, returns, totals)
            grads = torch.autograd.grad(loss, parameters)
            norms.append(math.sqrt(sum(g.square().sum().item() for g in grads[:count])))
            value_norms.append(math.sqrt(sum(g.square().sum().item() for g in grads[count:])))
            scales = [min(1.0, args.max_grad_norm / (norm + 1e-6)) for norm in (norms[-1], value_norms[-1])]
            grads = [g * scales[i >= count] for i, g in enumerate(grads)]
            for mine, theirs in zip(grads, next(gradients), strict=True):
                assert (mine - theirs).norm() <= 2e-4 * mine.norm() + 2e-6
            lr, value_lr = share * args.lr, share * getattr(args, "value_lr", 0.0)
            assert next(lrs) == pytest.approx([lr, value_lr][: 1 + (name == "ppo")])
            with torch.no_grad():
                for i, (p, g) in enumerate(zip(parameters, grads)):
                    p -= (lr if i < count else value_lr) * g
            losses.append(loss.item())

        divisor = totals.pop("weights")
        value_loss = totals.pop("value_loss")
        expected = {k: v / divisor for k, v in totals.items() if k in found}
        expected |= {"loss": mean(losses), "grad_norm": mean(norms), "lr": share * args.lr}
        expected |= {"reward": mean(batch.scores), "reward_std": statistics.pstdev(batch.scores), "completion_length": mean(lengths)}
        expected["truncated_fraction"] = mean(batch.truncated)
        expected["no_signal_fraction"] = mean([len(set(batch.scores[i : i + 3])) == 1 for i in range(0, 12, 3)])
        if args.kl_coef:
            d = [[p - q for p, q in zip(*rows)] for rows in zip(batch.logprobs, batch.ref_logprobs)]
            expected["kl"] = mean([sum(map(KL["k3"], row)) for row in d])
        if name == "ppo":
            spread = statistics.pvariance([r for row in returns for r in row])
            errors = [r - v for R, V in zip(returns, batch.values) for r, v in zip(R, V)]
            expected |= {"explained_variance": 1 - statistics.pvariance(errors) / spread, "kl_coef": kl_coef}
            expected |= {"value_loss": value_loss / updates, "value_grad_norm": mean(value_norms)}
            if adapted:
                error = max(-0.2, min(0.2, mean([sum(map(KL[args.kl_estimator], row)) for row in d]) / adapted - 1))
                kl_coef *= 1 + error * 12 / args.kl_horizon
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, rel=2e-3, abs=2e-5), key
        assert ("kl" in found) == bool(args.kl_coef)
        clipped, truncated = clipped + found.get("clip_fraction", 0.0), truncated + found["truncated_fraction"]
    assert not any(list(x) for x in (gradients, minibatch_rows))  # the script took no further step
    assert clipped > 0 or name in ("reinforce", "rloo") or updates == 1 or args.max_grad_norm < 1  # the test reaches the clip
    assert 0 < truncated < 2 or args.max_new_tokens > 3
    assert uneven or not getattr(args, "overlong_buffer", 0)  # a penalty that a whole group shares would cancel
