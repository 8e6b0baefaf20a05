"""`TorchSettings`: what a user set in PyTorch for the whole process, so that a worker computes the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TorchSettings:
    """Settings of a process that change what ops do or how long they take."""

    num_threads: int
    """Intra-op threads of the calling thread."""
    default_dtype: torch.dtype
    """Of tensors that are made without one."""
    matmul_precision: str
    """Of float32 matrix products."""
    is_deterministic: bool
    """`torch.use_deterministic_algorithms`."""
    warns_only: bool
    """Whether an op that has no deterministic form only warns."""
    cudnn_benchmark: bool
    """Whether cuDNN tries its algorithms out."""
    cudnn_deterministic: bool
    """Whether cuDNN uses deterministic ones alone."""
    cudnn_tf32: bool
    """Whether cuDNN may round to TF32."""

    @classmethod
    def here(cls) -> TorchSettings:
        """Those of this process."""
        return cls(
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.allow_tf32,
        )

    def apply(self) -> None:
        """Makes them those of this process."""
        torch.set_num_threads(self.num_threads)
        torch.set_default_dtype(self.default_dtype)
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.use_deterministic_algorithms(self.is_deterministic, warn_only=self.warns_only)
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        torch.backends.cudnn.allow_tf32 = self.cudnn_tf32
