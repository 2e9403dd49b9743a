"""Refuses rollouts ahead of the update that cannot be had, and chooses how they are played."""

import logging
from inspect import signature

from grpo.engines.only_vllm import NOT_APART
from grpo.extras.ahead.chain import Chain
from grpo.extras.ahead.pool import Pool
from grpo.rollout.draw import Everything, is_source
from grpo.rollout.rollouts import Rollouts
from grpo.system.errors import UserError
from grpo.system.stopping.stop import Stop

log = logging.getLogger(__name__)


def rollouts_ahead(rollouts: Rollouts, stop: Stop) -> Chain | Pool:
    """Return what plays rollouts beside the update. Raises UserError."""
    plan = rollouts.plan
    if not getattr(rollouts.engine, "apart", False):
        raise UserError(f"Plan.ahead={plan.ahead} {NOT_APART}")
    if plan.order == "exact":
        return Chain(rollouts, stop)
    if reason := one_by_one(rollouts):
        log.info("rollout.order=ready: rollouts are played one after another, because %s", reason)
        return Chain(rollouts, stop)
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
        return f"selection {type(rollouts.selection).__name__} decides by a whole rollout"
    if getattr(task, "state_dict", dict)():
        return "the task or its reward has a state, which changes from group to group"
    if "finished" not in signature(play).parameters:
        return "this `play` does not report groups as they are finished"
    return None
