"""Programs that call the policy over HTTP: their calls are turns, and what they do wrong harms only their own sample."""

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from conftest import compose_config, seed
from helpers.time_limits import keep_for

from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.protocol import Sampling
from grpo.env.messages import Message
from grpo.env.tokens import rows_of_turns
from grpo.env.types import Action, Reward, State, Step, Trajectory
from grpo.extras.demo.demo_model import make_model, make_tokenizer
from grpo.extras.serve.dialects.request import CompletionRequest
from grpo.extras.serve.sessions import Handler, NoAnswer, Sessions, posted
from grpo.extras.tools.renderer import TokenizerRenderer
from grpo.rollout.collate import collate
from grpo.rollout.episodes import play
from grpo.rollout.types import Limits
from grpo.runs.run import Run
from grpo.system.errors import RolloutError, UserError
from tasks.agent import Agent
from train import train

LIBRARY = """
import json, os, socket, sys, threading, time, urllib.error, urllib.request

def send(url, body, **headers):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        return {"status": error.code, **json.load(error)}

def ask(*texts, **more):
    said = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    body = {"messages": said, "return_token_ids": True, **more}
    return send(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)

def text(answer):
    return answer["choices"][0]["message"]["content"]

def reward(**body):
    return send(os.environ["GRPO_REWARD_URL"], body)

def note(*values):  # for the test
    with open(row["log"], "a") as file:
        file.write("".join(json.dumps(value) + "\\n" for value in values))

row = json.load(open(os.environ["GRPO_EXAMPLE"]))
exec(row["program"])
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The engine and the renderer of a small random Llama whose chat template supports tools."""
    tokenizer = make_tokenizer(["How many coins are left? 12 + 7 = 19"] * 30, tools=True)
    engine = TransformersEngine()
    engine.load_weights(make_model(tokenizer, seed=0), 0)
    return engine, TokenizerRenderer(tokenizer)


@pytest.fixture
def run(model, tmp_path, monkeypatch):
    """Play programs, one for each example; returns the groups, what the programs noted, and the task."""
    (tmp_path / "agent.py").write_text(LIBRARY)
    monkeypatch.chdir(tmp_path)  # the command names a file of this folder

    def played(*programs: str, group_size: int = 1, limits: Limits | None = None, max_tokens: int = 8, **settings):
        log = tmp_path / "log"
        rows = [{"prompt": f"q{i}", "program": program, "log": str(log)} for i, program in enumerate(programs)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = {"command": "python agent.py", "rewards": "longer", "splits": {"train": "train"}} | settings
        task = Agent("rows.jsonl", **settings)
        groups = play(task, task.examples("train"), group_size, *model, Sampling(max_tokens), seed, limits)
        noted = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        assert not task.server.open  # every session is closed
        return groups, noted, task

    return played


ENDED = ("answered", "truncated")  # the small model seldom ends a message itself


def told(answer) -> tuple:
    """The ids of prompt and completion in an answer."""
    return tuple(answer["prompt_token_ids"]), tuple(answer["choices"][0]["token_ids"])


def ids_of(sample) -> list[tuple]:
    return [(turn.prompt_ids, turn.completion.ids) for turn in sample.turns]


def test_the_calls_of_a_program_are_the_turns_of_its_sample(run, model):
    program = """
first = ask("How many?")
second = ask("How many?", text(first), "Sure?")
note(first, second, [os.getcwd(), os.environ["GRPO_SEED"], row["prompt"]])
"""
    ((sample,),), (first, second, (folder, given, prompt)), _ = run(program)
    assert sample.trajectory.end in ENDED and ids_of(sample) == [told(first), told(second)]
    assert [m.content for m in sample.trajectory.messages][::2] == ["How many?", "Sure?"]
    assert sample.reward.value == len(second["choices"][0]["message"]["content"])  # `longer`, of the last message
    assert second["usage"]["prompt_tokens"] == len(sample.turns[1].prompt_ids)
    assert sample.turns[1].prompt_ids[: len(sample.turns[0].ids)] == sample.turns[0].ids
    (row,) = rows_of_turns(sample.turns)  # one row, with exact ids
    assert row.prompt_ids + row.ids == sample.turns[1].ids
    assert given == str(seed(0, 0, 1 << 31)) and prompt == "q0"
    assert Path(folder).name.startswith("grpo-agent-") and not Path(folder).exists()


def test_branches_and_sub_agents_are_rows_of_one_sample(run):
    program = """
main = ask("How many?")
helper = ask("Who?")
again = ask("Who?")
more = ask("How many?", text(main), "Sure?")
note(main, helper, again, more)
"""
    ((sample,),), noted, _ = run(program)
    main, helper, again, more = sample.turns
    assert ids_of(sample) == [told(answer) for answer in noted]
    rows = rows_of_turns(sample.turns)
    assert [row.prompt_ids + row.ids for row in rows] == [more.ids, helper.ids, again.ids]
    assert [sum(row.sampled) for row in rows] == [
        len(main.completion.ids + more.completion.ids),
        len(helper.completion.ids),
        len(again.completion.ids),
    ]
    assert int(collate([[sample]]).mask.sum()) == sample.length


def test_a_program_gives_the_reward_or_leaves_it_to_the_task(run):
    half = 'ask("?"); note(reward(reward=0.5, parts={"tests": 3}))'
    right = 'ask("?"); reward(reward=1); reward(reward=0.25, correct=True); sys.exit(3)'  # the last one counts
    null = 'note(len(text(ask("?")))); reward(reward=None)'
    ((a,), (b,), (c,)), noted, _ = run(half, right, null)
    assert a.reward == Reward(0.5, False, {"tests": 3}) and {"reward": 0.5} in noted
    assert b.trajectory.end in ENDED and (b.reward.value, b.reward.correct) == (0.25, True)  # whatever its exit code
    assert c.reward.value in noted


def test_an_answer_column_grades_where_no_reward_is_posted(tmp_path):
    rows = [{"prompt": "1 + 1?", "answer": "2"}, {"prompt": "1 + 2?"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = Agent(str(tmp_path / "rows.jsonl"), "python -c pass", splits={"train": "train"})
    first, second = task.examples("train")

    def said(row, text, reward=None):
        step = Step(State(task.messages(row)), Action(Message("assistant", text)))
        return Trajectory((step,), reward=reward)

    given = task.score_group(first, [said(first, "\\boxed{2}"), said(first, "", Reward(0.5, False)), said(first, "2")])
    assert [reward.value for reward in given] == [1, 0.5, 0]
    assert not task.score(second, said(second, "\\boxed{3}")).known


HOSTILE = {
    "answered": 'note(text(ask("Still there?")))',
    "never ends": 'ask("?"); signal = __import__("signal"); time.sleep(10**4)',
    "fails": 'ask("?"); print("a line", file=sys.stderr); raise KeyError("lost")',
    "never calls": "pass",
    "rubbish": """
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
for body in (b"{", b"[]", b"null", b"\\xff", b'{"messages": 3}', {"messages": [{"role": "user", "content": "?"}], "n": 2}):
    answer = send(url, body)
    assert answer["status"] == 400 and answer["error"]["message"].count("\\n") == 0, answer
assert send(url, b"[" * 100000)["status"] == 400
assert send(url.replace("chat/completions", "embeddings"), {})["status"] == 404
note(text(ask("?")))
""",
    "other's id": """
key = os.environ["OPENAI_API_KEY"]
other = os.environ["OPENAI_BASE_URL"].replace(key, "0" * 32)
assert send(other + "/chat/completions", {"messages": []})["status"] == 404
wrong = send(other + "/messages", {"messages": []})
assert wrong["type"] == "error", wrong  # Anthropic's form
assert send(os.environ["GRPO_REWARD_URL"].replace(key, "x"), {"reward": 1})["status"] == 404
ask("?")
""",
    "closes half-way": """
where = os.environ["ANTHROPIC_BASE_URL"].split("/")
host, port = where[2].split(":")
for head in (b"POST ", b"POST /" + where[3].encode() + b"/v1/chat/completions HTTP/1.1\\r\\nContent-Length: 99\\r\\n\\r\\n{"):
    connection = socket.create_connection((host, int(port)))
    connection.sendall(head)
    connection.close()
ask("?")
""",
    "floods": """
found = []
def one():
    found.append(ask("?").get("status", 200))
threads = [threading.Thread(target=one, daemon=True) for _ in range(120)]
[thread.start() for thread in threads]
deadline = time.time() + 120
while 429 not in found and time.time() < deadline:
    time.sleep(0.01)
note({"flood": 429 in found})
os._exit(0)  # Python's own end may abort while so many threads write their errors
""",
    "too large": """
ask("?")
try:
    assert send(os.environ["OPENAI_BASE_URL"] + "/chat/completions", b" " * (1 << 23) + b"{}")["status"] == 413
except OSError:  # the server has closed the connection before all was sent
    pass
""",
    "too long": 'ask("12 " * 5000)',
    "odd tokens": """
url = os.environ["ANTHROPIC_BASE_URL"] + "/inference/v1/generate"
send(url, {"token_ids": [10 ** 9], "sampling_params": {"max_tokens": 4}})
""",
    "no numbers": """
send(os.environ["ANTHROPIC_BASE_URL"] + "/inference/v1/generate", {"token_ids": [1.5]})
""",
    "no tokens": 'send(os.environ["OPENAI_BASE_URL"] + "/completions", {"prompt": [None]})',
    "half a character": """
answer = send(os.environ["OPENAI_BASE_URL"] + "/completions", {"prompt": "a\\ud800", "stop": ["\\ud800"]})
assert answer["choices"], answer
tool = {"type": "function", "function": {"name": "a\\ud800", "description": "", "parameters": {}}}
ask("?", tools=[tool])
""",
}


@pytest.mark.slow
def test_a_hostile_program_harms_only_its_own_sample(run, model, tmp_path, monkeypatch):
    """The time between two calls is limited only for the program that never ends, and the policy waits for the flood."""
    never, log, sample = (list(HOSTILE).index("never ends"), 0), tmp_path / "log", model[0].sample
    keep_for(monkeypatch, lambda place, function, *_: (place, function.__name__) == (never, "step"))

    def after_the_flood(*asked):
        end = time.monotonic() + 120
        while not (log.exists() and '"flood"' in log.read_text()) and time.monotonic() < end:
            time.sleep(0.01)
        return sample(*asked)

    monkeypatch.setattr(model[0], "sample", after_the_flood)
    groups, noted, _ = run(*HOSTILE.values(), limits=Limits(max_turns=6, step_timeout=5))
    found = dict(zip(HOSTILE, (group[0] for group in groups), strict=True))
    failed = {name: sample.trajectory.end for name, sample in found.items() if sample.trajectory.failed}
    names = ("fails", "never calls", "too long", "odd tokens", "no numbers", "no tokens")
    of_itself = dict.fromkeys(names, "env_error")
    assert failed == of_itself | {"never ends": "env_timeout"}
    errors = {name: sample.trajectory.error for name, sample in found.items()}
    assert "the program ended with exit code 1: KeyError: 'lost'" in errors["fails"]
    assert "never called the model; its address is in OPENAI_BASE_URL" in errors["never calls"]
    assert "exceed the context of 4096" in errors["too long"]
    assert "a prompt of token ids has at least one, each from 0 to" in errors["odd tokens"]
    assert {"flood": True} in noted and all(found[name].reward.known for name in found.keys() - failed)
    assert len(found["answered"].turns) == len(found["rubbish"].turns) == 1
    assert not [p for p in psutil.Process().children(recursive=True) if "agent.py" in " ".join(p.cmdline())]


def test_if_all_programs_fail_the_run_ends_with_the_last_line_of_one(run):
    with pytest.raises(RolloutError, match=r"exit code 1: ModuleNotFoundError: No module named 'my_agent'"):
        run("import my_agent")


def test_completions_and_token_routes_extend_what_they_read(run, model):
    program = """
url = os.environ["OPENAI_BASE_URL"]
first = send(url + "/completions", {"prompt": "How many", "return_token_ids": True, "max_tokens": 5})["choices"][0]
second = send(url + "/completions", {"prompt": "How many" + first["text"] + " left", "return_token_ids": True})["choices"][0]
ids = second["prompt_token_ids"] + second["token_ids"] + [5]
third = send(url[:-3] + "/inference/v1/generate", {"token_ids": ids, "sampling_params": {"max_tokens": 3}})["choices"][0]
note([first["token_ids"], second["prompt_token_ids"], third["token_ids"], ids])
"""
    ((sample,),), ((first, read, third, ids),), _ = run(program)
    a, b, c = sample.turns
    assert (list(a.completion.ids), list(b.prompt_ids), list(c.prompt_ids)) == (first, read, ids)
    assert [len(one.completion.ids) for one in (a, b, c)][::2] == [len(first), len(third)] and len(third) <= 3
    assert b.prompt_ids[: len(a.ids)] == a.ids and len(rows_of_turns(sample.turns)) == 1


def test_stop_texts_and_limits_of_a_call_count_beside_those_of_other_calls(run, model):
    _, renderer = model
    ((first,),), (whole,), _ = run('note(text(ask("How many?")))', max_tokens=12)
    stop = next(letter for letter in whole[len(whole) // 2 :] if letter.isascii() and letter not in whole[:2])
    program = f"""
cut, short = ask("How many?", stop=["never there", {stop!r}]), ask("How many?", max_tokens=3)
note(text(cut), cut["choices"][0]["finish_reason"], short["choices"][0]["finish_reason"])
"""
    ((sample,), (other,)), (_, text, *finish), _ = run(program, 'ask("How many?")', max_tokens=12)
    assert finish == ["stop", "length"] and text == whole.partition(stop)[0]
    cut, short = sample.turns
    assert cut.completion.ids == first.turns[0].completion.ids[: len(cut.completion.ids)]  # the same seed
    assert stop in renderer.parse(cut.completion.ids).content and len(cut.completion.ids) < 12
    assert stop not in renderer.parse(cut.completion.ids[:-1]).content  # it ended at once
    assert len(short.completion.ids) == 3 and len(other.turns[0].completion.ids) <= 12


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ([], r"\[\] is no reward"),
        ({}, "is no reward"),
        ({"reward": True}, "is no reward"),
        ({"reward": float("nan")}, "with finite numbers"),
        ({"reward": 1, "parts": {"a": "b"}}, "is no reward"),
        ({"reward": 1, "parts": [1]}, "is no reward"),
    ],
)
def test_what_is_no_reward_is_refused_in_one_line(body, line):
    with pytest.raises(NoAnswer, match=line):
        posted(body, 1.0)


def test_a_posted_reward_is_right_from_solved_on_unless_it_says():
    right = [posted({"reward": value}, 0.5).correct for value in (0.5, 0.49, 1, -1)]
    assert right == [True, False, True, False]
    assert (
        posted({"reward": 0.0, "correct": True}, 0.5).correct
        and not posted({"reward": 1, "correct": False}, 0.5).correct
    )
    assert posted({"reward": None}, 0.5) is None
    assert posted({"reward": 1, "parts": {"a": 2}}, 0.5).parts == {"a": 2}


def test_wrong_commands_are_refused_before_a_run(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "?"}\n')
    monkeypatch.delenv("GRPO_AGENT_KEY", raising=False)
    with pytest.raises(UserError, match=r"task\.command=pythn x\.py: there is no such program"):
        Agent(str(tmp_path / "rows.jsonl"), "pythn x.py")
    with pytest.raises(UserError, match=r"needs task\.port and the environment variable GRPO_AGENT_KEY"):
        Agent(str(tmp_path / "rows.jsonl"))
    config = compose_config("task=agent", "task.path=rows.jsonl", "output_dir=.")
    assert config.task.command is None and config.max_turns == 16


def request(url: str, body: dict, key: str = "") -> dict:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as reply:
        return json.load(reply)


def test_programs_from_outside_take_episodes(run, monkeypatch, unused_port):
    monkeypatch.setenv("GRPO_AGENT_KEY", "a key of ours")
    url, seen = f"http://127.0.0.1:{unused_port}/sessions", []

    def outside() -> None:
        while len(seen) < 4:
            try:
                given = request(url, {}, "a key of ours")
            except urllib.error.URLError:  # the run is not there yet
                time.sleep(0.05)
                continue
            said = {"messages": [{"role": "user", "content": given["example"]["prompt"]}]}
            request(given["OPENAI_BASE_URL"] + "/chat/completions", said)
            with pytest.raises(urllib.error.HTTPError) as refused:
                request(url, {}, "another key")
            seen.append((given["example"]["prompt"], refused.value.code))
            request(given["GRPO_REWARD_URL"], {"reward": len(seen)})

    thread = threading.Thread(target=outside, daemon=True)
    thread.start()
    groups, _, task = run("", "", group_size=2, command=None, port=unused_port)
    thread.join(60)
    assert sorted(sample.reward.value for group in groups for sample in group) == [1, 2, 3, 4]
    assert sorted(seen) == [("q0", 401)] * 2 + [("q1", 401)] * 2
    task.server.shutdown()


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_calls_that_wait_together_get_their_own_answers(tmp_path, monkeypatch, unused_port):
    monkeypatch.setenv("GRPO_AGENT_KEY", "a key of ours")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "q0"}\n')
    task = Agent(str(tmp_path / "rows.jsonl"), port=unused_port, splits={"train": "train"})
    env = task.build({"prompt": "q0"})

    async def played(pool: ThreadPoolExecutor) -> tuple[list[str], list[str]]:
        answers, state = [], asyncio.create_task(env.start())
        await asyncio.sleep(0)
        for count, text in enumerate(("How many?", "Who?"), 1):
            answers.append(pool.submit(env.ask, CompletionRequest((Message("user", text),))))
            while len(env.calls) < count:
                await asyncio.sleep(0.001)
        first = await state
        second = await env.step(Action(Message("assistant", "Seven.")))
        env.post(None)  # the program has ended
        assert await env.step(Action(Message("assistant", "Ann."))) is None
        asked = [state.messages[0].content for state in (first, second)]
        return asked, [answer.result(60).message.content for answer in answers]

    with ThreadPoolExecutor() as pool:
        assert asyncio.run(played(pool)) == (["How many?", "Who?"], ["Seven.", "Ann."])
    env.close()
    task.server.shutdown()


@pytest.mark.slow
def test_of_100_programs_at_once_no_token_is_lost_or_mixed(run):
    program = """
import random
dice = random.Random(os.environ["GRPO_SEED"])
said, got = [], []
for turn in range(3):
    said.append(f"{row['prompt']} {dice.randint(0, 99)}")
    answer = ask(*said, max_tokens=dice.randint(2, 8), stream=False)
    said.append(text(answer))
    got.append([answer["prompt_token_ids"], answer["choices"][0]["token_ids"]])
    if dice.random() < 0.5:
        other = ask("Who?")
        got.append([other["prompt_token_ids"], other["choices"][0]["token_ids"]])
note([os.environ["GRPO_SEED"], got])
reward(reward=len(got))
"""
    groups, noted, _ = run(*[program] * 25, group_size=4, limits=Limits(step_timeout=300))
    heard = {given: [(tuple(read), tuple(wrote)) for read, wrote in got] for given, got in noted}
    assert len(heard) == 100
    for p, group in enumerate(groups):
        for s, sample in enumerate(group):
            assert heard[str(seed(p, s, 1 << 31))] == ids_of(sample) and sample.reward.value == len(sample.turns) >= 3


@pytest.mark.slow
def test_a_run_trains_a_program_and_evaluates_it(toy, tmp_path, monkeypatch):
    (tmp_path / "agent.py").write_text(LIBRARY)
    monkeypatch.chdir(tmp_path)
    program = 'said = text(ask(row["prompt"])); reward(reward=len(said), parts={"letters": len(set(said))})'
    rows = [{"prompt": f"q{i}", "program": program} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = "debug=smoke max_tokens=8 eval.limit=2 optim.optimizer.lr=1e-3 forecast=false preflight=warn".split()
    sizes += [
        "callbacks=samples",
        "task.command=python agent.py",
        "task.path=rows.jsonl",
        f"output_dir={tmp_path / 'run'}",
    ]
    train(compose_config("task=agent", "model=path", f"model.path={toy}", *sizes))
    samples = Run(tmp_path / "run").samples([2])
    assert len(samples) == 4 and samples["reward"].tolist() == samples["completion"].str.len().tolist()
    assert samples["reward/letters"].tolist() == [len(set(text)) for text in samples["completion"]]
    assert set(samples["end"]) <= set(ENDED)


def test_an_external_program_gets_no_session_that_has_ended():
    server = Sessions(0, "key")
    ended, lives = (server.opened(None)[0] for _ in range(2))
    for name in (ended, lives):
        server.waiting.put((name, {"session": name}))
    del server.open[ended]
    assert server.taken("Bearer key") == {"session": lives}
    server.shutdown()
    server.server_close()


def test_a_body_in_pieces_is_refused_and_what_follows_is_not_read():
    request = SimpleNamespace(headers={"Transfer-Encoding": "chunked"}, close_connection=False)
    with pytest.raises(NoAnswer, match="has a Content-Length") as error:
        Handler.body(request)
    assert error.value.status == 411 and request.close_connection
