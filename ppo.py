"""PPO, proximal policy optimization (Schulman et al. 2017, arXiv:1707.06347), as in RLHF (Ouyang et al. 2022, arXiv:2203.02155).

A value model predicts what a completion will still earn from each of its tokens on; what it did not expect is the advantage:

    rewards_t    = -kl_coef * (logprobs_t - ref_logprobs_t), + score at the last completion token
    delta_t      = rewards_t + gamma * values_{t+1} - values_t             (values_{t+1} = 0 after the last token)
    advantages_t = delta_t + gamma * gae_lambda * advantages_{t+1}         (GAE, arXiv:1506.02438)
    returns_t    = advantages_t + values_t, then advantages are whitened
    loss         = mean over all tokens of
                   -min(ratio_t * advantages_t, clip(ratio_t, 1 - clip_low, 1 + clip_high) * advantages_t)
                   + vf_coef / 2 * max((values - returns)^2, (clip(values, old_values +- value_clip) - returns)^2)

gae_lambda 0 is the one-step temporal difference, 1 the Monte-Carlo return minus the value.

Differs from grpo.py: a value model and GAE in place of the group, the KL in the reward, the mean over all tokens.

Departures from the papers: the value model has its own weights and learning rate, advantages are whitened and values clipped (both as
in OpenAI's code), a cut completion counts as ended, and a step moves the adaptive kl_coef to no less than half.

    python ppo.py  # CPU, about a minute: held-out reward 0.2 -> 2.6
    # GPU, untested:
    python ppo.py --model Qwen/Qwen3-0.6B --dataset math.jsonl --reward-fn math_answer --lr 1e-6 --value-lr 1e-5 --max-new-tokens 512
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from common import (
    InputError, Logger, Timer, ValueHead, accumulate, at_last_token, check_finite, describe, evaluate, explained_variance,
    full_state, generate, importance_weighted, keep_best, kl_estimate, launch, load_checkpoint, load_eval_prompts, load_policy,
    load_prompts, load_reference, load_rewards, load_state, load_tokenizer, load_value_model, logprobs_and_entropy_of,
    logprobs_of, loss_weights, lr_factor, masked_mean, masked_sum, microbatches, minibatches, no_grad_pass, normalize,
    pick_device, rollout_metrics, samples_of, save_checkpoint, save_model, score, stopping, summarize, take, updates_per_batch,
    weighted_sum,
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
    num_prompts: int = 128  # prompts per step
    group_size: int = 1  # completions per prompt
    max_new_tokens: int = 32  # longest completion
    max_prompt_tokens: int = 512  # longer prompts are left out
    temperature: float = 1.0  # of sampling and of every log-probability
    is_correction_cap: float = 0.0  # largest weight trained / sampled probability of a token, where the two differ (bfloat16, ...); 0: off
    # algorithm
    clip_low: float = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2  # upper end of that range
    kl_coef: float = 0.05  # weight of the KL to the reference in the reward; 0: no reference is loaded
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"  # k1: log-ratio, k2: half its square, k3: exp(-k1) - 1 + k1
    kl_target: float | None = None  # adapt kl_coef, which it starts from, to keep the KL near this many nats per completion
    kl_horizon: int = 10000  # completions over which kl_coef adapts
    gamma: float = 1.0  # discount per token
    gae_lambda: float = 1.0  # 0: one-step temporal difference, 1: Monte-Carlo return minus value
    vf_coef: float = 0.1  # weight of the value loss
    value_clip: float = 0.2  # values move at most this far from the old ones before their loss is clipped
    value_lr: float = 1e-3  # learning rate of the value model
    value_model: str | None = None  # where it starts; by default the reward model, else the policy with a zero head
    shared_backbone: bool = False  # a value head on the policy's own trunk instead of a value model
    missing_eos_penalty: float = 0.0  # taken off the reward of completions without a stop token
    aggregation: Literal["sequence", "token", "constant"] = "token"  # what the loss is averaged over
    entropy_coef: float = 0.0  # weight of the entropy bonus
    # optimization
    num_epochs: int = 1  # passes over a batch
    minibatch_size: int | None = 64  # rows per optimizer step; None: the whole batch
    microbatch_tokens: int = 2048  # tokens per forward and backward, padding included; changes memory, never the result
    lr: float = 2e-4  # learning rate; 1e-6 for a model of 0.5B or more
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # after the warm-up
    warmup_steps: int = 5  # steps of linear warm-up
    max_grad_norm: float = 1.0  # gradients are scaled down to this norm


# --- the algorithm ---


def gae(rewards, values, mask, gamma: float, gae_lambda: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns (B, T), 0 outside the mask (arXiv:1506.02438, eq. 16); nothing is bootstrapped past the last token.

    Example: rewards [0, 1], values [.5, .5], gamma 1, gae_lambda .5: deltas [0, .5], advantages [.25, .5], returns [.75, 1].
    """
    rewards, values = rewards.masked_fill(mask == 0, 0.0), values.masked_fill(mask == 0, 0.0)
    advantages = torch.zeros_like(values)
    next_value = next_advantage = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = delta + gamma * gae_lambda * next_advantage
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return advantages.masked_fill(mask == 0, 0.0), (advantages + values).masked_fill(mask == 0, 0.0)


def whiten(x: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True) -> torch.Tensor:
    """(B, T): x over its standard deviation (sample variance, over the mask alone), around 0 or, without shift_mean, its own mean."""
    x = x.masked_fill(mask == 0, 0.0)
    mean = masked_mean(x, mask)
    mean = mean + masked_mean(x - mean, mask)  # what rounding left, so that equal values become exactly 0
    count = (mask != 0).sum()
    variance = masked_mean((x - mean) ** 2, mask) * count / (count - 1).clamp(min=1)
    whitened = (x - mean) * (variance + 1e-8).rsqrt() + (0.0 if shift_mean else mean)
    return whitened.masked_fill(mask == 0, 0.0)


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


def value_loss(values, old_values, returns, weights, clip: float) -> tuple[torch.Tensor, dict]:
    """Half the squared error, or that of values kept within clip of the old ones where it is larger; (B, T) each.

    NOTE: the clip is in units of the reward; with scores far larger than 1 it stops values from ever catching up.
    """
    values, old_values, returns = (x.masked_fill(weights == 0, 0.0) for x in (values, old_values.detach(), returns.detach()))
    clipped = values.clamp(old_values - clip, old_values + clip)
    plain, limited = (values - returns) ** 2, (clipped - returns) ** 2
    stats = {"value_clip_fraction": weighted_sum((limited > plain).float(), weights)}
    return weighted_sum(0.5 * torch.maximum(plain, limited), weights), stats


def adapted_kl_coef(kl_coef: float, kl: float, target: float, completions: int, horizon: int) -> float:
    """kl_coef moved towards keeping the KL (nats per completion) at its target (Ziegler et al. 2019, arXiv:1909.08593, section 2.2)."""
    error = min(0.2, max(-0.2, kl / target - 1))
    return kl_coef * max(0.5, 1 + error * completions / horizon)  # 0 would be for good


def main(args: Args) -> None:
    if args.kl_target and not args.kl_coef:
        raise InputError("--kl-target adapts --kl-coef, which is 0: without a reference there is no KL to keep")
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
    if args.shared_backbone:
        value_model = ValueHead(policy)
    else:
        value_args = args.value_model, args.model, reward_fns, tokenizer, device, dtype, args.gradient_checkpointing
        value_model = load_value_model(*value_args, args.trust_remote_code)
    params = [{"params": policy.parameters()}, {"params": value_model.parameters()}]
    optimizer = torch.optim.AdamW(params, lr=args.lr, weight_decay=0.0, fused=True)
    kl_coef = state["kl_coef"] if args.kl_target and state.get("kl_start") == args.kl_coef else args.kl_coef  # what is typed anew wins
    if checkpoint:
        load_state(optimizer, state.pop("optimizer"))
        load_state(value_model, state.pop("value_model"))
    models = {"policy": policy, "reference": reference, "value_model": value_model}
    describe(device, dtype, tokenizer, models, reward_fns, prompts, eval_prompts, **vars(args))
    logger = Logger(Path(__file__).stem, vars(args), state["step"])

    rollout = partial(generate, policy, tokenizer, max_new_tokens=args.max_new_tokens, temperature=args.temperature)
    held_out = partial(
        evaluate, rollout, reward_fns, eval_prompts, args.seed, args.num_prompts * args.group_size, args.eval_samples, args.eval_temperature
    )
    num_updates = updates_per_batch(args.num_prompts * args.group_size, args.num_epochs, args.minibatch_size)

    def old_pass(micro: dict) -> tuple[torch.Tensor, torch.Tensor]:  # NOTE: the policy first, a shared value head reads its hidden states
        return logprobs_of(policy, args.temperature, micro), value_model(micro)

    if state["step"] == 0:
        eval_metrics, eval_samples = held_out(0)
        keep_best(logger.dir, policy, tokenizer, state, 0, eval_metrics)
        logger.log(0, eval_metrics, eval_samples)
    for step in range(state["step"] + 1, args.num_steps + 1):
        timer, totals = Timer(device), {}  # sums over the microbatches; summarize() knows what each is divided by
        lr, value_lr = (x * lr_factor(step - 1, args.warmup_steps, args.lr_schedule, args.num_steps) for x in (args.lr, args.value_lr))
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = lr, value_lr

        # 1. generate
        batch = rollout(take(prompts, args.num_prompts, state, args.seed), args.group_size, key=(args.seed, "sample", step))
        timer.lap("generate")

        # 2. score
        batch |= score(reward_fns, batch, step)
        metrics = rollout_metrics(batch, args.group_size)
        if reference is not None:
            batch["ref_logprobs"] = no_grad_pass(partial(logprobs_of, reference, args.temperature), batch, args.microbatch_tokens)

        # 3. advantages
        rewards = batch["rewards"] - args.missing_eos_penalty * batch["truncated"]  # (B,)
        if args.normalize_rewards:
            rewards = normalize(rewards)
        token_rewards = at_last_token(rewards, batch["mask"])  # (B, T)
        if reference is not None:
            kl = kl_estimate(batch["logprobs"], batch["ref_logprobs"], args.kl_estimator)  # (B, T)
            token_rewards = token_rewards - kl_coef * kl
        if num_updates > 1 or args.shared_backbone:  # else the current log-probabilities are the old ones (sampling rounds differently)
            batch["old_logprobs"], batch["values"] = no_grad_pass(old_pass, batch, args.microbatch_tokens)
        else:
            batch["values"] = no_grad_pass(value_model, batch, args.microbatch_tokens)
        advantages, batch["returns"] = gae(token_rewards, batch["values"], batch["mask"], args.gamma, args.gae_lambda)
        batch["advantages"] = whiten(advantages, batch["mask"])  # after the returns, which need them as they were
        timer.lap("score")

        # 4. update
        for minibatch in minibatches(batch, args.num_epochs, args.minibatch_size, key=(args.seed, "shuffle", step)):
            minibatch["weights"] = loss_weights(minibatch["mask"], args.aggregation, args.max_new_tokens)  # (b, T)
            for micro in microbatches(minibatch, args.microbatch_tokens):
                logprobs, entropy = logprobs_and_entropy_of(policy, args.temperature, micro)  # (m, T)
                old_logprobs = micro.get("old_logprobs", logprobs.detach())
                weights = micro["weights"]
                if args.is_correction_cap:
                    weights = importance_weighted(weights, old_logprobs, micro["logprobs"], args.is_correction_cap)
                loss, stats = policy_loss(logprobs, old_logprobs, micro["advantages"], weights, args.clip_low, args.clip_high)
                values_loss, value_stats = value_loss(value_model(micro), micro["values"], micro["returns"], weights, args.value_clip)
                loss = loss + args.vf_coef * values_loss
                stats |= value_stats | {"entropy": weighted_sum(entropy, weights), "value_loss": values_loss}
                if args.entropy_coef:
                    loss = loss - args.entropy_coef * stats["entropy"]
                loss.backward()
                accumulate(totals, loss=loss, weights=weights.sum(), **stats)
                if "updates" not in totals:  # the policy is still the one that sampled
                    gap = weighted_sum((logprobs.detach() - micro["logprobs"]).abs(), micro["weights"])
                    accumulate(totals, sampler_gap=gap, gap_weights=micro["weights"].sum())
            grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
            value_grad_norm = torch.nn.utils.clip_grad_norm_(value_model.parameters(), args.max_grad_norm)
            check_finite(step, gradient_norm=grad_norm, gradient_norm_of_the_value_model=value_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            accumulate(totals, updates=1, grad_norm=grad_norm, value_grad_norm=value_grad_norm)
        timer.lap("update")

        # 5. log
        metrics |= {"lr": lr} | summarize(batch, totals, timer.laps)
        metrics["explained_variance"] = explained_variance(batch["values"], batch["returns"], batch["mask"])
        metrics["kl_coef"] = kl_coef
        if args.kl_target and reference is not None:
            mean_kl = masked_sum(kl, batch["mask"], 1).mean().item()
            kl_coef = adapted_kl_coef(kl_coef, mean_kl, args.kl_target, len(rewards), args.kl_horizon)
        samples = samples_of(batch)
        if step == args.num_steps or (args.eval_every and step % args.eval_every == 0):
            eval_metrics, eval_samples = held_out(step)
            metrics, samples = metrics | eval_metrics, samples + eval_samples
            keep_best(logger.dir, policy, tokenizer, state, step, eval_metrics)
        logger.log(step, metrics, samples)
        if step == args.num_steps or stopping() or (args.save_every and step % args.save_every == 0):
            saved = {"optimizer": full_state(optimizer)}
            saved |= {"value_model": full_state(value_model), "kl_coef": kl_coef, "kl_start": args.kl_coef}
            save_checkpoint(logger.dir, step, policy, tokenizer, state | saved, args.keep)
    save_model(logger.dir / "final", policy, tokenizer)
    logger.close()


if __name__ == "__main__":
    launch(main, Args, __doc__)
