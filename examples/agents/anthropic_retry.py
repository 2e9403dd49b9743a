"""An agent on the official `anthropic` client: after a wrong answer it asks a second time. It gives the reward itself.

pip install anthropic
python examples/agents/problems.py wordmath > wordmath.jsonl
python train.py task=agent model=tiny task.command="python examples/agents/anthropic_retry.py" task.path=wordmath.jsonl \\
  rollout.prompts=4 rollout.num_rollouts=20 eval.limit=50 eval.batch=16 eval.every=20 max_tokens=40
"""

import json
import os
import re
import urllib.request

from anthropic import Anthropic


def answer(client: Anthropic, question: str) -> str:
    asked = [{"role": "user", "content": question}]
    said = client.messages.create(model="policy", max_tokens=64, messages=asked)
    found = re.findall(r"\\boxed\{(.*?)\}", "".join(block.text for block in said.content))
    return found[-1] if found else ""


def post(reward: float, **parts: float) -> None:
    body = json.dumps({"reward": reward, "correct": reward == 1, "parts": parts}).encode()
    urllib.request.urlopen(urllib.request.Request(os.environ["GRPO_REWARD_URL"], body)).close()


def main(question: str, right: str) -> None:
    client = Anthropic()  # ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY are those of this episode
    for attempt in (1, 2):  # each is a conversation of its own, and so a row of this sample
        if answer(client, question) == right:
            return post(1 / attempt, attempts=attempt)
    post(0.0, attempts=2)


if __name__ == "__main__":
    with open(os.environ["GRPO_EXAMPLE"]) as file:
        row = json.load(file)
    main(row["prompt"], row["answer"])
