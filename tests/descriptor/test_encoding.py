"""No two different values serialise alike: a large random search among values made to be confused."""

import random
from dataclasses import replace

import pytest

from kvjax.descriptor import Adapter, EncodingError, Media, Model, Text, Tokens, decode, encode
from tests.descriptor.examples import EXAMPLE

# Separators, emptiness, numbers in words, lengths and tags of the encoding itself, and look-alikes: e with an accent as
# one character and as two, Latin and Cyrillic a, Greek Omega and Ohm, a zero-width joiner, full-width letters.
TEXTS = (
    "", " ", "\0", "\0\0", "None", "null", "0", "1", "01", "1.0", "True", "a", "а", "é", "e\u0301", "Ω", "\u2126",
    "a\u200d", "ａ", "a,b", "a", ",b", "a|b", "|", "a:b", "=", '"', "'", "\\", "s\0\0\0\0\0\0\0\1a", "()", "a\0b", "\n",
    encode("a").decode("latin-1"), encode(("a", "b")).decode("latin-1"),
)  # fmt: skip
NUMBERS = (0, 1, -1, 10, 2**63, -(2**63), 2**64, 0.0, 1.0, -1.0, 1e-300, float("inf"), 2.0**63)
LEAVES = (*TEXTS, *NUMBERS, None, True, False, b"", b"a", b"\0", b"None")


def draw_value(source: random.Random, depth: int = 3):
    if depth == 0 or source.random() < 0.5:
        return source.choice(LEAVES)
    return tuple(draw_value(source, depth - 1) for _ in range(source.randrange(4)))


def identity(value):
    """The value with its types, so that 1, 1.0 and True differ as they do in the encoding."""
    return tuple(map(identity, value)) if isinstance(value, tuple) else (type(value).__name__, repr(value))


def confused(values, encoder) -> int:
    """Pairs of different values with one encoding, or of equal ones with two."""
    of_bytes, of_value, wrong = {}, {}, 0
    for value in values:
        key, data = repr(identity(value)), encoder(value)
        wrong += of_bytes.setdefault(data, key) != key or of_value.setdefault(key, data) != data
    return wrong


def joined(value) -> bytes:
    """An encoder without types and lengths: what the search must catch."""
    return b"|".join(map(joined, value)) if isinstance(value, tuple) else str(value).encode()


def test_no_two_values_serialise_alike():
    source = random.Random(0)
    values = [draw_value(source) for _ in range(60_000)]
    values += [(a, b) for a in LEAVES for b in LEAVES]
    assert confused(values, encode) == 0
    assert confused(values[:2000], joined) > 100


def test_every_encoding_decodes_to_its_value():
    source = random.Random(1)
    for _ in range(5_000):
        value = draw_value(source)
        assert identity(decode(encode(value))) == identity(value)


def draw_descriptor(source: random.Random):
    """A descriptor whose texts are all adversarial."""

    def text():
        return source.choice(TEXTS)

    def maybe(value):
        return value if source.random() < 0.5 else None

    return replace(
        EXAMPLE,
        tokens=tuple(Tokens(text(), source.randrange(3)) for _ in range(source.randrange(3))),
        model=Model(text(), text()),
        text=maybe(Text(text(), maybe(text()))),
        adapter=maybe(Adapter(text(), text())),
        media=tuple(Media(text(), source.randrange(2), source.randrange(2)) for _ in range(source.randrange(3))),
        tenant=text(),
    )


def test_no_two_descriptors_serialise_or_digest_alike():
    source = random.Random(2)
    seen, digests = {}, {}
    for _ in range(8_000):
        descriptor = draw_descriptor(source)
        key = repr(descriptor)
        assert seen.setdefault(descriptor.to_bytes(), key) == key
        assert digests.setdefault(descriptor.digest, key) == key
    assert len(seen) == len(digests) == len(set(seen.values())) > 7_500


REFUSED = (float("nan"), "\ud800", [1], {"a": 1}, 1j, object(), ("a", []))


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_what_has_no_one_encoding_is_refused(value):
    with pytest.raises(EncodingError):
        encode(value)


def test_what_encode_does_not_write_is_refused():
    good = encode(("a", 1, True))
    one = encode(1)
    for wrong in (
        b"",
        good[:-1],
        good + b"\0",
        good + good,
        b"x" + good[1:],
        one.replace(b"1", b"+"),
        b"i" + (2).to_bytes(8, "big") + b"01",
        b"b" + (1).to_bytes(8, "big") + b"\2",
        b"n" + (1).to_bytes(8, "big") + b"\0",
        b"f" + (3).to_bytes(8, "big") + b"\0\0\0",
        b"s" + (1).to_bytes(8, "big") + b"\xff",
        b"t" + (2**63).to_bytes(8, "big"),
        b"d" + (0).to_bytes(8, "big"),
        encode(Model("a", "b")),
    ):
        with pytest.raises(EncodingError):
            decode(wrong)
    with pytest.raises(EncodingError, match=r"ends within|goes past|cannot be read"):
        nested = b""
        for _ in range(5000):
            nested = b"t" + len(nested).to_bytes(8, "big") + nested
        decode(nested[:-1])
