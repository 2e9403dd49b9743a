"""Measure the gap between the log-probabilities of engine and trainer in bfloat16, with the head of either of them in float32.

    python benchmarks/head_gap.py [--engine NAME] [--vocabulary 8192] [--width 256] [--layers 4] [--samples 32] [--tokens 64]

A Llama with random weights, whose logits have a standard deviation of 4. The engine samples, and the trainer scores the same
tokens: prints the mean and the largest absolute difference in nats, on a CPU. NAME: transformers (the built-in engine), vllm,
vllm_shared or vllm_server, which starts a server for each head.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.protocol import Engine, Sampling
from grpo.env.messages import Message
from grpo.env.tokens import Turn
from grpo.env.types import Action, Reward, State, Step, Trajectory
from grpo.extras.float32_head.head import in_float32
from grpo.models.logprobs import completion_logprobs
from grpo.objectives.batch import TokenBatch
from grpo.rollout.collate import collate
from grpo.rollout.types import Sample

DTYPES = (None, "float32")  # of a head


def policy(vocabulary: int, width: int, layers: int) -> LlamaForCausalLM:
    """Return a random model in bfloat16, whose logits have a standard deviation of 4."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        max_position_embeddings=512,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    model.lm_head.weight.data.normal_(0, 4 * width**-0.5)  # a state has the length sqrt(width)
    return model.bfloat16()


def sampled(engine: Engine, vocabulary: int, samples: int, tokens: int) -> TokenBatch:
    """Return what an engine samples: four answers to each of `samples` / 4 prompts, with its log-probabilities."""
    prompts = [[(7919 * (5 * row + i) + 11) % vocabulary for i in range(5)] for row in range(samples // 4)]
    prompts = [prompt for prompt in prompts for _ in range(4)]
    got = engine.sample(prompts, Sampling(tokens), range(samples))
    state = Step(State((Message("user", ""),)), Action(Message("assistant", "")))
    turns = [Turn(tuple(prompt), one) for prompt, one in zip(prompts, got, strict=True)]
    return collate([[Sample({}, Trajectory((state,)), (turn,), Reward(0, False)) for turn in turns]])


@torch.no_grad()
def gap(model: LlamaForCausalLM, batch: TokenBatch, layout: str = "shared_prompt") -> Tensor:
    """Return the absolute differences between the trainer's log-probabilities and those of the batch, [n]."""
    logprobs, _ = completion_logprobs(model, batch, 1.0, layout=layout)
    return (logprobs - batch.rollout_logprobs)[batch.mask].abs()


def both(model: LlamaForCausalLM) -> dict[str | None, LlamaForCausalLM]:
    """Return the model with each kind of head."""
    return {None: model, "float32": in_float32(deepcopy(model))}


def opened(name: str, folder: str, head: str | None) -> Engine:
    """Return an engine for the model of a folder, in bfloat16. name: see above; head: number type of its head."""
    if name == "transformers":
        return TransformersEngine()
    settings = {"max_model_len": 512, "kv_cache_memory_bytes": 1 << 27, "hf_overrides": {"head_dtype": head}}
    if name == "vllm_server":
        from grpo.extras.vllm_server.engine import VLLMServerEngine

        more = {"dtype": "bfloat16", "skip_tokenizer_init": True}  # the folder has no tokenizer
        return VLLMServerEngine(folder, launch=True, args=settings | more, folder=f"{folder}/weights", logs=folder)
    from grpo.engines.vllm.engine import VLLMEngine
    from grpo.extras.shared_weights.shared import VLLMSharedEngine

    return {"vllm": VLLMEngine, "vllm_shared": VLLMSharedEngine}[name](folder, dtype="bfloat16", args=settings)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["transformers", "vllm", "vllm_shared", "vllm_server"]
    parser.add_argument("--engine", choices=names, default=names[0])
    for name, default in {"vocabulary": 8192, "width": 256, "layers": 4, "samples": 32, "tokens": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args(arguments)
    models = both(policy(args.vocabulary, args.width, args.layers))
    print(f"{'engine':>10} {'trainer':>10} {'mean':>9} {'largest':>9}")
    with tempfile.TemporaryDirectory() as folder:
        models[None].save_pretrained(folder)
        for of_engine in DTYPES:
            engine = opened(args.engine, folder, of_engine)
            engine.load_weights(models[of_engine], 0)
            batch = sampled(engine, args.vocabulary, args.samples, args.tokens)
            engine.close()
            for of_trainer in DTYPES:
                gaps = gap(models[of_trainer], batch)
                names = (name or "bfloat16" for name in (of_engine, of_trainer))
                print("{:>10} {:>10} {:9.5f} {:9.4f}".format(*names, float(gaps.mean()), float(gaps.max())))


if __name__ == "__main__":
    main()
