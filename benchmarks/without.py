"""Delete an appendix from a copy of this tree, and see whether what is left works.

    python benchmarks/without.py NAME [...] [--steps=imports,composes,trains,tests]
    python benchmarks/without.py all

With an appendix go the appendices whose NEEDS name it, its tests, the tasks and plugins of Hydra that import it, and the options
of conf/ that name one of these or choose such an option. A choice of the configuration that is gone becomes none or off, or
Hydra's own; a slot of an object that stays becomes null, an entry of a list is left out. Then every module is imported, the
configuration is composed, a run of one rollout trains, and the quick tests that remain are run. Prints a line for each
appendix and step: `ok`, or the last line of what failed. The exit code is 1 if anything did.

`all` deletes each appendix by itself; `book` deletes all of them at once.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STEPS = ("imports", "composes", "trains", "tests")
NONE = ("none", "off", "plain", "null", "path")  # what a choice becomes, the first of them that its group has
IMPORTS = """
import importlib, pkgutil, sys
import grpo
assert grpo.__path__[0].startswith(sys.argv[1])
failed = []
for one in pkgutil.walk_packages(grpo.__path__, "grpo.", onerror=lambda name: None):
    try:
        if not one.name.endswith("__main__"):
            importlib.import_module(one.name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("grpo", "tasks"):  # another package may well not be installed
            failed.append(f"{one.name} names {error.name}")
sys.exit("; ".join(failed) or None)
"""
COMPOSES = """
import sys
from grpo.config.composing import composed
for name in sys.argv[1:]:
    composed(name, ["output_dir=."])
"""
SETTINGS = """model=path model.path={toy} task.path={data} debug=smoke rollout.num_rollouts=1 max_tokens=8 forecast=false
    trainer=cpu output_dir={out} hydra.run.dir={out}"""


def appendices(root: Path = ROOT) -> dict[str, set[str]]:
    """Return the names of the appendices, each with those that it needs."""
    return {
        path.name: needs(path) for path in sorted((root / "grpo/extras").iterdir()) if (path / "__init__.py").is_file()
    }


def needs(folder: Path) -> set[str]:
    body = ast.parse((folder / "__init__.py").read_text(encoding="utf-8")).body
    found = [node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NEEDS"]
    return {name for value in found for name in ast.literal_eval(value)}


def gone_with(names: Iterable[str], root: Path = ROOT) -> set[str]:
    """Return the names and those of the appendices that need one of them."""
    gone, known = set(names), appendices(root)
    while more := {name for name, needed in known.items() if needed & gone} - gone:
        gone |= more
    return gone


class Tree:
    """A copy of the project in `root`, from which appendices are deleted."""

    def __init__(self, root: Path, names: Iterable[str]):
        self.root, self.gone = root, gone_with(names)
        listed = subprocess.check_output(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True
        ).splitlines()
        for name in (name for name in listed if (ROOT / name).is_file()):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
        for name in self.gone:
            for folder in ("grpo/extras", "tests/extras"):
                shutil.rmtree(root / folder / name, ignore_errors=True)
        self.named = re.compile(rf"\bgrpo\.extras\.({'|'.join(self.gone)})\b")
        tasks = [
            path for folder in ("tasks", "hydra_plugins") for path in (root / folder).rglob("*.py") if self.names(path)
        ]
        for task in tasks:
            task.unlink()
        modules = [".".join(task.relative_to(root).with_suffix("").parts) for task in tasks]
        if modules:
            self.named = re.compile(rf"{self.named.pattern}|\b({'|'.join(map(re.escape, modules))})\b")
        self.options: set[str] = set()
        while self.strike():
            pass

    def names(self, file: Path) -> bool:
        """Return whether a file names what is gone, other than in a comment."""
        return any(self.named.search(line.partition("#")[0]) for line in file.read_text(encoding="utf-8").splitlines())

    def strike(self) -> bool:
        """Delete the options that name what is gone, and mend what chooses them; return whether there was one."""
        conf, before = self.root / "conf", len(self.options)
        for file in sorted(conf.rglob("*.yaml")):
            option = str(file.relative_to(conf).with_suffix(""))
            self.empty_slots(file)
            if self.names(file) or self.chooses_none(file):
                self.options.add(option)
                file.unlink()
        return len(self.options) > before

    def empty_slots(self, file: Path) -> None:
        """Make null what is gone inside of an object that stays, and leave it out of lists."""
        lines, within = [], -1  # the indent of a slot whose lines are left out
        text = file.read_text(encoding="utf-8").splitlines(keepends=True)
        stays = [len(line) - len(line.lstrip()) for line in text if "_target_:" in line and not self.named.search(line)]
        for line in text:
            indent = len(line) - len(line.lstrip())
            if within >= 0 and indent > within:
                continue
            within = -1
            if "[" in line and "{" not in line:
                line = re.sub(rf"(, )?(?:{self.named.pattern})[.\w]*", "", line)
            elif self.named.search(line) and "_target_:" in line and any(depth < indent for depth in stays):
                within = indent - 2
                lines[-1] = lines[-1].partition(":")[0] + ": null\n"
                continue
            elif self.named.search(line) and not stays and "_target_:" not in line and line.partition(":")[1]:
                line = line.partition(":")[0] + ": null\n"
            lines.append(line)
        if lines != text:
            file.write_text("".join(lines), encoding="utf-8")

    def chooses_none(self, file: Path) -> bool:
        """Mend the choices of a file; return whether it cannot do without one that is gone."""
        conf, lines, unset, lost = self.root / "conf", [], [], False
        group = file.parent.relative_to(conf)
        for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
            if members := re.match(r"defaults: \[([\w, ]+)\]", line):  # a list of options of its own group
                left = [one for one in members[1].split(", ") if str(group / one) not in self.options]
                lost |= not left or (len(left) < len(members[1].split(", ")) == 2)
                line = line.replace(members[1], ", ".join(left))
            elif choice := re.match(r'  - (?:override )?(/?)([\w/]+)(?:@\w+)?: "?(\w+)"?', line):
                slash, where, one = choice.groups()
                where = where if slash or group == Path(".") else str(group / where)
                if f"{where}/{one}" in self.options:
                    if where.startswith("hydra/"):  # Hydra has its own
                        continue
                    others = [other for other in NONE if other == "null" or (conf / where / f"{other}.yaml").is_file()]
                    lost |= group != Path(".")
                    line = line[: choice.start(3)].rstrip('"') + f'"{others[0]}"\n'.replace('"null"', "null")
                    unset += [f"${{{where}}}"] if others[0] == "null" else []
            elif any(reference in line for reference in unset):  # the choice of a group that has no option left
                line = re.sub(r"\$\{\w+\}", "null", line)
            lines.append(line)
        if not lost:
            file.write_text("".join(lines), encoding="utf-8")
        return lost

    def imports(self) -> str:
        return self.failed("-c", IMPORTS, str(self.root))

    def composes(self) -> str:
        programs = [name for name in ("train", "eval", "serve") if (self.root / f"conf/{name}.yaml").is_file()]
        return self.failed("-c", COMPOSES, *programs)

    def trains(self) -> str:
        paths = {"toy": ROOT / "tests/data/run/checkpoints/last", "data": ROOT / "tests/data", "out": self.root / "out"}
        words = ["task=gsm8k", *SETTINGS.format(**paths).split()]
        if not (self.root / "conf/task/gsm8k.yaml").is_file():
            task = next(name for name in ("sums", "countdown") if (self.root / f"conf/task/{name}.yaml").is_file())
            words = [f"task={task}", *(word for word in words if not word.startswith("task"))]
        elif "grading" in self.gone:  # the task names its reward by a word, which the error of a run explains
            words.append("task.rewards=same_text")
        return self.failed("train.py", *words)

    def tests(self) -> str:
        return self.failed("-m", "pytest", "-p", "no:cacheprovider", "--no-header", f"--basetemp={self.root}/.tests")

    def failed(self, *words: str) -> str:
        """Run Python in the tree; return the last line of what it wrote if it failed."""
        shared = os.environ.get("GRPO_TEST_DATA", str(ROOT.parent / "shared" / "data"))
        environment = {**os.environ, "PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1", "GRPO_TEST_DATA": shared}
        done = subprocess.run([sys.executable, *words], cwd=self.root, env=environment, capture_output=True, text=True)
        (self.root / "log.txt").write_text(done.stdout + done.stderr)
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        return (said[-1] if said else f"exit code {done.returncode}") if done.returncode else ""


def without(names: Iterable[str], steps: Iterable[str] = STEPS, log: Path | None = None) -> dict[str, str]:
    """Return what failed by step, "" for a step that went well. log: a file for all that the steps wrote."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder).resolve() / "tree", names)
        found = {}
        for step in steps:
            begun = time.monotonic()
            found[step] = getattr(tree, step)()
            print(f"{' '.join(names):16}{step:10}{time.monotonic() - begun:7.0f} s  {found[step] or 'ok'}", flush=True)
            if log:
                with log.open("a") as file:
                    file.write(f"== {names} {step}\n{(tree.root / 'log.txt').read_text()}")
        return found


def main(words: list[str]) -> int:
    steps = next((word.removeprefix("--steps=").split(",") for word in words if word.startswith("--steps=")), STEPS)
    log = next((Path(word.removeprefix("--log=")) for word in words if word.startswith("--log=")), None)
    chosen = [word for word in words if not word.startswith("--")]
    known = [*appendices()]
    if unknown := {*chosen} - {*known, "all", "book"}:
        sys.exit(f"no appendix: {', '.join(sorted(unknown))}; there are {', '.join(known)}, all and book")
    trees = (
        [[name] for name in known]
        if chosen == ["all"]
        else [known]
        if chosen == ["book"]
        else [[name] for name in chosen]
    )
    return int(any([any(without(names, steps, log).values()) for names in trees]))  # a list: each tree is tried


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
