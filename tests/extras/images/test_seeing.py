"""Models that see: the same numbers in every layout and cache, for each family, with 0, 1 and 2 pictures of unequal sizes."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from helpers.seeing import KINDS, drawn, made, plain

from grpo.engines.builtin.engine import TransformersEngine, cache_for
from grpo.engines.protocol import Sampling
from grpo.extras.images.door import sight_of
from grpo.models.language import beside_language
from grpo.models.logprobs import completion_logprobs
from grpo.models.packing import microbatches, trusted
from grpo.models.pretrained import Pretrained
from grpo.objectives.batch import TokenBatch
from grpo.system.errors import UserError

PADDED = {"gemma3"}  # tokens of a picture see each other, which a plan does not have
TALL, WIDE = drawn(56, 84, 1), drawn(90, 30, 2)  # of 2 x 3 and 3 x 1 places in Qwen: six tokens take three positions


@pytest.fixture(scope="module", params=KINDS)
def seeing(request, tmp_path_factory, toy) -> SimpleNamespace:
    """A model that sees, whose tower learns; its sight; and rows of prompts and what follows them."""
    pretrained = Pretrained(
        made(request.param, tmp_path_factory.mktemp(request.param), toy), vision="trained", eyes=sight_of
    )
    sight = sight_of(pretrained)

    def prompt(*parts) -> tuple[int, ...]:
        pictures = [part for part in parts if not isinstance(part, int)]
        return sight.expanded([part if isinstance(part, int) else sight.placeholder for part in parts], pictures)

    blind, tall, wide, both = (
        prompt(5, 6, 7, 8),
        prompt(5, 6, TALL, 7),
        prompt(5, 6, WIDE, 7),
        prompt(5, WIDE, 7, TALL, 9, 9),
    )
    later = (20, 21, 22, *prompt(30, WIDE, 31), 23, 24)  # a picture in the second turn
    rows = [
        (blind, (20, 21, 22)),
        (blind, (23,)),
        (tall, (20, 21, 22)),
        (tall, (25, 26)),
        (wide, (20, 21, 22)),
        (both, (20, 21, 22, 23)),
        (both, (24,)),
        (tall, later),
    ]
    model = pretrained.model()
    return SimpleNamespace(
        kind=request.param, pretrained=pretrained, sight=sight, model=model, rows=rows, prompt=prompt
    )


def batch_of(rows) -> TokenBatch:
    """Return rows as a batch. The policy sampled all that follows a prompt, but for pictures."""
    before, after = max(len(prompt) for prompt, _ in rows), max(len(ids) for _, ids in rows)
    ids = torch.zeros(len(rows), before + after, dtype=torch.int64)
    real, mask = torch.zeros_like(ids), torch.zeros(len(rows), after, dtype=torch.bool)
    for r, (prompt, following) in enumerate(rows):
        start, end = before - len(prompt), before + len(following)
        ids[r, start:end], real[r, start:end] = torch.tensor([*prompt, *following]), 1
        mask[r, : len(following)] = torch.tensor(following) >= 0
    return TokenBatch(ids, real, mask, torch.zeros(mask.shape), torch.arange(len(rows)))


def of_tower(model) -> torch.Tensor:
    """Return the gradient of tower and projector, and forget all gradients."""
    decoder = {*model.get_decoder().parameters(), *model.get_output_embeddings().parameters()}
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p not in decoder and p.grad is not None])
    model.zero_grad()
    return found


def test_a_row_has_the_same_numbers_alone_padded_packed_and_behind_a_shared_prompt(seeing):
    alone = [completion_logprobs(seeing.model, batch_of([row]), 1.0)[0][0] for row in seeing.rows]
    sum(row.sum() for row in alone).backward()
    gradient = of_tower(seeing.model)
    assert gradient.norm() > 0
    for layout in ("padded",) if seeing.kind in PADDED else ("padded", "packed", "shared_prompt"):
        logprobs, _ = completion_logprobs(seeing.model, batch_of(seeing.rows), 1.0, layout=layout)
        for row, exact in zip(logprobs, alone, strict=True):
            torch.testing.assert_close(row[: len(exact)], exact, atol=1e-5, rtol=0)
        logprobs.sum().backward()
        assert (of_tower(seeing.model) - gradient).norm() < 1e-5 * gradient.norm()
    assert trusted(seeing.model, "shared_prompt")[0] == ("padded" if seeing.kind in PADDED else "shared_prompt")
    assert (alone[2] - alone[4]).abs().max() > 0.01  # the same words after another picture


def test_the_models_own_code_has_the_same_logits(seeing):
    """It takes one placeholder for each feature, the pixels, and finds positions and masks itself."""
    ids = torch.tensor([seeing.prompt(5, WIDE, 7, TALL, 9, 9)])
    pixels = [seeing.sight.pixels(picture.id) for picture in (WIDE, TALL)]
    if len({x["pixel_values"].shape[2:] for x in pixels}) > 1 or seeing.kind == "idefics3":
        pytest.skip("its own code pads pictures of unequal sizes, and then computes other numbers")
    given = {name: torch.cat([x[name] for x in pixels]) for name in pixels[0]}
    kinds = {"token_type_ids" if seeing.kind == "gemma3" else "mm_token_type_ids": (ids < 0).int()}
    fresh = Pretrained(seeing.pretrained.path).model()
    own = fresh(input_ids=ids.where(ids >= 0, seeing.sight.repeated), **given, **kinds).logits
    ours = seeing.model(input_ids=ids).logits
    kept = [i for i in range(own.shape[-1]) if i not in seeing.sight.banned]
    torch.testing.assert_close(ours[..., kept], own[..., kept], atol=1e-5, rtol=0)


def test_the_engine_samples_with_the_trainers_log_probabilities(seeing):
    engine = TransformersEngine()
    engine.load_weights(seeing.model, 0)
    prompts = [seeing.rows[i][0] for i in (0, 2, 2, 4, 5, 5)]
    done = engine.sample(prompts, Sampling(max_tokens=6), range(6))
    logprobs, _ = completion_logprobs(
        seeing.model, batch_of([(prompt, one.ids) for prompt, one in zip(prompts, done, strict=True)]), 1.0
    )
    for row, one in zip(logprobs, done, strict=True):
        torch.testing.assert_close(row[: len(one.ids)], torch.tensor(one.logprobs), atol=1e-5, rtol=0)
    scores = engine.score([prompts[4] + done[4].ids], top=2)[0][-len(done[4].ids) :]
    found = [of_token[i] for i, of_token in zip(done[4].ids, scores, strict=True)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(done[4].logprobs), atol=1e-5, rtol=0)
    assert engine.sample(prompts[:3], Sampling(max_tokens=2, repetition_penalty=1.5), range(3))
    assert cache_for(seeing.model)[0].__name__ == ("PaddedCache" if seeing.kind in PADDED else "KVCache")


def test_no_token_of_a_picture_is_sampled_and_the_softmax_is_without_them(seeing):
    model, banned = deepcopy(seeing.model), seeing.sight.banned
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight[banned] = 100 * head.weight[5]  # they would be sampled at every second place
    prompt = seeing.rows[2][0]
    logits = model(input_ids=torch.tensor([prompt])).logits[0, -1]
    kept = [i for i in range(len(logits)) if i not in banned]
    exact = logits[kept].log_softmax(-1)
    for layout in ("padded",) if seeing.kind in PADDED else ("padded", "packed"):
        rows = batch_of([(prompt, (kept[i],)) for i in range(len(kept))])
        torch.testing.assert_close(
            completion_logprobs(model, rows, 1.0, layout=layout)[0][:, 0], exact, atol=1e-5, rtol=0
        )
    engine = TransformersEngine()
    engine.load_weights(model, 0)
    for done in engine.sample([prompt] * 8, Sampling(max_tokens=8), range(8)):
        assert not {*done.ids} & {*banned}


def test_what_reads_pictures_learns_if_it_is_asked_to(seeing):
    frozen = Pretrained(seeing.pretrained.path, vision="frozen", eyes=sight_of).model()
    beside = [*beside_language(frozen)]
    assert beside and not [*beside_language(seeing.model)]
    assert {name for name, p in frozen.named_parameters() if not p.requires_grad} == {
        name for name, _ in frozen.named_parameters() if name.startswith(tuple(f"{one}." for one in beside))
    }
    assert all(p.requires_grad for p in seeing.model.parameters())
    logprobs, _ = completion_logprobs(frozen, batch_of(seeing.rows), 1.0)
    logprobs.sum().backward()
    assert all(p.grad is None for p in frozen.parameters() if not p.requires_grad)
    exact, _ = completion_logprobs(seeing.model, batch_of(seeing.rows), 1.0)
    torch.testing.assert_close(logprobs, exact, atol=1e-6, rtol=0)


def test_a_pass_without_pictures_gives_every_weight_a_gradient(seeing):
    """Ranks that learn together wait for it, and other ranks may have pictures. The tower's is 0."""
    logprobs, _ = completion_logprobs(seeing.model, batch_of(seeing.rows[:2]), 1.0)
    logprobs.sum().backward()
    assert all(p.grad is not None for p in seeing.model.parameters())
    assert not of_tower(seeing.model).any()


def test_rows_of_one_prompt_and_other_pictures_share_nothing(seeing):
    """The words are the same, and the pictures take as many places or not."""
    same = drawn(56, 84, 3)
    first, second = seeing.prompt(5, 6, TALL, 7), seeing.prompt(5, 6, same, 7)
    assert len(first) == len(second) and first != second
    rows = batch_of([(first, (20, 21)), (second, (20, 21)), (first, (22,)), (second, (22,))])
    assert [sorted(piece.tolist()) for piece in microbatches(rows, "shared_prompt", len(first) + 4)] == [[0, 2], [1, 3]]
    logprobs, _ = completion_logprobs(seeing.model, rows, 1.0)
    assert (logprobs[0] - logprobs[1]).abs().max() > 0.01


def test_a_copy_of_a_model_sees_by_its_own_tower(seeing):
    twin = deepcopy(seeing.model)
    assert twin.get_decoder().eyes.whole is twin.base_model
    with torch.no_grad():
        for name in beside_language(Pretrained(seeing.pretrained.path).model()):
            for p in twin.get_submodule(name).parameters():
                p.mul_(1.5)
    row = batch_of([seeing.rows[2]])
    moved = completion_logprobs(twin, row, 1.0)[0] - completion_logprobs(seeing.model, row, 1.0)[0]
    assert moved.abs().max() > 1e-3


def test_a_prompt_goes_back_to_its_text_and_pictures(seeing):
    sight = seeing.sight
    short = [5, sight.placeholder, 7, sight.placeholder, 9]
    whole = sight.expanded(short, [WIDE, TALL])
    assert sight.folded(whole) == (tuple(short), [WIDE, TALL])
    assert sight.folded(sight.expanded(short, [TALL, TALL])) == (tuple(short), [TALL, TALL])
    assert all(number in (WIDE.id, TALL.id) for number in whole if number < 0)
    with pytest.raises(UserError, match="a prompt has 1 pictures, and its text 2 places for them"):
        sight.expanded(short, [WIDE])
    with pytest.raises(UserError, match="a part of picture"):
        sight.folded(whole[: whole.index(TALL.id) + 1])


def test_pixels_of_0_are_no_padding(seeing):
    """Idefics3 drops a picture whose pixels are all 0."""
    black = plain(112, 56, (0, 0, 0))
    row = batch_of([(seeing.prompt(5, black, 7), (20,))])
    assert completion_logprobs(seeing.model, row, 1.0)[0].isfinite().all()
