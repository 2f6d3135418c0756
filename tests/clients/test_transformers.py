"""The Trainer of transformers, unmodified, on two replicas: its numbers are those of one device.

The models are tiny and random, the data invented: nothing is downloaded.
"""

import copy
import dataclasses
import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono
from unisono.scripts import trainer as adapted
from unisono.scripts import wrapper
from unisono.scripts.first_step import FirstStepComparison
from unisono.scripts.wrapper import Settings

transformers = pytest.importorskip("transformers", reason="the Trainer of the library transformers")
pytest.importorskip("accelerate", reason="the Trainer needs it")

WORDS, LENGTH, CLASSES, STEPS, BATCH_ROWS = 30, 8, 3, 10, 8
IGNORED = -100
SMALL = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
BERT = SMALL | {"num_attention_heads": 2, "max_position_embeddings": LENGTH, "num_labels": CLASSES}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def gpt2(dropout: float = 0.0) -> nn.Module:
    """Divides by the number of tokens that the Trainer gives it; its labels are shifted."""
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert_words() -> nn.Module:
    """Divides by the number of tokens that the Trainer gives it."""
    return transformers.BertForMaskedLM(transformers.BertConfig(**BERT, **NO_DROPOUT))


def bert_classes() -> nn.Module:
    """Takes the number of tokens, ignores it, and returns a mean over rows."""
    return transformers.BertForSequenceClassification(transformers.BertConfig(**BERT, **NO_DROPOUT))


def bert_tags() -> nn.Module:
    """Takes the number of tokens, ignores it, and returns a mean over labels: some rows have many, some few."""
    return transformers.BertForTokenClassification(transformers.BertConfig(**BERT, **NO_DROPOUT))


def sequences(model: nn.Module, num_rows: int) -> list[dict[str, torch.Tensor]]:
    """Return padded sequences that count upwards, with labels for the model; the third of four rows may have none."""
    generator = torch.Generator().manual_seed(num_rows)
    rows = []
    for number in range(num_rows):
        length, start = (int(torch.randint(low, high, (), generator=generator)) for low, high in ((2, 9), (2, 20)))
        words, mask = torch.zeros(2, LENGTH, dtype=torch.long)
        words[:length], mask[:length] = torch.arange(start, start + length), 1
        labels = words.masked_fill((mask == 0) | (number % 4 == 2), IGNORED)
        if isinstance(model, transformers.BertForSequenceClassification):
            labels = torch.tensor(start % CLASSES)
        elif isinstance(model, transformers.BertForTokenClassification):
            labels = torch.where(labels == IGNORED, IGNORED, labels % CLASSES)
        rows.append({"input_ids": words, "attention_mask": mask, "labels": labels})
    return rows


def arguments(folder: Path, num_devices: int, **options: Any) -> Any:
    """Return the arguments of a script that trains on so many devices; a batch has the same rows for any number."""
    given = {
        "max_steps": STEPS,
        "optim": "sgd",  # others magnify rounding where a gradient is zero
        "learning_rate": 0.3,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    args = transformers.TrainingArguments(
        output_dir=str(folder), report_to="none", disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False,
        per_device_train_batch_size=BATCH_ROWS // num_devices, per_device_eval_batch_size=BATCH_ROWS // num_devices,
        **given | options,
    )  # fmt: skip
    args._n_gpu = num_devices  # as it is on a machine with so many GPUs
    return args


def results(
    model: nn.Module,
    args: Any,
    *,
    num_rows: int = 45,
    trainer_class: type | None = None,
    resume: Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return what a Trainer makes of a copy of the model: losses and norms of gradients, and what it makes later."""
    trainer = (trainer_class or transformers.Trainer)(
        model=copy.deepcopy(model), args=args, train_dataset=sequences(model, num_rows),
        eval_dataset=sequences(model, 11), **options,
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    before = trainer.evaluate()["eval_loss"]
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    history = trainer.state.log_history
    predicted = trainer.predict(sequences(model, 9))  # the last batch has one row
    found = {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "norms": [entry["grad_norm"] for entry in history if "grad_norm" in entry],
        "evaluated": [before, *[entry["eval_loss"] for entry in history if "eval_loss" in entry]],
        "predictions": torch.from_numpy(predicted.predictions),
        "loss of predictions": predicted.metrics["test_loss"],
        "weights": trainer.model.state_dict(),
    }
    assert trainer.args.n_gpu == args.n_gpu
    return found


def assert_as_on_one_device(
    make: Callable[[], nn.Module], folder: Path, installed: Any, num_rows: int = 45, **options: Any
) -> None:
    """Compare a training on two replicas with one on one device, and check that one wrapper did all of it."""
    torch.manual_seed(0)
    model, forwards = make(), []
    own = {name: options.pop(name) for name in ("trainer_class", "compute_loss_func") if name in options}
    counting = model.register_forward_hook(lambda *_: forwards.append(None))
    one = results(model, arguments(folder, 1, **options), num_rows=num_rows, **own)
    counting.remove()
    two = results(model, arguments(folder, 2, **options), num_rows=num_rows, **own)
    torch.testing.assert_close(two, one, **TOLERANCE)
    assert len(two["losses"]) == STEPS
    report = installed.report()
    assert report.devices == ((torch.device("cpu"),) * 2,)
    assert report.forwards == len(forwards)


@pytest.mark.parametrize("make", [gpt2, bert_tags])
def test_ten_steps(make: Callable[[], nn.Module], tmp_path: Path, installed: Any) -> None:
    """X8: the Trainer, which sees two devices: losses, gradients, weights, evaluations, predictions; one row last."""
    assert_as_on_one_device(make, tmp_path, installed, num_rows=33, eval_strategy="steps", eval_steps=4)


def smoothed(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
    """Return a loss over the whole batch, as a script may have one: it gets the outputs of all replicas."""
    losses = nn.functional.cross_entropy(
        outputs.logits.transpose(1, 2), labels, reduction="none", label_smoothing=0.1, ignore_index=IGNORED
    )
    return losses.sum() / num_items_in_batch


class OwnLoss(transformers.Trainer):
    """Scripts often take the loss off the output themselves."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


MODELS = [gpt2, bert_words, bert_classes, bert_tags]
WAYS: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 3},
    "one row last, accumulation": {"gradient_accumulation_steps": 2, "num_rows": 33},
    "label smoothing": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    "no average of tokens": {"average_tokens_across_devices": False},
    "own compute_loss": {"trainer_class": OwnLoss, "gradient_accumulation_steps": 2},
}


QUICK = {*zip(MODELS, WAYS, strict=False), (bert_tags, "accumulation"), (gpt2, "own compute_loss")}


@pytest.mark.parametrize(
    ("make", "way"),
    [
        pytest.param(make, way, marks=[] if (make, way) in QUICK else pytest.mark.slow)
        for make in MODELS
        for way in WAYS
    ],
)
def test_ways_to_train(make: Callable[[], nn.Module], way: str, tmp_path: Path, installed: Any) -> None:
    """X8: the same with accumulation, label smoothing, a loss of the script's own."""
    assert_as_on_one_device(make, tmp_path, installed, **WAYS[way], eval_strategy="steps", eval_steps=4)


def test_a_loss_function_of_the_script(tmp_path: Path, installed: Any) -> None:
    """X8: a loss function of the script gets the gathered outputs, all labels, and one number of tokens."""
    assert_as_on_one_device(bert_tags, tmp_path, installed, compute_loss_func=smoothed, gradient_accumulation_steps=2)


def test_checkpoint_and_resume(tmp_path: Path, installed: Any) -> None:
    """X8: the Trainer's checkpoint has the model's own names; a resumed training ends as an uninterrupted one."""
    torch.manual_seed(0)
    model, saving = gpt2(), {"save_strategy": "steps", "save_steps": 4}
    one = results(model, arguments(tmp_path / "one", 1, **saving))
    interrupted = results(model, arguments(tmp_path / "two", 2, **saving))
    names = set(transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "two" / "checkpoint-4").state_dict())
    assert names == set(model.state_dict())
    resumed = results(model, arguments(tmp_path / "two", 2, **saving), resume=tmp_path / "two" / "checkpoint-4")
    torch.testing.assert_close(interrupted, one, **TOLERANCE)
    torch.testing.assert_close(resumed["weights"], one["weights"], **TOLERANCE)
    torch.testing.assert_close(resumed["losses"][-6:], one["losses"][-6:], **TOLERANCE)


def test_mixed_precision(tmp_path: Path, installed: Any) -> None:
    """X8: the Trainer leaves the autocast to accelerate, which gives it to a model on one device only."""
    torch.manual_seed(0)
    model, seen = gpt2(), []
    model.lm_head.register_forward_hook(lambda *args: seen.append(args[-1].dtype))
    one = results(model, arguments(tmp_path, 1, bf16=True))
    num_forwards = len(seen)
    two = results(model, arguments(tmp_path, 2, bf16=True))
    assert len(seen) > num_forwards
    assert {*seen} == {torch.bfloat16}
    torch.testing.assert_close(two["losses"], one["losses"], rtol=0, atol=10 * torch.finfo(torch.bfloat16).eps)
    assert two["predictions"].dtype == one["predictions"].dtype == torch.float32


@pytest.mark.parametrize("make", [gpt2, bert_tags])
def test_the_first_step_is_compared_with_one_device(
    make: Callable[[], nn.Module], tmp_path: Path, installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X8, X10: also with rows that have more labels than others, and a number of tokens."""
    comparison = FirstStepComparison({})
    monkeypatch.setattr(
        wrapper, "installed", dataclasses.replace(wrapper.installed or Settings(), comparison=comparison)
    )
    model = make()
    transformers.Trainer(model, arguments(tmp_path, 2, max_steps=2), train_dataset=sequences(model, 16)).train()
    assert comparison.conclusion() == "first steps compared with one device: 1 the same"


def test_replicas_do_not_run_in_parts(tmp_path: Path, installed: Any) -> None:
    """X8: of a part it is not known how many of the replica's tokens are its own. Rows without labels can be parted."""
    model = gpt2()
    trainer = transformers.Trainer(model, arguments(tmp_path, 2))
    wrapped = trainer._wrap_model(model)
    wrapped.parts = 2
    batch = transformers.default_data_collator(sequences(model, 8))
    with pytest.raises(RuntimeError, match=r"in parts .*the weight of each part in a mean is unknown"):
        wrapped(**batch)
    del batch["labels"]
    torch.testing.assert_close(wrapped(**batch).logits, model(**batch).logits)


def test_a_trainer_without_a_wrapper_of_ours_stays_as_it_is(tmp_path: Path, no_accelerators: None) -> None:
    """X8, X2: after uninstall, torch's wrapper and the Trainer's arithmetic for several devices."""
    seen = []

    class Seen(transformers.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            seen.append((self.args.n_gpu, type(self.model_wrapped)))
            return super().compute_loss(*args, **kwargs)

    with unisono.install(["cpu", "cpu"]):
        pass
    model = bert_tags()
    for num_devices in (1, 2):
        args = arguments(tmp_path, num_devices, max_steps=1)
        Seen(model, args, train_dataset=sequences(model, 8)).train()
    assert seen == [(1, type(model)), (2, nn.DataParallel)]


def test_a_wrapper_that_a_script_gives_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """X8, S5: a script's own wrapper, without `install`: the error names the `in_dims` for one device's losses."""
    torch.manual_seed(0)
    model = gpt2()
    one = results(model, arguments(tmp_path, 1, max_steps=2))
    monkeypatch.delitem(sys.modules, "transformers.trainer")  # an `install` before this test has changed the class
    trainer_class = importlib.import_module("transformers.trainer").Trainer

    def losses(**options: Any) -> list[float]:  # for several devices the Trainer repeats its number of tokens
        trained = copy.deepcopy(model)
        trainer = trainer_class(trained, arguments(tmp_path, 2, max_steps=2), train_dataset=sequences(model, 45))
        trainer.model_wrapped = unisono.DataParallel(trained, ["cpu", "cpu"], **options)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    with pytest.raises(ValueError, match=r"'num_items_in_batch'\] has 2\. .* in_dims={'num_items_in_batch': None}\)\."):
        losses()
    assert losses(in_dims={"num_items_in_batch": None}) == pytest.approx(one["losses"], rel=1e-5, abs=1e-5)


def test_the_trainer_is_adapted_when_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """X8: `unisono run` installs before the script imports anything; and what was never imported is left alone."""
    finders = [*sys.meta_path]
    monkeypatch.delitem(sys.modules, "transformers.trainer")
    with unisono.install(["cpu", "cpu"]):
        assert adapted._MODULE not in sys.modules
        later = importlib.import_module("transformers.trainer").Trainer
        assert later.compute_loss.__wrapped__.__qualname__ == "Trainer.compute_loss"
    assert sys.meta_path == finders
    monkeypatch.delitem(sys.modules, "transformers.trainer")
    with unisono.install(["cpu", "cpu"]):
        assert len(sys.meta_path) == len(finders) + 1
    assert sys.meta_path == finders


SCRIPT = """
import sys
import torch
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

torch.manual_seed(0)
model = BertForMaskedLM(BertConfig(vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
words = torch.randint(0, 20, (40, 6))
rows = [{"input_ids": row, "labels": torch.where(row < 10, row, -100)} for row in words]
args = TrainingArguments(output_dir=sys.argv[1], max_steps=4, per_device_train_batch_size=int(sys.argv[2]), optim="sgd",
    logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, dataloader_pin_memory=False)
trainer = Trainer(model, args, train_dataset=rows)
trainer.train()
print(*[entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
"""


@pytest.mark.slow
def test_a_script_that_is_left_as_it_is(tmp_path: Path, no_accelerators: None) -> None:
    """X8, X1: with --count-replicas the Trainer sees as many devices as there are replicas; without, it says so."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def run(rows: int, *options: str) -> tuple[list[float], str]:
        command = [sys.executable, "-m", "unisono", "run", "--devices", "cpu*2", *options, script, tmp_path, str(rows)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        return [float(word) for word in done.stdout.splitlines()[-1].split()], done.stderr.splitlines()[-1]

    (one, no_wrapper), (two, closing) = run(8), run(4, "--count-replicas")
    assert "used neither torch.nn.DataParallel" in no_wrapper
    assert "--count-replicas" in no_wrapper
    assert "1 wrapper on 2 replicas (2 x cpu); 32 rows in 4 forwards" in closing
    assert two == pytest.approx(one, rel=1e-5, abs=1e-5)
