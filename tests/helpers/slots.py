"""Tasks, engines and callbacks that the configurations of tests name."""

import os
import random
import threading
import time
from copy import deepcopy
from dataclasses import replace

import lightning as L

from grpo.engines.builtin.engine import TransformersEngine
from grpo.env.messages import Message
from grpo.env.tokens import Completion
from grpo.env.types import Example, Reward, SingleTurn, State, Trajectory
from tasks.gsm8k import GSM8K


class Varied(GSM8K):
    """GSM8K's questions with a reward that differs between samples of a random model, none of which would be right."""

    def score(self, example: Example, trajectory: Trajectory) -> Reward:
        value = len(trajectory.answer.encode()) % 7 / 7
        return Reward(value, correct=value > 0.5)


class Crash(L.Callback):
    """Fails in the middle of a rollout, and leaves as little as a kill: what came after the last checkpoint is lost."""

    def __init__(self, rollout: int) -> None:
        self.rollout = rollout

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if batch.rollout == self.rollout:
            error = RuntimeError("the disk is full")
            error.saves = False
            raise error


class Halves:
    """Questions by number. Even ones have a constant reward; the reward of the others depends on the answer."""

    def __init__(self, varied: bool = True) -> None:
        self.varied = varied

    def examples(self, split):
        return [{"number": number} for number in range(40)]

    def build(self, example):
        return SingleTurn((Message("user", str(example["number"])),))

    def score(self, example, trajectory):
        differs = self.varied and example["number"] % 2
        return Reward(len(trajectory.answer.encode()) % 7 / 7 if differs else 1.0, correct=False)


class Asked(L.Callback):
    """Sends a signal to this process in an update."""

    def __init__(self, update: int, number: int) -> None:
        self.update, self.number = update, number

    def on_before_optimizer_step(self, trainer, module, optimizer) -> None:
        if module.updates == self.update:
            os.kill(os.getpid(), self.number)


class Apart(TransformersEngine):
    """The built-in engine with a copy of the weights. It records which weights it received, and which it sampled with."""

    apart = True

    def __init__(self, max_cache_tokens: int = 65536) -> None:
        super().__init__(max_cache_tokens)
        Apart.loads, Apart.sampled = [], []

    def load_weights(self, model, version):
        self.loads.append(version)
        super().load_weights(deepcopy(model), version)

    def sample(self, *args):
        self.sampled.append(self.version)
        return super().sample(*args)


class Streams(Apart):
    """Several threads sample at once. Completions are sampled in pieces of `piece` tokens, and get new weights in between."""

    concurrent = in_flight = True

    def __init__(self, max_cache_tokens: int = 65536, piece: int = 3, pause: float = 0.0) -> None:
        super().__init__(max_cache_tokens)
        self.turn, self.piece, self.pause = threading.Lock(), piece, pause

    def load_weights(self, model, version):
        with self.turn:
            super().load_weights(model, version)

    def sample(self, prompts, sampling, seeds, done=None):
        made = [Completion((), (), "length", ()) for _ in prompts]
        while going := [i for i, c in enumerate(made) if c.finish == "length" and len(c.ids) < sampling.max_tokens]:
            time.sleep(self.pause)
            with self.turn:
                version = self.version
                some = replace(sampling, max_tokens=min(self.piece, sampling.max_tokens - len(made[going[0]].ids)))
                texts = [(*prompts[i], *made[i].ids) for i in going]
                more = super().sample(texts, some, [seeds[i] + len(made[i].ids) for i in going])
            for i, new in zip(going, more, strict=True):
                versions = (*made[i].versions, *(version,) * len(new.ids))
                made[i] = Completion(made[i].ids + new.ids, made[i].logprobs + new.logprobs, new.finish, versions)
                if done is not None and (new.finish == "stop" or len(made[i].ids) >= sampling.max_tokens):
                    done(i, made[i])
        return made


class Talk:
    """Says its lines, one per turn."""

    def __init__(self, lines):
        self.messages, self.lines = (Message("user", "begin"),), list(lines)

    def start(self):
        return State(self.messages)

    def step(self, action):
        if not self.lines:
            return None
        self.messages = (*self.messages, action.message, Message("user", self.lines.pop(0)))
        return State(self.messages)


class Dice:
    """Throws dice, as often as the example says, one throw per turn; the seed decides the numbers."""

    def __init__(self, size=12):
        self.size = size

    def examples(self, split):
        return [{"throws": 1 + i % 3} for i in range(self.size)]

    def build(self, example, seed):
        rng = random.Random(seed)
        return Talk([f"you threw {rng.randint(1, 6)}" for _ in range(example["throws"])])

    def score(self, example, trajectory):
        text = " ".join(message.content for message in trajectory.messages)
        return Reward(len(text) % 7 / 7, correct=False)
