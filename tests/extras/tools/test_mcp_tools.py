"""Tools of a server of the Model Context Protocol, which its own SDK runs here."""

import json
import os
import signal
import sys
from io import BytesIO
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, compose_config
from hydra.utils import instantiate
from PIL import Image

from grpo.env.messages import Message, ToolCall
from grpo.env.types import Action
from grpo.extras.tools import mcp
from grpo.extras.tools.env import ToolEnv
from grpo.system.errors import UserError

SERVER = f"{sys.executable} {ROOT}/tests/helpers/mcp_server.py"
OWN = '''
def double(number: int) -> int:
    """Double a number.

    Args:
        number: what to double
    """
    return 2 * number
'''
PAGES = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if asked["method"] == "initialize":
        about = {"capabilities": {"tools": {}}, "serverInfo": {"name": "pages", "version": "1"}}
        answer = {"result": {"protocolVersion": asked["params"]["protocolVersion"], **about}}
    elif asked["method"] == "tools/list":
        page = int((asked.get("params") or {}).get("cursor") or 1)
        tools = [{"name": f"tool{page}", "inputSchema": {"type": "object"}}]
        answer = {"result": {"tools": tools, **({"nextCursor": str(page + 1)} if page < 3 else {})}}
    else:
        answer = {"error": {"code": -32601, "message": "unknown"}}
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}), flush=True)
"""


@pytest.fixture(scope="module")
def tools():
    pytest.importorskip("mcp")
    return mcp.mcp_tools(SERVER)


def env_of(tools) -> ToolEnv:
    return ToolEnv([Message("user", "What is an otter?")], tools)


def said(tools, name: str, **arguments) -> str:
    return env_of(tools).answer(ToolCall(name, arguments)).content


def test_a_server_describes_its_tools_and_answers_calls(tools):
    env = env_of(tools)
    lookup, *_ = env.start().tools
    assert (lookup.name, lookup.description) == ("lookup", "Look a word up in the dictionary.")
    assert lookup.parameters["required"] == ["word"]
    assert lookup.parameters["properties"]["language"] == {"default": "en", "title": "Language", "type": "string"}
    calls = (ToolCall("lookup", {"word": "otter"}), ToolCall("lookup", {"word": "Otter", "language": "de"}))
    state = env.step(Action(Message("assistant", "", calls)))
    assert [message.content for message in state.messages[2:]] == ["a river mammal", "ein Marder"]
    assert json.loads(said(tools, "sums", numbers=[2, 3]))["sum"] == 5
    assert env.step(Action(Message("assistant", "a mammal"))) is None


def test_a_picture_of_a_server_comes_with_its_text(tools):
    message = env_of(tools).answer(ToolCall("draw", {"width": 7}))
    assert message.content == "red\n<image>" and message.error is None
    with Image.open(BytesIO(message.pictures[0].data)) as image:
        assert image.size == (7, 4) and image.getpixel((0, 0)) == (255, 0, 0)


def test_a_long_list_of_tools_is_read_to_its_last_page(tmp_path):
    """The pages are three, of an older server."""
    pytest.importorskip("mcp")
    (tmp_path / "pages.py").write_text(PAGES)
    found = mcp.mcp_tools(f"{sys.executable} {tmp_path}/pages.py")
    assert [tool.spec.name for tool in found] == ["tool1", "tool2", "tool3"]


def test_a_call_that_the_server_refuses_is_an_answer_to_the_policy(tools):
    assert said(tools, "lookup", word="bat") == "Error: Error executing tool lookup: bat is in no dictionary"
    assert said(tools, "lookup", word=3) == "Error: word must be of type string, not 3"  # without a call
    assert said(tools, "sums", numbers=["a"]).startswith("Error: Error executing tool sums: 1 validation error")


def test_all_samples_share_one_server_and_one_that_ends_is_started_again(tools, caplog):
    first = json.loads(said(tools, "sums", numbers=[]))["process"]
    again = mcp.mcp_tools(SERVER)
    assert json.loads(said(again, "sums", numbers=[]))["process"] == first
    with pytest.raises(ConnectionError, match=r"mcp_server.py' has ended: out of memory$"):
        said(tools, "leave", reason="so\nout of memory")  # an OSError: the sample has no reward
    assert [record.message[-30:] for record in caplog.records] == ["; the next call starts it again"[-30:]]
    second = json.loads(said(again, "sums", numbers=[]))["process"]
    os.kill(second, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(second)] if psutil.pid_exists(second) else [], timeout=20)
    with pytest.raises(ConnectionError, match="has ended"):
        said(tools, "lookup", word="otter")
    assert said(tools, "lookup", word="otter") == "a river mammal"


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("nowhere --fast", "there is no such program; give one, as 'mcp:python my_server.py'"),
        (f"{sys.executable} nowhere.py", "did not start: .*can't open file .*nowhere.py"),
        ("sleep 60", "'sleep 60' did not start in 0.2 s"),
    ],
)
def test_a_server_that_does_not_start_is_named(command, line, monkeypatch):
    pytest.importorskip("mcp")
    monkeypatch.setattr(mcp, "SECONDS", 0.2 if "sleep" in command else mcp.SECONDS)
    with pytest.raises(UserError, match=line) as error:
        mcp.mcp_tools(command)
    assert "\n" not in str(error.value)


def test_rows_get_tools_by_configuration(tools, tmp_path):
    Path(tmp_path / "own.py").write_text(OWN)
    Path(tmp_path / "rows.jsonl").write_text('{"prompt": "What is an otter?"}\n' * 3)
    words = [f"task.path={tmp_path}/rows.jsonl", "task.rewards=format", "output_dir=."]
    named = f"task.tools=['mcp:{SERVER}','{tmp_path}/own.py:double']"
    task = instantiate(compose_config("task=jsonl", *words, named).task)
    env = task.build(task.examples("train")[0])
    assert [tool.name for tool in env.start().tools] == [
        "lookup",
        "sums",
        "draw",
        "leave",
        "double",
    ] and task.several_turns
    assert env.answer(ToolCall("double", {"number": 4})).content == "8"
    one = instantiate(compose_config("task=jsonl", *words, f"task.tools={tmp_path}/own.py:double").task)
    assert [tool.__name__ for tool in one.tools] == ["double"]
    with pytest.raises(Exception, match="exclude each other"):
        instantiate(compose_config("task=jsonl", *words, named, f"task.environment={tmp_path}/own.py:double").task)
