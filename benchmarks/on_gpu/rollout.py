"""Measure rollouts: sampled tokens per second of the built-in engine and of vLLM, and the seconds in which vLLM takes weights.

Every engine samples the same groups, and every answer has the length of the limit: a model with random weights has no end token.
"""

from importlib.util import find_spec
from statistics import median
from tempfile import TemporaryDirectory

from on_gpu.jobs import Skipped


def rollout(name: str, engine: str, note, overrides: list[str]) -> None:
    """Measure an engine: builtin or vllm."""
    if engine == "vllm" and not find_spec("vllm"):
        raise Skipped("vLLM is not installed")
    from on_gpu.models import SHAPES
    from on_gpu.update import random_model, settings

    shape = SHAPES[name]
    with TemporaryDirectory() as folder:
        shape.config.save_pretrained(folder)
        config = settings(shape, folder, overrides)
        measure(shape, random_model(config), built(engine, folder, shape), note)


def built(engine: str, folder: str, shape):
    """Return the engine of this name. folder: has the model's config.json."""
    if engine == "builtin":
        from grpo.engines.builtin.engine import TransformersEngine
        from on_gpu.update import CACHE

        return TransformersEngine(CACHE)
    from grpo.engines.vllm.engine import VLLMEngine
    from on_gpu.device import DTYPE

    args = {"load_format": "dummy", "max_model_len": shape.prompt + shape.answer}
    return VLLMEngine(folder, dtype=DTYPE, args=args)


def measure(shape, model, engine, note) -> None:
    """Time an engine: its first rollout, in which it may compile, then others; and its loads of weights, if it copies them."""
    import torch

    from grpo.engines.protocol import Sampling
    from on_gpu.device import clock, peaks, precision

    generator = torch.Generator().manual_seed(0)
    size = (shape.prompts, shape.prompt)
    asked = (
        torch.randint(3, shape.config.vocab_size, size, generator=generator).repeat_interleave(shape.group, 0).tolist()
    )

    def sampled(turn: int, limit: int) -> tuple[float, int]:
        seeds = range(turn * len(asked), (turn + 1) * len(asked))
        begun = clock()
        with precision():
            done = engine.sample(asked, Sampling(limit), seeds)
        return clock() - begun, sum(len(completion.ids) for completion in done)

    begun = clock()
    engine.load_weights(model, 0)
    loaded = clock() - begun
    first, _ = sampled(0, min(32, shape.answer))
    note(warm_up_s=loaded + first)
    found: dict = {}
    with peaks(found):
        seconds, tokens = sampled(1, shape.answer)
    note(**found, tokens_per_s=tokens / seconds, rollout_s=seconds, step_ms=1000 * seconds / shape.answer)
    if getattr(engine, "apart", False):
        times = []
        for version in (1, 2, 3):
            begun = clock()
            engine.load_weights(model, version)
            times.append(clock() - begun)
        note(sync_s=median(times))
