"""A sweep makes the optimizer's own update, and its own next one for a look-ahead, whatever the settings are."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pliant.tensors import passes, sweep
from pliant.tensors.gradients import FlatGradients
from pliant.tensors.lookahead import LookAhead
from pliant.tensors.sweep import Agreement, LookAheadSweep, Sweeps, UpdateSweep, sweeps_for

KINDS = (SGD, Adam, AdamW)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
COMPILED = pytest.mark.skipif(passes._sweep is None, reason="the extension is not built here")


@dataclass
class Case:
    """An optimizer that has made some updates, and the gradients of its next one."""

    parameters: list[Parameter]
    optimizer: Optimizer
    present: int
    """bitmap of the parameters that have a gradient"""
    factor: float
    seed: int

    def gradients(self, more: int = 0) -> FlatGradients:
        """Flat buffers with numbers in them; as often as it is called the same."""
        flat, generator = FlatGradients(self.parameters), torch.Generator().manual_seed(self.seed + 1 + more)
        for view in flat.views:
            if view is not None:
                view.copy_(torch.randn(view.shape, generator=generator, dtype=torch.float64))
        return flat

    def copies(self) -> dict[int, Tensor]:
        return {
            index: torch.full_like(p, math.nan, memory_format=torch.preserve_format).detach()
            for index, p in enumerate(self.parameters)
        }

    def hyper(self, rate: float = 1.0) -> list[dict[str, Any]]:
        return [{"lr": group["lr"] * rate} for group in self.optimizer.param_groups]

    def step(self, gradients: FlatGradients) -> None:
        """What is done without sweeps."""
        for index, p in enumerate(self.parameters):
            view = gradients.views[index]
            p.grad = view if view is not None and self.present >> index & 1 else None
        for flat in gradients.flats:
            flat.mul_(self.factor)
        self.optimizer.step()
        for p in self.parameters:
            p.grad = None

    def sweeps(self) -> Sweeps:
        made = sweeps_for(self.optimizer, self.parameters)
        assert made is not None
        return made

    def update(self, gradients: FlatGradients, *, clears: bool = False) -> UpdateSweep:
        return UpdateSweep(gradients.views, self.present, self.hyper(), self.factor, clears)

    def settle(self, gradients: FlatGradients, *, clears: bool = False) -> bool:
        return self.sweeps().settle(self.update(gradients, clears=clears))

    def state(self) -> list[Tensor]:
        """All that the optimizer keeps, in order."""
        found = [self.optimizer.state.get(p, {}) for p in self.parameters]
        return [state[name] for state in found for name in sorted(state) if isinstance(state[name], Tensor)]


rates = st.sampled_from([0.1, 0.01, 0.003])
decays = st.sampled_from([0.0, 0.0, 0.1, 0.013])
shapes = st.sampled_from([(), (1,), (3,), (0, 2), (5, 7), (64,), (33, 65), (2, 3, 4, 5), (1, 8, 1, 3)])


@st.composite
def settings_of(draw: st.DrawFn, kind: type[Optimizer]) -> dict[str, Any]:
    """Keywords for an optimizer or one of its groups."""
    rate: float | Tensor = draw(rates)
    if draw(st.integers(0, 5)) == 0:
        rate = torch.tensor(rate, dtype=draw(st.sampled_from([torch.float32, torch.float64])))
    made = {"lr": rate, "weight_decay": draw(decays), "maximize": draw(st.booleans())}
    if kind is SGD:
        momentum = draw(st.sampled_from([0.0, 0.9, 0.5]))
        nesterov = momentum > 0 and draw(st.booleans())
        dampening = 0.0 if nesterov else draw(st.sampled_from([0.0, 0.3, 1.0]))
        return {**made, "momentum": momentum, "nesterov": nesterov, "dampening": dampening}
    betas = draw(st.sampled_from([(0.9, 0.999), (0.3, 0.9), (0.0, 0.5)]))
    return {**made, "betas": betas, "eps": draw(st.sampled_from([1e-8, 1e-3])), "amsgrad": draw(st.booleans())}


def parameter(shape: tuple[int, ...], dtype: torch.dtype, layout: str, generator: torch.Generator) -> Parameter:
    values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    if layout == "channels_last" and values.dim() == 4:
        values = values.contiguous(memory_format=torch.channels_last)
    if layout == "transposed" and values.dim() > 1:
        values = values.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "gaps" and values.dim() > 1:
        values = torch.cat([values, values], -1)[..., : shape[-1]]
    return Parameter(values)


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Case:
    kind, seed = draw(st.sampled_from(KINDS)), draw(st.integers(0, 1000))
    generator = torch.Generator().manual_seed(seed)
    layouts = st.sampled_from(["plain", "plain", "channels_last", "transposed", "gaps"])
    groups = draw(st.lists(st.lists(st.tuples(shapes, layouts), min_size=1, max_size=3), min_size=1, max_size=2))
    dtype = draw(st.sampled_from(dtypes))
    parameters = [[parameter(shape, dtype, layout, generator) for shape, layout in group] for group in groups]
    maker: Any = kind
    optimizer = maker([{"params": each, **draw(settings_of(kind))} for each in parameters])
    flat = list(itertools.chain.from_iterable(parameters))
    everything = (1 << len(flat)) - 1
    case = Case(flat, optimizer, everything, draw(st.sampled_from([1.0, 0.37, 1.9])), seed)
    for more in range(draw(st.integers(1, 3))):
        case.present = draw(st.integers(0, everything)) | (everything if more == 0 else 0)
        case.step(case.gradients(7 + more))
    case.present = draw(st.integers(0, everything))
    return case


def twins(case: Case, count: int = 2) -> Iterator[Case]:
    """Copies that share nothing."""
    for _ in range(count):
        parameters, optimizer = copy.deepcopy((case.parameters, case.optimizer))
        yield Case(parameters, optimizer, case.present, case.factor, case.seed)


def same(ones: list[Any], others: list[Any]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that several are cut from what an example has."""
    monkeypatch.setattr(passes, "_PIECE", 50)


def without_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "_kernel", lambda method, dtype: None)


# -- the update


@given(cases())
def test_an_update_is_that_of_the_optimizer(case: Case) -> None:
    swept, stepped = twins(case)
    before = [p.detach().clone() for p in swept.parameters]
    assert swept.settle(swept.gradients())
    stepped.step(stepped.gradients())
    dtype = swept.parameters[0].dtype
    if dtype is not torch.bfloat16:
        # Of numbers of 16 bits torch rounds the last few otherwise.
        assert same(swept.state(), stepped.state())
    if sweep.agreement(type(swept.optimizer), dtype) is Agreement.EXACT:
        assert same(swept.parameters, stepped.parameters)
    for mine, theirs, plain in zip(swept.parameters, stepped.parameters, before, strict=True):
        # A few units in the last place of the weights, or of the step where that is larger.
        size = max(largest(plain), largest(theirs.detach() - plain))
        assert largest(mine.detach().double() - theirs.detach().double()) <= 6 * torch.finfo(dtype).eps * size


@given(cases())
def test_the_optimizers_state_stays_true(case: Case) -> None:
    """The same tensors, the same counters: what ``state_dict`` says is what has happened."""
    (swept,) = twins(case, 1)
    kept, places = swept.state(), [p.data_ptr() for p in swept.parameters]
    counted = [state.get("step") for state in (swept.optimizer.state.get(p, {}) for p in swept.parameters)]
    expected = [None if count is None else count + (case.present >> index & 1) for index, count in enumerate(counted)]
    assert swept.settle(swept.gradients())
    assert all(one is other for one, other in zip(kept, swept.state(), strict=True))
    assert counted == expected
    assert places == [p.data_ptr() for p in swept.parameters]


@given(cases(), st.booleans())
def test_gradients_are_cleared_only_where_that_is_asked_for(case: Case, clears: bool) -> None:
    (swept,) = twins(case, 1)
    gradients = swept.gradients()
    assert swept.settle(gradients, clears=clears)
    assert clears == all(not bool(flat.any()) for flat in gradients.flats if flat.numel()) or not gradients.flats
    if not clears:
        assert same(gradients.flats, swept.gradients().flats)


@given(cases())
def test_updates_follow_each_other(case: Case) -> None:
    """Many of them: float64 stays within 1e-12 of the optimizer's."""
    swept, stepped = twins(case)
    for more in range(6):
        assert swept.settle(swept.gradients(more))
        stepped.step(stepped.gradients(more))
    if case.parameters[0].dtype is torch.float64:
        for mine, theirs in zip(swept.parameters, stepped.parameters, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_the_first_update_is_the_optimizers() -> None:
    """It makes the state. Where there is none, a sweep makes that one, too."""
    for kind, expected in ((SGD, True), (AdamW, False)):
        p = Parameter(torch.ones(3))
        sweeps = sweeps_for(kind([p], lr=0.1), [p])
        assert sweeps is not None and sweeps.settle(UpdateSweep([torch.ones(3)], 1, [{}])) is expected
        assert bool((p != 1.0).all()) is expected
    p = Parameter(torch.ones(3))
    sweeps = sweeps_for(SGD([p], lr=0.1, momentum=0.9), [p])
    assert sweeps is not None and not sweeps.settle(UpdateSweep([torch.ones(3)], 1, [{}]))


def test_autograd_sees_that_weights_were_changed() -> None:
    p = Parameter(torch.ones(3))
    sweeps = sweeps_for(SGD([p], lr=0.1), [p])
    assert sweeps is not None
    loss = (p * p).sum()
    sweeps.settle(UpdateSweep([torch.ones(3)], 1, [{}]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- the look-ahead


@given(cases(), st.booleans())
def test_the_look_ahead_point_is_where_an_update_would_lead(case: Case, parked: bool) -> None:
    ahead, settled = twins(case)
    plain, state = [p.detach().clone() for p in ahead.parameters], [kept.clone() for kept in ahead.state()]
    gradients, copies = ahead.gradients(), ahead.copies()
    if parked:
        for index, kept in copies.items():
            kept.copy_(gradients.views[index])
    own = None if parked else gradients.views
    ahead.sweeps().ahead(LookAheadSweep(copies, ahead.present, ahead.hyper(), own, ahead.factor))
    assert settled.settle(settled.gradients())
    assert same(ahead.parameters, settled.parameters)
    assert same(list(copies.values()), plain)
    assert same(ahead.state(), state)


@given(cases((torch.float64,)), st.booleans())
def test_it_is_that_of_the_formula(case: Case, contributed: bool) -> None:
    """ŵ = w − η(μu + ḡ), and the same for Adam, as ``LookAhead`` computes it."""
    ahead, peeked = twins(case)
    present = case.present if contributed else None
    copies = ahead.copies()
    ahead.sweeps().ahead(LookAheadSweep(copies, present, ahead.hyper(0.5), ahead.gradients().views, 0.3))
    # A rate that is a tensor is computed with in its own precision, as the optimizer does.
    near = 1e-6 if any(isinstance(group["lr"], Tensor) for group in case.optimizer.param_groups) else 1e-12
    lookahead = LookAhead(peeked.optimizer, peeked.parameters)
    lookahead.park(peeked.gradients().views if contributed else None, case.present, 0.3)
    lookahead.go(peeked.hyper(0.5))
    for mine, theirs in zip(ahead.parameters, peeked.parameters, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=near, atol=near)


@pytest.mark.parametrize("kind", KINDS)
def test_before_the_first_update_it_is_that_of_a_new_optimizer(kind: Any) -> None:
    settings: dict[str, Any] = {"momentum": 0.9, "nesterov": True} if kind is SGD else {"amsgrad": True}
    gradient, looking, stepped = torch.randn(70), Parameter(torch.ones(70)), Parameter(torch.ones(70))
    optimizer = kind([looking], lr=0.1, **settings)
    sweeps, copies = sweeps_for(optimizer, [looking]), {0: torch.zeros(70)}
    assert sweeps is not None
    sweeps.ahead(LookAheadSweep(copies, None, [{}]))
    assert torch.equal(looking, torch.ones(70)) and torch.equal(copies[0], looking)
    sweeps.ahead(LookAheadSweep(copies, 1, [{}], [gradient]))
    stepped.grad = gradient
    kind([stepped], lr=0.1, **settings).step()
    torch.testing.assert_close(looking, stepped, rtol=1e-12, atol=1e-12)
    assert torch.equal(copies[0], torch.ones(70)) and not optimizer.state


@given(cases(), st.sampled_from([None, 0, 3, 5, 63]), st.booleans(), st.booleans())
def test_both_in_one_are_one_after_the_other(case: Case, own: int | None, away: bool, parked: bool) -> None:
    """Also where the copies hold the plain weights, and the model something else: maybe the parked gradients."""
    once, twice = twins(case)
    found: list[list[Tensor]] = []
    for each in (once, twice):
        gradients, copies, mine = each.gradients(), each.copies(), each.gradients(1)
        is_away = away and each is once
        with torch.no_grad():
            for index, p in enumerate(each.parameters):
                if is_away:
                    copies[index].copy_(p)
                (p if is_away else copies[index]).copy_(mine.views[index])
        update = each.update(gradients, clears=True)
        step = LookAheadSweep(copies, own, each.hyper(0.7), None if parked else mine.views, 0.9)
        if each is once:
            assert each.sweeps().settle_and_look_ahead(update, step, away=away)
        else:
            assert each.sweeps().settle(update)
            each.sweeps().ahead(step)
        found.append([*each.parameters, *each.state(), *copies.values(), *gradients.flats])
    assert same(*found)


@given(cases(), st.booleans())
def test_an_update_may_lead_back_to_the_model(case: Case, clears: bool) -> None:
    """From the look-ahead point: the plain weights are in the copies."""
    away, here = twins(case)
    copies, gradients = away.copies(), away.gradients()
    with torch.no_grad():
        for index, p in enumerate(away.parameters):
            copies[index].copy_(p)
            p.fill_(math.nan)
    assert away.sweeps().settle(away.update(gradients, clears=clears), copies)
    assert here.settle(here.gradients())
    assert same([*away.parameters, *away.state()], [*here.parameters, *here.state()])
    assert not clears or not any(bool(flat.any()) for flat in gradients.flats)


# -- the ways of making a pass


@COMPILED
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", [passes._SGD, passes._ADAM])
def test_the_compiled_loops_are_used(method: int, dtype: torch.dtype) -> None:
    assert passes._kernel(method, dtype) is not None


@COMPILED
@given(cases(), st.sampled_from([None, 5, 63]), st.sampled_from([1, 3]))
def test_they_give_the_bits_of_torchs_operators(case: Case, own: int | None, threads: int) -> None:
    compiled, composed = twins(case)
    found: list[list[Tensor]] = []
    for each in (compiled, composed):
        with pytest.MonkeyPatch.context() as patch:
            if each is composed:
                without_kernel(patch)
            copies, gradients = each.copies(), each.gradients()
            step = LookAheadSweep(copies, own, each.hyper(0.7), each.gradients(1).views, 0.9)
            torch.set_num_threads(threads)
            assert each.sweeps().settle_and_look_ahead(each.update(gradients, clears=True), step)
            torch.set_num_threads(1)
        found.append([*each.parameters, *each.state(), *copies.values(), *gradients.flats])
    assert same(*found)


@COMPILED
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_large_tensors_by_several_threads_too(kind: Any, dtype: torch.dtype) -> None:
    """Large enough that the compiled loops divide them among threads."""
    generator = torch.Generator().manual_seed(0)
    parameters = [parameter((count,), dtype, "plain", generator) for count in (700_001, 5, 300_000)]
    settings = {"momentum": 0.9} if kind is SGD else {"amsgrad": True}
    case = Case(parameters, kind(parameters, lr=0.01, weight_decay=0.1, **settings), 0b111, 0.7, 1)
    case.step(case.gradients(1))
    found: list[list[Tensor]] = []
    for each, threads in zip(twins(case, 3), (1, 3, 1), strict=True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(passes, "_PIECE", 1 << 17)
            if found[1:]:
                without_kernel(patch)
            torch.set_num_threads(threads)
            assert each.settle(each.gradients())
            torch.set_num_threads(1)
        found.append([*each.parameters, *each.state()])
    assert same(found[0], found[1]) and same(found[0], found[2])


@given(cases(), st.sampled_from([1.0, 0.25, 1 / 3]), st.booleans(), st.booleans())
def test_parking_scales_copies_and_measures(case: Case, factor: float, copies: bool, compiled: bool) -> None:
    gradients, expected = case.gradients(), case.gradients()
    for flat in expected.flats:
        flat.mul_(factor)
    square = sum(float(flat.double().square().sum()) for flat in expected.flats)
    views = [view for view in gradients.views if view is not None]
    kept = list(case.copies().values()) if copies else None
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(passes, "_sweep", None)
        found = passes.park(views, kept, factor=factor)
    assert found == pytest.approx(square, rel=1e-2 if case.parameters[0].dtype is torch.bfloat16 else 1e-5)
    assert same(gradients.flats, expected.flats)
    assert kept is None or same(kept, views)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bad_gradient_shows_in_the_norm(dtype: torch.dtype, bad: float) -> None:
    gradient = torch.ones(100, dtype=dtype)
    gradient[77] = bad
    assert not math.isfinite(passes.park([gradient]))
    assert not math.isfinite(passes.park([gradient], [torch.empty_like(gradient)], factor=0.5))


@COMPILED
def test_the_norm_does_not_depend_on_threads() -> None:
    gradient = torch.randn(1_000_003)
    norms: set[float] = set()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        norms.add(passes.park([gradient], [torch.empty_like(gradient)]))
    torch.set_num_threads(1)
    assert len(norms) == 1


# -- what is left to the optimizer


def begun(kind: Any = SGD, **settings: Any) -> tuple[Any, Sweeps]:
    """An optimizer after its first update, and its sweeps."""
    p = Parameter(torch.ones(4))
    p.grad = torch.ones(4)
    optimizer = kind([p], lr=0.1, **settings)
    optimizer.step()
    sweeps = sweeps_for(optimizer, [p])
    assert sweeps is not None
    return optimizer, sweeps


def settles(sweeps: Sweeps) -> bool:
    done = sweeps.settle(UpdateSweep([torch.ones(4)], 1, [{}]))
    assert done is sweeps.settles
    return done


class OwnSgd(SGD):
    """A user's."""


def test_other_optimizers_are_not_swept() -> None:
    p = Parameter(torch.ones(4))
    assert sweeps_for(OwnSgd([p], lr=0.1), [p]) is None
    assert sweeps_for(RMSprop([p]), [p]) is None


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_are_the_optimizers(kind: Any) -> None:
    optimizer, sweeps = begun(kind)
    assert settles(sweeps)
    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    ):
        handle = register(lambda *_: None)
        assert not settles(sweeps)
        handle.remove()
        assert settles(sweeps)


def test_but_for_pliants_own() -> None:
    optimizer, _ = begun()

    def mine(*_: Any) -> None: ...

    sweeps = sweeps_for(optimizer, optimizer.param_groups[0]["params"], lambda hook: hook is mine)
    assert sweeps is not None
    for register in (optimizer.register_step_pre_hook, register_optimizer_step_pre_hook):
        own, other = register(mine), register(lambda *_: None)
        assert not settles(sweeps)
        other.remove()
        assert settles(sweeps)
        own.remove()


@pytest.mark.parametrize(
    ("kind", "flag"),
    [(SGD, "foreach"), (SGD, "fused"), (SGD, "differentiable"), (Adam, "foreach"), (AdamW, "fused")],
)
def test_another_implementation_that_was_asked_for_is_used(kind: Any, flag: str) -> None:
    _, sweeps = begun(kind, **({flag: True} if flag != "differentiable" else {}))
    if flag == "differentiable":
        sweeps._optimizer.param_groups[0][flag] = True
    assert not settles(sweeps)
    for other in ("foreach", "fused"):
        _, sweeps = begun(kind, **{other: False})
        assert settles(sweeps)


@pytest.mark.parametrize("name", ["grad_scale", "found_inf"])
def test_scaling_inside_is_the_optimizers(name: str) -> None:
    optimizer, sweeps = begun()
    setattr(optimizer, name, torch.ones(()))
    assert not settles(sweeps)


def test_numbers_that_are_tensors_are_the_optimizers() -> None:
    optimizer, sweeps = begun()
    optimizer.param_groups[0]["weight_decay"] = torch.tensor(0.1)
    assert not settles(sweeps)


def test_a_step_of_the_scripts_own_is_called() -> None:
    optimizer, sweeps = begun()
    optimizer.step = lambda: None
    assert not settles(sweeps)
    StepLR(begun()[0], 1)
    optimizer, sweeps = begun()
    inner = optimizer.step
    optimizer.step = lambda: inner()
    assert not settles(sweeps)


def test_a_scheduler_takes_a_sweep_for_a_step() -> None:
    """Warnings are errors: it would say that the optimizer was not called."""
    p = Parameter(torch.ones(4))
    optimizer = SGD([p], lr=0.1)
    scheduler = StepLR(optimizer, 1, 0.5)
    sweeps = sweeps_for(optimizer, [p])
    assert sweeps is not None and settles(sweeps)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_formula_that_is_another_one_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a torch release that has changed its optimizers."""
    real = passes.adam_numbers
    monkeypatch.setattr(passes, "adam_numbers", lambda group, *given, **how: real({**group, "eps": 0.1}, *given, **how))
    sweep.agreement.cache_clear()
    try:
        assert sweep.agreement(AdamW, torch.float64) is Agreement.NONE
        _, sweeps = begun(AdamW)
        assert not settles(sweeps)
    finally:
        sweep.agreement.cache_clear()


def test_finding_out_leaves_random_numbers_and_hooks_alone() -> None:
    called: list[Any] = []
    handle = register_optimizer_step_pre_hook(lambda *given: called.append(given))
    before = torch.get_rng_state()
    sweep.agreement.cache_clear()
    passes._kernel.cache_clear()
    assert {sweep.agreement(kind, torch.float64) for kind in KINDS} <= {Agreement.EXACT, Agreement.CLOSE}
    handle.remove()
    assert not called and torch.equal(before, torch.get_rng_state())
