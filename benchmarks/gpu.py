"""Measure the update on one GPU, for each layout and for TRL: tokens per second, share of the peak FLOPs (MFU), memory.

    python benchmarks/gpu.py [--shapes 1b 8b] [--overrides optim.max_tokens_per_microbatch=16384] [--json]      # no network

Llama shapes with random weights in bfloat16, PROMPTS x GROUP rows of 2048 tokens. Our step is `GRPOModule.training_step` with
AdamW on float32 masters; overrides are train.py's. TRL's step is `_compute_loss` on microbatches of its default size, with its
default gradient checkpointing, and AdamW on the bfloat16 weights. Each runs in its own process; results are medians of steps.
tokens/s counts the tokens of all rows. MFU counts the layout's arithmetic: a prompt once per row, with shared_prompt once per
group, and nothing that is recomputed. Memory of a token is a step's memory beside weights, gradients and optimizer, divided by
the tokens in the model at once. `--shapes tiny` tries the script without a GPU.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import get_args

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from shapes import Group, batch_of, forward_flops, llama, model_of

from grpo.models.logprobs import Layout
from grpo.objectives.batch import TokenBatch

PROMPTS, GROUP, STEPS = 4, 8, 5
PEAK = 989e12  # bfloat16 operations in a second of an H100 or H200, dense
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def groups_of(shape: str) -> list[Group]:
    prompt, answer = (16, 48) if shape == "tiny" else (512, 1536)
    return [(prompt, [answer] * GROUP)] * PROMPTS


def arithmetic():
    """Return the Trainer's precision."""
    return torch.autocast("cuda", torch.bfloat16) if CUDA else nullcontext()


def ours(model: torch.nn.Module, batch: TokenBatch, layout: str, overrides: list[str]) -> tuple[Callable, dict]:
    from hydra.utils import instantiate

    from grpo.apps.composing import composed
    from grpo.objectives.batch import Scores
    from grpo.training.batch import RolloutBatch
    from grpo.training.module import GRPOModule

    config = composed("train", ["output_dir=.", f"optim.layout={layout}", *overrides])
    module = GRPOModule(model, instantiate(config.algo), instantiate(config.optim), 1.0, 1000, seed=0)
    optimizers, schedules = module.configure_optimizers()
    # stands in for the Trainer, which only returns these
    module.optimizers, module.lr_schedulers = lambda: optimizers[0], lambda: schedules[0]
    module.manual_backward = lambda loss: loss.backward()
    shape = (PROMPTS, GROUP)
    lengths = batch.mask.sum(1).view(shape).float()
    rewards = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    scores = Scores(rewards, {}, lengths, lengths, torch.zeros(shape, dtype=torch.bool))

    def step() -> None:
        with arithmetic():
            module.training_step(RolloutBatch(0, tokens=batch, scores=scores), 0)

    used, kernel = module.layout
    at_once = min(config.optim.max_tokens_per_microbatch, int(batch.attention_mask.sum()))
    return step, {"kernel": kernel if used == layout else f"fell back to {used}", "at_once": at_once}


def trl(model: torch.nn.Module, batch: TokenBatch) -> tuple[Callable, dict]:
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    words = Tokenizer(models.WordLevel({"!": 0, "<end>": 1}, unk_token="!"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="!", eos_token="<end>")
    args = GRPOConfig(
        output_dir="/tmp",
        report_to="none",
        bf16=CUDA,
        use_cpu=not CUDA,
        loss_type="grpo",
        num_generations=GROUP,
    )
    rows = Dataset.from_list([{"prompt": "!"}] * GROUP)
    trainer = GRPOTrainer(
        model, lambda completions, **_: [0.0] * len(completions), args, rows, processing_class=tokenizer
    )
    model = trainer.model.to(DEVICE).train()
    model.gradient_checkpointing_enable()  # as in its train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    width = batch.completion_width
    every = {
        "prompt_ids": batch.ids[:, :-width],
        "prompt_mask": batch.attention_mask[:, :-width],
        "completion_ids": batch.ids[:, -width:],
        "completion_mask": batch.mask.long(),
        "advantages": torch.randn(len(batch), generator=torch.Generator().manual_seed(0)).to(DEVICE),
    }
    size = args.per_device_train_batch_size
    trainer.current_gradient_accumulation_steps = len(batch) // size

    def step() -> None:
        for start in range(0, len(batch), size):
            some = {name: values[start : start + size] for name, values in every.items()}
            with trainer.compute_loss_context_manager():
                loss = trainer._compute_loss(model, some)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, {"kernel": model.config._attn_implementation, "at_once": size * batch.ids.shape[1]}


def synchronized() -> float:
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(shape: str, name: str, overrides: list[str]) -> dict:
    groups = groups_of(shape)
    with torch.device(DEVICE):
        model = model_of(llama(shape), torch.bfloat16 if CUDA else torch.float32)
    batch = batch_of(groups, model.config.vocab_size).to(DEVICE)
    step, found = trl(model, batch) if name == "trl" else ours(model, batch, name, overrides)
    for _ in range(2):  # compiles, and creates the optimizer's state
        step()
    before = torch.cuda.memory_allocated() if CUDA else 0
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(STEPS):
        begun = synchronized()
        step()
        seconds.append(synchronized() - begun)
    peak = torch.cuda.max_memory_allocated() if CUDA else 0
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    tokens = int(batch.attention_mask.sum())
    computed = groups if name == "shared_prompt" else [(p, [n]) for p, answers in groups for n in answers]
    mfu = 3 * forward_flops(model.config, computed) / median(seconds) / PEAK
    return found | {
        "seconds": median(seconds),
        "tokens/s": tokens / median(seconds),
        "mfu": mfu,
        "gb": peak / 1e9,
        "kb_per_token": max(0, peak - before - gradients) / 1e3 / found["at_once"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=["tiny", "1b", "8b"], default=["1b", "8b"])
    parser.add_argument("--overrides", nargs="*", default=[], help="of train.py")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", help="measure this layout, or trl, in this process")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.shapes[0], given.one, given.overrides)))
        return
    results = []
    for shape in given.shapes:
        for name in (*get_args(Layout), "trl"):
            command = [sys.executable, __file__, "--one", name, "--shapes", shape, "--overrides", *given.overrides]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(f"{shape} {name}: {(done.stderr.strip() or 'it was killed').splitlines()[-1]}", file=sys.stderr)
                continue
            result = {"shape": shape, "name": name, **json.loads(done.stdout.splitlines()[-1])}
            results.append(result)
            print(
                f"{shape:5s} {name:14s} {result['seconds']:8.3f} s  {result['tokens/s']:9,.0f} tokens/s   MFU {result['mfu']:.1%}"
                f"   {result['gb']:6.1f} GB, {result['kb_per_token']:8.1f} KB a token   {result['kernel']}",
                file=sys.stderr if given.json else sys.stdout,
                flush=True,
            )
    if given.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
