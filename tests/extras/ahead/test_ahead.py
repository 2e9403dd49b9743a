"""rollout.ahead=1: which weights sample which rollout, what a failure leads to, and bit-exact resumes."""

import asyncio
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import lightning as L
import pandas as pd
import pytest
import torch
from conftest import TEST_PATH, preset
from helpers.programs import command
from helpers.runs import VARIED, learned, state
from helpers.runs import rows as all_rows
from helpers.slots import Apart, Halves, Streams, Varied

from grpo.apps.try_algorithm import check_algorithm
from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.protocol import Sampling
from grpo.env.messages import Message
from grpo.env.tokens import Completion, Turn
from grpo.env.types import Reward, SingleTurn, Trajectory
from grpo.extras.ahead.chain import Chain
from grpo.extras.ahead.copied import CopiedEngine
from grpo.extras.ahead.copies import holding
from grpo.extras.ahead.order import staleness_of
from grpo.models.pretrained import Pretrained
from grpo.rollout.rollouts import Rollout
from grpo.rollout.types import Plan, Sample
from grpo.runs.run import Run
from grpo.system import threads
from grpo.system.errors import RolloutError, UserError
from grpo.system.stopping.stop import Stop
from grpo.system.threads import Background

LIMIT = 60  # seconds after which a test that waits fails


@pytest.fixture
def run(smoke, tmp_path):
    """A run with rollout.ahead=1 and no evaluations, unless the overrides say otherwise, in a folder of tmp_path."""

    def run(*overrides: str, folder: str = "run", engine: str = "Apart", task=VARIED) -> list[dict[str, float]]:
        (tmp_path / folder).mkdir()
        settings = f"""rollout.ahead=1 algo.old_policy=rollout eval.every=0 engine=transformers
            engine._target_=test_ahead.{engine} output_dir={tmp_path / folder}""".split()
        learned(smoke(*settings, *overrides), task)
        return rows(tmp_path / folder)

    return run


def rows(folder) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in all_rows(folder)]


def test_a_rollout_is_sampled_by_the_weights_of_before(run):
    """Rollout 0 runs alone; rollout 1 runs beside the first update, so with the same weights; the last update starts none."""
    told = run("rollout.num_rollouts=4")
    assert Apart.sampled == [0, 0, 1, 2]
    assert Apart.loads == [0, 1, 2]
    assert [row["rollout/staleness"] for row in told] == [0, 1, 1, 1]
    assert [row["rollout/logprob_gap"] < 1e-5 for row in told] == [True, False, False, False]
    assert told[1]["loss/ratio_max"] > 1 and told[1]["loss/grad_norm"] > 0


def test_an_evaluation_waits_and_has_the_newest_weights(run):
    run("rollout.num_rollouts=3", "eval.every=2")
    assert Apart.sampled == [0, 0, 0, 1, 2, 3]  # evaluation, rollouts 0, 1 and 2, evaluations after 2 and 3
    assert Apart.loads == [0, 1, 2, 3]


def test_the_copied_engine_samples_from_the_weights_of_its_load_while_the_policy_changes(toy):
    policy, engine, plain = Pretrained(str(toy)).model(), CopiedEngine(), TransformersEngine()
    policy.lm_head.weight.requires_grad_(False)

    def sampled(by):
        return [logprob for c in by.sample([(5, 6, 7)] * 2, Sampling(6), [1, 2]) for logprob in c.logprobs]

    def same(a, b):  # a product may round in another way where its weights lie elsewhere in memory
        return a == pytest.approx(b, abs=1e-5)

    for version, factor in ((0, 1.5), (1, 0.5)):
        engine.load_weights(policy, version)
        plain.load_weights(policy, version)
        before = sampled(plain)
        with torch.no_grad():
            for p in filter(lambda p: p.requires_grad, policy.parameters()):
                p.mul_(factor)
        assert same(sampled(engine), before) and not same(sampled(plain), before) and engine.version == version
    assert engine.model.lm_head.weight is policy.lm_head.weight  # what does not learn is shared
    other = Pretrained(str(toy)).model().requires_grad_(False)  # as a server loads it
    engine.load_weights(other, 2)
    plain.load_weights(other, 2)
    assert same(sampled(engine), sampled(plain)) and engine.version == 2


class Patient(Apart):
    """Samples rollout 1 only after the update on rollout 0. In a single thread it would wait forever."""

    learned = threading.Event()

    def sample(self, *args):
        if self.sampled:
            assert self.learned.wait(LIMIT)
        return super().sample(*args)


class Learned(L.Callback):
    def on_train_batch_end(self, *args):
        Patient.learned.set()


def test_the_policy_learns_while_the_next_rollout_is_played(run):
    told = run("+callbacks.learned={_target_: test_ahead.Learned}", engine="Patient")
    assert Patient.sampled == [0, 0] and [row["rollout/staleness"] for row in told] == [0, 1]


class Later(Halves):
    """Questions in an asynchronous environment."""

    def build(self, example):
        return Answered((Message("user", str(example["number"])),))


class Answered(SingleTurn):
    async def step(self, action):
        await asyncio.sleep(0)
        return None


@pytest.mark.slow
def test_for_a_policy_that_stays_as_it_is_it_changes_nothing(run, tmp_path):
    """Prompts, seeds, rounds of dynamic sampling and kept groups are the same, with asynchronous environments."""
    settings = (
        "selection=dynamic selection.rounds=8 rollout.prompts=6 rollout.num_rollouts=3 optim.optimizer.lr=0".split()
    )
    settings, task = [*settings, "selection.by=reward", "callbacks=[samples]"], {"_target_": "test_ahead.Later"}
    usual = run(*settings, "rollout.ahead=0", folder="usual", task=task)
    early = run(*settings, folder="ahead", task=task)
    assert [row["rollout/staleness"] for row in early] == [0, 1, 1]
    assert [{key: row[key] for key in usual[0]} for row in early] == usual and max(
        row["rollout/rounds"] for row in usual
    ) > 1
    written = [Run(tmp_path / folder).samples([1, 2, 3]) for folder in ("usual", "ahead")]
    assert written[0].equals(written[1]) and len(written[0]) == 36


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_crashed_run_resumes_bit_exactly(run, tmp_path, adapter):
    """5 rollouts in one run equal 3, a crash and the rest: the checkpoint has the rollout that was ahead."""
    settings = f"""callbacks=[samples,checkpoint] callbacks.checkpoint.every=2 rollout.num_rollouts=5 eval.every=2
        algo.num_epochs=2 algo.num_minibatches=2 selection=dynamic selection.rounds=2 adapter={adapter}""".split()
    straight = run(*settings, folder="straight")
    with pytest.raises(RuntimeError, match="the disk is full"):
        run(*settings, "+callbacks.crash={_target_: helpers.slots.Crash, rollout: 3}", folder="crashed")
    checkpoint = f"ckpt_path={tmp_path / 'crashed' / 'checkpoints' / 'last.ckpt'}"
    resumed = run(*settings, checkpoint, "resume.changes=allow", folder="resumed")

    assert [row["rollout/staleness"] for row in straight[1:]] == [0, *[1] * 4]
    assert resumed == straight[3:]
    weights = [state(tmp_path / folder)["state_dict"] for folder in ("straight", "resumed")]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    left = [Run(tmp_path / folder) for folder in ("straight", "resumed")]
    assert left[0].samples([3, 5]).equals(left[1].samples([3, 5]))
    assert left[0].evaluations([4]).equals(left[1].evaluations([4]))

    if adapter == "none":  # a rollout that was played under another plan is not used
        more = ("rollout.sampling.temperature=0.9", "rollout.num_rollouts=4", "resume.changes=allow")
        other = run(*settings, checkpoint, *more, folder="other")
        assert [row["rollout/staleness"] for row in other] == [0, 1]


class Breaking(Varied):
    """Fails after it has scored `most` samples of the training examples."""

    calls, most = 0, 9  # one in the trial before the model is loaded

    def score(self, example, trajectory):
        if example in self.examples("train"):
            type(self).calls += 1
            if self.calls > self.most:
                raise RuntimeError("the grader is gone")
        return super().score(example, trajectory)


class Once(Breaking):
    """Fails once. A rollout that was played again would find the grader mended."""

    def score(self, example, trajectory):
        try:
            return super().score(example, trajectory)
        finally:
            type(self).most = 1000 if self.calls > self.most else self.most


def test_a_failure_in_the_thread_does_not_vanish(run):
    Once.calls, Once.most = 0, 9
    with pytest.raises(RolloutError, match="the grader is gone"):
        run("rollout.num_rollouts=4", "callbacks=[checkpoint]", task={**VARIED, "_target_": "test_ahead.Once"})


@pytest.mark.slow
def test_what_fails_in_the_thread_is_raised_where_it_is_needed(run, tmp_path, monkeypatch):
    """It is raised at that point: the evaluation and the checkpoint before it are still made."""
    settings = ["callbacks=[checkpoint]", "rollout.num_rollouts=4", "eval.every=2"]
    task = {**VARIED, "_target_": "test_ahead.Breaking"}
    with pytest.raises(RolloutError, match=r"the grader is gone.*000003\.failed\.parquet"):
        run(*settings, "callbacks.checkpoint.every=2", task=task)
    folder = tmp_path / "run"
    assert len(pd.read_parquet(folder / "rollouts" / "000003.failed.parquet")) == 4
    assert [row["step"] for row in rows(folder)] == [0, 1, 2]
    left = state(folder)["callbacks"]["RolloutCallback"]
    assert left["rollouts"] == 2 and left["ahead"]["finished"] == []

    monkeypatch.setattr(Breaking, "most", 1000)
    told = run(*settings, f"ckpt_path={folder / 'checkpoints' / 'last.ckpt'}", folder="mended", task=task)
    assert [row["rollout/staleness"] for row in told] == [1, 1]  # rollout 3 has the weights that it was issued with


class InFlight(Apart):
    """Samples half of the tokens, and the other half once it has newer weights, which arrive while it samples."""

    in_flight = True

    def __init__(self, max_cache_tokens: int) -> None:
        super().__init__(max_cache_tokens)
        self.newer = threading.Condition()

    def load_weights(self, model, version):
        with self.newer:
            super().load_weights(model, version)
            self.newer.notify_all()

    def sample(self, prompts, sampling, seeds, done=None):
        first, version = not self.sampled, self.version
        half = replace(sampling, max_tokens=sampling.max_tokens // 2)
        begun = super().sample(prompts, half, seeds)
        if first:  # no update runs beside it
            return begun
        with self.newer:
            assert self.newer.wait_for(lambda: self.version > version, LIMIT)
        longer = [(*prompt, *completion.ids) for prompt, completion in zip(prompts, begun, strict=True)]
        ended = super().sample(longer, half, seeds)
        versions = (version,) * half.max_tokens + (self.version,) * half.max_tokens
        return [
            Completion(a.ids + b.ids, a.logprobs + b.logprobs, b.finish, versions)
            for a, b in zip(begun, ended, strict=True)
        ]


def test_weights_that_are_taken_in_flight_are_given_at_once(run):
    told = run("rollout.num_rollouts=3", "rollout.order=ready", engine="InFlight")
    assert InFlight.loads == [0, 1, 2] and InFlight.sampled == [0, 0, 1, 1, 2]
    assert [row["rollout/staleness"] for row in told] == [0, 0.5, 0.5]


class Quick(Streams):
    """Takes weights in flight, and samples for one rollout at a time."""

    concurrent = False


def test_an_engine_that_is_faster_than_the_update_gets_every_version(run):
    told = run("rollout.num_rollouts=5", "rollout.order=ready", engine="Quick")
    assert Quick.loads == [0, 1, 2, 3, 4] and all(row["rollout/staleness_max"] <= 1 for row in told)


def test_staleness_counts_each_token():
    def sample(length: int, versions: tuple[int, ...] | None) -> Sample:
        turn = Turn((1,), Completion((2,) * length, (-1.0,) * length, "stop", versions))
        return Sample({}, Trajectory(()), (turn,), Reward(0.0, False))

    groups = [[sample(2, None), sample(3, (3, 3, 4))]]
    played = Rollout(groups, None, groups, None, rounds=1, version=3, seconds=0.0)
    assert staleness_of(played, 4) == {
        "rollout/staleness": pytest.approx((1 + 1 + 1 + 1 + 0) / 5),
        "rollout/staleness_max": 1,
    }
    replayed = replace(played, groups=[[*groups[0], replace(sample(1, None), age=2)]])
    assert staleness_of(replayed, 4) == {"rollout/staleness": pytest.approx(7 / 6), "rollout/staleness_max": 3}


def test_a_rollout_of_another_plan_is_played_again():
    plan, rollout = Plan(2, 2, 4, Sampling(4), ahead=1), Rollout([], None, [], None, rounds=1, version=3, seconds=0.0)
    others = (
        (replace(plan, num_rollouts=9), "a", True),
        (replace(plan, ahead=3), "a", True),
        (replace(plan, group_size=3), "a", False),
        (plan, "b", False),  # with other rewards, say
    )
    for other, recipe, taken in others:
        made = Chain(SimpleNamespace(plan=plan, engine=None, objects={}, recipe="a"), Stop())
        state = {"plan": other, "recipe": recipe, "finished": [rollout], "places": [[]]}
        made.load_state_dict({"ahead": state}, 2)
        assert (made.finished == {2: rollout}) == taken


def chain_of(ahead: int) -> Chain:
    engine = SimpleNamespace(version=0, load_weights=lambda model, version: setattr(engine, "version", version))
    return Chain(
        SimpleNamespace(plan=Plan(2, 2, 6, Sampling(4), ahead=ahead), engine=engine, objects={}, recipe="a"), Stop()
    )


def test_a_copy_of_a_version_stays_as_it_is_when_the_policy_learns():
    chain, policy = chain_of(2), torch.nn.Linear(1, 1)
    torch.nn.init.constant_(policy.weight, 1.0)
    chain.learned(1, policy, print)
    torch.nn.init.constant_(policy.weight, 5.0)
    assert chain.copies[1].weight.item() == 1


def test_a_policy_that_lends_older_weights_to_the_engine_gets_its_own_back():
    policy = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(policy.weight, 5.0)
    with pytest.raises(OSError, match="lost"), holding(policy, {"weight": torch.ones(1, 1)}):
        assert policy.weight.item() == 1
        raise OSError("the engine is lost")
    assert policy.weight.item() == 5


def test_a_checkpoint_has_the_weights_of_the_rollout_in_play():
    """With ahead=2 rollout 3 has version 1, and rollout 4 version 2."""
    chain = chain_of(2)
    chain.copies, chain.version, chain.stopped = {version: torch.nn.Linear(1, 1) for version in (0, 1, 2)}, 3, True
    chain._take(3)
    assert chain.engine.version == 1 and [*chain.copies] == [1, 2]
    assert [version for version, _ in chain.state_dict()["ahead"]["weights"]] == [1, 2]


def test_a_checkpoint_has_what_was_handed_over_and_the_states_before_the_rollout_in_play():
    chain = chain_of(1)
    taken, next_one = (Rollout([], None, [], None, rounds=1, version=v, seconds=0.0) for v in (2, 3))
    chain.taken, chain.finished, chain.version, chain.stopped = taken, {3: next_one}, 2, True
    chain.before = {"sampler": {"drawn": 7}}
    saved = chain.state_dict()
    assert [rollout.version for rollout in saved["ahead"]["finished"]] == [2, 3]
    assert saved["objects"] == {"sampler": {"drawn": 7}}


def test_a_thread_that_is_not_needed_is_ended_or_left(monkeypatch):
    def forever():
        while True:
            time.sleep(0.01)

    monkeypatch.setattr(threads, "GRACE", LIMIT)
    endless = Background(forever)
    endless.stop()
    assert not endless.thread.is_alive()

    monkeypatch.setattr(threads, "GRACE", 0.1)
    over = threading.Event()
    deaf = Background(over.wait)
    deaf.stop()
    assert deaf.thread.is_alive()
    over.set()


class Endless(Apart):
    def sample(self, *args):
        while self.sampled:
            torch.randn(64, 64).softmax(-1).tolist()
        return super().sample(*args)


class Interrupt(L.Callback):
    def on_train_batch_end(self, *args):
        raise KeyboardInterrupt


@pytest.mark.slow
def test_ctrl_c_ends_the_program_and_does_not_abort_it(smoke, tmp_path):
    words = ["train.py", *(o for o in smoke() if not o.startswith("output_dir"))]
    words += ["rollout.ahead=1", "algo.old_policy=rollout", "eval.every=0", f"hydra.run.dir={tmp_path}"]
    words += ["engine=transformers", "engine._target_=test_ahead.Endless", "trainer=cpu"]
    words += ["+callbacks.interrupt={_target_: test_ahead.Interrupt}"]
    done = command(*words, environment={"PYTHONPATH": TEST_PATH})
    assert done.returncode == 1 and len(rows(tmp_path)) == 1, done.stderr


@pytest.mark.vllm
def test_vllm_samples_beside_the_update(run):
    """If the policy does not change, the log-probabilities from the sampling thread are the trainer's."""
    pytest.importorskip("vllm")
    more = [
        "engine=vllm",
        "engine._target_=grpo.engines.vllm.engine.VLLMEngine",
        "engine.args.kv_cache_memory_bytes=67108864",
    ]
    still = run(*more, "optim.optimizer.lr=0", "rollout.num_rollouts=4", "max_tokens=32")
    assert [row["rollout/staleness"] for row in still] == [0, 1, 1, 1]
    assert max(row["rollout/logprob_gap_max"] for row in still) < 1e-5 and still[1]["loss/grad_norm"] > 0


def test_objectives_that_take_old_samples_for_the_policys_own_are_refused():
    for overrides in ("algo.old_policy=rollout", "algo/correction=mis", "algo=rolo", "algo=rloo algo/correction=tis"):
        check_algorithm(preset(*overrides.split()), 4, 2, ahead=1)
    for overrides in (
        ["algo=gspo"],
        ["algo/surrogate=ipo"],  # which leaves tokens out by mu, and weighs the others by the old policy
        ["algo/correction=low_error"],  # leaves rows out, and weighs none
        ["algo.level=none", "algo/surrogate=reinforce", "algo.old_policy=rollout"],
    ):
        with pytest.raises(UserError, match="older than the policy") as refused:
            check_algorithm(preset(*overrides), 4, 2, ahead=1)
    assert "old_policy" not in str(refused.value)  # would change nothing: there is no ratio


def test_the_thread_uses_the_gpu_of_the_trainer(monkeypatch):
    """CUDA's present device belongs to a thread, and is 0 in a new one. On a CPU nothing is set."""
    set_in: list[tuple[int, str]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda i: set_in.append((i, threading.current_thread().name)))
    assert Background(lambda: "on a CPU").future.result(LIMIT) == "on a CPU" and not set_in
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3 if threading.current_thread().name != "rollout" else 0)
    played = Background(lambda: list(set_in)).future.result(LIMIT)
    assert played == [(3, "rollout")]  # before the rollout begins
