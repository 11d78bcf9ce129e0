"""FlashAttention's functions for CPUs (native kernels) and CUDA devices (Triton), exact in fp32, bf16 and fp16."""

from .cached import flash_attn_with_kvcache
from .dense import flash_attn_func
from .varlen import flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
