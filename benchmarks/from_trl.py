"""Keep grpo/extras/migration/from_trl.yaml complete: every setting of the installed TRL's `trl grpo`, and
every argument of its GRPOTrainer, has one row there, which has an answer.

    python benchmarks/from_trl.py            # prints what is wrong, and fails if there is anything
    python benchmarks/from_trl.py --write    # adds open rows for new settings, removes lost ones

`python -m grpo.from_trl` reads that file, and its --table prints it.
"""

import dataclasses
import inspect
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from jinja2 import meta

from grpo.extras.migration.from_trl import JINJA

ROOT = Path(__file__).parents[1]
DATA = ROOT / "grpo" / "extras" / "migration" / "from_trl.yaml"
OPEN = "?"  # the answer of a row that --write adds


def settings() -> dict[str, dataclasses.Field]:
    """Return each field of the installed `trl grpo`: of GRPOConfig, of the script, of the model and of the dataset."""
    from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig
    from trl.scripts.grpo import GRPOScriptArguments

    kinds = (GRPOConfig, GRPOScriptArguments, ModelConfig, DatasetMixtureConfig)
    return {field.name: field for kind in kinds for field in dataclasses.fields(kind)}


def arguments() -> list[str]:
    """Return the arguments of the installed GRPOTrainer."""
    from trl import GRPOTrainer

    return list(inspect.signature(GRPOTrainer.__init__).parameters)[1:]


def version() -> str:
    """Return the installed version of TRL without its last number."""
    import trl

    return trl.__version__.rpartition(".")[0]


def read_by_rules(data: dict[str, Any]) -> set[str]:
    """Return the fields that rules read."""
    rules = [rule.partition(" when ") for row in data["fields"] + data["others"] for rule in row.get("set", ())]
    texts = [f"{word}{{{{ {condition or 0} }}}}" for word, _, condition in rules]
    texts += [f"{{{{ {expression} }}}}" for expression in data["derived"].values()]
    return {name for text in texts for name in meta.find_undeclared_variables(JINJA.parse(text))} - {*data["derived"]}


def faults(data: dict[str, Any]) -> list[str]:
    """Return what is wrong with the data, a line each."""
    listed = Counter(name for row in data["fields"] for name in row["trl"].split())
    there, taken = settings(), data["defaults"]
    others = {name for row in data["others"] for name in row["trl"].split()}
    defaults = {name: there[name].default for name in read_by_rules(data) | {*taken} if name in there}
    return [
        *(f"{name} has no row" for name in there if name not in listed),
        *(f"{name} has {count} rows" for name, count in listed.items() if count > 1),
        *(f"{name} is no field of TRL {version()}" for name in listed if name not in there),
        *(f"{name} is a field of TRL {version()}" for name in others if name in there),
        *(
            f"{name} of GRPOTrainer has no row"
            for name in arguments()
            if name not in {row["trl"] for row in data["trainer"]}
        ),
        *(f"{row['trl']} has no answer" for row in data["fields"] if row["here"] == OPEN),
        *(
            f"{name} is {default!r} in TRL"
            for name, default in defaults.items()
            if (taken.get(name) or 0) != (default or 0)
        ),
        *([] if data["version"] == version() else [f"the rows are about TRL {data['version']}, not {version()}"]),
    ]


def mended(text: str) -> str:
    """Return the data's file with an open row for each new field, without lost fields, and with the installed version."""
    there = settings()
    head, marker, tail = text.partition("\nfields:\n")
    kept = []
    for block in tail.split("- trl: ")[1:]:
        names, rest = block.split("\n", 1)
        if left := [name for name in names.split() if name in there]:
            kept.append(f"- trl: {' '.join(left)}\n{rest}")
    listed = {name for block in kept for name in block.split("\n")[0].split()}
    words = {name: str(field.metadata.get("help") or "") for name, field in there.items() if name not in listed}
    first = {name: " ".join(re.split(r"(?<=\.)\s", help)[0].split()).replace("|", "or") for name, help in words.items()}
    kept += [f"- trl: {name}\n  here: '{OPEN}'\n  remark: {json.dumps(first[name])}\n" for name in first]
    return re.sub(r'version: ".*"', f'version: "{version()}"', head) + marker + "".join(kept)


if __name__ == "__main__":
    if "--write" in sys.argv:
        DATA.write_text(mended(DATA.read_text()))
    found = faults(yaml.safe_load(DATA.read_text()))
    print("\n".join(found) or f"every field of TRL {version()} has its row")
    sys.exit(bool(found))
