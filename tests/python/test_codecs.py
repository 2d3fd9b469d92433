"""The encoders on whatever hypothesis comes up with: nothing is lost that feedback does not keep."""

import hypothesis
import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dcoll import _C

Floats = npt.NDArray[np.float32]
K = _C.kernels


def floats(most: float = float(np.float32(1e30))) -> st.SearchStrategy[Floats]:
    elements = st.floats(-most, most, width=32)
    return arrays.arrays(np.float32, st.integers(1, 700), elements=elements)


def exactly_top(values: Floats, k: int) -> Floats:
    """The k of greatest magnitude, of equal ones the first, and zeros for the rest."""
    order = np.argsort(-(values.view(np.uint32) & 0x7FFFFFFF).astype(np.int64), kind="stable")[:k]
    kept = np.zeros_like(values)
    kept[order] = values[order]
    return kept


def sent_by_top_k(values: Floats, k: int, error: Floats | None = None) -> Floats:
    message = np.zeros(K.top_bytes(len(values), k), np.uint8)
    K.encode_top(message.ctypes.data, values.ctypes.data, len(values), k, 0 if error is None else error.ctypes.data)
    sent = np.empty_like(values)
    assert K.sum_top(sent.ctypes.data, [message.ctypes.data], len(values), k)
    return sent


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(floats(), floats(), st.floats(0, 1))
def test_top_k_sends_the_greatest_and_keeps_the_rest(values: Floats, before: Floats, share: float) -> None:
    error = np.resize(before, len(values))
    whole = values + error
    k = round(share * len(values))
    sent = sent_by_top_k(values, k, error)
    assert np.array_equal(sent, exactly_top(whole, k))
    assert np.array_equal(np.where(sent != 0, sent, error), whole)
    assert not error[sent != 0].any()


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(
    arrays.arrays(np.uint8, st.integers(0, 200)),
    st.integers(0, 45) | st.integers(0, 2**32 - 1),
    st.integers(1, 300),
    st.integers(0, 40),
)
def test_top_k_refuses_messages_or_stays_inside(noise: npt.NDArray[np.uint8], sent: int, count: int, k: int) -> None:
    k = min(k, count)
    message = np.zeros(K.top_bytes(count, k), np.uint8)
    message[: len(noise)] = noise[: len(message)]
    message[:4].view(np.uint32)[0] = sent
    places = message[4 : 4 + 2 * k].view(np.uint16)[:sent]
    target = np.full(count + 2, 7, np.float32)
    taken = K.sum_top(target[1:].ctypes.data, [message.ctypes.data], count, k)
    assert taken == (sent <= k and bool((places < count).all()))
    assert target[0] == target[-1] == 7


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(floats(), floats())
def test_int8_keeps_what_it_loses(values: Floats, before: Floats) -> None:
    count = len(values)
    error = np.resize(before, count)
    whole = values + error
    wire = np.zeros(K.encoded_bytes("int8", count), np.uint8)
    K.encode("int8", wire.ctypes.data, values.ctypes.data, count, error.ctypes.data)
    decoded = np.empty_like(values)
    K.decode("int8", decoded.ctypes.data, wire.ctypes.data, count)
    assert np.array_equal(error, whole - decoded)
    for begin in range(0, count, 256):
        block = slice(begin, begin + 256)
        greatest = np.abs(whole[block]).max()
        if greatest >= 1e-36:
            assert np.abs(error[block]).max() <= float(greatest) / 254 * (1 + 1e-5)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(st.sampled_from(["fp16", "bf16", "int8", "fp32"]), floats(1e4))
def test_what_was_decoded_is_encoded_as_it_was(codec: str, values: Floats) -> None:
    count = len(values)
    first, again = (np.zeros(K.encoded_bytes(codec, count), np.uint8) for _ in range(2))
    decoded, twice = np.empty_like(values), np.empty_like(values)
    K.encode(codec, first.ctypes.data, values.ctypes.data, count)
    K.decode(codec, decoded.ctypes.data, first.ctypes.data, count)
    K.encode(codec, again.ctypes.data, decoded.ctypes.data, count)
    K.decode(codec, twice.ctypes.data, again.ctypes.data, count)
    if codec == "int8":  # whose scale is rounded
        assert np.allclose(twice, decoded, rtol=1e-5, atol=0)
    else:
        assert np.array_equal(twice, decoded)
