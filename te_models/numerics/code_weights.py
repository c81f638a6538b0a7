"""The weights of codes in the hash of a recorded tensor (te_models.recorder.statistics.hash_codes).

The hash is a sum, which needs no order, so kernels of any shape agree. Each code is weighted by its place, so that
exchanged codes change it: by a byte of its row (of four), a byte of its column (of 64), and a word of that block of
4 x 64. A kernel multiplies four codes by bytes in one instruction. The hash has two such sums, of two families of
weights.
"""

# Four bytes in a word, the lowest of the first row.
ROW_WEIGHTS = (0x3BB5D71F, 0x65A3E947)
# Column j of 64 has the highest byte of (j + 1) times this, modulo 2^32, and at least 1: its last bit is set.
COLUMN_MIX = (0x9E3779B1, 0x85EBCA77)
# Block (g, b) has h ^ (h >> 16) of h = g * first + b * second + third, modulo 2^32.
BLOCK_MIX = ((0xC2B2AE3D, 0x27D4EB2F, 0x165667B1), (0x2545F491, 0x9E3779B1, 0x7FEB352D))
