"""Each rule about pairs of answers, by a recipe that breaks it and the message."""

import pytest
from support.recipes import VALID, load, make_shape

from ulysses_cli.plan.resolved import find_sharing_obstacle, resolve
from ulysses_cli.plan.rules import training

PAIRS = ("preference.loss=sigmoid", "data.datasets.0.type=preference")


ROPE: dict[str, dict[str, object]] = {
    "longrope": {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
    "dynamic in one kind of layer": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default"},
            "other": {"rope_type": "dynamic", "factor": 2.0},
        }
    },
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
}


@pytest.mark.parametrize(
    ("words", "changes", "obstacle"),
    [
        ((), {}, ""),
        ((), ROPE["yarn"], ""),
        ((), ROPE["longrope"], "rotary frequencies follow"),
        ((), ROPE["dynamic in one kind of layer"], "rotary frequencies follow"),
        (("model.rope_scaling={type: dynamic, factor: 2}",), {}, "rotary frequencies follow"),
        (("model.attn_implementation=cudnn",), {}, "as many keys as queries"),
        ((), {"layer_types": ["linear_attention"] * 32}, "carries a state from token to token"),
    ],
)
def test_answers_read_one_copy_of_their_prompt_where_that_is_exact(
    words: tuple[str, ...], changes: dict[str, object], obstacle: str
) -> None:
    shape = make_shape(**changes)
    recipe = load(*PAIRS, *words, text=VALID).recipe
    assert obstacle in find_sharing_obstacle(recipe, shape)
    assert bool(find_sharing_obstacle(recipe, shape)) == bool(obstacle)
    assert resolve(recipe, shape).shares_prompts == (not obstacle)
    assert not resolve(load(*PAIRS, "preference.share_prompts=false").recipe, shape).shares_prompts
    assert not resolve(load(*words).recipe, shape).shares_prompts


def test_every_rule_is_taken() -> None:
    assert len(training.PREFERENCE_RULES) == 4
