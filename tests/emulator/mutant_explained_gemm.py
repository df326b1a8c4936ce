"""Why mutants of the products survive: no test can see them.

By name, as in mutants.py. Each entry says what is the same in spite of the change.
"""

from __future__ import annotations

SPEED = "more or fewer loads, copies or parts at a time: the same results"
SAME_FOR_ALL = "every thread of the block may be the one"
NOT_STORED = "what is computed of tokens or features that do not exist is not stored"
GUARD = "the guard inside leaves out the round that is added"
ZERO_WEIGHT = "the weight is zeros there, and what it is multiplied with is finite"
ROOM = "an array has an element that nothing uses"
PITCH = "rows of shared memory lie further apart or closer: the same results"

# fmt: off
EXPLAINED_GEMM: dict[str, str] = {
    "gemm.cuh: if (column >= in_features) return make_uint4(0, 0, 0, [0 -> 1]);": ZERO_WEIGHT,
    "gemm.cuh: if (column >= in_features) return make_uint4(0, 0, [0 -> 1], 0);": ZERO_WEIGHT,
    "gemm.cuh: if (column >= in_features) return make_uint4(0, [0 -> 1], 0, 0);": ZERO_WEIGHT,
    "gemm.cuh: if (column >= in_features) return make_uint4([0 -> 1], 0, 0, 0);": ZERO_WEIGHT,
    "gemm.cuh: pack.at[j] = column + j < in_features ? row[column + j] : round_to<T>([0.0f -> "
    "0.25f]);": ZERO_WEIGHT,
    "gemm_chunks.cuh: if ([!used[i] -> false]) continue;": NOT_STORED,
    "gemm_chunks.cuh: if ([used[i] -> true]) {": NOT_STORED,
    "gemm_chunks.cuh: if (thread == [0 -> 1]) ticket = atomicAdd(&tickets[share.tile], "
    "1);": SAME_FOR_ALL,
    "gemm_chunks.cuh: if (thread == [0 -> 1]) tickets[share.tile] = 0;": SAME_FOR_ALL,
    "gemm_rows.cu: compute<1, [4 -> 5]>(problem, partial, tickets);": SPEED,
    "gemm_rows.cu: compute<2, [3 -> 4]>(problem, partial, tickets);": SPEED,
    "gemm_rows.cu: compute<4, [2 -> 3]>(problem, partial, tickets);": SPEED,
    "gemm_rows.cu: compute_rows<GROUPS, [1 -> 2], false>(problem, partial, tickets);": SPEED,
    "gemm_rows.cu: for (int granule = 0; granule [< -> <=] granules; granule += SLOTS) {": GUARD,
    "gemm_rows.cu: for (int i = 0; i < GROUPS; ++i) used[i] = token + 8 * i [< -> <=] "
    "problem.num_tokens;": NOT_STORED,
    "gemm_rows.cu: for (int i = 0; i < GROUPS; ++i) used[i] = token [+ -> -] 8 * i < "
    "problem.num_tokens;": NOT_STORED,
    "gemm_f32.cu: __shared__ __align__(16) float x[DEPTH][[8 * TOKENS + PADDING -> 8 * TOKENS + "
    "PADDING + 1]];": PITCH,
    "gemm_f32.cu: __shared__ __align__(16) float x[DEPTH][[8 * TOKENS + PADDING -> 8 * TOKENS + "
    "PADDING - 1]];": PITCH,
    "gemm_f32.cu: for (int i = threadIdx.x; i [< -> <=] count * DEPTH / 4; i += THREADS) {":
        "a row more, of the padding",
    "gemm_f32.cu: uint4 words = make_uint4(0, 0, 0, [0 -> 1]);": NOT_STORED,
    "gemm_f32.cu: uint4 words = make_uint4(0, 0, [0 -> 1], 0);": NOT_STORED,
    "gemm_f32.cu: uint4 words = make_uint4(0, [0 -> 1], 0, 0);": NOT_STORED,
    "gemm_f32.cu: uint4 words = make_uint4([0 -> 1], 0, 0, 0);": NOT_STORED,
    "gemm_f32.cu: used[i] = share.token + int(threadIdx.x) / 16 * TOKENS + i [< -> <=] "
    "problem.num_tokens;": NOT_STORED,
    "gemm_f32.cu: used[i] = share.token + int(threadIdx.x) / 16 * TOKENS [+ -> -] i < "
    "problem.num_tokens;": NOT_STORED,
    "gemm_f32.cu: used[i] = share.token + int(threadIdx.x) / 16 [* -> /] TOKENS + i < "
    "problem.num_tokens;": NOT_STORED,
    "gemm_f32.cu: used[i] = share.token + int(threadIdx.x) / [16 -> 17] * TOKENS + i < "
    "problem.num_tokens;": NOT_STORED,
    "gemm_f32.cu: used[i] = share.token [+ -> -] int(threadIdx.x) / 16 * TOKENS + i < "
    "problem.num_tokens;": NOT_STORED,
    "gemm_tiles.cu: [copy_async_wait_all(); -> ]":
        "the last groups are empty: every copy has been waited for in the loop",
    "gemm_tiles.cu: copy_async_wait<S::STAGES - [2 -> 3]>();": SPEED,
    "gemm_tiles.cu: uint4 tokens[[S::TOKEN_TILES -> S::TOKEN_TILES + 1]];": ROOM,
    "gemm_tile_stages.cuh: const bool exists = row + i [* -> /] S::TOKENS_AT_ONCE <= last_token && "
    "at < in_features;": NOT_STORED,
    "gemm_tile_stages.cuh: const bool exists = row [+ -> -] i * S::TOKENS_AT_ONCE <= last_token && "
    "at < in_features;": NOT_STORED,
    "gemm_tile_stages.cuh: exists ? 16 : [0 -> 1]);":
        "one byte makes a finite number; the weight is zeros there, or the token does not exist",
    "gemm_tile_stages.cuh: int weight_blocks[[S::WEIGHT_COPIES -> S::WEIGHT_COPIES + 1]]; // where "
    "the blocks that the thread copies begin, from there": ROOM,
    "gemm_tile_stages.cuh: int x_rows[[S::TOKEN_COPIES -> S::TOKEN_COPIES + 1]]; // and the "
    "rows": ROOM,
    "gemm_tile_stages.cuh: load_x<false>(from, at, token <= last_token ? in_features : [0 -> "
    "1]);": NOT_STORED,
    "gemm_tile_store.cuh: S::TOKENS <= ROOM ? S::TOKEN_TILES : S::TOKEN_TILES / [2 -> 3]; // "
    "groups of 8 tokens": SPEED,
    "gemm_tile_store.cuh: float bias = [0.0f -> 0.25f];": NOT_STORED,
    "gemm_tile_store.cuh: for (int j = 0; j [< -> <=] S::TOKEN_TILES; ++j) {": GUARD,
    "gemm_pack.cu: for (int j = 0; j [< -> <=] WIDEST<T>; ++j) {":
        "what is written behind the pack is read by nobody",
}
# fmt: on
