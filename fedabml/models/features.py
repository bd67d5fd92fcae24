"""Features that a module computes on the way to its outputs: its last hidden layer, its convolutions' channels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn


class LayerOutputs(NamedTuple):
    """The outputs of a module's layers for a batch of inputs."""

    hidden: Tensor | None  # the input of the last linear layer [batch, h]; None without one, or if it mixes examples
    maps: tuple[Tensor, ...]  # means of the rectified channels over the image [batch, c], a map for every size of image


class Observer:
    """Collects features while a module runs once."""

    def __init__(self) -> None:
        self._hidden: Tensor | None = None
        self._maps: dict[tuple[int, ...], Tensor] = {}

    def features(self, batch: int) -> LayerOutputs:
        """Return the features of a batch of so many inputs; parts whose first axis is another are left out."""
        hidden = self._hidden if self._hidden is not None and len(self._hidden) == batch else None
        if hidden is not None and hidden.ndim > 2:  # such as the steps of a sequence
            hidden = hidden.flatten(1, -2).mean(1)
        return LayerOutputs(hidden, tuple(m for m in self._maps.values() if len(m) == batch))

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Observe a module while the context is entered.

        Of the convolutions whose maps have one size, the last one counts: a stage of a residual network gives one map.
        A convolution's outputs are rectified before they are averaged, since most networks rectify them.
        """

        def linear(m: nn.Module, args: tuple[Tensor, ...]) -> None:
            self._hidden = args[0]

        def convolution(m: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            self._maps.pop(size := tuple(out.shape[2:]), None)
            self._maps[size] = out.relu().flatten(2).mean(2)

        layers = list(module.modules())
        hooks = [m.register_forward_pre_hook(linear) for m in layers if isinstance(m, nn.Linear)]
        convolutions = (m for m in layers if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d))
        hooks += [m.register_forward_hook(convolution) for m in convolutions]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
