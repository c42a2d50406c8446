"""Tests import the scripts from the repository root, offline."""

import importlib
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

importlib.import_module("grpo")
AT_START = set(sys.modules)  # before any test has imported what is optional
