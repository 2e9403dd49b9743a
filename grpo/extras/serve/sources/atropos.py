"""The trainer's side of Atropos' run-api: register, wait for a batch, make groups of its items. docs/sources.md has the steps."""

import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import httpx2

from grpo.env.rendering import Renderer
from grpo.extras.network.answers import addresses, reading
from grpo.extras.serve.sources.open_engine import OpenEngine
from grpo.extras.sources.conversion import Conversion
from grpo.models.pretrained import Pretrained
from grpo.rollout.rollouts import Rollouts
from grpo.rollout.types import Group
from grpo.system.distributed import world_size
from grpo.system.errors import RolloutError, UserError
from grpo.system.ranges import Port, Seconds, enforced

log = logging.getLogger(__name__)

POLL, START = 0.25, 30.0  # seconds between two looks for a batch, and for the run-api to be there at first
TRIES, SEEN = 5, 20  # of a registration; looks at a full queue without a batch, before a warning


@enforced("source")
@dataclass(eq=False)
class Atropos:
    """Gives the batches of a run-api at `url`, newest first. Mutable: whether it is registered there.

    port: of this machine, on which environments sample from the run's engine while the run waits for a batch; 0: a free one.
    timeout: seconds without a sign of life of an environment, after which the run ends.
    """

    pretrained: Pretrained
    renderer: Renderer
    url: str = "http://127.0.0.1:8000"
    port: Port = 9001
    timeout: Seconds = 600.0

    def __post_init__(self) -> None:
        [self.url] = addresses([self.url], "source.url")
        self.http = httpx2.Client(base_url=self.url, timeout=60, trust_env=False)
        self.served, self.registered, self.again = None, False, False
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
        with reading(f"{self.url}/batch", items, RolloutError):
            samples = [sample for p, item in enumerate(items) for sample in samples_of(p, item)]
        groups = self.convert.groups(samples)
        turns = [turn for group in groups for sample in group for turn in sample.turns]
        ages = [r - version for turn in turns for version in turn.completion.versions or (math.nan,)]
        age = fmean(ages) if ages else math.nan
        self.metrics = {} if math.isnan(age) else {"rollout/staleness": age}
        return groups

    def progress(self, rollouts: int) -> dict[str, float]:
        """Return the age of the weights that sampled, if it is known of every token."""
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
        size = rollouts.plan.prompts * rollouts.plan.group_size
        sign, since, full = None, time.monotonic(), 0
        while True:
            if not self.registered:
                self.register(r, size, rollouts)
            answer = self.ask("/batch") or {}
            if answer.get("batch"):
                return answer["batch"]
            self.registered = "batch" in answer and "status" not in answer
            waiting = (self.ask("/status") or {}).get("queue_size") or 0
            full = full + 1 if waiting >= size else 0
            if full == SEEN:
                fix = "every group_size must divide rollout.prompts x rollout.group_size, and no group be larger than the others"
                log.warning("%d groups wait at %s, and none becomes a batch of %d: %s", waiting, self.url, size, fix)
            latest = waiting, self.served.answered
            if latest != sign or self.served.batching.running:
                sign, since = latest, time.monotonic()
            if time.monotonic() - since > self.timeout:
                line = f"no environment has sent or asked anything for {self.timeout:g} s ({waiting} groups wait at {self.url}"
                raise RolloutError(f"{line}, {self.served.answered} samples were given): {self.advice()}")
            time.sleep(POLL)

    def register(self, r: int, size: int, rollouts: Rollouts) -> None:
        """Register for batches of `size` samples, with an empty queue if the run-api has others. Raises RolloutError."""
        begun = time.monotonic()
        while (info := self.ask("/info")) is None:
            if time.monotonic() - begun > (self.timeout if self.again else START):
                raise RolloutError(
                    f"Atropos API not reachable at {self.url}: start run-api --port N, or set source.url"
                )
            time.sleep(POLL)
        if (other := info.get("batch_size") not in (-1, size)) or self.again:
            log.warning("the run-api at %s has lost this run or has another one: restart its environments", self.url)
        if other:
            self.ask("/reset_data")
        registration = {
            **{"wandb_group": "", "wandb_project": "", "batch_size": size, "max_token_len": self.pretrained.context()},
            **{"checkpoint_dir": f"{rollouts.folder}/checkpoints", "save_checkpoint_interval": 0, "starting_step": r},
            # environments leave then, and batches that a killed run has lost count too
            "num_steps": 2 * rollouts.plan.num_rollouts,
        }
        for attempt in range(TRIES):
            if isinstance((self.ask("/register", registration) or {}).get("uuid"), int):
                self.registered = self.again = True
                return
            time.sleep(POLL * 2**attempt)
        raise RolloutError(f"Registration failed: {self.url} gave no uuid in {TRIES} tries: is it Atropos' run-api?")

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Return an answer of the run-api; None if it gives none, an error, or no JSON object."""
        with suppress(httpx2.HTTPError, ValueError, RecursionError):
            answer = self.http.request("GET" if body is None else "POST", path, json=body)
            content = answer.json() if answer.is_success else None
            return content if isinstance(content, dict) else None
        return None


def samples_of(p: int, item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the sequences of an item as samples of group p. Raises RolloutError if its lists do not fit each other."""
    where, size = f"item {p} of the batch (environment {item.get('env_id')})", len(item["tokens"])
    names = ("tokens", "masks", "scores", "advantages", "inference_logprobs", "overrides")
    lists = {name: item.get(name) or [None] * size for name in names}
    if uneven := [f"{len(values)} {name}" for name, values in lists.items() if len(values) != size]:
        raise RolloutError(f"{where}: {size} sequences of tokens, but {', '.join(uneven)}")
    of_group = {**(item.get("group_overrides") or {}), **(item.get("generation_params") or {})}
    for s, (ids, mask, score, advantages, logprobs, overrides) in enumerate(zip(*lists.values(), strict=True)):
        at = f"{where}, sequence {s}"
        settings = {**of_group, **(overrides or {})}
        if shifted := [m for token, m in zip(ids, mask or (), strict=False) if m not in (-100, token)]:
            raise RolloutError(f"{at}: the mask has {shifted[0]} where it must have -100 or the token's own id")
        sampled = [m != -100 for m in mask or ()]
        row = {"ids": ids, "sampled": sampled, "logprobs": logprobs or None, "advantages": advantages or None}
        given = {"advantage": 0.0 if settings.get("set_advantage_to_zero") else None}
        yield at, {"rows": [row], "reward": score, "group": p, "temperature": settings.get("temperature"), **given}
