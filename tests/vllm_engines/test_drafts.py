"""vLLM with a draft from the text so far (n-grams): the distribution is the policy's, and so are the log-probabilities.

A draft decides how many tokens a step gives, and nothing else: arXiv 2211.17192.
"""

import itertools
import re

import pytest
import torch
import transformers
from helpers.models import CONTEXT, gap, model_folder, next_logits
from helpers.runs import learned, rows

from grpo.engines.protocol import Sampling
from grpo.engines.vllm.engine import VLLMEngine
from grpo.system.errors import UserError

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

DRAFT = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
ARGS = {"kv_cache_memory_bytes": 1 << 26, "max_model_len": CONTEXT, "speculative_config": DRAFT}
PROMPTS = [[60, 61, 62] * 6, [63, 64, 65, 66, 67, 68, 69] * 3, [70, 71, 70]]
EVERY = PROMPTS * 4


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    torch.set_num_threads(1)
    folder = model_folder("llama", tmp_path_factory.mktemp("llama"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    engine = VLLMEngine(folder, args=ARGS)
    engine.load_weights(model, 0)
    yield engine, model, transformers.AutoTokenizer.from_pretrained(folder)
    engine.close()


@pytest.fixture
def steps(monkeypatch) -> list[tuple[int, int]]:
    """The number of tokens of drafts in each step, and of those that came of it."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    counted, verify = [], RejectionSampler.forward

    def forward(self, metadata, *rest):
        out = verify(self, metadata, *rest)
        counted.append((sum(metadata.num_draft_tokens), int((out.sampled_token_ids >= 0).sum())))
        return out

    monkeypatch.setattr(RejectionSampler, "forward", forward)
    return counted


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5}, {"top_k": 3}, {"repetition_penalty": 1.5}], ids=str)
def test_log_probabilities_are_those_of_the_whole_vocabulary_at_the_temperature(llama, steps, temperature, filters):
    engine, model, _ = llama
    completions = engine.sample(EVERY, Sampling(32, temperature, **filters), seeds=range(len(EVERY)))
    assert sum(drafted for drafted, _ in steps) > 50
    assert gap(model, EVERY, completions, temperature) < 1e-5
    if "top_k" in filters:
        for prompt, completion in zip(EVERY, completions, strict=True):
            best = next_logits(model, prompt, completion).topk(3).indices
            assert (best == torch.tensor(completion.ids)[:, None]).any(-1).all()


def test_greedy_tokens_have_the_largest_logit(llama, steps):
    engine, model, _ = llama
    completions = engine.sample(PROMPTS, Sampling(64, temperature=0), seeds=[1, 2, 3])
    assert sum(given for _, given in steps) > 1.5 * len(steps) * len(PROMPTS)  # drafts are taken
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        logits = next_logits(model, prompt, completion)
        own = logits.gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
        assert (logits.amax(-1) - own).max() < 1e-5  # of two equal ones, either
    assert gap(model, PROMPTS, completions) < 1e-5


def test_guided_samples_match_and_keep_the_models_own_log_probabilities(llama, steps):
    engine, model, tokenizer = llama
    sampling = Sampling(48, 0.7, guided={"regex": "(12 ){4}[0-9]+c"})
    completions = engine.sample(EVERY, sampling, seeds=range(len(EVERY)))
    texts = [tokenizer.decode(c.ids, skip_special_tokens=True) for c in completions if c.finish == "stop"]
    assert len(set(texts)) > 3 and all(re.fullmatch("(12 ){4}[0-9]+c", text) for text in texts), texts
    assert sum(drafted for drafted, _ in steps) > 10
    assert gap(model, EVERY, completions, 0.7) < 1e-5


def test_a_seed_decides_whatever_else_is_in_the_batch(llama):
    engine, _, _ = llama
    sampling = Sampling(32)
    together = engine.sample(EVERY, sampling, range(len(EVERY)))
    alone = [engine.sample([prompt], sampling, [seed])[0] for seed, prompt in enumerate(EVERY)]
    assert [c.ids for c in together] == [c.ids for c in alone]
    assert len({c.ids for c in together}) == len(EVERY)


def test_tokens_follow_the_probabilities(tmp_path, steps):
    """The second and third token of 6,000 completions, after each of which a draft was offered: 144 pairs, chi-square."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=12,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    engine = VLLMEngine(str(tmp_path), args={**ARGS, "max_model_len": 64})
    engine.load_weights(model, 0)
    prompt, draws = [*range(12), *range(12)], 6000
    found = engine.sample([prompt] * draws, Sampling(4, 0.9), seeds=range(draws))
    engine.close()
    offered, given = (sum(counts) for counts in zip(*steps, strict=True))
    assert offered > draws and given > 0

    starts = torch.tensor([[*prompt, *pair] for pair in itertools.product(range(12), repeat=2)])
    with torch.no_grad():
        probs = (model(starts).logits[:, -3:] / 0.9).softmax(-1)  # of the first token, the second, the third
    first, second, third = (probs[:, i].view(12, 12, 12) for i in range(3))  # by the tokens before
    expected = torch.einsum("a,ab,abc->bc", first[0, 0], second[:, 0], third) * draws
    assert expected.sum().item() == pytest.approx(draws, rel=1e-4)
    counts = torch.zeros(12, 12)
    for completion in found:
        counts[completion.ids[1], completion.ids[2]] += 1
    common = expected > 5
    seen, due = (torch.cat([x[common], x[~common].sum()[None]]) for x in (counts, expected))
    free = len(seen) - 1
    # exceeds k + 5 sqrt(2 k) with a probability below 1e-4
    assert ((seen - due).square() / due.clamp(min=1)).sum() < free + 5 * (2 * free) ** 0.5


def test_a_draft_that_would_change_the_distribution_is_refused(tmp_path):
    folder = model_folder("llama", tmp_path)
    synthetic = {**DRAFT, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}
    with pytest.raises(UserError, match=r"speculative_config.*synthetic.*not the policy's"):
        VLLMEngine(folder, args=ARGS | {"speculative_config": synthetic})


def test_a_run_with_a_draft_passes_the_preflight_and_trains_on_exact_log_probabilities(smoke, tmp_path):
    draft = "+engine.args.speculative_config={method: ngram, num_speculative_tokens: 3, prompt_lookup_max: 2}"
    more = ["engine.args.kv_cache_memory_bytes=67108864", "rollout.sampling.temperature=0.8", "max_tokens=16"]
    learned(smoke("engine=vllm", draft, *more))
    assert max(row.get("rollout/logprob_gap_max", 0) for row in rows(tmp_path)) < 1e-5
