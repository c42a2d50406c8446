"""Does the suite catch what it should? Plausible wrong edits, each made alone in a scratch copy, and the test that fails for it.

    python tests/mutants.py            # all of them, two at a time; about half an hour
    python tests/mutants.py kl ppo.py  # those whose file or edit contains one of these words

A mutant that no test kills is a hole in the suite; the exit status is the number of such. Not part of the default run.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
# not test_ladder.py: it would see that two scripts differ, which is no proof that a test knows what is right
FAST_FIRST = "functions sharing oracles enumeration common loops traps invariances jobs models faults scripts".split()
GROUPED = ("grpo.py", "gspo.py", "cispo.py")

MUTANTS = [  # (files, which get the same edit, one mutant each; what stands there; what is put in its place)
    # weights, masks, means
    ("common.py", "mask / mask.sum(1, keepdim=True).clamp(min=1) / len(mask)", "mask / mask.shape[1] / len(mask)"),
    ("common.py", "return mask / mask.sum().clamp(min=1)", "return mask / mask.numel()"),
    ("common.py", "return mask / max_new_tokens / len(mask)", "return mask / mask.shape[1] / len(mask)"),
    ("common.py", "        return mask / len(mask)", "        return mask"),
    ("common.py", "masked_sum(x, mask, dim) / (mask != 0).sum(dim).clamp(min=1)", "x.masked_fill(mask == 0, 0.0).mean(dim) if dim is not None else x.masked_fill(mask == 0, 0.0).mean()"),
    ("common.py", "return (x.masked_fill(weights == 0, 0.0) * weights).sum()", "return (x * weights).sum()"),
    ("common.py", "    return x.masked_fill(mask == 0, 0.0).sum(dim)", "    return (x * mask).sum(dim)"),
    ("common.py", "last = (mask.cumsum(1) == mask.sum(1, keepdim=True)) & (mask != 0)", "last = torch.arange(mask.shape[1], device=mask.device) == mask.shape[1] - 1"),
    # the shift between logits and tokens, temperature, entropy
    ("common.py", 'first = batch["prompt_length"][:, None] - 1', 'first = batch["prompt_length"][:, None]'),
    ("common.py", "(logits - top[..., None]).exp_().sum(-1).log()", "(logits - top[..., None]).exp_().sum(-1).log().detach()"),
    ("common.py", "LogprobsAndEntropy.apply(scaled(logits, temperature), ids)", "LogprobsAndEntropy.apply(logits, ids)"),
    ("common.py", "return upcast(logits) if temperature == 1.0 else upcast(logits) / temperature", "return upcast(logits) if temperature == 1.0 else upcast(logits) * temperature"),
    ("common.py", "probabilities.mul_(grad + entropy_grad * entropy[:, None])", "probabilities.mul_(grad - entropy_grad * entropy[:, None])"),
    ("common.py", "    return x.to(torch.promote_types(x.dtype, torch.float32))", "    return x"),
    # what is computed once or in place
    ("common.py", "b = b + (a.max() + 1 if len(a) else 0)", "pass"),
    ("common.py", "prompts * shared[1] + n * shared[2]", "n * shared[2]"),
    ("common.py", "min(by_length, by_prompt, key=lambda found: found[0])[1]", "by_length[1]"),
    ("common.py", "probabilities.mul_(-grad)", "probabilities.mul_(grad)"),
    ("common.py", ".nansum(-1) / total", ".sum(-1) / total"),
    ("common.py", "logits.split(max(1, 2**22 // logits.shape[-1]))", "[logits]"),
    ("common.py", "map(torch.cat, zip(*found))", "(x[-1] for x in zip(*found))"),
    ("common.py", " and id(module.weight) not in embedded and", " and"),
    ("common.py", "if not trainable and dtype != torch.float32:", "if dtype != torch.float32:"),
    ("common.py", "load_reward_model(path, device, torch.float32, trust_remote_code)", "load_reward_model(path, device, dtype, trust_remote_code)"),
    ("common.py", "            head.forward = partial(float32_linear, head)\n", "            pass\n"),
    ("common.py", "not in embedded and module.out_features > 1", "not in embedded"),
    ("common.py", "        with torch.no_grad(), autocast(model):\n", "        with torch.no_grad():\n"),
    ("common.py", "(known and tokenizer.convert_ids_to_tokens(pad)) or tokenizer.eos_token", "tokenizer.eos_token"),
    ("common.py", "start[:, None] + torch.arange(mask.shape[1]", "start.max() + torch.arange(mask.shape[1]"),
    ("common.py", "all(type(x) is DynamicLayer for x", "all(isinstance(x, DynamicLayer) for x"),
    ("common.py", "(group_size if shares else 1)", "group_size"),
    ("common.py", "        self.room = None\n        super().reorder", "        super().reorder"),
    # KL
    ("common.py", "log_ratio = upcast(logprobs) - upcast(ref_logprobs)", "log_ratio = upcast(ref_logprobs) - upcast(logprobs)"),
    ("common.py", "return torch.expm1(-log_ratio) + log_ratio", "return torch.exp(-log_ratio) - 1 + log_ratio"),
    ("common.py", "return torch.expm1(-log_ratio) + log_ratio", "return torch.expm1(log_ratio) - log_ratio"),
    ("common.py", "        log_ratio = log_ratio.clamp(min=-20)\n", ""),
    ("common.py", "return 0.5 * log_ratio**2", "return log_ratio**2"),
    ("common.py", '"k3"), batch["mask"], 1).mean().item()', '"k3"), batch["mask"]).item() / batch["mask"].sum().item()'),
    # sampling and stop tokens
    ("common.py", "    logits = scaled(logits, temperature)\n    shifted", "    logits = scaled(logits, 1.0)\n    shifted"),
    ("common.py", "cumulative = shifted.exp()", "cumulative = shifted.exp().masked_fill(logits < logits.topk(min(50, logits.shape[-1])).values[:, -1:], 0.0)"),
    ("common.py", "(shifted.gather(1, ids) - total.log())", "(temperature * shifted.gather(1, ids) - total.log())"),
    ("common.py", "positions = (attention.cumsum(1) - 1).clamp(min=0)", "positions = torch.arange(attention.shape[1], device=device).repeat(len(attention), 1)"),
    ("common.py", "        length[rows] += running\n        truncated[rows] = running = running & ~torch.isin(ids, stops)\n",
     "        truncated[rows] = running = running & ~torch.isin(ids, stops)\n        length[rows] += running\n"),
    ("common.py", "ids_logprobs.where(running, 0.0)", "ids_logprobs"),
    ("common.py", "sorted({tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [] if ids is None else [ids])})", "[tokenizer.eos_token_id]"),
    ("common.py", "sorted({tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [] if ids is None else [ids])})", "ids if isinstance(ids, list) else [ids]"),
    ("common.py", '        "truncated": truncated,', '        "truncated": length == max_new_tokens,'),
    ("common.py", "generator=generator(*key), dtype=torch.float64)[first:]", "dtype=torch.float64)[first:]"),
    ("common.py", "dtype=torch.float64)[first:]", "dtype=torch.float64)[: end - first]"),
    ("common.py", ".repeat_interleave(B // len(prompt_ids))", ".repeat(B // len(prompt_ids))"),
    ("common.py", "            cache.reorder_cache(running.nonzero()[:, 0])\n", "            cache.reorder_cache(torch.arange(int(running.sum())))\n"),
    ("common.py", "position_ids=positions + t + 1)", "position_ids=positions + t)"),
    ("common.py", "seen = attention[:, : t + 1 - max_new_tokens]", "seen = torch.ones_like(attention[:, : t + 1 - max_new_tokens])"),
    # batches
    ("common.py", "order = torch.randperm(B, generator=generator(*key, epoch))", "order = torch.randperm(B)"),
    ("common.py", "        for rows in order.split(minibatch_size or B):", "        for rows in [r for r in order.split(minibatch_size or B) if len(r) == (minibatch_size or B)]:"),
    ("common.py", 'result[micro["rows"], : piece.shape[1]] = piece', "result[: len(piece), : piece.shape[1]] = piece"),
    ("common.py", "max(completion_length[i] for i in piece)", "completion_length[piece[0]]"),
    ("common.py", "return (rewards - rewards.mean()) / (rewards.std() + 1e-8)", "return rewards / (rewards.std() + 1e-8)"),
    ("common.py", "return weights * log_ratio.exp().clamp(max=cap)", "return weights * (-log_ratio).exp().clamp(max=cap)"),
    ("common.py", "(logprobs.detach() - sampled_logprobs)", "(logprobs - sampled_logprobs)"),
    # what is logged
    ("common.py", 'if k.endswith(("loss", "grad_norm"))} | {"sampler_gap": gap}', 'if k.endswith("grad_norm")} | {"sampler_gap": gap}'),
    ("common.py", "{k: v / weights for k, v in totals.items()", "{k: v / updates for k, v in totals.items()"),
    ("common.py", '"reward": rewards.mean().item()', '"reward": rewards.sum().item()'),
    ("common.py", "return 1 - variance(returns - values)", "return 1 - variance(values)"),
    ("common.py", "min(1.0, (step + 1) / max(1, warmup_steps)) * decay", "min(1.0, step / max(1, warmup_steps)) * decay"),
    ("common.py", "return model.eval().requires_grad_(trainable)", "return model.train().requires_grad_(trainable)"),
    ("common.py", 'kwargs |= {"dtype": torch.float32, "use_safetensors": True}', 'kwargs |= {"use_safetensors": True}'),
    ("common.py", "return scatter_tokens(self.head(hidden[keep].float())[:, 0]", "return scatter_tokens(self.head(hidden[keep.roll(1, 1)].float())[:, 0]"),
    # evaluation, checkpoints, rewards of a user's own job
    ("common.py", 'batch["rewards"].view(-1, num_samples).amax(1)', 'batch["rewards"].view(-1, num_samples).mean(1)'),
    ("common.py", "step > 0 and reward > best:", "step > 0 and reward < best:"),
    ("common.py", 'best = max(best, state.get("best", -math.inf))', 'best = state.get("best", -math.inf)'),
    ("common.py", "first_row=first * num_samples", "first_row=first"),
    ("common.py", "step > 0 and reward > best:", "reward > best:"),
    ("common.py", 'messages = conversation(row["prompt"], system_prompt)\n        if', 'messages = row["prompt"]\n        if'),
    ("common.py", "ids := logits.argmax(-1)", "ids := logits.argmin(-1)"),
    ("common.py", "layer.forward = partial(checkpointed, layer.forward)", "pass"),
    ("common.py", "        signal.setitimer(signal.ITIMER_REAL, 0)\n", ""),
    ("common.py", "except (Exception, SystemExit, TimeUp) as fault:", "except Exception as fault:"),
    ("common.py", "checkpoints(run_folder)[:-keep] if keep", "checkpoints(run_folder)[keep:] if keep"),
    ("common.py", 'row["step"] <= start)', "True)"),
    ("common.py", "fn(*copy.deepcopy(args))", "fn(*args)"),
    ("common.py", 'Fraction(match[1] + match[2].replace(",", ""))', 'Fraction(match[2].replace(",", ""))'),
    ("common.py", 'places = [divmod(state["consumed"] + i, len(prompts)) for i in range(count)]', "places = [divmod(i, len(prompts)) for i in range(count)]"),
    # reinforce
    ("reinforce.py", "running = rewards[:, t] + gamma * running", "running = rewards[:, t] + running"),
    ("reinforce.py", "returns[0] + (apart.sum() - apart) / (len(returns) - 1)", "returns.mean()"),
    ("reinforce.py", "(apart.sum() - apart) / (len(returns) - 1)", "(apart.sum() - apart) / len(returns)"),
    ("reinforce.py", "token_rewards = token_rewards - args.kl_coef * kl", "token_rewards = token_rewards + args.kl_coef * kl"),
    ("reinforce.py", 'total if args.weighting == "total" else returns', "returns"),
    ("reinforce.py", "returns - leave_one_out_baseline(total)[:, None]", "returns - leave_one_out_baseline(rewards)[:, None]"),
    ("reinforce.py", 'loss_weights(minibatch["mask"], "sum")', 'loss_weights(minibatch["mask"], "token")'),
    (("reinforce.py", "rloo.py"), "per_token = -advantages * logprobs", "per_token = advantages * logprobs"),
    # rloo
    ("rloo.py", "(group_size - 1)", "group_size"),
    ("rloo.py", "args.kl_coef * masked_sum(kl, batch[\"mask\"], 1)", "args.kl_coef * masked_mean(kl, batch[\"mask\"], 1)"),
    ("rloo.py", "rewards = rewards - args.kl_coef", "rewards = rewards + args.kl_coef"),
    # ppo
    ("ppo.py", "delta = rewards[:, t] + gamma * next_value - values[:, t]", "delta = rewards[:, t] + next_value - values[:, t]"),
    ("ppo.py", "next_advantage = delta + gamma * gae_lambda * next_advantage", "next_advantage = delta + gae_lambda * next_advantage"),
    ("ppo.py", "next_value = next_advantage = torch.zeros_like(values[:, 0])", "next_value, next_advantage = values[:, -1], torch.zeros_like(values[:, 0])"),
    ("ppo.py", "rewards, values = rewards.masked_fill(mask == 0, 0.0), values.masked_fill(mask == 0, 0.0)\n", "rewards = rewards.masked_fill(mask == 0, 0.0)\n"),
    ("ppo.py", "* count / (count - 1).clamp(min=1)", ""),
    ("ppo.py", '        advantages, batch["returns"] = gae(token_rewards, batch["values"], batch["mask"], args.gamma, args.gae_lambda)\n        batch["advantages"] = whiten(advantages, batch["mask"])', '        advantages, _ = gae(token_rewards, batch["values"], batch["mask"], args.gamma, args.gae_lambda)\n        batch["advantages"] = whiten(advantages, batch["mask"])\n        batch["returns"] = batch["advantages"] + batch["values"]'),
    ("ppo.py", "torch.maximum(plain, limited)", "torch.minimum(plain, limited)"),
    ("ppo.py", "clipped = values.clamp(old_values - clip, old_values + clip)", "clipped = values.clamp(returns - clip, returns + clip)"),
    ("ppo.py", "returns.detach())", "returns)"),
    ("ppo.py", "token_rewards = token_rewards - kl_coef * kl", "token_rewards = token_rewards - args.kl_coef * kl"),
    ("ppo.py", "token_rewards = token_rewards - kl_coef * kl", "token_rewards = token_rewards + kl_coef * kl"),
    ("ppo.py", 'at_last_token(rewards, batch["mask"])', 'rewards[:, None] * batch["mask"]'),
    ("ppo.py", "- args.missing_eos_penalty * batch", "+ args.missing_eos_penalty * batch"),
    ("ppo.py", "loss = loss + args.vf_coef * values_loss", "loss = loss + values_loss"),
    ("ppo.py", "if num_updates > 1 or args.shared_backbone:", "if num_updates > 1:"),
    ("ppo.py", "kl_coef * max(0.5, 1 + error * completions / horizon)", "kl_coef * max(0.5, 1 - error * completions / horizon)"),
    # the clipped surrogate
    (("ppo.py", "grpo.py", "gspo.py"), "per_token = torch.maximum(-ratio * advantages", "per_token = torch.minimum(-ratio * advantages"),
    (("ppo.py", "grpo.py", "gspo.py"), "per_token = torch.maximum(-ratio * advantages, -clipped * advantages)", "per_token = -clipped * advantages"),
    (("ppo.py", "grpo.py", "gspo.py"), "is_clipped = (-clipped * advantages > -ratio * advantages).float()", "is_clipped = (clipped != ratio).float()"),
    (("ppo.py", "grpo.py", "gspo.py"), "clamp(1 - clip_low, 1 + clip_high)", "clamp(1 - clip_low, 1 + clip_low)"),
    (("ppo.py", "grpo.py"), "(logprobs - old_logprobs.detach())", "(old_logprobs.detach() - logprobs)"),
    (("ppo.py", "grpo.py"), ".clamp(max=20.0).exp()", ".exp()"),
    ("ppo.py", "torch.maximum(-ratio * advantages, -clipped * advantages)", "torch.maximum(-ratio.detach() * advantages, -clipped * advantages)"),
    # groups
    (GROUPED, "groups = rewards.view(-1, group_size)", "groups = rewards.view(group_size, -1).T"),
    (GROUPED, "groups.std(1, keepdim=True) + 1e-4", "groups.std(1, keepdim=True, unbiased=False) + 1e-4"),
    (GROUPED, "groups.std(1, keepdim=True) + 1e-4", "groups.std(1, keepdim=True) + 1e-8"),
    (GROUPED, "groups - groups.mean(1, keepdim=True)", "groups - groups.mean()"),
    (GROUPED, "    groups = groups - groups[:, :1]  # equal rewards leave no rounding behind\n", ""),
    # gspo and cispo
    ("gspo.py", "(log_ratio.sum(1, keepdim=True) / length)", "log_ratio.sum(1, keepdim=True)"),
    ("gspo.py", ".exp().detach()  # (B, 1), eq. 7", ".exp()  # (B, 1), eq. 7"),
    ("gspo.py", "length = (weights != 0).sum(1, keepdim=True).clamp(min=1)", "length = weights.shape[1]"),
    ("cispo.py", "per_token = -clipped.detach()", "per_token = -clipped"),
    ("cispo.py", "per_token = -clipped.detach()", "per_token = -ratio.detach()"),
    ("cispo.py", "clamp(1 - clip_low, 1 + clip_high)", "clamp(1 - clip_low, clip_high)"),
    # the loops
    (("ppo.py", *GROUPED), 'old_logprobs = micro.get("old_logprobs", logprobs.detach())', "old_logprobs = logprobs.detach()"),
    (GROUPED, 'loss = loss + args.kl_coef * weighted_sum(kl_estimate(logprobs, micro["ref_logprobs"]', 'loss = loss - args.kl_coef * weighted_sum(kl_estimate(logprobs, micro["ref_logprobs"]'),
    ("grpo.py", 'kl_estimate(logprobs, micro["ref_logprobs"]', "kl_estimate(logprobs, old_logprobs"),
    (("grpo.py", "gspo.py"), 'kl_estimate(logprobs, micro["ref_logprobs"], args.kl_estimator)', 'kl_estimate(logprobs, micro["ref_logprobs"], "k1")'),
    (GROUPED, "rewards = rewards - overlong_penalty", "rewards = rewards + overlong_penalty"),
    ("common.py", '{"trust_remote_code": trust_remote_code}', '{"trust_remote_code": True}'),
    (GROUPED, "return ((length - (max_new_tokens - buffer)) / buffer).clamp(0, 1)", "return ((length - buffer) / buffer).clamp(0, 1)"),
    (GROUPED, 'minibatch["mask"] * ~(minibatch["truncated"] & args.mask_truncated)[:, None]', 'minibatch["mask"]'),
    ("grpo.py", 'batch["advantages"] /= rewards.std() + 1e-4', "pass"),
    (GROUPED, "batch = concatenate(select(batch, live), fresh | score(reward_fns, fresh, step))", "batch = select(batch, live)"),
    (("reinforce.py", "rloo.py", "ppo.py", *GROUPED), "loss = loss - args.entropy_coef *", "loss = loss + args.entropy_coef *"),
    (("reinforce.py", "rloo.py", "ppo.py", *GROUPED), "            optimizer.zero_grad()\n", ""),
    (("reinforce.py", "rloo.py", "ppo.py", *GROUPED), "load_reference(policy, args.model, device, dtype, args.trust_remote_code) if args.kl_coef else None", "policy if args.kl_coef else None"),
    (("reinforce.py", "rloo.py", "ppo.py", *GROUPED), "load_reference(policy, args.model, device, dtype, args.trust_remote_code) if args.kl_coef else None", "load_reference(policy, checkpoint or args.model, device, dtype, args.trust_remote_code) if args.kl_coef else None"),
    (("reinforce.py", "rloo.py", "ppo.py", *GROUPED), "partial(logprobs_of, reference, args.temperature)", "partial(logprobs_of, reference, 1.0)"),
    (("reinforce.py", "rloo.py", "ppo.py", *GROUPED), '                weights = micro["weights"]\n', '                weights = loss_weights(micro["mask"], getattr(args, "aggregation", "sum"), args.max_new_tokens)\n'),
    (("reinforce.py", "rloo.py", "ppo.py", *GROUPED), "args.max_grad_norm)\n            check_finite", "1e9)\n            check_finite"),
]  # fmt: skip


def run(mutant: tuple[str, str, str]) -> str | None:
    """The first test that fails, or None."""
    file, old, new = mutant
    source = (ROOT / file).read_text()
    if old and source.count(old) != 1:
        raise SystemExit(f"{file} holds {source.count(old)} times: {old}")
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns("runs", ".*", "__pycache__"))
        (copy / file).write_text(source.replace(old, new) if old else source)
        tests = [f"tests/test_{name}.py" for name in FAST_FIRST]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *tests]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, env=environment)
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.M)
    return failed[1] if failed else f"pytest ended with {done.returncode}: {done.stdout[-300:]}"


def main() -> None:
    each = [(file, old, new) for files, old, new in MUTANTS for file in ([files] if isinstance(files, str) else files)]
    each = [m for m in each if not sys.argv[1:] or any(word in " ".join(m) for word in sys.argv[1:])]
    survivors = 0
    if failed := run(("README.md", "", "")):
        raise SystemExit(f"the suite fails as it is, so that it would kill anything: {failed}")
    with ThreadPoolExecutor(2) as pool:
        for (file, old, new), killer in zip(each, pool.map(run, each)):
            survivors += killer is None
            edit = f"{old.strip()!r:.70} -> {new.strip()!r:.70}"
            print(f"{'SURVIVED' if killer is None else 'killed  '} {file:12} {edit}\n             {killer or ''}", flush=True)
    print(f"{len(each) - survivors} of {len(each)} mutants killed")
    sys.exit(survivors)


if __name__ == "__main__":
    main()
