"""Which weights are served: a model's folder, and maybe an adapter on it.

Nothing is kept but the paths: each change reads both again. All of it runs in the engine's thread, between batches.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from peft import PeftModel
from torch import nn

from grpo.engines.protocol import Engine
from grpo.models.pretrained import Pretrained
from grpo.system.errors import UserError, told


@dataclass(frozen=True)
class Adapter:
    path: str
    name: str


class ServedWeights:
    """device: where the model is put before the engine is given it. load_count: of adapters, so far."""

    def __init__(self, pretrained: Pretrained, device: torch.device | str) -> None:
        self.pretrained, self.device = pretrained, device
        self.adapter: Adapter | None = None
        self.load_count = 0
        self._shapes: dict[str, torch.Size] = {}

    def read(self, engine: Engine, path: str | None = None) -> int:
        """The folder's weights, as they are now; an adapter stays on. path: another folder, of the same model.

        Returns the version. As the two below it raises UserError, with the weights as they were, where a folder cannot be
        read or is of another model.
        """
        pretrained = self.pretrained
        if path is not None:
            if not any((Path(path) / name).is_file() for name in ("config.json", "adapter_config.json")):
                raise UserError(f"path={path} is no model: give a Hugging Face folder, with its config.json")
            pretrained = replace(pretrained, path=path, revision=None)
        return self._give(engine, pretrained, self.adapter)

    def put_on(self, engine: Engine, adapter: Adapter) -> int:
        """An adapter instead of the one there is, if any. Returns the version."""
        version = self._give(engine, self.pretrained, adapter)
        self.load_count += 1
        return version

    def take_off(self, engine: Engine) -> int:
        if self.adapter is None:
            raise UserError("there is no adapter to unload")
        return self._give(engine, self.pretrained, None)

    def _give(self, engine: Engine, pretrained: Pretrained, adapter: Adapter | None) -> int:
        model = self._model(pretrained, adapter)
        version = 0 if engine.version is None else engine.version + 1
        engine.load_weights(model.to(self.device), version)
        self.pretrained, self.adapter = pretrained, adapter
        return version

    def _model(self, pretrained: Pretrained, adapter: Adapter | None) -> nn.Module:
        path = pretrained.path
        try:
            model = pretrained.model()
            shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
            if adapter:
                path = adapter.path
                model = PeftModel.from_pretrained(model, path).eval()
        except UserError:
            raise
        except Exception as error:  # files may be broken in any way
            raise UserError(f"{path} cannot be loaded: {told(error)}") from error
        self._shapes = self._shapes or shapes
        if shapes != self._shapes:
            raise UserError(f"{pretrained.path} is another model than the one served: start a server for it")
        return model
