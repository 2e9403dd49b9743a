"""White space of a text after a tokenizer has written and read it."""

import re
import unicodedata

from transformers import PreTrainedTokenizerBase


def loses_spaces(text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether white space in a text is other when it is tokenized and read again; that of answers and calls is, too."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return spaces(tokenizer.decode(ids, clean_up_tokenization_spaces=False)) != spaces(text)


def spaces(text: str) -> list[str]:
    """Return the white space within a text, as one list of runs. Other blanks of Unicode count as spaces."""
    return re.findall(r"\s+", unicodedata.normalize("NFKC", text).strip())
