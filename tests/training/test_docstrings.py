import doctest

import pytest

from manyhands.training import data, download, idx, models, run, schedule


@pytest.mark.parametrize("module", [data, download, idx, models, run, schedule], ids=lambda module: module.__name__)
def test_examples(module):
    failed, attempted = doctest.testmod(module)
    assert (failed, attempted > 0) == (0, True)
