"""Measure weights that arrive while vLLM samples: with the KV cache kept, and computed again.

    python benchmarks/in_flight.py [--layers 8 --hidden 512 --samples 32 --tokens 192 --updates 3 --lr 1e-5] [--json]

It needs vLLM, and takes minutes. vLLM runs in this process, with a random Llama in float32. A thread samples, and this one loads
the next version of the policy, a step of AdamW further, whenever an equal share of the steps is over. `without`: no new weights.

seconds: of one CPU for all completions. load: of these, for a call of load_weights; the median. again: tokens that vLLM computes
again, for each update. first, later: mean |log pi - log mu| in nats of the tokens before the first update, and of those after it;
pi: the weights that drew the token, with a cache of their own; mu: what vLLM returned. largest: the largest later one. newest:
the mean over all tokens with the newest weights as pi, which is what an update without a correction would meet.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from copy import deepcopy
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

MODES = {"without": None, "keep": False, "recompute": True}
COLUMNS = "mode", "seconds", "load", "again", "first", "later", "largest", "newest"


def folder_of(work: str, layers: int, hidden: int, context: int) -> str:
    """Save a random Llama and return its folder."""
    from grpo.extras.demo.demo_model import make_tokenizer

    tokenizer = make_tokenizer(["How many coins are left? 12 + 7 = 19"] * 30)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128, max_position_embeddings=context,
        initializer_range=0.05, eos_token_id=1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(work)
    tokenizer.save_pretrained(work)
    return work


def versions_of(model: torch.nn.Module, updates: int, lr: float) -> list[torch.nn.Module]:
    """Return the policy and its copies after each update, which is one step of AdamW."""
    models = [model]
    for _ in range(updates):
        new = deepcopy(models[-1])
        optimizer = torch.optim.AdamW(new.parameters(), lr=lr)
        ids = torch.randint(2, new.config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(len(models)))
        new(ids, labels=ids).loss.backward()
        optimizer.step()
        models.append(new)
    return models


def measure(engine: Any, models: list, samples: int, tokens: int, mode: str) -> dict[str, float | str]:
    """Sample `samples` completions of `tokens` tokens while the weights change, and compare them with the models."""
    from helpers.models import PROMPTS, next_logits

    from grpo.engines.protocol import Sampling

    engine.version, engine.recompute = None, MODES[mode] is not False
    engine.load_weights(models[0], 0)
    arrives = threading.Event()
    core = engine._llm.llm_engine.engine_core.engine_core
    step, schedule = engine._llm.llm_engine.step, core.scheduler.schedule
    count, computed = [0], [0]

    def stepped() -> list:
        count[0] += 1
        if count[0] % (tokens // len(models)) == 0:
            arrives.set()
        return step()

    def scheduled(*args, **named):
        output = schedule(*args, **named)
        computed[0] += output.total_num_scheduled_tokens
        return output

    engine._llm.llm_engine.step, core.scheduler.schedule = stepped, scheduled
    prompts, found, loads = (PROMPTS * samples)[:samples], [], []
    sampling = Sampling(tokens, vllm={"ignore_eos": True})
    thread = threading.Thread(target=lambda: found.extend(engine.sample(prompts, sampling, range(samples))))
    begun = time.process_time()
    thread.start()
    for version in range(1, len(models)) if MODES[mode] is not None else ():
        arrives.wait()
        arrives.clear()
        at = time.thread_time()
        engine.load_weights(models[version], version)
        loads.append(time.thread_time() - at)
    thread.join()
    seconds = time.process_time() - begun
    engine._llm.llm_engine.step, core.scheduler.schedule = step, schedule
    gaps: dict[str, list[float]] = {"first": [], "later": [], "newest": []}
    for prompt, done in zip(prompts, found, strict=True):
        ids = torch.tensor(done.ids)[:, None]
        pi = [next_logits(m, prompt, done).log_softmax(-1).gather(1, ids)[:, 0].tolist() for m in models]
        for t, (version, mu) in enumerate(zip(done.versions, done.logprobs, strict=True)):
            gaps["later" if version else "first"].append(abs(pi[version][t] - mu))
            gaps["newest"].append(abs(pi[max(done.versions)][t] - mu))
    means = {name: fmean(values) if values else 0.0 for name, values in gaps.items()}
    return {
        "mode": mode, "seconds": seconds, "load": median(loads or [0.0]), "again": float(computed[0]),
        "largest": max(gaps["later"] or [0.0]), **means,
    }  # fmt: skip


def main() -> None:
    from grpo.engines.vllm.engine import VLLMEngine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"layers": 8, "hidden": 512, "samples": 32, "tokens": 192, "updates": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=1e-5, help="of AdamW, which moves a weight by so much")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        folder = folder_of(work, args.layers, args.hidden, context := args.tokens + 64)
        engine = VLLMEngine(folder, args={"kv_cache_memory_bytes": 1 << 28, "max_model_len": context})
        models = versions_of(AutoModelForCausalLM.from_pretrained(folder), args.updates, args.lr)
        measure(engine, models[:1], args.samples, 8, "without")  # warms up
        found = [measure(engine, models, args.samples, args.tokens, mode) for mode in MODES]
        engine.close()
    plain = found[0]["again"]
    for row in found:
        row["again"] = (row["again"] - plain) / args.updates
    if args.json:
        print(json.dumps(found))
        return
    print(("{:>12}" * len(COLUMNS)).format(*COLUMNS))
    for row in found:
        print("".join(f"{row[name]:>12}" if name == "mode" else f"{row[name]:>12.3g}" for name in COLUMNS))


if __name__ == "__main__":
    main()
