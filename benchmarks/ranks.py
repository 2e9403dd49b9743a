"""Compare one rank with two that share the policy (ddp) or hold a part of it each (fsdp2), on the same work, on a CPU.

    python benchmarks/ranks.py [--rollouts 6] [--devices 2]        # five minutes on two cores, 6 GB

The demo gives the seconds of each part and the tokens of each rank; a model of 100 M parameters with random weights gives
the most bytes of each rank beside the forecast. `shares` are the tokens that the busiest rank learns from, over those of a fair
share: as the groups are shared out, and as they would be in the order of the prompts.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import lightning as L
from forecast import Asked, save

ROOT = Path(__file__).parents[1]
PARTS = ("time/rollout", "time/update", "time/sync")
PHASES = ("memory/update", "memory/rollout")
KINDS = {"one rank": "auto", "ddp": "ddp", "fsdp2": "fsdp2", "fsdp2, not resharded": "fsdp2 strategy.reshard=false"}
QUIET = "preflight=off eval.every=0 callbacks=none logger=csv trainer=cpu trainer.timeout=120"
LARGE = "rollout.prompts=4 max_tokens=128 model=path ~recipe task._target_=ranks.Long"


class Long(Asked):
    """The same questions, in place of those of the task that the command line names."""

    def __init__(self, **_) -> None: ...


class Each(L.Callback):
    """Writes what each rank measures of each rollout, and the tokens of all groups, to FOLDER/RANK.jsonl."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx: int) -> None:
        found = {name: batch.metrics[name] for name in (*PARTS, *PHASES)}
        found["groups"] = [sum(sample.length for sample in group) for group in batch.groups]
        found["mine"] = int(batch.tokens.attention_mask.sum())
        with (self.folder / f"{trainer.global_rank}.jsonl").open("a") as file:
            print(json.dumps(found), file=file)


def measured(kind: str, devices: int, rollouts: int, settings: str) -> tuple[list[list[dict]], str]:
    """Train in processes of their own. Returns the measurements of each rank, without the first rollout, and what was printed."""
    with tempfile.TemporaryDirectory() as folder:
        strategy = f"trainer.devices={1 if kind == 'one rank' else devices} strategy={KINDS[kind]}"
        words = f"{QUIET} {settings} {strategy} rollout.num_rollouts={rollouts + 1} hydra.run.dir={folder}/run".split()
        each = f"+callbacks.each={{_target_: ranks.Each, folder: {folder}}}"
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "train.py", *words, each]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{kind} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        files = sorted(Path(folder).glob("*.jsonl"))
        return [[json.loads(line) for line in file.read_text().splitlines()][1:] for file in files], done.stdout


def shares(rows: list[dict], devices: int) -> list[float]:
    """Return the largest share of any rank over a fair one, as shared out by tokens and in the order of the prompts; means."""
    from grpo.system import distributed

    found = []
    distributed.world_size = lambda: devices
    for way in (lambda sizes: distributed.balanced(sizes), lambda sizes: distributed.share(len(sizes))):
        ratios = []
        for sizes in (row["groups"] for row in rows):
            loads = []
            for rank in range(devices):
                distributed.rank = lambda rank=rank: rank
                loads.append(sum(sizes[i] for i in way(sizes)))
            ratios.append(max(loads) * devices / sum(sizes))
        found.append(statistics.mean(ratios))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=6)
    parser.add_argument("--devices", type=int, default=2)
    given = parser.parse_args()
    for kind in KINDS:
        ranks, _ = measured(kind, given.devices, given.rollouts, "forecast=false")
        seconds = [f"{name[5:]} {statistics.median(row[name] for row in ranks[0]):.2f} s" for name in PARTS]
        tokens = " and ".join(f"{statistics.mean(row['mine'] for row in rank):.0f}" for rank in ranks)
        print(f"{kind:21} {'  '.join(seconds)}  tokens a rank {tokens}", flush=True)
    balanced, ordered = shares(ranks[0], given.devices)
    print(f"shares: {balanced:.3f} by tokens, {ordered:.3f} in the order of the prompts", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        save("100m", folder)
        for kind in KINDS:
            ranks, said = measured(kind, given.devices, 1, f"{LARGE} model.path={folder}")
            line = re.search(r"memory: ([\d.]+) ([GM])B in an update, ([\d.]+) ([GM])B in a rollout", said)
            for phase, number, unit in ((PHASES[0], line[1], line[2]), (PHASES[1], line[3], line[4])):
                foreseen = float(number) / (1 if unit == "G" else 1000)
                most = [max(row[phase] for row in rank) / 1e9 for rank in ranks]
                cells = "  ".join(f"{each:.2f} GB ({each / foreseen:.2f})" for each in most)
                print(f"{kind:21} {phase[7:]:8} forecast {foreseen:.2f} GB, ranks {cells}", flush=True)


if __name__ == "__main__":
    main()
