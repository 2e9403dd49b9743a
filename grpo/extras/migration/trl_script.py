"""Reads a script that trains with TRL: the values of its GRPOConfig and GRPOTrainer, from its syntax tree. Nothing is run."""

import ast
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo.system.errors import UserError

TRAINER = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class")  # by position
# arguments of peft's LoraConfig that are fields of `trl grpo`
LORA = {name: f"lora_{name}" for name in ("r", "target_modules", "modules_to_save", "task_type")}
LORA |= {name: name for name in ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")}
PEFT = {"use_peft": True, "lora_r": 8, "lora_alpha": 8}  # peft's defaults; those of `trl grpo` are others
# and arguments of load_dataset
ROW_FIELDS = {
    "path": "dataset_name",
    "name": "dataset_config",
    "split": "dataset_train_split",
    "streaming": "dataset_streaming",
}
PATH = "pretrained_model_name_or_path"
FORMATS = ("json", "csv", "parquet")  # of files, as paths of load_dataset
FUNCTIONS, ROWS = "rewards.py", "rows.jsonl"  # files that the user makes of what a script holds

Arguments = Iterable[tuple[str, ast.expr]]


@dataclass
class Found:
    """The contents of a script. fields: of `trl grpo`, with their values. adapter: other arguments of LoraConfig. unread: (line,
    name, expression) of arguments whose value the text does not show. notes: what to do before the command runs."""

    fields: dict[str, Any] = field(default_factory=dict)
    adapter: dict[str, Any] = field(default_factory=dict)
    unread: list[tuple[int, str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Script:
    """A script's tree, what its names stand for, and what was found. Raises UserError for a file that is no Python."""

    def __init__(self, path: Path) -> None:
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError) as error:
            raise UserError(f"{path} cannot be read as a Python script: {error}") from error
        self.path, self.found, self.nodes = path, Found(), list(ast.walk(tree))
        stored = Counter(node.id for node in self.of(ast.Name) if isinstance(node.ctx, ast.Store))
        stored.update(node.arg for node in self.of(ast.arg))
        self.values = {
            node.targets[0].id: node.value
            for node in self.of(ast.Assign)
            if isinstance(node.targets[0], ast.Name) and stored[node.targets[0].id] == 1
        }
        self.modules = {alias.asname or alias.name: alias.name for node in self.of(ast.Import) for alias in node.names}
        for node in self.of(ast.ImportFrom):
            self.modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        self.functions = {node.name: node.lineno for node in self.of(ast.FunctionDef, ast.AsyncFunctionDef)}

    def of(self, *kinds: type) -> list:
        """Return the nodes of these kinds."""
        return [node for node in self.nodes if isinstance(node, kinds)]

    def one(self, name: str) -> ast.Call | None:
        """Return the only call of a class or function; None if there is none. Raises UserError for several."""
        calls = [node for node in self.nodes if callee(node) == name]
        if len(calls) > 1:
            lines = ", ".join(str(call.lineno) for call in calls)
            raise UserError(
                f"{self.path} calls {name} in lines {lines}: leave the one in it that you want to translate"
            )
        return calls[0] if calls else None

    def meant(self, node: ast.expr) -> ast.expr:
        """Return the expression that a name stands for, if the script gives it one value; of other nodes, the node."""
        for _ in self.values:
            node = self.values.get(node.id, node) if isinstance(node, ast.Name) else node
        return node

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression. Raises ValueError if it is no literal."""
        node = self.meant(node)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch":
            return node.attr  # a number type
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(part) for part in node.elts]
        if isinstance(node, ast.Dict) and all(node.keys):
            return {self.value(key): self.value(part) for key, part in zip(node.keys, node.values, strict=True)}
        return ast.literal_eval(node)

    def take(self, given: Arguments, into: dict[str, Any]) -> None:
        """Put the values of arguments into a dictionary. `**` is a mapping of several."""
        for name, node in given:
            try:
                value = self.value(node)
                into |= value if name == "**" else {name: value}
            except (ValueError, TypeError):
                self.lose(name, node)

    def lose(self, name: str, node: ast.expr) -> None:
        """Note an argument whose value the text does not show."""
        self.found.unread.append((node.lineno, name, ast.unparse(node)))

    def trainer(self, name: str, node: ast.expr) -> None:
        """Take an argument of GRPOTrainer."""
        made, fields = self.meant(node), self.found.fields
        if name == "model" and callee(made) == "from_pretrained" and arguments_by_name(made, ["path"]):
            rest = dict(arguments_by_name(made, [PATH]))
            self.take([("model_name_or_path", rest.pop(PATH))] if PATH in rest else [], fields)
            self.take(rest.items(), fields.setdefault("model_init_kwargs", {}))
        elif name == "model":
            self.take([("model_name_or_path", node)], fields)
        elif name == "peft_config" and callee(made) == "LoraConfig":
            fields |= PEFT
            self.take(((LORA[key], value) for key, value in arguments_by_name(made) if key in LORA), fields)
            self.take(((key, value) for key, value in arguments_by_name(made) if key not in LORA), self.found.adapter)
        elif name == "reward_funcs":
            parts = made.elts if isinstance(made, ast.List | ast.Tuple) else [made if callee(made) else node]
            fields[name] = [function for part in parts if (function := self.reward(part))]
        elif name == "train_dataset":
            self.rows(node)
        else:
            self.lose(name, node)

    def reward(self, node: ast.expr) -> str | None:
        """Return the name that `task.rewards` takes; None if the function has none."""
        made, name = self.meant(node), ast.unparse(node)
        first, _, rest = name.partition(".")
        if isinstance(made, ast.Constant):
            return made.value
        if name in self.functions:
            line = f"line {self.functions[name]}: copy {name} into {FUNCTIONS}, with what it needs"
            self.found.notes.append(f"{line}: to import it from {self.path.name} would run that script")
            return f"{FUNCTIONS}:{name}"
        if isinstance(node, ast.Name | ast.Attribute) and first in self.modules:
            return ".".join(filter(None, [self.modules[first], rest]))
        self.lose("reward_funcs", node)
        return None

    def rows(self, node: ast.expr) -> None:
        """Take the place of the rows, if they are as `load_dataset` reads them; others have to be written to a file."""
        made, split = self.meant(node), []
        if isinstance(made, ast.Subscript):
            made, split = self.meant(made.value), [("split", made.slice)]
        given = dict(arguments_by_name(made, ["path", "name"]) + split) if callee(made) == "load_dataset" else {}
        try:
            values = {name: self.value(part) for name, part in given.items()}
            whole = "[" not in str(values.get("split"))  # train[:1000] is a part
            if "data_files" in values:
                values = {"path": values["data_files"] if values["path"] in FORMATS else None}
            read = {ROW_FIELDS[name]: value for name, value in values.items() if whole}
        except (KeyError, ValueError):
            read = {}
        if not isinstance(read.get("dataset_name"), str):
            read = {"dataset_name": ROWS}
            line = f"line {node.lineno}: write the rows of train_dataset={ast.unparse(node)} to {ROWS}"
            self.found.notes.append(f'{line}, as datasets do by .to_json("{ROWS}")')
        self.found.fields |= read


def callee(node: ast.expr) -> str:
    """Return the last name of the function that an expression calls; "" if it is no call."""
    return ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""


def arguments_by_name(call: ast.Call, names: Iterable[str] = ()) -> list[tuple[str, ast.expr]]:
    """Return the arguments of a call by name. names: those of the positional arguments; the name of **mapping is `**`."""
    return [*zip(names, call.args, strict=False), *((keyword.arg or "**", keyword.value) for keyword in call.keywords)]


def read_script(path: Path) -> Found:
    """Return what a script has for a run of TRL. Raises UserError if it has no call of GRPOTrainer or GRPOConfig, or several."""
    script = Script(path)
    trainer, config = script.one("GRPOTrainer"), script.one("GRPOConfig")
    if trainer is None and config is None:
        raise UserError(f"{path} has no call of GRPOTrainer or GRPOConfig: name the script that has it")
    if config is not None:
        script.take(arguments_by_name(config, ["output_dir"]), script.found.fields)
    for name, node in arguments_by_name(trainer, TRAINER) if trainer else ():
        if name != "args" or callee(script.meant(node)) != "GRPOConfig":
            script.trainer(name, node)
    return script.found
