"""Print the command of train.py for a run of TRL: a configuration of `trl grpo --config`, or a script with a GRPOTrainer.

    python -m grpo.from_trl CONFIG.yaml [FIELD=VALUE ...]
    python -m grpo.from_trl SCRIPT.py [FIELD=VALUE ...]
    python -m grpo.from_trl --table [SYSTEM ...]    # settings of TRL, verl, OpenRLHF, ... and what each is here

The command comes last. The lines before it begin with # and say what becomes of the fields that have no key here. More fields may
follow the file, as num_processes=8. A script is read and not run; a line names each argument whose value its text does not show.
TRL need not be installed: extras/migration/from_trl.yaml has its fields.
"""

import re
import shlex
import sys
from collections.abc import Container, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from textwrap import shorten
from typing import Any

import yaml
from jinja2 import ChainableUndefined, Environment, TemplateError
from omegaconf import OmegaConf

from grpo.apps.cli import one_line_errors, quiet
from grpo.config.composing import composed, literal
from grpo.config.validation import check_values
from grpo.extras.migration.foreign import TRL as DATA
from grpo.extras.migration.foreign import printed
from grpo.extras.migration.trl_script import Found, read_script
from grpo.system.errors import UserError

AFTER = "give num_processes=N after the file if there are several"
WORD = re.compile(r"(?:'(?:\\.|[^'\\])*'|[^\s'])+")  # a space within quotes belongs to the word


def hydra_value(value: Any) -> str:
    """Return a value in Hydra's grammar, in quotes only if it needs them."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{hydra_value(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(hydra_value, value)) + "]"
    plain = isinstance(value, str) and re.fullmatch(r"(?!(null|true|false|nan|inf)$)[a-z_./][\w./:-]*", value, re.I)
    return value if plain else literal(value)


JINJA = Environment(undefined=ChainableUndefined, finalize=hydra_value)
JINJA.globals["zip"] = zip
JINJA.filters["part"] = lambda function: re.split("[.:/]", function)[-1]  # the name of its part of the reward


def check_batches(values: Mapping[str, Any]) -> None:
    """Refuse sizes that TRL refuses, and those that have no form here. values: of the fields, and what is derived from them."""
    group, processes, batch = values["num_generations"], values.get("num_processes") or 1, values["batch"]
    generated, update, evaluated = values["generated"], values["update"], values.get("num_generations_eval") or group
    if group < 2:
        raise UserError(f"num_generations={group} must be at least 2, as TRL says")
    if generated % batch:
        line = f"generation_batch_size={generated} is no multiple of the {batch} rows of a step"
        raise UserError(
            f"{line} (per_device_train_batch_size x num_processes={processes}), and TRL refuses it: {AFTER}"
        )
    if generated % group:
        line = f"num_generations={group} does not divide the {generated} samples of a batch, and TRL refuses it"
        sizes = f"{values['per_device_train_batch_size']} rows x num_processes={processes} x {generated // batch} steps"
        raise UserError(f"{line} ({sizes}): {AFTER}; or set num_generations to one of {divisors(generated)}")
    if values["eval_strategy"] != "no" and (rows := values["per_device_eval_batch_size"] * processes) % evaluated:
        line = f"{evaluated} samples for each prompt do not divide the {rows} rows of a batch of evaluations, and TRL refuses it"
        sizes = f"per_device_eval_batch_size x num_processes={processes}"
        raise UserError(f"{line} ({sizes}): {AFTER}; or set num_generations_eval to one of {divisors(rows)}")
    if generated % update and update % generated:
        line = f"an update takes {update} samples, so parts of batches of {generated}"
        raise UserError(f"{line}: let steps_per_generation be a multiple of gradient_accumulation_steps")


def divisors(count: int) -> str:
    """Return the valid sizes of a group among `count` samples, the numbers from 2 that divide it."""
    return ", ".join(str(size) for size in range(2, count + 1) if count % size == 0) or f"none for {count}"


def rows_of(data: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the row of each field."""
    return {name: row for row in [*data["fields"], *data["others"]] for name in row["trl"].split()}


def unread_lines(data: Mapping[str, Any], found: Found, given: Container[str]) -> list[str]:
    """Return a line for each argument of a script whose value its text does not show, without those `given` after it."""
    rows = rows_of(data) | {row["trl"]: row for row in data["trainer"]}
    lines = []
    for number, name, text in found.unread:
        row = rows.get(name, {"here": name})
        argument = shorten(f"{name}{text}" if name == "**" else f"{name}={text}", 90)
        if name not in given:
            lines.append(
                ": ".join(filter(None, [f"line {number}: {argument} is not read", row["here"], row.get("remark")]))
            )
    return lines


def translated(data: Mapping[str, Any], fields: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the words of the command, and a line for each field that has none. data: from_trl.yaml. Raises UserError for a field
    that TRL lacks, and for sizes that it refuses."""
    by_name = rows_of(data)
    for name in fields:
        if name not in by_name:
            near = get_close_matches(name, by_name, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"{name} is no field of `trl grpo` in TRL {data['version']}{hint}")
    fields = {by_name[name].get("now", name): value for name, value in fields.items()}
    values = {**data["defaults"], **fields}
    words, lines = list(data["always"]), []
    try:
        for name, expression in data["derived"].items():
            values[name] = JINJA.compile_expression(expression, undefined_to_none=False)(values)
        check_batches(values)
        for row in [*data["fields"], *data["others"]]:
            names = row["trl"].split()
            in_use = [name for name in names if name in fields]
            if not in_use and not {*names} & {*data["said"].split()}:
                continue
            pairs = zip(names, row["here"].split(), strict=False)
            default_rules = [f"{key}={{{{ {name} }}}} when {name} not in (none, undefined)" for name, key in pairs]
            made = []
            for rule in row.get("set", [] if row["here"] in ("always", "none") else default_rules):
                text, _, condition = rule.partition(" when ")
                if not condition or JINJA.compile_expression(condition)(values):
                    made += WORD.findall(JINJA.from_string(text).render(values))
            words += made
            if not made:
                lost = [name for name in in_use if fields[name] not in (None, False, "no", "none", "", [], {})]
                if lost:
                    remarks = filter(None, [row["here"], row.get("remark")])
                    lines.append(": ".join([", ".join(lost), *remarks]))
    except (TypeError, ZeroDivisionError, TemplateError) as error:
        raise UserError(f"the configuration has a value that TRL does not take: {error}") from error
    return words, lines


def main(arguments: Sequence[str]) -> None:
    """Print remarks and the command. arguments: the file and further fields. Raises UserError for what does not compose."""
    if not arguments or {"-h", "--help"} & {*arguments}:
        print(__doc__)
        return
    if arguments[0] == "--table":
        print(printed(arguments[1:]))
        return
    data = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    found = read_script(Path(arguments[0])) if arguments[0].endswith(".py") else None
    try:
        file = OmegaConf.create(found.fields) if found else OmegaConf.load(arguments[0])
        more = OmegaConf.from_dotlist(list(arguments[1:]))
        fields = OmegaConf.to_container(OmegaConf.merge(file, more), resolve=False)
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise UserError(
            f"{arguments[0]} is no file with the fields of `trl grpo`: {str(error).splitlines()[0]}"
        ) from error
    words, lines = translated(data, fields)
    if found:
        words += [f"++adapter.{name}={hydra_value(value)}" for name, value in found.adapter.items()]
        lines = [*found.notes, *unread_lines(data, found, more), *lines]
    check_values(composed("train", [*words, "output_dir=."]))
    print(*(f"# {line}" for line in lines), f"python train.py {shlex.join(words)}", sep="\n")


if __name__ == "__main__":
    quiet()
    with one_line_errors("train"):
        main(sys.argv[1:])
