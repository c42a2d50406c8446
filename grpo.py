"""GRPO, group relative policy optimization (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300).

G completions are sampled of each prompt, and each is compared with its own group, so no value model is needed:

    advantages_i = (rewards_i - mean(group)) / (std(group) + 1e-4)
    ratio_t      = exp(logprobs_t - old_logprobs_t)
    loss         = mean over rows, mean over tokens of
                   -min(ratio_t * advantages, clip(ratio_t, 1 - clip_low, 1 + clip_high) * advantages) + kl_coef * k3_t

Differs from rloo.py: the baseline holds the sample itself and the advantage is divided by the group's std; a batch may
feed several optimizer steps, so there is an importance ratio and it is clipped; the KL to the reference is in the loss.

Two relatives are a command line each:

    Dr. GRPO (arXiv:2503.20783)  --scale-rewards none --aggregation constant --kl-coef 0
    DAPO (arXiv:2503.14476)      --clip-high 0.28 --aggregation token --kl-coef 0 --dynamic-sampling 3 --overlong-buffer 8

Departures from the paper: sample std and 1e-4 (the paper gives neither); a group of equal rewards has advantage exactly 0.

    python grpo.py  # CPU, about a minute: held-out reward 0.2 -> 2.2
    python grpo.py --model Qwen/Qwen3-0.6B --dataset math.jsonl --reward-fn math_answer --lr 1e-6 --max-new-tokens 512  # GPU, untested
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from common import (
    InputError, Logger, Timer, accumulate, check_finite, concatenate, describe, evaluate, full_state, generate,
    importance_weighted, keep_best, kl_estimate, launch, load_checkpoint, load_eval_prompts, load_policy, load_prompts,
    load_reference, load_rewards, load_state, load_tokenizer, logprobs_and_entropy_of, logprobs_of, loss_weights, lr_factor,
    microbatches, minibatches, no_grad_pass, no_signal, normalize, pick_device, rollout_metrics, samples_of, save_checkpoint,
    save_model, score, select, stopping, summarize, take, updates_per_batch, weighted_sum,
)  # fmt: skip


@dataclass
class Args:
    # run
    output_dir: str | None = None  # run folder; by default runs/SCRIPT-DATE-TIME
    resume: str | None = None  # run folder to continue from its newest checkpoint, with its flags
    seed: int = 0  # same seed, same metrics
    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the forward passes (trained weights are float32); auto: bfloat16 on cuda
    shard: Literal["full", "none"] = "full"  # with several processes: weights and optimizer spread over them, or a copy on each
    gather_for_sampling: bool = True  # the whole weights on each of them while it samples; else layer by layer: less memory, slower
    eval_every: int = 25  # steps between evaluations on held-out prompts; 0: before and after only
    eval_samples: int = 1  # completions per held-out prompt; k > 1 also gives eval_pass@k
    eval_temperature: float | None = None  # of those completions; 0: the likeliest token; None: as --temperature
    save_every: int = 0  # steps between checkpoints; 0: one at the end, and one when the run is stopped
    keep: int = 2  # newest checkpoints to keep; 0: all
    track: Literal["none", "tensorboard", "wandb", "trackio"] = "none"  # tracker beside metrics.jsonl
    quiet: bool = False  # print warnings, the scores before and after and the run folder, nothing else
    debug: bool = False  # show the traceback of an error
    # task and models
    model: str = "tiny/policy"  # causal language model, a folder or a hub id
    trust_remote_code: bool = False  # run the Python code that a model's folder or hub page brings: it can do anything you can
    lora_rank: int = 0  # train a low-rank adapter of this rank (needs peft); 0: all weights
    gradient_checkpointing: bool = False  # recompute layers in the backward pass: less memory, a third more time
    reward_model: str | None = None  # sequence-classification model with one label; tiny/reward if no reward is given
    reward_fn: tuple[str, ...] = ()  # exact_match, math_answer, path/to/file.py:function; several are summed
    reward_weights: tuple[float, ...] = ()  # one per reward, the reward model first; 0: only watched
    reward_timeout: float = 0.0  # seconds that a reward function may take for a whole batch; 0: no limit
    normalize_rewards: bool = False  # standardize the rewards of a batch
    dataset: str = "tiny/reviews.jsonl"  # JSONL, CSV or parquet file with a "prompt" column, or a hub dataset as id:split
    eval_dataset: str | None = None  # held-out prompts; by default NAME-eval.jsonl beside NAME.jsonl
    system_prompt: str | None = None  # makes a chat of every prompt, with this system message ("": none but the template's own)
    chat_template: str | None = None  # Jinja file in place of the tokenizer's own template
    # rollout
    num_steps: int = 100  # steps; each samples a batch once and learns from it
    num_prompts: int = 16  # prompts per step
    group_size: int = 8  # completions per prompt
    max_new_tokens: int = 32  # longest completion
    max_prompt_tokens: int = 512  # longer prompts are left out
    temperature: float = 1.0  # of sampling and of every log-probability
    is_correction_cap: float = 0.0  # largest weight trained / sampled probability of a token, where the two differ (bfloat16, ...); 0: off
    # algorithm
    clip_low: float = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2  # upper end of that range
    kl_coef: float = 0.04  # weight of the KL to the reference in the loss; 0: no reference is loaded
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"  # k1: log-ratio, k2: half its square, k3: exp(-k1) - 1 + k1
    scale_rewards: Literal["group", "batch", "none"] = "group"  # std that advantages are divided by
    aggregation: Literal["sequence", "token", "constant"] = "sequence"  # what the loss is averaged over
    dynamic_sampling: int = 0  # rounds of sampling that replace groups of equal rewards (DAPO)
    overlong_buffer: int = 0  # the last tokens of max_new_tokens cost up to 1 reward, linearly (DAPO)
    mask_truncated: bool = False  # no loss on completions without a stop token (DAPO); they stay in the baseline
    entropy_coef: float = 0.0  # weight of the entropy bonus
    # optimization
    num_epochs: int = 1  # passes over a batch
    minibatch_size: int | None = 64  # rows per optimizer step; None: the whole batch
    microbatch_tokens: int = 2048  # tokens per forward and backward, padding included; changes memory, never the result
    lr: float = 5e-5  # learning rate; 1e-6 for a model of 0.5B or more
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # after the warm-up
    warmup_steps: int = 5  # steps of linear warm-up
    max_grad_norm: float = 1.0  # gradients are scaled down to this norm


# --- the algorithm ---


def group_advantages(rewards: torch.Tensor, group_size: int, scale_by_std: bool = True) -> torch.Tensor:
    """(B,): reward minus the group's mean, over its sample std (arXiv:2402.03300, section 4.1.2); exactly 0 where all rewards are equal."""
    if group_size < 2:
        raise ValueError(f"a group's statistics need group_size 2 or more, not {group_size}")
    groups = rewards.view(-1, group_size)  # (N, G)
    groups = groups - groups[:, :1]  # equal rewards leave no rounding behind
    advantages = groups - groups.mean(1, keepdim=True)
    if scale_by_std:
        advantages = advantages / (groups.std(1, keepdim=True) + 1e-4)
    return advantages.view(-1)  # (B,)


def overlong_penalty(length: torch.Tensor, max_new_tokens: int, buffer: int) -> torch.Tensor:
    """(B,): from 0 where the last buffer tokens begin up to 1 at max_new_tokens, linearly (DAPO, arXiv:2503.14476, eq. 13)."""
    return ((length - (max_new_tokens - buffer)) / buffer).clamp(0, 1)


def policy_loss(logprobs, old_logprobs, advantages, weights, clip_low: float, clip_high: float) -> tuple[torch.Tensor, dict]:
    """Clipped surrogate (PPO, arXiv:1707.06347, eq. 7), and how much of it is clipped. Advantages are (B,) or (B, T)."""
    advantages = (advantages[:, None] if advantages.dim() == 1 else advantages).detach()
    log_ratio = (logprobs - old_logprobs.detach()).masked_fill(weights == 0, 0.0)
    ratio = log_ratio.clamp(max=20.0).exp()  # (B, T); an inf would make NaNs
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    per_token = torch.maximum(-ratio * advantages, -clipped * advantages)
    is_clipped = (-clipped * advantages > -ratio * advantages).float()
    stats = {"clip_fraction": weighted_sum(is_clipped, weights), "ratio_mean": weighted_sum(ratio.detach(), weights)}
    return weighted_sum(per_token, weights), stats


def main(args: Args) -> None:
    if args.group_size < 2:
        raise InputError("--group-size must be 2 or more: completions are compared with the others of their prompt")
    if args.overlong_buffer > args.max_new_tokens:
        raise InputError(f"--overlong-buffer {args.overlong_buffer} is longer than --max-new-tokens {args.max_new_tokens}")
    device, dtype = pick_device(args.device, args.dtype)
    checkpoint, state = load_checkpoint(args.resume)
    tokenizer = load_tokenizer(args.model, args.chat_template, args.trust_remote_code)
    policy_args = args.lora_rank, args.gradient_checkpointing, args.seed, args.trust_remote_code
    policy = load_policy(args.model, device, dtype, checkpoint, *policy_args)
    reference = load_reference(policy, args.model, device, dtype, args.trust_remote_code) if args.kl_coef else None
    reward_args = args.reward_model, args.reward_fn, args.reward_weights, args.reward_timeout, args.system_prompt
    reward_fns = load_rewards(*reward_args, device, dtype, args.microbatch_tokens, args.trust_remote_code)
    prompts = load_prompts(args.dataset, tokenizer, args.max_prompt_tokens, args.system_prompt)
    eval_prompts = load_eval_prompts(args.eval_dataset, args.dataset, tokenizer, args.max_prompt_tokens, args.system_prompt)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=0.0, fused=True)
    if checkpoint:
        load_state(optimizer, state.pop("optimizer"))
    models = {"policy": policy, "reference": reference}
    describe(device, dtype, tokenizer, models, reward_fns, prompts, eval_prompts, **vars(args))
    logger = Logger(Path(__file__).stem, vars(args), state["step"])

    rollout = partial(generate, policy, tokenizer, max_new_tokens=args.max_new_tokens, temperature=args.temperature)
    held_out = partial(
        evaluate, rollout, reward_fns, eval_prompts, args.seed, args.num_prompts * args.group_size, args.eval_samples, args.eval_temperature
    )
    num_updates = updates_per_batch(args.num_prompts * args.group_size, args.num_epochs, args.minibatch_size)
    if state["step"] == 0:
        eval_metrics, eval_samples = held_out(0)
        keep_best(logger.dir, policy, tokenizer, state, 0, eval_metrics)
        logger.log(0, eval_metrics, eval_samples)
    for step in range(state["step"] + 1, args.num_steps + 1):
        timer, totals = Timer(device), {}  # sums over the microbatches; summarize() knows what each is divided by
        lr = args.lr * lr_factor(step - 1, args.warmup_steps, args.lr_schedule, args.num_steps)
        optimizer.param_groups[0]["lr"] = lr

        # 1. generate
        batch = rollout(take(prompts, args.num_prompts, state, args.seed), args.group_size, key=(args.seed, "sample", step))
        timer.lap("generate")

        # 2. score
        batch |= score(reward_fns, batch, step)
        metrics = rollout_metrics(batch, args.group_size)
        for attempt in range(args.dynamic_sampling):  # new prompts replace groups without signal (DAPO, section 3.2)
            live = ~no_signal(batch["rewards"], args.group_size).repeat_interleave(args.group_size)  # (B,)
            if live.all():
                break
            fresh = take(prompts, int((~live).sum()) // args.group_size, state, args.seed)
            fresh = rollout(fresh, args.group_size, key=(args.seed, "sample", step, attempt))
            batch = concatenate(select(batch, live), fresh | score(reward_fns, fresh, step))
        if reference is not None:
            batch["ref_logprobs"] = no_grad_pass(partial(logprobs_of, reference, args.temperature), batch, args.microbatch_tokens)

        # 3. advantages
        rewards = batch["rewards"]  # (B,)
        if args.overlong_buffer:
            rewards = rewards - overlong_penalty(batch["mask"].sum(1), args.max_new_tokens, args.overlong_buffer)
        if args.normalize_rewards:
            rewards = normalize(rewards)
        batch["advantages"] = group_advantages(rewards, args.group_size, args.scale_rewards == "group")
        if args.scale_rewards == "batch":
            batch["advantages"] /= rewards.std() + 1e-4
        if num_updates > 1:  # else the current log-probabilities are the old ones (sampling rounds differently)
            batch["old_logprobs"] = no_grad_pass(partial(logprobs_of, policy, args.temperature), batch, args.microbatch_tokens)
        timer.lap("score")

        # 4. update
        for minibatch in minibatches(batch, args.num_epochs, args.minibatch_size, key=(args.seed, "shuffle", step)):
            trained = minibatch["mask"] * ~(minibatch["truncated"] & args.mask_truncated)[:, None]
            minibatch["weights"] = loss_weights(trained, args.aggregation, args.max_new_tokens)  # (b, T)
            for micro in microbatches(minibatch, args.microbatch_tokens):
                logprobs, entropy = logprobs_and_entropy_of(policy, args.temperature, micro)  # (m, T)
                old_logprobs = micro.get("old_logprobs", logprobs.detach())
                weights = micro["weights"]
                if args.is_correction_cap:
                    weights = importance_weighted(weights, old_logprobs, micro["logprobs"], args.is_correction_cap)
                loss, stats = policy_loss(logprobs, old_logprobs, micro["advantages"], weights, args.clip_low, args.clip_high)
                if reference is not None:
                    loss = loss + args.kl_coef * weighted_sum(kl_estimate(logprobs, micro["ref_logprobs"], args.kl_estimator), weights)
                stats |= {"entropy": weighted_sum(entropy, weights)}
                if args.entropy_coef:
                    loss = loss - args.entropy_coef * stats["entropy"]
                loss.backward()
                accumulate(totals, loss=loss, weights=weights.sum(), **stats)
                if "updates" not in totals:  # the policy is still the one that sampled
                    gap = weighted_sum((logprobs.detach() - micro["logprobs"]).abs(), micro["weights"])
                    accumulate(totals, sampler_gap=gap, gap_weights=micro["weights"].sum())
            grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
            check_finite(step, gradient_norm=grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            accumulate(totals, updates=1, grad_norm=grad_norm)
        timer.lap("update")

        # 5. log
        metrics |= {"lr": lr} | summarize(batch, totals, timer.laps)
        samples = samples_of(batch)
        if step == args.num_steps or (args.eval_every and step % args.eval_every == 0):
            eval_metrics, eval_samples = held_out(step)
            metrics, samples = metrics | eval_metrics, samples + eval_samples
            keep_best(logger.dir, policy, tokenizer, state, step, eval_metrics)
        logger.log(step, metrics, samples)
        if step == args.num_steps or stopping() or (args.save_every and step % args.save_every == 0):
            saved = {"optimizer": full_state(optimizer)}
            save_checkpoint(logger.dir, step, policy, tokenizer, state | saved, args.keep)
    save_model(logger.dir / "final", policy, tokenizer)
    logger.close()


if __name__ == "__main__":
    launch(main, Args, __doc__)
