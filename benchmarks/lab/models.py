"""Small models, several seeds of each in one set of tensors.

Question  How are many seeds trained in about the time of a few?
Holds     Every parameter has the seeds as its first dimension, and nothing mixes them: seed s of a stack computes what
          a stack of s alone computes, from the same initial weights. Convolutions are matrix products over patches
          (the first layer's are cut out once, the second one's do not overlap), so one batched product does all seeds.
Source    ours: about 14 µs of processor time per sample and seed in a stack of 24, batch 32, against 70 to 90 µs for
          one seed in torch's own layers.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.lab.data import LETTERS, WINDOW, Data

KERNEL, STRIDE, GRID = 5, 2, 6  # of the first convolution: 14 × 14 pixels, one more on two sides, give 6 × 6 places
FIRST, SECOND = 16, 32  # channels
BLOCKS = (GRID // 2) ** 2
FORGETS = 0.1  # share of the newest batch in BatchNorm's running statistics: torch's default
EPS = 1e-5

Shape = tuple[tuple[int, ...], float]
"""shape of one seed's parameter, standard deviation of its initial values (0: zeros, below 0: ones)"""


def patches(images: Tensor) -> Tensor:
    """The first convolution's inputs, ordered so that each 2 × 2 block of places is in one piece."""
    cut = F.unfold(F.pad(images, (1, 0, 1, 0)), KERNEL, stride=STRIDE).transpose(1, 2)
    order = torch.arange(GRID * GRID).view(GRID // 2, 2, GRID // 2, 2).permute(0, 2, 1, 3).reshape(-1)
    return cut[:, order].contiguous()


class Stack(nn.Module):
    """A model of several seeds. ``running`` is what BatchNorm remembers: mean and variance in turn."""

    micro_batch: int | None = None
    """samples whose statistics belong together; None: a batch may be cut anywhere"""

    def __init__(self, seeds: Sequence[int], shapes: dict[str, Shape]) -> None:
        super().__init__()
        self.seeds = tuple(seeds)
        self.running: list[Tensor] = []
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        for name, (shape, deviation) in shapes.items():
            if deviation > 0:
                value = torch.stack([torch.randn(shape, generator=one) * deviation for one in generators])
            else:
                value = torch.full((len(self.seeds), *shape), 1.0 if deviation < 0 else 0.0)
            self.register_parameter(name, nn.Parameter(value))

    def weights(self, name: str) -> Tensor:
        return self.get_parameter(name)

    def scores(self, inputs: Tensor) -> Tensor:
        """(seeds, samples, …) to (seeds, samples, …, classes)."""
        raise NotImplementedError

    def losses(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of every sample: (seeds, samples)."""
        scores = self.scores(inputs)
        found = F.cross_entropy(scores.flatten(0, -2), targets.flatten(), reduction="none")
        return found.view(*targets.shape[:2], -1).mean(2)

    @torch.no_grad()
    def judged(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Per seed: the mean share of right answers, and the mean loss."""
        self.eval()
        right, losses = [], []
        for part in range(0, len(inputs), 500):
            wanted = targets[part : part + 500].expand(len(self.seeds), *targets[part : part + 500].shape)
            scores = self.scores(inputs[part : part + 500].expand(len(self.seeds), *inputs[part : part + 500].shape))
            right.append((scores.argmax(-1) == wanted).float().flatten(1).mean(1) * wanted.shape[1])
            found = F.cross_entropy(scores.flatten(0, -2), wanted.flatten(), reduction="none")
            losses.append(found.view(len(self.seeds), -1).mean(1) * wanted.shape[1])
        self.train()
        return torch.stack(right).sum(0) / len(inputs), torch.stack(losses).sum(0) / len(inputs)


class Convolutional(Stack):
    """Two convolutions and a linear layer: 5,386 parameters."""

    def __init__(self, seeds: Sequence[int], *, normalised: bool = False) -> None:
        pixels = KERNEL * KERNEL
        shapes: dict[str, Shape] = {
            "w1": ((pixels, FIRST), (2 / pixels) ** 0.5),
            "b1": ((1, FIRST), 0.0),
            "w2": ((4 * FIRST, SECOND), (2 / (4 * FIRST)) ** 0.5),
            "b2": ((1, SECOND), 0.0),
            "w3": ((BLOCKS * SECOND, 10), (1 / (BLOCKS * SECOND)) ** 0.5),
            "b3": ((1, 10), 0.0),
        }
        if normalised:
            shapes |= {"g1": ((1, FIRST), -1.0), "g2": ((1, SECOND), -1.0)}
        super().__init__(seeds, shapes)
        if normalised:
            self.micro_batch = 32
            for channels in (FIRST, SECOND):
                self.running += [torch.zeros(len(seeds), 1, channels), torch.ones(len(seeds), 1, channels)]

    def scores(self, inputs: Tensor) -> Tensor:
        stack, samples = inputs.shape[:2]
        places = inputs.reshape(stack, samples * GRID * GRID, KERNEL * KERNEL)
        hidden = self._activated(places, 1).view(stack, samples * BLOCKS, 4 * FIRST)
        hidden = self._activated(hidden, 2).view(stack, samples, BLOCKS * SECOND)
        return torch.baddbmm(self.weights("b3"), hidden, self.weights("w3"))

    def _activated(self, inputs: Tensor, layer: int) -> Tensor:
        weight, bias = self.weights(f"w{layer}"), self.weights(f"b{layer}")
        if not self.running:
            return torch.baddbmm(bias, inputs, weight).relu()
        found = torch.bmm(inputs, weight)
        mean, variance = self.running[2 * layer - 2 : 2 * layer]
        if self.training:
            now_variance, now_mean = torch.var_mean(found, dim=1, keepdim=True, correction=0)
            with torch.no_grad():
                count = found.shape[1]
                mean.lerp_(now_mean, FORGETS)
                variance.lerp_(now_variance * (count / (count - 1)), FORGETS)
            mean, variance = now_mean, now_variance
        scale = self.weights(f"g{layer}") * torch.rsqrt(variance + EPS)
        return (found * scale + (bias - mean * scale)).relu()


class Transformer(Stack):
    """A character model: two blocks of attention and two linear layers; LayerNorm has no weights of its own."""

    WIDTH, HEADS, LAYERS = 32, 2, 2

    def __init__(self, seeds: Sequence[int]) -> None:
        width, deviation = self.WIDTH, self.WIDTH**-0.5
        shapes: dict[str, Shape] = {"letters": ((LETTERS, width), 1.0), "places": ((WINDOW, width), 0.3)}
        for layer in range(self.LAYERS):
            shapes |= {
                f"attend{layer}": ((width, 3 * width), deviation),
                f"gather{layer}": ((width, width), deviation / 2),
                f"widen{layer}": ((width, 2 * width), deviation),
                f"bias{layer}": ((1, 2 * width), 0.0),
                f"narrow{layer}": ((2 * width, width), deviation / 2),
            }
        shapes |= {"out": ((width, LETTERS), deviation / 2), "prior": ((1, LETTERS), 0.0)}
        super().__init__(seeds, shapes)

    def scores(self, inputs: Tensor) -> Tensor:
        stack, samples, length = inputs.shape
        offset = torch.arange(stack).view(stack, 1, 1) * LETTERS
        hidden = F.embedding(inputs + offset, self.weights("letters").flatten(0, 1)) + self.weights("places")[:, None]
        for layer in range(self.LAYERS):
            hidden = hidden + self._attention(_normal(hidden), layer)
            flat = _normal(hidden).view(stack, samples * length, self.WIDTH)
            wide = torch.baddbmm(self.weights(f"bias{layer}"), flat, self.weights(f"widen{layer}")).relu()
            hidden = hidden + torch.bmm(wide, self.weights(f"narrow{layer}")).view_as(hidden)
        flat = _normal(hidden).view(stack, samples * length, self.WIDTH)
        return torch.baddbmm(self.weights("prior"), flat, self.weights("out")).view(stack, samples, length, LETTERS)

    def _attention(self, hidden: Tensor, layer: int) -> Tensor:
        stack, samples, length, width = hidden.shape
        flat = torch.bmm(hidden.reshape(stack, samples * length, width), self.weights(f"attend{layer}"))
        parts = flat.view(stack * samples, length, 3, self.HEADS, width // self.HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(stack, samples * length, width)
        return torch.bmm(mixed, self.weights(f"gather{layer}")).view_as(hidden)


def _normal(hidden: Tensor) -> Tensor:
    return F.layer_norm(hidden, hidden.shape[-1:])


MODELS = ("cnn", "batchnorm", "transformer")


def build(name: str, seeds: Sequence[int]) -> Stack:
    if name == "transformer":
        return Transformer(seeds)
    return Convolutional(seeds, normalised=name == "batchnorm")


def prepared(name: str, data: Data) -> Data:
    """The data as the model takes it."""
    if name == "transformer":
        return data
    return Data(
        data.name, patches(data.inputs), data.targets, patches(data.held_inputs), data.held_targets, data.classes
    )
