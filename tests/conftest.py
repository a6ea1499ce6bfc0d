"""Every test runs offline against the tiny hub: the environment is set before anything imports transformers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import hub

for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE", "HF_TOKEN"):
    os.environ.pop(variable, None)
os.environ["HF_HOME"] = str(hub.hub_home())
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


@pytest.fixture(scope="session", autouse=True)
def tiny_hub() -> Path:
    """The HF_HOME that every test finds its models in; built on first use, in a few seconds."""
    return hub.ensure_hub()
