"""Models of the library transformers with default options: their outputs hold caches of keys and values.

The models are tiny and have random parameters: nothing is downloaded.
"""

import copy
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import unisono
from helpers.contract import Wrap, at_one_place

os.environ.update(TRANSFORMERS_OFFLINE="1", HF_HUB_OFFLINE="1")  # read when it is imported
transformers = pytest.importorskip("transformers", reason="models of the library transformers")

WORDS, ROWS, LENGTH = 40, 5, 7
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1
        )
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=WORDS, num_key_value_heads=1, **SMALL)
    ),
    # Its caches keep the last three tokens of seven, and their number.
    "sliding window": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(vocab_size=WORDS, num_key_value_heads=1, sliding_window=4, **SMALL)
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
        )
    ),
}


def tokens() -> torch.Tensor:
    return torch.randint(3, WORDS, (ROWS, LENGTH))


def tensors_of(cache: Any) -> list[torch.Tensor]:
    return [tensor for layer in cache for tensor in layer if tensor is not None]


def halves(cache: Any) -> list[Any]:
    is_pair = isinstance(cache, transformers.EncoderDecoderCache)
    return [cache.self_attention_cache, cache.cross_attention_cache] if is_pair else [cache]


@at_one_place
@pytest.mark.parametrize("name", MODELS)
def test_caches_of_keys_and_values_are_joined(wrap: Wrap, name: str) -> None:
    """G9: all rows in replica order, with what the cache says about them; gradients through it are the plain ones."""
    model, x = MODELS[name]().eval(), tokens()

    def results(call: Callable[..., Any]) -> tuple[Any, list[torch.Tensor]]:
        output = call(input_ids=x, labels=x)
        cache = tensors_of(output.past_key_values)
        total = sum(tensor.square().sum() for tensor in (output.logits, *cache) if tensor.requires_grad)
        return output, [output.logits, *cache, *torch.autograd.grad(total, [*model.parameters()])]

    (expected, plain), (actual, ours) = results(model), results(wrap(model, 2, scalars={"loss": "mean"}))
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-6, atol=0)  # computed in float32
    assert type(actual) is type(expected)
    for mine, theirs in zip(halves(actual.past_key_values), halves(expected.past_key_values), strict=True):
        assert type(mine) is type(theirs)
        assert [type(layer) for layer in mine.layers] == [type(layer) for layer in theirs.layers]
        assert mine.get_seq_length() == theirs.get_seq_length() == LENGTH


@at_one_place
@pytest.mark.parametrize(
    ("name", "kind"), [("gpt2", "filled"), ("sliding window", "filled"), ("gpt2", "empty"), ("gpt2", "with a config")]
)
def test_a_cache_as_an_input_is_split_by_rows(wrap: Wrap, name: str, kind: str) -> None:
    """S14: each replica continues its own rows; the caller's cache stays as it was, and the grown one is returned.
    Replicas that wrote into one empty cache would see each other's rows."""
    model, x, y = MODELS[name]().eval(), tokens(), tokens()[:, :2]
    wrapped = wrap(model, 2)
    with torch.no_grad():
        before = transformers.DynamicCache(config=model.config if kind == "with a config" else None)
        if kind == "filled":
            before = wrapped(x).past_key_values
        length, kept = before.get_seq_length(), [tensor.clone() for tensor in tensors_of(before)]
        assert length == (LENGTH if kind == "filled" else 0)
        actual = wrapped(y, past_key_values=before)
        torch.testing.assert_close(tensors_of(before), kept, rtol=0, atol=0)
        assert before.get_seq_length() == length
        expected = model(y, past_key_values=copy.deepcopy(before))
    torch.testing.assert_close(actual.logits, expected.logits)
    torch.testing.assert_close(tensors_of(actual.past_key_values), tensors_of(expected.past_key_values))
    assert actual.past_key_values.get_seq_length() == length + 2


@at_one_place
def test_generate_on_every_device(wrap: Wrap) -> None:
    """R12: the plain module's tokens."""
    plain, x = MODELS["gpt2"]().eval(), tokens()
    options = {"do_sample": False, "min_new_tokens": 6, "max_new_tokens": 6, "pad_token_id": 0}
    model = wrap(plain, 2, out_dims=unisono.pad(1, value=0))
    expected = plain.generate(x, attention_mask=torch.ones_like(x), **options)
    actual = model.call("generate", x, attention_mask=torch.ones_like(x), **options)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@at_one_place
def test_caches_that_cannot_be_split_or_joined(wrap: Wrap) -> None:
    """G9, S5: replicas' caches of different lengths; a cache with the rows of another batch; one of unknown layout."""
    cut = nn.Identity()
    cut.forward = lambda x: _cache_of(x[:, : int(x[0, 0])])
    x = torch.ones(4, 6, dtype=torch.long)
    x[2:] = 3
    with pytest.raises(
        ValueError, match=r"they differ in \.layers\[0\]\.keys \(replica 0: .*use_cache=False"
    ) as raised:
        wrap(cut, 2)(x)
    assert raised.value.__notes__[0] == "while gathering output"
    with pytest.raises(ValueError, match=r"inputs\[0\] has 4, kwargs\['past'\] has 3"):
        wrap(nn.Identity(), 2)(x, past=_cache_of(x[:3]))
    room = transformers.StaticCache(MODELS["gpt2"]().config, max_cache_len=8)
    pair = transformers.EncoderDecoderCache(transformers.DynamicCache(), room)
    with pytest.raises(TypeError, match="cannot split or join this EncoderDecoderCache: its StaticCache") as raised:
        wrap(nn.Identity(), 2)(x, past=pair)
    assert raised.value.__notes__ == ["while scattering kwargs['past']"]
    cache = transformers.DynamicCache([(torch.zeros(2, 1, 3, 4),) * 2, (torch.zeros(3, 1, 3, 4),) * 2])
    with pytest.raises(ValueError, match=r"this DynamicCache have different batch sizes, \[2, 3\]"):
        wrap(nn.Identity(), 2)(cache)


def _cache_of(x: torch.Tensor) -> Any:
    keys = x[:, None, :, None].double()
    return transformers.DynamicCache([(keys, keys)])


@pytest.mark.parametrize(("name", "attention"), [("gpt2", "eager"), ("gpt2", "sdpa"), ("t5", "eager")])
def test_models_with_dropout_are_compared(name: str, attention: str) -> None:
    """N12: also with that of attention."""
    model, x = MODELS[name]().train(), tokens()
    model.set_attn_implementation(attention)
    inputs = {"input_ids": x, "labels": x}
    report = unisono.verify(model, inputs, device_ids=["cpu", "cpu"], scalars={"loss": "mean"}, show=False)
    assert report.same, str(report)
    assert any("dropout drops nothing" in note for note in report.notes)


STOCK: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(vocab_size=WORDS, **SMALL)),
    "vit": lambda: transformers.ViTModel(transformers.ViTConfig(image_size=32, patch_size=8, **SMALL)),
    "swin": lambda: transformers.SwinModel(
        transformers.SwinConfig(
            image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4
        )
    ),
    "funnel": lambda: transformers.FunnelModel(
        transformers.FunnelConfig(
            vocab_size=WORDS, block_sizes=[1, 1], num_decoder_layers=1, d_model=16, n_head=2, d_head=8, d_inner=32
        )
    ),
}


@at_one_place
@pytest.mark.parametrize("name", STOCK)
def test_hidden_states_of_stock_models(wrap: Wrap, name: str) -> None:
    """R6: the first forward installs hooks, and others keep sizes and tables: as on one device, with nothing to say."""
    plain = STOCK[name]().eval()
    model = wrap(copy.deepcopy(plain), 2)
    given = {"pixel_values": torch.randn(6, 3, 32, 32)} if name in ("vit", "swin") else {"input_ids": tokens()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for mode in (torch.enable_grad, torch.no_grad, torch.enable_grad):
            with mode():
                found, expected = (each(**given, output_hidden_states=True).hidden_states for each in (model, plain))
            torch.testing.assert_close([*found], [*expected], rtol=1e-5, atol=1e-5)
