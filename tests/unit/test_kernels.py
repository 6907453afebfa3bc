"""The compiled attention against plain numpy where models of other tests do not go: odd widths, scores beyond exp."""

import numpy as np
import pytest

from common import kernels

HEADS, KV_HEADS = 4, 2


def attention(query_W, keys_TW, values_TW):
    scores_T = (keys_TW.astype(np.float64) @ query_W).astype(np.float64)
    weights_T = np.exp(scores_T - scores_T.max())
    return weights_T @ values_TW / weights_T.sum()


@pytest.mark.parametrize(("width", "size"), [(6, 1.0), (10, 1.0), (8, 40.0)])
def test_attention_is_that_of_the_formula(width, size):
    """A prompt of 5 tokens, then two steps of a row: all at once and token by token."""
    rng = np.random.default_rng(0)
    qkv_NX = rng.normal(0, 1, (7, (HEADS + 2 * KV_HEADS) * width)).astype(np.float32)
    qkv_NX[:, : HEADS * width] *= size
    heads_NHW = qkv_NX.reshape(7, -1, width)
    expected = np.empty((7, HEADS, width))
    for token in range(7):
        for head in range(HEADS):
            own = HEADS + head // (HEADS // KV_HEADS)
            keys, values = heads_NHW[: token + 1, own], heads_NHW[: token + 1, own + KV_HEADS]
            expected[token, head] = attention(heads_NHW[token, head], keys, values)
    out = np.zeros((7, HEADS * width), np.float32)
    kernels.attend(qkv_NX, KV_HEADS, width, np.array([[0, 5, 0, 0], [5, 2, 0, 5]]), out)
    np.testing.assert_allclose(out.reshape(expected.shape), expected, atol=2e-5)

    prompt = heads_NHW[None, :5, HEADS:]
    prompt_keys = np.ascontiguousarray(prompt[:, :, :KV_HEADS].transpose(0, 2, 3, 1))
    prompt_values = np.ascontiguousarray(prompt[:, :, KV_HEADS:].transpose(0, 2, 1, 3))
    keys, values = np.zeros((1, KV_HEADS, width, 2), np.float32), np.zeros((1, KV_HEADS, 2, width), np.float32)
    for slot in range(2):
        step = np.zeros((1, HEADS * width), np.float32)
        kernels.attend_step(
            qkv_NX[5 + slot : 6 + slot], prompt_keys, prompt_values, np.array([0]), np.array([5]), keys, values, slot, step
        )
        np.testing.assert_allclose(step.reshape(HEADS, width), expected[5 + slot], atol=2e-5)
