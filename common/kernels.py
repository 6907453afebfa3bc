"""Compiled loops for small decoders on a CPU: norms, rotary positions, attention and gated units, forward and backward.

Between its matrix products a model of a few million parameters moves more memory than it computes; each function here
does in one pass over its rows what takes a tensor library five to twenty. Attention runs over packed rows: no padding is
computed, and a prefix that several rows share stands in memory once. All arrays are float32 and C-contiguous.

Shape suffixes: _N packed tokens, _B rows, _P prompts, _S segments, _D width of the model, _H heads (queries, then keys),
_W width of a head, _F half of it, _T slots, _X queries, keys and values side by side: (H + kv_heads) * W.
"""

import numpy as np
from numba import njit

F = np.float32
# Sums may be reordered and a division by zero is not looked for, so that loops vectorise; NaN and infinity keep their meaning.
compiled = njit(fastmath={"contract", "reassoc", "nsz", "arcp"}, error_model="numpy", cache=True)
START, LENGTH, PREFIX, PREFIX_LENGTH = range(4)  # columns of a segment, in tokens of the packed rows


@compiled
def exp(x):
    """e^x to 3e-7: 2^n times a polynomial in the rest (Cephes expf), without a branch, so that loops vectorise."""
    x = max(min(x, F(88.0)), F(-87.0))
    n = np.floor(x * F(1.44269504) + F(0.5))
    r = x - n * F(0.693359375) + n * F(2.12194440e-4)
    p = F(1.9875691500e-4)
    p = p * r + F(1.3981999507e-3)
    p = p * r + F(8.3334519073e-3)
    p = p * r + F(4.1665795894e-2)
    p = p * r + F(1.6666665459e-1)
    p = p * r + F(5.0000001201e-1)
    p = p * r * r + r + F(1.0)
    return p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@compiled
def normalise(x_ND, epsilon, y_ND, inverse_N):
    """y = x / sqrt(sum of squares + epsilon), row by row; inverse_N is that factor."""
    for n in range(len(x_ND)):
        x, y = x_ND[n], y_ND[n]
        inverse_N[n] = F(1) / np.sqrt(dot(x, x) + epsilon)
        for d in range(x.size):
            y[d] = x[d] * inverse_N[n]


@compiled
def normalise_back(grad_ND, y_ND, inverse_N, out_ND):
    """Gradient of `normalise` for its input."""
    for n in range(len(y_ND)):
        grad, y, out = grad_ND[n], y_ND[n], out_ND[n]
        along = dot(grad, y)
        for d in range(y.size):
            out[d] = (grad[d] - along * y[d]) * inverse_N[n]


@compiled
def gate(both_NX, out_ND):
    """silu(first half) * second half."""
    for n in range(len(out_ND)):
        out = out_ND[n]
        gates, ups = both_NX[n, : out.size], both_NX[n, out.size :]
        for d in range(out.size):
            out[d] = gates[d] / (F(1) + exp(-gates[d])) * ups[d]


@compiled
def gate_back(grad_ND, both_NX, out_NX):
    """Gradient of `gate` for its input."""
    for n in range(len(grad_ND)):
        grad = grad_ND[n]
        gates, ups = both_NX[n, : grad.size], both_NX[n, grad.size :]
        out_gates, out_ups = out_NX[n, : grad.size], out_NX[n, grad.size :]
        for d in range(grad.size):
            share = F(1) / (F(1) + exp(-gates[d]))
            out_ups[d] = grad[d] * gates[d] * share
            out_gates[d] = grad[d] * ups[d] * share * (F(1) + gates[d] * (F(1) - share))


@compiled
def dot(a, b):
    total = F(0)
    for d in range(a.size):
        total += a[d] * b[d]
    return total


@compiled
def fill(x, value):
    for i in range(x.size):
        x[i] = value


@compiled
def copy(x, out):
    for i in range(x.size):
        out[i] = x[i]


@compiled
def add(x, out):
    for i in range(x.size):
        out[i] += x[i]


@compiled
def scale(x, factor):
    for i in range(x.size):
        x[i] *= factor


@compiled
def _products(query_W, keys_WT, scores_T):
    """scores = query @ keys, the keys transposed: the inner loop runs along memory and needs no sum across lanes."""
    whole = query_W.size // 4 * 4
    fill(scores_T, F(0))
    for d in range(0, whole, 4):
        q0, q1, q2, q3 = query_W[d], query_W[d + 1], query_W[d + 2], query_W[d + 3]
        k0, k1, k2, k3 = keys_WT[d], keys_WT[d + 1], keys_WT[d + 2], keys_WT[d + 3]
        for t in range(scores_T.size):
            scores_T[t] += q0 * k0[t] + q1 * k1[t] + q2 * k2[t] + q3 * k3[t]
    for d in range(whole, query_W.size):
        q0, k0 = query_W[d], keys_WT[d]
        for t in range(scores_T.size):
            scores_T[t] += q0 * k0[t]


@compiled
def _mix(weights_T, values_TW, out_W):
    """out += weights @ values."""
    whole = weights_T.size // 4 * 4
    for t in range(0, whole, 4):
        w0, w1, w2, w3 = weights_T[t], weights_T[t + 1], weights_T[t + 2], weights_T[t + 3]
        v0, v1, v2, v3 = values_TW[t], values_TW[t + 1], values_TW[t + 2], values_TW[t + 3]
        for d in range(out_W.size):
            out_W[d] += w0 * v0[d] + w1 * v1[d] + w2 * v2[d] + w3 * v3[d]
    for t in range(whole, weights_T.size):
        w0, v0 = weights_T[t], values_TW[t]
        for d in range(out_W.size):
            out_W[d] += w0 * v0[d]


@compiled
def _softmax(scores_T):
    """In place, but not divided by the sum; returns 1 / sum."""
    top = scores_T[0]
    for t in range(scores_T.size):
        top = max(top, scores_T[t])
    total = F(0)
    for t in range(scores_T.size):
        scores_T[t] = exp(scores_T[t] - top)
        total += scores_T[t]
    return F(1) / total


@compiled
def _rotate(x_W, norm_W, cosine_F, sine_F, epsilon):
    """Norm of one head with its weight (epsilon below 0: no norm), then the rotation of its halves; in place."""
    inverse = F(1) / np.sqrt(dot(x_W, x_W) + epsilon) if epsilon >= 0 else F(1)
    half = cosine_F.size
    low, high = x_W[:half], x_W[half:]
    norm_low, norm_high = norm_W[:half], norm_W[half:]
    for d in range(half):
        a, b = low[d] * inverse * norm_low[d], high[d] * inverse * norm_high[d]
        low[d] = a * cosine_F[d] - b * sine_F[d]
        high[d] = b * cosine_F[d] + a * sine_F[d]


@compiled
def rotate(qkv_NX, norm_HW, cosine_TF, sine_TF, position_N, epsilon):
    """Normalises and rotates queries and keys in place; values stay."""
    heads, width = norm_HW.shape
    for n in range(len(qkv_NX)):
        for h in range(heads):
            x = qkv_NX[n, h * width : (h + 1) * width]
            _rotate(x, norm_HW[h], cosine_TF[position_N[n]], sine_TF[position_N[n]], epsilon)


@compiled
def rotate_back(grad_NX, qkv_NX, norm_grad_HW, norm_HW, cosine_TF, sine_TF, position_N, epsilon):
    """Turns the gradient of `rotate`'s output into that of its input, in place; adds that of the norm weights."""
    heads, width = norm_HW.shape
    half = width // 2
    for n in range(len(qkv_NX)):
        cosine, sine = cosine_TF[position_N[n]], sine_TF[position_N[n]]
        for h in range(heads):
            grad, x = grad_NX[n, h * width : (h + 1) * width], qkv_NX[n, h * width : (h + 1) * width]
            norm, norm_grad = norm_HW[h], norm_grad_HW[h]
            low, high = grad[:half], grad[half:]
            for d in range(half):
                a, b = low[d], high[d]
                low[d] = a * cosine[d] + b * sine[d]
                high[d] = b * cosine[d] - a * sine[d]
            if epsilon < 0:
                continue
            inverse = F(1) / np.sqrt(dot(x, x) + epsilon)
            along = F(0)
            for d in range(width):
                norm_grad[d] += grad[d] * x[d] * inverse
                grad[d] *= norm[d]
                along += grad[d] * x[d]
            along *= inverse * inverse
            for d in range(width):
                grad[d] = (grad[d] - along * x[d]) * inverse


@compiled
def _row_of(segment, t):
    """The packed row of a segment's t-th visible token."""
    return segment[PREFIX] + t if t < segment[PREFIX_LENGTH] else segment[START] + t - segment[PREFIX_LENGTH]


@compiled
def longest_row(segments_S4):
    """Most tokens that any segment sees."""
    longest = 0
    for s in range(len(segments_S4)):
        longest = max(longest, segments_S4[s, LENGTH] + segments_S4[s, PREFIX_LENGTH])
    return longest


@compiled
def _take_tile(rows_NX, segment, first, column, out_4W):
    """Four tokens of a segment from its token `first` on; zeros behind its end."""
    width = out_4W.shape[1]
    for i in range(4):
        if first + i < segment[LENGTH]:
            copy(rows_NX[segment[START] + first + i, column : column + width], out_4W[i])
        else:
            fill(out_4W[i], F(0))


@compiled
def _products4(query_4W, keys_WT, scores_4T, seen):
    """Four rows of `_products` at once, so that every key is loaded once for four queries. The width is even."""
    s0, s1, s2, s3 = scores_4T[0], scores_4T[1], scores_4T[2], scores_4T[3]
    for i in range(4):
        fill(scores_4T[i, :seen], F(0))
    for d in range(0, query_4W.shape[1], 2):
        a0, a1, a2, a3 = query_4W[0, d], query_4W[1, d], query_4W[2, d], query_4W[3, d]
        b0, b1, b2, b3 = query_4W[0, d + 1], query_4W[1, d + 1], query_4W[2, d + 1], query_4W[3, d + 1]
        k0, k1 = keys_WT[d], keys_WT[d + 1]
        for t in range(seen):
            a, b = k0[t], k1[t]
            s0[t] += a0 * a + b0 * b
            s1[t] += a1 * a + b1 * b
            s2[t] += a2 * a + b2 * b
            s3[t] += a3 * a + b3 * b


@compiled
def _softmax4(scores_4T, before, seen, inverse_4):
    """`_softmax` of four tokens, the i-th of which sees before + i + 1 slots; the slots behind become 0, one more too."""
    for i in range(4):
        own = min(before + i + 1, seen)
        inverse_4[i] = _softmax(scores_4T[i, :own])
        fill(scores_4T[i, own : seen + 1], F(0))


@compiled
def _softmax4_back(weights_4T, inverse_4, scores_4T, seen):
    """Divides the weights by their sum, and turns their gradients (in scores_4T) into those of the scores."""
    for i in range(4):
        weights, scores = weights_4T[i, :seen], scores_4T[i, :seen]
        scale(weights, inverse_4[i])
        along = dot(weights, scores)
        for t in range(seen):
            scores[t] = weights[t] * (scores[t] - along)
        scores_4T[i, seen] = F(0)


@compiled
def _mix4(weights_4T, values_TW, out_4W, seen):
    """weights @ values, two slots at a time; the weights of the slot behind the last are 0."""
    o0, o1, o2, o3 = out_4W[0], out_4W[1], out_4W[2], out_4W[3]
    for i in range(4):
        fill(out_4W[i], F(0))
    for t in range(0, seen, 2):
        a0, a1, a2, a3 = weights_4T[0, t], weights_4T[1, t], weights_4T[2, t], weights_4T[3, t]
        b0, b1, b2, b3 = weights_4T[0, t + 1], weights_4T[1, t + 1], weights_4T[2, t + 1], weights_4T[3, t + 1]
        v0, v1 = values_TW[t], values_TW[t + 1]
        for d in range(o0.size):
            a, b = v0[d], v1[d]
            o0[d] += a0 * a + b0 * b
            o1[d] += a1 * a + b1 * b
            o2[d] += a2 * a + b2 * b
            o3[d] += a3 * a + b3 * b


@compiled
def _spread4(weights_4T, vectors_4W, out_TW, seen):
    """out += weights transposed @ vectors."""
    v0, v1, v2, v3 = vectors_4W[0], vectors_4W[1], vectors_4W[2], vectors_4W[3]
    for t in range(seen):
        w0, w1, w2, w3 = weights_4T[0, t], weights_4T[1, t], weights_4T[2, t], weights_4T[3, t]
        out = out_TW[t]
        for d in range(out.size):
            out[d] += w0 * v0[d] + w1 * v1[d] + w2 * v2[d] + w3 * v3[d]


@compiled
def attend(qkv_NX, kv_heads, width, segments_S4, out_ND):
    """Causal attention of every segment's tokens over its prefix and itself; queries are scaled already."""
    heads, longest = qkv_NX.shape[1] // width - 2 * kv_heads, longest_row(segments_S4) + 1
    keys_WT, values_TW = np.empty((width, longest), F), np.zeros((longest, width), F)
    tiles, scores_4T, inverse_4 = np.empty((2, 4, width), F), np.empty((4, longest), F), np.empty(4, F)
    query_4W, mixed_4W = tiles[0], tiles[1]
    for s in range(len(segments_S4)):
        segment = segments_S4[s]
        prefix, length = segment[PREFIX_LENGTH], segment[LENGTH]
        for k in range(kv_heads):
            for t in range(prefix + length):
                row = qkv_NX[_row_of(segment, t)]
                copy(row[(heads + k) * width : (heads + k + 1) * width], keys_WT[:, t])
                copy(row[(heads + kv_heads + k) * width : (heads + kv_heads + k + 1) * width], values_TW[t])
            for h in range(k * heads // kv_heads, (k + 1) * heads // kv_heads):
                for t in range(0, length, 4):
                    seen = min(prefix + t + 4, prefix + length)
                    _take_tile(qkv_NX, segment, t, h * width, query_4W)
                    _products4(query_4W, keys_WT, scores_4T, seen)
                    _softmax4(scores_4T, prefix + t, seen, inverse_4)
                    _mix4(scores_4T, values_TW, mixed_4W, seen)
                    for i in range(min(4, length - t)):
                        scale(mixed_4W[i], inverse_4[i])
                        copy(mixed_4W[i], out_ND[segment[START] + t + i, h * width : (h + 1) * width])


@compiled
def attend_back(grad_ND, qkv_NX, kv_heads, width, segments_S4, out_NX):
    """Adds the gradient of `attend` for its input to out_NX."""
    heads, longest = qkv_NX.shape[1] // width - 2 * kv_heads, longest_row(segments_S4) + 1
    keys_WT, values_WT, keys_TW = np.empty((width, longest), F), np.empty((width, longest), F), np.zeros((longest, width), F)
    tiles, inverse_4 = np.empty((3, 4, width), F), np.empty(4, F)
    query_4W, grad_4W, mixed_4W = tiles[0], tiles[1], tiles[2]
    weights_4T, scores_4T = np.empty((4, longest), F), np.empty((4, longest), F)
    key_grad_TW, value_grad_TW = np.empty((longest, width), F), np.empty((longest, width), F)
    for s in range(len(segments_S4)):
        segment = segments_S4[s]
        prefix, length = segment[PREFIX_LENGTH], segment[LENGTH]
        for k in range(kv_heads):
            key, value = (heads + k) * width, (heads + kv_heads + k) * width
            for t in range(prefix + length):
                row = qkv_NX[_row_of(segment, t)]
                copy(row[key : key + width], keys_TW[t])
                copy(row[key : key + width], keys_WT[:, t])
                copy(row[value : value + width], values_WT[:, t])
                fill(key_grad_TW[t], F(0))
                fill(value_grad_TW[t], F(0))
            for h in range(k * heads // kv_heads, (k + 1) * heads // kv_heads):
                for t in range(0, length, 4):
                    seen = min(prefix + t + 4, prefix + length)
                    _take_tile(qkv_NX, segment, t, h * width, query_4W)
                    _take_tile(grad_ND, segment, t, h * width, grad_4W)
                    _products4(query_4W, keys_WT, weights_4T, seen)
                    _softmax4(weights_4T, prefix + t, seen, inverse_4)
                    _products4(grad_4W, values_WT, scores_4T, seen)
                    _softmax4_back(weights_4T, inverse_4, scores_4T, seen)
                    _mix4(scores_4T, keys_TW, mixed_4W, seen)
                    for i in range(min(4, length - t)):
                        add(mixed_4W[i], out_NX[segment[START] + t + i, h * width : (h + 1) * width])
                    _spread4(scores_4T, query_4W, key_grad_TW, seen)
                    _spread4(weights_4T, grad_4W, value_grad_TW, seen)
            for t in range(prefix + length):
                row = out_NX[_row_of(segment, t)]
                add(key_grad_TW[t], row[key : key + width])
                add(value_grad_TW[t], row[value : value + width])


@compiled
def attend_step(qkv_BX, prompt_keys, prompt_values, source_B, length_P, keys, values, slot, out_BD):
    """Attention of one new token per row over its prompt and the tokens it wrote; stores the new key and value at `slot`.

    Prompts: keys (P, kv_heads, W, T), values (P, kv_heads, T, W), of which the first length_P slots count; own: the same
    with rows in place of prompts. Queries are scaled already.
    """
    kv_heads, width = values.shape[1], values.shape[3]
    heads = qkv_BX.shape[1] // width - 2 * kv_heads
    scores_T = np.empty(prompt_values.shape[2] + slot + 1, F)
    for b in range(len(qkv_BX)):
        prompt = source_B[b]
        length = length_P[prompt]
        scores = scores_T[: length + slot + 1]
        for k in range(kv_heads):
            copy(qkv_BX[b, (heads + k) * width : (heads + k + 1) * width], keys[b, k, :, slot])
            copy(qkv_BX[b, (heads + kv_heads + k) * width : (heads + kv_heads + k + 1) * width], values[b, k, slot])
            for h in range(k * heads // kv_heads, (k + 1) * heads // kv_heads):
                query, out = qkv_BX[b, h * width : (h + 1) * width], out_BD[b, h * width : (h + 1) * width]
                _products(query, prompt_keys[prompt, k], scores[:length])
                _products(query, keys[b, k], scores[length:])
                inverse = _softmax(scores)
                fill(out, F(0))
                _mix(scores[:length], prompt_values[prompt, k], out)
                _mix(scores[length:], values[b, k], out)
                scale(out, inverse)
