"""Measure the project on one GPU in eight minutes: updates, rollouts, the checks before a run, and TRL's update beside ours.

    python benchmarks/carry.py       # once, on a machine with a network: packs what a machine without one may lack
    python benchmarks/gpu.py [--parts update rollout ...] [--shapes 0.5b 1.5b ...] [--minutes 8] [--out gpu.json]

Models have the shapes of Qwen 2.5 (0.5b, 1.5b, 7b-lora) and of Qwen 3 0.6B with two rows of 16,384 or 65,536 tokens, with random
weights; benchmarks/on_gpu/models.py has lengths. `--shapes tiny` tries everything without a GPU. A part runs in a process of its
own with a time limit, the most important ones first, and the others go on if it fails. Overrides are train.py's.

tokens/s counts the tokens of all rows. MFU is the arithmetic that the update needs, per second, over the device's peak: 2
operations for each weight and token that must pass (a prompt once a group; the head for sampled tokens only) and 4 for each pair
of tokens and channel in attention, three times for forward and backward; frozen weights twice. Nothing computed again counts.
6N is the usual estimate: 6 operations for each parameter and token of all rows; with LoRA 4, and 6 for those of the adapter.
warm-up: seconds of the first step beyond a later one. compile: torch's own count. One cache serves all processes, so the first
one of a shape compiles and later ones read. waits: how often the host waited for the device in one update. busy: the share of a
step in which kernels run. peak and reserved: GB of tensors and of the allocator; forecast: what a run says beforehand. kernel:
of layout, attention, head and layers.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from on_gpu import jobs
from on_gpu.jobs import Job
from on_gpu.table import completed, line, table

HERE = Path(__file__).parent
CARRIED = HERE.parent / "build" / "carried"  # made by benchmarks/carry.py
VARIANTS = {
    "update": ("shared_prompt", "recompute", "no_liger", "packed", "padded"),
    "rollout": ("builtin", "vllm"),
    "preflight": ("",),
    "trl": ("",),
}
SHAPES = ("0.5b", "1.5b", "7b-lora", "0.6b-16k", "0.6b-65k", "tiny")
ORDER = [  # the most important first
    Job("update", "shared_prompt", "0.5b"),
    Job("update", "shared_prompt", "1.5b"),
    Job("rollout", "builtin", "0.5b"),
    Job("preflight", "", "0.5b"),
    Job("update", "recompute", "7b-lora"),
    Job("update", "recompute", "0.6b-16k"),
    Job("trl", "", "0.5b"),
    Job("rollout", "vllm", "0.5b"),
    Job("update", "recompute", "1.5b"),
    Job("update", "no_liger", "1.5b"),
    Job("rollout", "builtin", "1.5b"),
    Job("update", "recompute", "0.6b-65k"),
    Job("trl", "", "1.5b"),
    Job("update", "shared_prompt", "7b-lora"),
    Job("update", "shared_prompt", "0.6b-16k"),
    Job("preflight", "", "1.5b"),
    Job("rollout", "vllm", "1.5b"),
    Job("update", "recompute", "0.5b"),
    Job("update", "packed", "0.5b"),
    Job("update", "padded", "0.5b"),
]


def split(text: str) -> list[str]:
    """Return the words of a list with commas."""
    return [word for word in text.split(",") if word]


def chosen(parts: list[str] | None, shapes: list[str] | None) -> list[Job]:
    """Return the jobs of these parts and shapes, the most important first. None: those of the usual measurement."""
    if parts is None and shapes is None:
        return ORDER
    every = [
        Job(part, variant, shape)
        for part in parts or VARIANTS
        for variant in VARIANTS[part]
        for shape in shapes or dict.fromkeys(job.shape for job in ORDER if job.part == part)
    ]
    return jobs.sorted_by(ORDER, every)


def environment(cache: str) -> dict[str, str]:
    """Return the environment of the jobs: what is carried where it is missing, no network, and an empty cache of kernels."""
    paths = [str(HERE.parent), str(HERE), *split(os.environ.get("PYTHONPATH", "").replace(os.pathsep, ","))]
    if CARRIED.exists() and not all(
        map(find_spec, ("hydra", "omegaconf", "antlr4", "trl", "datasets", "liger_kernel"))
    ):
        paths.append(str(CARRIED))
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return os.environ | quiet | {"PYTHONPATH": os.pathsep.join(paths), "TORCHINDUCTOR_CACHE_DIR": cache}


def one(part: str, variant: str, shape: str, overrides: list[str]) -> None:
    """Do a job in this process, and print what it measures. The memory forecast prints beside it, from a process of its own."""
    missing = [name for name in ("hydra", "omegaconf", "antlr4") if not find_spec(name)]
    if missing:
        raise ModuleNotFoundError(
            f"{', '.join(missing)} not installed: run benchmarks/carry.py where there is a network"
        )
    beside = None
    if part == "update" or (part, variant) == ("rollout", "builtin"):  # it needs the CPU for as long as these the GPU
        words = ["--overrides", *overrides, "--one", "forecast", variant, shape]
        beside = subprocess.Popen([sys.executable, __file__, *words])
    try:
        module = import_module("on_gpu.update" if part == "forecast" else f"on_gpu.{part}")
        getattr(module, part)(shape, variant, jobs.note, overrides)
    except jobs.Skipped as reason:
        jobs.note(skipped=str(reason))
    finally:
        if "torch" in sys.modules:
            jobs.note(device=import_module("on_gpu.device").facts())
        if beside:
            beside.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", help=f"of {', '.join(VARIANTS)}; commas may separate them, too")
    parser.add_argument("--shapes", nargs="+", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all parts together")
    parser.add_argument("--out", type=Path, help="a file for the results as JSON, which is written after each part")
    parser.add_argument("--json", action="store_true", help="print the results as JSON in place of the table")
    parser.add_argument("--overrides", nargs="*", default=[], help="of train.py")
    parser.add_argument("--one", nargs=3, help="do one job in this process: a part, its variant, a shape")
    given = parser.parse_args()
    if given.one:
        return one(*given.one, given.overrides)
    for name, known in (("parts", VARIANTS), ("shapes", SHAPES)):
        if asked := getattr(given, name):
            setattr(given, name, [word for text in asked for word in split(text)])
            if wrong := [word for word in getattr(given, name) if word not in known]:
                parser.error(f"--{name} has no {', '.join(wrong)}: choose of {', '.join(known)}")
    found = {"device": None, "minutes": given.minutes, "overrides": given.overrides, "results": []}
    command = [sys.executable, __file__, "--overrides", *given.overrides, "--one"]
    with tempfile.TemporaryDirectory() as cache:
        for result in jobs.results(chosen(given.parts, given.shapes), command, given.minutes * 60, environment(cache)):
            found["device"] = result["values"].pop("device", None) or found["device"]
            found["results"].append(completed(result))
            print(line(result), file=sys.stderr, flush=True)
            if given.out:
                given.out.write_text(json.dumps(found, indent=1))
    print(json.dumps(found) if given.json else f"{found['device']}\n{table(found['results'])}")


if __name__ == "__main__":
    main()
