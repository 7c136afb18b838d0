"""The one operator layer: a family or a token loop as an opaque torch operator with its backward.

Everything that a compiler, an exporter or ``torch.func`` must know of an operator is said here, once: schema, shapes
under fake tensors, first and higher derivatives, batching. What an operator computes is a plain differentiable function
behind it; a native kernel is another implementation of the same operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import _C, Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.library import Library
from torch.nn.attention import SDPBackend, sdpa_kernel

from innerloop.kernels.alike import is_plain
from innerloop.kernels.native import Native, Values
from innerloop.kernels.portable import Dense, Portable, full_precision
from innerloop.shapes import compute_dtype

_LIBRARY = Library("innerloop", "DEF")
_BELOW_AUTOGRAD = _C._after_autograd_keyset
_OPTIONS = (
    "Tensor? cu_seqlens", "float scale", "bool l2norm", "int chunk_size", "float[] constants", "int room", "bool native"
)  # fmt: skip


Outputs = tuple[Any, ...] | list[Any]


class Info(Protocol):
    """What ``torch.func.vmap`` says of itself."""

    batch_size: int


class Options(NamedTuple):
    """What a call may say beside its tensors."""

    cu_seqlens: Tensor | None = None
    scale: float = 1.0
    l2norm: bool = False
    chunk_size: int = 64
    constants: tuple[float, ...] = ()
    room: int = 0
    """Of packed sequences, how many tokens the longest will have: what states that grow take for each. 0 if unknown."""
    native: bool = True
    """Whether a compiled kernel may serve."""


class Operator:
    """``innerloop::name`` and ``innerloop::name_backward``, callable with raw inputs of any float dtype.

    Args:
        name: Operator name in the ``innerloop`` namespace.
        dense: What it computes on aligned, unpacked inputs in the precision of arithmetic, differentiable.
        gates: Names of its gates, in order; each may be None.
        states: Name to axes, such as ``{"S": ("G", "K", "V")}``, without the leading N; each may be None, for zeros.
        keyed: Gates that have heads of keys, and on which axis from the end; they are repeated to v's like q and k.
        grouped: Whether ``dense`` wants the heads as given, q's a multiple of k's; else q and k are repeated to v's.
        grows: Whether states with an axis S keep T more tokens after a call.
        fresh: Whether what ``dense`` returns for T > 0 shares memory neither with its inputs nor with each other.
        native: The same compiled, which serves tensors on the CPU where the library is present.
    """

    _folds = True
    """Whether a batch axis of ``vmap`` can be folded into the first axis of all inputs."""

    def __init__(
        self,
        name: str,
        dense: Dense,
        *,
        gates: Sequence[str],
        states: dict[str, tuple[str, ...]],
        keyed: dict[str, int] | None = None,
        grouped: bool = False,
        grows: bool = False,
        fresh: bool = True,
        native: Native | None = None,
    ) -> None:
        """Define the operator and its backward, and all that the framework asks of them."""
        self.name = name
        places = {list(gates).index(gate): axis for gate, axis in (keyed or {}).items()}
        self.portable = Portable(dense, len(gates), states, keyed=places, grouped=grouped, grows=grows)
        self._counts = not all(states.values())
        self._fresh = fresh
        self.native = native
        tensors = ["Tensor q", "Tensor k", "Tensor v", *(f"Tensor? {x}" for x in (*gates, *states))]
        self._define(tensors, _OPTIONS, ["Tensor"] * (1 + len(states)))

    def _define(self, tensors: Sequence[str], options: Sequence[str], outputs: Sequence[str]) -> None:
        """Define both operators by their schemas; the first option may be a tensor that has no gradient."""
        name, given, returns = self.name, ", ".join((*tensors, *options)), ", ".join(outputs)
        self._inputs, self._end = len(tensors), len(tensors) + len(options)
        self._saved = self._inputs + options[0].startswith("Tensor")
        _LIBRARY.define(f"{name}({given}) -> ({returns})")
        grads = ", ".join(f"Tensor? grad{i}" for i in range(len(outputs)))
        _LIBRARY.define(f"{name}_backward({given}, {grads}, bool[] needs) -> Tensor[]")
        self._op = getattr(torch.ops.innerloop, name).default
        self._backward = getattr(torch.ops.innerloop, f"{name}_backward").default
        self._apply = self._make_apply()
        self._register()

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Sequence[Tensor | None],
        states: Sequence[Tensor | None],
        options: Options,
    ) -> tuple[Any, ...]:
        """Return ``o`` and the states after the last token, in one flat tuple."""
        return self._call((q, k, v, *gates, *states, *options))

    def _call(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not is_plain(args):
            return self._op(*args)
        # The dispatcher would bring us here by two detours, which cost as much again as all the rest of a call.
        if torch.is_grad_enabled() and _C._any_requires_grad(*args):
            return self._apply(None, *args)
        return self._forward(*args)

    def again(self, call: Values, inputs: Sequence[Tensor | None], options: Options) -> tuple[Any, ...]:
        """Return the same from a native call prepared for such inputs, which nothing but autograd watches."""
        if call.records:
            return self._apply(call, *inputs, *options)
        native = self.native
        return native.again(call, inputs)[0]  # pyright: ignore[reportOptionalMemberAccess]

    def _register(self) -> None:
        op, backward = self.name, f"{self.name}_backward"
        _LIBRARY.impl(op, self._forward, "CompositeExplicitAutograd")
        _LIBRARY.impl(op, self._forward_autograd, "Autograd", with_keyset=True)
        _LIBRARY.impl(op, self._forward_fake, "Meta")
        _LIBRARY.impl(backward, self._gradients, "CompositeExplicitAutograd")
        _LIBRARY.impl(backward, self._backward_autograd, "Autograd", with_keyset=True)
        _LIBRARY.impl(backward, self._gradients_fake, "Meta")
        torch.library.register_vmap(f"innerloop::{op}", self._batched(self._op), lib=_LIBRARY)
        torch.library.register_vmap(f"innerloop::{backward}", self._batched(self._backward), lib=_LIBRARY)

    # Forward

    def _forward(self, *args: Any) -> tuple[Tensor, ...]:
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._outputs(args)
        return self._outputs(args)

    def _serving(self, args: Sequence[Any]) -> Any:  # ruff: ignore[any-type] - a Native where a call for one is at hand
        """Return the native kernel if it takes a call: inputs, then options, of which the last says whether it may."""
        native = self.native
        return native if native is not None and native.present and args[self._end - 1] and args[0].is_cpu else None

    def _outputs(self, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
        inputs, options = args[: self._inputs], args[self._inputs :]
        native = self._serving(args)
        if native is not None:
            return native.forward(inputs, options)[0]
        outputs = self.portable(inputs, options)
        if not self._fresh:
            outputs = _apart(outputs, inputs)
        # Autograd forbids in-place changes of an output that is a view, even of memory that nobody else has.
        return tuple([_alone(x) if x._is_view() or not x.is_contiguous() else x for x in outputs])

    def _forward_autograd(self, keyset: _C.DispatchKeySet, *args: Any) -> tuple[Tensor, ...]:
        if _in_forward_mode():
            with sdpa_kernel(SDPBackend.MATH):
                return self.portable(args[: self._inputs], args[self._inputs :])
        if torch.is_grad_enabled() and _C._any_requires_grad(*args):
            if _C._are_functorch_transforms_active():
                with enable_single_level_autograd_function():
                    return self._apply(keyset, *args)
            return self._apply(keyset, *args)
        return self._op.redispatch(keyset & _BELOW_AUTOGRAD, *args)

    def _forward_fake(self, *args: Any) -> tuple[Tensor, ...]:
        q, _, v, cu_seqlens = *args[:3], args[self._inputs]
        rows = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        out = v.new_empty((*v.shape[:2], max(q.shape[-2], v.shape[-2]), v.shape[-1]))
        room = args[self._end - 2]
        shapes = self.portable.state_shapes(args[: self._inputs], rows, after=v.shape[1], room=room)
        dtypes = self.portable.state_dtypes(compute_dtype(v.dtype))
        return out, *(v.new_empty(tuple(shape), dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True))

    # Backward

    def _make_apply(self) -> Callable[..., tuple[Tensor, ...]]:
        operator, inputs, saved = self, self._inputs, self._saved

        class Call(_SingleLevelFunction):
            # One level: functorch has already peeled its own when the Autograd key is reached.
            @staticmethod
            def forward(ctx: Any, how: _C.DispatchKeySet | Values | None, *args: Any) -> tuple[Tensor, ...]:  # ruff: ignore[any-type] - the framework's own
                ctx.rest = args[saved:]
                ctx.set_materialize_grads(False)
                left = None
                if how is None:
                    native = operator._serving(args)
                else:
                    native = operator.native if isinstance(how, Values) else None
                ctx.native = native
                if how is not None and not isinstance(how, Values):
                    # On: under torch.func the next level's derivative is recorded below this one.
                    with torch.enable_grad():
                        outputs = tuple(operator._op.redispatch(how & _BELOW_AUTOGRAD, *args))
                elif native is None:
                    outputs = operator._outputs(args)
                elif how is None:
                    outputs, left = native.forward(args[:inputs], args[inputs:], leave=True)
                else:
                    outputs, left = native.again(how, args[:inputs])
                ctx.save_for_backward(*args[:saved], *(() if left is None else (left,)))
                if operator._counts:
                    ctx.mark_non_differentiable(*(x for x in outputs if not x.is_floating_point()))
                return outputs

            @staticmethod
            def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # ruff: ignore[any-type] - the framework's own
                needs = ctx.needs_input_grad[1 : inputs + 1]
                tensors = ctx.saved_tensors  # once: a checkpoint computes them anew
                args, left = (*tensors[:saved], *ctx.rest), tensors[saved:]
                if ctx.native is not None and not torch.is_grad_enabled():
                    found = iter(ctx.native.backward(args[:inputs], args[inputs:], grads, needs, *left))
                else:
                    found = iter(operator._backward(*args, *grads, needs))
                return (
                    None,
                    *(next(found) if need else None for need in needs),
                    *(None for _ in range(operator._end - inputs)),
                )

        return Call.apply  # pyright: ignore[reportAttributeAccessIssue]

    def _gradients(self, *args: Any) -> list[Tensor]:
        native = self._serving(args)
        if native is not None:
            *grads, needs = args[self._end :]
            return native.backward(args[: self._inputs], args[self._inputs : self._end], grads, needs)
        with torch.enable_grad():
            grads = self._differentiate([None if x is None else x.detach() for x in args[: self._inputs]], args, False)
        return _apart(grads, args)

    def _backward_autograd(self, keyset: _C.DispatchKeySet, *args: Any) -> list[Tensor]:
        if (torch.is_grad_enabled() and _C._any_requires_grad(*args)) or _in_forward_mode():
            # A derivative of the backward: in the open, through the differentiable form itself. Attention's fast
            # kernels have no second derivative.
            inputs = [None if x is None else x.view_as(x) for x in args[: self._inputs]]
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                return self._differentiate(inputs, args, True)
        return self._backward.redispatch(keyset & _BELOW_AUTOGRAD, *args)

    def _differentiate(self, inputs: list[Tensor | None], args: tuple[Any, ...], create_graph: bool) -> list[Tensor]:
        options = args[self._inputs : self._end]
        *grads, needs = args[self._end :]
        wanted = [x for x, need in zip(inputs, needs, strict=True) if need and x is not None]
        for x in wanted:
            if not x.requires_grad:
                x.requires_grad_()
        with full_precision(args[0]):
            outputs = self.portable(inputs, options)
            pairs = [(x, grad) for x, grad in zip(outputs, grads, strict=True) if grad is not None and x.requires_grad]
            if not pairs:
                return [torch.zeros_like(x) for x in wanted]
            roots, seeds = zip(*pairs, strict=True)
            found = torch.autograd.grad(
                roots, wanted, seeds, create_graph=create_graph, allow_unused=True, materialize_grads=True
            )
        return list(found)

    def _gradients_fake(self, *args: Any) -> list[Tensor]:
        return [torch.empty_like(x) for x, need in zip(args[: self._inputs], args[-1], strict=True) if need]

    # Batching

    def _batched(self, op: Callable[..., Any]) -> Callable[..., Any]:
        inputs = self._inputs

        def rule(info: Info, in_dims: Sequence[int | None], *args: Any) -> tuple[Outputs, Outputs]:
            size = info.batch_size
            front = [
                x if dim is None or not isinstance(x, Tensor) else x.movedim(dim, 0)
                for x, dim in zip(args, in_dims, strict=True)
            ]
            if not self._folds or front[inputs] is not None:  # packed: there is no batch axis to fold into
                pairs = list(zip(front, in_dims, strict=True))
                rows = [
                    op(*(x[i] if isinstance(x, Tensor) and dim is not None else x for x, dim in pairs))
                    for i in range(size)
                ]
                stacked = [torch.stack(parts) for parts in zip(*rows, strict=True)]
                return _like(rows[0], stacked), _like(rows[0], [0] * len(stacked))
            folded = [
                (x.expand(size, *x.shape) if dim is None else x).flatten(0, 1) if isinstance(x, Tensor) else x
                for x, dim in zip(front, in_dims, strict=True)
            ]
            outputs = op(*folded)
            unfolded = [x.unflatten(0, (size, x.shape[0] // size)) for x in outputs]
            return _like(outputs, unfolded), _like(outputs, [0] * len(unfolded))

        return rule


def _in_forward_mode() -> bool:
    """Whether tangents are being pushed forward: they pass through plain torch only, so the call runs in the open."""
    return forward_ad._current_level >= 0


def _like(example: Outputs, values: list[Any]) -> Outputs:
    return tuple(values) if isinstance(example, tuple) else values


def _alone(output: Tensor) -> Tensor:
    return output.contiguous().detach()


def _apart(outputs: Sequence[Tensor], inputs: Sequence[Any]) -> list[Tensor]:
    """Copy what shares memory with an input or an earlier output, as an empty sequence's state does."""
    taken = {x.untyped_storage().data_ptr() for x in inputs if isinstance(x, Tensor)}
    apart = []
    for output in outputs:
        memory = output.untyped_storage().data_ptr()
        if memory in taken:
            output = output.clone(memory_format=torch.contiguous_format)
        elif not output.is_contiguous():
            output = output.contiguous()
        else:
            taken.add(memory)
        apart.append(output)
    return apart
