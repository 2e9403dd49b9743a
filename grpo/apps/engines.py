"""Builds the engine of a configuration."""

from contextlib import suppress
from pydoc import locate

from hydra.utils import instantiate
from omegaconf import DictConfig

from grpo.engines.context import Bound
from grpo.engines.protocol import Engine
from grpo.env.intake import asked_for


def engine_of(config: DictConfig, most_tokens: Bound) -> Engine:
    """Return the engine of the configuration.

    most_tokens: returns the tokens of the longest sequence that the program will sample, or None if there is no bound. Only an
    engine with an argument of this name is given it.
    """
    arguments = {}
    with suppress(Exception):  # of an engine that cannot be imported: Hydra says why
        arguments = asked_for(locate(config.engine._target_), most_tokens=most_tokens)
    return instantiate(config.engine, **arguments)
