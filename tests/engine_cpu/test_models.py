"""Our models compute what transformers computes."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from paged_model import PagedModel, load_model

from configs.schema import ModelConfig
from replicas.engine.models.layers import packed_linear, packs_bf16, plain_linear

PROMPT = torch.randint(0, tiny_models.VOCAB_SIZE, (77,), generator=torch.Generator().manual_seed(1)).tolist()
CHUNKINGS = ([77], [1, 15, 17, 44], [33, 44], [16, 16, 16, 16, 13])


def in_chunks(tokens, sizes):
    pieces, start = [], 0
    for size in sizes:
        pieces.append(tokens[start : start + size])
        start += size
    assert start == len(tokens)
    return pieces


@pytest.fixture(scope="module", params=tiny_models.CONFIGS)
def pair(request, tmp_path_factory):
    """(ours, transformers' model) of one family."""
    directory = tmp_path_factory.mktemp(request.param)
    theirs = tiny_models.make(request.param, directory)
    return load_model(directory), theirs


@pytest.mark.parametrize("sizes", CHUNKINGS, ids=str)
def test_logits_of_every_position_equal_those_of_transformers_however_the_prompt_is_chunked(pair, sizes):
    ours, theirs = pair
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    paged = PagedModel(ours, len(PROMPT))
    logits = torch.cat([paged.feed(piece) for piece in in_chunks(PROMPT, sizes)])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_greedy_decoding_gives_the_tokens_of_transformers(pair):
    ours, theirs = pair
    expected = theirs.generate(
        torch.tensor([PROMPT]), max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=None
    )[0, len(PROMPT) :].tolist()
    assert PagedModel(ours, len(PROMPT) + 20).greedy(PROMPT, 20) == expected


def test_a_model_longer_than_one_attention_tile_still_equals_transformers(tmp_path):
    theirs = tiny_models.make("llama", tmp_path, max_position_embeddings=1024)
    tokens = (PROMPT * 6)[:400]
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    paged = PagedModel(load_model(tmp_path), 400)
    logits = torch.cat([paged.feed(tokens[:7]), paged.feed(tokens[7:])])
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198],  # a chat turn
        [504, 2443, 282, 260, 2905, 28, 284],  # bare text
    ],
    ids=["chat", "text"],
)
def test_the_embedded_gguf_gives_the_logits_that_transformers_reads_from_it(embedded_reference, tokens):
    with torch.inference_mode():
        expected = embedded_reference(torch.tensor([tokens])).logits[0]
    paged = PagedModel(load_model(ModelConfig().source), len(tokens))
    logits = torch.cat([paged.feed(tokens[:5]), paged.feed(tokens[5:])])
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-4)


def test_bf16_stays_within_rounding_of_fp32(tmp_path):
    tiny_models.make("qwen3", tmp_path, initializer_range=0.05)
    exact = PagedModel(load_model(tmp_path), len(PROMPT)).feed(PROMPT)
    rounded = PagedModel(load_model(tmp_path, dtype=torch.bfloat16), len(PROMPT)).feed(PROMPT).float()
    assert (rounded - exact).norm() < 0.03 * exact.norm()


@pytest.mark.skipif(not packs_bf16(), reason="oneDNN packs no bf16 on this CPU")
@pytest.mark.parametrize("num_rows", [1, 16, 77])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_linear_equals_its_plain_twin(num_rows, with_bias):
    torch.manual_seed(0)
    weight, x = torch.randn(48, 32, dtype=torch.bfloat16), torch.randn(num_rows, 32, dtype=torch.bfloat16)
    bias = torch.randn(48, dtype=torch.bfloat16) if with_bias else None
    torch.testing.assert_close(packed_linear(weight, bias)(x), plain_linear(weight, bias)(x))
