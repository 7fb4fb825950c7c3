"""Compares the loss of targets, whole and in tiles, with cross-entropy over all logits, in float64; bounds its error in
bfloat16."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.byte_counter import ByteCounter
from support.levers import find_places
from support.other_thread import run_in_thread
from support.tiers import count_examples
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.flop_counter import FlopCounterMode

from ulysses_cli.plan.rows.packing import IGNORE_INDEX
from ulysses_cli.train.elementwise import operators as tile_losses
from ulysses_cli.train.elementwise.operators import Implementation, compile_once, compute_losses
from ulysses_cli.train.loss import HeadRule, Loss, Places, PlainLoss, apply_rule, compute_token_losses, measure_logits
from ulysses_cli.train.memory.tiled_loss import make_tiled_loss

HIDDEN, VOCABULARY = 6, 11


def make_case(tokens: int, seed: int, share: float = 0.7, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, VOCABULARY, (1, tokens), generator=generator)
    hidden = torch.rand(1, tokens, generator=generator) >= share
    torch.manual_seed(seed)
    return {
        "hidden": torch.randn(1, tokens, HIDDEN, generator=generator, dtype=torch.float64).to(dtype) * 3,
        "labels": labels.masked_fill(hidden, IGNORE_INDEX),
        "head": nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=dtype),
    }


def compute_reference(hidden: Tensor, labels: Tensor, head: nn.Module, rule: HeadRule) -> Tensor:
    """Returns [S] losses, by the definition of each term."""
    logits = head(hidden)[0] / rule.divisor
    if rule.softcap is not None:
        logits = rule.softcap * torch.tanh(logits / rule.softcap)
    shares = torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True)
    picked = shares.gather(-1, labels[0].clamp(min=0)[:, None])[:, 0]
    losses = -torch.log(picked)
    losses = losses if rule.token_loss is None else rule.token_loss(losses)
    losses = losses + rule.z_loss_weight * torch.log(torch.exp(logits).sum(-1)) ** 2
    return torch.where(labels[0] == IGNORE_INDEX, torch.zeros_like(losses), losses)


RULES = st.builds(
    HeadRule,
    softcap=st.sampled_from([None, 1.5]),
    divisor=st.sampled_from([1.0, 2.5]),
    z_loss_weight=st.sampled_from([0.0, 0.1]),
    token_loss=st.sampled_from([None, torch.sqrt, lambda losses: (1 - torch.exp(-losses)) ** 2 * losses]),
)


def make_loss(head: nn.Linear, rule: HeadRule, tile: int) -> Loss:
    """All targets at once where the tile is 0."""
    return make_tiled_loss(head, rule, tile) if tile else PlainLoss(head, rule)


# Some tokens are targets, all, none, or those of an answer at the end.
SHARES = st.sampled_from([0.0, 0.1, 0.7, 1.0])


@settings(max_examples=count_examples(160), deadline=None)
@given(
    st.integers(1, 23),
    st.integers(0, 30),
    RULES,
    st.integers(0, 99),
    SHARES,
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_loss_and_gradients(
    tokens: int, tile: int, rule: HeadRule, seed: int, share: float, is_answer: bool, picks: bool, is_weighted: bool
) -> None:
    case = make_case(tokens, seed, share)
    hidden, labels, head = case["hidden"].requires_grad_(), case["labels"], case["head"]
    if is_answer:
        labels = torch.where(torch.arange(tokens) < tokens * (1 - share), IGNORE_INDEX, labels.clamp(min=0))
    expected = compute_reference(hidden, labels, head, rule)
    loss, places, given = make_loss(head, rule, tile), find_places(labels) if picks else None, ()
    if is_weighted:
        weights = torch.rand(tokens, generator=torch.Generator().manual_seed(seed)) * 3
        expected, given = expected * weights, (weights if places is None else weights[list(places.numbers)],)
    grads = torch.autograd.grad(expected.sum() * 0.3, [hidden, head.weight])
    with torch.no_grad():
        torch.testing.assert_close(loss(hidden, labels, places, *given), expected.sum(), rtol=1e-12, atol=1e-12)
    total = loss(hidden, labels, places, *given)
    assert total.requires_grad
    (total * 0.3).backward()
    torch.testing.assert_close(total, expected.sum(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(hidden.grad, grads[0], rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(head.weight.grad, grads[1], rtol=1e-11, atol=1e-12)


@settings(max_examples=count_examples(160), deadline=None)
@given(st.integers(1, 23), st.integers(0, 30), RULES, st.integers(0, 99), SHARES, st.booleans())
def test_losses_of_targets_get_weights_later(
    tokens: int, tile: int, rule: HeadRule, seed: int, share: float, picks: bool
) -> None:
    """As a preference needs them: what a target's loss counts for depends on the losses of all."""
    case = make_case(tokens, seed, share)
    hidden, labels, head = case["hidden"].requires_grad_(), case["labels"], case["head"]
    expected = compute_reference(hidden, labels, head, HeadRule(rule.softcap, rule.divisor))
    grads = torch.autograd.grad(torch.tanh(expected.sum() / 9) + expected.square().sum(), [hidden, head.weight])
    loss, places = make_loss(head, rule, tile), find_places(labels) if picks else None
    if picks:
        expected = expected[labels[0] != IGNORE_INDEX]
    losses = loss.per_token(hidden, labels, places)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    (torch.tanh(losses.sum() / 9) + losses.square().sum()).backward()
    torch.testing.assert_close(hidden.grad, grads[0], rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(head.weight.grad, grads[1], rtol=1e-11, atol=1e-12)
    with torch.no_grad():
        assert torch.equal(loss.per_token(hidden, labels, places), losses)


def count_added(_: list[int], left: list[int], right: list[int], **__: Any) -> int:
    """torch counts a product that is added to a sum only where the sum is a new tensor."""
    return 2 * left[0] * left[1] * right[1]


def count_products(run: Callable[[], Tensor]) -> int:
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: count_added}) as counter:
        run().backward()
    return int(counter.get_total_flops()) // (2 * HIDDEN * VOCABULARY)


@pytest.mark.parametrize("tile", [0, 4])
def test_the_head_computes_for_targets_alone(tile: int) -> None:
    """A sum takes three products for each target, in tiles and at once; losses in tiles take one more, since each tile
    is made again."""
    case = make_case(60, 7, share=0.2)
    hidden, labels = case["hidden"].requires_grad_(), case["labels"]
    places, loss = find_places(labels), make_loss(case["head"], HeadRule(), tile)
    assert 8 < len(places) < 20
    assert count_products(lambda: loss(hidden, labels, places)) == 3 * len(places)
    assert count_products(lambda: loss.per_token(hidden, labels, places).sum()) == (4 if tile else 3) * len(places)
    assert count_products(lambda: loss(hidden, labels)) == 3 * 60


def measure_peak(loss: Loss, hidden: Tensor, labels: Tensor, places: Places | None) -> int:
    """Nobody else needs the hidden states in the backward, as in a model."""
    start = torch.ones(1, dtype=hidden.dtype, requires_grad=True)
    with ByteCounter() as counter:
        counter.ignore(labels, start, *([] if places is None or places.index is None else [places.index]))
        made = hidden.detach() + start
        total = loss(made, labels, places)
        del made
        total.backward()
    return counter.peak


@pytest.mark.parametrize("tile", [0, 64])
def test_no_mask_takes_more_memory_than_all_tokens(tile: int) -> None:
    """Plans count all tokens as targets (train/loss.py: take_all)."""
    for dtype in (torch.float32, torch.bfloat16):
        case = make_case(512, 8, share=1.0, dtype=dtype)
        hidden, labels = case["hidden"], case["labels"]
        loss = make_loss(nn.Linear(HIDDEN, 24 * HIDDEN, dtype=dtype), HeadRule(), tile)
        most = measure_peak(loss, hidden, labels, None)
        assert measure_peak(loss, hidden, labels, find_places(labels)) == most
        sizes = []
        for step in (500, 100, 7, 3, 2):
            labels[:, ::step] = IGNORE_INDEX
            sizes.append(measure_peak(loss, hidden, labels, find_places(labels)))
        labels[:, 51:] = IGNORE_INDEX
        sizes.append(measure_peak(loss, hidden, labels, find_places(labels)))
        assert max(sizes) <= most + 8 * tile  # labels of a tile, if they are picked
        assert sizes[-1] < (0.2 if not tile else 0.9) * most


def test_a_head_with_adapters() -> None:
    """Only the adapter's weights are trained, and the loss asks for the whole head."""
    from peft import LoraConfig, get_peft_model

    case = make_case(9, 3)
    model = get_peft_model(nn.Sequential(case["head"]), LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    head = model.base_model.model[0]
    head.double()
    learning = [weight for weight in head.parameters() if weight.requires_grad]
    hidden, labels = case["hidden"].requires_grad_(), case["labels"]
    expected = torch.autograd.grad(compute_reference(hidden, labels, head, HeadRule()).sum(), [hidden, *learning])
    wholes: list[nn.Module] = []
    make_tiled_loss(head, HeadRule(), 4, wholes.append)(hidden, labels).backward()
    assert wholes == [head]
    assert len(learning) == 2
    for tensor, grad in zip([hidden, *learning], expected, strict=True):
        torch.testing.assert_close(tensor.grad, grad, rtol=1e-11, atol=1e-13)


def test_bfloat16_is_as_near_as_one_rounding() -> None:
    """Uses fifty tiles: sums in bfloat16 would lose small gradients; these sums are in float32."""
    case = make_case(400, 4, dtype=torch.bfloat16)
    hidden, head = case["hidden"], case["head"]
    exact_head = nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=torch.float64)
    exact_head.weight.data = head.weight.data.double()
    exact_hidden = hidden.double().requires_grad_()
    expected = compute_reference(exact_hidden, case["labels"], exact_head, HeadRule()).sum() / 277
    grads = torch.autograd.grad(expected, [exact_hidden, exact_head.weight])
    hidden.requires_grad_()
    total = make_tiled_loss(head, HeadRule(), 8)(hidden, case["labels"])
    assert total.dtype == torch.float32
    (total / 277).backward()
    assert abs(total.item() / 277 - expected.item()) < 2e-3 * expected.item()
    for ours, exact in ((hidden.grad, grads[0]), (head.weight.grad, grads[1])):
        assert (ours.double() - exact).norm() < 2**-8 * exact.norm()


def test_a_second_backward_is_refused() -> None:
    case = make_case(5, 5)
    total = make_tiled_loss(case["head"], HeadRule(), 2)(case["hidden"].requires_grad_(), case["labels"])
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        total.backward()


def test_the_largest_tensor_is_a_tile() -> None:
    """The largest tensor has the size of one tile, however long the row."""
    case = make_case(1000, 6)
    with ByteCounter() as counter:
        make_tiled_loss(case["head"], HeadRule(), 4)(case["hidden"].requires_grad_(), case["labels"]).backward()
    assert counter.largest == 1000 * HIDDEN * 8


def compare_with_plain(
    compute: Callable[..., Any], rule: HeadRule, tokens: int, width: int, dtype: torch.dtype, overwrites: bool = True
) -> None:
    """Losses and gradients against float64, and whether the gradient is in the logits' memory."""
    generator = torch.Generator().manual_seed(tokens)
    logits = (3 * torch.randn(tokens, width, generator=generator)).to(dtype)
    labels = torch.randint(0, width, (tokens,), generator=generator)
    labels[tokens // 3] = IGNORE_INDEX
    weights = torch.rand(tokens, generator=generator)
    exact = logits.double().requires_grad_()
    expected = compute_token_losses(exact, labels, rule)
    bound = {"rtol": 1e-6, "atol": 2e-6}
    for shares in (None, weights):
        total = expected.sum() if shares is None else (expected * shares.double()).sum()
        (grad,) = torch.autograd.grad(total, exact, retain_graph=True)
        given = logits.clone()
        losses, ours = compute(given, labels, rule, with_grad=True, weights=shares, overwrites=True)
        assert losses.dtype == torch.float32
        assert (ours.data_ptr() == given.data_ptr()) == overwrites
        torch.testing.assert_close(losses.double(), expected, **bound)
        rounding = {} if dtype == torch.float32 else {"rtol": 2**-8, "atol": 2**-24}
        torch.testing.assert_close(ours.double(), grad, **(rounding or bound))
    losses = compute(logits.clone(), labels, rule, overwrites=True)[0]
    torch.testing.assert_close(losses.double(), expected, **bound)
    kept = logits.clone()
    losses, ours = compute(kept, labels, rule, with_grad=True)
    torch.testing.assert_close(losses.double(), expected, **bound)
    assert torch.equal(kept, logits), "they are another's"
    assert ours.data_ptr() != kept.data_ptr()


FEW_RULES = [
    HeadRule(), HeadRule(divisor=2.5, softcap=1.5), HeadRule(z_loss_weight=0.1), HeadRule(token_loss=torch.sqrt),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rule", FEW_RULES, ids=["plain", "capped", "z-loss", "token loss"])
def test_blocks_of_a_tile_have_the_values_of_the_whole(
    rule: HeadRule, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_losses, "BLOCK_ELEMENTS", 100)
    for tokens, width in ((1, 7), (23, 7), (6, 333)):
        compare_with_plain(compute_losses, rule, tokens, width, dtype)


@pytest.mark.parametrize("rule", FEW_RULES, ids=["plain", "capped", "z-loss", "token loss"])
def test_a_tile_at_once(rule: HeadRule) -> None:
    """As on a GPU where nothing is compiled."""
    logits = torch.randn(23, 33, dtype=torch.float64, requires_grad=True)
    labels, weights = torch.arange(23) % 33, torch.rand(23, dtype=torch.float64)
    labels[7] = IGNORE_INDEX
    expected = compute_token_losses(logits, labels, rule)
    (grad,) = torch.autograd.grad((expected * weights).sum(), logits)
    losses, ours = compute_losses(
        logits.detach(), labels, rule, weights=weights, with_grad=True, implementation="torch"
    )
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours, grad, rtol=1e-11, atol=1e-13)


def check_compiled_tile() -> None:
    """As on a GPU, also where a backward runs it in a thread of its own."""
    compute = partial(compute_losses, implementation="compiled")
    for rule in (HeadRule(), HeadRule(divisor=2.5, softcap=1.5, z_loss_weight=0.1), HeadRule(token_loss=torch.sqrt)):
        for tokens in (1, 9, 23):
            is_compiled = tokens > 1 and rule.token_loss is None
            compare_with_plain(compute, rule, tokens, 33, torch.bfloat16, is_compiled)
        run_in_thread(compare_with_plain, compute, rule, 24, 33, torch.bfloat16, rule.token_loss is None)


def test_a_compiled_tile(compiled_graphs: list[list[Any]]) -> None:
    """Tiles of all sizes are of one kind."""
    check_compiled_tile()
    assert len(compiled_graphs) <= 2 * 3, "of each rule one with weights, one without and one without a gradient"


@pytest.mark.full
def test_a_tile_in_the_compilers_kernels() -> None:
    compile_once.cache_clear()
    check_compiled_tile()
    compile_once.cache_clear()


@pytest.mark.usefixtures("compiled_graphs")
@pytest.mark.parametrize("way", ["blocks", "compiled"])
@pytest.mark.parametrize("tile", [4, None])
@pytest.mark.parametrize("rule", [HeadRule(), HeadRule(divisor=2.5, softcap=1.5, z_loss_weight=0.1)], ids=str)
def test_targets_are_measured_beside_their_losses(
    rule: HeadRule, tile: int | None, way: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's own distribution, also with gaps between targets, and for none. Losses stay bitwise what they are."""
    monkeypatch.setattr(tile_losses, "BLOCK_ELEMENTS", 100)
    case = make_case(23, 1)
    hidden, labels, head = case["hidden"].requires_grad_(), case["labels"].clone(), case["head"]
    logits = apply_rule(head(hidden.detach())[0].detach(), rule)
    labels[0, :6] = logits[:6].argmax(-1)
    loss = PlainLoss(head, rule) if tile is None else make_tiled_loss(head, rule, tile, implementation=way)
    numbers = [0, 2, 5, 8, 9, 17]
    for places in (Places(range(23)), Places(numbers, torch.tensor(numbers)), Places([])):
        chosen = list(places.numbers)
        losses = loss.per_token(hidden, labels, places)
        found = loss.per_token(hidden, labels, places, is_measured=True)
        assert torch.equal(found[0], losses)
        own = logits[chosen]
        expected = [Categorical(logits=own).entropy(), own.mean(-1), (own.argmax(-1) == labels[0, chosen]).double()]
        torch.testing.assert_close(found[1:], torch.stack(expected), rtol=1e-12, atol=1e-12)
        assert not len(chosen) or 0 < found[3].mean() < 1
        grads = [torch.autograd.grad(torch.tanh(each.sum()), hidden)[0] for each in (losses, found[0])]
        assert torch.equal(*grads)
        with torch.no_grad():
            assert torch.equal(loss.per_token(hidden, labels, places, is_measured=True), found)


def test_of_equal_logits_the_first_is_the_likeliest() -> None:
    """As TRL has it. A head's logits in bfloat16 are often equal."""
    logits = torch.tensor([[1.0, 3.0, 3.0]] * 2, dtype=torch.bfloat16)
    assert measure_logits(logits, torch.tensor([1, 2]), 1.0, None)[2].tolist() == [1, 0]


@pytest.mark.usefixtures("compiled_graphs")
def test_preferences_learn_from_a_compiled_tile() -> None:
    """Losses that get their weights later are made again in the backward."""
    results = []
    for way in ("blocks", "compiled"):
        case = make_case(23, 1)
        loss = make_tiled_loss(case["head"], HeadRule(), 4, implementation=way)
        losses = loss.per_token(case["hidden"].requires_grad_(), case["labels"])
        torch.tanh(losses.sum() / 9).backward()
        results.append((losses.detach(), case["hidden"].grad, case["head"].weight.grad))
    for ours, right in zip(*results, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-13)


def test_a_tile_takes_no_float32_copy_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = torch.zeros(64, 4096, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int64)
    monkeypatch.setattr(tile_losses, "BLOCK_ELEMENTS", 8192)
    with ByteCounter() as counter:
        compute_losses(logits, labels, HeadRule(), with_grad=True, overwrites=True)
    assert counter.largest == logits.nbytes, "half of a float32 copy"


def test_a_head_that_keeps_its_result_is_not_overwritten() -> None:
    """A module may need in its backward what it has returned."""
    case = make_case(9, 3)
    plain = nn.Sequential(case["head"], nn.Tanh())
    hidden, labels = case["hidden"].requires_grad_(), case["labels"]
    expected = torch.autograd.grad(compute_reference(hidden, labels, plain, HeadRule()).sum(), hidden)[0]
    make_tiled_loss(plain, HeadRule(), 4)(hidden, labels).backward()
    torch.testing.assert_close(hidden.grad, expected, rtol=1e-11, atol=1e-13)
