"""MuSiQue: questions that take two to four facts, each found by a search of the question's own paragraphs (arXiv 2108.00573)."""

import logging
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from grpo.data.rows import rows_where
from grpo.env.messages import Message
from grpo.env.thoughts import after_thoughts
from grpo.env.types import Example, Reward, Split, Trajectory
from grpo.extras.datasets.dataset import Dataset
from grpo.extras.grading.answers import boxed
from grpo.extras.tools.env import ToolEnv
from grpo.system.errors import UserError
from grpo.system.ranges import Count, NonNegative, Whole, enforced

# bm25s works without numba. If numba is imported, vLLM's engine for CPUs (0.32) fails to start, because of llvmlite
numba = sys.modules.setdefault("numba", None)
import bm25s  # noqa: E402

if numba is None:
    del sys.modules["numba"]

logging.getLogger("bm25s").setLevel(logging.WARNING)  # by default it logs every index

# A box instead of a line "Answer: ...": chat models know boxes from mathematics, prose does not contain one by accident, and its
# end is clear. The instructions come first, so that all prompts begin with the same tokens, which an engine computes once.
INSTRUCTIONS = (
    "Answer the question. It takes several facts: find them with the search tool, one fact at a time, as often as needed. "
    "When you know the answer, give it alone, in as few words as possible, in \\boxed{}."
)
NOTHING = "No paragraph matches. Try other words."
_STYLED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf)\s*\{([^{}]*)\}")  # models put these around words in a box


class Paragraph(NamedTuple):
    """A paragraph of a question's collection."""

    title: str
    text: str
    support: bool  # it holds one of the facts

    @property
    def shown(self) -> str:
        """The text that a search shows and indexes."""
        return f"{self.title}\n{self.text}"


class Question(NamedTuple):
    """A row of MuSiQue with its paragraphs."""

    text: str
    answers: tuple[str, ...]  # the gold one first, then its aliases
    hops: int | None  # how many facts it takes
    paragraphs: tuple[Paragraph, ...]


def question_of(row: Example) -> Question:
    """Return the question of a row of either form: MuSiQue's own (answer_aliases, paragraph_text, is_supporting, and the number
    of hops in an id like `2hop__1_2`), or the short one (aliases, text, support, hops). Raises UserError for other paragraphs."""

    aliases = _first_of(row, "aliases", "answer_aliases") or ()
    answers = tuple(str(answer) for answer in (row.get("answer"), *aliases) if answer not in (None, ""))
    paragraphs = tuple(map(_paragraph_of, row.get("paragraphs") or ()))
    return Question(row.get("question", ""), answers, hops(row), paragraphs)


def _paragraph_of(fields: Mapping[str, Any]) -> Paragraph:
    if not isinstance(fields, Mapping):
        form = "a mapping with title and text or paragraph_text"
        raise UserError(f"the paragraph {str(fields)[:80]!r} must be {form}")
    title, text = fields.get("title"), _first_of(fields, "text", "paragraph_text")
    if title is None or text is None:
        raise UserError(f"a paragraph has {', '.join(fields)}: it needs title, and text (or paragraph_text)")
    return Paragraph(title, text, bool(_first_of(fields, "support", "is_supporting")))


def _first_of(fields: Mapping[str, Any], *names: str) -> Any:
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def hops(row: Example) -> int | None:
    """Return the number of hops, from the column `hops`, else from the id; None if neither has it."""
    if row.get("hops") is not None:
        return int(row["hops"])
    named = re.match(r"(\d+)hop", str(row.get("id", "")))
    return int(named[1]) if named else None


@lru_cache(maxsize=256)  # all samples of a question are built one after the other
def search_of(paragraphs: tuple[Paragraph, ...], k: int) -> Callable[[str], str]:
    """Return the tool that finds at most k paragraphs, by BM25 with the defaults of bm25s: lower case, words of two letters and
    more without the English stop words, k1 = 1.5, b = 0.75. It has no state, so any number of samples may share one."""
    index = bm25s.BM25()
    tokens = bm25s.tokenize([paragraph.shown for paragraph in paragraphs], show_progress=False)
    if tokens.vocab:  # bm25s cannot make an index without a word
        index.index(tokens, show_progress=False)

    def search(query: str) -> str:
        """Search an encyclopedia. Gives the paragraphs that match best, each under its title.

        Args:
            query: what to look for: names and words that the paragraph should contain
        """
        (words,) = bm25s.tokenize([query], return_ids=False, show_progress=False)
        if not words or not tokens.vocab:
            return NOTHING
        scores = index.get_scores(words)  # [paragraphs]
        best = np.argsort(-scores, kind="stable")[:k]  # bm25s's own choice among equals depends on the processor
        return "\n\n".join(paragraphs[i].shown for i in best if scores[i] > 0) or NOTHING

    return search


# -- the score of an answer


def normalised(text: str) -> str:
    """Return the text normalised as in SQuAD's evaluation (arXiv 1606.05250), which MuSiQue uses: lower case, without ASCII
    punctuation, articles and extra white space. A text of nothing else is kept: otherwise "!" would equal "The The"."""
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split()) or text.lower()


def em(answer: str, golds: Sequence[str]) -> float:
    """Return 1 if the answer is one of `golds`, else 0."""
    return float(normalised(answer) in map(normalised, golds))


def f1(answer: str, golds: Sequence[str]) -> float:
    """Return 2 P R / (P + R) of the common words, for the gold answer with the highest value."""

    def of(gold: str) -> float:
        ours, theirs = normalised(answer).split(), normalised(gold).split()
        if not ours or not theirs:
            return float(ours == theirs)
        return 2 * sum((Counter(ours) & Counter(theirs)).values()) / (len(ours) + len(theirs))

    return max(map(of, golds), default=0.0)


def answer_of(trajectory: Trajectory) -> str | None:
    """Return the content of the last box of the last message; None if that message searches instead, or the turns ran out."""
    if trajectory.end == "out_of_turns" or not trajectory.steps:
        return None
    if trajectory.steps[-1].action.message.tool_calls:
        return None
    answer = boxed(after_thoughts(trajectory.answer))
    return None if answer is None else _STYLED.sub(r"\1", answer).strip() or None


def queries(trajectory: Trajectory) -> list[str]:
    """Return the policy's search queries, normalised."""
    calls = [call for step in trajectory.steps for call in step.action.message.tool_calls]
    searches = [call for call in calls if call.name == "search" and isinstance(call.arguments, Mapping)]
    texts = [call.arguments.get("query") for call in searches]
    return [normalised(text) for text in texts if isinstance(text, str)]


def shown(trajectory: Trajectory, paragraphs: Sequence[Paragraph]) -> list[Paragraph]:
    """Return the paragraphs that searches have shown completely."""
    results = [message.content for message in trajectory.messages if message.role == "tool"]
    return [paragraph for paragraph in paragraphs if any(paragraph.shown in result for result in results)]


class Musique:
    """reward = em or f1 (`match`) - repeat_penalty * repeats - call_penalty * max(0, searches - free_searches)

    repeats: searches whose `normalised` query the same sample has used before. A search is a call with a text, answered or not.
    em decides whether an answer is right, whatever `match` is.
    Parts: em, f1, searches, repeats; supports, the share of the supporting paragraphs that the searches showed; and em again as
    hops_2, hops_3 or hops_4.

    path: a hub id, a file or a folder; rows of either form; unanswerable ones are left out. rows: further arguments of `Dataset`.
    """

    gold_column = "answer"

    @enforced("task")
    def __init__(
        self,
        path: str = "dgslibisey/MuSiQue",
        k: Count = 3,
        match: Literal["em", "f1"] = "em",
        repeat_penalty: NonNegative = 0.1,
        call_penalty: NonNegative = 0.05,
        free_searches: Whole = 4,
        **rows: Any,
    ) -> None:
        self.k, self.match = k, match
        self.repeat_penalty, self.call_penalty = repeat_penalty, call_penalty
        self.free_searches = free_searches
        self.data = Dataset(path, ("question", "answer"), "musique", **rows)
        self.kept: dict[Split, Sequence[Example]] = {}

    def examples(self, split: Split) -> Sequence[Example]:
        if split not in self.kept:
            rows = self.data.split(split)
            if not question_of(rows[0]).paragraphs:
                has = f"a row has {', '.join(rows[0])} and needs question, answer, paragraphs"
                raise UserError(f"{self.data.path}, {split}: no `paragraphs` to search; {has}")
            columns = ("question", "answerable")
            answerable = rows_where(lambda row: row.get("answerable") is not False, rows, columns)
            if not answerable:
                raise UserError(f"no row of the split {split!r} ({len(rows):,}) is an answerable question")
            self.kept[split] = answerable
        return self.kept[split]

    def build(self, example: Example) -> ToolEnv:
        question = question_of(example)
        prompt = Message("user", f"{INSTRUCTIONS}\n\nQuestion: {question.text}")
        return ToolEnv([prompt], [search_of(question.paragraphs, self.k)])

    def score(self, example: Example, trajectory: Trajectory) -> Reward:
        question, answer, searches = question_of(example), answer_of(trajectory), queries(trajectory)
        parts = {
            "em": 0.0 if answer is None else em(answer, question.answers),
            "f1": 0.0 if answer is None else f1(answer, question.answers),
            "searches": float(len(searches)),
            "repeats": float(len(searches) - len(set(searches))),
        }
        beyond = max(0, len(searches) - self.free_searches)
        value = parts[self.match] - self.repeat_penalty * parts["repeats"] - self.call_penalty * beyond
        right = parts["em"] == 1
        if supports := [paragraph for paragraph in question.paragraphs if paragraph.support]:
            parts["supports"] = len(shown(trajectory, supports)) / len(supports)
        if question.hops is not None:
            parts[f"hops_{question.hops}"] = float(right)
        outcome = "right" if right else "wrong"
        return Reward(value, right, parts, "no_answer" if answer is None else outcome)
