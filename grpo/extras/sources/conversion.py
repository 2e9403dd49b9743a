"""Converts the rows of a source to groups. A maximal run of sampled tokens is a turn, all tokens before it are its prompt.

A sample is a mapping: rows, a list of mappings with the fields of `SourceRow`; group, which samples of one prompt share; reward
(null: unknown). It may have advantage (in place of the estimator's), correct (by default reward > 0), parts (numbers to log) and
finish ("stop" or "length", of the last turn), and temperature (of all its turns; none: the run's).
"""

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from grpo.engines.logprobs import is_logprob
from grpo.engines.weights import eos_token_ids
from grpo.env.intake import no_tokens
from grpo.env.messages import Message
from grpo.env.rendering import Renderer, message_after
from grpo.env.tokens import Completion, Turn
from grpo.env.types import Action, Reward, State, Step, Trajectory
from grpo.models.pretrained import Pretrained
from grpo.rollout.types import Group, Sample
from grpo.system.errors import RolloutError

log = logging.getLogger(__name__)

PICTURES = 1 << 32  # ids of pictures are further below 0, but for one in two thousand million
NO_LOGPROBS = (
    "there are no log-probabilities of the engine, which the loss needs: let the environment sample from this run by its "
    "managed_server (--openai.server_type vllm), or send inference_logprobs with each group; in a file give logprobs in each row"
)


@dataclass(frozen=True)
class SourceRow:
    """One sequence: ids and sampled, [T]. The other fields are [T], or None if unknown; they are read where `sampled` is true."""

    ids: Sequence[int]
    sampled: Sequence[bool]
    logprobs: Sequence[float] | None = None
    versions: Sequence[int] | None = None
    advantages: Sequence[float] | None = None
    temperatures: Sequence[float | None] | None = None


class Conversion:
    """Makes samples for a model. Mutable: each remark is logged once.

    find: returns a completion, by its prompt, its ids and maybe its log-probabilities and its temperature, if our own engine has
    sampled it.
    """

    def __init__(self, pretrained: Pretrained, renderer: Renderer, find: Callable = lambda *_: None) -> None:
        config = pretrained.config().get_text_config()
        self.vocabulary, self.renderer, self.find = config.vocab_size, renderer, find
        self.ends = {*eos_token_ids(pretrained.path, config.eos_token_id)}
        self.logged: set[str] = set()

    def groups(self, samples: Iterable[tuple[str, Mapping[str, Any] | str]]) -> list[Group]:
        """Return the groups of samples, which may be JSON texts, each with its place for messages. Raises RolloutError, in one
        line, for a mistake."""
        groups: dict[Any, Group] = {}
        for where, record in samples:
            try:
                record = json.loads(record) if isinstance(record, str) else record
                groups.setdefault(record["group"], []).append(self.sample(record))
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                mistake = "" if isinstance(error, RolloutError) else f"this is no sample, {type(error).__name__}: "
                raise RolloutError(f"{where}: {mistake}{error}") from error
        return list(groups.values())

    def sample(self, record: Mapping[str, Any]) -> Sample:
        """Return one sample. Without rows it is an episode that failed before its first turn."""
        rows, finish = [SourceRow(**row) for row in record["rows"]], record.get("finish")
        if (temperature := record.get("temperature")) is not None:
            rows = [replace(row, temperatures=[temperature] * len(row.ids)) for row in rows]
        turns = tuple(turn for row in rows for turn in self.turns(row, finish))
        reward = math.nan if record["reward"] is None else float(record["reward"])
        truncated = bool(turns) and turns[-1].completion.finish == "length"
        versions = sorted({version for turn in turns for version in turn.completion.versions or ()})
        extra: dict[str, Any] = {"versions": versions or "unknown"}
        if truncated and not finish and (rows[-1].versions or not versions):
            extra["finish"] = "guessed"
            self.say("a sample has no end token and no finish reason: it counts as cut short by a limit of tokens")
        if not versions:
            self.say("which weights have sampled is unknown, and so is how old they are")
        advantage, correct = record.get("advantage"), record.get("correct")
        if advantage is None:
            of_tokens = {value for turn in turns for value in turn.advantages or ()}
            advantage = of_tokens.pop() if len(of_tokens) == 1 else None
        if advantage is not None:  # it is that of every token
            turns = tuple(replace(turn, advantages=None) for turn in turns)
        advantage = math.nan if advantage is None else float(advantage)
        right = reward > 0 if correct is None else bool(correct)
        rewarded = Reward(reward, right, dict(record.get("parts") or {}), advantage=advantage, extra=extra)
        steps = tuple(map(self.step, turns))
        example = {"prompt": steps[0].state.messages[0].content if steps else ""}
        return Sample(example, Trajectory(steps, "truncated" if truncated else "answered"), turns, rewarded)

    def turns(self, row: SourceRow, finish: str | None) -> list[Turn]:
        """Return the turns of one row. finish: of the last one."""
        self.check(row)
        turns, at = [], 0
        for sampled, tokens in groupby(map(bool, row.sampled)):
            begin, at = at, at + len(list(tokens))
            if sampled:
                advantages = row.advantages and tuple(map(float, row.advantages[begin:at]))
                turns.append(Turn(tuple(row.ids[:begin]), self.completion(row, begin, at, finish), advantages))
        return turns

    def completion(self, row: SourceRow, begin: int, end: int, finish: str | None) -> Completion:
        """Return the tokens from `begin` to `end` as our engine gave them if it did, otherwise as the row has them."""
        ids = tuple(row.ids[begin:end])
        logprobs = None if row.logprobs is None else tuple(map(float, row.logprobs[begin:end]))
        temperature = None if row.temperatures is None else row.temperatures[begin]
        if temperature is not None:
            check_learnable(temperature)
        if ours := self.find(tuple(row.ids[:begin]), ids, logprobs, temperature):
            return ours
        if logprobs is None:
            raise RolloutError(NO_LOGPROBS)
        check_logprobs(logprobs)
        reason = "stop" if end < len(row.ids) else finish
        if not reason:
            reason = "stop" if ids[-1] in self.ends else "length"
        versions = None if row.versions is None else tuple(row.versions[begin:end])
        return Completion(ids, logprobs, reason, versions, temperature)

    def check(self, row: SourceRow) -> None:
        """Raise RolloutError unless the lists of a row fit each other and the model."""
        lengths = {name: len(values) for name, values in vars(row).items() if values is not None}
        if len({*lengths.values()}) > 1:
            raise RolloutError(f"the lists of a row must be equally long, not {lengths}")
        if not any(row.sampled) or row.sampled[0]:
            masked = f"the mask has {sum(map(bool, row.sampled))} of {len(row.ids)} tokens as sampled"
            raise RolloutError(f"{masked}: a row begins with a prompt, and the policy has sampled a token after it")
        if min(row.ids, default=0) < -PICTURES:
            fix = "play the prompts again, or take rows of text"
            raise RolloutError(f"a row has a picture, whose bytes are in no table of rows: {fix}")
        if bad := no_tokens(row.ids, self.vocabulary):
            line = f"{bad[0]} is no token of the model, which has 0 to {self.vocabulary - 1}"
            raise RolloutError(f"{line}: the environment must have the tokenizer of model.path")

    def step(self, turn: Turn) -> Step:
        """Return a turn as messages: all that the policy has read is one message, since its form is unknown."""
        prompt = message_after(self.renderer, turn.prompt_ids).content
        answer = message_after(self.renderer, turn.completion.ids, turn.prompt_ids)
        action = Action(answer, turn.completion.finish == "length", turn.completion.ids)
        return Step(State((Message("user", prompt),)), action)

    def say(self, line: str) -> None:
        """Log a remark, once."""
        if line not in self.logged:
            self.logged.add(line)
            log.warning("%s", line)


def check_learnable(temperature: float) -> None:
    """Raise RolloutError for a temperature at which nothing can be learned from a sample."""
    if not isinstance(temperature, int | float) or not 0 < temperature < math.inf:
        raise RolloutError(f"temperature {temperature}: a sample to learn from has a temperature above 0")


def check_logprobs(logprobs: Sequence[float]) -> None:
    """Raise RolloutError for log-probabilities of sampled tokens that are none, or all the same placeholder."""
    if wrong := [value for value in logprobs if not is_logprob(value)]:
        line = f"{wrong[0]} is no log-probability of a sampled token, which is at most 0"
        raise RolloutError(f"{line} (1.0 is the placeholder of a prompt): look at the mask and the order of tokens")
    if len(logprobs) > 2 and len({*logprobs}) == 1 and logprobs[0]:
        line = f"all {len(logprobs)} sampled tokens have the log-probability {logprobs[0]}, which is a placeholder"
        raise RolloutError(f"{line}: unset ATROPOS_ALLOW_DUMMY_MANAGED_SERVER, and give those of the engine")
