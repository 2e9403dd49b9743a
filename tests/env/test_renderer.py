"""Messages to tokens and back, on five families of chat templates: sampled tokens never change."""

import random
import re
from dataclasses import replace

import pytest
from conftest import compose_config
from helpers.families import FAMILIES, TOOLS, add, shipped, spelled
from hydra.utils import instantiate
from omegaconf import OmegaConf
from tokenizers import normalizers

from eval import as_in_run
from grpo.env.messages import Message, ToolCall
from grpo.env.types import Action
from grpo.extras.tools.renderer import TokenizerRenderer
from grpo.system.errors import UserError

QUESTION = Message("user", "How many are 1 + 2?")
CALL = ToolCall("add", {"a": 1, "b": 2})
every_family = pytest.mark.parametrize("name", FAMILIES)


def made(name: str, **options):
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    return family, tokenizer, TokenizerRenderer(tokenizer, **options)


def without_ids(calls):
    return [(call.name, call.arguments) for call in calls]


@every_family
def test_what_was_sampled_stays_token_for_token_over_three_turns(name):
    """The turns: a call, the tool's response, an answer in words, another question."""
    family, tokenizer, renderer = made(name)
    messages, before = [QUESTION], ()
    space = " " if name == "mistral" else ""
    for said, reply in [
        (family.call, Message("tool", "3", name="add")),
        (f"{space}There are 3.", Message("user", "Sure?")),
    ]:
        prompt = renderer.prompt_ids(messages, TOOLS, before)
        assert prompt[: len(before)] == before and tokenizer.decode(prompt) == tokenizer.decode(
            renderer.prompt_ids(messages, TOOLS)
        )
        completion = spelled(tokenizer, said + family.end)
        assert completion != tuple(tokenizer(said + family.end, add_special_tokens=False).input_ids)
        message = renderer.parse(completion, TOOLS)
        if said == family.call:
            assert message.content == "" and without_ids(message.tool_calls) == [("add", CALL.arguments)]
        else:
            assert message == Message("assistant", said)
            message = Message("assistant", said.strip())  # Mistral's template writes this space
        messages += [message, reply]
        before = prompt + completion
    last = renderer.prompt_ids(messages, TOOLS, before)
    fresh = renderer.prompt_ids(messages, TOOLS)
    assert tokenizer.decode(last) == tokenizer.decode(fresh)
    if name == "mistral":  # its tools move to the last question
        assert last == fresh
    else:
        assert last[: len(before)] == before and last != fresh


@every_family
def test_a_completion_cut_short_goes_on_with_the_templates_end(name):
    family, tokenizer, renderer = made(name)
    prompt = renderer.prompt_ids([QUESTION])
    cut = spelled(tokenizer, " There" if name == "mistral" else "There")
    again = [QUESTION, Message("assistant", "There"), Message("user", "Go on.")]
    got = renderer.prompt_ids(again, (), prompt + cut)
    end = tokenizer.convert_tokens_to_ids(family.end)
    assert got[: len(prompt + cut) + 1] == (*prompt, *cut, end)
    assert tokenizer.decode(got) == tokenizer.decode(renderer.prompt_ids(again))


@every_family
def test_what_the_template_tells_otherwise_is_rendered_anew(name):
    """An additional space in the JSON, and a conversation that the environment rewrote."""
    family, tokenizer, renderer = made(name)
    prompt = renderer.prompt_ids([QUESTION], TOOLS)
    completion = spelled(tokenizer, family.call.replace('{"name"', '{ "name"') + family.end)
    message = renderer.parse(completion, TOOLS)
    assert without_ids(message.tool_calls) == [("add", CALL.arguments)]
    for messages in ([QUESTION, message, Message("tool", "3", name="add")], [Message("user", "Begin again.")]):
        assert renderer.prompt_ids(messages, TOOLS, prompt + completion) == renderer.prompt_ids(messages, TOOLS)


def test_thinking_is_kept_within_a_question_and_stripped_after_it():
    family, tokenizer, renderer = made("qwen3")
    thought = "<think>\nLet me see. <tool_call>\n{}\n</tool_call>\n</think>\n\n"
    prompt = renderer.prompt_ids([QUESTION], TOOLS)
    before = prompt + spelled(tokenizer, thought + family.call + family.end)
    message = renderer.parse(before[len(prompt) :], TOOLS)
    assert message == Message("assistant", thought[:-1], (CALL,))  # a call inside thinking does not count
    messages = [QUESTION, message, Message("tool", "3", name="add")]
    prompt = renderer.prompt_ids(messages, TOOLS, before)
    assert prompt[: len(before)] == before and "Let me see" in tokenizer.decode(prompt)
    before = prompt + spelled(tokenizer, "<think>\nIt is 3.\n</think>\n\nThere are 3." + family.end)
    messages += [renderer.parse(before[len(prompt) :], TOOLS), Message("user", "Sure?")]
    got = renderer.prompt_ids(messages, TOOLS, before)
    assert got == renderer.prompt_ids(messages, TOOLS) and "<think>" not in tokenizer.decode(got)


def test_variables_of_the_template_are_passed_on():
    _, tokenizer, renderer = made("qwen3", template_args={"enable_thinking": False})
    assert tokenizer.decode(renderer.prompt_ids([QUESTION], TOOLS)).endswith("assistant\n<think>\n\n</think>\n\n")
    assert tokenizer.decode(made("qwen3")[2].prompt_ids([QUESTION], TOOLS)).endswith("<|im_start|>assistant\n")


@every_family
def test_several_calls_of_a_message_and_their_answers(name):
    """Llama's template cannot show two calls: a policy that writes two gets an error as text, and the run continues."""
    from grpo.extras.tools.env import ToolEnv

    family, tokenizer, renderer = made(name)
    message = renderer.parse(spelled(tokenizer, family.calls + family.end), TOOLS)
    state = ToolEnv([QUESTION], [add]).step(Action(message))
    text = tokenizer.decode(renderer.prompt_ids(state.messages, state.tools))
    if name == "llama31":
        assert message.tool_calls == () and message.error.startswith(
            "2 calls in one message, and there can be one; a call"
        )
        assert message.content == family.calls and "could not be read: 2 calls" in text
    else:
        assert without_ids(message.tool_calls) == [("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4})]
        assert (
            family.calls in text and "3" in text.rpartition(family.calls)[2] and "7" in text.rpartition(family.calls)[2]
        )


@every_family
def test_a_malformed_call_is_told_and_its_words_stay(name):
    family, tokenizer, renderer = made(name)
    broken = family.call.replace('"b": 2}', '"b": 2')
    prompt = renderer.prompt_ids([QUESTION], TOOLS)
    completion = spelled(tokenizer, broken + family.end)
    message = renderer.parse(completion, TOOLS)
    assert message.content == broken and message.tool_calls == () and "\n" not in message.error
    assert "JSON is broken" in message.error and "a call is written" in message.error and '"NAME"' in message.error
    messages = [QUESTION, message, Message("user", message.error)]
    got = renderer.prompt_ids(messages, TOOLS, prompt + completion)
    assert tokenizer.decode(got) == tokenizer.decode(renderer.prompt_ids(messages, TOOLS))
    if name != "mistral":  # its tools are before the last question
        assert got[: len(prompt + completion)] == prompt + completion


def test_ids_are_made_where_the_policy_wrote_none_that_fits():
    _, tokenizer, renderer = made("mistral")
    calls = (
        ToolCall("add", {"a": 1, "b": 2}),
        ToolCall("add", {"a": 3, "b": 4}, "abcDEF124"),
        ToolCall("add", {}, "x-1"),
    )
    answers = [Message("tool", text, name="add") for text in ("3", "7", "?")]
    text = tokenizer.decode(renderer.prompt_ids([QUESTION, Message("assistant", "", calls), *answers], TOOLS))
    for place, told in [("call00000", '"3"'), ("abcDEF124", '"7"'), ("call00002", '"?"')]:
        assert f'"id": "{place}"' in text and f'{{"content": {told}, "call_id": "{place}"}}' in text


def test_end_tokens_and_other_special_tokens_are_no_words_but_the_marks_of_calls_are_read():
    _, tokenizer, renderer = made("llama31")
    ids = spelled(tokenizer, '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}<|eom_id|><|eot_id|>')
    assert renderer.parse(ids, TOOLS) == Message("assistant", "", (CALL,))
    assert (
        renderer.parse(spelled(tokenizer, "There<|end_header_id|> are 3.<|eot_id|>"), TOOLS).content == "There are 3."
    )
    assert renderer.parse(ids).tool_calls == ()  # no tools, no calls


@every_family
def test_a_prefill_is_continued_with_what_was_sampled_before_it(name):
    family, tokenizer, renderer = made(name)
    space = " " if name == "mistral" else ""
    before = renderer.prompt_ids([QUESTION]) + spelled(tokenizer, f"{space}There are 3.{family.end}")
    messages = [QUESTION, Message("assistant", "There are 3."), Message("user", "Sure?"), Message("assistant", "I am")]
    got = renderer.prompt_ids(messages, (), before)
    assert got[: len(before)] == before and tokenizer.decode(got).endswith("I am")


def test_a_template_that_trims_is_rendered_anew():
    _, tokenizer, renderer = made("llama31")
    before = renderer.prompt_ids([QUESTION]) + spelled(tokenizer, "There are 3. <|eot_id|>")
    messages = [QUESTION, Message("assistant", "There are 3. "), Message("user", "Sure?")]
    assert renderer.prompt_ids(messages, (), before) == renderer.prompt_ids(messages)


def test_what_is_longer_than_the_limit_is_cut_from_a_fresh_rendering():
    _, tokenizer, renderer = made("qwen25")
    before = renderer.prompt_ids([QUESTION]) + spelled(tokenizer, "There are 3.<|im_end|>")
    messages = [QUESTION, Message("assistant", "There are 3."), Message("user", "Sure?")]
    whole = renderer.prompt_ids(messages, (), before)
    assert TokenizerRenderer(tokenizer, keep=len(whole)).prompt_ids(messages, (), before) == whole
    cut = TokenizerRenderer(tokenizer, keep=len(before) - 1).prompt_ids(messages, (), before)
    assert cut == renderer.prompt_ids(messages)[-len(before) + 1 :]


def test_a_tokenizer_that_normalizes_what_it_reads_keeps_what_was_sampled():
    """Qwen's tokenizer replaces the ohm sign (U+2126) of a question by a letter (U+03A9)."""
    tokenizer = FAMILIES["qwen25"].tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    renderer, question = TokenizerRenderer(tokenizer), Message("user", "3 \u2126?")
    before = renderer.prompt_ids([question]) + spelled(tokenizer, "There are 3.<|im_end|>")
    messages = [question, Message("assistant", "There are 3."), Message("user", "Sure?")]
    got = renderer.prompt_ids(messages, (), before)
    assert got[: len(before)] == before and "3 \u03a9?" in tokenizer.decode(got)


def test_a_tokenizer_that_begins_every_text_with_a_space_is_not_misled():
    """Text after the sampled ids would get a space that is not in the conversation."""
    tokenizer = FAMILIES["qwen25"].tokenizer()
    completion = spelled(tokenizer, "There are 3.")
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend(" ")
    renderer = TokenizerRenderer(tokenizer)
    before = renderer.prompt_ids([QUESTION]) + completion
    messages = [QUESTION, Message("assistant", "There are 3. And"), Message("user", "Sure?")]
    assert tokenizer.decode(renderer.prompt_ids(messages)).startswith(tokenizer.decode(before))
    assert renderer.prompt_ids(messages, (), before) == renderer.prompt_ids(messages)


@every_family
def test_any_completion_is_kept_whole_or_rendered_anew(name):
    """Completions are random pieces of text, of calls, of special tokens and of bytes that are no text."""
    family, tokenizer, renderer = made(name)
    rng = random.Random(0)
    pieces = [
        family.call, family.calls, family.end, "There are 3.", " ", "\n", "é", "\u2126", "{", "}", "</think>",
        "<think>\n",
    ]  # fmt: skip
    pieces += [*family.special, *family.plain]
    kept = 0
    for _ in range(200):
        said = [rng.choice(pieces) for _ in range(rng.randrange(4))]
        write = rng.choice(
            [spelled, lambda tokenizer, text: tuple(tokenizer(text, add_special_tokens=False).input_ids)]
        )
        completion = write(tokenizer, "".join(said) + rng.choice([family.end, ""]))
        if rng.random() < 0.3:
            noise = tuple(rng.randrange(len(tokenizer)) for _ in range(3))
            at = rng.randrange(len(completion) + 1)
            completion = completion[:at] + noise + completion[at:]
        message = renderer.parse(completion, TOOLS)
        replies = [Message("tool", "3", name="add") for _ in message.tool_calls] or [Message("user", "Go on.")]
        messages = [QUESTION, message, *replies]
        before = renderer.prompt_ids([QUESTION], TOOLS) + completion
        got, fresh = renderer.prompt_ids(messages, TOOLS, before), renderer.prompt_ids(messages, TOOLS)
        assert tokenizer.decode(got) == tokenizer.decode(fresh)
        starts = tokenizer.decode(fresh).startswith(tokenizer.decode(before))
        assert got[: len(before)] == before if starts else got == fresh
        kept += starts
    assert 0 < kept < 200


def test_tokenizers_that_know_no_tools_are_refused():
    tokenizer = FAMILIES["qwen25"].tokenizer()
    wordy = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    for template, reason in [(None, "no chat template"), (wordy, "does not show them")]:
        tokenizer.chat_template = template
        renderer = TokenizerRenderer(tokenizer)
        assert renderer.prompt_ids([QUESTION])  # accepted without tools
        for ask in (lambda r=renderer: r.prompt_ids([QUESTION], TOOLS), lambda r=renderer: r.parse((1,), TOOLS)):
            with pytest.raises(UserError, match=f"{reason}.*model.chat_template=FILE"):
                ask()


def test_an_unknown_form_of_calls_is_asked_for():
    tokenizer = FAMILIES["qwen25"].tokenizer()
    tokenizer.chat_template = "{{ tools }}{% for m in messages %}{{ m }}{% endfor %}"
    with pytest.raises(UserError, match=r"writes a call as .*find.*, which no form here reads: take a chat model"):
        TokenizerRenderer(tokenizer).prompt_ids([QUESTION], TOOLS)
    assert TokenizerRenderer(tokenizer, tool_calls="llama3").form == "llama3"
    with pytest.raises(UserError, match=r"renderer\.tool_calls=json is not one of auto, hermes, llama3, mistral"):
        TokenizerRenderer(tokenizer, tool_calls="json")


def test_a_template_that_raises_is_told_in_one_line():
    _, _, renderer = made("mistral")
    with pytest.raises(UserError, match="a conversation of user, user: After the optional system message"):
        renderer.prompt_ids([QUESTION, QUESTION])
    with pytest.raises(UserError, match="a conversation of system, user: Only user"):
        renderer.prompt_ids([Message("system", "Be short."), QUESTION], TOOLS)
    no_answers = replace(
        FAMILIES["mistral"], template=FAMILIES["mistral"].template.replace("!= 9", "!= 10")
    ).tokenizer()
    with pytest.raises(UserError, match="user, assistant, tool: Tool call IDs"):  # before the first question is asked
        TokenizerRenderer(no_answers).prompt_ids([QUESTION], TOOLS)


def test_a_tokenizer_with_a_template_for_tools_beside_its_own():
    tokenizer = FAMILIES["hermes"].tokenizer()
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    tokenizer.chat_template = {"default": plain, "tool_use": tokenizer.chat_template}
    renderer = TokenizerRenderer(tokenizer)
    assert renderer.form == "hermes" and "<tools>" in tokenizer.decode(renderer.prompt_ids([QUESTION], TOOLS))
    assert tokenizer.decode(renderer.prompt_ids([QUESTION])).startswith("<|im_start|>user")


XML = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>"
QWEN = FAMILIES["qwen3"].call
THOUGHT = "I think.\n</think>\n\n"


@pytest.mark.parametrize(
    ("template", "family", "said"),
    [
        ("qwen2_5", "qwen25", f"Let me see.\n{QWEN}"),
        ("qwen3", "qwen3", f"<think>\n{THOUGHT}{QWEN}"),
        ("qwen3_instruct_2507", "qwen3", QWEN),
        ("qwen3_5_think", "qwen3", f"{THOUGHT}Let me see.\n\n{XML}"),
        ("qwen3_5_nothink", "qwen3", XML),
        ("llama3_1", "llama31", FAMILIES["llama31"].call),
        ("llama3_2", "llama31", FAMILIES["llama31"].call),
    ],
)
def test_real_templates_keep_what_was_sampled(template, family, said):
    """The models' own templates, which TRL ships."""
    tokenizer = FAMILIES[family].tokenizer()
    tokenizer.chat_template = shipped(template)
    renderer = TokenizerRenderer(tokenizer)
    prompt = renderer.prompt_ids([QUESTION], TOOLS)
    before = prompt + spelled(tokenizer, said + FAMILIES[family].end)
    message = renderer.parse(before[len(prompt) :], TOOLS)
    assert message.tool_calls == (CALL,)
    messages = [QUESTION, message, Message("tool", "3", name="add")]
    got = renderer.prompt_ids(messages, TOOLS, before)
    assert got[: len(before)] == before
    assert tokenizer.decode(got) == tokenizer.decode(renderer.prompt_ids(messages, TOOLS))


def test_an_evaluation_reads_a_run_with_the_runs_renderer(tmp_path):
    """The command line has precedence."""
    best = tmp_path / "checkpoints" / "best"
    best.mkdir(parents=True)
    (best / "config.json").touch()
    trained = compose_config(
        "renderer.tool_calls=hermes", "renderer.template_args={enable_thinking: false}", "output_dir=."
    )
    OmegaConf.save(trained, tmp_path / "config.yaml", resolve=True)
    for overrides, form in [((), "hermes"), (("task=gsm8k",), "hermes"), (("renderer.tool_calls=mistral",), "mistral")]:
        config = as_in_run(compose_config(f"run={tmp_path}", *overrides, "output_dir=.", name="eval"), overrides)
        assert config.renderer.tool_calls == form and config.renderer.template_args == {"enable_thinking": False}
        renderer = instantiate(config.renderer)(FAMILIES["qwen3"].tokenizer(), None)
        assert renderer.tool_calls == form and renderer.template_args == {"enable_thinking": False}


def test_an_evaluation_ends_answers_as_the_evaluations_of_the_run(tmp_path):
    """Their form too, unless the command line names another task; the temperature is that of eval.py."""
    (tmp_path / "checkpoints" / "best").mkdir(parents=True)
    (tmp_path / "checkpoints" / "best" / "config.json").touch()
    form = {"choice": ["yes", "no"]}
    words = "eval.sampling.stop_ids=[107]", "eval.sampling.guided={choice: [yes, no]}", "eval.sampling.temperature=0.5"
    OmegaConf.save(compose_config(*words, "output_dir=."), tmp_path / "config.yaml", resolve=True)
    for overrides, ids, guided in [
        ((), [107], form),
        (("task=gsm8k",), [107], None),
        (("eval.sampling.stop_ids=[]",), [], form),
    ]:
        config = as_in_run(compose_config(f"run={tmp_path}", *overrides, "output_dir=.", name="eval"), overrides)
        sampling = instantiate(config.eval.sampling)
        assert (list(sampling.stop_ids), sampling.guided, sampling.temperature) == (ids, guided, 0.0)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("hello", "ignores its messages, different prompts become the same 5 tokens: set model.chat_template"),
        ("", "ignores its messages, different prompts become the same 0 tokens"),
        ("{{ raise_exception('no') }}", "the chat template refuses a conversation of user: no; ask in another way"),
        ("{% for x in %}", "refuses a conversation of user: Expected an expression, got 'end of statement block'"),
        ("{{ 1 / 0 }}", "refuses a conversation of user: division by zero"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "refuses a conversation of user: Range too big"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(template, message):
    tokenizer = FAMILIES["qwen25"].tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=re.escape(message)):
        TokenizerRenderer(tokenizer).prompt_ids([QUESTION])
