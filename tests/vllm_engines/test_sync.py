"""Real vLLM in this process: after each of three optimizer steps it samples from the trainer's weights."""

import json
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import transformers
from helpers.models import BOUND, CONTEXT, FAMILIES, PROMPTS, disturb, gap, gap_now, model_folder, steps
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.engines.protocol import Sampling
from grpo.engines.vllm.engine import VLLMEngine
from grpo.engines.weights import checksum
from grpo.models.policy import with_adapter
from grpo.system.errors import UserError

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

ARGS = {"kv_cache_memory_bytes": 1 << 26, "max_model_len": CONTEXT}


@pytest.mark.parametrize("family", ["llama_tied", "llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_copied_weights_are_the_trainers_after_every_step(family, dtype, tmp_path):
    torch.set_num_threads(1)
    folder = model_folder(family, tmp_path, dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    engine = VLLMEngine(folder, dtype=str(dtype).removeprefix("torch."), args=ARGS)
    engine.load_weights(model, 0)
    assert gap_now(engine, model) < BOUND[dtype]
    for version, _ in enumerate(steps(model), start=1):
        assert gap_now(engine, model) > 3 * BOUND[dtype]  # the engine still has the old weights
        engine.load_weights(model, version)
        assert engine.version == version
        assert gap_now(engine, model) < BOUND[dtype]
    engine.close()


MIXTURES = {
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1},
    ),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


@pytest.mark.parametrize("family", MIXTURES)
def test_copied_experts_are_the_trainers(family, tmp_path, monkeypatch):
    """One tensor of all experts in transformers, one for each in the files, packed for the CPU in vLLM. An adapter is merged."""
    torch.set_num_threads(1)
    monkeypatch.setitem(FAMILIES, family, MIXTURES[family])
    folder = model_folder(family, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    engine = VLLMEngine(folder, dtype="float32", args=ARGS)
    engine.load_weights(model, 0)
    assert gap_now(engine, model) < BOUND[torch.float32]
    adapted = with_adapter(model, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear"))
    assert any(".experts." in name for name, p in adapted.named_parameters() if p.requires_grad)
    disturb(adapted, seed=2, size=0.2)
    assert gap_now(engine, adapted) > 3 * BOUND[torch.float32]
    engine.load_weights(adapted, 1)
    assert gap_now(engine, adapted) < BOUND[torch.float32]
    engine.close()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    torch.set_num_threads(1)
    folder = model_folder("llama", tmp_path_factory.mktemp("llama"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    engine = VLLMEngine(folder, args=ARGS)
    engine.load_weights(model, 0)
    yield engine, model, AutoTokenizer.from_pretrained(folder)
    engine.close()


NUMBER = {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"], "additionalProperties": False}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("guided", "matches"),
    [
        ({"regex": "[0-9]{3}-[ab]+c"}, re.compile("[0-9]{3}-[ab]+c").fullmatch),
        ({"choice": ["yes", "no, never"]}, {"yes", "no, never"}.__contains__),
        ({"json": NUMBER}, lambda text: list(json.loads(text)) == ["n"]),
        ({"grammar": 'root ::= "<" [x-z] [x-z] ">"'}, re.compile("<[x-z][x-z]>").fullmatch),
    ],
    ids=["regex", "choice", "json", "grammar"],
)
def test_guided_samples_match_and_keep_the_models_own_logprobs(llama, guided, matches, temperature):
    engine, model, tokenizer = llama
    prompts = PROMPTS * 10
    completions = engine.sample(prompts, Sampling(48, temperature, guided=guided), seeds=range(30))
    ended = [c for c in completions if c.finish == "stop"]
    texts = [tokenizer.decode(c.ids, skip_special_tokens=True) for c in ended]
    assert len(ended) > 8 and len(set(texts)) > 1
    assert all(matches(text) for text in texts), texts
    assert (
        gap(model, prompts, completions, temperature) < 1e-5
    )  # over the whole vocabulary, not only the tokens that the guide allows


def test_bad_words_are_not_said(llama):
    engine, model, tokenizer = llama
    prompts = PROMPTS * 10
    common, _ = Counter(i for c in engine.sample(prompts, Sampling(48), range(30)) for i in c.ids).most_common(1)[0]
    word = tokenizer.decode([common])
    without = engine.sample(prompts, Sampling(48, vllm={"bad_words": [word]}), range(30))
    assert tokenizer.encode(word, add_special_tokens=False) == [common]
    assert all(common not in completion.ids for completion in without)
    assert gap(model, prompts, without) < 1e-5


def test_guides_filters_and_free_samples_do_not_touch_each_other(llama):
    engine, _, _ = llama
    free = engine.sample(PROMPTS, Sampling(12, 0.8), seeds=[1, 2, 3])
    engine.sample(PROMPTS, Sampling(12, guided={"regex": "[ab]+"}), seeds=[1, 2, 3])
    assert engine.sample(PROMPTS, Sampling(12, 0.8), seeds=[1, 2, 3]) == free


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (
            {"kv_cache_memory_bytes": 1 << 12},
            "too little memory.*: raise engine.args.gpu_memory.*kv_cache_memory_bytes",
        ),
        ({"max_modellen": 3}, "engine.args.*max_modellen"),
        ({"max_model_len": CONTEXT * 2}, "engine.args.*max_model_len.*1024"),
    ],
)
def test_arguments_that_vllm_refuses_are_told_in_one_line(tmp_path, args, line):
    with pytest.raises(UserError, match=line) as told:
        VLLMEngine(model_folder("llama", tmp_path), args=ARGS | args)
    assert "\n" not in str(told.value)


def test_sleep_is_refused_without_a_gpu(tmp_path):
    with pytest.raises(UserError, match=r"engine\.sleeps=false"):
        VLLMEngine(str(tmp_path), sleeps=True)


def test_a_file_with_other_weights_than_the_trainer_wrote_is_refused(tmp_path):
    from grpo.engines.vllm.transfer import Bucket, Transfer  # imports vllm

    loaded, file = [], tmp_path / "weights.safetensors"
    weights = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
    worker = SimpleNamespace(model=SimpleNamespace(load_weights=loaded.append))
    bucket = Bucket(file=str(file), checksum=checksum(weights.items()))
    save_file(weights, file)
    Transfer.receive_weights(worker, bucket)
    save_file(weights | {"b": torch.tensor([3.5])}, file)
    with pytest.raises(ValueError, match="does not hold the weights that the trainer wrote"):
        Transfer.receive_weights(worker, bucket)
    assert len(loaded) == 1
