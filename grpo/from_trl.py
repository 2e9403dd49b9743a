"""Print the command of train.py for a configuration of `trl grpo --config`.

    python -m grpo.from_trl CONFIG.yaml [FIELD=VALUE ...]

The command comes last. The lines before it begin with # and say what becomes of the fields that have no key here. More fields may
follow the file, as num_processes=8. TRL need not be installed: from_trl.yaml, beside this file, has its fields.
"""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from jinja2 import ChainableUndefined, Environment, TemplateError
from omegaconf import OmegaConf

from grpo.apps.cli import one_line_errors, quiet
from grpo.config.composing import composed, literal
from grpo.config.validation import check_values
from grpo.system.errors import UserError

DATA = Path(__file__).parent / "apps" / "from_trl.yaml"
WORD = re.compile(r"(?:'(?:\\.|[^'\\])*'|[^\s'])+")  # a space within quotes belongs to the word


def hydra_value(value: Any) -> str:
    """Return a value in Hydra's grammar, in quotes only if it needs them."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{hydra_value(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(hydra_value, value)) + "]"
    plain = isinstance(value, str) and re.fullmatch(r"(?!(null|true|false|nan|inf)$)[a-z_./][\w./:-]*", value, re.I)
    return value if plain else literal(value)


def translated(fields: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the words of the command, and a line for each field that has none. Raises UserError for a field that TRL lacks."""
    data = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    rows = [(row["trl"].split(), row) for row in [*data["fields"], *data["others"]]]
    all_names = [name for names, _ in rows for name in names]
    for name in fields:
        if name not in all_names:
            near = get_close_matches(name, all_names, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"{name} is no field of `trl grpo` in TRL {data['version']}{hint}")
    jinja = Environment(undefined=ChainableUndefined, finalize=hydra_value)
    values = {**data["defaults"], **fields}
    words, lines = list(data["always"]), []
    try:
        for name, expression in data["derived"].items():
            values[name] = jinja.compile_expression(expression, undefined_to_none=False)(values)
        for names, row in rows:
            in_use = [name for name in names if name in fields]
            if not in_use and not {*names} & {*data["said"].split()}:
                continue
            pairs = zip(names, row["here"].split(), strict=False)
            default_rules = [f"{key}={{{{ {name} }}}} when {name} not in (none, undefined)" for name, key in pairs]
            made = []
            for rule in row.get("set", [] if row["here"] in ("always", "none") else default_rules):
                text, _, condition = rule.partition(" when ")
                if not condition or jinja.compile_expression(condition)(values):
                    made += WORD.findall(jinja.from_string(text).render(values))
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
    try:
        config = OmegaConf.merge(OmegaConf.load(arguments[0]), OmegaConf.from_dotlist(list(arguments[1:])))
        fields = OmegaConf.to_container(config, resolve=False)
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise UserError(
            f"{arguments[0]} is no file with the fields of `trl grpo`: {str(error).splitlines()[0]}"
        ) from error
    words, lines = translated(fields)
    check_values(composed("train", [*words, "output_dir=."]))
    print(*(f"# {line}" for line in lines), f"python train.py {shlex.join(words)}", sep="\n")


if __name__ == "__main__":
    quiet()
    with one_line_errors("train"):
        main(sys.argv[1:])
