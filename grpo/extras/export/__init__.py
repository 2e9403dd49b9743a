"""A policy as a folder of the hub, with a model card. Door: `python -m grpo.export`."""

NEEDS = ("quantized",)  # the base that an adapter is merged into
PROGRAMS = ("export",)
