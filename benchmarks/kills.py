"""Kill runs at random and chosen moments, continue them with resume=auto, and compare each with one that was never stopped.

    python benchmarks/kills.py [CASE ...] [--kills 8] [--seed 0]     # about twelve minutes

Each case is killed with SIGKILL, and every fourth time asked to stop with SIGTERM, until it has had so many. Compared are
weights, optimizer, metrics without times, and all tables, bit by bit. Where groups are learned from as they are finished
(rollout.order=ready), no two runs are equal: there every sample of the plan must have been learned from once. `disk` writes to a
small file system that another program fills (this needs root), `truncated` cuts the newest checkpoint after each kill. In `ended`
an exception in the run or a callback's should_stop ends it, in `slow` SIGTERM alone, while rollouts wait for a slow engine; these
write no checkpoint but at their ends. The cases of vLLM need it.
"""

import argparse
import contextlib
import copy
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}

from same import difference, left

import grpo.training.module
import grpo.training.trainer
from grpo.engines.builtin.engine import TransformersEngine
from grpo.extras.ahead import chain
from grpo.runs.run import Run
from grpo.training.checkpoints import by_rollouts

PROMPTS = 48  # of the plan: 12 rollouts of 4
ROOT = Path(__file__).resolve().parents[1]
COMMON = (
    "rollout.prompts=4 rollout.group_size=4 max_tokens=24 rollout.num_rollouts=12 eval.every=2 eval.limit=16 trainer=cpu "
    "callbacks=[samples,checkpoint] callbacks.checkpoint.every=1 logger=csv optim.optimizer.lr=1e-3 task.train_size=64 "
    "task.test_size=16 forecast=false preflight=off resume=auto"
)
MANY = "algo.num_minibatches=2 algo.num_epochs=2"
CASES = {
    "full": "",
    "full, 4 updates": f"{MANY} algo.kl.coef=0.05 algo.kl.sync_every=3",
    "lora": "adapter=lora",
    "lora, 4 updates": f"adapter=lora {MANY} algo.kl.coef=0.05",
    "bfloat16": "model.dtype=bfloat16 callbacks.checkpoint.every=3",
    "three ahead": "engine=transformers engine._target_=kills.Copied algo.old_policy=rollout rollout.ahead=3",
    "groups of three ahead": "engine._target_=paced.Paced +engine.step=0.005 algo.old_policy=rollout rollout.ahead=3 "
    "rollout.order=ready",
    "ended": "callbacks.checkpoint.every=100",
    "ended, 4 updates": f"callbacks.checkpoint.every=100 {MANY}",
    "ended, three ahead": "callbacks.checkpoint.every=100 engine=transformers engine._target_=kills.Copied "
    "algo.old_policy=rollout rollout.ahead=3",
    "slow, one ahead": "callbacks.checkpoint.every=100 engine=transformers engine._target_=kills.Slow "
    "algo.old_policy=rollout rollout.ahead=1",
    "slow, three ahead": "callbacks.checkpoint.every=100 engine=transformers engine._target_=kills.Slow "
    "algo.old_policy=rollout rollout.ahead=3",
    "truncated": "",
    "disk": "",
    "two devices": "trainer.devices=2",
    "two devices, 4 updates": f"trainer.devices=2 {MANY} adapter=lora",
    "vllm ahead": "engine=vllm rollout.ahead=1 algo.old_policy=rollout",
    "vllm servers": "engine=vllm_server engine.launch=true",
}
ALONE = ("two", "vllm")  # cases whose processes cannot be forked
PLACES = ("flushing", "renaming", "linking", "writing", "an update", "an evaluation", "a loss")  # chosen moments
ENDS = ("an update", "an evaluation", "a loss", "a sample", "a stop")  # moments at which a run ends by itself


class Copied(TransformersEngine):
    """The built-in engine with its own copy of the weights. The last bits of its numbers depend on nothing but the rollout."""

    apart = True

    def load_weights(self, model, version: int) -> None:
        super().load_weights(copy.deepcopy(model), version)


class Slow(Copied):
    """Takes its time. A run that is asked to stop waits for it as little as for an engine that takes minutes."""

    def sample(self, *args, **named):
        chain.STOPPING = 0.1
        time.sleep(0.4)
        return super().sample(*args, **named)


def started(arguments: list[str], log: Path, moment: tuple[str, int] | None = None, ends: bool = False) -> int:
    """Fork a process that runs train.py. moment: one of PLACES, and at which of its calls the process dies; with `ends` one of
    ENDS, where the run ends by itself. Returns its id."""
    if pid := os.fork():
        return pid
    os.setsid()
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(ROOT)
    sys.argv, code = ["train.py", *arguments], 0
    if moment:
        dying(*moment, ends)
    try:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    os._exit(code)


def dying(name: str, call: int, ends: bool) -> None:
    """Let this process die at a call of a function, which is one of PLACES. ends: let the run end instead, at one of ENDS."""
    from grpo.training import checkpoints
    from grpo.training.callbacks.evaluation import EvaluationCallback
    from grpo.training.callbacks.measure import Recorder
    from grpo.training.module import GRPOModule

    places = {
        "flushing": (checkpoints, "to_disk"),
        "renaming": (Path, "rename"),
        "linking": (Path, "replace"),
        "writing": (checkpoints, "save_file"),
        "an update": (GRPOModule, "step"),
        "an evaluation": (EvaluationCallback, "evaluate"),
        "a loss": (grpo.training.module, "note_loss"),
        "a sample": (TransformersEngine, "sample"),
        "a stop": (Recorder, "on_train_batch_end"),
    }
    owner, attribute = places[name]
    real, count = getattr(owner, attribute), iter(range(1, 1_000_000))

    def call_or_die(*args, **kwargs):
        if next(count) != call:
            return real(*args, **kwargs)
        if name == "a stop":
            args[1].should_stop = bool(args[4].rollout % 2)  # after an evaluation, so that there is none more
        elif ends:
            raise RuntimeError(f"the end of {name}")
        else:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(owner, attribute, call_or_die)


def launched(arguments: list[str], log: Path) -> int:
    """Start train.py as a process of its own. Returns its id."""
    with log.open("ab") as output:
        command = [sys.executable, "train.py", *arguments]
        return subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True).pid


def ended(pid: int, limit: float) -> int | None:
    """Wait for a process. Returns its exit code, negative for a signal; None if it still runs after `limit` seconds."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


def stop(pid: int, number: int) -> int:
    """Send a signal: SIGKILL to all processes of the run, SIGTERM to the first. Returns the exit code."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number) if number == signal.SIGKILL else os.kill(pid, number)
    if (code := ended(pid, 120)) is None:
        raise SystemExit(f"a run did not end within 120 s of signal {number}")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return code


def killed(case: str, folder: Path, kills: int, chance: random.Random, seconds: float) -> dict[str, int]:
    """Kill a run so many times, and let it finish. Returns the numbers of signals and of chosen moments. seconds: of a run."""
    arguments = [*COMMON.split(), *CASES[case].split(), f"hydra.run.dir={folder}"]
    start, log = launched if case.startswith(ALONE) else started, folder.with_suffix(".log")
    counts = {"SIGKILL": 0, "SIGTERM": 0, "ended": 0, "chosen": 0}
    while counts["SIGKILL"] + counts["SIGTERM"] + counts["ended"] < kills:
        done = counts["SIGKILL"] + counts["SIGTERM"] + counts["ended"]
        if case.startswith("ended"):
            code = ended(started(arguments, log, (chance.choice(ENDS), chance.randint(1, 9)), ends=True), 300)
            over = Run(folder).manifest["rollouts"] == 12
            counts["ended"] += not over or code != 0
            if over:
                shutil.rmtree(folder)
        elif start is started and done % 2 and not case.startswith("slow"):
            code = ended(started(arguments, log, (chance.choice(PLACES), chance.randint(1, 12))), 300)
            if code == 0:  # it had fewer calls
                shutil.rmtree(folder)
            counts["SIGKILL"] += code == -signal.SIGKILL
            counts["chosen"] += code == -signal.SIGKILL
        else:
            number = signal.SIGTERM if done % 4 == 2 or case.startswith("slow") else signal.SIGKILL
            pid = start(arguments, log)
            if (code := ended(pid, chance.uniform(0.2, 0.9) * seconds)) is None:
                code = stop(pid, number)
                counts[signal.Signals(number).name] += code != 0
            if code == 0:
                shutil.rmtree(folder)
        if case == "truncated" and len(there := list(by_rollouts(folder / "checkpoints").values())) > 1:
            tensors = there[0] / "tensors.safetensors"
            os.truncate(tensors, tensors.stat().st_size // 2)
    if (code := ended(start(arguments, log), 600)) != 0:
        raise SystemExit(f"{case}: the last part ended with {code}: {log.read_text()[-2000:]}")
    return counts


def filled(folder: Path, chance: random.Random, seconds: float, times: int) -> dict[str, int]:
    """Run on a small file system that is full for a second, several times."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", str(folder)], check=True)
    try:
        pid = started([*COMMON.split(), f"hydra.run.dir={folder}/run"], folder.with_suffix(".log"))
        for _ in range(times):
            time.sleep(chance.uniform(0.3, 1.5) * seconds / times)
            with contextlib.suppress(OSError), (folder / "filler").open("wb") as filler:
                while True:
                    filler.write(bytes(100_000))
            time.sleep(0.5)
            (folder / "filler").unlink()
        if (code := ended(pid, 300)) != 0:
            raise SystemExit(f"disk: the run ended with {code}: {folder.with_suffix('.log').read_text()[-2000:]}")
        shutil.copytree(folder / "run", folder.with_name("disk_run"), symlinks=True)
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    folder.rmdir()
    folder.with_name("disk_run").rename(folder)
    return {"full": times}


def missed(folder: Path) -> str | None:
    """Return the prompts of a run that were not learned from exactly once; None if there are none."""
    samples = Run(folder).samples()
    counts = samples.groupby("example").size()
    wrong = counts[counts != samples["sample"].nunique()]
    return (
        None if wrong.empty and len(counts) == PROMPTS else f"{len(counts)} of {PROMPTS} prompts, {len(wrong)} not once"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--kills", type=int, default=8, help="signals of each case")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    wanted = [case for case in CASES if not given.cases or case in given.cases]
    wanted = [case for case in wanted if find_spec("vllm") or not case.startswith("vllm")]
    chance, wrong, total = random.Random(given.seed), 0, {}
    with tempfile.TemporaryDirectory() as scratch:
        for number, case in enumerate(wanted):
            whole, other = Path(scratch, f"{number}_whole"), Path(scratch, f"{number}_killed")
            arguments = [*COMMON.split(), *CASES[case].split(), f"hydra.run.dir={whole}"]
            begun = time.monotonic()
            run = launched if case.startswith(ALONE) else started
            if (code := ended(run(arguments, whole.with_suffix(".log")), 600)) != 0:
                raise SystemExit(f"{case} ended with {code}: {whole.with_suffix('.log').read_text()[-2000:]}")
            seconds = time.monotonic() - begun
            full = case == "disk"
            counts = filled(other, chance, seconds, 4) if full else killed(case, other, given.kills, chance, seconds)
            found = missed(other) if "order=ready" in CASES[case] else difference(left(other), left(whole))
            wrong += bool(found)
            total = {name: total.get(name, 0) + counts.get(name, 0) for name in total | counts}
            shown = ", ".join(f"{count} {name}" for name, count in counts.items())
            print(f"{case:24}{shown:40} {found or 'equal'}", flush=True)
    print(", ".join(f"{count} {name}" for name, count in total.items()), f"; {wrong} cases differ")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
