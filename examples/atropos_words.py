"""An environment of Atropos with small word problems, which model=tiny learns in minutes (docs/sources.md).

It runs in an environment of Python that has atroposlib, and knows nothing of this project. First make that environment; then
start three programs, each in a terminal of its own:

    python -m venv atropos && atropos/bin/pip install atroposlib==0.4.0

    atropos/bin/run-api --host 127.0.0.1 --port 8000

    python train.py source=atropos task=wordmath rollout.num_rollouts=20 resume=auto hydra.run.dir=outputs/words

    M=grpo/extras/demo/demo_models/wordmath
    atropos/bin/python examples/atropos_words.py serve --env.rollout_server_url http://127.0.0.1:8000 \\
      --env.tokenizer_name $M --openai.base_url http://127.0.0.1:9001/v1 --openai.model_name $M \\
      --env.group_size 8 --env.max_token_length 40
"""

import random
import re

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup

NAMES, THINGS = ("Sam", "Mia", "Tom", "Ana", "Ben", "Eva"), ("coins", "books", "cards", "shells", "apples", "pens")


def problem(number: int) -> tuple[str, int]:
    """Return a question of two steps and its answer."""
    rng = random.Random(number)
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    start, more, less = rng.randint(5, 20), rng.randint(2, 20), rng.randint(1, 6)
    story = f"{name} has {start} {things}. {name} finds {more} {things}. {name} loses {less} {things}."
    return f"{story} How many {things} does {name} have?", start + more - less


def score(text: str, answer: int) -> float:
    """Return 1 for the right number in the last box, else -1."""
    found = re.findall(r"\\boxed\{(\d+)\}", text)
    return 1.0 if found and int(found[-1]) == answer else -1.0


class Words(BaseEnv):
    """Samples a group of answers to each problem from the trainer, and scores them."""

    name = "words"

    @classmethod
    def config_init(cls):
        # a list: with a single configuration Atropos asks ports 9004 to 9007, whatever --openai.base_url says
        return BaseEnvConfig(wandb_name=cls.name, use_wandb=False), [APIServerConfig(server_type="vllm", api_key="x")]

    async def setup(self):
        self.number = 0

    async def get_next_item(self):
        self.number += 1
        return problem(self.number)

    async def collect_trajectories(self, item):
        question, answer = item
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.chat_completion(
                messages=[{"role": "user", "content": question}],
                n=self.config.group_size,
                max_tokens=self.config.max_token_length,
                temperature=1.0,
            )
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(
            tokens=[node.tokens for node in nodes],
            masks=[node.masked_tokens for node in nodes],
            inference_logprobs=[node.logprobs for node in nodes],
            scores=[score(node.full_text, answer) for node in nodes],
        )
        for key in ("advantages", "ref_logprobs", "messages", "generation_params", "images"):
            group[key] = None
        group["group_overrides"], group["overrides"] = {}, None
        return group, []

    async def evaluate(self, *args, **kwargs):
        pass


if __name__ == "__main__":
    Words.cli()
