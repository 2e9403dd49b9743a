"""A language model as a reward, behind any OpenAI chat endpoint: rubrics (arXiv 2507.17746), or comparisons inside a group.

    python train.py judge=explicit judge.model=MODEL 'task.rewards=[correct,${judge}]'

A verdict is a line LABEL: CHOICE. One that is missing, given twice or no choice is invalid, as is a request that fails: the
reward is then unknown, never 0. Knows nothing of agreement with people: see extras/judges/agreement.py.
"""

import asyncio
import hashlib
import json
import logging
import math
import os
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import httpx2

from grpo.env.thoughts import after_thoughts
from grpo.env.types import Reward
from grpo.extras.network.answers import addresses
from grpo.rewards.combined import text_of
from grpo.system.errors import UserError, one_line
from grpo.system.output.secrets import bearer
from grpo.system.ranges import Count, NonNegative, Range, Seconds, Whole

log = logging.getLogger(__name__)

Choices = Mapping[str, Sequence[str]]  # by label
TASKS = {
    "explicit": "Grade the response by each criterion.",
    "implicit": "Grade the response by all criteria together; 1 is the worst grade.",
    "pairwise": "Compare the two responses by all criteria together.",
}
MARKS = " \t*_`\"'."  # around a verdict
LONGEST_WAIT = 600.0  # seconds that a host may ask for
UNJUDGED = Reward(math.nan, False, outcome="error")


def verdicts(text: str, labels: Choices) -> list[int] | None:
    """Return the index of the choice for each label; None if a verdict is missing, given twice or no choice."""
    answer = after_thoughts(text)
    places = []
    for label, choices in labels.items():
        lines = re.findall(rf"^\W*{re.escape(label)}\W*:(.*)$", answer, re.MULTILINE | re.IGNORECASE)
        chosen = [line.strip(MARKS).lower() for line in lines]
        places += [i for i, choice in enumerate(choices) if chosen == [choice.strip(MARKS).lower()]]
    return places if len(places) == len(labels) else None


def explicit_score(criteria: Sequence[Mapping[str, Any]], places: Sequence[int]) -> float:
    """R = clip(sum w s / sum of the w > 0, 0, 1), s = place / (number of choices - 1). A penalty has w < 0.

    places: the index of the choice for each criterion.
    """
    pairs = zip(criteria, places, strict=True)
    scores = [criterion["weight"] * place / (len(criterion["choices"]) - 1) for criterion, place in pairs]
    best = sum(criterion["weight"] for criterion in criteria if criterion["weight"] > 0)
    return min(max(sum(scores) / best, 0.0), 1.0)


def as_criteria(entries: Any) -> list[dict[str, Any]]:
    """Return the criteria that the entries stand for: texts, or mappings with `text` and perhaps weight (else 1) and choices, the
    worst first (else no, yes). Raises UserError for those that cannot be graded."""
    with suppress(TypeError, KeyError, AttributeError):
        usual = {"weight": 1.0, "choices": ["no", "yes"]}
        criteria = [usual | ({"text": entry} if isinstance(entry, str) else {**entry}) for entry in entries]
        for one in criteria:  # YAML reads no and yes as false and true
            one["choices"] = [("no", "yes")[c] if isinstance(c, bool) else c for c in one["choices"]]
        if all(map(_can_be_graded, criteria)) and any(criterion["weight"] > 0 for criterion in criteria):
            return criteria
    form = "[{text: It is polite., weight: 1, choices: [no, partly, yes]}]"
    raise UserError(f"judge.criteria={entries} must be a list as {form}: two choices or more, and a weight above 0")


def _can_be_graded(criterion: Mapping[str, Any]) -> bool:
    choices = criterion["choices"]
    distinct = {choice.strip(MARKS).lower() for choice in choices}
    return bool(criterion["text"]) and len(distinct) == len(choices) > 1 and "" not in distinct


class Host:
    """The requests of this process to one host: some at a time, with a gap from one to the next, and none before `free`."""

    def __init__(self, concurrency: int, per_minute: int | None) -> None:
        self.slots = asyncio.Semaphore(concurrency)
        self.gap, self.free = 60 / (per_minute or math.inf), 0.0

    async def turn(self) -> None:
        """Wait for the turn of a request that has a slot."""
        while (wait := self.free - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        self.free = time.monotonic() + self.gap


_hosts: dict[tuple[Any, str], Host] = {}  # by event loop and host


@dataclass
class Judge:
    """model: asked at `url` (null: OPENAI_BASE_URL of the environment, else OpenAI's); of several, the mean counts. key_from: the
    variable of the environment that has the key.

    criteria: see `as_criteria`, or the column that has them. mode: `explicit` gives a verdict on each, `implicit` a grade from 1
    to `grades` on all, scaled to 0 ... 1, and `pairwise` compares each sample with the next `rounds` of its group in both
    orders: R = (wins - losses) / matches, and who wins in one order only has a tie. reference: show `gold` to the judge.
    temperature: null sends none. request: further fields of one. An answer without text gets 0 (or loses) without a request.

    concurrency, per_minute: of the requests of this process to a host; the first judge there sets them. retries: after 429, 5xx,
    a lost connection or `timeout` seconds; the n-th waits Retry-After, or backoff * 2^(n-1) s. cache: a file of valid verdicts;
    null: none. prices: of a million tokens of prompts and of answers. name: of the metric, and the start of NAME_invalid, ...
    """

    model: str | list[str]
    criteria: str | Sequence[Any] = ("The response is correct, complete and clear.",)
    mode: Literal["explicit", "implicit", "pairwise"] = "explicit"
    grades: Annotated[int, Range(2)] = 10
    rounds: Count = 2
    reference: bool = True
    url: str | None = None
    key_from: str = "OPENAI_API_KEY"
    temperature: NonNegative | None = 0.0
    request: Mapping[str, Any] | None = None
    concurrency: Count = 16
    per_minute: Count | None = None
    timeout: Seconds = 60.0
    retries: Whole = 4
    backoff: NonNegative = 1.0
    cache: str | None = None
    prices: tuple[NonNegative, NonNegative] = (0.0, 0.0)
    name: str = "judge"

    def __post_init__(self) -> None:
        self.__name__, self.models = self.name, [self.model] if isinstance(self.model, str) else self.model
        usual = {} if self.temperature is None else {"temperature": self.temperature}
        self.fields = usual | (self.request or {})
        url = self.url or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1"
        [self.url], self.logged = addresses([url], "judge.url"), False
        if not isinstance(self.criteria, str):
            self.criteria = as_criteria(self.criteria)
        if self.cache:
            Path(self.cache).parent.mkdir(parents=True, exist_ok=True)

    async def __call__(self, prompts: Sequence, completions: Sequence, log_metric: Any, **columns: Any) -> list:
        prompt, [gold, *_] = prompts[0], columns.get("gold") or [None]
        if not isinstance(prompt, str):
            prompt = "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)
        texts = {"The prompt": prompt}
        if self.reference and gold is not None:
            texts["A right answer"] = str(gold)
        criteria = as_criteria(columns[self.criteria][0]) if isinstance(self.criteria, str) else self.criteria
        answers = [after_thoughts(text_of(completion)).strip() for completion in completions]
        with closing(sqlite3.connect(self.cache or ":memory:", 60, isolation_level=None)) as file:
            file.execute("CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, answer TEXT)")
            async with httpx2.AsyncClient(timeout=self.timeout) as http:
                session = Session(self, http, file, texts, criteria)
                score = session.compared if self.mode == "pairwise" else session.graded
                scores = await score(answers)
        for metric, value in self.metrics(session.seen).items():
            log_metric(f"{self.name}_{metric}", value)
        return scores

    def metrics(self, seen: Counter[str]) -> dict[str, float]:
        """Return the metrics of the requests about one group, by the ends of their names."""
        read, written = seen["prompt_tokens"], seen["completion_tokens"]
        cost = (self.prices[0] * read + self.prices[1] * written) / 1e6
        totals = {"calls": seen["sent"], "cached": seen["cached"], "tokens": read + written, "cost": cost}
        rates = {"invalid": "asked", "seconds": "sent", "flips": "matches", "first": "decided"}
        return totals | {name: seen[name] / seen[count] for name, count in rates.items() if seen[count]}

    async def answer(self, http: httpx2.AsyncClient, body: Mapping[str, Any], seen: Counter[str]) -> Any:
        """Send a request, again if it fails, and return the JSON or the text of its answer; None if there is none. Counts in
        `seen`. Raises UserError for a wrong key, model or address."""
        place = asyncio.get_running_loop(), httpx2.URL(self.url).host
        host = _hosts.setdefault(place, Host(self.concurrency, self.per_minute))
        headers = bearer(self.key_from)
        for attempt in range(self.retries + 1):
            async with host.slots:
                await host.turn()
                seen["sent"] += 1
                response, began = None, time.monotonic()
                with suppress(httpx2.HTTPError):
                    response = await http.post(f"{self.url}/chat/completions", json=body, headers=headers)
                seen["seconds"] += time.monotonic() - began
            status = response.status_code if response is not None else 503
            if status in (401, 403, 404):
                fix = f"check judge.url, judge.model and the key in ${self.key_from}"
                raise UserError(f"{self.url} answers {status}: {response.text[:200]!r}; {fix}")
            if status != 429 and status < 500:
                with suppress(ValueError, RecursionError):
                    return response.json()
                return response.text
            try:
                wait = min(float(response.headers["retry-after"]), LONGEST_WAIT)
                host.free = max(host.free, time.monotonic() + wait)
            except (AttributeError, KeyError, ValueError):
                await asyncio.sleep(self.backoff * 2**attempt if attempt < self.retries else 0)
        return None


@dataclass
class Session:
    """The requests about one group. texts: by their titles, what every question shows. Mutable: `seen` counts."""

    judge: Judge
    http: httpx2.AsyncClient
    file: sqlite3.Connection
    texts: Mapping[str, str]
    criteria: Sequence[Mapping[str, Any]]
    seen: Counter[str] = field(default_factory=Counter)

    async def graded(self, answers: Sequence[str]) -> list[float | Reward]:
        """Return the scores of the answers, by each criterion or by one grade."""
        explicit, grades = self.judge.mode == "explicit", self.judge.grades
        labels = {"GRADE": [str(grade) for grade in range(1, grades + 1)]}
        if explicit:
            labels = {str(i): criterion["choices"] for i, criterion in enumerate(self.criteria, 1)}

        def score(places: Sequence[int]) -> float:
            return explicit_score(self.criteria, places) if explicit else places[0] / (grades - 1)

        async def mean_score(answer: str) -> float | Reward:
            if not answer:
                return 0.0
            response = {"The response": answer}
            requests = [self.ask(voter, labels, response) for voter in enumerate(self.judge.models)]
            votes = await asyncio.gather(*requests)
            return UNJUDGED if None in votes else fmean(map(score, votes))

        return await asyncio.gather(*map(mean_score, answers))

    async def compared(self, answers: Sequence[str]) -> list[float | Reward | None]:
        """Return (wins - losses) / matches of each answer; None for an answer without a rival."""
        n = len(answers)
        pairs = set()
        for i in range(n):
            for distance in range(1, min(self.judge.rounds, n - 1) + 1):
                rival = (i + distance) % n
                pairs.add((min(i, rival), max(i, rival)))
        if not pairs:
            return [None] * n
        matches = [(i, j, voter) for i, j in sorted(pairs) for voter in enumerate(self.judge.models)]
        requests = [self.match(answers[i], answers[j], voter) for i, j, voter in matches]
        results = await asyncio.gather(*requests)
        points: list[list[int]] = [[] for _ in answers]
        for (i, j, _), result in zip(matches, results, strict=True):
            if result is not None:
                points[i].append(result)
                points[j].append(-result)
        return [fmean(earned) if earned else UNJUDGED for earned in points]

    async def match(self, left: str, right: str, voter: tuple[int, str]) -> int | None:
        """Return 1 if `left` wins, -1 if `right` does, 0 for a tie, None for an invalid verdict. Both orders are asked for; an
        answer that wins in only one of them ties."""
        if not (left and right):
            return bool(left) - bool(right)
        labels = {"BETTER": ["tie", "A", "B"]}
        orders = ({"Response A": left, "Response B": right}, {"Response A": right, "Response B": left})
        both = await asyncio.gather(*(self.ask(voter, labels, order) for order in orders))
        if None in both:
            return None
        [forth], [back] = both  # 0 is a tie, 1 is A, 2 is B
        outcome = {(0, 0): 0, (1, 2): 1, (2, 1): -1}.get((forth, back))
        flipped = outcome is None
        first, decided = (forth, back).count(1), bool(forth) + bool(back)
        self.seen.update(matches=1, flips=flipped, first=first, decided=decided)
        return 0 if flipped else outcome

    async def ask(self, voter: tuple[int, str], labels: Choices, responses: Mapping[str, str]) -> list[int] | None:
        """Return the index of the choice for each label, from the cache or a request; None if the answer is not valid.

        voter: its number, which tells equal models apart, and its model.
        """
        seen, (number, model) = self.seen, voter
        question = self.question(labels, {**self.texts, **responses})
        body = {"model": model, "messages": [{"role": "user", "content": question}], **self.judge.fields}
        key = hashlib.sha256(json.dumps([self.judge.url, body, number], sort_keys=True).encode()).hexdigest()
        seen["asked"] += 1
        if row := self.file.execute("SELECT answer FROM verdicts WHERE key = ?", (key,)).fetchone():
            seen["cached"] += 1
            return verdicts(row[0], labels)
        reply = await self.judge.answer(self.http, body, seen)
        places = None
        with suppress(TypeError, ValueError, LookupError, AttributeError):  # the answer may be anything
            text = reply["choices"][0]["message"]["content"]
            places = verdicts(text, labels)
            seen.update({name: int(reply["usage"][name]) for name in ("prompt_tokens", "completion_tokens")})
        if places is None:
            seen["invalid"] += 1
            if not self.judge.logged:  # the metric counts the others
                self.judge.logged, said = True, "nothing" if reply is None else one_line(reply, 200)
                log.warning(
                    "the judge at %s gave no verdict, so a reward is unknown. It answers %s", self.judge.url, said
                )
        else:
            self.file.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", (key, text))
        return places

    def question(self, labels: Choices, texts: Mapping[str, str]) -> str:
        """Return a question. A mark ends each text, so that no text can pretend to end: it is the text's own hash."""
        weighted = self.judge.mode != "explicit"
        parts = [TASKS[self.judge.mode]]
        for i, criterion in enumerate(self.criteria, 1):
            weight = f" (weight {criterion['weight']:g})" if weighted else ""
            parts.append(f"{i}. {criterion['text']}{weight}")
        for title, text in texts.items():
            mark = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:8]
            parts.append(f"{title}, up to the line {mark}:\n{text}\n{mark}")
        parts.append("End with these lines, each with one of its choices:")
        parts.append("\n".join(f"{label}: {' | '.join(choices)}" for label, choices in labels.items()))
        return "\n\n".join(parts).encode(errors="replace").decode()  # JSON has no half of a surrogate pair
