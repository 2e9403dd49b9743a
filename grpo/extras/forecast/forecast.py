"""The memory forecast: the bytes that a run will hold, logged before it starts, and what they leave for the engine."""

import logging
from collections.abc import Mapping

import lightning as L

from grpo.engines.room import Room
from grpo.extras.forecast.limits import CPU, host_limit, limit_of, to_fill
from grpo.extras.forecast.parts import LATER, Part, at_peak, human, in_phases
from grpo.extras.forecast.sizes import Sizes
from grpo.system import memory
from grpo.system.output.console import to_logs

log = logging.getLogger(__name__)

SPARE = 0.5  # of a memory; the parts of a run that takes less are in the log file alone


def forecast(sizes: Sizes, trainer: L.Trainer, parts: list[Part] | None = None, shown: bool | str = True) -> list[Part]:
    """Log one line per memory (device, CPU), and a warning if it may be too small. Returns the parts; none if unknown.

    An engine that may choose how much it takes (`fit`) is given what the run leaves. parts: if they have been counted. shown:
    whether to log; "only": this is all that was asked for.
    """
    device, card = trainer.strategy.root_device, getattr(trainer, "card", None)
    fit = getattr(sizes.engine, "fit", None) if device.type == "cuda" else None
    parts = parts or (sizes.of_trainer(trainer) if shown or fit else [])
    of_engine, fits = {}, True
    if parts and fit:
        total, limit = card.size if card else memory.total(device), to_fill(sizes.engine, trainer)
        room = sizes.room(parts, total, limit, trainer.world_size)
        of_engine = fit(room)
        fits = not room.lacks(sum(of_engine.values()) / total)
        lower = "a lower engine.args.gpu_memory_utilization"
        parts = [part for part in parts if part.name != "engine"]
        parts += [Part("engine", size, lower, phase) for phase, size in of_engine.items()]
        if shown:
            log.info("engine: %s", words_of_engine(room, of_engine))
    if not shown:
        return parts or []
    if parts is None:
        log.info("memory: no forecast for this model")
        return []
    parts += [LATER] if device == CPU else []
    so_far = 0 if card else max(0, memory.held(device) - sum(of_engine.values()))
    for place in dict.fromkeys([device, CPU]):
        held = [part for part in parts if part.size != 0 and (device == CPU or part.host == (place == CPU))]
        if not held:
            continue
        now, limit = (so_far, limit_of(trainer)) if place == device else host_limit(trainer)
        most = {phase: now + size for phase, size in in_phases(held).items()}
        table = ", ".join(f"{part.name} {human(part.size)}" for part in [Part("so far", now), *held])
        name = card.name if card and place == device else place
        line = "memory: {} in an update, {} in a rollout, of {}".format(*map(human, [*most.values(), limit]))
        detailed = f"{line} on {name}: {table}"
        short = shown != "only" and not card and limit is not None and max(most.values()) < SPARE * limit
        log.info("%s", f"{line} on {name}" if short else detailed)
        if short:
            to_logs(detailed)
        for phase, size in most.items() if limit is not None else ():
            if size > limit:
                fits = False
                remediable = [part for part in at_peak(held, phase) if part.size and part.remedy]
                largest = sorted(remediable, key=lambda part: part.size, reverse=True)[:3]
                remedies = dict.fromkeys(part.remedy for part in largest)
                log.warning("memory: the %s may not fit; what helps most: %s", phase, ", ".join(remedies))
    if card:
        log.info("%s: the run %s", card.name, "fits" if fits else "does not fit")
    return [Part("so far", so_far), *parts]


def words_of_engine(room: Room, taken: Mapping[str, int]) -> str:
    """Describe the part of a device that an engine takes, and why. taken: bytes by phase, as `fit` returns them."""
    size, left = sum(taken.values()), human(max(0, room.usable - room.update))
    when = "; it sleeps during" if "rollout" in taken else ", also during"
    return f"{100 * size / room.total:.0f}% of the GPU, {human(size)}{when} an update, which leaves {left}"
