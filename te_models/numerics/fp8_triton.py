"""FP8 casts inside Triton kernels: FP32 values to FP8 bytes and back, with integer arithmetic.

The integers give the same bits on a GPU and in Triton's interpreter (TRITON_INTERPRET=1), which has no instruction for
the conversion. An FP8 tensor is uint8 here: the bytes of E4M3 or E5M2.
"""

import triton
import triton.language as tl

_INF = tl.constexpr(0x7F800000)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_CONVERT = (
    "{ .reg .b16 low, high; cvt.rn.satfinite.FORMx2.f32 low, $2, $1; "
    "cvt.rn.satfinite.FORMx2.f32 high, $4, $3; mov.b32 $0, {low, high}; }"
)
_TO_E4M3 = tl.constexpr(_CONVERT.replace("FORM", "e4m3"))
_TO_E5M2 = tl.constexpr(_CONVERT.replace("FORM", "e5m2"))
_CONVERT_BACK = (
    "{ .reg .b16 low, high, a, b, c, d; .reg .b32 ab, cd; mov.b32 {low, high}, $4; cvt.rn.f16x2.FORMx2 ab, low; "
    "cvt.rn.f16x2.FORMx2 cd, high; mov.b32 {a, b}, ab; mov.b32 {c, d}, cd; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; "
    "cvt.f32.f16 $2, c; cvt.f32.f16 $3, d; }"
)
_FROM_E4M3 = tl.constexpr(_CONVERT_BACK.replace("FORM", "e4m3"))
_FROM_E5M2 = tl.constexpr(_CONVERT_BACK.replace("FORM", "e5m2"))


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


@triton.jit
def encode_four(a, b, c, d, E5M2: tl.constexpr):
    """Return the FP8 data of four FP32 tensors as one of int32, a's in the lowest byte."""
    if INTERPRETED:
        a = encode_fp8(a, E5M2).to(tl.int32)
        b = encode_fp8(b, E5M2).to(tl.int32)
        c = encode_fp8(c, E5M2).to(tl.int32)
        d = encode_fp8(d, E5M2).to(tl.int32)
        word = a | (b << 8) | (c << 16) | (d << 24)
    else:
        # Triton's own cast to FP8 (3.6) mixes up elements where the result is transposed.
        asm: tl.constexpr = _TO_E5M2 if E5M2 else _TO_E4M3
        word = tl.inline_asm_elementwise(
            asm, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1
        )
    return word


@triton.jit
def decode_four(word, E5M2: tl.constexpr):
    """Return the FP32 values of the four FP8 bytes of int32 words as four tensors, the lowest byte's first."""
    if INTERPRETED:
        a = decode_fp8(word.to(tl.uint8), E5M2)
        b = decode_fp8((word >> 8).to(tl.uint8), E5M2)
        c = decode_fp8((word >> 16).to(tl.uint8), E5M2)
        d = decode_fp8((word >> 24).to(tl.uint8), E5M2)
    else:
        asm: tl.constexpr = _FROM_E5M2 if E5M2 else _FROM_E4M3
        a, b, c, d = tl.inline_asm_elementwise(
            asm,
            "=f,=f,=f,=f,r",
            [word],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    return a, b, c, d
