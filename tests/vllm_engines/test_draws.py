"""Drawing tokens by seed and position: the distribution, the independence, and a whole engine that draws so, as on a GPU."""

import pytest
import torch
import transformers
from helpers.models import PROMPTS, gap, model_folder
from torch import Tensor

from grpo.engines.protocol import Sampling
from grpo.engines.vllm.engine import VLLMEngine, import_vllm

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")
import_vllm()

from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p_pytorch  # noqa: E402

from grpo.engines.vllm import draws  # noqa: E402

DRAWS = 20_000
# the chi-square statistic of k degrees of freedom exceeds k + 5 sqrt(2 k) with a probability below 1e-4, for k from 5 on
LARGEST = 5.0


class OnGpu:
    """A generator on a GPU, as the host sees it: a seed, and an offset. It counts no draws by itself."""

    device = torch.device("cuda")

    def __init__(self, seed: int) -> None:
        self.seed, self.offset = seed, 0

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


def keys(seeds: range, position: int = 0) -> Tensor:
    return torch.tensor([(seed, 0, position) for seed in seeds])


def excess(counts: Tensor, probs: Tensor) -> float:
    """Return by how many standard deviations the chi-square statistic of the counts exceeds its mean."""
    there = probs > 0
    assert not counts[~there].any()  # what a filter excludes is never drawn
    expected = probs[there] * counts.sum()
    free = int(there.sum()) - 1
    return float((((counts[there] - expected) ** 2 / expected).sum() - free) / (2 * free) ** 0.5)


@pytest.mark.parametrize("filters", [{}, {"k": 9}, {"p": 0.8}, {"k": 12, "p": 0.6}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_draws_follow_the_probabilities(dtype, filters):
    """With vLLM's own masks of filters, as its sampler calls them: 20,000 seeds at one position, then one seed at as many."""
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1)).mul(1.5).to(dtype).float()[None]
    given = {name: torch.tensor([value]) for name, value in filters.items()}
    logits = apply_top_k_top_p_pytorch(logits, given.get("k"), given.get("p"))
    probs = logits.softmax(-1)
    seeds = keys(range(DRAWS), 8)
    one = torch.tensor([(7, 3, 4 * place) for place in range(DRAWS)])
    for each in (seeds, one):
        drawn = (probs / draws.exponentials(each, 40)).argmax(-1)
        assert excess(drawn.bincount(minlength=40).double(), probs[0].double()) < LARGEST


def test_noise_is_exponential_and_independent_between_rows_positions_and_tokens():
    """Correlations of 2^20 pairs are below 5 standard deviations, 5 / 1024. P(e < x) = 1 - exp(-x)."""
    size = 1024
    noise = draws.exponentials(keys(range(size)), size)
    assert noise.shape == (size, size) and noise.dtype == torch.float32 and (noise > 0).all()
    for x in (1e-3, 0.1, 1.0, 3.0):
        share, expected = (noise < x).double().mean(), 1 - torch.tensor(-x, dtype=torch.float64).exp()
        assert abs(share - expected) < 5 * (expected * (1 - expected)).sqrt() / size
    later = draws.exponentials(keys(range(size), 4), size)
    other = draws.exponentials(torch.tensor([(seed, 1, 0) for seed in range(size)]), size)
    pairs = {
        "neighbouring rows": (noise[1:], noise[:-1]),
        "neighbouring tokens": (noise[:, 1:], noise[:, :-1]),
        "positions": (noise, later),
        "upper halves of seeds": (noise, other),
        "seed and position swapped": (later[4], noise[0]),
    }
    for name, (one, two) in pairs.items():
        both = torch.stack([one.flatten(), two.flatten()]).double()
        assert abs(torch.corrcoef(both)[0, 1]) < 5 / both.shape[1] ** 0.5, name
    assert len(noise.flatten().unique()) > 0.95 * size * size  # float32 rounds the 2^32 values


def test_a_row_depends_on_its_seed_and_position_alone():
    """Not on the other rows, their number, or its place; a token that vLLM takes back is drawn again."""
    probs = torch.rand(6, 500, generator=torch.Generator().manual_seed(0)).softmax(-1)

    def drawn(rows: list[int], generators: dict[int, OnGpu]) -> list[int]:
        given = {place: generators[row] for place, row in enumerate(rows)}
        return draws.random_sample(probs[rows].clone(), given).tolist()

    every = [OnGpu(seed=2**63 + row) for row in range(6)]
    together = [drawn([0, 1, 2, 3, 4, 5], dict(enumerate(every))) for _ in range(5)]
    assert len({tuple(step) for step in together}) == 5  # the position counts
    for row in range(6):
        alone = {row: OnGpu(seed=2**63 + row)}
        assert [drawn([row], alone)[0] for _ in range(5)] == [step[row] for step in together]
    again = dict(enumerate(OnGpu(seed=2**63 + row) for row in range(6)))
    assert drawn([5, 0, 3], again) == [together[0][i] for i in (5, 0, 3)]
    backwards = {row: OnGpu(seed=2**63 + row) for row in reversed(range(6))}
    assert draws.random_sample(probs.clone(), backwards).tolist() == together[0]
    others = dict(enumerate(OnGpu(seed=2**62 + row) for row in range(6)))  # other upper halves
    assert draws.random_sample(probs.clone(), others).tolist() != together[0]
    again[0].set_offset(again[0].get_offset() - 4)  # as vLLM does for a prompt that is read in pieces
    assert drawn([3, 0], again) == [together[1][3], together[0][0]]


def draw_of(generator) -> tuple[int, int, int]:
    """The draw of one row, by itself: the halves of its seed, and its position."""
    if generator.device.type == "cpu":
        low, high = torch.randint(1 << 32, (2,), generator=generator).tolist()
        return low, high, 0
    seed, position = generator.initial_seed(), generator.get_offset()
    generator.set_offset(position + 4)
    return seed % (1 << 32), seed >> 32, position % (1 << 32)


@pytest.mark.parametrize("kind", [OnGpu, lambda seed: torch.Generator().manual_seed(seed)], ids=["gpu", "cpu"])
def test_all_rows_at_once_draw_what_each_draws_by_itself(kind):
    """Rows end, come and change places, and one goes back by a draw. The last seed has upper bits, and a position passes 2^32."""
    seeds = [0, 7, 7, (1 << 32) - 1, (1 << 63) + 5]
    ours, theirs = ([kind(seed) for seed in seeds] for _ in range(2))
    for rows in ([0, 1, 2], [0, 1, 2], [2, 1, 0], [2, 1], [2, 4, 1], [2, 4, 1], [3], [3, 0], [2, 4, 1]):
        keys = draws.keys_of([ours[row] for row in rows])
        assert keys.dtype == torch.int64 and keys.tolist() == [[*draw_of(theirs[row])] for row in rows]
        if kind is OnGpu:
            for row in (ours[4], theirs[4]):
                row.set_offset(row.get_offset() - 4 if rows == [2, 4, 1] else row.get_offset() + (1 << 32))


class Counted(OnGpu):
    asked = 0

    def initial_seed(self) -> int:
        Counted.asked += 1
        return self.seed


def test_the_seeds_of_rows_that_stay_are_read_once():
    rows = [Counted(seed) for seed in range(5)]
    for count, asked in ((5, 5), (5, 5), (5, 5), (3, 8), (3, 8)):
        draws.keys_of(rows[:count])
        assert Counted.asked == asked


def test_rows_without_a_seed_draw_beside_seeded_ones():
    probs = torch.full((3, 1000), 1e-3)
    first = draws.random_sample(probs.clone(), {1: OnGpu(5)})
    second = draws.random_sample(probs.clone(), {1: OnGpu(5)})
    assert first[1] == second[1] and first[0] != second[0] and first[2] != second[2]


def test_an_engine_that_draws_so_keeps_seeds_and_logprobs(tmp_path, monkeypatch):
    """The path of a GPU, taken on this CPU: vLLM's native sampler with our draws. Log-probabilities are still those of the whole
    vocabulary, and a seed decides whatever else is in the batch."""
    monkeypatch.setattr(TopKTopPSampler, "forward_cpu", TopKTopPSampler.forward_native)
    calls = []
    own = draws.keys_of
    monkeypatch.setattr(draws, "keys_of", lambda rows, pinned: calls.extend(rows) or own(rows, pinned))
    torch.set_num_threads(1)
    path = model_folder("llama", tmp_path)
    engine = VLLMEngine(path, args={"kv_cache_memory_bytes": 1 << 26})
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    engine.load_weights(model, 1)
    asked = 0
    for sampling in (Sampling(12), Sampling(12, 0.7, top_k=5), Sampling(12, top_p=0.6), Sampling(12, min_p=0.1)):
        together = engine.sample([*PROMPTS, PROMPTS[0]], sampling, [1, 2, 3, 1])
        assert together[0] == together[3]
        alone = [engine.sample([prompt], sampling, [i])[0] for i, prompt in enumerate(PROMPTS, 1)]
        assert [one.ids for one in alone] == [one.ids for one in together[:3]]
        assert gap(model, PROMPTS, together[:3], sampling.temperature) < 1e-5
        asked += sum(len(one.ids) for one in [*together, *alone])
    assert len(calls) >= asked  # the draws were ours
    engine.close()
