"""Finds the arms of a sweep that cannot be, before its first job: the checks of a run that need no model."""

from collections.abc import Mapping
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError

from grpo.config.early import check_sources
from grpo.config.explain import explain
from grpo.system.errors import UserError


def check_arms(arms: Mapping[str, DictConfig]) -> None:
    """Raises UserError for the first arm that its run would refuse. arms: the configuration of each, by a label for people."""
    for check, names in CHECKED.items():  # the second imports torch
        seen: list[Any] = []
        for label, config in arms.items():
            try:
                nodes = [config[name] for name in names]
                plain = [node and OmegaConf.to_container(node, resolve=True) for node in nodes]
                if plain not in seen:
                    check(config)
                seen.append(plain)
            except InterpolationResolutionError:
                continue  # known only in the job
            except Exception as error:
                if (line := explain(error, "train")) is None:
                    raise
                raise UserError(f"the arm {label} cannot run, and no job has begun: {line}") from error


def check_built(config: DictConfig) -> None:
    """Build what needs neither rows nor a model, and check that it fits together. Raises UserError."""
    from grpo.apps.try_algorithm import check_algorithm

    plan, algorithm = instantiate(config.rollout), instantiate(config.algo)
    instantiate(config.eval)
    check_algorithm(algorithm, plan.prompts, plan.group_size, plan.ahead, bool(config.get("critic")))


# what each check reads
CHECKED = {check_sources: ("task", "source", "model"), check_built: ("rollout", "algo", "eval", "critic")}
