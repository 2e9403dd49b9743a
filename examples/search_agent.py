"""A search agent: a task, a tool and a reward in one file, trained by the Python API.

python examples/search_agent.py MODEL    # a chat model that calls tools: a folder or a hub id
"""

import random
import sys

import grpo
from grpo.env.messages import Message
from grpo.env.types import Example, Reward, Split, Trajectory
from grpo.extras.tools.env import ToolEnv

COUNTRIES = {"Lima": "Peru", "Oslo": "Norway", "Cairo": "Egypt", "Quito": "Ecuador", "Hanoi": "Vietnam"}


class Countries:
    """In which country does a person live? Two searches tell: the first one gives the city, the second one its country."""

    def examples(self, split: Split) -> list[Example]:
        dice = random.Random(split)
        return [{"person": f"{split} person {i}", "city": dice.choice(list(COUNTRIES))} for i in range(200)]

    def build(self, example: Example) -> ToolEnv:
        def search(query: str) -> str:
            """Look a person or a city up.

            Args:
                query: the name, and nothing else
            """
            if query == example["person"]:
                return f"{query} lives in {example['city']}."
            return f"{query} is a city in {COUNTRIES[query]}." if query in COUNTRIES else "There is no such entry."

        question = f"In which country does {example['person']} live? Search for the person, then for the city."
        return ToolEnv([Message("user", question)], [search])

    def score(self, example: Example, trajectory: Trajectory) -> Reward:
        right = COUNTRIES[example["city"]] in trajectory.answer
        found = any(example["city"] in message.content for message in trajectory.messages if message.role == "tool")
        return Reward(0.2 * found + 0.8 * right, correct=right, parts={"found": float(found)})


def main(model: str = "Qwen/Qwen2.5-0.5B-Instruct", **settings) -> None:
    defaults = {"algo": "dr_grpo", "max_tokens": 64, "max_turns": 4, "rollout.num_rollouts": 100}
    run = grpo.train(model, Countries(), **defaults | settings)
    print(f"held out: {run.accuracy.iloc[0]:.1%} before, {run.accuracy.iloc[-1]:.1%} after; {run.folder}/report.html")


if __name__ == "__main__":
    main(*sys.argv[1:])
