"""Which number type each part of a run has, from runs of two updates on a CPU: PYTHONPATH=.:tests python -m helpers.dtypes"""

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
from conftest import EXAMPLES, compose_config

from grpo.engines.builtin.kv_cache import KVCache
from grpo.models import head
from grpo.training.optimization import learned_by
from helpers.models import model_folder
from helpers.runs import VARIED

PRECISIONS = {  # the columns
    "float32": "model.dtype=float32 trainer.precision=32-true",
    "bfloat16": "model.dtype=bfloat16 trainer.precision=bf16-mixed",
    "bfloat16, LoRA": "model.dtype=bfloat16 trainer.precision=bf16-mixed adapter=lora",
    "float16, LoRA": "model.dtype=float16 trainer.precision=16-mixed adapter=lora",
}
PARTS = (
    "parameters", "adapter", "masters", "gradients in a backward pass", "gradients that the optimizer reads", "optimizer's state",
    "products of layers", "states between layers", "logits", "log-probabilities", "KV cache", "reference", "teacher",
)  # fmt: skip


class Seen(L.Callback):
    """Notes the number types of a run. found: by part."""

    found: dict[str, set[str]]

    def on_train_start(self, trainer, module) -> None:
        policy, optimizer = module.policy, trainer.optimizers[0]
        own = set(policy.parameters())
        for name, p in policy.named_parameters():
            note("adapter" if "lora_" in name else "parameters", p)
            if p.requires_grad:
                p.register_hook(lambda grad: note("gradients in a backward pass", grad))

        def before(*_) -> None:
            for p in learned_by(optimizer):
                note("gradients that the optimizer reads", p.grad)
                if p not in own:
                    note("masters", p)

        def after(*_) -> None:
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor) and value.dim():
                        note("optimizer's state", value)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        layer = policy.get_decoder().layers[0]
        for part, places in {"products of layers": [layer.mlp.down_proj], "states between layers": [layer]}.items():
            for place in places:
                place.register_forward_hook(lambda _, given, out, part=part: note(part, out) if learns(out) else None)
        with module.reference.model() as reference:
            for name, p in reference.named_parameters():
                if "lora_" not in name:
                    note("reference", p)
        loss_of = module.loss_of

        def noted(logprobs: torch.Tensor, *more: Any) -> Any:
            note("log-probabilities", logprobs)
            return loss_of(logprobs, *more)

        module.loss_of = noted
        if lessons := module.parts.get("teacher"):
            with lessons.teacher.model() as teacher:
                for p in teacher.parameters():
                    note("teacher", p)


def learns(out: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and out.requires_grad


def note(part: str, tensor: torch.Tensor) -> None:
    Seen.found.setdefault(part, set()).add(str(tensor.dtype).removeprefix("torch."))


def seen(*overrides: str) -> dict[str, set[str]]:
    """Return the number types of the parts of a run of two updates, with a reference and a teacher."""
    from train import train

    scores, admit = head.scores_of_logits, KVCache.admit

    def of_logits(logits: torch.Tensor, *more: Any) -> Any:
        note("logits", logits)
        return scores(logits, *more)

    def admitted(cache: KVCache, waiting: Any) -> Any:
        result = admit(cache, waiting)
        for keys in cache.of_prompts.values():
            note("KV cache", keys[0])
        return result

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        Seen.found = {}
        stack.enter_context(patch.object(head, "scores_of_logits", of_logits))
        stack.enter_context(patch.object(KVCache, "admit", admitted))
        model, run = model_folder("llama", Path(folder, "model")), Path(folder, "run")
        run.mkdir()
        settings = f"""task=gsm8k task.path={EXAMPLES} model=path model.path={model} debug=smoke callbacks=none forecast=false
            preflight=off max_tokens=8 output_dir={run} rollout.num_rollouts=2 eval.every=0 engine=transformers algo=gkd
            algo.policy_coef=1 algo.kl.coef=0.1 teacher.model.path={model} +callbacks.seen._target_=helpers.dtypes.Seen"""
        config = compose_config(*settings.split(), *overrides)
        config.task = VARIED
        train(config)
        return Seen.found


def column(name: str) -> list[str]:
    """Return the number types of each part in a run of this name."""
    found = seen(*PRECISIONS[name].split())
    return [", ".join(sorted(found.get(part, ()))) or "-" for part in PARTS]


def table() -> list[str]:
    """Return the lines of the table of docs/performance.md."""
    lines = [["", *PRECISIONS], ["---"] * (1 + len(PRECISIONS))]
    lines += map(list, zip(PARTS, *map(column, PRECISIONS), strict=True))
    return [f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines]


if __name__ == "__main__":
    from helpers import dtypes  # not this module, whose class the run does not know

    print("\n".join(dtypes.table()))
