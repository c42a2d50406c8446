"""RLOO, REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740).

G completions are sampled of each prompt; the baseline of each is the mean reward of the other G - 1, which does not depend
on it, so the gradient stays unbiased:

    rewards_i    = score_i - kl_coef * sum over tokens of (logprobs - ref_logprobs)
    advantages_i = rewards_i - mean(rewards of the other G - 1)
    loss         = mean over rows of -advantages_i * sum over tokens of logprobs

Differs from reinforce.py: the baseline is the prompt's own, and the whole completion is one action with one reward.

Departures from the paper: none known. TRL's RLOO clips a ratio of sequence probabilities; here there is no ratio.

    python rloo.py  # CPU, about a minute: held-out reward 0.2 -> 2.6
    python rloo.py --model Qwen/Qwen3-0.6B --dataset math.jsonl --reward-fn math_answer --lr 1e-6 --max-new-tokens 512  # GPU, untested
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from common import (
    InputError, Logger, Timer, accumulate, check_finite, describe, evaluate, full_state, generate, importance_weighted,
    keep_best, kl_estimate, launch, load_checkpoint, load_eval_prompts, load_policy, load_prompts, load_reference, load_rewards,
    load_state, load_tokenizer, logprobs_and_entropy_of, logprobs_of, loss_weights, lr_factor, masked_sum, microbatches,
    minibatches, no_grad_pass, normalize, pick_device, rollout_metrics, samples_of, save_checkpoint, save_model, score,
    stopping, summarize, take, weighted_sum,
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
    kl_coef: float = 0.05  # weight of the KL to the reference in the reward; 0: no reference is loaded
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"  # k1: log-ratio, k2: half its square, k3: exp(-k1) - 1 + k1
    entropy_coef: float = 0.0  # weight of the entropy bonus
    # optimization
    num_epochs: int = 1  # passes over a batch; there is no ratio, so all but the first optimizer step are off-policy
    minibatch_size: int | None = None  # rows per optimizer step; None: the whole batch
    microbatch_tokens: int = 2048  # tokens per forward and backward, padding included; changes memory, never the result
    lr: float = 2e-4  # learning rate; 1e-6 for a model of 0.5B or more
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # after the warm-up
    warmup_steps: int = 5  # steps of linear warm-up
    max_grad_norm: float = 1.0  # gradients are scaled down to this norm


# --- the algorithm ---


def leave_one_out_advantages(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """(B,): reward minus the mean reward of the other completions of the same prompt (section 2.2.1)."""
    if group_size < 2:
        raise ValueError(f"leaving one out needs group_size 2 or more, not {group_size}")
    groups = rewards.view(-1, group_size)  # (N, G)
    groups = groups - groups[:, :1]  # equal rewards leave no rounding behind
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
        if reference is not None:
            batch["ref_logprobs"] = no_grad_pass(partial(logprobs_of, reference, args.temperature), batch, args.microbatch_tokens)

        # 3. advantages
        rewards = batch["rewards"]  # (B,)
        if args.normalize_rewards:
            rewards = normalize(rewards)
        if reference is not None:
            kl = kl_estimate(batch["logprobs"], batch["ref_logprobs"], args.kl_estimator)  # (B, T)
            rewards = rewards - args.kl_coef * masked_sum(kl, batch["mask"], 1)
        batch["advantages"] = leave_one_out_advantages(rewards, args.group_size)
        timer.lap("score")

        # 4. update
        for minibatch in minibatches(batch, args.num_epochs, args.minibatch_size, key=(args.seed, "shuffle", step)):
            minibatch["weights"] = loss_weights(minibatch["mask"], "sum")  # (b, T)
            for micro in microbatches(minibatch, args.microbatch_tokens):
                logprobs, entropy = logprobs_and_entropy_of(policy, args.temperature, micro)  # (m, T)
                weights = micro["weights"]
                if args.is_correction_cap:
                    weights = importance_weighted(weights, logprobs, micro["logprobs"], args.is_correction_cap)
                loss, stats = policy_loss(logprobs, micro["advantages"], weights)
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
