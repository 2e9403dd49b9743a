"""Memory: the peak of each phase of a run, and the forecast compared with real tensors, real optimizers and a real run."""

import csv
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import compose_config
from helpers.foreseen import LINUX, Run
from helpers.learning import OPTIONS
from helpers.models import FAMILIES, SHAPE, model_folder, model_of
from helpers.project import ROOT
from helpers.runs import VARIED, learned, state
from helpers.slots import Varied
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig, MixtralConfig

from grpo.engines.builtin import llama
from grpo.engines.builtin.engine import TransformersEngine
from grpo.extras.forecast.forecast import forecast
from grpo.extras.forecast.imagined import (
    Live,
    after_a_step,
    bytes_of,
    fullest,
    in_the_cache,
    minibatch,
    optimizer_step_bytes,
)
from grpo.extras.forecast.parts import Part
from grpo.extras.forecast.sizes import Sizes, packed
from grpo.models import token_scores
from grpo.models.gradient_checkpointing import recomputing
from grpo.models.logprobs import completion_logprobs
from grpo.models.packing import microbatches
from grpo.models.pretrained import Pretrained
from grpo.system import memory
from grpo.system.memory import storage_of
from train import train

CPU = torch.device("cpu")
MB = 1 << 20


@LINUX
def test_the_peak_begins_anew():
    memory.reset_peak(CPU)
    before = memory.held(CPU)
    x = torch.ones(200 * MB // 4)
    del x
    assert memory.peak(CPU) > before + 190 * MB
    memory.reset_peak(CPU)
    assert memory.peak(CPU) < before + 20 * MB


@LINUX
def test_what_is_freed_goes_back_to_the_system():
    """In a process without what other tests hold. Small tensors stay between the freed ones, as results do in a forward pass."""
    script = f"""
import torch
from grpo.system import memory

memory.settle()
held = [memory.held(torch.device("cpu"))]
kept = []
for size in ({6 * MB}, {MB}):
    freed = []
    for _ in range({200 * MB} // size):
        freed.append(torch.ones(size // 4))
        kept.append(torch.ones(1000))
    held.append(memory.held(torch.device("cpu")))
    del freed[:]
    if size == {MB}:
        memory.give_back()
    held.append(memory.held(torch.device("cpu")))
print(*held)
"""
    child = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    before, *held = map(int, child.stdout.split())
    large, after_large, small, after_small = ((size - before) / MB for size in held)
    assert min(large, small) > 190 and max(after_large, after_small) < 30


@LINUX
def test_the_padded_layout_copies_no_head(tmp_path):
    """A frozen head of 26 MB in bfloat16: it was copied for each of 16 rows."""
    model = AutoModelForCausalLM.from_config(large(100_000), dtype=torch.bfloat16).requires_grad_(False)
    batch = minibatch(Run("nowhere", "rollout.prompts=4", "rollout.group_size=4", "max_tokens=1").plan, 8, 16)
    completion_logprobs(model, batch, 1.0)
    memory.reset_peak(CPU)
    before = memory.held(CPU)
    completion_logprobs(model, batch, 1.0)
    assert memory.peak(CPU) < before + 100 * MB  # logits in float32 take 6 MB


def test_a_container_has_what_its_limit_leaves(tmp_path, monkeypatch):
    assert 0 < memory.free(CPU) < psutil.virtual_memory().total
    monkeypatch.setattr(memory, "CGROUP_LIMITS", [str(tmp_path / "memory.max"), str(tmp_path / "nothing")])
    (tmp_path / "memory.max").write_text(f"{memory.held(CPU) + 64 * MB}\n")
    assert 32 * MB < memory.free(CPU) < 96 * MB
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free(CPU) > 96 * MB


def large(vocabulary: int, **more) -> LlamaConfig:
    """Return a model whose head is most of it."""
    return LlamaConfig(**SHAPE | {"vocab_size": vocabulary, "eos_token_id": None, "bos_token_id": None} | more)


class Big(Varied):
    """A reward that briefly takes 300 MB."""

    def score(self, example, trajectory):
        x = torch.ones(300 * MB // 4)
        del x
        return super().score(example, trajectory)


@LINUX
@pytest.mark.slow
def test_phases_are_told_apart(smoke, tmp_path):
    learned(smoke("eval.every=0"), VARIED | {"_target_": "test_forecast.Big"})
    with open(tmp_path / "metrics.csv") as file:
        for row in csv.DictReader(file):
            rollout, update = float(row["memory/rollout"]), float(row["memory/update"])
            assert 50 * MB < update < rollout - 250 * MB < psutil.virtual_memory().total


# -- the forecast

SIZES = {"small": (["rollout.prompts=2", "rollout.group_size=2", "max_tokens=20"], 30),
         "large": (["rollout.prompts=4", "rollout.group_size=4", "max_tokens=60"], 100)}  # fmt: skip


SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    return {name: model_folder(name, tmp_path_factory.mktemp(name)) for name in ("llama_tied", "qwen3")}


def really(run: Run, prompt_tokens: int) -> tuple[int, int]:
    """Run all rows at once with real tensors. Returns the peak bytes, and the bytes that autograd saved for the backward pass."""
    module = run.module(run.pretrained.model())
    policy, optim = module.policy, module.optim
    count = run.plan.prompts * run.plan.group_size
    batch = minibatch(run.plan, prompt_tokens, count).rows(torch.arange(count))
    trained = [p for p in policy.parameters() if p.requires_grad]
    for p in trained:
        p.grad = torch.zeros_like(p)
    there = [*policy.parameters(), *policy.buffers(), *(p.grad for p in trained)]
    known, kept = set(map(storage_of, there)), []
    live = Live(there, policy.config.get_text_config().vocab_size)
    with live, recomputing(policy, optim.gradient_checkpointing):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            logprobs, entropy = completion_logprobs(policy, batch, 1.0, False, optim.layout)
        saved = bytes_of(x for x in kept if storage_of(x) not in known)
        kept.clear()
        (logprobs + entropy).sum().backward()
    return live.most.total(), saved


@pytest.mark.extras("float32_head")
def test_logits_of_a_head_in_float32_are_counted(folders):
    """With real tensors to the byte. There is no second matrix in the weights."""
    found = {}
    for kind in ("null", "float32"):
        words = ["model.dtype=bfloat16", f"model.head_dtype={kind}", "optim.layout=padded", *SIZES["small"][0]]
        run = Run(folders["llama_tied"], *words, "optim.max_tokens_per_microbatch=100000")
        found[kind] = run.forecast(30)
        most, _ = really(run, 30)
        found[kind]["pass"] = found[kind]["activations"] + found[kind]["logits"]
        assert found[kind]["pass"] == most
    assert found["float32"]["pass"] > found["null"]["pass"]
    assert found["float32"]["weights"] == found["null"]["weights"]


@pytest.mark.parametrize("mode", [nullcontext, FakeTensorMode])
def test_the_gradient_of_logits_is_computed_in_pieces_on_a_cpu(monkeypatch, mode):
    """It takes 4 of 9 rows of 500 at a time: the gradient of all, and of 4 their logarithms, probabilities, the product of these,
    and a factor for each. Tensors without memory take as much as real ones."""
    monkeypatch.setattr(token_scores, "CACHED", 4 * 500)
    with mode():
        logits, numbers, targets = torch.zeros(9, 500), torch.zeros(9), torch.zeros(9, dtype=torch.int64)
        with Live([logits, numbers, targets]) as live:
            token_scores.gradient_of_logits(logits, targets, 1.0, (numbers, numbers, numbers), numbers, None)
    assert live.most.total() == 4 * (9 * 500 + 3 * 4 * 500 + 4)


@pytest.mark.parametrize(
    ("family", "size", "adapter", "layout"),
    [
        ("llama_tied", "small", "none", "shared_prompt"),
        ("llama_tied", "small", "lora", "padded"),
        pytest.param("llama_tied", "large", "lora", "shared_prompt", marks=SLOW),
        pytest.param("qwen3", "small", "lora", "shared_prompt", marks=SLOW),
        pytest.param("qwen3", "large", "none", "padded", marks=SLOW),
        pytest.param("qwen3", "large", "none", "shared_prompt", marks=SLOW),
    ],
)
def test_a_microbatch_takes_what_was_foreseen(folders, family, size, adapter, layout):
    """The forecast is exact to the byte. Most of it is saved by autograd; with recomputed layers, the rest is one layer's."""
    settings, prompt = SIZES[size]
    settings = [*settings, f"adapter={adapter}", f"optim.layout={layout}", "optim.max_tokens_per_microbatch=100000"]
    saved = {}
    for again in (False, True):
        run = Run(folders[family], *settings, f"optim.gradient_checkpointing={again}")
        foreseen = run.forecast(prompt)
        foreseen = foreseen["activations"] + foreseen["logits"]
        most, saved[again] = really(run, prompt)
        assert foreseen == most
        layers = SHAPE["num_hidden_layers"]
        assert saved[again] < foreseen < 1.5 * (saved[True] + saved[False] / layers if again else saved[False])


POLICIES = ("model.dtype=float32", "model.dtype=bfloat16", "adapter=lora", "optim.offload=true")
COMBINED = [
    pytest.param(*option.values, policy, marks=(*option.marks, *(() if option.values == ("adamw",) else (SLOW,))))
    for option in OPTIONS
    for policy in (POLICIES if option.values == ("adamw",) else ("model.dtype=bfloat16", "adapter=lora"))
]


@pytest.mark.parametrize(("option", "policy"), COMBINED)
def test_weights_masters_gradients_and_optimizer_to_the_byte(toy, option, policy):
    run = Run(str(toy), f"optim={option}", policy)
    foreseen = run.forecast(10)
    module = run.module(run.pretrained.model())
    [optimizer], _ = module.configure_optimizers()
    logprobs, _ = completion_logprobs(module.policy, minibatch(run.plan, 10, 4), 1.0)
    logprobs.sum().backward()
    learned = [p for group in optimizer.param_groups for p in group["params"]]
    assert foreseen["gradients"] == bytes_of(p.grad for p in learned) > 0
    assert foreseen["optimizer"] == after_a_step(optimizer)
    own = [*module.policy.parameters(), *module.policy.buffers()]
    assert foreseen["weights"] == bytes_of(own)
    assert foreseen["masters"] == bytes_of(p for p in learned if not any(p is q for q in own))
    assert bool(foreseen["masters"]) == (policy in ("model.dtype=bfloat16", "optim.offload=true"))


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
@pytest.mark.slow
def test_a_quantized_base_to_the_byte(toy, bits):
    settings = [*SIZES["small"][0], "adapter=lora", "optim.max_tokens_per_microbatch=100000"]
    run, plain = Run(str(toy), *settings, f"model.quantization={bits}"), Run(str(toy), *settings)
    foreseen = run.forecast(30)
    policy = run.module(run.pretrained.model()).policy
    assert foreseen["weights"] == bytes_of([*policy.parameters(), *policy.buffers()])
    assert foreseen["weights"] < 0.5 * plain.forecast(30)["weights"]
    assert foreseen["activations"] + foreseen["logits"] == really(run, 30)[0]


def test_temporary_tensors_of_a_step():
    """AdamW in plain torch makes the root of the second moment, and divides it into another tensor. The fused one makes none."""
    for fused, expected in ((False, 2 * 4 * 1000), (True, 0)):
        p = torch.nn.Parameter(torch.ones(1000))
        p.grad = torch.ones(1000)
        optimizer = torch.optim.AdamW([p], foreach=False, fused=fused)
        assert after_a_step(optimizer) == 2 * 4 * 1000 + 4
        assert optimizer_step_bytes(optimizer, [p, p.grad]) == expected


@pytest.mark.slow
def test_a_step_counts_if_it_takes_more_than_a_microbatch(toy):
    short = ["rollout.prompts=2", "rollout.group_size=2", "max_tokens=2"]
    plain, adafactor = (Run(str(toy), f"optim={name}", *short).forecast(3) for name in ("adamw", "adafactor"))
    assert plain["step"] == 0 < adafactor["step"]
    away = Run(str(toy), "optim=adafactor", "optim.offload=true", *short).forecast(3)  # it is on the CPU then
    assert away["step"] == adafactor["step"] + adafactor["activations"] + adafactor["logits"]


@pytest.mark.slow
def test_a_reference_is_a_copy_or_the_adapter_switched_off(toy):
    for settings, expected in (
        (["model.dtype=bfloat16"], "weights"),
        (["adapter=lora"], None),
        (["algo.kl.sync_every=5", "model.dtype=bfloat16"], "masters"),
    ):
        foreseen = Run(str(toy), "algo/kl=loss", *settings).forecast(10)
        wanted = 0 if expected is None else foreseen[expected]
        assert foreseen["reference"] == pytest.approx(wanted, rel=0.01)  # except buffers


@pytest.mark.slow
def test_a_critic_takes_its_weights_and_what_they_entail(toy):
    """A head has a weight for each number of a state, and one more. Its own model is another decoder, with activations."""
    foreseen = {critic: Run(str(toy), "algo=ppo", f"critic={critic}").forecast(10) for critic in ("head", "model")}
    plain, decoder = Run(str(toy)).forecast(10), Pretrained(str(toy)).model().get_decoder()
    head = 4 * (decoder.config.hidden_size + 1)
    for critic, below in (("head", 0), ("model", bytes_of([*decoder.parameters(), *decoder.buffers()]))):
        assert foreseen[critic]["weights"] - plain["weights"] == head + below
        learned = head + (below and bytes_of(decoder.parameters()))
        assert foreseen[critic]["gradients"] - plain["gradients"] == learned
        assert foreseen[critic]["optimizer"] - plain["optimizer"] == pytest.approx(2 * learned, rel=0.01, abs=20)
    assert foreseen["model"]["activations"] > 1.5 * plain["activations"] >= 1.4 * foreseen["head"]["activations"]


@pytest.mark.parametrize(
    ("settings", "copies"), [("rollout.ahead=1", 1), ("rollout.ahead=3", 4), ("rollout.ahead=3 rollout.order=ready", 0)]
)
def test_versions_that_wait_for_their_rollout_are_copies(toy, settings, copies):
    foreseen = Run(str(toy), *settings.split()).forecast(10)
    assert foreseen.get("copies", 0) == copies * foreseen["gradients"]


def test_an_engine_that_samples_during_an_update_is_promised_no_memory_by_sleep(toy):
    """An update holds 9 of 10 GB, and vLLM computes with 2 GB beside its weights."""
    run = Run(str(toy))
    for ahead, sleeps in ((0, True), (1, False)):
        sizes = Sizes(run.module, run.pretrained, replace(run.plan, ahead=ahead), None, lambda: 10)
        room = sizes.room([Part("weights", 9 * 10**9, phase="update")], total=10**10, usable=10**10, ranks=1)
        share, asleep = room.share(None)
        assert asleep == sleeps and (sleeps or share == pytest.approx(0.1))


@pytest.mark.parametrize("divergence", ["sampled", pytest.param("reverse", marks=SLOW)])
def test_a_teacher_takes_its_weights_and_its_pass(toy, tmp_path, divergence):
    """A teacher of twice the depth that reads a microbatch, and whole distributions of its tokens, to a hundredth."""
    folder, vocabulary = tmp_path / "teacher", Pretrained(str(toy)).config().vocab_size
    AutoModelForCausalLM.from_config(large(vocabulary, num_hidden_layers=4)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(toy).save_pretrained(folder)
    settings = ["rollout.prompts=2", "rollout.group_size=2", "max_tokens=20", "optim.max_tokens_per_microbatch=100000"]
    run = Run(str(toy), "algo=opd", f"teacher.model.path={folder}", f"algo.teacher.divergence={divergence}", *settings)
    foreseen = run.forecast(30)
    module = run.module(run.pretrained.model())
    lessons = module.parts["teacher"]
    assert foreseen["sampling"] > 0
    assert foreseen["teacher"] == bytes_of(lessons.teacher.loaded.parameters()) + bytes_of(
        lessons.teacher.loaded.buffers()
    )
    batch = minibatch(run.plan, 30, 4)
    batch = lessons.reads = replace(batch, row=torch.arange(4), teaching=torch.ones(4, 20))
    for p in module.policy.parameters():
        p.grad = torch.zeros_like(p)
    lessons.logprobs(batch)  # and layouts are chosen
    held = [*module.policy.parameters(), *module.policy.buffers(), *lessons.own()]
    with Live([*held, *(p.grad for p in module.policy.parameters())], vocabulary) as live:
        if divergence == "sampled":
            lessons.logprobs(batch)
        logprobs, entropy = module.forward_pass(module.policy, batch, False)
        parts = [logprobs, entropy] if divergence == "sampled" else [lessons.read]
        sum(part.sum() for part in parts).backward()
    assert foreseen["activations"] + foreseen["logits"] == pytest.approx(live.most.total(), rel=0.01)


@pytest.mark.slow
def test_arithmetic_in_16_bits_and_several_devices(toy):
    settings, prompt = SIZES["large"]
    run = Run(str(toy), *settings)
    full, mixed = run.forecast(prompt), run.forecast(prompt, precision="bf16-mixed")
    assert mixed["activations"] < 0.8 * full["activations"] and mixed["cache"] == full["cache"] / 2
    two = run.forecast(prompt, devices=2)
    assert two["cache"] == full["cache"] / 2 and two["buckets"] == two["gradients"] == full["gradients"]


@pytest.mark.slow
def test_shards_compute_in_16_bits_without_a_copy_of_all_weights(toy):
    """Under autocast each weight has a second copy, but layers of shards are gathered in 16 bits."""
    shards = {"devices": 2, "sharded": True}
    mixed = Run(str(toy)).forecast(10, precision="bf16-mixed", **shards)
    low = Run(str(toy), "model.dtype=bfloat16").forecast(10, **shards)
    for name in ("activations", "logits", "gathered", "sampling", "cache", "whole policy", "gradients", "optimizer"):
        assert mixed[name] == low[name] > 0, name
    assert mixed["weights"] == low["weights"]  # the shards are float32
    assert mixed["activations"] < Run(str(toy)).forecast(10, precision="bf16-mixed", devices=2)["activations"]


def test_more_tokens_at_once_take_more(toy):
    settings, prompt = SIZES["large"]
    all_at_once, one = (
        Run(str(toy), *settings, f"optim.max_tokens_per_microbatch={tokens}", "optim.layout=packed").forecast(prompt)
        for tokens in (16 * 160, 160)
    )
    assert 10 < all_at_once["activations"] / one["activations"] < 17


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache_is_transformers(family):
    make, more = FAMILIES[family]
    config = make(**SHAPE | more, vocab_size=97)
    model = AutoModelForCausalLM.from_config(config).eval()
    plan = Run("nowhere", "rollout.prompts=2", "rollout.group_size=2", "max_tokens=5").plan
    cache = DynamicCache()
    with torch.no_grad():
        model(torch.zeros(4, 12, dtype=torch.int64), past_key_values=cache, use_cache=True)
    expected = bytes_of(x for layer in cache.layers for x in (layer.keys, layer.values))
    foreseen = partial(in_the_cache, config, torch.float32)
    assert foreseen(replace(plan, prompts=4, group_size=1), 7, 1000) == expected  # 4 x (7 + 5) tokens
    assert foreseen(plan, 7, 1000) == expected * (2 * 7 + 4 * 5) / 48
    assert foreseen(plan, 7, 12) == expected / 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mixture_takes_what_was_foreseen(tmp_path, dtype, monkeypatch):
    """The forecast has no numbers, so it does not know how many tokens an expert gets: the experts' rows are counted together."""
    torch.manual_seed(0)
    config = MixtralConfig(**SHAPE | {"vocab_size": 97, "num_local_experts": 4})
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(tmp_path)
    run = Run(str(tmp_path), *SIZES["small"][0], f"model.dtype={dtype}", "optim.layout=padded")
    foreseen = run.forecast(30)
    monkeypatch.setattr("grpo.extras.forecast.imagined.by_groups", torch.ops.aten._grouped_mm.default)
    most, _ = really(run, 30)
    assert foreseen["activations"] + foreseen["logits"] == most > 0
    assert min(foreseen["weights"], foreseen["gradients"]) > MB and foreseen["sampling"] > 0


def test_the_memory_of_a_server_is_elsewhere(toy):
    assert Run(str(toy)).forecast(10, engine=object())["engine"] is None


def test_asking_without_training(smoke, toy, tmp_path, caplog, monkeypatch):
    """No weights are read: the folder has none."""
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in toy.iterdir():
        if file.suffix != ".safetensors":
            (bare / file.name).write_bytes(file.read_bytes())
    caplog.set_level("INFO")
    settings = smoke(f"model.path={bare}", "forecast=only", "optim=sgd")
    assert train(compose_config(*settings)) == (None, None)
    [line] = [line for line in caplog.messages if line.startswith("memory:")]
    assert "in an update" in line and "of " in line and "on cpu: so far" in line
    assert all(f", {name} " in line for name in ("weights", "gradients", "activations", "cache"))
    assert "optimizer" not in line and "may not fit" not in caplog.text
    assert not (tmp_path / "config.yaml").exists()
    monkeypatch.setattr(memory, "free", lambda device: MB)
    train(compose_config(*settings))
    remedies = "optim.gradient_checkpointing=true or a lower optim.max_tokens_per_microbatch, model.dtype=bfloat16, adapter=lora"
    assert f"memory: the update may not fit; what helps most: {remedies}\n" in caplog.text


def test_two_memories(toy, caplog, monkeypatch):
    """On a pretended GPU: offloaded parts are compared with the CPU's memory, the others with the GPU's."""
    there = {"cuda": 10**9, "cpu": 10**6}
    monkeypatch.setattr(memory, "held", lambda device: 0)
    monkeypatch.setattr(memory, "free", lambda device: there[device.type])
    run = Run(str(toy), "optim.offload=true", "model.dtype=bfloat16")
    strategy = SimpleNamespace(root_device=torch.device("cuda", 0))
    trainer = SimpleNamespace(strategy=strategy, precision="32-true", num_devices=2, world_size=2)
    caplog.set_level("INFO")
    forecast(Sizes(run.module, run.pretrained, run.plan, TransformersEngine(), lambda: 10), trainer)
    gpu, cpu, update, rollout = caplog.messages
    assert "of 0.97 GB on cuda:0: so far 0.00 MB, weights" in gpu and "activations" in gpu and "optimizer" not in gpu
    assert "of 0.50 MB on cpu: so far 0.00 MB, masters" in cpu and "gradients" in cpu and "activations" not in cpu
    assert "the update may not fit; what helps most: optim=adamw_8bit, adapter=lora" in update
    assert "the rollout may not fit; what helps most: optim=adamw_8bit, adapter=lora" in rollout


@pytest.mark.slow
def test_a_forecast_changes_nothing(smoke, tmp_path):
    """LoRA's matrices are random, and a forecast draws some too, which must not change the run."""
    for wanted in (True, False):
        folder = tmp_path / str(wanted)
        short = ("rollout.num_rollouts=1", "eval.every=0", "callbacks=[checkpoint]")
        learned(smoke("adapter=lora", *short, f"forecast={wanted}", f"output_dir={folder}"))
    one, other = (state(tmp_path / name)["state_dict"] for name in ("True", "False"))
    assert all(torch.equal(one[name], other[name]) for name in one | other)


REAL = [
    pytest.param({}, ["optim.layout=padded", "rollout.group_size=8", "max_tokens=4"], marks=SLOW, id="small"),
    pytest.param({}, ["rollout.group_size=64", "max_tokens=4"], marks=SLOW, id="many_rows"),
    pytest.param(
        {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12},
        ["optim.gradient_checkpointing=true", "rollout.group_size=8", "max_tokens=32"],
        marks=SLOW,
        id="larger",
    ),
    pytest.param({}, ["algo=gkd", "rollout.group_size=8", "max_tokens=4"], marks=SLOW, id="teacher"),
]


@LINUX
@pytest.mark.parametrize(("shape", "settings"), REAL)
def test_a_run_takes_what_was_foreseen(smoke, toy, tmp_path, caplog, shape, settings):
    """The peak of each phase is at most 15 % above the forecast, and the forecast at most 30 % above the peak."""
    folder = tmp_path / "model"
    AutoModelForCausalLM.from_config(large(100_000, **shape)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(toy).save_pretrained(folder)
    bfloat16 = ["model.dtype=bfloat16", "adapter=lora", "forecast=true"]
    teacher = [f"teacher.model.path={folder}"] if "algo=gkd" in settings else []
    config = compose_config(*smoke("eval.every=0", f"model.path={folder}", *bfloat16, *settings, *teacher))
    config.task = VARIED
    caplog.set_level("INFO")
    train(config)
    [line] = [line for line in caplog.messages if " in an update" in line]
    foreseen = {phase: float(size) * 1e9 for size, phase in re.findall(r"([\d.]+) GB in an? (update|rollout)", line)}
    with open(tmp_path / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    for phase, expected in foreseen.items():
        most = max(float(row[f"memory/{phase}"]) for row in rows)
        assert expected / 1.3 < most < 1.15 * expected, f"{phase}: {most / 1e9:.2f} GB, {line}"
    assert foreseen.keys() == {"update", "rollout"}


@pytest.mark.parametrize(
    ("layout", "most", "groups", "width"),
    [
        ("shared_prompt", 8192, 20, 480),  # two groups of 256 + 8 x 480; one of 256 + 8 x 512 would be 4352
        ("shared_prompt", 2048, 20, 448),  # 256 + 4 x 448; 256 + 3 x 512 would be 1792
        ("shared_prompt", 4352, 20, 512),
        ("shared_prompt", 100_000, 20, 512),  # all rows
        ("shared_prompt", 8192, 1, 512),
        ("shared_prompt", 700, 20, 512),  # a row of 768 is longer than the limit, and alone
        ("packed", 8192, 20, 256),  # 16 rows of 512
        ("padded", 768 * 3, 20, 512),
    ],
)
def test_the_fullest_microbatch_may_have_shorter_answers(layout, most, groups, width):
    """Prompts of 256 tokens, each with 8 answers of at most 512."""
    run = Run("nowhere", "rollout.group_size=8", "max_tokens=512")
    assert fullest(run.plan, 256, 8 * groups, layout, most) == width
    tokens = {}
    for each in (width, 512):
        batch = minibatch(replace(run.plan, sampling=replace(run.plan.sampling, max_tokens=each)), 256, 8 * groups)
        batch = batch.rows(microbatches(batch, layout, most)[0])
        prompts = batch.ids[:, 0].unique().numel() if layout == "shared_prompt" else len(batch)
        tokens[each] = 256 * prompts + each * len(batch)
    assert tokens[512] <= tokens[width] and (tokens[width] <= most or width == 512)


def test_a_large_llama_on_a_cpu_is_sampled_from_copies_of_its_matrices(monkeypatch, folders):
    """Two layers of 128 x (128 + 64 + 64 + 128) and 3 x 128 x 256 numbers, and a head of 97 x 128, with 4 bytes each."""
    assert packed(model_of("llama")) == packed(model_of("qwen3")) == 0
    monkeypatch.setattr(llama, "SMALL", 0)
    assert packed(model_of("llama")) == 4 * (2 * (128 * 384 + 3 * 128 * 256) + 97 * 128)
    assert packed(model_of("qwen3")) == 0
    run = Run(folders["llama_tied"], *SIZES["small"][0])
    assert run.forecast(30)["packed matrices"] == packed(run.pretrained.model()) > 4 * 2 * 128 * 384
    assert run.forecast(30, device="cuda")["packed matrices"] == 0
