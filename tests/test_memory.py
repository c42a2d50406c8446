"""The arithmetic of benchmarks/memory.py."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import memory


@pytest.mark.parametrize("size", memory.SHAPES)
def test_parameters_are_those_of_the_model(size):
    s = memory.SHAPES[size]
    shape = {"vocab_size": s.vocabulary, "hidden_size": s.hidden, "intermediate_size": s.intermediate}
    shape |= {"num_hidden_layers": s.layers, "head_dim": s.head_dim, "num_attention_heads": s.heads}
    config = LlamaConfig(**shape, num_key_value_heads=s.kv_heads, tie_word_embeddings=s.tied)
    with torch.device("meta"):
        assert LlamaForCausalLM(config).num_parameters() == memory.parameters(s)


def test_a_small_example_by_hand(monkeypatch):
    # a layer: 4 * 2 * (2 * 2 + 2 * 1) + 3 * 4 * 6 = 120 weights in matrices and 2 * 4 in norms
    # in all 2 layers, a norm and 10 x 4 embeddings: 300
    monkeypatch.setitem(memory.SHAPES, "8B", memory.Shape(2, 4, 6, 2, 1, 2, 10))
    a = memory.Args("8B", gpus=1, dtype="float32", num_prompts=2, group_size=3, prompt_tokens=5, max_new_tokens=7)
    a = replace(a, microbatch_tokens=26)
    found = memory.bytes_per_gpu("ppo", a)
    assert [found[name] for name in ("weights", "gradients", "optimizer")] == [1200, 1200, 2400]
    assert [found[name] for name in ("reference", "value model")] == [1200, 4800]
    row = (5 + 7) * 2 * 2 * 1 * 2 * 4  # tokens, layers, keys and values, heads, their width, bytes
    assert found["cache"] == 6 * row
    assert found["sampling"] == found["cache"] + 6 * 10 * 20
    assert found["activations"] == 2 * 26 * 2 * 4 * (6 * 4 + 5 * 4 + 4 * 2 + 4 * 6)  # policy and value model
    assert (
        found["logits"] == 26 * 7 / 12 * 10 * 8 and memory.bytes_per_gpu("grpo", a)["logits"] == 26 * 21 / 26 * 10 * 8
    )
    assert found["peak"] == 10800 + max(found["sampling"], found["updating"])
    low = memory.bytes_per_gpu("grpo", replace(a, dtype="bfloat16", reward_model=True))
    assert [low[name] for name in ("weights", "reference", "reward model")] == [1200, 720, 720]  # 240 of 300
    two = memory.bytes_per_gpu("gspo", replace(a, gpus=2))
    assert two["weights"] == 600 and two["reference"] == 0 and two["cache"] == found["cache"] / 2
    assert two["sampling"] == two["cache"] + 3 * 10 * 20 + 1200  # gathered
    assert two["updating"] == two["activations"] + two["logits"] + 8 * (2 * 128 + 40)
    recomputed = memory.bytes_per_gpu("grpo", replace(a, gradient_checkpointing=True))
    assert recomputed["activations"] == 26 * (2 * 4 * 4 + 4 * (6 * 4 + 5 * 4 + 4 * 2 + 4 * 6))  # and no shared prompts
    assert recomputed["logits"] == found["logits"]
    # sampled at once: as many prompts as have 16 * 4 tokens, 1 of 36 each with three completions, or 5 of 12 with one
    small = replace(a, microbatch_tokens=4)
    assert [memory.bytes_per_gpu(script, small)["cache"] / row for script in ("grpo", "ppo")] == [3, 5]
    # a prompt's completions are sampled on one GPU
    assert memory.bytes_per_gpu("grpo", replace(a, gpus=64))["cache"] == 3 * row


def test_what_is_printed(capsys):
    memory.main(memory.Args(gpus=64))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("grpo       gspo        ppo") and lines[1].split() == ["weights", "0.5", "0.5", "0.5"]
    peaks = [f"{memory.bytes_per_gpu(script, memory.Args(gpus=64))['peak'] / 1e9:,.0f}" for script in memory.SCRIPTS]
    assert "| 8B | 64 | " + " | ".join(peaks) + " |" in lines and len([x for x in lines if x.startswith("|")]) == 2 + 12
