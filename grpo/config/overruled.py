"""Values that somebody chose and that are not in effect: a line for each."""

import re
from collections.abc import Iterator, Sequence

from omegaconf import DictConfig, OmegaConf

from grpo.config.composing import CONF, literal
from grpo.system.ranges import flat

ADAMW = "${oc.select:adamw.lr,"  # a learning rate that follows what recipes, adapters and experiments have for AdamW
# optimizers that it suits
ALIKE = (
    "torch.optim.AdamW",
    "grpo.extras.optimizers.adamw_8bit.adamw_8bit",
    "transformers.Adafactor",
    "grpo.extras.optimizers.muon.muon",
)
IDLE = {  # keys, or beginnings of keys, by the one without which they do nothing
    "rollout.ahead": ("rollout.order", "rollout.max_staleness", "rollout.stale", "rollout.patience"),
    "algo.kl.coef": ("algo.kl.",),
    "algo.kl.sync_every": ("algo.kl.sync_alpha",),
    "algo.entropy.target": ("algo.entropy.step", "algo.entropy.most"),
    "algo.teacher.coef": ("algo.teacher.",),
    "callbacks.checkpoint.history": ("callbacks.checkpoint.history_keep",),
}


INSTEAD = {  # keys that do nothing beside another one that has a value
    "optim.schedule.num_warmup_steps": "optim.warmup_ratio",
    "rollout.num_rollouts": "rollout.epochs",
}

ONLY = {  # keys that do something beside these values of another one alone
    "teacher.alpha": ("teacher.weights", ("ema",)),
    "teacher.success": ("teacher.context", ("sibling",)),
    "teacher.column": ("teacher.context", ("solution", "feedback")),
    "teacher.prompt": ("teacher.context", ("solution", "feedback", "sibling")),
}


def not_in_effect(config: DictConfig, arguments: Sequence[str]) -> Iterator[str]:
    """Yield a line for each value of the command line that does nothing: of an option, where a task, a recipe or an experiment
    sets it too, and of a key beside one that is off. And one for a learning rate of AdamW's that another optimizer takes."""
    values = flat(OmegaConf.to_container(config))
    optimizer, rate = values.get("optim.optimizer._target_"), values.get("optim.optimizer.lr")
    if str(rate).startswith(ADAMW) and optimizer not in ALIKE and "adamw" in config:
        line = f"optim.optimizer.lr={config.optim.optimizer.lr} was chosen for AdamW, and {optimizer} takes it"
        yield f"{line}: set optim.optimizer.lr, or lr in an option of optim"
    named = {word: re.split("[=@]", word.lstrip("+~"))[0].replace("/", ".") for word in arguments}
    for word, place in named.items():
        for other, keys in IDLE.items():
            if place != other and place.startswith(keys) and place in values and not values.get(other, True):
                yield f"{word} has no effect while {other}={literal(values[other])}"
        other = INSTEAD.get(place)
        if values.get(other) is not None:
            yield f"{word} has no effect while {other}={literal(values[other])}"
        other, used = ONLY.get(place, ("", ()))
        if other in values and values[other] not in used:
            yield f"{word} has no effect while {other}={values[other] or 'null'}"
        file = CONF / f"{word.lstrip('+').replace('=', '/')}.yaml"
        if not file.is_file():
            continue
        own = OmegaConf.load(file)
        if "# @package _global_" in file.read_text(encoding="utf-8"):
            own = own.get(place) or {}
        for key, value in flat(OmegaConf.to_container(OmegaConf.create({"at": own}))).items():
            key = place + key.removeprefix("at")
            typed = any(f"{key}.".startswith(f"{name}.") for name in named.values() if name != place)
            if key in values and values[key] != value and not typed:
                line = f"{word} has {key}={literal(value)}, but a task, a recipe or an experiment sets {literal(values[key])}"
                yield f"{line}: add {key}={literal(value)} to keep it"
