"""What all suites share. Nothing heavy is imported here: tests/unit must start at once."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def clean_environment(monkeypatch):
    """No TRIESERVE_* variable of whoever runs the tests reaches the configuration."""
    for name in list(os.environ):
        if name.startswith("TRIESERVE_"):
            monkeypatch.delenv(name)


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
