"""Download the model, the tokenizer and the rows of a run into the hub's cache, for a machine without network.

    HF_HOME=FOLDER python -m grpo.prefetch task=gsm8k model=qwen05b

The arguments are those of train.py. Copy FOLDER to the other machine, and run the command that is printed.
"""

import os
import shlex
import sys
from collections.abc import Sequence

from hydra.utils import instantiate

from grpo.apps.cli import one_line_errors, quiet
from grpo.config.composing import composed
from grpo.config.validation import check_values
from grpo.system.errors import plural


def main(arguments: Sequence[str]) -> None:
    """Load everything that a run with these arguments reads. Raises UserError if the hub does not give it."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    config = composed("train", [*arguments, "output_dir=."])
    check_values(config)
    task, pretrained = instantiate(config.task), instantiate(config.model)
    for name, (source, split) in instantiate(config.eval).loaded(task).items():
        print(f"{name}: {plural(len(source.examples(split)), 'example')}")
    pretrained.tokenizer()
    pretrained.model(mapped=True)  # complete, but in its files
    home = shlex.quote(os.environ["HF_HOME"]) if "HF_HOME" in os.environ else "~/.cache/huggingface"
    print(f"model: {pretrained.path}")
    print(f"without network: HF_HOME={home} HF_HUB_OFFLINE=1 python train.py {shlex.join(arguments)}")


if __name__ == "__main__":
    quiet()
    with one_line_errors("train"):
        main(sys.argv[1:])
