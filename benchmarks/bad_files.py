"""Give train.py, eval.py and the server bad files, models, rewards, tasks, checkpoints and command lines, and count outcomes.

    python benchmarks/bad_files.py               counts by kind of input
    python benchmarks/bad_files.py --all         every input with its line
    python benchmarks/bad_files.py model nan     inputs whose kind or name has one of these words

Each input has a process of its own, mostly forked from this one after the large imports, with a time limit. Outcomes: refused,
with one line; traceback; hang; silent, an end without a line; accepted, which is right for some inputs.
"""

import atexit
import contextlib
import gzip
import json
import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}

import torch
import transformers
from safetensors.torch import load_file, save_file

from grpo.extras.demo.demo_model import SHIPPED
from grpo.training.checkpoints import PlainCheckpoints

ROOT = Path(__file__).parents[1]
HERE = Path(tempfile.gettempdir()) / f"bad_files_{os.getpid()}"
LIMIT = 60  # seconds
SMALL = [
    *("forecast=false", "callbacks=none", "logger=none", "engine=transformers", "eval.limit=2", "eval.every=0"),
    *("rollout.prompts=2", "rollout.group_size=2", "rollout.num_rollouts=1"),
]
LEAVE = os._exit  # a run replaces it
JSONL = ["task=jsonl", "task.gold=answer", "task.rewards=correct", "max_tokens=8", "preflight=off"]
WORDS = ["preflight=off", "task.train_size=20", "task.test_size=4", "max_tokens=8"]
ROW = {"prompt": "Sam has 10 coins. Sam finds 5 coins. How many coins does Sam have?", "answer": "15"}
ROWS = [{**ROW, "prompt": ROW["prompt"].replace("10", str(i))} for i in range(40)]

CALLED = {
    **{"role": "assistant", "content": None},
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
}
ANSWERED = {"role": "tool", "content": "3", "tool_call_id": "a"}


@dataclass
class Input:
    """A bad input: the program's arguments. fine: it may be accepted, because it is odd and not wrong."""

    kind: str
    name: str
    arguments: list[str]
    fine: bool = False
    program: str = "train.py"
    environment: dict[str, str] = field(default_factory=dict)


def written(name: str, content: str | bytes) -> Path:
    """Write a file, and return its path."""
    file = HERE / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def lines(rows: Sequence[object]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


# -- data


def asked(row: dict[str, str]) -> dict[str, str]:
    """Return the message of a row."""
    return {"role": "user", "content": row["prompt"]}


def data() -> list[Input]:
    import pandas as pd

    good = lines(ROWS)
    parquet = written("good.parquet", b"")
    pd.DataFrame(ROWS).to_parquet(parquet)
    fine = {
        "some_nulls.jsonl",
        "bom.jsonl",
        "twice_a_key.jsonl",
        "numbers_as_answers.jsonl",
        "huge_numbers_as_answers.jsonl",
        "nul_characters.jsonl",
        "mixed_answers.jsonl",
        "windows_lines.jsonl",
        "surrogates.jsonl",
        "late_nulls.jsonl",
        "late_column.jsonl",
        "long_numbers.jsonl",
        "huge_integers.csv",
        "words_of_nothing.csv",
        "calls.jsonl",
        "parts.jsonl",
    }
    files: dict[str, str | bytes] = {
        "nulls.jsonl": lines([{"prompt": None, "answer": None}] * 9),
        "some_nulls.jsonl": lines([*ROWS, {"prompt": None, "answer": "1"}]),
        "latin_1.jsonl": "".join(json.dumps({**row, "answer": "é"}, ensure_ascii=False) + "\n" for row in ROWS).encode(
            "latin-1"
        ),
        "utf_16.jsonl": good.encode("utf-16"),
        "long_line.jsonl": lines([{**row, "prompt": row["prompt"] * 20000} for row in ROWS[:4]]),
        "zipped.jsonl": gzip.compress(good.encode()),
        "cut.jsonl.gz": gzip.compress(good.encode())[:100],
        "cut.parquet": parquet.read_bytes()[:-200],
        "text.parquet": good,
        "empty.parquet": b"",
        "empty.jsonl": "",
        "blank_lines.jsonl": "\n\n\n",
        "wrong_columns.jsonl": lines([{"text": "a", "label": 1}] * 9),
        "no_answer.jsonl": lines([{"prompt": row["prompt"]} for row in ROWS]),
        "bom.jsonl": b"\xef\xbb\xbf" + good.encode(),
        "windows_lines.jsonl": good.replace("\n", "\r\n"),
        "twice_a_key.jsonl": good.replace("{", '{"prompt": "Other?", ', 1),
        "numbers.jsonl": lines([{"prompt": i, "answer": i} for i in range(40)]),
        "numbers_as_answers.jsonl": lines([{**row, "answer": 15} for row in ROWS]),
        "huge_numbers_as_answers.jsonl": lines([{**row, "answer": 10**30} for row in ROWS]).replace("0}", "0.5}"),
        "mixed_answers.jsonl": lines([{**row, "answer": i if i % 2 else str(i)} for i, row in enumerate(ROWS)]),
        "mixed_prompts.jsonl": lines(
            [{**row, "prompt": row["prompt"] if i % 2 else [i]} for i, row in enumerate(ROWS)]
        ),
        "lists.jsonl": lines([[1, 2]] * 9),
        "texts.jsonl": lines(["a"] * 9),
        "no_json.jsonl": "prompt: a\n" * 9,
        "cut.jsonl": good[:-30],
        "nan.jsonl": good.replace('"15"', "NaN"),
        "bytes.jsonl": bytes(range(256)) * 40,
        "deep.jsonl": '{"prompt": ' + "[" * 3000 + "]" * 3000 + "}\n",
        "one_row.jsonl": lines(ROWS[:1]),
        "equal_rows.jsonl": lines([ROW] * 40),
        "blank_prompts.jsonl": lines([{**ROW, "prompt": "  "}] * 40),
        "empty_conversation.jsonl": lines([{**row, "prompt": []} for row in ROWS]),
        "no_content.jsonl": lines([{**row, "prompt": [{"role": "user"}]} for row in ROWS]),
        "odd_role.jsonl": lines([{**row, "prompt": [{"role": "wizard", "content": row["prompt"]}]} for row in ROWS]),
        "content_is_null.jsonl": lines([{**row, "prompt": [{"role": "user", "content": None}]} for row in ROWS]),
        "content_is_number.jsonl": lines(
            [{**row, "prompt": [{"role": "user", "content": i}]} for i, row in enumerate(ROWS)]
        ),
        "late_nulls.jsonl": lines([{**ROW, "prompt": f"{i}?", "note": None if i < 99 else "x"} for i in range(100)]),
        "late_column.jsonl": lines([*ROWS, {**ROW, "more": {"a": 1}}]),
        "long_numbers.jsonl": good.replace('"15"', "1" * 5000),
        "huge_integers.csv": "prompt,answer\n" + "".join(f"{i}?,{10**30}\n" for i in range(40)),
        "words_of_nothing.csv": "prompt,answer\n" + "".join(f"{i}?,NA\n" for i in range(40)),
        "latin_1.csv": b"prompt,answer\n" + "é?,1\n".encode("latin-1") * 9,
        "open_quote.csv": 'prompt,answer\na?,1\n"b?,2\n',
        "calls.jsonl": lines([{**row, "prompt": [asked(row), CALLED, ANSWERED]} for row in ROWS]),
        "parts.jsonl": lines(
            [
                {**row, "prompt": [{"role": "user", "content": [{"type": "text", "text": row["prompt"]}]}]}
                for row in ROWS
            ]
        ),
        "picture.jsonl": lines([{**row, "prompt": [{"role": "user", "content": [{"type": "image"}]}]} for row in ROWS]),
        "from_and_value.jsonl": lines([{**row, "prompt": [{"from": "human", "value": "1?"}]} for row in ROWS]),
        "another_field.jsonl": lines([{**row, "prompt": [{**asked(row), "weight": 1}]} for row in ROWS]),
        "broken_call.jsonl": lines(
            [{**row, "prompt": [asked(row), {**CALLED, "tool_calls": [{"id": "a"}]}]} for row in ROWS]
        ),
        "surrogates.jsonl": good.replace("Sam", "S\\ud800m"),
        "nul_characters.jsonl": good.replace("Sam", "S\\u0000m"),
        "ragged.csv": "prompt,answer\n" + "a,b,c,d\n" * 9,
        "semicolons.csv": "prompt;answer\n" + "a;1\n" * 9,
        "headless.csv": "a,1\n" * 9,
        "object.json": json.dumps({"a": 1}),
        "rows.txt": good,
    }
    found = [
        Input("data", name, [*JSONL, f"task.path={written(f'data/{name}', content)}"], name in fine)
        for name, content in files.items()
    ]
    (HERE / "data" / "folder").mkdir()
    (HERE / "data" / "named.jsonl").mkdir()
    os.symlink(HERE / "data" / "loop.jsonl", HERE / "data" / "loop.jsonl")
    os.mkfifo(HERE / "data" / "pipe.jsonl")
    os.symlink("/dev/zero", HERE / "data" / "zeros.jsonl")
    for name in ("folder", "named.jsonl", "loop.jsonl", "pipe.jsonl", "zeros.jsonl", "missing.jsonl"):
        found.append(Input("data", name, [*JSONL, f"task.path={HERE}/data/{name}"]))
    rows = {
        "gsm8k without ####": ("gsm8k", [{"question": row["prompt"], "answer": "15"} for row in ROWS], True),
        "gsm8k answers are numbers": ("gsm8k", [{"question": row["prompt"], "answer": 15} for row in ROWS], True),
        "gsm8k questions are lists": ("gsm8k", [{"question": [i], "answer": "#### 1"} for i in range(40)], False),
        "math without level": (
            "math",
            [{"problem": row["prompt"], "solution": "x", "answer": "1"} for row in ROWS],
            True,
        ),
        "math without a box": ("math", [{"problem": row["prompt"], "solution": "x"} for row in ROWS], False),
        "code tests are text": (
            "code",
            [{"prompt": row["prompt"], "test_list": "assert", "code": ""} for row in ROWS],
            True,
        ),
        "code tests are null": (
            "code",
            [{"prompt": row["prompt"], "test_list": None, "code": ""} for row in ROWS],
            False,
        ),
        "musique without paragraphs": ("musique", [{"question": row["prompt"], "answer": "a"} for row in ROWS], False),
        "musique paragraphs are texts": (
            "musique",
            [{"question": row["prompt"], "answer": "a", "paragraphs": ["a", "b"]} for row in ROWS],
            False,
        ),
    }
    for name, (task, listed, right) in rows.items():
        file = written(f"data/{name.replace(' ', '_').replace('#', '')}.jsonl", lines(listed))
        more = ["task.splits.validation=null"] if task in ("code", "musique") else []
        tools = [f"model.path={SHIPPED / 'calculator'}", "model=path"] if task == "musique" else []
        given = [
            f"task={task}",
            f"task.path={file}",
            "task.held_out.test=0.2",
            "preflight=off",
            "max_tokens=8",
            *more,
            *tools,
        ]
        found.append(Input("data", name, given, right))
    return found


# -- models


def models() -> list[Input]:
    source = SHIPPED / "wordmath"
    weights = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    first = next(iter(weights))
    found: list[Input] = []

    def model(name: str, change: Callable[[Path], object], *more: str, fine: bool = False) -> None:
        """Add a copy of the demo's model with a change."""
        folder = HERE / "models" / name.replace(" ", "_")
        shutil.copytree(source, folder)
        change(folder)
        given = [*WORDS, "model=path", f"model.path={folder}", *more]
        found.append(Input("model", name, given, fine))

    def saved(tensors: dict[str, torch.Tensor]) -> Callable[[Path], object]:
        return lambda folder: save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    def configured(**values: object) -> Callable[[Path], object]:
        return lambda folder: (folder / "config.json").write_text(json.dumps(config | values))

    def file(name: str, content: str | bytes | None) -> Callable[[Path], object]:
        def change(folder: Path) -> None:
            (folder / name).unlink(missing_ok=True)
            if content is not None:
                (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

        return change

    whole = (source / "model.safetensors").read_bytes()
    model("no config", file("config.json", None))
    model("config is no JSON", file("config.json", "{not json"))
    model("config is a list", file("config.json", "[]"))
    model("config is empty", file("config.json", "{}"))
    model("unknown model_type", configured(model_type="mystery"))
    model("no model_type", configured(model_type=None))
    model("no weights", file("model.safetensors", None))
    model("weights are empty", file("model.safetensors", b""))
    model("weights are cut", file("model.safetensors", whole[: len(whole) // 2]))
    model("weights are noise", file("model.safetensors", os.urandom(10000)))
    model("a tensor is missing", saved({name: one for name, one in weights.items() if name != first}))
    model("a tensor has another shape", saved(weights | {first: weights[first][:-3].clone()}))
    model("a weight is NaN", saved(weights | {first: weights[first] * torch.nan}))
    model("a weight is infinite", saved(weights | {first: weights[first] * torch.inf}))
    model("weights are 0", saved({name: one * 0 for name, one in weights.items()}), "preflight=on")
    model("weights are integers", saved({name: one.int() for name, one in weights.items()}), "preflight=on")
    model("another width", configured(hidden_size=96))
    model("another number of layers", configured(num_hidden_layers=5))
    model("heads do not divide", configured(num_attention_heads=7))
    model("a width is a text", configured(hidden_size="wide"))
    model("no layers", configured(num_hidden_layers=0))
    model("vocabulary is smaller", configured(vocab_size=100))
    model("context of 4 tokens", configured(max_position_embeddings=4))
    model("context is null", configured(max_position_embeddings=None))
    model("no end token", configured(eos_token_id=None), fine=True)
    model("end token is beyond the vocabulary", configured(eos_token_id=10**6))
    model("end token is a text", configured(eos_token_id="end"))
    model("generation_config is no JSON", file("generation_config.json", "{"), fine=True)
    model("no tokenizer", lambda folder: [(folder / name).unlink() for name in os.listdir(source) if "token" in name])
    model("tokenizer is cut", file("tokenizer.json", (source / "tokenizer.json").read_bytes()[:500]))
    model("tokenizer is empty", file("tokenizer.json", "{}"))
    model("tokenizer_config is no JSON", file("tokenizer_config.json", "["))
    model(
        "index names a missing shard",
        lambda folder: (
            (folder / "model.safetensors").unlink(),
            (folder / "model.safetensors.index.json").write_text(
                json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, "model-1.safetensors")})
            ),
        ),
    )
    model(
        "pickle is noise",
        lambda folder: (
            (folder / "model.safetensors").unlink(),
            (folder / "pytorch_model.bin").write_bytes(os.urandom(999)),
        ),
    )
    model("adapter without a base", file("adapter_config.json", json.dumps({"peft_type": "LORA"})))
    model(
        "adapter of a missing base",
        file(
            "adapter_config.json",
            json.dumps(
                {"peft_type": "LORA", "base_model_name_or_path": "/nowhere", "r": 4, "target_modules": ["q_proj"]}
            ),
        ),
    )
    model(
        "adapter without weights",
        file(
            "adapter_config.json",
            json.dumps(
                {"peft_type": "LORA", "base_model_name_or_path": str(source), "r": 4, "target_modules": ["q_proj"]}
            ),
        ),
    )
    model("adapter_config is no JSON", file("adapter_config.json", "{"))

    def template(text: str | bytes) -> Callable[[Path], object]:
        return lambda folder: (
            (folder / "chat_template.jinja").unlink(missing_ok=True),
            (folder / "chat_template.jinja").write_bytes(text.encode() if isinstance(text, str) else text),
        )

    model("template has a syntax error", template("{% for m in messages %}{{ m.content }"))
    model("template ignores its messages", template("Hello."), "preflight=on")
    model("template is empty", template(""), "preflight=on")
    model("template raises", template("{{ raise_exception('no') }}"))
    model("template divides by 0", template("{{ 1 / 0 }}"))
    model("template has no end", template("{% for i in range(10**9) %}a{% endfor %}"))
    model("template is noise", template(os.urandom(300)))
    model("template has an unknown variable", template("{{ nothing.at.all }}"))
    model("no template for tools", template("{% for m in messages %}{{ m.content }}{% endfor %}"), "task=calculator")
    given = ["model=path", *WORDS]
    kinds = {"an encoder": "bert", "a seq2seq model": "t5", "a vision model": "vit", "a reward model": "llama"}
    for name, kind in kinds.items():
        folder = HERE / "models" / name.replace(" ", "_")
        shape = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 500}
        small = transformers.AutoConfig.for_model(
            kind, **shape | ({"d_model": 64, "num_layers": 1} if kind == "t5" else {})
        )
        if kind == "llama":
            transformers.AutoModelForSequenceClassification.from_config(small).save_pretrained(folder)
        else:
            transformers.AutoModel.from_config(small).save_pretrained(folder)
        for one in source.glob("*token*"):
            shutil.copy(one, folder)
        found.append(Input("model", name, [*given, f"model.path={folder}"]))
    for name, path in {
        "a missing folder": "/nowhere/at/all",
        "a file": source / "config.json",
        "an empty path": "''",
        "a hub id, offline": "a/b",
        "an empty folder": HERE / "models" / "empty",
        "an odd hub id": "a//b:c",
        "a path with ..": "../../..",
    }.items():
        (HERE / "models" / "empty").mkdir(exist_ok=True)
        found.append(Input("model", name, [*given, f"model.path={path}"]))
    template_file = written("template.jinja", "{{ messages")
    for name, value in {
        "template file is broken": template_file,
        "template file is missing": "/nowhere.jinja",
        "template file is a folder": HERE,
        "template file is noise": written("noise.jinja", os.urandom(99)),
    }.items():
        found.append(Input("model", name, [*WORDS, f"model.chat_template={value}"]))
    for name, value in {
        "unknown template variable": "+renderer.template_args.nothing=1",
        "template variable is messages": "+renderer.template_args.messages=[]",
        "template variable is tokenize": "+renderer.template_args.tokenize=true",
    }.items():
        found.append(Input("model", name, [*WORDS, value], name.startswith("unknown")))
    for name, value in {
        "attention unknown": "model.attn_implementation=magic",
        "revision": "model.revision=nope",
        "stop id beyond": "rollout.sampling.stop_ids=[99999]",
        "lora targets": "adapter.target_modules=[nothing]",
        "lora targets a number": "adapter.target_modules=3",
    }.items():
        lora = ["adapter=lora"] if "lora" in name else []
        found.append(Input("model", name, [*WORDS, *lora, value], name == "revision"))
    return found


# -- rewards

HEAD = "import math, os, sys, time, random, threading\nimport numpy as np\nimport torch\n"
BODIES = {  # the body of reward(completions, **columns)
    "raises": "raise ValueError('no')",
    "raises a class": "raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})()",
    "divides by 0": "return [1 / 0 for _ in completions]",
    "returns None": "return None",
    "returns a number": "return 1.0",
    "returns too few": "return [1.0]",
    "returns too many": "return [1.0] * 9",
    "returns a dict": "return {i: 1.0 for i in range(len(completions))}",
    "returns texts": "return ['1'] * len(completions)",
    "returns NaN": "return [math.nan] * len(completions)",
    "returns infinity": "return [math.inf] * len(completions)",
    "returns 1e30": "return [1e30] * len(completions)",
    "returns lists": "return [[1.0]] * len(completions)",
    "returns complex numbers": "return [1j] * len(completions)",
    "returns a matrix": "return torch.ones(len(completions), 2)",
    "returns an endless generator": "return (1.0 for _ in iter(int, 1))",
    "returns a set": "return {1.0, 2.0}",
    "returns a string": "return 'ab'",
    "sys.exit": "sys.exit(0)",
    "os._exit": "os._exit(0)",
    "os._exit in a thread": "thread = threading.Thread(target=os._exit, args=(0,)); thread.start(); thread.join()",
    "os.abort": "os.abort()",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "GeneratorExit": "raise GeneratorExit",
    "StopIteration": "raise StopIteration",
    "MemoryError": "raise MemoryError",
    "recursion": "return reward(completions)",
    "changes the folder": "os.chdir('/'); return [1.0] * len(completions)",
    "removes the folder": "d = os.path.join(os.environ['HERE'], 'd%s' % time.time_ns()); os.mkdir(d); os.chdir(d); os.rmdir(d); "
    "return [1.0] * len(completions)",
    "changes the default dtype": "torch.set_default_dtype(torch.float64); return [1.0] * len(completions)",
    "closes stdout": "sys.stdout.close(); return [1.0] * len(completions)",
    "does not return": "time.sleep(999)",
    "computes for ever": "while True: pass",
    "takes all arguments away": "completions.clear(); return []",
}
FINE = {  # these are no mistakes: the run goes on
    "forks": "pid = os.fork()\n    if not pid: os._exit(0)\n    os.waitpid(pid, 0)\n    return [1.0] * len(completions)",
    "returns in a fork": "os.fork(); return [float(len(c)) for c in completions]",
    "seeds all generators": "random.seed(0), np.random.seed(0), torch.manual_seed(0); return np.random.rand(len(completions))",
    "returns a generator": "return (float(len(c)) for c in completions)",
    "returns an array": "return np.ones(len(completions))",
    "returns a tensor": "return torch.ones(len(completions))",
    "returns booleans": "return [len(c) > 3 for c in completions]",
    "returns None for each": "return [None] * len(completions)",
    "changes its columns": "columns.clear(); return [float(len(c)) for c in completions]",
    "starts a thread": "threading.Thread(target=time.sleep, args=(9,), daemon=True).start(); return [1.0] * len(completions)",
    "turns gradients off": "torch.set_grad_enabled(False); return [float(len(c)) for c in completions]",
    "ignores warnings": "import warnings; warnings.simplefilter('error'); return [float(len(c)) for c in completions]",
    "closes all files": "os.closerange(0, 3); return [1.0] * len(completions)",
    "sets threads": "torch.set_num_threads(2); return [float(len(c)) for c in completions]",
}


def rewards() -> list[Input]:
    file = written("data/good.jsonl", lines(ROWS))
    base = [*JSONL, f"task.path={file}", "score_timeout=3", "rollout.prompts=4"]
    found = []
    for i, (name, body) in enumerate({**BODIES, **FINE}.items()):
        code = f"{HEAD}\ndef reward(completions, **columns):\n    {body}\n"
        given = f"task.rewards={written(f'rewards/r{i}.py', code)}:reward"
        fine = name in FINE or name in ("does not return", "computes for ever")  # counted as rollout/timeout
        found.append(Input("reward", name, [*base, given], fine, environment={"HERE": str(HERE)}))
    files = {
        "syntax error": "def reward(:\n",
        "raises on import": "1 / 0\n",
        "exits on import": "import sys; sys.exit(0)\n",
        "leaves on import": "import os; os._exit(0)\n",
        "missing function": "x = 1\n",
        "not callable": "reward = 3\n",
        "is a class": "class reward:\n    pass\n",
        "is no Python": "\0\1\2",
        "imports a missing module": "import nothing_at_all\n",
        "wrong arguments": "def reward(a, b, c):\n    return [1.0]\n",
        "no arguments": "def reward():\n    return [1.0]\n",
        "a missing column": "def reward(completions, nothing):\n    return [1.0] * len(completions)\n",
        "only positional": "def reward(completions, /):\n    return [1.0] * len(completions)\n",
        "a coroutine that raises": "async def reward(completions, **columns):\n    raise ValueError('no')\n",
        "a coroutine that exits": "async def reward(completions, **columns):\n    raise SystemExit(0)\n",
        "a coroutine that leaves": "import os\nasync def reward(completions, **columns):\n    os._exit(0)\n",
        "a coroutine that hangs": "import asyncio\nasync def reward(completions, **columns):\n    await asyncio.sleep(999)\n",
        "a coroutine that blocks": "import time\nasync def reward(completions, **columns):\n    time.sleep(999)\n",
        "latin-1": "# é\ndef reward(completions, **columns):\n    return 1\n".encode("latin-1"),
    }
    for i, (name, code) in enumerate(files.items()):
        given = f"task.rewards={written(f'rewards/f{i}.py', code)}:reward"
        found.append(Input("reward", name, [*base, given], name.endswith(("hangs", "blocks"))))
    for name, value in {
        "missing file": "/nowhere.py:reward",
        "file without a name": f"{HERE}/rewards/f0.py",
        "unknown name": "corect",
        "missing module": "no.such.module",
        "a folder": str(HERE),
        "an empty text": "''",
        "an empty list": "[]",
        "twice": "[correct,correct]",
        "a hub id": "no/such",
        "a number": "3",
        "null": "null",
    }.items():
        found.append(Input("reward", name, [*base, f"task.rewards={value}"]))
    for name, value in {
        "weights too many": "[1,2]",
        "weight NaN": "[nan]",
        "weights a text": "heavy",
        "weight infinite": "[inf]",
    }.items():
        found.append(Input("reward", name, [*base, f"task.weights={value}"]))
    return found


# -- tasks of the user's own


TASK = """import os, sys, time
from grpo.env.messages import Message
from grpo.env.types import Reward, SingleTurn

class Mine:
    def examples(self, split):
        {examples}

    def build(self, example):
        {build}

    def score(self, example, trajectory):
        {score}
"""
GOOD = {
    "examples": "return [{'n': i} for i in range(9)]",
    "build": "return SingleTurn((Message('user', 'Count to %s.' % example['n']),))",
    "score": "return Reward(float(len(trajectory.answer)), True)",
}
WRONG = {
    "no examples": {"examples": "return []"},
    "examples are None": {"examples": "return None"},
    "examples raise": {"examples": "1 / 0"},
    "examples leave": {"examples": "os._exit(0)"},
    "build raises": {"build": "1 / 0"},
    "build returns None": {"build": "return None"},
    "build leaves": {"build": "os._exit(0)"},
    "build exits": {"build": "sys.exit(0)"},
    "build hangs": {"build": "time.sleep(999)"},
    "no messages": {"build": "return SingleTurn(())"},
    "messages are texts": {"build": "return SingleTurn(('a',))"},
    "score raises": {"score": "1 / 0"},
    "score is a number": {"score": "return 1.0"},
    "score is None": {"score": "return None"},
    "score leaves": {"score": "os._exit(0)"},
    "score aborts": {"score": "os.abort()"},
    "score is infinite": {"score": "return Reward(float('inf'), True)"},
    "score hangs": {"score": "time.sleep(999)"},
    "parts are texts": {"score": "return Reward(1.0, True, {'a': 'b'})"},
}


def tasks() -> list[Input]:
    found = []
    for i, (name, change) in enumerate(WRONG.items()):
        code = TASK.format(**GOOD | change)
        written(f"tasks/bad_task_{i}.py", code)
        given = [
            "task=wordmath",
            "~task",
            f"+task._target_=bad_task_{i}.Mine",
            "step_timeout=3",
            "score_timeout=3",
            "preflight=off",
            "max_tokens=8",
        ]
        found.append(Input("task", name, given, environment={"PYTHONPATH": f"{HERE}/tasks"}))
    return found


# -- checkpoints, eval.py, the server, the command line, the environment


def checkpoints(run: Path) -> list[Input]:
    good = (run / "checkpoints" / "last.ckpt").resolve()
    whole = PlainCheckpoints().load_checkpoint(good)
    found = []

    def pickled(name: str, checkpoint: object) -> Path:
        file = written(f"checkpoints/{name}.ckpt", b"")
        torch.save(checkpoint, file)
        return file

    def damaged(name: str, file: str, content: bytes | None) -> Path:
        folder = HERE / "damaged" / name / "00001.ckpt"
        shutil.copytree(good, folder)
        (folder / file).unlink() if content is None else (folder / file).write_bytes(content)
        return folder

    tensors = (good / "tensors.safetensors").read_bytes()
    middle = len(tensors) // 2
    flipped = tensors[:middle] + bytes([tensors[middle] ^ 1]) + tensors[middle + 1 :]
    files = {
        "missing": "/nowhere.ckpt",
        "a folder": run / "rollouts",
        "of safetensors": run / "checkpoints" / "last" / "model.safetensors",
        "a null device": "/dev/null",
        "empty tensors": damaged("empty", "tensors.safetensors", b""),
        "cut tensors": damaged("cut", "tensors.safetensors", tensors[:middle]),
        "a flipped bit": damaged("bit", "tensors.safetensors", flipped),
        "no tensors": damaged("none", "tensors.safetensors", None),
        "a state of text": damaged("text", "state.json", b"hello"),
        "no checksums": damaged("unsummed", "sha256.json", None),
        "checksums of text": damaged("sums", "sha256.json", b"[1, 2]"),
        "a pickle": pickled("pickle", whole),
    }
    for name, file in files.items():
        found.append(Input("checkpoint", name, [*WORDS, f"ckpt_path={file}", "rollout.num_rollouts=2"]))
    last = f"ckpt_path={run}/checkpoints/last.ckpt"
    for name, more in {
        "of another adapter": ["adapter=lora"],
        "of another model": ["task=calculator"],
        "of another optimizer": ["optim=sgd"],
        "shorter than it is": ["rollout.num_rollouts=1"],
    }.items():
        found.append(
            Input("checkpoint", name, [*WORDS, "rollout.num_rollouts=2", *more, last], name.startswith("shorter"))
        )
    return found


def evaluations(run: Path) -> list[Input]:
    broken = HERE / "broken_run"
    shutil.copytree(run, broken)
    (broken / "config.yaml").write_text("{[")
    odd = HERE / "odd_run"
    shutil.copytree(run, odd)
    (odd / "config.yaml").write_text("just a text\n")
    small = ["eval.limit=2", "max_tokens=8", "engine=transformers", "task.test_size=4"]
    found = {
        "missing run": ["run=/nowhere"],
        "run is a file": [f"run={run}/config.yaml"],
        "run is empty": [f"run={HERE}/data/folder"],
        "config is no YAML": [f"run={broken}"],
        "config is a text": [f"run={odd}"],
        "compare one": [f"compare={run}"],
        "compare missing": ["compare=/a,/b"],
        "compare without evaluations": [f"compare={HERE}/data,{HERE}/models"],
        "compare a file": [f"compare={run}/config.yaml,{run}"],
        "after": [f"compare={run},{run}", "after=99"],
        "limit 0": ["eval.limit=0"],
        "samples 0": ["eval.samples=0"],
        "split unknown": ["eval.split=dev"],
        "by a text": ["eval.by=steps"],
        "greedy with several samples": ["eval.samples=4"],
        "unknown key": ["eval.limt=3"],
        "a checkpoint that is missing": [f"run={run}/checkpoints/none.ckpt"],
        "two devices": ["trainer.devices=2"],
        "output is a file": [f"hydra.run.dir={run}/config.yaml"],
        "training key": ["rollout.prompts=2"],
    }
    fine = {"greedy with several samples", "after"}
    return [
        Input("eval", name, [*(() if "compare" in given[0] else small), *given], name in fine, "eval.py")
        for name, given in found.items()
    ]


def servers() -> list[Input]:
    found = {
        "port 99999": ["port=99999"],
        "port a text": ["port=http"],
        "port 1 and no right": ["port=-1"],
        "host unknown": ["host=no.such.host"],
        "host empty": ["host=''"],
        "device unknown": ["device=tpu9"],
        "unknown key": ["prt=1"],
        "missing model": ["model=path", "model.path=/nowhere"],
        "model without a path": ["model=path"],
        "unknown engine": ["engine=fast"],
        "a task": ["task=gsm8k"],
    }
    return [Input("serve", name, given, program="-m grpo.serve") for name, given in found.items()]


def commands() -> list[Input]:
    found = {
        "unknown key": ["rollout.prompt=3"],
        "unknown group": ["tsk=gsm8k"],
        "unknown option": ["task=gsm9k"],
        "missing value": ["rollout.prompts"],
        "no key": ["=3"],
        "empty value": ["rollout.prompts="],
        "open bracket": ["rollout.sampling.stop_ids=[1"],
        "open brace": ["engine={a: 1"],
        "open quote": ["task.path='a"],
        "a sweep without -m": ["seed=1,2"],
        "two groups": ["task=gsm8k,math"],
        "group is a value": ["task.rewards.0=x"],
        "a dash": ["--prompts=3"],
        "help of nothing": ["--cfg", "nothing"],
        "package unknown": ["--cfg", "job", "--package", "no.such"],
        "add what is there": ["+seed=1"],
        "delete what is not there": ["~nothing"],
        "delete a group": ["~task"],
        "interpolation": ["seed=${nothing}"],
        "interpolation of itself": ["seed=${seed}"],
        "resolver unknown": ["seed=${magic:1}"],
        "a group below a value": ["seed.a=1"],
        "missing config dir": ["--config-dir", "/nowhere"],
        "config name": ["--config-name", "nothing"],
        "a space": ["rollout.prompts = 3"],
        "nested option": ["algo/kl=nothing"],
        "unknown axis": ["algo/nothing=loss"],
        "experiment": ["experiment=nothing"],
        "null group": ["algo=null"],
        "group is a list": ["task=[gsm8k]"],
        "unicode": ["rollout.prömpts=3"],
        "run dir is a file": [f"hydra.run.dir={HERE}/template.jinja"],
        "run dir cannot be made": ["hydra.run.dir=/proc/x"],
        "run dir is empty": ["hydra.run.dir="],
        "missing path": ["task=jsonl", "task.rewards=correct"],
        "bad sweep": ["-m", "seed=range(1,0)"],
        "bad sweep value": ["-m", "seed=0,x"],
        "sweep of nothing": ["-m", "sweep=nothing"],
        "bad choice": ["-m", "seed=choice(1"],
        "target unknown": ["optim.optimizer._target_=torch.optim.Magic"],
        "target is a module": ["optim.optimizer._target_=torch"],
        "target missing": ["engine._target_=no.such.Engine"],
        "target exits": ["optim.schedule._target_=sys.exit"],
        "group by value": ["optim.optimizer=adam"],
        "whole node": ["rollout.sampling=3"],
        "too many prompts": ["rollout.prompts=1000000000000"],
        "too many rows": ["task.train_size=1000000000000"],
        "too large an adapter": ["adapter=lora", "adapter.r=1000000000000"],
        "too many devices": ["trainer=cpu", "trainer.devices=1000"],
        "machines without a launcher": ["trainer.num_nodes=2"],
        "nothing to replay": ["replay=abc"],
        "a stop that is not evaluated": [
            "callbacks=[early_stopping]",
            "callbacks.early_stopping.monitor=abc",
            "eval.every=1",
        ],
        "a folder below a file": ["callbacks=[checkpoint]", "callbacks.checkpoint.folder=/dev/null/x"],
        "metrics below a file": ["logger=csv", "logger.csv.file=/dev/null/x"],
        "a stop without evaluations": ["callbacks=[early_stopping]", "eval.every=0"],
    }
    return [Input("command", name, [*WORDS, *given], name == "run dir is empty") for name, given in found.items()]


def environments() -> list[Input]:
    file = str(written("a_file", "x"))
    fine = {
        "CUDA_VISIBLE_DEVICES",
        "OMP_NUM_THREADS",
        "OMP_NUM_THREADS 0",
        "MASTER_PORT",
        "COLUMNS",
        "TOKENIZERS_PARALLELISM",
        "WORLD_SIZE",
        "LANG",
        "TERM",
        "HOME missing",
        "HF_HOME is a file",
    }
    found = {
        "HF_HOME is a file": {"HF_HOME": file},
        "OMP_NUM_THREADS": {"OMP_NUM_THREADS": "abc"},
        "OMP_NUM_THREADS 0": {"OMP_NUM_THREADS": "0"},
        "CUDA_VISIBLE_DEVICES": {"CUDA_VISIBLE_DEVICES": "one,two"},
        "MASTER_PORT": {"MASTER_PORT": "odd"},
        "COLUMNS": {"COLUMNS": "wide"},
        "TOKENIZERS_PARALLELISM": {"TOKENIZERS_PARALLELISM": "perhaps"},
        "LOCAL_RANK": {"LOCAL_RANK": "first"},
        "RANK": {"RANK": "7"},
        "WORLD_SIZE": {"WORLD_SIZE": "x"},
        "TMPDIR is missing": {"TMPDIR": "/nowhere"},
        "LANG": {"LANG": "xx_YY", "LC_ALL": "xx"},
        "TERM": {"TERM": "dumb"},
        "HOME missing": {"HOME": "/nowhere"},
        "SLURM": {"SLURM_NTASKS": "x", "SLURM_JOB_NAME": "y"},
    }
    return [
        Input("environment", name, list(WORDS), name in fine | {"TMPDIR is missing", "SLURM"}, environment=given)
        for name, given in found.items()
    ]


# -- the outcome


def started(given: Input, folder: Path) -> int:
    """Fork a process that runs the program. Returns its id."""
    if pid := os.fork():
        return pid
    os.setsid()
    os.environ |= given.environment
    sys.path[:0] = [str(ROOT), *given.environment.get("PYTHONPATH", "").split(":")]
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    train = given.program == "train.py"
    own = (
        []
        if given.program.startswith("-m") or any(one.startswith("hydra.run.dir") for one in given.arguments)
        else [f"hydra.run.dir={folder}/run"]
    )
    sweep = [f"hydra.sweep.dir={folder}/run"] if "-m" in given.arguments else []
    sys.argv = [given.program, *(SMALL if train else []), *given.arguments, *own, *sweep]
    os.chdir(folder)  # some inputs write to the working directory
    if given.kind == "environment":  # libraries read it when they are imported
        os.execv(sys.executable, [sys.executable, str(ROOT / given.program), *sys.argv[1:]])
    code = 0
    try:
        if given.program.startswith("-m"):
            runpy.run_module("grpo.serve", run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(ROOT / given.program), run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    with contextlib.suppress(Exception):
        sys.stdout.flush(), sys.stderr.flush()
    atexit._run_exitfuncs()
    LEAVE(code)


def outcome(given: Input, number: int) -> tuple[str, str, float]:
    """Run an input. Returns its outcome, its last line, and the seconds."""
    folder, begun, status = HERE / "out" / f"{number:03d}", time.perf_counter(), None
    folder.mkdir(parents=True)
    pid = started(given, folder)
    while status is None and time.perf_counter() - begun < LIMIT:
        done, status = os.waitpid(pid, os.WNOHANG)
        status = status if done else None
        time.sleep(0.02)
    hung = status is None
    if hung:
        os.killpg(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
    said = (folder / "err").read_text(errors="replace")
    words = ("error:", "Fatal Python error", "stopped", "train.py: error", "usage:")
    told = [line for line in said.splitlines() if line.startswith(words)]
    last = (told or said.strip().splitlines() or [""])[-1]
    errors = sum(line.startswith("error:") for line in told)
    if hung:
        name = "hang"
    elif "Traceback (most recent call last)" in said:
        name = "traceback"
    elif status == 0:
        name = "accepted"
    else:
        name = "refused" if errors == 1 or (told and not errors) else "silent" if not errors else "several lines"
    return name, f"[{os.waitstatus_to_exitcode(status)}] {last}", time.perf_counter() - begun


def a_run() -> Path:
    """Make a run of one rollout, with checkpoints. Returns its folder."""
    folder = HERE / "run"
    settings = ["callbacks=[checkpoint]", "eval.every=1", "logger=csv", f"hydra.run.dir={folder}"]
    found, line, _ = outcome(Input("", "", [*WORDS, *settings]), 999)
    assert found == "accepted", line
    return folder


def main(asked: Sequence[str]) -> int:
    HERE.mkdir()
    import grpo.training.module
    import grpo.training.trainer  # noqa: F401

    show = "--all" in asked
    asked = [word for word in asked if word != "--all"]
    run = a_run()
    every = [
        *data(),
        *models(),
        *rewards(),
        *tasks(),
        *checkpoints(run),
        *evaluations(run),
        *servers(),
        *commands(),
        *environments(),
    ]
    chosen = [one for one in every if not asked or any(word in f"{one.kind}: {one.name}" for word in asked)]
    counts, wrong = Counter(), []
    for number, given in enumerate(chosen):
        found, line, seconds = outcome(given, number)
        counts[given.kind, found] += 1
        bad = found not in ("refused", "accepted") or (found == "accepted" and not given.fine)
        shown = f"{given.kind}: {given.name}: {found.upper() if bad else found}: {line[:600]} ({seconds:.0f} s)"
        wrong += [shown] * bad
        if show or bad:
            print(shown, flush=True)
    names = ["refused", "accepted", "several lines", "silent", "traceback", "hang"]
    print(f"\n{'kind':12}" + "".join(f"{name:>15}" for name in names))
    for kind in dict.fromkeys(one.kind for one in chosen):
        print(f"{kind:12}" + "".join(f"{counts[kind, name]:15}" for name in names))
    print(f"{len(chosen)} inputs, {len(wrong)} not as they should be; what they printed is in {HERE}/out")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
