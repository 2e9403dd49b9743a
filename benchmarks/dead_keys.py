"""Replace one value of the configuration at a time, run, and look for what changed: does each key do what it says?

    python benchmarks/dead_keys.py [WORD ...]

dead_keys.yaml has small set-ups of two rollouts of the demo, and for each key another allowed value, under what it should change:

    numbers    weights, metrics, tables of samples
    files      which files there are, or what is in them
    terminal   the lines that are printed
    refused    the value cannot act in this set-up, and one line says so
    nothing    by the reason for it

Each run is a fork of this process, beside an unchanged one of its set-up. The record of the configuration (config.yaml,
manifest.json, the report's) is not looked at: it is what a run says, not what it does. WORD: only keys with one of these words.
Prints a line for each key, and at the end the keys that change nothing, each with its reason from the table. The exit code is 1
if a key does not do what the table says.
"""

import contextlib
import hashlib
import importlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from grpo.config.composing import composed
from grpo.config.explain import explain
from grpo.system.ranges import flat

ROOT = Path(__file__).resolve().parents[1]

TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
KINDS = ("numbers", "files", "terminal")  # the first of these that differs is what a key changes
IMPORTED = "lightning pandas torch.utils.tensorboard grpo.training.module grpo.extras.report.run_plots train"
# what is measured, and so differs between equal runs
MEASURED = re.compile(r"(time|memory)/|tokens/s$|rollout/(flying|buffered)_groups|engine/|seconds|_time$")
LINES = re.compile(r"^ +(beside|rest|rollout|update|sync|eval|checkpoint|memory|tokens/s|time)\b|it/s|/report.html")
RECORDS = {"config.yaml", "manifest.json", "packages.txt", "uncommitted.patch", "train.log"}


def keys_in(config: DictConfig) -> set[str]:
    """Return the leaves of a composed configuration, by dotted key, without those of Hydra's own, such as _target_."""
    return {key for key in flat(OmegaConf.to_container(config)) if not key.rpartition(".")[2].startswith("_")}


def trials() -> Iterator[tuple[str, str, str, Any]]:
    """Yield (set-up, kind, key, value) of each trial of the table."""
    for name, setup in TABLE["setups"].items():
        for kind in (*KINDS, "refused"):
            for key, value in setup.get(kind, {}).items():
                yield name, kind, key, value
        for values in setup.get("nothing", {}).values():
            for key, value in values.items():
                yield name, "nothing", key, value


def words_of(name: str, folder: Path) -> list[str]:
    """Return the arguments of a set-up. FOLDER in them is one where files may be written."""
    words = f"{TABLE['all']} {TABLE['setups'][name].get('words', '')}"
    return words.replace("ROOT", str(ROOT)).replace("FOLDER", str(folder)).split()


def left_by(config: DictConfig, changes: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Run a configuration in a fork, with some values replaced. Returns what the run leaves, by kind; `refused`: the line of a
    run that does not start."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "run").mkdir(parents=True)
    if not (child := os.fork()):
        with contextlib.suppress(BaseException):
            play(config, changes, folder)
        os._exit(0)
    os.waitpid(child, 0)
    line = (folder / "line").read_text()
    if line:
        return {"refused": line}
    lines = [re.sub(r"\d[\d.,:]*", "#", line) for line in (folder / "out").read_text().splitlines()]
    return {
        "numbers": numbers(folder / "run"),
        "files": files(folder),
        "terminal": [line for line in lines if line and not LINES.search(line)],
    }


def play(config: DictConfig, changes: Mapping[str, Any], folder: Path) -> None:
    """Train in this process. Writes what is printed to FOLDER/out, and the line of a mistake to FOLDER/line."""
    from train import train

    (folder / "line").write_text("it died")
    out = os.open(folder / "out", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.chdir(folder)
    line = ""
    try:
        from grpo.apps.cli import announced

        for key, value in changes.items():
            value = value.replace("FOLDER", str(folder)) if isinstance(value, str) else value
            OmegaConf.update(config, key, value, merge=False)
        train(announced(config, [f"{key}={value}" for key, value in changes.items()]))
    except BaseException as error:
        line = explain(error, "train") or f"{type(error).__name__}: {error}"
    sys.stdout.flush()
    (folder / "line").write_text(line)


def numbers(run: Path) -> dict[str, Any]:
    """Return the metrics, the samples and the digests of all tensors that a run leaves, without what is measured."""
    import pandas as pd
    from safetensors.numpy import load_file

    found: dict[str, Any] = {}
    tables = [(file, pd.read_csv(file, float_precision="round_trip")) for file in run.glob("metrics.csv")]
    tables += [
        (file, pd.read_parquet(file)) for file in [*run.glob("rollouts/*.parquet"), *run.glob("evaluations/*.parquet")]
    ]
    for file, table in tables:
        for name in (name for name in table if not MEASURED.search(name)):
            found[f"{file.stem}:{name}"] = table[name].to_json()
    for file in run.glob("checkpoints/**/*.safetensors"):
        for name, tensor in load_tensors(file, load_file).items():
            found[f"{file.parent.name}:{name}"] = hashlib.sha256(tensor.tobytes()).hexdigest()
    return dict(sorted(found.items()))


def load_tensors(file: Path, load: Any) -> dict[str, Any]:
    """Return the tensors of a file; numpy has no bfloat16, so that their bytes are taken where there is one."""
    try:
        return load(file)
    except (TypeError, KeyError):
        from safetensors import safe_open

        with safe_open(file, "pt") as tensors:
            return {name: tensors.get_tensor(name).float().numpy() for name in tensors.keys()}  # noqa: SIM118


def files(folder: Path) -> dict[str, Any]:
    """Return the files below a folder, with what can be compared of them: the columns of tables, the length of texts."""
    import pandas as pd
    from safetensors import safe_open

    found: dict[str, Any] = {}
    for file in sorted(file for file in folder.rglob("*") if file.is_file() or file.is_symlink()):
        name = str(file.relative_to(folder))
        if file.name in RECORDS or name in ("out", "line") or "/code/" in name:
            continue
        if "tfevents" in name:
            found[re.sub(r"tfevents.*", "tfevents", name)] = tensorboard(file)
        elif file.suffix == ".parquet":
            found[name] = list(pd.read_parquet(file))
        elif file.suffix == ".safetensors":
            with safe_open(file, "pt") as tensors:
                found[name] = sorted(tensors.keys())
        elif file.is_symlink():
            found[name] = os.readlink(file)
        else:
            found[name] = file.read_text(errors="replace").count("\\boxed") if file.suffix == ".html" else ""
    return found


def tensorboard(file: Path) -> list[int]:
    """Return how many texts a file of TensorBoard has, and how many answers are in them."""
    return [file.read_bytes().count(word) for word in (b"text_summary", b"boxed")]


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, str]:
    """Return the kind of what differs between two runs, and an example of it; ("nothing", "") for equal ones."""
    if "refused" in before or "refused" in after:
        return ("refused", after.get("refused", "")) if "refused" not in before else ("refused", before["refused"])
    both = (
        before["numbers"].keys() & after["numbers"].keys()
    )  # what only one run has is another file, or another column
    before, after = (run | {"numbers": {key: run["numbers"][key] for key in sorted(both)}} for run in (before, after))
    for kind in KINDS:
        if before[kind] != after[kind]:
            return kind, example(before[kind], after[kind])
    return "nothing", ""


def example(before: Any, after: Any) -> str:
    """Return a few words about the first difference."""
    if isinstance(before, list):
        more = [f"+ {line}" for line in after if line not in before]
        less = [f"- {line}" for line in before if line not in after]
        return (more or less or ["the number of lines"])[0][:90]
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return " ".join(names[:3])


def prepare() -> None:
    """Import what each run needs, so that a fork has it; the numbers of one thread are the same in each."""
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in IMPORTED.split():
        importlib.import_module(name)
    from grpo.apps.cli import quiet
    from grpo.runs.provenance import packages

    quiet()
    packages()  # takes a second, and is kept


def outcomes(chosen: list[tuple[str, str, str, Any]], folder: Path) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield (set-up, key, kind of the table, kind that was seen, example) for each trial. The first one of a set-up changes
    nothing, and has the key "" and the kind "nothing"."""
    for name, of_setup in groupby(chosen, itemgetter(0)):
        config = composed("train", [*words_of(name, folder), f"output_dir={folder}/run"])
        unchanged = left_by(config, {}, folder)
        yield name, "", "nothing", *changed(unchanged, left_by(config, {}, folder))
        for _, kind, key, value in of_setup:
            yield name, key, kind, *changed(unchanged, left_by(config, {key: value}, folder))


def main(words: list[str]) -> int:
    chosen = [t for t in trials() if not words or any(word in f"{t[0]}: {t[2]}" for word in words)]
    wrong, begun, counts = 0, time.monotonic(), dict.fromkeys([*KINDS, "refused", "nothing"], 0)
    prepare()
    with tempfile.TemporaryDirectory() as temporary:
        for name, key, kind, seen, words_ in outcomes(chosen, Path(temporary, "runs")):
            wrong += kind != seen
            counts[kind] += bool(key)
            mark = "" if kind == seen else f"  WRONG: {kind} should change"
            print(f"{name}: {key or '(unchanged)'}  {seen}  {words_}{mark}", flush=True)
    print(f"\n{sum(counts.values())} keys in {time.monotonic() - begun:.0f} s: {counts}")
    reasons = [
        (reason, " ".join(keys))
        for setup in TABLE["setups"].values()
        for reason, keys in setup.get("nothing", {}).items()
    ]
    for reason, names in [*reasons, *TABLE["nothing"].items()]:
        print(f"nothing: {names}: {reason}")
    for reason, names in TABLE["untried"].items():
        print(f"untried: {names}: {reason}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
