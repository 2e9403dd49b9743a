"""Thoughts in the history: what the policy sampled comes back as it was, or its template drops it; never half of it."""

import re
from types import SimpleNamespace

import pytest
from helpers.families import FAMILIES, TOOLS, real, shipped, spelled
from tokenizers import AddedToken

from grpo.env.messages import Message, ToolCall, message_of
from grpo.env.scoring import UNKNOWN
from grpo.env.thoughts import Tags, oddity, parted, tags_of, with_thought
from grpo.env.tokens import Completion, Turn
from grpo.env.types import Action, State, Step, Trajectory
from grpo.extras.tools.renderer import TokenizerRenderer
from grpo.rollout.types import Sample
from grpo.system.errors import UserError

ASK, SURE, THREE = Message("user", "How many are 1 + 2?"), Message("user", "Sure?"), Message("tool", "3", name="add")
BLOCK = FAMILIES["qwen3"].call
XML = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>"
NONE = {"enable_thinking": False}
NEMO = ("nano", "super", "ultra", "5_lightning")


HARMONY = "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant"
# said: a turn as the model writes it. kept: the next prompt begins with the ids of this turn; else the template drops its thought
CASES = [
    ("qwen3", {}, f"<think>\nI add.\n</think>\n\n{BLOCK}<|im_end|>", THREE, True),
    *[(n, {}, f"I add.\n</think>\n\n{XML}<|im_end|>", THREE, True) for n in ("qwen3_5_think", "qwen3_6", "qwen3_8")],
    *[(n, {}, "I add.\n</think>\n\nThree.<|im_end|>", SURE, n == "qwen3_8") for n in ("qwen3_5_think", "qwen3_6", "qwen3_8")],
    *[(f"nemotron_3_{n}", {}, f"I add.\n</think>\n{XML}\n<|im_end|>", THREE, True) for n in ("nano", "super")],
    *[(f"nemotron_3_{n}", {}, f"I add.</think>\n{XML}\n<|im_end|>", THREE, True) for n in ("ultra", "5_lightning")],
    *[(f"nemotron_3_{n}", {}, "I add.\n</think>\nThree.<|im_end|>", SURE, False) for n in NEMO],
    ("qwen3", {}, "<think>\nI add.\n</think>\n\nThree.<|im_end|>", SURE, False),
    ("qwen3_training", {}, "<think>\nI add.\n</think>\n\nThree.<|im_end|>", SURE, True),
    # the prompt holds an empty thought, which is a part of the turn
    *[(n, NONE, f"{BLOCK if n == 'qwen3' else XML}<|im_end|>", THREE, True) for n in ("qwen3", "qwen3_5_think", "qwen3_8")],
    *[(f"nemotron_3_{n}", NONE, f"\n{XML}\n<|im_end|>", THREE, True) for n in ("nano", "ultra")],
    ("qwen3", NONE, "Three.<|im_end|>", SURE, False),
    ("qwen3_8", NONE, "Three.<|im_end|>", SURE, True),
    ("lfm2_2_5", {}, "<think>I add.</think>Three.<|im_end|>", SURE, False),
    ("deepseek_r1_distill", {}, "I add.\n</think>\n\nThree.<\uff5cend\u2581of\u2581sentence\uff5c>", SURE, False),
    ("deepseek_r1_distill_training", {}, "I add.\n</think>\n\nThree.<\uff5cend\u2581of\u2581sentence\uff5c>", SURE, True),
    *[("gemma4_v5", {}, f"<|channel>thought\nI add.\n<channel|>{said}", reply, kept) for said, reply, kept in (
        ("<|tool_call>call:add{a:1,b:2}<tool_call|><|tool_response>", THREE, True), ("Three.<turn|>", SURE, False))],
    *[("gptoss", {}, f"{HARMONY}{said}", reply, kept) for said, reply, kept in (
        (' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}<|call|>', THREE, True),
        ("<|channel|>final<|message|>Three.<|return|>", SURE, False))],
    ("gptoss", {}, "<|channel|>final<|message|>Three.<|end|>", SURE, True),
    ("glm4moe", {}, "\n<think>I add.</think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
     "<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n</tool_call><|observation|>", THREE, True),
    ("lfm2_2_5", {}, "<think>I add.</think><|tool_call_start|>[add(a=1, b=2)]<|tool_call_end|><|im_end|>", THREE, True),
    ("qwen2_5", {}, f"<think>\nI add.\n</think>\n{BLOCK}<|im_end|>", THREE, True),  # knows no thoughts: they are text
]  # fmt: skip


@pytest.mark.parametrize(("template", "args", "said", "reply", "kept"), CASES)
def test_a_sampled_turn_comes_back_token_for_token_or_without_its_thought(template, args, said, reply, kept):
    renderer = real(template, **args)
    tools = TOOLS if reply is THREE else ()
    prompt = renderer.prompt_ids([ASK], tools)
    before = prompt + spelled(renderer.tokenizer, said)
    message = renderer.parse(before[len(prompt) :], tools)
    assert message.reasoning_content == ("I add." if "I add." in said else None)
    assert message.tool_calls == ((ToolCall("add", {"a": 1, "b": 2}),) if tools else ())
    got = renderer.prompt_ids([ASK, message, reply], tools, before)
    assert (got[: len(before)] == before) is kept
    told = renderer.tokenizer.decode(got).partition(ASK.content)[2]
    opening = renderer.tokenizer.decode(prompt).partition(ASK.content)[2]
    assert told.count("<think>") - opening.count("<think>") == told.count("</think>") - opening.count("</think>")
    assert told.count("I add.") == (kept and "I add." in said) and (tools or "Three." in told)


def test_a_call_of_gpt_oss_that_its_template_spells_otherwise_is_written_anew():
    renderer = real("gptoss")
    prompt = renderer.prompt_ids([ASK], TOOLS)
    call = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>'
    before = prompt + spelled(renderer.tokenizer, HARMONY + call)
    message = renderer.parse(before[len(prompt) :], TOOLS)
    assert message.tool_calls == (ToolCall("add", {"a": 1, "b": 2}),) and message.reasoning_content == "I add."
    got = renderer.tokenizer.decode(renderer.prompt_ids([ASK, message, THREE], TOOLS, before))
    assert f"{HARMONY} to=functions.add<|channel|>commentary json<|message|>" in got


def test_a_message_without_its_channel_is_read_as_it_is():
    renderer = real("gptoss")
    for text, history in (("Three.", "Three."), ("<|channel|>final<|channel|>final", "final final")):
        message = renderer.parse(spelled(renderer.tokenizer, text))
        assert message.content == text
        got = renderer.tokenizer.decode(renderer.prompt_ids([ASK, message, SURE]))
        assert re.search(rf"<\|channel\|>final<\|message\|>\s*{history}<\|end\|>", got)


@pytest.mark.parametrize(("template", "written"), [("llama3_2", "31 Jan 2026"), ("gptoss", "2026-01-31")])
def test_the_date_in_a_prompt_is_that_of_the_run(template, written):
    """A run that is resumed tomorrow has the same prompts."""
    tokenizer = FAMILIES["llama31"].tokenizer()
    tokenizer.chat_template = shipped(template)
    renderer = TokenizerRenderer(tokenizer, date="2026-01-31")
    assert written in tokenizer.decode(renderer.prompt_ids([ASK]))
    assert written in tokenizer.decode(renderer.with_args({"more": 1}).prompt_ids([ASK]))
    assert written not in tokenizer.decode(TokenizerRenderer(tokenizer).prompt_ids([ASK]))
    with pytest.raises(UserError, match=r"renderer.date=tomorrow is no day: write it as 2026-01-31"):
        TokenizerRenderer(tokenizer, date="tomorrow")


def test_a_thought_that_came_apart_is_a_part_of_the_text():
    """Rows and clients give it as reasoning_content, as vLLM and OpenAI's clients do, as reasoning, or as thinking."""
    for field in ("reasoning_content", "reasoning", "thinking"):
        message = message_of({"role": "assistant", "content": "Three.", field: "I add."})
        assert message == Message("assistant", "<think>\nI add.\n</think>\n\nThree.")
        assert message.reasoning_content == "I add." and message_of(message) == message
        assert message_of({"role": "user", "content": "Hm", field: "I add."}).content == "Hm"
        whole = {"role": "assistant", "content": "<think>A</think>B", field: "A"}
        assert message_of(whole).content == "<think>A</think>B"  # a client that sends both
    text = real("qwen3_8").tokenizer.decode(real("qwen3_8").prompt_ids([ASK, message, SURE]))
    assert "assistant\n<think>\nI add.\n</think>\n\nThree.<|im_end|>" in text
    assert message_of({"role": "assistant", "content": None, "reasoning": "I add."}).content == with_thought(
        "I add.", ""
    )


def test_where_a_thought_begins_and_ends():
    for text, found in [
        ("<think>a</think>b", ("a", "b")), (" <think>\na\n</think>\n\nb", ("\na\n", "\n\nb")), ("a</think>b", ("a", "b")),
        ("b", (None, "b")), ("<think>a", (None, "<think>a")), ("</think>b", ("", "b")),
        ("b<think>a</think>", (None, "b<think>a</think>")),
        ("<think>a</think>b</think>c", ("a", "b</think>c")),
    ]:  # fmt: skip
        assert parted(text) == found


def test_how_badly_a_template_wrote_a_thought():
    for history, rank in [
        ("<think>\nA\n</think>\n\nB", 0), ("B", 1), ("<think></think>B", 1), ("A\n</think>\n\nB", 2), ("<think>A</think>", 2),
        ("<think></think>A B", 2), ("<think></think><think>A</think>B", 2), ("A B", 2),
    ]:  # fmt: skip
        assert oddity(history, "A", "B") == rank, history


def test_tags_stay_in_the_text_where_a_tokenizer_counts_them_as_special():
    """Otherwise a box in a thought would be the answer."""
    tokenizer = FAMILIES["qwen25"].tokenizer()
    tokenizer.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in ("<think>", "</think>")])
    said = spelled(tokenizer, "<think>4</think>5<|im_end|>")
    assert TokenizerRenderer(tokenizer).parse(said) == Message("assistant", "<think>4</think>5")
    assert TokenizerRenderer(tokenizer).parse(spelled(tokenizer, "5<|im_end|>")) == Message("assistant", "5")


def sample(renderer: TokenizerRenderer, *said: str) -> Sample:
    """An episode in which the user asks after every answer whether it is right."""
    messages, before, steps, played = [ASK], (), [], []
    for text in said:
        prompt = renderer.prompt_ids(messages, (), before)
        ids = spelled(renderer.tokenizer, f"{text}<|im_end|>")
        played.append(Turn(prompt, Completion(ids, (0.0,) * len(ids), "stop")))
        steps.append(Step(State(tuple(messages)), Action(renderer.parse(ids))))
        messages, before = [*messages, steps[-1].action.message, SURE], prompt + ids
    return Sample({}, Trajectory(tuple(steps)), tuple(played), UNKNOWN)


def test_the_preflight_tells_what_dropped_thoughts_cost():
    from grpo.extras.preflight.data import turns

    def told(renderer: TokenizerRenderer, *said: str) -> tuple[str, str]:
        found = turns(SimpleNamespace(samples=[sample(renderer, *said)], rollouts=SimpleNamespace(renderer=renderer)))
        return found.result, found.compared

    thought = "<think>\nI add.\n</think>\n\nThree."
    assert told(real("qwen3"), thought) == ("SKIP", "every episode has one turn")
    result, text = told(real("qwen3"), thought, "Yes.", "Yes.")  # two rows: the last two turns have no thought
    assert result == "PASS" and text.startswith("3 turns of 1 episode are 2 rows") and "drops earlier thoughts" in text
    assert told(real("qwen3_training"), thought, thought, thought) == ("PASS", "3 turns of 1 episode are 1 row")
    one, two, three = (len(turn.ids) for turn in sample(real("qwen3"), thought, thought, thought).turns)
    result, text = told(real("qwen3"), thought, thought, thought)
    assert text == (
        f"3 turns of 1 episode are 3 rows, {(one + two + three) / three:.1f} times the tokens of the last turns: "
        "the chat template drops earlier thoughts, so each turn after one is a row of its own"
    )
    odd = told(real("qwen3", **NONE), "Three.", "Yes.")
    assert odd[1].endswith("the template or the environment writes earlier turns in another way")


# how a template writes what the model wrote: CONTENT is its text, THOUGHT its thought in a field
TURNS = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == "assistant" %}TURN{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
OPENING{% endif %}"""
COHERE = """{% if m.reasoning %}<|START_THINKING|>{{ m.reasoning }}<|END_THINKING|>{% endif -%}
<|START_TEXT|>{{ m.content }}<|END_TEXT|>"""
DROPPED = "{{ (m.content.split('END')[-1] if 'END' in m.content else m.content).lstrip('\n') }}"
# a template's turn and the opening of a prompt, what the model writes, the next prompt begins with it
MARKED = {
    "Command A": (COHERE, "<|START_THINKING|>", "I add.<|END_THINKING|><|START_TEXT|>Three.<|END_TEXT|>", True),
    "Command R7B": (
        "<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{# <|END_THINKING|> #}",
        "",
        "<|START_THINKING|>I add.<|END_THINKING|><|START_RESPONSE|>Three.<|END_RESPONSE|>",
        False,
    ),
    "EXAONE Deep": (DROPPED.replace("END", "</thought>"), "<thought>\n", "I add.\n</thought>\n\nThree.", False),
    "Apertus": ("{{ m.content }}{# <|inner_suffix|> #}", "", "<|inner_prefix|>I add.<|inner_suffix|>Three.", True),
    "LongCat": ("{{ m.content }}{# </longcat_think> #}", "<longcat_think>\n", "I add.\n</longcat_think>\nThree.", True),
    "Kimi-VL": ("{{ m.content }}{# <|media_pad|> #}", "", "◁think▷I add.◁/think▷Three.", True),
    "Apriel 1.6": (
        DROPPED.replace("END", "[BEGIN FINAL RESPONSE]"),
        "Here are my reasoning steps:\n",
        "I add.\n[BEGIN FINAL RESPONSE]\nThree.",
        False,
    ),
    "Apriel 1.5": (
        "{{ m.content }}{# [BEGIN FINAL RESPONSE] #}",
        "",
        "Here are my reasoning steps:\nI add.\n[BEGIN FINAL RESPONSE]\nThree.\n[END FINAL RESPONSE]",
        False,
    ),
}


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("family", MARKED)
def test_a_family_marks_its_thought_in_its_own_way(family, special):
    """The message has the usual tags and no other marks; the model's own stand in the prompt. special: a tokenizer may count the
    marks among its special tokens."""
    turn, opening, said, kept = MARKED[family]
    tokenizer = FAMILIES["qwen25"].tokenizer()
    marks = [*re.findall(r"</?\|?[A-Za-z_/]+\|?>|◁/?think▷|\[[A-Z ]+\]", opening + said), "<|media_pad|>"]
    tokenizer.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in sorted({*marks})])
    tokenizer.chat_template = TURNS.replace("TURN", turn).replace("OPENING", opening)
    renderer = TokenizerRenderer(tokenizer)
    prompt = renderer.prompt_ids([ASK])
    before = prompt + spelled(tokenizer, f"{said}<|im_end|>")
    message = renderer.parse(before[len(prompt) :], (), prompt)
    assert message.reasoning_content == "I add." and parted(message.content)[1].strip() == "Three."
    assert message.given == ("<think>" + opening[-1] * opening.endswith("\n") if opening else "")
    got = renderer.prompt_ids([ASK, message, SURE], (), before)
    assert (got[: len(before)] == before) is kept
    history = tokenizer.decode(got).partition(ASK.content)[2].partition(SURE.content)[0]
    assert "<think>" not in history and history.count("Three.") == 1
    assert ("I add." in history) is (kept or family == "Apriel 1.5")  # it lacks the mark that ends the answer
    cut = renderer.parse(spelled(tokenizer, said.partition("add")[0]), (), prompt)
    assert cut.content.startswith("<think>") and "Three" not in cut.content and cut.reasoning_content is None


def test_a_template_with_the_usual_tags_and_pictures_is_no_kimi_vl():
    assert tags_of("<think></think><|media_pad|>") == Tags() == tags_of("<|im_middle|>")
    assert tags_of("<|media_pad|>").end == "◁/think▷"


def test_a_thought_inside_of_an_answer_is_written_badly():
    marks = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    for history, rank in [
        ("<|START_RESPONSE|><think>I add.</think>Three.", 2),
        ("<think>I add.</think><|START_RESPONSE|>Three.", 0),
        ("<|START_RESPONSE|>Three.", 1),
    ]:
        assert oddity(history, "I add.", "Three.", marks) == rank
