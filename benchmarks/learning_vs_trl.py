"""Train a task with TRL 1.16 and with this project: held-out accuracy against rollouts and against CPU seconds.

    python benchmarks/learning_vs_trl.py [--case demo] [--seeds 0 1 2 3 4] [--json] [--picture FILE]        # needs trl

Both start from the same model and learn from the same prompts in the same order, with the same reward and settings: AdamW at the
learning rate of the experiment, one optimizer step per rollout, float32, no KL, one thread. Their samples differ, because each
draws with a generator of its own.

`demo` is the demo's base model, with 16 prompts x 8 samples of at most 40 tokens, in 40 rollouts: about four minutes for each
seed. `sums` is a real model, SmolLM2-135M-Instruct (`make smollm`), with the experiment smollm2_sums: 8 prompts x 8 samples of at
most 24 tokens, in 8 rollouts, half an hour for each seed. TRL's microbatch is then 16 rows, because 64 need too much memory.

For each seed both have a process, and one waits while the other makes a rollout and learns from it, so that other load on the
machine slows both. Four times in a run, and before it, the policy answers 200 held-out problems greedily, with the same code in
both. CPU seconds are those of the process from its first rollout on, without these evaluations.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
LEVEL = "95 % interval"


@dataclass(frozen=True)
class Case:
    """settings: of train.py. reward: the name of a function in grpo/extras/grading/functions.py. limit: new tokens.

    batch: rows in a microbatch of TRL. problems: held-out problems. every: rollouts between two evaluations.
    """

    settings: str
    reward: str
    rollouts: int
    prompts: int
    limit: int
    batch: int
    group: int = 8
    problems: int = 200

    @property
    def every(self) -> int:
        return max(1, self.rollouts // 4)

    def config(self, seed: int, folder: Path):
        from grpo.config.composing import composed

        values = f"""{self.settings} seed={seed} rollout.num_rollouts={self.rollouts} rollout.prompts={self.prompts}
            rollout.group_size={self.group} max_tokens={self.limit} eval.limit={self.problems} eval.every=0 output_dir={folder}
            engine=transformers trainer=cpu callbacks=none logger=none preflight=off forecast=false"""
        return composed("train", values.split())


CASES = {
    "demo": Case("", reward="correct", rollouts=40, prompts=16, limit=40, batch=128),
    "sums": Case("experiment=smollm2_sums", reward="last_number", rollouts=8, prompts=8, limit=24, batch=16),
}


class Rounds:
    """Divides a run into rollouts. At the end of each it sends {"cpu_s": .., "prompts": .., "right": ..} and waits.

    cpu_s: CPU seconds of the rollout and its update. prompts: its messages. right: the problems solved now, if that is measured.
    """

    def __init__(self, case: Case, seed: int, folder: Path, send: Callable[[dict], None]) -> None:
        from hydra.utils import instantiate

        self.case, self.seed, self.send, self.config = case, seed, send, case.config(seed, folder)
        self.task = instantiate(self.config.task)
        self.number, self.found = 0, {}

    def messages(self, examples: Sequence[dict]) -> list[list[dict]]:
        """Return the messages of these examples' prompts."""
        return [[message.as_dict() for message in self.task.messages(example)] for example in examples]

    def next(self, policy, prompts: list[list[dict]]) -> None:
        """Called at the start of each rollout, with its prompts, and at the end of the run, with none."""
        if self.number:
            self.found["cpu_s"] = time.process_time() - self.began
        if self.number % self.case.every == 0 or not prompts:
            self.found["right"] = self.solved(policy)
        self.send(self.found)
        self.found = {"prompts": prompts}
        self.number += 1
        self.began = time.process_time()

    def solved(self, policy) -> list[bool]:
        """Return for each held-out problem whether the policy solves it greedily."""
        from hydra.utils import instantiate

        from grpo.engines.builtin.engine import TransformersEngine

        engine = TransformersEngine()
        engine.load_weights(policy, 0)
        renderer = instantiate(self.config.renderer)(instantiate(self.config.model).tokenizer())
        groups = instantiate(self.config.eval)(self.task, engine, renderer, seed=0).groups
        return [bool(group[0].reward.correct) for group in groups]


def run_grpo(rounds: Rounds) -> None:
    from grpo.apps.cli import quiet
    from grpo.rollout.rollouts import Rollouts
    from train import train

    def begin(rollouts: Rollouts, r: int) -> None:
        rounds.next(rollouts.engine.model, rounds.messages(rollouts.sampler.draw(r, rollouts.plan.prompts)))

    quiet()
    with before(Rollouts, "make", begin):
        _, policy = train(rounds.config)
    rounds.next(policy, [])


def run_trl(rounds: Rounds) -> None:
    from datasets import Dataset
    from hydra.utils import instantiate
    from shapes import TRL
    from trl import GRPOConfig, GRPOTrainer

    from grpo.data.prompts import Uniform
    from grpo.extras.grading import functions

    case, config = rounds.case, rounds.config
    args = GRPOConfig(
        **TRL,
        output_dir=config.output_dir,
        seed=rounds.seed,
        max_steps=case.rollouts,
        learning_rate=config.optim.optimizer.lr,
        per_device_train_batch_size=case.batch,
        gradient_accumulation_steps=case.prompts * case.group // case.batch,
        num_generations=case.group,
        max_completion_length=case.limit,
        shuffle_dataset=False,
        beta=0.0,
        loss_type="grpo",
        model_init_kwargs={"dtype": "float32"},
    )
    sampler = Uniform(rounds.task.examples("train"), case.prompts, rounds.seed)
    rows = [
        {"prompt": prompt, "gold": example["answer"]}
        for examples in (sampler.draw(r, case.prompts) for r in range(case.rollouts))
        for example, prompt in zip(examples, rounds.messages(examples), strict=True)
    ]

    def reward(completions, gold, **_) -> list[float]:
        return [each.value for each in getattr(functions, case.reward)(completions, gold)]

    def begin(trainer: GRPOTrainer, inputs: list[dict]) -> None:
        rounds.next(trainer.model, [row["prompt"] for row in inputs[:: case.group]])

    trainer = GRPOTrainer(instantiate(config.model.path), reward, args, Dataset.from_list(rows))
    with before(GRPOTrainer, "_generate_and_score_completions", begin):
        trainer.train()
    rounds.next(trainer.model, [])


@contextmanager
def before(owner: type, name: str, call: Callable):
    """In this `with`, `call` is called with the arguments of a method before each call of that method."""
    method = getattr(owner, name)

    def called(*args, **kwargs):
        call(*args, **kwargs)
        return method(*args, **kwargs)

    setattr(owner, name, called)
    try:
        yield
    finally:
        setattr(owner, name, method)


SIDES = {"trl": run_trl, "grpo": run_grpo}


def answer(side: str, case: Case, seed: int) -> None:
    """Run a side in this process: send each record to the parent, and wait for a line before the next rollout."""
    parent = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # for the output of libraries

    def send(found: dict) -> None:
        print(json.dumps(found), file=parent, flush=True)
        sys.stdin.readline()

    with tempfile.TemporaryDirectory() as folder:
        SIDES[side](Rounds(case, seed, Path(folder), send))


def compare(name: str, seed: int) -> dict[str, dict]:
    """Run both sides of a seed in turns. Returns for each: cpu_s of each rollout, right by the rollouts before it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as folder:
        processes, records = {}, {side: [] for side in SIDES}
        for side in SIDES:
            command = [sys.executable, __file__, "--side", side, "--case", name, "--seeds", str(seed)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            with Path(folder, side).open("w") as log:
                processes[side] = subprocess.Popen(command, text=True, env=environment, cwd=ROOT, stderr=log, **pipes)
        for number in range(CASES[name].rollouts + 1):
            for side, process in processes.items():
                if number:
                    print(file=process.stdin, flush=True)
                if not (line := process.stdout.readline()):
                    sys.exit(f"{side} ended:\n{Path(folder, side).read_text()[-2000:]}")
                records[side].append(json.loads(line))
            if records["trl"][-1].get("prompts") != records["grpo"][-1].get("prompts"):
                sys.exit(f"seed {seed}, rollout {number}: not the same prompts")
        for process in processes.values():
            process.communicate("\n")
    return {side: summary(found) for side, found in records.items()}


def summary(records: list[dict]) -> dict:
    right = {number: record["right"] for number, record in enumerate(records) if "right" in record}
    return {"cpu_s": [record["cpu_s"] for record in records[1:]], "right": right}


def ratio(seeds: list[dict[str, dict]]):
    """Return TRL's CPU seconds over ours: the geometric mean over seeds and its interval."""
    from grpo.extras.report.statistics import over_seeds

    seconds = np.array([[sum(found[side]["cpu_s"]) for side in ("trl", "grpo")] for found in seeds])
    found = over_seeds(np.log(seconds[:, 0] / seconds[:, 1]))
    return found._replace(**{end: float(np.exp(getattr(found, end))) for end in ("value", "low", "high")})


def points(seeds: list[dict[str, dict]], side: str) -> list[tuple[int, float, tuple]]:
    """Return at each evaluation the rollouts, the mean CPU seconds until then, and the accuracy with its interval."""
    from grpo.extras.report.statistics import arm_interval

    seconds = np.mean([np.cumsum([0, *found[side]["cpu_s"]]) for found in seeds], axis=0)
    each = seeds[0][side]["right"]
    return [(n, seconds[n], arm_interval([found[side]["right"][n] for found in seeds])) for n in each]


def table(seeds: list[dict[str, dict]]) -> str:
    lines = ["| rollouts | TRL: CPU s | accuracy | here: CPU s | accuracy |", "|---|---|---|---|---|"]
    for theirs, ours in zip(points(seeds, "trl"), points(seeds, "grpo"), strict=True):
        cells = [f"{s:.1f} | {a.value:.1%} ({a.low:.1%} to {a.high:.1%})" for _, s, a in (theirs, ours)]
        lines.append(f"| {ours[0]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(seeds: list[dict[str, dict]], file: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, both = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
    for side, name, colour in (("trl", "TRL", "#f58518"), ("grpo", "here", "#4c78a8")):
        rollouts, seconds, accuracy = zip(*points(seeds, side), strict=True)
        for axes, x in zip(both, (rollouts, seconds), strict=True):
            axes.plot(x, [a.value for a in accuracy], color=colour, marker="o", markersize=3, label=name)
            axes.fill_between(
                x, [a.low for a in accuracy], [a.high for a in accuracy], color=colour, alpha=0.2, linewidth=0
            )
            axes.spines[["top", "right"]].set_visible(False)
    both[0].set(xlabel="rollouts", ylabel=f"held-out accuracy, {LEVEL}", ylim=(0, 1))
    both[1].set(xlabel="CPU seconds")
    both[1].legend(frameon=False)
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="demo")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--picture", help="file for the two curves")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        answer(given.side, CASES[given.case], given.seeds[0])
        return
    seeds = []
    for seed in given.seeds:
        seeds.append(compare(given.case, seed))
        if not given.json:
            trl, grpo = (sum(seeds[-1][side]["cpu_s"]) for side in ("trl", "grpo"))
            print(f"seed {seed}: TRL {trl:.1f} CPU s, here {grpo:.1f}, ratio {trl / grpo:.2f}", flush=True)
    if given.picture:
        draw(seeds, given.picture)
    if given.json:
        print(json.dumps({"seeds": seeds, "ratio": ratio(seeds)}))
        return
    found = ratio(seeds)
    print(table(seeds))
    print(
        f"TRL takes {found.value:.2f} times the CPU seconds ({LEVEL} {found.low:.2f} to {found.high:.2f}, {found.n} seeds)"
    )


if __name__ == "__main__":
    main()
