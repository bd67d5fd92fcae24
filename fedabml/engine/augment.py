"""Augmentation: images moved and mirrored on the way into a step, for all lanes at once, by the step's own keys.

`crop` is a window of the image's size, anywhere in the image with four pixels of 0 around it; `flip` mirrors left and
right half of the time. Each sample of a minibatch has its own draw, and every minibatch new ones, so no epoch sees the
images of the last. Test data are never touched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import rng
from ..errors import InputError

MARGIN = 4  # pixels
PATH = 1 << 21  # folded into a step's key: beyond what algorithms, dropout and the noise of estimators fold into it


def check(augment: str, shape: Sequence[int]) -> None:
    """Raise InputError where samples of a shape are no images."""
    if augment != "none" and len(shape) != 3:
        raise InputError(f"augment {augment} is for images [C, H, W]; a sample here has the shape {list(shape)}.")


def augmented(x: Tensor, keys: Tensor, augment: str, black: Tensor) -> Tensor:
    """Return images [lanes, rows, C, H, W] as a step of `keys`, one per lane, sees them, with `black` around them."""
    height, width = x.shape[-2:]
    uniform = rng.uniform(keys, (x.shape[1], 3), torch.float32).unsqueeze(-1)  # [lanes, rows, 3, 1]
    down, right = torch.arange(height, device=x.device), torch.arange(width, device=x.device)
    if "flip" in augment:
        right = torch.where(uniform[..., 0, :] < 0.5, right.flip(0), right)
    if "crop" in augment:
        by = (uniform[..., 1:, :] * (2 * MARGIN + 1)).long() - MARGIN
        down, right = down + by[..., 0, :], right + by[..., 1, :]
    pixels = (down.clamp(0, height - 1).unsqueeze(-1) * width + right.clamp(0, width - 1).unsqueeze(-2)).flatten(-2)
    moved = x.flatten(-2).gather(-1, pixels.unsqueeze(-2).expand(*x.shape[:-2], -1)).view_as(x)
    if "crop" not in augment:
        return moved
    inside = ((down >= 0) & (down < height)).unsqueeze(-1) & ((right >= 0) & (right < width)).unsqueeze(-2)
    return torch.where(inside.unsqueeze(-3), moved, black)
