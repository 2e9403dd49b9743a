"""The built-in engine: samples from the model that is being trained, so no weights are copied.

Each distinct prompt goes through the model once, then each step is one forward pass for all rows. Finished samples leave the
batch and waiting ones join it. Works wherever the model works: CPU, MPS, one GPU.
"""

import logging
from collections import deque
from collections.abc import Sequence

import torch
from torch import nn

from grpo.engines.builtin.agreement import cache_for
from grpo.engines.builtin.sampler import Draws
from grpo.engines.protocol import Done, Prompts, Sampling
from grpo.env.tokens import Completion
from grpo.system.errors import UserError
from grpo.system.ranges import Count, enforced

log = logging.getLogger(__name__)


class TransformersEngine:
    """Samples from the model that is being trained.

    max_cache_tokens: size of the KV cache in tokens. Samples that do not fit wait; a single sample may exceed it.
    """

    @enforced("engine")
    def __init__(self, max_cache_tokens: Count = 65536) -> None:
        self.max_cache_tokens = max_cache_tokens
        self.version: int | None = None
        self.model: nn.Module | None = None
        self.tried: tuple[nn.Module, torch.device] | None = None
        self.reason = ""  # why the slower cache is used
        self.unwanted: set[int] = set()

    @property
    def context(self) -> int | None:
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def load_weights(self, model: nn.Module, version: int) -> None:
        self.model, self.version = model, version

    def choose(self) -> None:
        """Choose the cache, by trying it on the model's present device, which may differ from the device at loading time."""
        if self.tried != (self.model, self.model.device):
            self.cache, reason = cache_for(self.model)
            if reason and reason != self.reason:
                name = type(self.model).__name__
                log.warning("engine: sampling from %s is slower, it needs transformers' cache: %s", name, reason)
            self.tried, self.reason = (self.model, self.model.device), reason

    @torch.inference_mode()
    def sample(
        self, prompts: Prompts, sampling: Sampling, seeds: Sequence[int], done: Done | None = None
    ) -> list[Completion]:
        if sampling.guided:
            raise UserError("sampling.guided: the built-in engine does not support guided sampling: set engine=vllm")
        longest = max(map(len, prompts))
        if self.context is not None and longest + sampling.max_tokens > self.context:
            tokens = f"a prompt of {longest} tokens and max_tokens={sampling.max_tokens}"
            raise UserError(f"{tokens} exceed the context of {self.context}: lower max_tokens, or use shorter prompts")
        self.choose()
        prompts = [tuple(prompt) for prompt in prompts]
        place = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
        waiting = deque(sorted(range(len(prompts)), key=lambda i: place[prompts[i]]))  # equal prompts side by side
        device, eos = self.model.device, self.model.generation_config.eos_token_id
        eos = eos if isinstance(eos, list) else [] if eos is None else [eos]
        stop_ids = torch.tensor([*eos, *sampling.stop_ids], dtype=torch.int64, device=device)

        cache = self.cache(self.model, prompts, sampling.max_tokens, self.max_cache_tokens)
        draws = Draws(prompts, sampling, seeds, device)
        completions: list[Completion | None] = [None] * len(prompts)
        logits = None  # [B, V], one row per sample in the batch
        while (waiting or logits is not None) and len(self.unwanted) < len(prompts):
            new, fresh = cache.admit(waiting)
            if new:
                draws.join(new, fresh.shape[-1])
                logits = fresh if logits is None else torch.cat([logits, fresh])
            token = draws.step(logits)
            stopped = torch.isin(token, stop_ids)
            ended = stopped | (draws.counts == sampling.max_tokens)
            if self.unwanted:
                ended |= torch.isin(draws.rows, torch.tensor([*self.unwanted], device=device))
            if ended.any():
                which = ended.nonzero().squeeze(-1)
                for i, completion in draws.completions(which, stopped[which]):
                    completions[i] = completion
                    if done is not None:
                        with torch.inference_mode(False):  # the callback is not part of the engine
                            done(i, completion)
                order = torch.tensor(cache.drop(which.tolist()), dtype=torch.int64, device=device)
                draws.keep(order)
                token = token[order]
            logits = cache.step(token) if len(token) else None
        return completions

    def close(self) -> None:
        self.model = self.tried = None
