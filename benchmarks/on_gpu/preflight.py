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
VERDICT = re.compile(r"^(PASS|FAIL|WARN|SKIP) (.+?), ([\d.]+) s: (.*)$", re.MULTILINE)
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
        begun = time.perf_counter()
        done = subprocess.run(
            [*command, *shape.overrides, *overrides], capture_output=True, text=True, cwd=ROOT, env=None
        )
        seconds = time.perf_counter() - begun
    checks = VERDICT.findall(done.stdout)
    if not checks:
        raise RuntimeError((done.stderr.strip() or "train.py printed no verdict").splitlines()[-1])
    note(
        command_s=seconds,
        preflight_s=sum(float(took) for _, _, took, _ in checks),
        exit_code=done.returncode,
        verdicts={check: [verdict, float(took), why] for verdict, check, took, why in checks},
        slowest=max(checks, key=lambda found: float(found[2]))[1],
        failed=", ".join(check for verdict, check, _, _ in checks if verdict == "FAIL") or "none",
    )


def save(shape, folder: str) -> None:
    """Save a model with random weights, and the demo's tokenizer, whose tokens are the first of its vocabulary."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from on_gpu.device import DEVICE, DTYPE

    tokenizer = AutoTokenizer.from_pretrained(next((ROOT / "grpo" / "apps" / "demo_models").iterdir()))
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(shape.config, dtype=getattr(torch, DTYPE))
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
