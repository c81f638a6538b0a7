"""Chat templates by name: ChatML, Llama 3's and Gemma's, which mark what the assistant says.

They write conversations as the models of these names expect them. ChatML writes tools and calls as Qwen2.5 does; the
other two have no form for them and refuse such records.
"""

from pathlib import Path

from te_models.data.json_files import read_file
from te_models.data.tokenizer_base import Tokenizer
from te_models.errors import DataError

_THOUGHTS = """\
{%- set thoughts = message.reasoning_content or message.reasoning or message.thinking %}
{%- if thoughts %}{{ '<think>\\n' + thoughts + '\\n</think>\\n\\n' }}{% endif %}
"""
CHATML = (
    """\
{%- if tools %}
{%- set begins_with_system = messages and messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' }}
{%- if begins_with_system %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- '# Tools\\n\\nYou may call one or more of these functions:\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n</tools>\\n\\nWrite each call as a JSON object with its name and arguments:\\n<tool_call>\\n' }}
{{- '{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- generation %}
"""
    + _THOUGHTS
    + """\
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- ('\\n' if message.content or not loop.first else '') + '<tool_call>\\n{"name": ' + (call.function.name | tojson) }}
{{- ', "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endgeneration %}
{{- '\\n' }}
{%- elif message.role == 'tool' %}
{%- set follows = loop.index0 and messages[loop.index0 - 1].role == 'tool' %}
{{- '' if follows else '<|im_start|>user\\n' }}
{{- '<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{{- '\\n' if not loop.last and messages[loop.index0 + 1].role == 'tool' else '<|im_end|>\\n' }}
{%- elif not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
)
_NO_TOOLS = """\
{%- if tools %}{{ raise_exception('it has no form for tools: take chatml, or a template of your own') }}{% endif %}
"""
LLAMA3 = (
    _NO_TOOLS
    + """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}
"""
    + _THOUGHTS
    + """\
{{- (message.content | trim) + '<|eot_id|>' }}
{%- endgeneration %}
{%- else %}
{{- (message.content | trim) + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
)
GEMMA = (
    _NO_TOOLS
    + """\
{{- bos_token }}
{%- set turns = messages %}
{%- set before = '' %}
{%- if messages and messages[0].role == 'system' %}
{%- set turns = messages[1:] %}
{%- set before = messages[0].content + '\\n\\n' %}
{%- endif %}
{%- for message in turns %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('turns of user and assistant must alternate, and the first is of the user') }}
{%- endif %}
{%- if message.role == 'assistant' %}
{{- '<start_of_turn>model\\n' }}
{%- generation %}
"""
    + _THOUGHTS
    + """\
{{- (message.content | trim) + '<end_of_turn>' }}
{%- endgeneration %}
{{- '\\n' }}
{%- else %}
{{- '<start_of_turn>' + message.role + '\\n' + (before if loop.first else '') + (message.content | trim) }}
{{- '<end_of_turn>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""
)
NAMED_TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA}
# The tokens that each writes, which are single ids in the tokenizers of its models.
TEMPLATE_TOKENS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
}


def use_template(tokenizer: Tokenizer, chosen: str) -> list[str]:
    """Set a tokenizer's chat template to one of NAMED_TEMPLATES, or to that in a file; return lines to show about it.

    ChatML begins with the bos token if the tokenizer begins texts with it.

    Raises:
        DataError: there is no such name or file, or the file is not UTF-8 or no valid Jinja.
    """
    if chosen not in NAMED_TEMPLATES:
        content = read_file(Path(chosen))
        if content is None:
            names = ", ".join(NAMED_TEMPLATES)
            raise DataError(
                f"{chosen}: no such file; give a Jinja chat template, or one of {names}"
            )
        try:
            # Without the mark that editors on Windows put in front, which every prompt would begin with.
            template = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{chosen} is not UTF-8 text: {error.reason}; save it as UTF-8"
            ) from None
        tokenizer.set_chat_template(template)
        return []
    source = NAMED_TEMPLATES[chosen]
    if chosen == "chatml" and tokenizer.begins_with_bos():
        # The template of ChatML itself has no bos token, which a tokenizer that adds one to texts was trained with.
        source = "{{- bos_token }}\n" + source
    tokenizer.set_chat_template(source)
    # Words of the template that are no tokens are legal, and seldom meant: the model has to learn their pieces.
    apart = [token for token in TEMPLATE_TOKENS[chosen] if len(_ids(tokenizer, token)) != 1]
    if not apart:
        return []
    stop_words = ",".join(apart)
    return [
        f"the tokenizer writes {', '.join(apart)} of the template {chosen} as several tokens each: "
        f"--special-tokens '{stop_words}' makes each a token of its own"
    ]


def _ids(tokenizer: Tokenizer, token: str) -> list[int]:
    ids, _ = tokenizer.encode_rendered([token])[0]
    return ids.tolist()
