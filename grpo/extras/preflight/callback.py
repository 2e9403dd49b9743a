"""PreflightCallback: runs the checks before the first rollout, says how they ended and the plan, and stops a run that fails."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from difflib import get_close_matches
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only
from rich.markup import escape
from transformers import PreTrainedTokenizerBase

from grpo.env.types import Example
from grpo.evaluation.evaluator import Evaluator
from grpo.extras.forecast.parts import Part
from grpo.extras.preflight import CHECKS
from grpo.extras.preflight.checked import Checked
from grpo.extras.preflight.plan import RunPlan, plan_of
from grpo.extras.preflight.probe import Probe
from grpo.rollout.draw import is_source
from grpo.system import distributed
from grpo.system.errors import PreflightError, StopError, UserError, error_line, lacks_memory, plural
from grpo.system.output.console import busy, console, to_logs
from grpo.system.ranges import require
from grpo.system.seeds import everything, set_everything
from grpo.training.callbacks.rollout import RolloutCallback
from grpo.training.module import GRPOModule
from grpo.training.parts import UpdatePart

log = logging.getLogger(__name__)

WAIVED = Checked("WAIVED", "by preflight.skip")
Mode = Literal["on", "warn", "off", "only"]


class PreflightCallback(L.Callback):
    """Checks a run before it learns, and prints its plan. It comes after RolloutCallback.

    settings: the mode, or mode and skip. on: a FAIL stops the run with exit code 3. warn: a FAIL is a warning. off: no checks.
    only: the run ends after them. skip: checks that are not made, each by its name or a part of it.
    examples: the rows of each split. tokenizer: the model's own. parts: of the update, which may have checks.
    Mutable: parts, those of the memory forecast; verdicts, by the name of the check; plan; noted, called when a verdict is known.
    """

    def __init__(
        self,
        settings: Mode | Mapping[str, Any],
        rollout: RolloutCallback,
        evaluator: Evaluator,
        examples: Mapping[str, Sequence[Example]],
        tokenizer: PreTrainedTokenizerBase | None = None,
        parts: Mapping[str, UpdatePart | None] | None = None,
    ) -> None:
        both = {"mode": settings} if isinstance(settings, str) else settings
        self.mode = both["mode"]
        # a model that sees has checks of its own
        self.checks = CHECKS | getattr(getattr(tokenizer, "sight", None), "checks", {})
        checks = self.checks | checks_of(parts or {})
        self.waived = {check_named(part, checks) for part in both.get("skip", ())}
        require("preflight", self.mode, Mode)
        self.rollout, self.evaluator, self.examples = rollout, evaluator, examples
        self.tokenizer = tokenizer
        self.parts: list[Part] = []
        self.verdicts: dict[str, Checked] = {}
        self.plan: RunPlan | None = None
        self.noted: Callable[[], None] = lambda: None

    def facts(self) -> dict[str, Any]:
        """Return the verdicts so far, the bound and the plan for the manifest; nothing if the run was resumed."""
        facts: dict[str, Any] = {}
        if self.verdicts or self.plan:
            facts["preflight"] = {name: asdict(verdict) for name, verdict in self.verdicts.items()}
            facts |= {"rounding": self.rollout.rounding, "bound": self.rollout.plan.most_stale}
        if self.plan:
            facts["plan"] = asdict(self.plan)
        return facts

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.rollout.learned and self.mode != "only":
            return
        if is_source(self.rollout.rollouts.sampler):
            log.warning("no preflight: it plays episodes of a task, and the samples of this run come from a source")
            return self.act_on_verdicts()
        rollouts, version = self.rollout.rollouts, self.rollout.learned
        probe = Probe(module, rollouts, self.examples, trainer.precision, self.tokenizer, version, parts=self.parts)
        checks = {} if self.mode == "off" else self.checks | checks_of(getattr(module, "parts", {}))
        if checks and not isinstance(module, GRPOModule):
            raise UserError(f"preflight={self.mode} knows only GRPOModule and its subclasses: set preflight=off")
        before = everything(self.rollout.objects)
        allowed = self.rollout.stop.allowed("nothing was learned, and the same command begins again", saves=False)
        try:
            with trainer.precision_plugin.forward_context(), allowed:
                if checks:
                    start = -time.perf_counter()
                    self.rollout.sync()
                    start += time.perf_counter()
                with busy("preflight", len(checks)) as step:
                    for name, check in checks.items():
                        self.verdicts[name] = WAIVED if name in self.waived else agreed(outcome(check, probe))
                        self.rollout.rounding = vars(probe).get("bound")
                        self.noted()
                        # at once: on a large model the checks take minutes
                        show_verdict(name, self.verdicts[name], self.mode == "only" or name in self.waived)
                        step()
                with busy("measuring the plan"):
                    self.plan = plan_of(probe, self.evaluator, trainer.callbacks, self.parts, timed=bool(checks))
        except StopError as error:
            error.saves = False  # weights may be moved: without a checkpoint the run begins anew
            raise
        finally:
            set_everything(self.rollout.objects, before)
        self.noted()
        self.show_plan(probe, start if checks else 0.0)
        self.act_on_verdicts()

    @rank_zero_only
    def show_plan(self, probe: Probe, start: float) -> None:
        """Print the time of the checks and of the plan, and the plan. start: seconds until the engine had the weights."""
        if self.verdicts:
            parts = {"the engine's start": start} | {name: v.seconds for name, v in self.verdicts.items()}
            spent = probe.allowance.line(parts)
            line = f"preflight: {verdicts_counted(self.verdicts, spent.partition(',')[0])}"
            console().print(line, soft_wrap=True, highlight=False)
            to_logs(f"preflight: {spent}")
        for line in self.plan.lines():
            console().print(line, soft_wrap=True, highlight=False)

    def act_on_verdicts(self) -> None:
        """End the run if a check failed, or if only the checks were wanted."""
        failed = [f"{name}: {v.compared}; {v.remedy}" for name, v in self.verdicts.items() if v.result == "FAIL"]
        if failed and self.mode != "warn":
            others = "preflight=warn trains all the same, preflight.skip=[NAME] leaves a check out"
            raise PreflightError(f"preflight failed: {' | '.join(failed)} ({others})")
        for line in failed:
            log.warning("preflight failed: %s", line)
        for name, v in self.verdicts.items():
            if v.result == "WARN":
                log.warning("preflight: %s: %s; %s", name, v.compared, v.remedy)
        if self.mode == "only":
            raise SystemExit(0)


def checks_of(parts: Mapping[str, UpdatePart | None]) -> dict[str, Callable[[Any], Any]]:
    """Return the checks that the parts of an update have, by name."""
    return {name: check for part in parts.values() if part is not None for name, check in part.checks.items()}


def check_named(part: str, checks: Mapping[str, Any] = CHECKS) -> str:
    """Return the name of the check that has this part. Raises UserError if no check has it, or several."""
    named = [part] if part in checks else [name for name in checks if part in name]
    if len(named) == 1:
        return named[0]
    if named:
        raise UserError(f"preflight.skip=[{part}] is in several names: {' | '.join(named)}; give more of one")
    near = get_close_matches(part, checks, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UserError(f"preflight.skip=[{part}] is no check{hint}; the checks: {' | '.join(checks)}")


def agreed(verdict: Checked) -> Checked:
    """Return the worst verdict of all devices."""
    worst_first = ("FAIL", "WARN", "SKIP", "PASS")
    return min(distributed.all_gather([verdict]), key=lambda each: worst_first.index(each.result))


def outcome(check: Callable[[Probe], Checked], probe: Probe) -> Checked:
    """Return the verdict of a check. A check that raises fails; one that runs out of memory is skipped, unless other devices
    wait for this one."""
    begun = time.perf_counter()
    try:
        verdict = check(probe)
        verdict = verdict if isinstance(verdict, Checked) else Checked(*verdict)
    except UserError:
        raise
    except Exception as error:  # a model, an engine or a task of the user may raise anything
        log.debug("preflight", exc_info=True)
        verdict = Checked("FAIL", error_line(error), "the check could not be made: preflight=warn trains all the same")
        if lacks_memory(error):
            if distributed.world_size() > 1:
                raise
            torch.cuda.empty_cache()
            remedy = "lower optim.max_tokens_per_microbatch, or leave the engine less of the device"
            verdict = Checked("SKIP", f"memory ran out ({error_line(error)})", f"an update needs more: {remedy}")
    return replace(verdict, seconds=time.perf_counter() - begun)


@rank_zero_only
def show_verdict(name: str, verdict: Checked, asked: bool = False) -> None:
    """Print a verdict as a line, with what to do about it as a second one: in the log, and on the terminal if the checks are all
    that was asked for, or memory ran out. `act_on_verdicts` says in both what failed, and what a warning is for."""
    color = {"PASS": "green", "FAIL": "bold red", "SKIP": "dim"}.get(verdict.result, "yellow")
    words = f"[{color}]{verdict.result}[/] {name}, {verdict.seconds:.1f} s: {escape(verdict.compared)}"
    if verdict.remedy:
        words += f"\n     {escape(verdict.remedy)}"
    out = console()
    say = out.print if asked or (verdict.result == "SKIP" and verdict.remedy) else out.keep
    say(words, soft_wrap=True, highlight=False)


def verdicts_counted(verdicts: Mapping[str, Checked], took: str) -> str:
    """Return how many checks there were, how long they took, and how they ended."""
    counts = Counter(verdict.result for verdict in verdicts.values())
    said = {"PASS": "passed", "FAIL": "failed", "WARN": "with a warning", "SKIP": "do not apply", "WAIVED": "left out"}
    ended = [f"{counts[result]} {words}" for result, words in said.items() if counts[result]]
    return f"{plural(len(verdicts), 'check')} in {took}: {', '.join(ended)}"
