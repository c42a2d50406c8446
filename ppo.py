"""PPO, proximal policy optimization (Schulman et al. 2017, arXiv:1707.06347), for language models (Ouyang et al. 2022).

A value model predicts what a completion will still earn from each of its tokens on; what it did not expect is the
advantage:

    rewards_t    = -kl_coef * (logprobs_t - ref_logprobs_t), + score at the last completion token
    delta_t      = rewards_t + gamma * values_{t+1} - values_t             (values_{t+1} = 0 after the last token)
    advantages_t = delta_t + gamma * gae_lambda * advantages_{t+1}         (GAE, arXiv:1506.02438)
    returns_t    = advantages_t + values_t, then advantages are whitened
    loss         = mean over all tokens of
                   -min(ratio_t * advantages_t, clip(ratio_t, 1 - clip_low, 1 + clip_high) * advantages_t)
                   + vf_coef / 2 * max((values - returns)^2, (clip(values, old_values +- value_clip) - returns)^2)

Differs from grpo.py: a value model and GAE in place of the group, the KL in the reward, the mean over all tokens.

Departures from the papers: the value model has its own weights and learning rate, advantages are whitened and values
clipped (both as in OpenAI's code), and a cut completion counts as ended.

    python ppo.py  # CPU, about a minute: held-out reward 0.2 -> 2.6
    python ppo.py --model Qwen/Qwen3-0.6B --dataset math.jsonl --reward-fn math_answer \
        --lr 1e-6 --value-lr 1e-5 --max-new-tokens 512  # GPU, untested
"""

import math
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import transformers

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
    num_prompts: Positive[int] = 128  # prompts per step
    group_size: Positive[int] = 1  # completions per prompt
    max_new_tokens: Positive[int] = 32  # longest completion
    max_prompt_tokens: Positive[int] = 512  # longer prompts are left out
    temperature: Positive[float] = 1.0  # temperature of sampling and of every log-probability
    is_correction_cap: float = 0.0  # largest weight trained / sampled probability of a token (bfloat16, ...); 0: off
    # algorithm
    clip_low: common.Share = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2  # upper end of that range
    kl_coef: float = 0.05  # weight of the KL to the reference in the reward; 0: no reference is loaded
    normalize_rewards: bool = False  # standardize the rewards of a batch
    gamma: common.Share = 1.0  # discount per token
    gae_lambda: common.Share = 1.0  # 0: one-step temporal difference, 1: Monte-Carlo return minus value
    vf_coef: float = 0.1  # weight of the value loss; next to nothing with a value model of its own, and Adam
    value_clip: float = 0.2  # values move at most this far from the old ones before their loss is clipped
    value_lr: float = 1e-3  # learning rate of the value model
    value_model: str | None = None  # where it starts; by default the reward model, else the policy with a zero head
    shared_backbone: bool = False  # a value head on the policy's own trunk instead of a value model
    missing_eos_penalty: float = 0.0  # taken off the reward of completions without a stop token
    aggregation: Literal["sequence", "token", "constant"] = "token"  # what the loss is averaged over
    entropy_coef: float = 0.0  # weight of the entropy bonus
    # optimization
    num_epochs: Positive[int] = 1  # passes over a batch
    minibatch_size: int = 64  # rows per optimizer step; 0: the whole batch
    microbatch_tokens: Positive[int] = 2048  # tokens per forward and backward: memory, never the result
    lr: float = 2e-4  # learning rate; 1e-6 for a model of 0.5B or more
    warmup_steps: int = 5  # steps of linear warm-up
    max_grad_norm: Positive[float] = 1.0  # gradients are scaled down to this norm


# --- the algorithm ---


def gae(rewards, values, mask, gamma: float, gae_lambda: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns (B, T), 0 outside the mask (1506.02438, eq. 16); nothing is bootstrapped past the end.

    Example: rewards [0, 1], values [.5, .5], gamma 1, lambda .5: deltas [0, .5], advantages [.25, .5], returns [.75, 1]
    """
    rewards, values = rewards.masked_fill(mask == 0, 0.0), values.masked_fill(mask == 0, 0.0)
    advantages = torch.zeros_like(values)
    next_value = next_advantage = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        is_chosen = mask[:, t] != 0  # a tool's tokens are passed over: what comes after them comes next
        next_advantage = torch.where(is_chosen, delta + gamma * gae_lambda * next_advantage, next_advantage)
        next_value = torch.where(is_chosen, values[:, t], next_value)
        advantages[:, t] = next_advantage
    return advantages.masked_fill(mask == 0, 0.0), (advantages + values).masked_fill(mask == 0, 0.0)


def whiten(x: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True) -> torch.Tensor:
    """(B, T): x over its standard deviation (sample variance, over the mask alone), around 0 or else its own mean."""
    x = x.masked_fill(mask == 0, 0.0)
    mean = common.masked_mean(x, mask)
    mean = mean + common.masked_mean(x - mean, mask)  # what rounding left, so that equal values become exactly 0
    count = (mask != 0).sum()
    variance = common.masked_mean((x - mean) ** 2, mask) * count / (count - 1).clamp(min=1)
    whitened = (x - mean) * (variance + 1e-8).rsqrt() + (0.0 if shift_mean else mean)
    return whitened.masked_fill(mask == 0, 0.0)


def policy_loss(logprobs, old_logprobs, advantages, weights, clip_low, clip_high) -> tuple[torch.Tensor, dict]:
    """Clipped surrogate (arXiv:1707.06347, eq. 7), and how much of it is clipped. Advantages are (B,) or (B, T)."""
    advantages = (advantages[:, None] if advantages.dim() == 1 else advantages).detach()
    log_ratio = (logprobs - old_logprobs.detach()).masked_fill(weights == 0, 0.0)
    ratio = log_ratio.clamp(max=20.0).exp()  # (B, T); an inf would make NaNs
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    per_token = -torch.minimum(ratio * advantages, clipped * advantages)  # eq. 7
    is_clipped = (clipped * advantages < ratio * advantages).float()
    stats = {"clip_fraction": weighted_sum(is_clipped, weights), "ratio_mean": weighted_sum(ratio.detach(), weights)}
    return weighted_sum(per_token, weights), stats


def value_loss(values, old_values, returns, weights, clip: float) -> tuple[torch.Tensor, dict]:
    """Half the squared error, or that of values kept within clip of the old ones where it is larger; (B, T) each.

    NOTE: the clip is in units of the reward: where scores are far larger, values follow by about clip in a batch.
    """
    old_values, returns = old_values.detach(), returns.detach()
    values, old_values, returns = (x.masked_fill(weights == 0, 0.0) for x in (values, old_values, returns))
    clipped = values.clamp(old_values - clip, old_values + clip)
    plain, limited = (values - returns) ** 2, (clipped - returns) ** 2
    stats = {"value_clip_fraction": weighted_sum((limited > plain).float(), weights)}
    return weighted_sum(0.5 * torch.maximum(plain, limited), weights), stats


# --- the value model ---


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """1 - variance of (returns - values) / variance of returns, over the mask; 1: values predict all, 0: no better than
    a constant, which is all there is to do where returns don't vary."""

    def variance(x):
        return common.masked_mean((x - common.masked_mean(x, mask)) ** 2, mask)

    total = variance(returns).item()
    return 1 - variance(returns - values).item() / total if total > 1e-8 else 0.0


class ValueModel(torch.nn.Module):
    """A trunk and a scalar head: V(x, y_<t), from a causal LM (zero head, so V = 0 at first) or a reward model."""

    def __init__(self, model):
        super().__init__()
        self.trunk, self.config = model.base_model, model.config
        self.head = torch.nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False)
        self.head.weight.data = model.score.weight.data if hasattr(model, "score") else 0 * self.head.weight.data

    def forward(self, batch: dict) -> torch.Tensor:
        with common.autocast(self):
            inputs, keep = common.completion_inputs(self, self.trunk, batch)
            hidden = self.trunk(**inputs).last_hidden_state
        return common.scatter_tokens(self.head(hidden[keep].float())[:, 0], batch["mask"])  # (B, T)


class ValueHead(torch.nn.Module):
    """A scalar head on the policy's own trunk; it reads the hidden states of the policy's latest forward pass."""

    def __init__(self, policy):
        super().__init__()
        self.head = torch.nn.Linear(policy.config.get_text_config().hidden_size, 1, bias=False)
        torch.nn.init.zeros_(self.head.weight)
        policy.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: setattr(self, "hidden", inputs[0]))

    def forward(self, batch: dict) -> torch.Tensor:
        return common.scatter_tokens(self.head(self.hidden.float())[:, 0], batch["mask"])  # (B, T)


def load_value_model(starts: list[str], policy, tokenizer, gradient_checkpointing: bool = False):
    """From the first of these that reads the policy's own token ids: causal language models or reward models."""
    own = [path for path in starts if common.load_tokenizer(path).get_vocab() == tokenizer.get_vocab()]
    if not own:
        raise InputError(f"the value model {starts[0]} has another tokenizer than the policy, whose token ids it reads")
    common.say(f"value model: starts from {own[0]}")
    with common.explained(f"no value model could be loaded from {own[0]}"):
        config = transformers.AutoConfig.from_pretrained(common.locate(own[0]), trust_remote_code=False)
    kinds = config.architectures or []
    if any("SequenceClassification" in kind for kind in kinds):
        source = common.load_model(transformers.AutoModelForSequenceClassification, own[0], num_labels=1)
    else:
        source = common.load_model(transformers.AutoModelForCausalLM, own[0])
    with torch.no_grad(), common.explained(f"the value model {own[0]} can't read the policy's token ids"):
        pairs = torch.tensor([[0, 0], [0, len(tokenizer) - 1]])
        one, other = source.base_model(pairs).last_hidden_state[:, 0]
    if not torch.allclose(one, other, atol=1e-3):
        raise InputError(f"the value model {own[0]} sees the tokens that come after; it must be a causal model")
    model = common.prepare(ValueModel(source), policy.compute_dtype, True, gradient_checkpointing)
    return common.placed(model, policy.device)


def main(args: Args) -> None:
    if args.shared_backbone and args.value_model:
        raise InputError("--shared-backbone puts the value head on the policy; leave out --value-model")
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
    if args.shared_backbone:
        value_model = common.placed(ValueHead(policy), device)
    else:
        reward_model = args.reward_model or (None if args.reward_fn else "tiny/reward")
        is_rewarded = reward_model and reward_fns["reward_model"][1] != 0
        starts = [args.value_model] if args.value_model else [reward_model] * bool(is_rewarded) + [args.model]
        value_model = load_value_model(starts, policy, tokenizer, args.gradient_checkpointing)
    trained = torch.nn.ModuleDict({"policy": policy, "value_model": value_model})
    params = [{"params": policy.parameters()}, {"params": value_model.parameters(), "lr": args.value_lr}]
    optimizer = torch.optim.AdamW(params, lr=args.lr, weight_decay=0.0, fused=True)
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

    def old_pass(micro: dict) -> torch.Tensor:  # NOTE: the policy first, a shared value head reads its hidden states
        return torch.stack([common.logprobs_of(policy, args.temperature, micro), value_model(micro)])

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
        if args.num_epochs > 1 or 0 < args.minibatch_size < len(batch["mask"]) or (reference and not sampler_is_exact):
            # else the first pass gives them; as sampled, rounded by decoding with a cache, the first ratio is not 1
            batch["old_logprobs"], batch["values"] = no_grad_pass(old_pass, batch)
        elif args.shared_backbone:
            batch["values"] = no_grad_pass(old_pass, batch)[1]
        else:
            batch["values"] = no_grad_pass(value_model, batch)
        rewards = batch["rewards"] - args.missing_eos_penalty * batch["truncated"]  # (B,)
        if args.normalize_rewards:
            rewards = common.normalize(rewards)
        token_rewards = common.at_last_token(rewards, batch["mask"])  # (B, T)
        if reference is not None:
            kl = common.kl_estimate(batch.get("old_logprobs", batch["logprobs"]), batch["ref_logprobs"], "k1")  # (B, T)
            token_rewards = token_rewards - args.kl_coef * kl  # in a reward only k1 pulls the right way
        advantages, batch["returns"] = gae(token_rewards, batch["values"], batch["mask"], args.gamma, args.gae_lambda)
        # NOTE: where rewards are all equal and there is no KL, the value model's errors are what is scaled up to 1
        batch["advantages"] = whiten(advantages, batch["mask"])  # after the returns, which need them as they were
        timer.lap("score")

        # 4. update
        shuffle = (args.seed, "shuffle", step)
        for update, minibatch in enumerate(common.minibatches(batch, args.num_epochs, args.minibatch_size, shuffle)):
            minibatch["weights"] = loss_weights(minibatch["mask"], args.aggregation, args.max_new_tokens)  # (b, T)
            for micro in common.microbatches(minibatch, args.microbatch_tokens):
                logprobs, entropy = common.logprobs_and_entropy_of(policy, args.temperature, micro)  # (m, T)
                old_logprobs = micro.get("old_logprobs", logprobs.detach())
                advantages, weights = micro["advantages"], micro["weights"]
                if update == 0:  # the policy is still the one that sampled
                    gap = weighted_sum((logprobs.detach() - micro["logprobs"]).abs(), weights)
                    statistics.update(sampler_gap=gap, gap_weights=weights.sum())
                if args.is_correction_cap:
                    weights = importance_weighted(weights, old_logprobs, micro["logprobs"], args.is_correction_cap)
                loss, stats = policy_loss(logprobs, old_logprobs, advantages, weights, args.clip_low, args.clip_high)
                values_loss, value_stats = value_loss(
                    value_model(micro), micro["values"], micro["returns"], weights, args.value_clip
                )
                loss, stats = loss + args.vf_coef * values_loss, stats | value_stats
                entropy = weighted_sum(entropy, weights)
                if args.entropy_coef:
                    loss = loss - args.entropy_coef * entropy
                loss.backward()
                losses.update(loss=loss.detach(), value_loss=values_loss.detach())
                statistics.update(weights=weights.sum(), entropy=entropy.detach(), **stats)
            grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
            value_grad_norm = torch.nn.utils.clip_grad_norm_(value_model.parameters(), args.max_grad_norm)
            if not math.isfinite(norm := float(grad_norm + value_grad_norm)):
                raise InputError(f"the gradient norm is {norm} in step {step}: no update; lower --lr")
            optimizer.step()
            optimizer.zero_grad()
            per_update.update(updates=1, grad_norm=grad_norm, value_grad_norm=value_grad_norm)
        timer.lap("update")

        # 5. log
        metrics |= common.update_metrics(batch, losses, statistics, per_update, timer.laps)
        metrics["explained_variance"] = explained_variance(batch["values"], batch["returns"], batch["mask"])
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
