"""What lectures say of these algorithms, against the shipped functions: exactly where a small case can be enumerated.

    python benchmarks/claims.py                     # all, CPU: seconds; figures need matplotlib
    python benchmarks/claims.py --only lengths

Each claim is a function: what is said, how it is checked, and the numbers as panels, which go to claims.json and
claims-NAME.png. Enumerated: all completions of one prompt by a small GPT-2, in float64 (tests/test_enumeration.py).
"""

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]
import learning
import plot
import test_enumeration as small

import common
import grpo
import gspo
import ppo
import reinforce
import rloo


@dataclass
class Args:
    only: tuple[Literal["variance", "lengths", "experts"], ...] = ("variance", "lengths", "experts")
    output_dir: Path = Path(__file__).parent  # of claims.json and the figures


def panel(title: str, x: list, lines: dict[str, list[float]], x_label: str = "", log: str = "") -> dict:
    lines = {name: (x, [float(f"{value:.6g}") for value in y]) for name, y in lines.items()}
    return {"title": title, "x_label": x_label, "log": log, "lines": lines}


def numbers(title: str, found: dict[str, float]) -> dict:
    """A panel of a point each, names upwards."""
    found = {name: float(f"{value:.6g}") for name, value in found.items()}
    print(f"  {title}:", *(f"{name} {value:.4g}" for name, value in found.items()), sep="\n    ")
    return {"title": title, "lines": {"": (list(found.values()), list(found))}}


def variance() -> list[dict]:
    """Reward-to-go has less variance than the return, a baseline less again; lambda trades variance for bias.

    Variance is per completion: the trace of the covariance of a group's step, times the completions of a group. The
    bias is a share of the gradient's length. The score stands at the last token, and there is no KL.
    """
    rewards, exact = common.at_last_token(small.SCORES, small.MASK), small.exact(0.0)
    to_go = reinforce.rewards_to_go(rewards, small.MASK, 1.0)
    total, one = to_go[:, 0], small.groups_of(1)

    def measured(advantages: torch.Tensor) -> tuple[float, float]:
        """Of the advantages in every group that can be drawn."""
        groups = small.groups_of(advantages.shape[1])
        steps = small.steps(reinforce.policy_loss, groups, advantages)
        bias = (small.mean(groups, steps) - exact).norm() / exact.norm()
        return groups.shape[1] * small.variance(groups, steps).item(), bias.item()

    found = {"total return": total[one], "reward-to-go": to_go[one]}
    found["to-go - mean reward"] = (to_go - small.P @ total)[one]
    for size in (2, 3):
        groups = small.groups_of(size)
        others = torch.vmap(reinforce.leave_one_out_baseline)(total[groups])[..., None]
        found[f"to-go - others of {size}"] = to_go[groups] - others
        found[f"RLOO of {size}"] = small.advantages_of(rloo.leave_one_out_advantages, groups, total)
        found[f"group mean of {size}"] = small.advantages_of(grpo.group_advantages, groups, total, False)
    found = {name: measured(advantages) for name, advantages in found.items()}

    true = (torch.einsum("b,bt,btn->n", small.P, to_go, small.THROUGH) / small.REACHED)[small.PREFIX]
    error = small.noise(4, len(small.PREFIXES))[small.PREFIX]
    values = {"true values": true, "off by 0.1": true + 0.1 * error, "off by 0.5": true + 0.5 * error}
    lambdas, gae = [0.0, 0.25, 0.5, 0.75, 0.9, 1.0], {}
    for name, v in (values | {"no values": 0 * true}).items():
        gae[name] = [measured(ppo.gae(rewards, v, small.MASK, 1.0, x)[0][one]) for x in lambdas]
    names = "variance", "bias / gradient"
    panels = [numbers(what, {name: pair[i] for name, pair in found.items()}) for i, what in enumerate(names)]
    for i, what in enumerate(names):
        lines = {name: [pair[i] for pair in pairs] for name, pairs in gae.items()}
        panels.append(panel(f"GAE, {what}", lambdas, lines, "lambda"))
    return panels


def lengths() -> list[dict]:
    """A mean over each sequence favours short right answers and long wrong ones; a token mean does not.

    What answers of 8 to 512 tokens weigh in the loss. And the direction, exactly: the expected step of leave-one-out
    advantages in groups of 3, against the gradient of E[score].
    """
    long, signs = [8, 32, 128, 512], torch.tensor([1.0, -1.0, 1.0, -1.0])
    mask = (torch.arange(max(long)) < torch.tensor(long)[:, None]).double()
    logprobs = torch.zeros_like(mask).requires_grad_()
    draws, exact = small.groups_of(3), small.exact(0.0)
    advantages = small.advantages_of(rloo.leave_one_out_advantages, draws, small.SCORES)
    share, per_token, pull, cosine = {}, {}, {}, {}
    for kind in ("sequence", "token", "constant", "sum"):
        weights = common.loss_weights(mask, kind, max(long))
        share[kind] = (weights.sum(1) / weights.sum()).tolist()
        per_token[kind] = (weights[:, 0] / weights[-1, 0]).tolist()
        loss, _ = grpo.policy_loss(logprobs, logprobs.detach(), signs, weights, 0.2, 0.2)
        pull[kind] = (-torch.autograd.grad(loss, logprobs)[0].sum(1) / weights.sum()).tolist()
        step = small.mean(draws, small.steps(rloo.policy_loss, draws, advantages, kind))
        cosine[kind] = torch.cosine_similarity(step, exact, dim=0).item()
    return [
        panel("share of the loss", long, share, "tokens of the answer", "xy"),
        panel("weight of a token / that of the longest", long, per_token, "tokens of the answer", "xy"),
        panel("pull on the log-probabilities, advantages + - + -", long, pull, "tokens of the answer", "x"),
        numbers("cosine of the expected step with the gradient", cosine),
    ]


def experts(seeds: tuple[int, ...] = (0, 1, 2)) -> list[dict]:
    """In a mixture of experts token ratios are noisy, because routing changes; the sequence ratio of GSPO is not.

    Log-ratios of one policy with itself, sampled in bfloat16 and scored in float32: random tiny Qwen3s. The experts of
    a token have changed if in any layer another set is chosen in the other precision.
    """
    shape = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16}
    shape |= {"num_key_value_heads": 2, "initializer_range": 0.15, "max_position_embeddings": 256}
    shape |= {"eos_token_id": 0, "bos_token_id": None, "tie_word_embeddings": False}
    moe = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    dense = transformers.Qwen3Config(**shape, intermediate_size=128)
    tokenizer, panels = SimpleNamespace(eos_token_id=0, batch_decode=lambda ids, **_: ids), []
    for name, config in (("dense", dense), ("experts", transformers.Qwen3MoeConfig(**shape, **moe))):
        tokens, sequences, changed = [], [], []
        for seed in seeds:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                model = transformers.AutoModelForCausalLM.from_config(config)
            model = common.prepare(model, torch.bfloat16, trainable=True)
            ids = torch.randint(1, 256, (8, 12), generator=common.generator("experts", seed)).tolist()
            prompts = [common.Prompt(row, "", {}) for row in ids]
            batch = common.generate(model, tokenizer, prompts, 8, 96, 1.0, key=(seed, "experts"))
            chosen = [experts_of(model, dtype, batch) for dtype in (torch.bfloat16, torch.float32)]
            scored = common.no_grad_pass(partial(common.logprobs_of, model, 1.0), batch, 4096)
            log_ratio, mask = (scored - batch["logprobs"]).double(), batch["mask"].bool()
            tokens.append(log_ratio[mask])
            sequences.append(common.masked_mean(log_ratio, mask, 1))  # the log of GSPO's ratio
            changed.append((chosen[0] != chosen[1]).any(-1)[common.completion_positions(batch)])
        tokens, sequences, changed = torch.cat(tokens), torch.cat(sequences), torch.cat(changed)
        outside = (sequences.exp() < 1 - gspo.Args.clip_low) | (sequences.exp() > 1 + gspo.Args.clip_high)
        parts = {"token": tokens, "sequence": sequences}
        if changed.any():
            parts |= {"token, same experts": tokens[~changed], "token, experts changed": tokens[changed]}
        found = {part: log_ratios.std().item() for part, log_ratios in parts.items()}
        found["mean of independent tokens"] = found["token"] / (len(tokens) / len(sequences)) ** 0.5
        found["share outside GSPO's clip"] = outside.double().mean().item()
        found["share with other experts"] = changed.double().mean().item()
        panels.append(numbers(f"{name}: spread of log-ratios, and shares", found))
    return panels


def experts_of(model, dtype: torch.dtype, batch: dict) -> torch.Tensor:
    """(B, L - 1, layers * 2): the experts of each token, in order, when the passes are in this dtype."""
    model.compute_dtype = dtype
    ids = batch["input_ids"][:, :-1]
    if not hasattr(model.config, "num_experts"):
        return ids[..., None]  # there is no choice
    with torch.no_grad(), common.autocast(model):
        layers = model(ids, output_router_logits=True).router_logits
    return torch.cat([layer.float().topk(2).indices.sort(-1).values for layer in layers], -1).view(*ids.shape, -1)


def main(args: Args) -> None:
    output = args.output_dir / "claims.json"
    results = json.loads(output.read_text()) if output.exists() else {}  # claims that are not checked keep theirs
    for name in args.only:
        print(f"{name}: {globals()[name].__doc__.splitlines()[0]}")
        panels = globals()[name]()
        results[name] = learning.facts("cpu") | {"panels": panels}
        plot.draw(panels, args.output_dir / f"claims-{name}.png")
    output.write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args, description=__doc__))
