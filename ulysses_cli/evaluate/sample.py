"""A question at some length with its right answers, a draft of one whose haystack can still grow, and the words,
numbers and sentences to make haystacks and needles of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random
from typing import Any, Literal
from uuid import UUID


def read_words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = read_words(
    "able amber ancient autumn bitter black blue bold brave brief bright broad bronze calm careful cheap clean clear "
    "clever cold common cool coral cosmic crisp cruel curly damp dark deep dim distant double dry dull eager early "
    "eastern easy empty even faint fair famous fancy fast final fine firm flat fond frank free fresh frosty full "
    "gentle giant glad golden good grand grave gray great green happy hard hidden high hollow honest humble icy idle "
    "inner iron ivory jolly just keen kind large late lazy lean light lively local lonely long loud loyal lucky major "
    "marble mellow mild minor modern modest narrow native neat noble northern odd old olive open orange outer pale "
    "patient plain polite poor prime proper proud public pure purple quick quiet rapid rare ready red regal rich rigid "
    "ripe rough round royal rural rusty sacred safe scarlet secret sharp short shy silent silver simple slim slow "
    "small smooth snowy soft solid southern spare square stable steady steep still strange strict strong subtle sudden "
    "sunny sweet swift tall tame tender thick thin tidy tiny true urban vague vast violet vivid warm weak western "
    "white wide wild wise wooden yellow young"
)
NOUNS = read_words(
    "anchor apple apron arch arrow atlas attic badge bakery balcony bamboo banjo barn barrel basin basket beach beacon "
    "bell bench berry bird blanket boat bottle boulder bowl branch bread brick bridge broom bucket button cabin cable "
    "camel canal candle canoe canvas cape carpet castle cedar cellar chain chair chalk chapel cherry chest church "
    "circle cliff clock cloud coast coin comet compass copper corner cotton cottage cradle crane creek cricket crown "
    "crystal curtain dancer desert desk diamond dolphin door dragon drawer drum eagle earth elbow engine falcon farmer "
    "feather fence ferry fiddle field finger flag flame flute forest fossil fountain fox garden gate ginger glacier "
    "glove goat grain granite grape guitar hammer harbor harvest hat hawk hedge helmet hill hinge honey horn horse "
    "hotel island jacket jewel jungle kettle key kitchen kite ladder lagoon lake lamp lantern lemon leopard letter "
    "library lily lion lizard lobster magnet mango maple market meadow mirror monkey moon mountain museum needle nest "
    "notebook oak oasis ocean onion orchard otter owl paddle palace panda paper parrot pasture path pebble pencil "
    "pepper piano pigeon pillow pine planet plate pocket pond pony potato prairie puzzle quarry rabbit raft rain raven "
    "ribbon river road rocket roof rope rose saddle sail salmon sandal scarf school shadow shell ship shore shovel "
    "sparrow spider spoon spring squirrel stable stage star station statue stone storm stove stream street sugar "
    "summit swan table tailor temple thread throne thunder ticket tiger timber tower trail train tree trumpet tulip "
    "tunnel turtle valley vase velvet village violin wagon wallet walnut water whale wheat wheel whistle willow window "
    "wing winter wolf wool yard zebra"
)
VERBS = read_words(
    "passes follows finds leaves carries watches keeps paints repairs visits remembers describes crosses measures "
    "lifts covers counts draws hides moves opens sells shows studies touches turns washes weighs"
)
NOISE = (
    "The meadow is green. The lake is still. A bird sits on the fence. Soon it flies away. The clouds move on, and "
    "nothing else happens here."
)


@cache
def list_keys() -> tuple[str, ...]:
    return tuple(f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS)


def draw_keys(random: Random, number: int) -> list[str]:
    """Returns different keys. Beyond the pairs of one adjective and a noun, keys have two adjectives."""
    keys = list_keys()
    if number <= len(keys) // 2:
        return random.sample(keys, number)
    drawn: dict[str, None] = dict.fromkeys(random.sample(keys, len(keys)))
    while len(drawn) < number:
        drawn[f"{random.choice(ADJECTIVES)}-{random.choice(keys)}"] = None
    return list(drawn)[:number]


def draw_words(random: Random, number: int) -> list[str]:
    """Returns different words: plain ones as far as they reach, then compounds."""
    plain = list(dict.fromkeys([*ADJECTIVES, *NOUNS]))
    if number <= len(plain):
        return random.sample(plain, number)
    return [*random.sample(plain, len(plain)), *draw_keys(random, number - len(plain))]


def draw_number(random: Random) -> str:
    return str(random.randrange(10**6, 10**7))


def draw_uuid(random: Random) -> str:
    return str(UUID(int=random.getrandbits(128), version=4))


def draw_sentence(random: Random) -> str:
    """Returns a sentence that says nothing, unlike its neighbours."""
    draw, num_adjectives, num_nouns = random.random, len(ADJECTIVES), len(NOUNS)  # as random.choices does, but quicker
    first, second = ADJECTIVES[int(draw() * num_adjectives)], ADJECTIVES[int(draw() * num_adjectives)]
    subject, target, place = (NOUNS[int(draw() * num_nouns)] for _ in range(3))
    return f"The {first} {subject} {random.choice(VERBS)} the {second} {target} near the {place}."


Metric = Literal[
    "all", "part", "line", "none", "set_f1", "token_f1", "chinese_f1", "character_f1", "rouge_sets", "rouge_chinese",
    "rouge_lines", "classes", "share_right", "code_similarity", "sentence", "choice", "debug", "first_integer",
    "whole_word", "name", "last_integer", "first_number", "first_numbers", "ordered_copy", "calls", "plain_part",
    "ndcg",
]  # fmt: skip


Span = tuple[int, int]


@dataclass(frozen=True)
class Sample:
    """What a model is asked. `answer_prefix` stands after the assistant's header, and the model goes on from there.
    `with_template`: the content is a user's message; or `messages` are a conversation, of roles and texts, of which the
    content is then a written copy for models without a template. Spans count characters of `content`: `context` is the
    haystack, where it can be parted from the question, and `evidence` is what the answer is found in, where that is
    known. `groups`: what else its score is summed up by, such as the difficulty."""

    task: str
    content: str
    references: tuple[str, ...]
    metric: Metric
    max_new_tokens: int
    answer_prefix: str = ""
    evidence: tuple[Span, ...] = ()
    with_template: bool = True
    first_line: bool = False  # only the answer's first line counts
    facts: Mapping[str, Any] = field(default_factory=dict)  # what is reported with it
    context: Span | None = None
    messages: tuple[tuple[str, str], ...] = ()
    groups: Mapping[str, str] = field(default_factory=dict)
    has_one_answer: bool = False  # one right text: teacher forcing says something about it
    number: int = 0  # its place in the files that it was read from


def fill_up(sample: Sample, text: str) -> Sample:
    """The sample with more text at its context's end, after all evidence."""
    assert sample.context is not None, "a sample from a seed can be parted from its question"
    begin, end = sample.context
    content = sample.content[:end] + text + sample.content[end:]
    return replace(sample, content=content, context=(begin, end + len(text)))


# Takes the number of units of haystack.
Draft = Callable[[int], Sample]


@dataclass(frozen=True)
class Task:
    """Makes drafts from a random source; `length` is the number of tokens that the sample shall have. Teacher-forced
    scores mean something only where there is one right order of one right answer. `is_of_files`: the user's files
    decide how long a sample is at least."""

    name: str
    make: Callable[[Random, int], Draft]
    has_one_answer: bool = True
    is_of_files: bool = False
