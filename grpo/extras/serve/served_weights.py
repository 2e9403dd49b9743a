"""The weights that are served: the folder of a model, and optionally an adapter.

Only the paths are kept, so each change reads both again. Everything here runs in the engine's thread, between batches.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from grpo.engines.protocol import Engine
from grpo.models.pretrained import Pretrained
from grpo.system.errors import UserError, error_line


class Outside(UserError):
    """Weights are not in a folder from which the server may load them."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: its PEFT folder and its name."""

    path: str
    name: str


class ServedWeights:
    """The model and the adapter that an engine serves. Mutable: requests change them.

    device: the device of the model before it goes to the engine.
    folders: other weights may be loaded from these folders and below; always from the folder of the model.
    load_count: number of adapters loaded so far.
    """

    def __init__(self, pretrained: Pretrained, device: torch.device | str, folders: Sequence[str] = ()) -> None:
        self.pretrained, self.device = pretrained, device
        self.folders = [Path(folder).resolve() for folder in (pretrained.path, *folders)]
        self.adapter: Adapter | None = None
        self.load_count, self.version = 0, -1  # an engine that sleeps may lose the version with its weights
        self._shapes: dict[str, torch.Size] = {}

    def allowed(self, path: str) -> str:
        """Return the path of a folder with its links resolved. Raises Outside unless weights may be loaded from it."""
        with suppress(OSError, ValueError, RuntimeError):  # no path at all, or a loop of links
            folder = Path(path).resolve()
            if any(folder.is_relative_to(parent) for parent in self.folders):
                return str(folder)
        raise Outside(
            f"{path[:200]!r} is not in a folder with weights for this server: allow it with weights_from=[FOLDER]"
        )

    def read(self, engine: Engine, path: str | None = None) -> int:
        """Give the engine the weights that are in the folder now, with the current adapter, and return their version.

        path: another folder with the same model.
        Like the two methods below it raises UserError, and keeps the old weights, if a folder cannot be read or has a different
        model.
        """
        pretrained = self.pretrained
        if path is not None:
            if not any((Path(path) / name).is_file() for name in ("config.json", "adapter_config.json")):
                raise UserError(f"path={path} is not a model: give a Hugging Face folder with config.json")
            pretrained = replace(pretrained, path=path, revision=None)
        return self._give(engine, pretrained, self.adapter)

    def put_on(self, engine: Engine, adapter: Adapter) -> int:
        """Serve the model with this adapter, which replaces any other, and return the version of the weights."""
        version = self._give(engine, self.pretrained, adapter)
        self.load_count += 1
        return version

    def take_off(self, engine: Engine) -> int:
        """Serve the model without its adapter and return the version of the weights."""
        if self.adapter is None:
            raise UserError("no adapter is loaded")
        return self._give(engine, self.pretrained, None)

    def _give(self, engine: Engine, pretrained: Pretrained, adapter: Adapter | None) -> int:
        model = self._model(pretrained, adapter)
        engine.load_weights(model.to(self.device), self.version + 1)
        self.pretrained, self.adapter, self.version = pretrained, adapter, self.version + 1
        return self.version

    def _model(self, pretrained: Pretrained, adapter: Adapter | None) -> nn.Module:
        path = pretrained.path
        try:
            model = pretrained.model()
            shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
            if adapter:
                from peft import PeftModel  # takes seconds to import

                path = adapter.path
                model = PeftModel.from_pretrained(model, path).eval()
        except UserError:
            raise
        except Exception as error:  # broken files raise many types
            raise UserError(f"{path} cannot be loaded: {error_line(error)}") from error
        self._shapes = self._shapes or shapes
        if shapes != self._shapes:
            raise UserError(f"{pretrained.path} is a different model from the one served: start another server for it")
        return model
