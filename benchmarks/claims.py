"""What lectures say of these algorithms, against the shipped functions: exactly where a small case can be enumerated, else cheaply.

    python benchmarks/claims.py                     # all, CPU: seconds; figures need matplotlib
    python benchmarks/claims.py --only clip groups

Each claim is a function that gives its seeds, one sentence of what was found, computed, and the numbers behind it as panels. They go to
claims.json and claims-NAME.png. Enumerated: every completion of one prompt by a small GPT-2 in float64, from tests/test_enumeration.py.
"""

import json
import math
import re
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]
import cispo
import common
import grpo
import gspo
import ppo
import reinforce
import rloo
import test_enumeration as small
from speed import facts


@dataclass
class Args:
    only: tuple[Literal["variance", "clip", "groups", "lengths", "experts"], ...] = ("variance", "clip", "groups", "lengths", "experts")
    output_dir: Path = Path(__file__).parent  # of claims.json and the figures


def panel(title: str, x: list, lines: dict[str, list[float]], x_label: str = "", y_label: str = "", log: str = "") -> dict:
    """What is drawn, and kept in claims.json; x of words makes bars. log names the logarithmic axes."""
    lines = {name: [float(f"{value:.6g}") for value in values] for name, values in lines.items()}
    return {"title": title, "x_label": x_label, "y_label": y_label, "log": log, "x": x, "lines": lines}


def variance() -> dict:
    """Of the gradient per completion (the trace of its covariance times the completions of a group), and its bias, both exact.

    Scores alone, then scores with the KL to the reference in the reward at every token.
    """
    mask, panels, found = small.MASK, [], {}
    for case, beta in (("score at the last token", 0.0), (f"score, and {small.BETA} KL at every token", small.BETA)):
        rewards = common.at_last_token(small.SCORES, mask) - beta * common.kl_estimate(small.LOGPROBS, small.REF, "k1")
        to_go = reinforce.rewards_to_go(rewards, mask, 1.0)
        total, exact = to_go[:, 0], small.exact(beta)
        true = (torch.einsum("b,bt,btn->n", small.P, to_go, small.THROUGH) / small.REACHED)[small.PREFIX]
        off = small.noise(4, len(small.PREFIXES))[small.PREFIX]

        def measured(size, advantages, exact=exact):
            """Variance per completion, and the bias as a share of the gradient's length."""
            steps = small.steps(reinforce.policy_loss, small.groups_of(size), advantages)
            bias = (small.mean(small.groups_of(size), steps) - exact).norm() / exact.norm()
            return size * small.variance(small.groups_of(size), steps).item(), bias.item()

        one, rows = small.groups_of(1), {}
        rows["total return"] = measured(1, total[one])
        rows["reward-to-go"] = measured(1, to_go[one])
        rows["to-go - mean reward"] = measured(1, (to_go - small.P @ total)[one])
        for size in (2, 3):
            groups = small.groups_of(size)
            baseline = torch.vmap(reinforce.leave_one_out_baseline)(total[groups])[..., None]
            rows[f"to-go - others of {size}"] = measured(size, to_go[groups] - baseline)
            rows[f"RLOO of {size}"] = measured(size, small.advantages_of(rloo.leave_one_out_advantages, groups, total))
            centred = small.advantages_of(grpo.group_advantages, groups, total, False)
            rows[f"group mean of {size}"] = measured(size, centred)
        lambdas = [0.0, 0.25, 0.5, 0.75, 0.9, 1.0]
        gae = {
            name: [measured(1, ppo.gae(rewards, values, mask, 1.0, x)[0][one]) for x in lambdas]
            for name, values in zip(
                ("true values", "off by 0.1", "off by 0.5", "no values"), (true, true + 0.1 * off, true + 0.5 * off, 0 * true)
            )
        }
        names = list(rows)
        panels.append(panel(f"variance: {case}", names, {"": [rows[name][0] for name in names]}, log="x"))
        panels.append(panel(f"bias / gradient: {case}", names, {"": [rows[name][1] for name in names]}))
        for i, what in enumerate(("variance", "bias / gradient")):
            panels.append(panel(f"GAE, {what}: {case}", lambdas, {name: [row[i] for row in x] for name, x in gae.items()}, "lambda"))
        found[beta] = rows, gae
    (score, gae), (with_kl, _) = found.values()
    saved = 1 - with_kl["reward-to-go"][0] / with_kl["total return"][0]
    (true_0, true_1), (off_0, off_1) = ((gae[name][0], gae[name][-1]) for name in ("true values", "off by 0.5"))
    return {
        "lecture": "Reward-to-go has less variance than the total return, a baseline less again; lambda trades variance for bias.",
        "found": f"With the score at the last token reward-to-go is the total return, {score['total return'][0]:.1f}, and saves nothing "
        f"(with a KL at every token {saved:.0%}); the mean reward as baseline leaves {score['to-go - mean reward'][0]:.1f}, the others "
        f"of 3 {score['RLOO of 3'][0]:.1f}, true values at lambda 1 {true_1[0]:.1f}. Lambda 0 then has {true_0[0]:.1f} and no bias; but "
        f"with values off by 0.5 a lower lambda costs both: variance {off_0[0]:.1f} at 0 against {off_1[0]:.1f} at 1, and a bias of "
        f"{off_0[1]:.0%} of the gradient against 0. A mean over the group that holds the sample shrinks the gradient, by "
        f"{score['group mean of 3'][1]:.0%} at G 3.",
        "seeds": [3, 4, 5, 12],
        "panels": panels,
    }  # fmt: skip


def clip() -> dict:
    """The loss of one token and its gradient with respect to the token's log-probability, at default clip ranges."""
    wide = [round(0.02 * i, 2) for i in range(1, 301)]
    narrow = [round(1 + 2e-5 * i, 6) for i in range(-50, 51)]
    panels, slopes = [], {}
    for title, script, x in (("PPO and GRPO", grpo, wide[:100]), ("GSPO, one token", gspo, narrow), ("CISPO", cispo, wide)):
        lines, range_ = {}, (script.Args.clip_low, script.Args.clip_high)
        for advantage in (1.0, -1.0):
            logprobs = torch.tensor(x, dtype=torch.float64).log()[:, None].requires_grad_()
            zero, advantages = torch.zeros_like(logprobs), torch.full_like(logprobs, advantage)
            loss = torch.vmap(lambda l, o, a: script.policy_loss(l[None], o[None], a[None], torch.ones_like(l)[None], *range_)[0])
            each = loss(logprobs, zero, advantages)
            slope = torch.autograd.grad(each.sum(), logprobs)[0][:, 0].tolist()
            lines |= {f"loss, advantage {advantage:+g}": each.tolist(), f"gradient, advantage {advantage:+g}": slope}
            slopes[script, advantage] = dict(zip(x, slope))
        shown, label = ([round(1e4 * (r - 1), 4) for r in x], "(ratio - 1) * 10,000") if x is narrow else (x, "ratio")
        panels.append(panel(f"{title}, clip {range_[0]:g} / {range_[1]:g}", shown, lines, label))
    assert all(ppo.policy_loss(*args) == grpo.policy_loss(*args) for args in [tuple(torch.rand(4, 3, 2).unbind()) + (0.2, 0.2)])

    def dead(script, advantage):
        zero = [x for x, slope in slopes[script, advantage].items() if slope == 0]
        return f"{min(zero):g} to {max(zero):g}" if zero else "nowhere"

    return {
        "lecture": "The clip keeps the new policy near the old one.",
        "found": f"It only takes the gradient away where the policy has moved with the advantage: GRPO at ratios {dead(grpo, 1.0)} for "
        f"advantage +1 and {dead(grpo, -1.0)} for -1 (of those drawn). Against the advantage nothing is cut: at ratio 2 and advantage -1 "
        f"the gradient is {slopes[grpo, -1.0][2.0]:g} and grows with the ratio. CISPO's gradient vanishes {dead(cispo, 1.0)}; from a "
        f"ratio of {1 + cispo.Args.clip_high:g} on it stays at {-slopes[cispo, 1.0][6.0]:g} times the advantage.",
        "seeds": [],
        "panels": panels,
    }  # fmt: skip


def groups() -> dict:
    """Rewards of 0 or 1: the share of groups without signal, and the expected step as a multiple of the success rate's gradient.

    Simulated through no_signal and group_advantages; the step of a group is the mean of advantage * (success - p), over p (1 - p).
    """
    rates, sizes, n = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99], (4, 8, 16), 20_000
    silent, factor, worst = {}, {}, 0.0
    for size in sizes:
        lines = {"analytic": [], "simulated": []}
        factors = {"std": [], "std, simulated": [], "no std": [], "no std, simulated": []}
        for p in rates:
            rewards = (torch.rand(n * size, generator=common.generator("groups", size, p), dtype=torch.float64) < p).double()
            lines["analytic"].append(p**size + (1 - p) ** size)
            lines["simulated"].append(common.no_signal(rewards, size).double().mean().item())
            worst = max(worst, abs(lines["simulated"][-1] - lines["analytic"][-1]))
            for name, scale, exact in (("std", True, small.std_factor(p, size)), ("no std", False, (size - 1) / size)):
                step = grpo.group_advantages(rewards, size, scale) * (rewards - p) / (p * (1 - p))
                factors[name].append(exact)
                factors[f"{name}, simulated"].append(step.mean().item())
        silent |= {f"G {size}": lines["analytic"], f"G {size}, simulated": lines["simulated"]}
        factor |= {f"G {size}, {name}": values for name, values in factors.items()}
    quiet, c, half = silent["G 8"], factor["G 8, std"], rates.index(0.5)
    return {
        "lecture": "Groups in which all fail or all succeed teach nothing; dividing by the std lets hard and easy prompts count for more.",
        "found": f"At G 8 {quiet[0]:.0%} of groups are silent at a success rate of 1 % and {quiet[half]:.1%} at 50 % (simulated: within "
        f"{worst:.3f} everywhere). In expectation the step of a prompt is c times the gradient of its success rate, silent groups "
        f"included: c is 7/8 at every rate without the std; with it {c[0]:.2f} at 1 % and {c[half]:.2f} at 50 %. Silence costs "
        f"completions, not weight.",
        "seeds": ["(groups, G, p)"],
        "panels": [
            panel("groups without signal", rates, silent, "success rate", "share"),
            panel("step / gradient of the success rate", rates, {k: v for k, v in factor.items() if k.startswith("G 8")}, "success rate"),
            panel("the same for other G, with std", rates, {f"G {size}": factor[f"G {size}, std"] for size in sizes}, "success rate"),
        ],
    }  # fmt: skip


def lengths() -> dict:
    """The share of the loss that answers of 8, 32, 128 and 512 tokens carry, in all and per token; and what that does to the direction.

    The direction is exact: the expected step of leave-one-out advantages, averaged over groups of 3, against the gradient of E[score].
    """
    long, kinds = [8, 32, 128, 512], ("sequence", "token", "constant", "sum")
    mask = (torch.arange(max(long)) < torch.tensor(long)[:, None]).double()
    weights = {kind: common.loss_weights(mask, kind, max(long)) for kind in kinds}
    share = {kind: (w.sum(1) / w.sum()).tolist() for kind, w in weights.items()}
    per_token = {kind: (w[:, 0] / w[-1, 0]).tolist() for kind, w in weights.items()}
    logprobs = torch.zeros_like(mask).requires_grad_()
    gradient = {}
    for kind, w in weights.items():  # right and wrong answers of all lengths: what each pulls at its log-probabilities, in all
        loss, _ = grpo.policy_loss(logprobs, logprobs.detach(), torch.tensor([1.0, -1.0, 1.0, -1.0]), w, 0.2, 0.2)
        gradient[kind] = (torch.autograd.grad(loss, logprobs)[0].sum(1) / w.sum()).neg().tolist()
    draws = small.groups_of(3)
    advantages, exact = small.advantages_of(rloo.leave_one_out_advantages, draws, small.SCORES), small.exact(0.0)
    steps = {kind: small.mean(draws, small.steps(rloo.policy_loss, draws, advantages, kind)) for kind in kinds}
    cosine = {kind: torch.cosine_similarity(step, exact, dim=0).item() for kind, step in steps.items()}
    return {
        "lecture": "A mean over each sequence favours short right answers and long wrong ones; a token mean or a constant does not.",
        "found": f"A token of an 8-token answer weighs {per_token['sequence'][0]:.0f} times one of a 512-token answer under sequence, as "
        f"much under the others; the 512-token answer then carries {share['token'][-1]:.0%} of the loss, under sequence 25 %. constant "
        f"and sum step along the gradient of E[score] (cosine {cosine['constant']:.4f}); sequence ({cosine['sequence']:.4f}) does not, "
        f"nor quite does token ({cosine['token']:.4f}), which divides by a length that depends on what was sampled.",
        "seeds": [3, 5],
        "panels": [
            panel("share of the loss", long, share, "tokens of the answer", log="xy"),
            panel("weight of a token / that of the longest", long, per_token, "tokens of the answer", log="xy"),
            panel("pull on the log-probabilities, advantages + - + -", long, gradient, "tokens of the answer", log="x"),
            panel("cosine of the expected step with the gradient", list(cosine), {"": list(cosine.values())}),
        ],
    }  # fmt: skip


def experts(seeds: tuple[int, ...] = (0, 1, 2)) -> dict:
    """Log-ratios of one policy with itself, sampled in bfloat16 and scored in float32, by token and by sequence: random tiny Qwen3s.

    Routing is compared too: a token's experts have changed if in any layer the sets of chosen experts differ between the precisions.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = {
        "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "initializer_range": 0.15, "eos_token_id": 0, "bos_token_id": None, "max_position_embeddings": 256, "tie_word_embeddings": False,
    }  # fmt: skip
    moe = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    tokenizer, panels, figures = SimpleNamespace(eos_token_id=0, batch_decode=lambda ids, **_: ids), [], {}
    for name, Model, Config, extra in (
        ("dense", Qwen3ForCausalLM, Qwen3Config, {"intermediate_size": 128}), ("experts", Qwen3MoeForCausalLM, Qwen3MoeConfig, moe),
    ):  # fmt: skip
        tokens, sequences, flipped = [], [], []
        for seed in seeds:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                model = common.prepare(Model(Config(**shape, **extra)), torch.device("cpu"), torch.bfloat16, True)
            ids = torch.randint(1, 256, (8, 12), generator=common.generator("experts", seed)).tolist()
            prompts = [common.Prompt(row, "", {}) for row in ids]
            batch = common.generate(model, tokenizer, prompts, 8, 96, 1.0, key=(seed, "experts"))
            chosen = []
            for dtype in (torch.bfloat16, torch.float32):
                model.compute_dtype = dtype
                if extra is moe:
                    with torch.no_grad(), common.autocast(model):
                        routed = model(batch["input_ids"][:, :-1], output_router_logits=True).router_logits
                    picked = torch.stack([layer.float().topk(2).indices.sort(-1).values for layer in routed])  # (layers, tokens, 2)
                    chosen.append(picked.view(len(routed), *batch["input_ids"][:, 1:].shape, 2))
            scored = common.no_grad_pass(partial(common.logprobs_of, model, 1.0), batch, 4096)
            log_ratio, mask = (scored - batch["logprobs"]).double(), batch["mask"].bool()
            tokens.append(log_ratio[mask])
            weights = common.loss_weights(batch["mask"], "sequence")
            one = torch.ones(len(mask))
            ratios = [gspo.policy_loss(s[None], o[None], a[None], w[None], 1, 1)[1]["ratio_mean"] / w.sum()
                      for s, o, a, w in zip(scored, batch["logprobs"], one, weights)]  # fmt: skip
            sequences.append(torch.stack(ratios).double().log())
            if chosen:
                differ = (chosen[0] != chosen[1]).flatten(-1).any(-1).any(0)
                flipped.append(differ[common.completion_positions(batch)])
        tokens, sequences = torch.cat(tokens), torch.cat(sequences)
        length = len(tokens) / len(sequences)
        figures[name] = {"token": tokens.std().item(), "sequence": sequences.std().item(), "independent": tokens.std().item() / length**0.5}
        figures[name] |= {"bias": sequences.mean().item(), "length": length, "outside": 0.0}
        ratio = sequences.exp()
        figures[name]["outside"] = ((ratio < 1 - gspo.Args.clip_low) | (ratio > 1 + gspo.Args.clip_high)).double().mean().item()
        if flipped:
            flipped = torch.cat(flipped)
            figures[name] |= {"changed": flipped.double().mean().item()}
            figures[name] |= {"token, experts changed": tokens[flipped].std().item(), "token, same experts": tokens[~flipped].std().item()}
        shares = [i / 200 for i in range(1, 200)]
        spread = {"tokens": tokens.abs().quantile(torch.tensor(shares).double()).tolist()}
        spread["sequences"] = sequences.abs().quantile(torch.tensor(shares).double()).tolist()
        panels.append(panel(f"{name}: |log-ratio|, sampled in bfloat16, scored in float32", shares, spread, "quantile", log="y"))
    d, e = figures["dense"], figures["experts"]
    panels.append(panel("spread of log-ratios", [f"{n}, {k}" for n in figures for k in ("token", "sequence", "independent")],
                        {"": [figures[n][k] for n in figures for k in ("token", "sequence", "independent")]}))  # fmt: skip
    return {
        "lecture": "In a mixture of experts token ratios are noisy, because routing changes; the sequence ratio of GSPO is not.",
        "found": f"With experts the log-ratio of a token spreads by {e['token']:.4f} nats, {e['token'] / d['token']:.1f} times the dense "
        f"model's; {e['changed']:.0%} of tokens change experts in some layer, and spread by {e['token, experts changed']:.4f}, the rest "
        f"by {e['token, same experts']:.4f}. Per sequence it is {e['sequence']:.4f}, about what a mean of {e['length']:.0f} independent "
        f"tokens has ({e['independent']:.4f}): averaging, nothing more. {e['outside']:.0%} of sequences lie outside GSPO's clip before "
        f"any update, {d['outside']:.0%} of the dense model's: that clip is narrower than bfloat16.",
        "seeds": seeds,
        "figures": figures,
        "panels": panels,
    }  # fmt: skip


def draw(panels: list[dict], path: Path) -> None:
    if not common.importlib.util.find_spec("matplotlib"):
        return
    from matplotlib.figure import Figure

    columns = min(4, len(panels))
    figure = Figure((4.6 * columns, 3.4 * math.ceil(len(panels) / columns)), layout="constrained")
    axes = figure.subplots(math.ceil(len(panels) / columns), columns, squeeze=False).flatten()
    for axis, p in zip(axes, panels):
        for i, (name, y) in enumerate(p["lines"].items()):
            if isinstance(p["x"][0], str):
                axis.barh(p["x"][::-1], y[::-1])
            else:
                how = "x" if "simulated" in name else ("-", "--", "-.", ":")[i % 4]  # some lie on each other
                axis.plot(p["x"], y, how, label=name, markersize=4, linewidth=2 - 0.3 * (i % 4))
        axis.set(xlabel=p["x_label"], ylabel=p["y_label"], **{f"{a}scale": "log" for a in p["log"]})
        axis.set_title(p["title"], fontsize="small")
        if any(p["lines"]):
            axis.legend(fontsize="x-small")
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    figure.savefig(path)


def main(args: Args) -> None:
    args.output_dir.mkdir(parents=True, exist_ok=True)
    output = args.output_dir / "claims.json"
    results = json.loads(output.read_text()) if output.exists() else {}  # claims that are not checked this time keep theirs
    for name in args.only:
        start, claim = time.perf_counter(), globals()[name]()
        results[name] = facts("cpu") | {"torch": torch.__version__} | claim | {"seconds": round(time.perf_counter() - start, 1)}
        draw(claim["panels"], args.output_dir / f"claims-{name}.png")
        print(f"{name}\n  lecture: {claim['lecture']}\n  found:   {claim['found']}", flush=True)
    text = re.sub(r"\[\s+([^\[\]{}]+?)\s+\]", lambda match: "[" + " ".join(match[1].split()) + "]", json.dumps(results, indent=1))
    output.write_text(text + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
