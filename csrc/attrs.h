/* One struct for each op that takes attributes: the fields, in order, are the op's annotated
 * keyword-only parameters (float: float, int: int64_t, bool: int32_t, a tuple of ints: int64_t[4],
 * an IntEnum: int32_t).  A test compares the two, byte for byte. */

typedef struct gg_get_rows_back_attrs {
    int64_t rows;
} gg_get_rows_back_attrs;
