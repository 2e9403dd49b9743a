"""A KV cache for groups: keys and values of a prompt are stored once for all its samples, and those of new
tokens per sample.

It uses attention by plan (models.packed_attention) instead of a cache of transformers. Knows nothing of
sampling.

Shapes: U prompts with P places each; B rows (unfinished samples) with C places each, at most G rows per
prompt; H query heads, K key heads, r = H / K, head dimension D.
"""

from collections import Counter, deque
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grpo.models.packed_attention import NEVER, AttentionPlan, How, Packed, attending, take
from grpo.system.memory import in_pieces, sent

PREFILL_TOKENS = 8192  # tokens of prompts in one forward pass; a longer prompt goes alone
SHARED = 16  # tokens with which all prompts of a pass must begin, so that the pass computes them once
GROWTH = 16  # rows grow by this many tokens, or by an eighth of their length if that is more

# For one layer, as pairs of keys and values: all places of rows [n, D]; the present rows [B x K, C, D]; prompts [U x K, P, D].
Views = tuple[list[Tensor], list[Tensor], list[Tensor]]


class KVCache:
    """Keys and values of the unfinished samples.

    Row b is always at index b of the tensors, so a step copies nothing. When a row ends, the last row moves
    into its place.
    """

    def __init__(self, model: nn.Module, prompts: Sequence[tuple[int, ...]], max_tokens: int, bound: int) -> None:
        """prompts: one per sample. bound: size of the cache in tokens; a single sample may exceed it."""
        self.model, self.max_tokens, self.bound, self.device = model, max_tokens, bound, model.device
        # pictures take fewer positions than tokens
        self.position_after = getattr(model.get_decoder(), "position_after", len)
        self.texts = list(dict.fromkeys(prompts))
        number = {prompt: u for u, prompt in enumerate(self.texts)}
        self.prompt_of = [number[prompt] for prompt in prompts]  # the prompt's number for each sample
        self.unfinished = Counter(self.prompt_of)
        self.widest, self.beside = max(map(len, prompts)), 0  # beside: as many tokens as fit into a sequence's states
        self.prompts: list[int] = []  # numbers of the prompts in the cache
        self.rows: list[tuple[int, int]] = []  # each row's prompt, and the step at which it joined
        self.steps = 0
        self.logits: dict[int, Tensor] = {}  # logits after a prompt, [V], while samples of it wait
        # by layer: keys and values, [n, K, places, D], with n >= U for prompts and n >= B for rows
        self.of_prompts: dict[int, list[Tensor]] = {}
        self.of_rows: dict[int, list[Tensor]] = {}

    def admit(self, waiting: deque[int]) -> tuple[list[int], Tensor | None]:
        """Take the samples that fit from the left of `waiting`, in which equal prompts are adjacent.

        Returns these n samples and the logits after their prompts, [n, V].
        """
        new: list[int] = []
        unread: list[int] = []
        while waiting:
            prompt = self.prompt_of[waiting[0]]
            is_read = prompt in self.logits or prompt in unread[-1:]
            prompts, rows = len(self.prompts) + len(unread) + (not is_read), len(self.rows) + len(new) + 1
            tokens = prompts * self.widest + rows * self.max_tokens + (prompts + rows) * self.beside
            if tokens > self.bound and rows > 1:
                break
            if not is_read:
                unread.append(prompt)
            new.append(waiting.popleft())
        if not new:
            return [], None
        for piece in in_pieces(unread, lambda u: len(self.texts[u]), PREFILL_TOKENS):
            self.read(piece)
        logits = torch.stack([self.logits[self.prompt_of[i]] for i in new])
        following = self.prompt_of[waiting[0]] if waiting else None
        self.logits = {u: row for u, row in self.logits.items() if u == following}
        self.rows += [(self.prompt_of[i], self.steps) for i in new]
        self.arrange()
        return new, logits

    def read(self, prompts: list[int]) -> None:
        """Run the model on these prompts: stores their keys and values, and the logits after each."""
        self.prompts += prompts
        plan = Prefill(self, [self.texts[u] for u in prompts])
        logits = self.forward(plan, plan.ids, plan.positions, logits_to_keep=plan.last)
        self.logits |= zip(prompts, logits, strict=True)

    def step(self, tokens: Tensor) -> Tensor:
        """Append a token to every row. tokens: [B]. Returns the logits after it, [B, V]."""
        self.masks: dict[Any, Tensor] = {}  # by window
        self.ends: dict[int, Tensor] = {}  # by K
        self.longest += 1
        if self.longest > self.capacity:
            self.views.clear()
        self.positions = (self.after + self.counts)[None]
        logits = self.forward(self, tokens[None], self.positions)
        self.counts += 1
        self.steps += 1
        return logits

    def forward(self, plan: AttentionPlan, ids: Tensor, positions: Tensor, logits_to_keep: Tensor | int = 0) -> Tensor:
        """Return logits for ids, [T, V], or only the rows in logits_to_keep. ids, positions: [1, T]."""
        inputs = {"input_ids": ids, "position_ids": positions, "logits_to_keep": logits_to_keep}
        with attending(self.model, plan):
            return self.model(**inputs, use_cache=False).logits[0]

    def drop(self, ended: Collection[int]) -> list[int]:
        """Remove these rows, and prompts without unfinished samples. Returns the new order: row i was row
        order[i]."""
        self.unfinished -= Counter(self.rows[b][0] for b in ended)
        order = closed_up(len(self.rows), {*ended})
        move(self.of_rows, order)
        self.rows = [self.rows[b] for b in order]
        done = {place for place, u in enumerate(self.prompts) if u not in self.unfinished}
        left = closed_up(len(self.prompts), done)
        move(self.of_prompts, left)
        self.prompts = [self.prompts[place] for place in left]
        self.arrange()
        return order

    def arrange(self) -> None:
        """Compute what stays the same until rows join or leave."""
        lengths = [len(self.texts[u]) for u, _ in self.rows]
        counts = [self.steps - joined for _, joined in self.rows]
        self.lengths = sent(torch.tensor(lengths), self.device)  # [B], tokens of each row's prompt
        after = [self.position_after(self.texts[u]) for u, _ in self.rows]
        self.after = sent(torch.tensor(after), self.device)  # [B], the position after it
        self.counts = sent(torch.tensor(counts), self.device)  # [B], tokens of each row in the cache
        self.longest, self.capacity = max(counts, default=0), 0
        self.views: dict[int, Views] = {}  # by layer
        self.grids: dict[int, tuple[Tensor, Tensor]] = {}  # by K
        self.of_keys: Tensor | None = None  # their positions

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        """Attention of one step. query: [1, H, B, D]; key, value: [1, K, B, D]. Returns [1, B, H, D].

        The rows of a prompt attend to its keys in one product, G r queries at a time, and each row to its own
        keys; one softmax covers both.
        """
        if layer not in self.views:
            self.views[layer] = self.view(layer, key, value)
        places, (keys, values), (prompt_keys, prompt_values) = self.views[layer]
        rows, C, D = keys.shape  # rows: B x K
        prompts, P, _ = prompt_keys.shape  # prompts: U x K
        ends = self.end(key.shape[1], C)
        for kept, new in zip(places, (key, value), strict=True):
            kept.index_copy_(0, ends, new[0].transpose(0, 1).reshape(rows, -1))
        mask = self.mask(how, P, C)  # [B, 1, P + C]
        members, place = self.grid(key.shape[1])

        query = query[0].transpose(0, 1).reshape(rows, -1, D)  # [B x K, r, D]
        r = query.shape[1]
        by_prompt = query.index_select(0, members).view(prompts, -1, D)  # [U x K, G x r, D]
        scores = product(by_prompt, prompt_keys.mT)  # [U x K, G x r, P]
        scores = scores.view(-1, r, P).index_select(0, place)  # [B x K, r, P]
        scores = torch.cat([scores, product(query, keys.mT)], dim=-1)  # [B x K, r, P + C]
        scores, scale = scores.view(len(mask), -1, P + C), how.scale or D**-0.5  # [B, H, P + C]
        own = how.scores and how.scores.weights(scores, mask, scale)
        weights = torch.add(mask, scores, alpha=scale).softmax(-1) if own is None else own
        of_prompt, of_row = weights.view(rows, r, P + C).split([P, C], dim=-1)
        by_prompt = of_prompt.index_select(0, members).view(prompts, -1, P)  # [U x K, G x r, P]
        out = product(by_prompt, prompt_values)  # [U x K, G x r, D]
        out = out.view(-1, r, out.shape[2]).index_select(0, place)  # [B x K, r, D]
        out = product(of_row, values).add_(out)
        return out.view(1, len(mask), -1, out.shape[2]).to(value.dtype)

    def view(self, layer: int, *new: Tensor) -> Views:
        """Make room for the next token of each row, and return the layer's keys and values as `Views`. new:
        [1, K, B, D] each."""
        spare = min(max(GROWTH, self.longest // 8), self.max_tokens - self.longest)
        rows = self.of_rows.get(layer) or [x.new_empty(0, x.shape[1], 0, x.shape[3]) for x in new]
        self.of_rows[layer] = rows = [fitted(x, len(self.rows), self.longest, spare) for x in rows]
        self.capacity = rows[0].shape[2]
        return (
            [x.view(-1, x.shape[3]) for x in rows],
            [x[: len(self.rows)].flatten(0, 1) for x in rows],
            [x[: len(self.prompts)].flatten(0, 1) for x in self.of_prompts[layer]],
        )

    def end(self, heads: int, places: int) -> Tensor:
        """Return the index at which each row's new token is written, [B x K]."""
        if heads not in self.ends:
            first = torch.arange(len(self.rows) * heads, device=self.device) * places
            self.ends[heads] = first + self.counts.repeat_interleave(heads)
        return self.ends[heads]

    def mask(self, how: How, P: int, C: int) -> Tensor:
        """Return 0 where a row sees a key of its prompt or its own, else -inf: [B, 1, P + C]."""
        if self.of_keys is None or self.of_keys.shape[1] != P + C:
            p, c = torch.arange(P, device=self.device), torch.arange(C, device=self.device)
            of_prompt = p.expand(len(self.rows), -1).masked_fill(p >= self.lengths[:, None], NEVER)
            self.of_keys = torch.cat([of_prompt, self.lengths[:, None] + c], dim=1)  # [B, P + C]
        if how.window not in self.masks:
            now = (self.lengths + self.counts)[:, None]
            sees = (self.of_keys <= now) & (self.of_keys >= how.hidden(now))
            self.masks[how.window] = torch.where(sees, 0.0, -torch.inf)[:, None]
        return self.masks[how.window]

    def grid(self, heads: int) -> tuple[Tensor, Tensor]:
        """Return the indices in [B x K] of each prompt's rows, [U x K x G], and for each of [B x K] its place
        there, [B x K].

        heads: K. A prompt with fewer than G rows is padded with row 0.
        """
        if heads not in self.grids:
            groups: dict[int, list[int]] = {u: [] for u in self.prompts}
            number = []
            for b, (u, _) in enumerate(self.rows):
                number.append(len(groups[u]))
                groups[u].append(b)
            G, k = max(map(len, groups.values())), torch.arange(heads)
            rows = torch.tensor([group + [0] * (G - len(group)) for group in groups.values()])  # [U, G]
            index = {u: i for i, u in enumerate(self.prompts)}
            prompt = torch.tensor([index[u] for u, _ in self.rows])  # [B]
            members = rows[:, None] * heads + k[:, None]  # [U, K, G]
            place = (prompt[:, None] * heads + k) * G + torch.tensor(number)[:, None]  # [B, K]
            self.grids[heads] = sent(members.flatten(), self.device), sent(place.flatten(), self.device)
        return self.grids[heads]


class Prefill(Packed):
    """The plan that reads the newest prompts of a cache, packed into one row, and stores their keys and
    values.

    If all begin alike, with a system message or worked examples, the rest of each is a row that follows this
    beginning. kept: the places of each prompt's tokens, [n, P]. last: that of its last token, [n].
    """

    def __init__(self, cache: KVCache, prompts: Sequence[tuple[int, ...]]) -> None:
        self.cache, alike = cache, alike_until(prompts)
        if len(prompts) > 1 and alike >= SHARED:
            super().__init__([prompts[0][:alike]], [[prompt[alike:] for prompt in prompts]], cache.device)
            self.kept, starts, lengths = self.places[2], self.starts[1:], self.row_lengths
        else:
            super().__init__(prompts, [[]] * len(prompts), cache.device)
            self.kept, starts, lengths = self.places[0], self.starts, self.prompt_lengths
        self.last = sent(torch.tensor(starts) + lengths - 1, cache.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        """Store keys and values of the layer in the cache, then attend as `Packed`, with its shapes."""
        count, longest = len(self.cache.prompts), max(len(self.cache.texts[u]) for u in self.cache.prompts)
        new = [take(x[0].transpose(0, 1), self.kept) for x in (key, value)]  # [n, K, P, D]
        kept = self.cache.of_prompts.get(layer) or [x[:0] for x in new]
        self.cache.of_prompts[layer] = kept = [fitted(x, count, longest, 0) for x in kept]
        for x, y in zip(kept, new, strict=True):
            x[count - len(y) : count, :, : y.shape[2]] = y
        return super().attend(layer, query, key, value, how)


def alike_until(prompts: Sequence[tuple[int, ...]]) -> int:
    """Return how many tokens all prompts have in common at their start, less than any of them has."""
    first, last = min(prompts), max(prompts)  # all others are between these two
    most = min(map(len, prompts)) - 1
    return next((i for i, (a, b) in enumerate(zip(first[:most], last, strict=False)) if a != b), most)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in float32, whatever their dtype: [n, i, j] @ [n, j, k]."""
    if a.is_cuda and b.dtype != torch.float32:
        return torch.bmm(a.to(b.dtype), b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def closed_up(count: int, gone: set[int]) -> list[int]:
    """Return the order of `count` items after the items in `gone` are removed: the last ones move into the
    gaps."""
    left = count - len(gone)
    last = (i for i in range(left, count) if i not in gone)
    return [next(last) if i in gone else i for i in range(left)]


def move(buffers: dict[int, list[Tensor]], order: list[int]) -> None:
    """Reorder every buffer, [n, K, places, D], in place along n: item i becomes what item order[i] was.

    A buffer that has not grown yet lacks the newest items, and needs fewer moves.
    """
    indices: dict[int, tuple[Tensor, Tensor]] = {}  # by n
    for x in (x for pair in buffers.values() for x in pair):
        if len(x) not in indices:
            moves = [(i, j) for i, j in enumerate(order) if i != j < len(x)]
            indices[len(x)] = sent(torch.tensor(moves, dtype=torch.int64).view(-1, 2).T, x.device).unbind()
        to, taken = indices[len(x)]
        if len(to):
            x.index_copy_(0, to, x.index_select(0, taken))


def fitted(x: Tensor, count: int, length: int, spare: int) -> Tensor:
    """Return x, [n, K, places, D], if `count` sequences of `length` fit and use at least half of it; else a
    copy that has room for `spare` more tokens. Unwritten places are 0: a mask would turn values that are not
    finite into NaN."""
    n, heads, places, width = x.shape
    if count <= n and length <= places <= 2 * (length + spare):
        return x
    new = x.new_zeros(count, heads, length + spare, width)
    n, places = min(n, count), min(places, length)
    new[:n, :, :places] = x[:n, :, :places]
    return new
