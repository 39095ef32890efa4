// Attention over long rows of fp16 or bf16 in blocks of a byte buffer: rows that are K and V at
// once (latent rows, X rows), and K and V rows. kernels/attention.py says what the arguments mean.
//
// o[i] = sum over the rows r that query i sees of softmax_r(<query[i], k_r>) v_r, and lse, the
// logarithm of its denominator; 8 or 16 queries of a head over one part of its rows a block.
//
// Each warp has 64, 96 or 128 values of all rows: it copies them into a ring of its own in shared
// memory, 32 rows a tile, asynchronously; holds those of the queries in registers, in the parts
// that tensor cores take (two of fp16 or three of bf16, which add up to them); and sums those of V.
// So a row is brought once, whether it is both or not, and read from shared memory twice. Rows are
// the left operand of products, queries and weights the right one, of which a tensor core takes 8.
// Warps meet twice in a tile: when each has its share of the scores, and when these are weights.
// Between, a lane has a row, and a warp two queries at a time. Scores are in powers of two.
//
// A value of V that is not finite makes sums of queries so that do not see its row, since zero
// times infinity is NaN, and one of K makes NaN of what are infinite scores, since a query's parts
// differ in sign: where a sum is not finite all of them are made once more, by plain multiply-adds
// of those who see a row.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "tensor_cores.cuh"

namespace {

constexpr int kWarp = 32, kRows = 32;            // rows of a tile: one a lane
constexpr int kTiles = kRows / 16, kWarps = 16;  // of a block at most
// Between two queries' scores, in floats, and weights, in bytes: so that stores of scores and loads
// of weights are each in different banks.
constexpr int kScorePitch = kRows + 4, kWeightPitch = kRows * 2 + 16;
constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
// Exponents that values have in fp16, so that what the first part misses is in the second one's
// range: 2^14 for the largest of a query, 2^13 for the largest weight.
constexpr int kQueryBits = 14;
constexpr float kWeightBits = 13.0f;

struct Arguments {
  const float* query;  // [n_heads, n_queries, d]
  const uint8_t* buffer;
  const int64_t* offset;         // [n_heads, n_blocks], in bytes, of blocks
  const int64_t* count;          // [n_sequences], of rows
  const uint8_t* visible;        // [n_sequences, visible_stride]
  const int64_t* last_position;  // [n_sequences, q_len]
  const int64_t* position;       // [n_sequences, q_len]
  const float* slope;            // [n_heads, n_queries]
  float* o;                      // [n_splits, n_heads, n_queries, dv]
  float* lse;                    // [n_splits, n_heads, n_queries]
  int64_t n_blocks, visible_stride, v_begin;
  int n_heads, n_kv, n_queries, q_len, block_rows, split_rows;
  int d, dv, stages, window;
  bool is_both, has_last, has_slopes;
  float soft_cap, cap_inverse;
};

// What is to be known of a query: the rows that it sees, what is done to its scores, and its peak.
struct alignas(16) Place {
  int first, last;
  float factor, best;  // what every tile asks for, together
  float alpha, down, slope;
  int position;
};

// Waits until at most so many of a lane's groups of copies are under way.
__device__ __forceinline__ void wait_for_copies(int n_left) {
  if (n_left == 0)
    asm volatile("cp.async.wait_group 0;" ::: "memory");
  else if (n_left == 1)
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  else
    asm volatile("cp.async.wait_group 2;" ::: "memory");
}

__device__ __forceinline__ float power_of_two(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

__device__ __forceinline__ float log2_of(float x) {
  float found;
  asm("lg2.approx.f32 %0, %1;" : "=f"(found) : "f"(x));
  return found;
}

// Good to a few units in the last place also near 0, where 1 - e^-2x would lose all: Taylor's
// series up to x^9 is off by 2^-27 at most below 1/4.
__device__ __forceinline__ float tanh_of(float x) {
  const float size = fabsf(x), square = x * x;
  float series = square * (62.0f / 2835.0f) - 17.0f / 315.0f;
  series = (series * square + 2.0f / 15.0f) * square - 1.0f / 3.0f;
  const float e = power_of_two(-2.0f * kLog2E * size), far = __fdividef(1.0f - e, 1.0f + e);
  return size < 0.25f ? x + x * square * series : x < 0.0f ? -far : far;
}

// The largest number of a warp's; NaNs are none.
__device__ __forceinline__ float largest_of(float x) {
  const int bits = __float_as_int(x == x ? x : -INFINITY);
  const int key = bits ^ ((bits >> 31) & 0x7FFFFFFF);  // ordered as the numbers are
  const int most = __reduce_max_sync(kAll, key);
  return __int_as_float(most ^ ((most >> 31) & 0x7FFFFFFF));
}

__device__ __forceinline__ void load_turned(uint32_t* a, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address)
               : "memory");
}

// One of the parts of a number: in fp16 the number and what that misses, in bf16 its leading bits,
// those of what they miss, and so on.
template <bool kBf16>
__device__ __forceinline__ uint32_t part_of(float value, int part) {
  if constexpr (kBf16) {
    const uint32_t bits = __float_as_uint(value);
    if (part == 0) return bits >> 16;
    const float rest = value - __uint_as_float(bits & 0xFFFF0000u);
    const uint32_t rest_bits = __float_as_uint(rest);
    if (part == 1) return rest_bits >> 16;
    const float last = rest - __uint_as_float(rest_bits & 0xFFFF0000u);
    return __bfloat16_as_ushort(__float2bfloat16_rn(last));
  } else {
    const uint32_t high = __half_as_ushort(__float2half_rn(value));
    return part == 0 ? high : __half_as_ushort(__float2half_rn(value - fp32_of(high)));
  }
}

// A warp has kSliceOf values of all rows, and a block kPiecesOf times 8 queries.
template <bool kIsBf16, int kPiecesOf, int kSliceOf>
struct Shape : SliceLayout<kSliceOf> {
  static constexpr bool kBf16 = kIsBf16;
  static constexpr int kPieces = kPiecesOf, kSlice = kSliceOf;
  static constexpr int kParts = kBf16 ? 3 : 2;
  static constexpr int kQueries = 8 * kPieces;
  static constexpr int kScoreFloats = kQueries * kScorePitch;  // of a warp's share
  static constexpr int kSteps = kSlice / 16;
  static constexpr int kSliceBytes = kRows * SliceLayout<kSlice>::kPitch;

  static constexpr int kHeld = 2;  // parts of the queries in registers, the third in shared memory
  static constexpr int kSharedBytes = (kParts - kHeld) * kSteps * kPieces * kWarp * 8;  // of a warp
};

// A block's work: some queries of a head, and some of its rows.
struct Work {
  int head, sequence, split, q_begin, begin, end, n_rows, unused;

  __device__ __forceinline__ int64_t result(const Arguments& a) const {  // of its first query
    return (int64_t(split) * a.n_heads + head) * a.n_queries + q_begin;
  }
};

// Where things lie in shared memory, after the rings.
template <typename S>
struct Shared {
  uint8_t* memory;
  int ring_bytes, n_warps;

  __device__ __forceinline__ float* score(int slice) const {
    return reinterpret_cast<float*>(memory + ring_bytes) + slice * S::kScoreFloats;
  }
  // Weights by part, query and row; with care: floats by row and query.
  __device__ __forceinline__ uint8_t* weights() const {
    return reinterpret_cast<uint8_t*>(score(n_warps));
  }
  __device__ __forceinline__ float* total() const {  // by query and lane
    return reinterpret_cast<float*>(weights() + S::kParts * S::kQueries * kWeightPitch);
  }
  __device__ __forceinline__ Place* places() const {
    return reinterpret_cast<Place*>(total() + S::kQueries * kWarp);
  }
  __device__ __forceinline__ int* flags() const {  // of each warp: a sum of its is not finite
    return reinterpret_cast<int*>(places() + S::kQueries);
  }
  __device__ __forceinline__ Work* work() const {  // for what comes in the end
    return reinterpret_cast<Work*>(flags() + kWarps);
  }
  __device__ __forceinline__ uint2* parts(int slice) const {  // that registers do not hold
    return reinterpret_cast<uint2*>(reinterpret_cast<uint8_t*>(work() + 1) +
                                    slice * S::kSharedBytes);
  }
};

__device__ __forceinline__ Work work_of(const Arguments& a, int n_queries) {
  Work work{};
  const int q_blocks = (a.n_queries + n_queries - 1) / n_queries;
  const int rest = int(blockIdx.x / q_blocks);
  work.q_begin = int(blockIdx.x % q_blocks) * n_queries;
  work.split = rest / a.n_heads, work.head = rest % a.n_heads;
  work.sequence = work.head / a.n_kv;
  work.n_rows = int(a.count[work.sequence]);
  work.begin = int(min(int64_t(work.split) * a.split_rows, int64_t(work.n_rows)));
  work.end = int(min(int64_t(work.begin) + a.split_rows, int64_t(work.n_rows)));
  return work;
}

// A warp's ring: its values of tiles of rows.
template <typename S>
struct Ring {
  const Arguments& a;
  const Work& work;
  int lane, warp, n_warps;
  uint32_t memory;  // of all warps' rings
  // The tile that is asked for next, and of it where the lane's row lies.
  int next, in_block;
  int64_t offset;

  __device__ __forceinline__ uint32_t keys(int stage) const {
    return memory + (stage * (a.is_both ? 1 : 2) * n_warps + warp) * S::kSliceBytes;
  }
  __device__ __forceinline__ uint32_t values(int stage) const {
    return keys(stage) + (a.is_both ? 0 : n_warps * S::kSliceBytes);
  }

  __device__ __forceinline__ void look_up() {
    const unsigned row = min(next + lane, work.end - 1), rows = a.block_rows;
    const unsigned block = row / rows;
    in_block = int(row - block * rows);
    offset = a.offset[int64_t(work.head) * a.n_blocks + block];
  }

  __device__ __forceinline__ void begin() {
    next = work.begin;
    if (next < work.end) look_up();
  }

  // A warp's values of a tile's rows, of which a lane knows where its own begins: 16 bytes a lane,
  // neighbours of a row. Zeros stand for what is not there.
  __device__ __forceinline__ void copy_tile(uint32_t slot, int64_t begin, int width) const {
    constexpr int kRowCopies = S::kSlice / 8, kTurns = 8 * kRowCopies / kWarp;  // of 8 rows
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
      const int first = (turn * kWarp + lane) / kRowCopies;
      const int piece = (turn * kWarp + lane) % kRowCopies;
      const int column = warp * S::kSlice + piece * 8;
      const int n_rows = column < width ? work.end - next : 0;
      const uint8_t* const from = a.buffer + column * 2;
      const uint32_t to = slot + S::place_of(first, piece);
#pragma unroll
      for (int row = 0; row < kRows; row += 8) {
        const int64_t at = __shfl_sync(kAll, static_cast<long long>(begin), row + first);
        copy_ahead(to + row * S::kPitch, from + at, row + first < n_rows ? 16 : 0);
      }
    }
  }

  __device__ __forceinline__ void produce(int stage) {
    if (next < work.end) {
      const int64_t row = in_block;
      copy_tile(keys(stage), offset + row * (2 * a.d), a.d);
      if (!a.is_both) copy_tile(values(stage), offset + a.v_begin + row * (2 * a.dv), a.dv);
      next += kRows;
      if (next < work.end) look_up();
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
};

// Notes what is to be known of each query.
template <typename S>
__device__ __forceinline__ void note_places(const Arguments& a, const Work& work,
                                            const Shared<S>& shared, int warp, int n_warps,
                                            int lane) {
#pragma unroll 1
  for (int q = warp; q < S::kQueries; q += n_warps) {
    const int number = work.q_begin + q;
    Place place{0, -1, 1.0f, -INFINITY, 1.0f, 1.0f, 0.0f, 0};
    if (number < a.n_queries) {
      const int64_t at = int64_t(work.head) * a.n_queries + number;
      if constexpr (!S::kBf16) {
        float peak = 0.0f;
#pragma unroll 4
        for (int k = lane; k < a.d; k += kWarp) peak = fmaxf(peak, fabsf(a.query[at * a.d + k]));
        // numbers that are not negative are ordered as their bits are
        const int exponent =
            min(max(__reduce_max_sync(kAll, __float_as_int(peak)) >> 23, kQueryBits + 1), 253);
        place.down = __int_as_float((254 - exponent + kQueryBits) << 23);
        place.factor = __int_as_float((exponent - kQueryBits) << 23);
      }
      const int64_t at_position = int64_t(work.sequence) * a.q_len + number % a.q_len;
      const int64_t last = a.has_last ? a.last_position[at_position] : int64_t(work.n_rows);
      place.last = int(min(max(last, int64_t(-1)), int64_t(work.end - 1)));
      if (a.window || a.has_slopes) place.position = int(a.position[at_position]);
      if (a.window) place.first = place.position - a.window + 1;
      if (a.has_slopes) place.slope = a.slope[at];
    }
    if (lane == 0) shared.places()[q] = place;
  }
}

// The queries' values that a warp has, as right operands.
template <typename S>
struct Queries {
  static constexpr int kPieces = S::kPieces, kSteps = S::kSteps;
  uint2 held[S::kHeld][kSteps][kPieces];
  uint2* shared;  // [steps, pieces, lanes]

  __device__ __forceinline__ void load(const Arguments& a, const Work& work,
                                       const Shared<S>& memory, int warp, int lane) {
    shared = memory.parts(warp) + lane;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int q = piece * 8 + lane / 4, number = work.q_begin + q;
      const float down = memory.places()[q].down;
      const float* const values = a.query + (int64_t(work.head) * a.n_queries + number) * a.d;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int k = warp * S::kSlice + step * 16 + 2 * (lane % 4);
        float2 low = make_float2(0.0f, 0.0f), high = low;
        if (number < a.n_queries && k < a.d) low = *reinterpret_cast<const float2*>(values + k);
        if (number < a.n_queries && k + 8 < a.d)
          high = *reinterpret_cast<const float2*>(values + k + 8);
        low.x *= down, low.y *= down, high.x *= down, high.y *= down;
#pragma unroll
        for (int part = 0; part < S::kParts; ++part) {
          const uint2 both =
              make_uint2(part_of<S::kBf16>(low.x, part) | part_of<S::kBf16>(low.y, part) << 16,
                         part_of<S::kBf16>(high.x, part) | part_of<S::kBf16>(high.y, part) << 16);
          if (part < S::kHeld)
            held[part < S::kHeld ? part : 0][step][piece] = both;
          else
            shared[(step * kPieces + piece) * kWarp] = both;
        }
      }
    }
  }

  // A warp's share of the scores of a tile.
  __device__ __forceinline__ void score(uint32_t keys, float* score, int lane) const {
    float product[kTiles][kPieces][4];
#pragma unroll
    for (int i = 0; i < kTiles * kPieces * 4; ++i)
      product[i / (kPieces * 4)][i / 4 % kPieces][i % 4] = 0.0f;
    const uint32_t place = keys + S::place_of(lane % 16, lane / 16);
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        uint32_t left[4];
        load_matrices(left, S::further(place, step) + tile * 16 * S::kPitch);
#pragma unroll
        for (int part = S::kParts - 1; part >= 0; --part)
#pragma unroll
          for (int piece = 0; piece < kPieces; ++piece)
            multiply<S::kBf16>(product[tile][piece], left,
                               part < S::kHeld ? held[part < S::kHeld ? part : 0][step][piece]
                                               : shared[(step * kPieces + piece) * kWarp]);
      }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int q = piece * 8 + lane % 4 * 2 + i % 2;
          score[q * kScorePitch + tile * 16 + lane / 4 + i / 2 * 8] = product[tile][piece][i];
        }
  }
};

// The same share by plain multiply-adds in fp32, of a row a lane: a query's parts have signs of
// their own, or are 0, so that an infinite value of K makes their sum NaN where the query's product
// is infinite.
template <typename S>
struct CarefulQueries {
  const Shared<S>& shared;
  const float* values;  // of the block's first query, that the warp has
  int d, n_queries, n_values;

  __device__ __forceinline__ CarefulQueries(const Arguments& a, const Work& work,
                                            const Shared<S>& memory, int warp)
      : shared(memory),
        values(a.query + (int64_t(work.head) * a.n_queries + work.q_begin) * a.d +
               warp * S::kSlice),
        d(a.d),
        n_queries(min(S::kQueries, a.n_queries - work.q_begin)),
        n_values(min(S::kSlice, a.d - warp * S::kSlice)) {}

  __device__ __forceinline__ void score(uint32_t keys, float* score, int lane) const {
    constexpr int kTogether = 2;  // more would spill
#pragma unroll 1
    for (int first = 0; first < S::kQueries; first += kTogether) {
      float sum[kTogether] = {0.0f, 0.0f};
#pragma unroll 1
      for (int k = 0; k < n_values; k += 8) {
        uint32_t pairs[4];
        float row[8];
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
                     : "r"(keys + S::place_of(lane, k / 8))
                     : "memory");
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const uint32_t bits = i % 2 ? pairs[i / 2] >> 16 : pairs[i / 2] & 0xFFFFu;
          row[i] = S::kBf16 ? __uint_as_float(bits << 16) : fp32_of(bits);
        }
#pragma unroll
        for (int q = 0; q < kTogether; ++q) {
          // of queries that are not there, which see nothing, the last one once more
          const float4* const query = reinterpret_cast<const float4*>(
              values + int64_t(min(first + q, n_queries - 1)) * d + k);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float4 four = query[half];
            sum[q] = fmaf(four.x, row[4 * half], sum[q]);
            sum[q] = fmaf(four.y, row[4 * half + 1], sum[q]);
            sum[q] = fmaf(four.z, row[4 * half + 2], sum[q]);
            sum[q] = fmaf(four.w, row[4 * half + 3], sum[q]);
          }
        }
      }
#pragma unroll
      for (int q = 0; q < kTogether; ++q)
        score[(first + q) * kScorePitch + lane] = sum[q] * shared.places()[first + q].down;
    }
  }
};

// Weights of a tile's rows of which a lane has one, two queries at a time, from the scores' shares.
template <bool kCareful, typename S>
__device__ __forceinline__ void weigh(const Arguments& a, const Shared<S>& shared, int row,
                                      bool is_visible, int warp, int n_warps, int lane) {
#pragma unroll 1
  for (int first = 2 * warp; first < S::kQueries; first += 2 * n_warps) {
    float score[2] = {0.0f, 0.0f}, alpha[2], above[2];
    const Place* const places = shared.places() + first;
#pragma unroll(S::kBf16&& S::kSlice == 64 ? 2 : 4)
    for (int slice = 0; slice < n_warps; ++slice)
#pragma unroll
      for (int i = 0; i < 2; ++i) score[i] += shared.score(slice)[(first + i) * kScorePitch + lane];
#pragma unroll
    for (int i = 0; i < 2; ++i) score[i] *= places[i].factor;
    if (a.soft_cap > 0.0f) {
#pragma unroll
      for (int i = 0; i < 2; ++i) score[i] = a.soft_cap * tanh_of(score[i] * a.cap_inverse);
    }
    if (a.has_slopes) {
#pragma unroll
      for (int i = 0; i < 2; ++i) score[i] += places[i].slope * float(row - places[i].position);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int q = first + i;
      const bool is_seen = is_visible && row >= places[i].first && row <= places[i].last;
      const float seen = is_seen ? score[i] * kLog2E : -INFINITY, best = places[i].best;
      above[i] = fmaxf(best, largest_of(seen));
      // A query that has seen no row yet has no peak to subtract.
      const float peak = above[i] == -INFINITY ? 0.0f : above[i];
      alpha[i] = power_of_two(best - peak);
      const float weight = power_of_two(seen - (S::kBf16 ? peak : peak - kWeightBits));
      float* const total = shared.total() + q * kWarp + lane;
      *total = *total * alpha[i] + weight;
      if constexpr (kCareful) {
        // of a row that is not seen: below 0
        reinterpret_cast<float*>(shared.weights())[lane * S::kQueries + q] =
            is_seen ? weight : -1.0f;
      } else {
        uint16_t* const to =
            reinterpret_cast<uint16_t*>(shared.weights() + q * kWeightPitch) + lane;
#pragma unroll
        for (int part = 0; part < S::kParts; ++part)
          to[part * S::kQueries * kWeightPitch / 2] = uint16_t(part_of<S::kBf16>(weight, part));
      }
    }
    __syncwarp();  // all lanes have read what one of them writes now
    if (lane < 2) {
      shared.places()[first + lane].best = lane ? above[1] : above[0];
      shared.places()[first + lane].alpha = lane ? alpha[1] : alpha[0];
    }
  }
}

// A warp's sums of V: of its values 16 * tile + lane / 4 and eight further, for queries
// 8 * piece + 2 * (lane % 4) and the next.
template <typename S>
struct Sums {
  static constexpr int kPieces = S::kPieces, kSteps = S::kSteps;
  float sum[kSteps][kPieces][4];

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < kSteps * kPieces * 4; ++i)
      sum[i / (kPieces * 4)][i / 4 % kPieces][i % 4] = 0.0f;
  }

  // 16 rows' sums begin at 0 and are then added: tensor cores cut off what they add to a sum that
  // is large already, which would make long ones too small.
  __device__ __forceinline__ void add(const Shared<S>& shared, uint32_t values, int lane) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const Place* const place = shared.places() + piece * 8 + lane % 4 * 2;
      const float alpha[2] = {place[0].alpha, place[1].alpha};
#pragma unroll
      for (int tile = 0; tile < kSteps; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[tile][piece][i] *= alpha[i % 2];
    }
    const uint32_t weights = static_cast<uint32_t>(__cvta_generic_to_shared(shared.weights()));
    const uint32_t place = values + S::place_of(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll 1
    for (int step = 0; step < kTiles; ++step) {  // of 16 rows
      uint2 right[S::kParts][kPieces];
#pragma unroll
      for (int part = 0; part < S::kParts; ++part)
        load_weights(right[part], weights + part * S::kQueries * kWeightPitch, step, lane);
#pragma unroll
      for (int tile = 0; tile < kSteps; ++tile) {
        uint32_t left[4];
        load_turned(left, S::further(place, tile) + step * 16 * S::kPitch);
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          float more[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
          for (int part = S::kParts - 1; part >= 0; --part)
            multiply<S::kBf16>(more, left, right[part][piece]);
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[tile][piece][i] += more[i];
        }
      }
    }
  }

  // Of one part, 16 rows' weights; of 8 queries those of the next 16 rows come along, or the same
  // ones twice.
  __device__ __forceinline__ static void load_weights(uint2* right, uint32_t part, int step,
                                                      int lane) {
#pragma unroll
    for (int piece = 0; piece < kPieces; piece += 2) {
      uint32_t words[4];
      const int q = (piece + (kPieces > 1 ? lane / 16 : 0)) * 8 + lane % 8;
      load_matrices(words, part + q * kWeightPitch + (step * 2 + lane / 8 % 2) * 16);
      right[piece] = make_uint2(words[0], words[1]);
      if (kPieces > 1) right[piece + 1 < kPieces ? piece + 1 : 0] = make_uint2(words[2], words[3]);
    }
  }

  __device__ __forceinline__ bool is_finite() const {
    bool found = true;
#pragma unroll
    for (int i = 0; i < kSteps * kPieces * 4; ++i)
      found = found && fabsf(sum[i / (kPieces * 4)][i / 4 % kPieces][i % 4]) < INFINITY;
    return found;
  }

  __device__ __forceinline__ void store(const Arguments& a, const Work& work,
                                        const Shared<S>& shared, int warp, int lane) const {
    float* const o = a.o + work.result(a) * a.dv;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int q = piece * 8 + lane % 4 * 2 + i % 2;
        const float inverse = shared.total()[q * kWarp];
#pragma unroll
        for (int tile = 0; tile < kSteps; ++tile) {
          const int column = warp * S::kSlice + tile * 16 + i / 2 * 8 + lane / 4;
          if (work.q_begin + q < a.n_queries && column < a.dv)
            o[int64_t(q) * a.dv + column] = sum[tile][piece][i] * inverse;
        }
      }
  }
};

// The same sums by plain multiply-adds of those who see a row: of values lane, lane + 32, ...
template <typename S>
struct CarefulSums {
  static constexpr int kTurns = S::kSlice / kWarp;
  float sum[S::kQueries][kTurns];

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < S::kQueries * kTurns; ++i) sum[i / kTurns][i % kTurns] = 0.0f;
  }

  __device__ __forceinline__ void add(const Shared<S>& shared, uint32_t values, int lane) {
#pragma unroll
    for (int i = 0; i < S::kQueries * kTurns; ++i)
      sum[i / kTurns][i % kTurns] *= shared.places()[i / kTurns].alpha;
#pragma unroll 1
    for (int row = 0; row < kRows; ++row) {
      const float* const weights =
          reinterpret_cast<const float*>(shared.weights()) + row * S::kQueries;
      float value[kTurns];
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const int column = turn * kWarp + lane;
        uint16_t bits;
        asm volatile("ld.shared.u16 %0, [%1];"
                     : "=h"(bits)
                     : "r"(values + S::place_of(row, column / 8) + column % 8 * 2)
                     : "memory");
        value[turn] = S::kBf16 ? __uint_as_float(uint32_t(bits) << 16) : fp32_of(bits);
      }
#pragma unroll
      for (int i = 0; i < S::kQueries * kTurns; ++i) {
        const float weight = weights[i / kTurns];
        float& of = sum[i / kTurns][i % kTurns];
        of = weight < 0.0f ? of : fmaf(weight, value[i % kTurns], of);
      }
    }
  }

  __device__ __forceinline__ void store(const Arguments& a, const Work& work,
                                        const Shared<S>& shared, int warp, int lane) const {
    float* const o = a.o + work.result(a) * a.dv;
#pragma unroll
    for (int i = 0; i < S::kQueries * kTurns; ++i) {
      const int q = i / kTurns, column = warp * S::kSlice + i % kTurns * kWarp + lane;
      const float inverse = shared.total()[q * kWarp];
      // scores of nothing but -inf: 0, whatever V holds
      if (column < a.dv && work.q_begin + q < a.n_queries)
        o[int64_t(q) * a.dv + column] = inverse == 0.0f ? 0.0f : sum[q][i % kTurns] * inverse;
    }
  }
};

// The sums over a block's rows. Ends with all weights' sums by lane in shared memory.
template <bool kCareful, typename S, typename Q, typename V>
__device__ __forceinline__ void attend(const Arguments& a, const Work& work,
                                       const Shared<S>& shared, Ring<S>& ring, const Q& queries,
                                       V& sums, int warp, int n_warps, int lane) {
  const uint8_t* const visible = a.visible + int64_t(work.sequence) * a.visible_stride;
  int stage = 0;
  sums.begin();
#pragma unroll 1
  for (int first = work.begin; first < work.end; first += kRows) {
    wait_for_copies(a.stages - 2);
    __syncwarp();  // all lanes' copies are there, and all have read the stage before
    ring.produce(stage == 0 ? a.stages - 1 : stage - 1);
    const int row = first + lane;
    const bool is_visible = a.visible_stride == 0 || visible[min(row, work.end - 1)] != 0;
    queries.score(ring.keys(stage), shared.score(warp), lane);
    __syncthreads();
    weigh<kCareful>(a, shared, row, is_visible, warp, n_warps, lane);
    __syncthreads();
    sums.add(shared, ring.values(stage), lane);
    stage = stage == a.stages - 1 ? 0 : stage + 1;
  }
}

// The inverse of each query's sum of weights, in its first lane's place; and its logarithm.
template <typename S>
__device__ __forceinline__ void add_up(const Arguments& a, const Work& work,
                                       const Shared<S>& shared, int warp, int n_warps, int lane) {
  float* const lse = a.lse + work.result(a);
#pragma unroll 1
  for (int q = warp; q < S::kQueries; q += n_warps) {
    float total = shared.total()[q * kWarp + lane];
#pragma unroll
    for (int by = kWarp / 2; by; by /= 2) total += __shfl_xor_sync(kAll, total, by);
    if (lane == 0) {
      // zeros where a query has seen no row
      shared.total()[q * kWarp] = total == 0.0f ? 0.0f : __fdividef(1.0f, total);
      const float best = shared.places()[q].best - (S::kBf16 ? 0.0f : kWeightBits);
      if (work.q_begin + q < a.n_queries)
        lse[q] = total == 0.0f ? -INFINITY : (best + log2_of(total)) * kLn2;
    }
  }
}

template <typename S>
__device__ __forceinline__ void attention(const Arguments& a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, n_warps = blockDim.x / kWarp;
  const Work work = work_of(a, S::kQueries);
  const Shared<S> shared{memory, a.stages * (a.is_both ? 1 : 2) * n_warps * S::kSliceBytes,
                         n_warps};
  Ring<S> ring{a,    work,    lane,
               warp, n_warps, static_cast<uint32_t>(__cvta_generic_to_shared(memory)),
               0,    0,       0};
  ring.begin();
#pragma unroll 1
  for (int stage = 0; stage < a.stages - 1; ++stage) ring.produce(stage);

  note_places(a, work, shared, warp, n_warps, lane);
  if (threadIdx.x == 0) *shared.work() = work;
  for (int q = warp; q < S::kQueries; q += n_warps) shared.total()[q * kWarp + lane] = 0.0f;
  __syncthreads();
  {
    Queries<S> queries;
    queries.load(a, work, shared, warp, lane);
    Sums<S> sums;
    attend<false>(a, work, shared, ring, queries, sums, warp, n_warps, lane);
    const unsigned broken = __ballot_sync(kAll, !sums.is_finite());
    if (lane == 0) shared.flags()[warp] = broken != 0;
    add_up(a, *shared.work(), shared, warp, n_warps, lane);
    __syncthreads();
    if (__ballot_sync(kAll, shared.flags()[min(lane, n_warps - 1)] != 0) == 0) {
      sums.store(a, *shared.work(), shared, warp, lane);
      return;
    }
  }
  // Rare: a value is not finite.
  for (int q = warp; q < S::kQueries; q += n_warps) {
    shared.total()[q * kWarp + lane] = 0.0f;
    if (lane == 0) shared.places()[q].best = -INFINITY;
  }
  ring.begin();
#pragma unroll 1
  for (int stage = 0; stage < a.stages - 1; ++stage) ring.produce(stage);
  const CarefulQueries<S> queries(a, work, shared, warp);
  CarefulSums<S> sums;
  attend<true>(a, work, shared, ring, queries, sums, warp, n_warps, lane);
  add_up(a, *shared.work(), shared, warp, n_warps, lane);
  __syncthreads();
  sums.store(a, *shared.work(), shared, warp, lane);
}

}  // namespace

// Kernels by format, queries of a block, and values of a warp: a block has a warp for each so many
// values of the longer rows, WARPS at most, and a multiprocessor BLOCKS blocks at least.
#define ATTENTION(NAME, BF16, PIECES, SLICE, WARPS, BLOCKS)                                   \
  extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) espnx_attention_##NAME(    \
      const float* query, const uint8_t* buffer, const int64_t* offset, const int64_t* count, \
      const uint8_t* visible, const int64_t* last_position, const int64_t* position,          \
      const float* slope, float* o, float* lse, int64_t n_blocks, int64_t visible_stride,     \
      int64_t v_begin, uint32_t n_heads, uint32_t n_kv, uint32_t n_queries, uint32_t q_len,   \
      uint32_t block_rows, uint32_t split_rows, uint32_t d, uint32_t dv, uint32_t stages,     \
      uint32_t window, uint32_t flags, float soft_cap, float cap_inverse) {                   \
    attention<Shape<BF16, PIECES, SLICE>>({query,                                             \
                                           buffer,                                            \
                                           offset,                                            \
                                           count,                                             \
                                           visible,                                           \
                                           last_position,                                     \
                                           position,                                          \
                                           slope,                                             \
                                           o,                                                 \
                                           lse,                                               \
                                           n_blocks,                                          \
                                           visible_stride,                                    \
                                           v_begin,                                           \
                                           int(n_heads),                                      \
                                           int(n_kv),                                         \
                                           int(n_queries),                                    \
                                           int(q_len),                                        \
                                           int(block_rows),                                   \
                                           int(split_rows),                                   \
                                           int(d),                                            \
                                           int(dv),                                           \
                                           int(stages),                                       \
                                           int(window),                                       \
                                           (flags & 1) != 0,                                  \
                                           (flags & 2) != 0,                                  \
                                           (flags & 4) != 0,                                  \
                                           soft_cap,                                          \
                                           cap_inverse});                                     \
  }

ATTENTION(fp16_8_64, false, 1, 64, 16, 1)
ATTENTION(fp16_16_64, false, 2, 64, 16, 1)
ATTENTION(fp16_8_96, false, 1, 96, 6, 2)
ATTENTION(fp16_16_96, false, 2, 96, 6, 2)
ATTENTION(fp16_8_128, false, 1, 128, 8, 1)
ATTENTION(fp16_16_128, false, 2, 128, 8, 1)
ATTENTION(bf16_8_64, true, 1, 64, 16, 1)
ATTENTION(bf16_16_64, true, 2, 64, 16, 1)
ATTENTION(bf16_8_96, true, 1, 96, 6, 2)
ATTENTION(bf16_16_96, true, 2, 96, 6, 2)
ATTENTION(bf16_8_128, true, 1, 128, 8, 1)
ATTENTION(bf16_16_128, true, 2, 128, 8, 1)
