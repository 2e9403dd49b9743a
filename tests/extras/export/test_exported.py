"""A folder of grpo.export is one model for transformers and for vLLM: the same greedy tokens."""

import shutil

import pytest
import torch
from conftest import EXAMPLES
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.extras.export.export import main

pytestmark = pytest.mark.vllm
vllm = pytest.importorskip("vllm")


def test_the_same_greedy_tokens_in_transformers_and_vllm(toy, tmp_path):
    policy, out = tmp_path / "run" / "checkpoints" / "best", tmp_path / "out"
    shutil.copytree(toy, policy)
    shutil.copy(EXAMPLES / "run" / "checkpoints" / "best" / "README.md", policy)
    main([str(tmp_path / "run"), "--dtype", "float32", str(out)])
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True)
        for text in ("Tom has 16 books. How many?", "12 + 7")
    ]
    prompts = [list(prompt["input_ids"]) for prompt in prompts]
    settings = {"max_new_tokens": 12, "do_sample": False}
    theirs = [model.generate(torch.tensor([ids]), **settings)[0, len(ids) :].tolist() for ids in prompts]
    torch.set_num_threads(1)
    engine = vllm.LLM(str(out), dtype="float32", max_model_len=128, kv_cache_memory_bytes=1 << 26, enforce_eager=True)
    greedy = vllm.SamplingParams(temperature=0, max_tokens=12)
    found = engine.generate([{"prompt_token_ids": ids} for ids in prompts], greedy, use_tqdm=False)
    assert [list(one.outputs[0].token_ids) for one in found] == theirs and len(set(map(tuple, theirs))) > 1
