"""Two gloo processes train a tiny model; each prints nothing, the first says which ways gave the gradients of one."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers as tf

import adaattn_hf  # noqa: F401  (registers the names)

TOLERANCE = 1e-5


def model() -> Any:
    """The same tiny model in every process."""
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    return tf.LlamaForCausalLM._from_config(config, attn_implementation="adaattn").train()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Four padded rows."""
    ids = torch.randint(3, 64, (4, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[1, 10:] = mask[2, :5] = 0
    return ids, mask


def loss_of(net: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A loss that is a mean over rows, so that the mean over processes is the loss of the whole batch."""
    logits = net(input_ids=ids, attention_mask=mask, use_cache=False).logits
    rows = (logits.square() * mask[..., None]).sum((1, 2))
    mean: torch.Tensor = rows.mean()
    return mean


def worker(rank: int, port: int) -> None:
    """One process."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    ids, mask = batch()
    whole = model()
    loss_of(whole, ids, mask).backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    mine = slice(rank * 2, rank * 2 + 2)
    for way in ("ddp", "fsdp", "fsdp-checkpointing"):
        net = model()
        if way == "ddp":
            wrapped: Any = torch.nn.parallel.DistributedDataParallel(net)
        else:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            if way == "fsdp-checkpointing":
                enable = getattr(net, "activation_checkpointing_enable", net.gradient_checkpointing_enable)
                enable({"use_reentrant": False})
            mesh = init_device_mesh("cpu", (2,))
            for layer in net.model.layers:
                fully_shard(layer, mesh=mesh)
            wrapped = fully_shard(net, mesh=mesh)
        loss_of(wrapped, ids[mine], mask[mine]).backward()
        for name, parameter in net.named_parameters():
            grad: Any = parameter.grad
            grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            far = float((grad - expected[name]).abs().max())
            bound = TOLERANCE * max(1.0, float(expected[name].abs().max()))
            if far > bound:
                raise SystemExit(f"{way}: gradient of {name} differs by {far}, more than {bound}")
        if rank == 0:
            print(way, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        free = found.getsockname()[1]
    sys.stdout.flush()
    mp.spawn(worker, args=(free,), nprocs=2)  # type: ignore[attr-defined]
