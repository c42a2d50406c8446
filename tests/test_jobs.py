"""A user's own job: their model, tokenizer, prompts, reward function and evaluation."""

import json
import os
import signal
import sys
import time
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_invariances import first_step, same  # noqa: F401
from test_models import CPU, POLICY, random_model
from test_scripts import ADDITION, SMALL, metrics_of, run_command, train, without_times
from transformers import AutoModelForCausalLM

import common
import grpo
import ppo
from common import InputError

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
CHAT += "{% if add_generation_prompt %}<assistant>{% endif %}"
SHAPE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def tokenizer():
    return common.load_tokenizer("tiny/policy")


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def reward_file(path, body, name="score"):
    """PATH:NAME of a reward function."""
    path.write_text(f"def {name}(prompts, completions, rows):\n    {body}\n")
    return f"{path}:{name}"


# --- models ---


def test_final_is_an_ordinary_model_folder(tmp_path):
    train("grpo", tmp_path / "run", **SMALL | ADDITION | {"num_steps": 1})
    write_text = transformers.pipeline("text-generation", model=str(tmp_path / "run" / "final"))
    assert write_text("21+34=", max_new_tokens=8, do_sample=False)[0]["generated_text"].startswith("21+34=55")


def test_a_vocabulary_larger_than_the_tokenizers_no_pad_token_and_several_stop_tokens(tokenizer, tmp_path):
    """Ids that the tokenizer can't decode are trained as sampled, ids of both configs end a completion."""
    model = random_model("Qwen2", vocab_size=700, pad_token_id=None)
    model.generation_config.update(eos_token_id=[1, 600, 601, 602], do_sample=True, temperature=0.1, top_k=1)
    model.save_pretrained(tmp_path / "model")
    bare = common.load_tokenizer("tiny/policy")
    bare.pad_token = None
    bare.save_pretrained(tmp_path / "model")
    spec = reward_file(tmp_path / "reward.py", "return [float(len(c)) for c in completions]")
    options = SMALL | ADDITION | {"model": str(tmp_path / "model"), "reward_fn": (spec,), "num_steps": 2}
    rows = train("grpo", tmp_path / "run", **options)
    assert rows[1]["sampler_gap"] < 1e-4 and rows[2]["truncated_fraction"] < 1
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final").generation_config
    assert kept.eos_token_id == [1, 600, 601, 602] and kept.top_k == 1 and kept.temperature == 0.1


@pytest.mark.parametrize("kind", ["compiled", "no head", "no layer", "another vocabulary", "a classifier"])
def test_a_policy_folder_whose_weights_do_not_fit_is_refused(tokenizer, kind, tmp_path):
    """Else what is missing would be random numbers, and others in the reference."""
    random_model(num_labels=1).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    weights, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    message = "lm_head.weight"
    if kind == "compiled":
        weights, message = {f"_orig_mod.{name}": x for name, x in weights.items()}, "lm_head.weight, model.embed_tokens"
    elif kind == "no head":
        del weights["lm_head.weight"]
    elif kind == "no layer":
        weights = {name: x for name, x in weights.items() if "layers.1." not in name}
        message = "model.layers.1.input_layernorm.weight, "
    elif kind == "another vocabulary":
        config["vocab_size"] = 600
    else:
        weights["score.weight"], message = torch.zeros(1, 32), "score.weight"
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=f"{tmp_path} .*LlamaForCausalLM.* {message}"):
        common.load_policy(str(tmp_path), CPU, torch.float32)
    with pytest.raises(SystemExit, match=f"error: {tmp_path} .*LlamaForCausalLM"):
        run_command(["grpo.py", "--model", str(tmp_path), "--output-dir", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_a_reward_model_is_refused_as_a_policy_and_tied_heads_are_not_missing(tmp_path):
    with pytest.raises(InputError, match="tiny/reward .*LlamaForCausalLM.* score.weight"):
        common.load_policy("tiny/reward", CPU, torch.float32)
    model = random_model("Qwen3", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    policy, ids = common.load_policy(str(tmp_path), CPU, torch.float32), torch.arange(3, 9)[None]
    assert torch.equal(policy(ids).logits, model(ids).logits)


@pytest.mark.parametrize("kind", ["policy", "reward model", "value model"])
def test_code_that_a_model_brings_is_never_run(tokenizer, kind, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    folder, ran = tmp_path / "model", tmp_path / "ran"
    random_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "mine.py").write_text(
        f"open({str(ran)!r}, 'a').write('x')\nfrom transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
        "class MyConfig(LlamaConfig):\n    model_type = 'mine'\n\n\n"
        "class MyModel(LlamaForCausalLM):\n    config_class = MyConfig\n"
    )
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "mine", "architectures": ["MyModel"]}
    kinds = "AutoModelForCausalLM", "AutoModelForSequenceClassification"
    config["auto_map"] = {"AutoConfig": "mine.MyConfig"} | dict.fromkeys(kinds, "mine.MyModel")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=f"{folder}.* contains custom code"):
        if kind == "policy":
            common.load_policy(str(folder), CPU, torch.float32)
        elif kind == "reward model":
            common.load_rewards(str(folder), (), (), None, POLICY, 100)
        else:
            ppo.load_value_model([str(folder)], POLICY, tokenizer)
    assert not ran.exists()


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_recomputed_layers_change_memory_and_nothing_else(name, first_step):  # noqa: F811
    same(first_step(name), first_step(name, gradient_checkpointing=True))


def test_recomputed_layers_keep_less_and_leave_sampling_alone():
    """Every dropout of GPT-2 is 0.1, and still two passes agree: transformers' own switch would need train mode."""
    batch = {"input_ids": torch.arange(3, 99).view(2, 48), "mask": torch.ones(2, 40)}
    batch["prompt_length"] = torch.tensor([8, 8])
    kept, results = [], []
    for gradient_checkpointing in (False, True):
        model = random_model("GPT2", num_hidden_layers=6)
        model = common.prepare(model, torch.float32, True, gradient_checkpointing)
        sizes = []
        keep = partial(lambda sizes, x: sizes.append(x.numel()) or x, sizes)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            logprobs = common.logprobs_of(model, 1.0, batch)
        logprobs.sum().backward()
        kept.append(sum(sizes))
        results.append(torch.cat([logprobs.flatten(), *(p.grad.flatten() for p in model.parameters())]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)
    assert kept[1] < 0.5 * kept[0], kept
    calls, forward = [], model.transformer.h[0].attn.forward
    model.transformer.h[0].attn.forward = lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs)
    with torch.no_grad():
        common.logprobs_of(model, 1.0, batch)
    assert len(calls) == 1


def test_a_model_without_layers_to_recompute_is_named():
    with pytest.raises(InputError, match="--gradient-checkpointing: Linear has no layers"):
        common.prepare(torch.nn.Linear(1, 1), torch.float32, True, gradient_checkpointing=True)


@pytest.mark.parametrize("name, dtype", [("ppo", "float32"), ("grpo", "bfloat16")])
def test_an_adapter_trains_beside_frozen_weights_and_resumes(name, dtype, tmp_path):
    peft = pytest.importorskip("peft")
    options = SMALL | ADDITION | {"lora_rank": 4, "lr": 1e-2, "kl_coef": 0.1, "warmup_steps": 0, "dtype": dtype}
    options["minibatch_size"] = 0
    whole = train(name, tmp_path / "whole", **options | {"num_steps": 3})
    # the reference is the model with its adapter off
    assert whole[1]["kl"] == pytest.approx(0, abs=1e-6) and whole[3]["kl"] > 1e-4
    train(name, tmp_path / "parts", **options | {"num_steps": 2})
    run_command([f"{name}.py", "--resume", str(tmp_path / "parts"), "--num-steps", "3"])
    assert without_times(metrics_of(tmp_path / "parts"))[3] == without_times(whole)[3]
    assert not (tmp_path / "whole" / "final" / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained("tiny/policy", dtype=torch.float32)
    start = {k: v.clone() for k, v in base.state_dict().items()}
    for rank in ("8", "0"):
        with pytest.raises(SystemExit, match=f"checkpoint-3 is an adapter of rank 4, not {rank}"):
            run_command([f"{name}.py", "--resume", str(tmp_path / "parts"), "--num-steps", "4", "--lora-rank", rank])
    for rank in ("0", "4"):
        with pytest.raises(SystemExit, match="final is an adapter of rank 4, not 0 .*merge it first"):
            run_command([f"{name}.py", "--model", str(tmp_path / "whole" / "final"), "--lora-rank", rank])
    merged = peft.PeftModel.from_pretrained(base, str(tmp_path / "whole" / "final")).merge_and_unload().state_dict()
    changed = [k for k in start if not torch.equal(start[k], merged[k])]
    assert len(changed) > 10 and not [k for k in changed if "proj" not in k]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "final")  # transformers finds the base by itself


def test_a_package_that_an_option_needs_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(SystemExit, match="^error: .*; pip install peft$"):
        run_command(["grpo.py", "--lora-rank", "4", "--output-dir", str(tmp_path / "run")])


def test_a_reference_is_the_policy_without_its_adapter_and_shares_its_weights():
    """Also where the policy's class wants arguments to be made, as a sharded one does."""

    class Adapted(torch.nn.Linear):
        adapter = 10.0

        def __new__(cls, *sizes):
            assert sizes
            return super().__new__(cls)

        @contextmanager
        def disable_adapter(self):
            self.adapter, before = 0.0, self.adapter
            yield
            self.adapter = before

        def forward(self, x):
            return super().forward(x) + self.adapter

    policy, x = Adapted(2, 2), torch.ones(1, 2)
    reference = common.load_reference("nowhere", policy)
    for _ in range(2):  # the adapter is on again after each pass
        torch.testing.assert_close(policy(x) - reference(x), torch.full((1, 2), 10.0))
    assert reference.weight is policy.weight


# --- prompts ---


def test_a_system_prompt_makes_a_chat_of_every_prompt(tokenizer, tmp_path):
    chat = common.load_tokenizer("tiny/policy")
    chat.chat_template = CHAT
    user = {"role": "user", "content": "b"}
    data = write(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": [user]})
    texts = lambda system: [p.text for p in common.load_prompts(data, chat, 64, system)]
    assert texts(None) == ["a", "<user>b<assistant>"]
    assert texts("") == ["<user>a<assistant>", "<user>b<assistant>"]
    assert texts("s") == ["<system>s<user>a<assistant>", "<system>s<user>b<assistant>"]
    assert common.load_prompts(data, chat, 64, "s")[0].row == {"prompt": "a"}  # rewards see the row as it was
    with pytest.raises(
        InputError,
        match="a.jsonl line 1 can't be put through the tokenizer's chat template .--system-prompt makes chats.",
    ):
        common.load_prompts(data, tokenizer, 64, "s")
    data = write(tmp_path / "own.jsonl", {"prompt": [{"role": "system", "content": "x"}, user]})
    with pytest.raises(InputError, match="own.jsonl line 1 has a system message of its own"):
        common.load_prompts(data, chat, 64, "s")


def test_the_reward_model_reads_the_conversation_that_the_policy_had():
    """With a template of its own, also where the system prompt made the conversation."""
    model = common.load_model(transformers.AutoModelForSequenceClassification, "tiny/reward", num_labels=1)
    model, tokenizer = common.prepare(model, torch.float32, False), common.load_tokenizer("tiny/reward")
    tokenizer.chat_template = CHAT.replace("<", "[").replace(">", "]")
    fn = common.reward_model_fn(model, tokenizer, 100, "Be kind.")
    score = fn(["whatever the policy's template made"], [" Good."], [{"prompt": "Film?"}])
    ids = tokenizer("[system]Be kind.[user]Film?[assistant] Good.", add_special_tokens=False, return_tensors="pt")
    assert score == pytest.approx([model(**ids).logits.item()], abs=1e-5)


def test_prompts_come_from_csv_too(tokenizer, tmp_path):
    (tmp_path / "a.csv").write_text('prompt,answer\n"1+1=",2\n"2,5 and\n3=",x\n')
    prompts = common.load_prompts(str(tmp_path / "a.csv"), tokenizer, 64)
    assert [p.row for p in prompts] == [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2,5 and\n3=", "answer": "x"}]
    (tmp_path / "a-eval.csv").write_text("prompt,answer\n1+2=,3\n")
    assert len(common.load_eval_prompts(None, str(tmp_path / "a.csv"), tokenizer, max_prompt_tokens=64)) == 1
    for name, text in (("short", "prompt,answer\n1+1=\n"), ("long", "prompt,answer\n1+1=,2,3\n")):
        (tmp_path / f"{name}.csv").write_text(text)
        with pytest.raises(InputError, match=f"{name}.csv row 1 has not as many fields as the first line"):
            common.load_prompts(str(tmp_path / f"{name}.csv"), tokenizer, 64)
    (tmp_path / "latin.csv").write_bytes("prompt\ncafé\n".encode("latin-1"))
    with pytest.raises(InputError, match="latin.csv is not UTF-8"):
        common.load_prompts(str(tmp_path / "latin.csv"), tokenizer, 64)


# --- rewards ---


def test_an_exception_in_a_reward_function_is_its_own(tmp_path):
    fn = common.load_reward_fn(reward_file(tmp_path / "mine.py", "return [1 / len(c) for c in completions]"))
    prompts = [common.Prompt([1], "p", {"prompt": "p"})] * 2
    batch = {"prompts": prompts, "completions": ["ab", "a"], "mask": torch.ones(2, 1)}
    assert common.score({"mine": (fn, 1.0)}, batch)["rewards"].tolist() == [0.5, 1.0]
    with pytest.raises(ZeroDivisionError) as error:
        common.score({"mine": (fn, 1.0)}, batch | {"completions": ["ab", ""]})
    assert error.traceback[-1].path == tmp_path / "mine.py"


def test_a_reward_function_that_is_called_as_the_reward_model_counts_beside_it(tmp_path):
    spec = reward_file(tmp_path / "mine.py", "return [1000.0] * len(completions)", "reward_model")
    rewards = common.load_rewards("tiny/reward", (spec,), (), None, POLICY, 100)
    prompts = [common.Prompt([1], "p", {"prompt": "p"})] * 2
    batch = {"prompts": prompts, "completions": ["a", "b"], "mask": torch.ones(2, 1)}
    found = common.score(rewards, batch)
    assert len(found) == 3 and all(x.shape == (2,) for x in found.values())
    torch.testing.assert_close(found["rewards"], found["reward/reward_model"] + 1000.0)


def test_a_reward_model_that_has_no_position_or_embedding_for_a_text_is_named(tokenizer):
    """RoBERTa counts positions from its pad id + 1 on: of 34, 32 are left."""
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    shape |= {"max_position_embeddings": 34, "pad_token_id": 1, "num_labels": 1}
    for vocab_size, digits, is_read in (
        (512, 29, True),
        (512, 30, True),
        (512, 31, True),
        (512, 33, False),
        (8, 9, False),
    ):
        model = transformers.RobertaForSequenceClassification(
            transformers.RobertaConfig(**shape, vocab_size=vocab_size)
        )
        fn = common.reward_model_fn(common.prepare(model, torch.float32, False), tokenizer, 100, None)
        prompt = "1" * digits
        given = [prompt], [""], [{"prompt": prompt}]
        if is_read and len(tokenizer(prompt).input_ids) <= 32:
            assert len(fn(*given)) == 1
            continue
        with pytest.raises(InputError, match="the reward model can't read that many tokens, or not these: "):
            fn(*given)


@pytest.mark.parametrize("num_labels", [2, 5])
def test_a_reward_model_with_several_labels_is_refused(tokenizer, num_labels, tmp_path):
    config = transformers.LlamaConfig(**SHAPE, vocab_size=512, num_labels=num_labels)
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=rf"{tmp_path} .*LlamaForSequenceClassification \(1 label\).* score.weight"):
        common.load_rewards(str(tmp_path), (), (), None, POLICY, 100)


def test_a_whole_number_that_has_become_a_float_is_matched_as_the_number_it_was():
    """As pandas writes an integer column with a hole into JSON; in a CSV file 42.0 is a text like any other."""
    rows = [{"answer": answer} for answer in (42.0, 42, "42", "42.0", 0.5)]
    assert common.exact_match([""] * 5, ["42"] * 5, rows) == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert common.exact_match([""], [" 0.5\n"], rows[4:]) == [1.0]


@pytest.mark.parametrize("text, answer", [
    ("so it costs $1,234.50", "1234.5"), ("-7 degrees", "-7"), ("it lost -$5", "-5"), ("about 12%", "12"),
    ("−3", "-3"), ("+8", "8"), ("0.50", "1/2"), ("so 3/4", r"\frac{3}{4}"), ("18", "18 apples"), ("so 5", "$5"),
    ("1,000", "1000"), (r"the answer is \boxed{\$18}", "18"), ("3 + 4 = 7\n#### 7", "#### 7"), ("1e3", "1000"),
    ("x = 5, so 32", r"\$32"), (r"\boxed{12\%}", "12%"), ("10", r"10\%"),
    (r"so \boxed{\text{about }} 7, \boxed{7}", "7"),
    # mixed numbers
    (r"3\frac{1}{2}", "7/2"), ("so 3.5", r"3\frac{1}{2}"), (r"-1\frac{3}{4}", "-7/4"), ("2 3/4", "11/4"),
    (r"\boxed{-1\frac{3}{4}}", "-1.75"), ("it takes 2.75 cups", "2 3/4"),
    # what stands around a number
    (r"\boxed{72 \text{ clips}}", "72"), (r"\boxed{\text{72}}", "72"), (r"\boxed{x = 72}", "72"), ("72", "x=72"),
    (r"\boxed{\frac{-1}{2}}", "-1/2"), (r"\boxed{1{,}000}", "1000"), ("#### **72**", "72"), ("#### Answer\n72", "72"),
])  # fmt: skip
def test_math_answers_that_are_right(text, answer):
    assert common.math_answer([""], [text], [{"answer": answer}]) == [1.0]


@pytest.mark.parametrize("text, answer", [
    ("70", "7"), ("7.5", "75"), ("5", "-5"), ("seven", "7"), ("", "0"), ("12 or 13", "12"), ("None", "0"),
    ("1,2", "12"), (r"\boxed{2^5}", "5"), (r"\boxed{\frac{\sqrt{3}}{2}}", "2"), ("#### 3 or 5", "5"),
    ("x-5", "-5"), (r"\boxed{x-5}", "-5"), (r"3\frac{1}{2}", "31/2"), (r"-1\frac{3}{4}", "-13/4"), ("2 3/4", "3/4"),
    (r"\boxed{2x}", "2"), (r"\boxed{3i}", "3"), (r"\boxed{\frac{1}{2}x}", "1/2"), (r"\boxed{2 pi}", "2"),
])  # fmt: skip
def test_math_answers_that_are_wrong(text, answer):
    assert common.math_answer([""], [text], [{"answer": answer}]) == [0.0]


@pytest.mark.parametrize(
    "text", ["####" + 400 * " " + "x", r"\boxed{" + 400 * "\n" + "x}", "####" + 200 * " \n" + "5 a"]
)
def test_math_answer_is_not_held_up_by_a_policy_that_babbles(text):
    start = time.perf_counter()
    assert common.math_answer([""], [text], [{"answer": "5"}]) == [0.0]
    assert time.perf_counter() - start < 0.5


@pytest.mark.parametrize("answer", [
    "x^2 + 1", r"\frac{\sqrt{2}}{2}", "(1, 2)", "3, 5", "10:30", "2π", "3!", "2024-05-01", "5√2", "2x", "3i", "2 pi",
    r"\frac{1}{2}x", "x-5",
])  # fmt: skip
def test_an_answer_that_is_no_number_is_not_judged_by_its_last_number(answer, monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ModuleNotFoundError, match="math_verify"):
        common.math_answer([""], ["1"], [{"answer": answer}])


@pytest.mark.parametrize("answer", ["east", "no solution", "D", ""])
def test_an_answer_in_words_is_for_exact_match(answer, monkeypatch):
    """Whatever math-verify makes of it."""
    fake = SimpleNamespace(parse=lambda text: [text], verify=lambda gold, found: True)
    monkeypatch.setitem(sys.modules, "math_verify", fake)
    with pytest.raises(InputError, match=f"math_answer can't judge the answer '{answer}'; exact_match can"):
        common.math_answer([""], ["seat"], [{"answer": answer}])


@pytest.mark.parametrize("row", [{}, {"answer": None}, {None: ["x"], "prompt": "p"}])
@pytest.mark.parametrize("fn", [common.exact_match, common.math_answer])
def test_a_row_without_an_answer_is_shown(fn, row):
    with pytest.raises(InputError, match='needs a column "answer", a text or a number; this row has none'):
        fn([""], ["None"], [row])


def test_math_verify_is_asked_where_numbers_do_not_tell(monkeypatch):
    """Bare formulas, too. A completion that can't be worked out is wrong after a while, not for ever."""
    math_verify = pytest.importorskip("math_verify")
    right = [
        (r"$\frac{1}{\sqrt{2}}$", r"\frac{\sqrt{2}}{2}"), ("$1 + x^2$", "x^2 + 1"), ("x^2 + 1", "1 + x^2"),
        ("(1,2)", "(1, 2)"), (r"\sqrt{2}", r"\sqrt 2"), ("2x", "2x"), (r"so \boxed{2x}", "2x"), ("3i", "3i"),
        (r"\frac{x}{2}", r"\frac{1}{2}x"), ("2 pi", "2 pi"),
    ]  # fmt: skip
    wrong = [
        ("$x^2 - 1$", "x^2 + 1"), ("2", "2x"), ("3", "3i"), ("1/2", r"\frac{1}{2}x"), ("2", "2 pi"), ("-5", "x-5"),
        ("(2,1)", "(1, 2)"), ("3", "3!"), ("10", "10:30"),
    ]  # fmt: skip
    for pairs, score in ((right, 1.0), (wrong, 0.0)):
        for text, answer in pairs:
            assert common.math_answer([""], [text], [{"answer": answer}]) == [score], (text, answer)
    for words in ("east", "no solution", "D", ""):
        with pytest.raises(InputError, match="exact_match can"):
            common.math_answer([""], ["seat"], [{"answer": words}])
    monkeypatch.setattr(math_verify, "verify", partial(math_verify.verify, timeout_seconds=1))
    start = time.perf_counter()
    assert common.math_answer([""], ["$9^{9^{9^{9}}}$"], [{"answer": "x^2 + 1"}]) == [0.0]
    assert time.perf_counter() - start < 10


# --- evaluation ---


def test_evaluation_has_its_own_temperature_and_number_of_samples(tmp_path):
    """8 held-out sums; samples do not depend on what the training batch holds; greedy ones not on the temperature."""
    options, greedily = SMALL | ADDITION | {"num_steps": 1}, {"eval_temperature": 0.0}
    greedy, again = (
        train("grpo", tmp_path / f"greedy{t}", **options | greedily | {"temperature": t}) for t in (1.0, 0.5)
    )
    assert greedy[0] == again[0] and greedy[0]["eval_reward"] >= 0.9
    options["eval_samples"] = 4
    four, wide = (train("grpo", tmp_path / str(n), **options | {"num_prompts": n})[0] for n in (2, 9))
    assert four == wide and four["eval_reward"] < four["eval_pass@4"] <= 1
    samples = [json.loads(line) for line in (tmp_path / "2" / "samples.jsonl").read_text().splitlines()]
    prompts = [s["prompt"] for s in samples if s.get("held_out") and s["step"] == 0]
    assert len(prompts) == 4 and len(set(prompts)) >= 2  # the best and the worst of a prompt, or one if all are equal


def test_pass_at_k_is_the_best_of_k(tokenizer):
    """Rewards 0, .5, 1, .2 and 0, 0, 0, .1: mean .225, best of four (1 + .1) / 2."""
    rewards = iter([[0, 0.5, 1, 0.2, 0, 0, 0, 0.1]])
    reward_fns = {"mine": (lambda prompts, completions, rows: next(rewards), 1.0)}
    prompts = [common.Prompt([0, n], str(n), {}) for n in (5, 6)]
    rollout = partial(common.generate, random_model(), tokenizer, max_new_tokens=4)
    metrics, samples = common.evaluate(rollout, reward_fns, prompts, 4, 1.0, 0)
    assert metrics == pytest.approx({"eval_reward": 0.225, "eval_pass@4": 0.55})
    assert [(s["prompt"], s["reward"]) for s in samples] == [("5", 1), ("5", 0), ("6", pytest.approx(0.1)), ("6", 0)]
    assert all(s["held_out"] for s in samples)


# --- what a reward function may do ---


def test_a_reward_function_may_edit_what_it_gets_import_its_neighbours_and_use_processes(tmp_path):
    """The other rewards and later steps see texts and rows as they were."""
    (tmp_path / "neighbour.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "edits.py").write_text(
        "from concurrent.futures import ProcessPoolExecutor\nfrom multiprocessing import get_context\n\n"
        "def length(text):\n    from neighbour import double\n    return float(double(len(text)))\n\n"
        "def edits(prompts, completions, rows):\n    for i, row in enumerate(rows):\n"
        "        completions[i] = 'x' * 9\n        row.clear()\n    return [0.0] * len(rows)\n\n"
        "def pooled(prompts, completions, rows):\n    with ProcessPoolExecutor(2, get_context('fork')) as pool:\n"
        "        return list(pool.map(length, completions))\n"
    )
    specs = (f"{tmp_path}/edits.py:edits", f"{tmp_path}/edits.py:pooled", "exact_match")
    rewards = common.load_rewards(None, specs, (), None, POLICY, 100)
    prompts = [common.Prompt([0], "p", {"prompt": "p", "answer": answer}) for answer in ("ab", "c")]
    batch = {"prompts": prompts, "completions": ["ab", "abc"], "mask": torch.ones(2, 1)}
    scores = common.score(rewards, batch)
    assert scores["reward/pooled"].tolist() == [4.0, 6.0] and scores["reward/exact_match"].tolist() == [1.0, 0.0]
    assert batch["completions"] == ["ab", "abc"] and prompts[0].row == {"prompt": "p", "answer": "ab"}


def test_a_child_of_the_run_dies_of_sigterm_alone(monkeypatch):
    """A pool of processes ends them so. Ctrl-C reaches them, too: they work on, for the step that is to be finished."""
    died_of = []

    def main(args):
        child = os.fork()
        if not child:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        died_of.append(os.WTERMSIG(os.waitpid(child, 0)[1]))

    monkeypatch.setattr(common, "asked_to_stop", [])
    monkeypatch.setattr(sys, "argv", ["grpo.py"])
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        common.launch(main, grpo.Args, "")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert died_of == [signal.SIGTERM] and not common.asked_to_stop


@pytest.mark.parametrize("kind, message", [
    ("small", "can't read the policy's token ids"), ("other", "has another tokenizer than the policy"),
    ("bert", "sees the tokens that come after"),
])  # fmt: skip
def test_a_value_model_that_cannot_read_the_policys_tokens_is_refused(tokenizer, kind, message, tmp_path):
    family = "Bert" if kind == "bert" else "Llama"
    config = getattr(transformers, f"{family}Config")(**SHAPE, num_labels=1, vocab_size=40 if kind == "small" else 512)
    getattr(transformers, f"{family}ForSequenceClassification")(config).save_pretrained(tmp_path)
    own = common.load_tokenizer("tiny/policy")
    if kind == "other":
        own.add_tokens(["hello"])
    own.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=message):
        ppo.load_value_model([str(tmp_path)], POLICY, tokenizer)
