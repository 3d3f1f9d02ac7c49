"""Types of the part of Triton that Skipjoin uses: Triton ships none."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, overload

from triton import knobs as knobs
from triton import language as language

_R_co = TypeVar("_R_co", covariant=True)
_Value = language.tensor | float | str | None

__version__: str

class JITFunction(Generic[_R_co]):
    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]: ...
    # A kernel may call another, with constants in place of tensors and constant expressions.
    def __call__(self, *args: _Value) -> _R_co: ...

@overload
def jit(fn: Callable[..., _R_co]) -> JITFunction[_R_co]: ...
@overload
def jit(
    fn: Callable[..., _R_co],
    *,
    do_not_specialize: Sequence[str] = ...,
    do_not_specialize_on_alignment: Sequence[str] = ...,
) -> JITFunction[_R_co]: ...
@overload
def jit(
    *, do_not_specialize: Sequence[str] = ..., do_not_specialize_on_alignment: Sequence[str] = ...
) -> Callable[[Callable[..., _R_co]], JITFunction[_R_co]]: ...
def cdiv(x: int, y: int) -> int: ...
def next_power_of_2(n: int) -> int: ...
