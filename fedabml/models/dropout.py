"""Dropout whose masks are a function of a key, so that a network with dropout is pure and can be vmapped.

`KeyedDropout` intercepts torch's dropout functions, and the two functions of attention that drop weights inside:

    F.scaled_dot_product_attention      softmax(q kᵀ/√d + mask) is dropped before it meets v
    F.multi_head_attention_forward      nn.MultiheadAttention and all that is built of it (nn.TransformerEncoderLayer)

While the mode is active, torch's fused inference path of these layers is off, so that clients can be batched.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .. import rng


class KeyedDropout(TorchFunctionMode):
    """Gives dropout its noise from a key, so that it is pure and can be vmapped; counts dropout's calls.

    Without a key nothing is dropped.
    """

    _FUNCTIONS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)  # with 0, 1, 2, 3 axes that share their noise
    _UNITS: ClassVar[dict[Any, int]] = {function: axes for axes, function in enumerate(_FUNCTIONS)}

    def __init__(self, key: Tensor | None):
        self.key, self.calls = key, 0
        self.attentions = 0  # calls of attention, whose fused path must be off even if it drops nothing

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._UNITS:
            return self._dropout(self._UNITS[func], *args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            return self._heads(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _dropout(
        self, trailing: int, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        self.calls += 1
        if not training or p == 0 or self.key is None:
            return input
        if p == 1:
            return input * 0
        shape = [*input.shape[: input.ndim - trailing], *[1] * trailing]  # whole channels are dropped
        exact = torch.promote_types(input.dtype, torch.float32)
        keep = rng.uniform(rng.fold(self.key, self.calls), shape, exact) >= p
        return input * keep / (1 - p)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return attention with keyed dropout of its weights [..., queries, keys]."""
        self.attentions += 1
        if dropout_p == 0 or self.key is None:
            self.calls += dropout_p > 0
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
        scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        scores = scores.clamp_min(torch.finfo(scores.dtype).min)  # a row without any key would become NaN
        return self._dropout(0, scores.softmax(-1), dropout_p) @ value

    def _heads(self, *args: Any, **kwargs: Any) -> Any:
        """Run F.multi_head_attention_forward with this mode's functions in place of torch's.

        Inside of __torch_function__ the mode is off, so the calls within that function would draw from torch's own
        generator; and calling it with the mode on would only come back here.
        """
        self.attentions += 1
        call = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs)
        call.apply_defaults()
        if not call.arguments["training"] or not call.arguments["dropout_p"] or self.key is None:
            self.calls += call.arguments["dropout_p"] > 0
            call.arguments["training"] = False
            return F.multi_head_attention_forward(*call.args, **call.kwargs)
        function = _with_globals(
            F.multi_head_attention_forward,
            has_torch_function=lambda tensors: False,
            dropout=lambda weights, p: self._dropout(0, weights, p),
            scaled_dot_product_attention=self._attention,
        )
        return function(*call.args, **call.kwargs)


def _with_globals(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """Return a copy of a Python function that finds other objects under some of its global names."""
    assert isinstance(function, FunctionType) and names.keys() <= function.__globals__.keys()
    copy = FunctionType(function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
