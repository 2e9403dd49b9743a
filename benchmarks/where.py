"""Measure where the CPU seconds of SmolLM2's engine and update go, on one thread, beside the raw products of the same shapes.

    python benchmarks/where.py [--cases sums essays] [--prompts 2] [--kernels auto]        # needs `make smollm`

Random tokens, groups of 8, every answer as long as it may be, microbatches of 2048 tokens. The floor is the arithmetic of
`shapes.forward_flops`, three times for the update, at `shapes.operations_in_a_second`. `rest` is Python and memory. The case
`long` is left out by default: the profiler needs more than 16 GB for its 512 steps.
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from shapes import batch_of, forward_flops, operations_in_a_second
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.protocol import Sampling
from grpo.extras.demo.smollm2 import SMOLLM2
from grpo.extras.kernels.on_cpu import use_own
from grpo.models.logprobs import completion_logprobs
from grpo.models.packing import microbatches
from grpo.system import memory

CASES = {"sums": (93, 11), "essays": (40, 128), "long": (100, 512)}  # tokens of a prompt and of an answer
PARTS = {
    "products": ("aten::mm", "aten::addmm", "_linear_pointwise"),
    "attention": ("attention", "bmm", "softmax", "index_"),
    "element-wise": (
        "mul",
        "add",
        "sub",
        "div",
        "silu",
        "pow",
        "mean",
        "rsqrt",
        "exp",
        "log",
        "sum",
        "amax",
        "norm",
        "clamp",
    ),
    "optimizer": ("adam", "foreach"),
}


def part_of(name: str) -> str:
    return next((part for part, words in PARTS.items() if any(word in name for word in words)), "rest")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["sums", "essays"])
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--kernels", choices=("auto", "none"), default="auto")
    given = parser.parse_args()
    torch.set_num_threads(1)
    memory.settle()
    model = AutoModelForCausalLM.from_pretrained(SMOLLM2.made(), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    use_own(model, given.kernels)
    engine = TransformersEngine()
    engine.load_weights(model, 0)
    engine.choose()

    def update(batch) -> None:
        for rows in microbatches(batch, "shared_prompt", 2048):
            logprobs, _ = completion_logprobs(model, batch.rows(rows), 1.0, layout="shared_prompt")
            (-logprobs.mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    print(f"{'case':8s}{'':8s}{'CPU s':>8s}{'floor':>8s}" + "".join(f"{part:>14s}" for part in (*PARTS, "rest")))
    for case in given.cases:
        prompt, answer = CASES[case]
        groups = [(prompt, [answer] * 8)] * given.prompts
        batch = batch_of(groups, model.config.vocab_size)
        prompts = [prompt for prompt, _ in batch.sequences()]
        works = {
            "engine": (1, lambda asked=prompts, n=answer: engine.sample(asked, Sampling(n), range(len(asked)))),
            "update": (3, lambda batch=batch: update(batch)),
        }
        for name, (times, work) in works.items():
            with profile(activities=[ProfilerActivity.CPU]) as found:
                begun = time.process_time(), time.perf_counter()
                work()
                cpu, wall = time.process_time() - begun[0], time.perf_counter() - begun[1]
            shares: Counter[str] = Counter()
            for event in found.key_averages():
                shares[part_of(event.key)] += event.self_cpu_time_total / 1e6 / wall
            shares["rest"] = 1 - sum(shares[part] for part in PARTS)
            floor = times * forward_flops(model.config, groups) / operations_in_a_second(model.config)
            cells = "".join(f"{shares[part] * cpu:14.2f}" for part in (*PARTS, "rest"))
            print(f"{case:8s}{name:8s}{cpu:8.2f}{floor:8.2f}{cells}", flush=True)


if __name__ == "__main__":
    main()
