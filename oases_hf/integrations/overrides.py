"""Replacing methods of one object of another library, and only of that object."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import ConfigError


def override(target: object, **methods: Callable[..., Any]) -> None:
    """Set ``methods`` on ``target``, in place of those of its class.

    Raises:
        ConfigError: the class has no method of that name, so replacing it would change nothing.
    """
    for name, method in methods.items():
        if not hasattr(target, name):
            raise ConfigError(
                f"{type(target).__module__}.{type(target).__name__} has no {name}; this version of the library is not "
                f"supported, install transformers>=5.17,<6 and accelerate>=1.15,<2"
            )
        object.__setattr__(target, name, method)


@contextmanager
def replaced(target: object, **values: Any) -> Iterator[None]:
    """Give an object other attributes for a while."""
    missing = object()
    before = {name: vars(target).get(name, missing) for name in values}
    for name, value in values.items():
        object.__setattr__(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is missing:
                object.__delattr__(target, name)
            else:
                object.__setattr__(target, name, value)
