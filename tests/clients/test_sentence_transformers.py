"""sentence-transformers: training with negatives from the whole batch, and embeddings of many sentences."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono
from helpers.comparisons import assert_same_state
from helpers.contract import Wrap
from unisono.scripts.install import Installation

library = pytest.importorskip("sentence_transformers")
modules = pytest.importorskip("sentence_transformers.models")
losses = pytest.importorskip("sentence_transformers.losses")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = [f"word{number}" for number in range(30)]


@pytest.fixture
def model(tmp_path: Path, float64: None) -> Any:
    """A tiny BERT with random weights, and a tokenizer of 30 words, as files of the library transformers."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    words = tokenizers.models.WordLevel({word: number for number, word in enumerate(names)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    fast.save_pretrained(tmp_path / "bert")
    config = transformers.BertConfig(
        vocab_size=len(names),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    bert = modules.Transformer(str(tmp_path / "bert"), max_seq_length=12)
    pooling = modules.Pooling(16, pooling_mode="mean")
    return library.SentenceTransformer(modules=[bert, pooling], device="cpu")


def sentences(number: int, seed: int) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 9, (number,), generator=generator).tolist()
    return [
        " ".join(WORDS[word] for word in torch.randint(0, 30, (length,), generator=generator)) for length in lengths
    ]


def train(model: Any, folder: Path, wrapped: unisono.DataParallel | None = None, num_devices: int = 1) -> list[float]:
    args = library.SentenceTransformerTrainingArguments(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=8 // num_devices,
        learning_rate=0.5,
        optim="sgd",
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    args._n_gpu = num_devices  # as it is on a machine with so many GPUs
    pairs = datasets.Dataset.from_dict({"anchor": sentences(28, 1), "positive": sentences(28, 2)})
    trainer = library.SentenceTransformerTrainer(
        model, args, train_dataset=pairs, loss=losses.MultipleNegativesRankingLoss(model)
    )
    if wrapped is not None:
        trainer.model_wrapped = wrapped
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainer_with_negatives_of_the_whole_batch(wrap: Wrap, model: Any, tmp_path: Path) -> None:
    """X9: SentenceTransformerTrainer, MultipleNegativesRankingLoss over the rows of all replicas: losses, weights."""
    plain = copy.deepcopy(model)
    expected = train(plain, tmp_path / "plain")
    wrapped = wrap(model)
    actual = train(model, tmp_path / "wrapped", wrapped)
    assert len(wrapped.replica_timings) == 2
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)
    assert_same_state(model, plain, 1e-6)


def test_trainer_that_wraps(installed: Installation, model: Any, tmp_path: Path) -> None:
    """X9: the same where the trainer sees two devices, and wraps the model itself: unisono is installed."""
    plain = copy.deepcopy(model)
    expected = train(plain, tmp_path / "plain")
    actual = train(model, tmp_path / "wrapped", num_devices=2)
    assert len(installed.report().devices[0]) == 2
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)
    assert_same_state(model, plain, 1e-6)


def embeddings_by_map(model: unisono.DataParallel, texts: list[str]) -> torch.Tensor:
    batches = [(model.preprocess(texts[start : start + 6]),) for start in range(0, len(texts), 6)]
    with model.eval().map(batches) as outputs:
        return torch.cat([output["sentence_embedding"] for output in outputs])


def test_map_beside_encode(wrap: Wrap, model: Any) -> None:
    """X9: `map` over batches of features: the embeddings of `encode`."""
    texts = sentences(20, 3)
    expected = model.encode(texts, batch_size=6, convert_to_tensor=True)
    torch.testing.assert_close(embeddings_by_map(wrap(model), texts), expected)


def test_map_beside_the_pool(model: Any) -> None:
    """X9: `map`: the embeddings of `encode` with a pool of two CPU processes."""
    texts = sentences(20, 3)
    pool = model.start_multi_process_pool(["cpu", "cpu"])
    try:
        expected = model.encode(texts, batch_size=6, pool=pool, chunk_size=10)
    finally:
        model.stop_multi_process_pool(pool)
    actual = embeddings_by_map(unisono.DataParallel(model, ["cpu", "cpu"]), texts)
    torch.testing.assert_close(actual, torch.as_tensor(expected))
