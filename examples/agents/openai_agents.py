"""An agent on a framework, the OpenAI Agents SDK (pip install openai-agents): the framework runs the loop and the tool.

python examples/agents/problems.py tools > tools.jsonl
python train.py task=agent model=tiny \\
  task.command="agents-env/bin/python examples/agents/openai_agents.py" task.path=tools.jsonl \\
  '+warm_start={worked_answers: tasks.calculator.worked_answers, clean_steps: 400}' \\
  rollout.prompts=2 rollout.num_rollouts=16 eval.limit=50 eval.batch=16 eval.every=16 max_tokens=32 max_turns=6
"""

import json
import os

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled
from openai_tools import calculator


@function_tool(name_override="calculator")
def tool(expression: str) -> str:
    """Works out an expression."""
    return calculator(expression)


def main(question: str) -> None:
    set_tracing_disabled(True)
    set_default_openai_api("chat_completions")  # "responses", its default, works too
    Runner.run_sync(Agent(name="solver", model="policy", tools=[tool]), question, max_turns=6)


if __name__ == "__main__":
    with open(os.environ["GRPO_EXAMPLE"]) as file:
        main(json.load(file)["prompt"])
