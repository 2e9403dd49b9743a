"""The probe of the preflight, which all checks share: episodes of the run, its module and engine, and a bound on rounding."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.protocol import Sampling
from grpo.env.scoring import UNKNOWN
from grpo.env.tokens import Turn
from grpo.env.types import Example, Trajectory
from grpo.extras.forecast.parts import Part
from grpo.extras.preflight.allowance import Allowance, added_tokens, shortened, slowest
from grpo.extras.preflight.moved import moved
from grpo.extras.preflight.rounding import bounds
from grpo.models.head import logits_at_once
from grpo.objectives.batch import Scores, TokenBatch
from grpo.rollout.collate import collate, scores
from grpo.rollout.engine_queue import received
from grpo.rollout.rollouts import Rollouts
from grpo.rollout.types import Group, Sample
from grpo.system.distributed import computes_in
from grpo.training.batch import RolloutBatch
from grpo.training.module import GRPOModule
from grpo.training.trainer import MIXED

PROMPTS = 8  # prompts of the probe, with the run's number of samples each
FIRST = 2  # of them, which are played whatever that takes
FURTHER = 24  # more of them, where these have no signal: eight of a hard task may have none by chance
ROWS, LEAST_ROWS = 6, 3  # rows of checks that need several passes; fewer if they would be shorter than SHORT
SHORT = 32  # tokens of a row
PASSES = 24  # passes over these rows in all checks, a backward pass counts as two


@dataclass
class Probe:
    """A run before its first rollout. examples: the rows of each split. precision: of Lightning's trainer. tokenizer: the
    model's own. version: of the engine's weights. allowance: the time of the checks, by which they choose how much they compare.
    parts: of the memory forecast. Mutable: live, the share of all groups that were asked that have signal; None: unknown.

    It needs no more memory than the run: its passes are microbatches of an update, and the engine sleeps meanwhile if it does
    so in a run.
    """

    module: GRPOModule
    rollouts: Rollouts
    examples: Mapping[str, Sequence[Example]]
    precision: str
    tokenizer: PreTrainedTokenizerBase | None = None
    version: int = 0
    allowance: Allowance | None = None
    parts: Sequence[Part] = ()
    live: float | None = None

    def __post_init__(self) -> None:
        self.allowance = self.allowance or Allowance(self.rollouts.plan.num_rollouts)

    # -- episodes

    @cached_property
    def chosen(self) -> list[Example]:
        """Rows to ask, at most PROMPTS + FURTHER: those of rollout 0, then others."""
        return self.rollouts.sampler.draw(0, PROMPTS + FURTHER)

    @property
    def rows(self) -> list[Example]:
        """The rows that the probe asks if it has the time."""
        return self.chosen[:PROMPTS]

    @cached_property
    def played(self) -> list[tuple[list[Group], float]]:
        """Episodes in pieces, each with its seconds: FIRST rows, and the other ones if they will not take too long."""
        pieces, others = [self.play(self.rows[:FIRST], first=0)], self.rows[FIRST:]
        self.allowance.rollout = self.rollout_of(pieces)
        if others and pieces[0][1] * len(others) / FIRST <= self.allowance.left(1 / 3):
            pieces.append(self.play(others, first=FIRST))
            self.allowance.rollout = self.rollout_of(pieces)
        return pieces

    def further(self) -> Iterator[list[Group]]:
        """Yield episodes of the rows that have not been asked, piece by piece: FIRST at a time where more take too long."""
        slow = self.played[0][1] * PROMPTS / FIRST > self.allowance.left(1 / 3)
        size = min(FIRST, PROMPTS) if slow else PROMPTS
        for first in range(len(self.groups), len(self.chosen), size):
            yield self.play(self.chosen[first : first + size], first)[0]

    def play(self, rows: list[Example], first: int) -> tuple[list[Group], float]:
        """Play rows, at most as many at once as in a rollout, with seeds that no rollout of the run has. Returns the groups and
        the seconds. first: their first place."""
        plan, groups, begun = self.rollouts.plan, [], time.perf_counter()
        self.wake()
        for start in range(0, len(rows), plan.prompts):
            batch = rows[start : start + plan.prompts]
            with self.rollouts.while_sampling():
                places = range(first + start, first + start + len(batch))
                groups += self.rollouts.one_round(plan.num_rollouts, batch, places, plan.group_size)
        return groups, slowest(time.perf_counter() - begun)

    def rollout_of(self, pieces: Sequence[tuple[list[Group], float]]) -> float:
        """Return the seconds that a rollout will take: its first prompts as long as the first piece, each further prompt as long
        as one more prompt took in the pieces."""
        (groups, seconds), *others = pieces
        per_prompt = seconds / max(1, len(groups))
        if others:
            [(more, longer)] = others
            more_prompts = max(1, len(more) - len(groups))
            per_prompt = min(longer / len(more), max(0.0, longer - seconds) / more_prompts)
        return seconds + per_prompt * (self.rollouts.plan.prompts - len(groups))

    def rollout_seconds(self) -> float:
        """Return the seconds of a rollout: of a whole one if there is time, otherwise by those of the probe."""
        if self.allowance.rollout > self.allowance.left(1 / 4):
            return self.allowance.rollout
        return self.play(self.rollouts.sampler.draw(0, self.rollouts.plan.prompts), first=0)[1]

    @property
    def groups(self) -> list[Group]:
        """The episodes, by row."""
        return [group for groups, _ in self.played for group in groups]

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group]

    @cached_property
    def scores(self) -> Scores:
        """The rewards of the episodes."""
        return scores(self.groups)

    @cached_property
    def tokens(self) -> TokenBatch:
        """The rows of the episodes."""
        return collate(self.groups).to(self.module.device)

    # -- teachers

    @property
    def beyond_rewards(self) -> bool:
        """Whether the policy learns from anything but rewards."""
        return bool(self.module.algorithm.others)

    def assigned(self, tokens: TokenBatch) -> TokenBatch:
        """Return rows of the episodes with their weights in all parts of the loss, and demonstrations, if the run has them."""
        batch = RolloutBatch(self.rollouts.plan.num_rollouts, groups=self.groups, tokens=tokens, scores=self.scores)
        teacher = self.module.parts.get("teacher")  # a critic would value these rows, and nothing here learns from that
        return teacher.assign(tokens, batch) if teacher else tokens

    # -- passes

    @torch.no_grad()
    def trainer(self, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies by the trainer's own passes, [B, C] each."""
        self.sleep()
        return self.module.logprobs_of(self.module.policy, tokens, torch.arange(len(tokens), device=tokens.ids.device))

    @cached_property
    def token_seconds(self) -> float:
        """The seconds of a token in a pass of few tokens, without a gradient."""
        few = shortened(self.tokens.rows(self.longest[:LEAST_ROWS]), SHORT)
        self.trainer(few)  # the first one also chooses kernels
        begun = time.perf_counter()
        self.trainer(few)
        token = slowest(time.perf_counter() - begun) / int(added_tokens(few, self.module).sum())
        self.allowance.update = self.update_of(token)
        return token

    def update_of(self, token: float) -> float:
        """Return the seconds of an update. token: the seconds of one in a pass without a gradient."""
        rollout = self.rollouts.plan.prompts / len(self.groups) * int(added_tokens(self.tokens, self.module).sum())
        passes = 4 * self.module.algorithm.num_epochs  # one before the updates, in each epoch forward and backward ones
        return token * rollout * passes

    @property
    def longest(self) -> Tensor:
        """The indices of all rows, those with the most sampled tokens first, [B]."""
        return self.tokens.mask.sum(1).argsort(descending=True, stable=True)

    @cached_property
    def compared(self) -> TokenBatch:
        """The rows that pass once: all of them, or the longest and as many others as there is time for."""
        order, seconds = self.longest, self.token_seconds  # which says how long an update takes, and so what is left
        fit = self.allowance.left(1 / 6) / seconds
        count = int((added_tokens(self.tokens.rows(order), self.module).cumsum(0) <= fit).sum())
        return self.tokens.rows(order[: max(LEAST_ROWS, count)].sort().values)

    @cached_property
    def passed(self) -> tuple[Tensor, Tensor]:
        """The trainer's log-probabilities and entropies of `compared`, [B, C] each."""
        tokens, begun = self.compared, time.perf_counter()
        values = self.trainer(tokens)
        self.allowance.update = self.update_of(
            slowest(time.perf_counter() - begun) / int(added_tokens(tokens, self.module).sum())
        )
        return values

    @cached_property
    def few(self) -> TokenBatch:
        """The ROWS rows with the most sampled tokens, for checks that need many passes.

        They are fewer and shorter if time asks for it, or memory: together they have at most half of the tokens of a
        microbatch, and half of its logits, which the padded layout does not compute piece by piece.
        """
        rows = self.tokens.rows(self.longest[:ROWS])
        longest = int(self.tokens.attention_mask.sum(1).max())
        vocabulary = self.module.policy.config.get_text_config().vocab_size
        fit = self.allowance.left(1 / 2) / PASSES / self.token_seconds
        most = int(min(fit, max(self.module.at_once.most, longest) / 2))
        logits = logits_at_once(self.module.device.type) // (2 * vocabulary)
        if rows.ids.numel() <= most and rows.mask.numel() <= logits:
            return rows
        count = ROWS if min(most, logits) >= ROWS * SHORT else LEAST_ROWS
        rows = self.tokens.rows(self.longest[:count])
        short = shortened(rows, most // len(rows), logits // len(rows))
        # with another beginning of the prompt, the engine's log-probabilities would be others
        begins = short.prompt_width == rows.prompt_width
        return short if begins else replace(short, rollout_logprobs=self.trainer(short)[0])

    # -- the engine

    def wake(self) -> None:
        """Give the engine the weights of now, unless it has them."""
        if self.rollouts.engine.version != self.version:
            self.rollouts.engine.load_weights(self.module.policy, self.version)

    def sleep(self) -> None:
        """Let the engine free its memory, as during an update."""
        getattr(self.rollouts.engine, "sleep", lambda: None)()

    def sample(self, prompts: Sequence[Sequence[int]], max_tokens: int | None = None, others: int = 0) -> TokenBatch:
        """Sample a completion for each prompt from the engine, without the run's filters, penalty and guide.

        If a group has several temperatures, this takes the first. others: how many have been sampled before, so that these have
        seeds of their own.
        """
        seeds = [1_000_003 * (others + i) + 17 for i in range(len(prompts))]
        engine, settings = self.rollouts.engine, self.rollouts.plan.sampling
        temperature = [*settings.temperatures, settings.temperature][0]
        plain = Sampling(max_tokens or settings.max_tokens, temperature, stop_ids=settings.stop_ids)
        self.wake()
        with self.rollouts.while_sampling():
            completions = engine.sample(prompts, plain, seeds)
        own = temperature if settings.temperatures else None
        drawn = [replace(received(engine, completion), temperature=own) for completion in completions]
        return self.rows_of([Turn(tuple(prompt), one) for prompt, one in zip(prompts, drawn, strict=True)])

    def length_in(self, seconds: float) -> int:
        """Return the tokens of a completion that the engine samples twice in this time, 8 at least, at most those of `few`."""
        groups, spent = self.played[0]
        steps = max(sample.length for group in groups for sample in group)
        return max(8, min(self.few.completion_width, int(seconds / 2 * steps / spent)))

    def rows_of(self, turns: Sequence[Turn]) -> TokenBatch:
        """Return a row for each turn, as if it were an episode."""
        return collate([[Sample({}, Trajectory(()), (turn,), UNKNOWN) for turn in turns]]).to(self.module.device)

    @cached_property
    def bounds(self) -> tuple[float, float]:
        """The largest mean differences that rounding explains: of log-probabilities, in nats, and of log-odds."""
        return bounds(self)

    @cached_property
    def bound(self) -> float:
        """The bound in nats."""
        return self.bounds[0]

    @property
    def eps(self) -> float:
        """The relative precision of the coarsest number type of trainer and engine."""
        engine = self.rollouts.engine
        same = isinstance(engine, TransformersEngine) or hasattr(engine, "shared_bytes")
        types = [computes_in(self.module.policy)]
        if not same:
            types.append(getattr(engine, "dtype", torch.bfloat16))
        if self.precision in MIXED:
            types.append(MIXED[self.precision])
        return max(torch.finfo(dtype).eps for dtype in types)

    @contextmanager
    def kept(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Restore these parameters, and the engine's copy of them, after the block."""
        version, before = self.version, [p.detach().clone() for p in parameters]
        try:
            yield
        finally:
            with torch.no_grad():
                for p, value in zip(parameters, before, strict=True):
                    p.copy_(value)
            self.load(version)

    def load(self, version: int) -> None:
        """Give the engine the policy's weights of now, as this version."""
        self.version = version
        self.rollouts.engine.load_weights(self.module.policy, version)

    def moved(self, chosen: Mapping[str, Tensor], rows: TokenBatch, version: int) -> tuple[str, str]:
        """Return whether new values of parameters reach the engine: see `moved`."""
        return moved(self, chosen, rows, version)
