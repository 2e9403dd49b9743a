"""Measure what torch.compile gives an update: CPU seconds of forward and backward passes of packed rows, eager and compiled.

    python benchmarks/compile.py [--shape 1m] [--prompt 40] [--answer 40]

Each layer is compiled with dynamic=True, around the attention plan. Eight batches have lengths of their own, as rollouts have.
`gap` is the largest difference of a log-probability. Compiling takes half a minute, once a process.
"""

import argparse
import random
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from shapes import batch_of, llama, model_of
from update import passes

from grpo.models.gradient_checkpointing import layers_of
from grpo.models.packed_attention import Packed

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--shape", default="1m")
parser.add_argument("--prompt", type=int, default=40)
parser.add_argument("--answer", type=int, default=40)

if __name__ == "__main__":
    given, draw = parser.parse_args(), random.Random(0)
    torch.set_num_threads(1)
    model = model_of(llama(given.shape))
    sizes = [
        [(given.prompt + i, [draw.randint(1, given.answer) for _ in range(8)]) for _ in range(16)] for i in range(8)
    ]
    batches = [batch_of(groups, model.config.vocab_size) for groups in sizes]
    Packed.attend = torch.compiler.disable(Packed.attend)
    found, begun = {}, time.perf_counter()
    for name in ("warm-up", "eager", "to compile", "compiled"):
        if name == "to compile":
            begun = time.perf_counter()
            for layer in layers_of(model):
                layer.forward = torch.compile(layer.forward, dynamic=True)
        found[name] = [passes(model, batch, "shared_prompt", 2048) for batch in batches]
        print(
            f"{name}: {sum(seconds for seconds, _ in found[name]):.2f} CPU s, {time.perf_counter() - begun:.0f} s so far"
        )
    pairs = zip(found["eager"], found["compiled"], strict=True)
    print(f"gap: {max(float((a - b).abs().max()) for (_, a), (_, b) in pairs):.1e}")
