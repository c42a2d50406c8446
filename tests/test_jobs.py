"""A user's own job: their model, tokenizer, prompts, reward function and evaluation."""

import json
import os
import signal
import sys
import time

import pytest
import torch
from transformers import (
    AutoModelForCausalLM, AutoTokenizer, BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForSequenceClassification, pipeline,
)  # fmt: skip

import common
from common import InputError
from test_invariances import first_step, same  # noqa: F401
from test_models import CPU, random_model
from test_scripts import ADDITION, SCRIPTS, SMALL, metrics_of, run_command, train, weights_of, without_times

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture(scope="module")
def tokenizer():
    return common.load_tokenizer("tiny/policy")


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


# --- models ---


def test_final_is_an_ordinary_model_folder(tmp_path):
    train("grpo", tmp_path / "run", **SMALL | ADDITION | {"num_steps": 1})
    write_text = pipeline("text-generation", model=str(tmp_path / "run" / "final"))
    assert write_text("21+34=", max_new_tokens=8, do_sample=False)[0]["generated_text"].startswith("21+34=55")


def test_a_vocabulary_larger_than_the_tokenizers_no_pad_token_and_several_stop_tokens(tokenizer, tmp_path):
    """Ids that the tokenizer can't decode are trained as sampled, ids of both configs end a completion, and nothing needs a pad token."""
    model = random_model("Qwen2", vocab_size=700, pad_token_id=None)
    model.generation_config.update(eos_token_id=[1, 600, 601, 602], do_sample=True, temperature=0.1, top_k=1)
    model.save_pretrained(tmp_path / "model")
    bare = common.load_tokenizer("tiny/policy")
    bare.pad_token = None
    bare.save_pretrained(tmp_path / "model")
    (tmp_path / "reward.py").write_text("def score(prompts, completions, rows):\n    return [float(len(c)) for c in completions]\n")
    options = SMALL | ADDITION | {"model": str(tmp_path / "model"), "reward_fn": (f"{tmp_path}/reward.py:score",), "num_steps": 2}
    rows = train("grpo", tmp_path / "run", **options)
    assert rows[1]["sampler_gap"] < 1e-4 and rows[2]["truncated_fraction"] < 1
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final").generation_config
    assert kept.eos_token_id == [1, 600, 601, 602] and kept.top_k == 1 and kept.temperature == 0.1


def test_code_that_a_model_brings_is_run_only_if_trusted(tokenizer, tmp_path, capsys, monkeypatch):
    """Not for the policy, the reference, the value model or the tokenizer; then a run, its checkpoint and its final/ work with the flag."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    folder, ran = tmp_path / "model", tmp_path / "ran"
    random_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "mine.py").write_text(
        f"open({str(ran)!r}, 'a').write('x')\nfrom transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
        "class MyConfig(LlamaConfig):\n    model_type = 'mine'\n\n\nclass MyModel(LlamaForCausalLM):\n    config_class = MyConfig\n"
    )
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "mine", "architectures": ["MyModel"]}
    config["auto_map"] = {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyModel"}
    (folder / "config.json").write_text(json.dumps(config))
    words = f"ppo.py --model {folder} --dataset {ADDITION['dataset']} --reward-fn exact_match --max-new-tokens 4 --num-steps 1".split()
    words += ["--num-prompts", "2", "--output-dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as end:
        run_command(words)
    assert "add --trust-remote-code" in end.value.code and not ran.exists()
    run_command([*words, "--trust-remote-code"])
    assert ran.exists() and (tmp_path / "run" / "checkpoint-1" / "mine.py").exists()
    run_command(["ppo.py", "--resume", str(tmp_path / "run"), "--num-steps", "2"])
    assert len(metrics_of(tmp_path / "run")) == 3
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final", trust_remote_code=True)).__name__ == "MyModel"
    with open(folder / "mine.py", "a") as file:  # as code for older versions of transformers has it
        file.write("\n    def forward(self, input_ids, past_key_values=None, **kwargs):\n        pass\n")
    with pytest.raises(SystemExit, match=r"takes no cache and no logits_to_keep"):
        run_command([*words[:-1], str(tmp_path / "old"), "--trust-remote-code"])


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_recomputed_layers_change_memory_and_nothing_else(name, first_step):  # noqa: F811
    same(first_step(name), first_step(name, gradient_checkpointing=True))


def test_recomputed_layers_keep_less_and_leave_sampling_alone(tokenizer):
    """Every dropout of GPT-2 is 0.1, and still two passes agree: unlike transformers' own switch, this one needs no train mode."""
    batch = {"input_ids": torch.arange(3, 99).view(2, 48), "prompt_length": torch.tensor([8, 8]), "mask": torch.ones(2, 40)}
    kept, results = [], []
    for gradient_checkpointing in (False, True):
        model = random_model("GPT2", num_hidden_layers=6)
        model = common.prepare(model, CPU, torch.float32, True, gradient_checkpointing)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
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


def test_a_model_without_layers_to_recompute_is_named(tokenizer):
    with pytest.raises(InputError, match="--gradient-checkpointing: Linear has no layers"):
        common.prepare(torch.nn.Linear(1, 1), CPU, torch.float32, True, gradient_checkpointing=True)


@pytest.mark.parametrize("name, dtype", [("ppo", "float32"), ("grpo", "float32"), ("grpo", "bfloat16")])
def test_an_adapter_trains_beside_frozen_weights_and_resumes(name, dtype, tmp_path):
    peft = pytest.importorskip("peft")
    options = SMALL | ADDITION | {"lora_rank": 4, "lr": 1e-2, "kl_coef": 0.1, "warmup_steps": 0, "minibatch_size": None, "dtype": dtype}
    whole = train(name, tmp_path / "whole", **options | {"num_steps": 3})
    assert whole[1]["kl"] == pytest.approx(0, abs=1e-6) and whole[3]["kl"] > 1e-4  # the reference is the model with its adapter off
    train(name, tmp_path / "parts", **options | {"num_steps": 2})
    run_command([f"{name}.py", "--resume", str(tmp_path / "parts"), "--num-steps", "3"])
    assert without_times(metrics_of(tmp_path / "parts"))[3] == without_times(whole)[3]
    assert not (tmp_path / "whole" / "final" / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained("tiny/policy", dtype=torch.float32)
    start = {k: v.clone() for k, v in base.state_dict().items()}
    with pytest.raises(SystemExit, match="--lora-rank can't be changed in a resumed run; it was 4"):
        run_command([f"{name}.py", "--resume", str(tmp_path / "parts"), "--num-steps", "4", "--lora-rank", "8"])
    with pytest.raises(SystemExit, match="final is an adapter; merge it first"):
        run_command([f"{name}.py", "--model", str(tmp_path / "whole" / "final")])
    merged = peft.PeftModel.from_pretrained(base, str(tmp_path / "whole" / "final")).merge_and_unload().state_dict()
    changed = [k for k in start if not torch.equal(start[k], merged[k])]
    assert len(changed) > 10 and not [k for k in changed if "proj" not in k]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "final")  # transformers finds the base model by itself


def test_what_an_option_needs_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match="--lora-rank needs a package that is not installed: pip install peft"):
        common.load_policy("tiny/policy", CPU, torch.float32, lora_rank=4)


# --- prompts ---


def test_a_system_prompt_makes_a_chat_of_every_prompt(tokenizer, tmp_path):
    (tmp_path / "chat.jinja").write_text(CHAT)
    chat = common.load_tokenizer("tiny/policy", str(tmp_path / "chat.jinja"))
    user = {"role": "user", "content": "b"}
    data = write(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": [user]})
    texts = lambda system: [p.text for p in common.load_prompts(data, chat, 64, system)]  # noqa: E731
    assert texts(None) == ["a", "<user>b<assistant>"]
    assert texts("") == ["<user>a<assistant>", "<user>b<assistant>"]
    assert texts("s") == ["<system>s<user>a<assistant>", "<system>s<user>b<assistant>"]
    assert common.load_prompts(data, chat, 64, "s")[0].row == {"prompt": "a"}  # rewards see the row as it was
    with pytest.raises(InputError, match="a.jsonl line 1 has chat messages, but .* give one with --chat-template"):
        common.load_prompts(data, tokenizer, 64, "s")
    data = write(tmp_path / "own.jsonl", {"prompt": [{"role": "system", "content": "x"}, user]})
    with pytest.raises(InputError, match="own.jsonl line 1 has a system message of its own"):
        common.load_prompts(data, chat, 64, "s")
    with pytest.raises(InputError, match="--chat-template nothere is not a file"):
        common.load_tokenizer("tiny/policy", "nothere")


def test_the_reward_model_reads_the_conversation_that_the_policy_had(tmp_path):
    """With a template of its own, also where the system prompt made the conversation."""
    model, tokenizer = common.load_reward_model("tiny/reward", CPU, torch.float32), AutoTokenizer.from_pretrained("tiny/reward")
    tokenizer.chat_template = CHAT.replace("<", "[").replace(">", "]")
    fn = common.reward_model_fn(model, tokenizer, 100, "Be kind.")
    score = fn(["whatever the policy's template made"], [" Good."], [{"prompt": "Film?"}])
    ids = tokenizer("[system]Be kind.[user]Film?[assistant] Good.", add_special_tokens=False, return_tensors="pt")
    assert score == pytest.approx([model(**ids).logits.item()], abs=1e-5)


def test_prompts_come_from_csv_and_parquet_too(tokenizer, tmp_path):
    (tmp_path / "a.csv").write_text('prompt,answer\n"1+1=",2\n"2,5 and\n3=",x\n')
    prompts = common.load_prompts(str(tmp_path / "a.csv"), tokenizer, 64)
    assert [p.row for p in prompts] == [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2,5 and\n3=", "answer": "x"}]
    (tmp_path / "a-eval.csv").write_text("prompt,answer\n1+2=,3\n")
    assert len(common.load_eval_prompts(None, str(tmp_path / "a.csv"), tokenizer, 64)) == 1
    for name, text in (("short", "prompt,answer\n1+1=\n"), ("long", "prompt,answer\n1+1=,2,3\n")):
        (tmp_path / f"{name}.csv").write_text(text)
        with pytest.raises(InputError, match=f"{name}.csv line 2 has not as many fields as the first line"):
            common.load_prompts(str(tmp_path / f"{name}.csv"), tokenizer, 64)
    (tmp_path / "latin.csv").write_bytes("prompt\ncafé\n".encode("latin-1"))
    with pytest.raises(InputError, match="latin.csv is not UTF-8"):
        common.load_prompts(str(tmp_path / "latin.csv"), tokenizer, 64)
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"prompt": "1+1=", "answer": 2}]).to_parquet(tmp_path / "a.parquet")
    assert common.load_prompts(str(tmp_path / "a.parquet"), tokenizer, 64)[0].row == {"prompt": "1+1=", "answer": 2}


# --- rewards ---


def reward_of(tmp_path, body, timeout=0.0):
    (tmp_path / "mine.py").write_text(f"import time\n\ndef score(prompts, completions, rows):\n    {body}\n")
    (reward,) = common.load_rewards(None, (f"{tmp_path}/mine.py:score",), (), timeout, None, CPU, torch.float32, 100)
    return lambda *completions: reward.fn(["p"] * len(completions), list(completions), [{"prompt": "p"}] * len(completions))


def test_an_exception_in_a_reward_function_names_its_row(tmp_path):
    fn = reward_of(tmp_path, "return [1 / len(c) for c in completions]")
    assert fn("ab", "a") == [0.5, 1.0]
    with pytest.raises(InputError, match=r"reward score raised ZeroDivisionError: .* \(mine.py line 4\) for prompt 'p', completion ''"):
        fn("ab", "", "a")
    fn = reward_of(tmp_path, "return [1.0] if len(completions) == 1 else 1 / 0")
    with pytest.raises(InputError, match="for 2 completions at once, though for none of them alone"):
        fn("a", "b")


def test_a_reward_function_that_is_called_as_the_reward_model_counts_beside_it(tmp_path):
    (tmp_path / "mine.py").write_text("def reward_model(prompts, completions, rows):\n    return [1000.0] * len(completions)\n")
    rewards = common.load_rewards("tiny/reward", (f"{tmp_path}/mine.py:reward_model",), (), 0.0, None, CPU, torch.float32, 100)
    batch = {"prompts": [common.Prompt([1], "p", {"prompt": "p"})] * 2, "completions": ["a", "b"], "mask": torch.ones(2, 1)}
    found = common.score(rewards, batch)
    assert len(found) == 3 and all(x.shape == (2,) for x in found.values())
    torch.testing.assert_close(found["rewards"], found["reward/reward_model"] + 1000.0)


def test_a_reward_function_that_does_not_end_is_stopped_and_its_row_named(tmp_path):
    fn = reward_of(tmp_path, "return [time.sleep(60 if c == 'slow' else 0) or 1.0 for c in completions]", timeout=0.2)
    start = time.perf_counter()
    with pytest.raises(InputError, match="took more than --reward-timeout 0.2 s .* completion 'slow'"):
        fn("a", "slow", "b")
    assert time.perf_counter() - start < 10 and fn("a", "b") == [1.0, 1.0]
    time.sleep(0.3)  # no alarm is left behind
    (tmp_path / "catches.py").write_text(
        "import time\n\ndef score(prompts, completions, rows):\n    try:\n        time.sleep(60)\n    except Exception:\n        return [0.0]\n"
    )
    (reward,) = common.load_rewards(None, (f"{tmp_path}/catches.py:score",), (), 0.2, None, CPU, torch.float32, 100)
    with pytest.raises(InputError, match=r"took more than --reward-timeout 0.2 s \(catches.py line 5\)"):
        reward.fn(["p"], ["c"], [{}])


@pytest.mark.parametrize("num_labels", [2, 5])
def test_a_reward_model_with_several_labels_is_refused(tokenizer, num_labels, tmp_path):
    shape = {"vocab_size": 512, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForSequenceClassification(LlamaConfig(**shape, num_labels=num_labels)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=f"--reward-model {tmp_path} has no trained head with one label"):
        common.load_reward_model(str(tmp_path), CPU, torch.float32)


@pytest.mark.parametrize("text, answer", [
    ("so it costs $1,234.50", "1234.5"), ("-7 degrees", "-7"), ("it lost -$5", "-5"), ("about 12%", "12"), ("−3", "-3"), ("+8", "8"),
    ("0.50", "1/2"), ("so 3/4", r"\frac{3}{4}"), ("18", "18 apples"), ("so 5", "$5"), (r"the answer is \boxed{\$18}", "18"), ("3 + 4 = 7\n#### 7", "#### 7"), ("1e3", "1000"), ("1,000", "1000"), ("x = 5, so 32", r"\$32"), (r"\boxed{12\%}", "12%"), ("10", r"10\%"),
    (r"so \boxed{\text{about }} 7, \boxed{7}", "7"),
])  # fmt: skip
def test_math_answers_that_are_right(text, answer):
    assert common.math_answer([""], [text], [{"answer": answer}]) == [1.0]


@pytest.mark.parametrize("text, answer", [("70", "7"), ("7.5", "75"), ("5", "-5"), ("seven", "7"), ("", "0"), ("12 or 13", "12"), ("None", "0"),
    (r"\boxed{2^5}", "5"), (r"\boxed{\frac{\sqrt{3}}{2}}", "2"), ("1,2", "12"), ("#### 3 or 5", "5")])  # fmt: skip
def test_math_answers_that_are_wrong(text, answer):
    assert common.math_answer([""], [text], [{"answer": answer}]) == [0.0]


@pytest.mark.parametrize(
    "answer", ["x^2 + 1", r"\frac{\sqrt{2}}{2}", "x=3", "(1, 2)", "3, 5", "10:30", "2π", "2 3/4", "3!", "2024-05-01", "5√2"]
)
def test_an_answer_that_is_no_number_is_not_judged_by_its_last_number(answer, monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(InputError, match="which is not one number, needs a package that is not installed: pip install math-verify"):
        common.math_answer([""], ["1"], [{"answer": answer}])


@pytest.mark.parametrize("answer", ["east", "no solution", "D", ""])
def test_an_answer_in_words_is_for_exact_match(answer):
    with pytest.raises(InputError, match="which is no number and no formula; exact_match can"):
        common.math_answer([""], ["seat"], [{"answer": answer}])


@pytest.mark.parametrize("row", [{}, {"answer": None}, {None: ["x"], "prompt": "p"}])
@pytest.mark.parametrize("fn", [common.exact_match, common.math_answer])
def test_a_row_without_an_answer_is_shown(fn, row):
    with pytest.raises(InputError, match='need a column "answer", a text or a number, in every row; this row has none'):
        fn([""], ["None"], [row])


def test_math_verify_is_asked_where_numbers_do_not_tell():
    pytest.importorskip("math_verify")
    answers = [{"answer": r"\frac{\sqrt{2}}{2}"}, {"answer": "x^2 + 1"}, {"answer": "x^2 + 1"}]
    assert common.math_answer([""] * 3, [r"$\frac{1}{\sqrt{2}}$", "$1 + x^2$", "$x^2 - 1$"], answers) == [1.0, 1.0, 0.0]
    start = time.perf_counter()  # a completion that can't be worked out is wrong after a while, not for ever
    assert common.math_answer([""], ["$9^{9^{9^{9}}}$"], answers[1:2]) == [0.0] and time.perf_counter() - start < 30


# --- evaluation ---


def test_evaluation_has_its_own_temperature_and_number_of_samples(tmp_path):
    """8 held-out sums; k samples are the first k rows of each prompt whatever the batch holds; the likeliest token needs one."""
    options = SMALL | ADDITION | {"num_steps": 1}
    greedy, again = (train("grpo", tmp_path / f"greedy{t}", **options | {"eval_temperature": 0.0, "temperature": t}) for t in (1.0, 0.5))
    assert greedy[0] == again[0] and greedy[0]["eval_reward"] >= 0.9
    four, wide = (train("grpo", tmp_path / str(n), **options | {"eval_samples": 4, "num_prompts": n})[0] for n in (2, 9))
    assert four == wide and four["eval_reward"] < four["eval_pass@4"] <= 1
    samples = [json.loads(line) for line in (tmp_path / "2" / "samples.jsonl").read_text().splitlines()]
    prompts = [s["prompt"] for s in samples if s.get("held_out") and s["step"] == 0]
    assert len(set(prompts)) == len(prompts)


def test_pass_at_k_is_the_best_of_k(tokenizer):
    """Rewards 0, .5, 1, .2 and 0, 0, 0, .1: mean .225, best of four (1 + .1) / 2."""
    rewards = iter([[0, 0.5, 1, 0.2, 0, 0, 0, 0.1]])
    reward = common.Reward("mine", 1.0, lambda p, c, r: next(rewards), None)
    prompts = [common.Prompt([0, n], str(n), {}) for n in (5, 6)]
    rollout = lambda *args, **kwargs: common.generate(random_model(), tokenizer, *args, max_new_tokens=4, **kwargs)  # noqa: E731
    metrics, samples = common.evaluate(rollout, [reward], prompts, 0, 100, 4, 1.0)
    assert metrics == pytest.approx({"eval_reward": 0.225, "eval_pass@4": 0.55}) and [s["reward"] for s in samples] == [0, 0]


SAMPLE = {"prompt": "p", "completion": "c", "reward": 0.0, "held_out": True}


def test_the_best_policy_is_kept(tmp_path, monkeypatch, capsys):
    """Held-out rewards .5 (untrained), .6, .9, .7: best/ is step 2; when the untrained policy stays the best there is no best/."""
    for name, rewards in (("rises", [0.5, 0.6, 0.9, 0.7]), ("falls", [0.5, 0.4, 0.3, 0.2])):
        left = iter(rewards)
        monkeypatch.setattr(SCRIPTS["grpo"], "evaluate", lambda *_: ({"eval_reward": next(left)}, [SAMPLE]))  # noqa: B023
        train("grpo", tmp_path / name, **SMALL | ADDITION | {"eval_every": 1, "save_every": 1, "keep": 0, "lr": 1e-3})
    best, second = weights_of(tmp_path / "rises" / "best"), weights_of(tmp_path / "rises" / "checkpoint-2")
    assert all(torch.equal(best[k], second[k]) for k in best) and not (tmp_path / "falls" / "best").exists()

    # resumed from before the best, with other flags, and never that good again: best/ stays, and says of which step it is
    for step in (2, 3):
        (tmp_path / "rises" / f"checkpoint-{step}").rename(tmp_path / f"gone-{step}")
    left = iter([0.8, 0.85])
    capsys.readouterr()
    run_command(["grpo.py", "--resume", str(tmp_path / "rises"), "--lr", "1e-4"])
    again = weights_of(tmp_path / "rises" / "best")
    assert all(torch.equal(best[k], again[k]) for k in best) and "best/ of step 2" in capsys.readouterr().out
    (tmp_path / "rises" / "best" / "state.pt").write_text("")
    with pytest.raises(SystemExit, match="best/state.pt is damaged, or not of a run; move best/ away"):
        run_command(["grpo.py", "--resume", str(tmp_path / "rises")])


# --- what a reward function may do ---


def test_a_reward_function_may_edit_what_it_gets_import_its_neighbours_and_use_processes(tmp_path):
    """The other rewards and later steps see texts and rows as they were."""
    (tmp_path / "neighbour.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "edits.py").write_text(
        "from concurrent.futures import ProcessPoolExecutor\nfrom multiprocessing import get_context\n\n"
        "def length(text):\n    from neighbour import double\n    return float(double(len(text)))\n\n"
        "def edits(prompts, completions, rows):\n    for i, row in enumerate(rows):\n        completions[i] = 'x' * 9\n        row.clear()\n"
        "    return [0.0] * len(rows)\n\n"
        "def pooled(prompts, completions, rows):\n    with ProcessPoolExecutor(2, get_context('fork')) as pool:\n"
        "        return list(pool.map(length, completions))\n"
    )
    specs = (f"{tmp_path}/edits.py:edits", f"{tmp_path}/edits.py:pooled", "exact_match")
    rewards = common.load_rewards(None, specs, (), 0, None, CPU, torch.float32, 100)
    prompts = [common.Prompt([0], "p", {"prompt": "p", "answer": "ab"}), common.Prompt([0], "p", {"prompt": "p", "answer": "c"})]
    batch = {"prompts": prompts, "completions": ["ab", "abc"], "mask": torch.ones(2, 1)}
    scores = common.score(rewards, batch)
    assert scores["reward/pooled"].tolist() == [4.0, 6.0] and scores["reward/exact_match"].tolist() == [1.0, 0.0]
    assert batch["completions"] == ["ab", "abc"] and prompts[0].row == {"prompt": "p", "answer": "ab"}


def test_a_child_of_the_run_dies_of_a_signal_as_usual(monkeypatch):
    """What a pool of processes counts on when it ends them; only the run itself waits for its step."""
    monkeypatch.setattr(common, "asked_to_stop", [])
    child = os.fork()
    if not child:
        common.ask_to_stop(os.getppid(), signal.SIGTERM, None)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM and not common.asked_to_stop


@pytest.mark.parametrize("kind, message", [
    ("small", "has fewer embeddings than the policy"), ("other", "has another tokenizer than the policy"), ("bert", "sees the tokens that come after"),
])  # fmt: skip
def test_a_value_model_that_cannot_read_the_policys_tokens_is_refused(tokenizer, kind, message, tmp_path):
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 1}
    if kind == "bert":
        config = BertConfig(**shape, vocab_size=512)
        config.architectures = ["BertForSequenceClassification"]
        BertForSequenceClassification(config).save_pretrained(tmp_path)
    else:
        LlamaForSequenceClassification(LlamaConfig(**shape, vocab_size=40 if kind == "small" else 512)).save_pretrained(tmp_path)
    own = common.load_tokenizer("tiny/policy")
    if kind == "other":
        own.add_tokens(["hello"])
    own.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=message):
        common.load_value_model(str(tmp_path), "tiny/policy", [], tokenizer, CPU, torch.float32)
