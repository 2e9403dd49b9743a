"""Checks every value of a configuration against the annotation of the argument that receives it, before anything is built.

The arguments are those of the class or function that a node's `_target_` names. They are read from its source without an
import, so that a mistake and --help need no torch. keys.yaml has the types of keys that go to other libraries, and to no class.
"""

import ast
import builtins
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from omegaconf import DictConfig, OmegaConf

from grpo.system import ranges as r
from grpo.system.errors import UserError
from grpo.system.ranges import flat

TABLES = yaml.safe_load(Path(__file__).with_name("keys.yaml").read_text(encoding="utf-8"))
TYPES = {key: eval(kind, vars(r)) for kind, keys in TABLES["types"].items() for key in keys.split()}


class Names(dict):
    """The names of a module, for its annotations: a class is a Node, and a name that is no type is Any."""

    def __init__(self, source: str = "") -> None:
        self.nodes: dict[str, Any] = {}
        for node in ast.parse(source).body:
            if isinstance(node, ast.ImportFrom):
                self.nodes |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Assign):
                self.nodes[ast.unparse(node.targets[0])] = node.value
            elif isinstance(node, ast.ClassDef | ast.FunctionDef):
                self.nodes[node.name] = node

    def __missing__(self, name: str) -> Any:
        node = self.nodes.get(name)
        if isinstance(node, str):
            module, _, name = node.rpartition(".")
            light = module in ("typing", "collections.abc", r.__name__)
            return getattr(import_module(module), name) if light else names_of(module)[name]
        if isinstance(node, ast.ClassDef):
            return r.Node
        return getattr(builtins, name, Any) if node is None else self.kind(node)

    def kind(self, node: ast.AST) -> Any:
        """Return an annotation; Any if it cannot be known without importing large libraries."""
        try:
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ast.unparse(node)
            return eval(text, {"__builtins__": {}}, self)
        except Exception:  # an annotation may be any expression
            return Any

    def arguments(self, name: str) -> dict[str, Any]:
        """Return the annotations of the arguments of a class or function, and of the base class that gets the rest."""
        node, annotations = self.nodes.get(name), {}
        if isinstance(node, str):
            return arguments(node)
        if isinstance(node, ast.ClassDef):
            if node.decorator_list:  # a dataclass
                fields = [statement for statement in node.body if isinstance(statement, ast.AnnAssign)]
                annotations = {field.target.id: self.kind(field.annotation) for field in fields}
            init = next((method for method in node.body if getattr(method, "name", "") == "__init__"), None)
            if node.bases and (init is None or init.args.kwarg):
                annotations = self.arguments(ast.unparse(node.bases[0])) | annotations
            node = init
        if isinstance(node, ast.FunctionDef):
            if node.args.kwarg and node.args.kwarg.arg == "rows":
                annotations |= arguments("grpo.extras.datasets.dataset.Dataset")
            named = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            annotations |= {argument.arg: self.kind(argument.annotation) for argument in named if argument.annotation}
        return annotations


@cache
def names_of(module: str) -> Names:
    """Return the names of a module; of an installed library, and of a module that cannot be read, none."""
    package, *rest = module.split(".")
    with suppress(ValueError, TypeError, SyntaxError, OSError):
        spec = find_spec(package)
        for place in (spec.submodule_search_locations or [spec.origin]) if spec else ():
            path = Path(place, *rest)
            for file in (path, path.with_suffix(".py"), path / "__init__.py"):
                if file.is_file() and "site-packages" not in file.parts:
                    return Names(file.read_text(encoding="utf-8"))
    return Names()


@cache
def arguments(target: str) -> dict[str, Any]:
    """Return the annotation of each argument of the class or function with this dotted path, where it can be known."""
    module, _, name = target.rpartition(".")
    return names_of(module).arguments(name)


def kinds(node: Any, key: str = "", kind: Any = Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, value, annotation) of every leaf and node below a node, the inner ones first."""
    target = node["_target_"] if r.is_node(node) else TABLES["classes"].get(key)
    annotations = arguments(target) if isinstance(target, str) else {}
    of_any_key = next((get_args(member)[1] for member in r.members(kind) if get_origin(member) in (dict, Mapping)), Any)
    if isinstance(node, Mapping):
        for name, value in node.items():
            if name not in ("_target_", "_partial_", "_convert_", "_recursive_"):
                below = f"{key}.{name}".lstrip(".")
                yield from kinds(value, below, TYPES.get(below, annotations.get(name, of_any_key)))
    elif isinstance(node, list):
        for i, value in enumerate(node):
            yield from kinds(value, f"{key}[{i}]")
    if key:
        yield key, node, kind


def needed(key: str) -> str:
    """Return the line about a key that was left out."""
    return f"~{key}: the run needs {key}: give it another value or option, and --help {key} lists them"


def no_value(keys: Sequence[str]) -> str:
    """Return the line about keys that must have a value and have none."""
    given, group = " ".join(f"{key}=..." for key in keys), keys[0].partition(".")[0]
    return f"{' and '.join(keys)} must have a value: give {given}; --help {group} shows the keys of {group}"


def check_values(config: DictConfig) -> None:
    """Check every value of a configuration. Raises UserError for the first one that does not fit."""
    node = OmegaConf.to_container(config, resolve=True)
    if node.get("output_dir") == "":
        raise UserError("hydra.run.dir= is empty: name a folder, or leave the key out")
    if empty := [name for name in ("ckpt_path", "replay", "run", "max_time") if node.get(name) == ""]:
        raise UserError(f"{empty[0]}= is empty: give a value, or leave the key out")
    groups = {group: node[group] for group in ("callbacks", "logger") if isinstance(node.get(group), dict)}
    parts = {f"{group}.{name}": part for group, several in groups.items() for name, part in several.items()}
    if empty := [key for key, part in parts.items() if part is None]:
        raise UserError(f"{empty[0]}=null is no part of a run: ~{empty[0]} leaves it out")
    for key, names in TABLES["instead"].items():
        for name in node.get("trainer", {}).keys() & set(names.split()):
            raise UserError(f"trainer.{name} has no effect here, or breaks the loop: set {key} instead")
    if isinstance(chosen := node.get("trainer", {}).get("strategy"), str):
        raise UserError(f"trainer.strategy={chosen} is a choice of the group strategy: set strategy=auto, ddp or fsdp2")
    written = flat(OmegaConf.to_container(config))  # an error names the key that holds the value, not one with ${...}
    by_place = sorted(kinds(node), key=lambda leaf: "${" in str(written.get(leaf[0])))
    for key, value, kind in by_place:
        if is_quoted(kind, value):
            raise UserError(quoted_line(key, value, kind, str(written.get(key))))
        if value != "???":
            r.require(key, value, kind)


def is_quoted(kind: Any, value: Any) -> bool:
    """Return whether a value is a text that would fit the annotation without its quotes, as '3' for an integer."""
    with suppress(ValueError):
        return isinstance(value, str) and not r.accepts(kind, value) and r.accepts(kind, json.loads(value))
    return False


def quoted_line(key: str, value: str, kind: Any, source: str) -> str:
    """Return the line about a quoted value. source: the value as it was given, which may refer to the environment."""
    if "${oc.env:" not in source:
        return f"{key}='{value}' is a text and must be {r.spelled(kind)}: leave out the quotes"
    typed = f"{key}='${{oc.decode:{source}}}'".replace("$", r"\$")
    line = f"{key}='{value}' is a text, as all that the environment holds, and must be {r.spelled(kind)}"
    return f'{line}: "{typed}" in the shell reads it'
