// MaxSim of a query of up to 32 tokens with ragged documents in place in a byte buffer.
//
// -inf for a document without rows, NaN where a product with one of its rows is NaN. Rows are of
// fp16, bf16, int8 (an fp32 scale, then codes) or bit1 (signs). Documents begin at multiples of 16
// bytes; the query lies at one, too. maxsim.cuh says what is computed, and how warps share it.
//
// Rows of 16 bits are multiplied as they are by parts of the query, small products first. int8 and
// bit1 rows are multiplied in whole numbers: codes as they lie in memory, signs as 0 and 1, by
// digits of the query (digits.cuh). Those sums are exact.
//
// Nothing waits for another warp. Infinities that meet zeros in a part turn into NaN there, digits
// hold none, so that a token that has one makes scores NaN, and a product may be too large until a
// factor makes it less: where a document's score is not finite it is made once more, by plain
// multiply-adds.
#include <type_traits>

#include "digits.cuh"
#include "maxsim.cuh"

namespace {

// How rows of kWidth values lie in a stage of a ring, which takes kTiles tiles of 16 of them.
template <Format kFormat, int kWidth, int kTiles>
struct Shape {
  static constexpr bool kWhole = kFormat == kInt8 || kFormat == kBit1;  // multiplied as such
  static constexpr int kParts = kFormat == kBf16 ? 3 : 2;
  static constexpr int kSteps = kWhole ? (kWidth + 31) / 32 : kWidth / 16;
  static constexpr bool kEndsInHalf = kWhole && kWidth % 32;  // the last step: 16 values
  static constexpr int kRows = 16 * kTiles;
  static constexpr bool kFlat = kWhole;  // bytes as they come
  static constexpr int kRowBytes = kFormat == kInt8   ? 4 + kWidth
                                   : kFormat == kBit1 ? kWidth / 8
                                                      : 2 * kWidth;
  static constexpr int kRowCopies = kWidth / 8;  // of 16 bytes
  // Rows of a matrix lie whole multiples of 128 bytes apart, and their pieces are permuted, so that
  // eight rows' pieces are in different banks.
  static constexpr int kPitch = kFlat ? kRowBytes : (kRowCopies + 7) / 8 * 128;
  static constexpr int kStageBytes = (kRows * kPitch + 15) / 16 * 16;
  static constexpr int kShared = kWhole ? 0 : kParts - kHeld;
  static_assert(kFormat != kBit1 || kWidth == 128);
  static constexpr int kTogether = kFormat == kInt8 ? 2 : 1;  // tiles whose rows alternate
  static_assert(kTiles % kTogether == 0);
};

// One document's score by plain multiply-adds: a query token a lane, a row after another.
template <typename S, Format kFormat, int kWidth>
__device__ __forceinline__ float score_with_care(const Arguments& a, const float* query,
                                                 int64_t doc, int lane) {
  float largest = -INFINITY;
  const bool is_query = lane < a.n_query;
  const float* const values = query + (is_query ? lane : 0) * kWidth;
#pragma unroll 1
  for (int64_t row = 0; row < a.count[doc]; ++row) {
    const uint8_t* const at = a.buffer + a.offset[doc] + row * S::kRowBytes;
    float sum = 0.0f, scale = 1.0f;
    if constexpr (kFormat == kInt8) {
      scale = *reinterpret_cast<const float*>(at);
      scale = scale * 0.0f + scale;  // one that is not finite counts as NaN
    }
#pragma unroll 1
    for (int k = 0; k < kWidth; ++k) {
      float x;
      if constexpr (kFormat == kFp16) x = fp32_of(reinterpret_cast<const uint16_t*>(at)[k]);
      if constexpr (kFormat == kBf16)
        x = __uint_as_float(uint32_t(reinterpret_cast<const uint16_t*>(at)[k]) << 16);
      if constexpr (kFormat == kInt8) x = float(reinterpret_cast<const int8_t*>(at)[4 + k]) * scale;
      if constexpr (kFormat == kBit1) x = (at[k / 8] >> (k % 8)) & 1 ? 1.0f : -1.0f;
      sum = fmaf(values[k], x, sum);
    }
    if constexpr (kFormat == kBit1) sum *= 0.08838834764831845f;  // 128^-1/2
    largest = max_nan(largest, sum);
  }
  if (!is_query) largest = 0.0f;
#pragma unroll
  for (int by = kWarp / 2; by; by /= 2) largest += __shfl_xor_sync(kAll, largest, by);
  return largest;
}

// The rows of a stage that a lane has as left operands: two of each tile.
template <typename S, Format kFormat>
struct Rows {
  uint32_t stage;
  int lane;
  // Of int8: a lane's first row, and its first word of codes there, less the scale's. Addresses of
  // all others are these and a constant, which the compiler is not to take apart.
  uint32_t scales, codes;

  __device__ __forceinline__ Rows(uint32_t stage, int lane) : stage(stage), lane(lane) {
    scales = stage + number(0, 0) * S::kPitch, codes = scales + lane % 4 * 4;
    if (kFormat == kInt8) asm("" : "+r"(scales), "+r"(codes));
  }

  __device__ __forceinline__ static constexpr uint32_t further(int tile, int half) {
    return (tile / 2 * 32 + tile % 2 * 2 + half) * S::kPitch;
  }

  // Row lane / 4 of a tile and the one eight further; of int8 every fourth one of 32 rows, so that
  // words of the eight that are loaded at once, each with its scale, are in different banks.
  __device__ __forceinline__ int number(int tile, int half) const {
    if constexpr (kFormat == kInt8) return tile / 2 * 32 + lane / 4 * 4 + tile % 2 * 2 + half;
    return tile * 16 + half * 8 + lane / 4;
  }

  __device__ __forceinline__ uint32_t row(int tile, int half) const {
    return stage + number(tile, half) * S::kPitch;
  }

  __device__ __forceinline__ void values(uint32_t (*left)[4], int tile) const {
    if constexpr (kFormat == kInt8) {
#pragma unroll
      for (int i = 0; i < S::kSteps * 4 - (S::kEndsInHalf ? 2 : 0); ++i)
        left[i / 4][i % 4] = load_word(codes + further(tile, i % 2) + 4 + i / 2 * 16);
    } else if constexpr (kFormat == kBit1) {
      // Of each byte of a word the same bit: of 32 values one in eight.
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t word = load_word(row(tile, half) + lane % 4 * 4);
#pragma unroll
        for (int i = 0; i < 8; ++i) left[i / 2][i % 2 * 2 + half] = (word >> i) & 0x01010101u;
      }
    } else {
#pragma unroll
      for (int step = 0; step < S::kSteps; ++step) {
        const int at = tile * 16 + (lane & 15), piece = step * 2 + (lane >> 4);
        load_matrices(left[step], stage + at * S::kPitch + (piece ^ (at & 7)) * 16);
      }
    }
  }

  // An int8 row's scale.
  __device__ __forceinline__ float scale(int tile, int half) const {
    return __uint_as_float(load_word(scales + further(tile, half)));
  }
};

// A tile's products with all tokens; of what is multiplied in whole numbers, in steps of the
// query's last digit.
template <typename S, Format kFormat, typename Q>
__device__ __forceinline__ void products(float (*product)[4], const uint32_t (*left)[4],
                                         const Q& query) {
  if constexpr (S::kWhole) {
    int sum[kDigits][kPieces][4];
#pragma unroll
    for (int i = 0; i < kDigits * kPieces * 4; ++i)
      sum[i / (kPieces * 4)][i / 4 % kPieces][i % 4] = kFirst[i / (kPieces * 4)];
#pragma unroll
    for (int step = 0; step < S::kSteps; ++step)
#pragma unroll
      for (int digit = 0; digit < kDigits; ++digit)
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          const uint2 right = query.digit(digit, step, piece);
          if (S::kEndsInHalf && step == S::kSteps - 1)
            multiply_half(sum[digit][piece], left[step], right.x);
          else
            multiply(sum[digit][piece], left[step], right);
        }
#pragma unroll
    for (int i = 0; i < kPieces * 4; ++i)
      product[i / 4][i % 4] =
          number_of(sum[0][i / 4][i % 4], sum[1][i / 4][i % 4], sum[2][i / 4][i % 4]);
  } else {
#pragma unroll
    for (int i = 0; i < kPieces * 4; ++i) product[i / 4][i % 4] = 0.0f;
    // What is added to a large sum is rounded as it is: small products first.
#pragma unroll
    for (int part = S::kParts - 1; part >= 0; --part)
#pragma unroll
      for (int step = 0; step < S::kSteps; ++step)
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece)
          multiply<kFormat == kBf16>(product[piece], left[step], query.part(part, step, piece));
  }
}

// Products of a stage that holds whole rows.
template <typename S, Format kFormat, int kTiles, typename Q>
__device__ __forceinline__ void multiply_rows(Best& best, const Rows<S, kFormat>& rows,
                                              const Q& query, int n_rows) {
#pragma unroll(kFormat == kBit1 ? 1 : kTiles)
  for (int tile = 0; tile < kTiles; ++tile) {
    if (S::kWhole && tile && tile * 16 >= n_rows) break;
    uint32_t left[S::kSteps][4];
    rows.values(left, tile);
    float product[kPieces][4];
    products<S, kFormat>(product, left, query);
    if (n_rows < S::kRows) best.mask(product, rows.number(tile, 0), rows.number(tile, 1), n_rows);
    const float scale[2] = {1.0f, 1.0f};
    best.take(product, scale);
  }
}

// int8 rows: two tiles whose rows alternate at a time.
template <typename S, int kTiles, typename Q>
__device__ __forceinline__ void multiply_rows(Best& best, const Rows<S, kInt8>& rows,
                                              const Q& query, int n_rows) {
  constexpr int kTogether = S::kTogether;
  const bool is_whole = n_rows == S::kRows;
#pragma unroll
  for (int first = 0; first < kTiles; first += kTogether) {
    if (first && first * 16 >= n_rows) break;
    // A scale that is not finite times 0 is NaN, and so are sums with that.
    float scale[kTogether][2], addend[kTogether][2];
#pragma unroll
    for (int i = 0; i < kTogether * 2; ++i) {
      scale[i / 2][i % 2] = rows.scale(first + i / 2, i % 2);
      addend[i / 2][i % 2] = scale[i / 2][i % 2] * 0.0f;
    }
    if (!is_whole) {
#pragma unroll
      for (int i = 0; i < kTogether * 2; ++i) {
        if (rows.number(first + i / 2, i % 2) < n_rows) continue;
        // Products with rows that are not there can never be the largest.
        scale[i / 2][i % 2] = 0.0f, addend[i / 2][i % 2] = -INFINITY;
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTogether; ++tile) {
      uint32_t left[S::kSteps][4];
      rows.values(left, first + tile);
      float product[kPieces][4];
      products<S, kInt8>(product, left, query);
      best.take(product, scale[tile], addend[tile]);
    }
  }
}

template <Format kFormat, int kWidth, int kTiles, int kStages>
__device__ __forceinline__ void maxsim(const Arguments& a) {
  using S = Shape<kFormat, kWidth, kTiles>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, n_warps = blockDim.x / kWarp;
  const int which = blockIdx.x % a.n_queries;
  const float* const values = a.query + int64_t(which) * a.n_query * kWidth;
  float* const score = a.score + which * a.n_docs;
  // Rings of all warps, what is in their stages, parts of the query.
  const uint32_t ring =
      static_cast<uint32_t>(__cvta_generic_to_shared(memory)) + warp * kStages * S::kStageBytes;
  int4* const all_meta = reinterpret_cast<int4*>(memory + n_warps * kStages * S::kStageBytes);
  int4* const meta = all_meta + warp * kStages;
  const int64_t n_blocks = gridDim.x / a.n_queries;  // of this query; few documents meet in none
  Stream<S> stream{{a, lane, a.claimed + which, score, n_blocks * n_warps}, ring, meta};
  if (kFormat == kInt8) stream.clear(kStages);
  stream.begin(warp * n_blocks + blockIdx.x / a.n_queries);
#pragma unroll 1
  for (int stage = 0; stage < kStages - 1; ++stage) stream.produce(stage);

  std::conditional_t<S::kWhole, Digits<kFormat, kWidth>, Query<S, kFormat, kWidth>> query;
  if constexpr (S::kWhole) {
    query.prepare(values, a.n_query, lane);
  } else {
    query.lane = lane, query.shared = reinterpret_cast<uint2*>(all_meta + n_warps * kStages);
    query.prepare(values, a.n_query, warp, n_warps);
  }
  if (S::kShared) __syncthreads();

  Best best{lane};
  best.begin();
#pragma unroll 1
  for (int stage = 0;; stage = stage == kStages - 1 ? 0 : stage + 1) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
    __syncwarp();  // all lanes' copies are there, and all have read the stage before
    const int4 what = meta[stage];
    if (what.x < 0) break;
    stream.produce(stage == 0 ? kStages - 1 : stage - 1);
    const Rows<S, kFormat> rows(ring + stage * S::kStageBytes, lane);
    if constexpr (kFormat == kInt8)
      multiply_rows<S, kTiles>(best, rows, query, what.y);
    else
      multiply_rows<S, kFormat, kTiles>(best, rows, query, what.y);
    if (what.z) {
      float sum = best.score(query, a.n_query);
      if (!(fabsf(sum) < INFINITY))
        sum = score_with_care<S, kFormat, kWidth>(a, values, what.x, lane);
      if (lane == 0) score[what.x] = sum;
      best.begin();
    }
  }
}

}  // namespace

// Kernels by format and values of a row. A block has up to 8 warps, and shared memory for each
// warp's ring: STAGES stages of TILES tiles, and what is in each.
#define MAXSIM(NAME, FORMAT, WIDTH, TILES, STAGES)                                             \
  extern "C" __global__ void __launch_bounds__(256, 1) espnx_maxsim_##NAME(                    \
      const float* query, const uint8_t* buffer, const int64_t* offset, const int64_t* count,  \
      float* score, uint32_t* claimed, int64_t n_docs, uint32_t n_queries, uint32_t n_query) { \
    maxsim<FORMAT, WIDTH, TILES, STAGES>(                                                      \
        {query, buffer, offset, count, score, claimed, n_docs, int(n_queries), int(n_query)}); \
  }

MAXSIM(fp16_32, kFp16, 32, 2, 4)
MAXSIM(fp16_48, kFp16, 48, 2, 4)
MAXSIM(fp16_64, kFp16, 64, 1, 6)
MAXSIM(fp16_80, kFp16, 80, 1, 4)
MAXSIM(fp16_96, kFp16, 96, 1, 4)
MAXSIM(fp16_112, kFp16, 112, 1, 4)
MAXSIM(fp16_128, kFp16, 128, 1, 4)
MAXSIM(bf16_32, kBf16, 32, 2, 4)
MAXSIM(bf16_48, kBf16, 48, 2, 4)
MAXSIM(bf16_64, kBf16, 64, 1, 6)
MAXSIM(bf16_80, kBf16, 80, 1, 4)
MAXSIM(bf16_96, kBf16, 96, 1, 4)
MAXSIM(bf16_112, kBf16, 112, 1, 4)
MAXSIM(bf16_128, kBf16, 128, 1, 4)
MAXSIM(int8_32, kInt8, 32, 8, 4)
MAXSIM(int8_48, kInt8, 48, 8, 3)
MAXSIM(int8_64, kInt8, 64, 4, 4)
MAXSIM(int8_80, kInt8, 80, 2, 5)
MAXSIM(int8_96, kInt8, 96, 2, 5)
MAXSIM(int8_112, kInt8, 112, 2, 4)
MAXSIM(int8_128, kInt8, 128, 2, 4)
MAXSIM(bit1_128, kBit1, 128, 4, 4)
