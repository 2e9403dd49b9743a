"""The runs that a notebook reads: those of the folder in its first cell. A notebook shows one line where there are none."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import OmegaConf

from grpo.config.trust import check_code
from grpo.extras.report.comparison import comparable
from grpo.extras.report.folder import one_of_each_seed
from grpo.extras.report.runs import is_sweep, load, newest, run_folders, waiting_jobs
from grpo.objectives.algorithm import Algorithm
from grpo.runs.run import Run
from grpo.system.errors import UserError, plural

AGAIN = "or name another folder in FOLDER above"


class Missing(UserError):
    """There is nothing that a notebook could show."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows in place of the traceback."""
        return [str(self)]


LEARNED = "has learned from a rollout: python train.py makes one"


def newest_run(folder: str | Path, fits: Callable[[Run], object] = bool, needs: str = LEARNED) -> Run:
    """Return the newest run in a folder, or the folder itself. Raises Missing.

    fits, needs: what it must have besides a rollout, also in words, with what makes one.
    """
    found = next((run for run in map(Run, newest(folder)) if fits(run)), None)
    if found is None:
        raise Missing(f"No run in {Path(folder)} {needs}, {AGAIN}.")
    return found


def newest_sweep(folder: str | Path) -> tuple[Path, list[Run], dict[str, list[Run]]]:
    """Return the newest sweep in a folder, or the folder itself, its runs, and its arms: of those that can be compared one run
    of each seed. A folder without a sweep stands for all its runs. Raises Missing."""
    places = [place for place in run_folders(Path(folder)) if is_sweep(place)]
    for place in sorted(places, key=newest_change, reverse=True):
        if done := comparable(runs := load(place)):
            return place, runs, alone(done)
    runs = [run for place in run_folders(Path(folder)) if not is_sweep(place) and not (run := Run(place)).evaluates]
    if done := comparable(runs):
        return Path(folder), runs, alone(done)
    makes = "python train.py -m sweep=lr makes a sweep of three learning rates and three seeds"
    raise Missing(f"No run in {Path(folder)} has finished with an evaluation yet: {makes}, {AGAIN}.")


def newest_change(sweep: Path) -> float:
    """Return when the manifest of a job was last written, in seconds; 0 if there is none."""
    return max((file.stat().st_mtime for file in sweep.glob("*/manifest.json")), default=0.0)


def alone(done: dict[str, list[Run]]) -> dict[str, list[Run]]:
    """Return the arms with one run of each seed."""
    return {arm: one_of_each_seed(runs) for arm, runs in done.items()}


def said_of(folder: Path, runs: list[Run]) -> str:
    """Return a line with the number of runs by status."""
    count = Counter(run.status for run in runs) | Counter({"not begun": waiting_jobs(folder)})
    states = ", ".join(f"{number} {status}" for status, number in count.items() if number)
    return f"{folder}: {plural(count.total(), 'run')}, {states}"


def own_algorithm(folder: str | Path) -> dict[str, Algorithm]:
    """Return the objective of the newest run in a folder, or of the folder itself, by its name; nothing, and a printed line, if
    there is no run, or one whose code this project does not have."""
    try:
        run = newest_run(folder)
        check_code({"algo": run.config["algo"]}, run.folder, (), allowed=False)
        return {f"your run {run.name}": instantiate(OmegaConf.create(run.config["algo"]))}
    except UserError as line:
        print(line, "The presets are drawn without it.")
        return {}
