"""Pack the libraries that a GPU machine without a network may lack into build/carried, where benchmarks/gpu.py looks for them.

    python benchmarks/carry.py [--python 3.12] [--without-trl]

Needs pip and a network. Takes wheels for that version of Python that run on every system; a library without a wheel is built
here. Dependencies are not followed: torch, transformers, lightning, peft and what they need must be there. Copy the project with
the folder to the machine. Libraries that are installed there are used as they are.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "build" / "carried"
NEEDED = ["hydra-core>=1.3.2,<1.4", "omegaconf>=2.3,<2.4", "platformdirs", "liger-kernel>=0.8,<0.9"]
WITHOUT_WHEEL = ["antlr4-python3-runtime==4.9.3"]  # the one that Hydra's grammar needs
TRL = ["trl==1.16.0", "accelerate", "datasets>=4,<6", "dill", "multiprocess"]


def install(*words: str) -> None:
    """Put libraries into the folder. Ends the program if pip cannot."""
    command = [
        sys.executable,
        *["-m", "pip", "install", "--quiet", "--no-compile", "--no-deps", "--upgrade", "--target"],
        str(FOLDER),
        *words,
    ]
    if subprocess.run(command).returncode:
        sys.exit(f"pip could not pack {' '.join(words)}: is there a network?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="the version on the machine with the GPU")
    parser.add_argument("--without-trl", action="store_true", help="leave TRL out, which only one part needs")
    given = parser.parse_args()
    shutil.rmtree(FOLDER, ignore_errors=True)
    install("--only-binary=:all:", "--python-version", given.python, *NEEDED, *([] if given.without_trl else TRL))
    install(*WITHOUT_WHEEL)
    size = sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file())
    print(f"{FOLDER}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
