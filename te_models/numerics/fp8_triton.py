"""FP8 casts inside Triton kernels: FP32 values to FP8 bytes and back, with integer arithmetic.

The integers give the same bits on a GPU and in Triton's interpreter (TRITON_INTERPRET=1), which has no instruction for
the conversion. An FP8 tensor is uint8 here: the bytes of E4M3 or E5M2.
"""

import triton
import triton.language as tl

_INF = tl.constexpr(0x7F800000)


@triton.jit
def magnitude_bits(v):
    """Return the bits of |v| for FP32 v, which have the order of magnitudes; 0 for NaN."""
    bits = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(bits > _INF, 0, bits)


@triton.jit
def encode_fp8(v, E5M2: tl.constexpr):
    """Round FP32 values to FP8 (uint8), saturating.

    Adding a power of two whose last bit is the format's step rounds to nearest, ties to even.
    """
    mantissa: tl.constexpr = 2 if E5M2 else 3
    # The exponent field of the format's smallest normal number.
    first: tl.constexpr = (127 - 14) if E5M2 else (127 - 6)
    largest: tl.constexpr = 0x47600000 if E5M2 else 0x43E00000  # 57344 and 448
    bits = v.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    nan = size > _INF
    size = tl.minimum(size, largest)
    octave = tl.maximum(size & _INF, first << 23)
    power = octave + ((23 - mantissa) << 23)
    sums = (power.to(tl.float32, bitcast=True) + size.to(tl.float32, bitcast=True)).to(
        tl.int32, bitcast=True
    )
    byte = sums - power + (octave >> (23 - mantissa)) - (first << mantissa)
    return (tl.where(nan, 0x7F, byte) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decode_fp8(byte, E5M2: tl.constexpr):
    """Return the FP32 values of FP8 bytes."""
    if E5M2:
        value = (byte.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        byte = byte.to(tl.int32)
        value = ((byte & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
        # Triton before 3.8 interprets -value as 0 - value, which loses the sign of zero.
        value = tl.where(
            (byte & 0x7F) == 0x7F, float("nan"), tl.where(byte > 127, value * -1.0, value)
        )
    return value
