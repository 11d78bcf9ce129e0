"""Notes which of torch's operators run, and how large what they return is."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class NamedOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class Largest(TorchDispatchMode):
    """Numbers in the largest tensor that came back, and in the largest that lies in no memory of an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = self.allocated = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
                if tensor.untyped_storage().data_ptr() not in known:
                    self.allocated = max(self.allocated, tensor.numel())
        return result
