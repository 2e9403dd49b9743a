"""Builds the engine of a configuration, and what plays rollouts beside the update."""

from contextlib import suppress
from pydoc import locate
from typing import TYPE_CHECKING

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from grpo.config.appendix import of_appendix
from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.context import Bound
from grpo.engines.protocol import Engine
from grpo.env.intake import asked_for
from grpo.system.errors import UserError

if TYPE_CHECKING:  # evaluations need neither
    from grpo.rollout.lookahead import Ahead
    from grpo.rollout.rollouts import Rollouts
    from grpo.system.stopping.stop import Stop


def engine_of(config: DictConfig, most_tokens: Bound) -> Engine:
    """Return the engine of the configuration.

    most_tokens: returns the tokens of the longest sequence that the program will sample, or None if there is no bound. Only an
    engine with an argument of this name is given it; so are `head_dtype`, that of the model, and `sight`, how it sees. Raises
    UserError if the model sees, and the engine does not.
    """
    of_appendix("scores.door.follow_scores", tuple)()
    arguments = {}
    offered = {"most_tokens": most_tokens, "head_dtype": OmegaConf.select(config, "model.head_dtype")}
    if vision := OmegaConf.select(config, "model.vision"):
        model = instantiate(config.model)
        offered["sight"] = model.eyes(model)
    with suppress(Exception):  # of an engine that cannot be imported: Hydra says why
        target = locate(config.engine._target_)
        arguments = asked_for(target, **offered)
        vision = vision and "sight" not in arguments and TransformersEngine not in getattr(target, "__mro__", ())
    if vision:
        line = f"model.vision={config.model.vision}: this engine takes no pictures"
        raise UserError(f"{line}: set engine=transformers or engine=vllm, or model.vision=null")
    return instantiate(config.engine, **arguments)


def ahead_of(rollouts: "Rollouts", stop: "Stop") -> "Ahead | None":
    """Return what plays rollouts beside the update; None with rollout.ahead=0."""
    if not rollouts.plan.ahead:
        return None
    from grpo.extras.ahead.check import rollouts_ahead

    return rollouts_ahead(rollouts, stop)
