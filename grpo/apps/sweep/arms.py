"""Finds the arms of a sweep that cannot be, before its first job: the checks of a run that need no model."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from grpo.config.explain import explain
from grpo.system.errors import UserError

BUILT = ("rollout", "eval", "algo")  # what needs neither rows nor a model


def check_arms(arms: Mapping[str, DictConfig]) -> None:
    """Raises UserError for the first arm that its run would refuse. arms: the configuration of each, by a label for people."""
    from grpo.objectives.checks import check_algorithm  # imports torch

    seen: set[str] = set()
    for label, config in arms.items():
        try:
            text = str([OmegaConf.to_container(config[name], resolve=True) for name in (*BUILT, "module")])
            if text in seen:
                continue
            seen.add(text)
            plan, _, algorithm = (instantiate(config[name]) for name in BUILT)
            with silent("grpo.objectives.checks"):  # the job itself gives the advice
                check_algorithm(algorithm, plan.prompts, plan.group_size, plan.ahead, "critic" in config.module)
        except Exception as error:
            if (line := explain(error, "train")) is None:
                raise
            raise UserError(f"{label} cannot be trained, and no job has begun: {line}") from error


@contextmanager
def silent(name: str) -> Iterator[None]:
    """Hold back the warnings of a logger."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
