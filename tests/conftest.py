"""One thread per test process: xdist runs several side by side, and results do not depend on the machine."""

import pytest
import torch

torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests that take minutes")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes minutes; run with --slow")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="takes minutes; run with --slow"))
