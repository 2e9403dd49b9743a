"""Measure sampled tokens per second on one model: built-in engine, transformers' `generate` and continuous batching, vLLM.

    python benchmarks/rollout.py [--shapes 3m 100m] [--prompt 100] [--answer 64] [--json]

PROMPTS prompts x GROUP samples at temperature 1, float32, random weights, on one thread. `short`: answers end at random, after a
third of the limit on average. The engines take turns in one process; results are medians, per CPU second and per second of
wall-clock time. vLLM takes part if installed (environment of `make test-vllm`); an engine that cannot run here is reported.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from shapes import llama, model_of
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaForCausalLM
from transformers.utils import logging

from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.protocol import Engine, Sampling

PROMPTS, GROUP = 8, 8
Sampler = Callable[[list[list[int]], int], list[int]]  # (prompts, a number for the seed) -> lengths of the answers


def of_engine(engine: Engine, model: LlamaForCausalLM, limit: int) -> Sampler:
    engine.load_weights(model, 0)

    def sample(prompts: list[list[int]], turn: int) -> list[int]:
        seeds = range(turn * len(prompts), (turn + 1) * len(prompts))
        return [len(done.ids) for done in engine.sample(prompts, Sampling(limit), seeds)]

    return sample


def builtin(model: LlamaForCausalLM, limit: int, folder: str) -> Sampler:
    return of_engine(TransformersEngine(), model, limit)


def vllm(model: LlamaForCausalLM, limit: int, folder: str) -> Sampler:
    from grpo.engines.vllm.engine import VLLMEngine

    args = {"load_format": "dummy", "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 30}
    return of_engine(VLLMEngine(folder, dtype="float32", args=args), model, limit)


def settings(model: LlamaForCausalLM, limit: int) -> GenerationConfig:
    ends = model.config.eos_token_id
    return GenerationConfig(max_new_tokens=limit, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=ends)


def generate(model: LlamaForCausalLM, limit: int, folder: str) -> Sampler:
    config = settings(model, limit)
    ends = torch.tensor(model.config.eos_token_id or [])

    def sample(prompts: list[list[int]], turn: int) -> list[int]:
        torch.manual_seed(turn)
        ids = torch.tensor(prompts)
        said = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[:, ids.shape[1] :]
        ended = torch.isin(said, ends).int()
        return torch.where(ended.any(1), ended.argmax(1) + 1, said.shape[1]).tolist()

    return sample


def generate_batch(model: LlamaForCausalLM, limit: int, folder: str) -> Sampler:
    config = settings(model, limit)
    # by default it takes most of the machine's memory
    batching = ContinuousBatchingConfig(
        num_blocks=2 * PROMPTS * GROUP, max_batch_tokens=1024, max_requests_per_batch=256
    )

    def sample(prompts: list[list[int]], turn: int) -> list[int]:
        torch.manual_seed(turn)
        done = model.generate_batch(
            prompts, generation_config=config, continuous_batching_config=batching, progress_bar=False
        )
        if len(done) < len(prompts):
            raise RuntimeError(f"{len(done)} answers to {len(prompts)} prompts")
        return [len(output.generated_tokens) for output in done.values()]

    return sample


SAMPLERS = {"built-in": builtin, "generate": generate, "generate_batch": generate_batch, "vllm": vllm}


def measure(shape: str, prompt: int, limit: int, short: bool, repeats: int) -> dict:
    """Return for each sampler its tokens per CPU second and per second of wall-clock time."""
    config = llama(shape)
    ends = list(range(40, 40 + round(3 * config.vocab_size / limit)))
    config.eos_token_id = ends if short else None
    model = model_of(config)
    model.get_input_embeddings().weight.data[ends] = 0  # tied, so their logits are 0: answers end at one rate
    generator = torch.Generator().manual_seed(0)
    asked = (
        torch.randint(1, config.vocab_size, (PROMPTS, prompt), generator=generator).repeat_interleave(GROUP, 0).tolist()
    )
    samplers, speeds = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder)
        for name, make in SAMPLERS.items():
            try:
                samplers[name] = make(model, limit, folder)
                samplers[name](asked, 0)  # warm-up
            except Exception as error:
                samplers.pop(name, None)
                print(f"{name} does not run here: {' '.join(str(error).split())[:150]}", file=sys.stderr)
        for turn in range(1, repeats + 1):
            for name, sample in samplers.items():
                begun = time.process_time(), time.perf_counter()
                tokens = sum(sample(asked, turn))
                ended = time.process_time(), time.perf_counter()
                speeds.setdefault(name, []).append([tokens / (b - a) for a, b in zip(begun, ended, strict=True)])
    return {name: [median(column) for column in zip(*rows, strict=True)] for name, rows in speeds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["3m", "100m"])
    parser.add_argument("--prompt", type=int, default=100)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    results = []
    for shape in given.shapes:
        for short in (False, True):
            found = measure(shape, given.prompt, given.answer, short, given.repeats)
            results.append({"shape": shape, "short": short, "tokens/s": found})
            for name, (cpu, clock) in found.items() if not given.json else ():
                print(
                    f"{shape:6s} {'short' if short else 'even':6s} {name:16s} {cpu:9,.0f} tokens per CPU second, "
                    f"{clock:9,.0f} per second   {found['built-in'][0] / cpu:5.2f}x",
                    flush=True,
                )
    if given.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
