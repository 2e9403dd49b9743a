"""A prompt may leave a thought open: whatever the policy writes in it is no answer, no program and no call, and a demonstration
closes it."""

from functools import cache

import pytest
from conftest import seed
from helpers import families
from helpers.families import FAMILIES, TOOLS, add, spelled
from tokenizers import AddedToken

from grpo.engines.protocol import Sampling
from grpo.env.messages import Message, ToolCall, message_of
from grpo.env.rendering import message_after, message_read
from grpo.env.thoughts import after_thoughts
from grpo.env.tokens import Completion
from grpo.env.types import Action, Reward, SingleTurn, State, Step, Trajectory
from grpo.extras.tools.env import ToolEnv
from grpo.extras.tools.renderer import TokenizerRenderer
from grpo.rewards.combined import Rewards, as_lists
from grpo.rollout.episodes import play

ASK = Message("user", "How many are 1 + 2?")
OPENS = ("deepseek_r1_distill", "nemotron_3_nano", "qwen3_5_think", "qwen3_8")
REWARDS = [Rewards(name) for name in ("correct", "last_number", "format", "think_answer", "think_levels")]
ANSWER, PROGRAM = "\\boxed{3}", "```python\ndef f():\n    return 3\n```"
# what the policy writes after an open thought, and the parts of its reward in the order of REWARDS
PAID = [
    (f"I add. {ANSWER} or 4", (0, 0, 0, 0, 0.25)),  # cut off inside
    (f"I add. {ANSWER}\n</think>\n\nI do not know.", (0, 0, 0, 0, 1)),
    (f"\\boxed{{4}}?\n</think>\n\nIt is {ANSWER}", (1, 1, 1, 0, 1)),
    ("I add.\n</think>\n\n<answer>3</answer>", (0, 1, 0, 1, 1)),
]


real = cache(families.real)  # of a template and its variables


class Script:
    """An engine that says the texts of an episode, one per turn."""

    version, context = 0, None

    def __init__(self, tokenizer, *texts):
        self.tokenizer, self.texts = tokenizer, list(texts)

    def sample(self, prompts, sampling, seeds, done=None):
        ids = spelled(self.tokenizer, self.texts.pop(0))
        return [Completion(ids, (-1.0,) * len(ids), "stop")]


class Asked:
    """A question, or one with a tool that adds."""

    def __init__(self, *tools):
        self.tools = tools

    def build(self, example):
        return ToolEnv([ASK], [*self.tools]) if self.tools else SingleTurn((ASK,))

    def score(self, example, trajectory):
        if self.tools:
            return Reward(0, True)
        paid = {one.names[0]: one.score({"gold": "3"}, [trajectory])[0].value for one in REWARDS}
        return Reward(paid["correct"], True, paid)


def played(renderer, *texts, tools=()):
    [[sample]] = play(Asked(*tools), [{}], 1, Script(renderer.tokenizer, *texts), renderer, Sampling(300), seed)
    return sample


@pytest.mark.parametrize("name", OPENS)
def test_nothing_in_a_thought_that_the_prompt_opens_is_paid(name):
    from grpo.extras.programs.programs import code_verdict

    renderer = real(name)
    for text, parts in PAID:
        sample = played(renderer, text)
        assert tuple(sample.reward.parts.values()) == parts, text
        assert sample.trajectory.answer == f"<think>\n{text}"
        assert (
            renderer.tokenizer.decode(sample.turns[0].completion.ids) == text
        )  # only what was sampled is learned from
    program = {"test_list": ["assert f() == 3"]}
    text = played(renderer, f"I try\n{PROGRAM}\nor").trajectory.answer
    assert code_verdict(text, program).outcome == "no_answer"
    assert code_verdict(text, program | {"entry_point": "f"}, continuation=True).outcome == "no_answer"


@pytest.mark.parametrize("name", OPENS[1:])
def test_a_thought_that_the_prompt_closes_is_no_part_of_the_message(name):
    sample = played(real(name, enable_thinking=False), f"It is {ANSWER}")
    assert sample.trajectory.answer == f"It is {ANSWER}" and sample.reward.parts["correct"] == 1


CALLS = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
    "<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    "lfm2": "<|tool_call_start|>[add(a=1, b=2)]<|tool_call_end|>",
    "olmo3": "<function_calls>add(a=1, b=2)</function_calls>",
    "granite": '<|tool_call|>[{"name": "add", "arguments": {"a": 1, "b": 2}}]',
    "mistral": '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}',
    "llama3": '{"name": "add", "parameters": {"a": 1, "b": 2}}',
    "gemma4": "<|tool_call>call:add{a:1,b:2}<tool_call|>",
    "seed": "<seed:tool_call><function=add><parameter=a>1</parameter><parameter=b>2</parameter></function></seed:tool_call>",
    "deepseek": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": 2}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    '{"a": 1, "b": 2}<|tool_call_end|><|tool_calls_section_end|>',
    "minimax": '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
    '<parameter name="b">2</parameter>\n</invoke>\n</minimax:tool_call>',
}


@cache
def opening():
    """A tokenizer whose template opens a thought."""
    tokenizer = FAMILIES["qwen25"].tokenizer()
    tokenizer.chat_template += "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}"
    return tokenizer


@pytest.mark.parametrize("form", CALLS)
def test_a_call_in_a_thought_is_not_run(form):
    from grpo.extras.tools.tool_forms import message_of_text

    call, renderer = CALLS[form], TokenizerRenderer(opening(), tool_calls=form)
    for thought in (call, f"Maybe {call} or not."):
        sample = played(renderer, f"{thought}\n</think>\n\nThree.", tools=(add,))
        assert len(sample.turns) == 1 and sample.trajectory.messages[-1].tool_calls == ()
        assert sample.trajectory.messages[-1].reasoning_content == thought
        sample = played(renderer, thought, tools=(add,))  # cut off inside
        assert len(sample.turns) == 1 and sample.trajectory.answer == f"<think>\n{thought}"
        sample = played(renderer, f"{thought}\n</think>\n\n{call}", "I add.\n</think>\n\nThree.", tools=(add,))
        assert [m.content for m in sample.trajectory.messages if m.role == "tool"] == ["3"]
    closed = message_of_text(f"{call} is how.\n</think>\n\nThree.", form, TOOLS)  # nothing opened a thought
    assert closed.tool_calls == ()


def test_a_tag_in_the_arguments_of_a_call_ends_no_thought():
    said = 'I look: <tool_call>\n{"name": "add", "arguments": {"a": "</think>"}}\n</tool_call>'
    tokenizer = FAMILIES["qwen25"].tokenizer()
    for text in (said, said[8:]):
        message = TokenizerRenderer(tokenizer).parse(spelled(tokenizer, text), TOOLS)
        assert message.tool_calls == (ToolCall("add", {"a": "</think>"}),)


@pytest.mark.parametrize("name", [*OPENS, "qwen3", "gemma4_v4", "gptoss", "glm4moe"])
def test_a_demonstration_goes_on_from_its_prompt(name):
    """Its answer stands after the thought, and its thought in it; where the prompt closes the thought there is none."""
    for renderer in (real(name), real(name, enable_thinking=False)):
        prompt = renderer.prompt_ids([ASK])
        closed = "</think>" in renderer.tokenizer.decode(prompt)
        for text in ("There are 3.", "<think>\nLet me see.\n</think>\n\nThere are 3."):
            taught = renderer.answer_ids(Message("assistant", text))
            message = message_after(renderer, taught, prompt)
            assert after_thoughts(message.content).strip() == "There are 3."
            assert (message.reasoning_content or "") == ("Let me see." if "Let" in text and not closed else "")
            whole = renderer.tokenizer.decode([*prompt, *taught])
            assert whole.count("<think>") == whole.count("</think>") <= 1
            assert taught[-1] in renderer._special


def test_a_call_alone_is_a_demonstration():
    renderer, call = real("nemotron_3_nano"), ToolCall("add", {"a": 1, "b": 2})
    taught = renderer.answer_ids(Message("assistant", "", (call,)))
    assert message_after(renderer, taught, renderer.prompt_ids([ASK], TOOLS), TOOLS).tool_calls == (call,)


def test_how_an_empty_thought_is_closed():
    def taught(name):
        renderer = real(name)
        return renderer.tokenizer.decode(renderer.answer_ids(Message("assistant", "Three.")))

    assert taught("qwen3_5_think") == "\n</think>\n\nThree.<|im_end|>"
    assert taught("nemotron_3_nano") == "</think>Three.<|im_end|>"
    assert taught("deepseek_r1_distill") == "\n</think>\n\nThree.<｜end▁of▁sentence｜>"


LAST = """{% set last = messages[-1] if messages[-1].role == "assistant" else none %}
{%- for m in (messages[:-1] if last else messages) %}<S>{{ m.role }}
{{ m.content.split("</think>")[-1].strip() }}
<E>
{% endfor %}{% if add_generation_prompt or last %}<S>assistant
OPENING{% if last %}{{ last.content }}{% if not add_generation_prompt %}
{{- "\\n<E>\\n\\n" }}{% endif %}{% endif %}{% endif %}"""
BEGUN = """{# <|END_THINKING|> #}{% for m in messages %}<S>{{ m.role }} {% if m.role == "assistant" %}<|START_RESPONSE|>
{{- m.content }}<|END_RESPONSE|>{% else %}{{ m.content }}{% endif %}<E>
{%- endfor %}<S>assistant """
FIRST = "<|START_RESPONSE|>It is 3.<|END_RESPONSE|><E>"


@pytest.mark.parametrize(
    ("template", "short", "long"),
    [
        (LAST.replace("OPENING", "<think>\n\n"), "</think>\n\nIt is 3.\n<E>", "I see.\n</think>\n\nIt is 3.\n<E>"),
        (LAST.replace("OPENING", "<think></think>"), "It is 3.\n<E>", "It is 3.\n<E>"),
        (BEGUN, FIRST, f"<|START_THINKING|>\nI see.\n<|END_THINKING|>{FIRST}"),
    ],
    ids=["Nemotron Nano 2", "Nemotron Nano 2, closed", "Command R7B"],
)
def test_what_a_template_adds_to_a_last_message_is_no_part_of_a_demonstration(template, short, long):
    """A thought opened once more in front of it; behind it the beginning of the next message."""
    tokenizer = FAMILIES["qwen3"].tokenizer()
    marks = [*"<S> <E>".split(), *(f"<|{edge}_{of}|>" for edge in ("START", "END") for of in ("THINKING", "RESPONSE"))]
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    tokenizer.eos_token, tokenizer.chat_template = "<E>", template
    renderer = TokenizerRenderer(tokenizer)
    for text, expected in (("It is 3.", short), ("<think>\nI see.\n</think>\n\nIt is 3.", long)):
        assert tokenizer.decode(renderer.answer_ids(Message("assistant", text))) == expected


def test_a_thought_is_open_where_the_policys_turn_has_begun_one():
    renderer = real("qwen3")
    decode = renderer.tokenizer.decode

    def given(*messages, prompt=None):
        ids = renderer.prompt_ids(prompt or messages)
        message = message_read(
            renderer, spelled(renderer.tokenizer, "so 3<|im_end|>"), State(messages, prompt=prompt), ids
        )
        assert message.content == message.given + message.sampled and message.sampled == "so 3"
        assert message_of(message).given == message.given
        return message.given

    assert given(ASK) == ""
    assert given(Message("user", "Begin with <think>")) == ""
    assert given(ASK, Message("assistant", "<think>\nLet me")) == "<think>\nLet me"
    assert given(ASK, Message("assistant", "<think>\nI add.\n</think>\n\nIt is")) == ""
    raw = decode(renderer.prompt_ids([ASK]))
    assert given(prompt=raw + "<think>\nWait,") == "<think>\nWait," and given(prompt=raw) == ""
    assert given(prompt="Write <think> first. A:") == "" and given(prompt="A: <think>") == "<think>"


def test_a_prefill_that_opens_a_thought():
    """Its box is no answer in either form of completions, and the tag stands once."""
    renderer, prefill = real("qwen3"), Message("assistant", "<think>\nLet me")
    state = State((ASK, prefill))
    ids = spelled(renderer.tokenizer, f" see. {ANSWER}")
    message = message_read(renderer, ids, state, renderer.prompt_ids(state.messages))
    trajectory = Trajectory((Step(state, Action(message, True, ids)),))
    whole = f"<think>\nLet me see. {ANSWER}"
    assert as_lists({}, [trajectory])["completions"] == [whole]
    assert as_lists({}, [trajectory], conversational=True)["completions"][0][-1]["content"] == whole
    for conversational in (False, True):
        [reward] = Rewards("correct").score({"gold": "3"}, [trajectory], conversational=conversational)
        assert reward.outcome == "no_answer"


def test_a_client_gets_the_thought_that_the_template_opened_and_not_what_it_has_itself():
    from grpo.extras.serve.dialects.request import CompletionRequest, answered

    renderer = real("qwen3_5_think")
    ids = spelled(renderer.tokenizer, "I add.\n</think>\n\nThree.<|im_end|>")

    def content(request, prompt):
        message, done = message_after(renderer, ids, prompt), Completion(ids, (0.0,) * len(ids), "stop")
        return answered(request, prompt, done, message, renderer.tokenizer.decode).message.content

    prompt = renderer.prompt_ids([ASK])
    assert content(CompletionRequest((ASK,)), prompt) == "<think>\nI add.\n</think>\n\nThree."
    assert content(CompletionRequest((ASK,), stop=("\n",)), prompt) == "<think>\nI add."
    assert content(CompletionRequest(prompts=(prompt,)), prompt) == "I add.\n</think>\n\nThree."
    assert content(CompletionRequest((ASK, Message("assistant", "<think>\n"))), prompt) == "I add.\n</think>\n\nThree."
