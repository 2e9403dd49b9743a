"""vLLM inside the trainer's process. Knows token ids and weights; nothing of text, chat templates or rewards.

One device, one process: the trainer passes its tensors directly, and every rank has its own engine. This
module copies weights; `shared` uses one copy for both, and `lora` replaces its adapter.

With several ranks vLLM is built once they have met: without their process group it would create one with a
single rank.
"""

import gc
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from transformers import AutoConfig

from grpo.engines.context import Bound, bounded
from grpo.engines.protocol import Done, Prompts, Sampling
from grpo.engines.room import WORK, Room
from grpo.engines.vllm.errors import short_errors
from grpo.engines.vllm.package import import_vllm, mend_cpu_build
from grpo.engines.vllm.settings import ARGS, CPU_ARGS, GPU_SHARE, check_args, check_head, params_of, params_of_each
from grpo.engines.vllm.turns import Turns
from grpo.engines.weights import as_in_files, buckets, eos_token_ids
from grpo.env.tokens import Completion
from grpo.models.compiled import first_said
from grpo.models.language import is_multimodal
from grpo.models.pretrained import Dtype, base_path, context_of
from grpo.system import distributed
from grpo.system.errors import UserError
from grpo.system.ranges import Count

log = logging.getLogger(__name__)

ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}  # layers without a state


class VLLMEngine:
    """Samples with vLLM in this process, from its own copy of the weights.

    path: a Hugging Face folder or hub id. dtype: "auto" is float32 on a CPU, 16 bits on a GPU. sleeps:
    between rollouts vLLM frees its GPU memory, weights and KV cache, and takes new weights for the next
    rollout; None: if an update leaves it too little. args: arguments of `vllm.LLM`, which override the
    defaults below; None keeps vLLM's own default. On a CPU the KV cache has 1 GiB unless
    `kv_cache_memory_bytes` is given. On a GPU vLLM takes what the run leaves (`fit`), without a trainer 40 %.
    devices, nodes: the trainer's; with several ranks the first `load_weights` builds vLLM, on all of them at
    once. most_tokens: returns the tokens of the longest sequence that it will sample, for which vLLM then
    makes room; None for the model's whole context. recompute: whether unfinished completions are read again
    with new weights that arrive; otherwise they keep the KV cache of the weights before, and only completions
    that begin later are computed with the new ones alone. sight: of a model that sees (grpo/extras/images).
    """

    apart = True
    concurrent = True

    def __init__(
        self,
        path: str,
        dtype: Dtype = "auto",
        sleeps: bool | None = None,
        args: Mapping[str, Any] | None = None,
        devices: Count = 1,
        nodes: Count = 1,
        most_tokens: Bound | None = None,
        recompute: bool = True,
        sight: Any = None,
    ) -> None:
        import_vllm()
        from vllm import LLM
        from vllm.platforms import current_platform

        import grpo.engines.vllm.transfer  # noqa: F401 - registers itself

        if sleeps and current_platform.is_cpu():
            raise UserError("engine.sleeps=true frees a GPU's memory, and there is no GPU: set engine.sleeps=false")
        path = base_path(path)
        self.version: int | None = None
        self.sleeps, self._asleep = bool(sleeps), False
        self.recompute = recompute
        self._lora_request: Any = None
        self.unwanted: set[int] = set()
        defaults: dict[str, Any] = {
            "enable_prefix_caching": True,
            "gpu_memory_utilization": GPU_SHARE,
            "use_tqdm_on_load": False,
            # token ids in and out; only guided sampling needs text
            "skip_tokenizer_init": not has_tokenizer(path),
            **sleeping(self.sleeps),
            **args_for(path),
        }
        if current_platform.is_cpu():
            dtype = "float32" if dtype == "auto" else dtype
            defaults |= CPU_ARGS
            mend_cpu_build()
        args = {name: value for name, value in (args or {}).items() if value is not None}
        check_args(args)
        self._has_draft = "speculative_config" in args
        self._bound = bounded(args, most_tokens)
        self._new = partial(LLM, path, dtype=dtype, **defaults | self._bound | args, **ARGS)
        self._llm: Any = None
        self._turns = Turns(None)
        self.context: int | None = None
        self._path = path
        if sight is not None:
            sight.lent(self)
        # on a GPU without a given share it is built when `fit` has told it what the run leaves, at the first load
        fixed = current_platform.is_cpu() or bool(args.keys() & {"gpu_memory_utilization", "kv_cache_memory_bytes"})
        self._fits, self._given_sleeps = not fixed, sleeps
        if devices * nodes == 1 and fixed:
            self._open()

    def fit(self, room: Room) -> dict[str, int]:
        """Choose the share of the GPU and whether to sleep by what the run leaves, unless the arguments say
        so. Called before the first load. Returns the bytes that are held in a rollout alone ("rollout"), and
        always ("")."""
        taken = self._new.keywords
        if self._fits:
            taken["gpu_memory_utilization"], self.sleeps = room.share(self._given_sleeps)
            taken |= sleeping(self.sleeps)
        elif cache := taken.get("kv_cache_memory_bytes"):
            taken["gpu_memory_utilization"] = (room.weights + WORK + cache) / room.total
        if room.lacks(share := taken["gpu_memory_utilization"]):
            way_out = "set engine=vllm_shared or engine=transformers, or what needs less memory (docs/hardware.md)"
            log.warning("engine: the run leaves vLLM %.0f%% of the GPU, which is too little: %s", 100 * share, way_out)
        size, stays = round(share * room.total), {} if self.apart else {"": room.weights}  # the policy's own
        return stays | {"rollout": size - sum(stays.values())} if self.sleeps else {"": size}

    def _open(self) -> None:
        """Build vLLM, on all ranks at the same time."""
        launched = {}
        if distributed.world_size() > 1:  # vLLM learns its rank as from torchrun, and uses one device
            launched = {"distributed_executor_backend": "external_launcher"}
            device = torch.cuda.current_device() if torch.cuda.is_available() else 0
            os.environ |= {"RANK": str(distributed.rank()), "LOCAL_RANK": str(device)}
        # delete an engine of an earlier run now, with torch's process group, not while this one is built
        gc.collect()
        # the constructor reseeds every global generator
        with first_said(f"starting vLLM with {self._path}"), isolate_rng(), short_errors(building=True):
            self._llm = self._new(**launched)
        self._turns.llm = self._llm
        config = self._llm.llm_engine.model_config
        self.context, self.dtype = config.max_model_len, config.dtype
        self._eos = eos_token_ids(self._path, getattr(config.hf_text_config, "eos_token_id", None))

    def play_on(self, stream: torch.cuda.Stream) -> None:
        """Compute on this stream of CUDA, whichever thread asks."""
        self._turns.stream = stream

    @property
    def in_flight(self) -> bool:
        """Whether it takes new weights while it samples, see `Engine`: not if their memory is the policy's,
        or is freed."""
        return self.apart and not self.sleeps

    def load_weights(self, model: nn.Module, version: int) -> None:
        """Copy all weights of `model`, whose parameters stay unchanged to the bit. Unfinished completions
        continue with them."""
        if version == self.version:
            return
        if self._llm is None:
            self._open()
        check_head(model, self._llm.llm_engine.model_config.head_dtype, self.dtype)
        with self._turns.between_steps():
            if self._turns.busy and not self.in_flight:
                raise RuntimeError(f"{type(self).__name__} takes no new weights while it samples")
            self._wake()
            self._take(model)
            self._llm.update_weight_version(str(version))
            # with recompute=false running requests hold blocks, which vLLM does not clear: no later request has their salt
            cleared = self._llm.reset_prefix_cache(reset_running_requests=self.recompute)
            if not cleared and not self._turns.busy:
                raise RuntimeError("vLLM did not clear its prefix cache")
            self.version = version

    def _take(self, model: nn.Module) -> None:
        self._copy(as_in_files(model))

    @torch.no_grad()
    def _copy(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        self._llm.start_weight_update()
        for bucket in buckets(tensors):
            self._llm.update_weights({"update_info": {"tensors": bucket}})
        self._llm.finish_weight_update()
        # the caller may change or free what was copied, and its own stream does not wait for this one
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()

    def sample(
        self,
        prompts: Prompts,
        sampling: Sampling,
        seeds: Sequence[int],
        done: Done | None = None,
        temperatures: Sequence[float] | None = None,
    ) -> list[Completion]:
        """Sample as `Engine.sample`. A completion that reaches the end of the context ends there, with finish
        "length"."""
        if self._asleep:
            raise UserError("vLLM sleeps and has freed its weights: call load_weights before the next sample")
        if self._has_draft and (sampling.min_p or (sampling.vllm or {}).get("logit_bias")):
            raise UserError("vLLM takes no min_p or logit_bias beside engine.args.speculative_config: leave one out")
        plain = params_of(prompts, sampling, self._eos, self.context, bool(self._bound))
        each = params_of_each(plain, len(prompts), temperatures)
        params = [self._params(own, seed) for own, seed in zip(each, seeds, strict=True)]
        completions: list[Completion | None] = [None] * len(prompts)

        def hand_over(i: int, request: Any) -> None:
            out = request.outputs[0]
            ids, logprobs = tuple(out.token_ids), tuple(out.logprobs.logprobs)
            completions[i] = Completion(ids, logprobs, out.finish_reason, spans_to_versions(out.weight_versions))
            if done is not None:
                done(i, completions[i])

        # not LLM.generate: it holds vLLM until its last request ends, and new weights or other threads would wait
        self._turns.run(partial(self._enqueue, prompts, params), self.unwanted, hand_over)
        return completions

    def _enqueue(self, prompts: Prompts, params: Any) -> list[str]:
        salt = {} if self.recompute else {"cache_salt": f"version {self.version}"}
        inputs = [{"prompt_token_ids": list(prompt), **salt} for prompt in prompts]
        return self._llm.enqueue(inputs, params, lora_request=self._lora_request, use_tqdm=False)

    def _params(self, plain: Mapping[str, Any], seed: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        arguments = {**plain, "seed": seed, "flat_logprobs": True}
        guided = plain["structured_outputs"]
        texts = ["guided"] * bool(guided) + [name for name in ("stop", "bad_words") if name in plain]
        if texts and self._llm.llm_engine.tokenizer is None:
            raise UserError(f"sampling.{texts[0]} needs text, and the model's folder has no tokenizer: add one to it")
        if guided:
            arguments["structured_outputs"] = StructuredOutputsParams(**guided)
        return SamplingParams(**arguments)

    def score(self, sequences: Prompts, top: int) -> list[list[dict[int, float]]]:
        """Score as an `Engine` may: as prompts, each with a token after it."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=top, detokenize=False)
        outputs: dict[int, Any] = {}
        self._turns.run(partial(self._enqueue, sequences, params), set(), outputs.__setitem__)
        # by id
        places = [[place or {} for place in out.prompt_logprobs] for _, out in sorted(outputs.items())]
        return [[{i: p.logprob for i, p in place.items()} for place in sequence] for sequence in places]

    def sleep(self) -> None:
        """Free GPU memory until the next load, if `sleeps` is set."""
        if self.sleeps and not self._asleep:
            with self._turns.between_steps():
                self._release()
            # None: the next load copies weights whatever their version
            self._asleep, self.version = True, None

    def _release(self) -> None:
        self._llm.sleep(level=2)

    def _wake(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    def close(self) -> None:
        """Delete the engine, at the end of a run, since that destroys torch's default process group. Several
        ranks still need their group, so that they keep the engine until they end."""
        if distributed.world_size() == 1:
            self._llm = self._turns = None


def sleeping(sleeps: bool) -> dict[str, bool]:
    """Return vLLM's arguments for an engine that sleeps, or not. With async scheduling a step launched ahead
    would still run when it goes to sleep."""
    return {"enable_sleep_mode": True, "async_scheduling": False} if sleeps else {"enable_sleep_mode": False}


def spans_to_versions(spans: Sequence[Any] | None) -> tuple[int, ...] | None:
    """Return the version of the weights that drew each token, from vLLM's spans; None before the first
    load."""
    if not spans or spans[0].version == "default":
        return None
    return tuple(int(span.version) for span in spans for _ in range(span.start, span.end))


def has_tokenizer(path: str) -> bool:
    """Return whether a model's folder has a tokenizer; True for a hub id."""
    return not Path(path).is_dir() or (Path(path) / "tokenizer_config.json").exists()


def args_for(path: str) -> dict[str, Any]:
    """Return the arguments that a model needs so that vLLM computes what the trainer does.

    A multimodal model reads text only. Where positions change beyond the original context, that is the
    longest one: otherwise vLLM gives all positions the frequencies for long texts, and the trainer gives them
    those for short ones. Where layers have a state, vLLM keeps no beginnings of prompts, because its CPU
    build refuses to.
    """
    try:
        config = AutoConfig.from_pretrained(path)
    except Exception:  # vLLM will say what is wrong with it
        return {}
    text = config.get_text_config()
    args: dict[str, Any] = {}
    if (limit := context_of(config)) != getattr(text, "max_position_embeddings", None):
        args["max_model_len"] = limit
    if is_multimodal(config):
        args["language_model_only"] = True
    if not ATTENTION.issuperset(getattr(text, "layer_types", None) or ()):
        args["enable_prefix_caching"] = False
    return args
