"""The built-in engine's caches: each key and value is stored once and within the bound, and every model is sampled correctly."""

import inspect

import pytest
import torch
import transformers
from helpers.models import MORE, gap, model_of

from grpo.engines.builtin import engine as builtin
from grpo.engines.builtin import kv_cache, llama
from grpo.engines.builtin.engine import TransformersEngine, cache_objection
from grpo.engines.builtin.kv_cache import KVCache, Prefill, alike_until
from grpo.engines.builtin.llama import LlamaCache, is_plain_llama
from grpo.engines.builtin.padded import PaddedCache
from grpo.engines.protocol import Sampling
from grpo.engines.stop_texts import StopTexts
from grpo.system.errors import UserError

GROUPS = [(5, 6, 7, 8, 9, 10, 11)] * 5 + [(20, 21)] * 3 + [(40,) * 12] * 2
EOS = [*range(2, 97, 8)]  # enough of the 97 tokens that rows end at different lengths
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 512,
}  # fmt: skip
LINEAR = {"num_value_heads": 4, "num_key_heads": 2, "key_head_dim": 8, "value_head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
OTHERS = {
    "phimoe": (transformers.PhimoeConfig, {"sliding_window": 6, "num_local_experts": 4}),  # hides its window
    "mamba": (transformers.MambaConfig, {"state_size": 4}),
    "lfm2": (transformers.Lfm2Config, {"layer_types": ["conv", "full_attention"] * 2}),
    "qwen3_next": (
        transformers.Qwen3NextConfig,
        {f"linear_{name}": n for name, n in LINEAR.items()} | EXPERTS | {"head_dim": 16},
    ),
}


def other(family: str):
    make, more = OTHERS[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(make(**SMALL | more)).eval()
    for p in model.parameters():
        p.data += torch.randn_like(p) * (0.1 if p.dim() > 1 else 0.02)
    return model


def engine_of(model, *bound: int) -> TransformersEngine:
    model.generation_config.eos_token_id = EOS
    engine = TransformersEngine(*bound)
    engine.load_weights(model, 0)
    engine.choose()  # otherwise the first sample would do it
    return engine


def warnings(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.name.startswith("grpo")]


FULL = [(family, False) for family in ("llama", "llama_tied", "qwen3", "gemma", *MORE)]


@pytest.mark.parametrize(("family", "lora"), [*FULL, ("llama_tied", True), ("gemma", True)])
def test_the_pool_says_what_a_plain_forward_does(family, lora, caplog):
    """Prompts of three lengths, rows that end at any step, gaps that close, buffers that grow, windows shorter than the text."""
    model = model_of(family, lora)
    engine = engine_of(model)
    found = engine.sample(GROUPS, Sampling(24, temperature=0.8), range(10))
    assert engine.cache is (LlamaCache if family.startswith("llama") and not lora else KVCache) and not warnings(caplog)
    assert len({len(completion.ids) for completion in found}) > 1
    assert gap(model, GROUPS, found, 0.8) < 1e-5

    few = engine_of(model, 100).sample(GROUPS, Sampling(24, temperature=0.8), range(10))  # two or three at a time
    assert [completion.ids for completion in few] == [completion.ids for completion in found]
    assert gap(model, GROUPS, few, 0.8) < 1e-5


@pytest.mark.parametrize("family", ["llama", "llama_tied"])
def test_packed_matrices_say_what_a_plain_forward_does(family, monkeypatch):
    """Where no number of parameters is small. The demo's 1.3 million are."""
    model, packed = model_of(family), []
    reorder = torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(
        torch.ops.mkldnn, "_reorder_linear_weight", lambda w, rows: (packed.append(w.shape), reorder(w, rows))[1]
    )
    plain = engine_of(model).sample(GROUPS, Sampling(24, temperature=0.8), range(10))
    assert packed == [] and llama.SMALL > 10e6
    monkeypatch.setattr(llama, "SMALL", 0)
    found = engine_of(model).sample(GROUPS, Sampling(24, temperature=0.8), range(10))
    # four of each layer and the head: once to try the cache, once for all steps
    assert len(packed) == 2 * (4 * model.config.num_hidden_layers + 1)
    assert [completion.ids for completion in found] == [completion.ids for completion in plain]
    assert gap(model, GROUPS, found, 0.8) < 1e-5


@pytest.mark.parametrize("family", ["llama", "qwen3", *MORE])
def test_a_beginning_that_all_prompts_share_is_computed_once(family, monkeypatch):
    """Worked examples of 20 tokens, then questions of 1, 4 and 9 tokens; and prompts that begin alike for 15 tokens only."""
    model, read = model_of(family), []
    init = Prefill.__init__
    monkeypatch.setattr(
        Prefill, "__init__", lambda plan, *given: (init(plan, *given), read.append(plan.ids.shape[1]))[0]
    )
    for same, tokens in ((20, 20 + 1 + 4 + 9), (15, 3 * 15 + 1 + 4 + 9)):
        start = torch.randint(97, (same,), generator=torch.Generator().manual_seed(1)).tolist()
        prompts = [(*start, *range(7 * n, 8 * n)) for n in (1, 4, 9) for _ in range(2)]
        engine = engine_of(model)
        read.clear()
        found = engine.sample(prompts, Sampling(12, temperature=0.8), range(6))
        assert read == [tokens]
        assert gap(model, prompts, found, 0.8) < 1e-5
    assert alike_until([(1, 2, 3, 4), (1, 2, 3)]) == 2  # the last token of each is its own


def test_a_small_llama_is_computed_in_few_operations_with_the_same_result():
    model = model_of("llama")
    found = engine_of(model).sample(GROUPS, Sampling(24), range(10))
    plain = engine_of(model)
    plain.cache = KVCache
    same = plain.sample(GROUPS, Sampling(24), range(10))
    assert [completion.ids for completion in found] == [completion.ids for completion in same]
    gaps = [abs(a - b) for x, y in zip(found, same, strict=True) for a, b in zip(x.logprobs, y.logprobs, strict=True)]
    assert max(gaps) < 1e-5


def test_another_model_gets_a_cache_of_its_own():
    """Qwen 3 scales queries and keys to one length, which a Llama's cache does not."""
    engine, other = engine_of(model_of("llama")), model_of("qwen3")
    engine.load_weights(other, 1)
    assert gap(other, GROUPS[:2], engine.sample(GROUPS[:2], Sampling(6), range(2))) < 1e-5


def test_what_a_small_llama_is():
    model = model_of("llama")
    assert is_plain_llama(model)
    hook = model.model.layers[1].mlp.register_forward_hook(lambda *_: None)  # it may change what the layer returns
    assert not is_plain_llama(model)
    hook.remove()
    model.config.rope_parameters["rope_type"] = "dynamic"  # its angles depend on the longest row
    assert not is_plain_llama(model)
    assert not any(map(is_plain_llama, (model_of("llama", True), model_of("qwen3"), model_of("llama").bfloat16())))


@pytest.mark.parametrize("family", OTHERS)
def test_a_model_of_another_kind_is_sampled_from_by_its_own_cache(family, caplog, monkeypatch):
    monkeypatch.setattr(builtin, "FOLLOWERS", [])  # without the cache of an appendix, which keeps states
    model = other(family)
    engine = engine_of(model, 100)
    engine.close()
    engine.load_weights(model, 1)
    found = engine.sample(GROUPS, Sampling(24), range(10))
    assert engine.cache is PaddedCache and cache_objection(KVCache, model)
    [warning] = warnings(caplog)
    assert f"sampling from {type(model).__name__} is slower" in warning
    assert len({len(completion.ids) for completion in found}) > 1
    assert gap(model, GROUPS, found) < (3e-5 if family == "qwen3_next" else 1e-5)  # reads in chunks, samples in steps
    assert [c.ids for c in found] == [c.ids for c in engine_of(model).sample(GROUPS, Sampling(24), range(10))]


def test_padding_takes_no_positions():
    """It does not matter to distances, but to positions that are learned."""
    assert not cache_objection(PaddedCache, model_of("gpt2"))


def test_a_model_that_no_way_is_right_for_is_refused():
    config = transformers.RwkvConfig(hidden_size=64, attention_hidden_size=64, num_hidden_layers=2, vocab_size=97)
    with pytest.raises(UserError, match=r"cannot sample from RwkvForCausalLM .* set engine=vllm"):
        engine_of(transformers.AutoModelForCausalLM.from_config(config).eval())


def test_a_window_longer_than_what_is_tried_is_asked_of_the_masks():
    config = transformers.Gemma3TextConfig(
        **SMALL, head_dim=16, sliding_window=60, layer_types=["sliding_attention", "full_attention"] * 2
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert cache_objection(KVCache, model) == ""
    for layer, told in (0, None), (0, 61), (0, 59), (1, 60):
        attention = model.model.layers[layer].self_attn
        right, attention.sliding_window = attention.sliding_window, told
        assert cache_objection(KVCache, model) == f"layer {layer} has a mask other than its window"
        attention.sliding_window = right


MISTAKES = [
    ("(self.after + self.counts)[None]", "(self.after + self.counts + 1)[None]"),  # positions
    ("self.of_keys <= now", "self.of_keys <= now + 1"),  # a row sees a key that is not written yet
    ("self.of_keys <= now", "self.of_keys < now"),  # a row does not see itself
    ("self.of_keys >= how.hidden(now)", "self.of_keys >= how.hidden(now) - 1"),
    (
        "masked_fill(p >= self.lengths[:, None], NEVER)",
        "masked_fill(p >= self.lengths.max(), NEVER)",
    ),  # padding of a prompt
    ("move(self.of_rows, order)", "pass"),
    ("move(self.of_prompts, left)", "pass"),
    ("self.steps - joined for", "self.steps for"),  # a row that joined later
    ("how.scale or D**-0.5", "1.0"),
    ("number.append(len(groups[u]))", "number.append(0)"),  # every row of a prompt reads the first one's result
    ("heads + k[:, None]", "heads + k.flip(0)[:, None]"),  # keys of another head
    ("new[:n, :, :places] = x[:n, :, :places]", "new[:n, :, 1:places] = x[:n, :, 1:places]"),  # a lost token
]


@pytest.mark.parametrize(("right", "wrong"), MISTAKES)
def test_a_mistake_in_it_shows(right, wrong):
    source = inspect.getsource(kv_cache)
    assert source.count(right) == 1
    mistaken = {"__name__": "mistaken"}
    exec(source.replace(right, wrong), mistaken)
    model = model_of("mistral, window 6")

    def off(bound: int) -> bool:
        engine = engine_of(model, bound)
        engine.cache = mistaken["KVCache"]
        return gap(model, GROUPS, engine.sample(GROUPS, Sampling(24), range(10))) > 1e-3

    assert off(150) or off(10_000)


def test_seeds_decide_whatever_the_batch_the_order_and_the_bound(monkeypatch):
    model = model_of("llama")
    whole = engine_of(model).sample(GROUPS, Sampling(24), range(10))
    backwards = engine_of(model).sample(GROUPS[::-1], Sampling(24), range(9, -1, -1))
    some = [1, 8, 3, 6]
    few = engine_of(model, 60).sample([GROUPS[i] for i in some], Sampling(24), some)
    alone = engine_of(model, 1).sample(GROUPS, Sampling(24), range(10))
    monkeypatch.setattr(kv_cache, "PREFILL_TOKENS", 8)  # a prompt at a time
    monkeypatch.setattr(kv_cache, "GROWTH", 1)
    apart = engine_of(model).sample(GROUPS, Sampling(24), range(10))
    ids = [completion.ids for completion in whole]
    assert ids == [c.ids for c in backwards[::-1]] == [c.ids for c in alone] == [c.ids for c in apart]
    assert [ids[i] for i in some] == [c.ids for c in few]


@pytest.mark.parametrize("cache", [KVCache, PaddedCache])
@pytest.mark.parametrize("bound", [90, 10_000])
def test_samples_are_the_same_if_the_host_looks_for_ends_only_now_and_then(monkeypatch, cache, bound):
    """Rows end by the model's end tokens, a further one, a text that tokens complete together, and at the limit, all between two
    looks: what they draw after their end is not theirs. A bound of 90 leaves rows waiting for the places of those that end."""
    engine = engine_of(model_of("llama"), bound)
    engine.cache = cache
    texts = StopTexts(("7", "44"), lambda ids: "".join(str(i % 10) for i in ids if i % 3))
    for sampling in (
        Sampling(24),
        Sampling(23, stop=texts),
        Sampling(24, repetition_penalty=1.5, top_k=50, stop_ids=[3, 4, 5]),
    ):
        found = {}
        for every in (1, 5, 16):
            monkeypatch.setitem(builtin.STEPS, "cpu", every)
            found[every] = engine.sample(GROUPS, sampling, range(10))
        assert len({len(completion.ids) for completion in found[1]}) > 3
        for every in (5, 16):
            for one, other in zip(found[1], found[every], strict=True):
                assert (one.ids, one.finish) == (other.ids, other.finish)
                assert other.logprobs == pytest.approx(one.logprobs, abs=1e-5)


@pytest.mark.parametrize("bound", [74, 150, 10_000])
def test_every_token_is_computed_once_and_kept_within_the_bound(bound, monkeypatch):
    """A bound of 74 fits two rows of 24 tokens, each with a prompt padded to 12; a single row takes 36."""
    model = model_of("qwen3")
    engine = engine_of(model, bound)
    read, rows, kept = [], [], []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: read.append(args[0].numel()))

    def step(self, tokens, original=KVCache.step):
        rows.append(len(tokens))
        logits = original(self, tokens)
        kept.append(sum(x.nbytes for kind in (self.of_prompts, self.of_rows) for pair in kind.values() for x in pair))
        return logits

    monkeypatch.setattr(KVCache, "step", step)
    found = engine.sample(GROUPS, Sampling(24), range(10))
    distinct = {*GROUPS}
    assert sum(read) == sum(map(len, distinct)) + sum(len(completion.ids) - 1 for completion in found)
    assert max(rows) == {74: 2, 150: 5, 10_000: 9}[bound]
    config = model.config
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4  # bytes
    assert 0.5 * token * min(bound, 276) < max(kept) <= token * bound  # 276: 3 prompts and 10 rows


def test_a_wave_of_padded_rows_stays_within_the_bound(monkeypatch):
    model, rows = other("phimoe"), []

    def step(self, tokens, original=PaddedCache.step):
        rows.append(len(tokens))
        return original(self, tokens)

    monkeypatch.setattr(PaddedCache, "step", step)
    engine_of(model, 100).sample(GROUPS, Sampling(24), range(10))
    assert max(rows) == 3  # rows of 7 + 24 tokens


def test_who_is_told_of_a_completion_can_train(monkeypatch):
    """Inference mode ends before the callback, and leaves no trace in a model that changes its own buffers while it samples."""
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "factor": 4.0,
        "rope_theta": 1e4,
    }
    config = transformers.LlamaConfig(**SMALL, rope_parameters=rope | {"original_max_position_embeddings": 10})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()

    def learn(i, completion):
        ids = torch.tensor([[*GROUPS[i], *completion.ids]])
        model(ids, labels=ids).loss.backward()

    monkeypatch.setattr(TransformersEngine, "context", None)  # else it ends where the buffers would change
    engine_of(model).sample(GROUPS, Sampling(24), range(10), learn)
    learn(0, engine_of(model).sample(GROUPS[:1], Sampling(24), [0])[0])
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_sixteen_bits_agree_as_well_as_they_can():
    model = model_of("llama").bfloat16()
    engine = engine_of(model)
    assert engine.cache is KVCache
    assert gap(model, GROUPS, engine.sample(GROUPS, Sampling(24), range(10))) < 0.1


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_float32_weights_under_autocast_agree_as_well_as_sixteen_bits_can(low, caplog):
    """As on a GPU with the default settings. The error that shows a mistake in float32 is that of rounding here."""
    model = model_of("qwen2")
    with torch.autocast("cpu", low, cache_enabled=False):
        assert engine_of(model).cache is KVCache and not caplog.messages
        assert builtin.error_at(KVCache, model, (7, 3), builtin.EXACT)
    assert not builtin.error_at(KVCache, model, (7, 3), builtin.EXACT)


def test_a_bound_of_nothing_is_refused():
    with pytest.raises(UserError, match=r"engine\.max_cache_tokens=0 must be an integer of at least 1"):
        TransformersEngine(0)
