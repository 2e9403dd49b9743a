"""Layers with a state in packed rows: each sequence begins with what it should, also its gradient; and the cache that samples."""

from collections import deque
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers.architectures import alone, made
from helpers.models import agree, batch_of, gap, measured
from torch import Tensor

from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.protocol import Sampling
from grpo.extras.forecast.imagined import in_the_cache
from grpo.extras.forecast.sizes import states_carried
from grpo.extras.state_layers.cache import StateCache, bytes_carried
from grpo.extras.state_layers.following import Following, follow, way_of
from grpo.models.gradient_checkpointing import recomputing
from grpo.models.packed_attention import PLAN, Packed
from grpo.models.packing import trusted

# two prompts, the first with three rows, one of which is empty; their tokens are their values
PROMPTS, ROWS = [(1, 2, 3), (5,)], [[(10,), (), (20, 30)], [(7, 8)]]


def causal_conv1d_fn(hidden_states: Tensor, weight: Tensor, bias=None, activation=None, **kwargs) -> Tensor:
    assert not kwargs
    return F.conv1d(hidden_states, weight[:, None], padding=weight.shape[-1] - 1)[..., : hidden_states.shape[-1]]


def sums(value: Tensor, g: Tensor, initial_state=None, output_final_state=False, chunk_size=4, **kwargs):
    """Return s_t = g_t s_(t-1) + value_t."""
    state, out = torch.zeros_like(value[:, 0]) if initial_state is None else initial_state, []
    for t in range(value.shape[1]):
        state = g[:, t] * state + value[:, t]
        out.append(state)
    return torch.stack(out, 1), state if output_final_state else None


def selective_sums(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, return_last_state=False, **kwargs
):
    """A scan without a state at its beginning, as Mamba's: hidden_states, dt: [n, 1, L]; B, C: [n, 1, L]."""
    out, state = sums((hidden_states * dt * B).transpose(1, 2), torch.exp(A * dt).transpose(1, 2), None, True)
    return (out.transpose(1, 2) * C, state[..., None]) if return_last_state else out.transpose(1, 2) * C


def by_plan(function, *args, **kwargs):
    """Call a function as a layer does in a pass with the plan of PROMPTS and ROWS."""
    plan = Packed(PROMPTS, ROWS, torch.device("cpu"))
    token = PLAN.set(plan)
    try:
        return Following(function, way_of(function.__name__, function))(*args, plan=plan, **kwargs)
    finally:
        PLAN.reset(token)


def tokens() -> Tensor:
    return Packed(PROMPTS, ROWS, torch.device("cpu")).ids.float()  # 1 2 3, 10, 20 30, 5, 7 8


def test_a_convolution_sees_the_end_of_the_prompt_and_no_other_row():
    x = tokens()[:, None].requires_grad_()
    out = by_plan(causal_conv1d_fn, x, torch.tensor([[100.0, 10.0, 1.0]]))
    assert out[0, 0].tolist() == [1, 12, 123, 240, 250, 530, 5, 57, 578]
    out.sum().backward()
    # of the 3: its own, 10 in each of the two rows that follow, 100 in the second token of the longer; of the 2: 100 in each
    assert x.grad[0, 0].tolist() == [111, 211, 121, 1, 11, 1, 111, 11, 1]


def test_a_row_begins_with_the_state_of_its_prompt():
    value = tokens()[..., None].requires_grad_()
    out, state = by_plan(sums, value, torch.full_like(value, 2.0))
    # 1, 2 + 2, 2 4 + 3 = 11; 22 + 10; 22 + 20, 84 + 30; 5; 10 + 7, 34 + 8
    assert state is None and out.flatten().tolist() == [1, 4, 11, 32, 42, 114, 5, 17, 42]
    out.sum().backward()
    # of the 3: 1, then 2 in one row, 2 and 4 in the other; of the 2 twice that, and 1
    assert value.grad.flatten().tolist() == [39, 19, 9, 1, 3, 1, 7, 3, 1]


def test_a_scan_that_takes_no_state_sees_the_prompt_again():
    x = tokens()[:, None].requires_grad_()  # [1, 1, T]
    ones, two = torch.ones_like(x), torch.tensor(2.0).log()[None, None]
    out = by_plan(selective_sums, x, ones, two, ones, ones)
    torch.testing.assert_close(out.flatten().tolist(), [1.0, 4.0, 11.0, 32.0, 42.0, 114.0, 5.0, 17.0, 42.0])
    out.sum().backward()
    torch.testing.assert_close(x.grad.flatten().tolist(), [39.0, 19.0, 9.0, 1.0, 3.0, 1.0, 7.0, 3.0, 1.0])


def test_without_a_plan_a_function_is_the_layers_own():
    value = torch.ones(1, 3, 1)
    following = Following(sums, way_of("sums", sums))
    assert following(value, value, output_final_state=True)[1].item() == 3 and way_of("by_plan", by_plan) is None
    assert way_of("mamba_inner_fn", sums)() is None  # the fused layer: transformers then computes it in steps


@pytest.mark.parametrize("name", ["LFM 2", pytest.param("Mamba", marks=pytest.mark.slow)])
def test_a_family_is_exact_in_packed_rows_and_recomputed(name):
    model, batch = made(name), batch_of([(5, [4, 1, 6]), (1, [2, 3]), (7, [3])])
    assert follow(model) and trusted(model, "shared_prompt")[0] == "shared_prompt"
    agree(model, batch, "shared_prompt")
    logprobs, _, gradients = measured(model, batch, "shared_prompt")
    assert (logprobs - alone(model, batch)).abs().max() < 1e-5
    with recomputing(model):
        _, _, again = measured(model, batch, "shared_prompt")
    assert all(torch.equal(again[name], gradient) for name, gradient in gradients.items())


@pytest.mark.parametrize("alike", [0, 20])
def test_samples_join_and_leave_a_cache_of_states(alike):
    """Each has the state of its own prompt; prompts that begin alike are read as rows of what they share."""
    model, engine = made("LFM 2"), TransformersEngine(160)  # tokens: some samples wait
    model.generation_config.eos_token_id = list(range(2, 20))
    engine.load_weights(model, 0)
    start = [*range(30, 30 + alike)]
    prompts = [*[[*start, 60]] * 4, *[[*start, *range(61, 69)]] * 3, *[[*start, 70, 71]] * 4]
    samples = engine.sample(prompts, Sampling(12), seeds=range(11))
    assert engine.cache is StateCache and len({len(sample.ids) for sample in samples}) > 3
    assert gap(model, prompts, samples) < 1e-5
    with torch.no_grad():
        cache = StateCache(model, [*map(tuple, prompts)], 12, 1 << 20)
        cache.admit(deque(range(11)))
        cache.drop([*range(4)])  # the samples of the first prompt have ended
    assert sorted(cache.after_prompts) == [1, 2] and {len(x) for x in cache.of_samples} == {7}


def test_states_take_places_in_the_cache():
    """Three gated delta layers of Qwen3-Next, 128 channels of a convolution of 4 and 4 heads of 16 x 16 numbers each, are 16,896
    bytes, as 66 tokens of one attention layer with 2 heads of 16 numbers. A prompt takes 3 + 66 tokens, a sample 4 + 66: in 209
    tokens two samples have room. The forecast counts what is there."""
    model = made("Qwen3-Next")
    assert bytes_carried(model) == (3 * 4 * (128 * 3 + 4 * 16 * 16), 4 * 2 * 2 * 16)
    assert bytes_carried(made("Llama")) == (0, 0) and bytes_carried(made("Mamba"))[1] == 0
    prompts = [(60, 61, 62)] * 3 + [(63, 64)] * 3
    with torch.no_grad():
        for bound, taken in ((208, 1), (209, 2), (417, 3), (418, 4), (487, 4), (558, 6)):
            assert len(StateCache(model, prompts, 4, bound).admit(deque(range(6)))[0]) == taken
        cache = StateCache(model, prompts, 4, 1 << 30)
        cache.admit(deque(range(6)))
    here = [*cache.of_samples, *(x for carried in cache.after_prompts.values() for x in carried)]
    plan = SimpleNamespace(prompts=2, group_size=3, sampling=SimpleNamespace(max_tokens=4))
    states, keys = states_carried(model)
    assert states_carried(made("Llama")) is None
    foreseen = partial(in_the_cache, model.config, torch.float32, plan, 3, states=(states, keys))
    assert foreseen(1 << 30) == sum(x.nbytes for x in here) + keys * 2 * (3 + 3 * 4) == 8 * states + 30 * keys
    assert foreseen(100) == 100 * keys
    assert in_the_cache(None, torch.float32, plan, 3, 100, (states, 0)) == 8 * states


def test_a_mamba_steps_from_the_state_of_its_prompt():
    model, engine = made("Mamba"), TransformersEngine()
    engine.load_weights(model, 0)
    prompts = [[60, 61, 62], [63, 64], [60, 61, 62]]
    assert gap(model, prompts, engine.sample(prompts, Sampling(5), seeds=[1, 2, 3])) < 1e-5
    assert engine.cache is StateCache
