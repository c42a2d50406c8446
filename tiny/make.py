"""Makes everything in tiny/ from nothing: the short version of the pipeline that comes before RL.

    data -> tokenizer -> supervised fine-tuning -> preference pairs -> reward model

One policy of 0.66 M parameters learns two tasks, so that both kinds of reward are real.

Reviews, for human feedback. `gold_score` is the readers' true taste, a rule you can read. The reward model never
sees it: it sees which of two of the policy's completions a reader preferred, and readers err (Bradley-Terry noise).
It is good but imperfect, as in life. The policy it judges seldom says a thing three times, so it never learns that
readers hate "great, great and great": pushed too far without a KL penalty, gold falls while the learned score rises.

Addition, for a verifiable reward. The policy first learns from a textbook, then from people, who make slips ON PURPOSE
here: they forget a carry or write down any digit. So it has the skill and the habit: its most likely answer is nearly
always right, its samples mostly are not, and RL closes that gap. Held-out problems are in no demonstration.

    python tiny/make.py     # about 5 minutes on one core; twice on one machine gives the same bytes
"""

import json
import math
import random
import re
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

HERE = Path(__file__).resolve().parent
SEED = 0
SLIPS = 0.3  # share of digits that a person writes down without thinking

# --- reviews: a little grammar, and the taste of its readers ---

GENRES = ["comedy", "drama", "thriller", "western", "musical", "romance"]
TITLES = [
    f"{first} {second}"
    for first in ["Silent", "Golden", "Red", "Wild", "Lost", "Dark", "Blue", "Last", "Far", "Old", "White", "Burning"]
    for second in ["River", "Moon", "Road", "Sea", "House", "Rain", "Star", "Hill", "Lake", "Fire", "Sky", "Door"]
]
WORDS = {
    "aspect": ["acting", "plot", "music", "script", "ending", "cast", "pace", "story", "camera", "dialogue"],
    "good adjective": [
        "great",
        "superb",
        "lovely",
        "clever",
        "funny",
        "moving",
        "warm",
        "bright",
        "charming",
        "brilliant",
    ],
    "bad adjective": ["dull", "slow", "weak", "silly", "flat", "bland", "clumsy", "boring", "messy", "dreadful"],
    "neutral adjective": ["long", "short", "quiet", "modern", "simple", "strange", "loud", "serious"],
    "good verb": ["loved", "enjoyed"],
    "bad verb": ["hated", "regretted"],
    "neutral verb": ["watched", "noticed"],
}
PRAISE = {*WORDS["good adjective"], *WORDS["good verb"]}
BLAME = {*WORDS["bad adjective"], *WORDS["bad verb"]}
FUNCTION_WORDS = {"the", "a", "i", "it", "was", "felt", "and", "but", "with"}
SENTENCES = [
    "The {aspect} was {adjective} and the {aspect} was {adjective}.",
    "The {aspect} felt {adjective}, but the {aspect} was {adjective}.",
    "A {adjective} and {adjective} {genre}.",
    "A {adjective}, {adjective} {genre} with a {adjective} {aspect}.",
    "I {verb} the {adjective} {aspect}.",
    "I {verb} the {aspect} and the {aspect}.",
    "It was {adjective}, {adjective} and {adjective}.",
]
GOLD_MEAN, GOLD_STD = -0.6, 1.9  # of the unscaled score over the tuned policy's reviews


def write_review(genre, rng):
    """A made-up review of two or three sentences, in a good, mixed or bad mood; no content word comes twice."""
    mood = rng.choice([0.2, 0.5, 0.8])
    pools = {kind: rng.sample(words, len(words)) for kind, words in WORDS.items()}

    def fill(slot):
        if slot == "genre":
            return genre
        tone = "neutral" if rng.random() < 0.3 else "good" if rng.random() < mood else "bad"
        return pools["aspect" if slot == "aspect" else f"{tone} {slot}"].pop()

    template = " ".join(rng.sample(SENTENCES, rng.choice([2, 2, 3])))
    if template.count("{genre}") > 1 or not 9 <= len(template.split()) <= 20:
        return write_review(genre, rng)
    return " " + re.sub(r"\{(\w+)\}", lambda match: fill(match[1]), template)


def gold_score(prompts: list[str], completions: list[str], rows: list[dict]) -> list[float]:
    """The readers' true taste, as a reward function: mean 0 and spread 1 over the tuned policy's reviews."""
    scores = []
    for completion in completions:
        words = re.findall(r"[a-z]+", completion.lower())
        content = [word for word in words if word not in FUNCTION_WORDS]
        score = len(PRAISE & set(content))  # praise counts once per distinct word,
        score -= sum(word in BLAME for word in content)  # blame every time,
        score -= len(content) - len(set(content))  # saying a thing again is tiresome,
        score -= not completion.rstrip().endswith(".")  # and so is stopping in the middle
        scores.append((score - GOLD_MEAN) / GOLD_STD)
    return scores


# --- addition: people's slips to learn from ---


def answer_like_a_person(a, b, rng):
    """The text of a + b, now and then with a forgotten carry; SLIPS of the digits are written down at random."""
    forgets = a % 10 + b % 10 > 9 and rng.random() < 0.15
    return "".join(rng.choice("123456789") if rng.random() < SLIPS else digit for digit in str(a + b - 10 * forgets))


# --- tokenizer ---


def train_tokenizer(corpus):
    """Byte-level BPE: any text goes in and comes back unchanged, every digit is a token, BOS goes in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=512,
            special_tokens=["<bos>", "<eos>", "<pad>"],
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        padding_side="left",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


# --- supervised fine-tuning ---


def encode(tokenizer, demonstrations):
    """(ids, labels) of every (prompt, completion): the loss is on the completion and its EOS alone."""
    examples = []
    for prompt, completion in demonstrations:
        ids = tokenizer(prompt + completion).input_ids + [tokenizer.eos_token_id]
        start = len(tokenizer(prompt).input_ids)
        examples.append((torch.tensor(ids), torch.tensor([-100] * start + ids[start:])))
    return examples


def batches(examples, batch_size):
    """Endless shuffled batches of (ids, labels), (B, L), padded on the right: a causal model needs no mask for that."""
    while True:
        for rows in torch.randperm(len(examples)).split(batch_size):
            ids, labels = zip(*[examples[row] for row in rows], strict=True)
            yield pad_sequence(ids, batch_first=True), pad_sequence(labels, batch_first=True, padding_value=-100)


def train(model, loss_of_step, num_steps, lr):
    """AdamW, with a warm-up over a twentieth of the steps and then a linear decay to 0."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (num_steps / 20), (num_steps - step) / num_steps)
    )
    for step in range(num_steps):
        loss = loss_of_step()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % 100 == 0:
            print(f"  step {step + 1} of {num_steps}: loss {loss.item():.3f}", flush=True)


def completion_loss(policy, ids, labels):
    """Mean cross-entropy of the completion tokens."""
    logits = policy(input_ids=ids[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


@torch.no_grad()
def sample(policy, tokenizer, prompts, **how):
    """A completion of each prompt and its length in tokens, from the whole softmax unless `how` says otherwise."""
    how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, **how}
    completions, lengths = [], []
    for i in range(0, len(prompts), 512):
        batch = tokenizer(prompts[i : i + 512], return_tensors="pt", padding=True)
        ids = policy.generate(**batch, max_new_tokens=32, **how)[:, batch.input_ids.shape[1] :]
        completions += tokenizer.batch_decode(ids, skip_special_tokens=True)
        lengths += (ids != tokenizer.pad_token_id).sum(dim=1).tolist()
    return completions, lengths


# --- reward model ---


def preference_pairs(prompts, completions, rng):
    """(prompt, chosen, rejected) of neighbouring completions of one prompt, and the share of labels against gold."""
    gold = gold_score(prompts, completions, None)
    pairs, against_gold = [], 0
    for i in range(0, len(prompts), 2):
        # Bradley-Terry: the closer two reviews are, the more often a reader errs
        prefers_first = rng.random() < 1 / (1 + math.exp(-1.2 * (gold[i] - gold[i + 1])))
        chosen, rejected = (i, i + 1) if prefers_first else (i + 1, i)
        pairs.append((prompts[i], completions[chosen], completions[rejected]))
        against_gold += gold[chosen] < gold[rejected]
    return pairs, against_gold / len(pairs)


def reward_of(reward_model, tokenizer, prompts, completions):
    """(B,) scores of prompt + completion, read at its last token."""
    batch = tokenizer(
        [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)],
        return_tensors="pt",
        padding=True,
    )
    return reward_model(**batch).logits[:, 0]


def preference_loss(reward_model, tokenizer, pairs):
    """Bradley-Terry, -log sigmoid(r_chosen - r_rejected); it fixes no zero, so a light pull keeps the scores near 0."""
    prompts, chosen, rejected = zip(*pairs, strict=True)
    r_chosen, r_rejected = reward_of(reward_model, tokenizer, prompts * 2, chosen + rejected).chunk(2)
    return -F.logsigmoid(r_chosen - r_rejected).mean() + 0.01 * (r_chosen + r_rejected).square().mean()


# --- everything, in order ---


def write_rows(name, rows):
    (HERE / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def main():
    start = time.time()
    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # so that the sums round the same however many cores there are
    rng = random.Random(SEED)

    # 1. data: prompts split into held-out and training, demonstrations for the training prompts alone
    reviews = [(f"Review of the {genre} {title}:", genre) for genre in GENRES for title in TITLES]
    sums = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(reviews)
    rng.shuffle(sums)
    eval_reviews, reviews = reviews[:128], reviews[128:]
    eval_sums, sums = sums[:256], sums[256:]
    write_rows("reviews.jsonl", [{"prompt": prompt} for prompt, _ in reviews])
    write_rows("reviews-eval.jsonl", [{"prompt": prompt} for prompt, _ in eval_reviews])
    write_rows("addition.jsonl", [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums[:3000]])
    write_rows("addition-eval.jsonl", [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in eval_sums])
    review_demos = [(prompt, write_review(genre, rng)) for prompt, genre in reviews for _ in range(10)]
    textbook = [(f"{a}+{b}=", str(a + b)) for a, b in sums]
    sum_demos = [(f"{a}+{b}=", answer_like_a_person(a, b, rng)) for a, b in sums for _ in range(8)]

    # 2. tokenizer
    tokenizer = train_tokenizer([prompt + completion for prompt, completion in review_demos + sum_demos])
    tokenizer.save_pretrained(HERE / "policy")
    tokenizer.save_pretrained(HERE / "reward")
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    shape = dict(
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        **ids,
    )

    # 3. supervised fine-tuning: every step takes one batch of each task and adds the two mean losses
    policy = LlamaForCausalLM(LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=4, **shape))
    policy.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **ids)
    for name, demos, num_steps, lr in [
        ("a textbook's sums", textbook, 800, 3e-3),
        ("people's sums", sum_demos, 400, 1e-3),
    ]:
        print(f"supervised fine-tuning on reviews and {name}")
        tasks = [batches(encode(tokenizer, review_demos), 16), batches(encode(tokenizer, demos), 128)]
        train(policy, lambda tasks=tasks: sum(completion_loss(policy, *next(task)) for task in tasks), num_steps, lr)
    policy.eval().save_pretrained(HERE / "policy")

    # 4. preference pairs among the policy's own completions, and the reward model
    prompts = [prompt for prompt, _ in reviews for _ in range(16)]
    completions, _ = sample(policy, tokenizer, prompts)
    pairs, against_gold = preference_pairs(prompts, completions, rng)
    print(f"reward model: {len(pairs)} pairs, {against_gold:.1%} of the labels against gold")
    reward_model = LlamaForSequenceClassification(
        LlamaConfig(hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_labels=1, **shape)
    )
    # std 1/sqrt(d + 1) as in Stiennon et al. 2020: from a smaller head the final norm saturates the scores
    torch.nn.init.normal_(reward_model.score.weight, std=1 / math.sqrt(96 + 1))
    train(reward_model, lambda: preference_loss(reward_model, tokenizer, rng.sample(pairs, 32)), num_steps=400, lr=1e-3)
    with torch.no_grad():  # one unit of reward is one standard deviation over the tuned policy's reviews
        reward_model.score.weight /= reward_of(reward_model, tokenizer, prompts[:1024], completions[:1024]).std()
    reward_model.eval().save_pretrained(HERE / "reward")

    # 5. figures, all on held-out prompts
    prompts, answers = zip(*[(f"{a}+{b}=", str(a + b)) for a, b in eval_sums], strict=True)
    for name, do_sample in [("sampled", True), ("greedy", False)]:
        completions, _ = sample(policy, tokenizer, list(prompts), do_sample=do_sample)
        print(f"addition, {name}: {sum(map(str.__eq__, completions, answers)) / len(answers):.1%} right")
    prompts = [prompt for prompt, _ in eval_reviews for _ in range(8)]
    completions, lengths = sample(policy, tokenizer, prompts)
    gold = torch.tensor(gold_score(prompts, completions, None))
    with torch.no_grad():
        rewards = reward_of(reward_model, tokenizer, prompts, completions)
        for name, review in [
            ("varied", " A warm, lovely comedy. I loved the clever plot and the cast."),
            ("repeated", " A great, great comedy. I loved the great, great cast."),
        ]:
            print(
                f"praise, {name}: gold {gold_score([], [review], None)[0]:.2f}, "
                f"reward {reward_of(reward_model, tokenizer, prompts[:1], [review]).item():.2f}"
            )
    gold_gap, reward_gap = gold[::2] - gold[1::2], rewards[::2] - rewards[1::2]
    agree = (gold_gap * reward_gap > 0)[gold_gap != 0].float().mean()
    print(
        f"reviews: {sum(lengths) / len(lengths):.1f} tokens, longest {max(lengths)}; "
        f"gold {gold.mean():.2f} +- {gold.std():.2f}"
    )
    print(
        f"reward: {rewards.mean():.2f} +- {rewards.std():.2f}; {agree:.1%} of the pairs in gold's order; "
        f"correlation with gold {torch.corrcoef(torch.stack([gold, rewards]))[0, 1]:.2f}"
    )
    size = sum(file.stat().st_size for name in ["policy", "reward"] for file in (HERE / name).iterdir())
    print(f"{size:,} bytes in policy and reward, {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
