"""peft: LoRA in a language model of transformers, wrapped."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.comparisons import assert_same_gradients, assert_same_state
from helpers.contract import Wrap

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


def model_with_adapters() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)


def train(model: Any, words: torch.Tensor) -> list[float]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=words, labels=words, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_lora(wrap: Wrap, float64: None, tmp_path: Path) -> None:
    """X9: a wrapped PeftModel: losses, gradients of the adapters alone, merge_and_unload, save_pretrained."""
    plain = model_with_adapters()
    model = copy.deepcopy(plain)
    wrapped = wrap(model, scalars="mean")
    words = torch.randint(3, 40, (5, 7))
    torch.testing.assert_close(train(wrapped, words), train(plain, words), rtol=1e-6, atol=0)
    assert_same_gradients(model, plain, 1e-6)  # transformers computes the loss in float32
    assert_same_state(model, plain, 1e-6)
    assert sum(p.grad is not None for p in model.parameters()) == 8
    wrapped.save_pretrained(tmp_path)
    torch.testing.assert_close(peft.load_peft_weights(str(tmp_path)), peft.get_peft_model_state_dict(model))
    with wrapped.disable_adapter():
        without = wrapped(input_ids=words, use_cache=False).logits
    torch.testing.assert_close(without, plain.unload()(words, use_cache=False).logits)
    expected = wrapped(input_ids=words, use_cache=False).logits
    torch.testing.assert_close(wrap(model.merge_and_unload())(words, use_cache=False).logits, expected)
