"""Services that tests share, as long as they leave no traces in each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.service.served import TOKEN, Served, spec_in


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service of the small task with a scripted policy, and a token."""
    with Served(spec_in(tmp_path_factory.mktemp("served")), "--max-requests", "64", token=TOKEN) as service:
        yield service
