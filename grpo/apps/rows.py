"""The rows of a run: they are read, or for a forecast of memory made up where nobody gives them; one is tried."""

import logging
from collections.abc import Sequence
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig

from grpo.apps.trial import try_task
from grpo.data.rows import Made, spread
from grpo.env.messages import Message
from grpo.env.types import Example, SingleTurn, Split, Task
from grpo.evaluation.evaluator import Evaluator
from grpo.system.errors import MissingRows, UserError
from grpo.system.output.console import busy

log = logging.getLogger(__name__)

TOKENS, ROWS = 256, 10_000  # of a made-up prompt; made-up rows of a split


class Questions:
    """Plain questions of about `tokens` tokens, in place of a task whose rows are out of reach. They have no reward."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def examples(self, split: Split) -> Sequence[Example]:
        return Made(ROWS, lambda i: {"prompt": "word " * self.tokens})

    def build(self, example: Example) -> SingleTurn:
        return SingleTurn((Message("user", example["prompt"]),))


@busy("reading the rows")
def with_rows(task: Task | None, evaluator: Evaluator, config: DictConfig, trains: bool) -> tuple[Any, dict[str, Any]]:
    """Return the task, and its splits as `Evaluator.loaded` does. If the rows are out of reach, a forecast gets made-up ones, and
    others raise MissingRows. Code of the user's plays a made-up episode (`try_task`). trains: whether the run plays episodes of
    the task."""
    try:
        splits = evaluator.loaded(task, trains)
    except MissingRows as error:
        if config.forecast != "only":
            raise
        most = config.prompt_limit.max_tokens or 2 * TOKENS
        stand_in = Questions(min(TOKENS, most // 2))
        log.warning("%s; this forecast is for prompts of %d tokens instead", error, stand_in.tokens)
        return stand_in, {"train": (stand_in, "train")}
    try_task(task, splits)
    check_teaching(task, config)
    return task, splits


def check_teaching(task: Task | None, config: DictConfig) -> None:
    """Raise UserError if the run needs demonstrations, or weighs a source (algo.by_source), that the task does not have."""
    by, house = config.get("algo", {}).get("by_source") or {}, "grpo.extras.teachers.demonstrations."
    rows = spread(task.examples("train"), 1000) if by and task is not None else ()
    known = {str(row.get("source")) for row in rows}
    if unknown := sorted(by.keys() - known):
        line = f"algo.by_source names {unknown[0]!r}, but the column `source` of the training rows"
        raise UserError(f"{line} has {', '.join(sorted(known))}")
    if by and not config.teacher:
        raise UserError("algo.by_source weighs three parts of the loss, but teacher=none has one: set teacher=tokens")
    targets = [str((config.get(name) or {}).get("_target_")) for name in ("teacher", "selection")]
    named = {target.removeprefix(house) for target in targets} & {"Beside", "Demonstrations"}
    if "Beside" in named and not config.algo.imitation.given:
        raise UserError(
            "teacher=rows, but algo.imitation.given=0 leaves its rows out of the loss: set a weight, as 0.1"
        )
    if "Demonstrations" in named:
        teaching = instantiate(config.algo.teacher)
        if teaching.active and teaching.needs_samples:
            line = "a divergence of sampled tokens says nothing of a demonstration, which the policy has not sampled"
            raise UserError(f"{line}: set algo.teacher.divergence=reverse (or forward, jsd), or selection=all")
        if config.selection.get("sampled") and config.algo.imitation.sampled:
            line = "algo.imitation.sampled imitates all tokens of a rollout, also the policy's own"
            raise UserError(f"{line}: set selection.sampled=0, or take selection=right, which keeps right samples")
    if named:
        from grpo.extras.teachers.demonstrations import check_demonstrations  # only then, since nothing else needs it

        check_demonstrations(task)
