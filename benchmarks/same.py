"""Compare two trees of this project bit by bit: runs of train.py in both, on the same base models.

    python benchmarks/same.py OTHER_TREE [--keep FOLDER] [--out FOLDER] [--data FOLDER] [CASE ...]

It compares metrics.csv without times and memory, every rollout and evaluation, the weights and the state of the optimizer. Each
case prints a line: "same" or the first difference, and the CPU seconds of both. --keep: folder for the runs of OTHER_TREE; runs
that exist there are not repeated. --out: folder for the runs of this tree. --data: a folder that has gsm8k_train_1000.jsonl and
gsm8k_test.jsonl.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

from grpo.training.checkpoints import PlainCheckpoints

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("GRPO_TEST_DATA", ROOT.parent / "shared" / "data"))
LEFT_OUT = ("time/", "tokens/s", "memory/", "rollout/flying", "rollout/buffered")  # they depend on the machine
ALL = "trainer=cpu engine=transformers callbacks.samples.token_logprobs=true"
SMALL = "eval.limit=20"
CASES = {  # the command lines of one run; the second resumes it
    "demo": ["rollout.num_rollouts=20 eval.limit=50"],
    "gsm8k": ["experiment=gsm8k_tiny task.path=DATA rollout.num_rollouts=4 eval.limit=20 eval.every=2"],
    "turns": [f"{SMALL} task=calculator model=tiny rollout.num_rollouts=4 eval.every=2"],
    "lora_kl": [f"{SMALL} adapter=lora optim.optimizer.lr=1.5e-4 algo/kl=loss rollout.num_rollouts=5"],
    "resumed": [f"{SMALL} callbacks.checkpoint.every=3 rollout.num_rollouts={n}" for n in (3, 6)],
    "dapo": [f"{SMALL} algo=dapo algo.num_minibatches=4 rollout.num_rollouts=4"],
    "rloo": [f"{SMALL} algo=rloo rollout.num_rollouts=3"],
    "reinforce_pp": [f"{SMALL} algo=reinforce_pp algo.num_epochs=2 rollout.num_rollouts=3"],
    "entropy": [f"{SMALL} algo.entropy.target=0.5 algo.top_entropy=0.5 rollout.num_rollouts=3"],
}


def run(tree: Path, case: str, folder: Path, data: Path) -> float:
    """Run the case in `folder`, unless it is there already. Return its CPU seconds."""
    lines, note = [f"{ALL} {line}" for line in CASES[case]], folder / "same.json"
    if note.is_file() and (before := json.loads(note.read_text()))["lines"] == lines:
        return before["seconds"]
    shutil.rmtree(folder, ignore_errors=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    begun = cpu_seconds()
    for i, line in enumerate(lines):
        command = [sys.executable, "train.py", *line.replace("DATA", str(data)).split()]
        command += [f"hydra.run.dir={folder}", *([f"ckpt_path={folder}/checkpoints/last.ckpt"] if i else [])]
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{case} failed in {tree}:\n{done.stderr}")
    seconds = cpu_seconds() - begun
    note.write_text(json.dumps({"lines": lines, "seconds": seconds}))
    return seconds


def cpu_seconds() -> float:
    """Return the CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def left(folder: Path) -> dict[tuple, Any]:
    """Return each number, text and tensor that a run left, by its place: the file, the column or name, and so on."""
    metrics = pd.read_csv(folder / "metrics.csv", dtype=str, keep_default_na=False).to_dict("list")
    checkpoint = PlainCheckpoints().load_checkpoint(folder / "checkpoints" / "last.ckpt")
    found = {
        "metrics.csv": {name: column for name, column in metrics.items() if not name.startswith(LEFT_OUT)},
        "last.ckpt": {name: checkpoint[name] for name in ("state_dict", "optimizer_states")},
    }
    for file in sorted([*folder.glob("*/*.parquet"), *folder.glob("checkpoints/last/*.safetensors")]):
        read = pq.ParquetFile(file).read().to_pydict() if file.suffix == ".parquet" else load_file(file)
        found[str(file.relative_to(folder))] = read
    return dict(leaves(found, ()))


def leaves(node: Any, place: tuple) -> Iterator[tuple[tuple, Any]]:
    if not isinstance(node, (dict, list, tuple)):
        yield place, node
        return
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        yield from leaves(value, (*place, key))


def same(a: Any, b: Any) -> bool:
    """Return whether a and b are equal bit by bit; NaN equals NaN."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and repr(a) == repr(b)
    bits = [tensor.flatten().contiguous().view(torch.uint8) for tensor in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


def difference(ours: dict[tuple, Any], theirs: dict[tuple, Any]) -> str:
    """Describe the columns and tensors that only one side has, and the first that differs; empty if there are none."""
    told: list[str] = []
    for side, some, others in (("here", ours, theirs), ("there", theirs, ours)):
        only = list(dict.fromkeys(" ".join(map(str, place[:2])) for place in some if place not in others))
        told += [f"only {side}: {', '.join(only[:5])}{f' and {len(only) - 5} more' * (len(only) > 5)}"] * bool(only)
    differ = [place for place in ours if place in theirs and not same(ours[place], theirs[place])]
    for place in differ[:1]:
        a, b = ours[place], theirs[place]
        values = f"{a!r:.200} here, {b!r:.200} there"
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            values = f"by up to {(a.double() - b.double()).abs().max():.3g}" if a.shape == b.shape else "in shape"
        told.append(f"{len(differ)} of {len(ours)} differ, first {' '.join(map(str, place))}: {values}")
    return "; ".join(told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--data", type=Path, default=DATA)
    given = parser.parse_intermixed_args()
    if unknown := [case for case in given.cases if case not in CASES]:
        parser.error(f"there is no case {unknown[0]}; there are: {', '.join(CASES)}")
    differ = False
    with tempfile.TemporaryDirectory() as scratch:
        here, there = (given.out or Path(scratch, "here")).resolve(), (given.keep or Path(scratch, "there")).resolve()
        for case in given.cases or CASES:
            shutil.rmtree(here / case, ignore_errors=True)
            theirs = run(given.other.resolve(), case, there / case, given.data.resolve())
            ours = run(ROOT, case, here / case, given.data.resolve())
            found = difference(left(here / case), left(there / case))
            differ = differ or bool(found)
            print(f"{case:13s} {ours:4.0f} s here, {theirs:4.0f} s there: {found or 'same'}", flush=True)
    sys.exit(differ)


if __name__ == "__main__":
    main()
