"""Maps old module names to new ones, for runs, checkpoints, configurations and commands from before the modules were moved.

A checkpoint pickles the names of classes, a saved config.yaml has `_target_`s, and commands are written `python -m grpo.report`.
Importing an old name gives the class and function objects of the new name.
"""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import Any

_ROOMS = {
    "system": "errors workers ports memory ranks=distributed coroutines=calls guard=child",
    "env": "messages rl=types tools toolcalls=tool_parsers renderer",
    "data": "rows=dataset",
    "rewards": "rowtask=row_task rewards.names=resolve rewards.classifier=reward_model",
    "rewards.math": "answers arithmetic grading",
    "rewards.code": "programs sandbox confine=sandbox_child",
    "objectives": "advantage loss kl correction=importance entropy algorithm",
    "models": "policy logprobs attention=packed_attention layout=packing probe=trusted recompute=gradient_checkpointing"
    " masters=master_weights optimizers",
    "engines": "engine=protocol",
    "engines.builtin": "engines.transformers=engine engines.drawing=sampler engines.pool=kv_cache engines.padded",
    "engines.vllm": "engines.vllm_lora=lora engines.vllm_shared=shared engines.transfer=transfer",
    "rollout": "play=episodes scoring=rewarding collate records=samples_table",
    "evaluation": "scorecard=resumable statistics",
    "runs": "manifest card=model_card loggers trackers comparison plots anatomy show=html report",
    "training": "module trainer forecast callbacks",
    "apps.sweep": "sweep jobs",
    "apps": "cli launch prefetch tiny=demo_model serve rewards.__main__=profile_rewards",
}
MODULES = {  # old name: new name
    f"grpo.{old}": f"grpo.{room}.{new or old.rpartition('.')[2]}"
    for room, names in _ROOMS.items()
    for old, _, new in (name.partition("=") for name in names.split())
}
# modules that were split or became a room -> the modules that have their names now
SPLIT = {
    "grpo.env.tokens": ("grpo.objectives.batch",),
    "grpo.rollout": ("grpo.rollout.types", "grpo.rollout.metrics", "grpo.system.seeds"),
    "grpo.data": ("grpo.data.prompts", "grpo.rollout.prompt_limit"),
    "grpo.rewards": ("grpo.rewards.combined",),
    "grpo.evaluation": ("grpo.evaluation.evaluator", "grpo.evaluation.metrics"),
    "grpo.runs": ("grpo.runs.runs",),
    "grpo.tokens": ("grpo.env.tokens", "grpo.objectives.batch"),
    "grpo.callbacks.ahead": ("grpo.rollout.ahead",),
    "grpo.policy": ("grpo.models.pretrained", "grpo.models.policy"),
    "grpo.module": ("grpo.training.module", "grpo.training.optimization", "grpo.training.meter"),
    "grpo.engines.vllm": ("grpo.engines.vllm.engine",),
    "grpo.engines.vllm_server": ("grpo.engines.vllm_server.engine",),
}


def module_today(name: str) -> str:
    """Return the current name of a module, which is the given name if it was not moved."""
    parts = name.split(".")
    for i in range(len(parts), 1, -1):
        if new := MODULES.get(".".join(parts[:i])):
            return ".".join([new, *parts[i:]])
    return name


def today(name: str) -> str:
    """Return the current dotted name of a class or function."""
    module, _, attribute = name.rpartition(".")
    for place in SPLIT.get(module, ()):
        if hasattr(import_module(place), attribute):
            return f"{place}.{attribute}"
    return f"{module_today(module)}.{attribute}"


def door(room: str) -> Any:
    """Return a `__getattr__` for a room that was a module, so that the names of that module are still found."""

    def found(name: str) -> Any:
        place, _, attribute = (room, "", name) if name.startswith("__") else today(f"{room}.{name}").rpartition(".")
        if place == room:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        return getattr(import_module(place), attribute)

    return found


class _Loader(Loader):
    """Loads an empty module under an old name. Its attributes are looked up in the current modules."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = door(module.__name__)

    def get_code(self, name: str) -> Any:
        """Return the code of the current module, which `python -m` with the old name runs."""
        return find_spec(module_today(name)).loader.get_code(module_today(name))


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        new = module_today(name)
        if new != name and (there := find_spec(new)) is not None:
            package = there.submodule_search_locations is not None
            return spec_from_loader(name, _Loader(), origin=there.origin, is_package=package)
        return spec_from_loader(name, _Loader()) if name in SPLIT else None


sys.meta_path.append(_Finder())  # the last one: an old name that is a module today is that module
