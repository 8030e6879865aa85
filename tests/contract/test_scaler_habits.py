"""Calls of the loss scaler that are left over from a plain loop are refused, each with what to remove."""

from __future__ import annotations

import traceback

import pytest
import torch
from torch import nn

import pliant

STEP = "remove scaler.scale, scaler.unscale_, scaler.step and scaler.update from the loop"
OWN = "scaler.unscale_, scaler.step or scaler.update was called by the script: remove all three"
LEFT_OVER = {
    "run.backward(scaler.scale(loss)); run.step()": "write run.backward(loss) with the plain loss",
    "run.backward(scaler.scale(loss) / 2); run.step()": "write run.backward(loss) with the plain loss",
    "scaler.scale(loss).backward(); run.step()": "replace loss.backward() by run.backward(loss)",
    "run.backward(loss); scaler.unscale_(optimizer); run.step()": OWN,
    "run.backward(loss); run.step(); scaler.unscale_(optimizer)": OWN,
    "run.backward(loss); scaler.step(optimizer); run.step()": "optimizer.step() was called by the script",
    "run.backward(loss); run.step(); scaler.update()": STEP,
    "run.backward(loss); scaler.unscale_(optimizer); scaler.update(); run.step()": "clipping is join(clip_norm=…)",
}


@pytest.mark.parametrize("habit", LEFT_OVER)
def test_what_the_scaler_is_asked_out_of_habit_is_refused(habit: str) -> None:
    samples = [(torch.ones(4), torch.ones(1)) for _ in range(32)]
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(Exception) as refused, pliant.join(model, optimizer, batch=8, scaler=scaler) as run:
        for _ in run.epochs(3):
            for x, y in run.batches(samples, size=4):
                loss = nn.functional.mse_loss(model(x), y)
                exec(habit, {"run": run, "loss": loss, "scaler": scaler, "optimizer": optimizer})
    assert LEFT_OVER[habit] in "".join(traceback.format_exception(refused.value))
