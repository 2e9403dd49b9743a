"""Measure the time and the bytes of a checkpoint: as a folder with checksums on the disk, and as the pickle of version 0.1.

    python benchmarks/checkpoints.py [--parameters 94] [--folder FOLDER]     # millions; a minute, 6 GB of memory and of disk

The state is that of AdamW: weights and two moments in float32. Given are medians of five.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from grpo.training.checkpoints import PlainCheckpoints, fault_of

WIDTH = 1000


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def size(path: Path) -> float:
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir())) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=94.0)
    parser.add_argument("--folder")
    given = parser.parse_args()
    layers = range(max(1, round(given.parameters)))
    weights = {f"layer.{i}.weight": torch.randn(WIDTH, 1_000_000 // WIDTH) for i in layers}
    moments = {i: {"exp_avg": torch.randn_like(w), "exp_avg_sq": w**2} for i, w in enumerate(weights.values())}
    state = {"state_dict": weights, "optimizer_states": [{"state": moments}]}
    with tempfile.TemporaryDirectory(dir=given.folder) as scratch:
        plain, pickle = Path(scratch, "00001.ckpt"), Path(scratch, "pickle.ckpt")
        ways = {
            "pickle": lambda: torch.save(state, pickle),
            "folder": lambda: PlainCheckpoints().save_checkpoint(state, plain),
            "check of a folder": lambda: fault_of(plain),
        }
        for name, way in ways.items():
            took = [seconds(way) for _ in range(5)]
            print(f"{name:20}{median(took):6.2f} s  ({min(took):.2f} to {max(took):.2f})", flush=True)
        print(f"{'bytes':20}{size(pickle):6.3f} GB as a pickle, {size(plain):.3f} GB as a folder")


if __name__ == "__main__":
    main()
