"""Compare the memory forecast of a run with its measured peaks, for models of 1 M to 0.5 B parameters on a CPU.

    python benchmarks/forecast.py [--cases 1m 100m_bf16_lora ...] [--json]        # ten minutes on two cores, 8 GB

Each case has its own process: it makes the forecast and then two rollouts with random weights, whose answers all have the full
length. Measured are the metrics memory/update and memory/rollout, the larger of the two rollouts. `over` is measured / forecast.
"""

import argparse
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

from grpo.env.types import Example, Message, Reward, SingleTurn, Split, Trajectory

LORA, BF16, AGAIN = "adapter=lora", "model.dtype=bfloat16", "optim.gradient_checkpointing=true"
MIDDLE = ["rollout.prompts=4", "max_tokens=128"]
SHORT = ["rollout.prompts=2", "rollout.group_size=2", "max_tokens=64"]
CASES = {  # the shape, and the settings
    "1m": ("1m", []),
    "1m_lora": ("1m", [LORA]),
    "30m": ("30m", MIDDLE),
    "30m_bf16_padded": ("30m", [*MIDDLE, BF16, "optim.layout=padded"]),
    "100m": ("100m", MIDDLE),
    "100m_again": ("100m", [*MIDDLE, AGAIN]),
    "100m_bf16": ("100m", [*MIDDLE, BF16]),
    "100m_bf16_8bit": ("100m", [*MIDDLE, BF16, "optim=adamw_8bit"]),
    "100m_bf16_offload": ("100m", [*MIDDLE, BF16, AGAIN, "optim.offload=true"]),
    "0.5b_lora": ("0.5b", [*SHORT, LORA]),
    "0.5b_bf16_lora": ("0.5b", [*SHORT, BF16, LORA, AGAIN]),
    "0.5b_bf16": ("0.5b", [*SHORT, BF16, "optim=adafactor"]),
}
PHASES = ("update", "rollout")
TEXT = "How many coins are left? "


class Asked:
    """A task with long questions. The reward differs between the answers of a random model."""

    def examples(self, split: Split) -> Sequence[Example]:
        return [{"question": f"{i} {TEXT * 20}"} for i in range(16)]

    def build(self, example: Example) -> SingleTurn:
        return SingleTurn((Message("user", example["question"]),))

    def score(self, example: Example, trajectory: Trajectory) -> Reward:
        return Reward(len(trajectory.answer.encode()) % 7 / 7, False)


def save(shape: str, folder: str) -> None:
    """Save a model with random weights, without an end token, and a tokenizer."""
    from shapes import llama, model_of

    from grpo.extras.demo.demo_model import make_tokenizer

    tokenizer, config = make_tokenizer([TEXT] * 30), llama(shape)
    config.vocab_size = max(config.vocab_size, len(tokenizer))
    model_of(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Lines(logging.Handler):
    """Keeps the text of the last forecast."""

    def emit(self, record: logging.LogRecord) -> None:
        if " in an update" in record.getMessage():
            self.said = record.getMessage()


def measure(folder: str, settings: Sequence[str]) -> dict:
    """Make a run in this process. Returns the bytes of each phase, and the forecast's line."""
    import pandas as pd

    from grpo.apps.cli import quiet
    from grpo.config.composing import composed
    from train import train

    quiet()
    lines, log = Lines(), logging.getLogger("grpo.extras.forecast.forecast")
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    plain = ["rollout.num_rollouts=2", "eval.every=0", "preflight=off", "callbacks=none", "logger=csv", "trainer=cpu"]
    model = ["model=path", f"model.path={folder}", f"output_dir={folder}/run", "~recipe"]
    config = composed("train", [*plain, *model, *settings])
    config.task = {"_target_": "__main__.Asked"}
    train(config)
    rows = pd.read_csv(Path(folder) / "run" / "metrics.csv")
    said = re.findall(r"([\d.]+) ([GM])B in an? (?:update|rollout)", lines.said)
    forecasts = [float(number) * {"G": 1e9, "M": 1e6}[unit] for number, unit in said]
    found = {"line": lines.said}
    for phase, forecast in zip(PHASES, forecasts, strict=True):
        found[phase] = {"forecast": forecast, "measured": float(rows[f"memory/{phase}"].max())}
    return found


def apart(name: str) -> dict:
    """Measure a case in a process of its own, which does not make the model."""
    shape, settings = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        for asked in (["--save", shape, folder], ["--run", folder, *settings]):
            done = subprocess.run([sys.executable, __file__, *asked], capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{name} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", nargs=2, help="save a model: a shape and a folder")
    parser.add_argument("--run", nargs="+", help="measure here: a folder and settings")
    given = parser.parse_args()
    if given.save:
        return save(*given.save)
    if given.run:
        return print(json.dumps(measure(given.run[0], given.run[1:])))
    results = {}
    for name in given.cases:
        results[name] = found = apart(name)
        for phase in PHASES if not given.json else ():
            foreseen, measured = found[phase]["forecast"] / 1e9, found[phase]["measured"] / 1e9
            cells = f"forecast {foreseen:6.2f} GB   measured {measured:6.2f} GB   over {measured / foreseen:5.2f}"
            print(f"{name:20s} {phase:8s} {cells}", flush=True)
    if given.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
