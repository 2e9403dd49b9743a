"""Measure for each mode how long new weights take to reach the engine, how much memory that costs, and whether they arrive.

    python benchmarks/sync.py [--layers 8 --hidden 1024] [--json]        # needs vLLM; a few minutes on two cores

Each mode has its own process with a random Llama and vLLM. The policy changes and is synced five times; the time is the median.
`gap` is the largest difference of a sampled token's log-probability between engine and trainer after the last sync. `memory` is
what model and engine add to the process, less the KV cache, divided by the bytes of the weights; some of it is vLLM's own. `as
TRL` pushes one parameter at a time into the model's load_weights, as TRL 1.16 does in its colocate mode.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

MODES = ["as TRL", "vllm", "vllm_shared", "vllm + lora merged", "vllm_shared + lora"]
SERVED = ["vllm_server disk", "vllm_server lora"]
MODES += SERVED
CACHE = 1 << 26
ROUNDS = 5


def anonymous_bytes() -> int:
    """Return the memory of this process that belongs to no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def build(mode: str, folder: str, work: str):
    """Return the engine of a mode."""
    args = {"kv_cache_memory_bytes": CACHE, "max_model_len": 256}
    if mode in SERVED:
        from grpo.extras.vllm_server.engine import VLLMServerEngine

        engine = VLLMServerEngine(folder, sync=mode.split()[1], launch=True, args=args, folder=work, logs=work)
    elif mode.startswith("vllm_shared"):
        from grpo.extras.shared_weights.shared import VLLMSharedEngine

        engine = VLLMSharedEngine(folder, dtype="float32", rank=8 if "lora" in mode else None, args=args)
    else:
        from grpo.engines.vllm.engine import VLLMEngine
        from grpo.extras.shared_weights.shared import live_weights

        with live_weights() if mode == "as TRL" else nullcontext():  # packed weights cannot be loaded one by one
            engine = VLLMEngine(folder, args=args)
    return engine


def one_by_one(engine, policy, version: int) -> None:
    """Sync as TRL 1.16 does: `load_weights` of vLLM's model for each parameter, then a reset of the prefix cache."""
    for name, parameter in policy.named_parameters():
        engine._llm.apply_model(lambda model, pair=(name, parameter.data): model.load_weights([pair]) and None)
    engine._llm.reset_prefix_cache()


def measure(mode: str, folder: str) -> dict:
    import torch
    from helpers.models import disturb, gap_now
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from grpo.engines.vllm.engine import import_vllm

    import_vllm()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as work:
        before = anonymous_bytes()
        engine = build(mode, folder, work)
        policy = AutoModelForCausalLM.from_pretrained(folder)
        size = sum(p.nbytes for p in policy.parameters())
        if "lora" in mode:
            policy = get_peft_model(policy, LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False))
        send = partial(one_by_one, engine) if mode == "as TRL" else engine.load_weights
        send(policy, 0)
        gap_now(engine, policy)
        times = []
        for version in range(1, ROUNDS + 1):
            disturb(policy, seed=version, size=0.002)
            start = time.perf_counter()
            send(policy, version)
            times.append(time.perf_counter() - start)
        result = {"mode": mode, "seconds": median(times), "gap": gap_now(engine, policy)}
        if mode not in SERVED:
            result["memory"] = (anonymous_bytes() - before - CACHE) / size
        engine.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--mode", choices=MODES, help="measure this mode in this process")
    parser.add_argument("--folder", help="folder of the model, with --mode")
    given = parser.parse_args()
    if given.mode:
        print(json.dumps(measure(given.mode, given.folder)))
        return
    from helpers.models import SHAPE, model_folder

    SHAPE.update(hidden_size=given.hidden, intermediate_size=3 * given.hidden, num_hidden_layers=given.layers)
    SHAPE.update(num_attention_heads=given.hidden // 64, num_key_value_heads=given.hidden // 128, head_dim=64)
    SHAPE.update(initializer_range=0.02)
    rows = []
    with tempfile.TemporaryDirectory() as work:
        folder = model_folder("llama", Path(work))
        size = (Path(folder) / "model.safetensors").stat().st_size
        print(f"a Llama of {size / 4e6:.0f} M parameters, {size / 1e6:.0f} MB in float32", file=sys.stderr)
        for mode in MODES:
            command = [sys.executable, __file__, "--mode", mode, "--folder", folder]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(f"{mode}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                continue
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            row = rows[-1]
            line = f"{mode:20s} {row['seconds'] * 1e3:10.1f} ms   gap {row['gap']:.1e}"
            line += f"   memory {row['memory']:.2f}" if "memory" in row else ""
            print(line, file=sys.stderr if given.json else sys.stdout, flush=True)
    if given.json:
        print(json.dumps({"bytes": size, "modes": rows}))


if __name__ == "__main__":
    main()
