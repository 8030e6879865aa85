"""``evaluate``: several calls in a row, a dict of means, the outputs of single samples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import Dataset, TensorDataset

import pliant
from pliant.core.group_state import FinishedPhase
from pliant.core.tickets import Kind
from pliant.errors import PliantError
from pliant.testing.threads import Together, together
from pliant.worker.evaluation import measures, predictions

COUNT = 41


def model_of() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(4, 3).double()


def data(count: int = COUNT) -> TensorDataset:
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (count,), generator=generator), torch.arange(count))


def sums(model: nn.Module) -> Any:
    def measure(batch: Any) -> dict[str, tuple[Any, Any]]:
        x, y, _ = batch
        logits = model(x)
        hits = (logits.argmax(1) == y).sum()
        return {"accuracy": (hits, len(y)), "loss": (F.cross_entropy(logits, y, reduction="sum"), len(y))}

    return measure


def expected(model: nn.Module, samples: TensorDataset) -> dict[str, float]:
    with torch.no_grad():
        found = sums(model)(samples.tensors)
    return {name: float(total) / count for name, (total, count) in found.items()}


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("delay", [0, 1, "auto"])
def test_several_in_a_row_wherever_an_update_was_told(workers: int, delay: int | str) -> None:
    """Train and validation loss, and the outputs, after each update, in the last round of an epoch, and between two."""
    train_set, test_set = data(48), data()

    def script(handle: Together) -> Any:
        model, seen = model_of(), 0
        results: list[Any] = []

        def all_of_them(run: pliant.Run) -> None:
            train = run.evaluate(sums(model), train_set, size=6)
            test = run.evaluate(sums(model), test_set, size=5)
            outputs = run.evaluate(lambda batch: (model(batch[0]), batch[2]), test_set, size=7, gather=True)
            assert (outputs is not None) == run.is_leader
            with run.plain_weights():
                assert train == pytest.approx(expected(model, train_set), rel=1e-12)
                assert test == pytest.approx(expected(model, test_set), rel=1e-12)
                if outputs is not None:
                    assert [int(index) for _, index in outputs] == list(range(COUNT))
                    with torch.no_grad():
                        torch.testing.assert_close(
                            torch.stack([logits for logits, _ in outputs]), model(test_set.tensors[0])
                        )
            results.append((run.round, train, test))

        with handle.join(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=12, delay=delay) as run:
            for _ in run.epochs(3):
                for x, y, _ in run.batches(train_set, size=3):
                    run.backward(F.cross_entropy(model(x), y))
                    if run.step():
                        seen += 1
                        all_of_them(run)
                all_of_them(run)
        assert seen > 3
        return results

    first, *others = together(workers, script)
    assert all(other == first for other in others)
    if delay == 0 or workers == 1:
        # The last round of each epoch was seen, too.
        assert [number for number, _, _ in first].count(4) == 2


def test_with_spares_and_unequal_workers() -> None:
    """A batch below the number of workers: one of them goes along with every evaluate that it does not call."""

    def script(handle: Together) -> list[Any]:
        model, results = model_of(), []
        with handle.join(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=2, delay=1) as run:
            for _ in run.epochs(2):
                for x, y, _ in run.batches(data(20), size=1):
                    run.backward(F.cross_entropy(model(x), y))
                    if run.step():
                        for _ in range(3):
                            run.evaluate(sums(model), data(5), size=2)
                            run.evaluate(lambda batch: batch[2], data(5), size=2, gather=True)
                results.append(run.evaluate(sums(model), data(), size=5))
                results.append(run.evaluate(lambda batch: batch[2], data(5), size=2, gather=True, everywhere=True))
        return results

    first, *others = together(4, script, paces=(1.0, 1.0, 0.5, 0.3))
    assert all(other == first for other in others)
    assert [int(index) for index in first[1]] == list(range(5))


class Ragged(Dataset[Any]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> int:
        return index


def test_outputs_of_every_kind_come_back_in_the_order_of_the_dataset() -> None:
    def measure(batch: Tensor) -> dict[str, Any]:
        indices = batch.tolist()
        return {
            "half": batch.to(torch.bfloat16),
            "array": np.asarray(indices, dtype=np.int32)[:, None],
            "flags": batch > 3,
            "boxes": [torch.full((index % 3, 4), float(index)) for index in indices],
            "text": [f"sample {index}" for index in indices],
            "nested": [{"ids": list(range(index % 4)), "score": (index / 2, None)} for index in indices],
        }

    def script(handle: Together) -> list[Any]:
        model = model_of()
        with handle.join(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=4) as run:
            found = run.evaluate(measure, Ragged(), size=3, gather=True, everywhere=True)
            alone = run.evaluate(measure, Ragged(), size=3, gather=True)
            assert (alone is not None) == run.is_leader
            return found

    for outputs in together(3, script, paces=(1.0, 0.5, 0.25)):
        assert len(outputs) == 23
        for index, output in enumerate(outputs):
            assert output["half"].dtype is torch.bfloat16 and output["half"].shape == () and output["half"] == index
            assert output["array"].tolist() == [index] and output["flags"].item() is (index > 3)
            assert output["boxes"].shape == (index % 3, 4) and bool((output["boxes"] == index).all())
            assert output["text"] == f"sample {index}"
            assert output["nested"] == {"ids": list(range(index % 4)), "score": (index / 2, None)}


def test_outputs_that_this_worker_does_not_have_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from pliant.worker.loop import Worker

    whole = Worker.gathered
    monkeypatch.setattr(Worker, "gathered", lambda *a, **k: (whole(*a, **k) or [])[1::2])
    model = model_of()
    with pliant.join(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=4) as run:
        for options in ({}, {"num_workers": 2}):
            outputs = run.evaluate(lambda batch: (model(batch[0]), batch[2]), data(), size=4, gather=True, **options)
            assert [int(index) for _, index in outputs] == list(range(COUNT))
    with torch.no_grad():
        torch.testing.assert_close(torch.stack([logits for logits, _ in outputs]), model(data().tensors[0]))


def test_a_plateau_follows_the_loss_of_a_dict() -> None:
    losses = [0.5, 0.7, 0.7, 0.2]

    def script(handle: Together) -> list[float]:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.08)
        scheduler = schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        rates = []
        with handle.join(model, optimizer, batch=12, scheduler=scheduler) as run:
            for epoch in run.epochs(len(losses)):
                for x, y, _ in run.batches(data(), size=5):
                    run.backward(F.cross_entropy(model(x), y))
                    run.step()
                loss = losses[epoch]
                run.evaluate(lambda b, loss=loss: {"hits": (0, 1), "loss": (loss * len(b[1]), len(b[1]))}, data(), 7)
                run.evaluate(lambda batch: batch[1], data(), size=7, gather=True)
                rates.append(optimizer.param_groups[0]["lr"])
        return rates

    for rates in together(2, script):
        assert rates == pytest.approx([0.08, 0.04, 0.02, 0.02])


def refused(answer: Any, **options: Any) -> str:
    model = model_of()
    with pytest.raises(PliantError) as error, pliant.join(model, torch.optim.SGD(model.parameters()), batch=4) as run:
        run.evaluate(answer if callable(answer) else lambda batch: answer, data(), size=5, **options)
    return str(error.value)


def test_what_cannot_be_used_is_refused_with_the_remedy() -> None:
    assert "returned a Tensor: return (sum, count)" in refused(torch.zeros(3))
    assert "for 'loss' a float: return (sum, count)" in refused({"loss": 1.0})
    assert "for 'loss' count=-1.0" in refused({"loss": (1.0, -1)})
    assert "with the key 3" in refused({3: (1.0, 1)})
    assert "a dict of 0 means" in refused({})
    turns = iter([{"a": (1, 1)}, {"b": (1, 1)}])
    assert "{b} for one micro-batch and {a} for another" in refused(lambda batch: next(turns))
    assert "everywhere=True is for gather=True" in refused((1, 1), everywhere=True)
    assert "without a dimension of samples" in refused(torch.tensor(1.0), gather=True)
    assert "3 outputs for a micro-batch of 5 samples" in refused(torch.zeros(3, 2), gather=True)
    assert "4 outputs for a micro-batch of 5 samples" in refused({"a": [1, 2, 3, 4]}, gather=True)
    assert "measure(batch)[0] is a object" in refused([object()] * 5, gather=True)


def test_other_names_on_another_worker_are_refused_by_name() -> None:
    def script(handle: Together) -> None:
        model = model_of()
        with handle.join(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=4) as run:
            run.evaluate(lambda batch: {f"loss{handle.place}": (1.0, 1)}, data(), size=5)

    with pytest.raises(PliantError, match=r"evaluate's measure returned \{loss1\} on w1, and \{loss0\} on w0"):
        together(2, script)


def test_no_result_has_none_by_any_name() -> None:
    nothing: Any = measures.result_of(None)
    assert math.isnan(nothing) and math.isnan(nothing["loss"]) and f"{nothing:.3f}" == "nan"
    undefined: Any = measures.result_of(FinishedPhase(Kind.EVALUATE, 0, 0.5, results={"a": None, "b": 0.5}))
    assert math.isnan(undefined["a"]) and undefined["b"] == 0.5
    assert measures.result_of(FinishedPhase(Kind.EVALUATE, 0, 0.5)) == 0.5


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.complex64])
def test_tensors_keep_type_and_shape(dtype: torch.dtype) -> None:
    for shape in ((3,), (3, 0), (3, 2, 4)):
        tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
        back = predictions.decoded(predictions.encoded(tensor, 3), 3)
        assert len(back) == 3 and all(torch.equal(a, b) and a.dtype is dtype for a, b in zip(back, tensor, strict=True))
    view = torch.arange(12.0).reshape(3, 4).to(dtype).t()[:3]
    assert torch.equal(torch.stack(predictions.decoded(predictions.encoded(view, 3), 3)), view)


def test_bytes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="bytes are no"):
        predictions.decoded(predictions.encoded(torch.zeros(3), 3).replace(b"[3]", b"[4]"), 3)
    with pytest.raises(RuntimeError, match="twice"):
        predictions.in_order([(((0, 3),), predictions.encoded([1, 2, 3], 3))] * 2, 3)
    with pytest.raises(RuntimeError, match="not gathered"):
        predictions.in_order([], 3)
