// The driver of MaxSim: packs the queries once, then walks the documents. Per document: decode a
// chunk of tokens to fp32, score it against every query, fold the maxima. What is held is one chunk
// and the running maxima, whatever the sizes.
#include "maxsim.hpp"

#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

#include "bf16.hpp"
#include "cpu/aligned.hpp"
#include "cpu/cpu_level.hpp"
#include "cpu/parallel.hpp"
#include "integer.hpp"
#include "kernels.hpp"

namespace espnx {
namespace {

// Decoded at a time: 8 KiB of an L1 cache that also holds the query strips.
constexpr int64_t kChunkValues = 2048;
// Up to this many query tokens, dot products beat a strip that is mostly padding.
constexpr int64_t kMaxSingles = 2;
// 0.2 ms at 32 products a cycle and 2.6 GHz: ten times the cost of starting a thread.
constexpr int64_t kProductsPerThread = 16 << 20;
constexpr int64_t kDocsPerGrain = 16;
// Documents ahead whose first bytes are asked for early. Short records need it; long ones are
// prefetched by the kernels.
constexpr int64_t kPrefetchAhead = 4;
constexpr int64_t kPrefetchBytes = 256;

struct LevelKernels {
  const MaxsimKernels& tiles;
  const DecodeTable& decode;
};

LevelKernels kernels_in_force() {
#if defined(__x86_64__)
  switch (cpu_level()) {
    case CpuLevel::kAmx:
    case CpuLevel::kVnni:
    case CpuLevel::kAvx512: return {kMaxsimAvx512, kDecodeAvx512};
    case CpuLevel::kAvx2: return {kMaxsimAvx2, kDecodeAvx2};
    case CpuLevel::kPortable: break;
  }
#endif
  return {kMaxsimPortable, kDecodePortable};
}

// The first document in which something was found, whichever thread finds it.
class FirstDocument {
 public:
  void found(int64_t i) {
    int64_t first = first_.load(std::memory_order_relaxed);
    while (i < first && !first_.compare_exchange_weak(first, i, std::memory_order_relaxed)) {
    }
  }
  int64_t get() const {
    const int64_t first = first_.load(std::memory_order_relaxed);
    return first == kNone ? -1 : first;
  }

 private:
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> first_{kNone};
};

// The queries as the kernels want them. With few query tokens the rows are used as they are.
class PackedQueries {
 public:
  explicit PackedQueries(const MaxsimQueries& q)
      : source(q),
        singles(q.n_tokens <= kMaxSingles),
        strips(singles ? 0 : (q.n_tokens + kLanes - 1) / kLanes),
        packed_(static_cast<size_t>(q.n_queries * strips * kLanes * q.d)) {
    if (singles) return;
    packed_.fill(0.0f);
    for (int64_t i = 0; i < q.n_queries; ++i) {
      for (int64_t t = 0; t < q.n_tokens; ++t) {
        const float* row = q.values + (i * q.n_tokens + t) * q.d;
        float* lane = packed_.data() + (i * strips + t / kLanes) * q.d * kLanes + t % kLanes;
        for (int64_t k = 0; k < q.d; ++k) lane[k * kLanes] = row[k];
      }
    }
  }

  const float* strip(int64_t query, int64_t s) const {
    return packed_.data() + (query * strips + s) * source.d * kLanes;
  }
  const float* row(int64_t query, int64_t t) const {
    return source.values + (query * source.n_tokens + t) * source.d;
  }
  int64_t slots() const {
    return singles ? source.n_tokens : strips * kLanes;
  }  // running maxima per query

  const MaxsimQueries source;
  const bool singles;
  const int64_t strips;

 private:
  AlignedFloats packed_;  // [n_queries, strips, d, 16]
};

// One thread's view of the work, with its buffers.
class Scorer {
 public:
  Scorer(const LevelKernels& kernels, const PackedQueries& queries, const CodeQueries& code_queries,
         const PartQueries& part_queries, const RowDecoder& decoder, const MaxsimDocuments& docs,
         float* scores, FirstDocument& unknown_centroid)
      : kernels_(kernels.tiles),
        decode_(kernels.decode.of[static_cast<int>(docs.format)]),
        decoder_(decoder),
        queries_(queries),
        code_queries_(code_queries),
        part_queries_(part_queries),
        docs_(docs),
        scores_(scores),
        unknown_centroid_(unknown_centroid),
        d_(queries.source.d),
        row_bytes_(decoder_.row_bytes),
        chunk_tokens_(chunk_tokens(d_)),
        tokens_(static_cast<size_t>(chunk_tokens_ * d_)),
        running_(static_cast<size_t>(queries.source.n_queries * queries.slots())),
        is_nan_(static_cast<size_t>(queries.source.n_queries)),
        codes_(code_queries),
        parts_(part_queries) {}

  void score_range(int64_t begin, int64_t end) {
    if (code_queries_.usable) code_queries_.kernels->enter();
    if (part_queries_.usable) part_queries_.kernels->enter();
    for (int64_t i = begin; i < end; ++i) score(i);
    if (code_queries_.usable) code_queries_.kernels->leave();
    if (part_queries_.usable) part_queries_.kernels->leave();
  }

 private:
  void score(int64_t i) {
    prefetch_start(i + kPrefetchAhead);
    std::fill(is_nan_.begin(), is_nan_.end(), uint8_t{0});
    const bool is_done =
        (code_queries_.usable && fold_codes(i)) || (part_queries_.usable && fold_parts(i));
    if (!is_done) fold_values(i);
    for (int64_t q = 0; q < queries_.source.n_queries; ++q)
      scores_[q * docs_.n + i] = total(q, docs_.n_tokens[i]);
  }

  // In whole numbers; false where this document cannot be.
  bool fold_codes(int64_t i) {
    running_.fill(-std::numeric_limits<float>::infinity());
    for (int64_t begin = 0; begin < docs_.n_tokens[i]; begin += kCodeChunk) {
      const int64_t n = std::min(kCodeChunk, docs_.n_tokens[i] - begin);
      const uint8_t* rows = docs_.buffer + docs_.offset_bytes[i] + begin * row_bytes_;
      if (!codes_.fold(rows, n, next_bytes(i, rows, n), running_.data())) return false;
    }
    for (int64_t q = 0; q < queries_.source.n_queries; ++q) {
      for (int64_t t = 0; t < queries_.source.n_tokens; ++t) {
        running_.data()[q * queries_.slots() + t] *= code_queries_.step(q, t);
      }
    }
    return true;
  }

  // In bf16 parts; false where this document cannot be.
  bool fold_parts(int64_t i) {
    running_.fill(-std::numeric_limits<float>::infinity());
    for (int64_t begin = 0; begin < docs_.n_tokens[i]; begin += kPartChunk) {
      const int64_t n = std::min(kPartChunk, docs_.n_tokens[i] - begin);
      const uint8_t* rows = docs_.buffer + docs_.offset_bytes[i] + begin * row_bytes_;
      if (!parts_.fold(rows, n, bytes_at(i, begin + kPartsAhead), running_.data())) return false;
    }
    return true;
  }

  void fold_values(int64_t i) {
    running_.fill(-std::numeric_limits<float>::infinity());
    for (int64_t begin = 0; begin < docs_.n_tokens[i]; begin += chunk_tokens_) {
      const int64_t n = std::min(chunk_tokens_, docs_.n_tokens[i] - begin);
      const uint8_t* rows = docs_.buffer + docs_.offset_bytes[i] + begin * row_bytes_;
      if (!decode_(decoder_, rows, n, tokens_.data())) {
        unknown_centroid_.found(i);
        std::fill(is_nan_.begin(), is_nan_.end(), uint8_t{1});
        return;
      }
      for (int64_t q = 0; q < queries_.source.n_queries; ++q)
        fold_chunk(q, n, next_bytes(i, rows, n));
    }
  }

  static int64_t chunk_tokens(int64_t d) {
    const int64_t tiles = kChunkValues / (d * kTokenTile);
    return kTokenTile * std::max<int64_t>(tiles, 1);
  }

  void prefetch_start(int64_t i) const {
    if (i >= docs_.n) return;
    const int64_t bytes = std::min(docs_.n_tokens[i] * row_bytes_, kPrefetchBytes);
    for (int64_t at = 0; at < bytes; at += 64)
      __builtin_prefetch(docs_.buffer + docs_.offset_bytes[i] + at);
  }

  // What will be read after the `n` rows at `rows` of document i: its next rows, or the next
  // document.
  const uint8_t* next_bytes(int64_t i, const uint8_t* rows, int64_t n) const {
    const uint8_t* next = rows + n * row_bytes_;
    const bool is_end =
        next == docs_.buffer + docs_.offset_bytes[i] + docs_.n_tokens[i] * row_bytes_;
    return is_end && i + 1 < docs_.n ? docs_.buffer + docs_.offset_bytes[i + 1] : next;
  }

  // Where token row `token` of document i lies, or of the documents after it as if they were one.
  const uint8_t* bytes_at(int64_t i, int64_t token) const {
    if (token >= docs_.n_tokens[i] && i + 1 < docs_.n) token -= docs_.n_tokens[i++];
    return docs_.buffer + docs_.offset_bytes[i] + token * row_bytes_;
  }

  void fold_chunk(int64_t q, int64_t n, const uint8_t* ahead) {
    float* running = running_.data() + q * queries_.slots();
    const int64_t n_query_tokens = queries_.source.n_tokens;
    if (queries_.singles) {
      for (int64_t t = 0; t < n_query_tokens; ++t) {
        is_nan_[q] |=
            kernels_.single_max(queries_.row(q, t), tokens_.data(), n, d_, running + t) != 0;
      }
      return;
    }
    for (int64_t s = 0; s < queries_.strips; s += kMaxStrips) {
      const int64_t n_strips = std::min(kMaxStrips, queries_.strips - s);
      const uint32_t nan =
          kernels_.block_max(queries_.strip(q, s), n_strips, tokens_.data(), n, d_,
                             running + s * kLanes, ahead, std::max<int64_t>(row_bytes_ / d_, 1));
      // Lanes that pad the last strip say nothing: their zeros times an infinity in the document
      // are NaN.
      const int64_t lanes = std::min(n_query_tokens - s * kLanes, n_strips * kLanes);
      is_nan_[q] |= (nan & (0xFFFFFFFFu >> (32 - lanes))) != 0;
    }
  }

  // The sum of the query's maxima, in 16 interleaved partial sums: the same at every level, and
  // short chains of roundings.
  float total(int64_t q, int64_t n_tokens) const {
    if (n_tokens == 0) return -std::numeric_limits<float>::infinity();
    if (is_nan_[q]) return std::numeric_limits<float>::quiet_NaN();
    const float* running = running_.data() + q * queries_.slots();
    float partial[kLanes] = {};
    for (int64_t t = 0; t < queries_.source.n_tokens; ++t) partial[t % kLanes] += running[t];
    for (int64_t width = kLanes / 2; width > 0; width /= 2) {
      for (int64_t lane = 0; lane < width; ++lane) partial[lane] += partial[lane + width];
    }
    return partial[0];
  }

  const MaxsimKernels& kernels_;
  const Decode decode_;
  const RowDecoder& decoder_;
  const PackedQueries& queries_;
  const CodeQueries& code_queries_;
  const PartQueries& part_queries_;
  const MaxsimDocuments& docs_;
  float* const scores_;
  FirstDocument& unknown_centroid_;
  const int64_t d_, row_bytes_, chunk_tokens_;
  AlignedFloats tokens_;         // [chunk_tokens, d] of the document at hand
  AlignedFloats running_;        // [n_queries, slots]
  std::vector<uint8_t> is_nan_;  // [n_queries]
  CodeScorer codes_;
  PartScorer parts_;
};

int threads_worth(const MaxsimQueries& queries, const MaxsimDocuments& docs, int max_threads) {
  if (max_threads <= 1) return 1;
  int64_t tokens = 0;
  for (int64_t i = 0; i < docs.n; ++i) tokens += docs.n_tokens[i];
  const double products =
      static_cast<double>(tokens) * queries.n_queries * queries.n_tokens * queries.d;
  return static_cast<int>(std::min<double>(max_threads, 1 + products / kProductsPerThread));
}

}  // namespace

int64_t find_record_outside(const MaxsimDocuments& docs, int64_t d) {
  const int64_t row_bytes = token_row_bytes(docs.format, d);
  for (int64_t i = 0; i < docs.n; ++i) {
    const int64_t offset = docs.offset_bytes[i], n_tokens = docs.n_tokens[i];
    // kMaxTokens * kMaxDim * 4 < 2^63: nothing overflows once the count has been checked.
    if (n_tokens < 0 || n_tokens > kMaxTokens || offset < 0 || offset > docs.buffer_bytes) return i;
    if (n_tokens * row_bytes > docs.buffer_bytes - offset) return i;
  }
  return -1;
}

int64_t maxsim(const MaxsimQueries& queries, const MaxsimDocuments& docs, int max_threads,
               float* scores) {
  const PackedQueries packed(queries);
  const CodeQueries codes(queries, docs.format);
  const PartQueries parts(queries, docs.format);
  const RowDecoder decoder(docs.format, queries.d, docs.codebook);
  const LevelKernels kernels = kernels_in_force();
  FirstDocument unknown_centroid;
  // All memory is taken here, where running out of it is an exception in the caller's thread.
  std::vector<Scorer> scorers;
  const int n_threads = threads_worth(queries, docs, max_threads);
  scorers.reserve(n_threads);
  for (int i = 0; i < n_threads; ++i)
    scorers.emplace_back(kernels, packed, codes, parts, decoder, docs, scores, unknown_centroid);
  parallel_for(docs.n, kDocsPerGrain, n_threads, [&](int thread, int64_t begin, int64_t end) {
    scorers[thread].score_range(begin, end);
  });
  return unknown_centroid.get();
}

}  // namespace espnx
