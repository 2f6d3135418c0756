"""A recurrent layer that is wrapped itself: the warning, and that the line in it has the numbers of one device."""

import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from helpers.losses import tensors_in
from unisono import DataParallel

LAYERS = [nn.RNN, nn.LSTM, nn.GRU]


@pytest.mark.parametrize("layer", LAYERS)
def test_rows_on_axis_one_are_warned_about(layer):
    """G6: with the line to write, at the line that wraps; what the line gives is the plain module's."""
    plain = layer(5, 4, num_layers=2)
    with pytest.warns(UserWarning, match=re.escape(f"{layer.__name__}(batch_first=False) has its batch")) as caught:
        DataParallel(plain, ["cpu", "cpu"])
    assert [each.filename for each in caught] == [__file__]
    assert "DataParallel(module, ..., dim=1)" in str(caught[0].message)
    assert_same_outputs(DataParallel(plain, ["cpu", "cpu"], dim=1), plain, torch.randn(7, 6, 5))
    assert_same_outputs(DataParallel(plain, ["cpu", "cpu"], dim=1), plain, pack_sequence([torch.randn(3, 5)] * 6))


@pytest.mark.parametrize("layer", LAYERS)
def test_a_hidden_state_on_axis_one_is_warned_about(layer):
    """G6: with batch_first=True only the hidden state is joined on the wrong axis."""
    plain = layer(5, 4, batch_first=True)
    with pytest.warns(UserWarning, match=r"Write DataParallel\(module, ..., out_dims=\(0, 1\)\)"):
        DataParallel(plain, ["cpu", "cpu"])
    assert_same_outputs(DataParallel(plain, ["cpu", "cpu"], out_dims=(0, 1)), plain, torch.randn(6, 7, 5))


def test_nothing_is_said_where_the_axes_are_given_or_cannot_be_known():
    """G6: one device joins nothing, and a model may transpose the rows around its layer."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DataParallel(nn.LSTM(5, 4), ["cpu"])
        DataParallel(nn.LSTM(5, 4), ["cpu", "cpu"], in_dims=1, out_dims=1)
        DataParallel(nn.Sequential(nn.LSTM(5, 4)), ["cpu", "cpu"])


def assert_same_outputs(model, plain, inputs):
    torch.testing.assert_close(tensors_in(model(inputs)), tensors_in(plain(inputs)))
