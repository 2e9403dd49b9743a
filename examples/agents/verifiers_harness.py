"""A multi-turn harness of verifiers 0.4 (pip install verifiers uv): the library runs the loop, the tool and the reward.

Its import takes seconds. So one process may play all episodes, given the run's address; with GRPO_EXAMPLE it plays one.

GRPO_AGENT_KEY=SECRET python train.py task=agent model=tiny task.port=8765 task.path=tools.jsonl preflight=off \\
  '+warm_start={worked_answers: tasks.calculator.worked_answers, clean_steps: 400}' \\
  rollout.prompts=2 rollout.num_rollouts=16 eval.limit=50 eval.batch=16 eval.every=16 max_tokens=32 max_turns=8
# beside it, as soon as it has printed its plan:
PYTHONPATH=$PWD/examples/agents GRPO_AGENT_KEY=SECRET verifiers-env/bin/python examples/agents/verifiers_harness.py http://127.0.0.1:8765
"""

import asyncio
import json
import os
import sys
import urllib.error
import urllib.request

from verifiers import v1 as vf
from verifiers_calculator import Data, Question

AGENT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": 6}
AT_ONCE = 4  # episodes


def post(url: str, body: dict) -> dict:
    headers = {"Authorization": f"Bearer {os.environ.get('GRPO_AGENT_KEY')}"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as reply:
        return json.load(reply)


async def play(env: vf.Env, row: dict, told: dict) -> None:
    client = vf.EvalClientConfig(base_url=told["OPENAI_BASE_URL"])
    task = Question(Data(idx=0, prompt=row["prompt"], answer=row["answer"]))
    [trace] = (await env.run_episode(task, vf.ModelContext("policy", client))).traces
    if not trace.ok:
        raise RuntimeError(trace.errors[-1].message)  # so this sample gets no reward
    body = {"reward": trace.reward, "parts": {"turns": trace.num_turns}}
    await asyncio.to_thread(post, told["GRPO_REWARD_URL"], body)


async def play_all(env: vf.Env, address: str) -> None:
    while True:
        try:
            told = await asyncio.to_thread(post, f"{address}/sessions", {})
            await play(env, told["example"], told)
        except (RuntimeError, urllib.error.HTTPError) as error:  # as HTTP's 503, where no episode waits
            print(error, file=sys.stderr)
        except OSError:  # the run has ended
            return


async def main() -> None:
    env = vf.load_environment(vf.SingleAgentEnvConfig(taskset={"id": "verifiers_calculator"}, agent=AGENT))
    async with env.serving():
        if path := os.environ.get("GRPO_EXAMPLE"):
            with open(path) as file:
                return await play(env, json.load(file), dict(os.environ))
        await asyncio.gather(*(play_all(env, sys.argv[1]) for _ in range(AT_ONCE)))


if __name__ == "__main__":
    asyncio.run(main())
