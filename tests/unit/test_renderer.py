"""Tests chat templates that never end or fill the memory: each is soon one problem with its place and leaves no
process."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import explain
from support.tiers import count_examples, sample
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.data.store import TARGET
from ulysses_cli.data.tokenizing import renderer
from ulysses_cli.data.tokenizing.encoder import Encoder, EncoderSettings
from ulysses_cli.data.tokenizing.renderer import Renderer, RenderRequest, TemplateRefusal
from ulysses_cli.data.tokenizing.targets import TargetChoice
from ulysses_cli.data.tokenizing.tokenizer import make_bytes_tokenizer
from ulysses_cli.data.tokenizing.workers import encode_block
from ulysses_cli.readers.blocks import Block
from ulysses_cli.readers.columns import Chat
from ulysses_cli.readers.problems import BadRow, DataError

CHAT = b'{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n'
MANY = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"
TEMPLATE = "{% if 'no' in messages[0].content %}{{ raise_exception('not this') }}{% endif %}{{ messages[0].content }}"
ENDLESS = {
    "a loop": MANY.replace("BODY", ""),
    "a loop for the first messages alone": "{% if messages[-1].content != 'a' %}"
    + MANY.replace("BODY", "")
    + "{% endif %}{% for m in messages %}{{ m.role + m.content }}{% endfor %}",
    "a long text": MANY.replace("BODY", "{{ 'x' * 1000000 }}"),
    "one huge text": "{{ 'x' * 10 ** 11 }}",
    "a huge answer": "{{ 'x' * 2000000 }}",
    "no Jinja": "{% for m in messages %}\n{{ m.content }",
}

# Jinja computes constants when it compiles a template: gigabytes, or minutes, before anything is rendered.
FOLDED = {
    "gigabytes": "{{ messages }}{{ ('a' * 10 ** 10) | length }}",
    "gigabytes in a list": "{{ messages }}{{ ([0] * 10 ** 9) | length }}",
    "a long sum": "{{ messages }}{{ (10 ** (10 ** 8)) % 7 }}",
    "gigabytes in a branch": "{{ messages }}{% if false %}{{ 'a' * 10 ** 10 }}{% endif %}",
    "brackets": "{{ messages }}{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "digits": "{{ messages }}{{ " + "9" * 50_000 + " }}",
}
USES = """
import json, resource, sys, time
from ulysses_cli.data.tokenizing import renderer
from ulysses_cli.data.tokenizing.encoder import Encoder
from ulysses_cli.data.tokenizing.tokenizer import make_bytes_tokenizer
from ulysses_cli.evaluate.prompts import Prompter
from ulysses_cli.plan.models.model_files import find_switch, read_template
from ulysses_cli.plan.problem import RecipeError
from ulysses_cli.readers.columns import Chat
from ulysses_cli.readers.problems import BadRow
renderer.SECONDS = 1.0
CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
def prompt(tokenizer):
    Prompter(tokenizer, renderer.Renderer(tokenizer).render_text)
def measure(use, *words):
    started = time.perf_counter()
    try:
        use(*words)
        said = ""
    except (RecipeError, BadRow, renderer.TemplateProblem) as error:
        said = str(error)
    took.append((time.perf_counter() - started, said))
took = []
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for template in json.load(sys.stdin):
    tokenizer = make_bytes_tokenizer()
    tokenizer.chat_template = template
    measure(read_template, template)
    measure(find_switch, template)
    measure(prompt, tokenizer)
    measure(lambda: Encoder(tokenizer).encode(Chat(CHAT)))
print(json.dumps([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, took]))
"""


@pytest.mark.check
def test_no_use_of_a_template_takes_memory_or_time_of_this_process() -> None:
    templates = list(FOLDED.values())
    done = subprocess.run(
        [sys.executable, "-c", USES], input=json.dumps(templates), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    grown, took = json.loads(done.stdout)
    assert grown << 10 < 200 << 20, f"{grown >> 10} MiB"
    assert max(seconds for seconds, _ in took) < 10
    said = [words for _, words in took]
    assert len(said) == 4 * len(templates)
    assert all(len(words) < 600 and "Traceback" not in words for words in said)
    refused = {name: [words != "" for words in said[4 * at : 4 * at + 4]] for at, name in enumerate(FOLDED)}
    assert refused["gigabytes"] == refused["gigabytes in a list"] == [False, False, True, True]
    assert refused["brackets"] == refused["digits"] == [True, False, True, True]


def make_encoder(template: str) -> Encoder:
    tokenizer = make_bytes_tokenizer()
    tokenizer.chat_template = template
    return Encoder(tokenizer, EncoderSettings(assistant_only_loss=True))


def test_what_a_template_raises_is_one_short_line() -> None:
    tokenizer = make_bytes_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no\n' + 'x' * 10 ** 7) }}"
    with pytest.raises(TemplateRefusal) as caught:
        Renderer(tokenizer).render_text([{"role": "user", "content": "a"}])
    assert str(caught.value) == "no"
    encoder = make_encoder("{{ raise_exception('x' * 10 ** 7) }}")
    chat = Chat([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}])
    assert len(explain(encoder.encode, chat, error=BadRow)) < 400


def test_a_renderer_that_was_closed_starts_again() -> None:
    tokenizer = make_bytes_tokenizer()
    one = Renderer(tokenizer)
    for text in "ab":
        messages = [{"role": "user", "content": text}]
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert one.render_text(messages, add_generation_prompt=True) == expected
        one.close()
        assert one.connection is None


@pytest.mark.parametrize("name", sample(ENDLESS, quick=["a loop", "no Jinja"]))
def test_a_template_that_never_ends_or_begins_is_one_problem(
    monkeypatch: pytest.MonkeyPatch, name: str, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setattr(renderer, "SECONDS", 1.0 if "loop" in name else 20.0)
    monkeypatch.setattr(renderer, "MEMORY_BYTES", (3 << 30) if name == "one huge text" else (1 << 28))
    monkeypatch.setattr(renderer, "MAX_CHARS", 1 << 20)
    block = Block("d.jsonl", "lines", [CHAT, CHAT, CHAT], 1, 5)
    assert explain(encode_block, make_encoder(ENDLESS[name]), "chat", block, error=DataError) == snapshot


def test_refusals_and_texts_reach_the_caller() -> None:
    tokenizer = make_bytes_tokenizer()
    messages = [{"role": "user", "content": "é\ud800" * 3}, {"role": "assistant", "content": "a"}]
    for choice in (TargetChoice(answers_only=True), TargetChoice(answers_only=True, is_marked=True)):
        (chat,) = Renderer(tokenizer, ["<|end|>"]).render(RenderRequest(messages, choice=choice)).texts
        assert chat.text == tokenizer.apply_chat_template(messages, tokenize=False)
        assert [chat.text[start:stop] for start, stop, bits in chat.classes if bits & TARGET] == ["a<|end|>"]
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(TemplateRefusal, match="roles must alternate"):
        Renderer(tokenizer).render(RenderRequest(messages))


@pytest.mark.check
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
                assert one.render(requests[at]).texts[0].text == f"{at} "
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


@pytest.mark.check
def test_the_child_ends_with_a_parent_that_is_killed() -> None:
    process = subprocess.Popen([sys.executable, "-c", LIVING, MANY], stdout=subprocess.PIPE, text=True)
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
