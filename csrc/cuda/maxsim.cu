// MaxSim of a query of up to 32 tokens with ragged documents in place in a byte buffer.
//
// score[q, i] = sum over t < n_query of max over j < count[i] of <query[q, t], row j of document i>
//
// -inf for a document without rows, NaN where a product with one of its rows is NaN. Rows are of
// fp16, bf16, int8 (an fp32 scale, then codes) or bit1 (signs). Documents begin at multiples of 16
// bytes; the query lies at one, too.
//
// Each warp works by itself: it claims one document after another by a counter, and copies tiles of
// rows into a ring of its own in shared memory, asynchronously and across the ends of documents, so
// that as many bytes are under way at a document's end as in its midst. Nothing waits for another
// warp. The query is in the parts that tensor cores take, two of fp16 or three of bf16, which add
// up to it; two stay in registers, the third in shared memory. Small products are summed first. A
// maximum keeps NaNs. Infinities that meet zeros in a part turn into NaN there, and a product may
// be too large until a factor makes it less: where a document's score is not finite it is made once
// more, by plain multiply-adds.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace {

constexpr int kWarp = 32, kTokens = 32;  // query tokens, in four pieces of 8
constexpr int kPieces = kTokens / 8;
constexpr int kHeld = 2;  // parts of the query in registers
constexpr unsigned kAll = 0xFFFFFFFFu;
// Parts of fp16 are of 2^13 times as much: what misses of a value stays in its normal range.
constexpr float kLift = 8192.0f;

enum Format { kFp16, kBf16, kInt8, kBit1 };

struct Arguments {
  const float* query;  // [n_queries, n_query, d]
  const uint8_t* buffer;
  const int64_t* offset;  // of each document, in bytes
  const int64_t* count;   // of its rows
  float* score;           // [n_queries, n_docs]
  uint32_t* claimed;      // [n_queries], zeros, which they are in the end, too
  int64_t n_docs;
  int n_queries, n_query;
};

__device__ __forceinline__ void copy_ahead(uint32_t to, const void* from, int n_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(n_bytes)
               : "memory");
}

__device__ __forceinline__ float max_nan(float a, float b) {
  float largest;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(largest) : "f"(a), "f"(b));
  return largest;
}

template <Format kFormat>
__device__ __forceinline__ void multiply(float* sum, const uint32_t* a, uint2 b) {
  if constexpr (kFormat == kBf16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
  }
}

__device__ __forceinline__ void load_matrices(uint32_t* a, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ uint32_t load_word(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

// The first and the third of a word's four int8 in fp16, by their bits: 1024 + n is 0x6400 + n, and
// 0x6480 is 1152. lop3 by 0x6a is (a & b) ^ c.
__device__ __forceinline__ uint32_t codes_of(uint32_t word) {
  uint32_t both;
  asm("{ .reg .b32 %%code<1>; mov.b32 %%code0, 0x64806480;"
      " lop3.b32 %0, %1, 0x00ff00ff, %%code0, 0x6a; sub.f16x2 %0, %0, %%code0; }"
      : "=r"(both)
      : "r"(word));
  return both;
}

// The signs of a word's bits 15 - i and 31 - i in fp16; a 0 is -1.
__device__ __forceinline__ uint32_t signs_of(uint32_t word, int i) {
  return ((word << i) & 0x80008000u) ^ 0xBC00BC00u;
}

__device__ __forceinline__ float fp32_of(uint32_t half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(half)));
  return value;
}

__device__ __forceinline__ uint32_t fp16_of(float x, float y) {
  const __half2 both = __floats2half2_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&both);
}

// fp32 in three parts of bf16: its leading bits, those of what they miss, and so on.
__device__ __forceinline__ uint32_t third_of(float value, int part) {
  const uint32_t bits = __float_as_uint(value);
  if (part == 0) return bits >> 16;
  const float rest = value - __uint_as_float(bits & 0xFFFF0000u);
  const uint32_t rest_bits = __float_as_uint(rest);
  if (part == 1) return rest_bits >> 16;
  return __bfloat16_as_ushort(__float2bfloat16_rn(rest - __uint_as_float(rest_bits & 0xFFFF0000u)));
}

template <Format kFormat>
__device__ __forceinline__ uint32_t part_of(float x, float y, int part) {
  if constexpr (kFormat == kBf16) return third_of(x, part) | (third_of(y, part) << 16);
  const uint32_t high = fp16_of(x, y);
  return part == 0 ? high : fp16_of(x - fp32_of(high), y - fp32_of(high >> 16));
}

// How rows of kWidth values lie in a stage of a ring, which takes kTiles tiles of 16 of them.
template <Format kFormat, int kWidth, int kTiles>
struct Shape {
  static constexpr int kParts = kFormat == kBf16 ? 3 : 2;
  static constexpr int kSteps = kWidth / 16;
  static constexpr int kRows = 16 * kTiles;
  static constexpr bool kFlat = kFormat == kInt8 || kFormat == kBit1;  // bytes as they come
  static constexpr int kRowBytes = kFormat == kInt8   ? 4 + kWidth
                                   : kFormat == kBit1 ? kWidth / 8
                                                      : 2 * kWidth;
  static constexpr int kRowCopies = kWidth / 8;  // of 16 bytes
  // Rows of a matrix lie whole multiples of 128 bytes apart, and their pieces are permuted, so that
  // eight rows' pieces are in different banks.
  static constexpr int kPitch = kFlat ? kRowBytes : (kRowCopies + 7) / 8 * 128;
  static constexpr int kStageBytes = (kRows * kPitch + 15) / 16 * 16;
  static constexpr int kShared = kParts - kHeld;
  static_assert(kFormat != kBit1 || kWidth == 128);
};

// What a warp loads: documents as it claims them, tile by tile.
template <typename S>
struct Stream {
  const Arguments& a;
  int lane;
  uint32_t ring;  // of stages
  int4* meta;     // of each stage: document (-1: the end), rows, whether they are its last
  uint32_t* claimed;
  float* score;
  int64_t workers;
  // What is being loaded, the next document, and the number of the one after it.
  int64_t doc, left, next_doc, next_count, next_offset, later_doc;
  const uint8_t* from;

  __device__ __forceinline__ void look_up() {
    if (next_doc < a.n_docs) next_count = a.count[next_doc], next_offset = a.offset[next_doc];
  }

  // To the next document that has rows. Where that is, is read while another is multiplied.
  __device__ __forceinline__ void turn() {
    while (true) {
      doc = next_doc, left = next_count, from = a.buffer + next_offset;
      if (doc >= a.n_docs) return;
      next_doc = later_doc;
      look_up();
      uint32_t before = 0;
      // Every document that is taken claims one, so the last claim makes it 0 again.
      if (lane == 0) before = atomicInc(claimed, uint32_t(a.n_docs - 1));
      later_doc = int64_t(__shfl_sync(kAll, before, 0)) + 2 * workers;
      if (left > 0) return;
      if (lane == 0) score[doc] = -INFINITY;
    }
  }

  __device__ __forceinline__ void begin(int64_t worker) {
    next_count = next_offset = 0;
    next_doc = worker, later_doc = worker + workers;
    look_up();
    turn();
  }

  __device__ __forceinline__ void load_tile(uint32_t to, int rows) {
    if constexpr (S::kFlat) {
      const int n_bytes = rows * S::kRowBytes;
#pragma unroll
      for (int i = 0; i < (S::kStageBytes / 16 + kWarp - 1) / kWarp; ++i) {
        const int at = (i * kWarp + lane) * 16;
        const int here = min(max(n_bytes - at, 0), 16);
        if (at < S::kStageBytes) copy_ahead(to + at, here ? from + at : from, here);
      }
    } else {
#pragma unroll
      for (int i = 0; i < S::kRows * S::kRowCopies / kWarp; ++i) {
        const int row = (i * kWarp + lane) / S::kRowCopies;
        const int piece = (i * kWarp + lane) % S::kRowCopies;
        const bool is_there = row < rows;
        copy_ahead(to + row * S::kPitch + (piece ^ (row & 7)) * 16,
                   from + (is_there ? row * S::kRowBytes : 0) + piece * 16, is_there ? 16 : 0);
      }
    }
  }

  __device__ __forceinline__ void produce(int stage) {
    if (doc < a.n_docs) {
      const int rows = left < S::kRows ? int(left) : S::kRows;
      load_tile(ring + stage * S::kStageBytes, rows);
      if (lane == 0) meta[stage] = make_int4(int(doc), rows, left <= S::kRows, 0);
      left -= S::kRows, from += S::kRows * S::kRowBytes;
      if (left <= 0) turn();
    } else if (lane == 0) {
      meta[stage] = make_int4(-1, 0, 0, 0);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
};

// The four values of the query's token 8 * piece + lane / 4 that a lane has in a step's two
// registers: of the dimensions that it has of rows.
template <Format kFormat, int kWidth>
__device__ __forceinline__ void query_values(const float* query, int n_query, int piece, int step,
                                             int lane, float* v) {
  const int token = piece * 8 + lane / 4, t = lane % 4;
  if (token >= n_query) {
    v[0] = v[1] = v[2] = v[3] = 0.0f;
    return;
  }
  const float* const at = query + token * kWidth;
  if constexpr (kFormat == kInt8) {
    const float4 q = *reinterpret_cast<const float4*>(at + 4 * (t * (kWidth / 16) + step));
    v[0] = q.x, v[1] = q.z, v[2] = q.y, v[3] = q.w;
  } else if constexpr (kFormat == kBit1) {
    const float* const word = at + 32 * t - 2 * step;
    v[0] = word[15], v[1] = word[31], v[2] = word[14], v[3] = word[30];
  } else {
    const float2 low = *reinterpret_cast<const float2*>(at + step * 16 + 2 * t);
    const float2 high = *reinterpret_cast<const float2*>(at + step * 16 + 8 + 2 * t);
    v[0] = low.x, v[1] = low.y, v[2] = high.x, v[3] = high.y;
  }
}

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
    float sum = 0.0f;
#pragma unroll 1
    for (int k = 0; k < kWidth; ++k) {
      float x;
      if constexpr (kFormat == kFp16) x = fp32_of(reinterpret_cast<const uint16_t*>(at)[k]);
      if constexpr (kFormat == kBf16)
        x = __uint_as_float(uint32_t(reinterpret_cast<const uint16_t*>(at)[k]) << 16);
      if constexpr (kFormat == kInt8) x = float(reinterpret_cast<const int8_t*>(at)[4 + k]);
      if constexpr (kFormat == kBit1) x = (at[k / 8] >> (k % 8)) & 1 ? 1.0f : -1.0f;
      sum = fmaf(values[k], x, sum);
    }
    if constexpr (kFormat == kInt8) {
      const float scale = *reinterpret_cast<const float*>(at);
      sum *= scale * 0.0f + scale;  // one that is not finite counts as NaN
    }
    if constexpr (kFormat == kBit1) sum *= 0.08838834764831845f;  // 128^-1/2
    largest = max_nan(largest, sum);
  }
  if (!is_query) largest = 0.0f;
#pragma unroll
  for (int by = kWarp / 2; by; by /= 2) largest += __shfl_xor_sync(kAll, largest, by);
  return largest;
}

// A lane's own share of the query: what it multiplies with, and what is to be done with the maximum
// of the one token that it has in the end.
template <typename S, Format kFormat, int kWidth>
struct Query {
  uint2 held[kHeld][S::kSteps][kPieces];
  uint2* shared;  // [steps, pieces, parts that are not held, lanes]
  int lane, token;
  float factor;

  // Its parts; in shared memory each warp makes some of them.
  __device__ __forceinline__ void prepare(const float* query, int n_query, int warp, int n_warps) {
    const int own_piece = lane >> 3;
    token = own_piece * 8 + 2 * (lane % 4) + ((lane >> 2) & 1);
    factor = 1.0f;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      float down = 1.0f;
      if constexpr (kFormat != kBf16) {
        float peak = 0.0f;
#pragma unroll 4
        for (int step = 0; step < S::kSteps; ++step) {
          float v[4];
          query_values<kFormat, kWidth>(query, n_query, piece, step, lane, v);
#pragma unroll
          for (int i = 0; i < 4; ++i) peak = fmaxf(peak, fabsf(v[i]));
        }
        peak = fmaxf(peak, __shfl_xor_sync(kAll, peak, 1));
        peak = fmaxf(peak, __shfl_xor_sync(kAll, peak, 2));
        const uint32_t exponent = min(max(__float_as_uint(peak) >> 23, 1u), 253u);
        down = __uint_as_float((254u - exponent) << 23);
        float up = __uint_as_float(exponent << 23) * (1.0f / kLift);
        if (kFormat == kBit1) up *= 0.08838834764831845f;  // 128^-1/2
        // Lanes of the same lane / 4 have the same token here.
        const float of_own = __shfl_sync(kAll, up, token % 8 * 4);
        if (piece == own_piece) factor = of_own;
      }
#pragma unroll
      for (int step = 0; step < S::kSteps; ++step)
        make(query, n_query, piece, step, down, step % n_warps == warp);
    }
  }

  __device__ __forceinline__ void make(const float* query, int n_query, int piece, int step,
                                       float down, bool is_mine) {
    float v[4];
    query_values<kFormat, kWidth>(query, n_query, piece, step, lane, v);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = kFormat == kBf16 ? v[i] : v[i] * down * kLift;
#pragma unroll
    for (int part = 0; part < S::kParts; ++part) {
      const uint2 both =
          make_uint2(part_of<kFormat>(v[0], v[1], part), part_of<kFormat>(v[2], v[3], part));
      if (part < kHeld)
        held[part < kHeld ? part : 0][step][piece] = both;
      else if (is_mine)
        *place(part, step, piece) = both;
    }
  }

  __device__ __forceinline__ uint2* place(int part, int step, int piece) const {
    return shared + ((step * kPieces + piece) * S::kShared + part - kHeld) * kWarp + lane;
  }

  __device__ __forceinline__ uint2 part(int part, int step, int piece) const {
    if (part < kHeld) return held[part < kHeld ? part : 0][step][piece];
    return *place(part, step, piece);
  }
};

// The rows of a stage that a lane has as left operands: row lane / 4 of a tile, and eight further.
template <typename S, Format kFormat>
struct Rows {
  uint32_t stage;
  int lane;
  uint32_t word[2];  // bit1

  __device__ __forceinline__ uint32_t row(int tile, int half) const {
    return stage + (tile * 16 + half * 8 + lane / 4) * S::kPitch;
  }

  __device__ __forceinline__ void begin(int tile) {
    if constexpr (kFormat == kBit1)
      for (int half = 0; half < 2; ++half) word[half] = load_word(row(tile, half) + lane % 4 * 4);
  }

  __device__ __forceinline__ void values(uint32_t* left, int tile, int step) const {
    if constexpr (kFormat == kInt8) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t codes = load_word(row(tile, half) + 4 + 4 * (lane % 4 * S::kSteps + step));
        left[half] = codes_of(codes), left[2 + half] = codes_of(codes >> 8);
      }
    } else if constexpr (kFormat == kBit1) {
#pragma unroll
      for (int i = 0; i < 4; ++i) left[i] = signs_of(word[i % 2], 2 * step + i / 2);
    } else {
      const int at = tile * 16 + (lane & 15), piece = step * 2 + (lane >> 4);
      load_matrices(left, stage + at * S::kPitch + (piece ^ (at & 7)) * 16);
    }
  }

  // What a row's products are to be multiplied by; 1 where there is no row.
  __device__ __forceinline__ float scale(int tile, int half, int rows) const {
    if (kFormat != kInt8 || tile * 16 + half * 8 + lane / 4 >= rows) return 1.0f;
    const float stored = __uint_as_float(load_word(row(tile, half)));
    return stored * 0.0f + stored;  // one that is not finite counts as NaN
  }
};

// The largest products of a document's rows so far that a lane has: with tokens 8 * piece +
// 2 * (lane % 4) + {0, 1}.
template <typename S, Format kFormat>
struct Best {
  int lane;
  float largest[kPieces][2];

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < kPieces * 2; ++i) largest[i / 2][i % 2] = -INFINITY;
  }

  // Sums of products of a tile with rows that are not there can never be the largest.
  __device__ __forceinline__ void clear(float (*product)[4], int tile, int n_rows) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float there = tile * 16 + i / 2 * 8 + lane / 4 < n_rows ? 0.0f : -INFINITY;
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) product[piece][i] = there;
    }
  }

  __device__ __forceinline__ void take(float (*product)[4], const Rows<S, kFormat>& rows, int tile,
                                       int n_rows) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float scale = rows.scale(tile, half, n_rows);
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& most = largest[piece][i];
          most = max_nan(most, product[piece][half * 2 + i] * scale);
        }
    }
  }

  // The sum over the query's tokens. Lanes give halves of theirs away, until each has the maximum
  // of one token.
  template <typename Q>
  __device__ __forceinline__ float score(const Q& query, int n_query) const {
    float four[4], two[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float first = largest[i / 2][i % 2], second = largest[2 + i / 2][i % 2];
      const bool keeps_second = lane & 16;
      four[i] = max_nan(keeps_second ? second : first,
                        __shfl_xor_sync(kAll, keeps_second ? first : second, 16));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool keeps_second = lane & 8;
      two[i] = max_nan(keeps_second ? four[2 + i] : four[i],
                       __shfl_xor_sync(kAll, keeps_second ? four[i] : four[2 + i], 8));
    }
    const bool keeps_second = lane & 4;
    float sum = max_nan(keeps_second ? two[1] : two[0],
                        __shfl_xor_sync(kAll, keeps_second ? two[0] : two[1], 4));
    sum = query.token < n_query ? sum * query.factor : 0.0f;
#pragma unroll
    for (int by = kWarp / 2; by; by /= 2) sum += __shfl_xor_sync(kAll, sum, by);
    return sum;
  }
};

// Products of a stage that holds whole rows.
template <typename S, Format kFormat, int kTiles, typename Q>
__device__ __forceinline__ void multiply_rows(Best<S, kFormat>& best, Rows<S, kFormat>& rows,
                                              const Q& query, int n_rows) {
#pragma unroll(kFormat == kBit1 ? 1 : kTiles)
  for (int tile = 0; tile < kTiles; ++tile) {
    if (kFormat == kBit1 && tile * 16 >= n_rows) break;
    float product[kPieces][4];
    best.clear(product, tile, n_rows);
    rows.begin(tile);
    uint32_t left[S::kSteps][4];
#pragma unroll
    for (int step = 0; step < S::kSteps; ++step) rows.values(left[step], tile, step);
    // What is added to a large sum is rounded as it is: small products first.
#pragma unroll
    for (int part = S::kParts - 1; part >= 0; --part)
#pragma unroll
      for (int step = 0; step < S::kSteps; ++step)
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece)
          multiply<kFormat>(product[piece], left[step], query.part(part, step, piece));
    best.take(product, rows, tile, n_rows);
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
  Stream<S> stream{a, lane, ring, meta, a.claimed + which, score, n_blocks * n_warps};
  stream.begin(warp * n_blocks + blockIdx.x / a.n_queries);
#pragma unroll 1
  for (int stage = 0; stage < kStages - 1; ++stage) stream.produce(stage);

  Query<S, kFormat, kWidth> query;
  query.lane = lane, query.shared = reinterpret_cast<uint2*>(all_meta + n_warps * kStages);
  query.prepare(values, a.n_query, warp, n_warps);
  if (S::kShared) __syncthreads();

  Best<S, kFormat> best{lane};
  best.begin();
#pragma unroll 1
  for (int stage = 0;; stage = stage == kStages - 1 ? 0 : stage + 1) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
    __syncwarp();  // all lanes' copies are there, and all have read the stage before
    const int4 what = meta[stage];
    if (what.x < 0) break;
    stream.produce(stage == 0 ? kStages - 1 : stage - 1);
    Rows<S, kFormat> rows{ring + stage * S::kStageBytes, lane};
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

MAXSIM(fp16_64, kFp16, 64, 1, 6)
MAXSIM(fp16_96, kFp16, 96, 1, 4)
MAXSIM(fp16_128, kFp16, 128, 1, 4)
MAXSIM(bf16_64, kBf16, 64, 1, 6)
MAXSIM(bf16_96, kBf16, 96, 1, 4)
MAXSIM(bf16_128, kBf16, 128, 1, 4)
MAXSIM(int8_64, kInt8, 64, 2, 6)
MAXSIM(int8_96, kInt8, 96, 2, 5)
MAXSIM(int8_128, kInt8, 128, 2, 4)
MAXSIM(bit1_128, kBit1, 128, 4, 4)
