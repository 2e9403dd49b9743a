"""Start sound runs of many kinds with preflight and alarms on, and print each verdict and warning that they should not have.

    python benchmarks/clean_runs.py               all of them; those of vLLM if it is installed
    python benchmarks/clean_runs.py lora math     those whose names have one of these words

GRPO_TEST_DATA names a folder with real rows; without it these runs are left out. Exits with 1 if there was a false alarm.
"""

import contextlib
import io
import json
import logging
import os
import re
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
}

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from grpo.apps.cli import quiet
from grpo.config.composing import composed, options
from grpo.extras.demo.demo_model import make_tokenizer
from grpo.system.errors import UserError
from grpo.system.files import write_json
from tasks.wordmath import Wordmath
from train import train

HERE = Path(tempfile.gettempdir()) / f"clean_runs_{os.getpid()}"
REAL = Path(os.environ.get("GRPO_TEST_DATA", "/nowhere"))
OURS = f"{Path(__file__).resolve()}:"
SHORT = (
    "preflight=on callbacks=[health] forecast=false logger=none engine=transformers rollout.num_rollouts=2 rollout.prompts=8 "
    "eval.every=2 eval.limit=8"
)
DEMO = "task=wordmath model=tiny task.train_size=200 task.test_size=50"
TOOLS = "task=calculator model=tiny task.train_size=200 task.test_size=50"
ROWS = f"task=jsonl model=tiny task.path={HERE}/rows.jsonl task.gold=answer task.rewards=correct max_tokens=40"
HARD = "preflight=warn"  # with these the model has nothing to learn, and the checks may say so
CODE = f"task.config=null task.splits.validation=null task.held_out.test=0.2 max_tokens=24 {HARD}"
GSM = f"task=gsm8k model=tiny task.path={HERE}/gsm8k task.prompt=chat max_tokens=40 task.held_out.test=0.1 {HARD}"
MATH = f"task=math model=tiny task.path={HERE}/math task.prompt=chat max_tokens=40 task.held_out.test=0.1 {HARD}"
ANY = (  # a random model, whose answers end at one of these ids, and a reward that differs between them
    f"task=jsonl task.path={HERE}/rows.jsonl task.rewards={OURS}spread task.solved=0.5 max_tokens=24 optim.optimizer.lr=1e-4 "
    f"rollout.sampling.stop_ids={list(range(40, 80))} model=path model.path={HERE}/".replace(", ", ",")
)
# algorithms that need a teacher's model, or texts of tools
NEED_MORE = ["echo", "gkd", "iw_opd", "mopd", "opd", "opd_discounted", "topd", "vopd"]
LATER = "algo.num_minibatches=2 algo.num_epochs=2"
CACHE = "engine.args.kv_cache_memory_bytes=67108864"
LEARN, END, GOLD = "there is something to learn", "prompts differ, answers end", "gold answers are right"

RUNS = {
    "demo": DEMO,
    "demo, eos by sampling filters": f"{DEMO} rollout.sampling.top_p=0.9 rollout.sampling.top_k=50",
    "demo, hot": f"{DEMO} rollout.sampling.temperature=1.3",
    "demo, cool": f"{DEMO} rollout.sampling.temperature=0.7 rollout.sampling.min_p=0.05",
    "demo, repetition penalty": f"{DEMO} rollout.sampling.repetition_penalty=1.1",
    "demo, groups of two": f"{DEMO} rollout.group_size=2 rollout.prompts=32",
    "demo, one prompt": f"{DEMO} rollout.group_size=16 rollout.prompts=1",
    "demo, padded": f"{DEMO} optim.layout=padded",
    "demo, packed": f"{DEMO} optim.layout=packed",
    "demo, small microbatches": f"{DEMO} optim.max_tokens_per_microbatch=128",
    "demo, minibatches and epochs": f"{DEMO} {LATER}",
    "demo, gradient checkpointing": f"{DEMO} optim.gradient_checkpointing=true",
    "demo, bfloat16": f"{DEMO} model.dtype=bfloat16",
    "demo, bf16-mixed": f"{DEMO} trainer.precision=bf16-mixed",
    "demo, bfloat16 and bf16-mixed": f"{DEMO} model.dtype=bfloat16 trainer.precision=bf16-mixed",
    "demo, float16": f"{DEMO} model.dtype=float16",
    "demo, bfloat16, packed, KL": f"{DEMO} model.dtype=bfloat16 optim.layout=packed algo/kl=loss",
    "demo, eager attention": f"{DEMO} model.attn_implementation=eager",
    "demo, lora": f"{DEMO} adapter=lora",
    "demo, lora, KL": f"{DEMO} adapter=lora algo/kl=loss {LATER}",
    "demo, lora, bfloat16": f"{DEMO} adapter=lora model.dtype=bfloat16",
    "demo, lora, one kind of layer": f"{DEMO} adapter=lora adapter.target_modules=[q_proj] adapter.r=4",
    "demo, moving reference": f"{DEMO} algo/kl=loss algo.kl.sync_every=1",
    "demo, KL in the reward": f"{DEMO} algo/kl=reward",
    "demo, KL with ratio": f"{DEMO} algo/kl=loss_with_ratio",
    "demo, entropy bonus": f"{DEMO} algo.entropy.coef=0.01",
    "demo, entropy target": f"{DEMO} algo.entropy.coef=0.01 algo.entropy.target=1.0",
    "demo, top entropy": f"{DEMO} algo.top_entropy=0.2",
    "demo, GDPO": f"{DEMO} algo/advantage=gdpo",
    "demo, tis": f"{DEMO} algo/correction=tis",
    "demo, dynamic sampling": f"{DEMO} selection=dynamic selection.rounds=3",
    "demo, masks truncated": f"{DEMO} algo.mask_truncated=true max_tokens=20",
    "demo, adafactor": f"{DEMO} optim=adafactor",
    "demo, sgd": f"{DEMO} optim=sgd",
    "demo, offload": f"{DEMO} optim.offload=true",
    "demo, bfloat16 offloaded": f"{DEMO} optim.offload=true model.dtype=bfloat16",
    "demo, pass@k": f"{DEMO} eval.samples=4 eval.sampling.temperature=1",
    "demo, small cache": f"{DEMO} engine.max_cache_tokens=512",
    "demo, no evaluation": f"{DEMO} eval.every=0",
    "demo, validation of its own": f"{ROWS} task.held_out.validation=0.2 eval.split=validation",
    **{f"demo, algo={name}": f"{DEMO} algo={name}" for name in options("algo") if name not in NEED_MORE},
    "calculator": TOOLS,
    "calculator, lora": f"{TOOLS} adapter=lora",
    "calculator, packed, KL": f"{TOOLS} optim.layout=packed algo/kl=loss {LATER}",
    "calculator, padded, bfloat16": f"{TOOLS} optim.layout=padded model.dtype=bfloat16",
    "calculator, few turns": f"{TOOLS} max_turns=3",
    "jsonl, gold": ROWS,
    "jsonl, own reward": f"{ROWS} task.rewards=[correct,{OURS}brief] task.weights=[1,0.1]",
    "jsonl, conversations": f"{ROWS} task.path={HERE}/conversations.jsonl",
    "jsonl, prefill": f"{ROWS} {HARD} task.path={HERE}/prefill.jsonl",
    "jsonl, correct is only logged": f"{ROWS} {HARD} task.rewards=[correct,{OURS}brief] task.weights=[0,1]",
    "jsonl, near length": f"{ROWS} task.gold=null task.rewards={OURS}near",
    "jsonl, negative reward": f"{ROWS} task.gold=null task.rewards={OURS}negative task.solved=-0.2",
    "jsonl, thinking template": f"{ROWS} model.chat_template={HERE}/thinking.jinja +renderer.template_args.enable_thinking=false",
    "gsm8k form": GSM,
    "gsm8k form, algo=dapo": f"{GSM} algo=dapo",
    "math form": MATH,
    "math form, levels": f"{MATH} task.levels=[1,2]",
    "countdown": f"task=countdown model=tiny task.sizes.train=100 max_tokens=40 {HARD}",
    "mixture": "task=mixture model=tiny max_tokens=40 preflight=warn "
    f"task.sources.gsm8k.task.path={HERE}/gsm8k task.sources.gsm8k.task.held_out.test=0.1",
    "code": f"task=code model=tiny task.path={HERE}/code.jsonl {CODE}",
    "musique": f"task=musique model=tiny task.path={REAL}/musique_200.jsonl task.held_out.test=0.2 max_tokens=16 {HARD} "
    "model.path.worked_answers._target_=tasks.calculator.worked_answers model.path.clean_steps=400",
    "real gsm8k": f"{GSM} task.path={REAL} task.splits.train=gsm8k_train_1000 task.splits.test=gsm8k_test {HARD}",
    "real gsm8k, base prompt": f"{GSM} task.path={REAL}/gsm8k_test.jsonl task.prompt=one_shot model.chat_template=none {HARD}",
    "real math": f"{MATH} task.path={REAL}/math500_test.jsonl {HARD}",
    "real code": f"task=code model=tiny task.path={REAL}/mbpp_sanitized_30.jsonl {CODE}",
}  # fmt: skip
FAMILIES = {
    "llama": {}, "qwen2": {}, "qwen3": {"head_dim": 32}, "mistral": {}, "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 32}, "gemma3_text": {"head_dim": 32}, "phi3": {"pad_token_id": 0}, "olmo2": {}, "granite": {},
    "gpt2": {}, "gpt_neox": {},
    "qwen2_moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_experts": 4,
    "num_experts_per_tok": 2}, "mamba": {"state_size": 8},
}  # fmt: skip
RUNS |= {f"random {name}": f"{ANY}{name}" for name in FAMILIES}
RUNS["random gemma2"] += " model.attn_implementation=eager"
VLLM = {
    "vllm": f"{DEMO} engine=vllm {CACHE}",
    "vllm, minibatches and epochs": f"{DEMO} engine=vllm {CACHE} {LATER}",
    "vllm, filters": f"{DEMO} engine=vllm {CACHE} rollout.sampling.top_p=0.9 rollout.sampling.temperature=0.8",
    "vllm, repetition penalty": f"{DEMO} engine=vllm {CACHE} rollout.sampling.repetition_penalty=1.1",
    "vllm, guided": f"{DEMO} engine=vllm {CACHE} 'rollout.sampling.guided={{regex: \"[0-9]+[+*-][0-9]+=[0-9]+\"}}' {HARD}",
    "vllm, bfloat16": f"{DEMO} engine=vllm engine.dtype=bfloat16 model.dtype=bfloat16 {CACHE}",
    "vllm, bf16-mixed": f"{DEMO} engine=vllm engine.dtype=bfloat16 trainer.precision=bf16-mixed {CACHE}",
    "vllm, lora": f"{DEMO} engine=vllm adapter=lora {CACHE}",
    "vllm, ahead": f"{DEMO} engine=vllm {CACHE} rollout.ahead=1 algo.old_policy=rollout",
    "vllm, calculator": f"{TOOLS} engine=vllm {CACHE}",
    "vllm, gsm8k form": f"{GSM} engine=vllm {CACHE}",
    "vllm_shared": f"{DEMO} engine=vllm_shared {CACHE}",
    "vllm_shared, KL, minibatches": f"{DEMO} engine=vllm_shared {CACHE} algo/kl=loss {LATER}",
    "vllm_shared, bfloat16": f"{DEMO} engine=vllm_shared model.dtype=bfloat16 {CACHE}",
    "vllm_shared, lora": f"{DEMO} engine=vllm_shared adapter=lora {CACHE}",
    "vllm_server": f"{DEMO} engine=vllm_server engine.launch=true {CACHE}",
    "vllm_server, ahead": f"{DEMO} engine=vllm_server engine.launch=true {CACHE} rollout.ahead=1 algo.old_policy=rollout",
    "vllm_server, lora": f"{DEMO} engine=vllm_server engine.launch=true engine.sync=lora adapter=lora {CACHE}",
    **{f"vllm, random {name}": f"{ANY}{name} engine=vllm {CACHE}" for name in ("qwen2", "qwen3", "gemma", "phi3")},
    "vllm, real gsm8k": f"{RUNS['real gsm8k']} engine=vllm {CACHE}",
}
# lines that tell of a slower way, which is right
TOLD = ("engine: sampling from", "optim.layout=shared_prompt does not fit", "engine: ")
TOLD += ("preflight: there is something to learn: 0% solved",)  # only a format's reward differs
TOLD += ("rollout 0: no held-out answer is right: model=tiny was trained on",)  # which is true of other tasks
# checks that say, as they should, that this model has nothing to learn from this task, and their warnings
HONEST = {
    name: {LEARN, END, "rollout/truncated", "rollout/no_answer", "rollout/effective_groups", "rollout/malformed_calls"}
    for name in {**RUNS, **VLLM}
    if "preflight=warn" in {**RUNS, **VLLM}[name]
} | {
    "demo, masks truncated": {"rollout/truncated"},
    "jsonl, prefill": {LEARN},  # after the box it writes the first number
    "jsonl, correct is only logged": {"rewards agree with correctness"},
}


def spread(completions: Sequence[str], **_) -> list[float]:
    """A reward that differs between the samples of any model."""
    return [len(text.encode()) % 7 / 7 for text in completions]


def near(completions: Sequence[str], **_) -> list[float]:
    return [1 / (1 + abs(len(text) - 30)) for text in completions]


def negative(completions: Sequence[str], **_) -> list[float]:
    return [-abs(len(text) - 30) / 30 for text in completions]


def brief(completions: Sequence[str], **_) -> list[float]:
    return [1 - len(text) / 200 for text in completions]


def make_rows() -> None:
    """Write rows of several forms, of problems that the demo's model can solve, and random models."""
    rows = list(islice(Wordmath(train_size=400, test_size=10).examples("train"), 400))
    pairs = [(row["question"], str(row["answer"]).rpartition("####")[2].strip()) for row in rows]
    forms = {
        "rows.jsonl": [{"prompt": q, "answer": a} for q, a in pairs],
        "conversations.jsonl": [{"prompt": [{"role": "user", "content": q}], "answer": a} for q, a in pairs],
        "prefill.jsonl": [
            {"prompt": [{"role": "user", "content": q}, {"role": "assistant", "content": "\\boxed{"}], "answer": a}
            for q, a in pairs
        ],
        "gsm8k/train.jsonl": [{"question": q, "answer": f"So.\n#### {a}"} for q, a in pairs],
        "math/train.jsonl": [
            {"problem": q, "solution": f"\\boxed{{{a}}}", "answer": a, "level": i % 3 + 1, "subject": "Algebra"}
            for i, (q, a) in enumerate(pairs)
        ],
        "code.jsonl": [
            {"prompt": f"Write f that adds {i}.", "test_list": [f"assert f(1) == {i + 1}"], "test_imports": [], "code": ""}
            for i in range(60)
        ],
    }  # fmt: skip
    for name, listed in forms.items():
        file = HERE / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in listed), encoding="utf-8")
    thinking = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{{ '' if enable_thinking is defined and not enable_thinking "
        "else '<think>' }}{% endif %}"
    )
    (HERE / "thinking.jinja").write_text(thinking)


def make_model(family: str) -> None:
    """Save a random model of that family."""
    tokenizer = make_tokenizer(["How many coins are left? 12 + 7 = 19"] * 30)
    torch.manual_seed(0)
    shape = {
        "vocab_size": len(tokenizer) + 8, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.08,
        "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    config = AutoConfig.for_model(family, **shape | FAMILIES[family])
    AutoModelForCausalLM.from_config(config).save_pretrained(HERE / family)
    tokenizer.save_pretrained(HERE / family)


class Heard(logging.Handler):
    """Keeps the warnings of a run."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith(("grpo", "tasks", "train")):
            self.lines.append(record.getMessage())


def words_of(command: str) -> list[str]:
    """Return the arguments of a command line; later ones of the same key replace earlier ones."""
    given = {word.partition("=")[0]: word for word in shlex.split(f"{SHORT} {command}")}
    return list(given.values())


def tried(name: str, command: str) -> tuple[dict, list[str], float]:
    """Run a command line. Returns the verdicts, the warnings with any error, and the seconds."""
    folder, heard, begun = HERE / "runs" / re.sub(r"\W+", "-", name), Heard(), time.perf_counter()
    logging.getLogger().addHandler(heard)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            train(composed("train", [*words_of(command), f"output_dir={folder}"]))
    except UserError as error:
        heard.lines.append(f"error: {error}")
    except BaseException as error:
        heard.lines.append(" ".join(f"TRACEBACK: {type(error).__name__}: {error}".split()))
        if "-v" in sys.argv:
            raise
    finally:
        logging.getLogger().removeHandler(heard)
    manifest = folder / "manifest.json"
    verdicts = json.loads(manifest.read_text()).get("preflight", {}) if manifest.exists() else {}
    return verdicts, heard.lines, time.perf_counter() - begun


def main(asked: Sequence[str]) -> int:
    quiet()
    make_rows()
    for family in FAMILIES:
        make_model(family)
    every = RUNS | (VLLM if find_spec("vllm") else {})
    if not REAL.is_dir():
        every = {name: command for name, command in every.items() if str(REAL) not in command}
    chosen = {name: command for name, command in every.items() if not asked or any(word in name for word in asked)}
    false_alarms, seconds, results, by_check = [], 0.0, {}, {}
    for name, command in chosen.items():
        verdicts, lines, took = tried(name, command)
        honest = HONEST.get(name, set())
        counts = Counter(found["result"] for found in verdicts.values())
        checks = sum(found["seconds"] for found in verdicts.values())
        seconds += checks
        told = f"{counts['PASS']} PASS {counts['FAIL']} FAIL {counts['SKIP']} SKIP"
        print(f"{name:34} {told}, preflight {checks:.1f} s of {took:.1f} s", flush=True)
        for check, found in verdicts.items():
            by_check.setdefault(check, []).append(found["seconds"])
            if found["result"] != "PASS":
                false = found["result"] == "FAIL" and check not in honest
                false_alarms += [f"{name}: {check}: {found['compared']}"] * false
                print(f"    {'FALSE ' * false}{found['result']} {check}: {found['compared']}", flush=True)
        for line in lines:
            known = line.startswith(("preflight failed", *TOLD)) or any(word in line for word in honest)
            false_alarms += [f"{name}: {line}"] * (not known)
            print(f"    {'' if known else 'FALSE '}{line[:400]}", flush=True)
        if not verdicts:
            false_alarms.append(f"{name}: no verdicts")
        results[name] = {"verdicts": verdicts, "lines": lines, "seconds": took}
    print(f"\n{len(chosen)} runs, {len(false_alarms)} false alarms, {seconds:.0f} s of preflight")
    for check, values in by_check.items():
        print(f"    {check:36} mean {sum(values) / len(values):.2f} s, most {max(values):.2f} s")
    for line in false_alarms:
        print(f"false alarm: {line[:300]}")
    write_json(HERE / "results.json", results)
    print(HERE / "results.json")
    return int(bool(false_alarms))


if __name__ == "__main__":
    sys.exit(main([word for word in sys.argv[1:] if word != "-v"]))
