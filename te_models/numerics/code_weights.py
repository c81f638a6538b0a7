"""The weights of codes in the hash of a recorded tensor (te_models.recorder.statistics.hash_codes).

A code is a byte of FP8 data. The hash is a sum over all codes, which does not depend on their order, so that kernels
with any tiles agree. To notice codes that were exchanged, each is multiplied by three weights of its place: a byte for
its row in a block of 4 x 64 codes, a byte for its column there, and a word of 32 bits for the block. Bytes, since a
kernel multiplies four codes by four bytes in one instruction. The hash is the sum of two such sums, which have two
families of weights.
"""

# Of each family, the weights of four rows: bytes of a word, the lowest for the first row.
ROW_WEIGHTS = (0x3BB5D71F, 0x65A3E947)
# The weight of column j of 64 is the highest byte of (j + 1) times this, modulo 2^32, with its last bit set: it is odd.
COLUMN_MIX = (0x9E3779B1, 0x85EBCA77)
# The weight of block (g, b), the g-th of four rows and the b-th of 64 columns, is h ^ (h >> 16), where h is
# g * first + b * second + third, modulo 2^32.
BLOCK_MIX = ((0xC2B2AE3D, 0x27D4EB2F, 0x165667B1), (0x2545F491, 0x9E3779B1, 0x7FEB352D))
