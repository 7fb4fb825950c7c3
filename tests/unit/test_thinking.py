"""Models that think before they answer: asked to answer at once, or given tokens for a thought that does not count."""

import pytest
from support.prompters import make_prompter
from support.refusals import explain
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.data.tokenizing.tokenizer import make_bytes_tokenizer
from ulysses_cli.evaluate.prompts import Prompter, find_answer
from ulysses_cli.evaluate.sample import Sample
from ulysses_cli.evaluate.suites import Amount, Sources, make_prompts, plan_suites
from ulysses_cli.train.generation.questions import Answer, Quiz, _describe, _make_question

SAID = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
HEADER = SAID + "{% if add_generation_prompt %}<|im_start|>assistant\n"
SWITCHED = "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
PLAIN = HEADER + "{% endif %}"
QWEN3 = HEADER + SWITCHED + "{% endif %}"
QWEN35 = HEADER + "<think>\n{% endif %}"
DEEPSEEK = HEADER + "{% if thinking %}<think>{% else %}</think>{% endif %}{% endif %}"
GPT_OSS = (
    "{% for each in messages %}<|start|>{{ each.role }}<|message|>{{ each.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
SAMPLE = Sample("task", "Where is it?", ("here",), "all", 8, answer_prefix="It is")


def make_thinker(template: str, thinking: int = 0) -> Prompter:
    tokenizer = make_bytes_tokenizer()
    tokenizer.chat_template = template
    return make_prompter(tokenizer, thinking=thinking)


def test_a_model_that_thinks_is_asked_to_answer_at_once(snapshot: SnapshotAssertion) -> None:
    """As the templates of Qwen3, Qwen3.5, DeepSeek-V3.1 and gpt-oss do. An answer of a few tokens has no room for a
    thought, and a start of the answer inside a thought would be read as one."""
    templates = {"never thinks": PLAIN, "told": QWEN3, "always": QWEN35, "when told": DEEPSEEK, "channels": GPT_OSS}
    shown = {}
    for name, template in templates.items():
        prompter = make_thinker(template)
        text, begin = prompter.render(SAMPLE)
        assert (begin, prompter.count_new_tokens(SAMPLE)) == (text.index("Where"), 8)
        shown[name] = [text, *prompter.list_notes()]
    assert shown == snapshot


@pytest.mark.parametrize(
    ("template", "end", "said", "unfinished"),
    [
        (QWEN3, "assistant\n", "<think>\nno?</think>\n\nIt is here", "<think>\nIt is here, or"),
        (QWEN35, "assistant\n<think>\n", "no?</think>It is here", "It is here, or"),
        (DEEPSEEK, "assistant\n<think>", "a </think> b</think>It is here", "It is here"),
        (
            GPT_OSS, "<|start|>assistant",
            "<|channel|>analysis<|message|>no?<|end|><|start|>assistant<|channel|>final<|message|>It is here",
            "<|channel|>analysis<|message|>It is here",
        ),
    ],
    ids=["can be told", "always begins", "thinks when told", "channels"],
)  # fmt: skip
def test_tokens_for_a_thought_count_apart(template: str, end: str, said: str, unfinished: str) -> None:
    """The thought begins as the template has it, without the start of an answer, and is not scored: nor is a thought
    that names the right answer and does not end. The question's own length stays."""
    prompter = make_thinker(template, 100)
    text, _ = prompter.render(SAMPLE)
    assert text.endswith(end)
    prompt = prompter.make(SAMPLE)
    question = _make_question(prompt, Quiz([], prompter, {"task"}, print))
    assert (question.max_new_tokens, question.answer) == (108, ()), "no teacher forces a thought"
    for words, score, is_reached in ((said, 1.0, True), (unfinished, 0.0, False)):
        tokens = prompter.tokenizer(words, add_special_tokens=False)["input_ids"]
        result = _describe(prompt, Answer(tokens, None, None, 0.1), prompter)
        assert (result["score"], result["has_answer"]) == (score, is_reached)
        assert result["answer"].strip() == ("It is here" if is_reached else "")
    for thinking in (0, 5000):
        (made,) = make_prompts(
            plan_suites(["vt"], Sources()), make_thinker(template, thinking), Amount((1600,), 1), print
        )
        assert len(made.tokens) + made.sample.max_new_tokens == 1600


def test_a_question_without_the_models_template_is_answered_at_once() -> None:
    prompter = make_thinker(QWEN3, 100)
    few = Sample("trec", "Q: a? A:", ("b",), "all", 8, with_template=False)
    assert prompter.count_new_tokens(few) == 8
    assert prompter.render(few)[0] == "Q: a? A:"
    assert prompter.read_answer(few, prompter.tokenizer("<think> b")["input_ids"])[1]
    assert find_answer("assistant\n", "It is here") == "It is here"
    assert find_answer("assistant\n<think>\n", "It is here") is None


def test_it_is_said_that_a_model_thinks_and_one_that_cannot_is_refused(snapshot: SnapshotAssertion) -> None:
    said = [*make_thinker(QWEN3, 100).list_notes(), explain(make_thinker, PLAIN, 10)]
    said.append(explain(make_prompter, make_bytes_tokenizer(), with_template=False, thinking=10))
    assert said == snapshot
