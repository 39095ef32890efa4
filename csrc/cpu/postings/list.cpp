// See list.hpp.
#include "list.hpp"

#include <algorithm>
#include <cstring>

#include "cpu/cpu_level.hpp"
#include "cpu/crc32c.hpp"
#include "kernels.hpp"

namespace espnx::postings {
namespace {

constexpr int64_t kHeaderBytes = sizeof(PieceHeader);
constexpr int64_t kMaxOutliers = UINT16_MAX;

int bits_of(uint32_t value) { return value == 0 ? 0 : 32 - __builtin_clz(value); }

int64_t packed_bytes(int bits, int64_t n) { return (bits * n + 7) / 8; }

void pack(const uint32_t* numbers, int bits, int64_t n, std::vector<uint8_t>& out) {
  const size_t begin = out.size();
  out.resize(begin + packed_bytes(bits, n) + kSpareBytes);
  for (int64_t i = 0, at = 0; i < n; ++i, at += bits) {
    uint64_t word;
    uint8_t* p = out.data() + begin + at / 8;
    std::memcpy(&word, p, sizeof(word));
    word |= static_cast<uint64_t>(numbers[i]) << (at % 8);
    std::memcpy(p, &word, sizeof(word));
  }
  out.resize(begin + packed_bytes(bits, n));
}

// The width at which values and outliers take the least room.
int best_width(const uint32_t* values, int64_t n, bool may_have_outliers) {
  int64_t count[33] = {};
  for (int64_t i = 0; i < n; ++i) ++count[bits_of(values[i])];
  int width = 32;
  while (width > 0 && count[width] == 0) --width;
  if (!may_have_outliers) return width;
  int best = width;
  int64_t outliers = 0, best_bits = width * n;
  for (int w = width - 1; w >= 0; --w) {
    outliers += count[w + 1];
    const int64_t bits = w * n + outliers * 64;
    if (bits < best_bits) best = w, best_bits = bits;
  }
  return best;
}

PieceHeader header_of(const uint8_t* piece) {
  PieceHeader header;
  std::memcpy(&header, piece, sizeof(header));
  return header;
}

int64_t block_count(int64_t postings) { return (postings + kBlockPostings - 1) / kBlockPostings; }

// Sizes of what a piece holds, or -1 where it cannot be one.
int64_t content_bytes(const uint8_t* piece, const PieceHeader& header, int64_t size,
                      ValueKind kind) {
  const int64_t blocks = block_count(header.postings);
  int64_t at = kHeaderBytes + header.term_bytes + 2 * blocks;
  if (header.postings == 0 || at > size) return -1;
  const uint8_t* widths = piece + kHeaderBytes + header.term_bytes;
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t n = std::min<int64_t>(kBlockPostings, header.postings - i * kBlockPostings);
    if (widths[2 * i] > 32 || widths[2 * i + 1] > 32) return -1;
    if (kind == ValueKind::kImpact && widths[2 * i + 1] > 8) return -1;
    at += packed_bytes(widths[2 * i], n) + packed_bytes(widths[2 * i + 1], n);
  }
  at += header.outliers * static_cast<int64_t>(sizeof(Outlier));
  return at + kSpareBytes <= size ? at : -1;
}

const char* piece_fault(const uint8_t* piece, int64_t size, const StoredList& list,
                        const ListRules& rules) {
  const PieceHeader header = header_of(piece);
  if (header.salt != rules.salt) return "it is of another segment, or was never written";
  if (header.crc32c != crc32c(0, piece + 4, size - 4)) return "its checksum does not fit";
  if (header.term != list.term) return "it is another term's";
  if (header.last >= rules.n_records || header.base > header.last)
    return "its numbers are not of the segment";
  if (content_bytes(piece, header, size, rules.kind) < 0) return "its sizes do not fit";
  return nullptr;
}

bool is_named(const uint8_t* piece, const PieceHeader& header, const StoredList& list) {
  if (list.name.data == nullptr) return true;
  return ((header.flags & kTermDigest) != 0) == list.is_digest &&
         header.term_bytes == list.name.size &&
         (list.name.size == 0 ||
          std::memcmp(piece + kHeaderBytes, list.name.data, list.name.size) == 0);
}

}  // namespace

const Kernels& kernels() {
#if defined(__x86_64__)
  if (cpu_level() != CpuLevel::kPortable) return kKernelsAvx2;
#endif
  return kKernelsPortable;
}

ListFault check_list(const StoredList& list, const ListRules& rules, bool is_prefix,
                     const char** why) {
  const Bytes& bytes = list.bytes;
  *why = "its pieces are not those of a list";
  if (bytes.size <= 0 || bytes.size % kListAlignBytes != 0 || list.first_layer_bytes > bytes.size) {
    return ListFault::kDamaged;
  }
  int64_t layer = 0, piece = 0,
          layer_end = list.first_layer_bytes > 0 ? list.first_layer_bytes : bytes.size;
  bool is_named_so = true;
  for (int64_t at = 0; at < bytes.size;) {
    const int64_t size = std::min(kPieceBytes, layer_end - at);
    if (size < kHeaderBytes) return ListFault::kDamaged;
    const uint8_t* data = bytes.data + at;
    const char* fault = piece_fault(data, size, list, rules);
    if (fault != nullptr) {
      *why = fault;
      return ListFault::kDamaged;
    }
    const PieceHeader header = header_of(data);
    at += size;
    const bool ends_layer = at == layer_end;
    const bool is_last_layer = bytes.size == layer_end && !is_prefix;
    const bool flag_fits =
        !ends_layer || is_prefix || ((header.flags & kLastLayer) != 0) == is_last_layer;
    if (header.piece != (piece & UINT16_MAX) || header.layer != layer || !flag_fits ||
        ((header.flags & kLastPiece) != 0) != ends_layer || (at > size && header.term_bytes != 0)) {
      return ListFault::kDamaged;
    }
    if (at == size) is_named_so = is_named(data, header, list);
    ++piece;
    if (ends_layer) ++layer, piece = 0, layer_end = bytes.size;
  }
  return is_named_so ? ListFault::kNone : ListFault::kOtherTerm;
}

void ListEncoder::begin_list(uint32_t term, Bytes name, bool is_digest) {
  term_ = term;
  name_.assign(name.data, name.data + name.size);
  is_digest_ = is_digest;
  layer_ = 0, piece_ = 0, layer_bytes_ = 0;
}

void ListEncoder::add(const uint32_t* records, const uint32_t* values, int64_t n) {
  const uint32_t less = kind_ == ValueKind::kFloat ? 0 : 1;
  for (int64_t i = 0; i < n; ++i) {
    if (filled_ == kBlockPostings) add_block();
    records_[filled_] = records[i];
    values_[filled_++] = values[i] - less;
  }
}

int64_t ListEncoder::piece_bytes(int64_t more_blocks, int64_t more_bytes,
                                 int64_t more_outliers) const {
  return kHeaderBytes +
         static_cast<int64_t>(name_.size() + 2 * (widths_.size() + more_blocks) + packed_.size()) +
         more_bytes +
         (static_cast<int64_t>(outliers_.size()) + more_outliers) *
             static_cast<int64_t>(sizeof(Outlier)) +
         kSpareBytes;
}

void ListEncoder::add_block() {
  const int64_t n = filled_;
  if (n == 0) return;
  uint32_t gaps[kBlockPostings], widest = 0;
  const bool may_have_outliers = kind_ == ValueKind::kCount;
  int width = best_width(values_, n, may_have_outliers);
  const auto outliers_at = [&](int w) {
    return std::count_if(values_, values_ + n, [w](uint32_t value) { return bits_of(value) > w; });
  };
  const auto measure_gaps = [&](uint32_t next) {
    widest = 0;
    for (int64_t i = 0; i < n; ++i) {
      gaps[i] = records_[i] - next;
      next = records_[i] + 1;
      widest = std::max(widest, gaps[i]);
    }
  };
  measure_gaps(piece_postings_ == 0 ? records_[0] : last_ + 1);
  const auto bytes = [&] { return packed_bytes(bits_of(widest), n) + packed_bytes(width, n); };
  const bool is_full = piece_bytes(1, bytes(), outliers_at(width)) > kPieceBytes ||
                       static_cast<int64_t>(outliers_.size()) + outliers_at(width) > kMaxOutliers;
  if (is_full) {
    end_piece(false, false);
    measure_gaps(records_[0]);
  }
  if (piece_postings_ == 0) base_ = records_[0];
  const int gap_width = bits_of(widest);
  for (int64_t i = 0; i < n; ++i) {
    if (bits_of(values_[i]) <= width) continue;
    outliers_.push_back({static_cast<uint32_t>(piece_postings_ + i), values_[i]});
    values_[i] = 0;
  }
  widths_.push_back(static_cast<uint16_t>(gap_width | width << 8));
  pack(gaps, gap_width, n, packed_);
  pack(values_, width, n, packed_);
  last_ = records_[n - 1];
  piece_postings_ += n;
  filled_ = 0;
}

void ListEncoder::end_piece(bool is_last_of_layer, bool is_last_layer) {
  const int64_t content = piece_bytes(0, 0, 0);
  const int64_t size = is_last_of_layer
                           ? (content + kListAlignBytes - 1) / kListAlignBytes * kListAlignBytes
                           : kPieceBytes;
  PieceHeader header{};
  header.salt = salt_, header.term = term_,
  header.postings = static_cast<uint32_t>(piece_postings_);
  header.base = base_, header.last = last_;
  header.piece = piece_, header.layer = layer_;
  header.flags =
      static_cast<uint8_t>((is_last_of_layer ? kLastPiece : 0) | (is_last_layer ? kLastLayer : 0) |
                           (is_digest_ && !name_.empty() ? kTermDigest : 0));
  header.term_bytes = static_cast<uint16_t>(name_.size());
  header.outliers = static_cast<uint16_t>(outliers_.size());
  const size_t begin = bytes_.size();
  bytes_.resize(begin + size);
  uint8_t* at = bytes_.data() + begin + kHeaderBytes;
  const auto put = [&at](const auto& values) {
    const size_t n = values.size() * sizeof(values[0]);
    if (n > 0) std::memcpy(at, values.data(), n);
    at += n;
  };
  put(name_), put(widths_), put(packed_), put(outliers_);
  uint8_t* piece = bytes_.data() + begin;
  std::memcpy(piece, &header, sizeof(header));
  header.crc32c = crc32c(0, piece + 4, size - 4);
  std::memcpy(piece, &header, sizeof(header));
  name_.clear();  // in the first piece alone
  widths_.clear(), packed_.clear(), outliers_.clear();
  piece_postings_ = 0;
  ++piece_;
  layer_bytes_ += size;
}

int64_t ListEncoder::end_layer(bool is_last) {
  add_block();
  end_piece(true, is_last);
  const int64_t bytes = layer_bytes_;
  ++layer_, piece_ = 0, layer_bytes_ = 0;
  return bytes;
}

std::vector<Bytes> layers_of(const StoredList& list) {
  const int64_t first = list.first_layer_bytes;
  if (first <= 0 || first >= list.bytes.size) return {list.bytes};
  return {{list.bytes.data, first}, {list.bytes.data + first, list.bytes.size - first}};
}

bool ListReader::begin_piece() {
  const uint8_t* piece = layer_.data + at_;
  const PieceHeader header = header_of(piece);
  const bool is_in_order = header.base >= next_;
  at_ += std::min(kPieceBytes, layer_.size - at_);
  left_ = header.postings, posting_ = 0;
  outliers_left_ = header.outliers;
  next_ = header.base;
  widths_ = piece + kHeaderBytes + header.term_bytes;
  block_ = widths_ + 2 * block_count(left_);
  outliers_ = block_;
  for (int64_t i = 0; i < block_count(left_); ++i) {
    const int64_t n = std::min(kBlockPostings, left_ - i * kBlockPostings);
    outliers_ += packed_bytes(widths_[2 * i], n) + packed_bytes(widths_[2 * i + 1], n);
  }
  return is_in_order;
}

int64_t ListReader::next(uint32_t* records, uint32_t* values) {
  if (left_ == 0) {
    if (at_ == layer_.size) return 0;
    if (!begin_piece()) return -1;
  }
  const Kernels& with = kernels();
  const int64_t n = std::min(kBlockPostings, left_);
  const int gap_width = widths_[0], value_width = widths_[1];
  with.unpack(block_, gap_width, n, records);
  block_ += packed_bytes(gap_width, n);
  with.unpack(block_, value_width, n, values);
  block_ += packed_bytes(value_width, n);
  widths_ += 2;
  int64_t end = next_;  // in 64 bits where the gaps are so wide that a sum of 32 could overflow
  for (int64_t i = 0; gap_width > 23 && i < n; ++i) end += static_cast<int64_t>(records[i]) + 1;
  if (end > n_records_) return -1;
  with.sum_gaps(records, n, next_);
  if (records[n - 1] >= n_records_) return -1;
  next_ = records[n - 1] + 1;
  for (; outliers_left_ > 0; --outliers_left_, outliers_ += sizeof(Outlier)) {
    Outlier outlier;
    std::memcpy(&outlier, outliers_, sizeof(outlier));
    if (outlier.posting < posting_) return -1;
    if (outlier.posting >= posting_ + n) break;
    values[outlier.posting - posting_] = outlier.value;
  }
  if (kind_ != ValueKind::kFloat) {
    for (int64_t i = 0; i < n; ++i) ++values[i];
  }
  posting_ += n, left_ -= n;
  return n;
}

}  // namespace espnx::postings
