"""Stop rules and incremental text, exact inside a block of several tokens."""

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel as ByteLevelPreTokenizer

from dspark_ray.engine.output import OutputProcessor, TextDecoder
from dspark_ray.request import SamplingParams


@pytest.fixture(scope="module")
def bytes_decoder() -> TextDecoder:
    """A tokenizer with one token a byte (ids in the order of the byte alphabet) and no merges."""
    alphabet = sorted(ByteLevelPreTokenizer.alphabet())
    tokenizer = Tokenizer(BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevelPreTokenizer(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevel()
    return TextDecoder(tokenizer)


def processor(decoder: TextDecoder | None, eos: frozenset[int] = frozenset(), **params: object) -> OutputProcessor:
    return OutputProcessor(SamplingParams(**{"max_tokens": 100, **params}), eos, decoder)


def test_a_stop_inside_a_block_wins_over_a_later_length_limit() -> None:
    delta = processor(None, max_tokens=5, stop_token_ids=(12,)).push([10, 11, 12, 20, 21, 22])
    assert delta.token_ids == (10, 11, 12)
    assert delta.finish_reason == "stop"


def test_a_stop_beyond_the_length_limit_is_not_seen() -> None:
    delta = processor(None, max_tokens=5, stop_token_ids=(22,)).push([10, 11, 12, 20, 21, 22])
    assert delta.token_ids == (10, 11, 12, 20, 21)
    assert delta.finish_reason == "length"


@pytest.mark.parametrize("limit", range(1, 21))
def test_exactly_max_tokens_are_emitted_whatever_the_blocks(limit: int) -> None:
    output = processor(None, max_tokens=limit)
    emitted: list[int] = []
    while True:
        delta = output.push(list(range(8)))
        emitted.extend(delta.token_ids)
        if delta.finish_reason:
            break
    assert len(emitted) == limit


def test_eos_ends_a_request_unless_ignored() -> None:
    eos = frozenset([2])
    assert processor(None, eos).push([1, 2, 3]).token_ids == (1, 2)
    assert processor(None, eos, ignore_eos=True).push([1, 2, 3]).finish_reason is None


@pytest.mark.parametrize("split", range(1, 12))
def test_a_stop_string_is_found_wherever_blocks_split_it(bytes_decoder: TextDecoder, split: int) -> None:
    ids = bytes_decoder.tokenizer.encode("hello STOP bye").ids
    output = processor(bytes_decoder, stop=("STOP",))
    text, finish = "", None
    for chunk in (ids[:split], ids[split:]):
        delta = output.push(chunk)
        assert "S" not in text + delta.text
        text += delta.text
        finish = finish or delta.finish_reason
        if finish:
            break
    assert (text, finish) == ("hello ", "stop")


def test_text_that_only_starts_like_a_stop_string_is_shown_at_the_end(bytes_decoder: TextDecoder) -> None:
    ids = bytes_decoder.tokenizer.encode("about ST").ids
    output = processor(bytes_decoder, stop=("STOP",), max_tokens=len(ids))
    delta = output.push(ids)
    assert (delta.text, delta.finish_reason) == ("about ST", "length")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_code_points_split_over_blocks_come_out_whole(bytes_decoder: TextDecoder, size: int) -> None:
    text = "naïve 日本語 👩‍👩‍👧‍👦 end"
    ids = bytes_decoder.tokenizer.encode(text).ids
    output = processor(bytes_decoder, max_tokens=len(ids))
    shown = [output.push(ids[start : start + size]).text for start in range(0, len(ids), size)]
    assert "".join(shown) == text
    assert all("\ufffd" not in piece for piece in shown)


def test_replaying_emitted_tokens_continues_the_text_without_repeating_it(bytes_decoder: TextDecoder) -> None:
    ids = bytes_decoder.tokenizer.encode("日本語 text").ids
    whole, resumed = processor(bytes_decoder), processor(bytes_decoder)
    first = whole.push(ids[:4])
    resumed.replay(tuple(ids[:4]))
    assert resumed.push(ids[4:]).text == whole.push(ids[4:]).text
    assert first.text == "日"
    assert resumed.num_tokens == len(ids)
