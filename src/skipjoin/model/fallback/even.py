from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

# Numbers that torch computes at once. It computes what is left at the end of a tensor by other instructions, with
# other bits, for these functions.
_AT_ONCE = 32
_FUNCTIONS = frozenset({"silu", "sigmoid", "softplus", "gelu", "mish", "elu", "logsigmoid"})
# One that has other bits for views that are not contiguous.
_CONTIGUOUS = "gelu"


def is_uneven(function: Any, args: Any) -> bool:
    if function.__name__ not in _FUNCTIONS or not args or not isinstance(args[0], torch.Tensor) or not args[0].dim():
        return False
    x = args[0]
    return x.shape[-1] % _AT_ONCE > 0 or (function.__name__ == _CONTIGUOUS and not x.is_contiguous())


class EvenRows(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_uneven(function, args):
            return function(*args, **(kwargs or {}))
        x, *others = args
        width = x.shape[-1]
        padded = F.pad(x, (0, -width % _AT_ONCE)).contiguous()
        return function(padded, *others, **(kwargs or {}))[..., :width].contiguous()
