"""Resuming a run: its own configuration with the command line on top, and a line for each change that matters."""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.resolvers import oc

from grpo.config.composing import composed, literal
from grpo.config.moved import new_name
from grpo.data.rows import fingerprint
from grpo.rollout.types import Plan
from grpo.system.errors import UserError, one_line
from grpo.system.files import write_text
from grpo.system.output.secrets import MASK, masked_values
from grpo.system.ranges import flat

log = logging.getLogger(__name__)

# of each command, not of the run
OWN = ("output_dir", "ckpt_path", "replay", "resume", "trust", "max_time", "report", "export")
GUARDED = ("task", "model", "adapter", "algo", "callbacks")  # a change of these needs resume.changes=allow
NO_SAMPLES = (  # settings that no sample depends on, and `rollout`, which is compared by itself
    *("optim", "callbacks", "eval", "logger", "trainer", "strategy", "preflight", "resume", "deployment", "engine"),
    *("rollout", "teacher", "critic", "module", "alarms", "forecast", "device"),
)
SHOWN = ("grpo.training.callbacks.", "grpo.extras.")  # callbacks that do not change what a run learns
LATER = "config_changes.yaml"  # beside config.yaml: a list of times, changes, and the whole configuration from then on
NAME = re.compile(r"\b(?:grpo|tasks)(?:\.\w+)+")  # of a module, or of what is in it
SLOTS = (  # of conf/, which an earlier version filled itself or did not have: class, name of the slot, function in it
    ("grpo.training.callbacks.checkpoint.Checkpoint", "card", "grpo.extras.export.model_card.write_card"),
    ("grpo.models.pretrained.Pretrained", "quantizer", "grpo.extras.quantized.quantized.quantize"),
    ("grpo.models.pretrained.Pretrained", "head", "grpo.extras.float32_head.head.in_float32"),
)
MISSING = object()


def add_saved_overrides(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of train.py, and before them those of the run that they resume, so that they choose the same groups.

    Nothing is added to a sweep, which continues by itself.
    """
    values = {key_in(argument): argument.partition("=")[2].strip("'\"") for argument in arguments}
    source, folder = values.get("ckpt_path") or values.get("replay", ""), values.get("hydra.run.dir", "")
    if not source and values.get("resume") == "auto" and folder and has_checkpoint(Path(folder)):
        source = folder
    resumes = source and source != "null" and not any(argument.startswith("-") for argument in arguments)
    return joined(overrides_of(folder_of(Path(source))), arguments) if resumes else list(arguments)


def continued(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return the configuration of the run that `ckpt_path` or `replay` names, with the values of this command line on top.

    Values that neither command line gave are those of the run, even if a default has changed since. overrides: the arguments.
    """
    folder = folder_of(Path(config.ckpt_path or config.replay))
    if not (folder / "config.yaml").is_file():
        return config
    before, saved = overrides_of(folder), saved_config(folder)
    try:
        then = composed("train", [*before, f"output_dir={literal(saved.output_dir)}"])
    except HydraException as error:
        log.warning("the arguments of that run have no meaning today, those of this command alone are used: %s", error)
        return config
    now = composed("train", [*joined(before, overrides), f"output_dir={literal(config.output_dir)}"])
    merged = OmegaConf.create(changed(resolved(saved), resolved(then), resolved(now)))
    for key in (key for key in OWN if key in config):
        merged[key] = config[key]
    if missing := [key for key, value in flat(resolved(merged)).items() if isinstance(value, str) and MASK in value]:
        raise UserError(f"{missing[0]} is a secret, which no file of a run has: give it again")
    return merged


def has_checkpoint(folder: Path) -> bool:
    """Return whether a run's folder has a checkpoint."""
    return any((folder / "checkpoints").glob("*.ckpt"))


def is_over(config: DictConfig) -> bool:
    """Return whether the run in the output folder has learned from as many rollouts as the configuration asks for.

    The manifest of a run that was killed after its last checkpoint becomes that of a finished one.
    """
    from grpo.runs.run import Run, numbered  # imports pandas

    folder, wanted = Path(config.output_dir), config.rollout.num_rollouts
    run = Run(folder)
    manifest = run.manifest
    kept = numbered(folder / "checkpoints", ".ckpt")
    if config.rollout.get("epochs") != ((run.config or {}).get("rollout") or {}).get("epochs"):
        return False  # the number of rollouts is not known yet
    if manifest.get("owed"):  # an evaluation is left
        return False
    if manifest.get("status") == "finished":  # without its last checkpoint, if the disk was full
        return min(manifest.get("rollouts", 0), max(kept, default=wanted)) >= wanted
    newest = max(kept, default=0)
    if over := bool(manifest) and newest >= wanted:
        from grpo.runs.manifest import save_manifest  # imports torch

        save_manifest(str(folder), manifest | {"status": "finished", "rollouts": newest, "error": None})
    return over


def sized(plan: Plan, config: DictConfig, rows: int) -> Plan:
    """Return the plan, with rollout.num_rollouts for rollout.epochs passes over so many rows, in the configuration too."""
    if plan.epochs:
        config.rollout.num_rollouts = math.ceil(plan.epochs * rows / plan.prompts)
    return replace(plan, num_rollouts=config.rollout.num_rollouts)


def folder_of(checkpoint: Path) -> Path:
    """Return the folder of the run that a checkpoint, or that folder itself, belongs to."""
    return checkpoint if (checkpoint / "checkpoints").is_dir() else checkpoint.absolute().parent.parent


def overrides_of(folder: Path) -> list[str]:
    """Return the arguments of a run's command line that still have a meaning, those of earlier resumed runs included.

    Flags, and settings of Hydra itself, which could run code, are none of them.
    """
    from grpo.runs.run import Run  # imports pandas

    overrides = Run(folder).manifest.get("overrides") or []
    words = [word for word in overrides if isinstance(word, str) and not word.startswith("-")]
    return [word for word in words if "hydra" not in key_in(word) and not word.lstrip("+~").startswith(OWN)]


def joined(earlier: Sequence[str], later: Sequence[str]) -> list[str]:
    """Return the overrides of two command lines as one. A later one replaces those of its key; ~KEY needs the earlier +KEY.

    KEY=VALUE needs no + if the earlier one had it.
    """
    plus = {key_in(override): re.match(r"\+*", override)[0] for override in earlier}
    later = [override if override[:1] in "+~" else plus.get(key_in(override), "") + override for override in later]
    replaced = set(map(key_in, later))
    needed = {f"+{override[1:]}" for override in later if override.startswith("~")}
    needed = {override for override in earlier if override.partition("=")[0] in needed and override not in later}
    return [override for override in earlier if key_in(override) not in replaced or override in needed] + list(later)


def key_in(override: str) -> str:
    """Return the key of KEY=VALUE, +KEY=VALUE or ~KEY."""
    return override.lstrip("+~").partition("=")[0]


def changed(saved: Any, then: Any, now: Any) -> Any:
    """Return the saved value with what differs between `then` and `now`. Dictionaries are compared key by key."""
    if then == now:
        return saved
    if not all(isinstance(node, dict) for node in (saved, then, now)):
        return now
    keys = [*saved, *(key for key in now if key not in saved)]
    merged = {key: changed(*(node.get(key, MISSING) for node in (saved, then, now))) for key in keys}
    return {key: value for key, value in merged.items() if value is not MISSING}


def resolved(config: DictConfig) -> Any:
    """Return a configuration as plain data. References to the environment stay as they are: ${oc.env:NAME}."""
    OmegaConf.register_new_resolver("oc.env", reference, replace=True)
    try:
        return OmegaConf.to_container(config, resolve=True)
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def reference(*parts: Any) -> str:
    """Return the text of a reference to the environment. parts: the variable, and the default if there is one."""
    return f"${{oc.env:{','.join('null' if part is None else str(part) for part in parts)}}}"


def stored(config: DictConfig) -> Any:
    """Return a configuration as files have it: resolved, without secrets."""
    return masked_values(resolved(config))


def changes(config: DictConfig, folder: Path) -> list[str]:
    """Return the differences from the configuration of the run in a folder, each as 'key=now (was then)'."""
    now, then = flat(stored(config)), flat(stored(saved_config(folder)))
    after, before = str(now.get("output_dir")), str(then.get("output_dir"))
    then = {key: value.replace(before, after) if isinstance(value, str) else value for key, value in then.items()}
    keys = [key for key in now | then if not key.startswith((*OWN, "preflight"))]
    return [f"{key}={now.get(key)} (was {then.get(key)})" for key in keys if now.get(key) != then.get(key)]


def chosen_changes(changed: Sequence[str], folder: Path) -> list[str]:
    """Return those of the `changes` that somebody chose: a key that repeats another one changes with it."""
    if len(changed) < 2:
        return list(changed)
    try:
        written = flat(OmegaConf.to_container(composed("train", [*overrides_of(folder), "output_dir=."])))
    except HydraException:  # the arguments of the run have no meaning today
        return list(changed)
    references = {key: re.fullmatch(r"\$\{([\w.]+)\}", str(value)) for key, value in written.items()}
    values = {key_in(line): line.partition("=")[2] for line in changed}
    repeated = {key: values.get(match[1]) for key, match in references.items() if match}
    return [line for line in changed if repeated.get(key_in(line)) != line.partition("=")[2]]


def policy_folder(run: str) -> Path:
    """Return the Hugging Face folder for `run=`: the best policy of a run, the policy of a checkpoint, or the folder itself."""
    path = Path(run).absolute()
    beside = [path.with_suffix(""), path.with_name(f"policy_{path.stem}")] if path.suffix == ".ckpt" else [path]
    for folder in (path / "checkpoints" / "best", path / "checkpoints" / "last", *beside):
        if (folder / "config.json").exists() or (folder / "adapter_config.json").exists():
            return folder
    raise UserError(f"run={run} has no policy: give the folder of a run, its checkpoint, or a Hugging Face folder")


def saved_config(folder: Path) -> DictConfig:
    """Return the last configuration of a run or an evaluation. Raises UserError if a file is damaged."""
    file = next(file for file in (folder / LATER, folder / "config.yaml") if file.is_file() or file.name != LATER)
    try:
        text = file.read_text(encoding="utf-8")
        config = OmegaConf.create(NAME.sub(lambda match: new_name(match[0]), text))
        config = config[-1].config if file.name == LATER else config
        reason = ""
    except Exception as error:  # a parser may raise anything
        config, reason = None, f": {one_line(error, 200)}"
    if not isinstance(config, DictConfig) or "task" not in config:
        raise UserError(f"{file} is no configuration of a run{reason}")
    return OmegaConf.create(with_slots(OmegaConf.to_container(config)))


def with_slots(node: Any) -> Any:
    """Return a part of a configuration with the slots of its classes that it lacks, which it gets in place."""
    for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        with_slots(inner)
    for kind, slot, function in SLOTS:
        if isinstance(node, dict) and node.get("_target_") == kind:
            node.setdefault(slot, {"_target_": function, "_partial_": True})
    return node


def save_config(config: DictConfig) -> None:
    """Write config.yaml to the output folder, which is created. A folder that has one keeps it, and gets a list of changes."""
    from lightning.pytorch.utilities import rank_zero_only  # imports torch

    folder = Path(config.output_dir)
    if rank_zero_only.rank != 0:  # only the first process writes
        return
    if not (folder / "config.yaml").exists():
        write_text(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(stored(config))))
    elif changed := changes(config, folder):
        entry = {"time": datetime.now().astimezone().isoformat(timespec="seconds"), "changes": changed}
        earlier = (folder / LATER).read_text(encoding="utf-8") if (folder / LATER).exists() else ""
        write_text(folder / LATER, earlier + OmegaConf.to_yaml([entry | {"config": stored(config)}]))


def check_resumed(config: DictConfig) -> None:
    """Set ckpt_path to the checkpoint that is resumed, if any, and compare the configuration with that of its run.

    Raises UserError for a damaged checkpoint, and for changes that would make it another run.
    """
    if not config.ckpt_path:
        return
    from grpo.training.checkpoints import usable  # imports torch

    folder = folder_of(path := Path(config.ckpt_path))
    config.ckpt_path = str(usable(path))
    changed = changes(config, folder) if (folder / "config.yaml").is_file() else []
    if other := [line for line in changed if line.startswith("optim.optimizer._target_=")]:
        fix = "resume with that one, or start from the run's policy by model=path model.path=RUN/checkpoints/last"
        raise UserError(f"ckpt_path={path} has the state of another optimizer: {other[0]}; {fix}")
    saved = saved_config(folder) if changed else config
    before, now = ([*(one.optim.get("groups") or ())] for one in (saved, config))
    if before != now:
        fix = "the optimizer's state is kept by group; leave the patterns as they were"
        raise UserError(f"optim.groups={now} (was {before}): {fix}")
    guarded = [line for line in changed if line.startswith(GUARDED) and not is_shown(line, config, saved)]
    listed = chosen_changes(changed, folder)
    if guarded and config.resume.changes != "allow":
        named = [line for line in guarded if line in listed] or guarded
        line = f"the run to resume had other settings: {', '.join(named[:5])}"
        raise UserError(f"{line}; leave them out, or set resume.changes=allow")
    if changed:
        log.warning("resuming with other values: %s", ", ".join(listed))


def check_data(config: DictConfig, examples: Mapping[str, Sequence[Any]]) -> None:
    """Compare the rows of each split with those of the run that is resumed, if any, by the facts in its manifest.

    Raises UserError for rows that would make it another run.
    """
    from grpo.runs.manifest import data_facts  # imports torch
    from grpo.runs.run import Run

    recorded = (Run(folder_of(Path(config.ckpt_path))).manifest.get("data") or {}) if config.ckpt_path else {}
    differences = []
    for split, rows in examples.items():
        if split in recorded:
            now, then = data_facts(rows), recorded[split]
            if name := next((name for name in now if name in then and now[name] != then[name]), None):
                differences.append(f"{split} has {now['rows']} rows, {name}={now[name]} (was {then[name]})")
    if differences and config.resume.changes != "allow":
        line = f"the run to resume had other data: {'; '.join(differences)}"
        raise UserError(f"{line}; give it the same rows, or set resume.changes=allow")
    if differences:
        log.warning("resuming with other data: %s", "; ".join(differences))


def recipe_of(config: DictConfig) -> str:
    """Return a digest of the settings by which samples are made, besides those of `rollout`."""
    return fingerprint({key: value for key, value in stored(config).items() if key not in (*OWN, *NO_SAMPLES)})


def is_shown(change: str, *configs: DictConfig) -> bool:
    """Return whether a change is one of a callback that only shows, saves or checks."""
    group, name, *_ = key_in(change).split(".")
    targets = [OmegaConf.select(config, f"callbacks.{name}._target_") for config in configs]
    return group == "callbacks" and all(target.startswith(SHOWN) for target in targets if target)
