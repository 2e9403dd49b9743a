"""A run whose memory is foreseen, for the tests of the forecast."""

from pathlib import Path

import pytest
from conftest import compose_config
from hydra.utils import instantiate
from omegaconf import DictConfig

from grpo.engines.builtin.engine import TransformersEngine
from grpo.extras.forecast.sizes import Sizes
from grpo.models.policy import with_adapter
from grpo.training.module import GRPOModule

LINUX = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux counts peaks")


class Run:
    """The parts of a run, built as in train.py."""

    def __init__(self, path: str, *overrides: str) -> None:
        self.config: DictConfig = compose_config("model=path", f"model.path={path}", "output_dir=.", *overrides)
        self.plan, self.pretrained = instantiate(self.config.rollout), instantiate(self.config.model)
        self.optim = instantiate(self.config.optim)  # before tensors are without memory

    def module(self, model) -> GRPOModule:
        policy = with_adapter(model, instantiate(self.config.adapter))
        return instantiate(self.config.module)(policy, instantiate(self.config.algo), self.optim, 1.0, 10, 0)

    def forecast(self, prompt_tokens: int, engine=None, **settings) -> dict[str, int | None]:
        sizes = Sizes(self.module, self.pretrained, self.plan, engine or TransformersEngine(), lambda: prompt_tokens)
        return {part.name: part.size for part in sizes.counted(prompt_tokens, **settings)}
