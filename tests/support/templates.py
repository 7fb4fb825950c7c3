"""Holds chat templates in the style of known ones, and for each a plain reader of its text, which returns the
assistant's characters.

A reader knows its template's marks and does not use the product's way to find them.
"""

import re
from dataclasses import dataclass, field, replace

from ulysses_cli.plan.models.model_files import SHIPPED, read_template

CHATML = """\
{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"""
LLAMA3 = """\
{{- '<s>' }}{%- for message in messages %}{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
{{- message['content'] | trim + '<|eot_id|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""
MISTRAL = """\
{{- '<s>' }}{%- for message in messages %}
{%- if message['role'] == 'user' %}{{- '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] + '</s>' }}
{%- else %}{{- raise_exception('only user and assistant') }}{%- endif %}{%- endfor %}"""
MISTRAL_TOOLS = """\
{%- set last = namespace(user=0) %}{%- for message in messages %}
{%- if message['role'] == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}
{{- '<s>' }}{%- for message in messages %}
{%- if message['role'] == 'user' %}
{%- if tools and loop.index0 == last.user %}{{- '[TOOLS]' + tools | tojson + '[/TOOLS]' }}{%- endif %}
{{- '[INST] ' + message['content'] + '[/INST]' }}
{%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] | trim + '</s>' }}
{%- else %}{{- '[RESULT]' + message['content'] + '[/RESULT]' }}{%- endif %}{%- endfor %}"""
GEMMA = """\
{{- '<bos>' }}{%- for message in messages %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"""
PLAIN = """\
{%- for message in messages %}{{- message['role'] | capitalize + ': ' + message['content'] | trim + '\n\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- 'Assistant:' }}{%- endif %}"""
QWEN3 = """\
{%- if tools %}{{- '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{%- endif %}
{%- set ns = namespace(last=0) %}{%- for message in messages %}
{%- if message['role'] == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}
{%- set content = message['content'] %}{%- set thought = '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}
{%- if message.tool_calls %}{%- for call in message.tool_calls %}
{%- if (loop.first and content) or not loop.first %}{{- '\n' }}{%- endif %}
{{- '<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}{%- endfor %}{%- endif %}
{{- '<|im_end|>\n' }}
{%- elif message['role'] == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + message['content'] + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- else %}{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
THINKING = QWEN3.replace(
    "{{- '<|im_start|>assistant\n' }}{%- endif %}", "{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"
)
MARKED = CHATML.replace(
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}",
    "{{- '<|im_start|>' + message['role'] + '\n' }}{%- if message['role'] == 'assistant' %}{% generation %}"
    "{{- message['content'] + '<|im_end|>' }}{% endgeneration %}{%- else %}{{- message['content'] + '<|im_end|>' }}"
    "{%- endif %}{{- '\n' }}",
)


@dataclass(frozen=True)
class Template:
    """`pattern` matches what the assistant says, in its group 1, end mark included."""

    text: str
    pattern: str
    specials: tuple[str, ...]
    roles: frozenset[str] = field(default=frozenset({"system", "user", "assistant"}))
    has_tools: bool = False

    def read(self, shown: str) -> list[tuple[int, int]]:
        return [match.span(1) for match in re.finditer(self.pattern, shown, re.S)]


IM = ("<|im_start|>", "<|im_end|>")
TEMPLATES = {
    "chatml": Template(CHATML, r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", IM),
    "llama3": Template(
        LLAMA3,
        r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n(.*?<\|eot_id\|>)",
        ("<s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "mistral": Template(MISTRAL, r"\[/INST\](.*?</s>)", ("<s>", "</s>"), frozenset({"user", "assistant"})),
    "mistral-tools": Template(
        MISTRAL_TOOLS,
        r"(?:\[/INST\]|\[/RESULT\])(?!\[RESULT\])(.*?</s>)",
        ("<s>", "</s>"),
        frozenset({"user", "assistant", "tool"}),
        has_tools=True,
    ),
    "gemma": Template(
        GEMMA, r"<start_of_turn>model\n(.*?<end_of_turn>)", ("<bos>", "<start_of_turn>", "<end_of_turn>")
    ),
    "plain": Template(PLAIN, r"Assistant:(.*?\n\n)(?=\Z|User: |System: |Assistant: )", ()),
    "qwen3": Template(
        QWEN3,
        r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)",
        IM,
        frozenset({"system", "user", "assistant", "tool"}),
        has_tools=True,
    ),
    "thinking": Template(
        THINKING,
        r"<\|im_start\|>assistant\n(?:<think>\n)?(.*?<\|im_end\|>)",
        IM,
        frozenset({"system", "user", "assistant", "tool"}),
        has_tools=True,
    ),
    "marked": Template(MARKED, r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", IM),
}
SHIPPED_LIKE = {"llama-3": "llama3", "phi": "phi", "qwen": "chatml"}
PHI = Template("", r"<\|assistant\|>\n(.*?<\|end\|>)", ())
for name, shipped in SHIPPED.items():
    like = TEMPLATES.get(SHIPPED_LIKE.get(name, name), PHI)
    specials, text = (*shipped.markers, *like.specials), read_template(name).text
    TEMPLATES[f"shipped {name}"] = replace(like, text=text, specials=tuple(dict.fromkeys(specials)))
TEMPLATES["shipped mistral"] = replace(
    TEMPLATES["mistral-tools"],
    text=read_template("mistral").text,
    pattern=r"(?:\[/INST\]|\[/TOOL_RESULTS\])(?!\[TOOL_RESULTS\])(.*?</s>)",
    specials=("</s>", "[INST]", "[/INST]"),
    roles=frozenset({"system", "user", "assistant", "tool"}),
)
TEMPLATES["shipped qwen"] = replace(TEMPLATES["qwen3"], text=read_template("qwen").text)
assert len({template.text for template in TEMPLATES.values()}) == len(TEMPLATES)
assert "{% generation %}" in MARKED

# As Qwen3's: thoughts of the last round are shown, an empty one where the assistant did not think.
LAST_ROUND = """\
{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}
{%- endif %}{%- endfor %}{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}
{%- if loop.index0 > ns.last and (m.reasoning_content or loop.last) %}
{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{%- endif %}{{- m.content }}
{%- for call in m.tool_calls or [] %}{{- '<call>' + (call.function | tojson) + '</call>' }}{%- endfor %}
{%- else %}{{- m.content }}{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"""
