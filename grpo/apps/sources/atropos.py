"""The trainer's side of Atropos' run-api: register, wait for a batch, make groups of its items. docs/sources.md has the steps."""

import logging
import time
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import httpx2

from grpo.apps.sources.open_engine import OpenEngine
from grpo.env.renderer import TokenizerRenderer
from grpo.models.pretrained import Pretrained
from grpo.rollout.rollouts import Rollouts
from grpo.rollout.source.conversion import Conversion
from grpo.rollout.types import Group
from grpo.system.distributed import world_size
from grpo.system.errors import RolloutError, UserError
from grpo.system.ranges import Port, Seconds, enforced

log = logging.getLogger(__name__)

POLL, START = 0.25, 30.0  # seconds between two looks for a batch, and for the run-api to be there at first
TRIES = 5  # of a registration
SEEN = 20  # looks at a full queue without a batch, before a warning


class Atropos:
    """Gives the batches of a run-api, the newest first, as it does. Mutable: whether it is registered there.

    url: of the run-api. port: of this machine, on which environments sample from the run's engine while the run waits for a
    batch; 0: a free one. timeout: seconds without a sign of life of an environment, after which the run ends.
    """

    @enforced("source")
    def __init__(
        self,
        pretrained: Pretrained,
        renderer: TokenizerRenderer,
        url: str = "http://127.0.0.1:8000",
        port: Port = 9001,
        timeout: Seconds = 600.0,
    ) -> None:
        self.pretrained, self.renderer, self.port, self.timeout = pretrained, renderer, port, timeout
        self.http = httpx2.Client(base_url=url.rstrip("/"), timeout=60, trust_env=False)
        self.url, self.served, self.registered, self.again = url, None, False, False
        self.metrics: dict[str, float] = {}

    def groups(self, r: int, count: int, first: int, rollouts: Rollouts) -> list[Group]:
        """Return the groups of the next batch, which has plan.prompts * plan.group_size samples."""
        if world_size() > 1:
            raise UserError("source=atropos serves the engine of one device: set trainer.devices=1")
        if self.served is None:
            self.served = OpenEngine(rollouts, self.pretrained, self.renderer, self.port)
            self.convert = Conversion(self.pretrained, self.renderer, self.served.find)
            print(f"source=atropos: {self.advice()}", flush=True)
        with self.served.open():
            items = self.batch(r, rollouts)
        temperature = rollouts.plan.sampling.temperature
        samples = (samples_of(i, item, temperature) for i, item in enumerate(items))
        groups = self.convert.groups(chain.from_iterable(samples))
        turns = [turn.completion for group in groups for sample in group for turn in sample.turns]
        ages = [r - version for completion in turns for version in completion.versions or ()]
        self.metrics = {"rollout/staleness": sum(ages) / len(ages)} if ages else {}
        return groups

    def progress(self, rollouts: int) -> dict[str, float]:
        """Return the age of the weights that sampled, over the tokens for which it is known."""
        return self.metrics

    def close(self) -> None:
        """Stop the server."""
        self.http.close()
        if self.served:
            self.served.end()

    def advice(self) -> str:
        """Return how an environment is started."""
        flags = f"--env.rollout_server_url {self.url} --openai.server_type vllm --openai.base_url {self.served.url}/v1"
        return f"start environments with {flags}"

    def batch(self, r: int, rollouts: Rollouts) -> list[Mapping[str, Any]]:
        """Wait for a batch. Raises RolloutError if all environments seem to be dead."""
        size, sign, since, full = rollouts.plan.prompts * rollouts.plan.group_size, None, time.monotonic(), 0
        while True:
            if not self.registered:
                self.register(r, size, rollouts)
            answer = self.ask("/batch") or {}
            if answer.get("batch"):
                return answer["batch"]
            self.registered = "batch" in answer and "status" not in answer
            waiting = (self.ask("/status") or {}).get("queue_size", 0)
            full = full + 1 if waiting >= size else 0
            if full == SEEN:
                fix = "every group_size must divide rollout.prompts x rollout.group_size, and no group be larger than the others"
                log.warning("%d groups wait at %s, and none becomes a batch of %d: %s", waiting, self.url, size, fix)
            if (now := (waiting, self.served.answered)) != sign or self.served.batching.running:
                sign, since = now, time.monotonic()
            if time.monotonic() - since > self.timeout:
                line = f"no environment has sent or asked anything for {self.timeout:g} s ({waiting} groups wait at {self.url}"
                raise RolloutError(f"{line}, {self.served.answered} samples were given): {self.advice()}")
            time.sleep(POLL)

    def register(self, r: int, size: int, rollouts: Rollouts) -> None:
        """Register for batches of `size` samples, with an empty queue if the run-api has others. Raises RolloutError."""
        begun = time.monotonic()
        while (info := self.ask("/info")) is None:
            if time.monotonic() - begun > (self.timeout if self.again else START):
                fix = "start it with run-api --port N, or set source.url"
                raise RolloutError(f"Atropos API not reachable at {self.url}: {fix}")
            time.sleep(POLL)
        if self.again or info.get("batch_size") not in (-1, size):
            log.warning("the run-api at %s has lost this run or has another one: restart its environments", self.url)
        if info.get("batch_size") not in (-1, size):
            self.ask("/reset_data")
        steps = 2 * rollouts.plan.num_rollouts  # environments leave then: batches that a killed run has lost count too
        asked = {"batch_size": size, "max_token_len": self.pretrained.context(), "starting_step": r, "num_steps": steps}
        asked |= {"checkpoint_dir": f"{rollouts.folder}/checkpoints", "save_checkpoint_interval": 0}
        asked |= {"wandb_group": "", "wandb_project": ""}
        for attempt in range(TRIES):
            if isinstance((self.ask("/register", asked) or {}).get("uuid"), int):
                self.registered = self.again = True
                return
            time.sleep(POLL * 2**attempt)
        raise RolloutError(f"Registration failed: {self.url} gave no uuid in {TRIES} tries: is it Atropos' run-api?")

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Return an answer of the run-api; None if it gives none, or an error."""
        try:
            answer = self.http.request("GET" if body is None else "POST", path, json=body)
            return answer.json() if answer.is_success else None
        except (httpx2.HTTPError, ValueError):
            return None


def samples_of(p: int, item: Mapping[str, Any], temperature: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the sequences of an item as samples of group p. Raises RolloutError if its lists do not fit each other."""
    where, size = f"item {p} of the batch (environment {item.get('env_id')})", len(item["tokens"])
    names = ("tokens", "masks", "scores", "advantages", "inference_logprobs", "overrides")
    lists = {name: item.get(name) or [None] * size for name in names}
    if uneven := [f"{len(values)} {name}" for name, values in lists.items() if len(values) != size]:
        raise RolloutError(f"{where}: {size} sequences of tokens, but {', '.join(uneven)}")
    for s, (ids, mask, score, advantages, logprobs, own) in enumerate(zip(*lists.values(), strict=True)):
        place = f"{where}, sequence {s}"
        settings = {**(item.get("group_overrides") or {}), **(item.get("generation_params") or {}), **(own or {})}
        if (hot := settings.get("temperature", temperature)) != temperature:
            fix = "set rollout.sampling.temperature"
            raise RolloutError(f"{place}: it has temperature {hot:g}, the run {temperature:g}: {fix}")
        if shifted := [m for token, m in zip(ids, mask or (), strict=False) if m not in (-100, token)]:
            raise RolloutError(f"{place}: the mask has {shifted[0]} where it must have -100 or the token's own id")
        row = {"ids": ids, "sampled": [m != -100 for m in mask or ()]}
        row |= {"logprobs": logprobs or None, "advantages": advantages or None}
        zero = 0.0 if settings.get("set_advantage_to_zero") else None
        yield place, {"rows": [row], "reward": score, "group": p, "advantage": zero}
