"""Families of tiny random models: what is sampled is what is trained, and every script runs on them."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
import transformers
from test_scripts import FEW, SCRIPTS, train
from transformers import AutoModelForCausalLM

import common
from common import InputError, Prompt

CPU = torch.device("cpu")
POLICY = SimpleNamespace(device=CPU, compute_dtype=torch.float32)  # what the loaders ask of a policy
GROUPED = {"num_key_value_heads": 2, "intermediate_size": 64}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {
    "Llama": GROUPED | {"attention_dropout": 0.1},
    "Qwen2": GROUPED,
    "Qwen3": GROUPED | {"head_dim": 8, "tie_word_embeddings": True},
    "Qwen3Moe": GROUPED | EXPERTS | {"head_dim": 8, "num_experts": 4},
    "Mixtral": GROUPED | {"num_local_experts": 4},
    "Gemma2": GROUPED | {"head_dim": 8, "sliding_window": 8},  # soft-capped logits, every other layer has the window
    "Gemma3Text": GROUPED | {"head_dim": 8, "sliding_window": 8},
    "Mistral": GROUPED | {"sliding_window": 8},
    "Phi": {"intermediate_size": 64, "resid_pdrop": 0.1},
    "Phi3": GROUPED,
    "Olmo2": GROUPED,
    "GPT2": {"n_positions": 128},  # absolute positions, dropout 0.1
    "GPTNeoX": {"intermediate_size": 64},
    "SmolLM3": GROUPED,
    "Granite": GROUPED,
    "Falcon": {},
    "OPT": {"ffn_dim": 64, "max_position_embeddings": 128, "word_embed_proj_dim": 32},  # positions from 2, dropout 0.1
    "Bloom": {},  # a bias in place of positions
    "GptOss": GROUPED | {"head_dim": 8, "num_local_experts": 4, "sliding_window": 8},  # attention sinks
    "Mamba": {"state_size": 8},  # a state in place of a cache: no attention, and no mask after the prompt
    "FalconMamba": {"state_size": 8},
    "Jamba": GROUPED | {"num_experts": 2, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1},  # both
}


def random_model(family="Llama", vocab_size=512, seed=0, **options):
    """A tiny random causal LM whose distributions are far from uniform."""
    torch.manual_seed(seed)
    shape = {"vocab_size": vocab_size, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"eos_token_id": 1, "pad_token_id": 2, "bos_token_id": 0}
    config = getattr(transformers, f"{family}Config")(**shape | FAMILIES[family] | options)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data *= 12 if parameter.dim() > 1 else 1
    return common.prepare(model, torch.float32, trainable=True)


def prompts_of(*ids):
    return [Prompt(list(i), f"prompt {n}", {"prompt": f"prompt {n}"}) for n, i in enumerate(ids)]


RAGGED = prompts_of([0, 7, 8, 9], [0, 5], [0, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20], [0, 3, 1, 3])


@pytest.fixture(scope="module")
def tokenizer():
    return common.load_tokenizer("tiny/policy")


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_as_sampled_equal_the_scoring_pass(tokenizer, family):
    """Left-padded prompts with a cache, right-padded rows without one, and each row alone by the plainest formula."""
    model = random_model(family)
    batch = common.generate(model, tokenizer, RAGGED, 3, 24, 0.8, key=(0, 1))
    scored = common.no_grad_pass(lambda micro: common.logprobs_of(model, 0.8, micro), batch, 100)
    torch.testing.assert_close(batch["logprobs"], scored, atol=1e-4, rtol=0)
    for i in (0, 3, 7, 11):
        start, n = int(batch["prompt_length"][i]), int(batch["mask"][i].sum())
        ids = batch["input_ids"][i, : start + n]
        with torch.no_grad():
            plain = torch.log_softmax(model(ids[None]).logits[0] / 0.8, -1)
        expected = torch.stack([plain[start + t - 1, ids[start + t]] for t in range(n)])
        torch.testing.assert_close(scored[i, :n], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_frozen_model_holds_its_matrices_in_the_passes_dtype_and_gives_the_same_numbers(family):
    trained = common.prepare(random_model(family), torch.bfloat16, trainable=True)
    ids = torch.arange(3, 35).view(2, 16)
    frozen = common.prepare(copy.deepcopy(trained), torch.bfloat16, trainable=False)
    with torch.no_grad(), common.autocast(trained):
        assert torch.equal(trained(ids).logits, frozen(ids).logits)
    halved = sum(p.numel() for p in frozen.parameters() if p.dtype == torch.bfloat16)
    # queries and output of each layer at least; GPT2 calls its own Conv1D
    assert halved >= 2 * 2 * 32 * 32 * (family != "GPT2")
    others = [module for module in frozen.modules() if not isinstance(module, torch.nn.Linear)]
    assert {p.dtype for module in others for p in module.parameters(recurse=False)} == {torch.float32}
    assert {p.dtype for p in trained.parameters()} == {torch.float32}


@pytest.mark.parametrize("family, name", [*zip(list(FAMILIES)[::2], [*SCRIPTS, *SCRIPTS], strict=False)])
def test_a_family_goes_through_all_stages_and_comes_back_from_its_folder(tokenizer, family, name, tmp_path):
    """Every second family, for time. Two epochs at a temperature: the ratio starts at 1, whatever dropout it has."""
    random_model(family).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    data, few, reward = FEW / "addition.jsonl", tmp_path / "few.jsonl", tmp_path / "reward.py"
    few.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    reward.write_text("def score(prompts, completions, rows):\n    return [len(c) % 3 for c in completions]\n")
    options = {"model": str(tmp_path / "model"), "dataset": str(data), "eval_dataset": str(few)}
    options |= {"reward_fn": (f"{reward}:score",), "max_new_tokens": 12, "kl_coef": 0.1}
    options |= {"num_prompts": 2, "group_size": 4}
    at_rest = options | {"num_steps": 1, "lr": 0.0, "num_epochs": 2, "temperature": 0.7}
    still = train(name, tmp_path / "still", **at_rest)[1]
    assert still["sampler_gap"] < 1e-4 and still["kl"] == pytest.approx(0, abs=1e-4)
    assert still.get("ratio_mean", 1.0) == pytest.approx(1.0, abs=1e-5) and still.get("clip_fraction", 0.0) == 0.0
    train(name, tmp_path / "run", **options | {"num_steps": 2, "lr": 1e-3})
    before, after = (AutoModelForCausalLM.from_pretrained(tmp_path / folder) for folder in ("model", "run/final"))
    moved = [not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True)]
    assert sum(moved) > 0.8 * len(moved)
    saved = json.loads((tmp_path / "run" / "final" / "config.json").read_text())
    assert all(saved[key] == value for key, value in config.items() if "drop" in key or key == "tie_word_embeddings")


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_experts_whose_config_asks_for_the_routers_logits_are_trained(family, tokenizer, tmp_path):
    """As people save them after fine-tuning."""
    model = random_model(family)
    model.config.output_router_logits = True
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    options = {"model": str(tmp_path / "model"), "dataset": str(FEW / "addition.jsonl"), "max_new_tokens": 4}
    options |= {"reward_fn": ("exact_match",), "num_prompts": 2, "num_steps": 1, "eval_every": 0}
    metrics = train("grpo", tmp_path / "run", **options)
    assert metrics[1]["sampler_gap"] < 1e-4 and metrics[1]["kl"] == pytest.approx(0, abs=1e-6)


def test_a_model_whose_sampling_is_not_its_scoring_is_refused_before_anything_is_believed(tokenizer, monkeypatch):
    """By 0.01 nats in float32: the first token after a cache is opened takes its neighbour's logits, now and then."""
    model = random_model()
    prompts = [*RAGGED, *prompts_of([0, 100])]
    common.check_fits(model, tokenizer, prompts, 24)
    forward = type(model).forward

    def off(self, *args, cache=None, **how):
        out = forward(self, *args, cache=cache, **how)
        out.logits = out.logits * (1.01 if cache is not None else 1.0)
        return out

    monkeypatch.setattr(type(model), "forward", off)
    with pytest.raises(InputError, match="LlamaForCausalLM: sampling and scoring it differ by 0.[0-9]+ nats per token"):
        common.check_fits(model, tokenizer, prompts, 24)


def test_a_token_without_an_embedding_is_found_wherever_it_stands(tokenizer):
    """In a prompt that is neither the shortest nor the longest; of 512 embeddings, 511 is the last."""
    model = random_model()
    common.check_fits(model, tokenizer, prompts_of([0, 5], [0, 511, 3], [0, 3, 4, 5]), 4)
    with pytest.raises(InputError, match="can't read these prompts.*index out of range"):
        common.check_fits(model, tokenizer, prompts_of([0, 5], [0, 512, 3], [0, 3, 4, 5]), 4)


def test_a_model_without_a_cache_of_ours_is_refused_in_a_sentence(tokenizer):
    """It keeps its state in its modules."""
    config = {"vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.RecurrentGemmaConfig(**config, intermediate_size=64, lru_width=32, attention_window_size=16)
    model = common.prepare(AutoModelForCausalLM.from_config(config), torch.float32, trainable=True)
    with pytest.raises(InputError, match="RecurrentGemmaForCausalLM can't read these prompts, or not with a cache"):
        common.check_fits(model, tokenizer, RAGGED, 24)


def test_pairs_of_tokens_are_drawn_from_softmax_of_the_logits_over_temperature(tokenizer):
    """Chi-square over the first two tokens at once, with a hostile generation config that the sampler must not read."""
    model = random_model(vocab_size=60)
    hostile = {"do_sample": True, "temperature": 0.1, "top_k": 1, "top_p": 0.5, "repetition_penalty": 1.3}
    model.generation_config.update(**hostile, eos_token_id=1)
    for temperature in (0.5, 1.0, 1.5):
        n, prompt = 20_000, [0, 7, 8]
        batch = common.generate(model, tokenizer, prompts_of(prompt), n, 2, temperature, key=(0, 1))
        # over 50 tokens, a top-k that is often on by default; a completion that has ended counts as second token 0
        counts = torch.zeros(60, 60, dtype=torch.float64)
        second = batch["input_ids"][:, 4] * batch["mask"][:, 1].long()
        counts.index_put_((batch["input_ids"][:, 3], second), torch.ones(n, dtype=torch.float64), accumulate=True)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, first] for first in range(60)])).logits.double()
        first, then = (torch.softmax(logits[:, position] / temperature, -1) for position in (2, 3))
        expected = n * first[0][:, None] * then
        expected[1] = 0.0
        expected[1, 0] = n * first[0][1]
        rare = expected < 5
        counts, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected))
        chi2, freedom = ((counts - expected) ** 2 / expected).sum().item(), len(counts) - 1
        spread = 2 / (9 * freedom)
        z = ((chi2 / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5  # Wilson and Hilferty 1931
        assert freedom > 20 and z < 3.1, (temperature, chi2, freedom)  # p > 0.001
