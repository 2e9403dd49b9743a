"""Run the same GRPO cycles with TRL 1.16 and with this project in turn: CPU seconds, peak memory, distance from the floor.

    python benchmarks/vs_trl.py [--cases 100 100-mu2] [--cycles 5] [--json]        # needs trl; a few minutes for each case

A Llama of 2.94 M parameters in float32, 8 prompts x 8 samples, 64 new tokens, reward = share of digits, AdamW, one thread. A case
is named by the tokens of its prompt; `kl` adds a KL of 0.04 to a reference, `mu2` a second optimizer step on each rollout. In
`short` answers end at random, after about 22 of at most 64 tokens, and TRL's answers are made to end where ours did.

Each case has one process for TRL and one for us, started as users start them: GRPOTrainer, and `train` of train.py. One waits
while the other runs a cycle, from the start of one rollout to the start of the next; the first cycle of each is not counted.
Seconds are CPU seconds, since the machine may be busy. `total` is generation + update + everything else; `update` is clipping,
the optimizer's step and every pass through the model after generation. RSS is the peak of the process.

`sums` and `essays` have a real model, SmolLM2-135M-Instruct (`make smollm`), in float32. `sums` is the task of smollm2_sums:
prompts of 93 tokens, mostly two worked examples, and answers of 11. `essays` has questions of 40 tokens with the template, and
answers of up to 128; `long` has stories of up to 512, 2 prompts x 8 samples. TRL's answers end where ours did. TRL's microbatch
is 16 rows, 4 in `long`, ours 2048 tokens.

In the other cases TRL's microbatch is the 64 rows of a rollout, ours 1024 tokens. With TRL_BATCH=8, its default, or 16 in the
environment TRL takes as many seconds and far less memory: at `100` 760 and 917 MB, not 1.7 GB. So the ratio of RSS depends on
this choice. TRL's gradient checkpointing, which computes the forward pass again, and its bfloat16 are off.

The floor is the time of a cycle's arithmetic if every prompt goes through the model once (a forward pass to sample, mu forward
and backward passes, one for the reference), at the speed of this machine's matrix products in the shapes of the model.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from itertools import permutations
from pathlib import Path
from statistics import median

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

SIDES = ("grpo", "trl")  # in this order: TRL needs the lengths of our answers
PARTS = ("generation", "update", "other")
GROUP = 8
VOCABULARY = 129
BETA = 0.04
ENDS = list(range(40, 46))  # tokens that end an answer in `short`


@dataclass(frozen=True)
class Case:
    prompt: int = 100  # tokens
    mu: int = 1
    beta: float = 0.0
    short: bool = False
    real: bool = False  # SmolLM2
    reward: str = "digits"
    ask: str = "Compare {} and {} in a few sentences."  # what the real model is asked, unless for sums
    rate: float = 1e-6  # learning rate
    limit: int = 64  # new tokens
    prompts: int = 8
    batch: int = 64  # rows in a microbatch of TRL
    tokens: int = 1024  # in a microbatch of ours

    @property
    def ends(self) -> list[int]:
        """Return the tokens that end an answer, if TRL's answers have to end where ours did."""
        return [2] if self.real else ENDS if self.short else []

    @property
    def trl_batch(self) -> int:
        return int(os.environ.get("TRL_BATCH", str(self.batch)))


CASES = {
    "100": Case(),
    "10": Case(prompt=10),
    "100-kl": Case(beta=BETA),
    "100-mu2": Case(mu=2),
    "100-kl-mu2": Case(beta=BETA, mu=2),
    "short": Case(short=True),
    "sums": Case(prompt=93, real=True, reward="last", rate=5e-6, limit=24, batch=16, tokens=2048),
    "essays": Case(prompt=40, real=True, reward="different", rate=5e-6, limit=128, batch=16, tokens=2048),
    "long": Case(
        prompt=43,
        real=True,
        reward="different",
        ask="Write a long story of a thousand words about {} and {}.",
        rate=5e-6,
        limit=512,
        prompts=2,
        batch=4,
        tokens=2048,
    ),
}
THINGS = "rain bread tea bees salt snow paper iron sleep glass honey wool fire maps rivers clocks bridges stars"


def digits(completions: Sequence[str], **_) -> list[float]:
    """Return the share of digits in each completion."""
    return [sum(c in "0123456789" for c in text) / max(1, len(text)) for text in completions]


def last(completions: Sequence[list[dict]], gold: Sequence[int], **_) -> list[float]:
    """Return 1 for each completion whose last number is right."""
    from grpo.extras.grading.functions import last_number

    return [reward.value for reward in last_number(completions, gold)]


def different(completions: Sequence[list[dict]], **_) -> list[float]:
    """Return the share of different words in each completion, and a little for its length: nearly every one has its own."""
    texts = [completion[-1]["content"] for completion in completions]
    return [len(set(text.split())) / max(1, len(text.split())) + len(text) / 1e4 for text in texts]


# -- shared by both sides: a folder with a model, a tokenizer and prompts


def prepare(folder: Path, case: Case) -> None:
    """Write the folder."""
    write = prepare_real if case.real else prepare_made
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, write(folder, case))))


def prepare_real(folder: Path, case: Case) -> Iterator[dict]:
    """Link the files of SmolLM2, and yield rows."""
    from grpo.extras.demo.smollm2 import SMOLLM2
    from tasks.sums import Sums

    if not SMOLLM2.made().exists():
        sys.exit("this case needs SmolLM2: make smollm")
    for file in SMOLLM2.made().iterdir():
        (folder / file.name).symlink_to(file)
    if case.reward == "different":
        for one, other in permutations(THINGS.split(), 2):
            yield {"prompt": [{"role": "user", "content": case.ask.format(one, other)}]}
        return
    sums = Sums()
    for row in sums.examples("train"):
        yield {"prompt": [message.as_dict() for message in sums.messages(row)], "gold": row["answer"]}


def prepare_made(folder: Path, case: Case) -> Iterator[dict]:
    """Write a small model and its tokenizer, and yield rows. A token is a character; the tokenizer's own end token is never
    sampled, since its logit is far below."""
    from shapes import llama
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    characters = [*map(chr, range(33, 127)), *map(chr, range(192, 226))]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate([*characters, "<end>"])}, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="!", eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama("3m", vocab_size=VOCABULARY, eos_token_id=ENDS if case.short else None))
    embedding = model.get_input_embeddings().weight.data  # tied: the rows also give the logits
    embedding[ENDS] = 0  # their logits are equal, so answers end at one rate
    embedding[:, 0], embedding[-1, 0] = 1, -1  # a hidden state points along the first axis, away from the end token
    model.save_pretrained(folder)
    draw = random.Random(0)
    for _ in range(64):
        yield {"prompt": "".join(draw.choices(characters[1:], k=case.prompt))}


# -- in the process of one side


class Cycles:
    """Seconds by part, cycle by cycle. The parent receives them, and sends when to continue and where TRL's answers end."""

    def __init__(self) -> None:
        self.parent = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # for the output of libraries
        self.stack = ["other"]
        self.began = False
        self.anew()

    def anew(self) -> None:
        self.record = {"cpu": dict.fromkeys(PARTS, 0.0), "wall": dict.fromkeys(PARTS, 0.0)}
        self.then = (time.process_time(), time.perf_counter())

    def lap(self) -> None:
        """Add the time since the last lap to the innermost part."""
        then, self.then = self.then, (time.process_time(), time.perf_counter())
        for name, begun, ended in zip(("cpu", "wall"), then, self.then, strict=True):
            self.record[name][self.stack[-1]] += ended - begun

    def begin(self) -> None:
        """Begin a rollout: report the cycle that ends here, wait for the parent, start a new record."""
        if self.began:
            self.lap()
            peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
            print(json.dumps({**self.record, "rss": int(peak.split()[1]) / 1024}), file=self.parent, flush=True)
        told = sys.stdin.readline()
        if not told:
            os._exit(0)
        self.began, self.lengths = True, json.loads(told)
        self.anew()

    def watch(self, owner: type, name: str, part: str, look: Callable[..., dict] | None = None) -> None:
        """Count the calls of a method towards a part. look: makes further values to report from its arguments and result."""
        method = getattr(owner, name)

        @wraps(method)
        def watched(*args, **kwargs):
            if part == "generation":
                self.begin()
            self.lap()
            self.stack.append(part)
            given = method(*args, **kwargs)
            self.lap()
            self.stack.pop()
            self.record |= look(args, given) if look else {}
            return given

        setattr(owner, name, watched)


def shape(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> dict:
    return {"prompts": sum(map(len, prompts)), "lengths": [len(ids) for ids in completions]}


def run_grpo(folder: Path, case: Case, cycles: Cycles) -> None:
    """Run `train` of train.py, with the defaults of its configuration where the case sets nothing."""
    from grpo.apps.cli import quiet
    from grpo.config.composing import composed
    from grpo.engines.builtin.engine import TransformersEngine
    from grpo.system import memory
    from grpo.training.module import GRPOModule
    from train import train

    # the peak of the whole run is measured here
    memory.reset_peak = lambda device: memory.give_back(memory.KEPT)

    def live(args, _) -> dict:
        return {"live": sum(advantage != 0 for group in args[1].advantages for advantage in group)}

    cycles.watch(
        TransformersEngine, "sample", "generation", lambda args, given: shape(args[1], [done.ids for done in given])
    )
    cycles.watch(GRPOModule, "training_step", "update", live)
    quiet()
    gold = "gold" if case.reward == "last" else "null"
    overrides = f"""task=jsonl task.path={folder}/train.jsonl task.rewards=[{__file__}:{case.reward}] task.gold={gold}
        task.held_out.test=0 task.splits.test=null model=path model.path={folder} engine=transformers trainer=cpu
        callbacks=none logger=none output_dir={folder}/run eval.every=0 preflight=off forecast=false
        rollout.prompts={case.prompts} rollout.group_size={GROUP} rollout.num_rollouts=100000 max_tokens={case.limit}
        optim.max_tokens_per_microbatch={case.tokens} optim.optimizer.lr={case.rate} algo.num_epochs={case.mu}
        algo/kl={"loss_with_ratio" if case.beta else "none"} algo.kl.coef={case.beta}"""
    train(composed("train", overrides.split()))


def run_trl(folder: Path, case: Case, cycles: Cycles) -> None:
    from accelerate import Accelerator
    from datasets import load_dataset
    from shapes import TRL
    from transformers import LogitsProcessor
    from trl import GRPOConfig, GRPOTrainer

    class Ends(LogitsProcessor):
        """Makes answers end where ours did."""

        def __init__(self, width: int) -> None:
            self.width = width  # of the prompts, padded

        def __call__(self, ids, scores):
            last = torch.tensor(cycles.lengths) == ids.shape[1] - self.width + 1
            ends = torch.zeros(scores.shape[1], dtype=torch.bool)
            ends[case.ends] = True
            return scores.masked_fill(ends != last[:, None], -torch.inf)

    def live(_, given) -> dict:
        return {"live": int((given["advantages"] != 0).sum())}

    cycles.watch(GRPOTrainer, "_generate_single_turn", "generation", lambda args, given: shape(args[1], given[0]))
    cycles.watch(GRPOTrainer, "_generate_and_score_completions", "other", live)
    cycles.watch(GRPOTrainer, "_get_per_token_logps_and_entropies", "update")
    cycles.watch(GRPOTrainer, "training_step", "update")
    cycles.watch(Accelerator, "clip_grad_norm_", "update")
    cycles.watch(torch.optim.AdamW, "step", "update")
    args = GRPOConfig(
        **TRL,
        output_dir=str(folder),
        max_steps=100000,
        learning_rate=case.rate,
        per_device_train_batch_size=case.trl_batch,
        gradient_accumulation_steps=case.prompts * GROUP // case.trl_batch,
        num_generations=GROUP,
        max_completion_length=case.limit,
        num_iterations=case.mu,
        beta=case.beta,
        loss_type="grpo",
        model_init_kwargs={"dtype": "float32"},
    )
    rows = load_dataset("json", data_files=str(folder / "train.jsonl"), split="train", cache_dir=str(folder / "cache"))
    trainer = GRPOTrainer(str(folder), globals()[case.reward], args, rows)
    if case.ends:
        generate = trainer.model.generate
        trainer.model.generate = lambda **inputs: generate(
            **inputs, logits_processor=[Ends(inputs["input_ids"].shape[1])]
        )
    trainer.train()


# -- in the process that compares them


class Side:
    """The process of one side, which runs one cycle at a time."""

    def __init__(self, name: str, case: str, folder: str) -> None:
        command = [sys.executable, __file__, "--side", name, "--cases", case, "--folder", folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.log = Path(folder) / f"{name}.log"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, text=True, env=environment, stderr=log, **pipes)

    def cycle(self, lengths: list[int]) -> dict:
        with suppress(BrokenPipeError):  # a process that has ended is reported below
            print(json.dumps(lengths), file=self.process.stdin, flush=True)
        if not (told := self.process.stdout.readline()):
            sys.exit(f"{self.log.stem} ended:\n{self.log.read_text()[-2000:]}")
        return json.loads(told)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def floor(case: Case, folder: str, record: dict) -> tuple[float, float]:
    """Return the operations of a cycle that computes nothing twice, and how many this machine now does in a CPU second, on one
    thread. A row without an advantage is not learned from."""
    from shapes import forward_flops, operations_in_a_second
    from transformers import AutoConfig

    config, lengths = AutoConfig.from_pretrained(folder), record["lengths"]
    groups = [(case.prompt, lengths[start : start + GROUP]) for start in range(0, len(lengths), GROUP)]
    passes = 1 + record["live"] / len(lengths) * (3 * case.mu + (case.beta > 0))
    work = forward_flops(config, groups) * passes
    torch.set_num_threads(1)
    return work, operations_in_a_second(config)


def compare(name: str, cycles: int) -> dict:
    """Return the medians of both sides, and their ratios: TRL's over ours."""
    case = CASES[name]
    records: dict[str, list[dict]] = {side: [] for side in SIDES}
    least: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), case)
        sides = {side: Side(side, name, folder) for side in SIDES}
        for _ in range(cycles + 1):
            lengths: list[int] = []
            for side, process in sides.items():
                records[side].append(process.cycle(lengths))
                lengths = records[side][-1]["lengths"]
            least.append(floor(case, folder, records["grpo"][-1]))
        for process in sides.values():
            process.close()
    for ours, theirs in zip(*records.values(), strict=True):
        apart = abs(ours["prompts"] / theirs["prompts"] - 1)  # each side shuffles the prompts of the real model itself
        if ours["lengths"] != theirs["lengths"] or apart > 0.1 * case.real:
            sys.exit(f"{name}: not the same work: {ours} and {theirs}")
    medians = {side: middle(found[1:]) for side, found in records.items()}  # the first is a warm-up
    work, rate = (median(column) for column in zip(*least[1:], strict=True))
    ratios = {what: medians["trl"][what] / medians["grpo"][what] for what in ("total", "generation", "update", "rss")}
    over = medians["grpo"]["total"] / (work / rate)
    return {**medians, "ratios": ratios, "floor": work / rate, "over_floor": over, "gflops": rate / 1e9}


def middle(records: list[dict]) -> dict:
    cpu = {part: median(record["cpu"][part] for record in records) for part in PARTS}
    total, wall = (median(sum(record[clock].values()) for record in records) for clock in ("cpu", "wall"))
    tokens = median(sum(record["lengths"]) for record in records)
    live = median(record["live"] for record in records)
    return {"total": total, **cpu, "wall": wall, "rss": records[-1]["rss"], "tokens": tokens, "live": live}


def told(name: str, found: dict) -> str:
    lines = []
    for side in SIDES[::-1]:
        numbers = " ".join(f"{found[side][part]:10.3f}" for part in ("total", *PARTS, "wall"))
        lines.append(
            f"{name if side == 'trl' else '':12s}{side:7s}{numbers} {found[side]['rss']:8.0f} {found[side]['tokens']:7.0f} "
            f"{found[side]['live']:5.0f}"
        )
    ratios = [found["ratios"].get(part) for part in ("total", *PARTS, "wall", "rss")]
    numbers = " ".join(f"{ratio:9.2f}x" if ratio else " " * 10 for ratio in ratios[:-1])
    floor = f"   floor {found['floor']:.3f} s at {found['gflops']:.0f} GFLOP/s, ours is {found['over_floor']:.2f} of it"
    return "\n".join([*lines, f"{'':12s}{'ratio':7s}{numbers} {ratios[-1]:7.2f}x{floor}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--cycles", type=int, default=5, help="counted cycles, after one that is not counted")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--side", choices=SIDES, help="run this side in this process")
    parser.add_argument("--folder", type=Path, help="folder of the case, with --side")
    given = parser.parse_args()
    if given.side:
        run = run_trl if given.side == "trl" else run_grpo
        run(given.folder, CASES[given.cases[0]], Cycles())
        return
    head = " ".join(f"{part:>10s}" for part in ("total s", *PARTS, "wall s"))
    if not given.json:
        print(f"{'case':12s}{'':7s}{head} {'RSS MB':>8s} {'tokens':>7s} {'live':>5s}", flush=True)
    results = {}
    for name in given.cases:
        results[name] = compare(name, given.cycles)
        if not given.json:
            print(told(name, results[name]), flush=True)
    if given.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
