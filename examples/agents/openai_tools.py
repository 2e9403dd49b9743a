"""An agent on the official `openai` client: it answers a question with a calculator. Knows nothing of training.

python examples/agents/problems.py tools > tools.jsonl
python train.py task=agent model=tiny task.command="python examples/agents/openai_tools.py" task.path=tools.jsonl \\
  '+warm_start={worked_answers: tasks.calculator.worked_answers, clean_steps: 400}' \\
  rollout.prompts=4 rollout.num_rollouts=30 eval.limit=100 eval.batch=16 eval.every=15 max_tokens=32 max_turns=6
"""

import json
import os

from openai import OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Works out an expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


def calculator(expression: str) -> str:
    if not set(expression) <= set("0123456789+-*/() ") or len(expression) > 50 or "**" in expression:
        return "Error: give numbers with + - * / and parentheses"
    try:
        return f"{eval(expression):g}"
    except (SyntaxError, ZeroDivisionError, TypeError) as error:
        return f"Error: {error}"


def main(question: str) -> None:
    client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY are those of this episode
    messages = [{"role": "user", "content": question}]
    for _ in range(6):
        said = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL]).choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            return  # the policy's last message is the answer; the task compares it with the row's
        for call in said.tool_calls:
            result = calculator(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


if __name__ == "__main__":
    with open(os.environ["GRPO_EXAMPLE"]) as file:
        main(json.load(file)["prompt"])
