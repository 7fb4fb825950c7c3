"""Each rule of scoring against what the benchmark's own code gave for the same answer. The values were computed with
the scorers of LongBench and InfiniteBench, and the packages rouge, rouge_score and rapidfuzz."""

import pytest

from ulysses_cli.evaluate.scoring import SCORERS

PACKAGES = {"chinese_f1": "jieba", "rouge_chinese": "jieba", "code_similarity": "rapidfuzz"}
CASES = [
    ("choice", "C", ("the lake", "C"), 1.0),
    ("choice", "C. the lake", ("the lake", "C"), 1.0),
    ("choice", "Answer: C", ("the lake", "C"), 0.0),
    ("choice", "option C", ("the lake", "C"), 1.0),
    ("choice", "The correct option is C", ("the lake", "C"), 1.0),
    ("choice", "The answer is: the lake.", ("the lake", "C"), 1.0),
    ("choice", "the lake", ("the lake", "C"), 1.0),
    ("choice", "It was the lake", ("the lake", "C"), 0.0),
    ("choice", "", ("the lake", "C"), 0.0),
    ("choice", "B or C", ("the lake", "C"), 0.0),
    ("choice", "I think the answer is", ("the lake", "C"), 0.0),
    ("choice", "the answer is:", ("the lake", "C"), 0.0),
    ("choice", "Both A and C", ("the lake", "C"), 0.0),
    ("choice", "Perhaps, C!", ("the lake", "C"), 1.0),
    ("choice", "BC then C", ("the lake", "C"), 0.0),
    ("choice", "answer is c", ("the lake", "C"), 0.0),
    ("choice", "Dover", ("the lake", "C"), 0.0),
    ("debug", "B. parse_row", ("parse_row", "B"), 1.0),
    ("debug", "B: yes", ("parse_row", "B"), 1.0),
    ("debug", "B", ("parse_row", "B"), 0.0),
    ("debug", "The answer is: B", ("parse_row", "B"), 1.0),
    ("debug", "The error is: parse_row", ("parse_row", "B"), 1.0),
    ("debug", "answer: `parse_row`", ("parse_row", "B"), 1.0),
    ("debug", "The correct option is: B", ("parse_row", "B"), 1.0),
    ("debug", "answer is: Option B", ("parse_row", "B"), 1.0),
    ("debug", "The answer is B", ("parse_row", "B"), 0.0),
    ("debug", "parse_row", ("parse_row", "B"), 0.0),
    ("debug", "is:", ("parse_row", "B"), 0.0),
    ("debug", "A. parse_row", ("parse_row", "B"), 0.0),
    ("debug", " B.", ("parse_row", "B"), 1.0),
    ("last_integer", "the result is 12.", ("12",), 1.0),
    ("last_integer", "12", ("12",), 1.0),
    ("last_integer", "`12`", ("12",), 1.0),
    ("last_integer", "it is:12", ("12",), 1.0),
    ("last_integer", "-12", ("12",), 0.0),
    ("last_integer", "It is 12 now", ("12",), 0.0),
    ("last_integer", "twelve", ("12",), 0.0),
    ("last_integer", "1,2", ("12",), 0.0),
    ("last_integer", "12 .", ("12",), 1.0),
    ("last_integer", "(12)", ("12",), 0.0),
    ("last_integer", "", ("12",), 0.0),
    ("whole_word", 'the value is "ab-12".', ("ab-12",), 1.0),
    ("whole_word", "ab-12?", ("ab-12",), 1.0),
    ("whole_word", "is ab-12!", ("ab-12",), 1.0),
    ("whole_word", "(ab-12)", ("ab-12",), 0.0),
    ("whole_word", "ab-12;", ("ab-12",), 0.0),
    ("whole_word", "{ab-12}", ("ab-12",), 1.0),
    ("whole_word", "ab-123", ("ab-12",), 0.0),
    ("whole_word", "x:ab-12,", ("ab-12",), 1.0),
    ("name", "Mary Smith", ("MARY",), 1.0),
    ("name", "mary", ("MARY",), 1.0),
    ("name", "It was MARY!", ("MARY",), 1.0),
    ("name", "Marys", ("MARY",), 0.0),
    ("name", "(Mary)", ("MARY",), 0.0),
    ("name", "Mary;", ("MARY",), 0.0),
    ("first_integer", "It is 71432 and 5", ("71432",), 1.0),
    ("first_integer", "5 and 71432", ("71432",), 0.0),
    ("first_integer", "no", ("71432",), 0.0),
    ("first_integer", "71432.5", ("71432",), 1.0),
    ("first_integer", "x71432y", ("71432",), 1.0),
    ("first_number", "-5 is it", ("5",), 1.0),
    ("first_number", "5", ("5",), 1.0),
    ("first_number", "It is 5, or 6", ("5",), 1.0),
    ("first_number", "6", ("5",), 0.0),
    ("first_number", "-1.50 or 3", ("1.5",), 1.0),
    ("first_number", "1.5", ("1.5",), 1.0),
    ("first_number", "5", ("5.0",), 1.0),
    ("first_number", "none", ("5",), 0.0),
    ("first_number", "1.55", ("1.5",), 0.0),
    ("rouge_sets", "a b c d", ("a c d e",), 0.75),
    ("rouge_sets", "the cat sat. the cat ran away.", ("the cat sat down. a dog ran away.",), 0.769231),
    ("rouge_sets", "word word word word", ("word other",), 0.666667),
    ("rouge_sets", "", ("x",), 0.0),
    ("rouge_sets", "...", ("x",), 0.0),
    ("rouge_sets", "x y. z . ", ("z. x y.",), 0.857143),
    ("rouge_sets", "a b a c", ("c a b a",), 0.666667),
    ("rouge_sets", "One. Two three. four", ("four three. Two. One",), 1.0),
    ("rouge_lines", "the cat sat\nthe cat ran away", ("the cat sat down\na dog ran away",), 0.666667),
    ("rouge_lines", "word word word", ("word other",), 0.4),
    ("rouge_lines", "", ("x",), 0.0),
    ("rouge_lines", "It's A Test!", ("its a test",), 0.571429),
    ("rouge_lines", "One two.\n\nthree four", ("three four\none two five",), 0.888889),
    ("rouge_lines", "a b a c", ("c a b a",), 0.75),
    ("rouge_chinese", "会议讨论了预算。大家同意增加投入。", ("会议讨论预算，同意增加投入。",), 0.823529),
    ("rouge_chinese", "红色的球", ("蓝色的球",), 0.666667),
    ("chinese_f1", "他住在北京市，朝阳区。", ("北京市朝阳区",), 0.571429),
    ("chinese_f1", "《红楼梦》的作者是曹雪芹", ("曹雪芹",), 0.285714),
    ("character_f1", "红色，球", ("红球",), 0.8),
    ("character_f1", "A 座《三》楼", ("a座三楼",), 0.888889),
    ("character_f1", "没有", ("红球",), 0.0),
    ("token_f1", "The Eiffel tower!", ("eiffel tower",), 1.0),
    ("token_f1", "a big tower", ("Eiffel tower",), 0.5),
    ("token_f1", "an apple, the pear", ("apple pear plum",), 0.8),
    ("token_f1", "", ("x",), 0.0),
    ("token_f1", "it's", ("its",), 1.0),
    ("code_similarity", "# note\n```python\nreturn total + 1\n", ("return total",), 0.86),
    ("code_similarity", "\n\nx = foo(1)  # no\ny = 2", ("y = 3",), 0.8),
    ("code_similarity", "", ("a",), 0.0),
    ("code_similarity", "    return self.name", ("    return self.names",), 0.98),
]
CLASSES = [
    ("a dog and a cat", "cat", ("cat", "dog", "cow"), 0.5),
    ("hot dog", "hot dog", ("dog", "hot dog"), 1.0),
    ("a bird", "cat", ("cat", "dog"), 0.0),
    ("hot dog bun", "hot dog bun", ("dog", "hot dog", "bun", "hot dog bun"), 0.5),
    ("big hot dog", "big hot dog", ("hot", "dog", "big hot dog"), 0.5),
]


@pytest.mark.parametrize(("metric", "answer", "references", "expected"), CASES)
def test_a_rule_gives_what_the_original_gives(
    metric: str, answer: str, references: tuple[str, ...], expected: float
) -> None:
    if metric in PACKAGES:
        pytest.importorskip(PACKAGES[metric])
    assert SCORERS[metric](answer, references, {}) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("answer", "right", "classes", "expected"), CLASSES)
def test_classes_give_what_the_original_gives(
    answer: str, right: str, classes: tuple[str, ...], expected: float
) -> None:
    assert SCORERS["classes"](answer, (right,), {"classes": classes}) == pytest.approx(expected)
