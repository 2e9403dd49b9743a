"""Checks of the episodes: tokens are those of the texts, limits hold, and each sample has its own reward."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo.env.intake import asked_for, build, close_env
from grpo.env.rendering import message_read
from grpo.env.scoring import score_group
from grpo.env.tokens import Completion, Turn
from grpo.env.types import EnvBuilder, SingleTurn, Step
from grpo.extras.preflight.checked import Checked, pass_or_fail
from grpo.extras.preflight.probe import Probe
from grpo.extras.preflight.white_space import loses_spaces
from grpo.rollout.rewarding import THREADS
from grpo.rollout.types import Sample
from grpo.system.calls import Calls, awaited
from grpo.system.errors import StopError, plural
from grpo.system.threads import outcome_of

LIKELIER = 0.5  # nats per token by which a start token in front may make a prompt likelier
PATIENCE = 4.0  # seconds, or a part of the checks' time: slow rewards are asked again only for as many groups as fit in


def prompts(probe: Probe) -> Checked:
    """Different rows have different prompts, the policy can end an answer, and the engine ends those that are too long.

    Environments may begin all their episodes alike if the problem is in the row or in the seed; plain questions, and a template,
    may not make different rows alike.
    """
    first = [group[0] for group in probe.groups if group[0].turns]
    asked = {sample.turns[0].prompt_ids for sample in first}
    text = f"{len(asked)} different prompts of {len(probe.groups)}"
    if len(first) > 1 and len(asked) == 1:
        said = {repr(sample.trajectory.steps[0].state) for sample in first if sample.trajectory.steps}
        if len(said) > 1 or is_question(probe):
            remedy = "prompts do not depend on the rows: look at the chat template and at task.prompt"
            return Checked("FAIL", text, remedy)
        text += ": the environment begins all episodes alike"
        if not is_seeded(probe.rollouts.task) and all(sample.example == first[0].example for sample in first):
            remedy = "there is one problem: give rows that differ, or let `build` take group_seed and draw the problem from it"
            return Checked("FAIL", f"{text}, its rows are equal, and it takes no seed", remedy)
    most = probe.rollouts.plan.sampling.max_tokens
    lengths = [(len(turn.completion.ids), min(step.state.max_tokens or most, most)) for step, turn in turns_of(probe)]
    if first:  # shorter than the policy would end by itself
        short = probe.sample([sample.turns[0].prompt_ids for sample in first[:2]], max_tokens=1)
        lengths += [(int(count), 1) for count in short.mask.sum(1)]
    if over := next((f"{count} tokens of at most {limit}" for count, limit in lengths if count > limit), None):
        return Checked("FAIL", f"an answer has {over}", "the engine ignores max_tokens: mend it, or take another")
    cut = sum(sample.trajectory.truncated for sample in probe.samples)
    length = sum(sample.length for sample in probe.samples) / len(probe.samples)
    text += f"; {cut} of {len(probe.samples)} answers cut short, {length:.0f} tokens each of at most {most}"
    remedy = "raise max_tokens, or set rollout.sampling.stop_ids or the model's end token"
    if cut == len(probe.samples):
        return Checked("FAIL", text, f"the policy never ends an answer: {remedy}")
    if cut > len(probe.samples) / 2:  # a reward for shorter answers may begin so
        return Checked("WARN", text, f"most answers have no end, and are graded without it: {remedy}")
    return Checked("PASS", text)


def begun(probe: Probe) -> Checked:
    """The prompts begin with the tokenizer's start token, or the model does not miss it. Gemma without it talks nonsense."""
    start = probe.tokenizer and probe.tokenizer.bos_token_id
    if start is None:
        return Checked("SKIP", "the tokenizer has no start token")
    prompts = dict.fromkeys(group[0].turns[0].prompt_ids for group in probe.groups if group[0].turns)
    without = [prompt for prompt in prompts if prompt[0] != start and len(prompt) > 1][:4]
    if not without:
        return Checked("PASS", "all do")
    fit = probe.allowance.left(1 / 8) / probe.token_seconds / 2 / len(without)  # each passes twice
    without = [prompt[: max(16, min(256, int(fit)))] for prompt in without]

    def mean(*front: int) -> float:
        """Return the mean log-probability of their tokens after the first one, with these tokens in front."""
        turns = [Turn((*front, first), Completion(tuple(rest), (0.0,) * len(rest), "stop")) for first, *rest in without]
        tokens = probe.rows_of(turns)
        return float(probe.trainer(tokens)[0][tokens.mask].mean())

    gain, token = mean(start) - mean(), probe.tokenizer.bos_token
    text = f"they do not begin with {token}, and with it their tokens are {gain:+.2f} nats likelier"
    remedy = f"let the tokenizer put {token} in front (add_bos_token in its folder), or the chat template"
    return pass_or_fail(gain <= LIKELIER, text, remedy)


def turns_of(probe: Probe) -> list[tuple[Step, Turn]]:
    """Return the turns of all episodes, as messages and as tokens."""
    both = ((sample.trajectory.steps, sample.turns) for sample in probe.samples)
    return [pair for steps, turns in both for pair in zip(steps, turns, strict=False)]


def is_question(probe: Probe) -> bool:
    """Return whether the task asks plain questions, one answer to each."""
    env = build(probe.rollouts.task, probe.rows[0])
    try:
        return isinstance(env, SingleTurn)
    finally:
        awaited(close_env(env))


def is_seeded(task: EnvBuilder) -> bool:
    """Return whether the task's environments get a seed, from which they may draw the problem."""
    return bool(asked_for(task.build, seed=0, group_seed=0))


def spelled_out(probe: Probe) -> Checked:
    """The tokens of prompts and answers, read with the model's own tokenizer, are the texts of the episode, turn by turn."""
    renderer, tokenizer = probe.rollouts.renderer, probe.tokenizer
    if tokenizer is None or not hasattr(renderer, "texts"):
        return Checked("SKIP", "the renderer does not tell its texts")
    rendered: dict[tuple[int, ...], bool] = {}  # whether a prompt is its text, by its tokens
    wrong_prompts = wrong_answers = 0
    for step, turn in turns_of(probe):
        ids, state = turn.prompt_ids, step.state
        if ids not in rendered and not isinstance(state.prompt, tuple):
            texts = renderer.texts(state.messages if state.prompt is None else state.prompt, state.tools)
            rendered[ids] = any(is_text(ids, *text, tokenizer, renderer.keep) for text in texts)
        wrong_prompts += not rendered.get(ids, True)
        read = message_read(renderer, turn.completion.ids, state, ids)
        wrong_answers += step.action.ids not in ((), turn.completion.ids) or read != step.action.message
    contents = [message.content for step, _ in turns_of(probe)[:8] for message in step.state.messages]
    if any(loses_spaces(text, tokenizer) for text in contents):
        remedy = "name the class PreTrainedTokenizerFast as tokenizer_class in its tokenizer_config.json"
        return Checked("FAIL", "the tokenizer loses the spaces of a text: decode(encode(text)) has others", remedy)
    wrong = f"{plural(wrong_prompts, 'prompt')} and {plural(wrong_answers, 'answer')}"
    text = f"{plural(len(turns_of(probe)), 'turn')}: {wrong} are not their texts"
    remedy = "prompts are not what was rendered: look at the renderer and its tokenizer"
    if not wrong_prompts:
        remedy = "answers are not what was sampled, or of another turn: please report this"
    return pass_or_fail(not wrong_prompts and not wrong_answers, text, remedy)


def is_text(
    ids: tuple[int, ...], text: str, special: bool, tokenizer: PreTrainedTokenizerBase, keep: int | None
) -> bool:
    """Return whether token ids are a text, or its last `keep` tokens. special: whether special tokens are added to it."""
    if min(ids, default=0) < 0:
        ids = tokenizer.sight.folded(ids)[0]  # a text has one token for a picture
    fresh = tuple(tokenizer(text, add_special_tokens=special, verbose=False).input_ids)
    return tokenizer.decode(ids) == tokenizer.decode(fresh) or (len(ids) == keep and fresh[-keep:] == ids)


def owners(probe: Probe) -> Checked:
    """Each sample has the reward that it gets alone, not that of another sample."""
    recorded, alone, begun = [], [], time.perf_counter()
    patience = min(PATIENCE, probe.allowance.left(1 / 6))
    try:
        for group in probe.groups:
            if not recorded or time.perf_counter() - begun < patience:
                mine = [sample for sample in group if not sample.trajectory.failed and sample.reward.known]
                recorded += [sample.reward.value for sample in mine]
                alone += rescored(probe, mine)
        if not unlike(recorded, alone):
            return Checked("PASS", f"{plural(len(alone), 'sample')}, scored alone: the same rewards")
        if unlike(sorted(recorded), sorted(alone)):
            return Checked("SKIP", "rewards compare samples, or vary")
        again = [value for group in probe.groups for value in rescored(probe, group)][: len(alone)]
    except StopError:
        raise
    except Exception as error:  # a reward that needs its environment, or what else a user's code may raise
        return Checked("SKIP", f"rewards cannot be asked again: {type(error).__name__}")
    if unlike(alone, again):
        return Checked("SKIP", "rewards vary")
    wrong = sum(unlike([reward], [other]) for reward, other in zip(recorded, alone, strict=True))
    text = f"{wrong} of {len(alone)} samples have a reward that belongs to another"
    return Checked("FAIL", text, "the reward mixes up its samples: look at the order of the list that it returns")


def rescored(probe: Probe, group: Sequence[Sample]) -> list[float]:
    """Return the reward of each sample, scored alone. Raises what the reward raises, and TimeoutError."""
    task, timeout = probe.rollouts.task, probe.rollouts.plan.limits.score_timeout
    calls = Calls(THREADS, "the reward")

    async def scored(sample: Sample) -> Any:
        return await calls.run(object(), timeout, score_group, task, sample.example, [sample.trajectory])

    async def all_alone() -> list[Any]:
        return await asyncio.gather(*map(scored, group))

    try:
        results = outcome_of(all_alone())
    finally:
        calls.close()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [rewards[0].value for rewards in results]


def unlike(rewards: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether two lists of rewards differ by more than rounding; lists of unlike lengths do."""
    pairs = zip(rewards, others, strict=False)
    return len(rewards) != len(others) or any(abs(a - b) > 1e-4 * max(1.0, abs(a)) for a, b in pairs)
