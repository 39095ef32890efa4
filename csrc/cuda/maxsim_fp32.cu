// MaxSim of a query of up to 32 tokens with ragged documents of fp32 rows in place in a byte
// buffer.
//
// -inf for a document without rows, NaN where a product with one of its rows is NaN. Documents
// begin at multiples of 16 bytes; the query lies at one, too. maxsim.cuh says how warps share the
// work.
//
// A row is scaled by the power of two that brings its largest value to 2^14, and goes in two parts
// of fp16, made in registers, as the query does; three products of parts add up to theirs but for
// 2^-21 of each. What tensor cores add they cut off, and a sum of a whole row could lose more by
// that than fp32's own roundings may: so each 16 or 32 values have a sum of their own, and plain
// additions add those.
//
// A part of fp16 has a least step. What is lost by that is bounded; where it might be more than
// 2^-21 of a document's score, or the score is not finite, the document is made once more, by plain
// multiply-adds. Unless values of a row lie orders of magnitude apart and the query sees the small
// ones alone, or a score nearly is zero, that does not happen; nor where it is zero because all of
// the query or of the rows are zeros.
#include "maxsim.cuh"

namespace {

// Rows of kWidth values, 16 of them in a tile. Of two rows, lane / 4 and the one eight further, a
// lane has four values in each step: pieces 2 * (lane % 4) of 128 bytes in an even step, and the
// ones beside them in the odd step behind it.
template <int kWidthOfRow>
struct Shape {
  static constexpr int kWidth = kWidthOfRow;
  static constexpr int kParts = 2, kShared = 0;
  static constexpr int kRows = 16, kSteps = kWidth / 16;
  // Steps whose products are summed together; by 32 of 64 values the bound would be missed.
  static constexpr int kChain = kWidth == 64 ? 1 : 2;
  static constexpr bool kFlat = false;
  static constexpr int kRowBytes = kWidth * 4;
  static constexpr int kRowCopies = kWidth / 4;  // of 16 bytes
  static constexpr int kPitch = kRowBytes;       // of whole 128 bytes
  static constexpr int kStageBytes = kRows * kPitch;
};

// How far from zero a score has to be, over the largest of its rows' inverse factors, so that steps
// of fp16 are off by less than 2^-21 of it. A step is 2^-24, of which half at most is lost of each
// value of a row, times the query's value, which is less than twice its token's power of two; and
// 2^-13 as much of that power is lost of each value of the query, times the row's value, which is
// at most 2^15 times the inverse: 3 * 2^-24 of the power for each value, together. It is infinite
// where a token's largest value is near fp32's own, so that every document is made once more.
template <typename S, typename Q>
__device__ __forceinline__ float least_score(const Q& query) {
  constexpr float kOfEach = 3.0f / (1 << 24) * (1 << 21);
  return sum_of_lanes(query.factor * kLift) * (S::kWidth * kOfEach);
}

// One document's score by plain multiply-adds: a query token a lane, a row after another.
template <typename S>
__device__ __forceinline__ float score_with_care(const Arguments& a, const float* query,
                                                 int64_t doc, int lane) {
  float largest = -INFINITY;
  const bool is_query = lane < a.n_query;
  const float* const values = query + (is_query ? lane : 0) * S::kWidth;
#pragma unroll 1
  for (int64_t row = 0; row < a.count[doc]; ++row) {
    const float* const at =
        reinterpret_cast<const float*>(a.buffer + a.offset[doc] + row * S::kRowBytes);
    float sum = 0.0f;
#pragma unroll 1
    for (int k = 0; k < S::kWidth; ++k) sum = fmaf(values[k], at[k], sum);
    largest = max_nan(largest, sum);
  }
  return sum_of_lanes(is_query ? largest : 0.0f);
}

// A tile's rows as a lane has them.
template <typename S>
struct Rows {
  float value[S::kSteps][2][4];
  float lift[2], inverse[2];  // powers of two
  float largest;              // of the inverses, but for rows of zeros, of which nothing is lost

  __device__ __forceinline__ void load(uint32_t stage, int lane) {
    const int row = lane / 4;
    const uint32_t even = stage + row * S::kPitch + ((2 * (lane % 4)) ^ row) * 16;
    largest = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float peak = 0.0f;
#pragma unroll
      for (int step = 0; step < S::kSteps; ++step) {
        const float4 v =
            load_four((step % 2 ? even ^ 16 : even) + step / 2 * 128 + half * 8 * S::kPitch);
        float* const x = value[step][half];
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
        peak = fmaxf(peak, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
      }
      peak = fmaxf(peak, __shfl_xor_sync(kAll, peak, 1));
      peak = fmaxf(peak, __shfl_xor_sync(kAll, peak, 2));
      // Products times the inverse stay above fp32's least steps.
      const uint32_t exponent = min(max(__float_as_uint(peak) >> 23, 20u), 254u);
      lift[half] = __uint_as_float((268u - exponent) << 23);
      inverse[half] = __uint_as_float((exponent - 14u) << 23);
      if (peak > 0.0f) largest = fmaxf(largest, inverse[half]);
    }
  }

  // A step's left operands: the nearest in fp16, and what that misses.
  __device__ __forceinline__ void parts(uint32_t* high, uint32_t* low, int step) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float x = value[step][half][2 * i] * lift[half];
        const float y = value[step][half][2 * i + 1] * lift[half];
        const uint32_t both = fp16_of(x, y);
        high[2 * i + half] = both;
        low[2 * i + half] = fp16_of(x - fp32_of(both), y - fp32_of(both >> 16));
      }
  }
};

// Products of a tile. `largest` of the inverses of rows' factors.
template <typename S, typename Q>
__device__ __forceinline__ void multiply_rows(Best& best, uint32_t stage, const Q& query,
                                              int n_rows, int lane, float& largest) {
  Rows<S> rows;
  rows.load(stage, lane);
  largest = fmaxf(largest, rows.largest);
  float product[kPieces][4];
#pragma unroll
  for (int first = 0; first < S::kSteps; first += S::kChain) {
    float sum[kPieces][4] = {};
    uint32_t high[S::kChain][4];
    // What is added to a large sum is rounded as it is: small products first.
#pragma unroll
    for (int i = 0; i < S::kChain; ++i) {
      uint32_t low[4];
      rows.parts(high[i], low, first + i);
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        multiply<false>(sum[piece], low, query.part(0, first + i, piece));
        multiply<false>(sum[piece], high[i], query.part(1, first + i, piece));
      }
    }
#pragma unroll
    for (int i = 0; i < S::kChain; ++i)
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece)
        multiply<false>(sum[piece], high[i], query.part(0, first + i, piece));
#pragma unroll
    for (int i = 0; i < kPieces * 4; ++i) {
      float& whole = product[i / 4][i % 4];
      whole = first == 0 ? sum[i / 4][i % 4] : whole + sum[i / 4][i % 4];
    }
  }
  if (n_rows < S::kRows) best.mask(product, lane / 4, lane / 4 + 8, n_rows);
  best.take(product, rows.inverse);
}

template <int kWidth, int kStages>
__device__ __forceinline__ void maxsim(const Arguments& a) {
  using S = Shape<kWidth>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, n_warps = blockDim.x / kWarp;
  const int which = blockIdx.x % a.n_queries;
  const float* const values = a.query + int64_t(which) * a.n_query * kWidth;
  float* const score = a.score + which * a.n_docs;
  // Rings of all warps, what is in their stages.
  const uint32_t ring =
      static_cast<uint32_t>(__cvta_generic_to_shared(memory)) + warp * kStages * S::kStageBytes;
  int4* const meta =
      reinterpret_cast<int4*>(memory + n_warps * kStages * S::kStageBytes) + warp * kStages;
  const int64_t n_blocks = gridDim.x / a.n_queries;  // of this query; few documents meet in none
  Stream<S> stream{{a, lane, a.claimed + which, score, n_blocks * n_warps}, ring, meta};
  stream.begin(warp * n_blocks + blockIdx.x / a.n_queries);
#pragma unroll 1
  for (int stage = 0; stage < kStages - 1; ++stage) stream.produce(stage);

  Query<S, kFp32, kWidth> query;
  query.lane = lane, query.shared = nullptr;
  query.prepare(values, a.n_query, warp, n_warps);
  const float least = least_score<S>(query);

  Best best{lane};
  best.begin();
  float largest = 0.0f;
#pragma unroll 1
  for (int stage = 0;; stage = stage == kStages - 1 ? 0 : stage + 1) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
    __syncwarp();  // all lanes' copies are there, and all have read the stage before
    const int4 what = meta[stage];
    if (what.x < 0) break;
    stream.produce(stage == 0 ? kStages - 1 : stage - 1);
    multiply_rows<S>(best, ring + stage * S::kStageBytes, query, what.y, lane, largest);
    if (what.z) {
      float sum = best.score(query, a.n_query);
#pragma unroll
      for (int by = 4; by < kWarp; by *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, by));
      if (!(fabsf(sum) >= least * largest && fabsf(sum) < INFINITY))  // NaN is neither
        sum = score_with_care<S>(a, values, what.x, lane);
      if (lane == 0) score[what.x] = sum;
      best.begin();
      largest = 0.0f;
    }
  }
}

}  // namespace

// Kernels by values of a row. A block has up to 8 warps, and shared memory for each warp's ring of
// STAGES tiles, and for what is in each.
#define MAXSIM(WIDTH, STAGES)                                                                  \
  extern "C" __global__ void __launch_bounds__(256, 1) espnx_maxsim_fp32_##WIDTH(              \
      const float* query, const uint8_t* buffer, const int64_t* offset, const int64_t* count,  \
      float* score, uint32_t* claimed, int64_t n_docs, uint32_t n_queries, uint32_t n_query) { \
    maxsim<WIDTH, STAGES>(                                                                     \
        {query, buffer, offset, count, score, claimed, n_docs, int(n_queries), int(n_query)}); \
  }

MAXSIM(64, 5)
MAXSIM(96, 4)
MAXSIM(128, 3)
