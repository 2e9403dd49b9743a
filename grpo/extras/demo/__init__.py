"""The models of the demo and of the README, and how a hub's are fetched beforehand. Door: `model`, `python -m grpo.prefetch`."""

NEEDS = ("images",)  # the demo that sees
PROGRAMS = (
    "demo_model",
    "smollm2",
    "gemma3",
    "prefetch",
)
