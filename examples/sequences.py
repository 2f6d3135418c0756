"""Sequences of different lengths through an LSTM: three things to know.

    python examples/sequences.py

1. The hidden state has its rows on axis 1, for either value of `batch_first`. Without `out_dims` it would be joined on
   the wrong axis.
2. `pad_packed_sequence` inside `forward` pads to the longest sequence of the replica's own rows, so the replicas'
   outputs would differ in length: give it `total_length`. Without it there is an error that names the remedy.
3. A packed sequence as an input is split by sequence; as an output it is joined again.
"""

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import unisono

NUM_REPLICAS, LENGTHS, WIDTH = 2, [6, 2, 3, 1, 5], 4


class Padded(nn.Module):
    """Takes padded sequences and their lengths; returns padded outputs and the hidden state (layers, rows, width)."""

    def __init__(self, use_total_length: bool) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.use_total_length = use_total_length

    def forward(self, padded: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        packed = pack_padded_sequence(padded, lengths.cpu(), batch_first=True, enforce_sorted=False)
        output, (hidden, _) = self.lstm(packed)
        total = padded.size(1) if self.use_total_length else None
        return pad_packed_sequence(output, batch_first=True, total_length=total)[0], hidden


class Packed(nn.Module):
    """Takes a packed sequence and returns one."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH)

    def forward(self, packed: PackedSequence) -> PackedSequence:
        output: PackedSequence = self.lstm(packed)[0]
        return output


def main() -> None:
    torch.manual_seed(0)
    device_ids = pick_devices(NUM_REPLICAS)
    lengths = torch.tensor(LENGTHS)
    # In double precision: a GPU's LSTM rounds float32 to ten bits, and other rows in another way.
    padded = torch.randn(len(LENGTHS), max(LENGTHS), WIDTH).double().to(device_ids[0])

    plain = Padded(use_total_length=True).double().to(device_ids[0])
    model = unisono.DataParallel(plain, device_ids, out_dims=(0, 1))
    output, hidden = model(padded, lengths)
    torch.testing.assert_close((output, hidden), plain(padded, lengths))
    print(f"Padded: output {list(output.shape)} hidden state {list(hidden.shape)}, as without the wrapper")

    forgetful = Padded(use_total_length=False).double().to(device_ids[0])
    try:
        unisono.DataParallel(forgetful, device_ids, out_dims=(0, 1))(padded, lengths)
    except ValueError as error:
        print(f"Without total_length: {type(error).__name__}: {error}", *error.__notes__, sep="\n    ")

    plain_packed = Packed().double().to(device_ids[0])
    packed = pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=False)
    joined = unisono.DataParallel(plain_packed, device_ids)(packed)
    torch.testing.assert_close(joined.data, plain_packed(packed).data)
    print(f"Packed: {list(joined.data.shape)} in {len(joined.batch_sizes)} steps, as without the wrapper")


def pick_devices(num: int) -> list[int] | list[str]:
    """Return `num` devices: accelerators, in turn if there are fewer than that; without any, the CPU `num` times."""
    present = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return [i % present for i in range(num)] if present else ["cpu"] * num


if __name__ == "__main__":
    main()
