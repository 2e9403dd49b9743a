"""Refuses rollouts ahead of the update that cannot be had, and chooses how they are played."""

import logging
from inspect import signature
from typing import Any

from torch import nn

from grpo.engines.only_vllm import NOT_APART
from grpo.extras.ahead.chain import MIXED, Chain
from grpo.extras.ahead.pool import Pool
from grpo.rollout.draw import Everything, is_source
from grpo.rollout.rollouts import Rollouts
from grpo.system.distributed import is_sharded
from grpo.system.errors import UserError
from grpo.system.stopping.stop import Stop

log = logging.getLogger(__name__)


def rollouts_ahead(rollouts: Rollouts, objects: dict[str, Any], stop: Stop) -> Chain | Pool | None:
    """Return what plays rollouts beside the update; None with rollout.ahead=0. Raises UserError."""
    plan = rollouts.plan
    if not plan.ahead:
        return None
    if plan.bound < plan.ahead:
        line = f"rollout.max_staleness={plan.max_staleness} is below rollout.ahead={plan.ahead}"
        raise UserError(f"{line}, by which samples are old in any case: raise it, or lower rollout.ahead")
    if not getattr(rollouts.engine, "apart", False):
        raise UserError(f"rollout.ahead={plan.ahead} {NOT_APART}")
    if plan.order == "exact":
        return Chain(rollouts, objects, stop)
    if reason := one_by_one(rollouts):
        log.info("rollout.order=ready: rollouts are played one after another, because %s", reason)
        return Chain(rollouts, objects, stop)
    return Pool(rollouts, stop)


def one_by_one(rollouts: Rollouts) -> str | None:
    """Return why several rollouts cannot be played at once; None if they can."""
    engine, play, task = rollouts.engine, rollouts.play, rollouts.task
    if not (getattr(engine, "concurrent", False) and getattr(engine, "in_flight", False)):
        return f"{type(engine).__name__} cannot sample for several rollouts while it takes new weights"
    if is_source(rollouts.sampler):
        return "a source gives whole rollouts"
    if hasattr(rollouts.sampler, "observe"):
        return f"the sampler {type(rollouts.sampler).__name__} chooses prompts by the rewards of the rollout before"
    if type(rollouts.selection) is not Everything:
        return f"selection {type(rollouts.selection).__name__} decides by a whole rollout which prompts to play next"
    if getattr(task, "state_dict", dict)():
        return "the task or its reward has a state, which changes from group to group"
    if "finished" not in signature(play).parameters:
        return "this `play` does not report groups as they are finished"
    return None


def load_ahead(ahead: Chain | Pool | None, state: dict[str, Any], learned: int) -> None:
    """Give the samples ahead of a checkpoint, after `learned` rollouts, to those that play. Raises UserError for none."""
    if ahead:
        ahead.load_state_dict(state, learned)
    elif "flying" in state.get("ahead", {}):
        raise UserError(MIXED)


def give_policy(ahead: Chain | Pool | None, policy: nn.Module) -> None:
    """Let rollouts ahead know the policy. Raises UserError for a sharded one that would have to be copied."""
    if isinstance(ahead, Chain):
        ahead.policy = policy
    if isinstance(ahead, Chain) and not ahead.between and not ahead.in_flight and is_sharded(policy):
        line = f"rollout.ahead={ahead.plan.ahead} order={ahead.plan.order} copies the weights of each version"
        raise UserError(
            f"{line}, and a sharded policy cannot be copied: set rollout.ahead=1, or order=ready with engine=vllm_server"
        )
