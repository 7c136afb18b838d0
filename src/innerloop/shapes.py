"""The letters of our axes, and the checks that speak in them.

B batch, T time, C position in a chunk, H key head, G value head (a multiple of H; value head ``h`` reads key head
``h // (G // H)``), K key width, V value width, D model width, N sequences (B of them, or as many as are packed in one
row), S remembered tokens, n steps a token. Public order is ``[B, T, H, K]`` (``[B, T, n, H, K]``), inside a chunk
``[B, G, C, K]``, a memory ``[N, G, K, V]``.
"""

from __future__ import annotations

import torch
from torch import _C, Tensor

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the precision of arithmetic and state for inputs of ``dtype``: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_tensor(name: str, value: object) -> None:
    """Raise TypeError unless ``value`` is a tensor of a float type that we compute with."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {type(value).__name__}")
    if value.dtype not in FLOATS:
        wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
        raise TypeError(f"{name} must have dtype {wanted}; got {str(value.dtype).removeprefix('torch.')}")


def check_shape(name: str, tensor: Tensor, axes: tuple[str, ...], sizes: dict[str, int]) -> None:
    """Raise ValueError unless ``tensor`` has these axes; one that ``sizes`` does not hold yet is read off and kept."""
    shape = tensor.shape
    if len(shape) == len(axes):
        for axis, size in zip(axes, shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                break
        else:
            return
    known = ", ".join(f"{axis}={sizes[axis]}" for axis in axes if axis in sizes)
    raise ValueError(
        f"{name} must have shape [{', '.join(axes)}]{' with ' + known if known else ''}; got {list(shape)}"
    )


def readable(tensor: Tensor) -> bool:
    """Whether a tensor's values may be looked at: neither traced nor transformed, and more than a shape."""
    return (
        not torch.compiler.is_compiling()
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and not tensor.is_meta
        and not _C._are_functorch_transforms_active()
        and not _C._len_torch_dispatch_stack()
    )


def align_heads(tensor: Tensor, heads: int, axis: int = -2) -> Tensor:
    """Repeat key heads so that value head ``h`` finds its own at index ``h`` of the axis."""
    if tensor.shape[axis] == heads:
        return tensor
    return tensor.repeat_interleave(heads // tensor.shape[axis], dim=axis)
