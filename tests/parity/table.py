"""The command that shows each row of docs/parity.md, as a user types it, and the facts that have to hold afterwards.

tests/programs/test_parity_commands.py runs the commands in a folder that has the files beside this one, `data` (rows as GSM8K's),
`toy` and `served` (a random model) and `judge` (a random reward model).
"""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from conftest import ROOT
from pytest import approx
from safetensors.torch import load_file

import grpo


@dataclass
class Left:
    """The terminal after the commands. out: both streams. codes: the exit code of each."""

    out: str
    codes: list[int]

    @property
    def lines(self) -> list[str]:
        return self.out.strip().splitlines()

    def has(self, *texts: str) -> bool:
        return all(text in self.out for text in texts)


@dataclass
class Command:
    """lines: what is typed, in order. shows: the rows, and what is true after it. after: commands that come before it."""

    lines: list[str]
    shows: dict[str, Callable[[Left], bool]]
    after: tuple[str, ...] = ()
    ends: tuple[int, ...] = ()

    @property
    def codes(self) -> list[int]:
        return list(self.ends) or [0 for line in self.lines if not line.endswith("&")]


def metrics(run: str) -> pd.DataFrame:
    return grpo.load_run(run).metrics


def values(run: str, metric: str) -> list[float]:
    return metrics(run)[metric].dropna().tolist()


@functools.cache
def samples(run: str) -> pd.DataFrame:
    return grpo.load_run(run).samples()


def config(run: str, key: str) -> object:
    return functools.reduce(lambda node, name: node[name], key.split("."), grpo.load_run(run).config)


def groups(run: str) -> list[pd.DataFrame]:
    return [group for _, group in samples(run).groupby(["rollout", "prompt_index"])]


def read(file: str) -> str:
    return Path(file).read_text()


def result(folder: str, metric: str) -> float:
    return json.loads(read(f"{folder}/metrics.json"))[f"eval/{metric}"]["value"]


def weights(folder: str) -> dict:
    return load_file(f"{folder}/model.safetensors")


def moved(run: str, base: str = "toy") -> float:
    """The norm of what a run added to the weights of its model."""
    before, after = weights(base), weights(f"{run}/checkpoints/last")
    return sum((after[name] - before[name]).square().sum().item() for name in before) ** 0.5


def scalars(run: str, metric: str) -> list[float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(f"{run}/tensorboard")
    events.Reload()
    return [event.value for event in events.Scalars(metric)]


def first_messages(run: str) -> list[list[dict]]:
    return samples(run)["messages"].map(json.loads).tolist()


QUICK = "debug=smoke preflight=off forecast=false logger=csv eval.every=0"
BARE = f"python train.py {QUICK} callbacks=none"
SAVED = f"python train.py {QUICK} callbacks=[samples,checkpoint]"
DEMO = '"rollout={prompts: 4, group_size: 4}" eval.limit=20 eval.every=2 "task.rewards=[correct,format]" "task.weights=[1,0.1]"'
TEXTS = f"{SAVED} task=jsonl task.path=texts.jsonl task.splits.test=null task.held_out.test=0 rollout.prompts=3"
LYING = "python train.py debug=smoke forecast=false engine=transformers engine._target_=parts.Lying"

WORKS = {
    "demo": Command(
        [
            f"python train.py {DEMO} rollout.num_rollouts=3 callbacks.samples.token_logprobs=true callbacks.terminal.every=1"
            ' "callbacks.terminal.columns=[loss/policy,loss/grad_norm]" hydra.run.dir=demo'
        ],
        {
            "R01 R27 A01": lambda _: (
                metrics("demo").index.tolist() == [0, 1, 2, 3]
                and min(values("demo", "loss/grad_norm")) > 0
                and moved("demo", f"{ROOT}/grpo/apps/demo_models/wordmath") > 0
            ),
            "R06": lambda _: np.allclose(
                samples("demo")["reward"], samples("demo")["correct"] + 0.1 * samples("demo")["reward/format"]
            ),
            "R07": lambda _: all(
                len(row.token_ids) == len(row.rollout_logprobs) == row.tokens and row.end == "answered"
                for row in samples("demo").itertuples()
            ),
            "R08": lambda _: max(values("demo", "rollout/logprob_gap")) < 1e-5,  # of the weights that an update made
            "R09 T10": lambda _: (
                samples("demo")["prompt_index"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3] * 3
            ),
            "R14": lambda left: left.has("the mask has every sampled token  │ PASS"),
            "R15": lambda _: scalars("demo", "rollout/reward") == approx(values("demo", "rollout/reward")),
            "R18": lambda _: metrics("demo")["eval/accuracy"].dropna().index.tolist() == [0, 2, 3],
            "R20": lambda _: len(values("demo", "rollout/format")) == len(values("demo", "eval/format")) == 3,
            "R21": lambda _: grpo.load_run("demo").policy.name == "best" and bool(weights("demo/checkpoints/best")),
            "T12": lambda _: all(
                np.allclose(g["advantage"], (g["reward"] - g["reward"].mean()) / (g["reward"].std() + 1e-4), atol=1e-5)
                for g in groups("demo")
            ),
            "T17": lambda _: (
                {"rollout/reward", "rollout/length", "rollout/format", "eval/accuracy", "eval/length"}
                <= set(metrics("demo"))
            ),
            "T18": lambda left: left.out.count("\nrollout 1: reward") == 2 and Path("demo/report.html").exists(),
            "T21": lambda _: all(list(ids).count(ids[-1]) == 1 for ids in samples("demo")["token_ids"]),  # it ends once
            "T34": lambda _: all(
                word in read("demo/checkpoints/best/README.md") for word in ("tags:", "wordmath", "torch")
            ),
            "A20": lambda left: left.has("log-probabilities agree           │ PASS"),
            "A24 M11": lambda _: all(
                min(values("demo", f"rollout/{name}_std")) > 0
                for name in ("advantages", "rollout_logprobs", "old_logprobs")
            ),
            "A25": lambda left: left.out.count("  policy -") == left.out.count("  grad_norm ") >= 2,
            "A28": lambda left: left.has("the run", "   rollout", "   update", "   sync", "memory, at most"),
        },
    ),
    "its best policy": Command(
        ["python eval.py run=demo eval.limit=20 eval.samples=4 eval.sampling.temperature=1 hydra.run.dir=scores"],
        {
            "R19": lambda _: result("scores", "pass@4") > result("scores", "accuracy") > 0,
            "A45": lambda _: len(pd.read_parquet("scores/samples.parquet")) == 80 and result("scores", "format") == 1,
        },
        after=("demo",),
    ),
    "resumed": Command(  # two rollouts and then one are the three of the demo above
        [
            f"python train.py {DEMO} rollout.num_rollouts=2 callbacks=[samples,checkpoint] forecast=false preflight=off"
            " callbacks.checkpoint.history=1 hydra.run.dir=half",
            "python train.py ckpt_path=half rollout.num_rollouts=3 hydra.run.dir=whole",
        ],
        {
            "T32": lambda _: (
                values("whole", "loss/grad_norm")[-1] == values("demo", "loss/grad_norm")[-1]
                and values("whole", "eval/accuracy")[-1] == values("demo", "eval/accuracy")[-1]
            ),
            "A33": lambda _: (
                moved("half", "half/checkpoints/step_000001") > moved("half", "half/checkpoints/step_000002") == 0
            ),
        },
        after=("demo",),
    ),
    "gsm8k": Command(  # a whole command in conf/experiment/mine.yaml, and two keys on top of it
        ["python train.py --config-dir conf experiment=mine rollout.prompts=3 eval.every=2 hydra.run.dir=gsm8k"],
        {
            "R10": lambda _: (
                values("gsm8k", "data/epoch") == [0.75, 1.5, 2.25, 3]
                and samples("gsm8k")["item"].value_counts().tolist() == [6, 6, 6, 6]
            ),
            "R16": lambda _: all("\\boxed{" in str(messages) for messages in first_messages("gsm8k")),
            "R17 A34": lambda _: (
                len(samples("gsm8k")) == 4 * 3 * 2
                and metrics("gsm8k")["eval/accuracy"].dropna().index.tolist() == [2, 4]
                and len(grpo.load_run("gsm8k").evaluations([2])) == 2
            ),
            "T01": lambda _: (
                moved("gsm8k") == 0 and config("gsm8k", "model.path") == "toy"
            ),  # no sample earned a reward
            "T35": lambda _: (config("gsm8k", "rollout.group_size"), config("gsm8k", "rollout.prompts")) == (2, 3),
        },
    ),
    "one update, cut in three ways": Command(
        [
            f"{SAVED} algo=rolo rollout.group_size=8 hydra.run.dir=rolo",
            f"{BARE} algo=rolo rollout.group_size=8 optim.layout=padded hydra.run.dir=padded",
            f"{BARE} algo=rolo rollout.group_size=8 optim.max_tokens_per_microbatch=64 hydra.run.dir=cut",
        ],
        {
            "R13": lambda _: (
                all(np.allclose(g["advantage"], g["reward"] - g["reward"].mean()) for g in groups("rolo"))
                and samples("rolo")["advantage"].abs().max() > 0.1
            ),
            "A16": lambda _: values("padded", "loss/grad_norm") == approx(values("rolo", "loss/grad_norm"), rel=1e-3),
            "M21": lambda _: values("cut", "loss/grad_norm") == approx(values("rolo", "loss/grad_norm"), rel=1e-3),
        },
    ),
    "classes that import nothing": Command(
        [
            f"python train.py --config-dir conf {QUICK} callbacks=[samples] task=echo rollout.group_size=4 algo.num_epochs=2"
            " algo.num_minibatches=2 engine=transformers engine._target_=parts.Telling hydra.run.dir=echo",
            'python -c "import sys, tasks.gsm8k; '
            "assert not {'transformers', 'grpo.env.tokens', 'grpo.env.renderer'} & set(sys.modules)\"",
        ],
        {
            "R02": lambda _: samples("echo")["reward"].nunique() > 1,
            "R03": lambda _: (
                set(samples("echo")["turns"]) == {1, 3} and {"answered", "out_of_turns"} <= set(samples("echo")["end"])
            ),
            "R04": lambda _: all(messages[0]["content"].startswith("turn 1 ") for messages in first_messages("echo")),
            "R11": lambda left: left.codes[1] == 0,  # the layer of messages needs no tokens and no tensors
            "R26": lambda left: left.has("prompts ["),
            "A17": lambda _: set(samples("echo")["advantage"]) == {0.25},  # the environment's own
            "T26": lambda left: left.out.count("weights of version") == 2,  # for two rollouts, of eight updates
        },
    ),
    "a search agent that follows a script": Command(  # two equal searches, a tool that is not there, the answer
        ["python train.py --config-dir conf experiment=search hydra.run.dir=search"],
        {
            "R05": lambda _: config("search", "renderer.tool_calls") == "hermes",
            "R12": lambda left: (
                set(samples("search")["turns"]) == {4} and left.has("the mask has every sampled token  │ PASS")
            ),
            "R22 R23": lambda _: samples("search")["messages"].str.contains("Ines Korda in 1893").any(),
            "R24": lambda _: (
                np.allclose(samples("search")["reward"], samples("search")["reward/em"] - 0.1)
                and samples("search")["reward/em"].max() == 1
            ),
            "R25": lambda _: samples("search")["messages"].str.contains("serch").all(),
        },
    ),
    "rewards of many kinds": Command(
        [
            f"{TEXTS} rollout.group_size=4 task.gold=answer 'task.rewards=[correct,my_rewards.py:easy,my_rewards.py:additions,"
            "{_target_: grpo.rewards.reward_model.Classifier, path: judge, tokenizer: judge}]' 'task.weights=[1,0.5,0.01,2]'"
            " hydra.run.dir=kinds",
            "python judged.py kinds",
            f"{SAVED} task=jsonl task.path=chats.jsonl task.splits.test=null task.held_out.test=0"
            " task.rewards=my_rewards.py:told hydra.run.dir=chats",
        ],
        {
            "T03 M12": lambda _: {"reward/easy", "reward/additions", "reward/judge"} <= set(samples("kinds")),
            "T04 T36": lambda _: all(
                min(abs(1 - level - len(row["completion"]) / 100 - row["reward/easy"]) for level in (0.25, 0.5, 0.75))
                < 1e-6
                for _, row in samples("kinds").iterrows()
            ),
            "T05": lambda left: left.has("GOT [{'role': 'user'", "{'role': 'assistant', 'content': '12-3="),
            "T06": lambda _: (
                samples("kinds")["reward/additions"]
                .isna()
                .equals(~samples("kinds")["completion"].str.contains("+", regex=False))
                and samples("kinds")["reward/additions"].isna().any()
            ),
            "T08 T37": lambda left: left.has("24 values are the reward model's own"),
        },
    ),
    "pieces": Command(
        ["python pieces.py"],
        {
            "T09": lambda left: left.has("TRL's examples"),
            "M09": lambda left: left.has("log-probabilities, advantages, loss"),
            "M13": lambda left: left.has("clamped and scaled"),
            "M15": lambda left: left.has("five levels"),
        },
    ),
    "a KL": Command(
        [
            f"{BARE} rollout.group_size=8 rollout.num_rollouts=3 algo/kl=loss hydra.run.dir=kl",
            f"{BARE} rollout.group_size=8 rollout.num_rollouts=3 algo/kl=loss algo.kl.sync_every=2 algo.kl.sync_alpha=1"
            " hydra.run.dir=moving",
        ],
        {
            "T13 M20": lambda _: (
                values("kl", "loss/kl")[0] == 0 < values("kl", "loss/kl")[2] and "loss/kl" not in metrics("rolo")
            ),
            "T16": lambda _: (
                values("moving", "loss/kl")[:2] == values("kl", "loss/kl")[:2] and values("moving", "loss/kl")[2] == 0
            ),
        },
        after=("one update, cut in three ways",),
    ),
    "epochs": Command(
        [
            f"{BARE} rollout.group_size=8 algo.num_epochs=4 optim.optimizer.lr=1e-3 algo.surrogate.low=0.001"
            " algo.surrogate.high=1e9 rollout.sampling.temperature=0.7 hydra.run.dir=epochs",
            f"{BARE} rollout.group_size=8 algo=ppo_sequence algo.num_epochs=4 optim.optimizer.lr=1e-3 hydra.run.dir=sequence",
        ],
        {
            "T14": lambda _: (
                max(values("epochs", "loss/clip_fraction_low")) > 0
                and not any(values("epochs", "loss/clip_fraction_high"))
            ),
            "M05": lambda _: (
                len({*values("epochs", "loss/policy_epoch_1"), *values("epochs", "loss/policy_epoch_4")}) == 4
            ),
            "T15 M06": lambda _: (
                max(values("epochs", "loss/first_kl")) < 1e-6 < max(values("epochs", "loss/approx_kl"))
            ),
            "A18": lambda _: max(values("epochs", "rollout/logprob_gap")) < 1e-5,  # at a temperature of 0.7
            "M07": lambda _: (
                config("sequence", "algo.level") == "sequence_sum"
                and values("sequence", "loss/clip_fraction_high")[0] > 0.2
            ),  # products of ratios are soon out of bounds
        },
    ),
    "atropos": Command(
        [
            f"{SAVED} rollout.group_size=8 algo=atropos hydra.run.dir=atropos",
            f"{BARE} rollout.group_size=8 algo.level=none algo/surrogate=reinforce hydra.run.dir=reinforce",
        ],
        {
            "A17": lambda _: all(
                np.allclose(
                    g["advantage"], (g["reward"] - g["reward"].mean()) / (g["reward"].std(ddof=0) + 1e-8), atol=1e-5
                )
                for g in groups("atropos")
            ),
            "A21": lambda _: values("atropos", "loss/ratio") == approx([1, 1], abs=1e-5),
            "A22": lambda _: values("atropos", "loss/kl") == approx([0, 0], abs=1e-9),
            "A23": lambda _: (
                max(values("reinforce", "loss/grad_norm")) > 0 and config("reinforce", "algo.level") == "none"
            ),
        },
    ),
    "sampling": Command(
        [
            "python eval.py eval.limit=4 eval.samples=8 eval.sampling.temperature=1 hydra.run.dir=plain",
            "python eval.py eval.limit=4 eval.samples=8 'eval.sampling={temperature: 1, top_k: 1}' hydra.run.dir=top_k",
            "python eval.py eval.limit=4 eval.samples=8 'eval.sampling={temperature: 1, top_p: 1e-6}' hydra.run.dir=top_p",
            "python eval.py eval.limit=4 eval.samples=8 'eval.sampling={temperature: 1, min_p: 0.999}' hydra.run.dir=min_p",
            "python eval.py eval.limit=4 max_tokens=5 'eval.sampling={repetition_penalty: 1e6}' hydra.run.dir=penalty",
        ],
        {
            "T19": lambda _: (
                pd.read_parquet("plain/samples.parquet")["completion"].nunique() > 4
                and all(
                    pd.read_parquet(f"{name}/samples.parquet").groupby("item")["completion"].nunique().max() == 1
                    for name in ("top_k", "top_p", "min_p")
                )
                and pd.read_parquet("penalty/samples.parquet")["tokens"].max() <= 5
                and set(pd.read_parquet("penalty/samples.parquet")["completion"])
                != set(pd.read_parquet("top_k/samples.parquet")["completion"].str[:5])
            ),
        },
    ),
    "held-out sets by name": Command(
        [
            "python train.py debug=smoke preflight=off forecast=false logger=csv callbacks=none rollout.num_rollouts=3"
            " eval.every=1 eval.limit=2 eval.on_start=false eval.delay=2 +task@eval.sets.sums=wordmath hydra.run.dir=sets"
        ],
        {
            "T31": lambda _: (
                metrics("sets")["eval/sums/accuracy"].dropna().index.tolist()
                == metrics("sets")["eval/accuracy"].dropna().index.tolist()
                == [2, 3]
            )
        },
    ),
    "long prompts": Command(
        [
            f"{TEXTS} task.rewards=longer engine=transformers engine._target_=parts.Telling prompt_limit.max_tokens=8"
            " prompt_limit.too_long=truncate hydra.run.dir=truncated",
        ],
        {
            "T20": lambda left: (
                max(map(len, prompts(left))) == 8 and {tuple(ids[-2:]) for ids in prompts(left)} == {(1, 4)}
            )
        },
    ),
    "lora": Command(
        [
            f"{SAVED} rollout.group_size=8 adapter=lora adapter.r=4 adapter.lora_alpha=8 'adapter.target_modules=[q_proj,v_proj]'"
            " +adapter.layers_to_transform=[0] hydra.run.dir=lora",
            f"{SAVED} rollout.group_size=8 adapter=lora adapter.r=4 adapter.lora_alpha=8 'adapter.target_modules=[q_proj,v_proj]'"
            " +adapter.layers_to_transform=[0] optim.gradient_checkpointing=true hydra.run.dir=recomputed",
        ],
        {
            "T27": lambda _: (
                all("lora_" in name for name in load_file("lora/checkpoints/last/adapter_model.safetensors"))
                and values("recomputed", "loss/grad_norm") == values("lora", "loss/grad_norm")
            ),
            "A32": lambda _: (
                json.loads(read("lora/checkpoints/last/adapter_config.json")).items()
                >= {"r": 4, "lora_alpha": 8, "layers_to_transform": [0]}.items()
            ),
        },
    ),
    "optimizers": Command(
        [
            f"{TEXTS} model=path model.path=toy task.rewards=unique_letters max_tokens=8 optim=sgd optim.optimizer.lr=1"
            " optim.max_grad_norm=0.001 rollout.num_rollouts=1 optim.gradient_checkpointing=true hydra.run.dir=clipped",
            f"{BARE} rollout.group_size=8 optim=adafactor optim.schedule.name=cosine optim.schedule.num_warmup_steps=1"
            " optim.optimizer.lr=1e-3 rollout.num_rollouts=3 hydra.run.dir=cosine",
            f"{BARE} rollout.group_size=8 optim=adamw_8bit rollout.num_rollouts=1 hydra.run.dir=eight",
            f"{BARE} rollout.group_size=8 rollout.num_rollouts=1 optim.offload=true hydra.run.dir=offload",
        ],
        {
            "A31": lambda _: values("clipped", "loss/grad_norm")[0] > 0.001 == approx(moved("clipped"), rel=1e-3),
            "T29": lambda _: values("cosine", "lr") == approx([0, 1e-3, 5e-4]),
            "A30": lambda _: max(values("eight", "loss/grad_norm")) > 0 and max(values("cosine", "loss/grad_norm")) > 0,
            "M17": lambda _: (
                values("offload", "loss/grad_norm") == values("eight", "loss/grad_norm")
            ),  # before any step
        },
    ),
    "two devices": Command(
        [f"{SAVED} rollout.num_rollouts=1 rollout.group_size=4 trainer.devices=2 strategy=ddp hydra.run.dir=two"],
        {
            "T28": lambda _: samples("two")["prompt_index"].tolist() == [0] * 4 + [1] * 4,
            "T38": lambda _: samples("two")["completion"].nunique() > 2,
        },
    ),
    "the seventy billion": Command(
        ["python -m grpo.launch experiment=llama70b_split --dry-run"],
        {"T28": lambda left: left.has("#SBATCH --nodes=", "--tensor-parallel-size 4", "srun --nodes=4", "resume=auto")},
    ),
    "weights and biases": Command(
        [f"WANDB_MODE=offline {BARE} logger=wandb logger.wandb.name=mine hydra.run.dir=tracked"],
        {"T33 A29": lambda _: bool(list(Path("tracked/wandb").glob("offline-run-*"))) and len(metrics("tracked")) == 2},
    ),
    "forecast": Command(
        ["python train.py debug=forecast hydra.run.dir=forecast"],
        {"A42": lambda left: left.has("memory: ", "in an update", "weights 5.05 MB", "optimizer 10.09 MB")},
    ),
    "an engine that lies": Command(
        [
            f"{LYING} preflight=on callbacks=none hydra.run.dir=lying",
            f"{LYING} preflight=off callbacks=health alarms=warn hydra.run.dir=alarm",
            f"{BARE} engine=transformers engine._target_=parts.Mute hydra.run.dir=mute",
        ],
        {
            "A27": lambda left: left.has("preflight failed: log-probabilities agree: mean gap 1.0e+00 nats"),
            "A19": lambda left: left.has("token ids but 0 log-probabilities"),
            "A26": lambda left: left.has("rollout/logprob_gap is 1, above 0.03: engine and trainer disagree"),
        },
        ends=(3, 0, 1),
    ),
    "filters": Command(
        [
            f"{TEXTS} rollout.prompts=2 rollout.group_size=4 selection=dynamic selection.rounds=2 selection.by=reward"
            " task.gold=answer"
            " 'task.rewards=[{_target_: grpo.rewards.functions.correct, _partial_: true, wrong: -1}, {_target_:"
            " grpo.rewards.functions.at_least, _partial_: true, tokens: 10}]' hydra.run.dir=filtered",
        ],
        {
            "A46": lambda _: (
                samples("filtered").query("tokens < 10")["reward"].isna().all()
                and set(samples("filtered").query("tokens >= 10")["reward"]) <= {-1, 1}
                and max(values("filtered", "rollout/rounds")) == 2
            ),
        },
    ),
    "a server": Command(
        [
            "python -m grpo.serve model=path model.path=served engine=transformers device=cpu port=PORT&",
            "python client.py PORT",
            "python -m grpo.serve model=path model.path=served engine=transformers device=cpu port=PORT",
        ],
        {
            "M01": lambda left: left.has("health ok ok"),
            "M02": lambda left: left.has("changed True"),
            "M19": lambda left: left.has("health ok ok"),
            "A37": lambda left: left.has("missing 404", "adapter changes the answer True", "as before True"),
            "A36": lambda left: left.has("asleep True", "awake False", "max_model_len"),
            "T24": lambda left: left.has("as TRL [2, 1]", "weights 501"),
            "A39": lambda left: left.has("is held by", "choose another"),
        },
        ends=(0, 1),
    ),
    "a run-api": Command(
        [
            "python run_api.py PORT 19001&",
            "python train.py source=atropos source.url=http://127.0.0.1:PORT source.port=19001 model=path model.path=toy "
            "debug=smoke max_tokens=6 rollout.group_size=4 engine=transformers trainer=cpu hydra.run.dir=run_api",
        ],
        {
            "A12 A13 A14 A15": lambda left: (
                left.has("registered for batches of 8")
                and values("run_api", "rollout/staleness")[0] == 0
                and values("run_api", "rollout/logprob_gap")[0] < 1e-5
            ),
        },
    ),
    "mistakes": Command(
        [
            "python train.py model.dtype=float8",
            "python train.py 'task.rewards=[correct,format]' 'task.weights=[1]' debug=smoke",
            "python train.py algo.num_minibatches=3 debug=smoke",
            "python train.py rollout.group_size=1",
            "python train.py task.rewards=corect",
            f"{BARE} task.rewards=my_rewards.py:short task.weights=null hydra.run.dir=short",
            "python train.py trainer.precision=16-mixed",
            "python train.py +engine.vllm_gpu_memory_utilization=0.5",
        ],
        {
            "T02": lambda left: left.has("model.dtype=float8 is not one of auto, float32, bfloat16, float16"),
            "T07": lambda left: left.has("weights"),
            "T11 M10": lambda left: left.has("3 does not divide the 4 rows", "valid values: 1, 2, 4"),
            "M08": lambda left: left.has("rollout.group_size=1: advantages compare"),
            "M14": lambda left: left.has("corect", "unique_letters"),
            "M16": lambda left: left.has("gave 1 values for 2 completions"),
            "T30": lambda left: left.has("trainer.precision=16-mixed"),
            "T39": lambda left: left.has("vllm_gpu_memory_utilization"),
            "A43": lambda left: sum(line.startswith("error: ") for line in left.lines) == 8,
        },
        ends=(1,) * 8,
    ),
}


def prompts(left: Left) -> list[list[int]]:
    """The prompts that parts.Telling printed."""
    printed = [line[8:].translate(str.maketrans("()", "[]")) for line in left.lines if line.startswith("prompts ")]
    return [ids for line in printed for ids in json.loads(line)]


NO_BRIDGE = "python train.py +engine.vllm_config_path=vllm_bridge_config.json hydra.run.dir=bridge"
REFUSED = {  # by design: the command ends with this line
    "A06 A07": (NO_BRIDGE, "got an unexpected keyword argument 'vllm_config_path'"),
}
VLLM = {  # the test of the vLLM suite that asserts it
    "T22": "test_server.py::test_guided_samples_match",
    "T23 A03 M18": "test_server.py::test_a_start_brings_the_trainers_weights_and_leaves_nothing",
    "T25": "test_vllm.py::test_an_adapter_is_merged_for_the_engine_alone",
    "A02 A44": "test_sync.py::test_copied_weights_are_the_trainers_after_every_step",
    "A04": "test_one_copy.py::test_an_adapter_is_swapped_after_every_step",
    "A05 A09": "test_one_copy.py::test_an_optimizer_step_is_the_update",
    "A08": "test_one_copy.py::test_weights_that_only_one_of_the_two_has_are_refused",
    "A10": "test_server.py::test_no_server_outlives_a_trainer_that_is_killed",
    "A11": "test_one_copy.py::test_several_devices_are_refused",
    "A38": "test_vllm.py::test_another_version_of_vllm_is_refused_with_the_range",
    "A40": "test_server.py::test_a_launched_server_that_is_killed_is_started_again",
}
GPU = {  # what the commands would be
    "A41": "python train.py engine=vllm_shared +engine.args.enforce_eager=false",
    "M03": "python -m grpo.serve engine=vllm +engine.args.tensor_parallel_size=2",
    "M04": "python train.py engine=vllm_server engine.launch=true engine.devices=[1]",
}
OPEN = {  # a part of the row is missing; the commands above show the rest, if there is any
    "A18": "a temperature for each sample or group; there is one for a run",
    "A35": "streaming",
}
