// MaxSim of a query of up to 32 tokens with ragged documents of residual rows in place in a byte
// buffer: the number of a centroid, then a code of 1, 2 or 4 bits for each value, which is
// (centroid[number][k] + weight[code]) / the row's length (ColBERTv2, section 3.3).
//
// -inf for a document without rows, NaN where a product with one of its rows is NaN, or where a row
// names a centroid that does not exist. Documents begin at multiples of 16 bytes; the query and the
// centroids lie at such, too. maxsim.cuh says how warps share the work.
//
// While a tile is multiplied, the centroids that the next one names are copied to shared memory,
// and the rows of the one after that. A row's values, scaled by a power of two, are made in
// registers in two parts of fp16, as the query's are; three products of parts add up to theirs but
// for 2^-22 of each. The row's length is summed in fp32 beside that, and products are divided by it
// before the maximum. Each half of the values has sums of its own, which rounds less than one does.
//
// A part of fp16 has a least step and a largest value. What is lost by the former is bounded; where
// it might be more than 2^-21 of a document's score, or the score is NaN, which values beyond the
// latter make it, too, it is made once more, by plain multiply-adds. Unless values differ by orders
// of magnitude from the first centroid's, or a score nearly is zero, that does not happen.
#include "maxsim.cuh"

namespace {

constexpr float kTinyNorm = 1e-12f;  // least length, as torch.nn.functional.normalize has it
// The weights of a half byte's codes, at each of 16 places of 128 bytes, in which every lane that
// loads at the same time has banks of its own.
constexpr int kPlaceBytes = 128, kTableBytes = 16 * kPlaceBytes;

struct Codebook {
  const float* centroid;  // [n_centroids, d]
  const float* weight;    // [2^bits]
  uint32_t n_centroids;
};

// Rows of kWidth values with codes of kBits, 16 of them in a tile. A lane has a quarter of the
// values of two rows: of row lane / 4 and of the one eight further, values from
// (lane % 4) * kWidth / 4 on, four in each step.
template <int kBitsOfCode, int kWidthOfRow>
struct Shape {
  static constexpr int kBits = kBitsOfCode, kWidth = kWidthOfRow;
  static constexpr int kParts = 2, kShared = 0;
  static constexpr int kRows = 16, kSteps = kWidth / 16;
  static constexpr bool kFlat = true;
  static constexpr int kRowBytes = 4 + kWidth * kBits / 8;
  static constexpr int kStageBytes = kRows * kRowBytes;
  static constexpr int kLaneBytes = kWidth / 4 * kBits / 8;
  static constexpr int kCopies = kWidth / 4;  // of 16 bytes of a centroid
  static constexpr int kCentroidBytes = kRows * kWidth * 4;

  // In shared memory the pieces of 16 bytes of a lane's share are permuted, so that lanes of two
  // neighbouring rows have different banks: a step's number is turned by this.
  static __device__ __forceinline__ int turn(int row, int quarter) {
    if (kSteps == 8) return quarter | (row & 1) << 2;
    return kSteps == 4 ? quarter >> 1 | (row & 1) << 1 : row & 1;
  }
};

// So many of a place's weights.
template <int kCount>
__device__ __forceinline__ void load_weights(float* w, uint32_t address) {
  if constexpr (kCount == 4)
    asm("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
        : "=f"(w[0]), "=f"(w[1]), "=f"(w[2]), "=f"(w[3])
        : "r"(address));
  else if constexpr (kCount == 2)
    asm("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(w[0]), "=f"(w[1]) : "r"(address));
  else
    asm("ld.shared.f32 %0, [%1];" : "=f"(w[0]) : "r"(address));
}

// A power of two that brings what is as large as the first centroid's and the weights' largest to
// 2^11, so that 16 times as much can still be held in fp16.
template <typename S>
__device__ __forceinline__ float lift_of(const Codebook& book, int lane) {
  float peak = lane < 1 << S::kBits ? fabsf(book.weight[lane]) : 0.0f;
  if (book.n_centroids) {
#pragma unroll
    for (int k = 0; k < S::kWidth; k += kWarp) peak = fmaxf(peak, fabsf(book.centroid[k + lane]));
  }
#pragma unroll
  for (int by = kWarp / 2; by; by /= 2) peak = fmaxf(peak, __shfl_xor_sync(kAll, peak, by));
  const uint32_t exponent = min(max(__float_as_uint(peak) >> 23, 11u), 254u);
  return __uint_as_float((265u - exponent) << 23);
}

// Code i of so many bits: the first code lies in the highest ones, its lowest bit before the
// others.
template <int kBits>
__device__ __forceinline__ int code_of(uint32_t bits, int n_bits, int i) {
  int code = 0;
#pragma unroll
  for (int b = 0; b < kBits; ++b) code |= (bits >> (n_bits - 1 - i * kBits - b) & 1) << b;
  return code;
}

template <typename S>
__device__ __forceinline__ void fill_table(float* table, const Codebook& book, float lift) {
  for (int at = threadIdx.x; at < kTableBytes / 4; at += blockDim.x) {
    const int bits = at / (kPlaceBytes / 4), i = at % (4 / S::kBits);
    table[at] = book.weight[code_of<S::kBits>(bits, 4, i)] * lift;
  }
}

// Copies the centroids that a stage's rows name. One that does not exist is the first instead, and
// where there is no row, zeros are.
template <typename S>
__device__ __forceinline__ void copy_centroids(const Codebook& book, uint32_t to, uint32_t stage,
                                               int n_rows, int lane) {
  constexpr int kAtOnce = kWarp / S::kCopies;
  uint32_t own = load_word(stage + lane % S::kRows * S::kRowBytes);
  own = own < book.n_centroids ? own : 0;
  n_rows = book.n_centroids ? n_rows : 0;
  const int beside = lane / S::kCopies, piece = lane % S::kCopies;
  const int quarter = piece / S::kSteps, step = piece % S::kSteps;
  const float* const from = book.centroid + piece * 4;
#pragma unroll
  for (int first = 0; first < S::kRows; first += kAtOnce) {
    const int row = first + beside;
    const uint32_t number = __shfl_sync(kAll, own, row);
    uint64_t at;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(at) : "r"(number), "n"(4 * S::kWidth), "l"(from));
    const int place = row * S::kCopies + quarter * S::kSteps + (step ^ S::turn(row, quarter));
    if (beside < kAtOnce)
      copy_ahead(to + place * 16, reinterpret_cast<const void*>(at), row < n_rows ? 16 : 0);
  }
}

// A tile's rows as a lane has them.
template <typename S>
struct Rows {
  static constexpr int kWords = (S::kLaneBytes + 3) / 4;
  uint32_t stage;
  uint32_t share[2];  // of centroids: its places of even and of odd steps begin there
  uint32_t table;     // at a multiple of its size, and in the lane's own banks
  float lift;
  int lane;
  uint32_t codes[2][kWords];
  float squares[2];  // their sums

  __device__ __forceinline__ uint32_t row(int half) const {
    return stage + (half * 8 + lane / 4) * S::kRowBytes;
  }

  __device__ __forceinline__ void begin(uint32_t centroids) {
    const int turn = S::turn(lane / 4, lane % 4);
    const uint32_t own = centroids + (lane / 4 * S::kCopies + lane % 4 * S::kSteps) * 16;
    share[0] = own + turn * 16, share[1] = own + (turn ^ 1) * 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      squares[half] = 0.0f;
      const uint32_t at = row(half) + 4 + lane % 4 * S::kLaneBytes;
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        if constexpr (S::kLaneBytes % 4 == 0) {
          codes[half][i] = load_word(at + 4 * i);
        } else {  // parts of words
          constexpr int kPart = S::kLaneBytes % 2 ? 1 : 2;
          codes[half][i] = 0;
#pragma unroll
          for (int j = 0; j < 4 && 4 * i + j < S::kLaneBytes; j += kPart)
            codes[half][i] |= load_part<kPart>(at + 4 * i + j) << 8 * j;
        }
      }
    }
  }

  template <int kPart>
  static __device__ __forceinline__ uint32_t load_part(uint32_t address) {
    uint32_t part;
    if constexpr (kPart == 1)
      asm volatile("ld.shared.u8 %0, [%1];" : "=r"(part) : "r"(address) : "memory");
    else
      asm volatile("ld.shared.u16 %0, [%1];" : "=r"(part) : "r"(address) : "memory");
    return part;
  }

  // A step's left operands: the nearest in fp16, and what that misses.
  __device__ __forceinline__ void values(uint32_t* high, uint32_t* low, int step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float w[4];
#pragma unroll
      for (int j = 0; j < S::kBits; ++j) {
        const int number = step * S::kBits + j;  // of a half byte; a byte's upper one comes first
        const int bit = number / 2 % 4 * 8 + (number % 2 ? 0 : 4);
        const uint32_t word = codes[half][number / 8];
        const uint32_t moved = bit >= 7 ? word >> (bit - 7) : word << (7 - bit);
        load_weights<4 / S::kBits>(w + 4 / S::kBits * j, table | (moved & 15 * kPlaceBytes));
      }
      // By 6 steps alone turning is by 0 or 1; the others' shares begin at multiples of theirs.
      const uint32_t at = S::kSteps == 6 ? share[step % 2] + step / 2 * 32 : share[0] ^ step * 16;
      const float4 c = load_four(at + half * 8 * S::kCopies * 16);
      // The sum is rounded as without the power of two.
      const float v[4] = {fmaf(c.x, lift, w[0]), fmaf(c.y, lift, w[1]), fmaf(c.z, lift, w[2]),
                          fmaf(c.w, lift, w[3])};
#pragma unroll
      for (int i = 0; i < 4; ++i) squares[half] = fmaf(v[i], v[i], squares[half]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t both = fp16_of(v[2 * i], v[2 * i + 1]);
        high[2 * i + half] = both;
        low[2 * i + half] = fp16_of(v[2 * i] - fp32_of(both), v[2 * i + 1] - fp32_of(both >> 16));
      }
    }
  }

  // What a row's products are to be multiplied by. `largest` of those of rows that are there.
  __device__ __forceinline__ float inverse_length(int half, int n_rows, const Codebook& book,
                                                  float most, float& largest) const {
    float sum = squares[half];
    sum += __shfl_xor_sync(kAll, sum, 1);
    sum += __shfl_xor_sync(kAll, sum, 2);
    float inverse;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(inverse) : "f"(sum));
    inverse = fminf(inverse, most);
    const bool is_there = half * 8 + lane / 4 < n_rows;
    const bool is_known = load_word(row(half)) < book.n_centroids;
    largest = fmaxf(largest, is_there ? inverse : 0.0f);
    return is_known ? inverse : __uint_as_float(0x7FC00000u);
  }
};

// How far from zero a score has to be, so that steps of fp16 are off by less than 2^-21 of it. A
// step is 2^-24, of which half at most is lost of each value of a row, times the query's value and
// the inverse of the row's length; and of each value of a query token 2^-38 of its power of two,
// times a value of the row: the sum of those is at most the root of d, as their length is 1.
struct Doubt {
  float of_inverse, rest;

  template <typename S, typename Q>
  __device__ __forceinline__ void prepare(const Q& query, const float* values, int n_query,
                                          int lane) {
    float sum = 0.0f;
#pragma unroll 4
    for (int i = lane; i < n_query * S::kWidth; i += kWarp) sum += fabsf(values[i]);
    of_inverse = sum_of_lanes(sum) * 0.0625f;  // 2^-25 over 2^-21
    static_assert(S::kWidth <= 144);           // the root is 12
    rest = sum_of_lanes(query.factor * kLift) * (12.0f / 131072.0f);
  }

  __device__ __forceinline__ bool allows(float score, float inverse) const {
    return fabsf(score) >= fmaf(of_inverse, inverse, rest);  // NaN is not
  }
};

// One document's score by plain multiply-adds: a query token a lane, a row after another.
template <typename S>
__device__ __forceinline__ float score_with_care(const Arguments& a, const Codebook& book,
                                                 const float* query, int64_t doc, int lane) {
  float largest = -INFINITY;
  const bool is_query = lane < a.n_query;
  const float* const values = query + (is_query ? lane : 0) * S::kWidth;
#pragma unroll 1
  for (int64_t row = 0; row < a.count[doc]; ++row) {
    const uint8_t* const at = a.buffer + a.offset[doc] + row * S::kRowBytes;
    const uint32_t number = *reinterpret_cast<const uint32_t*>(at);
    const auto value = [&](int k) {
      const uint32_t bits = at[4 + k * S::kBits / 8];
      return book.centroid[uint64_t(number) * S::kWidth + k] +
             book.weight[code_of<S::kBits>(bits, 8, k % (8 / S::kBits))];
    };
    float sum = NAN;
    if (number < book.n_centroids) {  // or not, of all lanes
      float squares = 0.0f;
#pragma unroll 1
      for (int k = lane; k < S::kWidth; k += kWarp) squares = fmaf(value(k), value(k), squares);
      const float inverse = 1.0f / fmaxf(sqrtf(sum_of_lanes(squares)), kTinyNorm);
      sum = 0.0f;
#pragma unroll 1
      for (int k = 0; k < S::kWidth; ++k) sum = fmaf(values[k], value(k) * inverse, sum);
    }
    largest = max_nan(largest, sum);
  }
  return sum_of_lanes(is_query ? largest : 0.0f);
}

// Products of a tile.
template <typename S, typename Q>
__device__ __forceinline__ void multiply_rows(Best& best, Rows<S>& rows, uint32_t centroids,
                                              const Q& query, int n_rows, const Codebook& book,
                                              float most, float& largest) {
  float product[2][kPieces][4] = {};
  rows.begin(centroids);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t high[S::kSteps / 2][4];
    // What is added to a large sum is rounded as it is: small products first.
#pragma unroll
    for (int i = 0; i < S::kSteps / 2; ++i) {
      const int step = half * (S::kSteps / 2) + i;
      uint32_t low[4];
      rows.values(high[i], low, step);
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        multiply<false>(product[half][piece], low, query.part(0, step, piece));
        multiply<false>(product[half][piece], high[i], query.part(1, step, piece));
      }
    }
#pragma unroll
    for (int i = 0; i < S::kSteps / 2; ++i)
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece)
        multiply<false>(product[half][piece], high[i],
                        query.part(0, half * (S::kSteps / 2) + i, piece));
  }
#pragma unroll
  for (int i = 0; i < kPieces * 4; ++i) product[0][i / 4][i % 4] += product[1][i / 4][i % 4];
  if (n_rows < S::kRows) best.mask(product[0], rows.lane / 4, rows.lane / 4 + 8, n_rows);
  const float scale[2] = {rows.inverse_length(0, n_rows, book, most, largest),
                          rows.inverse_length(1, n_rows, book, most, largest)};
  best.take(product[0], scale);
}

template <int kBits, int kWidth, int kStages>
__device__ __forceinline__ void maxsim(const Arguments& a, const Codebook& book) {
  using S = Shape<kBits, kWidth>;
  extern __shared__ __align__(1024) uint8_t given[];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, n_warps = blockDim.x / kWarp;
  const int which = blockIdx.x % a.n_queries;
  const float* const values = a.query + int64_t(which) * a.n_query * kWidth;
  float* const score = a.score + which * a.n_docs;
  // The table, at a multiple of its size; all warps' centroids of two tiles; their rings; what is
  // in their stages.
  const uint32_t begin = static_cast<uint32_t>(__cvta_generic_to_shared(given));
  const uint32_t table = (begin + kTableBytes - 1) / kTableBytes * kTableBytes;
  uint8_t* const memory = given + (table - begin);
  const int n_centroid_bytes = n_warps * 2 * S::kCentroidBytes;
  const uint32_t centroids = table + kTableBytes + warp * 2 * S::kCentroidBytes;
  const uint32_t ring = table + kTableBytes + n_centroid_bytes + warp * kStages * S::kStageBytes;
  int4* const meta = reinterpret_cast<int4*>(memory + kTableBytes + n_centroid_bytes +
                                             n_warps * kStages * S::kStageBytes) +
                     warp * kStages;
  const int64_t n_blocks = gridDim.x / a.n_queries;  // of this query; few documents meet in none
  Stream<S> stream{{a, lane, a.claimed + which, score, n_blocks * n_warps}, ring, meta};
  stream.begin(warp * n_blocks + blockIdx.x / a.n_queries);
#pragma unroll 1
  for (int stage = 0; stage < kStages - 2; ++stage) stream.produce(stage);

  const float lift = lift_of<S>(book, lane);
  fill_table<S>(reinterpret_cast<float*>(memory), book, lift);
  Query<S, kResidual, kWidth> query;
  query.lane = lane, query.shared = nullptr;
  query.prepare(values, a.n_query, warp, n_warps);
  Doubt doubt;
  doubt.prepare<S>(query, values, a.n_query, lane);
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();  // the table, and the first rows
  if (meta[0].x >= 0) copy_centroids<S>(book, centroids, ring, meta[0].y, lane);
  asm volatile("cp.async.commit_group;" ::: "memory");
  stream.produce(kStages - 2);

  const float most = 1.0f / (kTinyNorm * lift);
  Rows<S> rows;
  rows.table = table + lane * 4 * (4 / kBits) % kPlaceBytes, rows.lift = lift, rows.lane = lane;
  Best best{lane};
  best.begin();
  float largest = 0.0f;
  uint32_t slot = 0;  // of the tile's centroids
#pragma unroll 1
  for (int stage = 0;;) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 3) : "memory");
    __syncwarp();  // all lanes' copies are there, and all have read the tile before
    const int4 what = meta[stage];
    if (what.x < 0) break;
    const int next = stage == kStages - 1 ? 0 : stage + 1;
    rows.stage = ring + stage * S::kStageBytes;
    const uint32_t present = centroids + slot;
    slot ^= S::kCentroidBytes;
    const int2 then = *reinterpret_cast<const int2*>(meta + next);
    if (then.x >= 0)
      copy_centroids<S>(book, centroids + slot, ring + next * S::kStageBytes, then.y, lane);
    asm volatile("cp.async.commit_group;" ::: "memory");
    stream.produce(stage == 0 ? kStages - 1 : stage - 1);
    multiply_rows(best, rows, present, query, what.y, book, most, largest);
    if (what.z) {
      float sum = best.score(query, a.n_query);
#pragma unroll
      for (int by = 4; by < kWarp; by *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, by));
      if (!doubt.allows(sum, largest)) sum = score_with_care<S>(a, book, values, what.x, lane);
      if (lane == 0) score[what.x] = sum;
      best.begin();
      largest = 0.0f;
    }
    stage = next;
  }
}

}  // namespace

// Kernels by bits of a code and values of a row. A block has up to 8 warps, and shared memory for
// the table, for each warp's centroids of two tiles and ring of STAGES tiles, and for what is in
// each.
#define MAXSIM(BITS, WIDTH, STAGES)                                                           \
  extern "C" __global__ void __launch_bounds__(256, 1) espnx_maxsim_residual##BITS##_##WIDTH( \
      const float* query, const uint8_t* buffer, const int64_t* offset, const int64_t* count, \
      float* score, uint32_t* claimed, int64_t n_docs, uint32_t n_queries, uint32_t n_query,  \
      const float* centroid, const float* weight, uint32_t n_centroids) {                     \
    maxsim<BITS, WIDTH, STAGES>(                                                              \
        {query, buffer, offset, count, score, claimed, n_docs, int(n_queries), int(n_query)}, \
        {centroid, weight, n_centroids});                                                     \
  }

MAXSIM(1, 64, 4)
MAXSIM(1, 96, 4)
MAXSIM(1, 128, 4)
MAXSIM(2, 64, 4)
MAXSIM(2, 96, 4)
MAXSIM(2, 128, 4)
MAXSIM(4, 64, 4)
MAXSIM(4, 96, 4)
MAXSIM(4, 128, 3)
