"""The arithmetic of benchmarks/memory.py. Its --check compares it with measured peaks."""

import sys
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from test_scripts import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import memory  # noqa: E402


@pytest.mark.parametrize("size", memory.SHAPES)
def test_parameters_are_those_of_the_model(size):
    s = memory.SHAPES[size]
    config = LlamaConfig(
        vocab_size=s.vocabulary, hidden_size=s.hidden, intermediate_size=s.intermediate, num_hidden_layers=s.layers, head_dim=s.head_dim,
        num_attention_heads=s.heads, num_key_value_heads=s.kv_heads, tie_word_embeddings=s.tied,
    )  # fmt: skip
    with torch.device("meta"):
        assert LlamaForCausalLM(config).num_parameters() == memory.parameters(s)


def test_a_small_example_by_hand(monkeypatch):
    # layer: 4 * 2 * (2 * 2 + 2 * 1) + 3 * 4 * 6 = 120 weights in matrices and 2 * 4 in norms; 2 layers, a norm and 10 x 4 embeddings: 300
    monkeypatch.setitem(memory.SHAPES, "30M", memory.Shape(2, 4, 6, 2, 1, 2, 10))
    a = memory.Args(model_size="30M", gpus=1, dtype="float32", num_prompts=2, group_size=3, prompt_tokens=5, max_new_tokens=7)
    a = replace(a, microbatch_tokens=26)
    found = memory.bytes_per_gpu("ppo", a)
    assert [found[name] for name in ("weights", "gradients", "optimizer", "reference", "value model")] == [1200, 1200, 2400, 1200, 4800]
    assert found["cache"] == 6 * (5 + 7) * 2 * 2 * 1 * 2 * 4  # rows, tokens, layers, keys and values, heads, their width, bytes
    assert found["sampling"] == found["cache"] + 6 * 10 * 20
    assert found["activations"] == 2 * 26 * 2 * 4 * (6 * 4 + 5 * 4 + 4 * 2 + 4 * 6)  # policy and value model
    assert found["logits"] == 26 * 7 / 12 * 10 * 8 and memory.bytes_per_gpu("grpo", a)["logits"] == 26 * 21 / 26 * 10 * 8
    assert found["peak"] == 10800 + max(found["sampling"], found["updating"])
    low = replace(a, dtype="bfloat16", reward_model=True)
    assert [memory.bytes_per_gpu("grpo", low)[name] for name in ("weights", "reference", "reward model")] == [1200, 720, 720]  # 240 of 300
    two = memory.bytes_per_gpu("gspo", replace(a, gpus=2))
    assert two["weights"] == 600 and two["reference"] == 0 and two["cache"] == found["cache"] / 2
    assert two["sampling"] == two["cache"] + 3 * 10 * 20 + 1200  # gathered
    assert two["updating"] == two["activations"] + two["logits"] + 8 * (2 * 128 + 40)
    whole = memory.bytes_per_gpu("gspo", replace(a, gpus=2, shard="none"))  # FSDP makes a second copy of weights that it does not shard
    assert whole["weights"] == 1200 and whole["sampling"] == memory.bytes_per_gpu("gspo", replace(a, gpus=2))["sampling"]
