"""The cost of programs: the same episodes in this process, by programs from outside, and by a program that is started for each.

    python benchmarks/agents.py

Question, calls of a calculator, answer, on the demo's model. A program from outside (here a thread) only costs HTTP; a started
one also costs the start of a Python. Prints sampled tokens a second, the best of four rounds, and
their ratio to the first.
"""

import json
import os
import sys
import tempfile
import threading
import time
import urllib.request
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROMPTS, SIZE, ROUNDS = 8, 8, 4
PORT, KEY = 18765, "the key of this benchmark"


def send(url: str, body: dict, key: str = "") -> dict:
    headers = {"Authorization": f"Bearer {key}"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as reply:
        return json.load(reply)


def converse(base_url: str, reward_url: str, row: dict) -> None:
    """Play an episode by HTTP, and leave the reward to the task."""
    messages = [{"role": "user", "content": row["question"]}]
    while True:
        said = send(f"{base_url}/chat/completions", {"messages": messages, "tools": [row["tool"]]})["choices"][0][
            "message"
        ]
        messages.append(said)
        if not said.get("tool_calls"):
            send(reward_url, {"reward": None})
            return
        for call in said["tool_calls"]:
            text = json.loads(call["function"]["arguments"]).get("expression", "")
            try:
                result = f"{eval(text):g}" if set(text) <= set("0123456789+-*() ") and "**" not in text else "Error"
            except Exception as error:
                result = f"Error: {error}"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


def outside() -> None:
    """Play episodes as a program from outside, until this process ends."""
    while True:
        try:
            given = send(f"http://127.0.0.1:{PORT}/sessions", {}, KEY)
            converse(given["OPENAI_BASE_URL"], given["GRPO_REWARD_URL"], given["example"])
        except OSError:  # no episode waits, or one took too many turns
            time.sleep(0.01)


def main() -> None:
    from grpo.engines.builtin.engine import TransformersEngine
    from grpo.engines.protocol import Sampling
    from grpo.extras.tools.env import spec_of
    from grpo.extras.tools.renderer import TokenizerRenderer
    from grpo.models.pretrained import Pretrained
    from grpo.rollout.episodes import play
    from grpo.rollout.types import Limits
    from grpo.system.seeds import derive_seed
    from tasks.agent import Agent
    from tasks.calculator import Calculator, calculator

    trained = Pretrained(str(ROOT / "grpo/extras/demo/demo_models/calculator"))
    engine, renderer = TransformersEngine(), TokenizerRenderer(trained.tokenizer())
    engine.load_weights(trained.model(), 0)
    inside = Calculator(test_size=PROMPTS)
    rows = [{**row, "tool": spec_of(calculator).as_dict()} for row in inside.examples("test")]
    os.environ["GRPO_AGENT_KEY"] = KEY
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.jsonl")
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = {"path": str(file), "prompt": "question", "splits": {"train": "train"}}
        ways = {
            "in this process": inside,
            "programs from outside": Agent(**settings, port=PORT),
            "a program for each": Agent(**settings, command=f"{sys.executable} {__file__} episode"),
        }
        for _ in range(PROMPTS * SIZE):
            threading.Thread(target=outside, daemon=True).start()
        best = dict.fromkeys(ways, 0.0)
        for name in [*ways] * ROUNDS:
            began = time.perf_counter()
            limits, sampling = Limits(max_turns=6, step_timeout=300), Sampling(32)
            seeds = partial(derive_seed, 0)
            groups = play(ways[name], rows, SIZE, engine, renderer, sampling, seeds, limits)
            seconds = time.perf_counter() - began
            samples = [sample for group in groups for sample in group]
            assert not any(sample.trajectory.failed for sample in samples)
            best[name] = max(best[name], sum(sample.length for sample in samples) / seconds)
    for name, speed in best.items():
        print(f"{name:22}{speed:6.0f} tokens/s {speed / best['in this process']:6.0%}")


if __name__ == "__main__":
    if sys.argv[1:] == ["episode"]:
        row = json.loads(Path(os.environ["GRPO_EXAMPLE"]).read_text())
        converse(os.environ["OPENAI_BASE_URL"], os.environ["GRPO_REWARD_URL"], row)
    else:
        main()
