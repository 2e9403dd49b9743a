"""Explains a mistake of the user in one line: what was wrong, what is allowed, what to do."""

import re
import shlex
from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo.config.appendix import of_appendix
from grpo.config.composing import CONF, composed, literal
from grpo.config.resuming import key_in
from grpo.config.validation import TABLES, needed, no_value
from grpo.system.errors import UserError, lacks_memory, one_line
from grpo.system.files import FULL
from grpo.system.ranges import flat

RENAMED = {
    "loader": "sampler",
    "algo.sampling_rounds": "selection=dynamic selection.rounds",
    "algo.sampling_filter": "selection=dynamic selection.by",
    "lr": "optim.optimizer.lr",
    "weights": "task.weights",
    "optim.schedule.num_cycles": "optim.schedule.scheduler_specific_kwargs={num_cycles: 2}",
}
OWN_REWARD = (
    "task.rewards: the reward of this task is its own: see its keys (--help task), or define score (docs/tasks.md)"
)


def explain(error: BaseException, config_name: str, arguments: Sequence[str] = ()) -> str | None:
    """Return one line that explains a mistake of the user; None for a bug of ours, which needs its traceback.

    arguments: the command line, which says which options of the groups are in use.
    """
    causes = list(chain(error))
    if mistake := next((cause for cause in causes if isinstance(cause, UserError)), None):
        return with_keys(str(mistake))
    if missing := next((cause for cause in causes if isinstance(cause, MissingConfigException)), None):
        group, _, option = (missing.missing_cfg_file or "").rpartition("/")
        options = ", ".join(option for option in missing.options or () if option != "base")
        return f"{group} has no option {option!r}; options: {options}" if options else one_line(missing)
    if unread := next((cause.override for cause in causes if isinstance(cause, OverrideParseException)), None):
        return one_line(f"{unread}: {_quote(unread)}")
    if lacking := next((str(cause) for cause in causes if lacks_memory(cause)), None):
        least = "python train.py debug=forecast shows what a run needs, docs/hardware.md how to need less"
        return f"not enough memory: {one_line(lacking, 200)}; {least}"
    if isinstance(error, OSError):
        is_output = f"hydra.run.dir={error.filename}" in arguments or error.errno in FULL
        if is_output or (error.filename and not isinstance(error, FileNotFoundError)):
            return f"the output folder cannot be written: {error}; set hydra.run.dir=FOLDER"
    if key := re.search(r"Could not override '([^']+)'", str(error)):
        inner = next((str(cause.full_key) for cause in causes if getattr(cause, "full_key", None)), "")
        of_a_dictionary = inner.startswith(f"{key[1]}.")
        return no_key(inner if of_a_dictionary else key[1], known_keys(config_name, arguments))
    if several := re.search(r"Ambiguous value for argument '(.*?)'\s+1\. To use it as a list", str(error), re.S):
        name, _, value = several[1].partition("=")
        return f"{several[1]}: {_quote(several[1])}; a list is {name}=[{value}], and -m makes a sweep of the values"
    if empty := re.search(r"Missing mandatory value: ([\w.]+)", str(error)):
        return no_value([empty[1]])
    if present := re.search(r"An item is already at '([^']+)'", str(error)):
        return f"there is a key {present[1]} already: leave out the +"
    if re.search(r"unexpected keyword argument '(rewards|weights)'", str(error)):
        return OWN_REWARD
    deleted = re.search(r"Could not delete from config. '([^']+)' does not exist", str(error))
    if deleted and deleted[1].startswith("hydra."):
        own = composed(config_name, [], return_hydra_config=True)
        if OmegaConf.select(own, deleted[1], default=own) is None:
            return f"~{deleted[1]}: it is null here, so there is nothing to leave out: drop this argument"
    if deleted and deleted[1] in known_keys(config_name, arguments):
        return f"~{deleted[1]}: its value is null, and Hydra deletes no null: give {deleted[1]}=0 ~{deleted[1]}"
    if deleted:
        return f"~{deleted[1]}: there is no such key to leave out, and --help all lists the keys"
    if "Config group override must be" in str(error):
        named = [a for a in arguments if (CONF / a.partition("=")[0]).is_dir()]
        wrong = [a for a in named if not (CONF / f"{a.replace('=', '/')}.yaml").is_file()]
        return f"{' '.join(wrong)}: a group takes the name of an option, and --help lists them"
    if isinstance(error, InstantiationException):
        where = re.search(r"full_key: (\S+)", str(error))
        reason = f"{where[1]}: {error.__cause__}" if where and error.__cause__ else str(error)
        extra = re.search(r"unexpected keyword argument '(\w+)'", reason)
        if extra and (elsewhere := known_elsewhere(extra[1])):
            return f"{where[1] if where else extra[1]} has no {extra[1]!r}; {elsewhere}"
        lacks = any(isinstance(cause, ModuleNotFoundError) for cause in causes)
        guess = "is it installed?" if lacks else "a key too many, or a value of the wrong type?"
        return f"{one_line(reason)} ({guess})"
    mapping = re.search(r"Error merging override '?([\w.]+)=(\{.*\})", str(error))
    if mapping and "Cannot merge DictConfig with ListConfig" in map(str, causes):
        return f"{mapping[1]} is a list here: put the mapping into it, {mapping[1]}=[{mapping[2]}]"
    gone = next((a for a in arguments if a.startswith("~") and key_in(a) in re.split(r"\W+", str(error))), None)
    if gone and isinstance(error, (HydraException, OmegaConfBaseException)):
        return needed(key_in(gone))
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return one_line(error)
    return None


def with_keys(line: str) -> str:
    """Return a line of a room with keys in place of Python's names: `Algorithm.level` is algo.level, and `Algorithm.kl=loss`
    is algo/kl=loss, since conf/ has a group for this axis."""
    axes = "|".join(path.name for path in (CONF / "algo").iterdir() if path.is_dir())
    line = re.sub(rf"\bAlgorithm\.({axes})=", r"algo/\1=", line)
    for name, key in TABLES["names"].items():
        line = re.sub(rf"\b{name}\.(?=\w)", f"{key}.", line)
    return line


def known_elsewhere(name: str, *headers: str) -> str | None:
    """Return what a setting of another system is here, in one line; None if it is in no table with these headers."""
    return of_appendix("migration.foreign.told", lambda *_: None)(name, *filter(None, [headers]))


def no_key(key: str, keys: Sequence[str], *headers: str) -> str:
    """Return the line about a key that does not exist. keys: all that do. headers: the tables of other systems to look into.

    A name of another system is looked up before a similar key is guessed, but a key of ours with just that name wins.
    """
    if key in ("task.rewards", "task.weights"):
        return OWN_REWARD
    parent, _, last = key.rpartition(".")
    near = RENAMED.get(key.removesuffix("._target_")) or RENAMED.get(key.partition(".")[0])
    is_ours = any(name.rpartition(".")[2] == last for name in keys)
    if near is None and not is_ours and (elsewhere := known_elsewhere(key, *headers)):
        return f"there is no key {key!r}; {elsewhere}"
    below = [name.removeprefix(f"{parent}.") for name in keys if name.rpartition(".")[0] == parent]
    listed = ", ".join(name for name in below if not name.startswith("_"))
    if parent in keys and not below:
        hint = f"{parent} is one value, as {parent}={{{last}: ...}} where it takes a dictionary"
    elif near := near or nearest(key, keys):
        hint = f"did you mean {near}?"
    else:
        hint = f"{parent} has {listed}" if parent and listed else "--help all lists them"
    return f"there is no key {key!r}; {hint} (+{key}=... adds a new key)"


def _quote(argument: str) -> str:
    """Return what to do about an argument that Hydra's grammar cannot read."""
    key, equals, value = argument.partition("=")
    if not equals or not re.fullmatch(r"[+~]*[\w.@/-]+", key):
        return "an argument is KEY=VALUE, and --help all lists the keys"
    if (bare := re.sub(r"""([{,]\s*)(['"])([^'"]*)\2(?=\s*:)""", r"\1\3", value)) != value:
        return f"names in a mapping have no quotes: {key}={bare}"
    word = f"{key}={literal(value)}"
    whole = shlex.quote(word) if re.search(r'["$`!\\]', word) else f'"{word}"'
    inner = ", or each text in it" if value[:1] in ("[", "{") else ""
    return f"quote the value{inner}, and the argument for the shell: {whole}"


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its causes, outermost first. Python allows a circle: each comes once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def nearest(key: str, keys: Sequence[str]) -> str | None:
    """Return the known key most similar to a mistyped one; None if none is similar.

    Keys beside it come first, then those of the same group. The last part of the key is compared, and after it the whole key, if
    that may be mistyped before its last part.
    """
    group, (parent, _, last) = key.partition(".")[0], key.rpartition(".")
    beside = [name for name in keys if parent and name.rpartition(".")[0] == parent]
    for names in (beside, [name for name in keys if name.startswith(f"{group}.")], keys):
        ends = {name.rpartition(".")[2]: name for name in reversed(names)}
        alike = get_close_matches(last, ends, n=1)
        if alike := alike or ([] if beside else get_close_matches(key, names, n=1)):
            return ends.get(alike[0], alike[0])
    return None


def known_keys(config_name: str, arguments: Sequence[str]) -> list[str]:
    """Return every dotted key of the configuration with the options that the arguments choose."""
    chosen = [a for a in arguments if (CONF / f"{a.replace('=', '/')}.yaml").is_file()]
    try:
        config = composed(config_name, chosen)
    except HydraException:  # a group of another program
        config = composed(config_name, [])
    leaves = [key.split(".") for key in flat(OmegaConf.to_container(config))]
    return sorted({".".join(names[:depth]) for names in leaves for depth in range(1, len(names) + 1)})
