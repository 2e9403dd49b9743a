"""Any program that calls a model over HTTP: it plays an episode, and its calls are the turns of the policy.

The program is the environment, turned inside out: `start` starts it and returns its first call, `step` answers a call and returns
the next one. Message space only, as in every environment.
"""

import asyncio
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from grpo.env.messages import Message
from grpo.env.tokens import Completion
from grpo.env.types import Action, Env, Example, Reward, State, Trajectory
from grpo.extras.datasets.dataset import Dataset
from grpo.extras.network import child
from grpo.extras.serve.dialects.request import Answer, CompletionRequest, written_to
from grpo.extras.serve.sessions import NoAnswer, sessions
from grpo.extras.tools.programs import program_variables
from grpo.rewards.combined import Weights
from grpo.rewards.resolve import Functions
from grpo.rewards.row_task import RowTask
from grpo.system.errors import UserError
from grpo.system.files import strict_json
from grpo.system.ranges import Port

WAITING = 64  # unanswered calls of a program
FILE_BLOCKS = 1 << 21  # of 512 bytes: the largest file that a program may write, its stderr too
ENDED = "this session has ended"


class AgentEnv:
    """One run of a program. `ask` and `post` are called by threads of the server, the others as those of every environment.

    task: has the `server` of the sessions and the `words` of the program. solved: the reward from which a posted one is right.
    """

    own_prompts = True

    def __init__(self, task: Any, example: Example, seed: int, solved: float) -> None:
        self.task, self.example, self.seed, self.solved = task, example, seed, solved
        self.name, self.folder, self.program = "", "", None
        self.calls: list[tuple[CompletionRequest, Future]] = []  # that wait for the policy, the oldest first
        self.reward: Reward | None = None
        self.code: int | None = None  # of the program that has ended

    async def start(self) -> State:
        self.loop, self.came = asyncio.get_running_loop(), asyncio.Queue()
        self.name, addresses = self.task.server.opened(self)
        self.begin(addresses)
        if (state := await self.next()) is None:
            raise RuntimeError("the program ended and never called the model; its address is in OPENAI_BASE_URL")
        return state

    def begin(self, addresses: dict[str, str]) -> None:
        """Start the program, or let one from outside begin."""
        if self.task.words:
            self.run(addresses)
        else:
            invitation = {**addresses, "example": self.example, "seed": self.seed}
            self.task.server.waiting.put((self.name, invitation))

    def run(self, addresses: dict[str, str]) -> None:
        """Start the program in a new folder."""
        self.folder = tempfile.mkdtemp(prefix="grpo-agent-")
        example = Path(self.folder, "example.json")
        example.write_text(strict_json(self.example, ensure_ascii=False, default=str), encoding="utf-8")
        variables = {**program_variables(), **addresses, "GRPO_EXAMPLE": str(example), "GRPO_SEED": str(self.seed)}
        words = ["sh", "-c", f'ulimit -f {FILE_BLOCKS}; exec "$@"', "sh", *self.task.words]
        with Path(self.folder, "stderr").open("wb") as errors:
            output = {"stdout": subprocess.DEVNULL, "stderr": errors}
            self.program = child.start(words, cwd=self.folder, env=variables, **output)
        threading.Thread(target=lambda: self.end(self.program.wait()), name="program", daemon=True).start()

    def end(self, code: int) -> None:
        """Note that the program has ended. Calls that still wait for an answer are dropped."""
        self.code = code
        self.loop.call_soon_threadsafe(self.came.put_nowait, None)

    def ask(self, request: CompletionRequest) -> Answer:
        """Wait for the policy's answer to a call."""
        if len(self.calls) >= WAITING:
            raise NoAnswer(f"{WAITING} calls of this session wait for their answers: wait for one of them", 429)
        self.calls.append((request, future := Future()))
        if self.name not in self.task.server.open:  # `close` may have missed it
            raise NoAnswer(ENDED, 410)
        self.loop.call_soon_threadsafe(self.came.put_nowait, None)
        return future.result()

    def post(self, reward: Reward | None) -> None:
        """Take the reward, with which the episode of a program from outside ends."""
        self.reward = reward
        if not self.task.words:
            self.end(0)

    async def next(self) -> State | None:
        """Return the next call of the program; None once it has ended."""
        await self.came.get()
        if self.code and self.reward is None:
            raise RuntimeError(f"the program ended with exit code {self.code}: {self.last_line()}")
        if self.code is not None:
            return None
        call, _ = self.calls[0]
        raw = call.prompt if isinstance(call.prompt, str) else f"{len(call.prompt or ())} token ids"
        messages = call.messages or (Message("user", raw),)
        return State(messages, call.tools, call.prompt, call.stop, call.max_tokens)

    async def step(self, action: Action) -> State | None:
        completion = Completion(action.ids, action.logprobs, "length" if action.truncated else "stop")
        request, future = self.calls.pop(0)
        future.set_result(Answer(written_to(request, action.message), completion, action.prompt_ids))
        return await self.next()

    def outcome(self) -> Reward | None:
        return self.reward

    def last_line(self) -> str:
        """Return the last line that the program has written to stderr."""
        last = ["tail", "-n", "1", str(Path(self.folder, "stderr"))]
        return subprocess.run(last, capture_output=True, text=True, errors="replace").stdout.strip()

    def close(self) -> None:
        self.task.server.open.pop(self.name, None)
        for _, future in self.calls:
            future.set_exception(NoAnswer(ENDED, 410))
        if self.program:
            child.stop([self.program])
            shutil.rmtree(self.folder, ignore_errors=True)


class Agent(RowTask):
    """command: the program that plays an episode; None: programs from outside, which ask for episodes at `port`, with the key in
    $GRPO_AGENT_KEY. prompt: the column that tells rows apart. gold: the column with the right answer, if the rows have one.
    rows: further arguments of `Dataset`.

    The reward is the one that the program posts, else that of the reward functions for the policy's last message.
    """

    def __init__(
        self,
        path: str,
        command: str | None = None,
        rewards: Functions = "correct",
        weights: Weights = None,
        solved: float = 1.0,
        prompt: str = "prompt",
        gold: str = "answer",
        port: Port = 0,
        **rows: Any,
    ) -> None:
        super().__init__(Dataset(path, (prompt,), **rows), rewards, weights, solved)
        self.gold_column, self.prompt = gold, prompt
        words = shlex.split(command or "")
        # files by their full paths, because the program runs in another folder
        self.words = [os.path.abspath(word) if Path(word).is_file() else word for word in words]
        if self.words and not shutil.which(self.words[0], path=program_variables()["PATH"]):
            raise UserError(f"task.command={command}: there is no such program; give one, as 'python my_agent.py'")
        key = "" if self.words else os.environ.get("GRPO_AGENT_KEY", "")
        if not self.words and not (key and port):
            needs = "task.port and the environment variable GRPO_AGENT_KEY, a secret that they send"
            raise UserError(f"task.command=null waits for programs from outside, and needs {needs}")
        self.looks = 2 if self.words else 0  # examples that are started to measure their prompts
        self.server = sessions(port, key)

    def messages(self, example: Example) -> tuple[Message, ...]:
        return (Message("user", str(example[self.prompt])),)

    def check(self, row: Example, where: str) -> None:
        self.rewards.check({*row, "gold"}, where)  # None in a row without an answer, which `correct` does not grade

    def build(self, example: Example, seed: int = 0) -> AgentEnv:
        return AgentEnv(self, example, seed, self.rewards.solved)

    def score_group(
        self, example: Example, trajectories: Sequence[Trajectory], envs: Sequence[Env] = ()
    ) -> list[Reward]:
        places = [i for i, trajectory in enumerate(trajectories) if trajectory.reward is None]
        rewards = [trajectory.reward for trajectory in trajectories]
        if places:
            without = [trajectories[i] for i in places]
            scored = super().score_group(example, without, [envs[i] for i in places] if envs else ())
            for i, reward in zip(places, scored, strict=True):
                rewards[i] = reward
        return rewards
