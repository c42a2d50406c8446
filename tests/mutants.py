"""Does the suite catch what it should? Plausible wrong edits, each made alone in a scratch copy, and what fails.

    python tests/mutants.py            # all of them, two at a time; one to three hours
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
FAST_FIRST = ["functions", "sharing", "oracles", "enumeration", "common", "loops"]
FAST_FIRST += ["traps", "invariances", "jobs", "models", "refusals", "faults", "scripts"]
SCRIPTS = ("reinforce.py", "rloo.py", "ppo.py", "grpo.py", "gspo.py", "cispo.py")
CLIPPED = ("ppo.py", "grpo.py", "gspo.py")
GROUPED = ("grpo.py", "gspo.py", "cispo.py")

MUTANTS = [  # (files, which get the same edit, one mutant each; what stands there; what is put in its place)
    # weights, masks, means
    ("common.py", "mask / mask.sum(1, keepdim=True).clamp(min=1) / len(mask)", "mask / mask.shape[1] / len(mask)"),
    ("common.py", "return mask / mask.sum().clamp(min=1)", "return mask / mask.numel()"),
    ("common.py", "return mask / max_new_tokens / len(mask)", "return mask / mask.shape[1] / len(mask)"),
    ("common.py", "        return mask / len(mask)", "        return mask"),
    ("common.py", "weighted_sum(x, mask != 0, dim) / (mask != 0).sum(dim).clamp(min=1)", "weighted_sum(x, mask != 0, dim) / max(1, (mask != 0).shape[dim or 0])"),
    ("common.py", "(x.masked_fill(weights == 0, 0.0) * weights).sum(dim)", "(x * weights).sum(dim)"),
    ("common.py", "(x.masked_fill(weights == 0, 0.0) * weights).sum(dim)", "x.masked_fill(weights == 0, 0.0).sum(dim)"),
    ("common.py", "(mask.cumsum(1) == mask.sum(1, keepdim=True)) & (mask != 0), x", "torch.arange(mask.shape[1], device=mask.device) == mask.shape[1] - 1, x"),
    ("common.py", "(mask.cumsum(1) == mask.sum(1, keepdim=True)) & (mask != 0), x", "mask.cumsum(1) == mask.sum(1, keepdim=True), x"),
    # the shift between logits and tokens, holes, temperature, entropy
    ("common.py", '- batch["prompt_length"][:, None] + 1', '- batch["prompt_length"][:, None]'),
    ("common.py", "return in_completion & mask.gather(1, predicted.clamp(0, mask.shape[1] - 1))", 'return in_completion & (predicted < batch["mask"].sum(1, keepdim=True))'),
    ("common.py", "return in_completion & mask", "return mask"),
    ("common.py", "(logits - top[..., None]).exp_().sum(-1).log()", "(logits - top[..., None]).exp_().sum(-1).log().detach()"),
    ("common.py", "LogprobsAndEntropy.apply(upcast(logits, temperature), ids)", "LogprobsAndEntropy.apply(upcast(logits), ids)"),
    ("common.py", "return x if temperature == 1.0 else x / temperature", "return x if temperature == 1.0 else x * temperature"),
    ("common.py", "probabilities.mul_(grad + entropy_grad * entropy[:, None])", "probabilities.mul_(grad - entropy_grad * entropy[:, None])"),
    ("common.py", "    x = x.to(torch.promote_types(x.dtype, torch.float32))\n", ""),
    # what is computed once or in place
    ("common.py", '(first["prompt_id"].max() + 1 if len(first["prompt_id"]) else 0)', "0"),
    ("common.py", 'return prompts * max(prompt_length[i] for i in rows) + len(rows) * max(length[i] for i in rows)', "return len(rows) * max(length[i] for i in rows)"),
    ("common.py", "min(cuts, key=lambda pieces: sum(map(tokens_of, pieces)))", "cuts[0]"),
    ("common.py", "probabilities.mul_(-grad)", "probabilities.mul_(grad)"),
    ("common.py", ".nansum(-1) / total", ".sum(-1) / total"),
    ("common.py", "logits.split(max(1, 2**22 // logits.shape[-1]))", "[logits]"),
    ("common.py", "map(torch.cat, zip(*found, strict=True))", "(x[-1] for x in zip(*found))"),
    ("common.py", "elif id(module.weight) not in embedded:", "else:"),
    ("common.py", "if not trainable and dtype != torch.float32:", "if dtype != torch.float32:"),
    ("common.py", "                module.forward = partial(linear_in_float32, module)\n", "                pass\n"),
    ("common.py", "with gathered(model), autocast(model), explained(", "with gathered(model), explained("),
    ("common.py", "with gathered(model), autocast(model), explained(\"the reward model can't read that many tokens, or not these\"):", "with gathered(model), autocast(model):"),
    ("common.py", "if i not in [ids[row][-1] for row in piece])", "if True)"),
    ("common.py", "attention = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)\n", "attention = torch.ones_like(inputs)\n"),
    ("common.py", "len(piece) * len(ids[piece[0]]), batch_tokens", "0, batch_tokens"),
    ("common.py", "start[:, None] + torch.arange(mask.shape[1]", "start.max() + torch.arange(mask.shape[1]"),
    ("common.py", "all(type(layer) is DynamicLayer for layer", "all(isinstance(layer, DynamicLayer) for layer"),
    ("common.py", "(group_size if shares_prompts else 1)", "group_size"),
    ("common.py", "    shares_prompts &= all(len(prompt.ids) > 1 for prompt in prompts)", "    shares_prompts &= True"),
    ("common.py", "(policy.device, policy.shares_prompts) if policy", "(policy.device, True) if policy"),
    ("common.py", "        self.room = None\n        super().reorder", "        super().reorder"),
    ("common.py", " or (start == 0).any():", ":"),
    # KL
    ("common.py", "log_ratio = upcast(logprobs) - upcast(ref_logprobs)", "log_ratio = upcast(ref_logprobs) - upcast(logprobs)"),
    ("common.py", "return torch.expm1(-log_ratio) + log_ratio", "return torch.exp(-log_ratio) - 1 + log_ratio"),
    ("common.py", "return torch.expm1(-log_ratio) + log_ratio", "return torch.expm1(log_ratio) - log_ratio"),
    ("common.py", "        log_ratio = log_ratio.clamp(min=-20)\n", ""),
    ("common.py", "return 0.5 * log_ratio.clamp(-1e4, 1e4) ** 2", "return log_ratio.clamp(-1e4, 1e4) ** 2"),
    ("common.py", "return 0.5 * log_ratio.clamp(-1e4, 1e4) ** 2", "return 0.5 * log_ratio**2"),
    ("common.py", 'weighted_sum(kl, batch["mask"], 1).mean().item()', 'masked_mean(kl, batch["mask"]).item()'),
    # sampling and stop tokens
    ("common.py", "    logits = upcast(logits, temperature)\n    shifted", "    logits = upcast(logits)\n    shifted"),
    ("common.py", "cumulative = shifted.exp()", "cumulative = shifted.exp().masked_fill(logits < logits.topk(min(50, logits.shape[-1])).values[:, -1:], 0.0)"),
    ("common.py", "(shifted.gather(1, ids) - total.log())", "(temperature * shifted.gather(1, ids) - total.log())"),
    ("common.py", "ids = logits.argmax(-1)", "ids = logits.argmin(-1)"),
    ("common.py", "positions, prompt_width = (attention.cumsum(1) - 1).clamp(min=0), inputs.shape[1]", "positions, prompt_width = torch.arange(inputs.shape[1]).repeat(len(inputs), 1), inputs.shape[1]"),
    ("common.py", "        length[rows] += running  # what is drawn after a stop token counts for nothing\n        running = running & ~torch.isin(ids, stops)\n",
     "        running = running & ~torch.isin(ids, stops)\n        length[rows] += running\n"),
    ("common.py", "cut, new_ids, logprobs = {*rows[running].tolist()}", "cut, new_ids, logprobs = {*(length == max_new_tokens).nonzero()[:, 0].tolist()}"),
    ("common.py", "return sorted({tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None})", "return [tokenizer.eos_token_id]"),
    ("common.py", "return sorted({tokenizer.eos_token_id, *(ends", "return sorted({*(ends"),
    ("common.py", "generator=generator(*key), dtype=precision)", "dtype=precision)"),
    ("common.py", "uniform[piece.start * group_size : piece.stop * group_size]", "uniform[: len(piece) * group_size]"),
    ("common.py", "at_once = max(1, most_tokens // (group_size * longest))", "at_once = len(prompts)"),
    ("common.py", "prompt_of_row = rows // (B // len(prompts))", "prompt_of_row = rows % len(prompts)"),
    ("common.py", "            cache.reorder_cache(running.nonzero()[:, 0])\n", "            cache.reorder_cache(torch.arange(int(running.sum())))\n"),
    ("common.py", "position_ids=positions + t + 1)", "position_ids=positions + t)"),
    ("common.py", "seen = attention[:, : prompt_width + t + 1]", "seen = torch.ones_like(attention[:, : prompt_width + t + 1])"),
    # a batch of anybody's completions
    ("common.py", "start + (row if cut else row[:-1])", "start + row"),
    ("common.py", "[whole[len(os.path.commonprefix([start, whole])) :] for start, whole in texts]", "decode([row if cut else row[:-1] for row, cut in zip(ids, truncated)])"),
    ("common.py", "prompts = [prompt for prompt in prompts for _ in range(group_size)]", "prompts = prompts * group_size"),
    ("common.py", "padded(masks, torch.float32)", "padded([[1] * len(row) for row in ids], torch.float32)"),
    ("common.py", '"length": torch.tensor([len(row) for row in ids], device=device)', '"length": torch.tensor([sum(row) for row in masks or [[1] * len(row) for row in ids]], device=device)'),
    # batches
    ("common.py", "order = torch.randperm(B, generator=generator(*key, epoch))", "order = torch.randperm(B)"),
    ("common.py", "        for rows in order.split(minibatch_size or B):", "        for rows in [r for r in order.split(minibatch_size or B) if len(r) == (minibatch_size or B)]:"),
    ("common.py", 'result[..., micro["rows"], : piece.shape[-1]] = piece', "result[..., : piece.shape[-2], : piece.shape[-1]] = piece"),
    ("common.py", "T = max(prompt_length[i] + length[i] for i in piece), max(length[i] for i in piece)", "T = max(prompt_length[i] + length[i] for i in piece), length[piece[0]]"),
    ("common.py", "return (rewards - rewards.mean()) / (rewards.std(", "return rewards / (rewards.std("),
    ("common.py", "4 * torch.finfo(rewards.dtype).eps * size", "0 * size"),
    ("common.py", "4 * torch.finfo(rewards.dtype).eps * size", "1e-4 * size"),
    ("common.py", "    rewards = from_first(rewards)\n", ""),
    ("common.py", "return weights * log_ratio.exp().clamp(max=cap)", "return weights * (-log_ratio).exp().clamp(max=cap)"),
    ("common.py", "(logprobs.detach() - sampled_logprobs)", "(logprobs - sampled_logprobs)"),
    ("common.py", "pieces.append(order[: max(1, fitting)])", "pieces.append(order[: max(1, fitting - 1)])"),
    ("common.py", "range(1, min(len(order), most_rows) + 1)", "range(1, len(order) + 1)"),
    # what is logged
    ("common.py", "metrics = {name: sums.pop(name) / updates for name in losses}", "metrics = {name: sums.pop(name) for name in losses}"),
    ("common.py", "{name: value / weights for name, value in sums.items()", "{name: value / updates for name, value in sums.items()"),
    ("common.py", 'sums.pop("sampler_gap") / (sums.pop("gap_weights") or 1.0)', 'sums.pop("sampler_gap") / (sums.pop("gap_weights") * 0 + weights)'),
    ("common.py", '"reward": batch["rewards"].mean().item()', '"reward": batch["rewards"].sum().item()'),
    ("common.py", 'batch["mask"].sum(1).mean().item()', 'batch["length"].float().mean().item()'),
    ("common.py", "(from_first(rewards.view(-1, group_size)) == 0).all(1)", "(rewards.view(-1, group_size) == 0).all(1)"),
    ("common.py", "    if gap > 0.5:\n", "    if gap > 1e9:\n"),
    # models
    ("common.py", "return model.eval().requires_grad_(trainable)", "return model.train().requires_grad_(trainable)"),
    ("common.py", "return placed(model.eval(), device)", "return placed(model.train(), device)"),
    ("common.py", 'options |= {"dtype": torch.float32, "use_safetensors": True,', 'options |= {"use_safetensors": True,'),
    ("common.py", '"use_safetensors": True, "trust_remote_code": False}', '"trust_remote_code": False}'),
    ("common.py", '"use_safetensors": True, "trust_remote_code": False}', '"use_safetensors": True, "trust_remote_code": True}'),
    ("common.py", 'wrong = {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}', 'wrong = {*info["missing_keys"]}'),
    ("common.py", 'wrong = {*info["missing_keys"], *(name', "wrong = {*(name"),
    ("common.py", 'layer.forward = partial(recomputed, layer.forward, use_reentrant=False)', "pass"),
    ("common.py", "path if lora_rank else checkpoint or path)", "path)"),
    ("common.py", '"lora_alpha": 2 * lora_rank', '"lora_alpha": lora_rank'),
    ("common.py", 'policy.__dict__ | {"forward": policy.disable_adapter()(policy.forward)}', "policy.__dict__"),
    # evaluation, checkpoints, rewards of a user's own job
    ("common.py", 'batch["rewards"].view(-1, num_samples).amax(1)', 'batch["rewards"].view(-1, num_samples).mean(1)'),
    ("common.py", 'key=(seed, "evaluate"))', 'key=(time.time(), "evaluate"))'),
    ("common.py", "rollout(prompts, num_samples, temperature=temperature,", "rollout(prompts, num_samples,"),
    ("common.py", 'messages = conversation(row["prompt"], system_prompt)\n        is_text', 'messages = row["prompt"]\n        is_text'),
    ("common.py", "signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL", "signal.SIG_IGN"),
    ("common.py", "signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL", "signal.SIG_DFL"),
    ("common.py", "(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)", "(signal.SIGINT, signal.SIGTERM)"),
    ("common.py", "if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:", "if True:"),
    ("common.py", "for old in checkpoints(run_folder)[:-2]", "for old in checkpoints(run_folder)[2:]"),
    ("common.py", ' and json.loads(line)["step"] <= start', ""),
    ("common.py", "fn(texts, completions[rows], copy.deepcopy(data))", "fn(texts, completions[rows], data)"),
    ("common.py", "sum(weight * x for (_, weight), x", "sum(x for (_, weight), x"),
    ("common.py", "if not abs(value) < 1e30:", "if abs(value) > 1e30:"),
    ("common.py", 'Fraction(match[1] + "1") * sum', "sum"),
    ("common.py", 'places = [divmod(state["consumed"] + i, len(prompts)) for i in range(count)]', "places = [divmod(i, len(prompts)) for i in range(count)]"),
    ("common.py", 'generator(seed, "prompts", e)', 'generator(seed, "prompts")'),
    ("common.py", "return str(found[-1]), torch.load(found[-1]", "return str(found[-1]), torch.load(found[0]"),
    ("common.py", 'key=lambda path: int(path.name[11:]))', "key=lambda path: path.name)"),
    ("common.py", 'whole.set_optimizer_state_dict(trained, optimizer, state.pop("optimizer"), options=options)', 'state.pop("optimizer")'),
    ("common.py", 'whole.set_model_state_dict(others, state.pop("weights"), options=options)', 'state.pop("weights")'),
    ("common.py", "tried = [by_length[0], by_length[-1], max(prompts, key=lambda prompt: max(prompt.ids))]", "tried = [by_length[0], by_length[-1]]"),
    ("common.py", "1e-3 if policy.compute_dtype == torch.float32 else 0.2", "0.2"),
    ("common.py", "if not gap < (1e-3", "if gap > (1e-3"),
    ("common.py", "os.chdir(saved[\"started_in\"])  # its relative paths are meant from there\n", "pass\n"),
    ("common.py", "parse(default=replace(args, **saved))", "parse(default=args)"),
    ("common.py", "    with suppress(OSError):\n        write(*args)", "    write(*args)"),
    # reinforce
    ("reinforce.py", "rewards[:, t] + gamma * running, running)", "rewards[:, t] + running, running)"),
    ("reinforce.py", "torch.where(mask[:, t] != 0, rewards[:, t] + gamma * running, running)", "rewards[:, t].masked_fill(mask[:, t] == 0, 0.0) + gamma * running"),
    ("reinforce.py", "returns[0] + (apart.sum() - apart) / (len(returns) - 1)", "returns.mean()"),
    ("reinforce.py", "(apart.sum() - apart) / (len(returns) - 1)", "(apart.sum() - apart) / len(returns)"),
    ("reinforce.py", 'total if args.weighting == "total" else returns', "returns"),
    ("reinforce.py", "returns - leave_one_out_baseline(total)[:, None]", "returns - leave_one_out_baseline(rewards)[:, None]"),
    (("reinforce.py", "rloo.py"), 'loss_weights(minibatch["mask"], "sum")', 'loss_weights(minibatch["mask"], "token")'),
    (("reinforce.py", "rloo.py"), "per_token = -advantages * logprobs", "per_token = advantages * logprobs"),
    # rloo
    ("rloo.py", "/ (group_size - 1)", "/ group_size"),
    ("rloo.py", 'args.kl_coef * weighted_sum(kl, batch["mask"], 1)', 'args.kl_coef * common.masked_mean(kl, batch["mask"], 1)'),
    ("rloo.py", "rewards = rewards - args.kl_coef", "rewards = rewards + args.kl_coef"),
    (("reinforce.py", "rloo.py", "ppo.py"), 'batch["ref_logprobs"], "k1")', 'batch["ref_logprobs"], "k3")'),
    (("reinforce.py", "rloo.py", "ppo.py"), "rewards = common.normalize(rewards)", "pass"),
    # ppo
    (("reinforce.py", "ppo.py"), "token_rewards = token_rewards - args.kl_coef * kl", "token_rewards = token_rewards + args.kl_coef * kl"),
    (("reinforce.py", "ppo.py"), 'common.at_last_token(rewards, batch["mask"])', 'rewards[:, None] * batch["mask"]'),
    ("ppo.py", "delta = rewards[:, t] + gamma * next_value - values[:, t]", "delta = rewards[:, t] + next_value - values[:, t]"),
    ("ppo.py", "delta + gamma * gae_lambda * next_advantage, next_advantage)", "delta + gae_lambda * next_advantage, next_advantage)"),
    ("ppo.py", "next_value = torch.where(is_chosen, values[:, t], next_value)", "next_value = values[:, t]"),
    ("ppo.py", "next_advantage = torch.where(is_chosen, delta + gamma * gae_lambda * next_advantage, next_advantage)", "next_advantage = delta + gamma * gae_lambda * next_advantage"),
    ("ppo.py", "next_value = next_advantage = torch.zeros_like(values[:, 0])", "next_value, next_advantage = values[:, -1], torch.zeros_like(values[:, 0])"),
    ("ppo.py", "rewards, values = rewards.masked_fill(mask == 0, 0.0), values.masked_fill(mask == 0, 0.0)\n", "rewards = rewards.masked_fill(mask == 0, 0.0)\n"),
    ("ppo.py", "* count / (count - 1).clamp(min=1)", ""),
    ("ppo.py", '        batch["advantages"] = whiten(advantages, batch["mask"])  # after', '        batch["advantages"] = whiten(advantages, batch["mask"])\n        batch["returns"] = batch["advantages"] + batch["values"]  # after'),
    ("ppo.py", "torch.maximum(plain, limited)", "torch.minimum(plain, limited)"),
    ("ppo.py", "clipped = values.clamp(old_values - clip, old_values + clip)", "clipped = values.clamp(returns - clip, returns + clip)"),
    ("ppo.py", "old_values.detach(), returns.detach()", "old_values.detach(), returns"),
    ("ppo.py", "- args.missing_eos_penalty * batch", "+ args.missing_eos_penalty * batch"),
    ("ppo.py", "loss + args.vf_coef * values_loss", "loss + values_loss"),
    ("ppo.py", "        elif args.shared_backbone:\n", "        elif False:\n"),
    ("ppo.py", "1 - variance(returns - values).item()", "1 - variance(values).item()"),
    ("ppo.py", "self.head(hidden[keep].float())", "self.head(hidden[keep.roll(1, 1)].float())"),
    ("ppo.py", "if not torch.allclose(one, other, atol=1e-3):", "if False:"),
    ("ppo.py", "            value_grad_norm = torch.nn.utils.clip_grad_norm_(value_model.parameters(), args.max_grad_norm)\n", "            value_grad_norm = torch.nn.utils.clip_grad_norm_(value_model.parameters(), 1e9)\n"),
    # the clipped surrogate
    (CLIPPED, "per_token = -torch.minimum(ratio", "per_token = -torch.maximum(ratio"),
    (CLIPPED, "per_token = -torch.minimum(ratio * advantages, clipped * advantages)", "per_token = -clipped * advantages"),
    (CLIPPED, "is_clipped = (clipped * advantages < ratio * advantages).float()", "is_clipped = (clipped != ratio).float()"),
    (CLIPPED, "clamp(1 - clip_low, 1 + clip_high)", "clamp(1 - clip_low, 1 + clip_low)"),
    (("ppo.py", "grpo.py"), "(logprobs - old_logprobs.detach())", "(old_logprobs.detach() - logprobs)"),
    (("ppo.py", "grpo.py"), ".clamp(max=20.0).exp()", ".exp()"),
    ("ppo.py", "-torch.minimum(ratio * advantages", "-torch.minimum(ratio.detach() * advantages"),
    # groups
    (GROUPED, "common.from_first(rewards.view(-1, group_size))", "common.from_first(rewards.view(group_size, -1).T)"),
    (GROUPED, "groups.std(1, keepdim=True) + 1e-4", "groups.std(1, keepdim=True, unbiased=False) + 1e-4"),
    (GROUPED, "groups.std(1, keepdim=True) + 1e-4", "groups.std(1, keepdim=True) + 1e-8"),
    (GROUPED, "groups - groups.mean(1, keepdim=True)", "groups - groups.mean()"),
    ((*GROUPED, "rloo.py"), "common.from_first(rewards.view(-1, group_size))", "rewards.view(-1, group_size)"),
    # gspo and cispo
    ("gspo.py", "(log_ratio.sum(1, keepdim=True) / length)", "log_ratio.sum(1, keepdim=True)"),
    ("gspo.py", ".exp().detach()  # (B, 1), eq. 7", ".exp()  # (B, 1), eq. 7"),
    ("gspo.py", "length = (weights != 0).sum(1, keepdim=True).clamp(min=1)", "length = weights.shape[1]"),
    ("cispo.py", "per_token = -clipped.detach()", "per_token = -clipped"),
    ("cispo.py", "per_token = -clipped.detach()", "per_token = -ratio.detach()"),
    ("cispo.py", "clamp(1 - clip_low, 1 + clip_high)", "clamp(1 - clip_low, clip_high)"),
    # the loops
    (("ppo.py", *GROUPED), 'old_logprobs = micro.get("old_logprobs", logprobs.detach())', "old_logprobs = logprobs.detach()"),
    (GROUPED, "loss = loss + args.kl_coef * weighted_sum(kl, weights)", "loss = loss - args.kl_coef * weighted_sum(kl, weights)"),
    ("grpo.py", 'kl_estimate(logprobs, micro["ref_logprobs"]', "kl_estimate(logprobs, old_logprobs"),
    (("grpo.py", "gspo.py"), 'kl_estimate(logprobs, micro["ref_logprobs"], args.kl_estimator)', 'kl_estimate(logprobs, micro["ref_logprobs"], "k1")'),
    (GROUPED, "rewards = rewards - overlong_penalty", "rewards = rewards + overlong_penalty"),
    (GROUPED, "return ((length - (max_new_tokens - buffer)) / buffer).clamp(0, 1)", "return ((length - buffer) / buffer).clamp(0, 1)"),
    (GROUPED, 'mask = minibatch["mask"] * ~(minibatch["truncated"] & args.mask_truncated)[:, None]', 'mask = minibatch["mask"]'),
    ("grpo.py", 'batch["advantages"] /= rewards.std() + 1e-4', "pass"),
    (GROUPED, "common.concatenate(common.select(batch, has_signal), replacement)", "common.select(batch, has_signal)"),
    (GROUPED, '(args.seed, "sample", step, attempt)', '(args.seed, "sample", step)'),
    (SCRIPTS, "loss = loss - args.entropy_coef *", "loss = loss + args.entropy_coef *"),
    (SCRIPTS, "            optimizer.zero_grad()\n", ""),
    (SCRIPTS, "common.load_reference(args.model, policy) if args.kl_coef else None", "policy if args.kl_coef else None"),
    (SCRIPTS, "common.load_reference(args.model, policy) if args.kl_coef else None", "common.load_reference(checkpoint or args.model, policy) if args.kl_coef else None"),
    (SCRIPTS, "partial(common.logprobs_of, reference, args.temperature)", "partial(common.logprobs_of, reference, 1.0)"),
    (SCRIPTS, 'weights = micro["advantages"], micro["weights"]\n', 'weights = micro["advantages"], loss_weights(micro["mask"], getattr(args, "aggregation", "sum"), args.max_new_tokens)\n'),
    (SCRIPTS, "clip_grad_norm_(policy.parameters(), args.max_grad_norm)", "clip_grad_norm_(policy.parameters(), 1e9)"),
    (SCRIPTS, "min(1.0, step / max(1, args.warmup_steps))", "min(1.0, (step - 1) / max(1, args.warmup_steps))"),
    (SCRIPTS, 'next_prompts(prompts, args.num_prompts, state, args.seed)\n        batch', 'next_prompts(prompts, args.num_prompts, {"consumed": 0}, args.seed)\n        batch'),
    (SCRIPTS, "            common.save_checkpoint(logger.dir, step, trained, optimizer, tokenizer, state)\n", "            pass\n"),
    # faults that users found
    ("common.py", "if has_attention else None", "if True else None"),
    ("common.py", "        config.output_router_logits = False", "        pass"),
    ("common.py", "(x.isfinite() | (batch[\"mask\"] == 0)).all()", "x.isfinite().all()"),
    ("common.py", "(x.isfinite() | (batch[\"mask\"] == 0)).all()", "(~x.isnan() | (batch[\"mask\"] == 0)).all()"),
    ("common.py", "add_special_tokens=not is_whole", "add_special_tokens=isinstance(prompt, str)"),
    ("common.py", "len(starts) - 1), dtype=torch.float64)", "len(starts) - 1))"),
    ("common.py", "            if not resume or name != \"args.json\":  # what was typed beside --resume may not work\n", "            if True:\n"),
    ("common.py", "answer.is_integer() else answer)", "answer < 0 else answer)"),
    ("common.py", "key=lambda i: -known[\"reward\"][i]", "key=lambda i: 0"),
    ("common.py", "        csv.field_size_limit(2**30)\n", ""),
    ("common.py", "batch.get(\"old_logprobs\", batch[\"logprobs\"])", "batch[\"logprobs\"]"),
    (("reinforce.py", "rloo.py", "ppo.py"), "batch.get(\"old_logprobs\", batch[\"logprobs\"])", "batch[\"logprobs\"]"),
    (SCRIPTS, "sampler_is_exact = dtype == torch.float32 and", "sampler_is_exact ="),
    (("reinforce.py", "rloo.py", "grpo.py", "gspo.py", "cispo.py"), "            if grad_norm > 0:  # else Adam would go on by its momentum alone\n", "            if True:\n"),
    (GROUPED, "if args.overlong_buffer > args.max_new_tokens:", "if False:"),
    ("reinforce.py", "if args.weighting == \"baseline\" and args.num_prompts", "if args.num_prompts"),
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
        done = subprocess.run(command, check=False, cwd=copy, capture_output=True, text=True, env=environment)
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.MULTILINE)
    return failed[1] if failed else f"pytest ended with {done.returncode}: {done.stdout[-300:]}"


def main() -> None:
    each = [(file, old, new) for files, old, new in MUTANTS for file in ([files] if isinstance(files, str) else files)]
    each = [m for m in each if not sys.argv[1:] or any(word in " ".join(m) for word in sys.argv[1:])]
    survivors = 0
    if failed := run(("README.md", "", "")):
        raise SystemExit(f"the suite fails as it is, so that it would kill anything: {failed}")
    with ThreadPoolExecutor(2) as pool:
        for (file, old, new), killer in zip(each, pool.map(run, each), strict=True):
            survivors += killer is None
            edit = f"{old.strip()!r:.70} -> {new.strip()!r:.70}"
            verdict = "SURVIVED" if killer is None else "killed  "
            print(f"{verdict} {file:12} {edit}\n             {killer or ''}", flush=True)
    print(f"{len(each) - survivors} of {len(each)} mutants killed")
    sys.exit(survivors)


if __name__ == "__main__":
    main()
