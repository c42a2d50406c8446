"""RLOO, REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740).

G completions are sampled of each prompt; the baseline of each is the mean reward of the other G - 1, which does not
depend on it, so the gradient stays unbiased:

    rewards_i    = score_i - kl_coef * sum over tokens of (logprobs - ref_logprobs)
    advantages_i = rewards_i - mean(rewards of the other G - 1)
    loss         = mean over rows of -advantages_i * sum over tokens of logprobs

Differs from reinforce.py: the baseline is the prompt's own, and the whole completion is one action with one reward.

Departures from the paper: none known. TRL's RLOO clips a ratio of sequence probabilities; here there is no ratio.

    python rloo.py  # CPU, about a minute: held-out reward 0.2 -> 2.6
    python rloo.py --model Qwen/Qwen3-0.6B --dataset math.jsonl --reward-fn math_answer \
        --lr 1e-6 --max-new-tokens 512  # GPU, untested
"""

import math
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

import common
from common import InputError, Positive, importance_weighted, loss_weights, weighted_sum


@dataclass
class Args:
    # run
    output_dir: str | None = None  # run folder; by default runs/SCRIPT-DATE-TIME
    resume: str | None = None  # run folder to continue from its newest checkpoint, with its flags
    seed: int = 0  # same seed, same draws; on a CPU the same run
    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of forward passes, not weights; auto: bfloat16 on cuda
    eval_every: int = 25  # steps between evaluations on held-out prompts; 0: before and after only
    eval_samples: Positive[int] = 1  # completions per held-out prompt; k > 1 also gives eval_pass@k
    eval_temperature: float = 1.0  # temperature of evaluation samples; 0: greedy
    save_every: int = 25  # steps between checkpoints, the newest two are kept; 0: at the end and when stopped
    track: Literal["none", "tensorboard", "wandb"] = "none"  # tracker beside metrics.jsonl
    # task and models
    model: str = "tiny/policy"  # causal language model, a folder or a hub id
    lora_rank: int = 0  # rank of a low-rank adapter, trained instead of all weights (needs peft); 0: none
    gradient_checkpointing: bool = False  # recompute layers in the backward pass: less memory, a third more time
    reward_model: str | None = None  # sequence-classification model with one label; tiny/reward if no reward is given
    reward_fn: tuple[str, ...] = ()  # exact_match, math_answer, path/to/file.py:function; several are summed
    reward_weights: tuple[float, ...] = ()  # one per reward, the reward model first; 0: only watched
    dataset: str = "tiny/reviews.jsonl"  # JSONL or CSV file with a "prompt" column
    eval_dataset: str | None = None  # held-out prompts; by default NAME-eval.jsonl beside NAME.jsonl
    system_prompt: str | None = None  # makes a chat of every prompt, with this system message ("": the template's own)
    # rollout
    num_steps: Positive[int] = 100  # steps; each samples a batch once and learns from it
    num_prompts: Positive[int] = 16  # prompts per step
    group_size: Positive[int] = 8  # completions per prompt
    max_new_tokens: Positive[int] = 32  # longest completion
    max_prompt_tokens: Positive[int] = 512  # longer prompts are left out
    temperature: Positive[float] = 1.0  # temperature of sampling and of every log-probability
    is_correction_cap: float = 0.0  # largest weight trained / sampled probability of a token (bfloat16, ...); 0: off
    # algorithm
    kl_coef: float = 0.05  # weight of the KL to the reference in the reward; 0: no reference is loaded
    normalize_rewards: bool = False  # standardize the rewards of a batch
    entropy_coef: float = 0.0  # weight of the entropy bonus
    # optimization
    num_epochs: Positive[int] = 1  # passes over a batch; without a ratio, only the first update is on-policy
    minibatch_size: int = 0  # rows per optimizer step; 0: the whole batch
    microbatch_tokens: Positive[int] = 2048  # tokens per forward and backward: memory, never the result
    lr: float = 2e-4  # learning rate; 1e-6 for a model of 0.5B or more
    warmup_steps: int = 5  # steps of linear warm-up
    max_grad_norm: Positive[float] = 1.0  # gradients are scaled down to this norm


# --- the algorithm ---


def leave_one_out_advantages(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """(B,): reward minus the mean reward of the other completions of the same prompt (section 2.2.1)."""
    if group_size < 2:
        raise ValueError(f"leaving one out needs group_size 2 or more, not {group_size}")
    groups = common.from_first(rewards.view(-1, group_size))  # (N, G); equal rewards leave no rounding behind
    others = (groups.sum(1, keepdim=True) - groups) / (group_size - 1)
    return (groups - others).view(-1)  # (B,)


def policy_loss(logprobs, advantages, weights) -> tuple[torch.Tensor, dict]:
    """-advantages * log-probabilities (Williams 1992). Advantages are (B,) or (B, T)."""
    advantages = (advantages[:, None] if advantages.dim() == 1 else advantages).detach()
    per_token = -advantages * logprobs.masked_fill(weights == 0, 0.0)  # (B, T)
    return weighted_sum(per_token, weights), {}


def main(args: Args) -> None:
    if args.group_size < 2:
        raise InputError("--group-size must be 2 or more: completions are compared with the others of their prompt")
    device, dtype = common.pick_device(args.device, args.dtype)
    checkpoint, state = common.load_checkpoint(args.resume)
    tokenizer = common.load_tokenizer(args.model)
    policy = common.load_policy(
        args.model, device, dtype, checkpoint, args.lora_rank, args.gradient_checkpointing, seed=args.seed
    )
    reference = common.load_reference(args.model, policy) if args.kl_coef else None
    reward_fns = common.load_rewards(
        args.reward_model, args.reward_fn, args.reward_weights, args.system_prompt, policy, args.microbatch_tokens
    )
    reading = {"max_prompt_tokens": args.max_prompt_tokens, "system_prompt": args.system_prompt}
    prompts = common.load_prompts(args.dataset, tokenizer, **reading)
    eval_prompts = common.load_eval_prompts(args.eval_dataset, args.dataset, tokenizer, **reading)
    common.check_fits(policy, tokenizer, prompts + eval_prompts, args.max_new_tokens)
    trained = torch.nn.ModuleDict({"policy": policy})
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=0.0, fused=True)
    base_lrs = [group["lr"] for group in optimizer.param_groups]
    if checkpoint:
        common.load_state(trained, optimizer, state)
    logger = common.Logger(Path(__file__).stem, vars(args), args.output_dir, args.resume, state["step"], args.track)

    rollout = partial(common.generate, policy, tokenizer, max_new_tokens=args.max_new_tokens)
    rollout = partial(rollout, temperature=args.temperature, most_tokens=16 * args.microbatch_tokens)
    held_out = partial(
        common.evaluate, rollout, reward_fns, eval_prompts, args.eval_samples, args.eval_temperature, args.seed
    )
    no_grad_pass = partial(common.no_grad_pass, microbatch_tokens=args.microbatch_tokens)
    sampler_is_exact = dtype == torch.float32 and args.is_correction_cap == 0  # else a KL from it is not 0 at first
    if state["step"] == 0 and eval_prompts:
        logger.log(0, *held_out())
    for step in range(state["step"] + 1, args.num_steps + 1):
        timer, losses, statistics, per_update = common.Timer(device), Counter(), Counter(), Counter()
        for group, base_lr in zip(optimizer.param_groups, base_lrs, strict=True):
            group["lr"] = base_lr * min(1.0, step / max(1, args.warmup_steps))

        # 1. generate
        new_prompts = common.next_prompts(prompts, args.num_prompts, state, args.seed)
        batch = rollout(new_prompts, args.group_size, key=(args.seed, "sample", step))
        timer.lap("generate")

        # 2. score
        batch |= common.score(reward_fns, batch)
        metrics = common.rollout_metrics(batch, args.group_size)
        if reference is not None:
            batch["ref_logprobs"] = no_grad_pass(partial(common.logprobs_of, reference, args.temperature), batch)

        # 3. advantages
        if reference is not None and not sampler_is_exact:
            batch["old_logprobs"] = no_grad_pass(partial(common.logprobs_of, policy, args.temperature), batch)
        rewards = batch["rewards"]  # (B,)
        if args.normalize_rewards:
            rewards = common.normalize(rewards)
        if reference is not None:
            kl = common.kl_estimate(batch.get("old_logprobs", batch["logprobs"]), batch["ref_logprobs"], "k1")  # (B, T)
            rewards = rewards - args.kl_coef * weighted_sum(kl, batch["mask"], 1)  # only k1 pulls the right way
        batch["advantages"] = leave_one_out_advantages(rewards, args.group_size)
        timer.lap("score")

        # 4. update
        shuffle = (args.seed, "shuffle", step)
        for update, minibatch in enumerate(common.minibatches(batch, args.num_epochs, args.minibatch_size, shuffle)):
            minibatch["weights"] = loss_weights(minibatch["mask"], "sum")  # (b, T)
            for micro in common.microbatches(minibatch, args.microbatch_tokens):
                logprobs, entropy = common.logprobs_and_entropy_of(policy, args.temperature, micro)  # (m, T)
                advantages, weights = micro["advantages"], micro["weights"]
                if update == 0:  # the policy is still the one that sampled
                    gap = weighted_sum((logprobs.detach() - micro["logprobs"]).abs(), weights)
                    statistics.update(sampler_gap=gap, gap_weights=weights.sum())
                if args.is_correction_cap:
                    weights = importance_weighted(weights, logprobs, micro["logprobs"], args.is_correction_cap)
                loss, stats = policy_loss(logprobs, advantages, weights)
                entropy = weighted_sum(entropy, weights)
                if args.entropy_coef:
                    loss = loss - args.entropy_coef * entropy
                loss.backward()
                losses.update(loss=loss.detach())
                statistics.update(weights=weights.sum(), entropy=entropy.detach(), **stats)
            grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
            if not math.isfinite(grad_norm):
                raise InputError(f"the gradient norm is {float(grad_norm)} in step {step}: no update; lower --lr")
            if grad_norm > 0:  # else Adam would go on by its momentum alone
                optimizer.step()
            optimizer.zero_grad()
            per_update.update(updates=1, grad_norm=grad_norm)
        timer.lap("update")

        # 5. log
        metrics |= common.update_metrics(batch, losses, statistics, per_update, timer.laps)
        metrics["lr"] = optimizer.param_groups[0]["lr"]
        samples = common.samples_of(batch, args.group_size, advantage=batch["advantages"])
        if step == args.num_steps or (args.eval_every and step % args.eval_every == 0):
            eval_metrics, eval_samples = held_out()
            metrics, samples = metrics | eval_metrics, samples + eval_samples
        logger.log(step, metrics, samples)
        if step == args.num_steps or common.stopping() or (args.save_every and step % args.save_every == 0):
            common.save_checkpoint(logger.dir, step, trained, optimizer, tokenizer, state)
    common.save_model(logger.dir / "final", trained, tokenizer)


if __name__ == "__main__":
    common.launch(main, Args, __doc__)
