"""A network as a function of one flat vector.

Everything the algorithms do (noise, KL, steps, averages) is arithmetic on flat vectors w of length d; only here does a
vector become a network f_w again. `Layout` knows the names, shapes and places of the parameters in a vector; `Network`
calls a module with the weights of a vector.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from . import rng
from .arguments import checks_arguments
from .errors import InputError, shortened
from .models.bodies import copies, hold
from .models.dropout import KeyedDropout
from .models.features import LayerOutputs, Observer
from .models.outputs import OutputKey, select_output


def derived(function: Callable[[Any], Tensor], at: Any) -> tuple[Any, Tensor]:
    """Return (∇f, f) at a vector, or at a dictionary of vectors; ∇f has the structure of `at`, f is a scalar.

    On a CPU, outside of torch.func's transforms, plain autograd computes them: for some layers a derivative that will
    not be differentiated again is faster (GroupNorm's takes a quarter of the time).
    """
    leaves, structure = tree_flatten(at)
    if torch._C._functorch.peek_interpreter_stack() is not None or any(t.device.type != "cpu" for t in leaves):
        return torch.func.grad_and_value(function)(at)
    with torch.enable_grad():
        inputs = [leaf.detach().requires_grad_() for leaf in leaves]
        value = function(tree_unflatten(inputs, structure))
        gradients = torch.autograd.grad(value, inputs, materialize_grads=True)
    return tree_unflatten(gradients, structure), value.detach()


def plus(a: Tensor, factor: Tensor | float, b: Tensor, sign: int = 1) -> Tensor:
    """Return a ± factor∘b in one operation."""
    if isinstance(factor, Tensor):
        return torch.addcmul(a, factor, b, value=sign)
    return torch.add(a, b, alpha=sign * factor)


@dataclass(frozen=True)
class Layout:
    """The names and shapes of the parameters in a flat vector, in order."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def __repr__(self) -> str:
        return f"Layout({self.size:,} entries in {len(self.names)} tensors)"

    @property
    def sizes(self) -> list[int]:
        """How many entries each parameter has."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def size(self) -> int:
        """d, the length of the vector."""
        return sum(self.sizes)

    def split(self, *parts: Tensor) -> dict[str, Tensor]:
        """Return the vector [d] as named tensors; they are views, by one `split`, whose backward is one `cat`.

        The vector may come in parts, each of which ends where a parameter does.
        """
        pieces: list[Tensor] = []
        for part in parts[:-1]:
            remaining_sizes = self.sizes[len(pieces) :]
            ends = [*itertools.accumulate(remaining_sizes, initial=0)]
            pieces += part.split(remaining_sizes[: ends.index(part.shape[-1])])
        pieces += parts[-1].split(self.sizes[len(pieces) :])
        return {n: p.view(s) for n, p, s in zip(self.names, pieces, self.shapes, strict=True)}

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return named tensors as one vector [d], detached: the inverse of `split`."""
        return torch.cat([tensors[name].detach().reshape(-1) for name in self.names])


MASK = "attention_mask"  # the parameter of a module's `forward` that marks tokens with 1 and padding with 0
LIKELIHOOD = "likelihood"  # the name of the likelihood's entries in a layout


class _Draws(TorchDispatchMode):
    """Remembers whether an operation of this thread may have drawn from torch's own generators."""

    met = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in this mode, so the compiler need not be loaded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.met |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


class Network:
    """A module called with the weights of a flat vector: network(w, x) = f_w(x), [d], [batch, ...] → [batch, outputs].

    The module is copied and never changed. Frozen parameters (requires_grad False) and buffers are constants of the
    network: not learned, saved with it. Networks with equal frozen parameters share their memory (`models.bodies`).
    `tail` further entries at the vector's end are the likelihood's and start at 0. `output` is the place of the outputs
    in what the module returns, if that is not one tensor (`models.outputs`); `pad` is the token of padding, which a
    module's `attention_mask` leaves out.
    Raises InputError for a module with BatchNorm, lazy layers, TorchScript, no trainable parameter or NaN weights.
    """

    def __init__(self, module: nn.Module, tail: int = 0, output: OutputKey | None = None, pad: int | None = None):
        _check_module(module)
        self.module = copy.deepcopy(module).eval()
        named = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        if not named:
            raise InputError("The model has no trainable parameter: every requires_grad is False, or it has no layers.")
        self.layout = Layout(tuple(named), tuple(tuple(p.shape) for p in named.values()))
        self.initial = self.layout.flatten(named)
        self.tail_size = tail
        if tail:
            self.layout = Layout((*self.layout.names, LIKELIHOOD), (*self.layout.shapes, (tail,)))
            self.initial = torch.cat([self.initial, self.initial.new_zeros(tail)])
        if not torch.isfinite(self.initial).all():
            raise InputError("The model's initial weights hold NaN or infinite values; load sound weights first.")
        for p in self.module.parameters():
            p.requires_grad_(False)
        hold(self.module, named)
        self.dropout = True  # until `probe` has seen that the model never calls it
        self.activations = self.layout.size  # numbers kept per example for the backward pass, a guess until `probe`
        self.dtype = self.initial.dtype  # the type of the module's arithmetic
        self.tokens = False  # whether the module takes integers, for an embedding
        self.output, self.pad = output, pad
        self.channels_last = False  # whether the module is given images channels-last, which may be faster
        self._mask = mask_parameter(self.module)
        self._copies: dict[int, nn.Module] = {}  # by thread, because a call changes the module while it runs

    def __repr__(self) -> str:
        return shortened(f"Network({type(self.module).__name__}, {self.layout})")

    def to(
        self,
        device: torch.device | str,
        dtype: torch.dtype,
        inside: torch.dtype | None = None,
        channels_last: bool = False,
    ) -> Network:
        """Return a copy on a device with vectors of a type; `inside`, if another, is the type inside the module."""
        other = copy.copy(self)
        other.dtype, other.channels_last = inside or dtype, channels_last
        memo = copies(self.module, torch.device(device), other.dtype)
        other.module, other._copies = copy.deepcopy(self.module, memo).to(device=device, dtype=other.dtype), {}
        other.initial = self.initial.to(device=device, dtype=dtype)
        return other

    def with_tokens(self, tokens: bool, pad: int | None = None) -> Network:
        """Return a copy whose module takes integers, for an embedding, or does not; `pad` is the token of padding."""
        other = copy.copy(self)
        other.tokens, other.pad = tokens, self.pad if pad is None else pad
        return other

    def with_initial(self, vector: Tensor) -> Network:
        """Return a copy that starts at other weights [d]."""
        other = copy.copy(self)
        other.initial = vector.to(self.initial)
        return other

    @property
    def constants(self) -> dict[str, Tensor]:
        """The module's buffers and frozen parameters by name: what it holds beside the vector."""
        return {n: t for n, t in self.module.state_dict().items() if n not in self.layout.names}

    def with_constants(self, constants: Mapping[str, Tensor]) -> Network:
        """Return a copy with other buffers and frozen parameters."""
        other = copy.copy(self)
        other.module, other._copies = copy.deepcopy(self.module), {}
        other.module.load_state_dict({**other.module.state_dict(), **constants})
        hold(other.module, self.layout.names)
        return other

    def fits(self, other: Network) -> bool:
        """Return whether a module of this network may be called with the weights of another network."""
        own, others = self.constants, other.constants
        same_kind = self.layout == other.layout and own.keys() == others.keys()
        return same_kind and all(torch.equal(own[name], others[name]) for name in own)

    def __call__(self, vector: Tensor, x: Tensor, key: Tensor | None = None) -> Tensor:
        """Return f_w(x), [batch, outputs]; with a key the module is in training mode and draws its dropout from it."""
        return self.call(self.weights(vector.to(self.dtype)), x, key)

    def call(self, weights: dict[str, Tensor], x: Tensor, key: Tensor | None = None) -> Tensor:
        """Return f_w(x) for named weights of the module's type; the output has the type of the initial vector."""
        module, x = self._module_of_thread(), self.as_input(x)
        if self.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        if module.training != (key is not None):
            module.train(key is not None)
        with KeyedDropout(key) if self.dropout else nullcontext():
            return self.forward(module, weights, x).to(self.initial.dtype)

    def forward(self, module: nn.Module, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        """Return the outputs of a module with named weights, for inputs in the type that it takes.

        A module whose `forward` has a parameter `attention_mask` is told which tokens are padding (0) and which are
        not (1), as Hugging Face's are.
        """
        options = self.mask_of(x)
        return select_output(torch.func.functional_call(module, weights, (x,), options), self.output)

    def mask_of(self, x: Tensor) -> dict[str, Tensor]:
        """Return the mask of inputs by its name, if the module takes one; without padding only if it needs one."""
        if self._mask is None or (self.pad is None and self._mask.default is not inspect.Parameter.empty):
            return {}
        return {MASK: (torch.ones_like(x) if self.pad is None else x != self.pad).long()}

    def as_input(self, x: Tensor) -> Tensor:
        """Return inputs in the type that the module takes."""
        return x.to(torch.int64 if self.tokens else self.dtype)

    def _module_of_thread(self) -> nn.Module:
        """Return a copy of the module that belongs to this thread alone."""
        if torch.compiler.is_compiling() or threading.current_thread() is threading.main_thread():
            return self.module
        number = threading.get_ident()
        if number not in self._copies:
            self._copies[number] = copy.deepcopy(self.module, copies(self.module))
        return self._copies[number]

    def weights(self, *parts: Tensor) -> dict[str, Tensor]:
        """Return the module's parameters in a vector, or in its parts, by name."""
        weights = self.layout.split(*parts)
        weights.pop(LIKELIHOOD, None)
        return weights

    def tail(self, vector: Tensor) -> Tensor:
        """Return the likelihood's entries [tail_size] of a vector, or of its last part."""
        return vector[vector.shape[-1] - self.tail_size :]

    def probe(self, x: Tensor) -> Tensor:
        """Run a float32 copy of the module on a batch and return its output; remember dropout calls and activations.

        Raises InputError if the module cannot take the batch, draws random numbers of its own, or returns no tensor
        at `output`.
        """
        trial = self.to(x.device, torch.float32)
        trial.module.train()
        sizes: list[int] = []
        before = torch.random.get_rng_state()
        leaves = [m for m in trial.module.modules() if not list(m.children())]
        for leaf in leaves:
            leaf.register_forward_hook(lambda m, i, o: sizes.append(getattr(o, "numel", int)()))
        try:
            with torch.no_grad(), KeyedDropout(rng.key(0, device=x.device)) as seen, _Draws() as draws:
                out = trial.forward(trial.module, trial.weights(trial.initial), trial.as_input(x))
        except InputError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise InputError(
                f"The model cannot take a batch of shape {tuple(x.shape)}: {str(error).splitlines()[0]}"
            ) from error
        # Another thread may draw meanwhile, and attention without dropout only seems to draw: so both must be observed.
        if draws.met and x.device.type == "cpu" and not torch.equal(before, torch.random.get_rng_state()):
            raise InputError(
                "The model draws random numbers of its own, so no run of it could be repeated. Dropout by nn.Dropout, "
                "torch.nn.functional.dropout and attention is fine; set the dropout inside recurrent layers to 0, "
                "and replace AlphaDropout, RReLU and the like."
            )
        self.dropout = seen.calls + seen.attentions > 0
        self.activations = (x.numel() + sum(sizes)) // len(x)
        return out

    def features(self, vector: Tensor, x: Tensor) -> LayerOutputs:
        """Return what the module computes on the way to its outputs: its last hidden layer and feature maps."""
        observer = Observer()
        with observer.watching(self._module_of_thread()):
            self(vector, x)
        return observer.features(len(x))

    def to_module(self, vector: Tensor) -> nn.Module:
        """Return a plain module with the weights of a vector [d], in evaluation mode."""
        module = copy.deepcopy(self.module)
        module.load_state_dict({**module.state_dict(), **self.weights(vector.detach())})
        for name, p in module.named_parameters():
            p.requires_grad_(name in self.layout.names)  # frozen parameters stay frozen
        return module.eval()


def mask_parameter(module: nn.Module) -> inspect.Parameter | None:
    """Return the parameter `attention_mask` of a module's `forward`; None if it has none."""
    return inspect.signature(module.forward).parameters.get(MASK)


def _check_module(module: nn.Module) -> None:
    """Refuse a module with TorchScript, lazy layers, complex trained weights, or layers with running statistics."""
    if any(isinstance(child, torch.jit.ScriptModule) for child in module.modules()):
        raise InputError(
            "The model, or a part of it, was made by torch.jit.script or torch.jit.trace, and cannot be called with "
            "other weights than its own. Give the plain module that it was made from."
        )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise InputError(
                f"The model's '{name}' belongs to a lazy layer, which has no shape before its first call. Call the "
                "model once on an example, model(x), and then train it; or use the plain layer with its sizes."
            )
        if tensor.is_complex() and tensor.requires_grad:  # constants, such as phases, may be complex
            raise InputError(
                f"The model's '{name}' is complex ({tensor.dtype}); weights must be real. Make the layer with "
                "dtype=torch.float32, twice as wide for real and imaginary parts."
            )
    for name, child in module.named_modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            way = "model = fedabml.replace_batchnorm(model), which puts GroupNorm in its place"
        elif isinstance(child, nn.modules.instancenorm._InstanceNorm) and child.track_running_stats:
            way = "make the layer with track_running_stats=False"
        else:
            continue
        raise InputError(
            f"The model's layer '{name}' is a {type(child).__name__}: its running statistics are neither weights nor "
            f"private data, and averaging or dropping them silently spoils a federation. The one-line way out: {way}."
        )


@checks_arguments
def replace_batchnorm(module: nn.Module, groups: int = 32) -> nn.Module:
    """Return a copy of the module with every BatchNorm replaced by a GroupNorm of the same width and affine weights.

    A BatchNorm1d, which may see plain vectors, becomes a single group: a group of one feature would be its own mean.
    """
    module = copy.deepcopy(module)

    def swap(parent: nn.Module) -> None:
        for name, child in parent.named_children():
            if isinstance(child, nn.modules.batchnorm._BatchNorm):
                count = 1 if isinstance(child, nn.BatchNorm1d) else math.gcd(groups, child.num_features)
                norm = nn.GroupNorm(count, child.num_features, child.eps, affine=False)
                norm.affine, norm.weight, norm.bias = child.affine, child.weight, child.bias
                norm.train(child.training)
                setattr(parent, name, norm)
            else:
                swap(child)

    swap(module)
    return module
