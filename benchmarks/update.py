"""Measure the CPU seconds of a forward and a backward pass in each layout, by lengths of prompts and answers and group size.

    python benchmarks/update.py [--shape 3m] [--prompts 10 100 400] [--answers 64 256] [--groups 1 8 16] [--json]

ROWS rows of random tokens go through a Llama with random weights in the microbatches of a run, on one thread. Layouts take turns;
seconds are medians. `even`: all answers have the given length; otherwise they end at random, after a third of it on average.
`gap` is the largest difference of a log-probability to the padded layout's.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import get_args

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from shapes import Group, batch_of, llama, model_of

from grpo.models.logprobs import Layout, completion_logprobs
from grpo.models.packing import microbatches
from grpo.objectives.batch import TokenBatch

ROWS = 32


def groups_of(prompt: int, answer: int, size: int, even: bool) -> list[Group]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.full((ROWS,), answer)
    if not even:
        lengths = torch.empty(ROWS).exponential_(3 / answer, generator=generator).ceil().clamp(1, answer).long()
        lengths[0] = answer
    return [(prompt, some.tolist()) for some in lengths.split(size)]


def passes(model: torch.nn.Module, batch: TokenBatch, layout: Layout, max_tokens: int) -> tuple[float, torch.Tensor]:
    """Return the CPU seconds, and the log-probabilities [B, C]."""
    found = torch.zeros_like(batch.rollout_logprobs)
    begun = time.process_time()
    for rows in microbatches(batch, layout, max_tokens):
        logprobs, _ = completion_logprobs(model, batch.rows(rows), 1.0, layout=layout)
        logprobs.sum().backward()
        found[rows, : logprobs.shape[1]] = logprobs.detach()
    seconds = time.process_time() - begun
    model.zero_grad()
    return seconds, found


def measure(model: torch.nn.Module, groups: list[Group], max_tokens: int, repeats: int) -> dict:
    batch = batch_of(groups, model.config.vocab_size)
    seconds: dict[str, list[float]] = {layout: [] for layout in get_args(Layout)}
    found = {}
    for _ in range(repeats + 1):
        for layout in seconds:
            taken, found[layout] = passes(model, batch, layout, max_tokens)
            seconds[layout].append(taken)
    medians = {layout: median(taken[1:]) for layout, taken in seconds.items()}  # the first is a warm-up
    gap = max(float((values - found["padded"]).abs().max()) for values in found.values())
    return {"seconds": medians, "gap": gap} | {
        "ratios": {layout: medians["padded"] / taken for layout, taken in medians.items()}
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="3m")
    parser.add_argument("--prompts", nargs="+", type=int, default=[10, 100, 400])
    parser.add_argument("--answers", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--groups", nargs="+", type=int, default=[1, 8, 16])
    parser.add_argument("--max-tokens", type=int, default=8192, help="optim.max_tokens_per_microbatch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = model_of(llama(given.shape))
    results = []
    if not given.json:
        print(
            f"{'prompt':>6s} {'answer':>6s} {'even':>5s} {'G':>3s}"
            + "".join(f"{n:>22s}" for n in get_args(Layout))
            + "   gap"
        )
    for prompt in given.prompts:
        for answer in given.answers:
            for even in (True, False):
                for size in given.groups:
                    found = measure(model, groups_of(prompt, answer, size, even), given.max_tokens, given.repeats)
                    results.append({"prompt": prompt, "answer": answer, "even": even, "group": size, **found})
                    if not given.json:
                        cells = "".join(f"{s:12.3f} s {found['ratios'][n]:6.2f}x" for n, s in found["seconds"].items())
                        print(
                            f"{prompt:6d} {answer:6d} {'yes' if even else 'no':>5s} {size:3d}{cells}   {found['gap']:.1e}",
                            flush=True,
                        )
    if given.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
