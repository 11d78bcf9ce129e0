"""What a forward pass is called with: its arguments by name, and the one that is the key/value cache.

The cache is `cache` since Transformers 5.24, `past_key_values` before. Transformers renamed it in its models; models
that come with their own code keep the name they were written with. Callers may pass the former name to a forward that
has the new one.
"""

import inspect
from collections.abc import Mapping
from typing import Any

CACHE_KEYWORDS = ("cache", "past_key_values")
"""Both names, the new one first."""


def cache_keyword(signature: inspect.Signature) -> str | None:
    """The name under which a forward of this signature takes a cache; None if it takes none."""
    return next((name for name in CACHE_KEYWORDS if name in signature.parameters), None)


def cache_in(named: Mapping[str, Any]) -> Any:
    """The cache among a call's arguments or a model's outputs, whatever its name; None if there is none."""
    return next((named[name] for name in CACHE_KEYWORDS if named.get(name) is not None), None)


def with_cache(model: Any, cache: Any) -> dict[str, Any]:
    """The keyword that hands `cache` to this model's forward; TypeError if that takes none."""
    name = cache_keyword(inspect.signature(type(model).forward))
    if name is None:
        raise TypeError(
            f"model: the forward of {type(model).__name__} takes no cache, expected a parameter "
            f"{' or '.join(CACHE_KEYWORDS)}; call a model that generates text"
        )
    return {name: cache}


def arguments_of(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Every argument of a call by its name; a cache by the name that this forward has for it."""
    bound = signature.bind_partial(None, *args, **kwargs).arguments
    named: dict[str, Any] = {}
    for name, value in list(bound.items())[1:]:
        named |= value if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    keyword = cache_keyword(signature)
    for other in CACHE_KEYWORDS:
        if keyword is not None and other != keyword and other in named:
            named.setdefault(keyword, named.pop(other))
    return named
