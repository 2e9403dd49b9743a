"""Files that start runs on Slurm, containers and rented machines. Door: `python -m grpo.launch`."""

PROGRAMS = ("launch",)
NEEDS = ("vllm_server",)
