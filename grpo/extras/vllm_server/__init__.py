"""vLLM servers, on this or other machines."""

NEEDS = ("network",)  # ports, and processes that end with the run
