"""Two gloo processes run a tiny model; the first says which ways gave the gradients, or the logits, of one process."""

import dataclasses
import importlib.util
import os
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers as tf

import adaattn_hf  # noqa: F401  (registers the names)
from adaattn_hf.patches.plans.attach import load_plan, remove_plan
from adaattn_hf.plans.choices import Choice
from adaattn_hf.plans.choices.window import Window
from adaattn_hf.plans.plan import PlanError

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
from tests.support.models import checkpointed, fresh_pair
from tests.support.plans import plan_for

TOLERANCE = 1e-5
WAYS = ["ddp", "fsdp", "fsdp-checkpointing"]
if importlib.util.find_spec("accelerate"):
    WAYS += ["accelerate", "accelerate-fsdp"]


def model() -> Any:
    return fresh_pair("llama").ours.train()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
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
        checkpointed(net, reentrant=False)
    mesh = init_device_mesh("cpu", (2,))
    for layer in net.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def split_heads(directory: str) -> None:
    """Tensor parallelism of Transformers: each process computes the heads that it holds, by its part of the plan."""
    ids, mask = batch()
    real = mask.bool()
    torch.manual_seed(0)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions want the argument in another place
        one = tf.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="adaattn")
        net = tf.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="adaattn", tp_plan="auto")
        if not hasattr(net.model.layers[0].self_attn.k_proj.weight, "device_mesh"):
            raise SystemExit("tp: the weights are not split")
        plan = plan_for(one, Choice())
        # heads that differ, so that a process which takes the other's part is found out
        for choices in ((Choice(), Choice()), (Choice(Window(3)), Choice()), (Choice(Window(2)), Choice(Window(6)))):
            layers = tuple(dataclasses.replace(layer, choices=choices) for layer in plan.layers)
            for model in (one, net):
                load_plan(model, dataclasses.replace(plan, layers=layers))
            expected, found = (m(ids, attention_mask=mask, use_cache=False).logits[real] for m in (one, net))
            far = float((found - expected).abs().max())
            if far > TOLERANCE:
                raise SystemExit(f"tp: logits under {choices} differ by {far}")
        remove_plan(one)
        if float((one(ids, attention_mask=mask).logits[real] - expected).abs().max()) < 100 * TOLERANCE:
            raise SystemExit("tp: the plan changed nothing")
        # a plan for a single key/value head is another model's, also where each process has one
        layers = tuple(dataclasses.replace(layer, choices=(Choice(Window(2)),)) for layer in plan.layers)
        try:
            load_plan(net, dataclasses.replace(plan, layers=layers))
        except PlanError as refusal:
            if "made for 1 key/value heads, the model has 2" not in str(refusal):
                raise
        else:
            raise SystemExit("tp: a plan for other heads ran")


def gathered_plan() -> None:
    """FSDP gathers the weights of a layer for its call, which the plan checks there, in every pass."""
    ids, mask = batch()
    one, net = model().eval(), model().eval()
    plan = plan_for(one, Choice(Window(2)))
    for each in (one, net):
        load_plan(each, plan)
    wrapped = prepared("fsdp", net)
    with torch.no_grad():
        expected = one(ids, attention_mask=mask, use_cache=False).logits
        for _ in range(2):
            far = float((wrapped(input_ids=ids, attention_mask=mask, use_cache=False).logits - expected).abs().max())
            if far > TOLERANCE:
                raise SystemExit(f"fsdp: logits under a plan differ by {far}")
        remove_plan(one)
        exact = one(ids, attention_mask=mask, use_cache=False).logits
        if float((exact - expected).abs().max()) < 100 * TOLERANCE:
            raise SystemExit("fsdp: the plan changed nothing")


class Stage(torch.nn.Module):
    """A layer of the model with what stands before the first or behind the last."""

    def __init__(self, net: Any, rank: int) -> None:
        """`net` loses its other layer."""
        super().__init__()
        self.inner, self.head, self.first = net.model, net.lm_head, rank == 0
        self.inner.layers = self.inner.layers[rank : rank + 1]
        if self.first:
            self.inner.norm, self.head = torch.nn.Identity(), torch.nn.Identity()
        else:
            self.inner.embed_tokens = torch.nn.Identity()  # with them it would be a model that lost its first layer

    def forward(self, given: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        given_as = {"input_ids" if self.first else "inputs_embeds": given}
        out: torch.Tensor = self.head(self.inner(**given_as, attention_mask=mask, use_cache=False).last_hidden_state)
        return out


def pipeline_stages(rank: int) -> None:
    """Torch's pipeline over two micro-batches, exact and by a plan that differs between the stages."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    ids, mask = batch()
    plan = plan_for(model(), Choice())
    layers = tuple(
        dataclasses.replace(layer, choices=(Choice(Window(2 + layer.layer)), Choice())) for layer in plan.layers
    )
    found = []
    for bound in (None, dataclasses.replace(plan, layers=layers)):
        one, net = model().eval(), model().eval()
        if bound is not None:
            load_plan(one, bound)
            load_plan(net, bound)  # a stage holds a part of the weights that the plan names
        schedule = ScheduleGPipe(PipelineStage(Stage(net, rank), rank, 2, torch.device("cpu")), 2)
        with torch.no_grad():
            expected = one(ids, attention_mask=mask, use_cache=False).logits
            out = schedule.step(*((ids,) if rank == 0 else ()), mask=mask)
        found.append(expected)
        if rank == 1 and float((out - expected).abs().max()) > TOLERANCE:
            raise SystemExit(f"stages: logits under {bound} differ by {float((out - expected).abs().max())}")
    if float((found[0] - found[1]).abs().max()) < 100 * TOLERANCE:
        raise SystemExit("stages: the plan changed nothing")


def worker(rank: int, port: int, directory: str) -> None:
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
    gathered_plan()
    split_heads(directory)
    pipeline_stages(rank)
    if rank == 0:
        print("fsdp-plan", "tp", "stages", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        free = found.getsockname()[1]
    sys.stdout.flush()
    model().save_pretrained(sys.argv[1])
    # copies of this process, which has started no thread: each new one would import torch and Transformers anew
    mp.start_processes(worker, args=(free, sys.argv[1]), nprocs=2, start_method="fork")  # type: ignore[attr-defined]
