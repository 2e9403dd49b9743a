"""The output of a run in the terminal: during the run, at its end, and when it is stopped."""

import logging
import math
import re
import signal
from dataclasses import replace
from types import SimpleNamespace

import lightning as L
import pytest
from conftest import compose_config
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from grpo.env.messages import Message
from grpo.env.types import Action, Reward, State, Step, Trajectory
from grpo.evaluation.evaluator import Evaluation
from grpo.evaluation.intervals import mean_interval
from grpo.extras.terminal.callback import Terminal, sample_panel, status
from grpo.extras.terminal.evaluations import history
from grpo.extras.terminal.summary import in_short, summary
from grpo.rollout.types import Sample
from grpo.runs.run import Run
from grpo.system.calls import SPENT
from grpo.system.errors import UserError
from grpo.system.output.console import SCREENS, console
from train import train

ROLLOUT = {
    "rollout/reward": 0.5, "rollout/solve_rate": 0.25, "rollout/effective_groups": 0.75, "rollout/tokens": 300.0,
    "tokens/s": 1234.0, "time/rollout": 2.0, "time/update": 1.0, "time/sync": 0.0, "memory/rollout": 2.0**30,
    "memory/update": 2.0**31,
}  # fmt: skip


def test_the_line_of_a_rollout():
    assert status(ROLLOUT, 3661.2) == "reward 0.50  solved 25 %  groups 75 %  1,234 tok/s  1:01:01 left"
    more = {"loss/grad_norm": 0.51239, "loss/clip_fraction_high": 0.031}
    line = status(ROLLOUT | more, 0, [*more, "loss/kl"])  # this run has no KL
    assert "groups 75 %  grad_norm 0.5124  clip_fraction_high 3.1 %  1,234 tok/s" in line
    with pytest.raises(
        UserError, match=r"callbacks\.terminal\.columns=grad_norm is no metric; similar: loss/grad_norm, "
    ):
        Terminal("run", 80, columns=["grad_norm"])


def evaluated(rollouts: int, shares: list[float]) -> Evaluation:
    return Evaluation(rollouts, (), {"accuracy": mean_interval(shares, bounds=(0, 1))}, seconds=1.5)


def test_the_summary_of_a_run():
    """Two rollouts of 300 tokens, 3 s each; the evaluation before training belongs to no rollout's row."""
    learned = [ROLLOUT, ROLLOUT | {"time/eval": 1.5}]
    evaluations = [evaluated(0, [0.0, 0.0, math.nan]), evaluated(1, [1.0, 1.0]), evaluated(2, [1.0, 0.0])]
    found = summary(learned, evaluations, 10.0, ["loss/kl"], 0.5, {"Task.score": 2.0})
    assert found == {
        "rollouts": "2",
        "time": "0:00:10, 5 s a rollout",
        "  rollout": "0:00:04, 40 %",
        "  update": "0:00:02, 20 %",
        "  sync": "0:00:00, 0 %",
        "  eval": "0:00:03, 30 %",
        "  checkpoint": "0:00:00, 5 %",
        "  rest": "0:00:00, 5 %",
        "beside: Task.score": "0:00:02, 20 %",
        "tokens/s": "100",
        "memory, at most": "2.00 GiB",
        # Wilson's interval of 0 and 2 of 2: 1.96^2 / (2 + 1.96^2) = 0.658
        "held out, first": "0.0 % (0.0 to 65.8) after 0",
        "held out, best": "100.0 % (34.2 to 100.0) after 1",
        "held out, last": "50.0 % (9.5 to 90.5) after 2",
        "warnings": "loss/kl",
    }
    assert in_short(found | {"checkpoints/best": "max eval/accuracy, 100.0 %"}) == {
        **{f"held out, {name}": found[f"held out, {name}"] for name in ("first", "best", "last")},
        "time": "5 s a rollout: rollout 40%, update 20%, eval 30%, checkpoint 5%, rest 5%",
        "speed": "100 tokens/s, at most 2.00 GiB of memory",
        "warnings": "loss/kl",
        "checkpoints/best": "max eval/accuracy, 100.0 %",
    }
    short = (10.0, [], 0.0, {})
    risen = in_short(summary(learned, evaluations[:2], *short))
    assert "held out, best" not in risen and risen["held out, last"] == "100.0 % (34.2 to 100.0) after 1, the best"
    fallen = summary(learned, [evaluated(0, [1.0, 1.0]), *evaluations[2:], evaluated(4, [0.0, 0.0])], *short)
    assert fallen["held out, best"] == "100.0 % (34.2 to 100.0) after 0"
    level = summary(learned, [evaluated(0, [0.0, 0.0]), evaluated(2, [0.0, 0.0])], *short)
    assert level["held out, best"].endswith(
        "after 2"
    )  # as `best`, the policy before training gives way to an equal one
    lost = summary(learned, evaluations, *short, lost=[1])  # the policy after 1 rollout is not on the disk
    assert lost["held out, best"].endswith("after 2") and lost["held out, last"].endswith("after 2")
    ahead = [row | {"time/played": 3.5, "time/engine_idle": 0.25, "time/weights": 0.0} for row in learned]
    ahead[0]["memory/rollout"] = 3 * 2.0**30  # more than any update took
    without = summary(ahead, [evaluated(0, [math.nan])], *short)
    assert without["memory, at most"] == "3.00 GiB"
    assert without["beside: rollouts ahead"] == "0:00:07, 70 %" and "beside: Task.score" not in without
    assert without["beside: engine idle"] == "0:00:00, 5 %" and "beside: wait for weights" not in without
    assert "held out, first" not in without and without["warnings"] == "none"
    assert list(in_short(without)) == ["time", "speed", "warnings"]


@pytest.fixture
def log(tmp_path):
    """Return what train.log has, as the command line makes one."""
    handler = logging.FileHandler(tmp_path / "train.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    logging.getLogger().addHandler(handler)
    yield (tmp_path / "train.log").read_text
    logging.getLogger().removeHandler(handler)
    handler.close()


def test_completions_at_an_interval_and_the_paths_at_the_end(smoke, tmp_path, capsys, log):
    columns = {
        "loss/policy": "policy -?0",
        "loss/policy_epoch_2": "policy_epoch_2 -?0",
        "loss/grad_norm": "grad_norm [0-9]",
    }
    columns |= {"loss/kl": "kl [0-9]", "loss/clip_fraction_high": "clip_fraction_high [0-9.]+ %"}
    columns |= {"rollout/advantages_std": "advantages_std 0", "rollout/old_logprobs_std": "old_logprobs_std [0-9]"}
    showing = ("callbacks=[terminal,health,checkpoint]", "callbacks.terminal.samples=1", "callbacks.terminal.every=2")
    showing += (f"callbacks.terminal.columns=[{','.join(columns)}]", "algo/kl=loss", "algo.num_epochs=2")
    train(
        compose_config(*smoke(*showing, "callbacks.terminal.samples_every=2", "rollout.num_rollouts=5", "eval.every=5"))
    )
    said = capsys.readouterr().out
    assert [f"\nrollout {rollout}: reward" in said for rollout in range(1, 6)] == [True, True, False, True, True]
    assert [f"rollout {rollout}/5  reward" in said for rollout in range(1, 6)] == [False, True, False, True, True]
    assert re.search("groups .*" + "  ".join(columns.values()), said)
    beside = re.findall(r"(beside: [\w. ]+?) +│ [\d:]+, (\d+) %", log())
    assert sorted(name for name, _ in beside) == [
        f"beside: {name}" for name in ("GSM8K.score_group", "an environment of GSM8K", "claims of GSM8K")
    ]
    assert said.index("after 0: 0.0 % (0.0 to ") < said.index("rollout 1: reward")
    assert "│" not in said and re.search("[0-9:]+ left", said)
    assert "rollout/truncated" in said.rpartition("the run")[2]  # the name of the warning's metric
    assert f"written to {tmp_path}: train.log, metrics.csv, checkpoints/best, checkpoints/last.ckpt\n" in said
    assert said.endswith(f"the best policy on all test examples: python eval.py run={tmp_path}\n")
    assert "held-out examples" in log() and "held-out examples" not in said and "beside: " not in said
    times = Run(tmp_path).metrics["time/eval"]
    assert list(times[times > 0].index) == [0, 5]


def test_the_evaluation_before_training_is_a_part_of_the_time(smoke, log):
    evaluated = ("eval.every=2", "eval.samples=64", "eval.sampling.temperature=1")
    train(compose_config(*smoke("callbacks=[terminal]", *evaluated)))
    shares = re.findall(r"\n│   \w.* (\d+) % ", log())
    assert len(shares) == 6 and abs(sum(map(int, shares)) - 100) <= 3


class Interrupt(L.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if batch.rollout == 2:
            raise KeyboardInterrupt


@pytest.fixture
def interrupts():
    """Restore the SIGINT handler: after the first Ctrl-C Lightning ignores further ones."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize(
    ("callback", "error", "why"),
    [
        ("{_target_: test_terminal.Interrupt}", SystemExit, "KeyboardInterrupt"),
        ("{_target_: helpers.slots.Crash, rollout: 2}", RuntimeError, "RuntimeError"),
    ],
)
def test_a_run_that_is_stopped_says_how_to_go_on(smoke, tmp_path, capsys, caplog, interrupts, callback, error, why):
    more = ("callbacks=[terminal,checkpoint]", "callbacks.checkpoint.every=2", f"+callbacks.stop={callback}")
    with pytest.raises(error):
        train(compose_config(*smoke(*more, "rollout.num_rollouts=3")))
    assert f"stopped by {why}; to resume after 2 rollouts: python train.py ckpt_path={tmp_path}" in caplog.text
    train(
        compose_config(
            *smoke("callbacks=[terminal]", "rollout.num_rollouts=3", f"ckpt_path={tmp_path}", "resume.changes=allow")
        )
    )
    said = capsys.readouterr().out  # of the whole run, not only of its last part
    assert "rollout 3/3" in said and "the run: 3 rollouts in 0:00:" in said
    assert re.search(r"held out, first .* after 0 *\n", said) and "held out, last" in said


def test_the_log_has_what_the_terminal_shows_at_its_width(log, monkeypatch):
    """Lines whole and with their time, tables without colors, no movement of the cursor."""
    monkeypatch.setenv("COLUMNS", "60")
    out, line = console(force_terminal=True), "many words " * 30
    with Live(Text("first rollout ..."), console=out, transient=True, auto_refresh=False) as live:
        live.update(Text("second rollout ..."), refresh=True)
        out.print(f"[green]PASS[/] {line}", soft_wrap=True)
        out.print(history([(0, {"eval/accuracy": 0.5})]))
    first, _, *table = log().splitlines()
    assert (
        re.fullmatch(rf"2\d\d\d-\d\d-\d\d \d\d:\d\d:\d\d PASS {line}".rstrip(), first)
        and "held-out examples" in table[0]
        and "50.0 %" in table[-2]
    )
    assert not any("\x1b" in each or "rollout ..." in each for each in table)


def test_the_lines_that_change_in_place_fit_into_80_columns():
    terminal = Terminal("run", 80)
    metrics = ROLLOUT | {"tokens/s": 123456.0, "rollout/reward": -10.5}
    out = Console(width=80, force_terminal=True, record=True)
    terminal.evaluations = {at: evaluated(at, [at / 80] * 2) for at in range(0, 81, 40)}
    out.print(Group(terminal.in_place(f"40/80  {status(metrics, 360000)}")))
    line = "40/80  reward -10.50  solved 25 %  groups 75 %  123,456 tok/s  4 days, 4:00:00 …"
    assert out.export_text().splitlines() == [line, "held out  ▁▅█  100.0 %"]
    terminal.evaluations = {at: evaluated(at, [float(at > 0)] * 2) for at in range(41)}
    assert terminal.in_place("40/80").plain == f"40/80\nheld out  {'█' * 40}  100.0 %"  # the first one is left out


def test_the_time_left_is_that_of_the_rollouts_to_come(capsys, monkeypatch):
    """Two of five rollouts took 20 seconds."""
    terminal = Terminal("run", 5, every=1)
    monkeypatch.setattr("grpo.extras.terminal.callback.time.perf_counter", lambda: 120.0)
    terminal.begun, terminal.learned = 100.0, [ROLLOUT]
    batch = SimpleNamespace(rollout=1, metrics=ROLLOUT, evaluations=[])
    terminal.on_train_batch_end(None, None, None, batch, 1)
    assert re.search(r"rollout 2/5  .* 0:00:30 left", capsys.readouterr().out)


def test_paths_and_commands_are_never_broken(capsys, tmp_path):
    folder = tmp_path / f"a [bold] {'long ' * 20}path"
    folder.mkdir()
    for name in ("report.html", "checkpoints/best"):
        (folder / name).mkdir(parents=True)
    Terminal(str(folder), 80).on_fit_end(None, None)
    written, command, link = capsys.readouterr().out.splitlines()
    assert written == f"written to {folder}: checkpoints/best"
    assert command.endswith(f": python eval.py 'run={folder}'") and link == (folder / "report.html").as_uri()


def test_output_to_a_file_is_not_wrapped(capsys, monkeypatch):
    """A prompt of one long line stays one; with COLUMNS, or in a terminal, it is wrapped."""
    prompt = "word " * 60
    step = Step(State((Message("user", prompt.strip()),)), Action(Message("assistant", "yes")))
    sample = Sample({}, Trajectory((step,)), (), Reward(1.0, True))
    monkeypatch.delenv("COLUMNS", raising=False)
    Terminal("run", 80).draw(sample_panel("rollout 1", sample))
    assert prompt.strip() in capsys.readouterr().out.splitlines()
    monkeypatch.setenv("COLUMNS", "80")
    Terminal("run", 80).draw(sample_panel("rollout 1", sample))
    assert prompt.strip() not in capsys.readouterr().out and console(force_terminal=True).width == 80


def test_what_a_resumed_run_tells_of_its_first_part(capsys):
    """Its seconds, also those beside it, go on from where it was; an evaluation keeps its numbers, not its samples."""
    first = Terminal("run", 80)
    first.note([replace(evaluated(0, [1.0, 0.0]), groups=((object(),),), columns={"a": [1]})])
    [kept] = first.evaluations.values()
    assert kept == evaluated(0, [1.0, 0.0]) and "50.0 %" in capsys.readouterr().out
    resumed = Terminal("run", 80)
    resumed.load_state_dict(first.state_dict() | {"seconds": 3600.0, "spent": {"Task.score": 2.5}})
    resumed.on_fit_start(None, None)
    resumed.on_exception(None, None, RuntimeError())  # which gives the terminal back
    state = resumed.state_dict()
    assert not SCREENS and 3600 <= state["seconds"] < 3660 and state["spent"] == {"Task.score": 2.5}
    SPENT.clear()


@pytest.mark.parametrize("bars", [False, True])
def test_progress_is_said_by_lines_where_nothing_can_change_in_place(monkeypatch, capsys, bars):
    """As on a dumb terminal, with colors in a pipe, and after breakpoint()."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = Terminal("run", 2, samples=0, every=1)
    shown.on_fit_start(None, None)
    assert shown.console.is_terminal and not shown.screen.bars
    if bars:
        shown.screen = SimpleNamespace(bars=True, tick=list, doing=str)
    batch = SimpleNamespace(rollout=0, metrics=ROLLOUT, evaluations=[], groups=[])
    shown.on_train_batch_end(None, None, None, batch, 0)
    shown.away()
    assert ("rollout 1/2  reward 0.50" in re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)) != bars


def test_a_long_prompt_shows_its_question_at_the_end():
    step = Step(State((Message("user", "0" * 100 + "1" * 490 + " 2 and 2?\n"),)), Action(Message("assistant", "4")))
    shown = sample_panel("rollout 1", Sample({}, Trajectory((step,)), (), Reward(1.0, True))).renderable
    assert shown.plain == "..." + "1" * 490 + " 2 and 2?\n" + "\n4"
