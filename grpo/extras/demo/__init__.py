"""The models of the demo and of the README, and how a hub's are fetched beforehand. Door: `model`, `python -m grpo.prefetch`."""

PROGRAMS = (
    "demo_model",
    "smollm2",
    "prefetch",
)
