"""Tasks from the user's files: questions of SQuAD and HotpotQA among other paragraphs, and recall of lines of code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from random import Random

from ulysses_cli.evaluate.sample import Draft, Sample, Span, Task, read_words
from ulysses_cli.plan.files import read_regular
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.units import format_count

CODE_FILES = frozenset(read_words(".c .cc .cpp .cs .go .h .hpp .java .js .kt .py .rb .rs .scala .swift .ts"))
MAX_CODE_BYTES = 64 << 20
MAX_QUESTION_BYTES = 256 << 20  # HotpotQA's have 45 MB
MIN_LINE, MAX_LINE = 12, 120  # characters of a line that is asked for
MAX_MINIFIED = 1000  # characters of a line; a file with a longer one is data or was written by a program
NUM_AROUND = 40  # lines of its file that are shown before and after it


@dataclass(frozen=True)
class PaperQuestion:
    """A question, its right answers, and the paragraphs that hold them."""

    text: str
    answers: tuple[str, ...]
    evidence: tuple[str, ...]


def read_questions(file: Path, option: str) -> tuple[list[PaperQuestion], list[str]]:
    """Reads SQuAD or HotpotQA JSON, which `option` names. Returns the questions with answers, and all paragraphs."""
    hint = "download SQuAD's dev-v2.0.json, or hotpot_dev_distractor_v1.json of HotpotQA"
    if not file.exists():
        raise RecipeError([Problem(option, f"{file} does not exist", hint)])
    try:
        content = json.loads(read_regular(file, MAX_QUESTION_BYTES).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RecipeError([Problem(option, f"{file} cannot be read as JSON: {error}", hint)]) from None
    try:
        questions = _read_squad(content) if isinstance(content, dict) else _read_hotpot(content)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        message = f"{file} is neither SQuAD's nor HotpotQA's: it lacks {error}"
        raise RecipeError([Problem(option, message, hint)]) from None
    paragraphs = dict.fromkeys(paragraph for each in questions for paragraph in each.evidence)
    if isinstance(content, list):
        for row in content:
            paragraphs.update(dict.fromkeys(_join_hotpot(title, lines) for title, lines in row["context"]))
    if not questions:
        raise RecipeError([Problem(option, f"{file} holds no question that has an answer")])
    return questions, list(paragraphs)


def _read_squad(content: dict[str, list[dict[str, list[dict[str, object]]]]]) -> list[PaperQuestion]:
    questions = []
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            for asked in paragraph["qas"]:  # type: ignore[attr-defined]
                answers = tuple(dict.fromkeys(answer["text"] for answer in asked["answers"]))
                if answers:
                    questions.append(PaperQuestion(asked["question"], answers, (str(paragraph["context"]),)))
    return questions


def _read_hotpot(content: list[dict[str, object]]) -> list[PaperQuestion]:
    questions = []
    for row in content:
        context = {title: _join_hotpot(title, lines) for title, lines in row["context"]}  # type: ignore[attr-defined]
        titles = dict.fromkeys(title for title, _ in row["supporting_facts"])  # type: ignore[attr-defined]
        evidence = tuple(context[title] for title in titles if title in context)
        questions.append(PaperQuestion(str(row["question"]), (str(row["answer"]),), evidence))
    return questions


def _join_hotpot(title: str, lines: Sequence[str]) -> str:
    return f"{title}\n{''.join(lines)}"


def make_question_task(name: str, file: Path) -> Task:
    """Other paragraphs come until they have as many words as there are units; the last of them is cut."""
    questions, paragraphs = read_questions(file, "--squad" if name == "qa_1" else "--hotpotqa")

    def make(random: Random, _: int) -> Draft:
        question, seed = random.choice(questions), random.getrandbits(64)

        def render(num_units: int) -> Sample:
            own = Random(seed)
            others = [each for each in paragraphs if each not in question.evidence]
            own.shuffle(others)
            distractors = list(_take_words(others, num_units))
            shown = [*question.evidence, *distractors]
            own.shuffle(shown)
            head, parts = "Answer the question from the documents below, as briefly as you can.\n\n", []
            evidence, end = list[Span](), len(head)
            for number, paragraph in enumerate(shown, 1):
                part = f"Document {number}:\n{paragraph}"
                if paragraph in question.evidence:
                    evidence.append((end, end + len(part)))
                parts.append(part)
                end += len(part) + 2
            content = f"{head}" + "\n\n".join(parts) + f"\n\nQuestion: {question.text}"
            context = len(head), end - 2
            return Sample(name, content, question.answers, "part", 32, " Answer:", tuple(evidence), context=context)

        return render

    return Task(name, make, is_of_files=True)


def _take_words(paragraphs: Sequence[str], number: int) -> Iterator[str]:
    """Paragraphs with so many words in all, from the first on again where they do not reach."""
    for paragraph in cycle(paragraphs):
        if number <= 0:
            return
        ends = list(islice((word.end() for word in re.finditer(r"\S+", paragraph)), number))
        number -= max(1, len(ends))
        yield paragraph[: ends[-1]] if ends else paragraph


def make_code_task(folder: Path) -> Task:
    """Asks for the line that follows a line of some file; the line that is shown comes once in all files."""
    files: dict[str, list[str]] = {}
    num_bytes = 0
    for file in sorted(folder.rglob("*")):
        if file.suffix in CODE_FILES and file.is_file() and num_bytes + file.stat().st_size <= MAX_CODE_BYTES:
            text = read_regular(file, MAX_CODE_BYTES).decode(errors="replace")
            num_bytes += len(text)
            lines = text.splitlines()
            if max(map(len, lines), default=0) <= MAX_MINIFIED:
                files[file.relative_to(folder).as_posix()] = lines
    pairs = _find_pairs(files)
    if not pairs:
        found = f"holds no code with lines that come once, in {format_count(len(files), 'file of code')}"
        message = f"{folder} {found if folder.is_dir() else 'is not a folder'}"
        raise RecipeError([Problem("--code", message, "name a folder of source files")])

    def make(random: Random, length: int) -> Draft:
        (name, at), seed = random.choice(pairs), random.getrandbits(64)
        first, end_of_excerpt = _choose_excerpt(files[name], at, length // 2)

        def render(num_units: int) -> Sample:
            own = Random(seed)
            others = [each for each in files if each != name]
            own.shuffle(others)
            excerpt = files[name][first:end_of_excerpt]
            lines, left = list[tuple[str, str]](), num_units
            while left > 0 and others:
                for other in others:
                    lines.append((other, "\n".join(files[other][: max(1, left)])))
                    left -= len(files[other]) + 1
                    if left <= 0:
                        break
            lines.insert(own.randrange(len(lines) + 1), (name, "\n".join(excerpt)))
            head, parts, evidence = "Source files of a program follow.\n", [], list[Span]()
            end = len(head)
            for file_name, text in lines:
                part = f"\n# file: {file_name}\n{text}"
                if file_name == name:
                    begin = end + len(f"\n# file: {file_name}\n") + sum(len(each) + 1 for each in files[name][first:at])
                    evidence = [(begin, begin + len("\n".join(files[name][at : at + 2])))]
                parts.append(part)
                end += len(part)
            line, wanted = files[name][at], files[name][at + 1]
            question = f"\n\nIn {name}, which line comes right after this line?\n{line}\nAnswer with that line alone."
            content = head + "".join(parts) + question
            context = len(head), end
            return Sample(
                "code_recall", content, (wanted.strip(),), "line", 128, "", tuple(evidence), context=context
            )  # fmt: skip

        return render

    return Task("code_recall", make, is_of_files=True)


def _choose_excerpt(lines: Sequence[str], at: int, room: int) -> tuple[int, int]:
    """The lines around two of them that fit into so many characters: no more than so many tokens."""
    first, end, used = at, at + 2, sum(len(line) + 1 for line in lines[at : at + 2])
    for _ in range(NUM_AROUND):
        for place in (first - 1, end):
            if 0 <= place < len(lines) and used + len(lines[place]) + 1 <= room:
                used += len(lines[place]) + 1
                first, end = min(first, place), max(end, place + 1)
    return first, end


def _find_pairs(files: dict[str, list[str]]) -> list[tuple[str, int]]:
    counts: dict[str, int] = {}
    for lines in files.values():
        for line in lines:
            counts[line.strip()] = counts.get(line.strip(), 0) + 1
    return [
        (name, at)
        for name, lines in files.items()
        for at in range(len(lines) - 1)
        if all(MIN_LINE <= len(line.strip()) <= MAX_LINE and re.search(r"\w", line) for line in lines[at : at + 2])
        and all(counts[line.strip()] == 1 for line in lines[at : at + 2])
    ]
