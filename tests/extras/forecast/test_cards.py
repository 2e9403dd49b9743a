"""`debug=forecast device=NAME` describes a run on a card that is not here: what it chooses, why, and whether it fits."""

import re
from types import SimpleNamespace

import pytest
import torch
from conftest import compose_config
from hydra.utils import instantiate
from transformers import LlamaConfig

from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.room import Room
from grpo.extras.forecast.cards import CARDS, GB, SharedOnPaper, VLLMOnPaper, card_named, on_paper, trainer_on
from grpo.extras.forecast.imagined import FlexOnPaper, Live, is_compiled, with_all_heads
from grpo.extras.forecast.limits import host_limit, limit_of, takes_flex, to_fill
from grpo.extras.forecast.sizes import Sizes
from grpo.models import packed_attention, packing, token_scores
from grpo.system.errors import UserError
from train import train


@pytest.mark.parametrize(
    ("name", "known", "size", "capability"),
    [
        ("rtx4090", "RTX 4090", 25.3, (8, 9)),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 25.3, (8, 9)),
        ("4090", "RTX 4090", 25.3, (8, 9)),
        ("t4", "T4", 15.6, (7, 5)),
        ("a100-80gb", "A100 80GB", 84.9, (8, 0)),
        ("A100 40GB", "A100 40GB", 42.2, (8, 0)),
        ("24GB", "a GPU of 24 GB", 24, None),
        ("7.5 gb", "a GPU of 7.5 GB", 7.5, None),
    ],
)
def test_a_card_has_a_name_or_a_size(name, known, size, capability):
    card = card_named(name)
    assert (card.name, card.size, card.capability) == (known, round(size * GB), capability)


@pytest.mark.parametrize("name", ["rtx4091", "24", "0GB", "a100", ""])
def test_an_unknown_card_is_one_line_with_those_that_are_known(name):
    with pytest.raises(UserError) as error:
        card_named(name)
    assert str(error.value).startswith(f"device={name} is no card that the forecast knows: give one of t4, rtx3090, ")
    assert str(error.value).endswith("b200, or its memory, as 24GB") and "a10, l4, a100" in str(error.value)


def test_every_card_is_found_by_the_name_that_the_error_lists():
    assert [card_named(name.lower().replace(" ", "")).name for name in CARDS] == list(CARDS)


def described(toy, caplog, *words: str) -> list[str]:
    """Return the lines of a forecast."""
    caplog.set_level("INFO")
    config = compose_config(
        "model=path", f"model.path={toy}", "debug=forecast", "logger=none", "output_dir=.", "callbacks=none", *words
    )
    assert train(config) == (None, None)
    return list(caplog.messages)


@pytest.mark.slow
def test_a_run_on_a_card_that_is_not_here_is_described_with_reasons(toy, caplog):
    settings = "device=rtx4090 model.dtype=bfloat16 trainer=gpu optim.gradient_checkpointing=null".split()
    lines = described(toy, caplog, *settings)
    text = "\n".join(lines)
    assert "RTX 4090: 25.3 GB, compute capability 8.9" in lines
    assert "trainer.precision=bf16-mixed: the card has bfloat16, which needs compute capability 8.0" in lines
    assert any(line.startswith("attention: FlexAttention, head: compiled") for line in lines)
    [line] = [line for line in lines if line.startswith("optim.max_tokens_per_microbatch=8192 optim.gradient_ch")]
    assert re.fullmatch(r".*=false: an update takes [\d.]+ (GB|MB) of 24\.54 GB", line)
    [line] = [line for line in lines if line.startswith("engine: ")]
    assert "also during an update, which leaves 2" in line
    [line] = [line for line in lines if line.startswith("memory: ")]
    assert "of 24.54 GB on RTX 4090: so far 0.00 MB, weights " in line and ", engine 2." in line
    assert lines[-1] == "RTX 4090: the run fits" and "may not fit" not in text and "this CPU" not in text


@pytest.mark.slow
def test_a_card_without_bfloat16_and_a_small_one(toy, caplog):
    lines = described(toy, caplog, "device=t4", "engine=transformers", "optim.offload=true")
    assert "trainer.precision=16-mixed: the card lacks bfloat16, which needs compute capability 8.0" in lines
    assert any(
        line.startswith("attention: sdpa, since FlexAttention's kernels want more shared memory") for line in lines
    )
    assert any(re.search("of unknown on cpu: so far 0.00 MB, (masters|optimizer)", line) for line in lines)
    assert lines[-1] == "T4: the run fits"
    caplog.clear()
    lines = described(
        toy, caplog, "device=0.61GB", "optim.gradient_checkpointing=null", "optim.max_tokens_per_microbatch=99"
    )
    assert any("gradient_checkpointing=true: an update takes " in line and "; not 0." in line for line in lines)
    assert lines[-1] == "a GPU of 0.61 GB: the run does not fit" and "may not fit; what helps most" in caplog.text


def test_a_device_is_for_a_forecast_alone(toy):
    words = "model=path", f"model.path={toy}", "output_dir=."
    for settings, line in (
        (
            ("device=rtx4090",),
            "device=rtx4090 describes a card for a forecast: add debug=forecast, or leave device out",
        ),
        (("device=rtx1", "debug=forecast"), "device=rtx1 is no card that the forecast knows: give one of t4"),
    ):
        with pytest.raises(UserError, match=line):
            train(compose_config(*words, *settings))


def test_the_shards_of_several_cards_are_those_of_the_strategy():
    """The policy does not fit a card alone, so that strategy=auto shares it out; `needs` is asked for a GPU's bytes."""
    from grpo.extras.devices.strategy import Strategy

    asked = []
    for needed, sharded in ((23 * GB, False), (24 * GB, True)):  # of 0.97 x 24 = 23.28

        def needs(*given, needed=needed):
            asked.append(given)
            return needed

        trainer = trainer_on("24GB", devices=2, num_nodes=2, strategy=Strategy(), needs=needs)
        assert hasattr(trainer.strategy, "share") == sharded and trainer.world_size == 4 and trainer.num_devices == 2
        assert trainer.precision == ("32-true" if sharded else "bf16-mixed")
    assert asked == [("bf16-mixed", 4, "cuda")] * 2
    assert trainer_on("24GB", precision="16-true").precision == "32-true"


def test_vllm_on_paper_takes_what_vllm_would(caplog):
    room = Room(24 * GB, 22 * GB, 21 * GB, 14 * GB, 3 * GB, GB // 10, 40 * GB)  # an update leaves 1
    assert VLLMOnPaper().fit(room) == {"rollout": 8 * GB}
    assert VLLMOnPaper(sleeps=False).fit(room) == {"": GB} and "the run leaves vLLM 4% of the GPU" in caplog.text
    assert VLLMOnPaper(share=0.5).fit(room) == {"": 12 * GB}
    # weights of 3 and 2 to compute with beside a cache of a size that is given
    assert VLLMOnPaper(cache=4 * GB).fit(room) == {"": 9 * GB}
    assert VLLMOnPaper(True, cache=4 * GB, share=0.9).fit(room) == {"rollout": 9 * GB}
    assert SharedOnPaper().fit(room) == {"": 3 * GB, "rollout": 5 * GB}  # its weights are the policy's and stay


def test_arguments_of_vllm_are_those_of_the_run_on_paper():
    words = "engine=vllm device=24GB debug=forecast engine.args.kv_cache_memory_bytes=4000000000 engine.sleeps=true"
    on_paper(config := compose_config("output_dir=.", *words.split()))
    engine = instantiate(config.engine)
    assert isinstance(engine, VLLMOnPaper) and engine.sleeps
    assert engine.fit(Room(24 * GB, 22 * GB, 21 * GB, 14 * GB, 3 * GB, GB // 10, 40 * GB)) == {"rollout": 9 * GB}


def sizes_of(folder, *words: str, vocabulary: int = 100_000, **more: int) -> Sizes:
    """Return the sizes of a run on a model of which only the configuration is there, with prompts of 30 tokens."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"vocab_size": vocabulary} | more
    config = LlamaConfig(**shape, architectures=["LlamaForCausalLM"], tie_word_embeddings=True)
    config.save_pretrained(folder)
    config = compose_config("model=path", f"model.path={folder}", "output_dir=.", *words)
    plan, algorithm, optim, pretrained = map(instantiate, (config.rollout, config.algo, config.optim, config.model))
    module = instantiate(config.module)
    make = lambda model: module(model, algorithm, optim, 1.0, 10, 0)  # noqa: E731
    return Sizes(make, pretrained, plan, TransformersEngine(), lambda: 30)


@pytest.mark.parametrize(("failed", "size"), [(False, 2 + 2), (True, 2 + 4 * 4)])
def test_the_head_of_a_gpu_writes_logits_and_their_gradient_alone(tmp_path, monkeypatch, failed, size):
    """In bfloat16, two bytes each for a token and an entry. Without a compiler there are four tensors in float32 beside them:
    logits, logarithms, probabilities and their product."""
    monkeypatch.setattr(token_scores.backward, "failed", failed)
    sizes = sizes_of(tmp_path, "rollout.prompts=2", "rollout.group_size=2", "max_tokens=20")
    parts = {part.name: part.size for part in sizes.parts("bf16-mixed", 1, device="cuda")}
    assert parts["logits"] == size * 4 * 20 * 100_000


WORDS = "rollout.prompts=16 rollout.group_size=8 max_tokens=50 optim.layout=packed optim.max_tokens_per_microbatch="


def test_the_default_of_a_gpu_is_the_forecasts_on_a_machine_without_one(tmp_path):
    sizes = sizes_of(tmp_path, *f"{WORDS}null".split(), vocabulary=100)
    for device, size in (("cuda", 8192), ("cpu", 2048)):
        assert sizes.outlined(sizes.pretrained, device).optim.max_tokens_per_microbatch == size


@pytest.mark.slow
def test_the_default_of_a_gpu_is_counted_on_a_machine_without_one(tmp_path):
    """Rows of 64 tokens fill both: 128 go through the model at once on a GPU, and 32 on a CPU."""
    sizes, given = (sizes_of(tmp_path, *f"{WORDS}{size}".split(), vocabulary=100) for size in ("null", 8192))
    gpu, cpu, explicit = (
        {part.name: part.size for part in one.parts("32-true", 1, device=device)}
        for one, device in ((sizes, "cuda"), (sizes, "cpu"), (given, "cuda"))
    )
    assert gpu == explicit
    assert gpu["activations"] / cpu["activations"] == pytest.approx(128 / 32, rel=0.1)


def test_the_card_gives_the_precision_and_the_limit(caplog):
    caplog.set_level("INFO")
    assert trainer_on("t4").precision == "16-mixed" and "sdpa, since FlexAttention" in caplog.text
    assert trainer_on("l4").precision == "bf16-mixed" and trainer_on("l4", precision="32-true").precision == "32-true"
    assert limit_of(trainer_on("24GB")) == to_fill(None, trainer_on("24GB")) == round(0.97 * 24 * GB)
    assert host_limit(trainer_on("24GB")) == (0, None)


def test_attention_is_counted_as_a_gpu_computes_it():
    """6 tokens, 4 heads of 8 numbers, 2 heads of keys: FlexAttention writes the output, and a float32 number for each query. The
    other repeats keys and values for all heads, if there is a mask."""
    query, key, value = (torch.zeros(1, heads, 6, 8, dtype=torch.bfloat16) for heads in (4, 2, 2))
    with Live([query, key, value]) as live:
        out = FlexOnPaper().attend(None, query, key, value)
        assert out.shape == query.shape and live.most.total() == 2 * 4 * 6 * 8 + 4 * 4 * 6
    mask, found = torch.ones(6, 6, dtype=torch.bool), {}
    for name, function in (("few", packed_attention.sdpa), ("all", with_all_heads)):
        for given in (mask, None):
            with Live([query, key, value, mask]) as live:
                function(query, key, value, given, None)
            found[name, given is None] = live.most.total()
    assert found["all", False] - found["few", False] >= 2 * 2 * 4 * 6 * 8 and found["all", True] == found["few", True]


@pytest.mark.parametrize("card", ["24GB", "l4", "t4"])
def test_attention_without_flex_takes_more(tmp_path, monkeypatch, card):
    """On a T4, or after FlexAttention has failed."""
    kernel = SimpleNamespace(failed="")
    monkeypatch.setattr(packing, "ON_GPU", [kernel])
    trainer = trainer_on(card)
    assert takes_flex(trainer) == (card != "t4")
    kernel.failed = "too many graphs"
    assert not takes_flex(trainer)
    if card == "l4":
        heads = {"num_attention_heads": 8, "num_key_value_heads": 1}
        sizes = sizes_of(
            tmp_path, "rollout.prompts=2", "rollout.group_size=8", "max_tokens=20", vocabulary=100, **heads
        )
        without = {part.name: part.size for part in sizes.of_trainer(trainer)}["activations"]
        kernel.failed = ""
        assert {part.name: part.size for part in sizes.of_trainer(trainer)}["activations"] < without


def test_the_head_is_compiled_on_a_gpu_unless_that_is_known_to_fail(monkeypatch):
    assert is_compiled("cuda") and not is_compiled("cpu")
    monkeypatch.setattr(token_scores.forward, "failed", True)
    assert not is_compiled("cuda")
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for found in (None, "triton"):
        monkeypatch.setattr("grpo.extras.forecast.imagined.find_spec", lambda name, found=found: found)
        assert is_compiled("cuda") == bool(found)
