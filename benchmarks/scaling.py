"""Measure how cost grows: CPU seconds and peak memory of a rollout and an update against tokens, group size and model size.

    python benchmarks/scaling.py [--shape 3m] [--json]        # some minutes on one thread

Each point has its own process, which samples a rollout with the built-in engine and trains on it, three times. Seconds are
medians; bytes are what the work added to the process at its peak. `exponent` belongs to a power law fitted to the points by least
squares of the logarithms: 1 is linear. The last line is about the dataset: ten times the prompts should cost no memory.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import linear_regression, median

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from grpo.system import memory

CPU = torch.device("cpu")

AXES = {  # the axis that grows; PLAIN has the rest
    "prompt": [{"prompt": n} for n in (64, 128, 256, 512)],
    "answer": [{"answer": n} for n in (32, 64, 128, 256)],
    "group": [{"group": n} for n in (2, 4, 8, 16)],
    "model": [{"shape": n} for n in ("3m", "10m", "30m")],
    "dataset": [{"rows": n} for n in (10_000, 100_000)],
}
SIZE = {"model": "parameters", "dataset": "rows"}  # the size on these axes; on the others it is the axis itself
PLAIN = {"shape": "3m", "prompt": 64, "answer": 64, "group": 8}
PROMPTS = 4
MEASURES = ("rollout", "update", "rollout_bytes", "update_bytes")


def anew() -> int:
    """Return the bytes of this process, and restart its peak."""
    memory.reset_peak(CPU)
    return memory.peak(CPU)


def point(shape: str, prompt: int, answer: int, group: int) -> dict:
    """Return the seconds of a rollout and of an update, and the bytes that each adds at its peak."""
    from shapes import batch_of, llama, model_of
    from update import passes

    from grpo.engines.builtin.engine import TransformersEngine
    from grpo.engines.protocol import Sampling

    torch.set_num_threads(1)
    model = model_of(llama(shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    engine = TransformersEngine()
    engine.load_weights(model, 0)
    batch = batch_of([(prompt, [answer] * group)] * PROMPTS, model.config.vocab_size)
    asked = batch.ids[:, :prompt].tolist()

    def rollout() -> None:
        engine.sample(asked, Sampling(answer), range(len(asked)))

    def update() -> None:
        passes(model, batch, "shared_prompt", 2048)
        optimizer.step()

    found = {}
    for name, work in (("rollout", rollout), ("update", update)):
        seconds, before = [], anew()
        for _ in range(4):
            begun = time.process_time()
            work()
            seconds.append(time.process_time() - begun)
        found |= {name: median(seconds[1:]), f"{name}_bytes": memory.peak(CPU) - before}
    return found | {
        "tokens": PROMPTS * group * (prompt + answer),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def dataset(rows: int) -> dict:
    """Return the seconds to read a file with so many prompts and draw ten rollouts of it, and the bytes added at the peak."""
    import datasets  # noqa: F401 - its own memory is not the rows'

    from grpo.data.prompts import Uniform
    from grpo.extras.datasets.dataset import Dataset

    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / "train.jsonl").open("w") as out:
            out.writelines(json.dumps({"prompt": f"{i} ".ljust(100, "+")}) + "\n" for i in range(rows))
        before, begun = anew(), time.process_time()
        sampler = Uniform(Dataset(folder, ["prompt"], splits={"train": "train"}).split("train"), 16, seed=0)
        for rollout in range(10):
            sampler.draw(rollout, sampler.size)
        return {"rollout": time.process_time() - begun, "rollout_bytes": memory.peak(CPU) - before}


def exponent(sizes: list[float], values: list[float]) -> float:
    """Return b of the power law a x^b through the points, by least squares of the logarithms."""
    x, y = ([math.log(max(value, 1e-9)) for value in column] for column in (sizes, values))
    return linear_regression(x, y).slope


def apart(axis: str, change: dict, shape: str) -> dict:
    """Measure the point in its own process."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": cache}
        asked = change if axis == "dataset" else {**PLAIN, "shape": shape, **change}
        command = [sys.executable, __file__, "--point", json.dumps(asked)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{asked} failed:\n{done.stderr[-2000:]}")
    return {**change, **json.loads(done.stdout.splitlines()[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--shape", default="3m")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--point", type=json.loads, help="measure this point in this process")
    given = parser.parse_args()
    if given.point:
        print(json.dumps(dataset(**given.point) if "rows" in given.point else point(**given.point)))
        return
    results = {}
    for axis in given.axes:
        points = [apart(axis, change, given.shape) for change in AXES[axis]]
        sizes = [found[SIZE.get(axis, axis)] for found in points]
        measures = [name for name in MEASURES if name in points[0]]
        exponents = {name: exponent(sizes, [found[name] for found in points]) for name in measures}
        results[axis] = {"points": points, "exponents": exponents}
        if not given.json:
            for size, found in zip(sizes, points, strict=True):
                cells = "".join(
                    f"{name}: {found[name] / 2**20:8.1f} MB   "
                    if "bytes" in name
                    else f"{name}: {found[name]:8.3f} s   "
                    for name in measures
                )
                print(f"{axis:8s} {size:9d}   {cells}")
            print(f"{axis:8s}  exponent   " + "   ".join(f"{n}: {b:.2f}" for n, b in exponents.items()), flush=True)
    if given.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
