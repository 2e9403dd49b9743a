"""An engine and an update that take the seconds of a GPU on a CPU, so that what runs beside what can be measured without one.

    python train.py engine._target_=paced.Paced +engine.step=0.02          # with benchmarks/ on the path

`Paced` samples really, with continuous batching and its own copy of the weights: one forward pass a step for all completions
that are open, whoever asked for them. A step takes `step` seconds, however many completions it has, as on a GPU that waits for
its memory; the thread sleeps until then. `PacedModule` makes each update `update` seconds long, also by sleeping. Both numbers
are set, not measured: they say what a GPU would take, and the CPU only has to be faster.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.builtin.kv_cache import PREFILL_TOKENS
from grpo.engines.builtin.llama import LlamaCache, is_plain_llama
from grpo.engines.builtin.next_token import NextTokens
from grpo.engines.context import check_context
from grpo.engines.only_vllm import refuse_only_vllm
from grpo.engines.protocol import Done, Prompts, Sampling
from grpo.engines.weights import checkpoint
from grpo.env.tokens import Completion
from grpo.models.pretrained import context_of
from grpo.system.errors import UserError
from grpo.system.memory import in_pieces
from grpo.training.batch import RolloutBatch
from grpo.training.module import GRPOModule

LOOK = 0.5  # seconds after which a caller that waits looks whether it is asked to end
LONGEST = 2048  # tokens of a model without a limit
PRIME = 9973


class Paced:
    """Samples with its own weights at set times.

    step: seconds of a step, which gives every open completion a token. prefill: seconds to read 1000 tokens of prompts. slots:
    completions at a time; others wait. pause: seconds of a load, in which no token is sampled. tail: share of the completions,
    chosen by their seeds, that take `stretch` times as many steps. Such a completion holds its slot after its last token, so
    its tokens are older than a slow one's would be when it is learned from.
    aside: threads whose calls take no time, such as an evaluation's: nothing else is sampled meanwhile. unused: arguments of
    other engines.
    """

    apart = in_flight = concurrent = True

    def __init__(
        self,
        step: float = 0.02,
        prefill: float = 0.0,
        slots: int = 128,
        pause: float = 0.0,
        tail: float = 0.0,
        stretch: float = 4.0,
        **unused: Any,
    ) -> None:
        self.step, self.prefill, self.slots, self.pause = step, prefill, slots, pause
        self.tail, self.stretch = tail, stretch
        self.version: int | None = None
        self.cache: Slots | None = None
        self.changed = threading.Condition()
        self.loading = self.closed = False
        self.calls: list[Call] = []
        self.rows: list[tuple[Call, int]] = []  # the call and the number in it of each row of the cache
        self.held: list[tuple[int, Call, int, Completion]] = []  # finished, but handed over at this step
        self.tokens = torch.zeros(0, dtype=torch.int64)  # [B], the last token of each row
        self.steps = 0
        self.aside: set[int] = set()

    @property
    def context(self) -> int | None:
        return context_of(self.model.config)

    def load_weights(self, model: nn.Module, version: int) -> None:
        """Copy the weights between two steps. Completions under way take them up, on the keys and values of the old ones."""
        self.loading = True
        with self.changed, torch.no_grad():
            if self.cache is None:
                self.open(model)
            self.model.load_state_dict(dict(checkpoint(model)), strict=False)  # a tied head is not in it
            self.cache.renew()
            time.sleep(self.pause)  # with the lock, so that no step is made
            self.version, self.loading = version, False
            self.changed.notify_all()

    def open(self, model: nn.Module) -> None:
        """Make the copy and start the thread that samples."""
        self.model = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).requires_grad_(False)
        if not is_plain_llama(self.model):
            raise UserError(f"the paced engine samples from a plain Llama in float32, not from {type(model).__name__}")
        eos = model.generation_config.eos_token_id
        self.eos = {*eos} if isinstance(eos, list) else set() if eos is None else {eos}
        self.cache, self.plain = Slots(self.model), TransformersEngine()
        self.thread = threading.Thread(target=self.pump, name="paced engine", daemon=True)
        self.thread.start()

    def sample(
        self,
        prompts: Prompts,
        sampling: Sampling,
        seeds: Sequence[int],
        done: Done | None = None,
        temperatures: Sequence[float] | None = None,
    ) -> list[Completion]:
        """Sample as an `Engine`; several threads may call it at once."""
        refuse_only_vllm(sampling.guided, sampling.vllm)
        check_context(max(map(len, prompts)), sampling.max_tokens, self.context)
        if threading.get_ident() in self.aside:
            with self.changed:
                self.plain.load_weights(self.model, self.version)
                return self.plain.sample(prompts, sampling, seeds, done, temperatures)
        texts = [tuple(prompt) for prompt in prompts]
        call = Call(texts, seeds, NextTokens(texts, sampling, seeds, torch.device("cpu"), temperatures))
        with self.changed:
            self.calls.append(call)
            self.changed.notify_all()
        completions: list[Completion | None] = [None] * len(texts)
        try:
            for _ in texts:
                i, completion = call.get()
                completions[i] = completion
                if done is not None:
                    done(i, completion)
        finally:  # also if this thread is asked to end
            call.unwanted.update(range(len(texts)))
        return completions

    @torch.inference_mode()
    def pump(self) -> None:
        """Make steps, each of which ends at its time, while there are calls."""
        deadline = 0.0
        try:
            while True:
                with self.changed:
                    while not self.closed and (self.loading or not self.calls):
                        self.changed.wait()
                    if self.closed:
                        return
                    now = time.monotonic()
                    deadline = deadline if now - deadline < self.step else now  # catches up with a small delay
                    read, finished = self.advance()
                deadline += self.step + self.prefill * read / 1000
                time.sleep(max(0.0, deadline - time.monotonic()))
                for call, i, completion in finished:
                    call.answers.put((i, completion))
        except BaseException as error:
            with self.changed:
                for call in self.calls:
                    call.answers.put(error)

    def advance(self) -> tuple[int, list[tuple["Call", int, Completion]]]:
        """Sample a token for every row, of new completions too. Returns the tokens of prompts that were read, and the
        completions that end."""
        logits, read = [], 0
        if self.rows:
            logits.append(self.cache.step(self.tokens))
        if new := self.admitted():
            fresh, read = self.cache.join([call.texts[i] for call, i in new])
            logits.append(fresh)
            self.rows += new
            for call in self.calls:
                if mine := [i for owner, i in new if owner is call]:
                    call.draws.join(mine, fresh.shape[-1])
        self.steps += 1
        finished = []
        if self.rows:
            self.draw(torch.cat(logits))
        for due, call, i, completion in self.held:
            if due <= self.steps or i in call.unwanted:
                finished.append((call, i, completion))
        over = {(id(call), i) for call, i, _ in finished}
        self.held = [one for one in self.held if (id(one[1]), one[2]) not in over]
        for call, i, _ in finished:
            call.left.discard(i)
        self.calls = [call for call in self.calls if call.left and not (call.gone and not call.has_rows)]
        return read, finished

    def admitted(self) -> list[tuple["Call", int]]:
        """Return the completions that take the free slots, those of older calls first."""
        new: list[tuple[Call, int]] = []
        for call in self.calls:
            while call.waiting and len(self.rows) + len(self.held) + len(new) < self.slots:
                new.append((call, call.waiting.popleft()))
            if call.gone:
                call.waiting.clear()
        return new

    def draw(self, logits: Tensor) -> None:
        """Draw the next token of every row, and take out those that have ended. logits: [B, V]."""
        self.tokens, ended = torch.zeros(len(self.rows), dtype=torch.int64), []
        for call in self.calls:
            places = [b for b, (owner, _) in enumerate(self.rows) if owner is call]
            if not places:
                continue
            self.tokens[places] = call.draws.step(logits[places])
            for b in places:
                call.versions.setdefault(self.rows[b][1], []).append(self.version)
            over = call.draws.ended(self.eos | {*call.draws.sampling.stop_ids}, call.unwanted)
            ended += [places[row] for row in over]
            for i, completion in call.draws.completions(over) if over else ():
                whole = replace(completion, versions=tuple(call.versions.pop(i)))
                slow = (call.seeds[i] % PRIME) < self.tail * PRIME
                extra = round((self.stretch - 1) * len(whole.ids)) if slow else 0
                self.held.append((self.steps + extra, call, i, whole))
        if ended:
            order = self.cache.drop(ended)
            self.rows, self.tokens = [self.rows[b] for b in order], self.tokens[order]
            for call in self.calls:
                place = {i: row for row, i in enumerate(call.draws.samples)}
                call.draws.keep([place[i] for owner, i in self.rows if owner is call])

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()


@dataclass(eq=False)
class Call:
    """One call of `sample`. waiting: completions without a slot. left: those that are not handed over. versions: of the tokens
    of each open completion. unwanted: those that may end, since nobody waits for them."""

    texts: list[tuple[int, ...]]
    seeds: Sequence[int]
    draws: NextTokens
    answers: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    versions: dict[int, list[int]] = field(default_factory=dict)
    unwanted: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.waiting = deque(range(len(self.texts)))
        self.left = set(self.waiting)

    @property
    def gone(self) -> bool:
        """Whether the caller has left."""
        return len(self.unwanted) == len(self.texts)

    @property
    def has_rows(self) -> bool:
        """Whether completions of it are in the cache."""
        return bool(self.draws.samples)

    def get(self) -> tuple[int, Completion]:
        """Wait for the next finished completion."""
        while True:
            try:
                answer = self.answers.get(timeout=LOOK)
            except queue.Empty:
                continue
            if isinstance(answer, BaseException):
                raise RuntimeError("the paced engine failed") from answer
            return answer


class Slots(LlamaCache):
    """A `LlamaCache` that does not know its samples before they come."""

    def __init__(self, model: nn.Module) -> None:
        self.longest_text = context_of(model.config) or LONGEST
        super().__init__(model, [(0,) * self.longest_text], self.longest_text, 0)
        self.known: dict[tuple[int, ...], int] = {}  # numbers of the prompts that these weights have read

    def renew(self) -> None:
        """Use the model's new weights. Prompts are read anew for completions that begin from now on."""
        self.layers = LlamaCache(self.model, [(0,)], 1, 0).layers
        self.known.clear()

    def join(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, int]:
        """Append a row for each prompt. Returns the logits after them, [n, V], and how many tokens were read."""
        unread = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self.known]
        numbers = range(len(self.texts), len(self.texts) + len(unread))
        self.texts += unread
        self.known |= zip(unread, numbers, strict=True)
        for piece in in_pieces(list(numbers), lambda u: len(self.texts[u]), PREFILL_TOKENS):
            self.read(piece)
        of = [self.known[prompt] for prompt in prompts]
        self.unfinished.update(of)
        self.rows += [(u, self.steps) for u in of]
        self.arrange()
        return torch.stack([self.logits[u] for u in of]), sum(map(len, unread))

    def drop(self, ended) -> list[int]:
        order = super().drop(ended)
        here = {*self.prompts}
        self.logits = {u: row for u, row in self.logits.items() if u in here}
        self.known = {prompt: u for prompt, u in self.known.items() if u in here}
        return order


class PacedModule(GRPOModule):
    """An update that takes `update` seconds, or longer if the CPU needs them."""

    def __init__(self, *args: Any, update: float, **named: Any) -> None:
        super().__init__(*args, **named)
        self.seconds = update

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> dict[str, float]:
        begun = time.monotonic()
        metrics = super().training_step(batch, batch_idx)
        time.sleep(max(0.0, begun + self.seconds - time.monotonic()))
        return metrics
