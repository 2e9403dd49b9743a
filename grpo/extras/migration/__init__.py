"""Names and command lines of other systems. Door: `python -m grpo.from_trl`, and the answer to a mistyped key."""

PROGRAMS = ("from_trl",)
