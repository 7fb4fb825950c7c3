"""Each rule about pairs of answers, by a recipe that breaks it and the message."""

import pytest
from support.recipes import VALID, check, load, make_shape

from ulysses_cli.plan.resolved import find_sharing_obstacle, resolve
from ulysses_cli.plan.rules import training

PAIRS = ("preference.loss=sigmoid", "data.datasets.0.type=preference")


def only(*overrides: str) -> str:
    problems = check(*overrides, num_processes=4, text=VALID)
    assert len(problems) == 1, [str(problem) for problem in problems]
    return str(problems[0]).strip()


def test_recipes_of_pairs_are_valid() -> None:
    for loss in ("sigmoid", "ipo", "apo_zero", "bco_pair"):
        assert check(*PAIRS, f"preference.loss={loss}", num_processes=4, text=VALID) == []
    assert check("preference.loss=robust", "preference.label_smoothing=0.1", num_processes=4, text=VALID) == []
    words = ("preference.loss=simpo", "preference.gamma=1", "preference.sft_weight=0", "lora.dropout=0.1")
    assert check(*words, num_processes=4, text=VALID) == []
    assert check(*PAIRS, "data.excess_length_strategy=drop", "lora.r=8", num_processes=4, text=VALID) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("data.datasets.0.type=preference",), "only a run with a section `preference` learns from"),
        (("preference.beta=0.2", "data.datasets.0.type=chat"), "chat holds no pairs of answers"),
        ((*PAIRS, "preference.label_smoothing=0.1"), "sigmoid has no such setting"),
        (("data.datasets.0.type=unpaired",), "write preference: {loss: kto}"),
        ((*PAIRS, "preference.loss=kto"), "preference holds no answers with labels, and kto learns from nothing else"),
        ((*PAIRS, "preference.desirable_weight=2"), "preference.desirable_weight: sigmoid has no such setting"),
        (("preference.loss=kto", "preference.sft_weight=1"), "preference.sft_weight: kto has no such setting"),
        ((*PAIRS, "preference.loss=exo_pair"), "exo_pair takes its logarithm, so it cannot be 0"),
        ((*PAIRS, "preference.discopop_tau=0.1"), "preference.discopop_tau: sigmoid has no such setting"),
        ((*PAIRS, "preference.loss=orpo", "preference.gamma=0.1"), "preference.gamma: orpo has no such setting"),
        ((*PAIRS, "data.packing=stream"), "stream cuts answers where a row ends"),
        ((*PAIRS, "data.excess_length_strategy=truncate"), "truncate would compare parts of answers"),
        ((*PAIRS, "data.attend_across_documents=true"), "the rejected answer would see the chosen one"),
        ((*PAIRS, "data.completion_only_loss=false"), "would count the prompt as a part of both answers"),
        ((*PAIRS, "data.on_rewritten_turns=split"), "an answer is one"),
        ((*PAIRS, "train.z_loss_weight=0.1"), "train.z_loss_weight: is not used"),
        ((*PAIRS, "train.token_loss=os.path:join"), "train.token_loss: is not used"),
        ((*PAIRS, "lora.dropout=0.1"), "an answer would differ from its reference by chance"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_pairs_is_refused(words: tuple[str, ...], message: str) -> None:
    assert message in only(*words)


def test_targets_of_chats_are_not_chosen_twice() -> None:
    problems = check(*PAIRS, "data.assistant_only_loss=true", num_processes=4, text=VALID)
    assert any("of a pair the answers are the targets" in str(problem) for problem in problems)


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
