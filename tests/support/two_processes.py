"""Two gloo processes train a tiny model; each prints nothing, the first says which ways gave the gradients of one."""

from __future__ import annotations

import importlib.util
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
WAYS = ["ddp", "fsdp", "fsdp-checkpointing"]
if importlib.util.find_spec("accelerate"):
    WAYS += ["accelerate", "accelerate-fsdp"]


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


def prepared(way: str, net: Any) -> Any:
    """The model as a way of training has it; parameters stay those of `net`."""
    if way == "ddp":
        return torch.nn.parallel.DistributedDataParallel(net)
    if way.startswith("accelerate"):
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model

        accelerator = Accelerator(cpu=True)
        if way == "accelerate":
            return accelerator.prepare(net)
        # on CPUs `prepare` knows DDP alone; this is what it calls elsewhere
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
        return fsdp2_prepare_model(accelerator, net)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if way == "fsdp-checkpointing":
        enable = getattr(net, "activation_checkpointing_enable", net.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    mesh = init_device_mesh("cpu", (2,))
    for layer in net.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def worker(rank: int, port: int) -> None:
    """One process."""
    place = dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), ACCELERATE_USE_CPU="true", **place)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    ids, mask = batch()
    whole = model()
    loss_of(whole, ids, mask).backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    mine = slice(rank * 2, rank * 2 + 2)
    for way in WAYS:
        net = model()
        wrapped = prepared(way, net)
        loss_of(wrapped, ids[mine], mask[mine]).backward()
        for name, parameter in net.named_parameters():
            grad: Any = parameter.grad
            sharded = hasattr(grad, "full_tensor")
            if sharded != ("fsdp" in way):
                raise SystemExit(f"{way}: the gradient of {name} is {type(grad)}")
            grad = grad.full_tensor() if sharded else grad
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
