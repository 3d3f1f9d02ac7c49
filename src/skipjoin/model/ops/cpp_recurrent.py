from __future__ import annotations

import ctypes
from collections.abc import Iterable
from ctypes import c_double, c_int64, c_void_p

import torch

from skipjoin.model.batch import PackedBatch
from skipjoin.model.ops.build import declare
from skipjoin.model.ops.calls import address, check_sizes
from skipjoin.model.ops.recurrent import (
    Average,
    Convolution,
    ConvolutionInputs,
    Gate,
    Recurrence,
    RecurrenceInputs,
    RecurrentOps,
    Scan,
    ScanInputs,
)
from skipjoin.model.ops.threads import threads_here

_I, _P = c_int64, c_void_p


class _Sequences(ctypes.Structure):
    _fields_ = (
        ("query_start", _P), ("starts", _P), ("slots", _P), ("count", _I), ("captures", _P), ("captured", _I),
    )  # fmt: skip


class _Convolve(ctypes.Structure):
    _fields_ = (
        ("x", _P), ("x_stride", _I), ("channels", _I), ("kernel", _I), ("weights", _P), ("bias", _P), ("before", _P),
        ("after", _P), ("out", _P), ("states", _P), ("state_stride", _I), ("is_gated", _I), ("sequences", _Sequences),
        ("threads", _I),
    )  # fmt: skip


class _Recur(ctypes.Structure):
    _fields_ = (
        ("query", _P), ("key", _P), ("value", _P), ("query_stride", _I), ("key_stride", _I), ("value_stride", _I),
        ("heads", _I), ("key_heads", _I), ("key_dim", _I), ("value_dim", _I), ("decay", _P), ("rate", _P),
        ("decay_stride", _I), ("rate_stride", _I), ("log_a", _P), ("decay_bias", _P), ("skip", _P),
        ("is_keyed", _I), ("least", c_double), ("most", c_double), ("states", _P), ("state_stride", _I), ("out", _P),
        ("sequences", _Sequences), ("threads", _I),
    )  # fmt: skip


class _Scan(ctypes.Structure):
    _fields_ = (
        ("query", _P), ("key", _P), ("value", _P), ("step", _P), ("query_stride", _I), ("key_stride", _I),
        ("value_stride", _I), ("step_stride", _I), ("key_dim", _I), ("channels", _I), ("a", _P), ("step_bias", _P),
        ("skip", _P), ("states", _P), ("state_stride", _I), ("out", _P), ("sequences", _Sequences), ("threads", _I),
    )  # fmt: skip


class _Average(ctypes.Structure):
    _fields_ = (
        ("key", _P), ("value", _P), ("key_stride", _I), ("value_stride", _I), ("channels", _I), ("decay", _P),
        ("bonus", _P), ("states", _P), ("state_stride", _I), ("out", _P), ("sequences", _Sequences), ("threads", _I),
    )  # fmt: skip


class _Gate(ctypes.Structure):
    _fields_ = (
        ("x", _P), ("rows", _I), ("groups", _I), ("width", _I), ("gate", _P), ("gate_stride", _I), ("is_single", _I),
        ("weights", _P), ("period", _I), ("kind", _I), ("eps", c_double), ("threads", _I),
    )  # fmt: skip


class CppRecurrent(RecurrentOps):
    def __init__(self, library: ctypes.CDLL, kind: int) -> None:
        sizes = {"convolve": _Convolve, "recur": _Recur, "scan": _Scan, "average": _Average, "gate": _Gate}
        check_sizes(library, {f"skipjoin_{name}_bytes": call for name, call in sizes.items()})
        calls = [getattr(library, f"skipjoin_{name}") for name in sizes]
        self._convolve, self._recur, self._scan, self._average, self._gate = calls
        for function, call in zip(calls, sizes.values(), strict=True):
            declare(function, _I, ctypes.POINTER(call))
        self._kind = kind

    def convolve(
        self, inputs: ConvolutionInputs, of: Convolution, states: torch.Tensor, batch: PackedBatch
    ) -> torch.Tensor:
        x, before, after = inputs
        out, sequences = torch.empty(x.shape, dtype=x.dtype), _SequenceArrays(batch)
        call = _Convolve(
            x.data_ptr(), x.stride(0), x.shape[1], len(of.weights), of.weights.data_ptr(), address(of.bias),
            address(before), address(after), out.data_ptr(), states.data_ptr(), states.stride(0), of.is_gated,
            sequences.call, threads_here(),
        )  # fmt: skip
        self._convolve(self._kind, call)
        return out

    def recur(self, inputs: RecurrenceInputs, of: Recurrence, states: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        query, key, value, decay, rate = inputs
        out = torch.empty(value.shape, dtype=value.dtype)
        sequences = _SequenceArrays(batch)
        call = _Recur(
            query.data_ptr(), key.data_ptr(), value.data_ptr(), query.stride(0), key.stride(0), value.stride(0),
            states.shape[1], of.key_heads, *states.shape[2:], decay.data_ptr(), address(rate), decay.stride(0),
            0 if rate is None else rate.stride(0), address(of.log_a), address(of.decay_bias), address(of.skip),
            decay.shape[1] > states.shape[1], of.least, of.most, states.data_ptr(), states.stride(0), out.data_ptr(),
            sequences.call, threads_here(),
        )  # fmt: skip
        self._recur(self._kind, call)
        return out

    def scan(self, inputs: ScanInputs, of: Scan, states: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        value, sequences = inputs.value, _SequenceArrays(batch)
        out = torch.empty(value.shape, dtype=value.dtype)
        call = _Scan(
            *(rows.data_ptr() for rows in inputs), *(rows.stride(0) for rows in inputs), *states.shape[1:],
            address(of.a), address(of.step_bias), address(of.skip), states.data_ptr(), states.stride(0),
            out.data_ptr(), sequences.call, threads_here(),
        )  # fmt: skip
        self._scan(self._kind, call)
        return out

    def average(
        self, key: torch.Tensor, value: torch.Tensor, of: Average, states: torch.Tensor, batch: PackedBatch
    ) -> torch.Tensor:
        out, sequences = torch.empty(value.shape, dtype=value.dtype), _SequenceArrays(batch)
        call = _Average(
            key.data_ptr(), value.data_ptr(), key.stride(0), value.stride(0), value.shape[1], of.decay.data_ptr(),
            of.bonus.data_ptr(), states.data_ptr(), states.stride(0), out.data_ptr(), sequences.call, threads_here(),
        )  # fmt: skip
        self._average(self._kind, call)
        return out

    def gate(self, x: torch.Tensor, gate: torch.Tensor, of: Gate) -> torch.Tensor:
        kind, weights, eps = of
        period = 1 if weights is None else len(weights)
        call = _Gate(
            x.data_ptr(), *x.shape, gate.data_ptr(), gate.stride(0), gate.shape[1] == 1, address(weights), period,
            kind, eps, threads_here(),
        )  # fmt: skip
        self._gate(self._kind, call)
        return x


class _SequenceArrays:
    def __init__(self, batch: PackedBatch) -> None:
        starts, slots = _array(batch.starts), _array(batch.states)
        captures = _array(number for capture in batch.captures for number in capture)
        self._kept = starts, slots, captures, batch.query_start
        self.call = _Sequences(
            batch.query_start.data_ptr(), ctypes.addressof(starts), ctypes.addressof(slots), len(slots),
            ctypes.addressof(captures), len(captures) // 3,
        )  # fmt: skip


def _array(numbers: Iterable[int]) -> ctypes.Array[c_int64]:
    found = list(numbers)
    return (c_int64 * len(found))(*found)
