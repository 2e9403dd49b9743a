"""The texts of sampled tokens, for readers of a run."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer


def token_texts(ids: Iterable[int], policy: Path | None) -> list[str]:
    """Return the text of each token, or its id as text if there is no tokenizer. policy: a folder with tokenizer.json."""
    file = policy and policy / "tokenizer.json"
    if not (file and file.is_file()):
        return [f"⟨{token}⟩" for token in ids]
    tokenizer, ids = Tokenizer.from_file(str(file)), list(map(int, ids))
    texts = {token: tokenizer.decode([token], skip_special_tokens=False) for token in set(ids)}
    return [texts[token] for token in ids]
