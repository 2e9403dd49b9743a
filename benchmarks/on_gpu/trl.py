"""Measure TRL's update: `_compute_loss` on microbatches of its default size, with its default gradient checkpointing, and AdamW
on the bfloat16 weights."""

from collections.abc import Callable
from importlib.util import find_spec
from tempfile import TemporaryDirectory

from on_gpu.jobs import Skipped


def trl(name: str, _: str, note, overrides: list[str]) -> None:
    """Measure TRL's update of the rows that `update` takes."""
    if missing := [package for package in ("trl", "accelerate", "datasets") if not find_spec(package)]:
        raise Skipped(f"{', '.join(missing)} not installed")
    from on_gpu.models import SHAPES
    from on_gpu.update import measure, random_model, settings

    if (shape := SHAPES[name]).lora:
        raise Skipped("TRL's update is measured without an adapter")
    with TemporaryDirectory() as folder:
        shape.config.save_pretrained(folder)
        model = random_model(settings(shape, folder, overrides))
        step, kernel = of_trl(shape, model, folder)
        note(kernel=kernel)
        measure(shape, step, model, note)


def of_trl(shape, model, folder: str) -> tuple[Callable, str]:
    """Return TRL's step, and its kernel of attention."""
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    from on_gpu.device import CUDA, DEVICE

    words = Tokenizer(models.WordLevel({"!": 0, "<end>": 1}, unk_token="!"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="!", eos_token="<end>")
    precise = {"bf16": CUDA, "use_cpu": not CUDA}
    args = GRPOConfig(output_dir=folder, report_to="none", loss_type="grpo", num_generations=shape.group, **precise)
    rows = Dataset.from_list([{"prompt": "!"}] * shape.group)
    trainer = GRPOTrainer(
        model, lambda completions, **_: [0.0] * len(completions), args, rows, processing_class=tokenizer
    )
    model = trainer.model.to(DEVICE).train()
    model.gradient_checkpointing_enable()  # as in its train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    size = args.per_device_train_batch_size

    def step(batch) -> None:
        trainer.current_gradient_accumulation_steps = max(1, len(batch) // size)
        every = as_trl(batch)
        for start in range(0, len(batch), size):
            some = {name: values[start : start + size] for name, values in every.items()}
            with trainer.compute_loss_context_manager():
                loss = trainer._compute_loss(model, some)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, f"TRL/{model.config._attn_implementation}"


def as_trl(batch) -> dict:
    """Return rows under the names that TRL gives them."""
    import torch

    width = batch.completion_width
    return {
        "prompt_ids": batch.ids[:, :-width],
        "prompt_mask": batch.attention_mask[:, :-width],
        "completion_ids": batch.ids[:, -width:],
        "completion_mask": batch.mask.long(),
        "advantages": torch.randn(len(batch), generator=torch.Generator().manual_seed(0)).to(batch.ids.device),
    }
