"""PreflightCallback: runs the checks before the first rollout, shows their verdicts, and stops a run that fails one."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

import lightning as L
from rich.console import Console
from rich.table import Table

from grpo.env.types import Example
from grpo.system import distributed
from grpo.system.errors import PreflightError, UserError, told
from grpo.system.ranges import require
from grpo.system.seeds import random_states, set_random_states
from grpo.training.callbacks.rollout import RolloutCallback
from grpo.training.preflight import CHECKS
from grpo.training.preflight.probe import Checked, Probe

log = logging.getLogger(__name__)

Mode = Literal["on", "warn", "off", "only"]


class PreflightCallback(L.Callback):
    """Checks a run before it learns. It comes after RolloutCallback.

    mode: on: a FAIL stops the run with exit code 3. warn: a FAIL is a warning. off: no checks. only: the run ends after them.
    examples: the rows of each split.
    """

    def __init__(self, mode: Mode, rollout: RolloutCallback, examples: Mapping[str, Sequence[Example]]) -> None:
        require("preflight", mode, Mode)
        self.mode, self.rollout, self.examples = mode, rollout, examples
        self.verdicts: dict[str, Checked] = {}

    def facts(self) -> dict[str, Any]:
        """Return the verdicts for the manifest."""
        return {"preflight": {name: asdict(found) for name, found in self.verdicts.items()}} if self.verdicts else {}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.mode == "off" or (self.rollout.rollouts and self.mode != "only"):
            return
        if distributed.world_size() > 1:
            log.warning("preflight: no checks with several devices")
            return
        random = random_states()
        self.rollout.sync()
        probe = Probe(module, self.rollout.makes, self.examples, trainer.precision)
        with trainer.precision_plugin.forward_context():
            for name, check in CHECKS.items():
                self.verdicts[name] = outcome(check, probe)
        set_random_states(random)
        Console().print(shown_table(self.verdicts))
        failed = [f"{name}: {v.compared}; {v.remedy}" for name, v in self.verdicts.items() if v.result == "FAIL"]
        if failed and self.mode != "warn":
            raise PreflightError(f"preflight failed: {' | '.join(failed)} (preflight=warn trains all the same)")
        for line in failed:
            log.warning("preflight failed: %s", line)
        if self.mode == "only":
            raise SystemExit(0)


def outcome(check: Callable[[Probe], Checked], probe: Probe) -> Checked:
    """Return the verdict of a check. A check that raises fails."""
    begun = time.perf_counter()
    try:
        found = check(probe)
    except UserError:
        raise
    except Exception as error:  # a model, an engine or a task of the user may raise anything
        log.debug("preflight", exc_info=True)
        found = Checked("FAIL", told(error), "the check could not be made: preflight=warn trains all the same")
    return replace(found, seconds=time.perf_counter() - begun)


def shown_table(verdicts: Mapping[str, Checked]) -> Table:
    """Return the verdicts for the terminal."""
    shown = Table(f"preflight, {sum(v.seconds for v in verdicts.values()):.1f} s", "", "compared")
    colors = {"PASS": "green", "FAIL": "bold red", "SKIP": "dim"}
    for name, found in verdicts.items():
        words = f"{found.compared}\n{found.remedy}" if found.result == "FAIL" else found.compared
        shown.add_row(name, f"[{colors[found.result]}]{found.result}[/]", words)
    return shown
