"""The built-in engine: samples follow the model, log-probabilities equal the trainer's, seeds decide the samples."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from grpo.engines.auto import auto_engine
from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.builtin.next_token import NextTokens, draw, filter_logits, penalize
from grpo.engines.protocol import Sampling
from grpo.engines.stop_texts import StopTexts
from grpo.env.messages import Message
from grpo.env.tokens import Turn
from grpo.env.types import Action, Reward, State, Step, Trajectory
from grpo.models.logprobs import completion_logprobs
from grpo.models.pretrained import Pretrained
from grpo.rollout.collate import collate
from grpo.rollout.types import Sample
from grpo.system.errors import UserError

PROMPTS = [(60, 61, 62, 63, 64), (60, 61), (60, 61, 62, 63, 64), (70,) * 9]


@pytest.fixture
def engine(toy_model):
    engine = TransformersEngine()
    assert engine.version is None
    engine.load_weights(toy_model, 3)
    assert engine.version == 3
    return engine


EOS = [1, *range(100, 130)]  # many, so that rows end at different lengths


def test_logprobs_are_the_trainers(engine, toy_model):
    """Prefill, expanded caches, left padding and dropped rows change nothing: the engine's numbers equal the trainer's."""
    toy_model.generation_config.eos_token_id = EOS
    for temperature in (1.0, 0.6):
        got = engine.sample(PROMPTS * 4, Sampling(12, temperature=temperature, top_p=0.95), seeds=range(16))
        assert {completion.finish for completion in got} == {"stop", "length"}
        assert len({len(completion.ids) for completion in got}) > 3
        state = Step(State((Message("user", ""),)), Action(Message("assistant", "")))
        groups = [
            [Sample({}, Trajectory((state,)), (Turn(prompt, completion),), Reward(0, False))]
            for prompt, completion in zip(PROMPTS * 4, got, strict=True)
        ]
        batch = collate(groups)
        trainer, _ = completion_logprobs(toy_model, batch, temperature)
        assert ((trainer - batch.rollout_logprobs).abs() * batch.mask).max() < 1e-5


@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prompt"])
def test_each_row_may_have_a_temperature_of_its_own(engine, toy_model, layout):
    """A group with two of them: each row is what it would be alone, and the trainer has its log-probabilities."""
    own, sampling = [0.6, 1.3] * 4, Sampling(12)
    toy_model.generation_config.eos_token_id = EOS
    got = engine.sample([PROMPTS[0]] * 8, sampling, range(8), temperatures=own)
    for i, temperature in enumerate(own):
        (alone,) = engine.sample([PROMPTS[0]], Sampling(12, temperature=temperature), [i])
        assert alone.ids == got[i].ids and alone.logprobs == pytest.approx(got[i].logprobs, abs=1e-6)
    turns = [Turn(PROMPTS[0], replace(one, temperature=own[i])) for i, one in enumerate(got)]
    state = Step(State((Message("user", ""),)), Action(Message("assistant", "")))
    batch = collate([[Sample({}, Trajectory((state,)), (turn,), Reward(0, False)) for turn in turns]])
    trainer, _ = completion_logprobs(toy_model, batch, 1.0, layout=layout)
    gap = (trainer - batch.rollout_logprobs)[batch.mask].abs()
    assert gap.max() < 1e-5 and gap.mean() < 1e-6
    same, _ = completion_logprobs(toy_model, replace(batch, temperature=None), 1.0, layout=layout)
    assert (same - batch.rollout_logprobs)[batch.mask].abs().mean() > 0.1


def test_float16_is_closer_to_the_trainer_than_bfloat16(toy):
    """It has three bits more (arXiv 2510.26788)."""
    gaps = {}
    for dtype in ("float16", "bfloat16"):
        model, engine = Pretrained(str(toy), dtype=dtype).model(), TransformersEngine()
        engine.load_weights(model, 0)
        got = engine.sample(PROMPTS * 2, Sampling(12), range(8))
        state = Step(State((Message("user", ""),)), Action(Message("assistant", "")))
        turns = [Turn(prompt, one) for prompt, one in zip(PROMPTS * 2, got, strict=True)]
        batch = collate([[Sample({}, Trajectory((state,)), (turn,), Reward(0, False)) for turn in turns]])
        trainer, _ = completion_logprobs(model, batch, 1.0, layout="shared_prompt")
        gaps[dtype] = float((trainer - batch.rollout_logprobs)[batch.mask].abs().mean())
    assert 0 < gaps["float16"] < gaps["bfloat16"] / 3


def test_a_completion_ends_with_its_eos_or_at_the_limit(engine, toy_model):
    toy_model.generation_config.eos_token_id = EOS
    for completion in engine.sample(PROMPTS * 4, Sampling(12), seeds=range(16)):
        ends = [token in EOS for token in completion.ids]
        assert not any(ends[:-1])
        assert (completion.finish == "stop") == ends[-1]
        assert completion.finish == "stop" or len(completion.ids) == 12


def test_seeds_decide_whatever_else_is_in_the_batch(engine):
    sampling = Sampling(8)
    together = engine.sample(PROMPTS, sampling, seeds=[5, 6, 7, 8])
    alone = [
        engine.sample([prompt], sampling, seeds=[seed])[0] for prompt, seed in zip(PROMPTS, [5, 6, 7, 8], strict=True)
    ]
    engine.max_cache_tokens = 40
    in_pieces = engine.sample(PROMPTS, sampling, seeds=[5, 6, 7, 8])
    assert [c.ids for c in together] == [c.ids for c in alone] == [c.ids for c in in_pieces]
    assert engine.sample(PROMPTS, sampling, seeds=[5, 6, 9, 8])[2].ids != together[2].ids


def test_tokens_that_a_row_has_seen_stay_its_own_when_others_end(engine, toy_model):
    toy_model.generation_config.eos_token_id = EOS
    sampling = Sampling(12, repetition_penalty=5.0)
    together = engine.sample(PROMPTS * 4, sampling, seeds=range(16))
    alone = [engine.sample([prompt], sampling, seeds=[seed])[0] for seed, prompt in enumerate(PROMPTS * 4)]
    assert [c.ids for c in together] == [c.ids for c in alone] and len({len(c.ids) for c in together}) > 3


def test_each_token_has_a_random_number_of_its_own():
    """All of 1,000 tokens are equally likely, so the number is the token's place among them."""
    draws = NextTokens([(1,), (2,)], Sampling(6), [5, 6], torch.device("cpu"))
    draws.join([0, 1], 1000)
    drawn = torch.stack([draws.step(torch.zeros(2, 1000)) for _ in range(6)], dim=1)
    numbers = [torch.rand(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in (5, 6)]
    assert drawn.tolist() == (torch.stack(numbers) * 1000).long().tolist()
    assert draws.tails(8) == draws.tails(6) == drawn.tolist() and draws.tails(2) == drawn[:, -2:].tolist()


def test_the_score_of_a_token_is_its_log_probability_after_those_before_it(engine, toy_model):
    ((first, *rest),) = engine.score([PROMPTS[0]], top=2)
    exact = toy_model(tensor([PROMPTS[0]])).logits[0, :-1].log_softmax(-1)
    assert first == {} and len(rest) == len(PROMPTS[0]) - 1
    for found, row, token in zip(rest, exact, PROMPTS[0][1:], strict=True):
        best = row.topk(2).indices.tolist()
        assert found.keys() == {token, *best}
        assert all(value == pytest.approx(row[i].item(), abs=1e-5) for i, value in found.items())


def test_greedy_takes_the_likeliest_token(engine, toy_model):
    (completion,) = engine.sample([PROMPTS[0]], Sampling(5, temperature=0.0), seeds=[0])
    ids = list(PROMPTS[0])
    for token in completion.ids:
        assert token == toy_model(tensor([ids])).logits[0, -1].argmax()
        ids.append(token)


def chances(logits: list[float], sampling: Sampling, prompt: set[int]) -> list[float]:
    """Return the probability of each token, computed one token at a time."""
    penalty = sampling.repetition_penalty
    for i in prompt if penalty != 1 else ():
        logits[i] = logits[i] / penalty if logits[i] > 0 else logits[i] * penalty
    weights = [math.exp(x) for x in logits]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    kept = order[: sampling.top_k or None]
    mass = sum(weights[i] for i in kept)
    while sum(weights[i] for i in kept[:-1]) >= sampling.top_p * mass:
        kept.pop()
    kept = [i for i in kept if weights[i] >= sampling.min_p * weights[order[0]]]
    return [weights[i] / sum(weights[j] for j in kept) if i in kept else 0 for i in range(len(weights))]


# The 99.9 % quantiles of chi-square, by degrees of freedom.
LIMITS = [0, 10.8, 13.8, 16.3, 18.5, 20.5, 22.5, 24.3, 26.1, 27.9, 29.6, 31.3]


@pytest.mark.parametrize(
    "parameters",
    [
        {}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.25}, {"repetition_penalty": 2.5},
        {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.5},
    ],
    ids=str,
)  # fmt: skip
def test_samples_follow_the_distribution(parameters):
    """4,000 draws from a vocabulary of 12 after one of two prompts; without the parameters they would not fit."""
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 12,
    }
    model = LlamaForCausalLM(LlamaConfig(**shape, initializer_range=0.25)).eval()
    model.generation_config.eos_token_id = None
    engine = TransformersEngine()
    engine.load_weights(model, 0)
    sampling, prompt = Sampling(1, **parameters), (3, 4, 5, 3)
    drawn = engine.sample([prompt, (7, 8)] * 4000, sampling, seeds=range(8000))[::2]
    counts = [sum(completion.ids[0] == token for completion in drawn) for token in range(12)]

    def misfit(sampling: Sampling) -> tuple[float, int]:
        with torch.no_grad():
            logits = (model(tensor([prompt])).logits[0, -1] / sampling.temperature).tolist()
        expected = [4000 * chance for chance in chances(logits, sampling, {*prompt})]
        pairs = [(c, e) for c, e in zip(counts, expected, strict=True) if e]
        assert sum(c for c, _ in pairs) == 4000 or sampling == Sampling(1)
        return sum((c - e) ** 2 / e for c, e in pairs), len(pairs) - 1

    found, freedom = misfit(sampling)
    assert freedom > 1 and found < LIMITS[freedom]
    assert not parameters or misfit(Sampling(1))[0] > 2 * LIMITS[11]


LOGITS = tensor([[0.5, 0.3, 0.15, 0.05]]).log()


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.5}, [0]),
        ({"top_p": 0.51}, [0, 1]),
        ({"top_p": 0.96}, [0, 1, 2, 3]),
        ({"min_p": 0.3}, [0, 1, 2]),  # 0.15 is 0.3 of 0.5
        ({"min_p": 0.31}, [0, 1]),
        ({"top_k": 3, "top_p": 0.6}, [0, 1]),  # 0.5 / 0.95 alone is below 0.6
    ],
)
def test_filters(sampling, kept):
    left = filter_logits(LOGITS.flip(-1), Sampling(1, **sampling)).isfinite().flip(-1)
    assert left.nonzero()[:, 1].tolist() == kept


def test_draw_reads_the_cumulative_distribution():
    uniform = tensor([0.0, 0.49, 0.51, 0.79, 0.81, 0.94, 0.96, 1 - 1e-16], dtype=torch.float64)
    for weights in (LOGITS.softmax(-1), 3 * LOGITS.exp()):
        assert draw(weights.expand(8, -1), uniform).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        banned = weights.masked_fill(tensor([[True, False, False, True]]), 0)
        assert draw(banned.expand(2, -1), tensor([0.0, 1 - 1e-16], dtype=torch.float64)).tolist() == [1, 2]


class Passes(TorchDispatchMode):
    """Counts the operations on tensors of [rows, V] that are no views."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        got = function(*args, **(kwargs or {}))
        if not function.is_view:
            self.count += any(isinstance(x, torch.Tensor) and x.shape[-1:] == (1000,) for x in (*args, got))
        return got


@pytest.mark.parametrize(
    ("dtype", "settings", "passes"),
    [
        (torch.float32, {}, 8),  # most, less it, exp, sum, float64, cumulative sum, search; and the drawn token's
        (torch.bfloat16, {}, 9),
        (torch.bfloat16, {"temperature": 0.7}, 10),
        (torch.bfloat16, {"top_k": 5}, 13),  # largest, smaller ones, without them, softmax
        (torch.float32, {"temperature": 0.0}, 6),
    ],
)
def test_a_step_passes_over_the_logits_as_often_as_it_must(dtype, settings, passes):
    """The draw and the log-probability share one exponential, and both are right."""
    draws = NextTokens([(1,)] * 4, Sampling(2, **settings), range(4), torch.device("cpu"))
    draws.join(range(4), 1000)
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    with Passes() as counted:
        token = draws.step(logits)
    assert counted.count == passes
    scaled = logits.double() / (draws.sampling.temperature or 1)
    torch.testing.assert_close(
        draws.logprobs[:, 0].double(), scaled.log_softmax(-1)[range(4), token], atol=1e-6, rtol=0
    )
    if draws.sampling.temperature:
        weights = filter_logits(scaled, draws.sampling).softmax(-1)
        below, above = ((weights.cumsum(-1) - shift * weights)[range(4), token] for shift in (1, 0))
        assert (below <= draws.uniform[:, 0] + 1e-6).all() and (draws.uniform[:, 0] <= above + 1e-6).all()
    else:
        assert token.tolist() == logits.argmax(-1).tolist()


def test_a_penalty_makes_what_was_there_less_likely(engine, toy_model):
    logits, seen = tensor([[2.0, 2.0, -1.0, -1.0]]), tensor([[True, False, True, False]])
    assert penalize(logits, seen, 2.0).tolist() == [[1.0, 2.0, -2.0, -1.0]]

    (free,) = engine.sample([PROMPTS[0]], Sampling(20, temperature=0.0), seeds=[0])
    (held,) = engine.sample([PROMPTS[0]], Sampling(20, temperature=0.0, repetition_penalty=1e4), seeds=[0])
    assert len(set(free.ids)) < 20 == len({*held.ids}) and not {*held.ids} & {*PROMPTS[0]}
    logits = toy_model(tensor([[*PROMPTS[0], *held.ids[:-1]]])).logits[0, len(PROMPTS[0]) - 1 :]
    told = logits.log_softmax(-1).gather(-1, tensor(held.ids)[:, None])[:, 0]
    assert (told - tensor(held.logprobs)).abs().max() < 1e-5  # the model's, before the penalty


def test_further_stop_ids_end_a_completion(engine):
    (free,) = engine.sample([PROMPTS[0]], Sampling(8), seeds=[0])
    (held,) = engine.sample([PROMPTS[0]], Sampling(8, stop_ids=[free.ids[3]]), seeds=[0])
    assert held.ids == free.ids[: free.ids.index(free.ids[3]) + 1] and held.finish == "stop"
    (last,) = engine.sample([PROMPTS[0]], Sampling(len(held.ids), stop_ids=[free.ids[3]]), seeds=[0])
    assert last.ids == held.ids and last.finish == "stop"  # at the limit, too


def test_stop_texts_end_a_completion_at_the_token_that_completes_them(engine, toy):
    decode = partial(AutoTokenizer.from_pretrained(toy).decode, skip_special_tokens=True)
    prompts, seeds = [PROMPTS[0], PROMPTS[1]] * 3, range(6)
    free = engine.sample(prompts, Sampling(24), seeds)
    text = decode(free[0].ids)
    stops = StopTexts((text[5:7], "never that"), decode)
    held = engine.sample(prompts, Sampling(24, stop=stops), seeds)
    ended = 0
    for before, after in zip(free, held, strict=True):
        ends = [i for i in range(1, len(before.ids) + 1) if text[5:7] in decode(before.ids[:i])]
        assert after.ids == before.ids[: ends[0] if ends else None]
        assert after.logprobs == pytest.approx(before.logprobs[: len(after.ids)], abs=1e-5)
        assert after.finish == ("stop" if ends else before.finish)
        ended += bool(ends)
    assert ended and text[5:7] in decode(held[0].ids) and decode(held[0].ids).index(text[5:7]) <= 5
    assert Sampling(24, stop=stops) == Sampling(24, stop=StopTexts(stops.texts, str)) != Sampling(24)


def test_what_only_vllm_takes_is_refused(engine):
    with pytest.raises(UserError, match="does not take guided, min_tokens: set engine=vllm"):
        engine.sample([PROMPTS[0]], Sampling(8, guided={"regex": "[0-9]+"}, vllm={"min_tokens": 2}), seeds=[0])


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1}, {"top_p": 0}, {"top_k": -1}, {"min_p": 1}, {"max_tokens": 0}, {"repetition_penalty": 0},
        {"stop_ids": ["</s>"]}, {"guided": {"regx": "a"}}, {"guided": {"regex": "a", "choice": ["a"]}},
        {"vllm": {"min_token": 1}}, {"vllm": {"min_tokens": -1}}, {"vllm": {"logit_bias": {3: 101}}},
    ],
)  # fmt: skip
def test_sampling_out_of_range_is_refused(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        Sampling(**{"max_tokens": 1} | wrong)


def test_a_prompt_beyond_the_context_is_refused(engine):
    with pytest.raises(UserError, match=r"prompt of 4090 tokens and an answer of 10 exceed .* context of 4096"):
        engine.sample([(60,) * 4090], Sampling(10), seeds=[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it may well choose vLLM")
def test_auto_takes_the_built_in_engine_without_a_gpu_and_says_so(caplog):
    caplog.set_level("INFO")
    assert isinstance(auto_engine("anything"), TransformersEngine)
    assert "built-in" in caplog.text and "no GPU" in caplog.text
