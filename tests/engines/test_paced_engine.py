"""benchmarks/paced.py: it samples as the built-in engine does, beside others and with new weights in flight, at set times."""

import threading
import time

import pytest
import torch
from conftest import compose_config
from paced import Paced

from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.protocol import Sampling
from grpo.runs.run import Run
from train import train

PROMPTS, SEEDS = [[5, 6, 7], [5, 6, 7], [9, 4, 3, 8]], [1, 2, 3]
AHEAD = ("rollout.ahead=1", "rollout.num_rollouts=5", "callbacks=terminal", "eval.every=5")


@pytest.fixture
def engine(toy_model):
    engine = Paced(step=0.0)
    engine.load_weights(toy_model, 0)
    yield engine
    engine.close()


def test_it_samples_what_the_built_in_engine_samples(engine, toy_model):
    other, sampling, finished = TransformersEngine(), Sampling(max_tokens=12, stop_ids=[2]), []
    other.load_weights(toy_model, 0)
    told = engine.sample(PROMPTS, sampling, SEEDS, lambda i, completion: finished.append((i, completion)))
    for ours, theirs in zip(told, other.sample(PROMPTS, sampling, SEEDS), strict=True):
        assert (ours.ids, ours.finish, ours.versions) == (theirs.ids, theirs.finish, (0,) * len(ours.ids))
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    assert sorted(finished) == list(enumerate(told))


def test_calls_share_the_slots_and_change_nothing_for_each_other(engine):
    sampling = Sampling(max_tokens=12)
    alone = [engine.sample([prompt], sampling, [seed])[0] for prompt, seed in zip(PROMPTS, SEEDS, strict=True)]
    engine.slots, together = 2, {}  # of nine completions

    def ask(n: int) -> None:
        together[n] = engine.sample(PROMPTS, sampling if n else Sampling(max_tokens=7, temperature=0.0), SEEDS)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for n in (1, 2):
        assert [done.ids for done in together[n]] == [done.ids for done in alone]
        for ours, theirs in zip(together[n], alone, strict=True):
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    assert [len(done.ids) for done in together[0]] == [7, 7, 7] and together[0][0].ids == together[0][1].ids
    assert not engine.calls and not engine.rows and not engine.held


def test_a_completion_goes_on_with_new_weights_and_says_so(engine, toy_model):
    """Four tokens with version 0, then new weights come in the middle of a step, and the rest is of version 5."""
    sampling, before = Sampling(max_tokens=12), engine.sample(PROMPTS[:1], Sampling(max_tokens=12), [1])[0]
    advance, result = engine.advance, []

    def fourth():
        step = advance()
        if engine.steps == first + 4:
            engine.loading = True  # as load_weights says first, so that no step comes between
            loader.start()
        return step

    first, engine.advance = engine.steps, fourth
    with torch.no_grad():
        toy_model.model.norm.weight.mul_(2.0)
    loader = threading.Thread(target=engine.load_weights, args=(toy_model, 5))
    asker = threading.Thread(target=lambda: result.extend(engine.sample(PROMPTS[:1], sampling, [1])))
    asker.start()
    asker.join(20)
    (done,) = result
    assert done.versions == (0,) * 4 + (5,) * 8
    assert done.ids[:4] == before.ids[:4] and done.logprobs[:4] == pytest.approx(before.logprobs[:4], abs=1e-5)
    # the last norm changes logits, and neither keys nor values: so a plain pass of the new weights has the same numbers
    text = torch.tensor([[*PROMPTS[0], *done.ids]])
    logprobs = toy_model(input_ids=text).logits[0, 2:-1].log_softmax(-1)
    theirs = logprobs.gather(-1, text[0, 3:, None])[4:, 0].tolist()
    assert done.logprobs[4:] == pytest.approx(theirs, abs=1e-4)


def test_a_step_a_prompt_a_load_and_a_slow_completion_take_their_time(toy_model):
    engine = Paced(step=0.02, prefill=10.0, pause=0.1, tail=1.0, stretch=2.0)
    begun = time.monotonic()
    engine.load_weights(toy_model, 0)
    assert time.monotonic() - begun >= 0.1
    begun = time.monotonic()
    engine.sample([[5] * 10] * 3, Sampling(max_tokens=5), SEEDS)
    # 5 tokens and as many steps again, and 10 tokens of the one prompt at 10 s for 1000
    assert 10 * 0.02 + 0.1 <= time.monotonic() - begun < 3
    engine.close()


def test_a_caller_that_leaves_frees_its_slots(engine):
    def leave(i, completion):
        raise KeyError("enough")

    engine.step = 0.01
    with pytest.raises(KeyError):
        engine.sample([[5, 6], [7, 8]], Sampling(max_tokens=2), [1, 2], leave)
    engine.slots = 1
    assert len(engine.sample([[5, 6]], Sampling(max_tokens=3), [1])[0].ids) == 3
    assert not engine.calls and not engine.rows and not engine.held


@pytest.mark.slow
def test_a_run_with_paced_updates_says_who_waited(smoke, tmp_path, capsys):
    """One rollout ahead takes at least 8 steps of 0.02 s, and nothing of the update: so the engine is idle for a half of it."""
    from grpo.extras.report.run import run_data

    words = smoke("engine._target_=paced.Paced", "+engine.step=0.02", "module._target_=paced.PacedModule")
    train(compose_config(*words, "+module.update=0.5", "logger=csv", "algo.old_policy=rollout", *AHEAD))
    metrics = Run(tmp_path).metrics
    assert (metrics["time/update"].dropna() >= 0.5).all()
    assert (metrics["time/played"].dropna() >= 8 * 0.02).all() and metrics["rollout/staleness"].max() <= 1
    assert "% of the time, and the policy hardly waited: fewer servers, or more devices" in capsys.readouterr().out
    (line,) = run_data(Run(tmp_path), 0)["waits"]
    assert line.startswith("the engine was idle")
