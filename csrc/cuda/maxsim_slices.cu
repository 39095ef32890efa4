// MaxSim of a query of up to 32 tokens with ragged documents of long rows, in place in a byte
// buffer. maxsim.cuh says what is computed.
//
// -inf for a document without rows, NaN where a product with one of its rows is NaN. Rows are of
// fp16, bf16 or int8 (an fp32 scale, then codes). Documents begin at multiples of 16 bytes; the
// query lies at one, too.
//
// A block of 2, 4 or 8 warps takes one document after another by a counter, in tiles of 32 rows.
// Each warp has 64, 96 or 128 values of every row, and holds these values of the query in the parts
// that tensor cores take, two of fp16 or three of bf16, which add up to it; the third part is in
// shared memory, where 32 rows read it once. int8 rows are multiplied in whole numbers by digits of
// the query (digits.cuh), whose steps are the same for all warps. Tiles are copied into a ring of
// stages, asynchronously and across the ends of documents, so that as many bytes are under way at a
// document's end as in its midst. Warps meet when each has its share of a tile's products: 8 pieces
// of 16 rows by 8 tokens, of which each then adds up one, two or four, and keeps the largest. A
// maximum keeps NaNs.
//
// Infinities that meet zeros in a part turn into NaN there, digits hold none, so that a token that
// has one makes scores NaN, and a product may be too large until a factor makes it less: where a
// document's score is not finite it is made once more, by plain multiply-adds.
#include "digits.cuh"
#include "maxsim.cuh"

namespace {

constexpr int kTileRows = 32, kTiles = kTileRows / 16;
constexpr int kFragments = kTiles * kPieces, kFragmentBytes = kWarp * 16;
constexpr int kWarpsMax = kFragments;  // of a block, each of which has one at least
constexpr int kNotes = 8;              // of tiles: those in the ring and the next
constexpr int kLastTile = 1 << 8;      // of its document; beside the number of rows

// What warps are told of a tile: where it begins, its document (-1: the end), and its rows.
struct alignas(16) Note {
  const uint8_t* from;
  int doc, rows;
};

// A warp has kSliceOf values of all rows of kFormatOf.
template <Format kFormatOf, int kSliceOf>
struct Slice : SliceLayout<kSliceOf> {
  static constexpr Format kFormat = kFormatOf;
  static constexpr bool kFlat = kFormat == kInt8;  // bytes as they come, copied by all warps
  static constexpr int kSlice = kSliceOf, kSteps = kSlice / (kFlat ? 32 : 16);
  static constexpr int kParts = kFlat ? kDigits : kFormat == kBf16 ? 3 : 2;
  static constexpr int kPartsHeld = kFlat ? kDigits : kHeld;
  static constexpr bool kThird = kParts > kPartsHeld;
  static constexpr int kSliceBytes = kTileRows * SliceLayout<kSlice>::kPitch;
  static constexpr int kThirdBytes = kSteps * kPieces * kWarp * 8;  // of a warp's third part
  static_assert(kFormat == kFp16 || kFormat == kBf16 || (kFormat == kInt8 && kSlice > 64));

  __device__ __forceinline__ static int row_bytes(int d) { return kFlat ? 4 + d : 2 * d; }
  __device__ __forceinline__ static int stage_bytes(int d, int n_warps) {
    return kFlat ? kTileRows * (4 + d) : n_warps * kSliceBytes;
  }
};

// Where things lie in shared memory.
template <typename S>
struct Memory {
  uint8_t* memory;
  int ring_bytes, n_buffers, n_warps;

  // Warps' shares of a tile's products, by piece and warp.
  __device__ __forceinline__ uint8_t* shares(int buffer) const {
    return memory + ring_bytes + buffer * n_warps * (kFragments * kFragmentBytes);
  }
  __device__ __forceinline__ uint4* third(int warp) const {  // [steps, pieces / 2, lanes]
    return reinterpret_cast<uint4*>(shares(n_buffers) + warp * S::kThirdBytes);
  }
  __device__ __forceinline__ Note* notes() const {
    return reinterpret_cast<Note*>(third(S::kThird ? n_warps : 0));
  }
  // The largest products with a document's rows, by turn, half of the rows (of 8 warps) and token.
  __device__ __forceinline__ float* largest(int turn) const {
    return reinterpret_cast<float*>(notes() + kNotes) +
           (turn & 1) * ((n_warps == kWarpsMax ? 2 : 1) * kTokens);
  }
  // While the query is prepared: those of each token.
  __device__ __forceinline__ Factors* factors() const {
    return reinterpret_cast<Factors*>(shares(0));
  }
};

// The tiles of a block's documents, which one warp notes.
template <typename S>
struct Tiles : Documents {
  int d;

  __device__ __forceinline__ void next(Note* note) {
    if (doc < a.n_docs) {
      const int rows = left < kTileRows ? int(left) : kTileRows;
      if (lane == 0) *note = Note{from, int(doc), rows | (left <= kTileRows ? kLastTile : 0)};
      left -= kTileRows, from += kTileRows * S::row_bytes(d);
      if (left <= 0) turn();
    } else if (lane == 0) {
      *note = Note{nullptr, -1, 0};
    }
  }
};

// Waits until at most so many of a lane's groups of copies are under way.
__device__ __forceinline__ void wait_for_copies(int n_left) {
  if (n_left == 1)
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  else if (n_left == 2)
    asm volatile("cp.async.wait_group 2;" ::: "memory");
  else
    asm volatile("cp.async.wait_group 3;" ::: "memory");
}

// Rows as they come, of which all warps copy some: `n_bytes`, and zeros up to `all`.
template <typename S>
__device__ __forceinline__ void copy_flat(const uint8_t* from, uint32_t to, int n_bytes, int all,
                                          int warp, int n_warps, int lane) {
  const int first = (warp * kWarp + lane) * 16, further = n_warps * kWarp * 16;
  if (n_bytes == all) {
    const uint8_t* next = from + uint32_t(first);
#pragma unroll
    for (int i = 0; i < S::kSlice / 16; ++i, next += uint32_t(further))
      if (first + i * further < all) copy_ahead(to + first + i * further, next);
  }
  // The rest of a whole tile, or one that is not whole.
#pragma unroll 1
  for (int at = first + (n_bytes == all ? S::kSlice / 16 * further : 0); at < all; at += further) {
    const int here = min(max(n_bytes - at, 0), 16);
    copy_ahead(to + at, here ? from + at : from, here);
  }
}

// A warp's values of rows, of which so many are there.
template <typename S>
__device__ __forceinline__ void copy_slice(const uint8_t* from, uint32_t to, int n_rows,
                                           int row_bytes, int n_values, int lane) {
  constexpr int kRowCopies = S::kSlice / 8, kTurns = 8 * kRowCopies / kWarp;  // of 8 rows
  if (n_rows == kTileRows && n_values == S::kSlice) {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int first = (turn * kWarp + lane) / kRowCopies;
      const int piece = (turn * kWarp + lane) % kRowCopies;
      const uint8_t* const begin = from + (first * row_bytes + piece * 16);
#pragma unroll
      for (int row = 0; row < kTileRows; row += 8)
        copy_ahead(to + S::place_of(first, piece) + row * S::kPitch, begin + row * row_bytes);
    }
    return;
  }
#pragma unroll 1
  for (int i = lane; i < kTileRows * kRowCopies; i += kWarp) {
    const int row = i / kRowCopies, piece = i % kRowCopies;
    const bool is_there = row < n_rows && piece * 8 < n_values;
    copy_ahead(to + S::place_of(row, piece),
               is_there ? from + (row * row_bytes + piece * 16) : from, is_there ? 16 : 0);
  }
}

// Asks for a warp's part of a tile; zeros stand for what is not there. Whole tiles are copied
// without asking of each 16 bytes whether they are there.
template <typename S>
__device__ __forceinline__ void produce(const Note& note, uint32_t stage, int d, int warp,
                                        int n_warps, int lane) {
  const uint8_t* const begin = note.from;
  const int doc = note.doc, n_rows = note.rows & (kLastTile - 1), row_bytes = S::row_bytes(d);
  if (doc >= 0) {
    if constexpr (S::kFlat)
      copy_flat<S>(begin, stage, n_rows * row_bytes, kTileRows * row_bytes, warp, n_warps, lane);
    else
      copy_slice<S>(begin + warp * S::kSlice * 2, stage + warp * S::kSliceBytes, n_rows, row_bytes,
                    min(d - warp * S::kSlice, S::kSlice), lane);
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// The first of the two words of a row's codes, one after the other, that a lane multiplies in a
// step: those of eight rows are in different banks, but for a third of two warps' with 96 values.
template <typename S>
__device__ __forceinline__ int code_word(int step, int warp, int n_warps, int lane) {
  const int t = lane % 4;
  if (S::kSlice == 128) return warp * 32 + 8 * t + 2 * step;
  if (n_warps == 2) return step < 2 ? 8 * t + 4 * warp + 2 * step : 32 + 4 * t + 2 * warp;
  return warp / 4 * 96 + 32 * step + 8 * t + 2 * (warp % 4);
}

// A warp's values of the query, as right operands: parts, or digits.
template <typename S>
struct Held {
  static constexpr int kSteps = S::kSteps;
  uint2 held[S::kPartsHeld][kSteps][kPieces];
  uint4* third;

  __device__ __forceinline__ void load(const float* query, int n_query, int d,
                                       const Factors* factors, uint4* to, int warp, int n_warps,
                                       int lane) {
    third = to + lane;
    if constexpr (S::kFlat)
      load_digits(query, n_query, d, factors, warp, n_warps, lane);
    else
      load_parts(query, n_query, d, factors, warp, lane);
  }

  __device__ __forceinline__ void load_digits(const float* query, int n_query, int d,
                                              const Factors* factors, int warp, int n_warps,
                                              int lane) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int token = piece * 8 + lane / 4;
      const Factors of_token = factors[token];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        float v[8] = {};
        const int k = 4 * code_word<S>(step, warp, n_warps, lane);
        if (token < n_query && k < d) {
          const float4* const at = reinterpret_cast<const float4*>(query + token * d + k);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float4 q = at[i];
            v[4 * i] = q.x, v[4 * i + 1] = q.y, v[4 * i + 2] = q.z, v[4 * i + 3] = q.w;
          }
        }
        const Operands made = operands_of(v, of_token.first, of_token.second);
#pragma unroll
        for (int digit = 0; digit < kDigits; ++digit) held[digit][step][piece] = made.digit[digit];
      }
    }
  }

  __device__ __forceinline__ void load_parts(const float* query, int n_query, int d,
                                             const Factors* factors, int warp, int lane) {
#pragma unroll
    for (int piece = 0; piece < kPieces; piece += 2) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint2 last[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int token = (piece + i) * 8 + lane / 4;
          float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
          if (token < n_query) values(query + token * d, d, warp * kSteps + step, lane, v);
#pragma unroll
          for (int j = 0; j < 4; ++j)
            v[j] = S::kFormat == kBf16 ? v[j] : v[j] * factors[token].first * factors[token].second;
#pragma unroll
          for (int part = 0; part < S::kParts; ++part) {
            const uint2 both = make_uint2(part_of<S::kFormat>(v[0], v[1], part),
                                          part_of<S::kFormat>(v[2], v[3], part));
            if (part < kHeld)
              held[part < kHeld ? part : 0][step][piece + i] = both;
            else
              last[i] = both;
          }
        }
        if (S::kThird)
          third[(step * kPieces + piece) / 2 * kWarp] =
              make_uint4(last[0].x, last[0].y, last[1].x, last[1].y);
      }
    }
  }

  // The four values of a token that a lane has in a step's two registers.
  __device__ __forceinline__ static void values(const float* query, int d, int step, int lane,
                                                float* v) {
    const int k = step * 16 + 2 * (lane % 4);
    float2 low = make_float2(0.0f, 0.0f), high = low;
    if (k < d) low = *reinterpret_cast<const float2*>(query + k);
    if (k + 8 < d) high = *reinterpret_cast<const float2*>(query + k + 8);
    v[0] = low.x, v[1] = low.y, v[2] = high.x, v[3] = high.y;
  }
};

// Of every token of the query what brings its values to steps, or to below 2 (its parts are of 2^13
// times as much), and what products are to be multiplied by then. Warps share the tokens.
template <typename S>
__device__ __forceinline__ void find_factors(const float* query, int n_query, int d,
                                             Factors* factors, int warp, int n_warps, int lane) {
#pragma unroll 1
  for (int token = warp; token < kTokens; token += n_warps) {
    uint32_t peak = 0;  // as bits: what is not finite is above all that is
    if (token < n_query) {
#pragma unroll 4
      for (int k = lane; k < d; k += kWarp)
        peak = max(peak, __float_as_uint(query[token * d + k]) & 0x7FFFFFFFu);
    }
#pragma unroll
    for (int by = kWarp / 2; by; by /= 2) peak = max(peak, __shfl_xor_sync(kAll, peak, by));
    const uint32_t exponent = min(max(peak >> 23, 1u), 253u);
    if (lane == 0)
      factors[token] = S::kFlat ? factors_of(peak)
                                : Factors{__uint_as_float((254u - exponent) << 23), kLift,
                                          __uint_as_float(exponent << 23) * (1.0f / kLift)};
  }
}

// The left operands of a tile that a warp has.
template <typename S>
struct Rows {
  int lane, row_bytes;
  uint32_t first;  // the place of a lane's first 16 bytes, or of its first row
  int place[S::kFlat ? S::kSteps : 1];

  __device__ __forceinline__ void begin(int d, int warp, int n_warps, int of_lane) {
    lane = of_lane, row_bytes = S::row_bytes(d);
    if constexpr (S::kFlat) {
      first = lane / 4 * row_bytes;
      // Beyond a row's end its last words, which zeros of the query meet. What lanes tell each
      // other is kept, or compilers would make it anew for every tile.
#pragma unroll
      for (int step = 0; step < S::kSteps; ++step) {
        const int word = min(code_word<S>(step, warp, n_warps, lane), d / 4 - 2);
        place[step] = __shfl_sync(kAll, int(first) + 4 + 4 * word, lane);
      }
    } else {
      first = warp * S::kSliceBytes + S::place_of(lane % 16, lane / 16);
    }
  }

  __device__ __forceinline__ void values(uint32_t* left, uint32_t stage, int tile, int step) const {
    if constexpr (S::kFlat) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t at = stage + (tile * 16 + half * 8) * row_bytes + place[step];
        left[half] = load_word(at), left[2 + half] = load_word(at + 4);
      }
    } else {
      load_matrices(left, S::further(stage + first, step) + tile * 16 * S::kPitch);
    }
  }

  // What products with a row are to be multiplied by.
  __device__ __forceinline__ float scale(uint32_t stage, int row) const {
    if (!S::kFlat) return 1.0f;
    const float stored = __uint_as_float(load_word(stage + row * row_bytes));
    return stored * 0.0f + stored;  // one that is not finite counts as NaN
  }
};

// The same by digits: sums of a warp's values are exact until each becomes a number.
template <typename S>
__device__ __forceinline__ void multiply_codes(const Held<S>& query, const Rows<S>& rows,
                                               uint32_t stage, uint8_t* to, int n_warps) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    int sum[kDigits][kPieces][4];
#pragma unroll
    for (int i = 0; i < kDigits * kPieces * 4; ++i)
      sum[i / (kPieces * 4)][i / 4 % kPieces][i % 4] = kFirst[i / (kPieces * 4)];
#pragma unroll
    for (int step = 0; step < S::kSteps; ++step) {
      uint32_t left[4];
      rows.values(left, stage, tile, step);
#pragma unroll
      for (int digit = 0; digit < kDigits; ++digit)
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece)
          multiply(sum[digit][piece], left, query.held[digit][step][piece]);
    }
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      float product[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        product[i] = number_of(sum[0][piece][i], sum[1][piece][i], sum[2][piece][i]);
      *reinterpret_cast<float4*>(to + (piece * kTiles + tile) * n_warps * kFragmentBytes) =
          make_float4(product[0], product[1], product[2], product[3]);
    }
  }
}

// A warp's share of the products of a tile, stored as pieces; `to`: of the first one.
template <typename S>
__device__ __forceinline__ void multiply_rows(const Held<S>& query, const Rows<S>& rows,
                                              uint32_t stage, uint8_t* to, int n_warps) {
  // What is added to a large sum is rounded as it is: small products are summed apart.
  float product[kTiles][kPieces][4] = {}, rest[kTiles][kPieces][4] = {};
#pragma unroll
  for (int step = 0; step < S::kSteps; ++step) {
    uint4 third[kPieces / 2];
    if (S::kThird) {
#pragma unroll
      for (int i = 0; i < kPieces / 2; ++i)
        third[i] = query.third[(step * kPieces / 2 + i) * kWarp];
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      uint32_t left[4];
      rows.values(left, stage, tile, step);
      if (S::kThird) {
#pragma unroll
        for (int i = 0; i < kPieces / 2; ++i) {
          multiply<true>(rest[tile][2 * i], left, make_uint2(third[i].x, third[i].y));
          multiply<true>(rest[tile][2 * i + 1], left, make_uint2(third[i].z, third[i].w));
        }
      }
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece)
        multiply<S::kFormat == kBf16>(rest[tile][piece], left, query.held[1][step][piece]);
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece)
        multiply<S::kFormat == kBf16>(product[tile][piece], left, query.held[0][step][piece]);
    }
  }
#pragma unroll
  for (int i = 0; i < kFragments; ++i) {
    const float* const large = product[i % kTiles][i / kTiles];
    const float* const small = rest[i % kTiles][i / kTiles];
    *reinterpret_cast<float4*>(to + i * n_warps * kFragmentBytes) = make_float4(
        large[0] + small[0], large[1] + small[1], large[2] + small[2], large[3] + small[3]);
  }
}

__device__ __forceinline__ float4 sum_of(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// The largest products with a document's rows so far that a lane has, of the tokens whose pieces
// its warp adds up: of 2 warps each has those of two pieces, of 4 of one, of 8 of one half of its
// rows.
struct Largest {
  int warp, n_warps, lane;
  float of[2][2];

  __device__ __forceinline__ void begin() { of[0][0] = of[0][1] = of[1][0] = of[1][1] = -INFINITY; }

  // The row of a tile that a lane has in a piece's first or second half.
  __device__ __forceinline__ int row(int tile, int half) const {
    return (n_warps == kWarpsMax ? warp & 1 : tile) * 16 + half * 8 + lane / 4;
  }

  // `from`: the warp's pieces, of each the shares of all warps.
  __device__ __forceinline__ void take(const uint8_t* from, const float (*scale)[2], int n_rows) {
    float4 v[kFragments];
#pragma unroll
    for (int i = 0; i < kFragments; ++i)
      v[i] = *reinterpret_cast<const float4*>(from + i * kFragmentBytes);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = sum_of(v[2 * i], v[2 * i + 1]);
    if (n_warps == 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) keep(v[i], scale[i % 2], i % 2, of[i / 2], n_rows);
      return;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) v[i] = sum_of(v[2 * i], v[2 * i + 1]);
    if (n_warps == kWarpsMax) {
      keep(sum_of(v[0], v[1]), scale[0], 0, of[0], n_rows);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) keep(v[i], scale[i], i, of[0], n_rows);
    }
  }

  // Products with rows that are not there can never be the largest.
  __device__ __forceinline__ void keep(float4 v, const float* scale, int tile, float* most,
                                       int n_rows) const {
    const bool is_first = row(tile, 0) < n_rows, is_second = row(tile, 1) < n_rows;
    most[0] = max_nan(most[0], is_first ? v.x * scale[0] : -INFINITY);
    most[1] = max_nan(most[1], is_first ? v.y * scale[0] : -INFINITY);
    most[0] = max_nan(most[0], is_second ? v.z * scale[1] : -INFINITY);
    most[1] = max_nan(most[1], is_second ? v.w * scale[1] : -INFINITY);
  }

  // At a document's end: for the warp that adds up tokens.
  __device__ __forceinline__ void store(float* to) {
    const int piece = n_warps == 2 ? 2 * warp : n_warps == kWarpsMax ? warp / 2 : warp;
    const int half = n_warps == kWarpsMax ? warp % 2 : 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i == 1 && n_warps != 2) break;
#pragma unroll
      for (int by = 4; by < kWarp; by *= 2)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          of[i][j] = max_nan(of[i][j], __shfl_xor_sync(kAll, of[i][j], by));
      if (lane < 4)
        *reinterpret_cast<float2*>(to + half * kTokens + (piece + i) * 8 + 2 * lane) =
            make_float2(of[i][0], of[i][1]);
    }
    begin();
  }
};

// One document's score by plain multiply-adds: a query token a lane, a row after another, 8 values
// at a time.
template <typename S>
__device__ __forceinline__ float score_with_care(const Arguments& a, const float* query, int d,
                                                 int64_t doc, int lane) {
  float largest = -INFINITY;
  const bool is_query = lane < a.n_query;
  const float* const values = query + (is_query ? lane : 0) * d;
#pragma unroll 1
  for (int64_t row = 0; row < a.count[doc]; ++row) {
    const uint8_t* const at = a.buffer + a.offset[doc] + row * S::row_bytes(d);
    float sum = 0.0f, scale = 1.0f;
    if constexpr (S::kFormat == kInt8) {
      scale = *reinterpret_cast<const float*>(at);
      scale = scale * 0.0f + scale;  // one that is not finite counts as NaN
    }
#pragma unroll 1
    for (int k = 0; k < d; k += 8) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float x;
        if constexpr (S::kFormat == kFp16)
          x = fp32_of(reinterpret_cast<const uint16_t*>(at)[k + i]);
        if constexpr (S::kFormat == kBf16)
          x = __uint_as_float(uint32_t(reinterpret_cast<const uint16_t*>(at)[k + i]) << 16);
        if constexpr (S::kFormat == kInt8)
          x = float(reinterpret_cast<const int8_t*>(at)[4 + k + i]) * scale;
        sum = fmaf(values[k + i], x, sum);
      }
    }
    largest = max_nan(largest, sum);
  }
  if (!is_query) largest = 0.0f;
#pragma unroll
  for (int by = kWarp / 2; by; by /= 2) largest += __shfl_xor_sync(kAll, largest, by);
  return largest;
}

// A document's score from the largest products of each token: a token a lane.
template <typename S>
__device__ __forceinline__ void finish(const Arguments& a, const float* query, int d,
                                       const float* largest, float factor, float* score, int doc,
                                       int n_warps, int lane) {
  float sum = largest[lane];
  if (n_warps == kWarpsMax) sum = max_nan(sum, largest[kTokens + lane]);
  sum = lane < a.n_query ? sum * factor : 0.0f;
#pragma unroll
  for (int by = kWarp / 2; by; by /= 2) sum += __shfl_xor_sync(kAll, sum, by);
  if (!(fabsf(sum) < INFINITY)) sum = score_with_care<S>(a, query, d, doc, lane);
  if (lane == 0) score[doc] = sum;
}

template <Format kFormat, int kSlice>
__device__ __forceinline__ void maxsim(const Arguments& a, int d, int n_stages, int n_buffers) {
  using S = Slice<kFormat, kSlice>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, n_warps = blockDim.x / kWarp;
  const int which = blockIdx.x % a.n_queries;
  const float* const query = a.query + int64_t(which) * a.n_query * d;
  float* const score = a.score + which * a.n_docs;
  const int stage_bytes = S::stage_bytes(d, n_warps);
  const Memory<S> places{memory, n_stages * stage_bytes, n_buffers, n_warps};
  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  Note* const notes = places.notes();

  Tiles<S> tiles{{a, lane, a.claimed + which, score, gridDim.x / a.n_queries}, d};
  if (warp == 0) {
    tiles.begin(blockIdx.x / a.n_queries);
#pragma unroll 1
    for (int i = 0; i < n_stages; ++i) tiles.next(notes + i);
  }
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < n_stages; ++i)
    produce<S>(notes[i], ring + i * stage_bytes, d, warp, n_warps, lane);

  float factor = 1.0f;
  if (kFormat != kBf16) {
    find_factors<S>(query, a.n_query, d, places.factors(), warp, n_warps, lane);
    __syncthreads();
    factor = places.factors()[lane].product;
  }
  Held<S> held;
  held.load(query, a.n_query, d, places.factors(), places.third(warp), warp, n_warps, lane);
  // Shares come where the factors are; of int8 there is a barrier before them anyway.
  if (kFormat == kFp16) __syncthreads();

  Rows<S> rows;
  rows.begin(d, warp, n_warps, lane);
  Largest largest{warp, n_warps, lane};
  largest.begin();
  int ended = -1, stage = 0, turn = 0;
#pragma unroll 1
  for (;; ++turn) {
    wait_for_copies(n_stages - 1);
    const Note note = notes[turn % kNotes];
    // All lanes' copies are there, or all warps', who have read the shares of the tile before.
    if (S::kFlat || n_buffers == 1)
      __syncthreads();
    else
      __syncwarp();
    if (note.doc < 0) break;
    const uint32_t from = ring + stage * stage_bytes;
    uint8_t* const shares = places.shares(n_buffers == 1 ? 0 : turn & 1);
    uint8_t* const own = shares + warp * kFragmentBytes + lane * 16;
    if constexpr (S::kFlat)
      multiply_codes<S>(held, rows, from, own, n_warps);
    else
      multiply_rows<S>(held, rows, from, own, n_warps);
    float scale[kTiles][2];
#pragma unroll
    for (int i = 0; i < kTiles * 2; ++i)
      scale[i / 2][i % 2] = rows.scale(from, largest.row(i / 2, i % 2));
    if (warp == 0) tiles.next(notes + (turn + n_stages) % kNotes);
    __syncthreads();
    // Nobody reads this stage any more.
    produce<S>(notes[(turn + n_stages) % kNotes], from, d, warp, n_warps, lane);
    largest.take(shares + warp * (kFragments * kFragmentBytes) + lane * 16, scale,
                 note.rows & (kLastTile - 1));
    if (warp == 0 && ended >= 0)
      finish<S>(a, query, d, places.largest(turn - 1), factor, score, ended, n_warps, lane);
    ended = -1;
    if (note.rows & kLastTile) largest.store(places.largest(turn)), ended = note.doc;
    stage = stage == n_stages - 1 ? 0 : stage + 1;
  }
  if (!S::kFlat) __syncthreads();  // of int8 that was the loop's last one
  if (warp == 0 && ended >= 0)
    finish<S>(a, query, d, places.largest(turn - 1), factor, score, ended, n_warps, lane);
}

}  // namespace

// Kernels by format, and values of a row that a warp has. A block has 2, 4 or 8 warps, and
// shared memory for its ring and for shares of products, of one tile or two.
#define MAXSIM(NAME, FORMAT, SLICE)                                                           \
  extern "C" __global__ void __launch_bounds__(256, 1) espnx_maxsim_##NAME##_slices_##SLICE(  \
      const float* query, const uint8_t* buffer, const int64_t* offset, const int64_t* count, \
      float* score, uint32_t* claimed, int64_t n_docs, uint32_t n_queries, uint32_t n_query,  \
      uint32_t d, uint32_t stages, uint32_t buffers) {                                        \
    maxsim<FORMAT, SLICE>(                                                                    \
        {query, buffer, offset, count, score, claimed, n_docs, int(n_queries), int(n_query)}, \
        int(d), int(stages), int(buffers));                                                   \
  }

MAXSIM(fp16, kFp16, 64)
MAXSIM(fp16, kFp16, 96)
MAXSIM(fp16, kFp16, 128)
MAXSIM(bf16, kBf16, 64)
MAXSIM(bf16, kBf16, 96)
MAXSIM(bf16, kBf16, 128)
MAXSIM(int8, kInt8, 96)
MAXSIM(int8, kInt8, 128)
