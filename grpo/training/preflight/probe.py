"""The probe of the preflight, which all checks share: episodes of the run, its module and engine, and a bound on rounding."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.protocol import Sampling
from grpo.env.scoring import UNKNOWN
from grpo.env.tokens import Turn
from grpo.env.types import Example, Trajectory
from grpo.models.logprobs import completion_logprobs
from grpo.objectives.batch import Scores, TokenBatch
from grpo.rollout.collate import collate, scores
from grpo.rollout.engine_queue import received
from grpo.rollout.rollouts import Rollouts
from grpo.rollout.types import Group, Sample
from grpo.system.distributed import computes_in, one_pass
from grpo.system.loading import kind_of
from grpo.training.module import GRPOModule

PROMPTS = 8  # prompts of the probe, with the run's number of samples each
FURTHER = 24  # more of them, where these have no signal: eight of a hard task may have none by chance
ROWS = 6  # rows of checks that need several passes


@dataclass(frozen=True)
class Checked:
    """The result of a check. compared: the numbers, or the reason for a SKIP. remedy: what to do about a FAIL or a WARN,
    which does not stop the run. seconds: time."""

    result: Literal["PASS", "WARN", "FAIL", "SKIP"]
    compared: str
    remedy: str = ""
    seconds: float = 0.0


def judged(good: bool, compared: str, remedy: str) -> Checked:
    """Return PASS or FAIL."""
    return Checked("PASS", compared) if good else Checked("FAIL", compared, remedy)


@dataclass
class Probe:
    """A run before its first rollout. examples: the rows of each split. precision: of Lightning's trainer. tokenizer: the
    model's own."""

    module: GRPOModule
    rollouts: Rollouts
    examples: Mapping[str, Sequence[Example]]
    precision: str
    tokenizer: PreTrainedTokenizerBase | None = None

    @cached_property
    def chosen(self) -> list[Example]:
        """Rows to ask, at most PROMPTS + FURTHER: those of rollout 0, then others."""
        return self.rollouts.sampler.draw(0, PROMPTS + FURTHER)

    @property
    def rows(self) -> list[Example]:
        """The rows that the probe asks."""
        return self.chosen[:PROMPTS]

    @cached_property
    def played(self) -> tuple[list[Group], float]:
        """Episodes of these rows, and the seconds that they took."""
        return self.play(self.rows, first=0)

    @cached_property
    def further(self) -> list[Group]:
        """Episodes of the other chosen rows."""
        return self.play(self.chosen[PROMPTS:], first=PROMPTS)[0]

    def play(self, rows: list[Example], first: int) -> tuple[list[Group], float]:
        """Play rows, with seeds that no rollout of the run has. Returns the groups and the seconds. first: their first place."""
        begun, places = time.perf_counter(), range(first, first + len(rows))
        with self.rollouts.sampling():
            groups = self.rollouts.one_round(
                self.rollouts.plan.num_rollouts, rows, places, self.rollouts.plan.group_size
            )
        return groups, time.perf_counter() - begun

    def rollout_seconds(self) -> float:
        """Return the seconds of a rollout: of a whole one if it is short, otherwise in proportion to the probe's."""
        seconds, whole = self.played[1], self.rollouts.sampler.draw(0, self.rollouts.plan.prompts)
        return seconds * len(whole) / len(self.rows) if seconds > 1 else self.play(whole, first=0)[1]

    @property
    def groups(self) -> list[Group]:
        """The episodes, by row."""
        return self.played[0]

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

    @cached_property
    def passed(self) -> tuple[Tensor, Tensor]:
        """The trainer's log-probabilities and entropies of `tokens`, [B, C] each."""
        return self.trainer(self.tokens)

    @torch.no_grad()
    def trainer(self, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies by the trainer's own passes, [B, C] each."""
        return self.module.logprobs_of(self.module.policy, tokens, torch.arange(len(tokens), device=tokens.ids.device))

    @cached_property
    def few(self) -> TokenBatch:
        """The ROWS rows with the most sampled tokens."""
        return self.tokens.rows(self.tokens.mask.sum(1).argsort(descending=True, stable=True)[:ROWS])

    def sample(self, prompts: Sequence[Sequence[int]], max_tokens: int | None = None, others: int = 0) -> TokenBatch:
        """Sample a completion for each prompt from the engine, without the run's filters, penalty and guide.

        others: how many have been sampled before, so that these have seeds of their own.
        """
        seeds = [1_000_003 * (others + i) + 17 for i in range(len(prompts))]
        own = self.rollouts.plan.sampling
        plain = Sampling(max_tokens or own.max_tokens, own.temperature, stop_ids=own.stop_ids)
        with self.rollouts.sampling():
            completions = self.rollouts.engine.sample(prompts, plain, seeds)
        engine = self.rollouts.engine
        return self.rows_of([Turn(tuple(p), received(engine, c)) for p, c in zip(prompts, completions, strict=True)])

    def rows_of(self, turns: Sequence[Turn]) -> TokenBatch:
        """Return a row for each turn, as if it were an episode."""
        return collate([[Sample({}, Trajectory(()), (turn,), UNKNOWN) for turn in turns]]).to(self.module.device)

    @cached_property
    @torch.no_grad()
    def bound(self) -> float:
        """The largest mean difference of log-probabilities that rounding explains, in nats.

        It is measured on this model: the difference between passes over all rows and passes over each row alone in the padded
        layout, and the size of the logits times the precision of the number type. In float32 it is at least 1e-5.
        """
        few, alone = self.few, []
        together = self.trainer(few)[0]
        for i in range(len(few)):
            one = few.rows(slice(i, i + 1))
            values, _ = one_pass(self.module.policy, completion_logprobs, one, self.module.temperature)
            alone.append(values[one.mask])
        noise = (torch.cat(alone) - together[few.mask]).abs().mean()
        one = few.rows(slice(0, 1))
        logits = self.module.policy(input_ids=one.ids, attention_mask=one.attention_mask, use_cache=False).logits
        size = logits.abs().amax(-1)[one.attention_mask.bool()].float().mean() / self.module.temperature
        return max(1e-5, 4 * float(noise), self.eps * float(size) / 4)

    @property
    def eps(self) -> float:
        """The relative precision of the coarsest number type of trainer and engine."""
        engine = self.rollouts.engine
        same = isinstance(engine, TransformersEngine) or hasattr(engine, "shared_bytes")
        types = [computes_in(self.module.policy), *([] if same else [getattr(engine, "dtype", torch.bfloat16)])]
        types += [torch.bfloat16] if self.precision == "bf16-mixed" else []
        return max(torch.finfo(dtype).eps for dtype in types)

    @contextmanager
    def kept(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Restore these parameters, and the engine's copy of them, after the block."""
        before = [p.detach().clone() for p in parameters]
        try:
            yield
        finally:
            with torch.no_grad():
                for p, value in zip(parameters, before, strict=True):
                    p.copy_(value)
            self.load(0)

    def load(self, version: int) -> None:
        """Give the engine the policy's weights of now."""
        self.rollouts.engine.load_weights(self.module.policy, version)

    def one_of_each_kind(self) -> dict[str, Tensor]:
        """Return a trained parameter of each kind, from different layers: names without their numbers are kinds."""
        kinds: dict[str, list[tuple[str, Tensor]]] = {}
        for name, p in self.module.policy.named_parameters():
            if p.requires_grad:
                kinds.setdefault(kind_of(name), []).append((name, p))
        return dict(found[i % len(found)] for i, found in enumerate(kinds.values()))
