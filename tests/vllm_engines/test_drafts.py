"""vLLM with a draft from the text so far (n-grams): the distribution is the policy's, and so are the log-probabilities.

A draft decides how many tokens a step gives, and nothing else: arXiv 2211.17192.
"""

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
def steps(monkeypatch) -> list[tuple[int, int, int]]:
    """The number of tokens of drafts in each step, of those that came of it, and of requests."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    counted, verify = [], RejectionSampler.forward

    def forward(self, metadata, *rest):
        out = verify(self, metadata, *rest)
        drafts = metadata.num_draft_tokens
        counted.append((sum(drafts), int((out.sampled_token_ids >= 0).sum()), len(drafts)))
        return out

    monkeypatch.setattr(RejectionSampler, "forward", forward)
    return counted


def taken(steps: list[tuple[int, int, int]]) -> int:
    """Return how many tokens of drafts were kept: each request gets one token more than that."""
    return sum(given - requests for _, given, requests in steps)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5}, {"top_k": 3}, {"repetition_penalty": 1.5}], ids=str)
def test_log_probabilities_are_those_of_the_whole_vocabulary_at_the_temperature(llama, steps, temperature, filters):
    engine, model, _ = llama
    completions = engine.sample(EVERY, Sampling(32, temperature, **filters), seeds=range(len(EVERY)))
    assert sum(drafted for drafted, _, _ in steps) > 20
    assert gap(model, EVERY, completions, temperature) < 1e-5
    if "top_k" in filters:
        for prompt, completion in zip(EVERY, completions, strict=True):
            best = next_logits(model, prompt, completion).topk(3).indices
            assert (best == torch.tensor(completion.ids)[:, None]).any(-1).all()


def test_greedy_tokens_have_the_largest_logit(llama, steps):
    engine, model, _ = llama
    completions = engine.sample(PROMPTS, Sampling(64, temperature=0), seeds=[1, 2, 3])
    assert taken(steps) > 20
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
    assert sum(drafted for drafted, _, _ in steps) > 10
    assert gap(model, EVERY, completions, 0.7) < 1e-5


def test_each_token_of_a_draft_has_the_settings_of_its_request(llama):
    """vLLM's CPU build leaves memory as it was in their place, so that its temperatures are random numbers."""
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    temperatures, ends = torch.tensor([0.5, 0.0, 2.0, 0.7]), torch.tensor([2, 2, 3, 5], dtype=torch.int32)
    assert expand_batch_to_tokens(temperatures, ends, 5, 0, 1).tolist() == pytest.approx([0.5, 0.5, 2.0, 0.7, 0.7])
    assert expand_batch_to_tokens(temperatures, ends + torch.tensor([0, 1, 1, 1], dtype=torch.int32), 6, 0, 1)[2] == 1.0


def test_a_seed_decides_whatever_else_is_in_the_batch(llama):
    engine, _, _ = llama
    sampling = Sampling(32)
    together = engine.sample(EVERY, sampling, range(len(EVERY)))
    alone = [engine.sample([prompt], sampling, [seed])[0] for seed, prompt in enumerate(EVERY)]
    assert [c.ids for c in together] == [c.ids for c in alone]
    assert len({c.ids for c in together}) == len(EVERY)


@pytest.mark.parametrize("top_k", [0, 3])
def test_tokens_follow_the_probabilities(llama, steps, top_k):
    """The second token of 4,000 completions, whose prompt ends like the text before it, so that drafts are often right."""
    engine, model, _ = llama
    size, end, draws, temperature = model.config.vocab_size, model.config.eos_token_id, 4000, 0.4
    (said,) = engine.sample([[60]], Sampling(80, temperature=0), [0])
    prompt = [60, *said.ids]
    steps.clear()
    found = engine.sample([prompt] * draws, Sampling(3, temperature, top_k=top_k), seeds=range(draws))
    assert sum(drafted for drafted, _, _ in steps) > draws / 2 and taken(steps) > draws / 20

    with torch.no_grad():
        rows = torch.tensor([[*prompt, i] for i in range(size)]).split(32)
        logits = torch.cat([model(part, logits_to_keep=2).logits for part in rows]) / temperature  # [size, 2, size]
    if top_k:
        logits[logits < logits.topk(top_k).values[..., -1:]] = -torch.inf
    probs = logits.softmax(-1)
    first = probs[0, 0].clone()
    first[end] = 0  # it has no second token
    expected = draws * first @ probs[:, 1]
    counts = torch.bincount(torch.tensor([c.ids[1] for c in found if len(c.ids) > 1]), minlength=size)
    common = expected > 5
    seen, due = ([*x[common].tolist(), draws - x[common].sum().item()] for x in (counts, expected))
    assert not counts[expected == 0].any() and len(seen) > 5
    free = len(seen) - 1
    # exceeds k + 5 sqrt(2 k) with a probability below 1e-4
    assert sum((x - y) ** 2 / max(y, 1) for x, y in zip(seen, due, strict=True)) < free + 5 * (2 * free) ** 0.5


def test_a_draft_that_would_change_the_distribution_is_refused(tmp_path):
    folder = model_folder("llama", tmp_path)
    synthetic = {**DRAFT, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}
    with pytest.raises(UserError, match=r"speculative_config.*synthetic.*not the policy's"):
        VLLMEngine(folder, args=ARGS | {"speculative_config": synthetic})


def test_a_run_with_a_draft_trains_on_exact_log_probabilities(smoke, tmp_path):
    draft = "+engine.args.speculative_config={method: ngram, num_speculative_tokens: 3, prompt_lookup_max: 2}"
    more = ["engine.args.kv_cache_memory_bytes=67108864", "rollout.sampling.temperature=0.8", "max_tokens=16"]
    learned(smoke("engine=vllm", draft, *more))
    assert max(row.get("rollout/logprob_gap_max", 0) for row in rows(tmp_path)) < 1e-5
