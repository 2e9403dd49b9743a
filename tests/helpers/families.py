"""Chat templates that behave like those of five families of models, on small tokenizers with the special tokens of each.

They are our own, with shorter prose and the same behaviour: where and how tools and calls are written, what is trimmed, which
thinking is kept, who writes the first token, what is refused.
"""

from dataclasses import dataclass

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from grpo.apps.demo_model import make_tokenizer

CHATML = """
{%- if tools %}
    {{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else 'Be helpful.') }}
    {{- '\\n\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\nCall one by <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
"""
CALLS = """
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{% set call = call.function %}{% endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
"""
RESPONSES = """
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' }}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
"""
QWEN25 = f"""
{CHATML}
{{%- for message in messages %}}
    {{%- if message.role == 'user' or (message.role == 'system' and not loop.first) or
            (message.role == 'assistant' and not message.tool_calls) %}}
        {{{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}}}
    {{%- elif message.role == 'assistant' %}}
        {{{{- '<|im_start|>assistant' + ('\\n' + message.content if message.content else '') }}}}
        {CALLS}
        {{{{- '<|im_end|>\\n' }}}}
    {RESPONSES}
    {{%- endif %}}
{{%- endfor %}}
{{{{- '<|im_start|>assistant\\n' if add_generation_prompt }}}}
"""
# thinking is shown only after a user's last question; a tool's response is not a question
QWEN3 = f"""
{CHATML}
{{%- set last = namespace(question=0) %}}
{{%- for message in messages %}}
    {{%- if message.role == 'user' %}}{{% set last.question = loop.index0 %}}{{% endif %}}
{{%- endfor %}}
{{%- for message in messages %}}
    {{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}}
        {{{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}}}
    {{%- elif message.role == 'assistant' %}}
        {{%- set said = message.content.split('</think>')[-1].lstrip('\\n') %}}
        {{%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\\n')
            if '</think>' in message.content else '' %}}
        {{{{- '<|im_start|>assistant\\n' }}}}
        {{%- if loop.index0 > last.question and (loop.last or thought) %}}
            {{{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}}}
        {{%- endif %}}
        {{{{- said }}}}
        {{%- for call in message.tool_calls or [] %}}
            {{{{- '\\n' if said or not loop.first }}}}
            {{{{- '<tool_call>\\n{{"name": "' + call.function.name + '", "arguments": ' }}}}
            {{{{- call.function.arguments | tojson + '}}\\n</tool_call>' }}}}
        {{%- endfor %}}
        {{{{- '<|im_end|>\\n' }}}}
    {RESPONSES}
    {{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}
    {{{{- '<|im_start|>assistant\\n' }}}}
    {{{{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and not enable_thinking }}}}
{{%- endif %}}
"""
# an assistant's words beside a call are lost; responses of tools have their own role
HERMES = f"""
{{{{- bos_token }}}}
{CHATML}
{{%- for message in messages %}}
    {{%- if message.role in ('user', 'assistant') and not message.tool_calls or message.role == 'system' and not tools %}}
        {{{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}}}
    {{%- elif message.role == 'assistant' %}}
        {{{{- '<|im_start|>assistant' }}}}
        {CALLS}
        {{{{- '<|im_end|>\\n' }}}}
    {{%- elif message.role == 'tool' %}}
        {{{{- '<|im_start|>tool\\n<tool_response>\\n{{"name": "' + message.name + '", "content": ' }}}}
        {{{{- message.content | tojson + '}}\\n</tool_response><|im_end|>\\n' }}}}
    {{%- endif %}}
{{%- endfor %}}
{{{{- '<|im_start|>assistant\\n' if add_generation_prompt }}}}
"""
LLAMA31 = """
{{- bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\n' + ('Environment: ipython\\n' if tools else '') }}
{{- messages[0].content | trim if messages[0].role == 'system' }}
{{- '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role in ('user', 'assistant') and not message.tool_calls %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {%- if tools and message.role == 'user' and messages | selectattr('role', 'eq', 'user') | first == message %}
            {{- 'Call by {"name": function name, "parameters": dictionary of argument name and its value}.\\n\\n' }}
            {%- for tool in tools %}
                {{- tool | tojson(indent=4) + '\\n\\n' }}
            {%- endfor %}
        {%- endif %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- elif message.role == 'assistant' %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' if add_generation_prompt }}
"""
# tools stand before the last question
MISTRAL = """
{{- bos_token }}
{%- set last = namespace(question=0, turns=0) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- raise_exception('Only user, assistant and tool roles are supported!') }}
    {%- elif message.role == 'user' %}
        {%- set last.question = loop.index0 %}
    {%- endif %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {%- if (message.role == 'user') != (last.turns % 2 == 0) %}
            {{- raise_exception('After the optional system message, roles must alternate user/assistant!') }}
        {%- endif %}
        {%- set last.turns = last.turns + 1 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' if tools and loop.index0 == last.question }}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if not call.id is defined or call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- else %}
        {%- if not message.tool_call_id is defined or message.tool_call_id | length != 9 %}
            {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | tojson + ', "call_id": "' + message.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""


@dataclass(frozen=True)
class Family:
    """special, plain: its tokens; skip_special_tokens drops only the first. call: add(a=1, b=2) as the template writes it. calls:
    this call and then add(a=3, b=4)."""

    template: str
    special: tuple[str, ...]
    plain: tuple[str, ...]
    end: str
    bos: str | None
    call: str
    calls: str

    def tokenizer(self) -> PreTrainedTokenizerFast:
        texts = [
            self.calls,
            "How many are 1 + 2? Let me see. There are 3.",
            '{"type": "function", "properties": "integer"}',
        ]
        tokenizer = make_tokenizer(texts * 30)
        tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in self.special])
        tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in self.plain])
        tokenizer.eos_token, tokenizer.bos_token = self.end, self.bos
        tokenizer.chat_template = self.template
        return tokenizer


A, B = '{"name": "add", "arguments": {"a": 1, "b": 2}}', '{"name": "add", "arguments": {"a": 3, "b": 4}}'
IM, TAGS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), ("<tool_call>", "</tool_call>")
BLOCK, BLOCKS = (f"<tool_call>\n{A}\n</tool_call>", f"<tool_call>\n{A}\n</tool_call>\n<tool_call>\n{B}\n</tool_call>")
RESULTS = ("[TOOL_RESULTS]", "[/TOOL_RESULTS]")
FAMILIES = {
    "qwen25": Family(QWEN25, IM, TAGS, "<|im_end|>", None, BLOCK, BLOCKS),
    "qwen3": Family(QWEN3, IM, (*TAGS, "<think>", "</think>"), "<|im_end|>", None, BLOCK, BLOCKS),
    "hermes": Family(HERMES, (*IM, "<|begin_of_text|>"), TAGS, "<|im_end|>", "<|begin_of_text|>", BLOCK, BLOCKS),
    "llama31": Family(
        LLAMA31,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
        (),
        "<|eot_id|>",
        "<|begin_of_text|>",
        A.replace("arguments", "parameters"),
        f"{A}; {B}".replace("arguments", "parameters"),
    ),
    "mistral": Family(
        MISTRAL,
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", *RESULTS),
        (),
        "</s>",
        "<s>",
        f'[TOOL_CALLS] [{A[:-1]}, "id": "abcDEF123"}}]',
        f'[TOOL_CALLS] [{A[:-1]}, "id": "abcDEF123"}}, {B[:-1]}, "id": "abcDEF124"}}]',
    ),
}


def spelled(tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[int, ...]:
    """Return the ids of the text, one per character, unlike the tokenizer's own encoding. Its added tokens stay whole."""
    added = sorted(tokenizer.added_tokens_encoder, key=len, reverse=True)
    ids, at = [], 0
    while at < len(text):
        whole = next((token for token in added if text.startswith(token, at)), None)
        piece = whole or text[at]
        ids += tokenizer(piece, add_special_tokens=False).input_ids
        at += len(piece)
    return tuple(ids)
