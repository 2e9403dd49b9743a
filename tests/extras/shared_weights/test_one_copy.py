"""Real vLLM on the trainer's own weights: after every step it samples from them, also with an adapter."""

import functools
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import pytest
import torch
import transformers
from helpers.in_flight import at
from helpers.models import BOUND, CONTEXT, FAMILIES, PROMPTS, disturb, gap, gap_now, model_folder, steps
from helpers.multimodal import made
from helpers.runs import learned, rows
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from grpo.engines.protocol import Sampling
from grpo.engines.room import Room
from grpo.engines.vllm.engine import VLLMEngine
from grpo.extras.quantized.quantized import quantize
from grpo.extras.shared_weights.lora import runner
from grpo.extras.shared_weights.shared import VLLMSharedEngine, bind, view_of
from grpo.extras.vllm_server.sync import adapter_tensors
from grpo.models.language import learning
from grpo.models.policy import Reference
from grpo.system.errors import UserError

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")
peft = pytest.importorskip("peft")
torch.set_num_threads(1)

ARGS = {"kv_cache_memory_bytes": 1 << 24, "max_model_len": CONTEXT}


def refused(line: str, call, *args, **kwargs) -> None:
    with pytest.raises(UserError, match=line) as told:
        call(*args, **kwargs)
    assert "\n" not in str(told.value)


# -- first in this file, since all engines use the process groups of the first engine, and closing any engine destroys them


def test_packed_experts_are_refused(tmp_path, monkeypatch):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    monkeypatch.setitem(FAMILIES, "qwen3_moe", (transformers.Qwen3MoeConfig, experts))
    folder = model_folder("qwen3_moe", tmp_path)
    engine = VLLMSharedEngine(folder, args=ARGS)
    refused("model.layers.0.mlp.experts.* in its own form", engine.load_weights, policy(folder), 0)
    engine.close()


def test_a_run_with_an_adapter_stays_in_step_when_it_is_resumed(smoke, tmp_path):
    def run(folder: str, *more: str) -> None:
        settings = f"""engine=vllm_shared adapter=lora engine.args.kv_cache_memory_bytes={1 << 26}
            engine.args.max_model_len=1024 callbacks=[checkpoint] callbacks.checkpoint.every=1
            rollout.num_rollouts=3 eval.every=0 algo.kl.coef=0.05 optim.optimizer.lr=1e-2
            output_dir={tmp_path / folder}""".split()
        (tmp_path / folder).mkdir()
        learned(smoke(*settings, *more))

    with pytest.raises(RuntimeError, match="the disk is full"):
        run("crashed", "+callbacks.crash={_target_: helpers.slots.Crash, rollout: 2}")
    run("resumed", f"ckpt_path={tmp_path / 'crashed'}", "resume.changes=allow")
    measured = [*rows(tmp_path / "crashed"), *rows(tmp_path / "resumed")]
    assert len(measured) == 3 and max(row["rollout/logprob_gap_max"] for row in measured) < 1e-4
    assert all(row["loss/grad_norm"] > 0 for row in measured)


# -- one copy


@pytest.fixture(scope="module")
def alive():
    """Every engine of this file: none may be garbage-collected before the last one has finished."""
    return []


@pytest.fixture
def shared(alive, tmp_path):
    """(family, dtype) -> an engine, and a policy of the same folder that is not loaded yet."""

    def make(family: str, dtype: torch.dtype = torch.float32, **config):
        folder = model_folder(family, tmp_path / family, dtype)
        alive.append(VLLMSharedEngine(folder, dtype=str(dtype).removeprefix("torch."), args=ARGS))
        return alive[-1], policy(folder, dtype, **config)

    return make


def policy(folder: str, dtype: torch.dtype = torch.float32, **config) -> nn.Module:
    """Return the folder's model with eager attention: other kinds leave out the caps on Gemma 2's logits."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager", **config).eval()


def memory(*models: nn.Module) -> dict[int, int]:
    """Return the distinct storages of all parameters: the start of each and its bytes."""
    storages = (p.untyped_storage() for model in models for p in model.parameters())
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def weights(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


FP32, BF16 = torch.float32, torch.bfloat16
CASES = [(family, FP32) for family in FAMILIES] + [("llama_tied", BF16), ("qwen3", BF16)]


@pytest.mark.parametrize(("family", "dtype"), CASES, ids=lambda value: str(value).removeprefix("torch."))
def test_an_optimizer_step_is_the_update(shared, family, dtype):
    engine, model = shared(family, dtype)
    disturb(model, seed=1)  # now the weights differ from the disk: the trainer's must win
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine.load_weights(model, 0)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    theirs = runner(engine._llm).get_model()
    assert engine.shared_bytes == weights(model) > 0
    assert memory(model, theirs) == memory(theirs)
    assert gap_now(engine, model) < BOUND[dtype]

    untouched, places = deepcopy(model), {name: p.data_ptr() for name, p in model.named_parameters()}
    for version, _ in enumerate(steps(model), start=1):
        assert gap_now(engine, model) < BOUND[dtype]  # at once: these prompts are too short for the cache
        engine.load_weights(model, version)
        assert engine.version == version
        assert gap_now(engine, model) < BOUND[dtype] < gap_now(engine, untouched) / 3
        assert places == {name: p.data_ptr() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def llama(alive, tmp_path_factory):
    folder = model_folder("llama", tmp_path_factory.mktemp("llama"))
    alive.append(VLLMSharedEngine(folder, args=ARGS))
    model = policy(folder)
    alive[-1].load_weights(model, 0)
    return alive[-1], model, folder


def test_what_older_weights_computed_is_forgotten(llama, monkeypatch):
    engine, model, _ = llama
    prefix = [5 + i % 90 for i in range(400)]
    prompts, sampling, seeds = [[*prefix, 50], [*prefix, 60]], Sampling(16), [1, 2]
    assert gap(model, prompts, engine.sample(prompts, sampling, seeds)) < 1e-5
    disturb(model, seed=2)
    assert gap(model, prompts, engine.sample(prompts, sampling, seeds)) > 1e-3  # new weights on an old cache
    engine.load_weights(model, 1)
    assert gap(model, prompts, engine.sample(prompts, sampling, seeds)) < 1e-5


def test_the_policy_is_still_a_policy(llama, tmp_path):
    """Copies have their own memory, files have all weights, and weights loaded in place reach the engine at once."""
    engine, model, _ = llama
    reference = Reference(model)
    assert not memory(reference.copy).keys() & memory(model).keys()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path)
    assert all(torch.equal(state[name], tensor) for name, tensor in load_file(tmp_path / "model.safetensors").items())
    torch.save(model.state_dict(), tmp_path / "state")
    assert (tmp_path / "state").stat().st_size < 1.2 * weights(model)  # q, k and v are not saved three times

    disturb(model, seed=3)
    assert gap_now(engine, model) < 1e-5 < 0.01 < gap_now(engine, reference.copy)
    model.load_state_dict(torch.load(tmp_path / "state"))
    assert gap_now(engine, model) < 1e-5 and gap_now(engine, reference.copy) < 1e-5
    model(torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
    assert all(p.grad is not None and p.grad.norm() > 0 for p in model.parameters())
    model.zero_grad()


@pytest.mark.parametrize("how", ["data", "to", "assign", "other"])
def test_a_policy_that_moved_away_is_told_by_name(llama, how):
    engine, model, _ = llama
    engine.load_weights(model, 101)
    held = {name: p.data for name, p in model.named_parameters()}
    moved, name = model, "model.embed_tokens.weight"
    if how == "data":
        name = "model.layers.1.self_attn.k_proj.weight"
        model.get_parameter(name).data = held[name].clone()
    elif how == "to":
        model.to(torch.float64).to(torch.float32)
    elif how == "assign":
        model.load_state_dict({name: tensor.clone() for name, tensor in held.items()}, assign=True)
    else:
        moved = deepcopy(model)
    for version in (101, 102):  # also if there is nothing to load
        refused(f"^the policy's {name} no longer shares vLLM's memory", engine.load_weights, moved, version)
    for name, tensor in held.items():
        model.get_parameter(name).data = tensor
    engine.load_weights(model, 102)


def test_the_cache_of_an_engine_that_sleeps_is_held_in_rollouts_only():
    """Half of a GPU of 200 GB, with weights of 30 GB, which are the policy's."""
    gb, engine = 10**9, object.__new__(VLLMSharedEngine)
    engine._fits, engine._new = False, functools.partial(dict, gpu_memory_utilization=0.5)
    room = Room(200 * gb, 200 * gb, 0, 0, 30 * gb, gb, gb)
    for engine.sleeps, held in ((True, {"": 30 * gb, "rollout": 70 * gb}), (False, {"": 100 * gb})):
        assert engine.fit(room) == held


class Memory:
    """Stands in for vLLM on a GPU, and knows only which memory it holds."""

    def __init__(self) -> None:
        self.held = {"weights", "kv_cache"}

    def sleep(self, level: int) -> None:
        self.held -= {"weights"} if level else set()

    def release_kv_cache_memory(self) -> None:
        self.held -= {"kv_cache"}

    def wake_up(self, tags: list[str]) -> None:
        self.held |= {*tags}


def test_an_engine_that_sleeps_keeps_the_weights_alone():
    engine = object.__new__(VLLMSharedEngine)
    engine._llm = Memory()
    engine._release()
    assert engine._llm.held == {"weights"}
    engine._asleep = True
    engine._wake()
    assert engine._llm.held == {"weights", "kv_cache"} and not engine._asleep


def test_the_memory_that_is_packed_elsewhere_stays_packed(llama, alive):
    """With two kinds of engine in one process, the layers of the copying engine keep vLLM's packed form on a CPU."""
    _, _, folder = llama
    alive.append(VLLMEngine(folder, args=ARGS))
    model = policy(folder)
    disturb(model, seed=4)
    alive[-1].load_weights(model, 0)
    assert gap_now(alive[-1], model) < 1e-5
    assert not memory(model).keys() & memory(runner(alive[-1]._llm).get_model()).keys()
    empty = [p for p in runner(alive[-1]._llm).get_model().parameters() if p.numel() == 0]
    assert empty  # vLLM leaves an empty tensor for a weight that it has packed


# -- models that cannot share one copy


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"])
def test_several_devices_are_refused(name):
    refused(f"engine.args.{name}=2", VLLMSharedEngine, "nowhere", rank=4, args={name: 2})


@pytest.fixture(scope="module")
def unbound(alive, tmp_path_factory):
    """An engine that refuses the models of the tests below, and its folder."""
    folder = model_folder("qwen2", tmp_path_factory.mktemp("qwen2"))
    alive.append(VLLMSharedEngine(folder, args=ARGS))
    return alive[-1], folder


def test_several_ranks_are_refused(tmp_path):
    for ranks in ({"devices": 2}, {"nodes": 2}):
        with pytest.raises(UserError, match=r"needs one device, not 2: .*trainer\.devices=1"):
            VLLMSharedEngine(str(tmp_path), **ranks)


def test_another_dtype_is_refused(unbound):
    engine, folder = unbound
    line = "bfloat16 in the policy and torch.float32 in vLLM.*model.dtype"
    refused(line, engine.load_weights, policy(folder, torch.bfloat16), 0)


def test_weights_that_only_one_of_the_two_has_are_refused(unbound, tmp_path):
    """Qwen 3 has norms where Qwen 2 has biases."""
    engine, folder = unbound
    extra = policy(model_folder("qwen3", tmp_path / "qwen3"))
    refused("vLLM .*model.layers.0.self_attn.q_norm.weight .*engine=vllm", engine.load_weights, extra, 0)
    fewer = policy(model_folder("llama_tied", tmp_path / "llama"))
    refused(r"vLLM's model.layers.0.self_attn.qkv_proj.bias is not fully covered", engine.load_weights, fewer, 0)
    assert engine.shared_bytes == 0
    assert not memory(extra, fewer).keys() & memory(runner(engine._llm).get_model()).keys()
    model = policy(folder)
    engine.load_weights(model, 0)  # the refused ones left no trace
    assert gap_now(engine, model) < 1e-5


def test_weights_that_vllm_stores_with_other_values_are_refused():
    class Loads(nn.Linear):
        def load_weights(self, weights) -> None:
            self.weight.copy_(weights[0][1]).mul_(self.scale)

    engine = Loads(2, 2)
    engine.scale = 1
    assert view_of(engine, "weight", torch.ones(2, 2)).data_ptr() == engine.weight.data_ptr()
    engine.scale = 2
    refused("vLLM stores weight in another form", view_of, engine, "weight", torch.ones(2, 2))


def test_weights_that_vllm_keeps_in_another_form_are_refused(shared, monkeypatch):
    """GPT-2's matrices are transposed; for a matrix of zeros, the values alone do not show it."""
    monkeypatch.setitem(FAMILIES, "gpt2", (transformers.GPT2Config, {}))
    engine, model = shared("gpt2")
    nn.init.zeros_(model.transformer.h[0].attn.c_attn.weight)
    refused("transformer.h.0.attn.c_attn.weight in another form", engine.load_weights, model, 0)


def test_positions_that_change_with_the_context_are_those_of_the_trainer(alive, tmp_path, monkeypatch):
    """Phi-3 with longrope: vLLM takes the short frequencies only if its context is the original one."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "rope_theta": 1e4}
    sizes = {"max_position_embeddings": CONTEXT, "original_max_position_embeddings": 64, "pad_token_id": 0}
    rope |= {"original_max_position_embeddings": 64}
    monkeypatch.setitem(FAMILIES, "phi3_long", (transformers.Phi3Config, sizes | {"rope_parameters": rope}))
    folder = model_folder("phi3_long", tmp_path)
    alive.append(VLLMSharedEngine(folder, args={"kv_cache_memory_bytes": 1 << 24}))
    assert alive[-1].context == 64
    model = policy(folder)
    alive[-1].load_weights(model, 0)
    assert gap_now(alive[-1], model) < BOUND[FP32]


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3", "gemma4"])
def test_a_multimodal_model_samples_text(alive, family, tmp_path, toy):
    """Both engines: the one with the trainer's memory, and the one that gets copies under the names of the whole model."""
    folder = made(family, tmp_path, toy)
    dtype = BF16 if family == "qwen3_5" else FP32  # vLLM has no other for linear attention on a CPU
    bound = (
        0.15 if family == "qwen3_5" else BOUND[dtype]
    )  # its states add up roundings, by kernels of the CPU: 0.11 was seen
    model = learning(AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval())
    for kind in (VLLMEngine, VLLMSharedEngine):
        alive.append(kind(folder, dtype=str(dtype).removeprefix("torch."), args=ARGS))
        if kind is VLLMSharedEngine and family == "qwen3_5" and torch.cpu._is_avx512_bf16_supported():
            return refused("packs the weights of .*conv1d", alive[-1].load_weights, model, 0)
        alive[-1].load_weights(model, 0)
        assert gap_now(alive[-1], model) < bound
        before = deepcopy(model)
        disturb(model, seed=1)
        alive[-1].load_weights(model, 1)
        assert gap_now(alive[-1], model) < bound < gap_now(alive[-1], before) / 3


# -- adapters


def adapted(model: nn.Module, **more) -> peft.PeftModel:
    torch.manual_seed(1)
    config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **config | more)).eval()


@pytest.fixture(scope="module")
def lora(alive, tmp_path_factory):
    """family -> an engine for adapters up to rank 8, bound to no policy, and its folder."""

    @functools.cache
    def made(family: str):
        folder = model_folder(family, tmp_path_factory.mktemp(family))
        alive.append(VLLMSharedEngine(folder, rank=5, args=ARGS))
        return alive[-1], folder

    def make(family: str):
        engine, folder = made(family)
        engine.version, engine._places = None, {}
        return engine, folder

    return make


def test_threads_share_an_adapter_that_is_not_replaced_under_them(lora, monkeypatch):
    engine, folder = lora("llama_tied")
    model = adapted(policy(folder))
    engine.load_weights(model, 3)
    assert engine.concurrent and not engine.in_flight
    call = PROMPTS, Sampling(20, vllm={"ignore_eos": True}), range(3)
    alone = engine.sample(*call)
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(lambda _: engine.sample(*call), range(2)):  # roundings depend on the batch here
            assert [done.ids for done in found] == [done.ids for done in alone]
            assert gap(model, PROMPTS, found) < 1e-5
    assert {v for done in alone for v in done.versions} == {3} and gap(model, PROMPTS, alone) < 1e-5

    line = "VLLMSharedEngine takes no new weights while it samples"
    told = threading.Event()

    def load() -> None:
        with pytest.raises(RuntimeError, match=line):
            engine.load_weights(model, 4)
        told.set()

    disturb(model, seed=4)  # the adapter alone, of which the engine has a copy
    at(engine, monkeypatch, {9: load})
    with pytest.raises(RuntimeError, match=line):
        engine.sample(*call)
    assert told.wait(10)
    engine.load_weights(model, 4)
    after = engine.sample(*call)
    assert {v for done in after for v in done.versions} == {4} and gap(model, PROMPTS, after) < 1e-5


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama_tied", {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"o_proj": 3}}),
        ("qwen2", {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]}),
    ],
    ids=["patterns", "some"],
)
def test_an_adapter_is_swapped_after_every_step(lora, family, config):
    engine, folder = lora(family)
    base = policy(folder)
    disturb(base, seed=1)  # the base differs from the disk too
    size = weights(base)
    model = adapted(base, **config)
    engine.load_weights(model, 0)
    assert gap_now(engine, model) < 1e-5
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    for version, _ in enumerate(steps(model), start=1):
        assert gap_now(engine, model) > 0.01  # the engine still has the old adapter
        engine.load_weights(model, version)
        assert gap_now(engine, model) < 1e-5
    assert all(torch.equal(frozen[name], p) for name, p in model.named_parameters() if name in frozen)
    theirs = runner(engine._llm).get_model()
    ours = nn.ParameterList(p for p in model.parameters() if not p.requires_grad)
    assert engine.shared_bytes == size and memory(ours, theirs) == memory(theirs)
    request, engine._lora_request = engine._lora_request, None
    with Reference(model).model() as reference:  # the same memory, its adapter switched off
        assert gap_now(engine, reference) < 1e-5
    engine._lora_request = request
    assert gap_now(engine, model) < 1e-5


@pytest.mark.parametrize(
    "config", [{"target_modules": ["lm_head", "embed_tokens", "q_proj"]}, {"init_lora_weights": "pissa"}]
)
@pytest.mark.parametrize("family", ["llama_tied", "llama"])
def test_adapters_at_both_ends_and_of_an_init_that_changes_the_base(lora, family, config):
    engine, folder = lora(family)
    model = adapted(policy(folder), **config)
    engine.load_weights(model, zlib.crc32(str(config).encode()))
    assert gap_now(engine, model) < 1e-5


def test_a_quantized_base_is_refused(lora):
    model = adapted(quantize(policy(lora("llama_tied")[1]), "8bit"))
    refused("engine=vllm_shared does not take a quantized base: set engine=vllm", bind, None, model)
    refused("engine.sync=lora does not take a quantized base: set engine.sync=disk", next, adapter_tensors(model))


@pytest.mark.parametrize(
    ("family", "config", "line"),
    [
        ("llama", {"use_dora": True}, "DoraLinearVariant at .*q_proj"),
        ("llama", {"lora_bias": True, "target_modules": ["q_proj"]}, "LoRA bias"),
        ("llama", {"bias": "all"}, "bias is not supported"),
        ("llama", {"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ("llama", {"trainable_token_indices": [3]}, "trainable_tokens"),
        ("llama", {"r": 9}, "LoRA rank 9 is greater than max_lora_rank 8"),
        ("llama", {"rank_pattern": {"q_proj": 16}}, "LoRA rank 16"),
        ("llama", {"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
        # vLLM would silently ignore these: its Gemma 2 has no adapter there
        (
            "gemma2",
            {"target_modules": ["q_proj", "embed_tokens"]},
            "no adapter at model.embed_tokens; .*target_modules",
        ),
        ("gemma2", {"target_modules": ["lm_head"]}, "no adapter at lm_head"),
    ],
)
def test_adapters_that_vllm_cannot_serve_are_refused(lora, family, config, line):
    engine, folder = lora(family)
    refused(
        f"vLLM cannot serve this adapter: .*{line}.*engine=vllm",
        engine.load_weights,
        adapted(policy(folder), **config),
        -1,
    )


def test_several_adapters_and_other_kinds_are_refused(lora, llama):
    engine, folder = lora("llama")
    model = adapted(policy(folder))
    model.add_adapter("more", model.peft_config["default"])
    model.base_model.set_adapter(["default", "more"])
    refused("2 active; it serves one LoRA", engine.load_weights, model, -1)
    other = peft.get_peft_model(policy(folder), peft.IA3Config(task_type="CAUSAL_LM"))
    refused("of type .*IA3.*it serves one LoRA", engine.load_weights, other, -1)
    refused("set engine.rank to its rank", llama[0].load_weights, adapted(policy(folder)), -1)


def test_ranks_that_no_engine_has_are_refused():
    refused("engine.rank=513 .* vLLM takes 1 to 512", VLLMSharedEngine, "nowhere", rank=513)
    refused("engine.rank=0 .* vLLM takes 1 to 512", VLLMSharedEngine, "nowhere", rank=0)
