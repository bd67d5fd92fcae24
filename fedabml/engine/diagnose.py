"""Explain what in a user's module torch cannot batch, differentiate or compile, and what to write instead."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
import traceback
from pathlib import Path
from types import FrameType

import numpy as np
import torch
from torch import nn

from ..errors import shortened
from ..vectors import Network

# Rules: a pattern in the error, or in the code that raised it (of a layer: its name), which is the last line; what that
# means, with a place for every group of the pattern; what to do.
Rule = tuple[str, str, str]
KEEP = "Have the model keep nothing from one call to the next (for running statistics: GroupNorm or LayerNorm)"
OTHERWISE = "Use other operations of torch in its place"
# fmt: off
MODEL: tuple[Rule, ...] = (
    (r"\bone_hot\([^\n]*\)$", "looks at a value",
     "Write it as labels.unsqueeze(-1) == torch.arange(classes, device=labels.device)"),
    (r"calling \.item\(\)|data-dependent control flow|looks at a tensor's value|tracing tensor|aten::equal|allclose",
     "looks at a value",
     "Choose by torch.where (no if, no assert), and leave numbers tensors (no .item(), float() or int())"),
    (r"data pointer|access storage|numpy", "takes values out of torch",
     "Stay with torch's operations on tensors (no .tolist(), .numpy() or packed sequences)"),
    (r"dynamic shape|differently shaped", "makes a tensor whose shape depends on values",
     "Keep the shape: torch.where(mask, h, 0) or h * mask"),
    (r"mutate a captured Tensor", "changes its input, or a tensor that it keeps",
     f"Leave the input as it is (x = x / 255, not x /= 255; inplace=False). {KEEP}"),
    (r"layer _?SpectralNorm$", "keeps vectors from one call to the next", "Leave spectral_norm out"),
    (r"batched == nullptr", "reads what the model kept from an earlier call", KEEP),
    (r"out-of-place operators|match the broadcast shape|work on out=",
     "writes what differs between clients into a tensor that does not",
     "Write out of place (out = out + h), or make the tensor from what goes into it (h.new_zeros(...))"),
    (r"called random operation", "draws random numbers",
     "Draw them in __init__ and register them as a buffer; for noise in every step there is nn.Dropout"),
    (r"saved tensor hooks|(?s:override the setup_context.*)\bcheckpoint(?:_sequential)?\(",
     "forgets what its gradient needs, to compute it again",
     "Leave torch.utils.checkpoint out: call the layers themselves"),
    (r"override the setup_context", "applies an autograd.Function whose forward has a ctx",
     "Give it a forward without ctx, and a setup_context"),
    (r"vmap over (\w+), but it does not have vmap support", "applies {}, an autograd.Function that cannot be batched",
     "Give it a line generate_vmap_rule = True"),
    (r"accessing `data`|detach views in-place", "cuts a tensor off", "Use .detach(), not .data or torch.tensor()"),
    (r"not implemented for aten::(lstm|gru|rnn)", "is recurrent (aten::{}), which torch cannot batch",
     "Write its steps out, by nn.GRUCell, nn.RNNCell or, for an LSTM, nn.Linear"),
    (r"not implemented for (aten::\w+)", "uses {}, which torch cannot batch", OTHERWISE),
    (r"derivative for '(\w+)' is not implemented", "uses {}, of which torch has no derivative",
     "Detach what goes into it (.detach()), or use other operations of torch in its place"),
)
COMPILER: tuple[Rule, ...] = (
    (r"No working C\+\+ compiler", "there is no C++ compiler",
     "Install one (Debian, Ubuntu: apt install g++) or name one in $CXX"),
    (r"Failed to find C compiler", "there is no C compiler",
     "Install one (Debian, Ubuntu: apt install gcc) or name one in $CC"),
    (r"Python\.h", "the header files of Python are missing", "Install them (Debian, Ubuntu: apt install python3-dev)"),
    (r"(?s)C\+\+ compile error.*?([^\n]*\berror:[^\n]*)", "the C++ compiler refuses the code ({})",
     "Install a newer compiler, or name another one in $CXX"),
    (r"too old to be supported by the triton", "this GPU is too old for Triton", "Leave compile out"),
    (r"working triton installation", "Triton is missing", "Install it (pip install triton)"),
    (r"([^\n]*)\n\s*target: (\S+)", "it cannot take the operation {1} ({0})",
     "Use other operations in the model, or leave compile out"),
)
# fmt: on


def refusal(error: BaseException, library: str = "") -> str:
    """Return where a network failed and at what (the end of a sentence), and a sentence that says what to do.

    If the model's code is a library's, the second sentence names the library: the user cannot change that code.
    """
    place, code = _locate(error) or ("it", "")
    problem, fix = _apply(MODEL, f"{error}\n{code or place}") or (f"fails ({_first_sentence(error)})", OTHERWISE)
    fix = f"This is code of the library {library}; there is nothing to change in your folder" if library else fix
    return f"{place} {problem}{f', in `{code}`' if code else ''}. {fix}."


def uncompiled(error: BaseException) -> str:
    """Return why torch.compile failed and what to do: a tool is missing, or the model cannot be compiled."""
    cause = _apply(COMPILER, str(error))
    if cause is None and _locate(error):
        return refusal(error)
    unknown = f"{type(error).__name__}: {_first_sentence(error)}", "Leave compile out to be spared this message"
    return "{}. {}.".format(*(cause or unknown))


def _apply(rules: tuple[Rule, ...], text: str) -> tuple[str, str] | None:
    """Return what the first rule that matches a text says: the meaning, and what to do."""
    for pattern, meaning, fix in rules:
        if met := re.search(pattern, text):
            return meaning.format(*(group.strip(" .") for group in met.groups())), fix
    return None


def _first_sentence(error: BaseException) -> str:
    """Return the first sentence of an error."""
    lines = [line.strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line and not line.endswith("raised:")] or [type(error).__name__]
    return shortened(lines[0].split(". ")[0].rstrip("."), 200)


_STDLIB = sysconfig.get_paths()["stdlib"]
_OURS = tuple(f"{Path(p).parent}{os.sep}" for p in (torch.__file__, np.__file__, Path(__file__).parent))


def _foreign(file: str) -> bool:
    """Return whether a file belongs to torch, numpy, Python or this package: not to the user or a library of models."""
    return file.startswith((*_OURS, "<eval_with_key>")) or (file.startswith(_STDLIB) and "site-packages" not in file)


def _locate(error: BaseException) -> tuple[str, str] | None:
    """Return where in a module an error arose, and the code there: the user's innermost line, else torch's layer."""
    frames = [*traceback.walk_tb(error.__traceback__)]
    inside = [i for i, (frame, _) in enumerate(frames) if frame.f_code is Network.call.__code__]
    if not inside:
        return None
    layer = None
    summaries = traceback.extract_tb(error.__traceback__)
    for (frame, _), summary in [*zip(frames, summaries, strict=True)][: inside[-1] : -1]:
        if not _foreign(summary.filename):
            return f"`{_name(frame)}` ({Path(summary.filename).name}:{summary.lineno})", _code(summary)
        owner = frame.f_locals.get("self")
        if layer is None and (isinstance(owner, nn.Module) or type(owner).__name__ == "SpectralNorm"):  # an old hook
            layer = f"the layer {type(owner).__name__}", ""
    return layer


def _name(frame: FrameType) -> str:
    owner, code = frame.f_locals.get("self"), frame.f_code
    if isinstance(owner, nn.Module):
        return f"{type(owner).__name__}.{code.co_name}"
    return code.co_qualname.rpartition("<locals>.")[2]


def _code(at: traceback.FrameSummary) -> str:
    """Return the expression that failed, if Python knows it, else its line."""
    code = at.line or ""
    if at.lineno and at.end_lineno and at.colno is not None and at.end_colno is not None:
        lines = [line.encode() for line in linecache.getlines(at.filename)[at.lineno - 1 : at.end_lineno]] or [b""]
        lines[-1] = lines[-1][: at.end_colno]
        lines[0] = lines[0][at.colno :]
        code = b" ".join(lines).decode()
    return shortened(" ".join(code.split()), 120)
