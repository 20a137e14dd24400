"""The append's share of a decode step, against figures worked out by hand."""

from experiments.append_share import append_bytes, share


def test_a_strip_of_tokens_is_moved_for_one_on_tpu():
    # 8 heads × 256 lanes: a strip of 8 tokens in bfloat16 is 32 KiB, read and written; the new token passes as words.
    strip, token = 8 * 8 * 256 * 2, 8 * 256
    assert append_bytes("tpu", 8, 256, 2) == 2 * strip + token * (2 + 4 + 4)
    assert share("tpu", 1024, 8, 256, 2) == (2 * 8 * 2 + 10) / (1024 * 2)


def test_a_gpu_moves_the_new_token_alone():
    assert append_bytes("gpu", 8, 256, 2) == 8 * 256 * (2 + 2 + 2 + 2)
    assert share("gpu", 1024, 8, 256, 1) == 5 / 1024
