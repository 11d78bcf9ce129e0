"""Faster attention for Transformers models by one string: `attn_implementation="adaattn"`.

Importing it registers names with Transformers and operators with torch; the rest is imported when it is asked for.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import warn

# In a checkout the other directories of the package lie beside this one: a Python that is started there finds them so.
_BESIDE = Path(__file__).parent.parent
if all((_BESIDE / name).is_file() for name in ("pyproject.toml", "patches/registry.py", "eval/provenance.py")):
    __path__.append(str(_BESIDE))
    _native = _BESIDE / "adaattn_hf" / "backends" / "native"
    if not any((_native / name).exists() for name in ("libadaattn.so", "build_report.json")):
        warn(
            f"adaattn: the checkout {_BESIDE} has no CPU kernels, so torch's are used; compile them with `python -m "
            "adaattn_hf.backends.native` there, or start Python elsewhere to import an installed copy"
        )

from adaattn_hf.patches.call.refusals import allow_keywords  # noqa: E402
from adaattn_hf.patches.registry import NAMES, continuous_batching, register, unregister  # noqa: E402

if TYPE_CHECKING:
    from adaattn_hf.patches.cache.caches import AdaAttnCache, GrowingCache
    from adaattn_hf.patches.cache.disk import load_cache, save_cache
    from adaattn_hf.patches.models.families import UnsupportedModel
    from adaattn_hf.patches.models.support import check
    from adaattn_hf.patches.observe.explain import Explanation, explain
    from adaattn_hf.patches.observe.monitoring import monitoring, statistics
    from adaattn_hf.patches.observe.record import AttentionRecord, record
    from adaattn_hf.patches.plans.attach import configure, load_plan, plan_of, remove_plan
    from adaattn_hf.patches.plans.block import use_plan
    from adaattn_hf.patches.prepare import PrepareError, prepare, restore, unpad_calls

    from .config import AdaAttnConfig, ConfigError
    from .plans.plan import Plan, PlanError
    from .presets import load_preset, preset_names

__all__ = [
    "NAMES", "AdaAttnCache", "AdaAttnConfig", "AttentionRecord", "ConfigError",
    "Explanation", "GrowingCache", "Plan", "PlanError", "PrepareError", "UnsupportedModel", "__version__",
    "allow_keywords", "check", "configure", "continuous_batching", "explain", "load_cache", "load_plan", "load_preset",
    "monitoring", "plan_of", "prepare", "preset_names", "record", "register", "remove_plan",
    "restore", "save_cache", "statistics", "unpad_calls", "unregister", "use_plan",
]  # fmt: skip

__version__ = "0.1.0"
_LATE = {
    "adaattn_hf.config": ("AdaAttnConfig", "ConfigError"),
    "adaattn_hf.patches.cache.caches": ("AdaAttnCache", "GrowingCache"),
    "adaattn_hf.patches.cache.disk": ("load_cache", "save_cache"),
    "adaattn_hf.patches.observe.explain": ("Explanation", "explain"),
    "adaattn_hf.patches.observe.monitoring": ("monitoring", "statistics"),
    "adaattn_hf.patches.plans.attach": ("configure", "load_plan", "plan_of", "remove_plan"),
    "adaattn_hf.patches.prepare": ("PrepareError", "prepare", "restore", "unpad_calls"),
    "adaattn_hf.patches.observe.record": ("AttentionRecord", "record"),
    "adaattn_hf.patches.models.families": ("UnsupportedModel",),
    "adaattn_hf.patches.models.support": ("check",),
    "adaattn_hf.plans.plan": ("Plan", "PlanError"),
    "adaattn_hf.patches.plans.block": ("use_plan",),
    "adaattn_hf.presets": ("load_preset", "preset_names"),
}
_MODULE_OF = {name: module for module, names in _LATE.items() for name in names}


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first asked for."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, getattr(import_module(_MODULE_OF[name]), name))


def __dir__() -> list[str]:
    """All public names, imported or not."""
    return sorted(__all__)


register()
