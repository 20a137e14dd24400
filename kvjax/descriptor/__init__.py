"""The contract between who wrote bytes and who reads them.  See `Descriptor`."""

from kvjax.descriptor.digests import text_digest, token_digest, tokens_of, weights_digest
from kvjax.descriptor.encoding import EncodingError, decode, encode
from kvjax.descriptor.explain import DescriptorMismatch, Difference, explain
from kvjax.descriptor.schema import (
    DESCRIPTOR_VERSION,
    Adapter,
    Descriptor,
    DescriptorError,
    Media,
    Model,
    Positions,
    Quantisation,
    Rope,
    Text,
    Tokens,
)

__all__ = [
    "DESCRIPTOR_VERSION",
    "Adapter",
    "Descriptor",
    "DescriptorError",
    "DescriptorMismatch",
    "Difference",
    "EncodingError",
    "Media",
    "Model",
    "Positions",
    "Quantisation",
    "Rope",
    "Text",
    "Tokens",
    "decode",
    "encode",
    "explain",
    "text_digest",
    "token_digest",
    "tokens_of",
    "weights_digest",
]
