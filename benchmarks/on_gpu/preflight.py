"""Measure the checks before a run: `train.py preflight=only` on random weights, with the demo's tokenizer and task.

The checks are timed, not judged: a model that knows nothing fails some of them.
"""

import re
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
VERDICT = re.compile(r"^(PASS|FAIL|WARN|SKIP) (.+?), ([\d.]+) s: (.*)$")
RUN = ["preflight=only", "engine=transformers", "callbacks=none", "logger=csv", "report=end", "~recipe"]


def preflight(name: str, _: str, note, overrides: list[str]) -> None:
    """Time the checks of a run on this shape, and the whole command."""
    from on_gpu.device import CUDA, DTYPE
    from on_gpu.models import SHAPES

    shape = SHAPES[name]
    with TemporaryDirectory() as folder:
        save(shape, folder)
        model = ["model=path", f"model.path={folder}", f"model.dtype={DTYPE}", f"trainer={'gpu' if CUDA else 'cpu'}"]
        sizes = [f"rollout.prompts={shape.prompts}", f"rollout.group_size={shape.group}", f"max_tokens={shape.answer}"]
        command = [sys.executable, str(ROOT / "train.py"), *RUN, f"hydra.run.dir={folder}/run", *model, *sizes]
        begun, checks = time.perf_counter(), {}
        with open(f"{folder}/errors", "w+") as errors:
            streams = {"stdout": subprocess.PIPE, "stderr": errors, "text": True}
            process = subprocess.Popen([*command, *shape.overrides, *overrides], cwd=ROOT, **streams)
            for line in process.stdout:
                if found := VERDICT.match(line):
                    verdict, check, took, why = found.groups()
                    checks[check] = [verdict, float(took), why]
                    note(**summary(checks))
            process.wait()
            wrong = Path(errors.name).read_text().splitlines()
        if not checks:
            raise RuntimeError((wrong or ["train.py printed no verdict"])[-1])
        note(command_s=time.perf_counter() - begun, exit_code=process.returncode)


def summary(checks: dict[str, list]) -> dict:
    """Return the values of the checks so far. checks: [verdict, seconds, line] by name."""
    return {
        "preflight_s": sum(took for _, took, _ in checks.values()),
        "verdicts": checks,
        "slowest": max(checks, key=lambda check: checks[check][1]),
        "failed": ", ".join(check for check in checks if checks[check][0] == "FAIL") or "none",
    }


def save(shape, folder: str) -> None:
    """Save a model with random weights, and the demo's tokenizer, whose tokens are the first of its vocabulary."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from on_gpu.device import DEVICE, DTYPE

    tokenizer = AutoTokenizer.from_pretrained(next((ROOT / "grpo" / "extras" / "demo" / "demo_models").iterdir()))
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(shape.config, dtype=getattr(torch, DTYPE))
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
