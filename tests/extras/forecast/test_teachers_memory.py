"""The memory of a teacher: always on the GPU, or while it scores, and then pinned in the host's memory; in GB worked by hand."""

from types import SimpleNamespace

import pytest
import torch
from conftest import compose_config
from hydra.utils import instantiate
from transformers import AutoTokenizer, LlamaConfig

from grpo.engines.builtin.engine import TransformersEngine
from grpo.extras.forecast.imagined import pinned
from grpo.extras.forecast.parts import Part, at_peak, in_phases
from grpo.extras.forecast.sizes import Sizes, of_teacher

GB = 10**9


def test_a_teacher_that_leaves_is_not_beside_the_gradients():
    """Weights of 2 GB are always there, its head in an update. Gradients and activations of 3 and 4 GB come when it has gone."""
    for visit, update in ((6, 2 + 1 + 3 + 4), (9, 2 + 1 + 9)):
        phases = {"weights": "", "head": "update", "visit": "scoring", "gradients": "passing", "activations": "passing"}
        sizes = {"weights": 2, "head": 1, "visit": visit, "gradients": 3, "activations": 4, "cache": 5}
        parts = [Part(name, sizes[name], phase=phases.get(name, "rollout")) for name in sizes]
        assert in_phases(parts) == {"update": update, "rollout": 2 + 5}
        assert ("visit" in [part.name for part in at_peak(parts, "update")]) == (visit == 9)


def test_pinned_memory_is_a_power_of_two():
    """A matrix of the MLP of a model of 7 B, 18944 x 3584 in 16 bits, takes nearly twice its size."""
    assert [pinned(size) for size in (1, 4096, 4097)] == [1, 4096, 8192]
    assert pinned(18944 * 3584 * 2) == 2**28 and 18944 * 3584 * 2 / 2**28 < 0.51


def test_parts_of_a_teacher_that_scores_and_leaves():
    """Its weights are 3 x 100 numbers of four bytes, its head 100 x 3. 2 x 4 samples of 5 tokens have states of 3 numbers."""
    weights, head, plan = torch.zeros(3, 100), torch.zeros(100, 3), SimpleNamespace(prompts=2, group_size=4)
    plan.sampling = SimpleNamespace(max_tokens=5)
    own = {"": [], "update": [head], "scoring": [weights], "host": [weights]}
    gpu = {part.name: (part.size, part.phase, part.host) for part in of_teacher(own, 50, plan, "cuda") if part.size}
    assert gpu == {
        "teacher's head": (1200, "update", False),
        "teacher's visit": (1200 + 50, "scoring", False),
        "pinned teacher": (2048 + 512, "", True),  # 1200, and 40 x 12
    }
    assert [(part.name, part.size) for part in of_teacher(own, 50, plan, "cpu")] == [("teacher", 2400)]
    own = {"": [weights], "update": [], "scoring": [], "host": []}
    stays = of_teacher(own, 50, plan, "cuda")
    assert [(part.name, part.size, part.phase) for part in stays if part.size] == [("teacher", 1200, "")]


@pytest.mark.slow
def test_an_offloaded_teacher_is_on_the_gpu_while_it_scores(toy, tmp_path):
    """A teacher with 3 layers of 64 numbers. Pinned: its matrices of 64 x 64, 64 x 100 and 282 x 64 numbers of four bytes are
    powers of two but for the last two, and so are the states of 4 rows of 20 tokens."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=100, num_hidden_layers=3, num_attention_heads=4, vocab_size=282,
        architectures=["LlamaForCausalLM"], tie_word_embeddings=False, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(toy).save_pretrained(tmp_path)
    words = f"model=path model.path={toy} output_dir=. algo=opd teacher.model.path={tmp_path} rollout.prompts=2"
    found = {}
    for offload in (True, False):
        settings = *words.split(), "rollout.group_size=2", "max_tokens=20", "algo.teacher.divergence=reverse"
        composed = compose_config(*settings, f"teacher.offload={offload}")
        plan, algorithm, optim, pretrained = map(
            instantiate, (composed.rollout, composed.algo, composed.optim, composed.model)
        )
        make = instantiate(composed.module)
        sizes = Sizes(
            lambda model, make=make, algorithm=algorithm, optim=optim: make(model, algorithm, optim, 1.0, 10, 0),
            pretrained,
            plan,
            TransformersEngine(),
            lambda: 30,
        )
        for device in ("cuda", "cpu"):
            parts = sizes.parts("32-true", 1, device=device)
            found[offload, device] = {part.name: part for part in parts if "teacher" in part.name and part.size}
    square, wide, head, rest = 64 * 64, 64 * 100, 282 * 64, 7 * 64
    weights = 4 * (3 * (4 * square + 3 * wide) + 2 * head + rest)
    buffers = 2 * 8 * 4  # of the rotary embedding, 8 numbers each
    gone = found[True, "cuda"]
    assert gone.keys() == {"teacher's head", "teacher's visit", "pinned teacher"}
    assert gone["teacher's head"].size == 4 * head and gone["teacher's head"].phase == "update"
    visit = gone["teacher's visit"]
    assert visit.phase == "scoring" and weights + buffers < visit.size < weights + buffers + 4 * 110 * 64 * 30
    assert gone["pinned teacher"].host and gone["pinned teacher"].size == (
        3 * (4 * 4 * square + 3 * 2**15) + 2 * 2**17 + 7 * 256 + 2 * 32 + 2**15
    )
    assert {name: part.size for name, part in found[False, "cuda"].items()} == {"teacher": weights + buffers}
    assert {name: part.size for name, part in found[True, "cpu"].items()} == {"teacher": weights + buffers + 4 * head}
