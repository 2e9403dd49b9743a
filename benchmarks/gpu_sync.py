"""Measure vLLM beside a trainer on one GPU: whether it follows every optimizer step, time of a sync, sampling speed.

    python benchmarks/gpu_sync.py [--shapes small 1b] [--json]      # a CUDA GPU with 48 GB; --shapes 8b needs 100 GB

Llama shapes with random weights in bfloat16, float32 masters in the optimizer, CUDA graphs on. Each engine runs in its own
process, which measures the gap between engine and trainer (largest and mean, over sampled tokens) before and after each of three
steps, the median sync, sampled tokens per second and the memory in use; for `vllm` also sleep and wake. `as TRL` pushes one
parameter at a time and samples with the same engine, as TRL's colocate mode does. `--shapes small` tries the script without a
GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ENGINES = ("vllm_shared", "vllm", "as TRL")
SHAPES = {
    "small": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "heads": (8, 4)},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "heads": (32, 8)},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "heads": (32, 8)},
}
VOCABULARY = {"small": 1024, "1b": 128256, "8b": 128256}
PROMPTS, PROMPT, ANSWER = 256, 128, 256


def shaped(shape: str):
    from transformers import LlamaConfig

    rest = dict(SHAPES[shape])
    heads, kv_heads = rest.pop("heads")
    return LlamaConfig(
        **rest,
        vocab_size=VOCABULARY[shape],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=rest["hidden_size"] // heads,
        max_position_embeddings=2048,
        tie_word_embeddings=shape == "1b",
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        eos_token_id=None,
    )


def gaps(engine, policy, prompts: list[list[int]]) -> tuple[float, float]:
    """Return the largest and the mean |engine - trainer|."""
    import torch

    from grpo.engines.protocol import Sampling

    found = []
    for prompt, said in zip(prompts, engine.sample(prompts, Sampling(64), seeds=range(len(prompts))), strict=True):
        ids = torch.tensor([[*prompt, *said.ids]], device=device())
        with torch.no_grad():
            logits = policy(ids, logits_to_keep=len(said.ids) + 1).logits[0, :-1].float()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(said.ids, device=device())[:, None])[:, 0]
        found.append((expected - torch.tensor(said.logprobs, device=device())).abs())
    every = torch.cat(found)
    return float(every.max()), float(every.mean())


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def taken() -> float:
    """Return the GB in use on the device."""
    import torch

    if device() == "cpu":
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e9


def measure(name: str, shape: str, folder: str) -> dict:
    import torch
    from sync import one_by_one
    from transformers import AutoModelForCausalLM

    from grpo.engines.protocol import Sampling
    from grpo.engines.vllm.engine import VLLMEngine
    from grpo.extras.shared_weights.shared import VLLMSharedEngine, live_weights
    from grpo.models.master_weights import with_masters

    config = shaped(shape)
    args = {"load_format": "dummy", "max_model_len": 1024}
    if device() == "cuda":
        args |= {"gpu_memory_utilization": 0.3, "enforce_eager": False}
    if name == "vllm_shared":
        engine = VLLMSharedEngine(folder, dtype="bfloat16", args=args)
    elif name == "as TRL":
        with live_weights():
            engine = VLLMEngine(folder, dtype="bfloat16", args=args)
    else:
        engine = VLLMEngine(folder, dtype="bfloat16", sleeps=name == "vllm" and device() == "cuda", args=args)
    torch.manual_seed(0)
    with torch.device(device()):
        policy = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    policy.gradient_checkpointing_enable()
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, config.vocab_size, (PROMPTS, PROMPT), generator=generator).tolist()
    send = partial(one_by_one, engine) if name == "as TRL" else engine.load_weights
    send(policy, 0)
    steps = [gaps(engine, policy, prompts[:8])]

    make = torch.optim.SGD if shape == "8b" else torch.optim.AdamW  # AdamW's moments of 8b: another 64 GB
    optimizer = with_masters(dict(policy.named_parameters()), partial(make, lr=1.0 if shape == "8b" else 1e-3))
    rows = torch.tensor(prompts[:4], device=device())
    times = []
    for version in (1, 2, 3):
        policy(rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.accelerator.synchronize()
        start = time.perf_counter()
        send(policy, version)
        torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
        steps.append(gaps(engine, policy, prompts[:8]))

    start = time.perf_counter()
    said = engine.sample(prompts, Sampling(ANSWER), seeds=range(PROMPTS))
    speed = sum(len(completion.ids) for completion in said) / (time.perf_counter() - start)
    result = {"engine": name, "shape": shape, "gaps": steps, "seconds": median(times), "tokens/s": speed, "gb": taken()}
    if engine.sleeps:
        engine.sleep()
        result["gb asleep"] = taken()
        engine.load_weights(policy, 4)
        result["gap awake"] = gaps(engine, policy, prompts[:8])
    engine.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["small", "1b"])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", choices=ENGINES, help="one engine, in this process")
    parser.add_argument("--folder", help="folder of the configuration, with --one")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one, given.shapes[0], given.folder)))
        return
    results = []
    for shape in given.shapes:
        for name in ENGINES:
            with tempfile.TemporaryDirectory() as folder:
                shaped(shape).save_pretrained(folder)
                command = [sys.executable, __file__, "--one", name, "--shapes", shape, "--folder", folder]
                done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(f"{shape} {name}: {(done.stderr.strip() or 'it was killed').splitlines()[-1]}", file=sys.stderr)
                continue
            results.append(json.loads(done.stdout.splitlines()[-1]))
            result = results[-1]
            line = (
                f"{shape:6s} {name:12s} sync {result['seconds'] * 1e3:8.1f} ms   {result['tokens/s']:8,.0f} tokens/s   "
                f"{result['gb']:5.1f} GB   gap after each step "
                + ", ".join(f"{largest:.3f}/{mean:.4f}" for largest, mean in result["gaps"])
            )
            print(line, file=sys.stderr if given.json else sys.stdout, flush=True)
            if "gap awake" in result:
                awake = result["gap awake"]
                print(
                    f"       asleep {result['gb asleep']:.1f} GB, gap after waking {awake[0]:.3f}/{awake[1]:.4f}",
                    flush=True,
                )
    if given.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
