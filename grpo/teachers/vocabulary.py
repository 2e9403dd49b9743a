"""Whether a teacher reads the policy's tokens: an id must mean the same to both."""

from collections.abc import Mapping
from functools import cache

from grpo.models.pretrained import Pretrained
from grpo.system.errors import UserError

REMEDY = "a teacher scores the policy's token ids, so take a model with the policy's tokenizer"


@cache
def check_vocabulary(teacher: Pretrained, student: Pretrained) -> None:
    """Raise UserError unless both tokenizers have the same tokens, ids and end token. Rows of the embedding beyond them may
    differ."""
    ours, theirs = student.tokenizer(), teacher.tokenizer()
    what = f"{teacher.called}.path={teacher.path} has another tokenizer than the policy"
    if why := difference(ours.get_vocab(), theirs.get_vocab()):
        raise UserError(f"{what}: {why}; {REMEDY}")
    if ours.eos_token != theirs.eos_token:
        why = f"the policy ends with {ours.eos_token!r}, the teacher with {theirs.eos_token!r}"
        raise UserError(
            f"{what}: {why}, and the policy would unlearn to end; save the teacher's with the same eos_token"
        )


def difference(ours: Mapping[str, int], theirs: Mapping[str, int]) -> str:
    """Return the first token whose id differs in two vocabularies, in words; "" if none does. ours: the policy's."""
    differing = {token for token, i in ours.items() ^ theirs.items()}
    if not differing:
        return ""
    token = min(differing, key=lambda token: min(ours.get(token, 1 << 40), theirs.get(token, 1 << 40)))
    ids = [f"has {names[token]}" if token in names else "lacks it" for names in (ours, theirs)]
    return f"the token {token!r}, of which the policy {ids[0]} and the teacher {ids[1]}, and {len(differing) - 1} more"
