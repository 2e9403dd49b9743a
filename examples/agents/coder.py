"""A small coding agent: the policy writes a program, which runs in the project's sandbox; after a wrong output it tries again.

python examples/agents/problems.py tools > tools.jsonl
PYTHONPATH=examples/agents python train.py task=agent model=tiny \\
  task.command="python examples/agents/coder.py" task.path=tools.jsonl \\
  '+warm_start={worked_answers: problems.worked_programs, clean_steps: 400}' \\
  rollout.prompts=4 rollout.num_rollouts=30 eval.limit=100 eval.batch=16 eval.every=15 max_tokens=64
"""

import json
import os
import urllib.request

from grpo.extras.programs.sandbox import ProgramLimits, run_program

LIMITS = ProgramLimits(seconds=2.0)


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


def main(question: str, right: str) -> None:
    messages = [{"role": "user", "content": question}]
    said = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"model": "policy", "messages": messages})
    result = run_program(said["choices"][0]["message"]["content"], LIMITS)
    right = result.stdout.strip() == right
    post(os.environ["GRPO_REWARD_URL"], {"reward": float(right), "parts": {"runs": float(result.passed)}})


if __name__ == "__main__":
    with open(os.environ["GRPO_EXAMPLE"]) as file:
        row = json.load(file)
    main(row["prompt"], row["answer"])
