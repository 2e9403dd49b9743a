"""Checks of the data: prompts, answers and their ends, rewards, and whether there is something to learn."""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from statistics import mean, pstdev
from typing import Any

import torch

from grpo.data.rows import at, key_of
from grpo.env.messages import Message
from grpo.env.rendering import Renderer
from grpo.env.scoring import place_of
from grpo.env.tokens import rows_of_turns
from grpo.env.types import Action, Example, Reward, State, Step, Trajectory
from grpo.extras.health.callback import untaught
from grpo.extras.preflight.checked import Checked, pass_or_fail
from grpo.extras.preflight.episodes import is_question, is_seeded
from grpo.extras.preflight.probe import Probe
from grpo.extras.preflight.written import agrees, golds_in, texts_only
from grpo.objectives.algorithm import Algorithm
from grpo.objectives.arguments import call, parameters
from grpo.rewards.row_task import RowTask
from grpo.rollout.collate import scores
from grpo.rollout.types import Group, Sample
from grpo.system.errors import plural
from grpo.system.global_state import put_back

FORMS = ("\\boxed{{{}}}", "#### {}", "{}")  # ways to write an answer
ACCEPTS = "the reward accepts wrong answers"
MOST = 10_000  # rows of a split that are compared
WORDS = 8  # words in a row that make two texts near duplicates
VERBS = "question|problem|q|task|solve|answer|calculate"
PICTURES = ("images", "image")  # the usual columns of pictures
LEADING = re.compile(rf"^({VERBS})( the following)?( problem| question)?\s*\d*\s*[:.)]\s*")


def gold(probe: Probe) -> Checked:
    """Right answers are those of the file and get full marks; damaged ones, and right answers of other rows, do not."""
    task = probe.rollouts.task
    if not isinstance(task, RowTask):
        return Checked("SKIP", "the task does not tell its right answers")
    answers = [(row, str(task.gold(row))) for row in probe.rows if task.gold(row) is not None]
    if not answers:
        return Checked("SKIP", "the rows have no right answers")
    in_file, misread = of_the_file(task, probe.rows)
    if misread:
        read, text = misread[0]
        has = f"{len(misread)} of {in_file} right answers are not what the file has"
        remedy = f"{text!r} is read as {read!r}: write the column as texts, or give the file as it was"
        return Checked("FAIL", has, remedy)
    tokens = getattr(probe.rollouts.renderer, "answer_ids", lambda message: ())

    def right(row: Example, answer: str) -> bool:
        state = State(task.messages(row))
        messages = [Message("assistant", form.format(answer)) for form in FORMS]
        episodes = [Trajectory((Step(state, Action(message, ids=tokens(message))),)) for message in messages]
        with put_back(place_of(task)):
            return any(reward.correct for reward in task.score_group(row, episodes))

    missed = [answer for row, answer in answers if not right(row, answer)]
    if len(missed) == len(answers):
        return Checked("SKIP", f"none of {len(answers)} right answers counts: the reward needs more than an answer")
    others = []  # rows, each with the right answer of another row
    for row, answer in answers:
        different = (other for _, other in answers if other != answer)
        if other := next(different, ""):
            others.append((row, other))
    broken = [(row, wrong) for row, answer in answers if (wrong := damaged(answer))]
    fooled = sum(right(row, wrong) for row, wrong in others)
    deceived = sum(right(row, wrong) for row, wrong in broken)
    text = f"{len(answers) - len(missed)} of {len(answers)} right answers are right"
    text = f"{in_file} right answers are as the file has them, {text}" if in_file else text
    text += f", {plural(fooled, 'answer')} of other rows and {deceived} damaged ones are"
    remedy = f"the right answer {missed[0][:40]!r} gets no marks: look at task.gold" if missed else ACCEPTS
    return pass_or_fail(not missed and not fooled and not deceived, text, remedy)


def of_the_file(task: RowTask, rows: Sequence[Example]) -> tuple[int, list[tuple[Any, Any]]]:
    """Compare the rows' right answers with the text of their local file. Returns how many are in it, and pairs of what was read
    and what the file has, where these differ. A task whose `gold` is not a column has that column compared."""
    data, name = task.data, task.gold_column
    file = data.file("train") if hasattr(data, "file") else None
    if file is None or name is None:
        return 0, []
    if all(at(row, name) is None for row in rows):  # as math's, whose answer is in the solution
        name = data.columns[-1]
    question = data.columns[0]
    texts_of = golds_in(file, question, name, [at(row, question) for row in rows])  # by question
    in_file, misread = 0, []
    for row in rows:
        texts = texts_of.get(key_of(texts_only(at(row, question))), [])
        read = at(row, name) if overrides(task) else task.gold(row)
        in_file += bool(texts)
        if texts and not any(agrees(read, text) for text in texts):
            misread.append((read, texts[0]))
    return in_file, misread


def overrides(task: RowTask) -> bool:
    """Return whether the class of a task makes its right answers of the rows in a way of its own."""
    return type(task).gold is not RowTask.gold


def damaged(answer: str) -> str | None:
    """Return another answer, whose first digit is one higher; None if there is no digit."""
    digit = re.search(r"[0-9]", answer)
    return digit and f"{answer[: digit.start()]}{(int(digit[0]) + 1) % 10}{answer[digit.end() :]}"


def turns(probe: Probe) -> Checked:
    """Turns go on in the row of the turn before; the verdict tells if the chat template keeps them from it."""
    several = [sample for sample in probe.samples if len(sample.turns) > 1]
    if not several:
        return Checked("SKIP", "every episode has one turn")
    rows = [rows_of_turns(sample.turns) for sample in several]
    count, turned = sum(map(len, rows)), sum(len(sample.turns) for sample in several)
    text = f"{plural(turned, 'turn')} of {plural(len(several), 'episode')} are {plural(count, 'row')}"
    if count == len(several):
        return Checked("PASS", text)
    tokens = sum(len(row.prompt_ids) + len(row.ids) for of_episode in rows for row in of_episode)
    of_last_turns = sum(len(sample.turns[-1].ids) for sample in several)
    text += f", {tokens / of_last_turns:.1f} times the tokens of the last turns"
    if any(thought_dropped(probe.rollouts.renderer, sample) for sample in several):
        text += ": the chat template drops earlier thoughts, so each turn after one is a row of its own"
        return Checked("PASS", text)
    return Checked("PASS", f"{text}: the template or the environment writes earlier turns in another way")


def thought_dropped(renderer: Renderer, sample: Sample) -> bool:
    """Return whether a prompt lacks the thought of the turn before it, although its conversation has it."""
    read = getattr(getattr(renderer, "tokenizer", None), "decode", str)
    for before, step, turn in zip(sample.trajectory.steps, sample.trajectory.steps[1:], sample.turns[1:], strict=False):
        message = before.action.message
        thought = message.reasoning_content
        if thought and message in step.state.messages and thought not in read(turn.prompt_ids):
            return True
    return False


def rewards(probe: Probe) -> Checked:
    """Wrong samples do not have higher rewards than right ones, by more than chance explains."""
    graded = [sample.reward for sample in probe.samples if sample.reward.known]
    right = [reward.value for reward in graded if reward.correct]
    wrong = [reward.value for reward in graded if not reward.correct]
    if not right or not wrong:
        return Checked("SKIP", f"{len(right)} right and {len(wrong)} wrong samples: no comparison")
    high, low = sum(right) / len(right), sum(wrong) / len(wrong)
    spread = math.hypot(pstdev(right) / len(right) ** 0.5, pstdev(wrong) / len(wrong) ** 0.5)
    text = f"mean reward {high:.3g} of {len(right)} right samples, {low:.3g} of {len(wrong)} wrong ones"
    remedy = "wrong answers earn more than right ones: look at task.weights and at the reward"
    return pass_or_fail(low - high <= 3 * spread, text, remedy)


def signal(probe: Probe) -> Checked:
    """Rewards differ within groups (or what selection.by asks for). If not in the probe, more groups are asked, whatever that
    takes: a run without signal learns nothing."""
    if not probe.module.algorithm.policy_coef:
        return Checked("SKIP", "algo.policy_coef=0: the policy learns from no reward")
    size, groups = probe.rollouts.plan.group_size, probe.groups
    by = "correct" if getattr(probe.rollouts.selection, "by", None) == "correct" else "reward"
    live = int(probe.scores.has_signal(by).sum())
    for more in () if live or probe.beyond_rewards else probe.further():
        groups = groups + more
        if live := int(scores(groups).has_signal(by).sum()):
            break
    samples, count = [sample for group in groups for sample in group], len(groups)
    probe.live = live / count
    right = [[bool(sample.reward.correct) for sample in group] for group in groups]
    solved = sum(map(sum, right)) / max(1, len(samples))
    passed = sum(map(any, right)) / count
    text = f"{solved:.0%} solved, pass@{size} {passed:.0%}, {live} of {count} groups have signal"
    if live and solved:
        return Checked("PASS", f"{text}: fit for GRPO")
    if live:
        text += f": no answer is right, so only other parts of the reward can rise at first; {differing(groups)}"
        remedy = "the advantage scales a small part up to the size of a right answer: set algo/advantage=mean_only"
        return Checked("WARN", text, remedy) if scales(probe.module.algorithm) else Checked("PASS", text)
    values = {sample.reward.value for sample in samples if sample.reward.known}
    outcomes = {sample.reward.outcome for sample in samples}
    foreign = untaught(probe.module.policy, probe.rollouts.task)
    causes = [
        (solved == 0 and foreign, foreign),
        (not values, "no sample has a reward: the grader fails or runs out of time"),
        (all(sample.trajectory.truncated for sample in samples), "all answers are cut short: raise max_tokens"),
        (outcomes == {"no_answer"}, "no answer is where the reward looks: prompt for that form, or reward it"),
        (by == "correct" and scores(groups).has_signal().any(), "only rewards differ: set selection.by=reward"),
        (solved == 1, "all answers are right: take harder problems"),
        (solved == 0, "no answer is right: take easier problems, a better model, or more samples per prompt"),
        (True, f"rewards differ between prompts only: {sorted(values)[:3]}"),
    ]
    remedy = next(words for applies, words in causes if applies)
    if probe.beyond_rewards:
        return Checked("WARN", f"{text}: at first the policy learns from its teacher or texts alone", remedy)
    return Checked("FAIL", text, remedy)


def differing(groups: Sequence[Group]) -> str:
    """Return which parts of the reward differ within groups, and their mean deviation there; the reward if it has no parts."""

    def deviation(number: Callable[[Reward], float]) -> float:
        values = [[number(sample.reward) for sample in group if sample.reward.known] for group in groups]
        return mean(pstdev(of_group) for of_group in values if of_group)

    names = sorted({name for group in groups for sample in group for name in sample.reward.parts})
    sizes = {name: deviation(lambda reward, name=name: reward.parts.get(name, 0.0)) for name in names}
    apart = {name: size for name, size in sizes.items() if size} or {"reward": deviation(lambda reward: reward.value)}
    return ", ".join(f"{name} differs by {size:.2g} within a group" for name, size in apart.items())


def scales(algorithm: Algorithm) -> bool:
    """Return whether the advantage gives rewards that are ten times as far apart the same advantages, and needs no more than
    rewards."""
    needed = [name for name, one in parameters(algorithm.advantage).items() if one.default is one.empty]
    if needed != ["rewards"]:
        return False
    rewards = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    wide, narrow = (call("advantage", algorithm.advantage, {"rewards": rewards * size}) for size in (10.0, 1.0))
    return torch.allclose(wide, narrow, rtol=1e-2)


def folded(text: str) -> str:
    """Return a text without case, width, accents, punctuation, leading phrases and separators in numbers."""
    text = unicodedata.normalize("NFKD", text).casefold().strip()
    text = re.sub(r"(?<=\d)[,_ ](?=\d{3}\b)", "", LEADING.sub("", text))
    text = re.sub(r"(\d)\.0+\b", r"\1", text)
    plain = "".join(c for c in text if not unicodedata.combining(c))
    return " ".join(re.findall(r"\w+|[-+*/^](?=\s*[\d(])", plain))  # 4 - 5 is not 4 + 5


def shingles(text: str) -> set[int]:
    """Return hashes of all runs of WORDS words."""
    words = text.split()
    return {hash(tuple(words[i : i + WORDS])) for i in range(len(words) - WORDS + 1)}


def held_out(probe: Probe) -> Checked:
    """No held-out row is among the training rows, however it is written; near duplicates are counted, without the words that most
    training rows share. Where the environment draws the problem from its seed, the same row is another problem: evaluations have
    seeds of their own."""
    (_, train), *others = probe.examples.items()
    if not others:
        return Checked("SKIP", "the run evaluates nothing")
    known = set(questions(train))
    if whole := len(known) == 1:  # the question is always the same: the rest of a row may be the problem
        known = set(questions(train, whole))
    counts = Counter(chain.from_iterable(map(shingles, known)))
    common = {run for run, count in counts.items() if count > max(1, len(known) / 2)}
    seen = counts.keys() - common
    asked = [text for _, rows in others for text in questions(rows, whole)]
    equal = sum(text in known for text in asked)
    runs = [shingles(text) - common for text in asked if text not in known]
    near = sum(len(run & seen) > len(run) / 2 for run in runs if run)
    text = f"{equal} of {len(asked)} held-out rows are training rows; {near} more share most runs of {WORDS} words"
    if equal <= len(asked) / 100:
        return Checked("PASS", text)
    repeated = len(known) <= min(len(train), MOST) / 10
    if repeated and is_seeded(probe.rollouts.task) and not is_question(probe):
        return Checked("PASS", f"{text}; {len(known)} of the training rows differ: the problem is in the seed")
    return Checked("FAIL", text, "accuracy would be memory: remove these rows, or set task.held_out")


def questions(rows: Sequence[Example], whole: bool = False) -> Iterable[str]:
    """Yield the folded question of each row, of MOST at most, with marks of its pictures. whole: take all values of a row."""
    names = () if whole else ("question", "problem", "prompt")
    for row in islice(rows, MOST):
        column = next((row[name] for name in names if isinstance(row.get(name), str)), None)
        rest = [value for name, value in row.items() if name not in PICTURES]
        yield folded(" ".join([*map(str, rest if column is None else [column]), *marks_of(row)]))


def marks_of(row: Example) -> Iterator[str]:
    """Yield a mark of each picture in the usual columns of a row: one question may be asked about many pictures."""
    for value in map(row.get, PICTURES):
        for one in value if isinstance(value, list | tuple) else [value]:
            if one is not None:
                yield str(hash(one.get("bytes") or str(one) if isinstance(one, Mapping) else str(one)))
