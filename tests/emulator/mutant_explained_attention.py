"""Why mutants of attention survive: no test can see them.

By name, as in mutants.py. Each entry says what is the same in spite of the change.
"""

from __future__ import annotations

SPEED = "more or fewer registers, copies or waits at a time: the same results"
SAME_FOR_ALL = "all of them hold the same there, so that any may be the one"
NOT_STORED = "what is computed of rows or dimensions that do not exist is not stored"
GUARD = "the guard inside leaves out the round that is added"
NO_KEY = "more tiles of rows count as active: one without a key stays as it is, which is slower"
MASKED = "more tiles count as masked: where every key counts the mask hides none, which is slower"
EMPTY = "what an empty state holds counts for 2^-inf = 0"
HAS_KEY = "a row that is stored has a key, and with it a sum of 1 or more"
SHORTCUT = "only a shortcut: what is behind it is true where it was, and false where it has to be"
ALL_SIZES = "the same for every HEAD_DIM that there is, a multiple of 16 up to 256"
ONE_BYTE = "one byte makes a finite number, whose weight is 0, or whose row does not exist"
BEHIND_QUERIES = "zeros behind the queries, where weights are written only later"
UNUSED = "the last element of an array in shared memory is padding, which nothing uses"
UNUSED_BLOCK = "the block number of a pass that does not exist is not used"

# fmt: off
EXPLAINED_ATTENTION: dict[str, str] = {
    "attention_products.cuh: constexpr int WARP_DIM_TILES = (DIM_TILES + WARPS - [1 -> 2]) / "
    "WARPS;": ALL_SIZES,
    "attention_products.cuh: for (int r = 0; r [< -> <=] ROW_TILES; ++r) {": GUARD,
    "attention_products.cuh: for (int r = 0; r [< -> <=] ROW_TILES; ++r) { (2)": GUARD,
    "attention_products.cuh: for (int r = 0; r [< -> <=] ROW_TILES; ++r) { (3)": GUARD,
    "attention_products.cuh: for (int r = 0; r [< -> <=] ROW_TILES; ++r) { (4)": GUARD,
    "attention_products.cuh: if ([!has_dim_tile(n) -> false]) continue; (2)": NOT_STORED,
    "attention_products.cuh: if ([has_dim_tile(n) -> true]) mma(values[r][n], a, pair, "
    "U{});": NOT_STORED,
    "attention_products.cuh: return DIM_TILES % WARPS == [0 -> 1] || n * WARPS + int(threadIdx.x / "
    "32) < DIM_TILES;": SHORTCUT,
    "attention_rows.cuh: any = any && first + KV_TILE - 1 [> -> >=] shared.position[16 * r] - "
    "rules.window;": NO_KEY,
    "attention_rows.cuh: any = any && first + KV_TILE [- -> +] 1 > shared.position[16 * r] - "
    "rules.window;": NO_KEY,
    "attention_rows.cuh: any = any [&& -> ||] first + KV_TILE - 1 > shared.position[16 * r] - "
    "rules.window;": NO_KEY,
    "attention_rows.cuh: bool masked = first + KV_TILE - 1 [> -> >=] shared.position[16 * "
    "r];": MASKED,
    "attention_rows.cuh: bool masked = first + KV_TILE [- -> +] 1 > shared.position[16 * "
    "r];": MASKED,
    "attention_rows.cuh: const int last = masked ? shared.position[row] : [0 -> 1];":
        "it is used only where masked is true",
    "attention_rows.cuh: for (int j = 0; j < 4; ++j) states.values[r][n][j] = [0.0f -> "
    "0.25f];": EMPTY,
    "attention_rows.cuh: for (int r = 0; r [< -> <=] ROW_TILES; ++r) { (2)": GUARD,
    "attention_rows.cuh: for (int r = 0; r [< -> <=] ROW_TILES; ++r) { (3)": GUARD,
    "attention_rows.cuh: for (int r = 0; r [< -> <=] ROW_TILES; ++r) { (4)": GUARD,
    "attention_rows.cuh: for (int r = 0; r [< -> <=] ROW_TILES; ++r) { (5)": GUARD,
    "attention_rows.cuh: for (int r = 0; r [< -> <=] ROW_TILES; ++r) { (6)": GUARD,
    "attention_rows.cuh: if ([r >= num_row_tiles -> false]) continue; (2)": NOT_STORED,
    "attention_rows.cuh: if (lane % 4 == [0 -> 1]) shared.row_max[warp * ROWS + row] = "
    "maximum;": SAME_FOR_ALL,
    "attention_rows.cuh: if (lane % 4 == [0 -> 1]) shared.row_sum[threadIdx.x / 32 * ROWS + "
    "row_of(r, half)] = sum;": SAME_FOR_ALL,
    "attention_rows.cuh: if (r [>= -> >] num_row_tiles) continue; (2)": NOT_STORED,
    "attention_rows.cuh: if (warp == 0 && lane % 4 == [0 -> 1]) {": SAME_FOR_ALL,
    "attention_rows.cuh: if (warp == [0 -> 1] && lane % 4 == 0) {": SAME_FOR_ALL,
    "attention_rows.cuh: if constexpr (WINDOW == [1 -> 2]) {": NO_KEY,
    "attention_rows.cuh: masked = masked || first <= shared.position[16 * r + 15] [- -> +] "
    "rules.window;": MASKED,
    "attention_rows.cuh: return __fadd_rn(value, __shfl_xor_sync(ALL_LANES, value, [2 -> "
    "3]));": SAME_FOR_ALL,
    "attention_rows.cuh: return fmaxf(value, __shfl_xor_sync(ALL_LANES, value, [2 -> "
    "3]));": SAME_FOR_ALL,
    "attention_rows.cuh: states.sum[r][half] = [0.0f -> 0.25f];": EMPTY,
    "attention_rows.cuh: unsigned active = [0 -> 1];": NO_KEY,
    "attention_state.cuh: return maximum == minus_infinity() ? [0.0f -> 0.25f] : maximum;": EMPTY,
    "attention_state.cuh: return sum == 0.0f ? [0.0f -> 0.25f] : __fdiv_rn(kept, sum);": HAS_KEY,
    "attention_state.cuh: return sum == [0.0f -> 0.25f] ? 0.0f : __fdiv_rn(kept, sum);": HAS_KEY,
    "attention_tiles.cuh: alignas(16) T queries[[ROWS * PITCH -> ROWS * PITCH - 1]];": UNUSED,
    "attention_tiles.cuh: alignas(16) T weights[[ROWS * WEIGHT_PITCH -> ROWS * WEIGHT_PITCH - "
    "1]];": UNUSED,
    "attention_tiles.cuh: block[j] = first + j < PASSES && inside ? context.blocks[position / "
    "BLOCK_SIZE] : -[1 -> 2];":
        "any negative number says that nothing is there",
    "attention_tiles.cuh: block[j] = first + j [< -> <=] PASSES && inside ? "
    "context.blocks[position / BLOCK_SIZE] : -1;": UNUSED_BLOCK,
    "attention_tiles.cuh: block[j] = first [+ -> -] j < PASSES && inside ? context.blocks[position "
    "/ BLOCK_SIZE] : -1;": UNUSED_BLOCK,
    "attention_tiles.cuh: const int num_pieces = (work.num_rows + 15) / 16 * [16 -> 17] * "
    "PIECES;": BEHIND_QUERIES,
    "attention_tiles.cuh: constexpr int GROUP = [4 -> 5];": SPEED,
    "attention_tiles.cuh: constexpr int KV_TILE = HEAD_DIM <= [128 -> 129] ? 64 : 32; // "
    "positions; edges are multiples of it": ALL_SIZES,
    "attention_tiles.cuh: constexpr int PASSES = (KV_TILE * PIECES + THREADS - [1 -> 2]) / "
    "THREADS;": ALL_SIZES,
    "attention_tiles.cuh: copy_async_or_zero<16>(shared.queries + row * PITCH + start, from, "
    "inside ? 16 : [0 -> 1]);": ONE_BYTE,
    "attention_tiles.cuh: copy_async_or_zero<16>(slot + row * PITCH + start, from, inside ? 16 : "
    "[0 -> 1]);": ONE_BYTE,
    "attention_tiles.cuh: float row_max[WARPS [* -> /] ROWS];":
        "row_max and row_sum share their place then, and barriers lie between their uses",
    "attention_tiles.cuh: for (int first = 0; first [< -> <=] PASSES; first += GROUP) {": GUARD,
    "attention_tiles.cuh: for (int i = threadIdx.x; i [< -> <=] num_pieces; i += THREADS) "
    "{": BEHIND_QUERIES,
    "attention_tiles.cuh: if ([inside -> true]) from += number / group * token_stride + number % "
    "group * HEAD_DIM + start;":
        "nothing is read from where it points",
    "attention_tiles.cuh: if (first + j >= PASSES || (KV_TILE * PIECES % THREADS != [0 -> 1] && i "
    ">= KV_TILE * PIECES)) break;": SHORTCUT,
    "attention_tiles.cuh: if (first + j >= PASSES || (KV_TILE * PIECES [% -> /] THREADS != 0 && i "
    ">= KV_TILE * PIECES)) break;": SHORTCUT,
    "attention_tiles.cuh: if (first + j >= PASSES || (KV_TILE [* -> /] PIECES % THREADS != 0 && i "
    ">= KV_TILE * PIECES)) break;": SHORTCUT,
    "paged_attention.cu: const int row = min(int(threadIdx.x), work.num_rows [- -> +] "
    "1);": NOT_STORED,
    "paged_attention.cu: constexpr int LANE_VECTORS = (VECTORS + 31) / [32 -> 33];": ALL_SIZES,
    "paged_attention.cu: constexpr int LANE_VECTORS = (VECTORS + [31 -> 32]) / 32;": GUARD,
    "paged_attention.cu: constexpr int MERGE_BLOCKS = [4 -> 5];": SPEED,
    "paged_attention.cu: float sum = [0.0f -> 0.25f];": EMPTY,
    "paged_attention.cu: for (int r = 0; r [< -> <=] ROW_TILES; ++r) {": GUARD,
    "paged_attention.cu: for (int r = 0; r [< -> <=] ROW_TILES; ++r) { (2)": GUARD,
    "paged_attention.cu: for (int v = 0; v [< -> <=] LANE_VECTORS; ++v) {": GUARD,
    "paged_attention.cu: for (int v = 0; v [< -> <=] LANE_VECTORS; ++v) { (2)": GUARD,
    "paged_attention.cu: for (int v = 0; v [< -> <=] LANE_VECTORS; ++v) { (3)": GUARD,
    "paged_attention.cu: if ([is_active(active, r) -> true]) finish_scores(scores[r], shared, r, "
    "first, rules);":
        "the maxima of tiles of rows that are not active are not read",
    "paged_attention.cu: if ([v * 32 + lane >= VECTORS -> false]) continue;": NOT_STORED,
    "paged_attention.cu: if (v * 32 + lane [>= -> >] VECTORS) continue;": NOT_STORED,
    "paged_attention.cu: if (v * 32 [+ -> -] lane >= VECTORS) continue;": NOT_STORED,
    "paged_attention.cu: if (v [* -> /] 32 + lane >= VECTORS) continue;": NOT_STORED,
}
# fmt: on
