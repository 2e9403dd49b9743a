"""Train the demo with TRL 1.16 and with this project, and compare held-out accuracy and CPU seconds.

    python benchmarks/demo_vs_trl.py [--rollouts 20] [--seeds 0 1 2] [--json]        # needs trl; two minutes for each seed

Both start from the demo's base model and learn from the same problems with the same settings: 16 prompts x 8 samples, at most 40
new tokens, AdamW at the demo's learning rate, one optimizer step per rollout, float32, one thread, no KL. They run one after the
other, each in its own process. CPU seconds are from the first rollout to the last step, without imports, loading and saving.
`eval.py` measures both policies on the same held-out problems, greedily.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
PROMPTS, GROUP, LIMIT = 16, 8, 40


def right(completions, answer, **_) -> list[float]:
    """Return 1 for each completion whose boxed number is the answer. TRL passes a list of messages for each completion."""
    return [
        float(text[0]["content"].endswith(f"\\boxed{{{gold}}}")) for text, gold in zip(completions, answer, strict=True)
    ]


def run_grpo(folder: Path, rollouts: int, seed: int) -> float:
    from grpo.apps.cli import quiet
    from grpo.apps.composing import composed
    from grpo.rollout.rollouts import Rollouts
    from train import train

    began = []
    make = Rollouts.make

    def timed(self, *args):
        began.append(time.process_time())
        return make(self, *args)

    Rollouts.make = timed
    quiet()
    sizes = f"rollout.prompts={PROMPTS} rollout.group_size={GROUP} max_tokens={LIMIT} rollout.num_rollouts={rollouts} seed={seed}"
    rest = f"engine=transformers trainer=cpu callbacks=checkpoint logger=none eval.every=0 output_dir={folder}"
    rest += " forecast=false preflight=off"  # only training is compared
    config = composed("train", [*sizes.split(), *rest.split()])
    train(config)
    return time.process_time() - began[0]


def run_trl(folder: Path, rollouts: int, seed: int) -> float:
    from datasets import Dataset
    from hydra.utils import instantiate
    from shapes import TRL
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from grpo.apps.composing import composed

    config = composed("train", [f"output_dir={folder}"])
    args = GRPOConfig(
        **TRL,
        output_dir=str(folder),
        seed=seed,
        max_steps=rollouts,
        learning_rate=config.optim.optimizer.lr,
        per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        max_completion_length=LIMIT,
        beta=0.0,
        loss_type="grpo",
        model_init_kwargs={"dtype": "float32"},
    )
    examples = instantiate(config.task).examples("train")
    rows = [
        {"prompt": [{"role": "user", "content": example["question"]}], "answer": example["answer"]}
        for example in (examples[i] for i in range(2 * PROMPTS * rollouts))
    ]
    seconds = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_, **__) -> None:
            seconds.append(time.process_time())

        def on_train_end(self, *_, **__) -> None:
            seconds.append(time.process_time())

    trainer = GRPOTrainer(instantiate(config.model.path), right, args, Dataset.from_list(rows), callbacks=[Clock()])
    trainer.train()
    trainer.save_model(str(folder / "checkpoints" / "last"))
    return seconds[1] - seconds[0]


SIDES = {"grpo": run_grpo, "trl": run_trl}


def program(*command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def measured(side: str, rollouts: int, seed: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program(__file__, "--side", side, "--rollouts", str(rollouts), "--seeds", str(seed), "--folder", name)
        evaluation = (
            f"model=path model.path={folder}/checkpoints/last task=wordmath eval.limit=200 hydra.run.dir={folder}/eval"
        )
        program("eval.py", *evaluation.split())
        accuracy = json.loads((folder / "eval" / "metrics.json").read_text())["eval/accuracy"]
        return {
            "cpu_s": float((folder / "cpu_s").read_text()),
            **{key: accuracy[key] for key in ("value", "low", "high")},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        folder = Path(args.folder)
        (folder / "cpu_s").write_text(str(SIDES[args.side](folder, args.rollouts, args.seeds[0])))
        return
    found = {side: [] for side in SIDES}
    for seed in args.seeds:
        for side in SIDES:
            found[side].append(measured(side, args.rollouts, seed))
            if not args.json:
                one = found[side][-1]
                accuracy = "{value:.1%} ({low:.1%} to {high:.1%})".format(**one)
                print(f"seed {seed}  {side:5s} {one['cpu_s']:7.1f} CPU s   held-out accuracy {accuracy}", flush=True)
    ratio = median(theirs["cpu_s"] / ours["cpu_s"] for ours, theirs in zip(found["grpo"], found["trl"], strict=True))
    print(
        json.dumps({**found, "ratio": ratio})
        if args.json
        else f"TRL takes {ratio:.2f} times the CPU seconds (median over seeds)"
    )


if __name__ == "__main__":
    main()
