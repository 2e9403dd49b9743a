"""GRPO in one file: a tiny language model learns to reason, on a laptop's CPU, in a few minutes. Read it from top to bottom.

    python examples/grpo_in_one_file.py

Group Relative Policy Optimization (arXiv 2402.03300) repeats four steps:

1. Sample a group of answers to each of some questions.
2. Give each answer a reward. Here a program checks it: 1 if the boxed number is right, else 0.
3. Compare each answer with its own group. Its advantage says how much better than the others it is.
4. Make the tokens of good answers more likely and those of bad answers less likely.

The base model answers word problems too hastily: one in four is right. Nobody shows it how to do better. It finds out that
answers which work out every line earn more, and ends at nine in ten.
"""

import random
import re
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

BASE = Path(__file__).parents[1] / "grpo/extras/demo/demo_models/wordmath"  # a Llama of 1.3 million parameters
QUESTIONS, GROUP, ROLLOUTS = 16, 8, 80  # a rollout is QUESTIONS x GROUP answers
MAX_TOKENS = 40  # of an answer
UPDATES = 1  # optimizer steps on each rollout
CLIP, LEARNING_RATE, BETAS, MAX_GRAD_NORM = 0.2, 1.5e-4, (0.9, 0.99), 1.0

# ---- The problems. "Sam has 14 coins. Sam finds 7 coins. How many coins does Sam have?"

NAMES = ["Sam", "Mia", "Tom", "Ana", "Ben", "Eva", "Leo", "Zoe", "Max", "Ida"]
THINGS = ["coins", "books", "cards", "shells", "apples", "stamps", "pens", "stones"]
EVENTS = [  # a sentence, the number after it, and the lines of working that it takes; a question ends the story
    ("{a} finds {n} {things}.", lambda x, n, m: x + n, 1),
    ("{a} buys {n} more {things}.", lambda x, n, m: x + n, 1),
    ("{a} buys {n} bags of {m} {things}.", lambda x, n, m: x + n * m, 2),
    ("{b} gives {a} {n} boxes of {m} {things}.", lambda x, n, m: x + n * m, 2),
    ("{a} loses {n} {things}.", lambda x, n, m: x - n, 1),
    ("{a} gives {n} {things} to {b}.", lambda x, n, m: x - n, 1),
    ("Now {a} gets {n} times as many {things}.", lambda x, n, m: x * n, 1),
    ("{a} sells all the {things} for {n} dollars each. How many dollars does {a} get?", lambda x, n, m: x * n, 1),
    ("{a} packs all the {things} into boxes of {n}. How many boxes does {a} fill?", lambda x, n, m: x / n, 1),
]


def make_problem(rng: random.Random) -> tuple[str, str]:
    """A question and its answer, by 2 to 4 lines of working with whole numbers from 2 to 99."""
    (a, b), things = rng.sample(NAMES, 2), rng.choice(THINGS)
    number, lines = rng.randint(3, 20), rng.randint(2, 4)
    story = f"{a} has {number} {things}."
    while lines:
        sentence, change, takes = rng.choice(EVENTS)
        n, m = rng.randint(2, 9), rng.randint(2, 9)
        after = change(number, n, m)
        if takes <= lines and after in range(2, 100) and ("?" not in sentence or lines == 1):
            story += " " + sentence.format(a=a, b=b, things=things, n=n, m=m)
            number, lines = int(after), lines - takes
    return story if "?" in story else f"{story} How many {things} does {a} have?", str(number)


# ---- 1. Sample answers.
def sample(model, tokenizer, questions, group: int, greedy: bool = False) -> tuple[Tensor, Tensor, list[str]]:
    """`group` answers to each question. Returns ids [B, P+C] of prompts, padded on the left, and answers; the mask [B, C] of
    what the model wrote, its end token included; the texts of the answers. B = questions x group."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(prompts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
    how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0}
    ids = model.generate(**inputs, **how, max_new_tokens=MAX_TOKENS, num_return_sequences=group)
    answers = ids[:, inputs.input_ids.shape[1] :]
    ended = (answers == tokenizer.eos_token_id).int()
    mask = ended.cumsum(1) - ended == 0  # up to the first end token
    return ids, mask, tokenizer.batch_decode(answers, skip_special_tokens=True)


# ---- 2. Reward them.
def reward(answer: str, right: str) -> float:
    """1 if the last \\boxed{...} of the answer holds the right number, else 0."""
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", answer)
    return float(boxed[-1:] == [right])


# ---- 3. Compare each with its group.
def group_advantages(rewards: Tensor) -> Tensor:
    """A_i = (r_i - mean(r)) / std(r) over each group. rewards [N, G] to [N, G]; 0 where all answers are equally good."""
    return (rewards - rewards.mean(dim=1, keepdim=True)) / (rewards.std(dim=1, keepdim=True) + 1e-4)


# ---- 4. Learn.
def token_logprobs(model, tokenizer, ids: Tensor, width: int) -> Tensor:
    """log pi(o_t | question, o_<t) of the last `width` tokens. ids [B, P+C] to [B, C]."""
    seen = (ids != tokenizer.pad_token_id).long()
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=seen, position_ids=positions, logits_to_keep=width + 1).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, -width:, None]).squeeze(-1)


def grpo_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """L = - mean_i mean_t min(rho_it A_i, clip(rho_it, 1 - CLIP, 1 + CLIP) A_i), rho_it = pi(o_it) / pi_old(o_it).

    The clip stops a token's push once the policy has moved far enough from the one that sampled it, so a rollout can serve
    several updates. At the first update rho is 1. advantages: [B]; the others: [B, C].
    """
    ratio = (logprobs - old_logprobs).exp()
    A = advantages[:, None]
    objective = torch.minimum(ratio * A, ratio.clamp(1 - CLIP, 1 + CLIP) * A)
    of_answers = (objective * mask).sum(1) / mask.sum(1)
    return -of_answers.mean()


def accuracy(model, tokenizer, problems) -> float:
    """The share of problems that the model solves when it always takes the most likely token."""
    _, _, answers = sample(model, tokenizer, [question for question, _ in problems], group=1, greedy=True)
    return sum(reward(answer, right) for answer, (_, right) in zip(answers, problems, strict=True)) / len(problems)


def main() -> None:
    torch.manual_seed(0)
    began, rng = time.perf_counter(), random.Random("training")
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0)
    held_out_rng = random.Random("held out")
    held_out = [make_problem(held_out_rng) for _ in range(200)]
    print(f"held-out accuracy before training: {accuracy(model, tokenizer, held_out):.1%}")
    for rollout in range(1, ROLLOUTS + 1):
        questions, right = zip(*(make_problem(rng) for _ in range(QUESTIONS)), strict=True)
        ids, mask, answers = sample(model, tokenizer, questions, GROUP)
        rewards = torch.tensor([reward(answer, right[i // GROUP]) for i, answer in enumerate(answers)])
        advantages = group_advantages(rewards.view(QUESTIONS, GROUP)).flatten()
        old_logprobs = None
        for _ in range(UPDATES):
            logprobs = token_logprobs(model, tokenizer, ids, mask.shape[1])
            old_logprobs = logprobs.detach() if old_logprobs is None else old_logprobs
            grpo_loss(logprobs, old_logprobs, advantages, mask).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
        if rollout % 10 == 0:
            solved, seconds = accuracy(model, tokenizer, held_out), time.perf_counter() - began
            line = f"reward {rewards.mean():.2f}, {mask.sum(1).float().mean():.1f} tokens an answer, {seconds:.0f} s"
            print(f"rollout {rollout}: held-out accuracy {solved:.1%}; in training: {line}")
    question, right = held_out[0]
    print(question, *sample(model, tokenizer, [question], 1, greedy=True)[2], f"(right: {right})", sep="\n")


if __name__ == "__main__":
    main()
