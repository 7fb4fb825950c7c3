"""Each rule about pairs of answers, by a recipe that breaks it and the message."""

import pytest
from support.recipes import VALID, check

from ulysses_cli.plan.rules import preferences

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


def test_every_rule_is_taken() -> None:
    assert len(preferences.RULES) == 4
