"""Measure CPU seconds and peak memory of an update with a teacher, against the plain update, by the size of the vocabulary.

    python benchmarks/teachers.py [--vocabularies 128 49152 151936] [--repeats 3] [--memory] [--json]

Policy and teacher are Llamas of two layers with random weights. 8 rows of 16 + 48 random tokens are one microbatch, on one
thread. Seconds are of a forward and a backward pass, medians after a first one, all ways in turn. Memory is the most that a pass
adds, the gradients included, in a process of its own for each way. Ways:

    plain    log-probabilities of the policy, with their gradient
    sampled  the same, and the teacher's log-probabilities of these tokens
    reverse  KL(policy || teacher) of whole distributions, and log-probabilities without a gradient
    jsd, vopd, top-k: the same with another divergence; top-k has the policy's 100 largest entries and a tail
    whole    reverse, if all logits were held at once: what the chunks avoid
"""

import argparse
import ctypes
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from shapes import batch_of, llama, model_of

from grpo.extras.teachers.distillation import vopd
from grpo.extras.teachers.divergence import Distributions
from grpo.extras.teachers.kinds import distributions_of
from grpo.extras.teachers.module import divergence_at
from grpo.extras.teachers.teaching import Teaching, reverse
from grpo.models.logprobs import completion_logprobs
from grpo.models.states import logprobs_and_states

ROWS, PROMPT, ANSWER = 8, 16, 48
LAYOUT = "shared_prompt", None
WAYS = {
    "reverse": Teaching(1.0, "reverse"),
    "jsd": Teaching(1.0, "jsd"),
    "vopd": Teaching(1.0, vopd),
    "top-k": Teaching(1.0, "reverse", top_k=100),
}


def ways(policy: torch.nn.Module, teacher: torch.nn.Module, vocabulary: int) -> dict[str, Callable[[], None]]:
    """Return a pass of each way."""
    batch = batch_of([(PROMPT, [ANSWER] * 8)] * (ROWS // 8), vocabulary)

    def plain(taught: bool = False) -> None:
        if taught:
            with torch.no_grad():
                completion_logprobs(teacher, batch, 1.0, False, *LAYOUT)
        completion_logprobs(policy, batch, 1.0, False, *LAYOUT)[0].mean().backward()

    def judged() -> Distributions:
        with torch.no_grad():
            return distributions_of(teacher, batch, False, *LAYOUT)

    def divergence(teaching: Teaching) -> None:
        reader = partial(divergence_at, judged(), batch.mask, 1.0, teaching.of_words)
        logprobs_and_states(policy, batch, 1.0, False, *LAYOUT, [reader], False)[2].mean().backward()

    def whole() -> None:
        theirs = judged()
        ours = distributions_of(policy, batch, False, *LAYOUT)
        every = slice(None), 1.0, vocabulary
        with torch.no_grad():
            T = theirs.logprobs(*every)
        reverse(ours.logprobs(*every), T).mean().backward()

    of_words = {name: partial(divergence, teaching) for name, teaching in WAYS.items()}
    return {"plain": plain, "sampled": partial(plain, True), **of_words, "whole": whole}


def seconds(run: Callable[[], None]) -> float:
    begun = time.process_time()
    run()
    return time.process_time() - begun


def peak(run: Callable[[], None]) -> int:
    """Return the bytes that a pass adds at most, measured in a fork."""
    reads, writes = os.pipe()
    if not (child := os.fork()):
        ctypes.CDLL(None).mallopt(-3, 1 << 20)  # a tensor above a megabyte has pages of its own, which go when it does
        before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        run()
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        os.write(writes, str(most - before).encode())
        os._exit(0)
    os.close(writes)
    with open(reads) as pipe:
        added = int(pipe.read())
    os.waitpid(child, 0)
    return added


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", nargs="+", type=int, default=[128, 49152, 151936])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", action="store_true", help="no seconds")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for vocabulary in given.vocabularies:
        policy, teacher = (model_of(llama("tiny", vocab_size=vocabulary)) for _ in range(2))
        teacher.requires_grad_(False)
        tried = ways(policy, teacher, vocabulary)
        peaks = {name: peak(run) for name, run in tried.items()}  # before this process holds a gradient
        times: dict[str, list[float]] = {name: [] for name in tried}
        for _ in range(0 if given.memory else 1 + (given.repeats if vocabulary < 100_000 else 1)):
            for name, run in tried.items():
                times[name].append(seconds(run))
                policy.zero_grad()
        taken = {name: median(some[1:] or [0.0]) for name, some in times.items()}
        results.append({"vocabulary": vocabulary, "seconds": taken, "bytes": peaks})
        head, body = vocabulary * policy.config.hidden_size * 4 / 1e6, taken["plain"]
        if not given.json:
            print(f"vocabulary {vocabulary}, head {head:.1f} MB, {ROWS * ANSWER} tokens")
            for name, spent in taken.items():
                more = (
                    f"{spent / (body or 1):6.2f} x  {peaks[name] / 1e6:8.1f} MB {peaks[name] / peaks['plain']:6.2f} x"
                )
                print(f"  {name:8}{spent:8.3f} s {more}", flush=True)
    if given.json:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
