"""Form: the order of a matrix's bytes in which the kernels compute."""

from dataclasses import dataclass

# The version of the forms' byte order; a file that has forms states it.
FORM_VERSION = 1
# Rows of a compute form that lie interleaved, so that a vector's lanes are rows.
TILE_ROWS = 16
# Columns whose codes lie together.
BLOCK_COLUMNS = 32
# Columns that share the float16 of scales in two steps.
SUPER_COLUMNS = 256
# Room for the number that multiplies or divides a matrix's scales: a cache line.
_FACTOR_BYTES = 64

_CODE_BITS = {"i8": 8, "e4m3": 8, "i4": 4, "u4": 4, "e2m1": 4, "iq4": 4, "i5": 5, "u5": 5, "i6": 6}
_CODE_BITS |= dict.fromkeys(("iq1", "iq2", "iq3", "iq3x"), 4)
_SCALE_BYTES = {"f16": 2, "bf16": 2, "f32": 4, "f16*i8": 1, "e4m3*": 1, "e4m3/": 1}


@dataclass(frozen=True)
class Form:
    """Tiles of 16 rows; in each, groups of columns: 16 scales, then the codes of 16 rows.

    A value is its code times its scale, or (code + zero point) * scale, or code * scale + offset,
    rounded once. Rows are filled up to whole tiles and columns to whole blocks of 32, with
    codes, or scales, of zero.

    Parameters
    ----------
    codes : {"i8", "e4m3", "i4", "u4", "e2m1", "i5", "u5", "i6", "iq4", "iq1", "iq2", "iq3", "iq3x"}
        Signed integers of 8 bits, floating-point numbers of 8 (4 of the exponent, 3 of the
        mantissa; OCP's FP8), integers of 4, 5 or 6 bits that are stored with half of their range
        added, or ("u") as they are, floating-point numbers of 4 (OCP's FP4), or ("iq") indices of
        up to 16 integers: ggml's table, and those that its code books, signs and deltas give. Bits
        beyond the fourth lie behind the others of 32 columns.
    scale : {"f16", "bf16", "f32", "f16*i8", "e4m3*", "e4m3/"}
        "f16*i8" are integers of 8 bits; 16 numbers of float16, which multiply them, begin each 256
        columns. The last two are of FP8, and are multiplied or divided by a float32 of the
        whole matrix, with which each tile begins; zeros fill it up to 64 bytes.
    group : int
        Columns that share a scale: 16, a multiple of 32, or 0: all.
    has_zeros : bool, default False
        After the scales come as many zero points, integers in the type of the scales; groups of 16
        have none.
    has_offsets : bool, default False
        After the scales, in one or two steps, come as many offsets of the same type.
    """

    codes: str
    scale: str
    group: int
    has_zeros: bool = False
    has_offsets: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes of the codes of 32 columns of a tile."""
        return TILE_ROWS * BLOCK_COLUMNS * _CODE_BITS[self.codes] // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of a scale."""
        return _SCALE_BYTES[self.scale]

    def num_groups(self, columns: int) -> int:
        """Return the scales of a row."""
        padded = -(-columns // BLOCK_COLUMNS) * BLOCK_COLUMNS
        return -(-padded // (self.group or padded or 1))

    def tile_bytes(self, columns: int) -> int:
        """Return the bytes of 16 rows."""
        blocks = -(-columns // BLOCK_COLUMNS)
        scales = self.num_groups(columns) * TILE_ROWS * self.scale_bytes
        if self.scale == "f16*i8":
            scales += -(-blocks * BLOCK_COLUMNS // SUPER_COLUMNS) * TILE_ROWS * 2
        factor = _FACTOR_BYTES if self.scale.startswith("e4m3") else 0
        return (
            factor + scales * (1 + (self.has_zeros or self.has_offsets)) + blocks * self.block_bytes
        )

    def nbytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a matrix."""
        return tiled_rows(rows) // TILE_ROWS * self.tile_bytes(columns)


def tiled_rows(rows: int) -> int:
    """Return the rows that a matrix has in its compute form: whole tiles."""
    return -(-rows // TILE_ROWS) * TILE_ROWS
