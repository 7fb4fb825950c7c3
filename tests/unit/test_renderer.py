"""Tests chat templates that never end or fill the memory: each is soon one problem with its place and leaves no
process."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiers import count_examples, sample

from ulysses_cli.data.tokenizing import renderer
from ulysses_cli.data.tokenizing.encoder import Encoder, EncoderSettings
from ulysses_cli.data.tokenizing.renderer import Renderer, RenderRequest, TemplateRefusal
from ulysses_cli.data.tokenizing.tokenizer import make_bytes_tokenizer
from ulysses_cli.data.tokenizing.workers import encode_block
from ulysses_cli.readers.blocks import Block
from ulysses_cli.readers.problems import DataError

CHAT = b'{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n'
MANY = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"
TEMPLATE = "{% if 'no' in messages[0].content %}{{ raise_exception('not this') }}{% endif %}{{ messages[0].content }}"
ENDLESS = {
    "a loop": (MANY.replace("BODY", ""), "does not come to an end in 1 s"),
    "a long text": (MANY.replace("BODY", "{{ 'x' * 1000000 }}"), "takes more than .* of memory"),
    "one huge text": ("{{ 'x' * 10 ** 11 }}", "takes more than 3 GiB of memory"),
    "a huge answer": ("{{ 'x' * 2000000 }}", "writes more than 1,048,576 characters"),
}


def make_encoder(template: str) -> Encoder:
    tokenizer = make_bytes_tokenizer()
    tokenizer.chat_template = template
    return Encoder(tokenizer, EncoderSettings(assistant_only_loss=True))


@pytest.mark.parametrize("name", sample(ENDLESS, quick=["a loop"]))
def test_a_template_that_never_ends_is_one_problem(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    template, words = ENDLESS[name]
    monkeypatch.setattr(renderer, "SECONDS", 1.0 if name == "a loop" else 20.0)
    monkeypatch.setattr(renderer, "MEMORY_BYTES", (3 << 30) if name == "one huge text" else (1 << 28))
    monkeypatch.setattr(renderer, "MAX_CHARS", 1 << 20)
    encoder = make_encoder(template)
    with pytest.raises(DataError, match=words) as caught:
        encode_block(encoder, "chat", Block("d.jsonl", "lines", [CHAT, CHAT, CHAT], 1, 5))
    (problem,) = caught.value.problems
    assert str(problem).startswith("d.jsonl:5:1: the chat template ")


@pytest.mark.check
def test_a_template_that_ends_for_the_first_rendering_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer, "SECONDS", 1.0)
    body = "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}"
    odd = f"{{% if messages[-1]['content'] != 'a' %}}{MANY.replace('BODY', '')}{{% endif %}}{body}"
    with pytest.raises(DataError, match="does not come to an end"):
        encode_block(make_encoder(odd), "chat", Block("d.jsonl", "lines", [CHAT], 1, 1))


def test_refusals_and_texts_reach_the_caller() -> None:
    tokenizer = make_bytes_tokenizer()
    messages = [{"role": "user", "content": "é\ud800" * 3}, {"role": "assistant", "content": "a"}]
    chat = Renderer(tokenizer, ["<|end|>"]).render(RenderRequest(messages, is_marked=True))
    assert chat.text == tokenizer.apply_chat_template(messages, tokenize=False)
    assert [chat.text[start:stop] for start, stop in chat.answers] == ["a<|end|>"]
    text, spans = chat.marked
    assert [text[start:stop] for start, stop in spans] == ["a<|end|>"]
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(TemplateRefusal, match="roles must alternate"):
        Renderer(tokenizer).render(RenderRequest(messages))


@settings(max_examples=count_examples(30), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=12), st.integers(1, 4))
def test_announced_chats_are_rendered_as_if_alone(kinds: list[tuple[int, bool]], num_sent: int) -> None:
    """Announced chats may be left out, may come without an announcement or may be refused in between."""
    tokenizer = make_bytes_tokenizer()
    tokenizer.chat_template = TEMPLATE
    one = Renderer(tokenizer)
    requests = [
        RenderRequest([{"role": "user", "content": f"{at} {'no' * (kind == 1)}"}]) for at, (kind, _) in enumerate(kinds)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(renderer, "MAX_SENT", num_sent)
        one.announce([request for request, (kind, _) in zip(requests, kinds, strict=True) if kind != 2])
        for at, (kind, is_asked) in enumerate(kinds):
            if kind == 1 and is_asked:
                with pytest.raises(TemplateRefusal, match="not this"):
                    one.render(requests[at])
            elif is_asked:
                assert one.render(requests[at]).text == f"{at} "
    one.end()


LIVING = """
import sys
from ulysses_cli.data.tokenizing.renderer import RenderRequest, Renderer
from ulysses_cli.data.tokenizing.tokenizer import make_bytes_tokenizer
tokenizer = make_bytes_tokenizer()
tokenizer.chat_template = "{% if messages[0].content == 'b' %}" + sys.argv[1] + "{% endif %}a"
one = Renderer(tokenizer)
one.render(RenderRequest([{"role": "user", "content": "a"}]))
print(open("/proc/self/task/" + str(__import__("os").getpid()) + "/children").read().split()[0], flush=True)
one.render(RenderRequest([{"role": "user", "content": "b"}]))
"""


def test_the_child_ends_with_a_parent_that_is_killed() -> None:
    process = subprocess.Popen([sys.executable, "-c", LIVING, MANY], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    handle = os.pidfd_open(int(process.stdout.readline()))
    process.kill()
    process.communicate()
    assert select.select([handle], [], [], 20)[0], "the child lives on"
    os.close(handle)


def test_the_child_holds_no_file_of_the_parent(tmp_path: Path) -> None:
    """It would otherwise hold a lock as long as it lives."""
    with open(tmp_path / "lock", "w") as lock:
        one = Renderer(make_bytes_tokenizer())
        one.render(RenderRequest([{"role": "user", "content": "a"}]))
        before = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        held = {os.path.realpath(file) for pid in before for file in Path(f"/proc/{pid}/fd").iterdir()}
        assert os.path.realpath(tmp_path / "lock") not in held
        assert lock.writable()
    one.end()
    assert not Path(f"/proc/{before[-1]}/fd").exists()
