// What kernels of MaxSim by warps have in common: how a warp takes documents and copies their rows
// ahead, a query's parts in registers, and the largest products of a document's rows.
//
// score[q, i] = sum over t < n_query of max over j < count[i] of <query[q, t], row j of document i>
//
// Each warp works by itself: it claims one document after another by a counter, and copies tiles of
// rows into a ring of its own in shared memory, asynchronously and across the ends of documents, so
// that as many bytes are under way at a document's end as in its midst. A maximum keeps NaNs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "tensor_cores.cuh"

namespace {

constexpr int kWarp = 32, kTokens = 32;  // query tokens, in four pieces of 8
constexpr int kPieces = kTokens / 8;
constexpr int kHeld = 2;  // parts of the query in registers
constexpr unsigned kAll = 0xFFFFFFFFu;
// Parts of fp16 are of 2^13 times as much: what misses of a value stays in its normal range.
constexpr float kLift = 8192.0f;

enum Format { kFp32, kFp16, kBf16, kInt8, kBit1, kResidual };

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

__device__ __forceinline__ void copy_ahead(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_word_ahead(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ float max_nan(float a, float b) {
  float largest;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(largest) : "f"(a), "f"(b));
  return largest;
}

__device__ __forceinline__ uint32_t load_word(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

__device__ __forceinline__ float4 load_four(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ float sum_of_lanes(float value) {
#pragma unroll
  for (int by = kWarp / 2; by; by /= 2) value += __shfl_xor_sync(kAll, value, by);
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

// Documents as a worker claims them, one after another, all lanes of a warp together.
struct Documents {
  const Arguments& a;
  int lane;
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
};

// What a warp loads: its documents, tile by tile.
template <typename S>
struct Stream : Documents {
  uint32_t ring;  // of stages
  int4* meta;     // of each stage: document (-1: the end), rows, whether they are its last

  // Rows that were never there can be read then, too.
  __device__ __forceinline__ void clear(int n_stages) const {
    for (int at = lane * 16; at < n_stages * S::kStageBytes; at += kWarp * 16)
      asm volatile("st.shared.v4.b32 [%0], {%1,%1,%1,%1};" ::"r"(ring + at), "r"(0) : "memory");
    __syncwarp();
  }

  __device__ __forceinline__ void load_tile(uint32_t to, int rows) {
    if constexpr (S::kFlat) {
      constexpr int kCopies = (S::kStageBytes / 16 + kWarp - 1) / kWarp;
      if constexpr (kCopies > 3) {
        // Whole pieces, and words of one that is not. Rows that are not there stay what they were.
        // Addresses are a lane's first and a constant, which the compiler is not to take apart.
        const uint32_t n_bytes = rows * S::kRowBytes;
        const int own_bytes = n_bytes - lane * 16;
        const uint8_t* begin = from + lane * 16;
        uint32_t own = to + lane * 16;
        asm("" : "+l"(begin), "+r"(own));
#pragma unroll
        for (int i = 0; i < kCopies; ++i)
          if (own_bytes >= i * kWarp * 16 + 16)
            copy_ahead(own + i * kWarp * 16, begin + i * kWarp * 16);
        const uint32_t at = n_bytes / 16 * 16 + lane * 4;
        if (at < n_bytes) copy_word_ahead(to + at, from + at);
        return;
      }
      const int n_bytes = rows * S::kRowBytes;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
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
  if constexpr (kFormat == kFp32) {
    const float4 q = *reinterpret_cast<const float4*>(at + 4 * (step / 2 * 8 + 2 * t + step % 2));
    v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
  } else if constexpr (kFormat == kResidual) {
    const float4 q = *reinterpret_cast<const float4*>(at + 4 * (t * (kWidth / 16) + step));
    v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
  } else {
    const float2 low = *reinterpret_cast<const float2*>(at + step * 16 + 2 * t);
    const float2 high = *reinterpret_cast<const float2*>(at + step * 16 + 8 + 2 * t);
    v[0] = low.x, v[1] = low.y, v[2] = high.x, v[3] = high.y;
  }
}

// The one token whose maximum a lane has in the end.
__device__ __forceinline__ int token_in_the_end(int lane) {
  return (lane >> 3) * 8 + 2 * (lane % 4) + ((lane >> 2) & 1);
}

// A lane's own share of the query: what it multiplies with, and what is to be done with the maximum
// of the one token that it has in the end. It is in the parts that tensor cores take, two of fp16
// or three of bf16, which add up to it; two stay in registers, the third in shared memory.
template <typename S, Format kFormat, int kWidth>
struct Query {
  uint2 held[kHeld][S::kSteps][kPieces];
  uint2* shared;  // [steps, pieces, parts that are not held, lanes]
  int lane, token;
  float factor;

  // Its parts; in shared memory each warp makes some of them.
  __device__ __forceinline__ void prepare(const float* query, int n_query, int warp, int n_warps) {
    const int own_piece = lane >> 3;
    token = token_in_the_end(lane);
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
        // Of a token of zeros nothing is lost, which those ask that bound it.
        if ((kFormat == kFp32 || kFormat == kResidual) && peak == 0.0f) up = 0.0f;
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

  __device__ __forceinline__ float product_of(float largest) const { return largest * factor; }
};

// The largest products of a document's rows so far that a lane has: with tokens 8 * piece +
// 2 * (lane % 4) + {0, 1}.
struct Best {
  int lane;
  float largest[kPieces][2];

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < kPieces * 2; ++i) largest[i / 2][i % 2] = -INFINITY;
  }

  // Products with rows that are not there can never be the largest. `first` and `second`: the two
  // rows of the tile that a lane has.
  __device__ __forceinline__ void mask(float (*product)[4], int first, int second,
                                       int n_rows) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i < 2 ? first : second) < n_rows) continue;
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) product[piece][i] = -INFINITY;
    }
  }

  // `scale`: of these two rows.
  __device__ __forceinline__ void take(float (*product)[4], const float* scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& most = largest[piece][i];
          most = max_nan(most, product[piece][half * 2 + i] * scale[half]);
        }
  }

  // `scale` and `addend`: of these two rows. An addend is 0, or NaN or -inf, which products become.
  __device__ __forceinline__ void take(float (*product)[4], const float* scale,
                                       const float* addend) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& most = largest[piece][i];
          most = max_nan(most, fmaf(product[piece][half * 2 + i], scale[half], addend[half]));
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
    sum = query.token < n_query ? query.product_of(sum) : 0.0f;
#pragma unroll
    for (int by = kWarp / 2; by; by /= 2) sum += __shfl_xor_sync(kAll, sum, by);
    return sum;
  }
};

}  // namespace
