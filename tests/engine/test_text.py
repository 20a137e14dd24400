"""Text streams: whole characters, stop strings wherever they fall, nothing shown that is taken back."""

import pytest

from kvjax.engine.text import TextStream


def decode_bytes(ids):
    """Token ids are bytes, as in the byte-level tokenizers of most models; 0 is a special token."""
    return bytes(one for one in ids if one).decode("utf-8", errors="replace")


def stream(text, stop=(), tail=b""):
    """Pushes a text byte by byte until it stops; returns the stream, the pieces shown and the tokens pushed."""
    one, pieces, pushed = TextStream(decode_bytes, stop), [], 0
    for token in text.encode() + tail:
        pushed += 1
        stopped = one.push(token)
        pieces.append(one.take())
        if stopped:
            break
    pieces.append(one.finish())
    return one, pieces, pushed


@pytest.mark.parametrize("text", ["plain", "Grüße, 世界", "👩‍🚀 in space", "", " leading and trailing "])
def test_a_stream_is_the_text(text):
    one, pieces, _ = stream(text)
    assert one.text == text == "".join(pieces)


def test_no_piece_holds_half_a_character():
    _, pieces, _ = stream("a世b")
    assert pieces == ["a", "", "", "世", "b", ""]


def test_bytes_that_never_become_a_character_are_shown_at_the_end():
    one, pieces, _ = stream("a", tail="世".encode()[:2])
    assert pieces == ["a", "", "", "\ufffd"] and one.text == "a\ufffd"


@pytest.mark.parametrize("stop, text, pushed", [(("llo",), "he", 5), (("o w",), "hell", 7), (("ö", "l"), "he", 3)])
def test_a_stop_string_across_tokens_ends_the_text_before_it(stop, text, pushed):
    one, pieces, used = stream("hello world", stop)
    assert one.stopped and one.text == text == "".join(pieces)
    assert used == pushed


def test_the_earliest_of_several_stop_strings_counts():
    assert stream("hello", ("lo", "ell"))[0].text == "h"


def test_a_character_that_completes_a_stop_string_in_its_last_byte():
    one, _, used = stream("ab世cd", ("世",))
    assert one.text == "ab" and used == 5


def test_nothing_is_shown_that_a_stop_string_may_take_back():
    _, pieces, _ = stream("abcSTO and on", ("STOP",))
    assert "".join(pieces[:6]) == "abc"
    assert "".join(pieces) == "abcSTO and on"


def test_special_tokens_have_no_text():
    one = TextStream(decode_bytes)
    assert [one.push(token) for token in (0, 65, 0, 66, 0)] == [False] * 5
    assert one.finish() == "AB"


def test_a_decoder_that_drops_leading_spaces():
    """SentencePiece decoders give a word its space only after another word."""
    words = {1: "the", 2: "quick", 3: "fox"}
    one = TextStream(lambda ids: " ".join(words[token] for token in ids))
    for token in (1, 2, 3):
        one.push(token)
    assert one.finish() == "the quick fox"
