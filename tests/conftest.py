"""Fixtures and markers of the test suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from .ranks import Worlds, warm_up


def pytest_configure() -> None:
    torch.set_num_threads(1)  # on busy cores, threads that wait for each other made a tiny model 100 times slower


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _uses_ranks(item):
            item.add_marker(pytest.mark.dist)


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly and any(map(_uses_ranks, session.items)):
        warm_up()  # imports torch and transformers while other tests run


def _uses_ranks(item: pytest.Item) -> bool:
    return "ranks" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="session")
def ranks() -> Iterator[Worlds]:
    """Worlds of ranks that live as long as the session: ``ranks(2).run(function, *args)``."""
    worlds = Worlds()
    yield worlds
    worlds.close()
