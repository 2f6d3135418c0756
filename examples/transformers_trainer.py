"""The Trainer of transformers on every device, with the exact mean over tokens.

    python examples/transformers_trainer.py

It needs transformers and accelerate (pip install transformers accelerate). A tiny GPT-2 with random parameters learns
sequences of different lengths: nothing is downloaded. The same training runs twice, on one device and wrapped, and ends
with the same parameters.

It uses all GPUs if there are several, and two CPU replicas if there is none. A script that is started by `unisono run`
needs none of this: see docs/run.md.
"""

import copy
import os
import tempfile

os.environ.update(TRANSFORMERS_OFFLINE="1", HF_HUB_OFFLINE="1")

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

import unisono

NUM_WORDS, NUM_SEQUENCES, LONGEST, BATCH_ROWS, EPOCHS = 30, 45, 12, 16, 4
IGNORED = -100  # in labels: padding, which no loss counts


def main() -> None:
    logging.set_verbosity_error()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(tiny_config())
    one_device, wrapped = copy.deepcopy(model), copy.deepcopy(model)

    with tempfile.TemporaryDirectory() as folder:  # Trainer makes one, although nothing is saved
        print("One device:")
        train(one_device, wrap=False, folder=folder)
        print("Wrapped:")
        train(wrapped, wrap=True, folder=folder)

    pairs = zip(one_device.parameters(), wrapped.parameters(), strict=True)
    difference = max((one - other).abs().max().item() for one, other in pairs)
    print(f"Same numbers: parameters differ by {difference:.1e} at most")


def train(model: nn.Module, wrap: bool, folder: str) -> None:
    args = TrainingArguments(
        output_dir=folder,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH_ROWS,  # of all devices together: see n_gpu below
        optim="sgd",  # Adam would magnify rounding errors where a gradient is zero, and the parameters are compared
        learning_rate=0.5,
        logging_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=torch.accelerator.is_available(),
    )
    on_gpus = args.device.type != "cpu"
    # With n_gpu above 1 Trainer wraps the model in torch's DataParallel for evaluation, and changes the batch size, the
    # number of tokens and the loss to suit torch's. Here the wrapper does all that several GPUs need, so Trainer counts
    # one. This attribute is the only way to say so; Trainer sets it itself for models that are split over GPUs.
    args._n_gpu = 1
    trainer = Trainer(model, args, train_dataset=sequences(), data_collator=padded)
    if wrap:
        # Trainer wraps nothing that is wrapped in a torch.nn.DataParallel already, and this counts as one. It gives
        # every replica num_items_in_batch, the number of tokens in the whole batch (with gradient accumulation, in all
        # batches of the step), and the model divides its sum of losses by that. So the sum of the replicas' losses is
        # the mean over all tokens, however they are split.
        trainer.model_wrapped = unisono.DataParallel(model, None if on_gpus else ["cpu"] * 2, scalars={"loss": "sum"})
        # Trainer evaluates trainer.model, the plain one, on one device.
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(PrintLosses())
    trainer.train()


class PrintLosses(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if "loss" in logs:
            print(f"    epoch {round(state.epoch)}: loss {float(logs['loss']):.4f}")


def tiny_config() -> GPT2Config:
    # Without dropout, which draws other numbers on other devices; and without a cache of keys and values, which
    # training does not need (it would be joined like the other outputs).
    return GPT2Config(
        vocab_size=NUM_WORDS,
        n_positions=LONGEST,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=1,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        use_cache=False,
    )


def sequences() -> list[torch.Tensor]:
    """Return sequences that count upwards from a random word, of random lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, LONGEST + 1, (NUM_SEQUENCES,), generator=generator).tolist()
    starts = torch.randint(2, NUM_WORDS - LONGEST, (NUM_SEQUENCES,), generator=generator).tolist()
    return [torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]


def padded(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    words = nn.utils.rnn.pad_sequence(batch, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in batch], batch_first=True)
    return {"input_ids": words, "attention_mask": mask, "labels": words.masked_fill(mask == 0, IGNORED)}


if __name__ == "__main__":
    main()
