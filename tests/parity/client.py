"""Asks a server: python client.py PORT."""

import json
import sys
import threading
import time
import urllib.error
import urllib.request
from queue import SimpleQueue

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM


def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{sys.argv[1]}{path}", data, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code


def greedy():
    asked = {"messages": [[{"role": "user", "content": "12 + 7?"}]], "max_tokens": 8, "temperature": 0}
    answer = ask("/generate", asked)
    assert (
        len(answer["completion_token_ids"][0]) == len(answer["old_log_probs"][0]) <= 8
        and len(answer["completion"]) == 1
    )
    return answer["completion_token_ids"][0]


for _ in range(6000):  # ten minutes
    try:
        if ask("/health_generate") == {"status": "ok"}:
            break
    except urllib.error.URLError:
        pass
    time.sleep(0.1)
print("health", ask("/health")["status"], ask("/health_generate")["status"])
first = greedy()

torch.manual_seed(0)  # another adapter may be too small to change the answer
model = AutoModelForCausalLM.from_pretrained("served")
large = {"r": 2, "lora_alpha": 64, "init_lora_weights": False}
adapted = get_peft_model(model, LoraConfig(**large, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
adapted.save_pretrained("served/adapter")
print("adapters", ask("/lora/status")["loaded"] if "loaded" in ask("/lora/status") else ask("/lora/status"))
print("missing", ask("/lora/load", {"adapter_path": "served/none", "adapter_name": "none"}))
print("loaded", ask("/lora/load", {"adapter_path": "served/adapter", "adapter_name": "mine"}), ask("/lora/status"))
print("adapter changes the answer", greedy() != first)
print("unloaded", ask("/lora/unload", {}), "as before", greedy() == first)

plain = AutoModelForCausalLM.from_pretrained("served")
for parameter in plain.parameters():
    parameter.data.neg_()
plain.save_pretrained("served")
print("reloaded", ask("/reload_weights", {}), "changed", greedy() != first)

asked = {"prompts": ["12 + 7?"], "n": 2, "max_tokens": 4}
print("as TRL", [len(ask("/generate/", asked)["completion_ids"]), ask("/get_world_size/")["world_size"]])
print("weights", ask("/update_named_param", {"name": "a", "dtype": "float32", "shape": [1]}))
print("info", ask("/info"))
ask("/sleep", {})
print("asleep", ask("/is_sleeping")["is_sleeping"])
ask("/wake_up", {})
print("awake", ask("/is_sleeping")["is_sleeping"])

ask("/pause", {})
answers = SimpleQueue()
for _ in range(2):  # limits.queue=1: the one that comes second is refused
    threading.Thread(target=lambda: answers.put(ask("/generate/", asked))).start()
print("full", answers.get())
ask("/resume", {})
print("then", len(answers.get()["completion_ids"]))
