"""A plan bound to a model by one act: what was checked, the layers that run by it, and the hooks of the model's passes.

A `BoundPlan` lies on the trunk of a model (all of it but its head) as `adaattn_plan`, and each attention module has its
part as `adaattn_layer`, None where it is exact. Two forward hooks of the trunk compare the model with what was
checked at the start of each pass: weights and buffers, the order of layers, the settings that attention reads, and the
plan in the configuration. They only notice that something is another; then all is checked anew, and refused in words.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, Literal, Self

import torch
from torch import nn

from adaattn_hf.attention.tracing import in_backward
from adaattn_hf.errors import is_news, logger
from adaattn_hf.plans.bound_layer import BoundLayer
from adaattn_hf.plans.execute import no_gradient
from adaattn_hf.plans.plan import Plan
from adaattn_hf.plans.record import PlanError
from adaattn_hf.plans.store import CARRIED, CONFIG_KEY

from ..models.positions import configs_of
from .check import bound_layer_for, configs_for, refuse_autocast, refuse_beyond_budget, refuse_other_weights
from .configured import computes_by, refuse_other_settings
from .hashes import base_of
from .layers import attention_modules, running_model
from .parts import parts
from .slots import LAYER, PLAN, layer_of, within
from .snapshot import Snapshot, facts_of, listen

UNBOUND = (
    "the model's configuration holds a plan, and attention is exact until somebody binds it to the model: "
    "adaattn_hf.load_plan(model) does, adaattn_hf.remove_plan(model) takes it out"
)


State = Literal["as verified", "adapted", "trained"]
"""What became of a model since its plan was bound to it: adapters alone are trained under the plan; or it is trained
itself, so that weights change, and the plan goes on in this process only."""


@dataclass(eq=False, repr=False)
class BoundPlan:
    """A plan, the model that it was checked for, and the layers that run by it; `BoundPlan.of` makes one.

    A copied or pickled model takes its plan along. The copy has checked nothing yet: its first pass does.

    Attributes:
        plan, unverified: The plan, and whether it runs though held-out text has not shown it good.
        state: What became of the model since.
        configs, data: The configurations that carry the plan, and the plan as they do, None where they do not.
        facts: Settings and passing buffers at the first check, which no plan names.
        layers, readers: By attention module, its part of the plan, None where it is exact; and their configurations.
        carried: The plan's tensors, as the model's settings carry them.
        trunk: The model without its head, by a weak reference.
        threads: Those in which a pass of the model is open that was compared at its start.
        in_graph: The thread and number of the layer that a compiled graph asked for last.
        monitor, session: What watches the model, and the settings that asked for it, None for a block.
        snapshot: The model as it was checked.
        read: The hash of each weight that it had when all of it was read, by its name.
    """

    plan: Plan
    unverified: bool
    state: State = "as verified"
    configs: Sequence[Any] = ()
    data: Any = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    layers: dict[nn.Module, BoundLayer | None] = field(default_factory=dict, init=False)
    readers: Sequence[Any] = field(default=(), init=False)
    carried: dict[str, Any] = field(default_factory=dict, init=False)
    trunk: Callable[[], nn.Module | None] = field(default=type(None), init=False)
    threads: set[int] = field(default_factory=set, init=False)
    in_graph: tuple[int, int] = field(default=(0, 0), init=False)
    monitor: Any = field(default=None, init=False)
    session: Any = field(default=None, init=False)
    snapshot: Snapshot | None = field(default=None, init=False)
    read: Mapping[str, str] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, model: nn.Module, plan: Plan, *, unverified: bool = False) -> Self:
        """Checks all of a model against a plan (PlanError: it does not belong to it), and changes nothing of it."""
        before = next(hooked_plans(base_of(model)), None)
        bound = cls(plan, unverified, facts={} if before is None else before.facts)
        for config in configs_for(model, plan, unverified):
            settings = carried_by(config)
            refuse_beyond_budget(plan.budget, settings)
            if (settings.get(CONFIG_KEY) or {}).get("tensors") == plan.tensors and settings.get(CARRIED):
                bound.carried[CARRIED] = settings[CARRIED]
        bound.check_model(base_of(model))
        return bound

    def __post_init__(self) -> None:
        listen()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.plan, self.unverified, self.state, self.configs, self.data, self.facts)

    def install(self, model: nn.Module) -> None:
        """Lets the model run by the plan, which its configuration then carries; another one goes."""
        unbind(model)
        self.configs = self.readers
        self.data = self.plan.to_dict()
        for config in self.configs:
            settings = {name: value for name, value in carried_by(config).items() if name != CARRIED}
            config.adaattn = {**settings, **self.carried, CONFIG_KEY: self.data}
        trunk = base_of(model)
        trunk.__dict__[PLAN] = self
        self.give()
        self.hook(trunk)

    def hook(self, trunk: nn.Module) -> None:
        """Hooks a trunk: from here on each of its passes is compared with what was checked."""
        trunk.register_forward_pre_hook(self.enter)
        trunk.register_forward_hook(self.leave, always_call=True)

    def unhook(self, trunk: nn.Module) -> None:
        """Takes the hooks off again."""
        for hooks in (trunk._forward_pre_hooks, trunk._forward_hooks):
            for key in [key for key, hook in [*hooks.items()] if getattr(hook, "__self__", None) is self]:
                hooks.pop(key, None)  # blocks of two threads may take it off at once
                trunk._forward_hooks_always_called.pop(key, None)

    @property
    def by_index(self) -> dict[Any, BoundLayer | None]:
        """The layers by their numbers."""
        return {module.layer_idx: bound_layer for module, bound_layer in self.layers.items()}

    # ------------------------------------------------------------------ in every pass
    def enter(self, trunk: nn.Module, _: Any) -> None:
        """Called by torch before a pass."""
        if torch.compiler.is_compiling() or within(trunk, self) is not self:
            return
        # a copy has no readers yet
        readers: Any = self.readers or (getattr(part, "config", None) for part in trunk.modules())
        configs = [config for config in readers if getattr(config, "model_type", None) == self.plan.model_type]
        if any("adaattn" in str(config._attn_implementation) for config in configs):
            self.check_pass(trunk)
            self.threads.add(get_ident())

    def leave(self, trunk: nn.Module, _: Any, out: Any) -> None:
        """Called by torch behind a pass, be it by an exception."""
        if not torch.compiler.is_compiling():
            self.threads.discard(get_ident())

    def check_pass(self, trunk: nn.Module) -> None:
        """Refuses what no longer is as it was checked (PlanError), and notices that the model is trained."""
        for config in self.configs:
            carried = carried_by(config).get(CONFIG_KEY)
            if carried is not self.data:
                if carried != self.data:
                    raise PlanError(
                        "config.adaattn['plan']: got another one than the model runs by, expected that one; call "
                        "adaattn_hf.load_plan(model) to run the new one, or adaattn_hf.remove_plan(model) for exact "
                        "attention"
                    )
                self.data = carried
        if self.state == "trained":
            if not self.layers:  # a copy
                self._take(trunk)
            return
        snapshot = self.snapshot
        if snapshot is None or not snapshot.same():
            snapshot = self.check_model(trunk)
        # a block does not train
        if trunk.training and torch.is_grad_enabled() and not in_backward() and trunk.__dict__.get(PLAN) is self:
            self._train(trunk)
        if self.state == "as verified" and not trunk.training:
            refuse_autocast(self.plan, snapshot.tensors[0].device.type)

    def check_graph(self, bound_layer: BoundLayer) -> None:
        """Called by planned layers of a compiled graph; the first one of a pass does what the hooks do elsewhere."""
        (thread, layer), trunk = self.in_graph, self.trunk()
        self.in_graph = get_ident(), bound_layer.plan.layer
        # layers come in their order: one that does not lie behind the last begins another pass
        begins = thread != get_ident() or bound_layer.plan.layer <= layer
        if trunk is not None and begins and get_ident() not in self.threads:
            self.check_pass(trunk)

    # ------------------------------------------------------------------ once, and where something has changed
    def check_model(self, trunk: nn.Module) -> Snapshot:
        """Compares all of a model with what its plan names (PlanError: something differs), and makes its layers."""
        now, modules = Snapshot(trunk), dict(attention_modules(trunk, self.plan.model_type))
        if self.snapshot is None or not self.snapshot.covers(now):
            self.read = refuse_other_weights(self.plan, trunk, modules, self.read)
        for module in modules.values():
            refuse_other_settings(self.plan.configuration, computes_by(module.config))
        facts = facts_of(trunk)
        refuse_other_settings(self.facts, facts)
        self.facts = {**facts, **self.facts}
        self._take(trunk)
        self.snapshot = now
        if now.adapted:
            say(
                self.plan.weight_hash,
                "the model has adapters, and its plan was verified without them: what they change is not covered; "
                "merge them and calibrate again to have it verified",
            )
        elif self.state == "adapted":
            self.state = "as verified"
        return now

    def _take(self, trunk: nn.Module) -> None:
        """Makes the layers of a trunk that this plan has not made yet, and hands them over if it is the trunk's own."""
        modules, me = dict(attention_modules(trunk, self.plan.model_type)), weakref.ref(self)
        self.trunk = weakref.ref(trunk)
        for index, module in modules.items():
            if module not in self.layers:
                other: Callable[[], Any] | None = getattr(module.__dict__.get(LAYER), "owner", None)
                if other is not None and (bound := other()) is not None and bound.trunk() not in (None, trunk):
                    raise _foreign(module, trunk)
                self.layers[module] = bound_layer_for(module, self.plan, index, self.carried, me)
        self.layers = {module: self.layers[module] for module in modules.values()}
        self.readers = configs_of(modules.values())
        if trunk.__dict__.get(PLAN) is self:
            self.give()

    def give(self) -> None:
        """Hands the layers to their modules."""
        for module, bound_layer in self.layers.items():
            module.__dict__[LAYER] = bound_layer

    def _train(self, trunk: nn.Module) -> None:
        """Notes that a model is trained under its plan, which is not saved any more then; adapters alone leave it."""
        planned = [bound_layer for bound_layer in self.layers.values() if bound_layer is not None]
        if not (planned and any(parameter.requires_grad for parameter in trunk.parameters())):
            return
        for bound_layer in planned:
            if not bound_layer.has_gradient:
                raise PlanError(no_gradient(bound_layer))
        if not any(weight.requires_grad for part in parts(trunk) for weight in part.weights.values()):
            self.state = "adapted"
        elif all(bound_layer.trains for bound_layer in planned):
            self.state, self.data = "trained", None
            for config in self.configs:
                config.adaattn = {name: value for name, value in carried_by(config).items() if name != CONFIG_KEY}
            say(
                self.plan.weight_hash,
                "the model is trained under its plan, which was verified for the weights before: it goes on under it "
                "here, and is saved without it; calibrate the trained model",
            )


def _foreign(module: nn.Module, model: nn.Module | None) -> PlanError:
    return PlanError(
        f"{type(module).__name__} of layer {getattr(module, 'layer_idx', None)} runs in another model "
        f"({type(model).__name__}) than the one that its plan was checked for; put the layer back, or remove the plan "
        "with adaattn_hf.remove_plan(model)"
    )


def checked_layer(module: nn.Module) -> BoundLayer | None:
    """Returns what `layer_of` does, compared with what was checked if the pass of its model was not (PlanError)."""
    bound_layer = layer_of(module)
    if module.training and within(module, module) is not module:
        # a checkpointed layer is computed again in the backward pass, in another thread or after the block
        raise PlanError(
            "use_plan: the model is in training mode, whose passes may be repeated behind the block; call "
            "model.eval(), or train with the plan that adaattn_hf.load_plan(model, directory) gives it"
        )
    if bound_layer is None:
        return None
    bound = None if bound_layer.owner is None else bound_layer.owner()
    if bound is None:
        raise PlanError(
            f"{type(module).__name__} of layer {bound_layer.plan.layer} was taken from a model with a plan, which was "
            "checked for that model alone; call adaattn_hf.load_plan(model), or adaattn_hf.remove_plan(model) for "
            "exact attention"
        )
    if get_ident() not in bound.threads:  # outside of a pass: computed again for gradients, or run by itself
        trunk, host = bound.trunk(), None if in_backward() else running_model(module)
        if trunk is None or not (host is None or trunk in {*host.modules()} or host in {*trunk.modules()}):
            raise _foreign(module, host)
        bound.check_pass(trunk)
    return bound_layer


def bound_plan(model: nn.Module) -> BoundPlan | None:
    """Returns the plan that is bound to a model, None where there is none."""
    return next((part.__dict__[PLAN] for part in model.modules() if PLAN in part.__dict__), None)


def hooked_plans(trunk: nn.Module) -> Iterator[BoundPlan]:
    """Yields the plans whose hooks are on a trunk: the model's own, and those of blocks."""
    for hook in [*trunk._forward_pre_hooks.values()]:  # in one step: other threads add and remove hooks
        if isinstance(owner := getattr(hook, "__self__", None), BoundPlan):
            yield owner


def unbind(model: nn.Module) -> None:
    """Takes away all that binding plans has put on a model."""
    for part in model.modules():
        for bound in [*hooked_plans(part)]:
            bound.unhook(part)
        part.__dict__.pop(PLAN, None)
        part.__dict__.pop(LAYER, None)


def carried_by(config: Any) -> Mapping[str, Any]:
    """Returns the settings of this package in a model's configuration, empty where there are none."""
    settings = getattr(config, "adaattn", None)
    return settings if isinstance(settings, Mapping) else {}


def say(weights: str, words: str) -> None:
    """Says something once of a plan, told by the hash of the model that it was made for."""
    if is_news(weights, words):
        logger.warning("adaattn: %s", words)
