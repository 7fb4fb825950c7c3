"""Each rule of scoring against what the benchmark's own code gave for the same answer. The values were computed with
the scorers of LongBench and InfiniteBench, and the packages rouge, rouge_score and rapidfuzz."""

import pytest

from ulysses_cli.evaluate.scoring import SCORERS

PACKAGES = {"chinese_f1": "jieba", "rouge_chinese": "jieba", "code_similarity": "rapidfuzz"}
# By rule and right answers: answers and their scores. Of classes, the first is the right one.
CASES: dict[str, dict[tuple[str, ...], dict[str, float]]] = {
    "choice": {("the lake", "C"): {
        "C": 1.0, "C. the lake": 1.0, "Answer: C": 0.0, "option C": 1.0, "The correct option is C": 1.0,
        "The answer is: the lake.": 1.0, "the lake": 1.0, "It was the lake": 0.0, "": 0.0, "B or C": 0.0,
        "I think the answer is": 0.0, "the answer is:": 0.0, "Both A and C": 0.0, "Perhaps, C!": 1.0,
        "BC then C": 0.0, "answer is c": 0.0, "Dover": 0.0,
    }},
    "debug": {("parse_row", "B"): {
        "B. parse_row": 1.0, "B: yes": 1.0, "B": 0.0, "The answer is: B": 1.0, "The error is: parse_row": 1.0,
        "answer: `parse_row`": 1.0, "The correct option is: B": 1.0, "answer is: Option B": 1.0,
        "The answer is B": 0.0, "parse_row": 0.0, "is:": 0.0, "A. parse_row": 0.0, " B.": 1.0,
    }},
    "last_integer": {("12",): {
        "the result is 12.": 1.0, "12": 1.0, "`12`": 1.0, "it is:12": 1.0, "-12": 0.0, "It is 12 now": 0.0,
        "twelve": 0.0, "1,2": 0.0, "12 .": 1.0, "(12)": 0.0, "": 0.0,
    }},
    "whole_word": {("ab-12",): {
        'the value is "ab-12".': 1.0, "ab-12?": 1.0, "is ab-12!": 1.0, "(ab-12)": 0.0, "ab-12;": 0.0, "{ab-12}": 1.0,
        "ab-123": 0.0, "x:ab-12,": 1.0,
    }},
    "name": {("MARY",): {
        "Mary Smith": 1.0, "mary": 1.0, "It was MARY!": 1.0, "Marys": 0.0, "(Mary)": 0.0, "Mary;": 0.0,
    }},
    "first_integer": {("71432",): {
        "It is 71432 and 5": 1.0, "5 and 71432": 0.0, "no": 0.0, "71432.5": 1.0, "x71432y": 1.0,
    }},
    "first_number": {
        ("5",): {"-5 is it": 1.0, "5": 1.0, "It is 5, or 6": 1.0, "6": 0.0, "none": 0.0},
        ("1.5",): {"-1.50 or 3": 1.0, "1.5": 1.0, "1.55": 0.0},
        ("5.0",): {"5": 1.0},
    },
    "rouge_sets": {
        ("a c d e",): {"a b c d": 0.75},
        ("the cat sat down. a dog ran away.",): {"the cat sat. the cat ran away.": 0.769231},
        ("word other",): {"word word word word": 0.666667},
        ("x",): {"": 0.0, "...": 0.0},
        ("z. x y.",): {"x y. z . ": 0.857143},
        ("c a b a",): {"a b a c": 0.666667},
        ("four three. Two. One",): {"One. Two three. four": 1.0},
    },
    "rouge_lines": {
        ("the cat sat down\na dog ran away",): {"the cat sat\nthe cat ran away": 0.666667},
        ("word other",): {"word word word": 0.4},
        ("x",): {"": 0.0},
        ("its a test",): {"It's A Test!": 0.571429},
        ("three four\none two five",): {"One two.\n\nthree four": 0.888889},
        ("c a b a",): {"a b a c": 0.75},
    },
    "rouge_chinese": {
        ("会议讨论预算，同意增加投入。",): {"会议讨论了预算。大家同意增加投入。": 0.823529},
        ("蓝色的球",): {"红色的球": 0.666667},
    },
    "chinese_f1": {
        ("北京市朝阳区",): {"他住在北京市，朝阳区。": 0.571429},
        ("曹雪芹",): {"《红楼梦》的作者是曹雪芹": 0.285714},
    },
    "character_f1": {
        ("红球",): {"红色，球": 0.8, "没有": 0.0},
        ("a座三楼",): {"A 座《三》楼": 0.888889},
    },
    "token_f1": {
        ("eiffel tower",): {"The Eiffel tower!": 1.0},
        ("Eiffel tower",): {"a big tower": 0.5},
        ("apple pear plum",): {"an apple, the pear": 0.8},
        ("x",): {"": 0.0},
        ("its",): {"it's": 1.0},
    },
    "code_similarity": {
        ("return total",): {"# note\n```python\nreturn total + 1\n": 0.86},
        ("y = 3",): {"\n\nx = foo(1)  # no\ny = 2": 0.8},
        ("a",): {"": 0.0},
        ("    return self.names",): {"    return self.name": 0.98},
    },
    "classes": {
        ("cat", "dog", "cow"): {"a dog and a cat": 0.5},
        ("hot dog", "dog"): {"hot dog": 1.0},
        ("cat", "dog"): {"a bird": 0.0},
        ("hot dog bun", "dog", "hot dog", "bun"): {"hot dog bun": 0.5},
        ("big hot dog", "hot", "dog"): {"big hot dog": 0.5},
    },
}  # fmt: skip


@pytest.mark.parametrize("metric", CASES)
def test_a_rule_gives_what_the_original_gives(metric: str) -> None:
    if metric in PACKAGES:
        pytest.importorskip(PACKAGES[metric])
    for references, answers in CASES[metric].items():
        facts = {"classes": references} if metric == "classes" else {}
        right = references[:1] if facts else references
        found = {answer: SCORERS[metric](answer, right, facts) for answer in answers}
        assert found == pytest.approx(answers, abs=1e-6)
