"""Why mutants of sampling and PTX wrappers survive: no test can see them; and all such entries.

By name, as in mutants.py. Each entry says what is the same in spite of the change.
"""

from __future__ import annotations

from tests.emulator.mutant_explained_attention import EXPLAINED_ATTENTION
from tests.emulator.mutant_explained_gemm import EXPLAINED_GEMM

SAME_FOR_ALL = "all threads hold the same there, so that any may be the one"
FILL = "the -inf that fills the last quad come behind all tokens, and there is room for them"
ALLOWED = "the change lies far within the error of 2^-43 that the header allows"
WIDER = "more tokens are looked at, or computed again in double: the best of them is the same"
ANY_SPLIT = "where a part is split decides how many rounds there are, not what they find"

# fmt: off
EXPLAINED_SAMPLING = {
    "logits_edits.cu: *logit = *logit [> -> >=] 0.0f ? __fdiv_rn(*logit, values[i]) : "
    "__fmul_rn(*logit, values[i]);": "0 / value is 0 * value, for a penalty is positive and finite",
    "philox.cuh: 1.0f / [4294967296.0f -> 4294967296.25f]);": "the same float",
    "philox.cuh: constexpr float MOST_NOISE = [22.88f -> 23.13f];": WIDER,
    "philox.cuh: constexpr float NOISE_ERROR = [1.0f -> 1.25f] / 65536.0f;": WIDER,
    "philox.cuh: constexpr float NOISE_ERROR = 1.0f / [65536.0f -> 65536.25f];":
        "the errors come to less than three quarters of it",
    "sampling_mass.cuh: const u64 t_57 = __umul64hi(distance_58, 0x[B8AA3B295C17F0BB -> "
    "b8aa3b295c17f0bc]ull); // log2(e)_63": ALLOWED,
    "sampling_mass.cuh: const u64 z_70 = __umul64hi(t_57 << 13, 0x[B17217F7D1CF79AB -> "
    "b17217f7d1cf79ac]ull); // log(2)_64": ALLOWED,
    "sampling_mass.cuh: series_32 = one_32 - (__umulhi(__umulhi(z_38, series_32), 0x[55555555 -> "
    "55555556]u) >> 6); // 1 - z / 3 (...)": ALLOWED,
    "sampling_mass.cuh: unsigned series_32 = one_32 - (__umulhi(z_38, 0x[33333333 -> 33333334]u) "
    ">> 6); // 1 - z / 5": ALLOWED,
    "logits_logprobs.cu: if (threadIdx.x == [0 -> 1]) { (2)": SAME_FOR_ALL,
    "sampling.cu: while (least > 1 && __ll2double_rn(least - [1 -> 2]) >= limit) --least;":
        "the mass of some tokens, beyond 2^53, would have to meet the limit to the unit",
    "sampling_mass.cuh: const u64 distance_58 = __float2ull_rz(__fmul_rn(distance, "
    "[288230376151711744.0f -> 2.8823037615171174e+17f]));": "the same float",
    "sampling_row.cuh: for (int start = threadIdx.x; start [< -> <=] quads; "
    "start += AHEAD * blockDim.x) {": "a quad is loaded and visited only if it exists",
    "sampling_row.cuh: return bits >> 63 != 0 ? ~bits : bits | 0x[8000000000000000 -> "
    "8000000000000001]ull;": "two scores would have to lie one unit of a double apart",
    "sampling_row.cuh: return {highest == [0xffffffffu -> 0x0fffffffu] ? "
    "__uint_as_float(0x7fffffffu) : from_ordered(highest),": "from_ordered makes a NaN of it, too",
    "sampling_search.cuh: if ([j >= count -> false]) continue;": FILL,
    "sampling_search.cuh: if (j [< -> <=] count) gather_token(first, last, logits[j], id + j);":
        FILL,
    "sampling_search.cuh: if (threadIdx.x == 0) *shared.part = {first, last, 0, 0, first, "
    "[0 -> 1], 0, 0};": "whole_count is set again before it is read",
    "sampling_search.cuh: if (threadIdx.x == [0 -> 1]) *shared.part = {first, last, 0, 0, first, "
    "0, 0, 0};": SAME_FOR_ALL,
    "sampling_search.cuh: for (int i = 1; i < SPLITS - 1; ++i) distance = s [== -> !=] i ? "
    "FIRST_SPLITS[i] : distance;": ANY_SPLIT,
    "sampling_search.cuh: split = shared.places[[examples * next / SPLITS -> "
    "examples * next / SPLITS - 1]];": ANY_SPLIT,
}
EXPLAINED_PTX: dict[str, str] = {}
# fmt: on

EXPLAINED_LATER: dict[str, str] = (
    EXPLAINED_ATTENTION | EXPLAINED_GEMM | EXPLAINED_SAMPLING | EXPLAINED_PTX
)
