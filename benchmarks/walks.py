"""Draw the rooms and their imports, and follow four objects through one run of the demo.

    python benchmarks/walks.py

The picture: for each room, the rooms it imports from, with the number of imports. A circle is two or more modules that
import each other, imports for types alone included.

A walk: an object is followed from the call that makes it an argument. A stay is a function of the project that is called with the
object. A climb is a call from a room to one that comes later in the picture: it is possible only through an object or a function
that the earlier room was given. The run has one rollout of eight samples, without preflight.

The last line says how much of the project this plain run enters: functions, their files, and lines, comments included.
"""

import ast
import os
import re
import runpy
import sys
import tempfile
import threading
from collections import Counter
from contextlib import redirect_stdout
from functools import cache
from importlib import import_module
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType

import lines

Stay = tuple[str, str]  # a file and a function of it
ROOT = Path(__file__).resolve().parents[1]
MAP = (ROOT / "grpo/__init__.py").read_text().partition("The core")[0]
ROOMS = re.findall(r"^    ([a-z]+) {2,}\S", MAP, re.M)
WALKS = {  # name: file, function and argument where a walk begins, and a part of the argument or none
    "the configuration": ("train.py", "train", "config", ""),
    "an example": ("grpo/rollout/episodes.py", "episode", "example", ""),
    "the rewards": ("grpo/objectives/algorithm.py", "credit", "scores", "rewards"),
    "the batch": ("grpo/training/module.py", "training_step", "batch", ""),
}
COMMAND = "preflight=off forecast=false rollout.num_rollouts=1 rollout.prompts=2 rollout.group_size=4 eval.every=0 callbacks=none"


def imports() -> dict[str, set[str]]:
    """Return the modules of grpo that each module imports, imports for types alone included."""
    paths = [path for path in lines.files() if path.is_relative_to(ROOT / "grpo")]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
    edges: dict[str, set[str]] = {}
    for name, path in names.items():
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        pairs = [(node.module, alias.name) for node in nodes for alias in node.names]
        targets = {f"{module}.{alias}" if f"{module}.{alias}" in names else module for module, alias in pairs}
        edges[name] = (targets & names.keys()) - {name}
    return edges


def circles(edges: dict[str, set[str]]) -> list[set[str]]:
    """Return the groups of modules that reach each other."""

    def reached(start: str) -> set[str]:
        modules, todo = set(), [start]
        while todo:
            fresh = edges[todo.pop()] - modules
            modules |= fresh
            todo += fresh
        return modules

    reach = {module: reached(module) for module in edges}
    groups = {frozenset(b for b in reach[a] if a in reach[b]) for a in edges if a in reach[a]}
    return sorted(map(set, groups), key=sorted)


def room(module: str) -> str:
    """Return the room of a module or file: rollout for grpo.rollout.types; extras; tasks; program for train.py."""
    parts = module.removesuffix(".py").replace("/", ".").split(".")
    if parts[0] == "grpo" and parts[1:] and parts[1] in ROOMS and parts[-1] != "__main__":
        return parts[1]
    return "tasks" if parts[0] == "tasks" else "program"


class Walk:
    """Follows one object: notes every call that has it as an argument, from the first call of a function on."""

    def __init__(self, file: str, function: str, argument: str, part: str) -> None:
        self.begins, self.argument, self.part = (file, function), argument, part
        self.object: object = None
        self.stays: dict[Stay, str] = {}  # and the file that calls it first

    def see(self, stay: Stay, arguments: dict[str, object], caller: str) -> None:
        if self.object is None and stay == self.begins:
            whole = arguments[self.argument]
            self.object = getattr(whole, self.part) if self.part else whole
            self.stays[stay] = stay[0]
        if self.object is not None and stay not in self.stays and any(a is self.object for a in arguments.values()):
            self.stays[stay] = caller

    def show(self) -> str:
        places = {name: place for place, name in enumerate(ROOMS)} | dict.fromkeys(("program", "tasks"), len(ROOMS))
        climbs = {stay for stay, caller in self.stays.items() if places[room(stay[0])] > places[room(caller)]}
        text = f"{len(self.stays)} stays, {len({room(file) for file, _ in self.stays})} rooms, {len(climbs)} climbs"
        for file, function in self.stays:
            climb = f"  (a climb from {self.stays[file, function]})" if (file, function) in climbs else ""
            text += f"\n    {file} {function}{climb}"
        return text


def walked() -> tuple[dict[str, Walk], set[CodeType]]:
    """Return the walks of one run of train.py in this process, and the functions of the project that it enters."""
    walks, entered = {name: Walk(*begins) for name, begins in WALKS.items()}, set()

    @cache
    def stay_of(code: CodeType) -> Stay | None:
        file = code.co_filename.removeprefix(f"{ROOT}/")
        ours = file.split("/")[0] in ("train.py", "grpo", "tasks") and code.co_name[0] != "<"
        return (file, code.co_name) if ours else None

    def profile(frame: FrameType, event: str, result: object) -> None:
        if event == "call" and (stay := stay_of(code := frame.f_code)):
            entered.add(code)
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            arguments = {name: frame.f_locals.get(name) for name in names}
            caller = frame.f_back
            while caller and not stay_of(caller.f_code):
                caller = caller.f_back
            for walk in walks.values():
                walk.see(stay, arguments, stay_of(caller.f_code)[0] if caller else stay[0])

    for library in ("lightning", "transformers", "tensorboard"):  # imports are slow under a profile
        import_module(library)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        sys.argv = ["train.py", *COMMAND.split(), f"hydra.run.dir={folder}"]
        sys.path.insert(0, str(ROOT))
        os.chdir(ROOT)
        sys.setprofile(profile)
        threading.setprofile(profile)
        try:
            runpy.run_path("train.py", run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return walks, entered


def size(entered: set[CodeType]) -> tuple[int, int, int]:
    """Return the number of functions, of their files, and of their lines. Bodies of classes do not count."""
    functions = {code for code in entered if code.co_flags & CO_OPTIMIZED}
    within = set()
    for code in functions:
        last = max(line for _, _, line in code.co_lines() if line)
        within |= {(code.co_filename, line) for line in range(code.co_firstlineno, last + 1)}
    return len(functions), len({code.co_filename for code in functions}), len(within)


def main() -> None:
    edges = imports()
    arrows = Counter((room(a), room(b)) for a, targets in edges.items() for b in targets if room(a) != room(b))
    for name in ROOMS:
        print(
            f"{name:12}",
            ", ".join(f"{to} {arrows[name, to]}" for to in ROOMS if (name, to) in arrows) or "no other room",
        )
    between = [(a, b) for a, b in arrows if a in ROOMS and b in ROOMS]
    upward = [f"{a} -> {b}" for a, b in between if ROOMS.index(b) > ROOMS.index(a)]
    print(f"{len(ROOMS)} rooms, {len(between)} arrows, upward: {', '.join(upward) or 'none'}")
    print("circles:", "; ".join(" ".join(sorted(group)) for group in circles(edges)) or "none")
    walks, entered = walked()
    for name, walk in walks.items():
        print(f"\n{name}: {walk.show()}")
    print("\nthe plain run enters {} functions in {} files, {:,} lines".format(*size(entered)))


if __name__ == "__main__":
    main()
